// SPDX-License-Identifier: Apache-2.0

//! Compares the routing of rows through experts with `ops::choose_experts`, and checks how their
//! pairs are grouped.

use anyhow::{Result, ensure};
use kernels::cuda::Buffer;
use kernels::cuda::experts::{ExpertKernels, ExpertRouting, PairGrouping};
use ops::choose_experts;

use crate::TestGpu;
use crate::bench::time;
use crate::random::TestRng;

/// Words of a group: its expert, its first slot, and its number of pairs.
const GROUP_WORDS: usize = 3;
/// Small groups, so that some experts have several.
const WGMMA: PairGrouping = PairGrouping::Wgmma { group_pairs: 32 };

struct Routed {
    experts: Vec<u32>,
    probabilities: Vec<f32>,
    words: Vec<u32>,
}

pub(crate) fn rows_take_the_experts_of_the_host(gpu: &TestGpu) -> Result<()> {
    let kernels = ExpertKernels::new(&gpu.device);
    let mut random = TestRng::new(33);
    for (count, used) in [(1, 1), (3, 2), (33, 33), (60, 4), (128, 8), (512, 10)] {
        // One launch routes up to 16 rows; more rows take two.
        for rows in [1, 2, 3, 16, 17, 40] {
            let rows = if gpu.small { rows.min(3) } else { rows };
            for logits in [&mut random_logits, &mut equal_logits, &mut extreme_logits] as [&mut LogitsOf; 3] {
                let logits = logits(&mut random, rows * count);
                for grouping in [PairGrouping::ByPair, PairGrouping::Skinny, PairGrouping::Matmul, WGMMA] {
                    let routed = route(gpu, &kernels, &logits, count, used, grouping)?;
                    let what = format!("{used} of {count} experts, {rows} rows, {grouping:?}");
                    check_choices(&what, &routed, &logits, count, used)?;
                    check_groups(&what, &routed, rows * used, count, grouping)?;
                }
            }
        }
    }
    Ok(())
}

type LogitsOf = dyn FnMut(&mut TestRng, usize) -> Vec<f32>;

fn random_logits(random: &mut TestRng, len: usize) -> Vec<f32> {
    random.values(len)
}

/// Few distinct values, so that the lower index decides.
fn equal_logits(random: &mut TestRng, len: usize) -> Vec<f32> {
    random.values(len).into_iter().map(|x| (2.0 * x).round()).collect()
}

/// Nearly all probabilities are zero, some logits are minus infinity.
fn extreme_logits(random: &mut TestRng, len: usize) -> Vec<f32> {
    let extreme = |x: f32| if x < -1.0 { f32::NEG_INFINITY } else { x * 1e30 };
    random.values(len).into_iter().map(extreme).collect()
}

fn route(
    gpu: &TestGpu,
    kernels: &ExpertKernels,
    logits: &[f32],
    count: usize,
    used: usize,
    grouping: PairGrouping,
) -> Result<Routed> {
    let pairs = logits.len() / count * used;
    let logits = Buffer::from_host(&gpu.stream, logits)?;
    let mut experts = Buffer::<u32>::new(&gpu.device, pairs)?;
    let mut probabilities = Buffer::<f32>::new(&gpu.device, pairs)?;
    let mut words = Buffer::<u32>::new(&gpu.device, grouping.words(pairs, count))?;
    words.view_mut().fill_bytes(&gpu.stream, 0xAB)?;
    let mut routing = ExpertRouting {
        experts: experts.view_mut(),
        expert_weights: probabilities.view_mut(),
        grouping,
        groups: words.view_mut(),
    };
    kernels.route(&gpu.stream, logits.view(), count, used, &mut routing)?;
    Ok(Routed {
        experts: experts.to_host(&gpu.stream)?,
        probabilities: probabilities.to_host(&gpu.stream)?,
        words: words.to_host(&gpu.stream)?,
    })
}

