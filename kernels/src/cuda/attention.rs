// SPDX-License-Identifier: Apache-2.0

//! Launcher of attention.cu, attention_bf16.cu and attention_q8_0.cu: causal attention over the
//! paged KV cache. The plan of [`super::backend`] decides which kernel computes which rows.

use ops::{AttentionSpan, AttentionSpec, KvType};
use quant::layout::TILE_COLS;

use super::abi::attention::{
    ATTENTION_CLUSTER_MAX, ATTENTION_CLUSTERED_BYTES, ATTENTION_GROUPED_BYTES, ATTENTION_GROUPS,
    ATTENTION_PAD, ATTENTION_PAD_BYTES, ATTENTION_STAGES, ATTENTION_TILE, ATTENTION_TWO_GROUPS,
    ATTENTION_WARPS, AttentionGroupedKv, AttentionMerge, AttentionMergeQuantized, AttentionMergedKv,
    AttentionQueries, AttentionScalar, AttentionSplitKv, NO_WINDOW, SPLIT_KV_PAIRS,
};
use super::abi::kv::NormRopeKvParams;
use super::abi::tiles::QuantizedRows;
use super::attention_names::{
    GROUPED_HEAD_DIM_MAX, HEAD_DIMS, clustered_kv_name, grouped_kv_name, merged_kv_name, split_kv_name,
    two_groups_kv_name,
};
use super::attention_prefill::PrefillMethod;
use super::kv_write::{KvLayerAddress, q8_scale_bytes};
use super::launch::{kernel_name, launch_kernel};
use super::module::image;
use super::norm::ensure_same_len;
use super::norm_rope_kv::NormRopeKvOperands;
use super::quantized_output::QuantizedOutput;
use super::{CudaError, Device, DeviceView, DeviceViewMut, LaunchConfig, LazyModule, Stream};

const HALF_BYTES: usize = 2;
/// Shared memory of the prefill kernel beside what its launch asks for, at most: the addresses of
/// two tiles of keys, with those of their scales.
const STATIC_SHARED_BYTES: u32 = 2 << 10;
/// Threads of a block.
const BLOCK: u32 = 32 * ATTENTION_WARPS as u32;

/// One image per KV cache type. A kernel has the same name in every image.
pub struct AttentionKernels {
    /// For caches of f16 and f32. Its merge kernel also merges the partial results of the other
    /// types.
    floats: LazyModule,
    bf16: LazyModule,
    q8_0: LazyModule,
    /// Shared memory of a block.
    shared_bytes_max: usize,
}

/// Device addresses of an attention plan, and upper bounds of its counts. Grids have the size of
/// these bounds, so a captured launch serves every plan within them.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct AttentionPlanAddress {
    /// Three counts: splits, merges, prefill tiles.
    pub counts: u64,
    pub splits: u64,
    pub merges: u64,
    pub prefill_tiles: u64,
    pub splits_max: u32,
    pub merges_max: u32,
    pub prefill_tiles_max: u32,
    /// Whether any block of the split-KV kernel has more than one tile of keys.
    pub has_multi_tile_blocks: bool,
    pub merge: SplitMerge,
    /// Whether the plan merges the splits of all rows of the step.
    pub merges_all_rows: bool,
    /// Whether the blocks can prepare the heads of their rows: each block has one row, and the row
    /// is the only one of the step that writes keys which it reads.
    pub prepares_heads: bool,
    pub partial_sums: u64,
    pub partial_weights: u64,
}

/// Blocks of a cluster of attention_clustered_kv, ascending.
pub const CLUSTERS: [u32; 3] = [2, 4, ATTENTION_CLUSTER_MAX as u32];

/// What computes the splits of a row and merges them.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub enum SplitMerge {
    /// A block for each split. A further kernel merges.
    #[default]
    Kernel,
    /// A block for all splits of its rows, one after the other.
    Block,
    /// `blocks` blocks for all splits of their row, several at a time in each. If there are several
    /// blocks, they are a cluster.
    Groups { blocks: u32 },
    /// A block for all splits of its row, two at a time. Two blocks share a multiprocessor.
    TwoGroups,
}

