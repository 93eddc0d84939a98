// SPDX-License-Identifier: Apache-2.0

//! [`Model`]: the interface between the engine and a model. [`ModelDescription`]: the facts of a
//! model file.

use crate::pooling::Pooling;
use crate::{ModelConfigError, WeightError};
use ops::{AttentionSpan, Backend, KvLayer, KvTypes, OpError, Step};
use std::ops::Range;

/// Least and most rows of a small step that pass through the model together. Fewer rows do not fill
/// a large GPU.
const SMALL_STEP_ROWS: (usize, usize) = (128, 512);
/// Steps of at least this many rows shall be fast; smaller steps shall need little memory.
const LARGE_STEP_MIN: usize = 2048;
/// Most rows of a large step that pass through the model together. In a mixture of experts, each
/// expert gets a part of the rows, so more rows fill the device better (decision 0006).
const LARGE_STEP_ROWS: usize = 1024;
const LARGE_STEP_ROWS_OF_EXPERTS: usize = 2048;
/// Bytes of logits computed together. This is the bound of a small workspace.
const LOGITS_BYTES_MIN: usize = 10 << 20;
/// A workspace for 512 rows has room for the logits of a decode batch of 64 with a vocabulary of
/// 150,000. The batch then reads the output weights once, not four times.
const LOGITS_BYTES_PER_ROW: usize = 80 << 10;
/// Rows beyond [`LOGITS_BYTES_MIN`] are given only up to this number.
const LOGITS_ROWS: usize = 64;
/// Kernels multiply this many rows together.
const ROWS_TOGETHER: usize = 8;

/// Largest step of a model. [`crate::build`] allocates activations once, for [`Self::rows_at_once`]
/// rows.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ForwardLimits {
    /// Rows (tokens) of one step.
    pub rows_max: usize,
    /// Rows of one step that need logits.
    pub outputs_max: usize,
}

impl ForwardLimits {
    /// Rows of a step that pass through a model with this number of experts together. A step of
    /// more rows is computed in several passes. A quarter of a small step, so that activations take
    /// a quarter of the memory.
    pub fn rows_at_once(self, experts: usize) -> usize {
        let rows = match (self.rows_max, experts) {
            (..LARGE_STEP_MIN, _) => {
                let (least, most) = SMALL_STEP_ROWS;
                (self.rows_max / 4).clamp(least, most)
            }
            (_, 0) => LARGE_STEP_ROWS,
            _ => LARGE_STEP_ROWS_OF_EXPERTS,
        };
        rows.min(self.rows_max)
    }

    /// Rows whose logits are computed together.
    pub fn outputs_at_once(self, vocab_size: usize, experts: usize) -> usize {
        let rows_in = |bytes: usize| bytes / (size_of::<f32>() * vocab_size.max(1));
        let fit = rows_in(LOGITS_BYTES_PER_ROW * self.rows_at_once(experts)).min(LOGITS_ROWS);
        let fit = fit.max(rows_in(LOGITS_BYTES_MIN));
        let whole = if fit > ROWS_TOGETHER { fit - fit % ROWS_TOGETHER } else { fit.max(1) };
        whole.min(self.outputs_max).min(self.rows_at_once(experts))
    }
}

/// What a model computes for an output of a step.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum OutputKind {
    #[default]
    Logits,
    /// The residual stream after the output norm.
    HiddenState,
    /// The result of the classifier, one value for each of its labels.
    Labels,
}

/// Callback that receives the rows of a range of outputs, which have one kind. Row i of the tensor
/// belongs to output `start + i` of the step.
pub type TakeOutputs<'a, B> =
    dyn FnMut(&mut B, Range<usize>, &<B as Backend>::Tensor) -> Result<(), OpError> + 'a;

/// A model ready to run.
pub trait Model<B: Backend>: Send {
    fn vocab_size(&self) -> usize;

    /// Context length that the model was trained for, in tokens.
    fn context_length(&self) -> usize;

    /// The KV cache layers of the model, with keys and values stored as `types`.
    fn kv_layers(&self, types: &KvTypes) -> Vec<KvLayer>;

    /// Copies blocks of the KV cache before the next step.
    fn copy_blocks(&mut self, backend: &mut B, kv: &mut B::Kv, copies: &[(u32, u32)]) -> Result<(), OpError> {
        backend.kv_copy(kv, copies)
    }

    /// Values in a row of this kind. 0 for labels if the model has no classifier.
    fn output_width(&self, kind: OutputKind) -> usize;

