// SPDX-License-Identifier: Apache-2.0

//! [`ExpertCommand`]: the commands of a mixture-of-experts layer. experts.rs makes them.

use ops::OpError;

use super::operand::{ActivationTiles, ByteRange, FloatRange, WeightMatrix};
use super::step::WordRange;
use crate::cuda::Stream;
use crate::cuda::experts::{
    ExpertKernels, ExpertRouting, ExpertWeights, FusedExperts, GroupedPairs, PairGrouping,
};
use crate::cuda::row_experts::RowChoice;

/// Pairs of (row, rank), sorted by expert.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(super) struct ExpertGroups {
    pub(super) pairs: u32,
    /// Number of experts.
    pub(super) count: u32,
    pub(super) grouping: PairGrouping,
    pub(super) words: WordRange,
}

/// The experts of one row, of `count`, and their weights.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(super) struct RowChoiceRange {
    pub(super) experts: WordRange,
    pub(super) weights: FloatRange,
    pub(super) count: u32,
}

impl RowChoiceRange {
    /// # Safety
    /// As [`ExpertCommand::enqueue`].
    unsafe fn view<'a>(&self) -> RowChoice<'a> {
        // SAFETY: the caller's contract.
        unsafe {
            let (experts, weights) = (self.experts.view(), self.weights.view());
            RowChoice { experts, weights, count: self.count as usize }
        }
    }
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(super) enum ExpertCommand {
    Route {
        logits: FloatRange,
        used: u32,
        experts: WordRange,
        pair_weights: FloatRange,
        groups: ExpertGroups,
    },
    /// Quantizes rows of `x` in the order of slots, for [`Self::Matmul`].
    Quantize {
        x: FloatRange,
        pairs_per_token: u32,
        groups: ExpertGroups,
        activation_tiles: ActivationTiles,
    },
    /// Products of the slots, on the tensor cores.
    Matmul {
        activation_tiles: ActivationTiles,
        groups: ExpertGroups,
        by_pair: bool,
        first: (WeightMatrix, FloatRange),
        second: Option<(WeightMatrix, FloatRange)>,
    },
    /// Routes one row, and quantizes it.
    RouteRow {
        logits: FloatRange,
        choice: RowChoiceRange,
        x: FloatRange,
        activation_tiles: ActivationTiles,
    },
    /// The gate and up products of one row, `[used, rows]`.
    RowGateAndUp {
        activation_tiles: ActivationTiles,
        choice: RowChoiceRange,
        gate: (WeightMatrix, FloatRange),
        up: (WeightMatrix, FloatRange),
    },
    /// The weighted sum of the down products of one row's pairs.
    RowDown {
        activation_tiles: ActivationTiles,
        choice: RowChoiceRange,
        down: WeightMatrix,
        out: FloatRange,
    },
    Floats {
        x: FloatRange,
        experts: WordRange,
        pairs_per_token: u32,
        count: u32,
        expert_weights: WeightMatrix,
        out: FloatRange,
    },
    Combine {
        contributions: FloatRange,
        pair_weights: FloatRange,
        used: u32,
        out: FloatRange,
    },
    /// All of a layer for a few rows, of `count` experts. Outputs of gate, up and down are scratch
    /// memory.
    Fused {
        logits: FloatRange,
        count: u32,
        used: u32,
        activation_tiles: ActivationTiles,
        gate: (WeightMatrix, FloatRange),
        up: (WeightMatrix, FloatRange),
        down: (WeightMatrix, FloatRange),
        pair_weights: FloatRange,
        finished: WordRange,
        out: FloatRange,
    },
}

impl ExpertCommand {
    /// # Safety
    /// As [`super::kernel_set::KernelSet::enqueue`]. In addition, groups and choices are those of
    /// the preceding `Route` or `RouteRow`. Between a `Route` and its first `Matmul` lies a
    /// `Quantize`, which waits before it lets the `Matmul` start. The counts of a `Fused` are zeros
    /// that nothing else writes, and all of a device have one stream.
    pub(super) unsafe fn enqueue(&self, kernels: &ExpertKernels, stream: &Stream) -> Result<(), OpError> {
        // SAFETY: for all calls and views below, the caller's contract.
        unsafe {
            match *self {
                Self::Route { logits, used, experts, pair_weights, groups } => {
                    let mut routing = ExpertRouting {
                        experts: experts.view_mut(),
                        expert_weights: pair_weights.view_mut(),
                        grouping: groups.grouping,
                        groups: groups.words.view_mut(),
                    };
                    kernels.route(stream, logits.view(), groups.count as usize, used as usize, &mut routing)
                }
                Self::Quantize { x, pairs_per_token, groups, activation_tiles } => {
                    let quantized = activation_tiles.quantized_output(true);
                    let (cols, per_token) = (activation_tiles.cols as usize, pairs_per_token as usize);
                    kernels.quantize(stream, x.view(), cols, per_token, groups.grouped(), &quantized)
                }
                Self::Matmul { activation_tiles, groups, by_pair, first, second } => {
                    let mut expert_weight_list = expert_weight_list(groups.count, first, second)?;
                    kernels.matmul(
                        stream,
                        activation_tiles.activations(),
                        groups.grouped(),
                        by_pair,
                        &mut expert_weight_list,
                    )
                }
                Self::RouteRow { logits, choice, x, activation_tiles } => kernels.route_row(
                    stream,
                    logits.view(),
                    &mut choice.experts.view_mut(),
                    &mut choice.weights.view_mut(),
                    x.view(),
                    &activation_tiles.quantized_output(true),
                ),
                Self::RowGateAndUp { activation_tiles, choice, gate, up } => {
                    let stacks = expert_weight_list(choice.count, gate, Some(up))?;
                    kernels.row_gate_and_up(stream, activation_tiles.activations(), choice.view(), &stacks)
                }
                Self::RowDown { .. } => self.enqueue_row_down(kernels, stream, None),
                Self::Floats { x, experts, pairs_per_token, count, expert_weights, out } => kernels
                    .float_matvec(
                        stream,
                        x.view(),
                        experts.view(),
                        pairs_per_token as usize,
                        count as usize,
                        &mut expert_weights.expert_slice(count, out)?,
                    ),
                Self::Combine { contributions, pair_weights, used, out } => kernels.combine(
                    stream,
                    contributions.view(),
                    pair_weights.view(),
                    used as usize,
                    &mut out.view_mut(),
                ),
                Self::Fused { .. } => self.enqueue_fused(kernels, stream),
            }
        }
    }
}

impl ExpertCommand {
    /// Enqueues a `Fused`. On any other command, the function panics.
    ///
    /// # Safety
    /// As [`Self::enqueue`].
    unsafe fn enqueue_fused(&self, kernels: &ExpertKernels, stream: &Stream) -> Result<(), OpError> {
        let Self::Fused {
            logits,
            count,
            used,
            activation_tiles,
            gate: (gate, gated),
            up: (up, raised),
            down: (down, contributions),
            pair_weights,
            finished,
            out,
        } = *self
        else {
            unreachable!("{self:?} is no fused layer");
        };
        // SAFETY: for all calls and views below, the caller's contract.
        unsafe {
            let mut layer = FusedExperts {
                logits: logits.view(),
                used: used as usize,
                x: activation_tiles.activations(),
                gate_and_up: [gate.expert_slice(count, gated)?, up.expert_slice(count, raised)?],
                down: down.expert_slice(count, contributions)?,
                pair_weights: pair_weights.view_mut(),
                finished: finished.view_mut(),
            };
            kernels.fused(stream, &mut layer, &mut out.view_mut())
        }
    }

