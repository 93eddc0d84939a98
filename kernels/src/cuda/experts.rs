// SPDX-License-Identifier: Apache-2.0

//! Launcher of experts.cu and experts_*.cu: the feed-forward layer of a mixture-of-experts model.
//! The device decides which row goes through which expert.
//!
//! A pair is one (row, rank): pair p is rank p % used of row p / used. A slot is a pair's position
//! after the pairs are sorted by expert.

use ops::OpError;
use quant::DType;
use quant::layout::{TILE_COLS, TILE_ROWS, Tiles};

pub use super::abi::experts::EXPERTS_MAX;
use super::abi::experts::{
    EXPERT_COMBINE_THREADS, EXPERT_MATMUL_ROW_TILES, EXPERT_MATMUL_WARPS, EXPERT_MATVEC_WARPS,
    EXPERT_QUANTIZE_WARPS, EXPERT_ROUTE_ROWS, EXPERT_ROUTE_THREADS, EXPERT_SORT_THREADS, EXPERT_STACKS_MAX,
    EXPERT_TOPK_ROWS, ExpertCombine, ExpertMatmul, ExpertMatmulParams, ExpertMatvecBF16, ExpertMatvecF16,
    ExpertMatvecF32, ExpertPairOrder, ExpertParams, ExpertQuantize, ExpertRoute, ExpertSkinny,
    ExpertSortPairs, ExpertTopkSoftmax,
};
use super::error::device_error;
pub use super::fused_experts::{ExpertLayer, FINISHED_WORDS, FusedExperts};
use super::launch::{KernelName, kernel_name, launch_kernel, launch_spread};
use super::module::image;
use super::pair_grouping::GroupAddress;
pub use super::pair_grouping::PairGrouping;
use super::quantize::{ACT_TILE_TOKENS, QuantizedActivations, activation_bytes};
use super::quantized_output::QuantizedOutput;
pub use super::skinny_experts::ExpertProduct;
use super::{Device, DeviceView, DeviceViewMut, LaunchConfig, LazyModule, Stream};

pub(super) const OP: &str = "experts";

const MATMUL_STAGES_MAX: usize = 6;
/// Shared memory that the device reserves for every block.
const BLOCK_SHARED_BYTES: usize = 1 << 10;

pub(super) const COMBINE: KernelName<ExpertCombine> = kernel_name!("experts", "expert_combine");

/// The buffers to which the device writes its routing.
pub struct ExpertRouting<'a> {
    /// The expert of each pair.
    pub experts: DeviceViewMut<'a, u32>,
    /// The weight of each pair in the sum of its row.
    pub expert_weights: DeviceViewMut<'a, f32>,
    pub grouping: PairGrouping,
    /// Scratch memory of [`PairGrouping::words`] words.
    pub groups: DeviceViewMut<'a, u32>,
}

/// The matrices of all experts, one after the other. They have the same shape and type.
pub struct ExpertWeights<'a> {
    /// The shape of one expert's matrix.
    pub shape: Tiles,
    pub tiles: DeviceView<'a, u8>,
    /// `[pairs, rows]`, or `[slots, rows]`.
    pub out: DeviceViewMut<'a, f32>,
}

/// The pairs that [`ExpertKernels::route`] has sorted and grouped.
#[derive(Clone, Copy)]
pub struct GroupedPairs<'a> {
    pub pairs: usize,
    /// Number of experts.
    pub count: usize,
    pub grouping: PairGrouping,
    pub groups: DeviceView<'a, u32>,
}

