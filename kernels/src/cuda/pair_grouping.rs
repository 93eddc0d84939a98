// SPDX-License-Identifier: Apache-2.0

//! [`PairGrouping`]: how the pairs of experts are sorted into groups, and the memory of their
//! order.

use quant::DType;

use super::Device;
use super::abi::experts::{EXPERT_MATMUL_ACT_TILES, ExpertGroup};
use super::quantize::{ACT_TILE_TOKENS, ActivationLayout};
use super::skinny_experts::{self, ExpertProduct};
use super::wgmma_experts;
use super::wgmma_linear::needs_f16_sums;

const GROUP_WORDS: usize = size_of::<ExpertGroup>() / size_of::<u32>();
/// From this number of pairs per expert on, groups of 32 slots are faster than groups of 8. On an
/// H200 with 128 experts of 2048 x 768, gate and up of Q4_K, 8 pairs take 73.6 us in groups of 8
/// and 72.8 in groups of 32 (down 42 and 47), 16 take 122 and 84.
const MANY_PAIRS_MIN: usize = 10;
/// More than the pairs of any launch, so that an expert has one group.
const BY_PAIR_GROUP_PAIRS: usize = 1 << 20;

/// How pairs are grouped for a kernel. The grouping never changes results.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum PairGrouping {
    /// For float experts, whose products take pairs in their own order, and for one row.
    ByPair,
    /// For expert_skinny_*: the pairs of each expert begin a new activation tile, and a group has
    /// one.
    Skinny,
    /// For expert_matmul_*: as for expert_skinny_*, with several activation tiles in a group.
    Matmul,
    /// For expert_wgmma_*: as for expert_skinny_*, with groups of up to so many pairs. Groups are
    /// in the order of falling pairs of their experts.
    Wgmma { group_pairs: u32 },
}

impl PairGrouping {
    /// The grouping for the fastest kernels that the device has for all of a layer's `products`.
    pub fn fastest(device: &Device, products: &[ExpertProduct], pairs: usize, count: usize) -> Self {
        let dtypes: Vec<DType> = products.iter().map(|product| product.shape.dtype()).collect();
        let has_few = pairs < MANY_PAIRS_MIN * count;
        if wgmma_experts::is_fastest(device, &dtypes, pairs, count) {
            Self::on_wgmma(&dtypes).unwrap_or(Self::Matmul)
        } else if has_few && products.iter().all(|&product| skinny_experts::can_compute(device, product)) {
            Self::Skinny
        } else {
            Self::Matmul
        }
    }

    /// The grouping for expert_wgmma_*. None if one of a layer's `dtypes` has no such kernel.
    pub fn on_wgmma(dtypes: &[DType]) -> Option<Self> {
        wgmma_experts::group_pairs_max(dtypes).map(|pairs| Self::Wgmma { group_pairs: pairs as u32 })
    }

    /// What the activations of weights of a type consist of. None if no kernel takes the type.
    pub fn layout(self, dtype: DType) -> Option<ActivationLayout> {
        let f16_sums = self.is_wgmma() && needs_f16_sums(dtype);
        Some(ActivationLayout { format: dtype.activation()?, f16_sums })
    }

    /// The number of slots for `pairs` pairs, sorted by `count` experts.
    pub fn slots(self, pairs: usize, count: usize) -> usize {
        let padding = (self.align() - 1) * count.min(pairs);
        (pairs + padding).next_multiple_of(self.align())
    }

    /// The words of [`ExpertRouting::groups`](super::experts::ExpertRouting::groups). They hold the
    /// pair of each slot, then the groups, then the number of groups.
    pub fn words(self, pairs: usize, count: usize) -> usize {
        self.slots(pairs, count) + GROUP_WORDS * self.groups_max(pairs, count) + 1
    }

    pub(super) fn groups_max(self, pairs: usize, count: usize) -> usize {
        pairs.min(pairs / self.group_pairs() + count)
    }

    pub(super) fn is_wgmma(self) -> bool {
        matches!(self, Self::Wgmma { .. })
    }

    pub(super) fn group_pairs(self) -> usize {
        match self {
            // No kernel reads the groups.
            Self::ByPair => BY_PAIR_GROUP_PAIRS,
            Self::Skinny => ACT_TILE_TOKENS,
            Self::Matmul => EXPERT_MATMUL_ACT_TILES * ACT_TILE_TOKENS,
            Self::Wgmma { group_pairs } => group_pairs as usize,
        }
    }

    /// The first slot of each expert is a multiple of this number.
    pub(super) fn align(self) -> usize {
        match self {
            Self::ByPair => 1,
            Self::Skinny | Self::Matmul | Self::Wgmma { .. } => ACT_TILE_TOKENS,
        }
    }

    pub(super) fn addresses(self, words: u64, pairs: usize, count: usize) -> GroupAddress {
        let at = |word: usize| words + (word * size_of::<u32>()) as u64;
        let slots = self.slots(pairs, count);
        let end = slots + GROUP_WORDS * self.groups_max(pairs, count);
        GroupAddress { sorted_pairs: at(0), groups: at(slots), group_count: at(end) }
    }
}

/// The addresses of the parts of [`ExpertRouting::groups`](super::experts::ExpertRouting::groups).
pub(super) struct GroupAddress {
    pub(super) sorted_pairs: u64,
    pub(super) groups: u64,
    pub(super) group_count: u64,
}