    /// Computes one step and passes the rows of `step.outputs` to `take`, in order, a range at a
    /// time. `kinds` has the kind of each output; outputs behind its end are logits. Rows pass
    /// through the model in several ranges, so a row must not read what a later row writes. Causal
    /// attention never does.
    fn forward(
        &mut self,
        backend: &mut B,
        kv: &mut B::Kv,
        step: &Step<'_>,
        kinds: &[OutputKind],
        take: &mut TakeOutputs<'_, B>,
    ) -> Result<(), OpError>;
}

/// The facts of a model that the head of its file contains.
#[derive(Clone, Debug, PartialEq)]
pub struct ModelDescription {
    /// `general.architecture`.
    pub architecture: String,
    pub vocab_size: usize,
    pub context_length: usize,
    pub embedding_length: usize,
    pub layers: usize,
    pub heads: usize,
    pub kv_heads: usize,
    /// Values per head of queries, keys and values.
    pub head_dim: usize,
    /// Attention span of each layer.
    pub attention_spans: Vec<AttentionSpan>,
    /// Hidden width of the feed-forward block, or of one expert.
    pub feed_forward: usize,
    /// Experts per layer, and experts that a row passes through. Both are 0 in dense models.
    pub experts: usize,
    pub experts_used: usize,
    /// How the file says that hidden states become an embedding or a score.
    pub pooling: Option<Pooling>,
    /// Widths of the f32 activation tensors: first of those with one row per row computed together,
    /// then of those with one row per output computed together.
    pub workspace_row_widths: Vec<usize>,
    pub workspace_output_widths: Vec<usize>,
    /// Names of tensors in the file that the architecture does not read.
    pub unread_tensors: Vec<String>,
}

impl ModelDescription {
    /// The cache it needs, layer by layer, when keys and values are stored as `types`.
    pub fn kv_layers(&self, types: &KvTypes) -> Vec<KvLayer> {
        kv_layers(&self.attention_spans, self.kv_heads, self.head_dim, types)
    }

    /// Bytes of each activation tensor of a model built with `limits`.
    pub fn workspace_tensors(&self, limits: ForwardLimits) -> impl Iterator<Item = u64> {
        let of = |widths: &[usize], rows: usize| {
            let bytes = move |&width: &usize| (width * rows * size_of::<f32>()) as u64;
            widths.iter().map(bytes).collect::<Vec<_>>()
        };
        let rows = of(&self.workspace_row_widths, limits.rows_at_once(self.experts));
        let outputs =
            of(&self.workspace_output_widths, limits.outputs_at_once(self.vocab_size, self.experts));
        rows.into_iter().chain(outputs)
    }

    /// Bytes of the logits tensor, which is part of the workspace.
    pub fn logits_bytes(&self, limits: ForwardLimits) -> u64 {
        (limits.outputs_at_once(self.vocab_size, self.experts) * self.vocab_size * size_of::<f32>()) as u64
    }
}

/// KV cache layers of one shape that differ in attention span and element type.
pub(crate) fn kv_layers(
    attention_spans: &[AttentionSpan],
    kv_heads: usize,
    head_dim: usize,
    types: &KvTypes,
) -> Vec<KvLayer> {
    let layer = |(layer, &span)| KvLayer { kv_heads, head_dim, kind: types.of(layer), span };
    attention_spans.iter().enumerate().map(layer).collect()
}

/// Why a model cannot be built.
#[derive(Debug, thiserror::Error)]
pub enum BuildModelError {
    #[error("architecture {found:?} is not supported; known are {}", known.join(", "))]
    UnknownArchitecture { found: String, known: Vec<&'static str> },
    #[error("model metadata refused")]
    Config(#[from] ModelConfigError),
    #[error("model tensors refused")]
    Weights(#[from] WeightError),
    #[error("value {index} of tensor rope_freqs.weight is {value}: not a positive number")]
    RopeFactor { index: usize, value: f32 },
    #[error("backend cannot hold the model")]
    Backend(#[from] OpError),
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn large_steps_are_computed_in_few_passes_and_small_ones_in_little_memory() {
        let at_once = |rows_max, experts| ForwardLimits { rows_max, outputs_max: 80 }.rows_at_once(experts);
        let of_steps =
            |experts| [1, 100, 300, 512, 1024, 2047, 2048, 8192].map(|rows| at_once(rows, experts));
        assert_eq!(of_steps(0), [1, 100, 128, 128, 256, 511, 1024, 1024]);
        assert_eq!(of_steps(128), [1, 100, 128, 128, 256, 511, 2048, 2048]);
    }
}
