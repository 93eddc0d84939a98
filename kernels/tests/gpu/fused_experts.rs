// SPDX-License-Identifier: Apache-2.0

//! Compares experts/fused.cuh bit by bit with the launches that it replaces.

use anyhow::{Context, Result, ensure};
use kernels::cuda::act_and_mul::ActAndMulKernels;
use kernels::cuda::experts::{
    ExpertKernels, ExpertLayer, ExpertRouting, ExpertWeights, FINISHED_WORDS, FusedExperts, GroupedPairs,
    PairGrouping,
};
use kernels::cuda::quantize::QuantizeKernels;
use kernels::cuda::quantized_output::QuantizedOutput;
use kernels::cuda::repack::RepackKernels;
use kernels::cuda::{Buffer, DeviceView, DeviceViewMut};
use ops::Activation;
use quant::DType;
use quant::layout::Tiles;

use crate::TestGpu;
use crate::expert_products::ExpertBytes;
use crate::linear::{TYPES, ensure_bits};
use crate::random::TestRng;

/// Layers that are computed one after the other.
const REPEATS: usize = 100;

/// The weights of a layer, and what its launches share.
struct Layer<'a> {
    gpu: &'a TestGpu,
    kernels: ExpertKernels,
    quantize: QuantizeKernels,
    gates: ActAndMulKernels,
    shape: ExpertLayer,
    /// Gate, up and down.
    tiles: [Buffer<u8>; 3],
    finished: Buffer<u32>,
}

/// Outputs of gate, up and down, and the weights of pairs.
struct Scratch {
    gate: Buffer<f32>,
    up: Buffer<f32>,
    down: Buffer<f32>,
    pair_weights: Buffer<f32>,
}

/// The inputs of a layer.
struct Rows {
    count: usize,
    logits: Buffer<f32>,
    x: Buffer<f32>,
}

impl<'a> Layer<'a> {
    fn new(
        gpu: &'a TestGpu,
        random: &mut TestRng,
        [gate, down]: [DType; 2],
        [width, hidden]: [usize; 2],
        [count, used]: [usize; 2],
    ) -> Result<Self> {
        let mut stack = |dtype: DType, cols: usize, rows: usize| -> Result<Buffer<u8>> {
            let all = Tiles::new(dtype, cols, rows * count)?;
            let raw = Buffer::from_host(&gpu.stream, &ExpertBytes::Encoded(dtype).bytes(random, &all)?)?;
            let mut tiles = Buffer::new(&gpu.device, all.bytes())?;
            let repack = RepackKernels::new(&gpu.device);
            repack.repack(&gpu.stream, &all, raw.view(), &mut tiles.view_mut())?;
            gpu.stream.synchronize()?;
            Ok(tiles)
        };
        let tiles = [stack(gate, width, hidden)?, stack(gate, width, hidden)?, stack(down, hidden, width)?];
        let of_gate = Tiles::new(gate, width, hidden)?;
        let of_down = Tiles::new(down, hidden, width)?;
        Ok(Self {
            gpu,
            kernels: ExpertKernels::new(&gpu.device),
            quantize: QuantizeKernels::new(&gpu.device),
            gates: ActAndMulKernels::new(&gpu.device),
            shape: ExpertLayer { gate: of_gate, up: of_gate, down: of_down, count, used },
            tiles,
            finished: Buffer::from_host(&gpu.stream, &[0; FINISHED_WORDS])?,
        })
    }

    fn rows(&self, random: &mut TestRng, count: usize, logits: Logits) -> Result<Rows> {
        let x = random.values(count * self.shape.gate.cols());
        let logits = logits.values(random, count, self.shape.count);
        let (logits, x) =
            (Buffer::from_host(&self.gpu.stream, &logits)?, Buffer::from_host(&self.gpu.stream, &x)?);
        Ok(Rows { count, logits, x })
    }

