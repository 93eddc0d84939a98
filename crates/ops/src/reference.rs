// SPDX-License-Identifier: Apache-2.0

//! [`Reference`]: the backend that tests compare kernels with. Plain loops and f64 sums, no SIMD,
//! no threads.
//!
//! It computes products with quantized weights in one of two ways:
//!
//! 1. [`Reference::new`] rounds activations to int8 blocks first, as the kernels do.
//! 2. [`Reference::dequantized`] decodes the weights to f32 and does not round activations.
//!
//! New tensors and cache blocks are filled with NaN, so that a read before a write shows in the
//! result.

mod cache;
mod host_tensor;
mod rows;
mod weights;

use crate::{
    Activation, AttentionSpec, Backend, DRAWN_TOKEN, DrawParams, GELU_CUBIC, GELU_LINEAR, KvLayout, Linear,
    NO_ARGMAX, OpError, RopePairing, RopeSpec, Shortlist, Step, Weight,
};
use bytes::Bytes;
use rows::ReferenceStep;
use std::collections::VecDeque;
use std::ops::Range;

pub use cache::HostKv;
pub use host_tensor::HostTensor;

/// The scalar backend.
#[derive(Debug, Default)]
pub struct Reference {
    dequantize: bool,
    runs_ahead: bool,
    step: ReferenceStep,
    /// Tokens that were chosen and not read yet.
    unread: VecDeque<Vec<u32>>,
    /// Those that were chosen last.
    drawn: Vec<u32>,
}

impl Reference {
    /// Activations are rounded to int8 blocks before they meet quantized weights, and to the
    /// weights' type before they meet F16 and BF16.
    pub fn new() -> Self {
        Self::default()
    }

    /// Weights are decoded to f32 and activations not rounded.
    pub fn dequantized() -> Self {
        Self { dequantize: true, ..Self::default() }
    }

    /// Lets the caller compute a step before it reads the tokens of the step before, as on a GPU.
    pub fn running_ahead(self) -> Self {
        Self { runs_ahead: true, ..self }
    }

    /// The token that an entry of [`Step::tokens`] stands for.
    pub fn token(&self, token: u32) -> u32 {
        match token & DRAWN_TOKEN {
            0 => token,
            _ => self.drawn.get((token & !DRAWN_TOKEN) as usize).copied().unwrap_or(NO_ARGMAX),
        }
    }
}

impl Backend for Reference {
    type Data = Bytes;
    type Tensor = HostTensor;
    type Kv = HostKv;
    type Rope = RopeSpec;

    // True as on a GPU, so that tests of the engine cover sampling from shortlists.
    const PREFERS_SHORTLISTS: bool = true;

    fn tensor(&mut self, rows_max: usize, cols: usize) -> Result<HostTensor, OpError> {
        Ok(HostTensor::new(rows_max, cols))
    }

    fn kv(&mut self, layout: &KvLayout) -> Result<HostKv, OpError> {
        HostKv::new(layout)
    }

    fn kv_bytes(&self, kv: &HostKv) -> u64 {
        kv.bytes()
    }

    fn trim(&mut self, kv: &mut HostKv, blocks: usize) -> Result<(), OpError> {
        kv.trim(blocks);
        Ok(())
    }

    fn kv_copy(&mut self, kv: &mut HostKv, copies: &[(u32, u32)]) -> Result<(), OpError> {
        copies.iter().try_for_each(|&(from, to)| kv.copy(from as usize, to as usize))
    }

    fn rope_table(&mut self, spec: &RopeSpec) -> Result<RopeSpec, OpError> {
        Ok(spec.clone())
    }

    fn begin(&mut self, step: &Step<'_>) -> Result<(), OpError> {
        self.step = ReferenceStep::new(step)?;
        Ok(())
    }

    fn embed(&mut self, table: &Weight<Self>, out: &mut HostTensor, rows: usize) -> Result<(), OpError> {
        const OP: &str = "embed";
        self.step.check(OP, rows)?;
        out.check(OP, "columns of out", rows, table.cols())?;
        for (r, &token) in self.step.tokens.iter().enumerate() {
            match self.token(token) {
                NO_ARGMAX => out.row_mut(r).fill(f32::NAN),
                token => {
                    let bytes = weights::row(OP, "token", table, token as usize)?;
                    weights::decode(OP, table.dtype, bytes, out.row_mut(r))?;
                }
            }
        }
        Ok(())
    }