/// The kernels for a model's attention shape. The choice depends on the model and the device, never
/// on the step.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum AttentionMethod {
    /// Tensor cores. A block of the split-KV kernel has `split_tokens` tokens, a block of the
    /// prefill kernel `prefill_tokens`. `has_groups` says whether there are kernels for
    /// [`SplitMerge::Groups`] and `TwoGroups`, and the device has the shared memory for them.
    TensorCores {
        split_tokens: usize,
        prefill_tokens: usize,
        has_groups: bool,
    },
    Scalar,
}

impl AttentionMethod {
    pub fn of(device: &Device, spec: &AttentionSpec, kind: KvType, span: AttentionSpan) -> Self {
        let group = spec.heads / spec.kv_heads.max(1);
        let has_kernels = kind != KvType::F32 && HEAD_DIMS.contains(&spec.head_dim);
        if !has_kernels || group == 0 || group > SPLIT_KV_PAIRS {
            return Self::Scalar;
        }
        let prefill = PrefillMethod::of(device, spec, kind);
        // Of these kernels, that for prompts needs the most.
        if prefill.shared_bytes(kind, spec) + STATIC_SHARED_BYTES > device.shared_bytes_max() {
            return Self::Scalar;
        }
        let prefill_pairs = prefill.pairs();
        let grouped_bytes = grouped_launch(kind, *spec, 1, ATTENTION_GROUPS, 1).shared_bytes as usize
            + ATTENTION_GROUPED_BYTES;
        Self::TensorCores {
            split_tokens: SPLIT_KV_PAIRS / group,
            prefill_tokens: prefill_pairs / group,
            has_groups: span == AttentionSpan::Full
                && spec.head_dim <= GROUPED_HEAD_DIM_MAX
                && grouped_bytes <= device.shared_bytes_max() as usize,
        }
    }
}

/// The inputs of attention in one layer.
#[derive(Clone, Copy)]
pub struct AttentionInputs<'a> {
    pub layer: KvLayerAddress,
    pub kind: KvType,
    pub span: AttentionSpan,
    pub spec: AttentionSpec,
    pub queries: DeviceView<'a, f32>,
    /// The block ids of all sequences' block tables.
    pub tables: DeviceView<'a, u32>,
}

/// Bytes of shared memory that the tensor-core kernels need for one tile of keys and values.
pub(super) struct KvStageBytes {
    /// One pipeline stage: the tile in the format of the cache.
    pub(super) stage: usize,
    /// The tile converted to f16, which only the prefill kernel keeps.
    pub(super) dequantized: usize,
}

impl KvStageBytes {
    /// Equal to STAGE_BYTES and DEQUANTIZED_BYTES in attention/kv_16bit.cuh and
    /// attention/kv_q8_0.cuh.
    pub(super) fn of(kind: KvType, head_dim: usize) -> Self {
        let f16_tiles = |cols: usize| 2 * ATTENTION_TILE * row_pitch_bytes(cols);
        match kind {
            KvType::Q8_0 => {
                let row = head_dim + ATTENTION_PAD_BYTES + q8_scale_bytes(head_dim);
                Self { stage: 2 * ATTENTION_TILE * row, dequantized: f16_tiles(head_dim) }
            }
            // Whole columns of four warps.
            _ => Self { stage: f16_tiles(head_dim.next_multiple_of(8 * ATTENTION_WARPS)), dequantized: 0 },
        }
    }
}

impl AttentionKernels {
    pub fn new(device: &Device) -> Self {
        Self {
            floats: LazyModule::new(device, "attention", image!("attention")),
            bf16: LazyModule::new(device, "attention_bf16", image!("attention_bf16")),
            q8_0: LazyModule::new(device, "attention_q8_0", image!("attention_q8_0")),
            shared_bytes_max: device.shared_bytes_max() as usize,
        }
    }

