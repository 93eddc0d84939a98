// SPDX-License-Identifier: Apache-2.0

//! Compares fused launches (backend/fusion.rs) with the same ops one by one: all bits are equal.
//! The backend collects ops until a caller waits, so waiting after each op prevents fusion.

use std::ops::Range;

use anyhow::{Result, ensure};
use bytes::Bytes;
use kernels::cuda::{Cuda, CudaTensor};
use ops::{
    Activation, AttentionSpan, AttentionSpec, Backend, Experts, KvLayer, KvLayout, KvType, Linear,
    RopePairing, RopeSpec, Weight,
};
use quant::DType;

use crate::TestGpu;
use crate::attention::begin;
use crate::ops::{filled, values, weight};
use crate::random::TestRng;

/// The rows of a matrix, which are not a whole number of tiles.
const OUT: usize = 41;
const EPS: f32 = 1e-5;

struct OpRunner {
    cuda: Cuda,
    apart: bool,
    random: TestRng,
    results: Vec<(&'static str, Vec<f32>)>,
}

impl OpRunner {
    /// Ends an op. If ops run apart, waits for it.
    fn end(&mut self) -> Result<()> {
        if self.apart {
            self.cuda.wait()?;
        }
        Ok(())
    }

    fn tensor(&mut self, rows: usize, cols: usize) -> Result<CudaTensor> {
        let host = self.random.values(rows * cols);
        filled(&mut self.cuda, rows, cols, &host)
    }

    /// Weights of a norm. They are small, because a sum of 32 values after a gate must stay below
    /// the largest f16: Q8_1 stores its sums as f16.
    fn vector(&mut self, len: usize) -> Weight<Cuda> {
        let values: Vec<f32> = self.random.values(len).iter().map(|value| value / 20.0).collect();
        weight(DType::F32, &[len], bytemuck::cast_slice(&values))
    }

    fn matrix(&mut self, dtype: DType, cols: usize) -> Result<Linear<Cuda>> {
        self.matrix_of(dtype, cols, OUT)
    }

    fn matrix_of(&mut self, dtype: DType, cols: usize, rows: usize) -> Result<Linear<Cuda>> {
        let mut data = vec![0; rows * cols / dtype.block_len() * dtype.block_bytes()];
        quant::encode(dtype, &self.random.values(rows * cols), &mut data)?;
        let data = Bytes::from(data).into();
        Ok(Linear { weight: Weight { dtype, dims: vec![cols, rows], layout: 0, data }, bias: None })
    }

