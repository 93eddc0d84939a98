// SPDX-License-Identifier: Apache-2.0

//! Compares linear_*.cu bit by bit with the canonical order on the host.

use anyhow::{Context, ensure};
use kernels::cuda::Buffer;
use kernels::cuda::embed::EmbedKernels;
use kernels::cuda::float_linear::FloatShape;
use kernels::cuda::linear::{
    LinearKernels, LinearMethod, MatmulShape, MatrixProduct, SKINNY_TOKENS, WgmmaShape, has_wgmma_kernels,
    takes_f16_sums,
};
use kernels::cuda::naive::NaiveKernels;
use kernels::cuda::quantize::{ActivationLayout, QuantizeKernels};
use kernels::cuda::repack::RepackKernels;
use ops::DRAWN_TOKEN;
use quant::layout::{TILE_COLS, Tiles};
use quant::{Activations, DType};

use crate::TestGpu;
use crate::random::TestRng;

pub(crate) const TYPES: [DType; 10] = [
    DType::Q8_0,
    DType::Q4_0,
    DType::Q4_1,
    DType::Q5_0,
    DType::Q5_1,
    DType::Q2_K,
    DType::Q3_K,
    DType::Q4_K,
    DType::Q5_K,
    DType::Q6_K,
];
pub(crate) const FLOATS: [DType; 3] = [DType::F32, DType::F16, DType::BF16];

/// With f16 sums for all numbers of tokens, if the device can compute with them for some.
pub(crate) fn layout_of(gpu: &TestGpu, dtype: DType) -> anyhow::Result<ActivationLayout> {
    let format = dtype.activation().context("no activation")?;
    Ok(ActivationLayout { format, f16_sums: takes_f16_sums(&gpu.device, dtype, usize::MAX) })
}

pub(crate) fn methods(gpu: &TestGpu, dtype: DType, tokens: usize) -> Vec<LinearMethod> {
    match dtype {
        DType::F32 => vec![LinearMethod::Scalar],
        DType::F16 | DType::BF16 => FloatShape::all().map(LinearMethod::FloatMatmul).to_vec(),
        _ => {
            let vector = (tokens == 1).then_some(LinearMethod::Matvec);
            let has_wgmma = has_wgmma_kernels(&gpu.device, dtype);
            let wgmma = WgmmaShape::of(dtype).filter(|_| has_wgmma).map(LinearMethod::Wgmma);
            let tensor_cores = MatmulShape::all().map(LinearMethod::Matmul);
            let skinny = (tokens <= SKINNY_TOKENS).then_some(LinearMethod::Skinny);
            vector.into_iter().chain(skinny).chain(tensor_cores).chain(wgmma).collect()
        }
    }
}

pub(crate) struct LinearCase {
    pub(crate) shape: Tiles,
    raw: Vec<u8>,
    tiles: Buffer<u8>,
    bias: Vec<f32>,
    device_bias: Buffer<f32>,
}

impl LinearCase {
    fn new(
        gpu: &TestGpu,
        random: &mut TestRng,
        dtype: DType,
        cols: usize,
        rows: usize,
    ) -> anyhow::Result<Self> {
        let shape = Tiles::new(dtype, cols, rows)?;
        let mut raw = vec![0; shape.raw_bytes()];
        quant::encode(dtype, &random.values(cols * rows), &mut raw)?;
        let bias = random.values(rows);
        Self::from_raw(gpu, shape, raw, bias)
    }

    pub(crate) fn from_raw(
        gpu: &TestGpu,
        shape: Tiles,
        raw: Vec<u8>,
        bias: Vec<f32>,
    ) -> anyhow::Result<Self> {
        let mut tiles = Buffer::new(&gpu.device, shape.bytes())?;
        let device_raw = Buffer::from_host(&gpu.stream, &raw)?;
        RepackKernels::new(&gpu.device).repack(
            &gpu.stream,
            &shape,
            device_raw.view(),
            &mut tiles.view_mut(),
        )?;
        gpu.stream.synchronize()?;
        let device_bias = Buffer::from_host(&gpu.stream, &bias)?;
        Ok(Self { shape, raw, tiles, bias, device_bias })
    }

    /// Computes the canonical result: partial sums over 256 columns, added in ascending order, then
    /// the bias.
    fn expected(&self, x: &[f32]) -> anyhow::Result<Vec<f32>> {
        let (cols, rows) = (self.shape.cols(), self.shape.rows());
        let mut out = Vec::new();
        for x in x.chunks_exact(cols) {
            let a = Activations::for_weight(self.shape.dtype(), x)?.context("no activation")?;
            for (raw, bias) in self.raw.chunks_exact(self.raw.len() / rows).zip(&self.bias) {
                out.push(canonical(self.shape.dtype(), raw, &a)? + bias);
            }
        }
        Ok(out)
    }