    pub(super) fn family(&self, kind: KvType) -> &LazyModule {
        match kind {
            KvType::F32 | KvType::F16 => &self.floats,
            KvType::Bf16 => &self.bf16,
            KvType::Q8_0 => &self.q8_0,
        }
    }

    /// How many clusters of each size of [`CLUSTERS`] the device runs at the same time, with a
    /// cache of f16. Caches of other types need no more shared memory.
    pub(super) fn clusters(&self, spec: &AttentionSpec) -> Result<[u32; CLUSTERS.len()], CudaError> {
        let mut clusters = [0; CLUSTERS.len()];
        let launch = |blocks: u32| grouped_launch(KvType::F16, *spec, 1, ATTENTION_GROUPS, blocks);
        if launch(1).shared_bytes as usize + ATTENTION_CLUSTERED_BYTES > self.shared_bytes_max {
            return Ok(clusters);
        }
        let kernel = self.floats.kernel(clustered_kv_name(KvType::F16, spec.head_dim).as_c_str())?;
        for (found, blocks) in clusters.iter_mut().zip(CLUSTERS) {
            *found = kernel.active_clusters(&launch(blocks))?;
        }
        Ok(clusters)
    }

    /// Whether the kernel that merges can also quantize its output. To do so, it must write all
    /// rows of the plan, and its blocks whole column tiles.
    pub(super) fn can_quantize(spec: &AttentionSpec, plan: &AttentionPlanAddress) -> bool {
        let heads = match plan.merge {
            SplitMerge::Kernel => spec.heads,
            SplitMerge::Block | SplitMerge::Groups { .. } | SplitMerge::TwoGroups => {
                spec.heads / spec.kv_heads.max(1)
            }
        };
        plan.merges_all_rows
            && TILE_COLS.is_multiple_of(spec.head_dim.max(1))
            && (heads * spec.head_dim).is_multiple_of(TILE_COLS)
    }

    /// Whether the kernels can also normalise and rotate the heads and write the step's keys:
    /// whole heads, whose pairs are in one lane or in neighbouring lanes.
    pub(super) fn takes_raw_heads(
        plan: &AttentionPlanAddress,
        kind: KvType,
        head_dim: usize,
        pairs: usize,
    ) -> bool {
        plan.prepares_heads
            && matches!(kind, KvType::F16 | KvType::Bf16)
            && head_dim.is_multiple_of(64)
            && HEAD_DIMS.contains(&head_dim)
            && 2 * pairs == head_dim
    }

    /// Computes all rows of a plan on the tensor cores. With `raw_heads`, it first does for these
    /// heads what [`super::norm_rope_kv`] does, but leaves queries and keys as they are.
    ///
    /// # Safety
    /// The plan is in device memory at its addresses. Its query tiles name rows of `queries` and
    /// `out` and entries of `tables`. Every block that these entries lead to, up to the tiles' last
    /// positions, is mapped memory of the shape that `layer` describes. The buffers of partial
    /// results have room for the whole plan. With `raw_heads`, also as
    /// [`super::norm_rope_kv::NormRopeKvKernels::launch`].
    pub unsafe fn paged(
        &self,
        stream: &Stream,
        inputs: &AttentionInputs<'_>,
        plan: &AttentionPlanAddress,
        raw_heads: Option<&NormRopeKvOperands<'_>>,
        out: &mut DeviceViewMut<'_, f32>,
        quantized: Option<QuantizedOutput<'_>>,
    ) -> Result<(), CudaError> {
        check_output(inputs, out)?;
        let raw_heads = match raw_heads {
            Some(heads) => raw_params(inputs, plan, heads)?,
            None => NormRopeKvParams::default(),
        };
        if plan.splits_max > 0 {
            // SAFETY: this function's contract.
            unsafe {
                match plan.merge {
                    SplitMerge::Kernel => {
                        self.split_kv(stream, inputs, plan, raw_heads)?;
                        self.merge(stream, inputs.spec, plan, out, quantized.as_ref())?;
                    }
                    SplitMerge::Block => {
                        self.merged_kv(stream, inputs, plan, raw_heads, out, quantized.as_ref())?;
                    }
                    SplitMerge::Groups { .. } | SplitMerge::TwoGroups => {
                        self.grouped_kv(stream, inputs, plan, raw_heads, out, quantized.as_ref())?;
                    }
                }
            }
        } else if quantized.is_some() {
            ensure_length("quantized rows that no kernel merges", 1, 0)?;
        }
        if plan.prefill_tiles_max > 0 {
            // SAFETY: as above.
            unsafe { self.prefill(stream, inputs, plan, out)? };
        }
        Ok(())
    }