pub(super) fn expert_params(
    x: QuantizedActivations<'_>,
    at: GroupAddress,
    stacks: &[ExpertWeights<'_>],
) -> ExpertParams {
    let mut params = ExpertParams {
        weights: [0; EXPERT_STACKS_MAX],
        out: [0; EXPERT_STACKS_MAX],
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

/// The kernels of a weight type.
pub(super) struct ExpertTypeKernels {
    dtype: DType,
    /// For few pairs an expert.
    pub(super) skinny: KernelName<ExpertSkinny>,
    /// For many.
    matmul: KernelName<ExpertMatmul>,
    pub(super) family: LazyModule,
}

pub struct ExpertKernels {
    pub(super) device: Device,
    pub(super) routing_kernels: LazyModule,
    products: Vec<ExpertTypeKernels>,
}

impl ExpertKernels {
    pub fn new(device: &Device) -> Self {
        macro_rules! family {
            ($dtype:ident, $name:literal) => {
                ExpertTypeKernels {
                    dtype: DType::$dtype,
                    skinny: kernel_name!(concat!("experts_", $name), concat!("expert_skinny_", $name)),
                    matmul: kernel_name!(concat!("experts_", $name), concat!("expert_matmul_", $name)),
                    family: LazyModule::new(
                        device,
                        concat!("experts_", $name),
                        include_bytes!(concat!(env!("OUT_DIR"), "/experts_", $name, ".fatbin")),
                    ),
                }
            };
        }
        let products = vec![
            family!(Q8_0, "q8_0"),
            family!(Q4_0, "q4_0"),
            family!(Q4_1, "q4_1"),
            family!(Q5_0, "q5_0"),
            family!(Q5_1, "q5_1"),
            family!(Q2_K, "q2_k"),
            family!(Q3_K, "q3_k"),
            family!(Q4_K, "q4_k"),
            family!(Q5_K, "q5_k"),
            family!(Q6_K, "q6_k"),
        ];
        let routing_kernels = LazyModule::new(device, "experts", image!("experts"));
        Self { device: device.clone(), routing_kernels, products }
    }

    /// Routes each row through `used` experts by its `logits`, `[rows, count]`. Then sorts the
    /// pairs by expert.
    pub fn route(
        &self,
        stream: &Stream,
        logits: DeviceView<'_, f32>,
        count: usize,
        used: usize,
        routing: &mut ExpertRouting<'_>,
    ) -> Result<(), OpError> {
        let rows = logits.len() / count.max(1);
        let pairs = rows * used;
        ensure_equal("values of the router", logits.len(), rows * count)?;
        ensure_equal("experts of a row", used.clamp(1, count.max(1)), used)?;
        ensure_equal("experts", count.min(EXPERTS_MAX), count)?;
        ensure_equal("pairs", routing.experts.len(), pairs)?;
        ensure_equal("weights of pairs", routing.expert_weights.len(), pairs)?;
        let grouping = routing.grouping;
        ensure_equal("words of groups", routing.groups.len(), grouping.words(pairs, count))?;
        if pairs == 0 {
            return Ok(());
        }
        let launch = |blocks: usize, block| LaunchConfig {
            grid: (blocks as u32, 1, 1),
            block,
            shared_bytes: 0,
            overlaps_predecessor: true,
            cluster: 1,
        };
        let (logits, experts) = (logits.address(), routing.experts.address());
        let expert_weights = routing.expert_weights.address();
        let GroupAddress { sorted_pairs, groups, group_count } =
            grouping.addresses(routing.groups.address(), pairs, count);
        let order = ExpertPairOrder {
            sorted_pairs,
            groups,
            group_count,
            group_pairs: grouping.group_pairs() as i32,
            align: grouping.align() as i32,
            slots: grouping.slots(pairs, count) as i32,
            expert_count: count as i32,
            largest_first: i32::from(grouping.is_wgmma()),
        };
        let blocks = launch(rows.div_ceil(EXPERT_TOPK_ROWS), 32 * EXPERT_TOPK_ROWS as u32);
        let is_small = rows <= EXPERT_ROUTE_ROWS;
        let (rows, pairs, count, used) = (rows as i32, pairs as i32, count as i32, used as i32);
        if is_small {
            let both = ExpertRoute { logits, rows, used, experts, expert_weights, order };
            let name = kernel_name!("experts", "expert_route");
            let block = launch(1, EXPERT_ROUTE_THREADS);
            // SAFETY: the block reads `rows` rows of `logits` and writes `used` values of each. The
            // experts that it writes are below `count`. All pairs with their padding fill at most
            // `slots` words, and their groups are at most `groups_max`.
            return unsafe { launch_spread(&self.routing_kernels, name, stream, block, &both) }
                .map_err(device_error(OP));
        }
        let topk = ExpertTopkSoftmax { logits, rows, count, used, experts, expert_weights };
        let name = kernel_name!("experts", "expert_topk_softmax");
        // SAFETY: as above; a block has EXPERT_TOPK_ROWS rows.
        unsafe { launch_spread(&self.routing_kernels, name, stream, blocks, &topk) }
            .map_err(device_error(OP))?;
        let sort = ExpertSortPairs { experts, pairs, order };
        let name = kernel_name!("experts", "expert_sort_pairs");
        // SAFETY: as above.
        unsafe { launch_spread(&self.routing_kernels, name, stream, launch(1, EXPERT_SORT_THREADS), &sort) }
            .map_err(device_error(OP))
    }

    /// Quantizes rows of `x`, `[tokens, cols]`, for [`Self::matmul`]. The slot of pair p gets row p
    /// / pairs_per_token.
    ///
    /// # Safety
    /// [`Self::route`] wrote `of.groups` with `of.grouping`.
    pub unsafe fn quantize(
        &self,
        stream: &Stream,
        x: DeviceView<'_, f32>,
        cols: usize,
        pairs_per_token: usize,
        of: GroupedPairs<'_>,
        quantized: &QuantizedOutput<'_>,
    ) -> Result<(), OpError> {
        let GroupedPairs { pairs, count, grouping, groups } = of;
        let slots = grouping.slots(pairs, count);
        ensure_equal("values of the input", x.len(), pairs.div_ceil(pairs_per_token.max(1)) * cols)?;
        ensure_equal("misalignment of the input", (x.address() % 16) as usize, 0)?;
        ensure_equal("words of groups", groups.len(), grouping.words(pairs, count))?;
        let rows = quantized.rows(slots, cols).map_err(device_error(OP))?;
        let warps = slots * cols.div_ceil(TILE_COLS);
        if warps == 0 {
            return Ok(());
        }
        let launch = LaunchConfig {
            grid: (warps.div_ceil(EXPERT_QUANTIZE_WARPS) as u32, 1, 1),
            block: 32 * EXPERT_QUANTIZE_WARPS as u32,
            shared_bytes: 0,
            overlaps_predecessor: true,
            cluster: 1,
        };
        let GroupAddress { sorted_pairs, .. } = grouping.addresses(groups.address(), pairs, count);
        let arguments = ExpertQuantize {
            x: x.address(),
            sorted_pairs,
            slots: slots as i32,
            pairs_per_token: pairs_per_token as i32,
            cols: cols as i32,
            quantized: rows,
        };
        let names = [
            kernel_name!("experts", "expert_quantize_q8_0"),
            kernel_name!("experts", "expert_quantize_q8_1"),
            kernel_name!("experts", "expert_quantize_q8_k"),
        ];
        let dtype = quantized.layout.format;
        let name = quantized.select_quants(names).ok_or(OpError::Type { op: OP, dtype })?;
        // SAFETY: a warp reads 256 values of the row of a slot's pair, and writes the slot's part
        // of an activation tile. The pair is below `pairs` by this function's contract.
        unsafe { launch_spread(&self.routing_kernels, name, stream, launch, &arguments) }
            .map_err(device_error(OP))
    }

    /// Computes `stack.out = matrix of a slot's expert times the slot's row of x` on the tensor
    /// cores. It takes one or two stacks of one shape. If `by_pair`, outputs are in the order of
    /// pairs, otherwise in the order of slots. `of.grouping` selects the kernel.
    ///
    /// # Safety
    /// [`Self::route`] wrote `of.groups` with `of.grouping`. Between that launch and this lies one
    /// that waits before it lets the next one start, as [`Self::quantize`] does.
    pub unsafe fn matmul(
        &self,
        stream: &Stream,
        x: QuantizedActivations<'_>,
        of: GroupedPairs<'_>,
        by_pair: bool,
        stacks: &mut [ExpertWeights<'_>],
    ) -> Result<(), OpError> {
        let GroupedPairs { pairs, count, grouping, groups } = of;
        if stacks.is_empty() {
            return Ok(());
        }
        let kernels = self.check_stacks(x, count, stacks)?;
        ensure_equal("words of groups", groups.len(), grouping.words(pairs, count))?;
        if pairs == 0 || stacks[0].shape.row_tiles() == 0 || stacks[0].shape.col_tiles() == 0 {
            return Ok(());
        }
        let (slots, shape) = (grouping.slots(pairs, count), stacks[0].shape);
        ensure_equal("tokens", x.tokens, slots)?;
        for stack in stacks.iter() {
            let outputs = if by_pair { pairs } else { slots };
            ensure_equal("values of the output", stack.out.len(), outputs * shape.rows())?;
        }
        let mut at = grouping.addresses(groups.address(), pairs, count);
        if !by_pair {
            at.sorted_pairs = 0;
        }
        let params = expert_params(x, at, stacks);
        if grouping.is_wgmma() {
            // SAFETY: this function's contract. Lengths were checked.
            return unsafe { self.launch_wgmma(kernels, stream, x, of, params, stacks) };
        }
        if grouping == PairGrouping::Skinny {
            // SAFETY: this function's contract. Lengths were checked.
            return unsafe { self.launch_skinny(kernels, stream, of, params, stacks) };
        }
        if grouping != PairGrouping::Matmul {
            let (found, expected) = (grouping.group_pairs(), PairGrouping::Matmul.group_pairs());
            return Err(OpError::Shape { op: OP, what: "pairs of a group", found, expected });
        }
        let name = kernels.matmul;
        let act_tile = activation_bytes(x.layout.format, ACT_TILE_TOKENS, TILE_COLS).unwrap_or(0);
        let act_tiles = grouping.group_pairs() / ACT_TILE_TOKENS;
        let stage_bytes = EXPERT_MATMUL_ROW_TILES * shape.tile_bytes() + act_tiles * act_tile;
        let barriers = 2 * MATMUL_STAGES_MAX * size_of::<u64>();
        let available = self.device.shared_bytes_max() as usize;
        // If half of the shared memory has room for two stages, two blocks run on each
        // multiprocessor. Each of them then loads one stage while it computes another.
        let half = available.saturating_sub(BLOCK_SHARED_BYTES) / 2;
        let available = if half >= 2 * stage_bytes + barriers { half } else { available };
        let stages = (available.saturating_sub(barriers) / stage_bytes).min(MATMUL_STAGES_MAX);
        if stages == 0 {
            let what = "bytes of shared memory for a stage of experts";
            let found = stage_bytes + barriers;
            return Err(OpError::Shape { op: OP, what, found, expected: available });
        }
        let params =
            ExpertMatmulParams { common: params, stacks: stacks.len() as i32, stages: stages as i32 };
        let (block, shared_bytes) =
            (32 * EXPERT_MATMUL_WARPS as u32, (stages * stage_bytes + barriers) as u32);
        let kernel = kernels.family.kernel(name.as_c_str()).map_err(device_error(OP))?;
        let resident = kernel.blocks_per_multiprocessor(block, shared_bytes).map_err(device_error(OP))?;
        let row_blocks = shape.row_tiles().div_ceil(EXPERT_MATMUL_ROW_TILES);
        let output_tiles = grouping.groups_max(pairs, count) * row_blocks * stacks.len();
        let blocks = output_tiles.min((resident.max(1) * self.device.multiprocessors()) as usize) as u32;
        let launch = LaunchConfig {
            grid: (blocks, 1, 1),
            block,
            shared_bytes,
            overlaps_predecessor: true,
            cluster: 1,
        };
        // SAFETY: by this function's contract the experts of groups are below `count`, and slots
        // and pairs are below their numbers. So the kernel reads and writes tiles, activation tiles
        // and outputs inside the lengths that were checked.
        unsafe { launch_kernel(&kernels.family, name, stream, launch, &ExpertMatmul { params }) }
            .map_err(device_error(OP))
    }

    /// Checks shapes, types and lengths of the inputs of a product with `count` experts.
    pub(super) fn check_stacks(
        &self,
        x: QuantizedActivations<'_>,
        count: usize,
        stacks: &[ExpertWeights<'_>],
    ) -> Result<&ExpertTypeKernels, OpError> {
        let kernels = self.check_weights(x.layout.format, count, stacks)?;
        ensure_equal("row length", x.cols, stacks[0].shape.cols())?;
        let activations = x.layout.bytes(x.tokens, x.cols).unwrap_or(usize::MAX);
        ensure_equal("bytes of the activations", x.data.len(), activations)?;
        Ok(kernels)
    }

    /// Checks matrices of `count` experts that are multiplied with activations of a format.
    pub(super) fn check_weights(
        &self,
        format: DType,
        count: usize,
        stacks: &[ExpertWeights<'_>],
    ) -> Result<&ExpertTypeKernels, OpError> {
        ensure_equal("stacks", stacks.len().clamp(1, EXPERT_STACKS_MAX), stacks.len())?;
        let shape = stacks[0].shape;
        let dtype = shape.dtype();
        let kernels = self.products.iter().find(|kernels| kernels.dtype == dtype);
        let Some(kernels) = kernels.filter(|_| dtype.activation() == Some(format)) else {
            return Err(OpError::Type { op: OP, dtype });
        };
        ensure_equal("rows beyond whole tiles", shape.rows() % TILE_ROWS, 0)?;
        for stack in stacks {
            if stack.shape != shape {
                return Err(OpError::Type { op: OP, dtype: stack.shape.dtype() });
            }
            ensure_equal("bytes of the experts", stack.tiles.len(), count * shape.bytes())?;
            ensure_equal("misalignment of the experts", (stack.tiles.address() % 16) as usize, 0)?;
        }
        Ok(kernels)
    }

    /// Computes `stack.out[p] = matrix of pair p's expert times row p / pairs_per_token of x` for
    /// one stack of float weights. `x` is not quantized.
    ///
    /// # Safety
    /// `experts` are in device memory. Each of them is below `count`.
    pub unsafe fn float_matvec(
        &self,
        stream: &Stream,
        x: DeviceView<'_, f32>,
        experts: DeviceView<'_, u32>,
        pairs_per_token: usize,
        count: usize,
        stack: &mut ExpertWeights<'_>,
    ) -> Result<(), OpError> {
        let (shape, pairs) = (stack.shape, experts.len());
        ensure_equal("values of the input", x.len(), pairs.div_ceil(pairs_per_token.max(1)) * shape.cols())?;
        ensure_equal("bytes of the experts", stack.tiles.len(), count * shape.bytes())?;
        ensure_equal("values of the output", stack.out.len(), pairs * shape.rows())?;
        if stack.out.is_empty() {
            return Ok(());
        }
        let grid = (shape.rows().div_ceil(EXPERT_MATVEC_WARPS) as u32, pairs as u32, 1);
        let block = 32 * EXPERT_MATVEC_WARPS as u32;
        let launch = LaunchConfig { grid, block, shared_bytes: 0, overlaps_predecessor: true, cluster: 1 };
        let (weights, x, experts) = (stack.tiles.address(), x.address(), experts.address());
        let (rows, cols, out) = (shape.rows() as i32, shape.cols() as i32, stack.out.address());
        let pairs_per_token = pairs_per_token as i32;
        let family = &self.routing_kernels;
        // SAFETY: a warp reads a row of an expert's matrix and a row of `x`, inside lengths that
        // were checked.
        unsafe {
            match shape.dtype() {
                DType::F32 => {
                    let name = kernel_name!("experts", "expert_matvec_f32");
                    let arguments = ExpertMatvecF32 { weights, x, experts, pairs_per_token, rows, cols, out };
                    launch_spread(family, name, stream, launch, &arguments)
                }
                DType::F16 => {
                    let name = kernel_name!("experts", "expert_matvec_f16");
                    let arguments = ExpertMatvecF16 { weights, x, experts, pairs_per_token, rows, cols, out };
                    launch_spread(family, name, stream, launch, &arguments)
                }
                DType::BF16 => {
                    let name = kernel_name!("experts", "expert_matvec_bf16");
                    let arguments =
                        ExpertMatvecBF16 { weights, x, experts, pairs_per_token, rows, cols, out };
                    launch_spread(family, name, stream, launch, &arguments)
                }
                dtype => return Err(OpError::Type { op: OP, dtype }),
            }
        }
        .map_err(device_error(OP))
    }

    /// Computes `out[r] = sum over ranks of expert weight times contribution`.
    pub fn combine(
        &self,
        stream: &Stream,
        contributions: DeviceView<'_, f32>,
        expert_weights: DeviceView<'_, f32>,
        used: usize,
        out: &mut DeviceViewMut<'_, f32>,
    ) -> Result<(), OpError> {
        self.combine_and_clear(stream, contributions, expert_weights, used, out, 0)
    }

    /// [`Self::combine`], which also clears the counts of expert_fused_* at `finished`, an address
    /// or 0.
    pub(super) fn combine_and_clear(
        &self,
        stream: &Stream,
        contributions: DeviceView<'_, f32>,
        expert_weights: DeviceView<'_, f32>,
        used: usize,
        out: &mut DeviceViewMut<'_, f32>,
        finished: u64,
    ) -> Result<(), OpError> {
        let rows = expert_weights.len() / used.max(1);
        let cols = out.len() / rows.max(1);
        ensure_equal("values of the output", out.len(), rows * cols)?;
        ensure_equal("contributions", contributions.len(), rows * used * cols)?;
        if out.is_empty() {
            return Ok(());
        }
        let launch = LaunchConfig {
            grid: (rows as u32, (cols as u32).div_ceil(EXPERT_COMBINE_THREADS), 1),
            block: EXPERT_COMBINE_THREADS,
            shared_bytes: 0,
            overlaps_predecessor: true,
            cluster: 1,
        };
        let arguments = ExpertCombine {
            contributions: contributions.address(),
            expert_weights: expert_weights.address(),
            used: used as i32,
            cols: cols as i32,
            out: out.address(),
            finished,
        };
        // SAFETY: blocks (r, _) read the pairs of row r and write the row.
        unsafe { launch_spread(&self.routing_kernels, COMBINE, stream, launch, &arguments) }
            .map_err(device_error(OP))
    }
}

pub(super) fn ensure_equal(what: &'static str, found: usize, expected: usize) -> Result<(), OpError> {
    if found == expected {
        return Ok(());
    }
    Err(OpError::Shape { op: OP, what, found, expected })
}
