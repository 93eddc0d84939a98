// SPDX-License-Identifier: Apache-2.0

//! Measures the kernels around the large products at the shapes of qwen3-8b: norm.cu,
//! act_and_mul.cu, rope.cu, quantize.cu, gather.cu, embed.cu, norm_rope_kv.cu and kv_write.cu.
//! Their input was often written just before and is in the L2 cache, here as in a step. So with few
//! rows, the rates exceed the memory's bandwidth.

use anyhow::{Context, Result};
use kernels::cuda::act_and_mul::ActAndMulKernels;
use kernels::cuda::embed::EmbedKernels;
use kernels::cuda::gather::GatherKernels;
use kernels::cuda::kv_write::{KvLayerAddress, KvWriteKernels, head_bytes};
use kernels::cuda::norm::NormKernels;
use kernels::cuda::norm_rope_kv::{NormRopeKvKernels, NormRopeKvOperands};
use kernels::cuda::quantize::{QuantizeKernels, activation_bytes};
use kernels::cuda::quantized_output::QuantizedOutput;
use kernels::cuda::rope::{RopeAngles, RopeKernels};
use kernels::cuda::{Buffer, DeviceView};
use ops::{Activation, KvType, RopePairing};
use quant::DType;
use quant::layout::Tiles;

use crate::TestGpu;
use crate::bench::time;
use crate::random::TestRng;

const EMBEDDING: usize = 4096;
const HIDDEN: usize = 12_288;
const HEADS: usize = 32;
const KV_HEADS: usize = 8;
const HEAD_DIM: usize = 128;
const VOCABULARY: usize = 32_000;
const EPS: f32 = 1e-6;
const BLOCK_TOKENS: usize = 16;

pub(crate) fn bench(gpu: &TestGpu) -> Result<()> {
    for rows in [1, 64, 2048] {
        of_rows(gpu, rows)?;
        of_heads(gpu, rows)?;
    }
    Ok(())
}

/// Prints time and rate of `work`, which reads and writes `bytes` for each row.
fn line(
    gpu: &TestGpu,
    what: &str,
    rows: usize,
    bytes: usize,
    work: impl FnMut(usize) -> Result<()>,
) -> Result<()> {
    let seconds = time(gpu, 50, work)?;
    let rate = (rows * bytes) as f64 / seconds / 1e12;
    println!("{what:34} {rows:4} rows: {:7.2} us, {rate:5.2} TB/s", seconds * 1e6);
    Ok(())
}

fn floats(gpu: &TestGpu, random: &mut TestRng, len: usize) -> Result<Buffer<f32>> {
    Ok(Buffer::from_host(&gpu.stream, &random.values(len))?)
}

fn of_rows(gpu: &TestGpu, rows: usize) -> Result<()> {
    let mut random = TestRng::new(41);
    let (norms, gates, quantize) = (
        NormKernels::new(&gpu.device),
        ActAndMulKernels::new(&gpu.device),
        QuantizeKernels::new(&gpu.device),
    );
    let (gathers, embed) = (GatherKernels::new(&gpu.device), EmbedKernels::new(&gpu.device));
    let stream = &gpu.stream;
    let mut x = floats(gpu, &mut random, rows * EMBEDDING)?;
    let y = floats(gpu, &mut random, rows * EMBEDDING)?;
    let weight = floats(gpu, &mut random, EMBEDDING)?;
    let mut out = Buffer::<f32>::new(&gpu.device, rows * EMBEDDING)?;
    let row = EMBEDDING * size_of::<f32>();
    line(gpu, "norm", rows, 2 * row, |_| {
        Ok(norms.rows(stream, x.view(), weight.view(), EPS, &mut out.view_mut(), None)?)
    })?;
    for format in [DType::Q8_K, DType::Q8_0] {
        let mut act_tiles = act_tiles(gpu, format, rows, EMBEDDING)?;
        line(gpu, &format!("sum and norm, rounded to {format}"), rows, 4 * row + EMBEDDING, |_| {
            let rounded = Some(rounded_output(format, &mut act_tiles));
            let (mut x, mut out) = (x.view_mut(), out.view_mut());
            Ok(norms.add_rows(stream, &mut x, y.view(), weight.view(), EPS, &mut out, rounded)?)
        })?;
        line(gpu, &format!("quantize to {format}"), rows, row + EMBEDDING, |_| {
            quantize.launch(stream, format, y.view(), rows, EMBEDDING, &mut act_tiles.view_mut())?;
            Ok(())
        })?;
    }
    let mut gate = floats(gpu, &mut random, rows * HIDDEN)?;
    let up = floats(gpu, &mut random, rows * HIDDEN)?;
    line(gpu, "gate", rows, 3 * HIDDEN * size_of::<f32>(), |_| {
        Ok(gates.values(stream, Activation::Silu, &mut gate.view_mut(), up.view())?)
    })?;
    let mut rounded = act_tiles(gpu, DType::Q8_K, rows, HIDDEN)?;
    line(gpu, "gate, rounded to q8_k", rows, 3 * HIDDEN * size_of::<f32>() + HIDDEN, |_| {
        let rounded = rounded_output(DType::Q8_K, &mut rounded);
        let (mut gate, up) = (gate.view_mut(), up.view());
        Ok(gates.rows_quantized(stream, Activation::Silu, &mut gate, up, HIDDEN, None, &rounded)?)
    })?;
    let picked: Vec<u32> = (0..rows as u32).rev().collect();
    let picked = Buffer::from_host(stream, &picked)?;
    line(gpu, "gathered rows", rows, 2 * row, |_| {
        // SAFETY: every picked row is a row of `y`.
        Ok(unsafe { gathers.rows(stream, y.view(), picked.view(), EMBEDDING, &mut out.view_mut()) }?)
    })?;
    for dtype in [DType::Q4_K, DType::F16] {
        let shape = Tiles::new(dtype, EMBEDDING, VOCABULARY)?;
        let noise = random.bytes(1 << 20);
        let table: Vec<u8> = noise.into_iter().cycle().take(shape.bytes()).collect();
        let table = Buffer::from_host(stream, &table)?;
        let tokens: Vec<u32> = (0..rows).map(|_| (random.bits() % VOCABULARY as u64) as u32).collect();
        let tokens = Buffer::from_host(stream, &tokens)?;
        let read = shape.bytes() / VOCABULARY;
        line(gpu, &format!("embeddings of {dtype}"), rows, read + row, |_| {
            let (tokens, mut out) = (tokens.view(), out.view_mut());
            Ok(embed.launch(stream, &shape, table.view(), tokens, tokens, &mut out)?)
        })?;
    }
    Ok(())
}