fn check_choices(what: &str, routed: &Routed, logits: &[f32], count: usize, used: usize) -> Result<()> {
    for (row, logits) in logits.chunks_exact(count).enumerate() {
        let found = (&routed.experts[row * used..][..used], &routed.probabilities[row * used..][..used]);
        for (rank, choice) in choose_experts(logits, used).into_iter().enumerate() {
            let (expert, probability) = (found.0[rank] as usize, found.1[rank]);
            // The exponentials of host and device may differ in their last bit.
            let near = (probability - choice.probability).abs() <= 4.0 * f32::EPSILON * choice.probability;
            let no_numbers = probability.is_nan() && choice.probability.is_nan();
            ensure!(
                expert == choice.expert && (near || no_numbers),
                "{what}: rank {rank} of row {row} is expert {expert} with {probability}, expected {choice:?}"
            );
        }
    }
    Ok(())
}

/// Each pair is in one slot, and each slot's pair in one group of its expert.
fn check_groups(
    what: &str,
    routed: &Routed,
    pairs: usize,
    count: usize,
    grouping: PairGrouping,
) -> Result<()> {
    let (sorted_pairs, rest) = routed.words.split_at(grouping.slots(pairs, count));
    let (groups, group_count) = rest.split_at(rest.len() - 1);
    let mut seen = vec![false; pairs];
    for group in groups.chunks_exact(GROUP_WORDS).take(group_count[0] as usize) {
        let (expert, first, len) = (group[0], group[1] as usize, group[2] as usize);
        for &pair in &sorted_pairs[first..first + len] {
            let seen = &mut seen[pair as usize];
            ensure!(!*seen, "{what}: pair {pair} is in two groups");
            ensure!(routed.experts[pair as usize] == expert, "{what}: pair {pair} is in a group of {expert}");
            *seen = true;
        }
    }
    ensure!(seen.iter().all(|&seen| seen), "{what}: a pair is in no group");
    if grouping == WGMMA {
        let pairs_of = |group: &[u32]| routed.experts.iter().filter(|&&expert| expert == group[0]).count();
        let groups: Vec<&[u32]> = groups.chunks_exact(GROUP_WORDS).take(group_count[0] as usize).collect();
        let falls = groups.is_sorted_by_key(|group| (std::cmp::Reverse(pairs_of(group)), group[0], group[1]));
        ensure!(falls, "{what}: groups are not in the order of falling pairs");
    }
    let placed = sorted_pairs.iter().filter(|&&pair| pair != u32::MAX).count();
    ensure!(placed == pairs, "{what}: {placed} slots have pairs, expected {pairs}");
    Ok(())
}

/// Measures the routing of a layer of qwen3-30b-a3b: one launch or two, and their latency.
pub(crate) fn bench(gpu: &TestGpu) -> Result<()> {
    const COUNT: usize = 128;
    const USED: usize = 8;
    const CALLS: usize = 16;
    let (kernels, grouping) = (ExpertKernels::new(&gpu.device), PairGrouping::Skinny);
    let mut random = TestRng::new(34);
    for rows in [1, 2, 8, 16, 32, 64, 512] {
        let pairs = rows * USED;
        let logits = Buffer::from_host(&gpu.stream, &random.values(rows * COUNT))?;
        let mut experts = Buffer::<u32>::new(&gpu.device, pairs)?;
        let mut probabilities = Buffer::<f32>::new(&gpu.device, pairs)?;
        let mut words = Buffer::<u32>::new(&gpu.device, grouping.words(pairs, COUNT))?;
        let mut routing = ExpertRouting {
            experts: experts.view_mut(),
            expert_weights: probabilities.view_mut(),
            grouping,
            groups: words.view_mut(),
        };
        let seconds = time(gpu, CALLS, |_| {
            Ok(kernels.route(&gpu.stream, logits.view(), COUNT, USED, &mut routing)?)
        })?;
        println!("routing {rows:3} rows, {USED} of {COUNT} experts: {:.2} us", seconds * 1e6);
    }
    Ok(())
}
