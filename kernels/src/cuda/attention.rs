//! Launcher of attention.cu, attention_bf16.cu and attention_q8_0.cu: causal attention over the paged cache. What each row
//! needs is planned by [`super::plan`].

use ops::{AttentionSpec, KvType};
use quant::layout::TILE_COLS;

use super::kv_write::{KvLayerAddress, q8_scale_bytes};
use super::module::{arguments, image};
use super::norm::ensure_same_len;
use super::quantized_output::{QuantizedOutput, select_kernel};
use super::{CudaError, Device, Family, Launch, Stream, View, ViewMut};

/// As attention.cu.
const TILE: usize = 64;
const PREFILL_PAIRS: usize = 64;
const SPLIT_KV_PAIRS: usize = 16;
const THREADS: u32 = 128;
/// Tiles in shared memory, where a block has more than one.
const STAGES: usize = 2;
/// Halves between rows in shared memory, or bytes.
const PAD: usize = 8;
const PAD_BYTES: usize = 16;
const HALF_BYTES: usize = 2;

/// A kernel has the ensure_same_len name in the images of all types of caches that it is made for.
pub struct AttentionKernels {
    /// f16 and f32; merges of all.
    floats: Family,
    bf16: Family,
    q8_0: Family,
}

/// `AttentionQueries` of attention.cu.
#[repr(C)]
#[derive(Clone, Copy)]
struct AttentionQueries {
    values: u64,
    heads: i32,
    group: i32,
    scale: f32,
}

/// Device addresses of a plan, and how much of it there is at most: grids are made for these bounds, so that a captured
/// launch_shape serves every plan within them.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct AttentionPlanAddress {
    /// Three counts: splits, merges, prefill_tiles.
    pub counts: u64,
    pub splits: u64,
    pub merges: u64,
    pub prefill_tiles: u64,
    pub splits_max: u32,
    pub merges_max: u32,
    pub prefill_tiles_max: u32,
    /// Whether a split has more than one tile.
    pub has_multi_tile_splits: bool,
    /// Whether all rows of the step are merged.
    pub merges_all_rows: bool,
    pub partial_sums: u64,
    pub partial_weights: u64,
}

/// Which kernels a shape gets: a matter of the model alone, never of the step.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum AttentionMethod {
    /// Tensor cores: tokens of an item of the split kernel, and of the chunk kernel.
    TensorCores {
        split_tokens: usize,
        prefill_tokens: usize,
    },
    Scalar,
}

impl AttentionMethod {
    pub fn of(spec: &AttentionSpec, kind: KvType) -> Self {
        let group = spec.heads / spec.kv_heads.max(1);
        let tiles = kind != KvType::F32 && matches!(spec.head_dim, 64 | 96 | 128);
        if !tiles || group == 0 || group > SPLIT_KV_PAIRS {
            return Self::Scalar;
        }
        Self::TensorCores { split_tokens: SPLIT_KV_PAIRS / group, prefill_tokens: PREFILL_PAIRS / group }
    }
}

/// The operands of one inputs.
#[derive(Clone, Copy)]
pub struct AttentionInputs<'a> {
    pub layer: KvLayerAddress,
    pub kind: KvType,
    pub spec: AttentionSpec,
    pub queries: View<'a, f32>,
    /// Block ids of all sequences.
    pub tables: View<'a, u32>,
}

/// How tile kernels hold keys and values in shared memory.
struct KvStageBytes {
    /// Of one tile, as it stands in the cache.
    bytes: usize,
    /// For a tile that is made into halves, in the chunk kernel.
    dequantized_bytes: usize,
}

impl KvStageBytes {
    /// As halves.cuh and bytes.cuh.
    fn of(kind: KvType, head_dim: usize) -> Self {
        let halves = 2 * TILE * (head_dim + PAD) * HALF_BYTES;
        match kind {
            KvType::Q8_0 => {
                let bytes = 2 * TILE * (head_dim + PAD_BYTES + q8_scale_bytes(head_dim));
                Self { bytes, dequantized_bytes: halves }
            }
            _ => Self { bytes: halves, dequantized_bytes: 0 },
        }
    }
}