fn rounded_output(format: DType, act_tiles: &mut Buffer<u8>) -> QuantizedOutput<'_> {
    let act_tiles = act_tiles.view_mut();
    QuantizedOutput { layout: format.into(), act_tiles, needs_values: true, is_before_product: false }
}

fn act_tiles(gpu: &TestGpu, format: DType, rows: usize, cols: usize) -> Result<Buffer<u8>> {
    let bytes = activation_bytes(format, rows, cols).context("bytes of act_tiles")?;
    Ok(Buffer::new(&gpu.device, bytes)?)
}

/// Measures the work on a row's heads before attention, up to the write of keys and values to the
/// cache.
fn of_heads(gpu: &TestGpu, rows: usize) -> Result<()> {
    let mut random = TestRng::new(42);
    let stream = &gpu.stream;
    let (norms, ropes) = (NormKernels::new(&gpu.device), RopeKernels::new(&gpu.device));
    let (heads_to_cache, writes) = (NormRopeKvKernels::new(&gpu.device), KvWriteKernels::new(&gpu.device));
    let mut queries = floats(gpu, &mut random, rows * HEADS * HEAD_DIM)?;
    let mut keys = floats(gpu, &mut random, rows * KV_HEADS * HEAD_DIM)?;
    let values = floats(gpu, &mut random, rows * KV_HEADS * HEAD_DIM)?;
    let weight = floats(gpu, &mut random, HEAD_DIM)?;
    let frequencies = floats(gpu, &mut random, HEAD_DIM / 2)?;
    let positions = Buffer::from_host(stream, &(0..rows as u32).collect::<Vec<_>>())?;
    let angles =
        RopeAngles { pairing: RopePairing::Halves, inverse_frequencies: frequencies.view(), magnitude: 1.0 };
    let row = HEAD_DIM * size_of::<f32>();
    line(gpu, "norms of query heads", rows, 2 * HEADS * row, |_| {
        Ok(norms.heads(stream, &mut queries.view_mut(), weight.view(), EPS)?)
    })?;
    line(gpu, "rotation of query heads", rows, 2 * HEADS * row, |_| {
        Ok(ropes.launch(stream, &mut queries.view_mut(), positions.view(), angles, HEAD_DIM)?)
    })?;
    for kind in [KvType::F16, KvType::Bf16, KvType::Q8_0] {
        let head_bytes = head_bytes(kind, HEAD_DIM, BLOCK_TOKENS).context("bytes of a head")?;
        let block_bytes = 2 * KV_HEADS as u32 * head_bytes;
        let blocks = rows.div_ceil(BLOCK_TOKENS);
        let cache = Buffer::<u8>::new(&gpu.device, blocks * block_bytes as usize)?;
        // All blocks are in one unit.
        let layer = KvLayerAddress {
            base: cache.view().address(),
            unit_bytes: cache.len() as u64,
            layer_offset: 0,
            block_bytes,
            head_bytes,
            unit_shift: 20,
            block_tokens: BLOCK_TOKENS as u32,
        };
        let slots: DeviceView<'_, u32> = positions.view();
        let cached = block_bytes as usize / BLOCK_TOKENS;
        line(gpu, &format!("keys and values to {kind}"), rows, 2 * KV_HEADS * row + cached, |_| {
            // SAFETY: the cache has a block for every slot, and no other work uses the cache.
            Ok(unsafe {
                writes.launch(stream, layer, kind, keys.view(), values.view(), slots, KV_HEADS, HEAD_DIM)
            }?)
        })?;
        let bytes = (2 * HEADS + 3 * KV_HEADS) * row + cached;
        line(gpu, &format!("heads, and to a cache of {kind}"), rows, bytes, |_| {
            let heads = NormRopeKvOperands {
                queries: queries.view_mut(),
                keys: keys.view_mut(),
                values: values.view(),
                norms: Some((weight.view(), weight.view(), EPS)),
                positions: positions.view(),
                slots,
                angles,
                head_dim: HEAD_DIM,
                kv_heads: KV_HEADS,
            };
            // SAFETY: the cache has a block for every slot. Earlier work wrote all inputs.
            Ok(unsafe { heads_to_cache.launch(stream, layer, kind, &heads) }?)
        })?;
    }
    Ok(())
}
