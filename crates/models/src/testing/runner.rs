// SPDX-License-Identifier: Apache-2.0

//! [`Runner`]: runs sequences through a model, step by step.

use super::ModelFile;
use crate::{ForwardLimits, Model, OutputKind, build};
use anyhow::Result;
use bytes::Bytes;
use ops::{Backend, KvLayout, KvTypes, Step};

/// Tokens per KV cache block, as in the engine by default.
const BLOCK_TOKENS: usize = 16;

pub struct Runner<B: Backend> {
    backend: B,
    model: Box<dyn Model<B>>,
    kv: B::Kv,
    sequences: Vec<RunnerSequence>,
}

struct RunnerSequence {
    /// One block table per KV cache group.
    tables: Vec<Vec<u32>>,
    /// Tokens that the model has computed.
    len: usize,
}

impl<B: Backend<Data: From<Bytes>>> Runner<B> {
    /// Builds the model, and a KV cache for `sequences` sequences of at most `tokens_max` tokens
    /// each.
    pub fn new(
        file: &ModelFile,
        mut backend: B,
        types: impl Into<KvTypes>,
        sequences: usize,
        tokens_max: usize,
    ) -> Result<Self> {
        let rows_max = sequences * tokens_max;
        let limits = ForwardLimits { rows_max, outputs_max: rows_max };
        let model = build(file.header().metadata(), file.weights()?, &mut backend, limits)?;
        let table_len = tokens_max.div_ceil(BLOCK_TOKENS);
        let layers = model.kv_layers(&types.into());
        let mut layout = KvLayout { block_tokens: BLOCK_TOKENS, blocks: 0, layers };
        let groups = layout.groups().len();
        let count = sequences * groups;
        layout.blocks = count * table_len;
        let kv = backend.kv(&layout)?;
        // Tables take blocks in turns, from the last block down. A backend that ignores block
        // tables therefore fails.
        let last = layout.blocks - 1;
        let table = |table| (0..table_len).map(|i| (last - (i * count + table)) as u32).collect();
        let tables = |sequence| (sequence * groups..(sequence + 1) * groups).map(table).collect();
        let sequences =
            (0..sequences).map(|index| RunnerSequence { tables: tables(index), len: 0 }).collect();
        Ok(Self { backend, model, kv, sequences })
    }

    /// Runs one step, in which each part appends tokens to a sequence. Returns the logits of the
    /// rows for which `wanted` is true, in order.
    pub fn step(
        &mut self,
        parts: &[(usize, &[u32])],
        wanted: impl Fn(usize) -> bool,
    ) -> Result<Vec<Vec<f32>>> {
        self.step_of_kinds(parts, |row| wanted(row).then_some(OutputKind::Logits))
    }

    /// As [`Runner::step`], with an output of this kind for each row that has one.
    pub fn step_of_kinds(
        &mut self,
        parts: &[(usize, &[u32])],
        kind_of: impl Fn(usize) -> Option<OutputKind>,
    ) -> Result<Vec<Vec<f32>>> {
        let (mut tokens, mut positions, mut owners, mut kv_slots) = (vec![], vec![], vec![], vec![]);
        for &(index, part) in parts {
            let sequence = &mut self.sequences[index];
            for &token in part {
                tokens.push(token);
                positions.push(sequence.len as u32);
                owners.push(index as u32);
                kv_slots.extend(sequence.tables.iter().map(|table| {
                    table[sequence.len / BLOCK_TOKENS] * BLOCK_TOKENS as u32
                        + (sequence.len % BLOCK_TOKENS) as u32
                }));
                sequence.len += 1;
            }
        }
        let tables: Vec<&[u32]> =
            self.sequences.iter().flat_map(|sequence| &sequence.tables).map(Vec::as_slice).collect();
        let (outputs, kinds): (Vec<u32>, Vec<OutputKind>) =
            (0..tokens.len()).filter_map(|row| Some((row as u32, kind_of(row)?))).unzip();
        let step = Step {
            tokens: &tokens,
            positions: &positions,
            sequences: &owners,
            kv_slots: &kv_slots,
            tables: &tables,
            outputs: &outputs,
        };
        let widths: Vec<usize> = kinds.iter().map(|&kind| self.model.output_width(kind)).collect();
        let mut rows = Vec::with_capacity(outputs.len());
        self.model.forward(&mut self.backend, &mut self.kv, &step, &kinds, &mut |backend, run, values| {
            let width = widths[run.start];
            let mut host = vec![0.0; run.len() * width];
            backend.read(values, run.len(), &mut host)?;
            rows.extend(host.chunks_exact(width).map(<[f32]>::to_vec));
            Ok(())
        })?;
        Ok(rows)
    }

    /// Appends `tokens` to the first sequence in one step. Returns the logits of each token's row.
    pub fn extend(&mut self, tokens: &[u32]) -> Result<Vec<Vec<f32>>> {
        self.step(&[(0, tokens)], |_| true)
    }

    /// As [`Runner::extend`], in steps of the given sizes. The remaining tokens are one more step.
    pub fn extend_in_chunks(&mut self, tokens: &[u32], sizes: &[usize]) -> Result<Vec<Vec<f32>>> {
        let mut logits = Vec::with_capacity(tokens.len());
        let mut rest = tokens;
        for &size in sizes {
            let (chunk, behind) = rest.split_at(size.min(rest.len()));
            logits.extend(self.extend(chunk)?);
            rest = behind;
        }
        logits.extend(self.extend(rest)?);
        Ok(logits)
    }
}

/// The token with the highest logit; the lowest id among equals.
pub(super) fn argmax(logits: &[f32]) -> u32 {
    let mut best = 0;
    for (token, logit) in logits.iter().enumerate() {
        if *logit > logits[best] {
            best = token;
        }
    }
    best as u32
}

/// Whether two sets of logits are equal bit for bit.
pub(super) fn same_bits(a: &[Vec<f32>], b: &[Vec<f32>]) -> bool {
    let bits = |rows: &[Vec<f32>]| rows.iter().flatten().map(|value| value.to_bits()).collect::<Vec<_>>();
    bits(a) == bits(b)
}
