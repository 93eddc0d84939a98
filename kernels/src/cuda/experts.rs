//! Launcher of experts.cu and experts_*.cu: a mixture of experts, everything about who goes where decided on the device.

use std::ffi::CStr;

use ops::OpError;
use quant::DType;
use quant::layout::{TILE_COLS, TILE_ROWS, Tiles};

use super::error::device_error;
use super::linear::act_row_bytes;
use super::module::{arguments, image};
use super::quantize::{ACT_TILE_TOKENS, QuantizedActivations, activation_bytes};
use super::quantized_output::{QuantizedOutput, select_kernel};
use super::{Device, Family, Launch, Stream, View, ViewMut};

const OP: &str = "experts";

/// As experts.cu.
pub const EXPERTS_MAX: usize = 512;
const TOPK_ROWS: usize = 4;
const GROUP_THREADS: u32 = 1024;
const COMBINE_THREADS: u32 = 256;
/// As experts/params.cuh.
pub const STACKS_MAX: usize = 2;
const MATVEC_WARPS: usize = 8;
const TILES_PER_STAGE: usize = 2;
/// Pairs of a group: the kernel has code for 1, 2 and 4.
const MATVEC_GROUP_PAIRS: usize = 4;
const GROUP_WORDS: usize = 3;
/// As experts/matmul.cuh: pairs of a group there, and tiles of 16 rows of a block, of which two share a multiprocessor.
const MATMUL_GROUP_PAIRS: usize = 8 * ACT_TILE_TOKENS;
const MATMUL_WARPS: usize = 8;
const MATMUL_STAGES_MAX: usize = 6;
/// Shared memory that the device takes for every block.
const BLOCK_SHARED_BYTES: usize = 1 << 10;
/// Pairs per expert from which on tensor cores win. On an H200, 128 experts of Q4_K 2048 x 768, gate and up: two pairs take
/// 81 us without them and 77 with, four 120 and 87, 32 687 and 138; of Q8_0 half a pair takes 64 and 55.
const MATMUL_PAIRS_MIN: usize = 2;
const QUANTIZE_WARPS: usize = 8;
/// Values that a block collects before it adds them.
const VALUES_BYTES_MAX: usize = 32 << 10;

/// How pairs are put together. Never a matter of results.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum PairGrouping {
    /// Four pairs share a read of an expert's weights at most: one after the other in sorted_pairs of experts.
    Matvec,
    /// For the tensor cores: an expert's pairs begin with a act_tile of their own.
    Matmul,
}

impl PairGrouping {
    pub fn of(pairs: usize, count: usize) -> Self {
        if pairs < MATMUL_PAIRS_MIN * count { Self::Matvec } else { Self::Matmul }
    }

    /// Places for pairs in sorted_pairs of experts.
    pub fn slots(self, pairs: usize, count: usize) -> usize {
        let padding = (self.align() - 1) * count.min(pairs);
        (pairs + padding).next_multiple_of(self.align())
    }

    /// Words of [`ExpertRouting::groups`]: the sorted_pairs of pairs, the groups, and how matmul there are.
    pub fn words(self, pairs: usize, count: usize) -> usize {
        self.slots(pairs, count) + GROUP_WORDS * self.groups_max(pairs, count) + 1
    }

    fn groups_max(self, pairs: usize, count: usize) -> usize {
        pairs.min(pairs / self.group_pairs() + count)
    }

    fn group_pairs(self) -> usize {
        match self {
            Self::Matvec => MATVEC_GROUP_PAIRS,
            Self::Matmul => MATMUL_GROUP_PAIRS,
        }
    }

    fn align(self) -> usize {
        match self {
            Self::Matvec => 1,
            Self::Matmul => ACT_TILE_TOKENS,
        }
    }

    fn addresses(self, words: u64, pairs: usize, count: usize) -> GroupAddress {
        let at = |word: usize| words + (word * size_of::<u32>()) as u64;
        let slots = self.slots(pairs, count);
        let end = slots + GROUP_WORDS * self.groups_max(pairs, count);
        GroupAddress { sorted_pairs: at(0), groups: at(slots), group_count: at(end) }
    }
}

