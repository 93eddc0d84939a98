// SPDX-License-Identifier: Apache-2.0

//! [`KernelCommand`] describes one op by device addresses. The recorder collects commands and
//! enqueues those of a step in two parts. If a list of commands repeats, the recorder replays it as
//! a CUDA graph.

use ops::{Activation, KvType};

use super::expert_command::ExpertCommand;
use super::operand::{ActivationTiles, AttentionOperands, ByteRange, F32Bits, FloatRange, WeightMatrix};
use super::step::WordRange;
use crate::cuda::attention::AttentionPlanAddress;
use crate::cuda::kv_write::KvLayerAddress;

#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(super) enum KernelCommand {
    Norm {
        x: FloatRange,
        weight: FloatRange,
        eps: F32Bits,
        out: FloatRange,
    },
    AddNorm {
        x: FloatRange,
        y: FloatRange,
        weight: FloatRange,
        eps: F32Bits,
        out: FloatRange,
    },
    NormHeads {
        x: FloatRange,
        weight: FloatRange,
        eps: F32Bits,
    },
    Add {
        x: FloatRange,
        y: FloatRange,
    },
    Scale {
        x: FloatRange,
        factor: F32Bits,
    },
    Embed {
        table: WeightMatrix,
        tokens: WordRange,
        /// The tokens that were drawn on the device last.
        drawn: WordRange,
        out: FloatRange,
    },
    Quantize {
        x: FloatRange,
        activation_tiles: ActivationTiles,
    },
    Product {
        activation_tiles: ActivationTiles,
        matrix: WeightMatrix,
        bias: Option<FloatRange>,
        out: FloatRange,
    },
    Rope {
        x: FloatRange,
        positions: WordRange,
        adjacent: bool,
        frequencies: FloatRange,
        magnitude: F32Bits,
        head_dim: u32,
    },
    KvWrite {
        layer: KvLayerAddress,
        kind: KvType,
        keys: FloatRange,
        values: FloatRange,
        slots: WordRange,
        kv_heads: u32,
        head_dim: u32,
    },
    /// `plan` is an index into [`CommandList::plans`].
    AttentionPaged {
        operands: AttentionOperands,
        plan: u32,
    },
    AttentionScalar {
        operands: AttentionOperands,
        table_starts: WordRange,
        positions: WordRange,
    },
    /// In place. `pairs_of_rows` is set for slots of experts: rows whose word is `NO_PAIR` may be
    /// left as they are.
    Gated {
        activation: Activation,
        gate: FloatRange,
        up: FloatRange,
        pairs_of_rows: Option<WordRange>,
    },
    Gather {
        x: FloatRange,
        rows: WordRange,
        cols: u32,
        out: FloatRange,
    },
    Argmax {
        x: FloatRange,
        cols: u32,
        out: WordRange,
    },
    /// `work` holds u64 words. With `tokens`, only tokens are drawn.
    Shortlist {
        x: FloatRange,
        cols: u32,
        draw_params: WordRange,
        work: ByteRange,
        tokens: Option<WordRange>,
    },
    Experts(ExpertCommand),
}

/// A list of commands, and the attention plans that its commands name.
#[derive(Clone, Debug, Default, PartialEq, Eq, Hash)]
pub(super) struct CommandList {
    pub(super) list: Vec<KernelCommand>,
    pub(super) plans: Vec<AttentionPlanAddress>,
}