    /// # Safety
    /// As [`Self::paged`].
    unsafe fn split_kv(
        &self,
        stream: &Stream,
        inputs: &AttentionInputs<'_>,
        plan: &AttentionPlanAddress,
        raw_heads: NormRopeKvParams,
    ) -> Result<(), CudaError> {
        let AttentionInputs { layer, kind, spec, .. } = *inputs;
        let stages = stages_of(plan);
        let launch = split_launch(kind, spec, plan, stages);
        let arguments = AttentionSplitKv {
            kv: layer,
            queries: query_params(inputs),
            tables: inputs.tables.address(),
            splits: plan.splits,
            split_count: plan.counts,
            stage_count: stages as i32,
            raw_heads,
            partial_sums: plan.partial_sums,
            partial_weights: plan.partial_weights,
        };
        // SAFETY: the arguments are valid by this function's contract. The kernel divides shared
        // memory as `split_launch` counts it.
        unsafe {
            launch_kernel(self.family(kind), split_kv_name(kind, spec.head_dim), stream, launch, &arguments)
        }
    }

    /// # Safety
    /// As [`Self::paged`].
    unsafe fn merged_kv(
        &self,
        stream: &Stream,
        inputs: &AttentionInputs<'_>,
        plan: &AttentionPlanAddress,
        raw_heads: NormRopeKvParams,
        out: &mut DeviceViewMut<'_, f32>,
        quantized: Option<&QuantizedOutput<'_>>,
    ) -> Result<(), CudaError> {
        let AttentionInputs { layer, kind, spec, .. } = *inputs;
        let (quantizer, quantized) = quantizer_of(&spec, plan, out, quantized)?;
        let name = merged_kv_name(kind, spec.head_dim);
        let mut stages = stages_of(plan);
        let mut launch = split_launch(kind, spec, plan, stages);
        // With one stage each, more blocks run at once. This beats two rounds of blocks with two
        // stages: 36.7 us instead of 38.7 for 64 rows at 512 keys of an 8B model (H200).
        let kernel = self.family(kind).kernel(name.as_c_str())?;
        let places =
            kernel.blocks_per_multiprocessor(BLOCK, launch.shared_bytes)? * stream.device().multiprocessors();
        if launch.grid.0 * launch.grid.1 > places {
            stages = 1;
            launch = split_launch(kind, spec, plan, stages);
        }
        let arguments = AttentionMergedKv {
            kv: layer,
            queries: query_params(inputs),
            tables: inputs.tables.address(),
            splits: plan.splits,
            split_count: plan.counts,
            stage_count: stages as i32,
            raw_heads,
            out: out.address(),
            quantizer,
            quantized,
        };
        // SAFETY: as in `split_kv`. A stage has room for 16 merged heads. If there are activation
        // tiles, the heads of a KV head are whole column tiles.
        unsafe { launch_kernel(self.family(kind), name, stream, launch, &arguments) }
    }

