// SPDX-License-Identifier: Apache-2.0

//! Attention windows on the device: near the reference, with bits that depend on neither chunks,
//! batch neighbours, freed blocks nor shared ones. The cases are those of the host's tests.

use anyhow::{Result, ensure};
use kernels::cuda::Cuda;
use ops::{KvType, Reference};

use crate::TestGpu;
use crate::attention::tile_tolerance;
use crate::ops::close;
use crate::split_mix::SplitMix64;
use crate::window_case::{Refusals, WindowCase, WindowSchedule, cases, refusals};

/// Heads of every kernel on tensor cores, and one without.
const HEAD_DIMS: [usize; 7] = [64, 128, 256, 80, 96, 192, 40];

/// Each case with each size of heads; under the sanitizers, six cases with one each.
fn all_cases(gpu: &TestGpu, random: &mut SplitMix64) -> Vec<WindowCase> {
    let sizes: Vec<&[usize]> = HEAD_DIMS.chunks(1).collect();
    let of = |head_dims: &[usize], random: &mut SplitMix64| cases(random, head_dims).collect::<Vec<_>>();
    if gpu.small {
        let nth = |(at, head_dims): (usize, &[usize])| of(head_dims, random).into_iter().nth(at);
        return sizes.into_iter().take(6).enumerate().filter_map(nth).collect();
    }
    sizes.into_iter().flat_map(|head_dims| of(head_dims, random)).collect()
}

fn name(case: &WindowCase) -> String {
    let WindowCase { spec, kind, block_tokens, window, .. } = case;
    format!("{spec:?}, {kind:?}, {block_tokens} a block, window {window}")
}

pub(crate) fn windows_are_those_of_the_reference(gpu: &TestGpu) -> Result<()> {
    let (random, order) = (&mut SplitMix64(31), &mut SplitMix64(32));
    for case in all_cases(gpu, random) {
        let steps = case.together(order);
        let way = WindowSchedule { steps: &steps, frees: true, shares: true };
        let expected = case.run(&mut Reference::new(), &way).concat().concat();
        let found = case.run(&mut Cuda::new(&gpu.device)?, &way).concat().concat();
        close(&name(&case), &found, &expected, tile_tolerance(case.kind))?;
    }
    Ok(())
}

pub(crate) fn windows_change_with_nothing_else(gpu: &TestGpu) -> Result<()> {
    let (random, order) = (&mut SplitMix64(33), &mut SplitMix64(34));
    for case in all_cases(gpu, random) {
        let alone = case.alone();
        let way = WindowSchedule { steps: &alone, frees: false, shares: false };
        let expected = case.run(&mut Cuda::new(&gpu.device)?, &way);
        for _ in 0..if gpu.small { 1 } else { 2 } {
            let steps = case.together(order);
            let way = WindowSchedule { steps: &steps, frees: true, shares: true };
            let found = case.run(&mut Cuda::new(&gpu.device)?, &way);
            for (sequence, (found, expected)) in found.iter().zip(&expected).enumerate() {
                for (layer, (found, expected)) in found.iter().zip(expected).enumerate() {
                    let differs = found.iter().zip(expected).position(|(a, b)| a.to_bits() != b.to_bits());
                    ensure!(
                        differs.is_none(),
                        "{}, sequence {sequence}, layer {layer}: value {differs:?} has other bits",
                        name(&case)
                    );
                }
            }
        }
    }
    Ok(())
}

/// Layers 2 and 4 have the same keys and values, and layer 4 has the window.
pub(crate) fn a_long_window_is_full_attention(gpu: &TestGpu) -> Result<()> {
    let random = &mut SplitMix64(35);
    for head_dim in HEAD_DIMS {
        let mut case = WindowCase::new(random, &[head_dim], KvType::F16, 16, 5_000, 0);
        for (window, is_full) in [(5_000, true), (40, false)] {
            case.window = window;
            let alone = case.alone();
            let way = WindowSchedule { steps: &alone, frees: false, shares: false };
            let found = case.run(&mut Cuda::new(&gpu.device)?, &way);
            let same = found.iter().all(|layers| layers[2] == layers[4]);
            ensure!(
                same == is_full,
                "heads of {head_dim}, window of {window}: like full attention is {same}"
            );
        }
    }
    Ok(())
}

pub(crate) fn a_block_of_another_group_is_refused(gpu: &TestGpu) -> Result<()> {
    let Refusals { texts, two_blocks, after_copy, after_change } = refusals(&mut Cuda::new(&gpu.device)?);
    ensure!(texts == refusals(&mut Reference::new()).texts, "{texts:?}");
    let bytes = [two_blocks, after_copy, after_change];
    ensure!(bytes == [two_blocks; 3], "{bytes:?} bytes, although one unit has all blocks");
    Ok(())
}
