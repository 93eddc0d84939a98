// SPDX-License-Identifier: Apache-2.0

//! Implements `ops::Backend` for [`Cuda`]. Each op checks its shapes, uploads weights on first use,
//! and pushes commands.

use std::ops::Range;
use std::sync::Arc;

use ops::{
    Activation, AttentionSpec, Backend, DrawParams, Experts, KvLayout, Linear, OpError, RopePairing,
    RopeSpec, Shortlist, Step, Weight,
};
use quant::DType;

use super::attention_plan::AttentionPlanShape;
use super::command::KernelCommand;
use super::operand::{ActivationTiles, AttentionOperands, AttentionShape, ByteRange};
use super::step::WordRange;
use super::{Cuda, CudaKv, CudaRope, CudaTensor, WeightData, data};
use crate::cuda::Buffer;
use crate::cuda::attention::AttentionMethod;
use crate::cuda::error::device_error;
use crate::cuda::linear::takes_f16_sums;
use crate::cuda::norm_rope_kv::NormRopeKvKernels;
use crate::cuda::quantize::ActivationLayout;
use crate::cuda::shortlist;

impl Backend for Cuda {
    type Data = WeightData;
    type Tensor = CudaTensor;
    type Kv = CudaKv;
    type Rope = CudaRope;

    const PREFERS_SHORTLISTS: bool = true;

    fn tensor(&mut self, rows_max: usize, cols: usize) -> Result<CudaTensor, OpError> {
        const OP: &str = "tensor";
        let bytes = (rows_max as u64).saturating_mul(cols as u64).saturating_mul(size_of::<f32>() as u64);
        let values = rows_max.checked_mul(cols).filter(|_| bytes < u64::MAX);
        let values = values.ok_or(OpError::Memory { op: OP, what: "a tensor", bytes, free: None })?;
        let buffer = Buffer::new(&self.device, values).map_err(device_error(OP))?;
        Ok(CudaTensor::new(buffer, rows_max, cols, &self.tensor_bytes))
    }

    fn kv(&mut self, layout: &KvLayout) -> Result<CudaKv, OpError> {
        let kv = CudaKv::new(&self.device, layout)?;
        self.caches.push(kv.ahead());
        Ok(kv)
    }

    fn kv_bytes(&self, kv: &CudaKv) -> u64 {
        kv.mapped_bytes()
    }

    fn kv_copy(&mut self, kv: &mut CudaKv, copies: &[(u32, u32)]) -> Result<(), OpError> {
        // Collected commands may write blocks that this function copies.
        self.recorder.flush()?;
        self.recorder.keep(kv.owner());
        kv.copy(self.recorder.stream(), copies)
    }

    fn rope_table(&mut self, spec: &RopeSpec) -> Result<CudaRope, OpError> {
        CudaRope::new(self.recorder.stream(), spec).map_err(device_error("rope_table"))
    }

    fn begin(&mut self, step: &Step<'_>) -> Result<(), OpError> {
        // Commands of the previous step refer to that step's rows.
        self.recorder.begin_step()?;
        self.steps += 1;
        self.step.set(&mut self.recorder, step)
    }

    fn embed(&mut self, table: &Weight<Self>, out: &mut CudaTensor, rows: usize) -> Result<(), OpError> {
        const OP: &str = "embed";
        self.step.check(OP, rows)?;
        out.check(OP, "columns of out", rows, table.cols())?;
        let (index, len) = (self.step.token_max() as usize, table.rows());
        if rows > 0 && index >= len {
            return Err(OpError::Index { op: OP, what: "token", index, len });
        }
        let (drawn, owner) = self.drawn.last();
        if self.step.drawn_end() > drawn.len {
            let (index, len) = (self.step.drawn_end() - 1, drawn.len);
            return Err(OpError::Index { op: OP, what: "drawn token", index, len });
        }
        self.recorder.keep(owner);
        let table = self.matrix(OP, table)?;
        let out = self.use_tensor(out, rows);
        // The length varies with the step before, and a command must not.
        let drawn = WordRange { len: 0, ..drawn };
        self.push(KernelCommand::Embed { table, tokens: self.step.tokens_on_device(), drawn, out });
        Ok(())
    }