    fn scratch(&self, pairs: usize) -> Result<Scratch> {
        let (hidden, width) = (self.shape.gate.rows(), self.shape.gate.cols());
        let new = |len: usize| -> Result<Buffer<f32>> {
            let mut buffer = Buffer::<f32>::new(&self.gpu.device, len)?;
            buffer.view_mut().fill_bytes(&self.gpu.stream, 0xFF)?;
            Ok(buffer)
        };
        Ok(Scratch {
            gate: new(pairs * hidden)?,
            up: new(pairs * hidden)?,
            down: new(pairs * width)?,
            pair_weights: new(pairs)?,
        })
    }

    /// Gate, up or down, with the buffer for its outputs.
    fn matrix<'b>(&'b self, index: usize, out: &'b mut Buffer<f32>) -> ExpertWeights<'b> {
        let shape = [self.shape.gate, self.shape.up, self.shape.down][index];
        ExpertWeights { shape, tiles: self.tiles[index].view(), out: out.view_mut() }
    }

    fn fused(&mut self, rows: &Rows, scratch: &mut Scratch, out: &mut DeviceViewMut<'_, f32>) -> Result<()> {
        let (stream, width) = (&self.gpu.stream, self.shape.gate.cols());
        ensure!(self.kernels.can_fuse(self.shape, rows.count), "no kernel for {:?}", self.shape);
        let layout = PairGrouping::ByPair.layout(self.shape.gate.dtype()).context("layout")?;
        let bytes = layout.bytes(rows.count, width).context("bytes")?;
        let mut data = Buffer::<u8>::new(&self.gpu.device, bytes)?;
        let mut data = data.view_mut();
        let x = self.quantize.launch(stream, layout, rows.x.view(), rows.count, width, &mut data)?;
        let finished = Buffer::view_mut(&mut self.finished);
        // SAFETY: the buffer lives as long as the layer, and nothing else uses it.
        let finished = unsafe { DeviceViewMut::from_raw(finished.address(), finished.len()) };
        let mut layer = FusedExperts {
            logits: rows.logits.view(),
            used: self.shape.used,
            x,
            gate_and_up: [self.matrix(0, &mut scratch.gate), self.matrix(1, &mut scratch.up)],
            down: self.matrix(2, &mut scratch.down),
            pair_weights: scratch.pair_weights.view_mut(),
            finished,
        };
        // SAFETY: the counts were zeros at first, and each sum clears them.
        unsafe { self.kernels.fused(stream, &mut layer, out) }?;
        stream.synchronize()?;
        Ok(())
    }