    pub(crate) fn product<'a>(&'a self, out: &'a mut Buffer<f32>) -> MatrixProduct<'a> {
        let bias = Some(self.device_bias.view());
        MatrixProduct { shape: self.shape, tiles: self.tiles.view(), bias, out: out.view_mut() }
    }
}

pub(crate) fn canonical(dtype: DType, raw: &[u8], a: &Activations) -> anyhow::Result<f32> {
    let blocks_per_tile = TILE_COLS / dtype.block_len();
    if blocks_per_tile == 1 {
        // `quant::dot` also adds these blocks in order, from zero.
        return Ok(quant::dot(dtype, raw, a)?);
    }
    let bytes = dtype.block_bytes();
    let mut total = 0.0;
    for (tile, raw) in raw.chunks(blocks_per_tile * bytes).enumerate() {
        let mut value = 0.0_f32;
        for (block, raw) in raw.chunks_exact(bytes).enumerate() {
            value = legacy_block(dtype, raw, a, tile * blocks_per_tile + block, value)?;
        }
        total += value;
    }
    Ok(total)
}

/// Returns `value` plus the product of one block of 32 values.
fn legacy_block(dtype: DType, raw: &[u8], a: &Activations, at: usize, value: f32) -> anyhow::Result<f32> {
    let half = |at: usize| half::f16::from_le_bytes([raw[at], raw[at + 1]]).to_f32();
    let quants: [i8; 32] = match dtype {
        DType::Q8_0 => std::array::from_fn(|e| raw[2 + e] as i8),
        DType::Q4_0 => bytemuck::pod_read_unaligned::<quant::BlockQ4_0>(raw).quants(),
        DType::Q4_1 => bytemuck::pod_read_unaligned::<quant::BlockQ4_1>(raw).quants(),
        DType::Q5_0 => bytemuck::pod_read_unaligned::<quant::BlockQ5_0>(raw).quants(),
        DType::Q5_1 => bytemuck::pod_read_unaligned::<quant::BlockQ5_1>(raw).quants(),
        _ => anyhow::bail!("{dtype} has no blocks of 32"),
    };
    let dot =
        |qs: &[i8; 32]| -> i32 { quants.iter().zip(qs).map(|(&q, &a)| i32::from(q) * i32::from(a)).sum() };
    Ok(match a {
        Activations::Q8_0(a) => (dot(&a[at].qs) as f32).mul_add(half(0) * a[at].d.to_f32(), value),
        Activations::Q8_1(a) => {
            let value = (dot(&a[at].qs) as f32).mul_add(half(0) * a[at].d.to_f32(), value);
            half(2).mul_add(a[at].s.to_f32(), value)
        }
        _ => anyhow::bail!("activations of {}", a.dtype()),
    })
}

/// A test's activations: on the host, on the device, and a buffer for their converted form.
pub(crate) struct LinearInput {
    pub(crate) data: Buffer<u8>,
    pub(crate) x: Vec<f32>,
    pub(crate) device_x: Buffer<f32>,
}

impl LinearInput {
    pub(crate) fn new(
        gpu: &TestGpu,
        random: &mut TestRng,
        dtype: DType,
        tokens: usize,
        cols: usize,
    ) -> anyhow::Result<Self> {
        let x = random.values(tokens * cols);
        let bytes = layout_of(gpu, dtype)?.bytes(tokens, cols).context("no activation bytes")?;
        Ok(Self { data: Buffer::new(&gpu.device, bytes)?, device_x: Buffer::from_host(&gpu.stream, &x)?, x })
    }

