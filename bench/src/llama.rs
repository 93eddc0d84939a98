// SPDX-License-Identifier: Apache-2.0

//! Runs llama.cpp in this process and measures prefill and decode speed of concurrent streams, as
//! its own batched benchmark does.

use crate::{Workload, TokenRates};
use anyhow::{Context, Result};
use llama_cpp_2::context::params::LlamaContextParams;
use llama_cpp_2::llama_backend::LlamaBackend;
use llama_cpp_2::llama_batch::LlamaBatch;
use llama_cpp_2::model::LlamaModel;
use llama_cpp_2::model::params::LlamaModelParams;
use llama_cpp_2::token::LlamaToken;
use std::num::NonZeroU32;
use std::path::Path;
use std::time::Instant;

/// Rows of one prompt batch: llama.cpp's default micro-batch.
const BATCH_ROWS: usize = 512;

pub(crate) struct Peer {
    backend: LlamaBackend,
    model: LlamaModel,
    threads: i32,
}

impl Peer {
    pub(crate) fn load(path: &Path, threads: usize) -> Result<Self> {
        let mut backend = LlamaBackend::init().context("starting llama.cpp")?;
        backend.void_logs();
        let model = LlamaModel::load_from_file(&backend, path, &LlamaModelParams::default())
            .with_context(|| format!("llama.cpp cannot load {}", path.display()))?;
        Ok(Self { backend, model, threads: i32::try_from(threads)? })
    }

    pub(crate) fn measure(&self, shape: Workload) -> Result<TokenRates> {
        let context_tokens = u32::try_from(shape.streams * (shape.prompt_tokens + shape.tokens + 1))?;
        let params = LlamaContextParams::default()
            .with_n_ctx(NonZeroU32::new(context_tokens))
            .with_n_batch(u32::try_from(BATCH_ROWS.max(shape.streams))?)
            .with_n_ubatch(u32::try_from(BATCH_ROWS.max(shape.streams))?)
            .with_n_seq_max(u32::try_from(shape.streams)?)
            .with_n_threads(self.threads)
            .with_n_threads_batch(self.threads);
        let mut context = self.model.new_context(&self.backend, params).context("llama.cpp context")?;
        let mut batch = LlamaBatch::new(BATCH_ROWS.max(shape.streams), 1);
        let vocabulary = u32::try_from(self.model.n_vocab())?;

        let started = Instant::now();
        let mut next = Vec::with_capacity(shape.streams);
        for stream in 0..shape.streams {
            let prompt = shape.prompt(stream, vocabulary);
            let mut last_row = 0;
            for (chunk_index, chunk) in prompt.chunks(BATCH_ROWS).enumerate() {
                batch.clear();
                for (offset, token) in chunk.iter().enumerate() {
                    let position = chunk_index * BATCH_ROWS + offset;
                    let wanted = position + 1 == prompt.len();
                    batch.add(
                        LlamaToken(i32::try_from(*token)?),
                        i32::try_from(position)?,
                        &[i32::try_from(stream)?],
                        wanted,
                    )?;
                }
                context.decode(&mut batch).context("llama.cpp prompt")?;
                last_row = i32::try_from(chunk.len() - 1)?;
            }
            next.push(argmax(context.get_logits_ith(last_row)));
        }
        let prompt_seconds = started.elapsed().as_secs_f64();

        let started = Instant::now();
        for step in 0..shape.tokens {
            batch.clear();
            for (stream, token) in next.iter().enumerate() {
                let position = shape.prompt_tokens + step;
                batch.add(LlamaToken(*token), i32::try_from(position)?, &[i32::try_from(stream)?], true)?;
            }
            context.decode(&mut batch).context("llama.cpp decode")?;
            for (stream, token) in next.iter_mut().enumerate() {
                *token = argmax(context.get_logits_ith(i32::try_from(stream)?));
            }
        }
        let decode_seconds = started.elapsed().as_secs_f64();
        Ok(TokenRates {
            prompt: (shape.streams * shape.prompt_tokens) as f64 / prompt_seconds,
            decode: (shape.streams * shape.tokens) as f64 / decode_seconds,
        })
    }
}

fn argmax(logits: &[f32]) -> i32 {
    let best = logits.iter().enumerate().max_by(|a, b| a.1.total_cmp(b.1));
    best.map_or(0, |(index, _)| index as i32)
}