    /// Enqueues a `RowDown`, which also adds its output to `residual`. On any other command, the
    /// function panics.
    ///
    /// # Safety
    /// As [`Self::enqueue`].
    pub(super) unsafe fn enqueue_row_down(
        &self,
        kernels: &ExpertKernels,
        stream: &Stream,
        residual: Option<FloatRange>,
    ) -> Result<(), OpError> {
        let Self::RowDown { activation_tiles, choice, down, out } = *self else {
            unreachable!("{self:?} is no down product of a row");
        };
        // SAFETY: for all calls and views below, the caller's contract. The activation was launched
        // between gate and up and this, and waits before it lets this start: `gains_by_early_start`
        // is false for this command.
        unsafe {
            let stack = down.expert_slice(choice.count, out)?;
            let residual = residual.map(|residual| residual.view_mut());
            kernels.row_down(stream, activation_tiles.activations(), choice.view(), &stack, residual)
        }
    }

    /// Whether this product copies weights before it has its input, and a step is faster if it
    /// starts before the launch in front of it has waited. With 128 experts (qwen3-30b-a3b, H200),
    /// steps of 16 pairs are 2 to 3% faster and those of 64 pairs 0.5%. Steps of 128 and 256 pairs
    /// are 0.3% slower.
    pub(super) fn gains_by_early_start(&self) -> bool {
        matches!(*self, Self::Matmul { groups, .. }
            if groups.grouping == PairGrouping::Skinny && groups.pairs < groups.count)
    }

