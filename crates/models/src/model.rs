//! [`Model`]: what the engine sees of a model, and why one could not be built.

use crate::{ModelConfigError, WeightError};
use ops::{AttentionSpan, Backend, KvLayer, KvTypes, OpError, Step};
use std::ops::Range;

/// Rows computed at once: fewer do not fill a large GPU, more need memory and make nothing faster.
const ROWS_AT_ONCE: (usize, usize) = (128, 512);
/// Logits computed at once: with a vocabulary of 150,000, 16 rows.
const LOGITS_BYTES_MAX: usize = 10 << 20;
/// Kernels multiply so many rows together.
const ROWS_TOGETHER: usize = 8;

/// How large a step may be. Memory for activations is taken once, at build: for as many rows as are
/// computed at once.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ModelLimits {
    /// Rows (tokens) of one step.
    pub rows_max: usize,
    /// Rows of one step whose logits are wanted.
    pub outputs_max: usize,
}

impl ModelLimits {
    /// Rows of a step that go through the model together; the next ones follow them. A quarter of
    /// the largest step, so that activations stay a fraction of what a step of this size would
    /// need.
    pub fn rows_at_once(self) -> usize {
        let (least, most) = ROWS_AT_ONCE;
        (self.rows_max / 4).clamp(least, most).min(self.rows_max)
    }

    /// Rows whose logits are computed together.
    pub fn outputs_at_once(self, vocab_size: usize) -> usize {
        let fit = LOGITS_BYTES_MAX / (size_of::<f32>() * vocab_size.max(1));
        let whole = if fit > ROWS_TOGETHER { fit - fit % ROWS_TOGETHER } else { fit.max(1) };
        whole.min(self.outputs_max).min(self.rows_at_once())
    }
}

/// Called with the logits of a run of the wanted rows: row i of the tensor belongs to output `start
/// + i` of the step.
pub type TakeLogits<'a, B> =
    dyn FnMut(&mut B, Range<usize>, &<B as Backend>::Tensor) -> Result<(), OpError> + 'a;

/// A model ready to run.
pub trait Model<B: Backend>: Send {
    fn vocab_size(&self) -> usize;

    /// Tokens that the model was trained to see at once.
    fn context_length(&self) -> usize;

    /// The cache it needs, layer by layer, when keys and values are stored as `types`.
    fn kv_layers(&self, types: &KvTypes) -> Vec<KvLayer>;

    /// Copies what the cache holds for blocks of tokens, before the next step.
    fn copy_blocks(&mut self, backend: &mut B, kv: &mut B::Kv, copies: &[(u32, u32)]) -> Result<(), OpError> {
        backend.kv_copy(kv, copies)
    }

    /// Runs one step, and hands out the logits of `step.outputs` in order, a run at a time. Rows go
    /// through the model in runs too, so none may look at what a later row of the step writes:
    /// inside a sequence none does.
    fn forward(
        &mut self,
        backend: &mut B,
        kv: &mut B::Kv,
        step: &Step<'_>,
        take: &mut TakeLogits<'_, B>,
    ) -> Result<(), OpError>;
}

/// What can be said of a model from the head of its file.
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
    /// Which part of the past each layer sees.
    pub attention_spans: Vec<AttentionSpan>,
    /// Width inside the feed-forward block, or inside one expert.
    pub feed_forward: usize,
    /// Experts per layer, and those that a row goes through; 0 in dense models.
    pub experts: usize,
    pub experts_used: usize,
    /// Widths of the f32 tensors that activations need: of those with a row for each row computed
    /// at once, and of those with one for each of these whose logits are wanted.
    pub workspace_row_widths: Vec<usize>,
    pub workspace_output_widths: Vec<usize>,
    /// Tensors of the file that this architecture does not read.
    pub unread_tensors: Vec<String>,
}

impl ModelDescription {
    /// The cache it needs, layer by layer, when keys and values are stored as `types`.
    pub fn kv_layers(&self, types: &KvTypes) -> Vec<KvLayer> {
        kv_layers(&self.attention_spans, self.kv_heads, self.head_dim, types)
    }

    /// Bytes of each activation tensor of a model built with `limits`.
    pub fn workspace_tensors(&self, limits: ModelLimits) -> impl Iterator<Item = u64> {
        let of = |widths: &[usize], rows: usize| {
            let bytes = move |&width: &usize| (width * rows * size_of::<f32>()) as u64;
            widths.iter().map(bytes).collect::<Vec<_>>()
        };
        let rows = of(&self.workspace_row_widths, limits.rows_at_once());
        let outputs = of(&self.workspace_output_widths, limits.outputs_at_once(self.vocab_size));
        rows.into_iter().chain(outputs)
    }

    /// The part of it that holds logits.
    pub fn logits_bytes(&self, limits: ModelLimits) -> u64 {
        (limits.outputs_at_once(self.vocab_size) * self.vocab_size * size_of::<f32>()) as u64
    }
}

/// The cache of layers that differ in what they see of the past and in the type of what they store.
pub(crate) fn kv_layers(
    attention_spans: &[AttentionSpan],
    kv_heads: usize,
    head_dim: usize,
    types: &KvTypes,
) -> Vec<KvLayer> {
    let layer = |(layer, &span)| KvLayer { kv_heads, head_dim, kind: types.of(layer), span };
    attention_spans.iter().enumerate().map(layer).collect()
}

/// Why a model could not be built.
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
