// SPDX-License-Identifier: Apache-2.0

//! Compares experts/wgmma.cuh and experts/skinny_matmul.cuh bit by bit with experts/matmul.cuh and
//! with the canonical order on the host, for experts with few and with many pairs.

use anyhow::{Context, Result, ensure};
use kernels::cuda::Buffer;
use kernels::cuda::experts::{ExpertKernels, ExpertRouting, ExpertWeights, GroupedPairs, PairGrouping};
use kernels::cuda::linear::has_wgmma_kernels;
use kernels::cuda::quantized_output::QuantizedOutput;
use kernels::cuda::repack::RepackKernels;
use quant::layout::Tiles;
use quant::{Activations, DType};

use crate::TestGpu;
use crate::linear::{TYPES, canonical, ensure_bits};
use crate::random::TestRng;
use crate::wgmma::{BLOCKS, BlockBytes, KINDS, RANDOM_KIND};

/// Pairs of each expert: no group, groups that end near tiles and blocks, and several groups.
const UNEVEN: [usize; 19] = [0, 1, 7, 8, 9, 31, 33, 63, 64, 65, 96, 97, 127, 128, 129, 160, 161, 200, 325];
/// Launches of one product. Of 100, a race between reading and copying made one to 60 differ.
const REPEATS: usize = 100;

/// Values that are encoded.
const ENCODED: usize = 256 * 1021;

/// The bytes of weights.
#[derive(Clone, Copy)]
pub(crate) enum ExpertBytes<'a> {
    Blocks(&'a BlockBytes, usize),
    /// Random values, encoded. They repeat after [`ENCODED`]; no expert's size is a
    /// multiple of it.
    Encoded(DType),
}

impl ExpertBytes<'_> {
    fn dtype(&self) -> DType {
        match self {
            Self::Blocks(blocks, _) => blocks.dtype,
            Self::Encoded(dtype) => *dtype,
        }
    }

    /// Otherwise activations are 1 and -1: with extreme weights, such sums are the largest.
    fn takes_random_activations(&self) -> bool {
        matches!(self, Self::Encoded(_) | Self::Blocks(_, RANDOM_KIND))
    }

    pub(crate) fn bytes(&self, random: &mut TestRng, shape: &Tiles) -> Result<Vec<u8>> {
        let mut raw = random.bytes(shape.raw_bytes());
        match *self {
            Self::Blocks(blocks, kind) => blocks.fill(random, kind, &mut raw),
            Self::Encoded(dtype) => {
                let mut some = vec![0; dtype.row_bytes(ENCODED as u64)? as usize];
                quant::encode(dtype, &random.values(ENCODED), &mut some)?;
                raw.iter_mut().zip(some.iter().cycle()).for_each(|(to, &from)| *to = from);
            }
        }
        Ok(raw)
    }
}

/// Rows, each of which goes through one expert, and two stacks of experts.
struct ExpertProducts<'a> {
    gpu: &'a TestGpu,
    kernels: ExpertKernels,
    /// The shape of one expert's matrix.
    shape: Tiles,
    count: usize,
    raw: [Vec<u8>; 2],
    tiles: [Buffer<u8>; 2],
    /// The expert of each pair.
    experts: Vec<usize>,
    logits: Buffer<f32>,
    x: Vec<f32>,
    device_x: Buffer<f32>,
}

