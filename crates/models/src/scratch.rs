// SPDX-License-Identifier: Apache-2.0

//! The activation tensors of a decoder. Each is allocated once, for the rows computed together.

use crate::decoder::DecoderConfig;

/// One tensor per role. `T` is a backend's tensor, or a number when memory is planned.
pub(crate) struct DecoderScratch<T> {
    /// The residual stream.
    pub(crate) residual: T,
    /// The normalized residual stream, which is the input of the current block.
    pub(crate) normed: T,
    /// The output of the current block, to be added to the residual stream.
    pub(crate) delta: T,
    pub(crate) attention: AttentionTensors<T>,
    pub(crate) feed_forward: FeedForwardTensors<T>,
    /// The residual stream of the rows that are outputs.
    pub(crate) selected: T,
    pub(crate) logits: T,
    /// The result of the classifier, in models that have one.
    pub(crate) labels: Option<T>,
}

pub(crate) struct AttentionTensors<T> {
    pub(crate) queries: T,
    pub(crate) keys: T,
    pub(crate) values: T,
    /// The attention output, before the output projection.
    pub(crate) mixed: T,
}

pub(crate) enum FeedForwardTensors<T> {
    Dense {
        /// Also the product of both.
        gate: T,
        up: T,
    },
    /// Router logits. The backend allocates what the experts need.
    Experts { router: T },
}

impl<T> DecoderScratch<T> {
    /// Calls `tensor(rows or outputs, cols)` for each tensor.
    pub(crate) fn new<E>(
        config: &DecoderConfig,
        rows: usize,
        outputs: usize,
        mut tensor: impl FnMut(usize, usize) -> Result<T, E>,
    ) -> Result<Self, E> {
        let query_width = config.heads * config.head_dim;
        let key_width = config.kv_heads * config.head_dim;
        Ok(Self {
            residual: tensor(rows, config.embedding)?,
            normed: tensor(rows, config.embedding)?,
            delta: tensor(rows, config.embedding)?,
            attention: AttentionTensors {
                queries: tensor(rows, query_width)?,
                keys: tensor(rows, key_width)?,
                values: tensor(rows, key_width)?,
                mixed: tensor(rows, query_width)?,
            },
            feed_forward: match config.experts {
                None => FeedForwardTensors::Dense {
                    gate: tensor(rows, config.feed_forward)?,
                    up: tensor(rows, config.feed_forward)?,
                },
                Some(experts) => FeedForwardTensors::Experts { router: tensor(rows, experts.count)? },
            },
            selected: tensor(outputs, config.embedding)?,
            logits: tensor(outputs, config.vocab_size)?,
            labels: match config.labels {
                0 => None,
                labels => Some(tensor(outputs, labels)?),
            },
        })
    }
}
