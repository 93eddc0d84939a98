// SPDX-License-Identifier: Apache-2.0

//! Compares experts*.cu with `ops::Reference`, and a row alone with the same row in any batch.

use std::collections::HashSet;

use anyhow::{Context, Result, ensure};
use bytes::Bytes;
use kernels::cuda::experts::{
    ExpertKernels, ExpertProduct, ExpertRouting, ExpertWeights, GroupedPairs, PairGrouping,
};
use kernels::cuda::quantize::QuantizeKernels;
use kernels::cuda::{Buffer, Cuda};
use ops::{Activation, Backend, Experts, Reference};
use quant::DType;
use quant::layout::Tiles;

use crate::TestGpu;
use crate::bench::time;
use crate::ops::{close, filled, values, weight};
use crate::random::TestRng;

struct ExpertsCase {
    types: [DType; 3],
    n_in: usize,
    hidden: usize,
    count: usize,
    used: usize,
    stacks: [Vec<u8>; 3],
    router: Vec<f32>,
    x: Vec<f32>,
}

impl ExpertsCase {
    fn new(
        random: &mut TestRng,
        types: [DType; 3],
        n_in: usize,
        hidden: usize,
        count: usize,
        used: usize,
        rows: usize,
    ) -> Result<Self> {
        let mut encoded = |dtype: DType, cols: usize, rows: usize| -> Result<Vec<u8>> {
            let scale = 1.0 / (cols as f32).sqrt();
            let values: Vec<f32> = random.values(cols * rows).into_iter().map(|x| x * scale).collect();
            let mut raw = vec![0; dtype.row_bytes(cols as u64)? as usize * rows];
            quant::encode(dtype, &values, &mut raw)?;
            Ok(raw)
        };
        let stacks = [
            encoded(types[0], n_in, hidden * count)?,
            encoded(types[1], n_in, hidden * count)?,
            encoded(types[2], hidden, n_in * count)?,
        ];
        let (router, x) = (random.values(rows * count), random.values(rows * n_in));
        Ok(Self { types, n_in, hidden, count, used, stacks, router, x })
    }

    fn run<B: Backend<Data: From<Bytes>>>(
        &self,
        b: &mut B,
        rows: std::ops::Range<usize>,
    ) -> Result<Vec<f32>> {
        let Self { n_in, hidden, count, .. } = *self;
        let layer = Experts {
            gate: weight(self.types[0], &[n_in, hidden, count], &self.stacks[0]),
            up: weight(self.types[1], &[n_in, hidden, count], &self.stacks[1]),
            down: weight(self.types[2], &[hidden, n_in, count], &self.stacks[2]),
            used: self.used,
        };
        let router = filled(b, rows.len(), count, &self.router[rows.start * count..rows.end * count])?;
        let x = filled(b, rows.len(), n_in, &self.x[rows.start * n_in..rows.end * n_in])?;
        let mut out = b.tensor(rows.len(), n_in)?;
        b.experts(&layer, Activation::Silu, &router, &x, &mut out, rows.len())?;
        values(b, &out, rows.len(), n_in)
    }
}

