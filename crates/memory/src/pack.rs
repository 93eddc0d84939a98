// SPDX-License-Identifier: Apache-2.0

//! [`PackPlan`]: which tensor lies in which allocation, computed from the sizes of the tensors
//! alone.
//!
//! ```text
//! allocation 0   | large tensor                  |      an allocation of its own
//! allocation 1   | a | b |  c  | d |             |      a slab: small tensors, 256-byte aligned
//!                0           2 MiB           4 MiB      granules
//! ```
//! A device allocates memory in granules of 2 MiB. A tensor that nearly fills its granules gets an
//! allocation of its own, the others share slabs. Rounding and alignment waste memory; the plan
//! limits the waste to a fixed small share of the model and spends it where it gives most tensors
//! an allocation of their own. One allocation for each tensor would waste 38% of a 0.6B Q8_0 file.
//!
//! # Invariants
//! 1. Tensors do not overlap, and lie inside of their allocations.
//! 2. Allocations are whole granules and never empty.
//! 3. A plan depends on nothing but the sizes and their order.

/// The unit in which CUDA allocates memory, and the size of a huge page of the host.
pub const GRANULE_BYTES: u64 = 2 << 20;

/// Alignment of a tensor inside a slab: the alignment that CUDA guarantees for its own allocations.
pub const SLAB_ALIGNMENT_BYTES: u64 = 256;

/// A slab that has reached this size takes no further tensor. The end of each slab wastes one
/// granule at most.
pub const SLAB_BYTES: u64 = 1 << 30;

/// A tensor gets an allocation of its own only if that wastes at most this part of the tensor.
const SINGLE_WASTE_DIVISOR: u64 = 16;

/// Allocations for single tensors and 2 MiB alignment inside slabs together waste at most this part
/// of the model.
const WASTE_BUDGET_DIVISOR: u64 = 512;

/// Larger than any memory. The limit keeps all sums below 64 bits.
const MAX_TENSOR_BYTES: u64 = 1 << 46;

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Packing {
    /// Small tensors share allocations.
    Slabs,
    /// One allocation for each tensor, whatever that wastes.
    OnePerTensor,
}

/// The place of one tensor.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct TensorPlacement {
    pub allocation: usize,
    pub offset: u64,
}

#[derive(Debug, Clone, PartialEq, Eq)]
pub struct PackPlan {
    /// Size of each allocation in bytes, whole granules.
    pub allocations: Vec<u64>,
    /// In the order of the tensors.
    pub placements: Vec<TensorPlacement>,
    pub tensor_bytes: u64,
}

#[derive(Debug, thiserror::Error, PartialEq, Eq)]
#[error("tensor {index} of {bytes} bytes is larger than any memory")]
pub struct PackError {
    pub index: usize,
    pub bytes: u64,
}

impl PackPlan {
    /// Plans tensors of these sizes, given in the order of the file. Slabs keep this order, so that
    /// reading the file forward writes memory forward.
    pub fn new(tensors: &[u64], packing: Packing) -> Result<Self, PackError> {
        if let Some((index, &bytes)) =
            tensors.iter().enumerate().find(|(_, bytes)| **bytes > MAX_TENSOR_BYTES)
        {
            return Err(PackError { index, bytes });
        }
        let tensor_bytes: u64 = tensors.iter().sum();
        let mut budget = tensor_bytes / WASTE_BUDGET_DIVISOR;
        let single = match packing {
            Packing::OnePerTensor => vec![true; tensors.len()],
            Packing::Slabs => choose_single_allocations(tensors, &mut budget),
        };
        let mut plan =
            Self { allocations: Vec::new(), placements: Vec::with_capacity(tensors.len()), tensor_bytes };
        let mut slab = None;
        for (&bytes, single) in tensors.iter().zip(single) {
            let placement = if single {
                plan.place_alone(bytes)
            } else {
                plan.place_in_slab(bytes, &mut slab, &mut budget)
            };
            plan.placements.push(placement);
        }
        for bytes in &mut plan.allocations {
            *bytes = bytes.next_multiple_of(GRANULE_BYTES);
        }
        Ok(plan)
    }

