// SPDX-License-Identifier: Apache-2.0

//! [`Cpu`]: implements `ops::Backend`. It checks shapes, then passes rows to the kernels.

use super::kv::{CpuKv, LayerView};
use super::pool::ThreadPool;
use super::product::{ActivationBuffers, LinearLayer, multiply};
use super::rope::CpuRope;
use super::rows::{Add, AddNorm, Gelu, Norm, NormHeads, NormInto, Rotate, Scale, Silu};
use super::step::CpuStep;
use super::tensor::{CpuTensor, SharedRows};
use super::{Isa, attention, weight};
use bytes::Bytes;
use std::ops::Range;

use ops::{
    Activation, AttentionSpec, Backend, KvLayout, Linear, OpError, RopeSpec, Step, Weight, finite_argmax,
};

/// If a row op has fewer values, the calling thread computes it alone: about 10 us of work.
const PARALLEL_VALUES: usize = 32 << 10;

/// The CPU backend. Its threads end when it is dropped.
pub struct Cpu {
    isa: Isa,
    pool: ThreadPool,
    step: CpuStep,
    /// Number of the current step. A `CpuRope` compares it with the step of its angles.
    steps: u64,
    input: ActivationBuffers,
    attention: attention::AttentionBuffers,
}

impl Cpu {
    /// `threads` counts the thread that calls the ops. Uses the fastest instruction set of the
    /// processor.
    pub fn new(threads: usize) -> Result<Self, OpError> {
        Self::with_isa(threads, Isa::best())
    }

    pub fn with_isa(threads: usize, isa: Isa) -> Result<Self, OpError> {
        let pool = ThreadPool::new(threads)
            .map_err(|source| OpError::Device { op: "threads", source: source.into() })?;
        Ok(Self {
            isa,
            pool,
            step: CpuStep::default(),
            steps: 0,
            input: ActivationBuffers::default(),
            attention: attention::AttentionBuffers::default(),
        })
    }

    pub fn isa(&self) -> Isa {
        self.isa
    }

    /// Calls `f` for every row, on all threads if there are enough values.
    fn each_row(&mut self, rows: usize, cols: usize, f: impl Fn(usize) + Sync) {
        if rows * cols < PARALLEL_VALUES {
            (0..rows).for_each(f);
        } else {
            self.pool.run(rows, &|r, _| f(r));
        }
    }
}

impl Backend for Cpu {
    type Data = Bytes;
    type Tensor = CpuTensor;
    type Kv = CpuKv;
    type Rope = CpuRope;

    const PREFERS_SHORTLISTS: bool = false;

    fn tensor(&mut self, rows_max: usize, cols: usize) -> Result<CpuTensor, OpError> {
        CpuTensor::new(rows_max, cols)
    }

    fn kv(&mut self, layout: &KvLayout) -> Result<CpuKv, OpError> {
        CpuKv::new(layout)
    }

    fn kv_bytes(&self, kv: &CpuKv) -> u64 {
        kv.used_bytes()
    }

    fn trim(&mut self, kv: &mut CpuKv, blocks: usize) -> Result<(), OpError> {
        kv.trim(blocks)
    }

    fn kv_copy(&mut self, kv: &mut CpuKv, copies: &[(u32, u32)]) -> Result<(), OpError> {
        copies.iter().try_for_each(|&(from, to)| kv.copy(from as usize, to as usize))
    }

    fn rope_table(&mut self, spec: &RopeSpec) -> Result<CpuRope, OpError> {
        Ok(CpuRope::new(spec))
    }

    fn begin(&mut self, step: &Step<'_>) -> Result<(), OpError> {
        self.steps += 1;
        self.step.set(step)
    }

    fn embed(&mut self, table: &Weight<Self>, out: &mut CpuTensor, rows: usize) -> Result<(), OpError> {
        const OP: &str = "embed";
        self.step.check(OP, rows)?;
        out.check(OP, "columns of out", rows, table.cols())?;
        for (r, &token) in self.step.tokens.iter().enumerate() {
            weight::decode_row(OP, "token", table, token as usize, out.row_mut(r))?;
        }
        Ok(())
    }

