// SPDX-License-Identifier: Apache-2.0

//! The workspace of a worker on the host. Only the process as a whole can be measured there: each
//! part is an upper bound, and `tests/workspace.rs` compares their sum with a worker under load.

use kernels::cpu::{CpuWorkerShape, predict_host_bytes};
use models::{ForwardLimits, ModelDescription};
use ops::KvLayout;
use quant::DType;

use crate::config::WorkerConfig;
use crate::workspace::WorkspaceBytes;

/// The process with its threads (3 MiB when idle), requests, queued outputs, compiled grammars of
/// usual size, and freed memory that the allocator keeps.
const PROCESS_BYTES: u64 = 24 << 20;

/// The vocabulary in the form that grammars need, per token: 15 MB for 150,000 tokens, from the
/// first grammar on.
const GRAMMAR_BYTES_PER_TOKEN: usize = 100;

/// Buffers of the sampler, per token of the vocabulary: the row after penalties and after
/// temperature, two lists of candidates, the best candidates, and weights.
const SAMPLER_BYTES_PER_TOKEN: usize = 36;

/// What the block pool, its index and its event log keep for each block, beside one mark for each
/// layer.
const POOL_BYTES_PER_BLOCK: usize = 160;

/// The whole workspace of a worker with this model.
pub(super) fn worker_workspace(
    config: &WorkerConfig,
    layout: &KvLayout,
    model: &ModelDescription,
    dtypes: &[DType],
) -> WorkspaceBytes {
    let engine = config.engine_config();
    let vocab_size = model.vocab_size;
    let deferred_logits = engine.kept_rows_max(vocab_size) * vocab_size * size_of::<f32>();
    let vocabulary = vocab_size * (GRAMMAR_BYTES_PER_TOKEN + SAMPLER_BYTES_PER_TOKEN);
    let block_pool = layout.blocks.saturating_mul(POOL_BYTES_PER_BLOCK + layout.layers.len());
    let model = model_workspace(config, engine.model_limits(vocab_size), model, dtypes);
    WorkspaceBytes {
        activations: model.activations + deferred_logits as u64,
        process: PROCESS_BYTES + (vocabulary + block_pool) as u64,
        ..model
    }
}

/// What the steps of one model take: the worker's own model, or its draft model.
pub(super) fn model_workspace(
    config: &WorkerConfig,
    limits: ForwardLimits,
    model: &ModelDescription,
    dtypes: &[DType],
) -> WorkspaceBytes {
    let shape = CpuWorkerShape {
        threads: config.threads,
        rows_at_once: limits.rows_at_once(model.experts),
        context_tokens: config
            .context_tokens
            .map_or(model.context_length, |limit| limit.min(model.context_length)),
        embedding: model.embedding_length,
        heads: model.heads,
        kv_heads: model.kv_heads,
        head_dim: model.head_dim,
        feed_forward: model.feed_forward,
        experts: model.experts,
        experts_used: model.experts_used,
        dtypes: dtypes.to_vec(),
    };
    WorkspaceBytes {
        activations: model.workspace_tensors(limits).sum(),
        scratch: predict_host_bytes(&shape),
        ..WorkspaceBytes::default()
    }
}