impl AttentionKernels {
    pub fn new(device: &Device) -> Self {
        Self {
            floats: Family::new(device, "attention", image!("attention")),
            bf16: Family::new(device, "attention_bf16", image!("attention_bf16")),
            q8_0: Family::new(device, "attention_q8_0", image!("attention_q8_0")),
        }
    }

    fn family(&self, kind: KvType) -> &Family {
        match kind {
            KvType::F32 | KvType::F16 => &self.floats,
            KvType::Bf16 => &self.bf16,
            KvType::Q8_0 => &self.q8_0,
        }
    }

    /// Whether all rows of a plan are merged, and so can be quantized as well.
    pub(super) fn can_quantize(spec: &AttentionSpec, plan: &AttentionPlanAddress) -> bool {
        let width = spec.heads * spec.head_dim;
        plan.merges_all_rows
            && TILE_COLS.is_multiple_of(spec.head_dim.max(1))
            && width.is_multiple_of(TILE_COLS)
    }

    /// All rows of a plan.
    ///
    /// # Safety
    /// The plan stands at its addresses, its items name rows of `queries` and `out` and entries of `tables`, every block
    /// that they lead to up to the items' last positions is mapped memory of the shape that `layer` describes, and the
    /// partials have room for all of the plan.
    pub unsafe fn paged(
        &self,
        stream: &Stream,
        inputs: &AttentionInputs<'_>,
        plan: &AttentionPlanAddress,
        out: &mut ViewMut<'_, f32>,
        quantized: Option<QuantizedOutput<'_>>,
    ) -> Result<(), CudaError> {
        let AttentionInputs { layer, kind, spec, .. } = *inputs;
        check_output(inputs, out)?;
        let width = spec.heads * spec.head_dim;
        let rows = out.len() / width.max(1);
        let act_tiles = match &quantized {
            Some(quantized) => {
                ensure_length(
                    "quantized rows that are not merged",
                    usize::from(!Self::can_quantize(&spec, plan)),
                    0,
                )?;
                quantized.address(rows, width)?
            }
            None => 0,
        };
        let pitch_bytes = (spec.head_dim + PAD) * HALF_BYTES;
        let shared = KvStageBytes::of(kind, spec.head_dim);
        let family = self.family(kind);
        let queries = queries(inputs);
        let tables = inputs.tables.address();
        let kv_heads = spec.kv_heads as u32;
        let AttentionPlanAddress {
            counts, splits, merges, prefill_tiles, partial_sums, partial_weights, ..
        } = *plan;
        let (merge_count, prefill_count) = (counts + 4, counts + 8);
        if plan.splits_max > 0 {
            let stages = if plan.has_multi_tile_splits { STAGES } else { 1 };
            let queries_and_weights = SPLIT_KV_PAIRS * (pitch_bytes + (TILE + PAD) * HALF_BYTES);
            let shared_bytes = stages * shared.bytes + queries_and_weights;
            let launch = launch_shape((plan.splits_max, kv_heads, 1), shared_bytes);
            let stages = stages as i32;
            let kernel = family.kernel(match spec.head_dim {
                64 => c"attention_split_kv_64",
                96 => c"attention_split_kv_96",
                _ => c"attention_split_kv_128",
            })?;
            // SAFETY: (KvLayer, AttentionQueries, const uint32_t *, const Work *, const uint32_t *, int, float *, float2 *), valid by this function's contract; shared memory as the kernel divides it.
            unsafe {
                kernel.launch(
                    stream,
                    launch,
                    arguments![layer, queries, tables, splits, counts, stages, partial_sums, partial_weights],
                )?;
            }
            let (heads, dim, out) = (spec.heads as i32, spec.head_dim as i32, out.address());
            let names = [
                c"attention_merge",
                c"attention_merge_q8_0",
                c"attention_merge_q8_1",
                c"attention_merge_q8_k",
            ];
            let kernel = self.floats.kernel(select_kernel(quantized.as_ref(), names))?;
            if quantized.is_some() {
                let grid = (plan.merges_max, (width / TILE_COLS) as u32, 1);
                let launch =
                    Launch { grid, block: TILE_COLS as u32, shared_bytes: 0, overlaps_predecessor: true };
                // SAFETY: as below, and a uint8_t *; whole heads stand in 256 columns, and every row is merged.
                unsafe {
                    kernel.launch(
                        stream,
                        launch,
                        arguments![
                            partial_sums,
                            partial_weights,
                            merges,
                            merge_count,
                            heads,
                            dim,
                            out,
                            act_tiles
                        ],
                    )?;
                }
            } else {
                let launch = launch_shape((plan.merges_max, spec.heads as u32, 1), 0);
                // SAFETY: (const float *, const float2 *, const Merge *, const uint32_t *, int, int, float *); heads have
                // at most 128 dimensions, one for a thread; the rest by this function's contract.
                unsafe {
                    kernel.launch(
                        stream,
                        launch,
                        arguments![partial_sums, partial_weights, merges, merge_count, heads, dim, out],
                    )?;
                }
            }
        }
        if plan.prefill_tiles_max > 0 {
            let shared_bytes = STAGES * shared.bytes + shared.dequantized_bytes + PREFILL_PAIRS * pitch_bytes;
            let launch = launch_shape((plan.prefill_tiles_max, kv_heads, 1), shared_bytes);
            let out = out.address();
            let kernel = family.kernel(match spec.head_dim {
                64 => c"attention_prefill_64",
                96 => c"attention_prefill_96",
                _ => c"attention_prefill_128",
            })?;
            // SAFETY: (KvLayer, AttentionQueries, const uint32_t *, const Item *, const uint32_t *, float *), as above.
            unsafe {
                kernel.launch(
                    stream,
                    launch,
                    arguments![layer, queries, tables, prefill_tiles, prefill_count, out],
                )?;
            }
        }
        Ok(())
    }

