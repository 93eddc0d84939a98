// SPDX-License-Identifier: Apache-2.0

//! Compares quantize.cu bit by bit with the activation functions of `quant`.

use anyhow::ensure;
use kernels::cuda::Buffer;
use kernels::cuda::quantize::{ACT_TILE_TOKENS, ActivationLayout, QuantizeKernels, activation_bytes};
use quant::{Activations, DType};

use crate::TestGpu;
use crate::random::TestRng;

pub(crate) fn activations_are_those_of_the_host(gpu: &TestGpu) -> anyhow::Result<()> {
    let quantize = QuantizeKernels::new(&gpu.device);
    let mut random = TestRng::new(4);
    for (format, cols, tokens) in [
        (DType::Q8_0, 32, 1),
        (DType::Q8_0, 4096, 9),
        (DType::Q8_0, 896, 23),
        (DType::Q8_1, 32, 3),
        (DType::Q8_1, 1024 + 96, 17),
        (DType::Q8_K, 256, 1),
        (DType::Q8_K, 4096, 19),
        (DType::F16, 16, 1),
        (DType::F16, 912, 21),
        (DType::BF16, 4096, 9),
    ] {
        let mut x = random.values(cols * tokens);
        // A block of zeros, and two values of the largest magnitude with opposite signs.
        x[..16].fill(0.0);
        let last = x.len();
        x[last - 3] = 99.0;
        x[last - 7] = -99.0;
        if format == DType::F16 {
            // Beyond the range, at its end, below the smallest normal value and below the smallest.
            for (at, value) in [1e5, -1e5, 65_519.0, 65_520.0, 3e-5, 1e-9].into_iter().enumerate() {
                x[last - 8 - at] = value;
            }
        }
        let expected = panels(format, &x, tokens, cols)?;
        let device_x = Buffer::from_host(&gpu.stream, &x)?;
        let mut out = Buffer::<u8>::new(&gpu.device, activation_bytes(format, tokens, cols).unwrap_or(0))?;
        out.view_mut().fill_bytes(&gpu.stream, 0)?;
        quantize.launch(&gpu.stream, format, device_x.view(), tokens, cols, &mut out.view_mut())?;
        let found = out.to_host(&gpu.stream)?;
        let differs = found.iter().zip(&expected).position(|(found, expected)| found != expected);
        ensure!(
            found.len() == expected.len() && differs.is_none(),
            "{format} {tokens} x {cols}: byte {differs:?}"
        );
    }
    Ok(())
}

/// Compares the f16 sums of linear/tile.cuh with those of `quant`, and the tiles before them with
/// tiles alone.
pub(crate) fn f16_sums_are_those_of_the_host(gpu: &TestGpu) -> anyhow::Result<()> {
    let quantize = QuantizeKernels::new(&gpu.device);
    let mut random = TestRng::new(14);
    let layout = ActivationLayout { format: DType::Q8_K, f16_sums: true };
    for (cols, tokens) in [(256, 1), (512, 130), (4096, 19)] {
        let mut x = random.values(cols * tokens);
        x[..256].fill(0.0);
        x[256.min(cols * tokens - 1)..].iter_mut().step_by(7).for_each(|x| *x = 99.0);
        let mut expected = panels(DType::Q8_K, &x, tokens, cols)?;
        expected.extend(f16_sums(&x, tokens, cols)?);
        let device_x = Buffer::from_host(&gpu.stream, &x)?;
        let mut out = Buffer::<u8>::new(&gpu.device, layout.bytes(tokens, cols).unwrap_or(0))?;
        out.view_mut().fill_bytes(&gpu.stream, 0)?;
        quantize.launch(&gpu.stream, layout, device_x.view(), tokens, cols, &mut out.view_mut())?;
        let found = out.to_host(&gpu.stream)?;
        let differs = found.iter().zip(&expected).position(|(found, expected)| found != expected);
        ensure!(
            found.len() == expected.len() && differs.is_none(),
            "{tokens} x {cols}: byte {differs:?}, {} bytes of {}",
            found.len(),
            expected.len()
        );
    }
    Ok(())
}