impl<'a> ExpertProducts<'a> {
    fn new(
        gpu: &'a TestGpu,
        random: &mut TestRng,
        weights: ExpertBytes<'_>,
        [cols, rows]: [usize; 2],
        pairs_of: &[usize],
    ) -> Result<Self> {
        let (dtype, count) = (weights.dtype(), pairs_of.len());
        let all = Tiles::new(dtype, cols, rows * count)?;
        let mut stack = || -> Result<(Vec<u8>, Buffer<u8>)> {
            let raw = weights.bytes(random, &all)?;
            let mut tiles = Buffer::new(&gpu.device, all.bytes())?;
            let device_raw = Buffer::from_host(&gpu.stream, &raw)?;
            let repack = RepackKernels::new(&gpu.device);
            repack.repack(&gpu.stream, &all, device_raw.view(), &mut tiles.view_mut())?;
            gpu.stream.synchronize()?;
            Ok((raw, tiles))
        };
        let (gate, up) = (stack()?, stack()?);
        let of_expert = |(expert, &pairs)| std::iter::repeat_n(expert, pairs);
        let mut experts: Vec<usize> = pairs_of.iter().enumerate().flat_map(of_expert).collect();
        for at in (1..experts.len()).rev() {
            experts.swap(at, random.bits() as usize % (at + 1));
        }
        let mut logits = vec![0.0; experts.len() * count];
        for (row, &expert) in logits.chunks_exact_mut(count).zip(&experts) {
            row[expert] = 1.0;
        }
        let mut x = random.values(experts.len() * cols);
        for (at, x) in x.iter_mut().enumerate().filter(|_| !weights.takes_random_activations()) {
            let positive = (at / cols).is_multiple_of(2) || random.bits().is_multiple_of(2);
            *x = if positive { 1.0 } else { -1.0 };
        }
        Ok(Self {
            gpu,
            kernels: ExpertKernels::new(&gpu.device),
            shape: Tiles::new(dtype, cols, rows)?,
            count,
            raw: [gate.0, up.0],
            tiles: [gate.1, up.1],
            experts,
            logits: Buffer::from_host(&gpu.stream, &logits)?,
            device_x: Buffer::from_host(&gpu.stream, &x)?,
            x,
        })
    }

    /// Computes `launches` products with both stacks. Returns the outputs of each, by pair.
    fn run(&self, grouping: PairGrouping, by_pair: bool, launches: usize) -> Result<Vec<[Vec<f32>; 2]>> {
        let Self { gpu, kernels, shape, count, .. } = self;
        let (pairs, count, cols) = (self.experts.len(), *count, shape.cols());
        let mut experts = Buffer::<u32>::new(&gpu.device, pairs)?;
        let mut expert_weights = Buffer::<f32>::new(&gpu.device, pairs)?;
        let mut words = Buffer::<u32>::new(&gpu.device, grouping.words(pairs, count))?;
        let mut routing = ExpertRouting {
            experts: experts.view_mut(),
            expert_weights: expert_weights.view_mut(),
            grouping,
            groups: words.view_mut(),
        };
        kernels.route(&gpu.stream, self.logits.view(), count, 1, &mut routing)?;
        let slots = grouping.slots(pairs, count);
        let layout = grouping.layout(shape.dtype()).context("no layout")?;
        let mut data = Buffer::<u8>::new(&gpu.device, layout.bytes(slots, cols).context("no bytes")?)?;
        let outputs = if by_pair { pairs } else { slots } * shape.rows();
        let new_out = || -> Result<Buffer<f32>> {
            let mut out = Buffer::<f32>::new(&gpu.device, outputs)?;
            out.view_mut().fill_bytes(&gpu.stream, 0xFF)?;
            Ok(out)
        };
        let mut outs = (0..launches).map(|_| Ok([new_out()?, new_out()?])).collect::<Result<Vec<_>>>()?;
        for [gate, up] in &mut outs {
            let of = GroupedPairs { pairs, count, grouping, groups: words.view() };
            let quantized = QuantizedOutput {
                layout,
                act_tiles: data.view_mut(),
                needs_values: true,
                is_before_product: false,
            };
            let mut stacks = [
                ExpertWeights { shape: *shape, tiles: self.tiles[0].view(), out: gate.view_mut() },
                ExpertWeights { shape: *shape, tiles: self.tiles[1].view(), out: up.view_mut() },
            ];
            // SAFETY: `route` made these groups, with this grouping, and `quantize` lies between.
            unsafe {
                kernels.quantize(&gpu.stream, self.device_x.view(), cols, 1, of, &quantized)?;
                let x = quantized.activations(slots, cols);
                kernels.matmul(&gpu.stream, x, of, by_pair, &mut stacks)?;
            }
        }
        let words = words.to_host(&gpu.stream)?;
        let in_order = |out: Vec<f32>| if by_pair { out } else { self.by_pair(&words[..slots], &out) };
        let read = |[gate, up]: [Buffer<f32>; 2]| {
            Ok([in_order(gate.to_host(&gpu.stream)?), in_order(up.to_host(&gpu.stream)?)])
        };
        outs.into_iter().map(read).collect()
    }