    fn rms_norm(
        &mut self,
        x: &CpuTensor,
        weight: &Weight<Self>,
        eps: f32,
        out: &mut CpuTensor,
        rows: usize,
    ) -> Result<(), OpError> {
        const OP: &str = "rms_norm";
        let weight = weight::vector(OP, "columns of x against the weight", weight, x.cols())?;
        x.check(OP, "columns of x", rows, weight.len())?;
        out.check(OP, "columns of out", rows, weight.len())?;
        let (isa, cols) = (self.isa, x.cols());
        let norm = Norm { weight: &weight, eps };
        let shared = SharedRows::new(out.rows_mut(rows), cols);
        self.each_row(rows, cols, |r| {
            // SAFETY: `out` is borrowed by this function, and each call takes a different row.
            let out = unsafe { shared.part(r, 0, cols) };
            isa.run(NormInto { x: x.row(r), norm, out });
        });
        Ok(())
    }

    fn rms_norm_heads(
        &mut self,
        x: &mut CpuTensor,
        weight: &Weight<Self>,
        eps: f32,
        rows: usize,
    ) -> Result<(), OpError> {
        const OP: &str = "rms_norm_heads";
        let weight = weight::vector(OP, "values of a head", weight, weight.cols())?;
        x.check_heads(OP, "columns of x", rows, weight.len())?;
        let (isa, cols) = (self.isa, x.cols());
        let norm = Norm { weight: &weight, eps };
        let shared = SharedRows::new(x.rows_mut(rows), cols);
        self.each_row(rows, cols, |r| {
            // SAFETY: `x` is borrowed by this function, and each call takes a different row.
            let x = unsafe { shared.part(r, 0, cols) };
            isa.run(NormHeads { x, norm });
        });
        Ok(())
    }

    fn add(&mut self, x: &mut CpuTensor, y: &CpuTensor, rows: usize) -> Result<(), OpError> {
        const OP: &str = "add";
        x.check(OP, "columns of x", rows, y.cols())?;
        y.check(OP, "columns of y", rows, x.cols())?;
        self.isa.run(Add { x: x.rows_mut(rows), y: y.rows(rows) });
        Ok(())
    }

    fn scale(&mut self, x: &mut CpuTensor, factor: f32, rows: usize, cols: usize) -> Result<(), OpError> {
        x.check("scale", "columns of x", rows, cols)?;
        self.isa.run(Scale { x: x.rows_mut(rows), factor });
        Ok(())
    }

    fn add_rms_norm(
        &mut self,
        x: &mut CpuTensor,
        y: &CpuTensor,
        weight: &Weight<Self>,
        eps: f32,
        out: &mut CpuTensor,
        rows: usize,
    ) -> Result<(), OpError> {
        const OP: &str = "add_rms_norm";
        let weight = weight::vector(OP, "columns of x against the weight", weight, x.cols())?;
        x.check(OP, "columns of x", rows, weight.len())?;
        y.check(OP, "columns of y", rows, weight.len())?;
        out.check(OP, "columns of out", rows, weight.len())?;
        let (isa, cols) = (self.isa, y.cols());
        let norm = Norm { weight: &weight, eps };
        let (x, out) = (SharedRows::new(x.rows_mut(rows), cols), SharedRows::new(out.rows_mut(rows), cols));
        self.each_row(rows, cols, |r| {
            // SAFETY: both tensors are borrowed by this function, and each call takes a different
            // row.
            let (x, out) = unsafe { (x.part(r, 0, cols), out.part(r, 0, cols)) };
            isa.run(AddNorm { x, y: y.row(r), norm, out });
        });
        Ok(())
    }

    fn linear(
        &mut self,
        layer: &Linear<Self>,
        x: &CpuTensor,
        out: &mut CpuTensor,
        rows: usize,
    ) -> Result<(), OpError> {
        self.linears(x, &mut [(layer, out)], rows)
    }

