// SPDX-License-Identifier: Apache-2.0

//! Counts a worker's device memory besides context, weights and KV cache, and predicts it for a
//! memory plan.

use ops::{AttentionSpan, KvLayer, KvLayout, KvType};
use quant::DType;

use super::experts::{PAIRS_MAX, scratch_bytes};
use super::plan::PARTIALS_MAX;
use super::recorder::GRAPHS_MAX;
use crate::cuda::attention_prefill::plan_shapes;
use crate::cuda::experts::PairGrouping;
use crate::cuda::quantize::ActivationLayout;
use crate::cuda::wgmma_experts;
use crate::cuda::wgmma_linear::can_take_f16_sums;

/// Bytes of a launch in a graph (measured on an H200).
const GRAPH_LAUNCH_BYTES: u64 = 512;
/// An allocation of 1 MiB or more takes whole units of this size. Smaller allocations share a unit.
const UNIT_BYTES: u64 = 2 << 20;
/// The code of all modules that a model loads, in the driver's unit (measured on an H200).
const MODULES_BYTES: u64 = UNIT_BYTES;
/// The driver allocates this for streams, events and the first launches, and does not count it
/// (measured on an H200).
pub(super) const DRIVER_BYTES: u64 = UNIT_BYTES;
/// Rows, block tables and attention plans of the current step, and the shortlists of its logits.
/// Each KV cache group has block tables.
const STEP_BYTES_OF_GROUP: u64 = 1 << 20;
/// The launches of one layer if norms, gates and merges also quantize, and the launches before and
/// after the layers.
const LAUNCHES_OF_LAYER: u64 = 9;
const LAUNCHES_AROUND: u64 = 8;

/// Bytes of device memory, by purpose.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct DeviceBytes {
    /// Activations and logits.
    pub tensors: u64,
    /// Quantized activations, partial results of attention, scratch memory of experts, rows of
    /// steps.
    pub scratch: u64,
    pub graphs: u64,
    /// Modules, and memory that the driver keeps for this process besides its context.
    pub modules: u64,
}

impl DeviceBytes {
    pub fn total(&self) -> u64 {
        self.tensors + self.scratch + self.graphs + self.modules
    }
}

/// All that decides how much memory a worker uses. `models::ModelDescription` and
/// `models::ForwardLimits` hold these values.
#[derive(Clone, Debug)]
pub struct CudaWorkerShape {
    pub layers: usize,
    pub embedding: usize,
    pub heads: usize,
    pub head_dim: usize,
    pub feed_forward: usize,
    /// 0 in dense models.
    pub experts: usize,
    pub experts_used: usize,
    pub rows_at_once: usize,
    /// Bytes of each tensor of activations or logits.
    pub tensors: Vec<u64>,
    /// The type of the KV cache and the span of each layer. A pair may occur once for many layers.
    pub kv_layers: Vec<(KvType, AttentionSpan)>,
    /// The types of the model's matrices, each once.
    pub dtypes: Vec<DType>,
}

/// Predicts [`super::Cuda::device_bytes`] after steps of all sizes.
pub fn predict_device_bytes(shape: &CudaWorkerShape) -> DeviceBytes {
    let rows = shape.rows_at_once;
    let width = shape.heads * shape.head_dim;
    let formats = shape.dtypes.iter().filter_map(|dtype| dtype.activation());
    let dense_tiles = |format: DType, cols: usize| {
        let takes = |&dtype: &DType| dtype.activation() == Some(format) && can_take_f16_sums(dtype, rows);
        let layout = ActivationLayout { format, f16_sums: shape.dtypes.iter().any(takes) };
        layout.bytes(rows, cols).unwrap_or(0)
    };
    let activation_tiles = |format: DType| match format {
        // F32 weights take rows without conversion.
        DType::F32 => 0,
        _ if shape.experts > 0 => {
            let pairs = expert_pairs(shape);
            let slots = PairGrouping::Skinny.slots(pairs, shape.experts);
            let takes = |&dtype: &DType| {
                dtype.activation() == Some(format)
                    && wgmma_experts::can_take_f16_sums(dtype, pairs, shape.experts)
            };
            let layout = ActivationLayout { format, f16_sums: shape.dtypes.iter().any(takes) };
            let expert_tiles = layout.bytes(slots, shape.embedding.max(shape.feed_forward));
            dense_tiles(format, shape.embedding.max(width)).max(expert_tiles.unwrap_or(0))
        }
        _ => dense_tiles(format, shape.embedding.max(width).max(shape.feed_forward)),
    };
    let activation_tiles = formats.map(activation_tiles).max().unwrap_or(0) as u64;
    let experts = match shape.experts {
        0 => 0,
        count => scratch_bytes(expert_pairs(shape), count, shape.feed_forward, shape.embedding) as u64,
    };
    let partials = PARTIALS_MAX as u64 * shape.heads as u64 * size_of::<f32>() as u64;
    let attention_plans = plan_shapes(&shape.kv_layers, shape.head_dim) as u64;
    let attention = attention_plans * (allocated(partials * shape.head_dim as u64) + allocated(2 * partials));
    let launches = LAUNCHES_OF_LAYER * shape.layers as u64 + LAUNCHES_AROUND;
    DeviceBytes {
        tensors: shape.tensors.iter().map(|&bytes| allocated(bytes)).sum(),
        scratch: allocated(activation_tiles)
            + allocated(experts)
            + attention
            + count_groups(shape) * STEP_BYTES_OF_GROUP,
        // Those of whole steps, and those of steps in two parts.
        graphs: graph_bytes(2 * GRAPHS_MAX as u64 * launches),
        modules: MODULES_BYTES + DRIVER_BYTES,
    }
}