    /// Outputs of slots in the order of pairs.
    fn by_pair(&self, sorted_pairs: &[u32], outputs: &[f32]) -> Vec<f32> {
        let rows = self.shape.rows();
        let mut out = vec![f32::NAN; self.experts.len() * rows];
        for (&pair, values) in sorted_pairs.iter().zip(outputs.chunks_exact(rows)) {
            if pair != u32::MAX {
                out[pair as usize * rows..][..rows].copy_from_slice(values);
            }
        }
        out
    }

    /// Compares repeated launches with one of another kernel.
    fn ensure_equal_repeats(&self, grouping: PairGrouping, repeats: usize) -> Result<()> {
        let expected = self.run(PairGrouping::Matmul, true, 1)?.remove(0);
        let mut differing = 0;
        for found in self.run(grouping, true, repeats)? {
            let is_equal = |(a, b): (&Vec<f32>, &Vec<f32>)| ensure_bits("", a, b).is_ok();
            differing += usize::from(!found.iter().zip(&expected).all(is_equal));
        }
        let (dtype, cols, rows) = (self.shape.dtype(), self.shape.cols(), self.shape.rows());
        ensure!(differing == 0, "{dtype} {cols} x {rows}: {differing} of {repeats} differ");
        Ok(())
    }

    /// The canonical result of every 13th pair.
    fn ensure_canonical(&self, what: &str, found: &[Vec<f32>; 2]) -> Result<()> {
        let (dtype, cols, rows) = (self.shape.dtype(), self.shape.cols(), self.shape.rows());
        let row_bytes = self.shape.raw_bytes() / rows;
        for pair in (0..self.experts.len()).step_by(13) {
            let a = Activations::for_weight(dtype, &self.x[pair * cols..][..cols])?.context("activation")?;
            let expert = self.experts[pair];
            for (raw, found) in self.raw.iter().zip(found) {
                let raw = &raw[expert * rows * row_bytes..][..rows * row_bytes];
                let expected = raw.chunks_exact(row_bytes).map(|raw| canonical(dtype, raw, &a));
                let expected: Vec<f32> = expected.collect::<Result<_>>()?;
                let what = format!("{what}, pair {pair} of expert {expert}");
                ensure_bits(&what, &found[pair * rows..][..rows], &expected)?;
            }
        }
        Ok(())
    }
}

/// Rows of 16 that end inside, at the end of and behind a block, and column counts of one and of
/// many rounds of the pipeline. All blocks get several output tiles.
pub(crate) fn products_on_wgmma_have_the_canonical_bits(gpu: &TestGpu) -> Result<()> {
    let mut random = TestRng::new(51);
    let counts = if gpu.small { &UNEVEN[..6] } else { &UNEVEN };
    for blocks in BLOCKS.iter().filter(|blocks| is_on_wgmma(gpu, blocks.dtype)) {
        for kind in 0..KINDS {
            for [cols, rows] in [[256, 16], [512, 144], [768, 256], [2048, 80]] {
                let weights = ExpertBytes::Blocks(blocks, kind);
                let case = ExpertProducts::new(gpu, &mut random, weights, [cols, rows], counts)?;
                let what = format!("{}, kind {kind}, {cols} x {rows}", blocks.dtype);
                let wgmma = PairGrouping::on_wgmma(&[blocks.dtype]).context("no kernel")?;
                let expected = case.run(PairGrouping::Matmul, true, 1)?.remove(0);
                for by_pair in [true, false] {
                    let found = case.run(wgmma, by_pair, 1)?.remove(0);
                    for (found, expected) in found.iter().zip(&expected) {
                        ensure_bits(&format!("{what}, by pair {by_pair}"), found, expected)?;
                    }
                    if cols <= 512 {
                        case.ensure_canonical(&what, &found)?;
                    }
                }
            }
        }
    }
    Ok(())
}