    fn linears(
        &mut self,
        x: &CpuTensor,
        layers: &mut [(&Linear<Self>, &mut CpuTensor)],
        rows: usize,
    ) -> Result<(), OpError> {
        const OP: &str = "linear";
        let mut biases = Vec::with_capacity(layers.len());
        for (layer, out) in layers.iter() {
            x.check(OP, "columns of x", rows, layer.n_in())?;
            out.check(OP, "columns of out", rows, layer.n_out())?;
            weight::row_bytes(OP, &layer.weight)?;
            let dtype = layer.weight.dtype;
            if dtype.activation().is_none() {
                return Err(OpError::Type { op: OP, dtype });
            }
            let bias = layer.bias.as_ref();
            biases.push(bias.map(|bias| weight::vector(OP, "bias length", bias, layer.n_out())).transpose()?);
        }
        let layers: Vec<LinearLayer<'_>> = layers
            .iter_mut()
            .zip(&biases)
            .map(|((layer, out), bias)| {
                let (n_out, weight) = (layer.n_out(), &layer.weight);
                let out = SharedRows::new(out.rows_mut(rows), n_out);
                LinearLayer { dtype: weight.dtype, bytes: &weight.data, n_out, bias: bias.as_deref(), out }
            })
            .collect();
        multiply(self.isa, &mut self.pool, &mut self.input, x.rows(rows), x.cols(), &layers);
        Ok(())
    }

    fn rope(
        &mut self,
        x: &mut CpuTensor,
        rope: &CpuRope,
        head_dim: usize,
        rows: usize,
    ) -> Result<(), OpError> {
        const OP: &str = "rope";
        self.step.check(OP, rows)?;
        x.check_heads(OP, "columns of x", rows, head_dim)?;
        let pairs = rope.pairs();
        if 2 * pairs > head_dim {
            let (found, expected) = (2 * pairs, head_dim);
            return Err(OpError::Shape { op: OP, what: "number of turning values", found, expected });
        }
        if pairs == 0 {
            return Ok(());
        }
        let angles = rope.angles(self.steps, &self.step.positions);
        let (cos, sin) = (&angles.cos[..], &angles.sin[..]);
        let (isa, cols, adjacent) = (self.isa, x.cols(), rope.is_adjacent());
        let shared = SharedRows::new(x.rows_mut(rows), cols);
        self.each_row(rows, cols, |r| {
            // SAFETY: `x` is borrowed by this function, and each call takes a different row.
            let x = unsafe { shared.part(r, 0, cols) };
            let (cos, sin) = (&cos[r * pairs..][..pairs], &sin[r * pairs..][..pairs]);
            isa.run(Rotate { x, head_dim, adjacent, cos, sin });
        });
        Ok(())
    }

    fn kv_write(
        &mut self,
        kv: &mut CpuKv,
        layer: usize,
        keys: &CpuTensor,
        values: &CpuTensor,
        rows: usize,
    ) -> Result<(), OpError> {
        const OP: &str = "kv_write";
        self.step.check(OP, rows)?;
        self.step.check_groups(OP, kv.groups())?;
        let LayerView { shape, group, .. } = kv.view(OP, layer)?;
        let cols = shape.kv_heads * shape.head_dim;
        keys.check(OP, "columns of keys", rows, cols)?;
        values.check(OP, "columns of values", rows, cols)?;
        let (isa, slots) = (self.isa, self.step.kv_slots(group));
        let writer = kv.writer(OP, layer, slots)?;
        let (keys, values) = (keys.rows(rows), values.rows(rows));
        let write = |head| {
            // SAFETY: `kv` is borrowed mutably by this function, and each call takes a different
            // head.
            unsafe { writer.write(isa, head, slots, keys, values) }
        };
        if rows * cols < PARALLEL_VALUES {
            (0..shape.kv_heads).for_each(write);
        } else {
            self.pool.run(shape.kv_heads, &|head, _| write(head));
        }
        Ok(())
    }

