//! Launcher of experts.cu and experts_*.cu: a mixture of experts, everything about who goes where decided on the device.

use std::ffi::CStr;

use ops::OpError;
use quant::DType;
use quant::layout::{TILE_ROWS, Tiles};

use super::error::device_error;
use super::linear::record_bytes;
use super::module::{arguments, image};
use super::quantize::{Activations, activation_bytes};
use super::{Device, Family, Launch, Stream, View, ViewMut};

const OP: &str = "experts";

/// As experts.cu.
pub const EXPERTS_MAX: usize = 512;
const CHOOSE_ROWS: usize = 4;
const GROUP_THREADS: u32 = 1024;
const COMBINE_THREADS: u32 = 256;
/// As experts/product.cuh.
pub const STACKS_MAX: usize = 2;
const PRODUCT_WARPS: usize = 8;
const TILES_PER_UNIT: usize = 2;
/// Pairs of a group: the kernel has code for 1, 2 and 4.
const GROUP_PAIRS: usize = 4;
const GROUP_WORDS: usize = 3;
/// Values that a block collects before it adds them.
const VALUES_BYTES_MAX: usize = 32 << 10;

/// Which pairs of (row, rank) go through which expert. Pair p is rank p % used of row p / used.
pub struct Routing<'a> {
    /// `[pairs]`.
    pub experts: ViewMut<'a, u32>,
    pub shares: ViewMut<'a, f32>,
    /// Scratch: [`Routing::group_words`] of them.
    pub groups: ViewMut<'a, u32>,
}

/// Experts' matrices of one shape and type, one after the other.
pub struct Stack<'a> {
    /// Of one expert.
    pub shape: Tiles,
    pub tiles: View<'a, u8>,
    /// `[pairs, rows]`.
    pub out: ViewMut<'a, f32>,
}

/// As `ExpertWork` in experts/product.cuh.
#[derive(Clone, Copy)]
#[repr(C)]
struct Work {
    weights: [u64; STACKS_MAX],
    out: [u64; STACKS_MAX],
    panels: u64,
    order: u64,
    groups: u64,
    group_count: u64,
    rows: i32,
    col_tiles: i32,
    pairs_per_token: i32,
    row_tiles: i32,
}

pub struct ExpertKernels {
    device: Device,
    around: Family,
    products: Vec<(DType, &'static CStr, Family)>,
}

impl Routing<'_> {
    fn groups_max(pairs: usize, count: usize) -> usize {
        pairs.min(pairs / GROUP_PAIRS + count)
    }

    /// Words of `groups` for so many pairs: their order, the groups, and how many there are.
    pub fn group_words(pairs: usize, count: usize) -> usize {
        pairs + GROUP_WORDS * Self::groups_max(pairs, count) + 1
    }
}

impl ExpertKernels {
    pub fn new(device: &Device) -> Self {
        let family = |dtype, kernel, name, image| (dtype, kernel, Family::new(device, name, image));
        let products = vec![
            family(DType::Q8_0, c"expert_product_q8_0", "experts_q8_0", image!("experts_q8_0")),
            family(DType::Q4_0, c"expert_product_q4_0", "experts_q4_0", image!("experts_q4_0")),
            family(DType::Q4_1, c"expert_product_q4_1", "experts_q4_1", image!("experts_q4_1")),
            family(DType::Q5_0, c"expert_product_q5_0", "experts_q5_0", image!("experts_q5_0")),
            family(DType::Q5_1, c"expert_product_q5_1", "experts_q5_1", image!("experts_q5_1")),
            family(DType::Q2_K, c"expert_product_q2_k", "experts_q2_k", image!("experts_q2_k")),
            family(DType::Q3_K, c"expert_product_q3_k", "experts_q3_k", image!("experts_q3_k")),
            family(DType::Q4_K, c"expert_product_q4_k", "experts_q4_k", image!("experts_q4_k")),
            family(DType::Q5_K, c"expert_product_q5_k", "experts_q5_k", image!("experts_q5_k")),
            family(DType::Q6_K, c"expert_product_q6_k", "experts_q6_k", image!("experts_q6_k")),
        ];
        let around = Family::new(device, "experts", image!("experts"));
        Self { device: device.clone(), around, products }
    }