/// Launches one product many times, each time after the kernel that quantizes its activations. All
/// results are equal: a race shows in some of them.
pub(crate) fn repeated_products_on_wgmma_are_equal(gpu: &TestGpu) -> Result<()> {
    let mut random = TestRng::new(52);
    let (counts, repeats) = if gpu.small { (&UNEVEN[..6], 3) } else { (&UNEVEN[..], REPEATS) };
    for blocks in BLOCKS.iter().filter(|blocks| is_on_wgmma(gpu, blocks.dtype)) {
        for [cols, rows] in [[2048, 768], [768, 2048]] {
            let shape = if gpu.small { [cols, 80] } else { [cols, rows] };
            let weights = ExpertBytes::Blocks(blocks, RANDOM_KIND);
            let case = ExpertProducts::new(gpu, &mut random, weights, shape, counts)?;
            let wgmma = PairGrouping::on_wgmma(&[blocks.dtype]).context("no kernel")?;
            case.ensure_equal_repeats(wgmma, repeats)?;
        }
    }
    Ok(())
}

/// Column counts of one and of many rounds of the pipeline. With the first shape, a group has as
/// many weight tiles as the ring, and blocks have several groups.
pub(crate) fn products_of_few_pairs_have_the_canonical_bits(gpu: &TestGpu) -> Result<()> {
    let mut random = TestRng::new(53);
    let counts = if gpu.small { UNEVEN[..6].to_vec() } else { UNEVEN.repeat(3) };
    let encoded = TYPES.into_iter().map(ExpertBytes::Encoded);
    let extreme = BLOCKS.iter().flat_map(|blocks| (0..KINDS).map(|kind| ExpertBytes::Blocks(blocks, kind)));
    for weights in encoded.chain(extreme) {
        for [cols, rows] in [[256, 256], [512, 144], [768, 256], [2048, 80]] {
            let case = ExpertProducts::new(gpu, &mut random, weights, [cols, rows], &counts)?;
            let expected = case.run(PairGrouping::Matmul, true, 1)?.remove(0);
            let what = format!("{}, {cols} x {rows}", weights.dtype());
            for by_pair in [true, false] {
                let found = case.run(PairGrouping::Skinny, by_pair, 1)?.remove(0);
                for (found, expected) in found.iter().zip(&expected) {
                    ensure_bits(&format!("{what}, by pair {by_pair}"), found, expected)?;
                }
                if cols <= 512 && by_pair {
                    case.ensure_canonical(&what, &found)?;
                }
            }
        }
    }
    Ok(())
}

/// As for wgmma. Experts have few pairs, as they do where the kernel is chosen.
pub(crate) fn repeated_products_of_few_pairs_are_equal(gpu: &TestGpu) -> Result<()> {
    let mut random = TestRng::new(54);
    let counts: Vec<usize> =
        (0..if gpu.small { 6 } else { 60 }).map(|at| [0, 1, 1, 3, 8, 9][at % 6]).collect();
    for dtype in TYPES {
        for shape in [[2048, 768], [768, 2048]] {
            let shape = if gpu.small { [shape[0], 80] } else { shape };
            let case = ExpertProducts::new(gpu, &mut random, ExpertBytes::Encoded(dtype), shape, &counts)?;
            case.ensure_equal_repeats(PairGrouping::Skinny, if gpu.small { 3 } else { REPEATS })?;
        }
    }
    Ok(())
}

fn is_on_wgmma(gpu: &TestGpu, dtype: DType) -> bool {
    let is_on = has_wgmma_kernels(&gpu.device, dtype);
    if !is_on {
        println!("SKIPPED: {dtype}: this GPU or build has no wgmma");
    }
    is_on
}
