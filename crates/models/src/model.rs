//! [`Model`]: what the engine sees of a model, and why one could not be built.

use crate::{ConfigError, WeightError};
use ops::{Backend, KvLayer, KvType, OpError, Step};

/// How large a step may be. Memory for activations is taken once, at build.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Limits {
    /// Rows (tokens) of one step.
    pub rows_max: usize,
    /// Rows of one step whose logits are wanted.
    pub outputs_max: usize,
}

/// A model ready to run.
pub trait Model<B: Backend>: Send {
    fn vocab_size(&self) -> usize;

    /// Tokens that the model was trained to see at once.
    fn context_length(&self) -> usize;

    /// The cache it needs, layer by layer, when keys and values are stored as `kind`.
    fn kv_layers(&self, kind: KvType) -> Vec<KvLayer>;

    /// Runs one step and returns the logits: row `i` belongs to row `step.outputs[i]`.
    fn forward(&mut self, backend: &mut B, kv: &mut B::Kv, step: &Step<'_>) -> Result<&B::Tensor, OpError>;
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
    /// Experts per layer; 0 in dense models.
    pub experts: usize,
    /// f32 values that activations need: for each row of a step, and for each row whose logits are wanted.
    pub workspace_row_values: usize,
    pub workspace_output_values: usize,
    /// Tensors of the file that this architecture does not read.
    pub unread_tensors: Vec<String>,
}

impl ModelDescription {
    /// The cache it needs, layer by layer, when keys and values are stored as `kind`.
    pub fn kv_layers(&self, kind: KvType) -> Vec<KvLayer> {
        vec![KvLayer { kv_heads: self.kv_heads, head_dim: self.head_dim, kind }; self.layers]
    }

    /// Bytes of the activation memory that a model built with `limits` takes.
    pub fn workspace_bytes(&self, limits: Limits) -> u64 {
        let values = self.workspace_row_values as u64 * limits.rows_max as u64
            + self.workspace_output_values as u64 * limits.outputs_max as u64;
        values * size_of::<f32>() as u64
    }
}

/// Why a model could not be built.
#[derive(Debug, thiserror::Error)]
pub enum BuildModelError {
    #[error("architecture {found:?} is not supported; known are {}", known.join(", "))]
    UnknownArchitecture { found: String, known: Vec<&'static str> },
    #[error("model metadata refused")]
    Config(#[from] ConfigError),
    #[error("model tensors refused")]
    Weights(#[from] WeightError),
    #[error("value {index} of tensor rope_freqs.weight is {value}: not a positive number")]
    RopeFactor { index: usize, value: f32 },
    #[error("backend cannot hold the model")]
    Backend(#[from] OpError),
}