    fn separate(&self, rows: &Rows, scratch: &mut Scratch, out: &mut DeviceViewMut<'_, f32>) -> Result<()> {
        let (stream, device) = (&self.gpu.stream, &self.gpu.device);
        let ExpertLayer { gate, down, count, used, .. } = self.shape;
        let (pairs, grouping) = (rows.count * used, PairGrouping::Matmul);
        let mut experts = Buffer::<u32>::new(device, pairs)?;
        let mut words = Buffer::<u32>::new(device, grouping.words(pairs, count))?;
        let mut routing = ExpertRouting {
            experts: experts.view_mut(),
            expert_weights: scratch.pair_weights.view_mut(),
            grouping,
            groups: words.view_mut(),
        };
        self.kernels.route(stream, rows.logits.view(), count, used, &mut routing)?;
        let slots = grouping.slots(pairs, count);
        let of = GroupedPairs { pairs, count, grouping, groups: words.view() };
        let product = |x: DeviceView<'_, f32>, shape: Tiles, per_row, stacks: &mut [ExpertWeights<'_>]| {
            let layout = grouping.layout(shape.dtype()).context("layout")?;
            let bytes = layout.bytes(slots, shape.cols()).context("bytes")?;
            let mut data = Buffer::<u8>::new(device, bytes)?;
            let quantized = QuantizedOutput {
                layout,
                act_tiles: data.view_mut(),
                needs_values: true,
                is_before_product: false,
            };
            // SAFETY: `route` made these groups, with this grouping, and `quantize` lies between.
            unsafe {
                self.kernels.quantize(stream, x, shape.cols(), per_row, of, &quantized)?;
                let x = quantized.activations(slots, shape.cols());
                self.kernels.matmul(stream, x, of, true, stacks)?;
            }
            stream.synchronize()?;
            anyhow::Ok(())
        };
        let mut stacks = [self.matrix(0, &mut scratch.gate), self.matrix(1, &mut scratch.up)];
        product(rows.x.view(), gate, used, &mut stacks)?;
        self.gates.values(stream, Activation::Silu, &mut scratch.gate.view_mut(), scratch.up.view())?;
        let mut stacks = [self.matrix(2, &mut scratch.down)];
        product(scratch.gate.view(), down, 1, &mut stacks)?;
        self.kernels.combine(stream, scratch.down.view(), scratch.pair_weights.view(), used, out)?;
        Ok(())
    }

    /// Compares both ways for some rows.
    fn compare(&mut self, rows: &Rows, what: &str) -> Result<()> {
        let stream = &self.gpu.stream;
        let (pairs, values) = (rows.count * self.shape.used, rows.count * self.shape.gate.cols());
        let mut outs =
            [Buffer::<f32>::new(&self.gpu.device, values)?, Buffer::new(&self.gpu.device, values)?];
        let mut scratch = [self.scratch(pairs)?, self.scratch(pairs)?];
        self.separate(rows, &mut scratch[0], &mut outs[0].view_mut())?;
        self.fused(rows, &mut scratch[1], &mut outs[1].view_mut())?;
        let [expected, found] = [outs[0].to_host(stream)?, outs[1].to_host(stream)?];
        let [of_expected, of_found] = &scratch;
        let weights = of_expected.pair_weights.to_host(stream)?;
        ensure_bits(&format!("{what}: weights"), &of_found.pair_weights.to_host(stream)?, &weights)?;
        let down = of_expected.down.to_host(stream)?;
        ensure_bits(&format!("{what}: down"), &of_found.down.to_host(stream)?, &down)?;
        ensure_bits(&format!("{what}: sum"), &found, &expected)?;
        let counts = self.finished.to_host(stream)?;
        ensure!(counts.iter().all(|&count| count == 0), "{what}: counts are left");
        Ok(())
    }
}

/// How rows choose their experts.
#[derive(Clone, Copy, Debug)]
enum Logits {
    Random,
    /// All rows choose the same experts, so groups are as large as they get.
    Same,
    /// Nearly all probabilities are zero, some logits are minus infinity.
    Extreme,
    /// Logits that differ so little that many probabilities are equal.
    Close,
    /// Zeros of both signs above all others.
    Zeros,
    /// Down to -120, where probabilities are subnormal. The second of two experts is a little above
    /// the first.
    Wide,
    /// Some rows have a logit that is not a number, of either sign, or infinity.
    NotNumbers,
}

impl Logits {
    const ALL: [Self; 7] =
        [Self::Random, Self::Same, Self::Extreme, Self::Close, Self::Zeros, Self::Wide, Self::NotNumbers];
    /// Those with different groups.
    const GROUPED: [Self; 2] = [Self::Random, Self::Same];

    fn values(self, random: &mut TestRng, rows: usize, count: usize) -> Vec<f32> {
        match self {
            Self::Random => random.values(rows * count),
            Self::Same => random.values(count).repeat(rows),
            Self::Extreme => {
                let extreme = |x: f32| if x < -1.0 { f32::NEG_INFINITY } else { x * 1e30 };
                random.values(rows * count).into_iter().map(extreme).collect()
            }
            Self::Close => {
                let scales = [1e-9, 1e-7, 3e-7, 1e-6, 3e-6, 1e-5];
                let values = random.values(rows * count).into_iter().enumerate();
                values.map(|(at, x)| x * scales[at / count % scales.len()]).collect()
            }
            Self::Zeros => {
                let zeros = |x: f32| if x.abs() < 0.3 { 0.0_f32.copysign(x) } else { -x.abs() };
                random.values(rows * count).into_iter().map(zeros).collect()
            }
            Self::Wide => {
                let mut values = random.values(rows * count);
                for row in values.chunks_exact_mut(count) {
                    row.iter_mut().for_each(|x| *x = -60.0 * x.abs());
                    row[0] = 0.0;
                    for pair in row[1..].chunks_exact_mut(2) {
                        pair[1] = pair[0].next_up().next_up();
                    }
                }
                values
            }
            Self::NotNumbers => {
                let mut values = random.values(rows * count);
                let found = [f32::NAN, -f32::NAN, f32::INFINITY, 1.0];
                for (row, found) in values.chunks_exact_mut(count).zip(found.into_iter().cycle()) {
                    row[count / 2] = found;
                }
                values
            }
        }
    }
}