    fn rms_norm(
        &mut self,
        x: &HostTensor,
        weight: &Weight<Self>,
        eps: f32,
        out: &mut HostTensor,
        rows: usize,
    ) -> Result<(), OpError> {
        const OP: &str = "rms_norm";
        let weight = weights::vector(OP, weight)?;
        x.check(OP, "columns of x", rows, weight.len())?;
        out.check(OP, "columns of out", rows, weight.len())?;
        for r in 0..rows {
            out.row_mut(r).copy_from_slice(x.row(r));
            normalise(out.row_mut(r), &weight, eps);
        }
        Ok(())
    }

    fn rms_norm_heads(
        &mut self,
        x: &mut HostTensor,
        weight: &Weight<Self>,
        eps: f32,
        rows: usize,
    ) -> Result<(), OpError> {
        const OP: &str = "rms_norm_heads";
        let weight = weights::vector(OP, weight)?;
        x.check_heads(OP, "columns of x", rows, weight.len())?;
        for r in 0..rows {
            for head in x.row_mut(r).chunks_exact_mut(weight.len()) {
                normalise(head, &weight, eps);
            }
        }
        Ok(())
    }

    fn add(&mut self, x: &mut HostTensor, y: &HostTensor, rows: usize) -> Result<(), OpError> {
        const OP: &str = "add";
        x.check(OP, "columns of x", rows, y.cols())?;
        y.check(OP, "columns of y", rows, x.cols())?;
        for r in 0..rows {
            for (x, y) in x.row_mut(r).iter_mut().zip(y.row(r)) {
                *x += y;
            }
        }
        Ok(())
    }

    fn linear(
        &mut self,
        layer: &Linear<Self>,
        x: &HostTensor,
        out: &mut HostTensor,
        rows: usize,
    ) -> Result<(), OpError> {
        const OP: &str = "linear";
        x.check(OP, "columns of x", rows, layer.n_in())?;
        out.check(OP, "columns of out", rows, layer.n_out())?;
        if self.dequantize {
            weights::product(&layer.weight, x, out, rows)?;
        } else {
            weights::rounded_product(&layer.weight, x, out, rows)?;
        }
        if let Some(bias) = &layer.bias {
            let bias = weights::vector(OP, bias)?;
            if bias.len() != layer.n_out() {
                let (found, expected) = (bias.len(), layer.n_out());
                return Err(OpError::Shape { op: OP, what: "bias length", found, expected });
            }
            for r in 0..rows {
                for (out, bias) in out.row_mut(r).iter_mut().zip(&bias) {
                    *out += bias;
                }
            }
        }
        Ok(())
    }

    fn rope(
        &mut self,
        x: &mut HostTensor,
        rope: &RopeSpec,
        head_dim: usize,
        rows: usize,
    ) -> Result<(), OpError> {
        const OP: &str = "rope";
        self.step.check(OP, rows)?;
        x.check_heads(OP, "columns of x", rows, head_dim)?;
        let pairs = rope.inverse_frequencies.len();
        if 2 * pairs > head_dim {
            let (found, expected) = (2 * pairs, head_dim);
            return Err(OpError::Shape { op: OP, what: "number of turning values", found, expected });
        }
        for (r, &position) in self.step.positions.iter().enumerate() {
            for head in x.row_mut(r).chunks_exact_mut(head_dim) {
                for (i, &frequency) in rope.inverse_frequencies.iter().enumerate() {
                    let (a, b) = match rope.pairing {
                        RopePairing::Adjacent => (2 * i, 2 * i + 1),
                        RopePairing::Halves => (i, i + pairs),
                    };
                    let (sin, cos) = (f64::from(position) * f64::from(frequency)).sin_cos();
                    let magnitude = f64::from(rope.magnitude);
                    let (sin, cos) = (sin * magnitude, cos * magnitude);
                    let (x, y) = (f64::from(head[a]), f64::from(head[b]));
                    head[a] = (x * cos - y * sin) as f32;
                    head[b] = (x * sin + y * cos) as f32;
                }
            }
        }
        Ok(())
    }

