// SPDX-License-Identifier: Apache-2.0

//! [`Backend`]: the trait between models and kernels.
//!
//! A tensor is a row-major f32 matrix `[rows, cols]`. A model allocates it once, for the largest
//! step, and uses it with fewer rows. In every op, `rows` follows the operands; the op neither
//! reads nor writes rows beyond `rows`.
//!
//! Invariant I5: an output row depends on its own input row only, and in [`Backend::attention`] on
//! the keys of its sequence. It never depends on its batch neighbours. docs/ARCHITECTURE.md
//! describes the order of additions.

use std::ops::Range;

use crate::softmax::SoftmaxWeights;
use crate::{DrawParams, Experts, KvLayout, Linear, RopeSpec, Shortlist, Step, Weight, experts};

/// The result of [`Backend::argmax`] for a row without a finite maximum.
pub const NO_ARGMAX: u32 = u32::MAX;

/// Shape and scale of attention. Query head `h` reads KV head `h / (heads / kv_heads)`.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct AttentionSpec {
    pub heads: usize,
    pub kv_heads: usize,
    /// Values per head of queries, keys and values.
    pub head_dim: usize,
    /// Factor on `q . k`, usually `1 / sqrt(head_dim)`.
    pub scale: f32,
}

/// Factors of [`Activation::GeluTanh`]: `2 u = x * (GELU_LINEAR + GELU_CUBIC * x^2)`.
pub const GELU_LINEAR: f64 = 2.0 * 0.797_884_560_802_865_4;
pub const GELU_CUBIC: f64 = 0.044_715 * GELU_LINEAR;

/// The activation of a gated feed-forward layer.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Activation {
    /// `x * sigmoid(x)`.
    Silu,
    /// `x / 2 * (1 + tanh(u))` with `u = sqrt(2 / pi) * (x + 0.044715 x^3)`, which is `x *
    /// sigmoid(2 u)`.
    GeluTanh,
}