    /// The first `positions.len()` rows, each with keys up to its position; its block ids start at `table_starts[r]`.
    ///
    /// # Safety
    /// As for [`Self::tiles`]: every block up to each row's position is mapped memory of the layer's shape.
    pub unsafe fn scalar(
        &self,
        stream: &Stream,
        inputs: &AttentionInputs<'_>,
        table_starts: View<'_, u32>,
        positions: View<'_, u32>,
        out: &mut ViewMut<'_, f32>,
    ) -> Result<(), CudaError> {
        let AttentionInputs { layer, kind, spec, .. } = *inputs;
        check_output(inputs, out)?;
        let rows = positions.len();
        ensure_same_len("rows of attention", inputs.queries.len(), rows * spec.heads * spec.head_dim)?;
        if out.is_empty() {
            return Ok(());
        }
        let name = match kind {
            KvType::F32 => c"attention_scalar_f32",
            KvType::F16 => c"attention_scalar_f16",
            KvType::Bf16 => c"attention_scalar_bf16",
            KvType::Q8_0 => c"attention_scalar_q8_0",
        };
        let launch = launch_shape((rows as u32, spec.heads as u32, 1), 2 * spec.head_dim * size_of::<f32>());
        let queries = queries(inputs);
        let (tables, starts, positions) =
            (inputs.tables.address(), table_starts.address(), positions.address());
        let (dim, out) = (spec.head_dim as i32, out.address());
        let kernel = self.family(kind).kernel(name)?;
        // SAFETY: (KvLayer, AttentionQueries, int, const uint32_t *, const uint32_t *, const uint32_t *, float *); shared memory for
        // two heads; the rest by this function's contract.
        unsafe {
            kernel.launch(stream, launch, arguments![layer, queries, dim, tables, starts, positions, out])
        }
    }
}

fn ensure_length(what: &'static str, found: usize, expected: usize) -> Result<(), CudaError> {
    if found == expected { Ok(()) } else { Err(CudaError::Length { what, found, expected }) }
}

fn check_output(inputs: &AttentionInputs<'_>, out: &ViewMut<'_, f32>) -> Result<(), CudaError> {
    ensure_same_len("output of attention", out.len(), inputs.queries.len())
}

fn queries(inputs: &AttentionInputs<'_>) -> AttentionQueries {
    let spec = inputs.spec;
    AttentionQueries {
        values: inputs.queries.address(),
        heads: spec.heads as i32,
        group: (spec.heads / spec.kv_heads.max(1)) as i32,
        // Scores count in powers of two.
        scale: spec.scale * std::f32::consts::LOG2_E,
    }
}

fn launch_shape(grid: (u32, u32, u32), shared_bytes: usize) -> Launch {
    Launch { grid, block: THREADS, shared_bytes: shared_bytes as u32, overlaps_predecessor: true }
}
