//! The trait between models and kernels.
//!
//! Shapes: a tensor is `[rows, cols]`, row-major f32, allocated once for the largest step and used with fewer rows.
//! `rows` is the first argument after the operands of every op; rows beyond it are neither read nor written.
//! Every output row depends only on its own input row (and, in [`Backend::attention`], on the keys before it), never
//! on which other rows share the step: invariant I5. DESIGN of the order of additions: docs/ARCHITECTURE.md.

use crate::{Experts, KvLayout, Linear, RopeSpec, Step, Weight, experts};

/// How attention scores are formed. Query head `h` reads kv head `h / (heads / kv_heads)`.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct AttentionSpec {
    pub heads: usize,
    pub kv_heads: usize,
    /// Values per head of queries, keys and values.
    pub head_dim: usize,
    /// Factor on `q . k`, usually `1 / sqrt(head_dim)`.
    pub scale: f32,
}

/// The activation of a gated feed-forward layer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Activation {
    /// `x * sigmoid(x)`.
    Silu,
}

/// Why an op could not be carried out. The step is lost, the process goes on unless `Device`.
#[derive(Debug, thiserror::Error)]
pub enum OpError {
    #[error("{op}: {what} is {found}, expected {expected}")]
    Shape { op: &'static str, what: &'static str, found: usize, expected: usize },
    #[error("{op}: {what} {index} is beyond the {len} there are")]
    Index { op: &'static str, what: &'static str, index: usize, len: usize },
    #[error("{op}: block {block} of the cache is read but was never written")]
    Unwritten { op: &'static str, block: usize },
    #[error("{op}: no kernel for tensor type {dtype}")]
    Type { op: &'static str, dtype: quant::DType },
    #[error("{op}: no kernel for weight layout {layout}")]
    Layout { op: &'static str, layout: u32 },
    #[error("{op}: out of memory: {bytes} bytes for {what}")]
    Memory { op: &'static str, what: &'static str, bytes: u64 },
    #[error("{op}: device failure")]
    Device { op: &'static str, source: Box<dyn std::error::Error + Send + Sync> },
}

/// The op vocabulary. Ops run in the order of the calls; results are visible to the host only after [`Backend::read`].
pub trait Backend: Sized + Send + 'static {
    /// A weight as the backend addresses it: cheap to clone, keeps its memory alive.
    type Data: Clone + Send + Sync;
    /// An activation matrix, f32.
    type Tensor: Send;
    /// Keys and values of all layers, in blocks.
    type Kv: Send;
    /// Angles of one rotary embedding, prepared once.
    type Rope: Send;

    /// An uninitialised `[rows_max, cols]` tensor.
    fn tensor(&mut self, rows_max: usize, cols: usize) -> Result<Self::Tensor, OpError>;

    /// Room for keys and values. Memory is reserved, and used as blocks are first written.
    fn kv(&mut self, layout: &KvLayout) -> Result<Self::Kv, OpError>;

    fn rope_table(&mut self, spec: &RopeSpec) -> Result<Self::Rope, OpError>;

    /// Takes over the row data of a step; the ops until the next `begin` refer to it.
    fn begin(&mut self, step: &Step<'_>) -> Result<(), OpError>;

    /// `out[r] = table[tokens[r]]`, dequantised to f32.
    fn embed(&mut self, table: &Weight<Self>, out: &mut Self::Tensor, rows: usize) -> Result<(), OpError>;

    /// `out[r] = x[r] / sqrt(mean(x[r]^2) + eps) * weight`.
    fn rms_norm(
        &mut self,
        x: &Self::Tensor,
        weight: &Weight<Self>,
        eps: f32,
        out: &mut Self::Tensor,
        rows: usize,
    ) -> Result<(), OpError>;

    /// `rms_norm` over each head of `head_dim = weight.dims[0]` values, in place.
    fn rms_norm_heads(
        &mut self,
        x: &mut Self::Tensor,
        weight: &Weight<Self>,
        eps: f32,
        rows: usize,
    ) -> Result<(), OpError>;

    /// `x[r] += y[r]`.
    fn add(&mut self, x: &mut Self::Tensor, y: &Self::Tensor, rows: usize) -> Result<(), OpError>;

    /// `x += y; out = rms_norm(x)`: the residual stream and the next block's norm in one pass.
    fn add_rms_norm(
        &mut self,
        x: &mut Self::Tensor,
        y: &Self::Tensor,
        weight: &Weight<Self>,
        eps: f32,
        out: &mut Self::Tensor,
        rows: usize,
    ) -> Result<(), OpError> {
        self.add(x, y, rows)?;
        self.rms_norm(x, weight, eps, out, rows)
    }

    /// `out[r] = weight x[r] (+ bias)`.
    fn linear(
        &mut self,
        layer: &Linear<Self>,
        x: &Self::Tensor,
        out: &mut Self::Tensor,
        rows: usize,
    ) -> Result<(), OpError>;

    /// Several linear layers of one input: the input is quantised once, the threads start once.
    fn linears(
        &mut self,
        x: &Self::Tensor,
        layers: &mut [(&Linear<Self>, &mut Self::Tensor)],
        rows: usize,
    ) -> Result<(), OpError> {
        for (layer, out) in layers {
            self.linear(layer, x, out, rows)?;
        }
        Ok(())
    }

    /// Rotates every head of `head_dim` values in place by the row's position.
    fn rope(
        &mut self,
        x: &mut Self::Tensor,
        rope: &Self::Rope,
        head_dim: usize,
        rows: usize,
    ) -> Result<(), OpError>;

    /// Rounds keys and values to the cache's type and stores them in the rows' KV slots of `layer`.
    fn kv_write(
        &mut self,
        kv: &mut Self::Kv,
        layer: usize,
        keys: &Self::Tensor,
        values: &Self::Tensor,
        rows: usize,
    ) -> Result<(), OpError>;

    /// Causal attention of every row over its sequence's keys at positions `0..=positions[r]`, all read from the cache
    /// (this step's keys were written by `kv_write` before).
    fn attention(
        &mut self,
        kv: &Self::Kv,
        layer: usize,
        queries: &Self::Tensor,
        spec: &AttentionSpec,
        out: &mut Self::Tensor,
        rows: usize,
    ) -> Result<(), OpError>;

    /// `out[r] = activation(gate[r]) * up[r]`.
    fn gated(
        &mut self,
        activation: Activation,
        gate: &Self::Tensor,
        up: &Self::Tensor,
        out: &mut Self::Tensor,
        rows: usize,
    ) -> Result<(), OpError>;

    /// Matrix `index` of the stack `[n_in, n_out, experts]`: a view, nothing is copied.
    fn expert(&self, stack: &Weight<Self>, index: usize) -> Result<Weight<Self>, OpError>;

    /// Mixture of experts: softmax of the row's `router` logits over all experts, the best `used` of them (a tie goes
    /// to the lower index), their probabilities divided by their sum, and
    /// `out[r] = sum over j of probability_j * down_j(activation(gate_j x[r]) * up_j x[r])`, added in rank order.
    fn experts(
        &mut self,
        layer: &Experts<Self>,
        activation: Activation,
        router: &Self::Tensor,
        x: &Self::Tensor,
        out: &mut Self::Tensor,
        rows: usize,
    ) -> Result<(), OpError> {
        experts::by_expert(self, layer, activation, router, x, out, rows)
    }

    /// `out[i] = x[step.outputs[i]]`: the rows whose logits are wanted.
    fn gather_outputs(&mut self, x: &Self::Tensor, out: &mut Self::Tensor) -> Result<(), OpError>;

    /// Sets the first `rows` rows from `host` (`rows * cols` values).
    fn write(&mut self, x: &mut Self::Tensor, rows: usize, host: &[f32]) -> Result<(), OpError>;

    /// Waits for all ops and copies the first `rows` rows to `host` (`rows * cols` values).
    fn read(&mut self, x: &Self::Tensor, rows: usize, host: &mut [f32]) -> Result<(), OpError>;
}
