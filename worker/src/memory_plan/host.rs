//! What a worker on the host takes beside keys and values. Nothing measures the parts there, only the process as a whole: each
//! is an upper bound, and `tests/workspace.rs` compares their sum with a worker that has worked.

use kernels::cpu::{WorkerShape, predict};
use models::{Limits, ModelDescription};
use ops::KvLayout;
use quant::DType;

use super::Workspace;
use crate::config::WorkerConfig;

/// The process with its threads (3 MiB when idle), requests and what is on its way to clients, compiled grammars of usual size,
/// and what the allocator keeps of what was freed.
const PROCESS_BYTES: u64 = 24 << 20;

/// The vocabulary as grammars need it, by token: 15 MB for 150,000, from the first grammar on.
const GRAMMAR_TOKEN_BYTES: usize = 100;

/// Buffers of the sampler, by token: the row after penalties and after temperature, two lists of candidates, the best of them,
/// and weights.
const SAMPLER_TOKEN_BYTES: usize = 36;

/// What the pool, its index and its log keep of a block, beside a mark for each layer.
const BLOCK_BYTES: usize = 160;

/// Of a worker with this model.
pub(super) fn workspace(
    config: &WorkerConfig,
    layout: &KvLayout,
    model: &ModelDescription,
    dtypes: &[DType],
) -> Workspace {
    let engine = config.engine();
    let vocab_size = model.vocab_size;
    let rows = engine.kept_rows_max(vocab_size) * vocab_size * size_of::<f32>();
    let by_token = vocab_size * (GRAMMAR_TOKEN_BYTES + SAMPLER_TOKEN_BYTES);
    let books = layout.blocks.saturating_mul(BLOCK_BYTES + layout.layers.len());
    let model = of_model(config, engine.model_limits(vocab_size), model, dtypes);
    Workspace {
        activations: model.activations + rows as u64,
        process: PROCESS_BYTES + (by_token + books) as u64,
        ..model
    }
}

/// What steps of one model take, of the worker's own or of one that drafts for it.
pub(super) fn of_model(
    config: &WorkerConfig,
    limits: Limits,
    model: &ModelDescription,
    dtypes: &[DType],
) -> Workspace {
    let shape = WorkerShape {
        threads: config.threads,
        rows_at_once: limits.rows_at_once(),
        context_tokens: config
            .context_tokens
            .map_or(model.context_length, |cut| cut.min(model.context_length)),
        embedding: model.embedding_length,
        heads: model.heads,
        kv_heads: model.kv_heads,
        head_dim: model.head_dim,
        feed_forward: model.feed_forward,
        experts: model.experts,
        experts_used: model.experts_used,
        dtypes: dtypes.to_vec(),
    };
    Workspace {
        activations: model.workspace_tensors(limits).sum(),
        scratch: predict(&shape),
        ..Workspace::default()
    }
}