    /// Routes `rows` rows by `logits`, `[rows, count]`, through `used` experts each.
    pub fn route(
        &self,
        stream: &Stream,
        logits: View<'_, f32>,
        count: usize,
        used: usize,
        routing: &mut Routing<'_>,
    ) -> Result<(), OpError> {
        let rows = logits.len() / count.max(1);
        let pairs = rows * used;
        expect("values of the router", logits.len(), rows * count)?;
        expect("experts of a row", used.clamp(1, count.max(1)), used)?;
        expect("experts", count.min(EXPERTS_MAX), count)?;
        expect("pairs", routing.experts.len(), pairs)?;
        expect("shares", routing.shares.len(), pairs)?;
        expect("words of groups", routing.groups.len(), Routing::group_words(pairs, count))?;
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
        let kernel = self.around.kernel(c"expert_choose").map_err(device_error(OP))?;
        // SAFETY: (const float *, int, int, int, uint32_t *, float *); a warp reads a row of `logits` and writes `used`
        // values of the row; experts are below `count`.
        unsafe {
            kernel.launch(
                stream,
                launch(rows.div_ceil(CHOOSE_ROWS), 128),
                arguments![logits, rows32, count32, used32, experts, shares],
            )
        }
        .map_err(device_error(OP))?;
        let (pairs32, group_pairs) = (pairs as i32, GROUP_PAIRS as i32);
        let GroupAddress { order, groups, group_count } = addresses(routing.groups.address(), pairs, count);
        let kernel = self.around.kernel(c"expert_group").map_err(device_error(OP))?;
        // SAFETY: (const uint32_t *, int, int, int, uint32_t *, Group *, uint32_t *); a permutation of all pairs, and at most
        // `groups_max` groups.
        unsafe {
            kernel.launch(
                stream,
                launch(1, GROUP_THREADS),
                arguments![experts, pairs32, count32, group_pairs, order, groups, group_count],
            )
        }
        .map_err(device_error(OP))
    }