    fn rms_norm(
        &mut self,
        x: &CudaTensor,
        weight: &Weight<Self>,
        eps: f32,
        out: &mut CudaTensor,
        rows: usize,
    ) -> Result<(), OpError> {
        const OP: &str = "rms_norm";
        let weight = self.vector(OP, "columns of x against the weight", weight, x.cols())?;
        x.check(OP, "columns of x", rows, weight.len)?;
        out.check(OP, "columns of out", rows, weight.len)?;
        let (x, out) = (self.use_tensor(x, rows), self.use_tensor(out, rows));
        self.push(KernelCommand::Norm { x, weight, eps: eps.into(), out });
        Ok(())
    }

    fn rms_norm_heads(
        &mut self,
        x: &mut CudaTensor,
        weight: &Weight<Self>,
        eps: f32,
        rows: usize,
    ) -> Result<(), OpError> {
        const OP: &str = "rms_norm_heads";
        self.recorder.end_first_part()?;
        let weight = self.vector(OP, "values of a head", weight, weight.cols())?;
        x.check_heads(OP, "columns of x", rows, weight.len)?;
        let is_row = weight.len == x.cols() && !NormRopeKvKernels::supports(weight.len);
        let x = self.use_tensor(x, rows);
        let eps = eps.into();
        // Heads that norm_rope_kv.cu can fuse stay heads. The norm of what attention or
        // feed-forward gives is longer, and of a row.
        self.push(match is_row {
            true => KernelCommand::Norm { x, weight, eps, out: x },
            false => KernelCommand::NormHeads { x, weight, eps },
        });
        Ok(())
    }

    fn add(&mut self, x: &mut CudaTensor, y: &CudaTensor, rows: usize) -> Result<(), OpError> {
        const OP: &str = "add";
        x.check(OP, "columns of x", rows, y.cols())?;
        y.check(OP, "columns of y", rows, x.cols())?;
        let (x, y) = (self.use_tensor(x, rows), self.use_tensor(y, rows));
        self.push(KernelCommand::Add { x, y });
        Ok(())
    }

    fn scale(&mut self, x: &mut CudaTensor, factor: f32, rows: usize, cols: usize) -> Result<(), OpError> {
        x.check("scale", "columns of x", rows, cols)?;
        let x = self.use_tensor(x, rows);
        self.push(KernelCommand::Scale { x, factor: factor.into() });
        Ok(())
    }

    fn add_rms_norm(
        &mut self,
        x: &mut CudaTensor,
        y: &CudaTensor,
        weight: &Weight<Self>,
        eps: f32,
        out: &mut CudaTensor,
        rows: usize,
    ) -> Result<(), OpError> {
        const OP: &str = "add_rms_norm";
        let weight = self.vector(OP, "columns of x against the weight", weight, x.cols())?;
        x.check(OP, "columns of x", rows, weight.len)?;
        y.check(OP, "columns of y", rows, weight.len)?;
        out.check(OP, "columns of out", rows, weight.len)?;
        let (x, y, out) = (self.use_tensor(x, rows), self.use_tensor(y, rows), self.use_tensor(out, rows));
        self.push(KernelCommand::AddNorm { x, y, weight, eps: eps.into(), out });
        Ok(())
    }

    fn linear(
        &mut self,
        layer: &Linear<Self>,
        x: &CudaTensor,
        out: &mut CudaTensor,
        rows: usize,
    ) -> Result<(), OpError> {
        self.linears(x, &mut [(layer, out)], rows)
    }