    fn attention(
        &mut self,
        kv: &CpuKv,
        layer: usize,
        queries: &CpuTensor,
        spec: &AttentionSpec,
        out: &mut CpuTensor,
        rows: usize,
    ) -> Result<(), OpError> {
        const OP: &str = "attention";
        self.step.check(OP, rows)?;
        self.step.check_groups(OP, kv.groups())?;
        let view = kv.view(OP, layer)?;
        for (what, found, expected) in [
            ("kv_heads", spec.kv_heads, view.shape.kv_heads),
            ("head_dim", spec.head_dim, view.shape.head_dim),
            ("remainder of heads / kv_heads", spec.heads % spec.kv_heads.max(1), 0),
        ] {
            if found != expected {
                return Err(OpError::Shape { op: OP, what, found, expected });
            }
        }
        let cols = spec.heads * spec.head_dim;
        queries.check(OP, "columns of queries", rows, cols)?;
        out.check(OP, "columns of out", rows, cols)?;
        if rows == 0 || cols == 0 {
            return Ok(());
        }
        attention::check(OP, &self.step, kv, layer, &view)?;
        let (queries, out) = (queries.rows(rows), SharedRows::new(out.rows_mut(rows), cols));
        let call = attention::AttentionCall { isa: self.isa, step: &self.step, view, spec, queries, out };
        attention::attend(&mut self.pool, &mut self.attention, &call);
        Ok(())
    }

    fn gated(
        &mut self,
        activation: Activation,
        gate: &mut CpuTensor,
        up: &CpuTensor,
        rows: usize,
    ) -> Result<(), OpError> {
        const OP: &str = "gated";
        up.check(OP, "columns of up", rows, gate.cols())?;
        gate.check(OP, "columns of gate", rows, up.cols())?;
        let (isa, cols) = (self.isa, gate.cols());
        let shared = SharedRows::new(gate.rows_mut(rows), cols);
        self.each_row(rows, cols, |r| {
            // SAFETY: `gate` is borrowed by this function, and each call takes a different row.
            let gate = unsafe { shared.part(r, 0, cols) };
            match activation {
                Activation::Silu => isa.run(Silu { gate, up: up.row(r) }),
                Activation::GeluTanh => isa.run(Gelu { gate, up: up.row(r) }),
            }
        });
        Ok(())
    }

    fn expert(&self, stack: &Weight<Self>, index: usize) -> Result<Weight<Self>, OpError> {
        weight::expert("expert", stack, index)
    }

    fn gather_outputs(
        &mut self,
        x: &CpuTensor,
        outputs: Range<usize>,
        out: &mut CpuTensor,
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

    fn write(&mut self, x: &mut CpuTensor, rows: usize, host: &[f32]) -> Result<(), OpError> {
        x.check_host("write", rows, host.len())?;
        x.rows_mut(rows).copy_from_slice(host);
        Ok(())
    }

    fn read_rows(&mut self, x: &CpuTensor, rows: Range<usize>, host: &mut [f32]) -> Result<(), OpError> {
        const OP: &str = "read";
        let (first, len) = (rows.start.min(rows.end) * x.cols(), host.len());
        x.check_host(OP, rows.end, first + len)?;
        host.copy_from_slice(&x.rows(rows.end)[first..]);
        Ok(())
    }

    fn argmax(&mut self, x: &CpuTensor, rows: usize, cols: usize, best: &mut [u32]) -> Result<(), OpError> {
        x.check_host("argmax", rows, rows * cols)?;
        if best.len() != rows {
            let (found, expected) = (best.len(), rows);
            return Err(OpError::Shape { op: "argmax", what: "host slice", found, expected });
        }
        for (best, row) in best.iter_mut().zip(x.rows(rows).chunks_exact(cols.max(1))) {
            *best = finite_argmax(row);
        }
        Ok(())
    }
}
