// SPDX-License-Identifier: Apache-2.0

//! Compares F32 products with the order of sums that linear_f32.cu states, bit for bit.

use anyhow::Result;
use kernels::cuda::Buffer;
use kernels::cuda::linear::{LinearKernels, LinearMethod};
use quant::DType;
use quant::layout::Tiles;

use crate::TestGpu;
use crate::linear::{LinearCase, LinearInput, ensure_bits};
use crate::random::TestRng;

pub(crate) fn sums_have_the_canonical_order(gpu: &TestGpu) -> Result<()> {
    let linear = LinearKernels::new(&gpu.device);
    let mut random = TestRng::new(10);
    for (cols, rows) in [(1, 3), (127, 9), (2047, 17), (2048, 128), (2052, 8), (4100, 5)] {
        let (weights, bias) = (random.values(cols * rows), random.values(rows));
        let raw = weights.iter().flat_map(|weight| weight.to_le_bytes()).collect();
        let case = LinearCase::from_raw(gpu, Tiles::new(DType::F32, cols, rows)?, raw, bias.clone())?;
        for tokens in [1, 2, 5, 9, 33, 511, 512, 517] {
            let mut input = LinearInput::new(gpu, &mut random, DType::F32, tokens, cols)?;
            let mut out = Buffer::<f32>::new(&gpu.device, tokens * rows)?;
            input.run(gpu, &linear, tokens, LinearMethod::Scalar, &mut [case.product(&mut out)])?;
            let mut expected = Vec::with_capacity(tokens * rows);
            for x in input.x.chunks_exact(cols) {
                let rows = weights.chunks_exact(cols).zip(&bias);
                expected.extend(rows.map(|(row, bias)| sum_of_lanes(row, x) + bias));
            }
            ensure_bits(&format!("{cols} x {rows}, {tokens} tokens"), &out.to_host(&gpu.stream)?, &expected)?;
        }
    }
    Ok(())
}

/// Lane l of 32 adds the products of columns 128 i + 4 l to 128 i + 4 l + 3, ascending; then lanes
/// are added pairwise, lanes 16 apart first.
fn sum_of_lanes(row: &[f32], x: &[f32]) -> f32 {
    let mut lanes = [0.0_f32; 32];
    for (column, (weight, x)) in row.iter().zip(x).enumerate() {
        let lane = &mut lanes[column / 4 % 32];
        *lane = weight.mul_add(*x, *lane);
    }
    for distance in [16, 8, 4, 2, 1] {
        for lane in 0..distance {
            lanes[lane] += lanes[lane + distance];
        }
    }
    lanes[0]
}