    /// `stack.out[p] = matrix of pair p's expert times row p / pairs_per_token of x`, for one or two stacks of one shape.
    ///
    /// # Safety
    /// `groups` is what [`Self::route`] made, with this `count`, for `pairs` pairs.
    #[expect(clippy::too_many_arguments, reason = "operands of one kernel, each of its own meaning")]
    pub unsafe fn product(
        &self,
        stream: &Stream,
        x: Activations<'_>,
        pairs: usize,
        pairs_per_token: usize,
        count: usize,
        groups: View<'_, u32>,
        stacks: &mut [Stack<'_>],
    ) -> Result<(), OpError> {
        let Some(first) = stacks.first() else { return Ok(()) };
        let shape = first.shape;
        let dtype = shape.dtype();
        let family = self.products.iter().find(|product| product.0 == dtype);
        let Some((_, name, family)) = family.filter(|_| dtype.activation() == Some(x.format)) else {
            return Err(OpError::Type { op: OP, dtype });
        };
        expect("stacks", stacks.len().min(STACKS_MAX), stacks.len())?;
        expect("row length", x.cols, shape.cols())?;
        expect("tokens", x.tokens, pairs.div_ceil(pairs_per_token.max(1)))?;
        expect("words of groups", groups.len(), Routing::group_words(pairs, count))?;
        expect("rows beyond whole tiles", shape.rows() % TILE_ROWS, 0)?;
        let panels = activation_bytes(x.format, x.tokens, x.cols).unwrap_or(usize::MAX);
        expect("bytes of the activations", x.data.len(), panels)?;
        for stack in stacks.iter() {
            if stack.shape != shape {
                return Err(OpError::Type { op: OP, dtype: stack.shape.dtype() });
            }
            expect("bytes of the experts", stack.tiles.len(), count * shape.bytes())?;
            expect("misalignment of the experts", (stack.tiles.address() % 16) as usize, 0)?;
            expect("values of the output", stack.out.len(), pairs * shape.rows())?;
        }
        let (row_tiles, col_tiles) = (shape.row_tiles(), shape.col_tiles());
        if pairs == 0 || row_tiles == 0 || col_tiles == 0 {
            return Ok(());
        }
        // Enough tiles that every warp has work.
        let units_per_tile = col_tiles.div_ceil(TILES_PER_UNIT);
        let tile_values = col_tiles * TILE_ROWS * GROUP_PAIRS * size_of::<f32>();
        let tiles = PRODUCT_WARPS.div_ceil(units_per_tile).min((VALUES_BYTES_MAX / tile_values).max(1));
        let shared = GROUP_PAIRS * col_tiles * record_bytes(x.format) + tiles * tile_values;
        let room = self.device.shared_bytes_max() as usize;
        if shared > room {
            let what = "bytes of shared memory for a row this long";
            return Err(OpError::Shape { op: OP, what, found: shared, expected: room });
        }
        let GroupAddress { order, groups, group_count } = addresses(groups.address(), pairs, count);
        let mut work = Work {
            weights: [0; STACKS_MAX],
            out: [0; STACKS_MAX],
            panels: x.data.address(),
            order,
            groups,
            group_count,
            rows: shape.rows() as i32,
            col_tiles: col_tiles as i32,
            pairs_per_token: pairs_per_token as i32,
            row_tiles: tiles as i32,
        };
        for (at, stack) in stacks.iter().enumerate() {
            work.weights[at] = stack.tiles.address();
            work.out[at] = stack.out.address();
        }
        let grid =
            (row_tiles.div_ceil(tiles) as u32, Routing::groups_max(pairs, count) as u32, stacks.len() as u32);
        let launch = Launch {
            grid,
            block: 32 * PRODUCT_WARPS as u32,
            shared_bytes: shared as u32,
            overlaps_predecessor: true,
        };
        let kernel = family.kernel(name).map_err(device_error(OP))?;
        // SAFETY: (ExpertWork). Experts of groups are below `count` and pairs below `pairs` by this function's contract, so
        // tiles, panels and outputs are read and written inside the lengths that were checked.
        unsafe { kernel.launch(stream, launch, arguments![work]) }.map_err(device_error(OP))
    }

    /// [`Self::product`] of one stack of floats with rows of `x` as they are.
    ///
    /// # Safety
    /// Every one of `experts`, which are on the device, is below `count`.
    pub unsafe fn float_product(
        &self,
        stream: &Stream,
        x: View<'_, f32>,
        experts: View<'_, u32>,
        pairs_per_token: usize,
        count: usize,
        stack: &mut Stack<'_>,
    ) -> Result<(), OpError> {
        let (shape, pairs) = (stack.shape, experts.len());
        let dtype = shape.dtype();
        let name = match dtype {
            DType::F32 => c"expert_product_f32",
            DType::F16 => c"expert_product_f16",
            DType::BF16 => c"expert_product_bf16",
            _ => return Err(OpError::Type { op: OP, dtype }),
        };
        expect("values of the input", x.len(), pairs.div_ceil(pairs_per_token.max(1)) * shape.cols())?;
        expect("bytes of the experts", stack.tiles.len(), count * shape.bytes())?;
        expect("values of the output", stack.out.len(), pairs * shape.rows())?;
        if stack.out.is_empty() {
            return Ok(());
        }
        let grid = (shape.rows().div_ceil(PRODUCT_WARPS) as u32, pairs as u32, 1);
        let block = 32 * PRODUCT_WARPS as u32;
        let launch = Launch { grid, block, shared_bytes: 0, overlaps_predecessor: true };
        let (weights, x, experts) = (stack.tiles.address(), x.address(), experts.address());
        let (per_token, rows, cols) = (pairs_per_token as i32, shape.rows() as i32, shape.cols() as i32);
        let out = stack.out.address();
        let kernel = self.around.kernel(name).map_err(device_error(OP))?;
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
            grid: (rows as u32, 1, 1),
            block: COMBINE_THREADS,
            shared_bytes: 0,
            overlaps_predecessor: true,
        };
        let (contributions, shares, out) = (contributions.address(), shares.address(), out.address());
        let (used, cols) = (used as i32, cols as i32);
        let kernel = self.around.kernel(c"expert_combine").map_err(device_error(OP))?;
        // SAFETY: (const float *, const float *, int, int, float *); block r reads the pairs of row r and writes the row.
        unsafe { kernel.launch(stream, launch, arguments![contributions, shares, used, cols, out]) }
            .map_err(device_error(OP))
    }
}

/// Parts of the words of groups.
struct GroupAddress {
    order: u64,
    groups: u64,
    group_count: u64,
}

fn addresses(words: u64, pairs: usize, count: usize) -> GroupAddress {
    let at = |word: usize| words + (word * size_of::<u32>()) as u64;
    let end = pairs + GROUP_WORDS * Routing::groups_max(pairs, count);
    GroupAddress { order: at(0), groups: at(pairs), group_count: at(end) }
}

fn expect(what: &'static str, found: usize, expected: usize) -> Result<(), OpError> {
    if found == expected {
        return Ok(());
    }
    Err(OpError::Shape { op: OP, what, found, expected })
}