    /// # Safety
    /// As [`Self::paged`].
    unsafe fn grouped_kv(
        &self,
        stream: &Stream,
        inputs: &AttentionInputs<'_>,
        plan: &AttentionPlanAddress,
        raw_heads: NormRopeKvParams,
        out: &mut DeviceViewMut<'_, f32>,
        quantized: Option<&QuantizedOutput<'_>>,
    ) -> Result<(), CudaError> {
        let AttentionInputs { layer, kind, spec, .. } = *inputs;
        let (quantizer, quantized) = quantizer_of(&spec, plan, out, quantized)?;
        let arguments = AttentionGroupedKv {
            kv: layer,
            queries: query_params(inputs),
            tables: inputs.tables.address(),
            splits: plan.splits,
            split_count: plan.counts,
            raw_heads,
            out: out.address(),
            quantizer,
            quantized,
        };
        let (groups, blocks, name) = match plan.merge {
            SplitMerge::TwoGroups => (ATTENTION_TWO_GROUPS, 1, two_groups_kv_name(kind, spec.head_dim)),
            SplitMerge::Groups { blocks } if blocks > 1 => {
                (ATTENTION_GROUPS, blocks, clustered_kv_name(kind, spec.head_dim))
            }
            _ => (ATTENTION_GROUPS, 1, grouped_kv_name(kind, spec.head_dim)),
        };
        let launch = grouped_launch(kind, spec, plan.splits_max, groups, blocks);
        // SAFETY: as in `merged_kv`. `grouped_launch` counts the memory as the kernel divides it.
        unsafe { launch_kernel(self.family(kind), name, stream, launch, &arguments) }
    }

    /// # Safety
    /// As [`Self::paged`].
    unsafe fn merge(
        &self,
        stream: &Stream,
        spec: AttentionSpec,
        plan: &AttentionPlanAddress,
        out: &mut DeviceViewMut<'_, f32>,
        quantized: Option<&QuantizedOutput<'_>>,
    ) -> Result<(), CudaError> {
        let width = spec.heads * spec.head_dim;
        let AttentionPlanAddress { partial_sums, partial_weights, merges, .. } = *plan;
        let merge_count = plan.counts + size_of::<u32>() as u64;
        let (heads, dim, rows) = (spec.heads as i32, spec.head_dim as i32, out.len() / width.max(1));
        let out = out.address();
        let Some(quantized) = quantized else {
            let arguments =
                AttentionMerge { partial_sums, partial_weights, merges, merge_count, heads, dim, out };
            let block = spec.head_dim.next_multiple_of(32) as u32;
            let launch = LaunchConfig { block, ..launch_shape((plan.merges_max, spec.heads as u32, 1), 0) };
            let name = kernel_name!("attention", "attention_merge");
            // SAFETY: each dimension of a head has a thread. The rest holds by this function's
            // contract.
            return unsafe { launch_kernel(&self.floats, name, stream, launch, &arguments) };
        };
        ensure_quantizable(&spec, plan, Some(quantized))?;
        let rows = quantized.rows(rows, width)?;
        let arguments = AttentionMergeQuantized {
            partial_sums,
            partial_weights,
            merges,
            merge_count,
            heads,
            dim,
            out,
            quantized: rows,
        };
        let launch = LaunchConfig {
            grid: (plan.merges_max, (width / TILE_COLS) as u32, 1),
            block: TILE_COLS as u32,
            shared_bytes: 0,
            overlaps_predecessor: true,
            cluster: 1,
        };
        let name = quantized.select([
            kernel_name!("attention", "attention_merge_q8_0"),
            kernel_name!("attention", "attention_merge_q8_1"),
            kernel_name!("attention", "attention_merge_q8_k"),
            kernel_name!("attention", "attention_merge_f16"),
            kernel_name!("attention", "attention_merge_bf16"),
        ]);
        // SAFETY: as above. 256 columns hold whole heads, and the plan merges every row.
        unsafe { launch_kernel(&self.floats, name, stream, launch, &arguments) }
    }