    pub fn allocation_bytes(&self) -> u64 {
        self.allocations.iter().sum()
    }

    /// Allocated bytes that hold no tensor.
    pub fn waste_bytes(&self) -> u64 {
        self.allocation_bytes() - self.tensor_bytes
    }

    fn place_alone(&mut self, bytes: u64) -> TensorPlacement {
        // An empty tensor needs an address too.
        self.allocations.push(bytes.max(1));
        TensorPlacement { allocation: self.allocations.len() - 1, offset: 0 }
    }

    fn place_in_slab(&mut self, bytes: u64, slab: &mut Option<usize>, budget: &mut u64) -> TensorPlacement {
        let end = slab.map_or(0, |index| self.allocations[index]);
        let mut offset = end.next_multiple_of(SLAB_ALIGNMENT_BYTES);
        // A large tensor starts on a granule if the budget allows: that suits huge pages and wide
        // loads.
        let gap = offset.next_multiple_of(GRANULE_BYTES) - offset;
        if bytes >= GRANULE_BYTES && gap <= *budget {
            *budget -= gap;
            offset += gap;
        }
        match *slab {
            Some(index) if offset + bytes <= SLAB_BYTES => {
                self.allocations[index] = offset + bytes;
                TensorPlacement { allocation: index, offset }
            }
            _ => {
                let placement = self.place_alone(bytes);
                *slab = Some(placement.allocation);
                placement
            }
        }
    }
}

