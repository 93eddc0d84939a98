//! What [`Cpu`](super::Cpu) comes to keep beside tensors and caches, worked out from a model's widths: its buffers grow to
//! what the largest step needs of them.

use super::{attention, product};
use quant::DType;

/// What a worker computes with.
#[derive(Clone, Debug)]
pub struct CpuWorkerShape {
    pub threads: usize,
    /// Rows of a step that go through the model together.
    pub rows_at_once: usize,
    /// Tokens that a row sees at most.
    pub context_tokens: usize,
    pub embedding: usize,
    pub heads: usize,
    pub kv_heads: usize,
    pub head_dim: usize,
    /// Of the feed-forward block, or of one expert.
    pub feed_forward: usize,
    /// Of a layer, and those that a row goes through; 0 in dense models.
    pub experts: usize,
    pub experts_used: usize,
    /// Of the tensors, each once.
    pub dtypes: Vec<DType>,
}

/// In bytes.
pub fn predict_host_bytes(shape: &CpuWorkerShape) -> u64 {
    let widest = shape.embedding.max(shape.heads * shape.head_dim).max(shape.feed_forward);
    // Cosines and sines of the pairs of a head.
    let angles = shape.rows_at_once * shape.head_dim;
    let floats = size_of::<f32>() * (angles + shape.expert_values());
    let product = product::kept_bytes(shape.rows_at_once, widest, shape.threads, &shape.dtypes);
    (product + attention::kept_bytes(shape) + floats) as u64
}

impl CpuWorkerShape {
    /// What `ops::Backend::experts` takes while it runs: rows gathered for an expert and what it makes of them, its tensors, and
    /// a contribution of each expert to each row.
    fn expert_values(&self) -> usize {
        if self.experts == 0 {
            return 0;
        }
        let of_row = self.experts + (6 + self.experts_used) * self.embedding + 3 * self.feed_forward;
        self.rows_at_once * of_row
    }
}