    pub(crate) fn run(
        &mut self,
        gpu: &TestGpu,
        linear: &LinearKernels,
        tokens: usize,
        method: LinearMethod,
        products: &mut [MatrixProduct<'_>],
    ) -> anyhow::Result<()> {
        let (dtype, cols) = (products[0].shape.dtype(), products[0].shape.cols());
        let layout = layout_of(gpu, dtype)?;
        let quantize = QuantizeKernels::new(&gpu.device);
        let mut scratch = self.data.view_mut();
        let x = quantize.launch(&gpu.stream, layout, self.device_x.view(), tokens, cols, &mut scratch)?;
        linear.launch_with(&gpu.stream, method, x, products)?;
        gpu.stream.synchronize()?;
        Ok(())
    }
}

pub(crate) fn ensure_bits(what: &str, found: &[f32], expected: &[f32]) -> anyhow::Result<()> {
    let differs =
        found.iter().zip(expected).position(|(found, expected)| found.to_bits() != expected.to_bits());
    if let Some(at) = differs {
        let count = found.iter().zip(expected).filter(|(a, b)| a.to_bits() != b.to_bits()).count();
        anyhow::bail!(
            "{what}: {count} of {} differ, value {at} is {}, expected {}",
            found.len(),
            found[at],
            expected[at]
        );
    }
    ensure!(found.len() == expected.len(), "{what}: {} values, expected {}", found.len(), expected.len());
    Ok(())
}

pub(crate) fn every_method_gives_the_canonical_bits(gpu: &TestGpu) -> anyhow::Result<()> {
    let linear = LinearKernels::new(&gpu.device);
    let mut random = TestRng::new(5);
    let mut failures = Vec::new();
    for dtype in TYPES {
        for (blocks, rows, tokens) in [
            (1, 1, 1),
            (2, 17, 2),
            (3, 40, 3),
            (16, 100, 4),
            (5, 33, 7),
            (17, 65, 9),
            (9, 130, 33),
            (4, 160, 70),
            (7, 257, 139),
        ]
        .into_iter()
        .filter(|shape| !gpu.small || [1, 4, 9, 70].contains(&shape.2))
        {
            let cols = blocks * dtype.block_len().max(96);
            let case = LinearCase::new(gpu, &mut random, dtype, cols, rows)?;
            let mut input = LinearInput::new(gpu, &mut random, dtype, tokens, cols)?;
            let expected = case.expected(&input.x)?;
            for method in methods(gpu, dtype, tokens) {
                let mut out = Buffer::<f32>::new(&gpu.device, tokens * rows)?;
                out.view_mut().fill_bytes(&gpu.stream, 0xFF)?;
                input.run(gpu, &linear, tokens, method, &mut [case.product(&mut out)])?;
                let what = format!("{dtype} {cols} x {rows}, {tokens} tokens, {method:?}");
                if let Err(error) = ensure_bits(&what, &out.to_host(&gpu.stream)?, &expected) {
                    failures.push(error.to_string());
                }
            }
        }
    }
    ensure!(failures.is_empty(), "{} failures:\n  {}", failures.len(), failures.join("\n  "));
    Ok(())
}

/// Checks that float products are close to the reference. They cannot be equal: a tensor core adds
/// in an order that the host cannot repeat.
pub(crate) fn floats_are_near_the_reference(gpu: &TestGpu) -> anyhow::Result<()> {
    let linear = LinearKernels::new(&gpu.device);
    let mut random = TestRng::new(9);
    for dtype in FLOATS {
        for (cols, rows, tokens) in [(16, 1, 1), (48, 17, 2), (256, 40, 9), (912, 100, 33), (2048, 70, 139)] {
            let case = LinearCase::new(gpu, &mut random, dtype, cols, rows)?;
            let mut input = LinearInput::new(gpu, &mut random, dtype, tokens, cols)?;
            for method in methods(gpu, dtype, tokens) {
                let mut out = Buffer::<f32>::new(&gpu.device, tokens * rows)?;
                out.view_mut().fill_bytes(&gpu.stream, 0xFF)?;
                input.run(gpu, &linear, tokens, method, &mut [case.product(&mut out)])?;
                let found = out.to_host(&gpu.stream)?;
                for (t, x) in input.x.chunks_exact(cols).enumerate() {
                    let x = &dequantized(&Activations::for_weight(dtype, x)?.context("no activation")?)?;
                    let norm = x.iter().map(|x| x * x).sum::<f32>().sqrt();
                    for (r, raw) in case.raw.chunks_exact(case.raw.len() / rows).enumerate() {
                        let mut weights = vec![0.0; cols];
                        quant::decode(dtype, raw, &mut weights)?;
                        let dot = |sum: f64, (w, x): (&f32, &f32)| sum + f64::from(*w) * f64::from(*x);
                        let expected =
                            (weights.iter().zip(x).fold(0.0, dot) + f64::from(case.bias[r])) as f32;
                        let found = found[t * rows + r];
                        // The tolerance is 2^-19 of the largest possible product. A row of weights
                        // has norm sqrt(cols). Each step of a chain of 16-bit floats also cuts the
                        // sum off at 24 bits.
                        let steps = if dtype == DType::F32 { 0.0 } else { (cols / 16) as f32 };
                        let cut = steps * expected.abs() * f32::EPSILON / 2.0;
                        let tolerance = 2e-6 * norm * (cols as f32).sqrt() + 1e-6 + cut;
                        ensure!(
                            (found - expected).abs() <= tolerance,
                            "{dtype} {cols} x {rows}, {tokens} tokens, {method:?}: row {r} of token {t} is {found}, expected {expected}"
                        );
                    }
                }
            }
        }
    }
    Ok(())
}

/// The values that quantized activations represent.
fn dequantized(a: &Activations) -> anyhow::Result<Vec<f32>> {
    let scaled = |d: f32, qs: &[i8]| qs.iter().map(|&q| d * f32::from(q)).collect::<Vec<f32>>();
    Ok(match a {
        Activations::Q8_0(blocks) => blocks.iter().flat_map(|b| scaled(b.d.to_f32(), &b.qs)).collect(),
        Activations::Q8_1(blocks) => blocks.iter().flat_map(|b| scaled(b.d.to_f32(), &b.qs)).collect(),
        Activations::Q8_K(blocks) => blocks.iter().flat_map(|b| scaled(b.d, &b.qs)).collect(),
        Activations::F32(x) => x.clone(),
        Activations::F16(x) => x.iter().map(|x| x.to_f32()).collect(),
        Activations::BF16(x) => x.iter().map(|x| x.to_f32()).collect(),
    })
}

/// Compares products of a real size with naive.cu over dequantized weights and activations.
pub(crate) fn products_match_the_naive_kernel(gpu: &TestGpu) -> anyhow::Result<()> {
    let linear = LinearKernels::new(&gpu.device);
    let naive = NaiveKernels::new(&gpu.device);
    let mut rng = TestRng::new(19);
    let (cols, rows) = if gpu.small { (512, 24) } else { (4096, 1040) };
    for dtype in TYPES.into_iter().chain(FLOATS) {
        let case = LinearCase::new(gpu, &mut rng, dtype, cols, rows)?;
        let mut weights = vec![0.0; cols * rows];
        quant::decode(dtype, &case.raw, &mut weights)?;
        let device_weights = Buffer::from_host(&gpu.stream, &weights)?;
        for tokens in [1, 4, 7, 33, 140] {
            let mut input = LinearInput::new(gpu, &mut rng, dtype, tokens, cols)?;
            let mut x = Vec::with_capacity(tokens * cols);
            for row in input.x.chunks_exact(cols) {
                x.extend(dequantized(&Activations::for_weight(dtype, row)?.context("no activation")?)?);
            }
            let device_x = Buffer::from_host(&gpu.stream, &x)?;
            let mut expected = Buffer::<f32>::new(&gpu.device, tokens * rows)?;
            let bias = Some(case.device_bias.view());
            naive.matmul(
                &gpu.stream,
                device_weights.view(),
                device_x.view(),
                bias,
                cols,
                &mut expected.view_mut(),
            )?;
            let expected = expected.to_host(&gpu.stream)?;
            let norm = |x: &[f32]| x.iter().map(|&x| f64::from(x) * f64::from(x)).sum::<f64>().sqrt();
            let token_norms: Vec<f64> = x.chunks_exact(cols).map(norm).collect();
            let row_norms: Vec<f64> = weights.chunks_exact(cols).map(norm).collect();
            for method in methods(gpu, dtype, tokens) {
                let mut out = Buffer::<f32>::new(&gpu.device, tokens * rows)?;
                input.run(gpu, &linear, tokens, method, &mut [case.product(&mut out)])?;
                // For types with minimums, the sums of Q8_1 blocks are rounded to f16, by 2^-11 at
                // most. A minimum is up to 2.5 times the root mean square of its block. All other
                // arithmetic is f32.
                let has_minimum = matches!(dtype, DType::Q4_1 | DType::Q5_1);
                let relative = if has_minimum { 2.5 / 2048.0 } else { 1e-5 };
                for (at, (found, expected)) in out.to_host(&gpu.stream)?.iter().zip(&expected).enumerate() {
                    let (token, row) = (at / rows, at % rows);
                    let tolerance = relative * token_norms[token] * row_norms[row] + 1e-5;
                    let difference = (f64::from(*found) - f64::from(*expected)).abs();
                    ensure!(
                        difference <= tolerance,
                        "{dtype} {cols} x {rows}, {tokens} tokens, {method:?}: row {row} of token {token} is \
                         {found}, the naive kernel's {expected}"
                    );
                }
            }
        }
    }
    Ok(())
}

/// Compares rows of the embedding table, read from tiles, with the host's decoding.
pub(crate) fn embeddings_are_decoded_as_on_the_host(gpu: &TestGpu) -> anyhow::Result<()> {
    let embed = EmbedKernels::new(&gpu.device);
    let mut random = TestRng::new(10);
    for dtype in TYPES.into_iter().chain(FLOATS) {
        for blocks in [1, 3, 11] {
            let (cols, rows) = (blocks * dtype.block_len().max(32), 75);
            let case = LinearCase::new(gpu, &mut random, dtype, cols, rows)?;
            let tokens: Vec<u32> = (0..40).map(|_| (random.bits() % rows as u64) as u32).collect();
            // Every third token is one that was drawn on the device: the entry names it.
            let drawn: Vec<u32> = tokens.iter().rev().copied().collect();
            let entry = |(at, &token): (usize, &u32)| match at % 3 {
                0 => DRAWN_TOKEN | (tokens.len() - 1 - at) as u32,
                _ => token,
            };
            let entries: Vec<u32> = tokens.iter().enumerate().map(entry).collect();
            let device_tokens = Buffer::from_host(&gpu.stream, &entries)?;
            let device_drawn = Buffer::from_host(&gpu.stream, &drawn)?;
            let mut out = Buffer::<f32>::new(&gpu.device, tokens.len() * cols)?;
            embed.launch(
                &gpu.stream,
                &case.shape,
                case.tiles.view(),
                device_tokens.view(),
                device_drawn.view(),
                &mut out.view_mut(),
            )?;
            let mut expected = vec![0.0; tokens.len() * cols];
            for (&token, out) in tokens.iter().zip(expected.chunks_exact_mut(cols)) {
                let row_bytes = case.raw.len() / rows;
                quant::decode(dtype, &case.raw[token as usize * row_bytes..][..row_bytes], out)?;
            }
            ensure_bits(&format!("{dtype} {cols}"), &out.to_host(&gpu.stream)?, &expected)?;
        }
    }
    Ok(())
}

pub(crate) fn matrices_of_one_launch(gpu: &TestGpu) -> anyhow::Result<()> {
    let mut random = TestRng::new(7);
    for dtype in TYPES {
        let counts = [1, 4, 6, 12, 20, 40, 130].into_iter().take(if gpu.small { 3 } else { 7 });
        compare_matrices(gpu, &mut random, dtype, 1024, [100, 16, 33, 250], counts)?;
    }
    if gpu.small {
        return Ok(());
    }
    // Blocks of several row tiles, which begin within a matrix and end within another. Rows of 11
    // column tiles end within the pieces that some methods copy.
    for dtype in [DType::Q4_K, DType::Q6_K, DType::Q8_0] {
        compare_matrices(gpu, &mut random, dtype, 2816, [2000, 40, 3000, 700], [3, 8, 12].into_iter())?;
    }
    Ok(())
}

fn compare_matrices(
    gpu: &TestGpu,
    random: &mut TestRng,
    dtype: DType,
    cols: usize,
    rows: [usize; 4],
    counts: impl Iterator<Item = usize>,
) -> anyhow::Result<()> {
    let linear = LinearKernels::new(&gpu.device);
    let cases: Vec<LinearCase> = rows
        .into_iter()
        .map(|rows| LinearCase::new(gpu, random, dtype, cols, rows))
        .collect::<Result<_, _>>()?;
    for tokens in counts {
        let mut input = LinearInput::new(gpu, random, dtype, tokens, cols)?;
        let expected: Vec<Vec<f32>> =
            cases.iter().map(|case| case.expected(&input.x)).collect::<Result<_, _>>()?;
        for method in methods(gpu, dtype, tokens) {
            let mut outs: Vec<Buffer<f32>> = cases
                .iter()
                .map(|case| Buffer::new(&gpu.device, tokens * case.shape.rows()))
                .collect::<Result<_, _>>()?;
            let mut products: Vec<MatrixProduct<'_>> =
                cases.iter().zip(&mut outs).map(|(case, out)| case.product(out)).collect();
            input.run(gpu, &linear, tokens, method, &mut products)?;
            drop(products);
            for (at, (expected, out)) in expected.iter().zip(&outs).enumerate() {
                let what = format!("{dtype}, matrix {at} of {cols} columns, {tokens} tokens, {method:?}");
                ensure_bits(&what, &out.to_host(&gpu.stream)?, expected)?;
            }
        }
    }
    Ok(())
}