    fn take(&mut self, what: &'static str, x: &CudaTensor, rows: usize, cols: usize) -> Result<()> {
        let found = values(&mut self.cuda, x, rows, cols)?;
        self.results.push((what, found));
        Ok(())
    }
}

/// Runs the same ops together and apart, on the same values.
fn compare(pair: &mut [OpRunner; 2], what: &str, work: impl Fn(&mut OpRunner) -> Result<()>) -> Result<()> {
    for ops in pair.iter_mut() {
        ops.random = TestRng::new(71);
        ops.results.clear();
        work(ops)?;
    }
    let [together, apart] = pair;
    ensure!(together.results.len() == apart.results.len(), "{what}: other results");
    for ((name, found), (_, expected)) in together.results.iter().zip(&apart.results) {
        ensure!(found.iter().any(|x| *x != 0.0), "{what}: {name} is all zeros");
        ensure!(found.iter().all(|x| x.is_finite()), "{what}: {name} has a value that is not finite");
        let differs = found.iter().zip(expected).position(|(a, b)| a.to_bits() != b.to_bits());
        ensure!(differs.is_none(), "{what}: value {differs:?} of {name} has other bits than op by op");
    }
    Ok(())
}

fn pair(gpu: &TestGpu) -> Result<[OpRunner; 2]> {
    let ops = |apart| -> Result<OpRunner> {
        Ok(OpRunner { cuda: Cuda::new(&gpu.device)?, apart, random: TestRng::new(71), results: Vec::new() })
    };
    Ok([ops(false)?, ops(true)?])
}

/// Norms and gates whose rows are quantized for the matrices after them.
pub(crate) fn rounded_rows_are_those_of_single_ops(gpu: &TestGpu) -> Result<()> {
    let mut pair = pair(gpu)?;
    let rows: &[usize] = if gpu.small { &[1, 5, 33] } else { &[1, 2, 4, 5, 33, 70, 139] };
    // One type for each format of quantized activations.
    for (dtype, widths) in [
        (DType::Q8_0, [32, 416, 1056]),
        (DType::Q5_1, [96, 480, 4128]),
        (DType::Q4_K, [256, 768, 4352]),
        (DType::F16, [48, 416, 4112]),
        (DType::BF16, [32, 912, 4352]),
    ] {
        for (cols, &rows) in widths.into_iter().flat_map(|cols| rows.iter().map(move |rows| (cols, rows))) {
            compare(&mut pair, &format!("{rows} rows of {cols} for {dtype}"), |ops| {
                rounded_rows(ops, dtype, rows, cols)
            })?;
        }
    }
    Ok(())
}

fn rounded_rows(ops: &mut OpRunner, dtype: DType, rows: usize, cols: usize) -> Result<()> {
    let (mut x, y) = (ops.tensor(rows, cols)?, ops.tensor(rows, cols)?);
    let (norm, matrix, other) = (ops.vector(cols), ops.matrix(dtype, cols)?, ops.matrix(dtype, cols)?);
    let (mut normed, mut sum) = (ops.cuda.tensor(rows, cols)?, ops.cuda.tensor(rows, cols)?);
    let mut gated = ops.tensor(rows, cols)?;
    let mut products = Vec::new();
    for _ in 0..4 {
        products.push(ops.cuda.tensor(rows, OUT)?);
    }
    let [of_norm, of_sum, other_of_sum, of_gate] = &mut products[..] else {
        anyhow::bail!("four products");
    };

    ops.cuda.rms_norm(&x, &norm, EPS, &mut normed, rows)?;
    ops.end()?;
    ops.cuda.linear(&matrix, &normed, of_norm, rows)?;
    ops.end()?;
    ops.cuda.add_rms_norm(&mut x, &y, &norm, EPS, &mut sum, rows)?;
    ops.end()?;
    ops.cuda.linears(&sum, &mut [(&matrix, of_sum), (&other, other_of_sum)], rows)?;
    ops.end()?;
    let activation = if rows.is_multiple_of(2) { Activation::GeluTanh } else { Activation::Silu };
    ops.cuda.gated(activation, &mut gated, &sum, rows)?;
    ops.end()?;
    ops.cuda.linear(&matrix, &gated, of_gate, rows)?;

    for (what, tensor) in [("the norm", &normed), ("the sum", &x), ("its norm", &sum), ("the gate", &gated)] {
        ops.take(what, tensor, rows, cols)?;
    }
    let names = ["product of the norm", "product of the sum", "another of it", "product of the gate"];
    for (what, tensor) in names.into_iter().zip(&products) {
        ops.take(what, tensor, rows, OUT)?;
    }
    Ok(())
}

/// Products that are added to the residual stream, and norms of it that are multiplied.
pub(crate) fn residual_sums_are_those_of_single_ops(gpu: &TestGpu) -> Result<()> {
    let mut pair = pair(gpu)?;
    // One type for each format of quantized activations, and widths up to the longest row that a
    // product normalises and beyond it.
    for dtype in [DType::Q8_0, DType::Q5_1, DType::Q4_K, DType::Q6_K, DType::F16, DType::F32] {
        let narrow: &[usize] = if dtype.block_len() == 32 { &[32, 416, 2080] } else { &[256, 2304] };
        // A row that is no whole number of vectors.
        let odd: &[usize] = if dtype == DType::F32 { &[301] } else { &[] };
        for &width in narrow.iter().chain(&[4096, 8192, 8448]).chain(odd) {
            for rows in [1, 2, 5] {
                let what = format!("{rows} rows of {width} for {dtype}");
                compare(&mut pair, &what, |ops| residual_sums(ops, dtype, rows, width))?;
                let what = format!("{what}, with a norm of what is added");
                compare(&mut pair, &what, |ops| normed_sums(ops, dtype, rows, width))?;
            }
        }
    }
    Ok(())
}

fn residual_sums(ops: &mut OpRunner, dtype: DType, rows: usize, width: usize) -> Result<()> {
    const INNER: usize = 256;
    let (mut x, inner) = (ops.tensor(rows, width)?, ops.tensor(rows, INNER)?);
    let mut down = ops.matrix_of(dtype, INNER, width)?;
    down.bias = Some(ops.vector(width));
    let (norm, matrix, other) = (ops.vector(width), ops.matrix(dtype, width)?, ops.matrix(dtype, width)?);
    let (mut delta, mut normed) = (ops.cuda.tensor(rows, width)?, ops.cuda.tensor(rows, width)?);
    let (mut out, mut other_out) = (ops.cuda.tensor(rows, OUT)?, ops.cuda.tensor(rows, OUT)?);

    ops.cuda.linear(&down, &inner, &mut delta, rows)?;
    ops.end()?;
    ops.cuda.add_rms_norm(&mut x, &delta, &norm, EPS, &mut normed, rows)?;
    ops.end()?;
    ops.cuda.linears(&normed, &mut [(&matrix, &mut out), (&other, &mut other_out)], rows)?;
    ops.end()?;
    for (what, tensor, cols) in [("the product", &delta, width), ("the norm", &normed, width)] {
        ops.take(what, tensor, rows, cols)?;
    }
    ops.take("a product of the norm", &out, rows, OUT)?;
    ops.take("another of it", &other_out, rows, OUT)?;
    ops.cuda.linear(&down, &inner, &mut delta, rows)?;
    ops.end()?;
    ops.cuda.add(&mut x, &delta, rows)?;
    ops.end()?;
    ops.cuda.rms_norm(&x, &norm, EPS, &mut normed, rows)?;
    ops.end()?;
    ops.cuda.linear(&matrix, &normed, &mut out, rows)?;
    ops.take("the sum", &x, rows, width)?;
    ops.take("a product of its norm", &out, rows, OUT)
}

/// As above, with a norm of the product. What is read later differs between the two sums.
fn normed_sums(ops: &mut OpRunner, dtype: DType, rows: usize, width: usize) -> Result<()> {
    const INNER: usize = 256;
    let (mut x, inner) = (ops.tensor(rows, width)?, ops.tensor(rows, INNER)?);
    let (down, matrix) = (ops.matrix_of(dtype, INNER, width)?, ops.matrix(dtype, width)?);
    let (own, norm) = (ops.vector(width), ops.vector(width));
    let (mut delta, mut normed) = (ops.cuda.tensor(rows, width)?, ops.cuda.tensor(rows, width)?);
    let (mut out, mut last) = (ops.cuda.tensor(rows, OUT)?, ops.cuda.tensor(rows, OUT)?);

    for out in [&mut out, &mut last] {
        ops.cuda.linear(&down, &inner, &mut delta, rows)?;
        ops.end()?;
        ops.cuda.rms_norm_heads(&mut delta, &own, EPS, rows)?;
        ops.end()?;
        ops.cuda.add_rms_norm(&mut x, &delta, &norm, EPS, &mut normed, rows)?;
        ops.end()?;
        ops.cuda.linear(&matrix, &normed, out, rows)?;
        ops.end()?;
    }
    for (what, tensor) in [("the norm that is added", &delta), ("the sum", &x), ("its norm", &normed)] {
        ops.take(what, tensor, rows, width)?;
    }
    ops.take("a product of the norm", &out, rows, OUT)?;
    ops.take("another of it", &last, rows, OUT)
}

/// Norms that are multiplied with matrices of two types. In the first shape, blocks compute several
/// row tiles of either type.
pub(crate) fn products_of_two_types_are_those_of_single_ops(gpu: &TestGpu) -> Result<()> {
    let mut pair = pair(gpu)?;
    for first in [DType::Q4_K, DType::Q5_K, DType::Q6_K] {
        // Several row tiles a block, or fewer than blocks.
        let many = if first == DType::Q4_K { [4000, 600, 1230] } else { [300, 60, 120] };
        for (width, rows_of) in [(2304, many), (256, [41, 16, 1]), (4096, [300, 17, 100])] {
            for rows in [1, 2, 4, 13] {
                let what = format!("{rows} rows of {width} for {first} and Q6_K");
                compare(&mut pair, &what, |ops| products_of_two_types(ops, first, rows, width, rows_of))?;
            }
        }
    }
    Ok(())
}

fn products_of_two_types(
    ops: &mut OpRunner,
    first: DType,
    rows: usize,
    width: usize,
    rows_of: [usize; 3],
) -> Result<()> {
    let (x, norm) = (ops.tensor(rows, width)?, ops.vector(width));
    let mut normed = ops.cuda.tensor(rows, width)?;
    let mut matrices = Vec::new();
    let mut outs = Vec::new();
    for (dtype, len) in [first, first, DType::Q6_K].into_iter().zip(rows_of) {
        let mut matrix = ops.matrix_of(dtype, width, len)?;
        matrix.bias = Some(ops.vector(len));
        matrices.push(matrix);
        outs.push(ops.cuda.tensor(rows, len)?);
    }
    ops.cuda.rms_norm(&x, &norm, EPS, &mut normed, rows)?;
    ops.end()?;
    let mut products: Vec<_> = matrices.iter().zip(outs.iter_mut()).collect();
    ops.cuda.linears(&normed, &mut products, rows)?;
    ops.end()?;
    ops.take("the norm", &normed, rows, width)?;
    for (what, (out, len)) in
        ["the first", "the second", "the third"].into_iter().zip(outs.iter().zip(rows_of))
    {
        ops.take(what, out, rows, len)?;
    }
    Ok(())
}

/// Experts of one row and of several. A norm gives their rows, from which a router makes logits.
/// Their sum is added to the residual stream and normalised for the next matrices.
pub(crate) fn sums_of_experts_are_those_of_single_ops(gpu: &TestGpu) -> Result<()> {
    let mut pair = pair(gpu)?;
    for (dtype, down) in [(DType::Q4_K, DType::Q6_K), (DType::Q8_0, DType::Q5_0), (DType::Q5_1, DType::Q8_0)]
    {
        for rows in [1, 2, 8, 9] {
            compare(&mut pair, &format!("{rows} rows of experts of {dtype} and {down}"), |ops| {
                sums_of_experts(ops, dtype, down, rows)
            })?;
        }
    }
    Ok(())
}

fn sums_of_experts(ops: &mut OpRunner, dtype: DType, down: DType, rows: usize) -> Result<()> {
    const COUNT: usize = 12;
    const WIDTH: usize = 1024;
    const HIDDEN: usize = 768;
    let mut stack = |dtype, cols: usize, len: usize| -> Result<Weight<Cuda>> {
        let matrix = ops.matrix_of(dtype, cols, len * COUNT)?.weight;
        Ok(Weight { dims: vec![cols, len, COUNT], ..matrix })
    };
    let layer = Experts {
        gate: stack(dtype, WIDTH, HIDDEN)?,
        up: stack(dtype, WIDTH, HIDDEN)?,
        down: stack(down, HIDDEN, WIDTH)?,
        used: 5,
    };
    let (mut x, y) = (ops.tensor(rows, WIDTH)?, ops.tensor(rows, WIDTH)?);
    let (norm, matrix) = (ops.vector(WIDTH), ops.matrix(dtype, WIDTH)?);
    let router = ops.matrix_of(DType::F32, WIDTH, COUNT)?;
    let (mut normed, mut logits) = (ops.cuda.tensor(rows, WIDTH)?, ops.cuda.tensor(rows, COUNT)?);
    let (mut delta, mut next) = (ops.cuda.tensor(rows, WIDTH)?, ops.cuda.tensor(rows, WIDTH)?);
    let mut out = ops.cuda.tensor(rows, OUT)?;
    ops.cuda.add_rms_norm(&mut x, &y, &norm, EPS, &mut normed, rows)?;
    ops.end()?;
    ops.cuda.linear(&router, &normed, &mut logits, rows)?;
    ops.end()?;
    ops.cuda.experts(&layer, Activation::Silu, &logits, &normed, &mut delta, rows)?;
    ops.end()?;
    ops.cuda.add_rms_norm(&mut x, &delta, &norm, EPS, &mut next, rows)?;
    ops.end()?;
    ops.cuda.linear(&matrix, &next, &mut out, rows)?;
    ops.end()?;
    for (what, tensor) in [("the experts", &delta), ("the sum", &x), ("its norm", &next)] {
        ops.take(what, tensor, rows, WIDTH)?;
    }
    ops.take("the product", &out, rows, OUT)
}

/// The part of a layer between its two groups of matrices.
struct AttentionBlock {
    spec: AttentionSpec,
    kind: KvType,
    span: AttentionSpan,
    /// Whether query and key heads have norms.
    norms: bool,
    pairing: RopePairing,
    /// The number of pairs of a head that are rotated.
    pairs: usize,
    /// The type of the matrix after attention.
    dtype: DType,
    /// Whether products overwrite queries and keys afterwards, as in a model. Then attention may
    /// prepare the heads itself.
    is_followed: bool,
}

const BLOCK_TOKENS: usize = 16;
/// Steps over sequences of known lengths.
struct AttentionSteps {
    /// Tokens of each sequence before the first step.
    before: Vec<usize>,
    steps: Vec<Vec<(usize, Range<usize>)>>,
}

impl AttentionSteps {
    /// Decode rows, then short runs, then runs for the prefill kernel. From position 2,048 on, a
    /// split of attention has more than one tile. In the last run, a block rotates a whole row.
    fn of_few_sequences() -> Self {
        let steps = vec![
            vec![(0, 2_100..2_101), (1, 3..4)],
            vec![(0, 2_101..2_104), (1, 4..40)],
            vec![(1, 40..110)],
            vec![(1, 110..630)],
        ];
        Self { before: vec![2_100, 3], steps }
    }