/// Which pairs of (row, rank) go through which expert. Pair p is rank p % used of row p / used.
pub struct ExpertRouting<'a> {
    /// `[pairs]`.
    pub experts: ViewMut<'a, u32>,
    pub shares: ViewMut<'a, f32>,
    pub grouping: PairGrouping,
    /// Scratch: [`PairGrouping::words`] of them.
    pub groups: ViewMut<'a, u32>,
}

/// Experts' matrices of one shape and type, one after the other.
pub struct ExpertWeights<'a> {
    /// Of one expert.
    pub shape: Tiles,
    pub tiles: View<'a, u8>,
    /// `[pairs, rows]`, or slots instead of pairs.
    pub out: ViewMut<'a, f32>,
}

/// What [`ExpertKernels::route`] made of the pairs.
#[derive(Clone, Copy)]
pub struct GroupedPairs<'a> {
    pub pairs: usize,
    /// Experts.
    pub count: usize,
    pub groups: View<'a, u32>,
}

/// As `ExpertWork` in experts/params.cuh.
#[derive(Clone, Copy)]
#[repr(C)]
struct ExpertParams {
    weights: [u64; STACKS_MAX],
    out: [u64; STACKS_MAX],
    act_tiles: u64,
    sorted_pairs: u64,
    groups: u64,
    group_count: u64,
    rows: i32,
    col_tiles: i32,
}

impl ExpertParams {
    fn new(x: QuantizedActivations<'_>, at: GroupAddress, stacks: &[ExpertWeights<'_>]) -> Self {
        let mut params = Self {
            weights: [0; STACKS_MAX],
            out: [0; STACKS_MAX],
            act_tiles: x.data.address(),
            sorted_pairs: at.sorted_pairs,
            groups: at.groups,
            group_count: at.group_count,
            rows: stacks[0].shape.rows() as i32,
            col_tiles: stacks[0].shape.col_tiles() as i32,
        };
        for ((weights, out), stack) in params.weights.iter_mut().zip(&mut params.out).zip(stacks) {
            (*weights, *out) = (stack.tiles.address(), stack.out.address());
        }
        params
    }
}

/// As `ExpertProductWork` in experts/matvec.cuh.
#[derive(Clone, Copy)]
#[repr(C)]
struct ExpertMatvecParams {
    params: ExpertParams,
    pairs_per_token: i32,
    row_tiles: i32,
}

/// As `ExpertTileWork` in experts/matmul.cuh.
#[derive(Clone, Copy)]
#[repr(C)]
struct ExpertMatmulParams {
    params: ExpertParams,
    stacks: i32,
    stages: i32,
}

/// The kernels of a weight type.
struct ExpertTypeKernels {
    dtype: DType,
    matvec: &'static CStr,
    matmul: &'static CStr,
    family: Family,
}

pub struct ExpertKernels {
    device: Device,
    routing_kernels: Family,
    products: Vec<ExpertTypeKernels>,
}

impl ExpertKernels {
    pub fn new(device: &Device) -> Self {
        macro_rules! family {
            ($dtype:ident, $matvec:literal, $matmul:literal, $stem:literal) => {
                ExpertTypeKernels {
                    dtype: DType::$dtype,
                    matvec: $matvec,
                    matmul: $matmul,
                    family: Family::new(device, $stem, image!($stem)),
                }
            };
        }
        let products = vec![
            family!(Q8_0, c"expert_matvec_q8_0", c"expert_matmul_q8_0", "experts_q8_0"),
            family!(Q4_0, c"expert_matvec_q4_0", c"expert_matmul_q4_0", "experts_q4_0"),
            family!(Q4_1, c"expert_matvec_q4_1", c"expert_matmul_q4_1", "experts_q4_1"),
            family!(Q5_0, c"expert_matvec_q5_0", c"expert_matmul_q5_0", "experts_q5_0"),
            family!(Q5_1, c"expert_matvec_q5_1", c"expert_matmul_q5_1", "experts_q5_1"),
            family!(Q2_K, c"expert_matvec_q2_k", c"expert_matmul_q2_k", "experts_q2_k"),
            family!(Q3_K, c"expert_matvec_q3_k", c"expert_matmul_q3_k", "experts_q3_k"),
            family!(Q4_K, c"expert_matvec_q4_k", c"expert_matmul_q4_k", "experts_q4_k"),
            family!(Q5_K, c"expert_matvec_q5_k", c"expert_matmul_q5_k", "experts_q5_k"),
            family!(Q6_K, c"expert_matvec_q6_k", c"expert_matmul_q6_k", "experts_q6_k"),
        ];
        let routing_kernels = Family::new(device, "experts", image!("experts"));
        Self { device: device.clone(), routing_kernels, products }
    }