pub(crate) fn they_are_those_of_the_reference(gpu: &TestGpu) -> Result<()> {
    use DType::{BF16, F16, F32, Q2_K, Q3_K, Q4_0, Q4_1, Q4_K, Q5_0, Q5_1, Q5_K, Q6_K, Q8_0};
    let mut random = TestRng::new(31);
    for (types, n_in, hidden, count, used, rows) in [
        ([Q8_0; 3], 64, 96, 5, 2, 7),
        ([Q4_0; 3], 96, 64, 4, 4, 3),
        ([Q4_1; 3], 256, 64, 128, 8, 40),
        ([Q5_0; 3], 64, 32, 40, 3, 33),
        ([Q5_1, Q5_1, Q8_0], 320, 32, 7, 3, 20),
        ([Q4_K, Q4_K, Q6_K], 512, 768, 16, 4, 40),
        ([Q5_K, Q4_K, Q5_K], 256, 256, 9, 1, 12),
        ([Q2_K, Q2_K, Q3_K], 1024, 256, 64, 8, 70),
        ([Q3_K, Q3_K, Q2_K], 256, 256, 3, 2, 600),
        ([Q4_K, Q4_K, Q6_K], 512, 256, 4, 2, 300),
        ([Q8_0, Q8_0, Q5_0], 320, 96, 3, 1, 120),
        // A matrix of gate has fewer weight tiles than a round of experts/skinny_matmul.cuh.
        ([Q8_0; 3], 256, 128, 16, 4, 20),
        // Blocks of the kernels for one row have several items, and pairs of two activation tiles.
        ([Q4_K, Q4_K, Q6_K], 1024, 768, 40, 12, 10),
        ([Q5_1, Q5_1, Q4_1], 96, 416, 36, 32, 4),
        // More experts than these kernels take.
        ([Q8_0; 3], 64, 32, 40, 33, 5),
        ([F32; 3], 48, 40, 6, 2, 9),
        ([F16, F16, BF16], 64, 24, 6, 2, 9),
        ([Q8_0, Q8_0, BF16], 64, 96, 5, 2, 7),
        ([F16, F16, Q5_0], 96, 64, 5, 3, 70),
        ([F32, Q4_K, Q6_K], 256, 256, 4, 2, 40),
    ] {
        let rows = if gpu.small { rows.min(6) } else { rows };
        let case = ExpertsCase::new(&mut random, types, n_in, hidden, count, used, rows)?;
        let what = format!("{types:?}, {count} of {n_in} x {hidden}, {used} used, {rows} rows");
        let mut cuda = Cuda::new(&gpu.device)?;
        let found = case.run(&mut cuda, 0..rows)?;
        // The rounding of the gate may change an int8 activation by one step.
        close(&what, &found, &case.run(&mut Reference::new(), 0..rows)?, 2e-2)?;
        for part in [0..1, rows - 1..rows, rows / 3..rows, 0..rows / 2 + 1] {
            let alone = case.run(&mut cuda, part.clone())?;
            ensure!(
                alone == found[part.start * n_in..part.end * n_in],
                "{what}: rows {part:?} have other bits"
            );
        }
    }
    Ok(())
}

/// Experts of qwen3-30b-a3b, and how many of them compute a row.
const COUNT: usize = 128;
const USED: usize = 8;
/// The L2 cache holds the experts of one row, but not those of 16 routings.
const ROUTINGS: usize = 16;

/// Measures the products of a layer of qwen3-30b-a3b. It compares the bytes read of the experts'
/// matrices with the memory's rate, and the operations with the integer rate. `BENCH_ALL_METHODS`
/// measures all kernels, not the chosen one.
pub(crate) fn bench(gpu: &TestGpu) -> Result<()> {
    let mut random = TestRng::new(32);
    let noise = random.bytes(16 << 20);
    let full = std::env::var_os("BENCH_ALL_METHODS").is_some();
    for dtype in [DType::Q4_K, DType::Q8_0, DType::Q6_K] {
        for (side, shape) in
            [("gate and up", Tiles::new(dtype, 2048, 768)?), ("down", Tiles::new(dtype, 768, 2048)?)]
        {
            let stacks = if side == "down" { 1 } else { 2 };
            let bytes: Vec<u8> = noise.iter().copied().cycle().take(COUNT * shape.bytes()).collect();
            let weights =
                (0..stacks).map(|_| Buffer::from_host(&gpu.stream, &bytes)).collect::<Result<Vec<_>, _>>()?;
            for rows in [1, 2, 4, 8, 16, 32, 64, 128, 256, 384, 512, 1024, 2048] {
                let chosen = PairGrouping::fastest(
                    &gpu.device,
                    &[ExpertProduct { shape, stacks }],
                    rows * USED,
                    COUNT,
                );
                let mut all = vec![PairGrouping::Skinny, PairGrouping::Matmul];
                all.extend(PairGrouping::on_wgmma(&[dtype]).filter(|_| rows > 64));
                for grouping in if full { all } else { vec![chosen] } {
                    print!("experts {dtype:5} {side:11} {rows:4} rows {grouping:?}: ");
                    measure(gpu, &mut random, shape, &weights, rows, grouping)?;
                }
            }
        }
    }
    Ok(())
}

