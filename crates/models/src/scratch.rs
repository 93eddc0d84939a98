//! The activations of a decoder: each tensor is allocated once, for the rows computed at once.

use crate::decoder::DecoderConfig;

/// One tensor per role. `T` is a backend's tensor, or a number when memory is planned.
pub(crate) struct DecoderScratch<T> {
    /// The residual stream.
    pub(crate) residual: T,
    /// The residual stream after a norm: the input of the block at hand.
    pub(crate) normed: T,
    /// What the block at hand adds to the residual stream.
    pub(crate) delta: T,
    pub(crate) attention: AttentionScratch<T>,
    pub(crate) feed_forward: FeedForwardScratch<T>,
    /// The residual stream of the rows whose logits are wanted.
    pub(crate) selected: T,
    pub(crate) logits: T,
}

pub(crate) struct AttentionScratch<T> {
    pub(crate) queries: T,
    pub(crate) keys: T,
    pub(crate) values: T,
    /// Values mixed by attention, before the output projection.
    pub(crate) mixed: T,
}

pub(crate) enum FeedForwardScratch<T> {
    Dense {
        gate: T,
        up: T,
        product: T,
    },
    /// Router logits. What the experts need is the backend's matter.
    Experts {
        router: T,
    },
}

impl<T> DecoderScratch<T> {
    /// Calls `tensor(rows or outputs, cols)` for each.
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
            attention: AttentionScratch {
                queries: tensor(rows, query_width)?,
                keys: tensor(rows, key_width)?,
                values: tensor(rows, key_width)?,
                mixed: tensor(rows, query_width)?,
            },
            feed_forward: match config.experts {
                None => FeedForwardScratch::Dense {
                    gate: tensor(rows, config.feed_forward)?,
                    up: tensor(rows, config.feed_forward)?,
                    product: tensor(rows, config.feed_forward)?,
                },
                Some(experts) => FeedForwardScratch::Experts { router: tensor(rows, experts.count)? },
            },
            selected: tensor(outputs, config.embedding)?,
            logits: tensor(outputs, config.vocab_size)?,
        })
    }
}
