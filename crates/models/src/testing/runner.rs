//! One sequence run through a model, chunk by chunk.

use super::ModelFile;
use crate::{Limits, Model, build};
use anyhow::Result;
use bytes::Bytes;
use ops::{Backend, KvLayout, KvType, Step};

/// Tokens per block of the cache. The engine's default.
const BLOCK_TOKENS: usize = 16;

pub struct Runner<B: Backend> {
    backend: B,
    model: Box<dyn Model<B>>,
    kv: B::Kv,
    /// Blocks in falling order, so that a backend that ignores the table fails.
    table: Vec<u32>,
    position: u32,
}

impl<B: Backend<Data: From<Bytes>>> Runner<B> {
    pub fn new(file: &ModelFile, mut backend: B, kind: KvType, tokens_max: usize) -> Result<Self> {
        let limits = Limits { rows_max: tokens_max, outputs_max: tokens_max };
        let model = build(file.header().metadata(), file.weights()?, &mut backend, limits)?;
        let blocks = tokens_max.div_ceil(BLOCK_TOKENS);
        let layers = model.kv_layers(kind);
        let kv = backend.kv(&KvLayout { block_tokens: BLOCK_TOKENS, blocks, layers })?;
        Ok(Self { backend, model, kv, table: (0..blocks as u32).rev().collect(), position: 0 })
    }

    /// Runs `tokens` in one step and returns the logits after each of them.
    pub fn extend(&mut self, tokens: &[u32]) -> Result<Vec<Vec<f32>>> {
        let positions: Vec<u32> = (self.position..).take(tokens.len()).collect();
        let slot = |&position: &u32| {
            let (index, offset) = (position as usize / BLOCK_TOKENS, position % BLOCK_TOKENS as u32);
            self.table[index] * BLOCK_TOKENS as u32 + offset
        };
        let step = Step {
            tokens,
            positions: &positions,
            sequences: &vec![0; tokens.len()],
            kv_slots: &positions.iter().map(slot).collect::<Vec<_>>(),
            tables: &[&self.table],
            outputs: &(0..tokens.len() as u32).collect::<Vec<_>>(),
        };
        let vocab_size = self.model.vocab_size();
        let logits = self.model.forward(&mut self.backend, &mut self.kv, &step)?;
        let mut host = vec![0.0; tokens.len() * vocab_size];
        self.backend.read(logits, tokens.len(), &mut host)?;
        self.position += tokens.len() as u32;
        Ok(host.chunks_exact(vocab_size).map(<[f32]>::to_vec).collect())
    }

    /// As [`Runner::extend`], in steps of the given sizes; what they leave over is one step more.
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

/// The best token, the lowest id among equals.
pub(super) fn argmax(logits: &[f32]) -> u32 {
    let mut best = 0;
    for (token, logit) in logits.iter().enumerate() {
        if *logit > logits[best] {
            best = token;
        }
    }
    best as u32
}
