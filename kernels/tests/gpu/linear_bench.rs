// SPDX-License-Identifier: Apache-2.0

//! Times of single products. `BENCH_ALL_METHODS` measures all methods, not the chosen one.

use anyhow::Context;
use bytemuck::Pod;
use kernels::cuda::Buffer;
use kernels::cuda::linear::{LinearKernels, LinearMethod, MatrixProduct};
use kernels::cuda::quantize::QuantizeKernels;
use quant::DType;
use quant::layout::Tiles;

use crate::TestGpu;
use crate::bench::time;
use crate::linear::{FLOATS, TYPES, layout_of, methods};
use crate::random::TestRng;

/// The bytes of several copies of the weights. With them, no copy is still in the 60 MB of L2 when
/// it is read again.
const COLD_BYTES: usize = 300 << 20;

/// Tokens of a measured product.
const TOKENS: [usize; 15] = [1, 2, 4, 8, 12, 16, 24, 32, 48, 64, 96, 128, 256, 512, 2048];
/// Output weights, which compute the last tokens alone.
const VOCABULARY: usize = 151_936;

pub(crate) fn bench(gpu: &TestGpu) -> anyhow::Result<()> {
    let mut random = TestRng::new(8);
    let noise = Buffer::from_host(&gpu.stream, &random.bytes(16 << 20))?;
    let full = std::env::var_os("BENCH_ALL_METHODS").is_some();
    println!("type   cols   rows tokens method          us    GB/s   TOPS");
    let types = if full {
        vec![DType::Q4_K, DType::Q5_K, DType::Q6_K, DType::Q8_0]
    } else {
        [&TYPES[..], &FLOATS].concat()
    };
    for dtype in types {
        for (cols, rows) in [(4096, 4096), (4096, 12_288), (12_288, 4096), (4096, VOCABULARY)] {
            let weights = ColdWeights::new(gpu, &noise, Tiles::new(dtype, cols, rows)?)?;
            for tokens in TOKENS {
                let left_out = full && matches!(tokens, 1 | 2048) || rows == VOCABULARY && tokens > 64;
                if !left_out {
                    weights.measure(gpu, &mut random, tokens, full)?;
                }
            }
        }
    }
    Ok(())
}

/// Several copies of a matrix of random bytes.
struct ColdWeights {
    shape: Tiles,
    copies: usize,
    data: Buffer<u8>,
}

impl ColdWeights {
    fn new(gpu: &TestGpu, noise: &Buffer<u8>, shape: Tiles) -> anyhow::Result<Self> {
        let copies = (COLD_BYTES / shape.bytes()).clamp(1, 24);
        let mut data = Buffer::<u8>::new(&gpu.device, copies * shape.bytes())?;
        repeat(gpu, noise, &mut data)?;
        gpu.stream.synchronize()?;
        Ok(Self { shape, copies, data })
    }

    fn measure(&self, gpu: &TestGpu, random: &mut TestRng, tokens: usize, full: bool) -> anyhow::Result<()> {
        let linear = LinearKernels::new(&gpu.device);
        let (dtype, cols, rows) = (self.shape.dtype(), self.shape.cols(), self.shape.rows());
        let some = Buffer::from_host(&gpu.stream, &random.values(tokens.min(64) * cols))?;
        let mut values = Buffer::<f32>::new(&gpu.device, tokens * cols)?;
        repeat(gpu, &some, &mut values)?;
        let layout = layout_of(gpu, dtype)?;
        let mut quants = Buffer::new(&gpu.device, layout.bytes(tokens, cols).context("bytes")?)?;
        let mut scratch = quants.view_mut();
        let quantize = QuantizeKernels::new(&gpu.device);
        let x = quantize.launch(&gpu.stream, layout, values.view(), tokens, cols, &mut scratch)?;
        let mut out = Buffer::<f32>::new(&gpu.device, tokens * rows)?;
        let chosen = vec![linear.method(self.shape, tokens)];
        let all = methods(gpu, dtype, tokens).into_iter().filter(|&method| is_sensible(method, tokens));
        for method in if full { all.collect() } else { chosen } {
            let calls = if tokens > 64 { self.copies.min(4) } else { self.copies };
            let timed = time(gpu, calls, |call| {
                let (shape, bytes) = (self.shape, self.shape.bytes());
                let tiles = self.data.view().slice(call % self.copies * bytes, bytes).context("copy")?;
                let mut products = [MatrixProduct { shape, tiles, bias: None, out: out.view_mut() }];
                Ok(linear.launch_with(&gpu.stream, method, x, &mut products)?)
            });
            match timed {
                Ok(seconds) => println!(
                    "{dtype:5} {cols:6} {rows:6} {tokens:6} {:10} {:8.1} {:7.0} {:6.1}",
                    name(method),
                    seconds * 1e6,
                    self.shape.bytes() as f64 / seconds / 1e9,
                    2.0 * (cols * rows * tokens) as f64 / seconds / 1e12
                ),
                // Long rows do not fit every shape's shared memory.
                Err(error) => println!("{dtype:5} {cols:6} {rows:6} {tokens:6} {method:?}: {error}"),
            }
        }
        Ok(())
    }
}

/// Fills `to` with `from`, as often as it fits.
fn repeat<T: Pod>(gpu: &TestGpu, from: &Buffer<T>, to: &mut Buffer<T>) -> anyhow::Result<()> {
    for at in (0..to.len()).step_by(from.len()) {
        let len = from.len().min(to.len() - at);
        let part = from.view().slice(0, len).context("from")?;
        to.view_mut().slice_mut(at, len).context("to")?.copy_from(&gpu.stream, part)?;
    }
    Ok(())
}

/// Whether blocks are neither nearly empty nor far too small.
fn is_sensible(method: LinearMethod, tokens: usize) -> bool {
    match method {
        LinearMethod::Matmul(shape) => tokens <= 8 * shape.tokens() && shape.tokens() <= 16 * tokens,
        LinearMethod::Wgmma(shape) => tokens <= 8 * shape.tokens() && shape.tokens() <= 4 * tokens,
        _ => true,
    }
}

fn name(method: LinearMethod) -> String {
    match method {
        LinearMethod::Matvec => "vector".to_owned(),
        LinearMethod::Scalar => "plain".to_owned(),
        LinearMethod::Matmul(shape) => format!("tiles {}", shape.tokens()),
        LinearMethod::Skinny => "skinny".to_owned(),
        LinearMethod::Wgmma(shape) => shape.to_string(),
        LinearMethod::FloatMatmul(shape) => format!("{}x{}", shape.tokens(), shape.rows()),
    }
}