    fn kv_write(
        &mut self,
        kv: &mut HostKv,
        layer: usize,
        keys: &HostTensor,
        values: &HostTensor,
        rows: usize,
    ) -> Result<(), OpError> {
        const OP: &str = "kv_write";
        self.step.check(OP, rows)?;
        self.step.check_groups(OP, kv.groups())?;
        let (shape, location) = kv.layer(OP, layer)?;
        keys.check(OP, "columns of keys", rows, shape.kv_heads * shape.head_dim)?;
        values.check(OP, "columns of values", rows, shape.kv_heads * shape.head_dim)?;
        for r in 0..rows {
            kv.write(OP, layer, self.step.kv_slot(r, location.group), keys.row(r), values.row(r))?;
        }
        Ok(())
    }

    fn attention(
        &mut self,
        kv: &HostKv,
        layer: usize,
        queries: &HostTensor,
        spec: &AttentionSpec,
        out: &mut HostTensor,
        rows: usize,
    ) -> Result<(), OpError> {
        const OP: &str = "attention";
        self.step.check(OP, rows)?;
        self.step.check_groups(OP, kv.groups())?;
        let (shape, location) = kv.layer(OP, layer)?;
        for (what, found, expected) in [
            ("kv_heads", spec.kv_heads, shape.kv_heads),
            ("head_dim", spec.head_dim, shape.head_dim),
            ("remainder of heads / kv_heads", spec.heads % spec.kv_heads.max(1), 0),
        ] {
            if found != expected {
                return Err(OpError::Shape { op: OP, what, found, expected });
            }
        }
        queries.check(OP, "columns of queries", rows, spec.heads * spec.head_dim)?;
        out.check(OP, "columns of out", rows, spec.heads * spec.head_dim)?;
        for r in 0..rows {
            let seen = self.step.history(OP, r, location.group, shape.span, kv.block_tokens())?;
            let mut keys = Vec::with_capacity(seen.len());
            let mut values = Vec::with_capacity(seen.len());
            for slot in seen {
                let (key, value) = kv.read(OP, layer, slot)?;
                keys.push(key);
                values.push(value);
            }
            for head in 0..spec.heads {
                let columns = head * spec.head_dim..(head + 1) * spec.head_dim;
                let kv_head = head / (spec.heads / spec.kv_heads);
                let kv_columns = kv_head * spec.head_dim..(kv_head + 1) * spec.head_dim;
                let keys: Vec<&[f32]> = keys.iter().map(|key| &key[kv_columns.clone()]).collect();
                let values: Vec<&[f32]> = values.iter().map(|value| &value[kv_columns.clone()]).collect();
                let query = &queries.row(r)[columns.clone()];
                attend(query, &keys, &values, spec.scale, &mut out.row_mut(r)[columns]);
            }
        }
        Ok(())
    }

    fn gated(
        &mut self,
        activation: Activation,
        gate: &mut HostTensor,
        up: &HostTensor,
        rows: usize,
    ) -> Result<(), OpError> {
        const OP: &str = "gated";
        up.check(OP, "columns of up", rows, gate.cols())?;
        gate.check(OP, "columns of gate", rows, up.cols())?;
        for r in 0..rows {
            for (value, &up) in gate.row_mut(r).iter_mut().zip(up.row(r)) {
                let gate = f64::from(*value);
                let exponent = match activation {
                    Activation::Silu => gate,
                    Activation::GeluTanh => gate * (GELU_LINEAR + GELU_CUBIC * gate * gate),
                };
                *value = (gate / (1.0 + (-exponent).exp()) * f64::from(up)) as f32;
            }
        }
        Ok(())
    }

    fn expert(&self, stack: &Weight<Self>, index: usize) -> Result<Weight<Self>, OpError> {
        weights::expert("expert", stack, index)
    }