    /// Routes `rows` rows by `logits`, `[rows, count]`, through `used` experts each.
    pub fn route(
        &self,
        stream: &Stream,
        logits: View<'_, f32>,
        count: usize,
        used: usize,
        routing: &mut ExpertRouting<'_>,
    ) -> Result<(), OpError> {
        let rows = logits.len() / count.max(1);
        let pairs = rows * used;
        expect("values of the router", logits.len(), rows * count)?;
        expect("experts of a row", used.clamp(1, count.max(1)), used)?;
        expect("experts", count.min(EXPERTS_MAX), count)?;
        expect("pairs", routing.experts.len(), pairs)?;
        expect("shares", routing.shares.len(), pairs)?;
        let grouping = routing.grouping;
        expect("words of groups", routing.groups.len(), grouping.words(pairs, count))?;
        if pairs == 0 {
            return Ok(());
        }
        let launch = |blocks: usize, block| Launch {
            grid: (blocks as u32, 1, 1),
            block,
            shared_bytes: 0,
            overlaps_predecessor: true,
        };
        let (logits, experts, shares) =
            (logits.address(), routing.experts.address(), routing.shares.address());
        let (rows32, count32, used32) = (rows as i32, count as i32, used as i32);
        let kernel = self.routing_kernels.kernel(c"expert_topk_softmax").map_err(device_error(OP))?;
        // SAFETY: (const float *, int, int, int, uint32_t *, float *); a warp reads a row of `logits` and writes `used`
        // values of the row; experts are below `count`.
        unsafe {
            kernel.launch(
                stream,
                launch(rows.div_ceil(TOPK_ROWS), 128),
                arguments![logits, rows32, count32, used32, experts, shares],
            )
        }
        .map_err(device_error(OP))?;
        let (pairs32, group_pairs) = (pairs as i32, grouping.group_pairs() as i32);
        let (align, slots) = (grouping.align() as i32, grouping.slots(pairs, count) as i32);
        let GroupAddress { sorted_pairs, groups, group_count } =
            grouping.addresses(routing.groups.address(), pairs, count);
        let kernel = self.routing_kernels.kernel(c"expert_sort_pairs").map_err(device_error(OP))?;
        // SAFETY: (const uint32_t *, int, int, int, int, int, uint32_t *, Group *, uint32_t *); all pairs and what aligns them
        // fill at most `slots` words, their groups are at most `groups_max`.
        unsafe {
            kernel.launch(
                stream,
                launch(1, GROUP_THREADS),
                arguments![
                    experts,
                    pairs32,
                    count32,
                    group_pairs,
                    align,
                    slots,
                    sorted_pairs,
                    groups,
                    group_count
                ],
            )
        }
        .map_err(device_error(OP))
    }

    /// Rounds rows of `x`, `[tokens, cols]`, for [`Self::tiles`]: a slot gets the row p / pairs_per_token of its pair p.
    ///
    /// # Safety
    /// `of.groups` is what [`Self::route`] made, grouped as [`PairGrouping::Matmul`].
    pub unsafe fn quantize(
        &self,
        stream: &Stream,
        x: View<'_, f32>,
        cols: usize,
        pairs_per_token: usize,
        of: GroupedPairs<'_>,
        quantized: &QuantizedOutput<'_>,
    ) -> Result<(), OpError> {
        let GroupedPairs { pairs, count, groups } = of;
        let slots = PairGrouping::Matmul.slots(pairs, count);
        expect("values of the input", x.len(), pairs.div_ceil(pairs_per_token.max(1)) * cols)?;
        expect("misalignment of the input", (x.address() % 16) as usize, 0)?;
        expect("words of groups", groups.len(), PairGrouping::Matmul.words(pairs, count))?;
        let act_tiles = quantized.address(slots, cols).map_err(device_error(OP))?;
        let warps = slots * cols.div_ceil(TILE_COLS);
        if warps == 0 {
            return Ok(());
        }
        let names = [c"", c"expert_quantize_q8_0", c"expert_quantize_q8_1", c"expert_quantize_q8_k"];
        let kernel =
            self.routing_kernels.kernel(select_kernel(Some(quantized), names)).map_err(device_error(OP))?;
        let launch = Launch {
            grid: (warps.div_ceil(QUANTIZE_WARPS) as u32, 1, 1),
            block: 32 * QUANTIZE_WARPS as u32,
            shared_bytes: 0,
            overlaps_predecessor: true,
        };
        let GroupAddress { sorted_pairs, .. } =
            PairGrouping::Matmul.addresses(groups.address(), pairs, count);
        let (x, slots, per_token, cols) = (x.address(), slots as i32, pairs_per_token as i32, cols as i32);
        // SAFETY: (const float *, const uint32_t *, int, int, int, uint8_t *); a warp reads 256 values of the row of a slot's
        // pair, which is below `pairs` by this function's contract, and writes the slot's part of a act_tile.
        unsafe {
            kernel.launch(stream, launch, arguments![x, sorted_pairs, slots, per_token, cols, act_tiles])
        }
        .map_err(device_error(OP))
    }