/// All types; layers whose row tiles of gate and up are parts of a round, whole rounds, and several
/// row tiles a round; blocks with no row tiles, and with those of two groups.
pub(crate) fn layers_are_those_of_single_launches(gpu: &TestGpu) -> Result<()> {
    if is_skipped(gpu) {
        return Ok(());
    }
    let mut random = TestRng::new(61);
    let same = TYPES.into_iter().map(|dtype| [dtype, dtype]);
    let mixed = [[DType::Q4_K, DType::Q6_K], [DType::Q5_K, DType::Q6_K]];
    for types in same.chain(mixed) {
        for (size, experts) in [
            ([256, 256], [9, 2]),
            ([2048, 768], [32, 8]),
            ([768, 512], [300, 5]),
            ([1024, 256], [130, 12]),
            ([4096, 256], [8, 8]),
            ([512, 1024], [7, 1]),
            // Partial column tiles, and as many experts and pairs as there may be.
            ([288, 480], [512, 32]),
        ] {
            let has_rows_of =
                |dtype: DType| size.iter().all(|cols: &usize| cols.is_multiple_of(dtype.block_len()));
            if gpu.small && size[0] * size[1] > 512 * 512 || !types.into_iter().all(has_rows_of) {
                continue;
            }
            let mut layer = Layer::new(gpu, &mut random, types, size, experts)?;
            let rows_max = (gpu.device.multiprocessors() as usize).min(128) / experts[1];
            for rows in (1..=rows_max.min(8)).filter(|rows| !gpu.small || [3, 8].contains(rows)) {
                // Routing knows no types.
                let is_first = types == [TYPES[0]; 2];
                for &logits in if is_first { &Logits::ALL[..] } else { &Logits::GROUPED } {
                    let inputs = layer.rows(&mut random, rows, logits)?;
                    let what = format!("{types:?}, {size:?}, {experts:?}, {rows} rows, {logits:?}");
                    layer.compare(&inputs, &what)?;
                }
            }
            ensure!(!layer.kernels.can_fuse(layer.shape, 9), "an activation tile has 8 rows");
        }
    }
    Ok(())
}

/// Blocks wait for each other in memory, so a race shows in some of many launches.
pub(crate) fn repeated_layers_are_equal(gpu: &TestGpu) -> Result<()> {
    if is_skipped(gpu) {
        return Ok(());
    }
    let mut random = TestRng::new(62);
    for types in [[DType::Q4_K, DType::Q6_K], [DType::Q8_0, DType::Q8_0]] {
        let size = if gpu.small { [256, 256] } else { [2048, 768] };
        let mut layer = Layer::new(gpu, &mut random, types, size, [64, 8])?;
        let rows_max = (gpu.device.multiprocessors() as usize / 8).min(8);
        for repeat in 0..if gpu.small { 3 } else { REPEATS } {
            let rows = layer.rows(&mut random, 1 + repeat % rows_max, Logits::Random)?;
            layer.compare(&rows, &format!("{types:?}, launch {repeat}"))?;
        }
    }
    Ok(())
}

fn is_skipped(gpu: &TestGpu) -> bool {
    let shares = gpu.device.info().mps;
    if shares {
        println!("SKIPPED: under MPS, layers of experts are not fused");
    }
    shares
}
