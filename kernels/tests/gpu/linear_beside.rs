// SPDX-License-Identifier: Apache-2.0

//! Products that run beside the one before them in the stream: they read its input, and the kernels
//! behind them read its output.

use anyhow::{Context, ensure};
use kernels::cuda::Buffer;
use kernels::cuda::linear::{Before, LinearKernels};
use kernels::cuda::norm::NormKernels;
use kernels::cuda::quantize::QuantizeKernels;
use quant::DType;

use crate::TestGpu;
use crate::linear::{LinearCase, ensure_bits, layout_of};
use crate::linear_sizes::case;
use crate::random::TestRng;

/// Steps in the stream at once. Each quantizes another input into the same memory.
const STEPS: usize = 12;
/// Products in the stream before the first step. While the device computes them, the host launches
/// all steps. Otherwise the device would wait for the host, and nothing would run beside another.
const BACKLOG: usize = 200;

/// What a step computes.
struct Outputs {
    products: Vec<Buffer<f32>>,
    /// Copies of `products`, made behind the last one.
    copies: Vec<Buffer<f32>>,
}

impl Outputs {
    fn new(gpu: &TestGpu, cases: &[LinearCase], tokens: usize) -> anyhow::Result<Self> {
        let buffers = || -> anyhow::Result<Vec<Buffer<f32>>> {
            let zeros = |case: &LinearCase| vec![0.0; tokens * case.shape.rows()];
            cases.iter().map(|case| Ok(Buffer::from_host(&gpu.stream, &zeros(case))?)).collect()
        };
        Ok(Self { products: buffers()?, copies: buffers()? })
    }
}

pub(crate) fn products_beside_each_other(gpu: &TestGpu) -> anyhow::Result<()> {
    let mut random = TestRng::new(12);
    // In the first two sets, the first product takes longest and leaves multiprocessors free. So
    // what reads its output too early reads an older one.
    for (types, cols, rows) in [
        ([DType::Q6_K, DType::Q4_K, DType::Q5_K], 12_288, [3840, 64, 64]),
        ([DType::Q4_K, DType::Q6_K, DType::Q5_K], 4096, [1920, 64, 64]),
        ([DType::Q4_K, DType::Q6_K, DType::Q2_K], 4096, [5120, 1024, 256]),
        ([DType::Q8_0, DType::Q5_0, DType::Q4_0], 4096, [5120, 1024, 256]),
    ] {
        let (cols, rows) = if gpu.small { (512, [48, 16, 16]) } else { (cols, rows) };
        let cases: Vec<LinearCase> = types
            .into_iter()
            .zip(rows)
            .map(|(dtype, rows)| case(gpu, &mut random, dtype, cols, rows))
            .collect::<anyhow::Result<_>>()?;
        for tokens in [1, 2, 5, 12, 20, 64, 150].into_iter().take(if gpu.small { 5 } else { 7 }) {
            check(gpu, &mut random, &cases, tokens)?;
        }
    }
    Ok(())
}

fn check(gpu: &TestGpu, random: &mut TestRng, cases: &[LinearCase], tokens: usize) -> anyhow::Result<()> {
    let linear = LinearKernels::new(&gpu.device);
    let (quantize, norms) = (QuantizeKernels::new(&gpu.device), NormKernels::new(&gpu.device));
    let cols = cases[0].shape.cols();
    let mut layout = layout_of(gpu, cases[0].shape.dtype())?;
    for case in cases {
        layout.f16_sums |= layout_of(gpu, case.shape.dtype())?.f16_sums;
    }
    let mut tiles = Buffer::new(&gpu.device, layout.bytes(tokens, cols).context("bytes")?)?;
    let inputs: Vec<Buffer<f32>> = (0..2)
        .map(|_| Ok(Buffer::from_host(&gpu.stream, &random.values(tokens * cols))?))
        .collect::<anyhow::Result<_>>()?;
    let step = |input: &Buffer<f32>, tiles: &mut Buffer<u8>, outputs: &mut Outputs, beside: bool| {
        let mut scratch = tiles.view_mut();
        let x = quantize.launch(&gpu.stream, layout, input.view(), tokens, cols, &mut scratch)?;
        let (mut before, mut count) = (Before::Other, 0);
        for (case, out) in cases.iter().zip(&mut outputs.products) {
            count += usize::from(before != Before::Other);
            let after = linear.launch(&gpu.stream, before, x, &mut [case.product(out)])?;
            before = if beside { after } else { Before::Other };
        }
        for (copy, out) in outputs.copies.iter_mut().zip(&outputs.products) {
            norms.add(&gpu.stream, &mut copy.view_mut(), out.view())?;
        }
        anyhow::Ok(count)
    };

    let mut expected = Vec::new();
    for input in &inputs {
        let mut outputs = Outputs::new(gpu, cases, tokens)?;
        step(input, &mut tiles, &mut outputs, false)?;
        let found: Vec<Vec<f32>> =
            outputs.products.iter().map(|out| out.to_host(&gpu.stream)).collect::<Result<_, _>>()?;
        expected.push(found);
    }
    let mut steps: Vec<Outputs> =
        (0..STEPS).map(|_| Outputs::new(gpu, cases, tokens)).collect::<anyhow::Result<_>>()?;
    let mut spare = Outputs::new(gpu, cases, tokens)?;
    gpu.stream.synchronize()?;
    let mut scratch = tiles.view_mut();
    let x = quantize.launch(&gpu.stream, layout, inputs[0].view(), tokens, cols, &mut scratch)?;
    for _ in 0..BACKLOG {
        let mut product = [cases[0].product(&mut spare.products[0])];
        linear.launch(&gpu.stream, Before::Other, x, &mut product)?;
    }
    for (at, outputs) in steps.iter_mut().enumerate() {
        let count = step(&inputs[at % 2], &mut tiles, outputs, true)?;
        // Matrix-vector kernels wait for the one before.
        let wanted = if tokens == 1 { 0 } else { cases.len() - 1 };
        ensure!(count == wanted, "{tokens} tokens: {count} products ran beside others, not {wanted}");
    }
    for (at, outputs) in steps.iter().enumerate() {
        for (number, (out, copy)) in outputs.products.iter().zip(&outputs.copies).enumerate() {
            let what = format!("{}, {tokens} tokens, step {at}", cases[number].shape.dtype());
            let wanted = &expected[at % 2][number];
            ensure_bits(&what, &out.to_host(&gpu.stream)?, wanted)?;
            ensure_bits(&format!("copy of {what}"), &copy.to_host(&gpu.stream)?, wanted)?;
        }
    }
    Ok(())
}
