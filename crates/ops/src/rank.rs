// SPDX-License-Identifier: Apache-2.0

//! Ranking of logits: [`RankedLogit`], and top-k selection without a full sort.
//!
//! Of equal logits the lower token id ranks higher. The samplers and the kernels that make
//! shortlists use this order.

/// A logit and its token id as one integer, ordered by falling logit, then rising id: the smaller
/// integer ranks higher.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct RankedLogit(u64);

impl RankedLogit {
    #[inline]
    pub fn new(logit: f32, id: u32) -> Self {
        // -0.0 + 0.0 is 0.0, so both zeros have one rank.
        let bits = (logit + 0.0).to_bits();
        let rising = if bits >> 31 == 1 { !bits } else { bits | 1 << 31 };
        Self(u64::from(!rising) << 32 | u64::from(id))
    }

    /// The inverse of [`Self::bits`].
    pub fn from_bits(bits: u64) -> Self {
        Self(bits)
    }

    pub fn bits(self) -> u64 {
        self.0
    }

    #[inline]
    pub fn id(self) -> u32 {
        self.0 as u32
    }

    #[inline]
    pub fn logit(self) -> f32 {
        let rising = !((self.0 >> 32) as u32);
        f32::from_bits(if rising >> 31 == 1 { rising & !(1 << 31) } else { !rising })
    }
}

/// Candidates beyond `2 n` that collect before the worst are dropped. They keep the work per logit
/// constant for small `n`.
const SLACK: usize = 256;

/// Replaces `best` by the `n` highest logits, in any order. `logits` has no NaN.
pub fn select_top_k(logits: &[f32], n: usize, best: &mut Vec<RankedLogit>) {
    best.clear();
    let limit = 2 * n + SLACK;
    // No dropped logit is above the floor. A later logit equal to the floor has a higher id and
    // ranks lower.
    let mut floor = f32::NEG_INFINITY;
    for (id, &logit) in logits.iter().enumerate() {
        if logit > floor || best.len() < n {
            best.push(RankedLogit::new(logit, id as u32));
            if best.len() == limit {
                truncate_to_top_k(best, n);
                floor = best.iter().max().map_or(floor, |worst| worst.logit());
            }
        }
    }
    truncate_to_top_k(best, n);
}

/// Keeps the `n` best, in any order.
pub fn truncate_to_top_k(best: &mut Vec<RankedLogit>, n: usize) {
    if n == 0 {
        best.clear();
    } else if n < best.len() {
        best.select_nth_unstable(n - 1);
        best.truncate(n);
    }
}

/// The id of the highest logit, the lowest among equals. `logits` is not empty and has no NaN.
pub fn argmax(logits: &[f32]) -> usize {
    let max = max(logits);
    logits.iter().position(|&logit| logit == max).unwrap_or(0)
}

pub fn max(logits: &[f32]) -> f32 {
    logits.iter().copied().fold(f32::NEG_INFINITY, f32::max)
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn sorted(logits: &[f32]) -> Vec<u32> {
        let mut ids: Vec<u32> = (0..logits.len() as u32).collect();
        ids.sort_by(|&a, &b| logits[b as usize].partial_cmp(&logits[a as usize]).unwrap().then(a.cmp(&b)));
        ids
    }

    proptest! {
        /// The logits have few distinct values, so that there are many ties.
        #[test]
        fn top_k_is_the_head_of_the_sorted_order(
            logits in prop::collection::vec((-6..6_i8).prop_map(|v| f32::from(v) / 2.0), 1..3000),
            n in 0..400_usize,
        ) {
            let mut best = Vec::new();
            select_top_k(&logits, n, &mut best);
            best.sort_unstable();
            let ids: Vec<u32> = best.iter().map(|ranked| ranked.id()).collect();
            prop_assert_eq!(&ids[..], &sorted(&logits)[..n.min(logits.len())]);
            prop_assert!(best.iter().all(|ranked| ranked.logit() == logits[ranked.id() as usize]));
            prop_assert_eq!(argmax(&logits), sorted(&logits)[0] as usize);
        }
    }

    #[test]
    fn order_of_ranks_is_the_order_of_logits() {
        let falling = [f32::INFINITY, f32::MAX, 1.0, 1e-40, 0.0, -1e-40, -1.0, f32::MIN, f32::NEG_INFINITY];
        assert!(falling.map(|logit| RankedLogit::new(logit, 9)).is_sorted());
        assert_eq!(falling.map(|logit| RankedLogit::new(logit, 9).logit()), falling);
        assert!(RankedLogit::new(-0.0, 1) < RankedLogit::new(0.0, 2));
        assert!(RankedLogit::new(0.0, 1) < RankedLogit::new(-0.0, 2));
    }
}