    /// Decode steps of sequences whose `lengths` lie in a range. The last one has two rows of a
    /// sequence, which read each other's keys, and so do not prepare their heads.
    fn of_decode(sequences: usize, lengths: Range<usize>) -> Self {
        let length = |sequence: usize| lengths.start + 37 * sequence % lengths.len();
        let before: Vec<usize> = (0..sequences).map(length).collect();
        let step = |from: usize, tokens: usize| {
            let part = |(sequence, &len): (usize, &usize)| (sequence, len + from..len + from + tokens);
            before.iter().enumerate().map(part).collect::<Vec<_>>()
        };
        // Over the end of a tile of 64 keys.
        let mut steps: Vec<_> = (0..6).map(|at| step(at, 1)).collect();
        let mut last = step(6, 1);
        last[0].1.end += 1;
        steps.push(last);
        Self { before, steps }
    }

    /// Two steps of so many sequences that blocks of attention merge the splits of their rows.
    fn of_many_sequences() -> Self {
        let before: Vec<usize> = (0..80).map(|sequence| 120 + sequence % 40).collect();
        let step = |from: usize, tokens: usize| {
            let part = |(sequence, &len): (usize, &usize)| (sequence, len + from..len + from + tokens);
            before.iter().enumerate().map(part).collect()
        };
        let steps = vec![step(0, 1), step(1, 2)];
        Self { before, steps }
    }