fn measure(
    gpu: &TestGpu,
    random: &mut TestRng,
    shape: Tiles,
    weights: &[Buffer<u8>],
    rows: usize,
    grouping: PairGrouping,
) -> Result<()> {
    let (kernels, quantize) = (ExpertKernels::new(&gpu.device), QuantizeKernels::new(&gpu.device));
    let (pairs, cols) = (rows * USED, shape.cols());
    let slots = grouping.slots(pairs, COUNT);
    let (mut groups, mut read) = (Vec::new(), 0);
    for _ in 0..ROUTINGS {
        let logits = Buffer::from_host(&gpu.stream, &random.values(rows * COUNT))?;
        let mut experts = Buffer::<u32>::new(&gpu.device, pairs)?;
        let mut pair_weights = Buffer::<f32>::new(&gpu.device, pairs)?;
        let mut words = Buffer::<u32>::new(&gpu.device, grouping.words(pairs, COUNT))?;
        let mut routing = ExpertRouting {
            experts: experts.view_mut(),
            expert_weights: pair_weights.view_mut(),
            grouping,
            groups: words.view_mut(),
        };
        kernels.route(&gpu.stream, logits.view(), COUNT, USED, &mut routing)?;
        read += experts.to_host(&gpu.stream)?.into_iter().collect::<HashSet<u32>>().len();
        groups.push(words);
    }
    let some = random.values(slots.min(64) * cols);
    let values: Vec<f32> = some.iter().copied().cycle().take(slots * cols).collect();
    let x = Buffer::from_host(&gpu.stream, &values)?;
    let layout = grouping.layout(shape.dtype()).context("layout")?;
    let mut data = Buffer::<u8>::new(&gpu.device, layout.bytes(slots, cols).context("bytes")?)?;
    let mut data = data.view_mut();
    let x = quantize.launch(&gpu.stream, layout, x.view(), slots, cols, &mut data)?;
    let by_pair = weights.len() == 1;
    let outs = if by_pair { pairs } else { slots };
    let new_out = |_| Buffer::<f32>::new(&gpu.device, outs * shape.rows());
    let mut outs = weights.iter().map(new_out).collect::<Result<Vec<_>, _>>()?;
    let seconds = time(gpu, ROUTINGS, |call| {
        let of = GroupedPairs { pairs, count: COUNT, grouping, groups: groups[call].view() };
        let mut stacks = Vec::new();
        for (weights, out) in weights.iter().zip(&mut outs) {
            stacks.push(ExpertWeights { shape, tiles: weights.view(), out: out.view_mut() });
        }
        // SAFETY: `route` made these groups, with the same grouping, and had ended when its experts
        // were read.
        unsafe { kernels.matmul(&gpu.stream, x, of, by_pair, &mut stacks) }?;
        Ok(())
    })?;
    let experts = read as f64 / ROUTINGS as f64;
    let bytes = experts * (weights.len() * shape.bytes()) as f64;
    let operations = (2 * pairs * cols * weights.len() * shape.rows()) as f64;
    println!(
        "{experts:5.1} of {COUNT} experts, {:7.2} us, {:.2} TB/s ({:2.0}% of the copy rate), {:4.0} TOPS \
         ({:2.0}% of 1,240)",
        seconds * 1e6,
        bytes / seconds / 1e12,
        bytes / seconds / 4.29e12 * 100.0,
        operations / seconds / 1e12,
        operations / seconds / 1240e12 * 100.0,
    );
    Ok(())
}
