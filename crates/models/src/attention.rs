// SPDX-License-Identifier: Apache-2.0

//! Grouped-query self-attention: projections, optional norms of query and key heads, rope, KV cache
//! write, attention, output projection.

use crate::{WeightError, WeightTable, decoder::DecoderConfig, scratch::AttentionTensors};
use ops::{AttentionSpec, Backend, Linear, OpError, Weight};

pub(crate) struct Attention<B: Backend> {
    query: Linear<B>,
    key: Linear<B>,
    value: Linear<B>,
    output: Linear<B>,
    /// Norm weights of query and key heads, applied before rope (qwen3, gemma3).
    head_norms: Option<HeadNorms<B>>,
}

struct HeadNorms<B: Backend> {
    query: Weight<B>,
    key: Weight<B>,
}

impl<B: Backend> Attention<B> {
    pub(crate) fn take(
        table: &mut WeightTable<B>,
        config: &DecoderConfig,
        prefix: &str,
    ) -> Result<Self, WeightError> {
        let query_width = config.heads * config.head_dim;
        let key_width = config.kv_heads * config.head_dim;
        let head_norms = if config.head_norms {
            Some(HeadNorms {
                query: table.take_vector(&format!("{prefix}.attn_q_norm.weight"), config.head_dim)?,
                key: table.take_vector(&format!("{prefix}.attn_k_norm.weight"), config.head_dim)?,
            })
        } else {
            None
        };
        Ok(Self {
            query: table.take_linear(&format!("{prefix}.attn_q"), config.embedding, query_width)?,
            key: table.take_linear(&format!("{prefix}.attn_k"), config.embedding, key_width)?,
            value: table.take_linear(&format!("{prefix}.attn_v"), config.embedding, key_width)?,
            output: table.take_linear(&format!("{prefix}.attn_output"), query_width, config.embedding)?,
            head_norms,
        })
    }

    /// `delta = attention(normed)`. Writes the step's keys and values of `layer` to the KV cache.
    #[expect(clippy::too_many_arguments, reason = "operands of one op, each of its own type")]
    pub(crate) fn forward(
        &self,
        backend: &mut B,
        kv: &mut B::Kv,
        layer: usize,
        rope: &B::Rope,
        config: &DecoderConfig,
        normed: &B::Tensor,
        scratch: &mut AttentionTensors<B::Tensor>,
        delta: &mut B::Tensor,
        rows: usize,
    ) -> Result<(), OpError> {
        let AttentionTensors { queries, keys, values, mixed } = scratch;
        backend.linears(
            normed,
            &mut [(&self.query, queries), (&self.key, keys), (&self.value, values)],
            rows,
        )?;
        if let Some(norms) = &self.head_norms {
            backend.rms_norm_heads(queries, &norms.query, config.norm_epsilon, rows)?;
            backend.rms_norm_heads(keys, &norms.key, config.norm_epsilon, rows)?;
        }
        backend.rope(queries, rope, config.head_dim, rows)?;
        backend.rope(keys, rope, config.head_dim, rows)?;
        backend.kv_write(kv, layer, keys, values, rows)?;
        let spec = AttentionSpec {
            heads: config.heads,
            kv_heads: config.kv_heads,
            head_dim: config.head_dim,
            scale: config.attention_scale,
        };
        backend.attention(kv, layer, queries, &spec, mixed, rows)?;
        backend.linear(&self.output, mixed, delta, rows)
    }
}