    /// `stack.out = matrix of a slot's expert times the slot's row of x`, for one or two stacks of one shape: in the sorted_pairs of
    /// slots, or of pairs.
    ///
    /// # Safety
    /// `of.groups` is what [`Self::route`] made, grouped as [`PairGrouping::Matmul`].
    pub unsafe fn matmul(
        &self,
        stream: &Stream,
        x: QuantizedActivations<'_>,
        of: GroupedPairs<'_>,
        by_pair: bool,
        stacks: &mut [ExpertWeights<'_>],
    ) -> Result<(), OpError> {
        let Some(products) = self.check(x, of, PairGrouping::Matmul, stacks)? else { return Ok(()) };
        let GroupedPairs { pairs, count, groups } = of;
        let (slots, shape) = (PairGrouping::Matmul.slots(pairs, count), stacks[0].shape);
        expect("tokens", x.tokens, slots)?;
        for stack in stacks.iter() {
            let found = if by_pair { pairs } else { slots };
            expect("values of the output", stack.out.len(), found * shape.rows())?;
        }
        let act_tile = activation_bytes(x.format, ACT_TILE_TOKENS, TILE_COLS).unwrap_or(0);
        let stage = MATMUL_WARPS * shape.tile_bytes() + MATMUL_GROUP_PAIRS / ACT_TILE_TOKENS * act_tile;
        let barriers = 2 * MATMUL_STAGES_MAX * size_of::<u64>();
        let available = self.device.shared_bytes_max() as usize;
        // Two blocks of a multiprocessor where both have a stage that comes while another is computed.
        let half = available.saturating_sub(BLOCK_SHARED_BYTES) / 2;
        let available = if half >= 2 * stage + barriers { half } else { available };
        let stages = (available.saturating_sub(barriers) / stage).min(MATMUL_STAGES_MAX);
        if stages == 0 {
            let what = "bytes of shared memory for a stage of experts";
            return Err(OpError::Shape { op: OP, what, found: stage + barriers, expected: available });
        }
        let mut at = PairGrouping::Matmul.addresses(groups.address(), pairs, count);
        if !by_pair {
            at.sorted_pairs = 0;
        }
        let params = ExpertMatmulParams {
            params: ExpertParams::new(x, at, stacks),
            stacks: stacks.len() as i32,
            stages: stages as i32,
        };
        let kernel = products.family.kernel(products.matmul).map_err(device_error(OP))?;
        let (block, shared_bytes) = (32 * MATMUL_WARPS as u32, (stages * stage + barriers) as u32);
        let at_once = kernel.blocks_per_multiprocessor(block, shared_bytes).map_err(device_error(OP))?;
        let runs = shape.row_tiles().div_ceil(MATMUL_WARPS);
        let items = PairGrouping::Matmul.groups_max(pairs, count) * runs * stacks.len();
        let blocks = items.min((at_once.max(1) * self.device.multiprocessors()) as usize) as u32;
        let launch = Launch { grid: (blocks, 1, 1), block, shared_bytes, overlaps_predecessor: true };
        // SAFETY: (ExpertTileWork). Experts of groups are below `count`, slots and pairs below their numbers by this function's
        // contract, so tiles, act_tiles and outputs are read and written inside the lengths that were checked.
        unsafe { kernel.launch(stream, launch, arguments![params]) }.map_err(device_error(OP))
    }

    /// What both kinds of products need; none if there is nothing to compute.
    fn check(
        &self,
        x: QuantizedActivations<'_>,
        of: GroupedPairs<'_>,
        grouping: PairGrouping,
        stacks: &[ExpertWeights<'_>],
    ) -> Result<Option<&ExpertTypeKernels>, OpError> {
        let Some(first) = stacks.first() else { return Ok(None) };
        let shape = first.shape;
        let dtype = shape.dtype();
        let products = self.products.iter().find(|products| products.dtype == dtype);
        let Some(products) = products.filter(|_| dtype.activation() == Some(x.format)) else {
            return Err(OpError::Type { op: OP, dtype });
        };
        expect("stacks", stacks.len().min(STACKS_MAX), stacks.len())?;
        expect("row length", x.cols, shape.cols())?;
        expect("words of groups", of.groups.len(), grouping.words(of.pairs, of.count))?;
        expect("rows beyond whole tiles", shape.rows() % TILE_ROWS, 0)?;
        let act_tiles = activation_bytes(x.format, x.tokens, x.cols).unwrap_or(usize::MAX);
        expect("bytes of the activations", x.data.len(), act_tiles)?;
        for stack in stacks {
            if stack.shape != shape {
                return Err(OpError::Type { op: OP, dtype: stack.shape.dtype() });
            }
            expect("bytes of the experts", stack.tiles.len(), of.count * shape.bytes())?;
            expect("misalignment of the experts", (stack.tiles.address() % 16) as usize, 0)?;
        }
        let empty = of.pairs == 0 || shape.row_tiles() == 0 || shape.col_tiles() == 0;
        Ok((!empty).then_some(products))
    }

    /// `stack.out[p] = matrix of pair p's expert times row p / pairs_per_token of x`, for one or two stacks of one shape.
    ///
    /// # Safety
    /// `of.groups` is what [`Self::route`] made, grouped as [`PairGrouping::Matvec`].
    pub unsafe fn matvec(
        &self,
        stream: &Stream,
        x: QuantizedActivations<'_>,
        pairs_per_token: usize,
        of: GroupedPairs<'_>,
        stacks: &mut [ExpertWeights<'_>],
    ) -> Result<(), OpError> {
        let Some(products) = self.check(x, of, PairGrouping::Matvec, stacks)? else { return Ok(()) };
        let GroupedPairs { pairs, count, groups } = of;
        let shape = stacks[0].shape;
        expect("tokens", x.tokens, pairs.div_ceil(pairs_per_token.max(1)))?;
        for stack in stacks.iter() {
            expect("values of the output", stack.out.len(), pairs * shape.rows())?;
        }
        let (row_tiles, col_tiles) = (shape.row_tiles(), shape.col_tiles());
        // Enough tiles that every warp has params.
        let pairs_per_row_tile = col_tiles.div_ceil(TILES_PER_STAGE);
        let tile_values = col_tiles * TILE_ROWS * MATVEC_GROUP_PAIRS * size_of::<f32>();
        let tiles = MATVEC_WARPS.div_ceil(pairs_per_row_tile).min((VALUES_BYTES_MAX / tile_values).max(1));
        let shared = MATVEC_GROUP_PAIRS * col_tiles * act_row_bytes(x.format) + tiles * tile_values;
        let available = self.device.shared_bytes_max() as usize;
        if shared > available {
            let what = "bytes of shared memory for a row this long";
            return Err(OpError::Shape { op: OP, what, found: shared, expected: available });
        }
        let at = PairGrouping::Matvec.addresses(groups.address(), pairs, count);
        let params = ExpertMatvecParams {
            params: ExpertParams::new(x, at, stacks),
            pairs_per_token: pairs_per_token as i32,
            row_tiles: tiles as i32,
        };
        let groups_max = PairGrouping::Matvec.groups_max(pairs, count) as u32;
        let grid = (row_tiles.div_ceil(tiles) as u32, groups_max, stacks.len() as u32);
        let launch = Launch {
            grid,
            block: 32 * MATVEC_WARPS as u32,
            shared_bytes: shared as u32,
            overlaps_predecessor: true,
        };
        let kernel = products.family.kernel(products.matvec).map_err(device_error(OP))?;
        // SAFETY: (ExpertProductWork). Experts of groups are below `count` and pairs below `pairs` by this function's contract, so
        // tiles, act_tiles and outputs are read and written inside the lengths that were checked.
        unsafe { kernel.launch(stream, launch, arguments![params]) }.map_err(device_error(OP))
    }

    /// [`Self::matvec`] of one stack of floats with rows of `x` as they are.
    ///
    /// # Safety
    /// Every one of `experts`, which are on the device, is below `count`.
    pub unsafe fn float_matvec(
        &self,
        stream: &Stream,
        x: View<'_, f32>,
        experts: View<'_, u32>,
        pairs_per_token: usize,
        count: usize,
        stack: &mut ExpertWeights<'_>,
    ) -> Result<(), OpError> {
        let (shape, pairs) = (stack.shape, experts.len());
        let dtype = shape.dtype();
        let name = match dtype {
            DType::F32 => c"expert_matvec_f32",
            DType::F16 => c"expert_matvec_f16",
            DType::BF16 => c"expert_matvec_bf16",
            _ => return Err(OpError::Type { op: OP, dtype }),
        };
        expect("values of the input", x.len(), pairs.div_ceil(pairs_per_token.max(1)) * shape.cols())?;
        expect("bytes of the experts", stack.tiles.len(), count * shape.bytes())?;
        expect("values of the output", stack.out.len(), pairs * shape.rows())?;
        if stack.out.is_empty() {
            return Ok(());
        }
        let grid = (shape.rows().div_ceil(MATVEC_WARPS) as u32, pairs as u32, 1);
        let block = 32 * MATVEC_WARPS as u32;
        let launch = Launch { grid, block, shared_bytes: 0, overlaps_predecessor: true };
        let (weights, x, experts) = (stack.tiles.address(), x.address(), experts.address());
        let (per_token, rows, cols) = (pairs_per_token as i32, shape.rows() as i32, shape.cols() as i32);
        let out = stack.out.address();
        let kernel = self.routing_kernels.kernel(name).map_err(device_error(OP))?;
        // SAFETY: (const T *, const float *, const uint32_t *, int, int, int, float *); a warp reads a row of an expert's
        // matrix and a row of `x`, inside lengths that were checked.
        unsafe { kernel.launch(stream, launch, arguments![weights, x, experts, per_token, rows, cols, out]) }
            .map_err(device_error(OP))
    }

    /// `out[r] = sum over ranks of share times contribution`.
    pub fn combine(
        &self,
        stream: &Stream,
        contributions: View<'_, f32>,
        shares: View<'_, f32>,
        used: usize,
        out: &mut ViewMut<'_, f32>,
    ) -> Result<(), OpError> {
        let rows = shares.len() / used.max(1);
        let cols = out.len() / rows.max(1);
        expect("values of the output", out.len(), rows * cols)?;
        expect("contributions", contributions.len(), rows * used * cols)?;
        if out.is_empty() {
            return Ok(());
        }
        let launch = Launch {
            grid: (rows as u32, (cols as u32).div_ceil(COMBINE_THREADS), 1),
            block: COMBINE_THREADS,
            shared_bytes: 0,
            overlaps_predecessor: true,
        };
        let (contributions, shares, out) = (contributions.address(), shares.address(), out.address());
        let (used, cols) = (used as i32, cols as i32);
        let kernel = self.routing_kernels.kernel(c"expert_combine").map_err(device_error(OP))?;
        // SAFETY: (const float *, const float *, int, int, float *); blocks (r, _) read the pairs of row r and write the row.
        unsafe { kernel.launch(stream, launch, arguments![contributions, shares, used, cols, out]) }
            .map_err(device_error(OP))
    }
}

/// Parts of the words of groups.
struct GroupAddress {
    sorted_pairs: u64,
    groups: u64,
    group_count: u64,
}

fn expect(what: &'static str, found: usize, expected: usize) -> Result<(), OpError> {
    if found == expected {
        return Ok(());
    }
    Err(OpError::Shape { op: OP, what, found, expected })
}