/// The bytes of absent tokens are zero.
fn f16_sums(x: &[f32], tokens: usize, cols: usize) -> anyhow::Result<Vec<u8>> {
    let (col_tiles, groups) = (cols / 256, tokens.div_ceil(ACT_TILE_TOKENS));
    let mut out = vec![0; col_tiles * groups * 288];
    for (token, x) in x.chunks_exact(cols).enumerate() {
        let (group, slot) = (token / ACT_TILE_TOKENS, token % ACT_TILE_TOKENS);
        for (tile, block) in quant::quantize_row_q8_k(x)?.iter().enumerate() {
            let mut put = |at: usize, bytes: &[u8]| out[at..at + bytes.len()].copy_from_slice(bytes);
            let sums = (tile * groups + group) * 288;
            for (at, &sum) in block.bsums.iter().enumerate() {
                let place = sums + at / 8 * 128 + slot * 16 + at % 8 * 2;
                put(place, &half::f16::from_f32(f32::from(sum)).to_le_bytes());
            }
            put(sums + 256 + slot * 4, &block.d.to_le_bytes());
        }
    }
    Ok(out)
}

/// Builds the activation tiles of linear/tile.cuh from rows that `quant` quantized. The bytes of
/// absent tokens and columns are zero.
fn panels(format: DType, x: &[f32], tokens: usize, cols: usize) -> anyhow::Result<Vec<u8>> {
    let col_tiles = cols.div_ceil(256);
    let panel_bytes = activation_bytes(format, 1, 1).unwrap_or(0);
    let mut out = vec![0; tokens.div_ceil(ACT_TILE_TOKENS) * col_tiles * panel_bytes];
    for (token, x) in x.chunks_exact(cols).enumerate() {
        let slot = token % ACT_TILE_TOKENS;
        let mut put = |value: usize, at: usize, bytes: &[u8]| {
            let panel = (token / ACT_TILE_TOKENS * col_tiles + value / 256) * panel_bytes;
            out[panel + at..panel + at + bytes.len()].copy_from_slice(bytes);
        };
        let quant_at = |value: usize| {
            value % 256 / 128 * 1024 + slot * 128 + ((value % 128 / 16) ^ slot) * 16 + value % 16
        };
        let scale_at = |block: usize| 2048 + (block % 8 * 8 + slot) * 4;
        match format {
            DType::Q8_0 => {
                for (b, block) in quant::quantize_row_q8_0(x)?.iter().enumerate() {
                    for (e, &q) in block.qs.iter().enumerate() {
                        put(32 * b + e, quant_at(32 * b + e), &[q as u8]);
                    }
                    put(32 * b, scale_at(b), &block.d.to_f32().to_le_bytes());
                }
            }
            DType::Q8_1 => {
                for (b, block) in quant::quantize_row_q8_1(x)?.iter().enumerate() {
                    for (e, &q) in block.qs.iter().enumerate() {
                        put(32 * b + e, quant_at(32 * b + e), &[q as u8]);
                    }
                    put(32 * b, scale_at(b), &block.d.to_f32().to_le_bytes());
                    put(32 * b, scale_at(b) + 256, &block.s.to_f32().to_le_bytes());
                }
            }
            DType::F16 | DType::BF16 => {
                let halves: Vec<u16> = match Activations::for_weight(format, x)? {
                    Some(Activations::F16(x)) => x.iter().map(|x| x.to_bits()).collect(),
                    Some(Activations::BF16(x)) => x.iter().map(|x| x.to_bits()).collect(),
                    _ => anyhow::bail!("activations of {format}"),
                };
                for (value, half) in halves.iter().enumerate() {
                    let (unit, vector) = (value % 256 / 64, value % 64 / 8);
                    let at = unit * 1024 + slot * 128 + (vector ^ slot) * 16 + value % 8 * 2;
                    put(value, at, &half.to_le_bytes());
                }
            }
            _ => {
                for (b, block) in quant::quantize_row_q8_k(x)?.iter().enumerate() {
                    for (e, &q) in block.qs.iter().enumerate() {
                        put(256 * b + e, quant_at(e), &[q as u8]);
                    }
                    put(256 * b, 2048 + slot * 4, &block.d.to_le_bytes());
                    let sums: Vec<u8> = block.bsums.iter().flat_map(|sum| sum.to_le_bytes()).collect();
                    put(256 * b, 2048 + 32 + slot * 32, &sums);
                }
            }
        }
    }
    Ok(out)
}