/// Why an op failed. The caller drops the step. After [`OpError::Device`] the process must end;
/// after the others it can continue.
#[derive(Debug, thiserror::Error)]
pub enum OpError {
    #[error("{op}: {what} is {found}, expected {expected}")]
    Shape { op: &'static str, what: &'static str, found: usize, expected: usize },
    #[error("{op}: {what} {index} is out of range: there are {len}")]
    Index { op: &'static str, what: &'static str, index: usize, len: usize },
    #[error("{op}: block {block} of the KV cache is read before it is written")]
    Unwritten { op: &'static str, block: usize },
    #[error("{op}: no kernel for tensor type {dtype}")]
    Type { op: &'static str, dtype: quant::DType },
    #[error("{op}: no kernel for {what}")]
    Unsupported { op: &'static str, what: &'static str },
    #[error("{op}: no kernel for weight layout {layout}")]
    Layout { op: &'static str, layout: u32 },
    #[error("{op}: out of memory: {bytes} bytes for {what}{}", of_which(*.bytes, *.free))]
    Memory {
        op: &'static str,
        what: &'static str,
        bytes: u64,
        /// Bytes that the device has free, if the backend can tell.
        free: Option<u64>,
    },
    #[error("{op}: device failure")]
    Device { op: &'static str, source: Box<dyn std::error::Error + Send + Sync> },
}

fn of_which(bytes: u64, free: Option<u64>) -> String {
    match free {
        Some(free) if free < bytes => format!(", of which {free} are free: {} are missing", bytes - free),
        Some(free) => format!(", which are refused although {free} are free"),
        None => String::new(),
    }
}

/// The operations of a model. A backend runs them in the order of the calls. The host sees results
/// only after [`Backend::read_rows`].
pub trait Backend: Sized + Send + 'static {
    /// The bytes of a weight as the backend addresses them. A clone is cheap and keeps the memory
    /// alive.
    type Data: Clone + Send + Sync;
    /// An activation matrix, f32.
    type Tensor: Send;
    /// The KV cache of all layers, in blocks.
    type Kv: Send;
    /// Rotation angles of one rotary position embedding, computed once.
    type Rope: Send;

    /// Whether a shortlist costs less than reading a whole row of logits. The sampler then calls
    /// [`Backend::shortlists`] first. False if rows are in host memory.
    const PREFERS_SHORTLISTS: bool;

    /// Allocates an uninitialised tensor of `[rows_max, cols]`.
    fn tensor(&mut self, rows_max: usize, cols: usize) -> Result<Self::Tensor, OpError>;

    /// Reserves address space for a KV cache. Blocks take memory when an op first writes them.
    fn kv(&mut self, layout: &KvLayout) -> Result<Self::Kv, OpError>;

    /// Bytes of memory that the KV cache takes now.
    fn kv_bytes(&self, kv: &Self::Kv) -> u64;

    /// Copies blocks from the first to the second of each pair, in order, for all layers of the
    /// block's group. Source blocks have been written.
    fn kv_copy(&mut self, kv: &mut Self::Kv, copies: &[(u32, u32)]) -> Result<(), OpError>;

    fn rope_table(&mut self, spec: &RopeSpec) -> Result<Self::Rope, OpError>;

    /// Copies the row data of a step. Ops refer to it until the next `begin`.
    fn begin(&mut self, step: &Step<'_>) -> Result<(), OpError>;

    /// `out[r] = table[tokens[r]]`, dequantized to f32.
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

    /// `x[r] *= factor`, each of `cols` values.
    fn scale(&mut self, x: &mut Self::Tensor, factor: f32, rows: usize, cols: usize) -> Result<(), OpError> {
        let mut values = vec![0.0; rows * cols];
        self.read(x, rows, &mut values)?;
        values.iter_mut().for_each(|value| *value *= factor);
        self.write(x, rows, &values)
    }

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

    /// Several linear layers of one input. A backend quantizes the input once and starts its
    /// threads once.
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

    /// Rounds keys and values to the cache's element type and writes them to the rows' KV slots of
    /// `layer`.
    fn kv_write(
        &mut self,
        kv: &mut Self::Kv,
        layer: usize,
        keys: &Self::Tensor,
        values: &Self::Tensor,
        rows: usize,
    ) -> Result<(), OpError>;

    /// Causal attention of each row over the keys of its sequence inside the layer's
    /// [`crate::AttentionSpan`]: positions `span.first_position(positions[r])..=positions[r]`. All
    /// keys come from the cache, since `kv_write` has written those of this step. The op does not
    /// read table entries of earlier blocks.
    fn attention(
        &mut self,
        kv: &Self::Kv,
        layer: usize,
        queries: &Self::Tensor,
        spec: &AttentionSpec,
        out: &mut Self::Tensor,
        rows: usize,
    ) -> Result<(), OpError>;

    /// `gate[r] = activation(gate[r]) * up[r]`.
    fn gated(
        &mut self,
        activation: Activation,
        gate: &mut Self::Tensor,
        up: &Self::Tensor,
        rows: usize,
    ) -> Result<(), OpError>;

    /// Matrix `index` of the stack `[n_in, n_out, experts]`, as a view without a copy.
    fn expert(&self, stack: &Weight<Self>, index: usize) -> Result<Weight<Self>, OpError>;

    /// Mixture of experts: softmax of the row's `router` logits over all experts, the best `used`
    /// of them (a tie goes to the lower index), their probabilities divided by their sum, and
    /// `out[r] = sum over j of probability_j * down_j(activation(gate_j x[r]) * up_j x[r])`, added
    /// in rank order.
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

    /// `out[i] = x[step.outputs[outputs.start + i]]`: gathers a range of the rows that need logits.
    fn gather_outputs(
        &mut self,
        x: &Self::Tensor,
        outputs: Range<usize>,
        out: &mut Self::Tensor,
    ) -> Result<(), OpError>;

    /// Sets `best[r]` to the column of the largest of the `cols` values of row r, the first among
    /// equals. It is [`NO_ARGMAX`] if the row contains a NaN or its largest value is infinite. The
    /// host receives one number per row instead of `cols`.
    fn argmax(
        &mut self,
        x: &Self::Tensor,
        rows: usize,
        cols: usize,
        best: &mut [u32],
    ) -> Result<(), OpError> {
        if best.len() != rows {
            let (found, expected) = (best.len(), rows);
            return Err(OpError::Shape { op: "argmax", what: "host slice", found, expected });
        }
        let mut values = vec![0.0; rows * cols];
        self.read(x, rows, &mut values)?;
        for (best, row) in best.iter_mut().zip(values.chunks_exact(cols.max(1))) {
            *best = finite_argmax(row);
        }
        Ok(())
    }

    /// Whether the next step may be enqueued before the tokens of this one are read. If true, the
    /// backend has [`Backend::start_draws`] for rows of `cols` values. The answer may change from
    /// step to step.
    fn may_run_ahead(&self, _cols: usize) -> bool {
        false
    }

    /// Enqueues the choice of a token for some outputs of a step. The first rows of `x` are the
    /// outputs `part` and have `cols` values. The token is the one that [`Backend::shortlists`]
    /// draws if the output's parameters have a uniform random number, else that of
    /// [`Backend::argmax`]. A row without a finite maximum gets [`NO_ARGMAX`].
    ///
    /// `draw_params` has an entry for every output of the step. The parts come in order, with the
    /// same parameters, and together are all outputs. [`Backend::finish_draws`] then reads the
    /// tokens. Until the first part of another step, steps may name them by
    /// [`crate::DRAWN_TOKEN`]. A row of a step whose token is [`NO_ARGMAX`] has undefined results.
    fn start_draws(
        &mut self,
        _x: &Self::Tensor,
        _cols: usize,
        _draw_params: &[DrawParams],
        _part: Range<usize>,
    ) -> Result<(), OpError> {
        Err(OpError::Unsupported { op: "start_draws", what: "tokens that stay on the device" })
    }

    /// Waits for the oldest tokens that were started and not finished. At most two are in flight.
    /// Returns whether the tokens were there already. An error other than one of the host's slice
    /// is [`OpError::Device`].
    fn finish_draws(&mut self, _tokens: &mut [u32]) -> Result<bool, OpError> {
        Err(OpError::Unsupported { op: "finish_draws", what: "tokens that stay on the device" })
    }

    /// Computes the shortlist of each of the first rows of `x`, which have `cols` values, with the
    /// row's entry of `draw_params`. The backend may leave a list empty; the caller then reads the
    /// row.
    fn shortlists(
        &mut self,
        x: &Self::Tensor,
        cols: usize,
        draw_params: &[DrawParams],
        lists: &mut [Shortlist],
    ) -> Result<(), OpError> {
        let rows = draw_params.len();
        if lists.len() != rows {
            let (found, expected) = (lists.len(), rows);
            return Err(OpError::Shape { op: "shortlists", what: "host slice", found, expected });
        }
        let mut values = vec![0.0; rows * cols];
        self.read(x, rows, &mut values)?;
        let mut weights = SoftmaxWeights::default();
        for ((list, params), row) in lists.iter_mut().zip(draw_params).zip(values.chunks_exact(cols.max(1))) {
            list.fill(row, params, &mut weights);
        }
        Ok(())
    }

    /// Releases the memory of blocks with numbers from `blocks` on, as far as the backend can. The
    /// caller writes such a block again before it reads the block; that write takes memory again.
    fn trim(&mut self, _kv: &mut Self::Kv, _blocks: usize) -> Result<(), OpError> {
        Ok(())
    }

    /// Sets the first `rows` rows from `host` (`rows * cols` values).
    fn write(&mut self, x: &mut Self::Tensor, rows: usize, host: &[f32]) -> Result<(), OpError>;

    /// Waits for all ops and copies a range of rows to `host` (`rows.len() * cols` values).
    fn read_rows(&mut self, x: &Self::Tensor, rows: Range<usize>, host: &mut [f32]) -> Result<(), OpError>;

    /// `read_rows` of the first `rows` rows.
    fn read(&mut self, x: &Self::Tensor, rows: usize, host: &mut [f32]) -> Result<(), OpError> {
        self.read_rows(x, 0..rows, host)
    }
}

/// The column of the largest value of a row, as [`Backend::argmax`] defines it.
pub fn finite_argmax(row: &[f32]) -> u32 {
    // The lanes have no branches, so that the compiler vectorizes them.
    const LANES: usize = 16;
    let mut lanes = [f32::NEG_INFINITY; LANES];
    let mut nan = false;
    let chunks = row.chunks_exact(LANES);
    let rest = chunks.remainder();
    for chunk in chunks {
        for (lane, &value) in lanes.iter_mut().zip(chunk) {
            *lane = if value > *lane { value } else { *lane };
            nan |= value.is_nan();
        }
    }
    nan |= rest.iter().any(|value| value.is_nan());
    let max = lanes.iter().chain(rest).copied().fold(f32::NEG_INFINITY, f32::max);
    if nan || !max.is_finite() {
        return NO_ARGMAX;
    }
    row.iter().position(|&value| value == max).map_or(NO_ARGMAX, |index| index as u32)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::Reference;

    #[test]
    fn memory_error_names_wanted_free_and_missing_bytes() {
        let text = |free| OpError::Memory { op: "kv", what: "keys and values", bytes: 100, free }.to_string();
        let told = [
            (None, ""),
            (Some(30), ", of which 30 are free: 70 are missing"),
            (Some(100), ", which are refused although 100 are free"),
        ];
        for (free, more) in told {
            assert_eq!(text(free), format!("kv: out of memory: 100 bytes for keys and values{more}"));
        }
    }

    #[test]
    fn argmax_is_the_first_maximum_and_absent_for_a_row_with_nan_or_infinity() {
        const INF: f32 = f32::INFINITY;
        let rows = [
            ([1.0, 5.0, 5.0, -1.0], 1),
            ([-2.0, -INF, -3.0, -2.0], 0),
            ([9.0, f32::NAN, 1.0, 2.0], NO_ARGMAX),
            ([9.0, 1.0, INF, 2.0], NO_ARGMAX),
            ([-INF; 4], NO_ARGMAX),
        ];
        let mut backend = Reference::new();
        let mut x = backend.tensor(rows.len(), 4).unwrap();
        backend.write(&mut x, rows.len(), &rows.map(|(row, _)| row).concat()).unwrap();
        let mut best = [7; 5];
        backend.argmax(&x, rows.len(), 4, &mut best).unwrap();
        assert_eq!(best, rows.map(|(_, best)| best));
        assert!(backend.argmax(&x, rows.len(), 4, &mut [0; 2]).is_err());
    }

    #[test]
    fn argmax_finds_every_column_of_a_long_row() {
        for len in [1, 15, 16, 17, 100] {
            for at in 0..len {
                let mut row = vec![-1.0; len];
                row[at] = 3.0;
                assert_eq!(finite_argmax(&row), at as u32, "of {len}");
                row[at] = f32::NAN;
                assert_eq!(finite_argmax(&row), NO_ARGMAX, "of {len}");
            }
        }
        assert_eq!(finite_argmax(&[]), NO_ARGMAX);
    }
}