    fn gather_outputs(
        &mut self,
        x: &HostTensor,
        outputs: Range<usize>,
        out: &mut HostTensor,
    ) -> Result<(), OpError> {
        const OP: &str = "gather_outputs";
        x.check(OP, "columns of x", self.step.len(), out.cols())?;
        out.check(OP, "columns of out", outputs.len(), x.cols())?;
        let (index, len) = (outputs.end, self.step.outputs.len());
        let wanted = self.step.outputs.get(outputs);
        let wanted = wanted.ok_or(OpError::Index { op: OP, what: "output", index, len })?;
        for (i, &r) in wanted.iter().enumerate() {
            out.row_mut(i).copy_from_slice(x.row(r as usize));
        }
        Ok(())
    }

    fn may_run_ahead(&self, _cols: usize) -> bool {
        self.runs_ahead
    }

    fn start_draws(
        &mut self,
        x: &HostTensor,
        cols: usize,
        draw_params: &[DrawParams],
        part: Range<usize>,
    ) -> Result<(), OpError> {
        let (start, end, len) = (part.start, part.end, draw_params.len());
        let params = draw_params.get(part);
        let params = params.ok_or(OpError::Index { op: "start_draws", what: "output", index: end, len })?;
        let mut tokens = vec![NO_ARGMAX; params.len()];
        self.argmax(x, params.len(), cols, &mut tokens)?;
        let mut lists = vec![Shortlist::default(); params.len()];
        self.shortlists(x, cols, params, &mut lists)?;
        for ((token, list), params) in tokens.iter_mut().zip(&lists).zip(params) {
            if params.uniform.is_some() {
                *token = list.drawn().unwrap_or(NO_ARGMAX);
            }
        }
        self.drawn.truncate(start);
        self.drawn.extend(tokens);
        if end == len {
            self.unread.push_back(self.drawn.clone());
        }
        Ok(())
    }

    fn finish_draws(&mut self, tokens: &mut [u32]) -> Result<bool, OpError> {
        const OP: &str = "finish_draws";
        let found = self.unread.pop_front().unwrap_or_default();
        if found.len() != tokens.len() {
            let (found, expected) = (tokens.len(), found.len());
            return Err(OpError::Shape { op: OP, what: "host slice", found, expected });
        }
        tokens.copy_from_slice(&found);
        // As on a device for which the host always has to wait.
        Ok(false)
    }

    fn write(&mut self, x: &mut HostTensor, rows: usize, host: &[f32]) -> Result<(), OpError> {
        x.rows_mut("write", rows, host.len())?.copy_from_slice(host);
        Ok(())
    }

    fn read_rows(&mut self, x: &HostTensor, rows: Range<usize>, host: &mut [f32]) -> Result<(), OpError> {
        const OP: &str = "read";
        x.check(OP, "columns", rows.end, x.cols())?;
        let (start, end) = (rows.start.min(rows.end) * x.cols(), rows.end * x.cols());
        if host.len() != end - start {
            let (found, expected) = (host.len(), end - start);
            return Err(OpError::Shape { op: OP, what: "host slice", found, expected });
        }
        host.copy_from_slice(&x.rows(OP, rows.end, end)?[start..]);
        Ok(())
    }
}

fn normalise(x: &mut [f32], weight: &[f32], eps: f32) {
    let squares: f64 = x.iter().map(|&x| f64::from(x) * f64::from(x)).sum();
    let factor = 1.0 / (squares / x.len() as f64 + f64::from(eps)).sqrt();
    for (x, &weight) in x.iter_mut().zip(weight) {
        *x = (f64::from(*x) * factor * f64::from(weight)) as f32;
    }
}

/// `out = sum_p softmax_p(scale * query . keys[p]) * values[p]`.
fn attend(query: &[f32], keys: &[&[f32]], values: &[&[f32]], scale: f32, out: &mut [f32]) {
    let scores: Vec<f64> = keys.iter().map(|key| f64::from(scale) * weights::dot(query, key)).collect();
    let largest = scores.iter().copied().fold(f64::NEG_INFINITY, f64::max);
    let shares: Vec<f64> = scores.iter().map(|score| (score - largest).exp()).collect();
    let total: f64 = shares.iter().sum();
    for (i, out) in out.iter_mut().enumerate() {
        let sum: f64 = shares.iter().zip(values).map(|(share, value)| share * f64::from(value[i])).sum();
        *out = (sum / total) as f32;
    }
}