    fn linears(
        &mut self,
        x: &CudaTensor,
        layers: &mut [(&Linear<Self>, &mut CudaTensor)],
        rows: usize,
    ) -> Result<(), OpError> {
        const OP: &str = "linear";
        let mut quantized: Option<ActivationTiles> = None;
        // Formats that a layer here also takes with f16 sums.
        let f16_formats: Vec<DType> = layers
            .iter()
            .map(|layer| layer.0.weight.dtype)
            .filter(|&dtype| takes_f16_sums(&self.device, dtype, rows))
            .filter_map(|dtype| dtype.activation())
            .collect();
        // Sorting makes layers of one type neighbours, so they share launches and their quantized
        // input.
        let mut order: Vec<usize> = (0..layers.len()).collect();
        order.sort_by_key(|&at| {
            let dtype = layers[at].0.weight.dtype;
            (dtype.activation().map(|format| format as u32), dtype as u32)
        });
        for at in order {
            let (layer, out) = &layers[at];
            x.check(OP, "columns of x", rows, layer.n_in())?;
            out.check(OP, "columns of out", rows, layer.n_out())?;
            let dtype = layer.weight.dtype;
            let format = dtype.activation().ok_or(OpError::Type { op: OP, dtype })?;
            let bias = match &layer.bias {
                Some(bias) => Some(self.vector(OP, "bias length", bias, layer.n_out())?),
                None => None,
            };
            let matrix = self.matrix(OP, &layer.weight)?;
            let (input, out) = (self.use_tensor(x, rows), self.use_tensor(out, rows));
            let activation_tiles = match quantized {
                Some(activation_tiles) if activation_tiles.layout.format == format => activation_tiles,
                // F32 weights take rows without conversion.
                _ if format == DType::F32 => {
                    let range = ByteRange { address: input.address, len: input.len * size_of::<f32>() };
                    ActivationTiles {
                        layout: format.into(),
                        range,
                        tokens: rows as u32,
                        cols: x.cols() as u32,
                    }
                }
                _ => {
                    let layout = ActivationLayout { format, f16_sums: f16_formats.contains(&format) };
                    let activation_tiles = self.activation_tiles(OP, layout, rows, x.cols())?;
                    self.push(KernelCommand::Quantize { x: input, activation_tiles });
                    *quantized.insert(activation_tiles)
                }
            };
            self.push(KernelCommand::Product { activation_tiles, matrix, bias, out });
        }
        Ok(())
    }

    fn rope(
        &mut self,
        x: &mut CudaTensor,
        rope: &CudaRope,
        head_dim: usize,
        rows: usize,
    ) -> Result<(), OpError> {
        const OP: &str = "rope";
        self.recorder.end_first_part()?;
        self.step.check(OP, rows)?;
        x.check_heads(OP, "columns of x", rows, head_dim)?;
        if 2 * rope.pairs() > head_dim {
            let (found, expected) = (2 * rope.pairs(), head_dim);
            return Err(OpError::Shape { op: OP, what: "number of turning values", found, expected });
        }
        self.recorder.keep(rope.owner());
        let x = self.use_tensor(x, rows);
        self.push(KernelCommand::Rope {
            x,
            positions: self.step.positions_on_device(),
            adjacent: rope.pairing == RopePairing::Adjacent,
            frequencies: rope.frequencies(),
            magnitude: rope.magnitude.into(),
            head_dim: head_dim as u32,
        });
        Ok(())
    }

    fn kv_write(
        &mut self,
        kv: &mut CudaKv,
        layer: usize,
        keys: &CudaTensor,
        values: &CudaTensor,
        rows: usize,
    ) -> Result<(), OpError> {
        const OP: &str = "kv_write";
        self.step.check(OP, rows)?;
        let (shape, address, group) = kv.layer(OP, layer)?;
        self.step.check_groups(OP, kv.groups())?;
        let cols = shape.kv_heads * shape.head_dim;
        keys.check(OP, "columns of keys", rows, cols)?;
        values.check(OP, "columns of values", rows, cols)?;
        if rows == 0 {
            return Ok(());
        }
        kv.prepare(OP, layer, self.step.kv_slots(group), self.step.slot_max())?;
        self.recorder.keep(kv.owner());
        let (keys, values) = (self.use_tensor(keys, rows), self.use_tensor(values, rows));
        self.push(KernelCommand::KvWrite {
            layer: address,
            kind: shape.kind,
            keys,
            values,
            slots: self.step.slots_on_device(group),
            kv_heads: shape.kv_heads as u32,
            head_dim: shape.head_dim as u32,
        });
        Ok(())
    }