    /// Computes the first `positions.len()` rows without tensor cores. Row r attends to the keys up
    /// to its position, and its block ids begin at `table_starts[r]`.
    ///
    /// # Safety
    /// As for [`Self::paged`]: every block up to each row's position is mapped memory of the
    /// layer's shape.
    pub unsafe fn scalar(
        &self,
        stream: &Stream,
        inputs: &AttentionInputs<'_>,
        table_starts: DeviceView<'_, u32>,
        positions: DeviceView<'_, u32>,
        out: &mut DeviceViewMut<'_, f32>,
    ) -> Result<(), CudaError> {
        let AttentionInputs { layer, kind, spec, .. } = *inputs;
        check_output(inputs, out)?;
        let rows = positions.len();
        ensure_same_len("rows of attention", inputs.queries.len(), rows * spec.heads * spec.head_dim)?;
        if out.is_empty() {
            return Ok(());
        }
        let name = match kind {
            KvType::F32 => kernel_name!("attention", "attention_scalar_f32"),
            KvType::F16 => kernel_name!("attention", "attention_scalar_f16"),
            KvType::Bf16 => kernel_name!("attention_bf16", "attention_scalar_bf16"),
            KvType::Q8_0 => kernel_name!("attention_q8_0", "attention_scalar_q8_0"),
        };
        let launch = launch_shape((rows as u32, spec.heads as u32, 1), 2 * spec.head_dim * size_of::<f32>());
        let arguments = AttentionScalar {
            kv: layer,
            queries: query_params(inputs),
            dim: spec.head_dim as i32,
            tables: inputs.tables.address(),
            table_starts: table_starts.address(),
            positions: positions.address(),
            out: out.address(),
        };
        // SAFETY: shared memory has room for two heads. The rest holds by this function's contract.
        unsafe { launch_kernel(self.family(kind), name, stream, launch, &arguments) }
    }
}

/// Bytes between two rows of `cols` 16-bit values in shared memory.
pub(super) fn row_pitch_bytes(cols: usize) -> usize {
    (cols + ATTENTION_PAD) * HALF_BYTES
}

/// Bytes between two queries in shared memory: PITCH of the cache's kernels.
pub(super) fn query_pitch_bytes(kind: KvType, head_dim: usize) -> usize {
    match kind {
        KvType::Q8_0 => row_pitch_bytes(head_dim),
        _ => row_pitch_bytes(head_dim.next_multiple_of(8 * ATTENTION_WARPS)),
    }
}

/// Stages of a block of the split-KV kernels, so that a tile is copied while the one before it is
/// multiplied.
fn stages_of(plan: &AttentionPlanAddress) -> usize {
    if plan.has_multi_tile_blocks { ATTENTION_STAGES } else { 1 }
}

/// The launch of a split-KV kernel.
fn split_launch(
    kind: KvType,
    spec: AttentionSpec,
    plan: &AttentionPlanAddress,
    stages: usize,
) -> LaunchConfig {
    let queries_and_weights =
        SPLIT_KV_PAIRS * (query_pitch_bytes(kind, spec.head_dim) + row_pitch_bytes(ATTENTION_TILE));
    let shared_bytes = stages * KvStageBytes::of(kind, spec.head_dim).stage + queries_and_weights;
    launch_shape((spec.kv_heads as u32, plan.splits_max, 1), shared_bytes)
}

/// The parameters of heads that the kernels prepare. They are those of `inputs`.
fn raw_params(
    inputs: &AttentionInputs<'_>,
    plan: &AttentionPlanAddress,
    heads: &NormRopeKvOperands<'_>,
) -> Result<NormRopeKvParams, CudaError> {
    let AttentionInputs { kind, spec, .. } = *inputs;
    let params = heads.params()?;
    let takes = AttentionKernels::takes_raw_heads(plan, kind, spec.head_dim, params.pairs as usize);
    ensure_length("heads that attention cannot prepare", usize::from(!takes), 0)?;
    ensure_same_len("dimensions of a head", heads.head_dim, spec.head_dim)?;
    ensure_same_len("KV heads", heads.kv_heads, spec.kv_heads)?;
    ensure_same_len("queries of attention", heads.queries.len(), inputs.queries.len())?;
    Ok(params)
}