/// Chooses the tensors that get an allocation of their own: those with the least relative waste
/// first, while the budget lasts.
fn choose_single_allocations(tensors: &[u64], budget: &mut u64) -> Vec<bool> {
    let waste = |bytes: u64| bytes.next_multiple_of(GRANULE_BYTES) - bytes;
    let mut candidates: Vec<usize> = (0..tensors.len())
        .filter(|&index| tensors[index] > 0 && waste(tensors[index]) <= tensors[index] / SINGLE_WASTE_DIVISOR)
        .collect();
    // By relative waste, as integers: waste_a / size_a < waste_b / size_b. The sort is stable, so
    // tensors of equal waste keep the order of the file.
    candidates.sort_by(|&a, &b| {
        let left = u128::from(waste(tensors[a])) * u128::from(tensors[b]);
        let right = u128::from(waste(tensors[b])) * u128::from(tensors[a]);
        left.cmp(&right)
    });
    let mut single = vec![false; tensors.len()];
    for index in candidates {
        if waste(tensors[index]) > *budget {
            break;
        }
        *budget -= waste(tensors[index]);
        single[index] = true;
    }
    single
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    const MIB: u64 = 1 << 20;

    fn check(tensors: &[u64], packing: Packing) -> PackPlan {
        let plan = PackPlan::new(tensors, packing).unwrap();
        assert_eq!(plan.placements.len(), tensors.len());
        let mut spans: Vec<(usize, u64, u64)> = Vec::new();
        for (placement, &bytes) in plan.placements.iter().zip(tensors) {
            assert_eq!(placement.offset % SLAB_ALIGNMENT_BYTES, 0);
            assert!(placement.offset + bytes <= plan.allocations[placement.allocation]);
            spans.push((placement.allocation, placement.offset, bytes));
        }
        spans.retain(|span| span.2 > 0);
        spans.sort_unstable();
        for pair in spans.windows(2) {
            assert!(pair[0].0 != pair[1].0 || pair[0].1 + pair[0].2 <= pair[1].1, "overlap: {pair:?}");
        }
        for (index, &bytes) in plan.allocations.iter().enumerate() {
            assert!(bytes > 0 && bytes % GRANULE_BYTES == 0);
            assert!(plan.placements.iter().any(|placement| placement.allocation == index));
        }
        if packing == Packing::OnePerTensor {
            assert_eq!(plan.allocations.len(), tensors.len());
            assert!(plan.placements.iter().all(|placement| placement.offset == 0));
        } else {
            let slabs = plan.allocation_bytes() / (SLAB_BYTES / 2) + 2;
            let bound = plan.tensor_bytes / WASTE_BUDGET_DIVISOR
                + slabs * GRANULE_BYTES
                + tensors.len() as u64 * SLAB_ALIGNMENT_BYTES;
            assert!(plan.waste_bytes() <= bound, "waste {} above {bound}", plan.waste_bytes());
        }
        plan
    }

    /// Sizes of the tensors of qwen3-8b in Q4_K_M: most are Q4_K, some Q6_K.
    fn qwen3_8b() -> Vec<u64> {
        let q4 = |columns: u64, rows: u64| columns / 256 * 144 * rows;
        let q6 = |columns: u64, rows: u64| columns / 256 * 210 * rows;
        let mut tensors = vec![q4(4096, 151_936), q6(4096, 151_936), 4096 * 4];
        for layer in 0..36 {
            let down: fn(u64, u64) -> u64 =
                if layer % 2 == 0 { |c, r| c / 256 * 210 * r } else { |c, r| c / 256 * 144 * r };
            tensors.extend([4096 * 4, 4096 * 4, 128 * 4, 128 * 4]);
            tensors.extend([q4(4096, 4096), q4(4096, 1024), q6(4096, 1024), q4(4096, 4096)]);
            tensors.extend([q4(4096, 12_288), q4(4096, 12_288), down(12_288, 4096)]);
        }
        tensors
    }

    #[test]
    fn models_above_four_gigabytes_waste_under_half_a_percent() {
        let plan = check(&qwen3_8b(), Packing::Slabs);
        assert!(plan.tensor_bytes > 4_000_000_000);
        assert!(
            plan.waste_bytes() * 200 < plan.tensor_bytes,
            "{} of {}",
            plan.waste_bytes(),
            plan.tensor_bytes
        );
    }

    #[test]
    fn tensors_of_whole_granules_get_allocations_of_their_own() {
        let plan = check(&[64 * MIB, 100, 32 * MIB, 100], Packing::Slabs);
        assert_eq!(plan.allocations, [64 * MIB, 2 * MIB, 32 * MIB]);
        assert_eq!(plan.placements[3], TensorPlacement { allocation: 1, offset: 256 });
    }

    #[test]
    fn small_model_fits_one_slab() {
        let plan = check(&[300_000, 17, 0, 2_000_000, 900], Packing::Slabs);
        assert_eq!(plan.allocations.len(), 1);
    }

    #[test]
    fn a_full_slab_takes_no_further_tensor() {
        let plan = check(&[600 * MIB + 1, 600 * MIB + 1, 600 * MIB + 1, 5], Packing::Slabs);
        assert_eq!(plan.allocations.len(), 3);
        assert_eq!(plan.placements[3].allocation, 2);
    }

    #[test]
    fn a_size_beyond_any_memory_is_refused_with_its_index() {
        let error = PackPlan::new(&[1, u64::MAX], Packing::Slabs).unwrap_err();
        assert_eq!(error, PackError { index: 1, bytes: u64::MAX });
    }

    #[test]
    fn a_model_without_tensors_needs_no_memory() {
        assert_eq!(check(&[], Packing::Slabs).allocation_bytes(), 0);
    }

    proptest! {
        #[test]
        fn any_model_is_placed_without_overlap_and_with_bounded_waste(
            tensors in prop::collection::vec(prop_oneof![0..5000u64, 0..8 * MIB, 0..300 * MIB], 0..120),
            one_each in any::<bool>(),
        ) {
            check(&tensors, if one_each { Packing::OnePerTensor } else { Packing::Slabs });
        }
    }
}