    /// Block tables with falling block ids, and the number of blocks of the cache.
    fn tables(&self) -> (Vec<Vec<u32>>, usize) {
        let mut ends = self.before.clone();
        self.steps.iter().flatten().for_each(|(sequence, range)| ends[*sequence] = range.end);
        let mut next = 1;
        let tables = ends.iter().map(|&end| {
            let first = next;
            next += end.div_ceil(BLOCK_TOKENS) as u32;
            (first..next).rev().collect()
        });
        (tables.collect(), next as usize)
    }
}

/// Norms and rotations of heads with the write to the cache, and attention whose rows are
/// quantized.
pub(crate) fn attention_blocks_are_those_of_single_ops(gpu: &TestGpu) -> Result<()> {
    let mut pair = pair(gpu)?;
    for kind in [KvType::F32, KvType::F16, KvType::Bf16, KvType::Q8_0] {
        for (heads, kv_heads, head_dim, norms, pairing, pairs, dtype) in [
            (4, 2, 64, true, RopePairing::Halves, 32, DType::Q4_K),
            (6, 2, 128, false, RopePairing::Adjacent, 64, DType::Q8_0),
            (6, 2, 128, true, RopePairing::Halves, 64, DType::Q4_K),
            (6, 2, 128, false, RopePairing::Halves, 64, DType::Q8_0),
            (12, 1, 64, false, RopePairing::Halves, 20, DType::Q5_1),
            (3, 1, 96, true, RopePairing::Adjacent, 48, DType::Q8_0),
            (2, 2, 256, true, RopePairing::Halves, 64, DType::Q4_K),
            (3, 1, 80, true, RopePairing::Halves, 40, DType::F32),
            (2, 1, 5, false, RopePairing::Adjacent, 1, DType::F32),
        ] {
            let spec = AttentionSpec { heads, kv_heads, head_dim, scale: 1.0 / (head_dim as f32).sqrt() };
            let span = AttentionSpan::Full;
            let block = AttentionBlock { spec, kind, span, norms, pairing, pairs, dtype, is_followed: false };
            // The scales of Q8_0 each cover 32 values.
            if kind != KvType::Q8_0 || head_dim % 32 == 0 {
                let what = format!("{heads} heads on {kv_heads} of {head_dim}, {kind:?}, {dtype}");
                let steps = AttentionSteps::of_few_sequences();
                compare(&mut pair, &what, |ops| attention_block(ops, &block, &steps))?;
            }
        }
        // The heads of a KV head are whole column tiles, but not in the last shape.
        for (heads, kv_heads, head_dim, dtype) in [
            (8, 4, 128, DType::Q4_K),
            (16, 4, 64, DType::Q8_0),
            (8, 4, 128, DType::Q5_1),
            (16, 2, 128, DType::F16),
            (8, 4, 128, DType::BF16),
            (8, 8, 128, DType::Q4_K),
            (8, 4, 256, DType::Q4_K),
        ] {
            let spec = AttentionSpec { heads, kv_heads, head_dim, scale: 1.0 / (head_dim as f32).sqrt() };
            let (pairing, pairs) = (RopePairing::Halves, head_dim / 2);
            let span = AttentionSpan::Full;
            let block =
                AttentionBlock { spec, kind, span, norms: true, pairing, pairs, dtype, is_followed: false };
            let what = format!("80 rows, {heads} heads on {kv_heads} of {head_dim}, {kind:?}, {dtype}");
            let steps = AttentionSteps::of_many_sequences();
            compare(&mut pair, &what, |ops| attention_block(ops, &block, &steps))?;
        }
    }
    Ok(())
}

/// Decode rows whose heads attention prepares, where it can. Later steps read the keys that it
/// writes.
pub(crate) fn decode_attention_is_that_of_single_ops(gpu: &TestGpu) -> Result<()> {
    let mut pair = pair(gpu)?;
    for kind in [KvType::F32, KvType::F16, KvType::Bf16, KvType::Q8_0] {
        for (heads, kv_heads, head_dim, norms, pairing, pairs, dtype) in [
            (4, 2, 64, true, RopePairing::Halves, 32, DType::Q4_K),
            (32, 2, 64, true, RopePairing::Adjacent, 32, DType::Q8_0),
            (6, 2, 128, false, RopePairing::Adjacent, 64, DType::Q8_0),
            (8, 4, 128, true, RopePairing::Halves, 64, DType::Q4_K),
            (32, 4, 128, true, RopePairing::Halves, 64, DType::F16),
            (1, 1, 128, false, RopePairing::Halves, 64, DType::Q8_0),
            (3, 1, 96, true, RopePairing::Halves, 48, DType::Q8_0),
            (6, 2, 128, true, RopePairing::Halves, 20, DType::Q8_0),
            (4, 1, 256, true, RopePairing::Halves, 128, DType::Q4_K),
            (8, 4, 256, true, RopePairing::Halves, 128, DType::Q8_0),
            (4, 2, 192, true, RopePairing::Adjacent, 96, DType::Q8_0),
        ] {
            let spec = AttentionSpec { heads, kv_heads, head_dim, scale: 1.0 / (head_dim as f32).sqrt() };
            let span = AttentionSpan::Full;
            let block = AttentionBlock { spec, kind, span, norms, pairing, pairs, dtype, is_followed: true };
            let counts: &[usize] = if gpu.small { &[1, 5] } else { &[1, 3, 8, 70] };
            for &sequences in counts {
                let what = format!("{sequences} rows, {heads} heads on {kv_heads} of {head_dim}, {kind:?}");
                let steps = AttentionSteps::of_decode(sequences, 60..210);
                compare(&mut pair, &what, |ops| attention_block(ops, &block, &steps))?;
                let span = AttentionSpan::Window { tokens: 70 };
                let what = format!("{what}, with a window");
                compare(&mut pair, &what, |ops| {
                    attention_block(ops, &AttentionBlock { span, ..block }, &steps)
                })?;
            }
            let steps = AttentionSteps::of_few_sequences();
            compare(&mut pair, "long rows", |ops| attention_block(ops, &block, &steps))?;
            // On an H200, so many blocks of one KV head compute two rounds of groups, and those of
            // two KV heads of two groups.
            if kv_heads <= 2 && !gpu.small {
                let steps = AttentionSteps::of_decode(70, 260..500);
                compare(&mut pair, "several rounds", |ops| attention_block(ops, &block, &steps))?;
            }
        }
    }
    Ok(())
}

/// Rows and keys for which, on a large GPU, clusters of two, four and eight blocks have a row and
/// KV head; the last but one compute two rounds. Two blocks of the last ones share a
/// multiprocessor, if there are four KV heads.
const CLUSTERED: [(usize, Range<usize>); 6] =
    [(1, 300..306), (3, 260..500), (1, 1_000..1_020), (2, 1_500..2_030), (16, 400..1_000), (40, 700..1_000)];

pub(crate) fn attention_of_clusters_is_that_of_single_ops(gpu: &TestGpu) -> Result<()> {
    let mut pair = pair(gpu)?;
    for kind in [KvType::F16, KvType::Bf16, KvType::Q8_0] {
        for (heads, kv_heads, head_dim, norms, pairing, dtype) in [
            (4, 2, 64, true, RopePairing::Halves, DType::Q4_K),
            (8, 4, 128, true, RopePairing::Halves, DType::Q4_K),
            (16, 8, 64, false, RopePairing::Adjacent, DType::Q8_0),
            (8, 1, 128, false, RopePairing::Adjacent, DType::F16),
            (8, 2, 128, true, RopePairing::Halves, DType::Q8_0),
            (3, 1, 96, true, RopePairing::Halves, DType::Q8_0),
            (4, 1, 80, true, RopePairing::Halves, DType::Q8_0),
        ] {
            let spec = AttentionSpec { heads, kv_heads, head_dim, scale: 1.0 / (head_dim as f32).sqrt() };
            let (span, pairs) = (AttentionSpan::Full, head_dim / 2);
            let block = AttentionBlock { spec, kind, span, norms, pairing, pairs, dtype, is_followed: true };
            for (sequences, keys) in CLUSTERED.into_iter().take(if gpu.small { 1 } else { 6 }) {
                let what =
                    format!("{sequences} rows of {keys:?} keys, {heads} heads on {kv_heads}, {kind:?}");
                let steps = AttentionSteps::of_decode(sequences, keys);
                compare(&mut pair, &what, |ops| attention_block(ops, &block, &steps))?;
            }
        }
    }
    Ok(())
}

fn attention_block(ops: &mut OpRunner, block: &AttentionBlock, steps: &AttentionSteps) -> Result<()> {
    let AttentionSpec { heads, kv_heads, head_dim, .. } = block.spec;
    let (width, kv_width) = (heads * head_dim, kv_heads * head_dim);
    let (query_norm, key_norm) = (ops.vector(head_dim), ops.vector(head_dim));
    let matrix = ops.matrix(block.dtype, width)?;
    let (next_queries, next_keys) =
        (ops.matrix_of(block.dtype, width, width)?, ops.matrix_of(block.dtype, width, kv_width)?);
    let inverse_frequencies =
        (0..block.pairs).map(|i| 10_000_f32.powf(-(i as f32) / block.pairs as f32)).collect();
    let rope =
        ops.cuda.rope_table(&RopeSpec { pairing: block.pairing, inverse_frequencies, magnitude: 1.25 })?;
    let layer = KvLayer { kv_heads, head_dim, kind: block.kind, span: block.span };
    let (tables, blocks) = steps.tables();
    let mut kv = ops.cuda.kv(&KvLayout { block_tokens: BLOCK_TOKENS, blocks, layers: vec![layer] })?;
    let tables: Vec<&[u32]> = tables.iter().map(Vec::as_slice).collect();

    let before: Vec<_> = steps.before.iter().map(|&len| 0..len).enumerate().collect();
    let rows = begin(&mut ops.cuda, BLOCK_TOKENS, &tables, &before)?;
    let (keys, contents) = (ops.tensor(rows, kv_width)?, ops.tensor(rows, kv_width)?);
    ops.cuda.kv_write(&mut kv, 0, &keys, &contents, rows)?;

    for parts in &steps.steps {
        let rows = begin(&mut ops.cuda, BLOCK_TOKENS, &tables, parts)?;
        let (mut queries, mut keys) = (ops.tensor(rows, width)?, ops.tensor(rows, kv_width)?);
        let contents = ops.tensor(rows, kv_width)?;
        let (mut attended, mut out) = (ops.cuda.tensor(rows, width)?, ops.cuda.tensor(rows, OUT)?);
        if block.norms {
            ops.cuda.rms_norm_heads(&mut queries, &query_norm, EPS, rows)?;
            ops.end()?;
            ops.cuda.rms_norm_heads(&mut keys, &key_norm, EPS, rows)?;
            ops.end()?;
        }
        ops.cuda.rope(&mut queries, &rope, head_dim, rows)?;
        ops.end()?;
        ops.cuda.rope(&mut keys, &rope, head_dim, rows)?;
        ops.end()?;
        ops.cuda.kv_write(&mut kv, 0, &keys, &contents, rows)?;
        ops.end()?;
        ops.cuda.attention(&kv, 0, &queries, &block.spec, &mut attended, rows)?;
        ops.end()?;
        ops.cuda.linear(&matrix, &attended, &mut out, rows)?;
        ops.end()?;
        if block.is_followed {
            let next = &mut [(&next_queries, &mut queries), (&next_keys, &mut keys)];
            ops.cuda.linears(&attended, next, rows)?;
            ops.end()?;
        }
        ops.take("queries", &queries, rows, width)?;
        ops.take("keys", &keys, rows, kv_width)?;
        ops.take("attention", &attended, rows, width)?;
        ops.take("the product", &out, rows, OUT)?;
    }
    Ok(())
}