/// The launch of a kernel of attention/grouped_kv.cuh for up to `rows` rows, with `blocks` blocks
/// of `groups` groups for each row and KV head.
fn grouped_launch(kind: KvType, spec: AttentionSpec, rows: u32, groups: usize, blocks: u32) -> LaunchConfig {
    let group = spec.heads / spec.kv_heads.max(1);
    let weights_and_results =
        SPLIT_KV_PAIRS * row_pitch_bytes(ATTENTION_TILE) + group * spec.head_dim * size_of::<f32>();
    let shared_bytes = groups * (KvStageBytes::of(kind, spec.head_dim).stage + weights_and_results)
        + SPLIT_KV_PAIRS * query_pitch_bytes(kind, spec.head_dim);
    let launch = launch_shape((spec.kv_heads as u32 * blocks, rows, 1), shared_bytes);
    LaunchConfig { block: groups as u32 * BLOCK, cluster: blocks, ..launch }
}

/// The number of the format of `quantized` rows, and their addresses; null if there are none.
fn quantizer_of(
    spec: &AttentionSpec,
    plan: &AttentionPlanAddress,
    out: &DeviceViewMut<'_, f32>,
    quantized: Option<&QuantizedOutput<'_>>,
) -> Result<(i32, QuantizedRows), CudaError> {
    let width = spec.heads * spec.head_dim;
    ensure_quantizable(spec, plan, quantized)?;
    match quantized {
        Some(quantized) => Ok((quantized.number() as i32, quantized.rows(out.len() / width.max(1), width)?)),
        None => Ok((0, QuantizedRows { act_tiles: 0, f16_sums: 0, f16_groups: 0 })),
    }
}

fn ensure_quantizable(
    spec: &AttentionSpec,
    plan: &AttentionPlanAddress,
    quantized: Option<&QuantizedOutput<'_>>,
) -> Result<(), CudaError> {
    let is_refused = quantized.is_some() && !AttentionKernels::can_quantize(spec, plan);
    ensure_length("quantized rows that no kernel merges", usize::from(is_refused), 0)
}

fn ensure_length(what: &'static str, found: usize, expected: usize) -> Result<(), CudaError> {
    if found == expected { Ok(()) } else { Err(CudaError::Length { what, found, expected }) }
}

fn check_output(inputs: &AttentionInputs<'_>, out: &DeviceViewMut<'_, f32>) -> Result<(), CudaError> {
    ensure_same_len("output of attention", out.len(), inputs.queries.len())
}

pub(super) fn query_params(inputs: &AttentionInputs<'_>) -> AttentionQueries {
    let spec = inputs.spec;
    AttentionQueries {
        values: inputs.queries.address(),
        heads: spec.heads as i32,
        group: (spec.heads / spec.kv_heads.max(1)) as i32,
        // The kernels compute exponentials with base 2.
        scale: spec.scale * std::f32::consts::LOG2_E,
        window: window_of(inputs.span),
    }
}

/// How many keys a row sees, its own included.
pub(super) fn window_of(span: AttentionSpan) -> u32 {
    let tokens = span.window_tokens().map(|tokens| tokens.max(1) as u64);
    tokens.filter(|&tokens| tokens < u64::from(NO_WINDOW)).map_or(NO_WINDOW, |tokens| tokens as u32)
}

pub(super) fn launch_shape(grid: (u32, u32, u32), shared_bytes: usize) -> LaunchConfig {
    LaunchConfig {
        grid,
        block: BLOCK,
        shared_bytes: shared_bytes as u32,
        overlaps_predecessor: true,
        cluster: 1,
    }
}