    /// Calls `each` for the values and activation tiles that the command reads.
    pub(super) fn for_each_input(&self, mut each: impl FnMut(ByteRange)) {
        match *self {
            Self::Route { logits, .. } => each(logits.bytes()),
            Self::RouteRow { logits, x, .. } => {
                each(logits.bytes());
                each(x.bytes());
            }
            Self::Matmul { activation_tiles, .. } | Self::RowGateAndUp { activation_tiles, .. } => {
                each(activation_tiles.range);
            }
            Self::RowDown { activation_tiles, choice, .. } => {
                each(activation_tiles.range);
                each(choice.weights.bytes());
            }
            Self::Quantize { x, .. } | Self::Floats { x, .. } => each(x.bytes()),
            Self::Combine { contributions, pair_weights, .. } => {
                each(contributions.bytes());
                each(pair_weights.bytes());
            }
            Self::Fused { logits, activation_tiles, .. } => {
                each(logits.bytes());
                each(activation_tiles.range);
            }
        }
    }

    /// Whether all of `values` that is ever read afterwards has been written by this command. Slots
    /// without a pair keep their old values, but nothing reads those.
    pub(super) fn overwrites(&self, values: FloatRange) -> bool {
        let covers = |out: FloatRange| out.bytes().covers(values.bytes());
        match *self {
            Self::Matmul { first: (_, first), second, .. } => {
                covers(first) || second.is_some_and(|(_, out)| covers(out))
            }
            Self::RowGateAndUp { gate: (_, gate), up: (_, up), .. } => covers(gate) || covers(up),
            Self::RowDown { out, .. } | Self::Fused { out, .. } => covers(out),
            _ => false,
        }
    }
}

impl ExpertGroups {
    /// The pair of each slot, or `NO_PAIR`.
    pub(super) fn sorted_pairs(&self) -> WordRange {
        let slots = self.grouping.slots(self.pairs as usize, self.count as usize);
        WordRange { address: self.words.address, len: slots }
    }

    /// # Safety
    /// As [`ExpertCommand::enqueue`].
    unsafe fn grouped<'a>(&self) -> GroupedPairs<'a> {
        // SAFETY: the caller's contract.
        let groups = unsafe { self.words.view() };
        let (pairs, count) = (self.pairs as usize, self.count as usize);
        GroupedPairs { pairs, count, grouping: self.grouping, groups }
    }
}

/// # Safety
/// As [`ExpertCommand::enqueue`].
unsafe fn expert_weight_list<'a>(
    count: u32,
    first: (WeightMatrix, FloatRange),
    second: Option<(WeightMatrix, FloatRange)>,
) -> Result<Vec<ExpertWeights<'a>>, OpError> {
    let all = [Some(first), second].into_iter().flatten();
    // SAFETY: the caller's contract.
    all.map(|(matrix, out)| unsafe { matrix.expert_slice(count, out) }).collect()
}

impl WeightMatrix {
    /// The first of the `count` expert matrices in this matrix, but with the range of all.
    pub(super) fn of_expert(self, count: u32) -> Self {
        Self { rows: self.rows / count.max(1), ..self }
    }

    /// One of the `count` expert matrices in this matrix, and the buffer for its products.
    ///
    /// # Safety
    /// As [`ExpertCommand::enqueue`].
    unsafe fn expert_slice<'a>(&self, count: u32, out: FloatRange) -> Result<ExpertWeights<'a>, OpError> {
        let shape = self.of_expert(count).tiles()?;
        // SAFETY: the caller's contract.
        Ok(unsafe { ExpertWeights { shape, tiles: self.range.view(), out: out.view_mut() } })
    }
}

#[cfg(test)]
mod tests {
    use quant::DType;

    use super::*;
    use crate::cuda::quantize::ActivationLayout;

    #[test]
    fn products_of_few_pairs_gain_by_an_early_start_if_they_copy_weights_early() {
        let range = ByteRange { address: 0x1000, len: 64 };
        let layout = ActivationLayout::from(DType::Q8_K);
        let activation_tiles = ActivationTiles { layout, range, tokens: 1, cols: 256 };
        let matrix = WeightMatrix { dtype: DType::Q4_K, range, cols: 256, rows: 16 };
        let out = FloatRange { address: 0x2000, len: 16 };
        let gains = |grouping, pairs| {
            let words = WordRange { address: 0x3000, len: 64 };
            let groups = ExpertGroups { pairs, count: 128, grouping, words };
            let first = (matrix, out);
            ExpertCommand::Matmul { activation_tiles, groups, by_pair: true, first, second: None }
                .gains_by_early_start()
        };
        assert!(gains(PairGrouping::Skinny, 64));
        assert!(!gains(PairGrouping::Skinny, 128));
        // These wait before they read anything.
        assert!(!gains(PairGrouping::Matmul, 64));
        assert!(!gains(PairGrouping::Wgmma { group_pairs: 32 }, 64));
        let weights = FloatRange { address: 0x4000, len: 8 };
        let choice = RowChoiceRange { experts: WordRange { address: 0x5000, len: 8 }, weights, count: 128 };
        let down = ExpertCommand::RowDown { activation_tiles, choice, down: matrix, out };
        assert!(!down.gains_by_early_start(), "it reads the choice early");
    }
}
