// SPDX-License-Identifier: Apache-2.0

//! Predicts the memory of [`Cpu`](super::Cpu) besides tensors and KV caches: its buffers, which
//! grow to the size that the largest step needs.

use super::{attention, product};
use quant::DType;

/// The properties of a worker that determine the size of its buffers.
#[derive(Clone, Debug)]
pub struct CpuWorkerShape {
    pub threads: usize,
    /// Rows of a step that pass through the model together.
    pub rows_at_once: usize,
    /// Largest number of tokens that a row attends to.
    pub context_tokens: usize,
    pub embedding: usize,
    pub heads: usize,
    pub kv_heads: usize,
    pub head_dim: usize,
    /// Hidden width of the feed-forward block, or of one expert.
    pub feed_forward: usize,
    /// Experts per layer, and experts that a row passes through. Both are 0 in dense models.
    pub experts: usize,
    pub experts_used: usize,
    /// The types of the model's tensors, each once.
    pub dtypes: Vec<DType>,
}

/// Bytes of all buffers.
pub fn predict_host_bytes(shape: &CpuWorkerShape) -> u64 {
    let widest = shape.embedding.max(shape.heads * shape.head_dim).max(shape.feed_forward);
    // Cosines and sines of the pairs of a head.
    let angles = shape.rows_at_once * shape.head_dim;
    let floats = size_of::<f32>() * (angles + shape.expert_values());
    let product = product::kept_bytes(shape.rows_at_once, widest, shape.threads, &shape.dtypes);
    (product + attention::kept_bytes(shape) + floats) as u64
}

impl CpuWorkerShape {
    /// Values that `ops::Backend::experts` allocates while it runs: the rows gathered for an
    /// expert, its tensors and outputs, and the contribution of each expert to each row.
    fn expert_values(&self) -> usize {
        if self.experts == 0 {
            return 0;
        }
        let of_row = self.experts + (6 + self.experts_used) * self.embedding + 3 * self.feed_forward;
        self.rows_at_once * of_row
    }
}
