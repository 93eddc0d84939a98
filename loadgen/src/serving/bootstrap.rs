// SPDX-License-Identifier: Apache-2.0

//! Bootstrap resampling: how much figures of a run would vary if the run were repeated.
//!
//! Requests of one run wait in one queue, so neighbours have similar latencies. Blocks of
//! neighbours are drawn (circular block bootstrap), because single requests drawn apart would give
//! intervals that are too narrow. With several runs, whole runs are drawn first, then blocks within
//! each.

use rand::RngExt;
use rand::rngs::Xoshiro256PlusPlus;

/// How often each member of a sample occurs in a resample.
pub(crate) type Weights = Vec<u32>;

/// Members of a block: the cube root of the sample's size, the order that is best for the variance
/// of a mean (Künsch 1989; Hall, Horowitz and Jing 1995).
fn block_members(members: usize) -> usize {
    (members as f64).cbrt().ceil().max(1.0) as usize
}

/// Draws a resample of runs with these sizes. The members of all runs are numbered through.
pub(crate) fn draw(sizes: &[usize], random: &mut Xoshiro256PlusPlus) -> Weights {
    let firsts: Vec<usize> = sizes
        .iter()
        .scan(0, |next, size| {
            *next += size;
            Some(*next - size)
        })
        .collect();
    let mut weights = vec![0; sizes.iter().sum()];
    for _ in 0..sizes.len() {
        let run = if sizes.len() > 1 { random.random_range(0..sizes.len()) } else { 0 };
        draw_blocks(&mut weights[firsts[run]..firsts[run] + sizes[run]], random);
    }
    weights
}

fn draw_blocks(weights: &mut [u32], random: &mut Xoshiro256PlusPlus) {
    let members = weights.len();
    let mut left = members;
    while left > 0 {
        let begin = random.random_range(0..members);
        let block = block_members(members).min(left);
        (begin..begin + block).for_each(|at| weights[at % members] += 1);
        left -= block;
    }
}

/// Values with the members that they belong to, such as the gaps between a request's tokens.
#[derive(Clone, Debug, Default, PartialEq)]
pub(crate) struct OwnedValues {
    /// Sorted by value.
    values: Vec<(f64, usize)>,
}

impl OwnedValues {
    pub(crate) fn new(mut values: Vec<(f64, usize)>) -> Self {
        values.sort_by(|a, b| a.0.total_cmp(&b.0));
        Self { values }
    }

    /// The mean of a resample. `None` if no value occurs in it.
    pub(crate) fn mean(&self, weights: &[u32]) -> Option<f64> {
        let (mut sum, mut count) = (0.0, 0.0);
        for (value, member) in &self.values {
            let weight = f64::from(weights[*member]);
            sum += value * weight;
            count += weight;
        }
        (count > 0.0).then(|| sum / count)
    }

    /// A percentile of a resample, on the line between its two neighbours, as in a result.
    pub(crate) fn percentile(&self, weights: &[u32], percent: f64) -> Option<f64> {
        let count: u64 = self.values.iter().map(|(_, member)| u64::from(weights[*member])).sum();
        let rank = (count.checked_sub(1)? as f64) * percent / 100.0;
        let (mut passed, mut below) = (0.0, None);
        for (value, member) in &self.values {
            passed += f64::from(weights[*member]);
            if below.is_none() && passed > rank.floor() {
                below = Some(*value);
            }
            // The last value has no neighbour above it.
            if passed > rank.floor() + 1.0 || passed >= count as f64 {
                let below = below.unwrap_or(*value);
                return Some(below + (value - below) * rank.fract());
            }
        }
        None
    }
}

/// The middle part of resampled figures.
pub(crate) fn interval(mut resampled: Vec<f64>, confidence: f64) -> Option<(f64, f64)> {
    resampled.sort_by(f64::total_cmp);
    let last = resampled.len().checked_sub(1)? as f64;
    let at = |share: f64| resampled[(last * share).round() as usize];
    Some((at((1.0 - confidence) / 2.0), at((1.0 + confidence) / 2.0)))
}

#[cfg(test)]
mod tests {
    use super::*;
    use rand::SeedableRng;

    fn random(seed: u64) -> Xoshiro256PlusPlus {
        Xoshiro256PlusPlus::seed_from_u64(seed)
    }

    #[test]
    fn a_resample_has_as_many_members_as_the_sample_in_blocks_of_neighbours() {
        let weights = draw(&[1000], &mut random(1));
        assert_eq!(weights.iter().sum::<u32>(), 1000);
        let ends = weights.windows(2).filter(|pair| pair[0] != pair[1]).count();
        // 100 blocks of 10 have 200 ends. Members drawn apart would have some 730 changes.
        assert!((100..=200).contains(&ends), "{ends}");
    }

    #[test]
    fn whole_runs_are_drawn_first() {
        let mut random = random(1);
        let missing = (0..300).filter(|_| draw(&[10, 10], &mut random)[..10].iter().all(|w| *w == 0)).count();
        // Both draws are the second run in a quarter of the cases.
        assert!((50..100).contains(&missing), "{missing}");
    }

    #[test]
    fn weights_count_as_repetitions() {
        let values = OwnedValues::new(vec![(3.0, 0), (1.0, 1), (2.0, 1)]);
        assert_eq!(values.mean(&[1, 1]), Some(2.0));
        assert_eq!(values.mean(&[2, 0]), Some(3.0));
        assert_eq!(values.mean(&[0, 0]), None);
        let percentiles =
            |weights: &[u32]| [1.0, 50.0, 99.0].map(|percent| values.percentile(weights, percent));
        assert_eq!(percentiles(&[1, 1]), [Some(1.02), Some(2.0), Some(2.98)]);
        assert_eq!(percentiles(&[0, 5]), [Some(1.0), Some(1.5), Some(2.0)]);
        assert_eq!(percentiles(&[0, 0]), [None; 3]);
    }

    #[test]
    fn an_interval_leaves_out_both_tails() {
        let resampled = (0..=1000).map(f64::from).collect();
        assert_eq!(interval(resampled, 0.95), Some((25.0, 975.0)));
        assert_eq!(interval(Vec::new(), 0.95), None);
    }
}
