// SPDX-License-Identifier: Apache-2.0

//! Checks products of real sizes bit by bit. Their blocks compute several output tiles, and their
//! pipelines go round many times.

use anyhow::{Context, ensure};
use kernels::cuda::Buffer;
use kernels::cuda::linear::{LinearKernels, LinearMethod};
use kernels::cuda::quantize::{ACT_TILE_TOKENS, QuantizeKernels};
use quant::DType;
use quant::layout::Tiles;

use crate::TestGpu;
use crate::linear::{FLOATS, LinearCase, LinearInput, TYPES, ensure_bits, layout_of, methods};
use crate::random::TestRng;

/// Rows of weights that are made. Larger matrices repeat them, since making them takes long.
const DIFFERENT_ROWS: usize = 1040;
/// Launches of one product. Of 100, a race between reading and copying made one to 60 differ.
const REPEATS: usize = 100;

/// Activations of longer rows do not fit the shared memory of linear/skinny_matmul.cuh, except for
/// its kernel for few tokens.
const SKINNY_COLS_MAX: usize = 4096;

fn fitting_methods(gpu: &TestGpu, shape: Tiles, tokens: usize) -> Vec<LinearMethod> {
    let fits = |method: &LinearMethod| {
        let is_few = tokens <= ACT_TILE_TOKENS;
        *method != LinearMethod::Skinny || shape.cols() <= SKINNY_COLS_MAX || is_few
    };
    methods(gpu, shape.dtype(), tokens).into_iter().filter(fits).collect()
}

pub(crate) fn case(
    gpu: &TestGpu,
    random: &mut TestRng,
    dtype: DType,
    cols: usize,
    rows: usize,
) -> anyhow::Result<LinearCase> {
    let different = Tiles::new(dtype, cols, rows.min(DIFFERENT_ROWS))?;
    let mut raw = vec![0; different.raw_bytes()];
    quant::encode(dtype, &random.values(cols * different.rows()), &mut raw)?;
    let shape = Tiles::new(dtype, cols, rows)?;
    let raw = raw.iter().copied().cycle().take(shape.raw_bytes()).collect();
    LinearCase::from_raw(gpu, shape, raw, random.values(rows))
}

/// Row r of a batch is row r alone.
pub(crate) fn a_row_alone_is_the_row_in_any_batch(gpu: &TestGpu) -> anyhow::Result<()> {
    let mut random = TestRng::new(6);
    let all_counts = &[1, 2, 3, 4, 5, 8, 9, 16, 17, 31, 32, 33, 64, 65, 100, 128, 129, 150][..];
    let some_counts = &[4, 8, 12, 16, 17, 32, 60, 64, 84, 129, 480][..];
    // Two with several output tiles for each block, of one and of two column tiles.
    let real = [
        (2816, 1040, all_counts),
        (4096, 12_288, some_counts),
        (12_288, 4096, some_counts),
        (256, 17_000, &[17, 40, 70][..]),
        (512, 17_000, &[24, 60][..]),
    ];
    let small = [(512, 24, &all_counts[..9])];
    let mut failures = Vec::new();
    for &(cols, rows, counts) in if gpu.small { &small[..] } else { &real } {
        for dtype in TYPES.into_iter().chain(FLOATS) {
            let case = case(gpu, &mut random, dtype, cols, rows)?;
            compare_with_single_rows(gpu, &mut random, &case, counts, &mut failures)?;
        }
    }
    ensure!(failures.is_empty(), "{} failures:\n  {}", failures.len(), failures.join("\n  "));
    Ok(())
}

fn compare_with_single_rows(
    gpu: &TestGpu,
    random: &mut TestRng,
    case: &LinearCase,
    counts: &[usize],
    failures: &mut Vec<String>,
) -> anyhow::Result<()> {
    let linear = LinearKernels::new(&gpu.device);
    let (dtype, cols, rows) = (case.shape.dtype(), case.shape.cols(), case.shape.rows());
    let tokens_max = counts.iter().copied().max().context("no counts")?;
    let mut input = LinearInput::new(gpu, random, dtype, tokens_max, cols)?;
    let x = input.device_x.to_host(&gpu.stream)?;
    let mut alone = Vec::new();
    for token in 0..tokens_max {
        let mut one = LinearInput::new(gpu, random, dtype, 1, cols)?;
        one.device_x = Buffer::from_host(&gpu.stream, &x[token * cols..][..cols])?;
        let mut out = Buffer::<f32>::new(&gpu.device, rows)?;
        one.run(gpu, &linear, 1, linear.method(case.shape, 1), &mut [case.product(&mut out)])?;
        alone.extend(out.to_host(&gpu.stream)?);
    }
    for &tokens in counts {
        for method in fitting_methods(gpu, case.shape, tokens) {
            let mut out = Buffer::<f32>::new(&gpu.device, tokens * rows)?;
            input.run(gpu, &linear, tokens, method, &mut [case.product(&mut out)])?;
            let what = format!("{dtype} {cols} x {rows}, {tokens} tokens, {method:?}");
            let found = out.to_host(&gpu.stream)?;
            if let Err(error) = ensure_bits(&what, &found, &alone[..tokens * rows]) {
                failures.push(error.to_string());
            }
        }
    }
    Ok(())
}

/// Launches one product many times, each time after the kernel that quantizes its activations, as
/// in a step. All results are equal: a race shows in some of them.
pub(crate) fn repeated_products_are_equal(gpu: &TestGpu) -> anyhow::Result<()> {
    let linear = LinearKernels::new(&gpu.device);
    let quantize = QuantizeKernels::new(&gpu.device);
    let mut random = TestRng::new(11);
    let repeats = if gpu.small { 3 } else { REPEATS };
    let shapes: &[(usize, usize, &[usize])] = if gpu.small {
        &[(2048, 24, &[8, 12, 60, 84, 140])]
    } else {
        &[(12_288, 4096, &[8, 12, 60, 84, 140]), (4096, 12_288, &[8, 12]), (768, 9000, &[24, 60])]
    };
    let mut failures = Vec::new();
    let types = [DType::Q4_K, DType::Q6_K, DType::Q8_0];
    for (dtype, &(cols, rows, counts)) in
        types.into_iter().flat_map(|dtype| shapes.iter().map(move |shape| (dtype, shape)))
    {
        let case = case(gpu, &mut random, dtype, cols, rows)?;
        for &tokens in counts {
            let mut input = LinearInput::new(gpu, &mut random, dtype, tokens, cols)?;
            let new_out = |_| Ok(Buffer::new(&gpu.device, tokens * rows)?);
            let mut outs: Vec<Buffer<f32>> = (0..repeats).map(new_out).collect::<anyhow::Result<_>>()?;
            for method in fitting_methods(gpu, case.shape, tokens) {
                for out in &mut outs {
                    let (x, mut scratch) = (input.device_x.view(), input.data.view_mut());
                    let layout = layout_of(gpu, dtype)?;
                    let x = quantize.launch(&gpu.stream, layout, x, tokens, cols, &mut scratch)?;
                    linear.launch_with(&gpu.stream, method, x, &mut [case.product(out)])?;
                }
                let expected = outs[0].to_host(&gpu.stream)?;
                for (at, out) in outs.iter().enumerate() {
                    let what = format!("{dtype} {cols} x {rows}, {tokens} tokens, {method:?}, launch {at}");
                    if let Err(error) = ensure_bits(&what, &out.to_host(&gpu.stream)?, &expected) {
                        failures.push(error.to_string());
                    }
                }
            }
        }
    }
    ensure!(failures.is_empty(), "{} failures:\n  {}", failures.len(), failures.join("\n  "));
    Ok(())
}
