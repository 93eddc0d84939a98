//! Launcher of attention.cu, attention_bf16.cu and attention_q8_0.cu: causal attention over the paged cache. What each row
//! needs is planned by [`super::plan`].

use ops::{AttentionSpec, KvType};
use quant::layout::TILE_COLS;

use super::kv_write::{KvLayerAddress, q8_scale_bytes};
use super::module::{arguments, image};
use super::norm::same;
use super::rounded::{Rounded, kernel_name};
use super::{CudaError, Device, Family, Launch, Stream, View, ViewMut};

/// As attention.cu.
const TILE: usize = 64;
const CHUNK_PAIRS: usize = 64;
const SPLIT_PAIRS: usize = 16;
const THREADS: u32 = 128;
/// Tiles in shared memory, where a block has more than one.
const STAGES: usize = 2;
/// Halves between rows in shared memory, or bytes.
const PAD: usize = 8;
const PAD_BYTES: usize = 16;
const HALF_BYTES: usize = 2;

/// A kernel has the same name in the images of all types of caches that it is made for.
pub struct Attentions {
    /// f16 and f32; merges of all.
    floats: Family,
    bf16: Family,
    q8_0: Family,
}

/// `Queries` of attention.cu.
#[repr(C)]
#[derive(Clone, Copy)]
struct Queries {
    values: u64,
    heads: i32,
    group: i32,
    scale: f32,
}

/// Device addresses of a plan, and how much of it there is at most: grids are made for these bounds, so that a captured
/// launch serves every plan within them.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct PlanAddress {
    /// Three counts: works, merges, chunks.
    pub counts: u64,
    pub works: u64,
    pub merges: u64,
    pub chunks: u64,
    pub works_max: u32,
    pub merges_max: u32,
    pub chunks_max: u32,
    /// Whether a split has more than one tile.
    pub long_splits: bool,
    /// Whether all rows of the step are merged.
    pub merges_all: bool,
    pub partial_sums: u64,
    pub partial_weights: u64,
}

/// Which kernels a shape gets: a matter of the model alone, never of the step.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Method {
    /// Tensor cores: tokens of an item of the split kernel, and of the chunk kernel.
    Tiles {
        split_tokens: usize,
        chunk_tokens: usize,
    },
    Plain,
}

impl Method {
    pub fn of(spec: &AttentionSpec, kind: KvType) -> Self {
        let group = spec.heads / spec.kv_heads.max(1);
        let tiles = kind != KvType::F32 && matches!(spec.head_dim, 64 | 96 | 128);
        if !tiles || group == 0 || group > SPLIT_PAIRS {
            return Self::Plain;
        }
        Self::Tiles { split_tokens: SPLIT_PAIRS / group, chunk_tokens: CHUNK_PAIRS / group }
    }
}

/// The operands of one call.
#[derive(Clone, Copy)]
pub struct Call<'a> {
    pub layer: KvLayerAddress,
    pub kind: KvType,
    pub spec: AttentionSpec,
    pub queries: View<'a, f32>,
    /// Block ids of all sequences.
    pub tables: View<'a, u32>,
}

/// How tile kernels hold keys and values in shared memory.
struct Stages {
    /// Of one tile, as it stands in the cache.
    bytes: usize,
    /// For a tile that is made into halves, in the chunk kernel.
    made_bytes: usize,
}

impl Stages {
    /// As halves.cuh and bytes.cuh.
    fn of(kind: KvType, head_dim: usize) -> Self {
        let halves = 2 * TILE * (head_dim + PAD) * HALF_BYTES;
        match kind {
            KvType::Q8_0 => {
                let bytes = 2 * TILE * (head_dim + PAD_BYTES + q8_scale_bytes(head_dim));
                Self { bytes, made_bytes: halves }
            }
            _ => Self { bytes: halves, made_bytes: 0 },
        }
    }
}

impl Attentions {
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

    /// Whether all rows of a plan are merged, and so can be rounded as well.
    pub(super) fn can_round(spec: &AttentionSpec, plan: &PlanAddress) -> bool {
        let width = spec.heads * spec.head_dim;
        plan.merges_all && TILE_COLS.is_multiple_of(spec.head_dim.max(1)) && width.is_multiple_of(TILE_COLS)
    }