/// The number of KV cache groups, at least 1.
fn count_groups(shape: &CudaWorkerShape) -> u64 {
    let layer = |&(kind, span): &(KvType, AttentionSpan)| KvLayer {
        kv_heads: 1,
        head_dim: shape.head_dim,
        kind,
        span,
    };
    let layers = shape.kv_layers.iter().map(layer).collect();
    KvLayout { block_tokens: 1, blocks: 0, layers }.groups().len().max(1) as u64
}

fn expert_pairs(shape: &CudaWorkerShape) -> usize {
    let used = shape.experts_used.max(1);
    (PAIRS_MAX / used).clamp(1, shape.rows_at_once.max(1)) * used
}

/// Bytes of graphs, from their number of launches. They are not measured during a capture, because
/// other processes may also take device memory at that time.
pub(super) fn graph_bytes(launches: u64) -> u64 {
    (launches * GRAPH_LAUNCH_BYTES).next_multiple_of(UNIT_BYTES)
}

/// Bytes of device memory that an allocation of `bytes` takes.
pub(super) fn allocated(bytes: u64) -> u64 {
    if bytes < UNIT_BYTES / 2 { bytes } else { bytes.next_multiple_of(UNIT_BYTES) }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The shape of an 8B model as Q4_K_M. `outputs` is `ForwardLimits::outputs_at_once`.
    fn shape(rows_at_once: usize, outputs: u64, feed_forward: usize, vocabulary: u64) -> CudaWorkerShape {
        let wide = feed_forward as u64;
        let widths = [4096, 4096, 4096, 4096, 1024, 1024, 4096, wide, wide];
        let rows = widths.map(|width| 4 * width * rows_at_once as u64);
        let outputs = [4096, vocabulary].map(|width| 4 * width * outputs);
        CudaWorkerShape {
            layers: 36,
            embedding: 4096,
            heads: 32,
            head_dim: 128,
            feed_forward,
            experts: 0,
            experts_used: 0,
            rows_at_once,
            kv_layers: vec![(KvType::F16, AttentionSpan::Full)],
            tensors: rows.into_iter().chain(outputs).collect(),
            dtypes: vec![DType::Q4_K, DType::Q6_K],
        }
    }

    #[test]
    fn layers_whose_spans_or_prefill_kernels_differ_have_partial_results_of_their_own() {
        let scratch = |kv_layers: &[(KvType, AttentionSpan)]| {
            let shape = CudaWorkerShape { kv_layers: kv_layers.to_vec(), ..shape(128, 16, 12_288, 151_936) };
            predict_device_bytes(&shape).scratch
        };
        let [full, window] = [AttentionSpan::Full, AttentionSpan::Window { tokens: 512 }];
        let one = scratch(&[(KvType::Q8_0, full); 36]);
        assert_eq!(scratch(&[(KvType::F16, full), (KvType::Bf16, full)]), one);
        // 1,024 partial results of 32 heads, and their weights.
        let more = (16 << 20) + (256 << 10);
        assert_eq!(scratch(&[(KvType::F16, full), (KvType::Q8_0, full)]), one + more);
        // The window also makes a second group.
        let window = scratch(&[(KvType::F16, full), (KvType::F16, window)]);
        assert_eq!(window, one + more + (1 << 20));
    }

    /// `worker::reservation::GPU_DRAFT_WORKSPACE_BYTES` is reserved without a model. A draft model
    /// has tensors of its own, and uses the rest of the memory that the model has.
    #[test]
    fn a_draft_model_of_0_6b_fits_in_what_is_reserved_for_it() {
        let rows = [1024, 1024, 2048, 2048, 1024, 1024, 1024, 3072, 3072].map(|width| 4 * width * 1024);
        let outputs = [1024, 151_936].map(|width| 4 * width * 64);
        let tensors = rows.into_iter().chain(outputs).collect();
        let draft = CudaWorkerShape { tensors, ..shape(1024, 64, 3072, 151_936) };
        assert!(predict_device_bytes(&draft).tensors <= 104 << 20);
    }

    #[test]
    fn a_second_worker_costs_little() {
        // `worker::reservation::GPU_WORKSPACE_BYTES`, reserved without a model, is 290 MiB.
        let qwen3 = (12_288, 151_936, [68, 290]);
        let llama3 = (14_336, 128_256, [72, 308]);
        for (feed_forward, vocabulary, allowed_mib) in [qwen3, llama3] {
            for ((rows, outputs), mib) in [(128, 16), (1024, 64)].into_iter().zip(allowed_mib) {
                let bytes = predict_device_bytes(&shape(rows, outputs, feed_forward, vocabulary));
                assert!(bytes.total() <= mib << 20, "{rows} rows: {bytes:?} is {}", bytes.total());
            }
        }
    }
}
