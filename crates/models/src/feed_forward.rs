// SPDX-License-Identifier: Apache-2.0

//! [`FeedForward`]: the gated feed-forward block of a layer, dense or a mixture of experts.
//!
//! ```text
//! dense:    delta = down(activation(gate(x)) * up(x))
//! experts:  router(x) selects `used` experts per row; delta = weighted sum of their dense results
//! ```

use crate::{WeightError, WeightTable, decoder::DecoderConfig, scratch::FeedForwardTensors};
use ops::{Activation, Backend, Experts, Linear, OpError};

/// The weights of one block.
pub(crate) enum FeedForward<B: Backend> {
    Dense { gate: Linear<B>, up: Linear<B>, down: Linear<B> },
    Experts { router: Linear<B>, experts: Experts<B> },
}

impl<B: Backend> FeedForward<B> {
    /// Takes the weights of the block from the table. `prefix` is the name of the layer.
    pub(crate) fn take(
        table: &mut WeightTable<B>,
        config: &DecoderConfig,
        prefix: &str,
    ) -> Result<Self, WeightError> {
        let (width, hidden) = (config.embedding, config.feed_forward);
        let Some(experts) = config.experts else {
            return Ok(Self::Dense {
                gate: table.take_linear(&format!("{prefix}.ffn_gate"), width, hidden)?,
                up: table.take_linear(&format!("{prefix}.ffn_up"), width, hidden)?,
                down: table.take_linear(&format!("{prefix}.ffn_down"), hidden, width)?,
            });
        };
        let (count, used) = (experts.count, experts.used);
        Ok(Self::Experts {
            router: table.take_linear(&format!("{prefix}.ffn_gate_inp"), width, count)?,
            experts: Experts {
                gate: table.take(&format!("{prefix}.ffn_gate_exps.weight"), &[width, hidden, count])?,
                up: table.take(&format!("{prefix}.ffn_up_exps.weight"), &[width, hidden, count])?,
                down: table.take(&format!("{prefix}.ffn_down_exps.weight"), &[hidden, width, count])?,
                used,
            },
        })
    }

    /// Computes `delta = feed_forward(normed)` for the first `rows` rows.
    pub(crate) fn forward(
        &self,
        backend: &mut B,
        activation: Activation,
        normed: &B::Tensor,
        scratch: &mut FeedForwardTensors<B::Tensor>,
        delta: &mut B::Tensor,
        rows: usize,
    ) -> Result<(), OpError> {
        match (self, scratch) {
            (Self::Dense { gate, up, down }, FeedForwardTensors::Dense { gate: gated, up: raised }) => {
                backend.linears(normed, &mut [(gate, gated), (up, raised)], rows)?;
                backend.gated(activation, gated, raised, rows)?;
                backend.linear(down, gated, delta, rows)
            }
            (Self::Experts { router, experts }, FeedForwardTensors::Experts { router: logits }) => {
                backend.linear(router, normed, logits, rows)?;
                backend.experts(experts, activation, logits, normed, delta, rows)
            }
            _ => unreachable!("weights and scratch are made from one config"),
        }
    }
}