    /// All rows of a plan.
    ///
    /// # Safety
    /// The plan stands at its addresses, its items name rows of `queries` and `out` and entries of `tables`, every block
    /// that they lead to up to the items' last positions is mapped memory of the shape that `layer` describes, and the
    /// partials have room for all of the plan.
    pub unsafe fn tiles(
        &self,
        stream: &Stream,
        call: &Call<'_>,
        plan: &PlanAddress,
        out: &mut ViewMut<'_, f32>,
        rounded: Option<Rounded<'_>>,
    ) -> Result<(), CudaError> {
        let Call { layer, kind, spec, .. } = *call;
        check(call, out)?;
        let width = spec.heads * spec.head_dim;
        let rows = out.len() / width.max(1);
        let panels = match &rounded {
            Some(rounded) => {
                expect("rounded rows that are not merged", usize::from(!Self::can_round(&spec, plan)), 0)?;
                rounded.address(rows, width)?
            }
            None => 0,
        };
        let pitch_bytes = (spec.head_dim + PAD) * HALF_BYTES;
        let shared = Stages::of(kind, spec.head_dim);
        let family = self.family(kind);
        let queries = queries(call);
        let tables = call.tables.address();
        let kv_heads = spec.kv_heads as u32;
        let PlanAddress { counts, works, merges, chunks, partial_sums, partial_weights, .. } = *plan;
        let (merge_count, chunk_count) = (counts + 4, counts + 8);
        if plan.works_max > 0 {
            let stages = if plan.long_splits { STAGES } else { 1 };
            let queries_and_weights = SPLIT_PAIRS * (pitch_bytes + (TILE + PAD) * HALF_BYTES);
            let shared_bytes = stages * shared.bytes + queries_and_weights;
            let launch = launch((plan.works_max, kv_heads, 1), shared_bytes);
            let stages = stages as i32;
            let kernel = family.kernel(match spec.head_dim {
                64 => c"attention_split_64",
                96 => c"attention_split_96",
                _ => c"attention_split_128",
            })?;
            // SAFETY: (KvLayer, Queries, const uint32_t *, const Work *, const uint32_t *, int, float *, float2 *), valid by this function's contract; shared memory as the kernel divides it.
            unsafe {
                kernel.launch(
                    stream,
                    launch,
                    arguments![layer, queries, tables, works, counts, stages, partial_sums, partial_weights],
                )?;
            }
            let (heads, dim, out) = (spec.heads as i32, spec.head_dim as i32, out.address());
            let names = [
                c"attention_merge",
                c"attention_merge_q8_0",
                c"attention_merge_q8_1",
                c"attention_merge_q8_k",
            ];
            let kernel = self.floats.kernel(kernel_name(rounded.as_ref(), names))?;
            if rounded.is_some() {
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
                            panels
                        ],
                    )?;
                }
            } else {
                let launch = self::launch((plan.merges_max, spec.heads as u32, 1), 0);
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
        if plan.chunks_max > 0 {
            let shared_bytes = STAGES * shared.bytes + shared.made_bytes + CHUNK_PAIRS * pitch_bytes;
            let launch = launch((plan.chunks_max, kv_heads, 1), shared_bytes);
            let out = out.address();
            let kernel = family.kernel(match spec.head_dim {
                64 => c"attention_chunk_64",
                96 => c"attention_chunk_96",
                _ => c"attention_chunk_128",
            })?;
            // SAFETY: (KvLayer, Queries, const uint32_t *, const Item *, const uint32_t *, float *), as above.
            unsafe {
                kernel.launch(
                    stream,
                    launch,
                    arguments![layer, queries, tables, chunks, chunk_count, out],
                )?;
            }
        }
        Ok(())
    }

    /// The first `positions.len()` rows, each with keys up to its position; its block ids start at `table_starts[r]`.
    ///
    /// # Safety
    /// As for [`Self::tiles`]: every block up to each row's position is mapped memory of the layer's shape.
    pub unsafe fn plain(
        &self,
        stream: &Stream,
        call: &Call<'_>,
        table_starts: View<'_, u32>,
        positions: View<'_, u32>,
        out: &mut ViewMut<'_, f32>,
    ) -> Result<(), CudaError> {
        let Call { layer, kind, spec, .. } = *call;
        check(call, out)?;
        let rows = positions.len();
        same("rows of attention", call.queries.len(), rows * spec.heads * spec.head_dim)?;
        if out.is_empty() {
            return Ok(());
        }
        let name = match kind {
            KvType::F32 => c"attention_plain_f32",
            KvType::F16 => c"attention_plain_f16",
            KvType::Bf16 => c"attention_plain_bf16",
            KvType::Q8_0 => c"attention_plain_q8_0",
        };
        let launch = launch((rows as u32, spec.heads as u32, 1), 2 * spec.head_dim * size_of::<f32>());
        let queries = queries(call);
        let (tables, starts, positions) =
            (call.tables.address(), table_starts.address(), positions.address());
        let (dim, out) = (spec.head_dim as i32, out.address());
        let kernel = self.family(kind).kernel(name)?;
        // SAFETY: (KvLayer, Queries, int, const uint32_t *, const uint32_t *, const uint32_t *, float *); shared memory for
        // two heads; the rest by this function's contract.
        unsafe {
            kernel.launch(stream, launch, arguments![layer, queries, dim, tables, starts, positions, out])
        }
    }
}

fn expect(what: &'static str, found: usize, expected: usize) -> Result<(), CudaError> {
    if found == expected { Ok(()) } else { Err(CudaError::Length { what, found, expected }) }
}

fn check(call: &Call<'_>, out: &ViewMut<'_, f32>) -> Result<(), CudaError> {
    same("output of attention", out.len(), call.queries.len())
}

fn queries(call: &Call<'_>) -> Queries {
    let spec = call.spec;
    Queries {
        values: call.queries.address(),
        heads: spec.heads as i32,
        group: (spec.heads / spec.kv_heads.max(1)) as i32,
        // Scores count in powers of two.
        scale: spec.scale * std::f32::consts::LOG2_E,
    }
}

fn launch(grid: (u32, u32, u32), shared_bytes: usize) -> Launch {
    Launch { grid, block: THREADS, shared_bytes: shared_bytes as u32, overlaps_predecessor: true }
}
