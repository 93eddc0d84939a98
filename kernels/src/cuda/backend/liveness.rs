// SPDX-License-Identifier: Apache-2.0

//! Finds values that nothing reads. A kernel that quantizes its values then need not write the
//! values themselves: about a quarter of the bytes of a gate, and a fifth of those of a norm.

use super::command::KernelCommand;
use super::operand::{ByteRange, FloatRange};

/// Whether a command of `behind` overwrites all of `values` before any command reads them. What is
/// left at the end of the list may be read later, by the host or by further commands.
pub(super) fn are_overwritten_unread(values: FloatRange, behind: &[KernelCommand]) -> bool {
    for command in behind {
        let mut reads = false;
        command.for_each_input(|input| reads |= input.overlaps(values.bytes()));
        if reads {
            return false;
        }
        if command.overwrites(values) {
            return true;
        }
    }
    false
}

impl KernelCommand {
    /// Calls `each` for the values and activation tiles that the command reads.
    fn for_each_input(&self, mut each: impl FnMut(ByteRange)) {
        match *self {
            Self::Norm { x, .. } | Self::NormHeads { x, .. } | Self::Scale { x, .. } => each(x.bytes()),
            Self::AddNorm { x, y, .. } | Self::Add { x, y } => {
                each(x.bytes());
                each(y.bytes());
            }
            Self::Embed { .. } => {}
            Self::Quantize { x, .. }
            | Self::Rope { x, .. }
            | Self::Gather { x, .. }
            | Self::Argmax { x, .. }
            | Self::Shortlist { x, .. } => each(x.bytes()),
            // Rows of F32 products are read as they are.
            Self::Product { activation_tiles, .. } => each(activation_tiles.range),
            Self::KvWrite { keys, values, .. } => {
                each(keys.bytes());
                each(values.bytes());
            }
            Self::AttentionPaged { operands, .. } | Self::AttentionScalar { operands, .. } => {
                each(operands.queries.bytes());
            }
            Self::Gated { gate, up, .. } => {
                each(gate.bytes());
                each(up.bytes());
            }
            Self::Experts(ref command) => command.for_each_input(each),
        }
    }

    /// Whether the command writes all of `values`. An attention command may write a part of its
    /// rows alone.
    fn overwrites(&self, values: FloatRange) -> bool {
        match *self {
            Self::Norm { out, .. }
            | Self::AddNorm { out, .. }
            | Self::Embed { out, .. }
            | Self::Product { out, .. }
            | Self::Gather { out, .. } => out.bytes().covers(values.bytes()),
            Self::Experts(ref command) => command.overwrites(values),
            Self::NormHeads { .. }
            | Self::Add { .. }
            | Self::Scale { .. }
            | Self::Quantize { .. }
            | Self::Rope { .. }
            | Self::KvWrite { .. }
            | Self::Gated { .. }
            | Self::AttentionPaged { .. }
            | Self::AttentionScalar { .. }
            | Self::Argmax { .. }
            | Self::Shortlist { .. } => false,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::cuda::quantize::ActivationLayout;
    use quant::DType;

    fn floats(address: u64, len: usize) -> FloatRange {
        FloatRange { address, len }
    }

    fn norm(x: FloatRange, out: FloatRange) -> KernelCommand {
        KernelCommand::Norm { x, weight: floats(0, 8), eps: 1e-6.into(), out }
    }

    fn quantize(x: FloatRange) -> KernelCommand {
        let layout = ActivationLayout::from(DType::Q8_K);
        let range = ByteRange { address: 9_000, len: 64 };
        let tiles = super::super::operand::ActivationTiles { layout, range, tokens: 1, cols: 8 };
        KernelCommand::Quantize { x, activation_tiles: tiles }
    }

    #[test]
    fn values_are_needed_until_a_command_overwrites_all_of_them() {
        let (stream, normed) = (floats(1_000, 16), floats(2_000, 16));
        let next = norm(stream, normed);
        assert!(are_overwritten_unread(normed, &[next]));
        // The host may read what the list leaves.
        assert!(!are_overwritten_unread(normed, &[]));
        assert!(!are_overwritten_unread(normed, &[quantize(stream)]));
        // A reader comes first, of all values or of the last one.
        assert!(!are_overwritten_unread(normed, &[quantize(normed), next]));
        assert!(!are_overwritten_unread(normed, &[quantize(floats(2_060, 1)), next]));
        assert!(are_overwritten_unread(normed, &[quantize(floats(2_064, 1)), next]));
        // The next norm has fewer rows.
        assert!(!are_overwritten_unread(normed, &[norm(stream, floats(2_000, 8))]));
        // In place: it reads what it writes.
        assert!(!are_overwritten_unread(normed, &[norm(normed, normed)]));
    }
}
