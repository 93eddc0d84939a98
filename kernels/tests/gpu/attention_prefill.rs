// SPDX-License-Identifier: Apache-2.0

//! Compares the prefill kernels with the split-KV kernel: long runs of tokens have the bits of
//! short runs (I5).

use std::ops::Range;

use anyhow::{Result, ensure};
use kernels::cuda::Cuda;
use ops::KvType;

use crate::TestGpu;
use crate::attention::{PagedAttention, spec};
use crate::random::TestRng;

/// Tokens of a run that the split-KV kernel computes at every position: the partial results of 32
/// splits fit into one plan.
const SHORT_RUN: usize = 30;

struct Shape {
    group: usize,
    kv_heads: usize,
    head_dim: usize,
    lengths: &'static [usize],
}

/// Groups of 7 and of 5 leave rows of a block unused. Splits have two tiles from position 2,048 on,
/// and four from 4,096 on.
const SHAPES: [Shape; 11] = [
    Shape { group: 1, kv_heads: 3, head_dim: 128, lengths: &[63, 64, 65, 127, 200] },
    Shape { group: 2, kv_heads: 2, head_dim: 128, lengths: &[300, 128, 129, 2_300] },
    Shape { group: 4, kv_heads: 1, head_dim: 128, lengths: &[5_000, 64, 2_047] },
    Shape { group: 5, kv_heads: 1, head_dim: 128, lengths: &[150, 75] },
    Shape { group: 7, kv_heads: 2, head_dim: 128, lengths: &[64, 127, 333] },
    Shape { group: 8, kv_heads: 1, head_dim: 128, lengths: &[2_200, 65] },
    Shape { group: 16, kv_heads: 1, head_dim: 64, lengths: &[200, 64] },
    Shape { group: 7, kv_heads: 2, head_dim: 64, lengths: &[2_200, 100] },
    Shape { group: 2, kv_heads: 2, head_dim: 256, lengths: &[2_200, 100] },
    Shape { group: 3, kv_heads: 1, head_dim: 80, lengths: &[2_100, 65] },
    Shape { group: 4, kv_heads: 1, head_dim: 192, lengths: &[300, 64] },
];

pub(crate) fn long_runs_have_the_bits_of_short_ones(gpu: &TestGpu) -> Result<()> {
    let mut random = TestRng::new(20);
    for kind in [KvType::F16, KvType::Bf16, KvType::Q8_0] {
        for shape in SHAPES {
            let Shape { group, kv_heads, head_dim, lengths } = shape;
            let lengths: Vec<usize> =
                lengths.iter().map(|&len| if gpu.small { len.min(130) } else { len }).collect();
            let spec = spec(group * kv_heads, kv_heads, head_dim);
            let paged = PagedAttention::new(&mut random, spec, kind, &lengths);
            // All sequences in one step, and the first one from the middle of a block on.
            let whole = lengths.iter().map(|&len| 0..len).enumerate().collect();
            let long = [whole, vec![(0, 37.min(lengths[0] - 1)..lengths[0])]];
            let what = format!("group of {group}, head size {head_dim}, {kind:?}");
            compare(gpu, &paged, &long, &what)?;
        }
    }
    Ok(())
}

/// Compares the rows of the steps `long` with the same rows in short runs.
fn compare(
    gpu: &TestGpu,
    paged: &PagedAttention,
    long: &[Vec<(usize, Range<usize>)>],
    what: &str,
) -> Result<()> {
    let short = |&(sequence, ref range): &(usize, Range<usize>)| {
        let end = range.end;
        range.clone().step_by(SHORT_RUN).map(move |at| vec![(sequence, at..(at + SHORT_RUN).min(end))])
    };
    let steps: Vec<_> = long.iter().flatten().flat_map(short).collect();
    let expected = paged.run(&mut Cuda::new(&gpu.device)?, 16, &steps)?.concat();
    ensure!(expected.iter().all(|x| x.is_finite()), "{what}: a value is not finite");
    let found = paged.run(&mut Cuda::new(&gpu.device)?, 16, long)?.concat();
    ensure!(
        found.len() == expected.len(),
        "{what}: {} values, {} in short runs",
        found.len(),
        expected.len()
    );
    let differs = found.iter().zip(&expected).position(|(a, b)| a.to_bits() != b.to_bits());
    let width = paged.spec.heads * paged.spec.head_dim;
    if let Some(at) = differs {
        anyhow::bail!(
            "{what}: row {}, value {} is {:e}, in a short run {:e}",
            at / width,
            at % width,
            found[at],
            expected[at]
        );
    }
    Ok(())
}
