// SPDX-License-Identifier: Apache-2.0

//! The pre-norm transformer decoder of llama, qwen2, qwen3 and gemma3.
//!
//! ```text
//! x = embedding(token)
//! per layer:  h = x + attention(norm(x))      x = h + feed_forward(norm(h))
//! logits = output(norm(x))
//! ```
//!
//! [`DecoderConfig`] has the options that only some of the architectures use.

use crate::{
    ForwardLimits, Model, ModelDescription, OutputKind, Pooling, TakeOutputs, WeightError, WeightTable,
    attention::Attention,
    feed_forward::FeedForward,
    model::{BuildModelError, kv_layers},
    rope::{self, RopeConfig},
    scratch::DecoderScratch,
};
use ops::{Activation, AttentionSpan, Backend, KvLayer, KvTypes, Linear, OpError, Step, Weight};
use std::{convert::Infallible, ops::Range};

/// Hyperparameters and options of a decoder. All counts are at least one and bounded (see
/// `config.rs`).
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct DecoderConfig {
    pub(crate) vocab_size: usize,
    pub(crate) context_length: usize,
    pub(crate) embedding: usize,
    pub(crate) layers: usize,
    pub(crate) heads: usize,
    pub(crate) kv_heads: usize,
    /// Values per head of queries, keys and values; not always `embedding / heads`.
    pub(crate) head_dim: usize,
    /// Width inside the feed-forward block, or inside one expert.
    pub(crate) feed_forward: usize,
    pub(crate) experts: Option<ExpertsConfig>,
    pub(crate) activation: Activation,
    pub(crate) norm_epsilon: f32,
    /// Whether each query and key head is normalized before rope.
    pub(crate) head_norms: bool,
    /// Whether the output of a block is normalized before it is added to the residual stream.
    pub(crate) post_norms: bool,
    /// Factor on the embedding of a token.
    pub(crate) embedding_scale: Option<f32>,
    /// Factor on the products of queries and keys.
    pub(crate) attention_scale: f32,
    pub(crate) rope: RopeConfig,
    /// Rope of layers with an attention window, if it differs.
    pub(crate) window_rope: Option<RopeConfig>,
    /// Attention span of each layer.
    pub(crate) attention_spans: Vec<AttentionSpan>,
    pub(crate) pooling: Option<Pooling>,
    /// Labels of the classifier. 0 without one.
    pub(crate) labels: usize,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct ExpertsConfig {
    pub(crate) count: usize,
    pub(crate) used: usize,
}

impl DecoderConfig {
    pub(crate) fn describe(&self, architecture: &str, unread_tensors: Vec<String>) -> ModelDescription {
        ModelDescription {
            architecture: architecture.to_owned(),
            vocab_size: self.vocab_size,
            context_length: self.context_length,
            embedding_length: self.embedding,
            layers: self.layers,
            heads: self.heads,
            kv_heads: self.kv_heads,
            head_dim: self.head_dim,
            attention_spans: self.attention_spans.clone(),
            feed_forward: self.feed_forward,
            experts: self.experts.map_or(0, |experts| experts.count),
            experts_used: self.experts.map_or(0, |experts| experts.used),
            pooling: self.pooling,
            workspace_row_widths: self.workspace_widths(1, 0),
            workspace_output_widths: self.workspace_widths(0, 1),
            unread_tensors,
        }
    }

    /// Widths of the scratch tensors, if those with a row per row have `rows` rows and those with a
    /// row per output have `outputs` rows.
    fn workspace_widths(&self, rows: usize, outputs: usize) -> Vec<usize> {
        let mut widths = Vec::new();
        let Ok(_) = DecoderScratch::new(self, rows, outputs, |rows, cols| {
            widths.extend((rows > 0).then_some(cols));
            Ok::<_, Infallible>(())
        });
        widths
    }
}

/// Every tensor that the decoder reads.
pub(crate) struct DecoderWeights<B: Backend> {
    embedding: Weight<B>,
    layers: Vec<DecoderLayer<B>>,
    output_norm: Weight<B>,
    output: Linear<B>,
    /// From the hidden state to the labels.
    classifier: Option<Linear<B>>,
    /// Divisors of the rope angles, `[n_rot / 2]` (Llama 3.1 and later).
    rope_factors: Option<Weight<B>>,
}

struct DecoderLayer<B: Backend> {
    attention_norm: Weight<B>,
    attention: Attention<B>,
    attention_post_norm: Option<Weight<B>>,
    feed_forward_norm: Weight<B>,
    feed_forward: FeedForward<B>,
    feed_forward_post_norm: Option<Weight<B>>,
}

impl<B: Backend> DecoderWeights<B> {
    pub(crate) fn take(config: &DecoderConfig, table: &mut WeightTable<B>) -> Result<Self, WeightError> {
        let width = config.embedding;
        let embedding = table.take("token_embd.weight", &[width, config.vocab_size])?;
        // Without an output tensor, the model uses the embedding table (tied embeddings).
        let output = match table.take_optional("output.weight", &[width, config.vocab_size])? {
            Some(weight) => weight,
            None => embedding.clone(),
        };
        let output_bias = table.take_optional_vector("output.bias", config.vocab_size)?;
        let layers = (0..config.layers)
            .map(|index| {
                let prefix = format!("blk.{index}");
                let norm = |table: &mut WeightTable<B>, name| {
                    table.take_vector(&format!("{prefix}.{name}.weight"), width)
                };
                let post_norm = |table: &mut WeightTable<B>, name| {
                    config.post_norms.then(|| norm(table, name)).transpose()
                };
                Ok(DecoderLayer {
                    attention_norm: norm(table, "attn_norm")?,
                    attention: Attention::take(table, config, &prefix)?,
                    attention_post_norm: post_norm(table, "post_attention_norm")?,
                    feed_forward_norm: norm(table, "ffn_norm")?,
                    feed_forward: FeedForward::take(table, config, &prefix)?,
                    feed_forward_post_norm: post_norm(table, "post_ffw_norm")?,
                })
            })
            .collect::<Result<_, _>>()?;
        Ok(Self {
            embedding,
            layers,
            output_norm: table.take_vector("output_norm.weight", width)?,
            output: Linear { weight: output, bias: output_bias },
            classifier: match config.labels {
                0 => None,
                labels => Some(table.take_linear("cls.output", width, labels)?),
            },
            rope_factors: table.take_optional_vector("rope_freqs.weight", config.rope.rotated / 2)?,
        })
    }
}

/// Weights, angles and scratch memory of one decoder.
pub(crate) struct Decoder<B: Backend> {
    config: DecoderConfig,
    weights: DecoderWeights<B>,
    rope: B::Rope,
    /// Rope of layers with an attention window, if it differs.
    window_rope: Option<B::Rope>,
    scratch: DecoderScratch<B::Tensor>,
    rows_at_once: usize,
    outputs_at_once: usize,
}

impl<B: Backend> Decoder<B> {
    pub(crate) fn new(
        config: DecoderConfig,
        weights: DecoderWeights<B>,
        backend: &mut B,
        limits: ForwardLimits,
    ) -> Result<Self, BuildModelError> {
        let factors = match &weights.rope_factors {
            Some(weight) => Some(rope::read_factors(backend, weight)?),
            None => None,
        };
        let rope = backend.rope_table(&config.rope.spec(factors.as_deref()))?;
        let window_rope = match &config.window_rope {
            Some(rope) => Some(backend.rope_table(&rope.spec(None))?),
            None => None,
        };
        let experts = config.experts.map_or(0, |experts| experts.count);
        let rows_at_once = limits.rows_at_once(experts);
        let outputs_at_once = limits.outputs_at_once(config.vocab_size, experts);
        let scratch = DecoderScratch::new(&config, rows_at_once, outputs_at_once, |rows, cols| {
            backend.tensor(rows, cols)
        })?;
        Ok(Self { config, weights, rope, window_rope, scratch, rows_at_once, outputs_at_once })
    }

    /// Computes at most `rows_at_once` rows. `before` counts the outputs of earlier passes of the
    /// step.
    fn run(
        &mut self,
        backend: &mut B,
        kv: &mut B::Kv,
        step: &Step<'_>,
        before: usize,
        kinds: &[OutputKind],
        take: &mut TakeOutputs<'_, B>,
    ) -> Result<(), OpError> {
        let Self { config, weights, rope, window_rope, scratch, .. } = self;
        let DecoderScratch { residual, normed, delta, attention, feed_forward, .. } = scratch;
        let epsilon = config.norm_epsilon;
        let rows = step.rows();

        backend.begin(step)?;
        backend.embed(&weights.embedding, residual, rows)?;
        if let Some(factor) = config.embedding_scale {
            backend.scale(residual, factor, rows, config.embedding)?;
        }
        let mut layers = weights.layers.iter().enumerate().peekable();
        if let Some((_, first)) = layers.peek() {
            backend.rms_norm(residual, &first.attention_norm, epsilon, normed, rows)?;
        }
        while let Some((index, layer)) = layers.next() {
            let rope = match (config.attention_spans[index], &*window_rope) {
                (AttentionSpan::Window { .. }, Some(own)) => own,
                _ => &*rope,
            };
            layer.attention.forward(backend, kv, index, rope, config, normed, attention, delta, rows)?;
            post_norm(backend, layer.attention_post_norm.as_ref(), delta, epsilon, rows)?;
            let Some((_, next)) = layers.peek() else { break };
            backend.add_rms_norm(residual, delta, &layer.feed_forward_norm, epsilon, normed, rows)?;
            layer.feed_forward.forward(backend, config.activation, normed, feed_forward, delta, rows)?;
            post_norm(backend, layer.feed_forward_post_norm.as_ref(), delta, epsilon, rows)?;
            backend.add_rms_norm(residual, delta, &next.attention_norm, epsilon, normed, rows)?;
        }
        // After the last attention, only rows that are outputs are computed.
        let outputs = step.outputs.len();
        let kind_of = |output: usize| kinds.get(before + output).copied().unwrap_or_default();
        let at_once = self.outputs_at_once.max(1);
        let end_of_run = |first: usize| {
            let most = outputs.min(first + at_once);
            (first..most).find(|&output| kind_of(output) != kind_of(first)).unwrap_or(most)
        };
        // Of one run alone: `output_rows` overwrites the residual stream and `delta`.
        let are_in_place = end_of_run(0) == rows && step.outputs.iter().copied().eq(0..rows as u32);
        if outputs > 0 && !are_in_place {
            backend.add(residual, delta, rows)?;
        }
        let mut first = 0;
        while first < outputs {
            let (kind, end) = (kind_of(first), end_of_run(first));
            self.output_rows(backend, first..end, kind, are_in_place)?;
            let DecoderScratch { normed, logits, labels, .. } = &self.scratch;
            let rows = match (kind, labels) {
                (OutputKind::Logits, _) => logits,
                (OutputKind::HiddenState, _) | (OutputKind::Labels, None) => normed,
                (OutputKind::Labels, Some(labels)) => labels,
            };
            take(backend, before + first..before + end, rows)?;
            first = end;
        }
        Ok(())
    }

    /// The feed-forward block of the last layer, the output norm, and the output layer or the
    /// classifier, for a range of outputs of one kind. If the outputs are all rows in order, they
    /// need not be gathered; then the last attention is not yet added to the residual stream.
    fn output_rows(
        &mut self,
        backend: &mut B,
        run: Range<usize>,
        kind: OutputKind,
        are_in_place: bool,
    ) -> Result<(), OpError> {
        let Self { config, weights, scratch, .. } = self;
        let DecoderScratch { residual, normed, delta, feed_forward, selected, logits, labels, .. } = scratch;
        let (epsilon, rows) = (config.norm_epsilon, run.len());
        let stream = if are_in_place {
            residual
        } else {
            backend.gather_outputs(residual, run, selected)?;
            selected
        };
        if let Some(last) = weights.layers.last() {
            if are_in_place {
                backend.add_rms_norm(stream, delta, &last.feed_forward_norm, epsilon, normed, rows)?;
            } else {
                backend.rms_norm(stream, &last.feed_forward_norm, epsilon, normed, rows)?;
            }
            last.feed_forward.forward(backend, config.activation, normed, feed_forward, delta, rows)?;
            post_norm(backend, last.feed_forward_post_norm.as_ref(), delta, epsilon, rows)?;
            backend.add_rms_norm(stream, delta, &weights.output_norm, epsilon, normed, rows)?;
        }
        match (kind, &weights.classifier, labels) {
            (OutputKind::Logits, _, _) => backend.linear(&weights.output, normed, logits, rows),
            (OutputKind::HiddenState, _, _) => Ok(()),
            (OutputKind::Labels, Some(classifier), Some(labels)) => {
                backend.linear(classifier, normed, labels, rows)
            }
            (OutputKind::Labels, _, _) => {
                let (found, expected) = (0, 1);
                Err(OpError::Shape { op: "labels", what: "number of labels", found, expected })
            }
        }
    }
}

/// `delta = norm(delta)`, in place. Each row is treated as one head.
fn post_norm<B: Backend>(
    backend: &mut B,
    norm: Option<&Weight<B>>,
    delta: &mut B::Tensor,
    epsilon: f32,
    rows: usize,
) -> Result<(), OpError> {
    norm.map_or(Ok(()), |norm| backend.rms_norm_heads(delta, norm, epsilon, rows))
}

impl<B: Backend> Model<B> for Decoder<B> {
    fn vocab_size(&self) -> usize {
        self.config.vocab_size
    }

    fn context_length(&self) -> usize {
        self.config.context_length
    }

    fn kv_layers(&self, types: &KvTypes) -> Vec<KvLayer> {
        let Self { config, .. } = self;
        kv_layers(&config.attention_spans, config.kv_heads, config.head_dim, types)
    }

    fn output_width(&self, kind: OutputKind) -> usize {
        match kind {
            OutputKind::Logits => self.config.vocab_size,
            OutputKind::HiddenState => self.config.embedding,
            OutputKind::Labels => self.config.labels,
        }
    }

    fn forward(
        &mut self,
        backend: &mut B,
        kv: &mut B::Kv,
        step: &Step<'_>,
        kinds: &[OutputKind],
        take: &mut TakeOutputs<'_, B>,
    ) -> Result<(), OpError> {
        let groups = step.groups();
        let mut outputs = step.outputs;
        let mut own_outputs = Vec::new();
        for first in (0..step.rows()).step_by(self.rows_at_once.max(1)) {
            let rows = first..step.rows().min(first + self.rows_at_once);
            let (own, later) =
                outputs.split_at(outputs.partition_point(|&output| (output as usize) < rows.end));
            own_outputs.clear();
            own_outputs.extend(own.iter().map(|&output| output - first as u32));
            let part = Step {
                tokens: &step.tokens[rows.clone()],
                positions: &step.positions[rows.clone()],
                sequences: &step.sequences[rows.clone()],
                kv_slots: &step.kv_slots[rows.start * groups..rows.end * groups],
                tables: step.tables,
                outputs: &own_outputs,
            };
            self.run(backend, kv, &part, step.outputs.len() - outputs.len(), kinds, take)?;
            outputs = later;
        }
        Ok(())
    }
}