    fn attention(
        &mut self,
        kv: &CudaKv,
        layer: usize,
        queries: &CudaTensor,
        spec: &AttentionSpec,
        out: &mut CudaTensor,
        rows: usize,
    ) -> Result<(), OpError> {
        const OP: &str = "attention";
        self.step.check(OP, rows)?;
        let (shape, address, group) = kv.layer(OP, layer)?;
        self.step.check_groups(OP, kv.groups())?;
        for (what, found, expected) in [
            ("kv_heads", spec.kv_heads, shape.kv_heads),
            ("head_dim", spec.head_dim, shape.head_dim),
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
        let span = shape.span;
        kv.check_written(OP, layer, self.step.blocks_read(OP, kv.blocks(), group, span)?)?;
        self.recorder.keep(kv.owner());
        let operands = AttentionOperands {
            layer: address,
            kind: shape.kind,
            span,
            shape: AttentionShape {
                heads: spec.heads as u32,
                kv_heads: spec.kv_heads as u32,
                head_dim: spec.head_dim as u32,
                scale: spec.scale.into(),
            },
            queries: self.use_tensor(queries, rows),
            tables: self.step.tables_on_device(group),
            out: self.use_tensor(out, rows),
        };
        match AttentionMethod::of(self.device(), spec, shape.kind, span) {
            AttentionMethod::TensorCores { split_tokens, prefill_tokens, has_groups } => {
                let block_tokens = kv.blocks().tokens;
                let shape = AttentionPlanShape {
                    split_tokens,
                    prefill_tokens,
                    has_groups,
                    spec: *spec,
                    block_tokens,
                    span,
                };
                for plan in self.plan_attention(shape, kv.groups_of(span))? {
                    self.push(KernelCommand::AttentionPaged { operands, plan });
                }
            }
            AttentionMethod::Scalar => self.push(KernelCommand::AttentionScalar {
                operands,
                table_starts: self.step.table_starts_on_device(),
                positions: self.step.positions_on_device(),
            }),
        }
        Ok(())
    }

    fn gated(
        &mut self,
        activation: Activation,
        gate: &mut CudaTensor,
        up: &CudaTensor,
        rows: usize,
    ) -> Result<(), OpError> {
        const OP: &str = "gated";
        up.check(OP, "columns of up", rows, gate.cols())?;
        gate.check(OP, "columns of gate", rows, up.cols())?;
        let (gate, up) = (self.use_tensor(gate, rows), self.use_tensor(up, rows));
        self.push(KernelCommand::Gated { activation, gate, up, pairs_of_rows: None });
        Ok(())
    }

    fn expert(&self, expert_weights: &Weight<Self>, index: usize) -> Result<Weight<Self>, OpError> {
        data::expert("expert", expert_weights, index)
    }

    fn experts(
        &mut self,
        layer: &Experts<Self>,
        activation: Activation,
        router: &CudaTensor,
        x: &CudaTensor,
        out: &mut CudaTensor,
        rows: usize,
    ) -> Result<(), OpError> {
        self.experts_on_device(layer, activation, router, x, out, rows)
    }

    fn gather_outputs(
        &mut self,
        x: &CudaTensor,
        outputs: Range<usize>,
        out: &mut CudaTensor,
    ) -> Result<(), OpError> {
        const OP: &str = "gather_outputs";
        x.check(OP, "columns of x", self.step.len(), out.cols())?;
        out.check(OP, "columns of out", outputs.len(), x.cols())?;
        let (index, len) = (outputs.end, self.step.outputs());
        if outputs.start > outputs.end || index > len {
            return Err(OpError::Index { op: OP, what: "output", index, len });
        }
        let cols = x.cols() as u32;
        let (x, out) = (self.use_tensor(x, self.step.len()), self.use_tensor(out, outputs.len()));
        self.push(KernelCommand::Gather { x, rows: self.step.outputs_on_device(outputs), cols, out });
        Ok(())
    }

    fn argmax(&mut self, x: &CudaTensor, rows: usize, cols: usize, best: &mut [u32]) -> Result<(), OpError> {
        const OP: &str = "argmax";
        if best.len() != rows {
            let (found, expected) = (best.len(), rows);
            return Err(OpError::Shape { op: OP, what: "host slice", found, expected });
        }
        x.check(OP, "columns", rows, cols)?;
        self.drawn.begin(rows).map_err(device_error(OP))?;
        let (out, owner) = self.drawn.last();
        self.recorder.keep(owner);
        let x = self.use_tensor(x, rows);
        self.push(KernelCommand::Argmax { x, cols: cols as u32, out });
        self.recorder.flush()?;
        self.read_to_host(OP, out.address, best)
    }

    fn may_run_ahead(&self, cols: usize) -> bool {
        (1..=shortlist::COLS_MAX).contains(&cols) && !self.recorder.is_turn_awaited()
    }

    fn start_draws(
        &mut self,
        x: &CudaTensor,
        cols: usize,
        draw_params: &[DrawParams],
        part: Range<usize>,
    ) -> Result<(), OpError> {
        const OP: &str = "start_draws";
        let (rows, outputs) = (part.len(), draw_params.len());
        x.check(OP, "columns", rows, cols)?;
        let own = draw_params.get(part.clone());
        let own = own.ok_or(OpError::Index { op: OP, what: "output", index: part.end, len: outputs })?;
        let is_sampled = |params: &DrawParams| params.uniform.is_some();
        if part.start == 0 {
            self.drawn.begin(outputs).map_err(device_error(OP))?;
            if draw_params.iter().any(is_sampled) {
                self.send_draw_params(OP, draw_params)?;
            }
        }
        let (tokens, owner) = self.drawn.last();
        let tokens = tokens.part(part.start, rows);
        self.recorder.keep(owner);
        if !own.iter().all(is_sampled) {
            let x = self.use_tensor(x, rows);
            self.push(KernelCommand::Argmax { x, cols: cols as u32, out: tokens });
        }
        if own.iter().any(is_sampled) {
            self.enqueue_shortlists(OP, x, cols, part.clone(), Some(tokens))?;
        }
        if part.end < outputs {
            return Ok(());
        }
        self.recorder.flush()?;
        self.drawn.send(&self.recorder).map_err(device_error(OP))?;
        self.recorder.mark();
        Ok(())
    }

    fn finish_draws(&mut self, tokens: &mut [u32]) -> Result<bool, OpError> {
        const OP: &str = "finish_draws";
        let expected = self.drawn.unread_rows().unwrap_or(0);
        if tokens.len() != expected {
            return Err(OpError::Shape { op: OP, what: "host slice", found: tokens.len(), expected });
        }
        // Maps cache units for the next step while the device is busy.
        self.caches.retain(|cache| cache.map().is_some());
        let were_there = self.drawn.receive(tokens).map_err(device_error(OP))?;
        self.recorder.mark_has_ended();
        Ok(were_there)
    }

    fn shortlists(
        &mut self,
        x: &CudaTensor,
        cols: usize,
        draw_params: &[DrawParams],
        lists: &mut [Shortlist],
    ) -> Result<(), OpError> {
        const OP: &str = "shortlists";
        let rows = draw_params.len();
        x.check(OP, "columns", rows, cols)?;
        if lists.len() != rows {
            let (found, expected) = (lists.len(), rows);
            return Err(OpError::Shape { op: OP, what: "host slice", found, expected });
        }
        lists.iter_mut().for_each(Shortlist::clear);
        if rows == 0 || !(1..=shortlist::COLS_MAX).contains(&cols) {
            return Ok(());
        }
        self.send_draw_params(OP, draw_params)?;
        let work = self.enqueue_shortlists(OP, x, cols, 0..rows, None)?;
        self.recorder.flush()?;
        let mut records = std::mem::take(&mut self.records);
        records.resize(rows * shortlist::RESULT_WORDS, 0);
        let brought = self.read_to_host(OP, work, &mut records);
        for (record, list) in records.chunks_exact(shortlist::RESULT_WORDS).zip(lists) {
            shortlist::decode_result(record, list);
        }
        self.records = records;
        brought
    }

    fn trim(&mut self, kv: &mut CudaKv, blocks: usize) -> Result<(), OpError> {
        self.recorder.flush()?;
        let recorder = &mut self.recorder;
        let trimmed = kv.trim(blocks, || recorder.wait());
        // This may be the last call before the process has nothing to compute.
        let ended = recorder.end_turn();
        recorder.drop_owners();
        ended.and(trimmed)
    }

    fn write(&mut self, x: &mut CudaTensor, rows: usize, host: &[f32]) -> Result<(), OpError> {
        const OP: &str = "write";
        x.check_host(OP, rows, host.len())?;
        self.recorder.flush()?;
        // SAFETY: the tensor is borrowed mutably until the copy has ended.
        let mut values = unsafe { x.rows(rows).view_mut() };
        values.copy_from_host(self.recorder.stream(), host).map_err(device_error(OP))
    }

    fn read_rows(&mut self, x: &CudaTensor, rows: Range<usize>, host: &mut [f32]) -> Result<(), OpError> {
        const OP: &str = "read";
        let (first, len) = (rows.start.min(rows.end) * x.cols(), host.len());
        x.check_host(OP, rows.end, first + len)?;
        self.recorder.flush()?;
        self.read_to_host(OP, x.rows(rows.end).part(first, len).address, host)
    }
}

impl Cuda {
    /// Copies the parameters of all outputs of a step to the device.
    fn send_draw_params(&mut self, op: &'static str, draw_params: &[DrawParams]) -> Result<(), OpError> {
        let fill = |to: &mut [u32]| {
            for (to, params) in to.chunks_exact_mut(shortlist::DRAW_PARAM_WORDS).zip(draw_params) {
                to.copy_from_slice(&shortlist::draw_param_words(params));
            }
        };
        let words = draw_params.len() * shortlist::DRAW_PARAM_WORDS;
        self.draw_params.send(&mut self.recorder, words, fill).map_err(device_error(op))
    }

    /// Collects the commands that shortlist the first rows of `x`, or draw their `tokens`. The rows
    /// have the parameters from `outputs.start` on. Returns the address of the results.
    fn enqueue_shortlists(
        &mut self,
        op: &'static str,
        x: &CudaTensor,
        cols: usize,
        outputs: Range<usize>,
        tokens: Option<WordRange>,
    ) -> Result<u64, OpError> {
        let rows = outputs.len();
        let words = shortlist::work_words(rows, cols);
        if words > self.shortlists.len() {
            self.shortlists = Arc::new(Buffer::new(&self.device, words).map_err(device_error(op))?);
        }
        self.recorder.keep(self.shortlists.clone());
        let work = self.shortlists.view().address();
        let x = self.use_tensor(x, rows);
        let [first, end] = [outputs.start, outputs.end].map(|output| output * shortlist::DRAW_PARAM_WORDS);
        let draw_params = WordRange { address: self.draw_params.address(), len: end };
        self.push(KernelCommand::Shortlist {
            x,
            cols: cols as u32,
            draw_params: draw_params.part(first, end - first),
            work: ByteRange { address: work, len: words * size_of::<u64>() },
            tokens,
        });
        Ok(work)
    }
}
