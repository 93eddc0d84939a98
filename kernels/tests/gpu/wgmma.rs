// SPDX-License-Identifier: Apache-2.0

//! Compares linear/q4_k_wgmma.cuh with the 8-bit products at the limits of exact sums.

use kernels::cuda::Buffer;
use kernels::cuda::linear::{LinearKernels, LinearMethod, MatmulShape, WgmmaShape, takes_f16_quants};
use quant::DType;
use quant::layout::Tiles;

use crate::TestGpu;
use crate::linear::{LinearCase, LinearInput, ensure_bits};
use crate::random::TestRng;

/// Compares wgmma with the 8-bit products for blocks whose sums are as large as they can be, sparse
/// or of any bits.
pub(crate) fn extreme_q4_k_blocks_give_the_same_bits_on_wgmma(gpu: &TestGpu) -> anyhow::Result<()> {
    if !takes_f16_quants(&gpu.device, DType::Q4_K, usize::MAX) {
        println!("SKIPPED: this GPU or build has no wgmma");
        return Ok(());
    }
    const BLOCK: usize = 144;
    let linear = LinearKernels::new(&gpu.device);
    let mut random = TestRng::new(16);
    for (cols, rows, tokens) in
        [(256, 16, 1), (512, 145, 70), (1024, 1040, 128), (1280, 17_000, 40), (4096, 515, 300)]
    {
        for kind in 0..4 {
            let shape = Tiles::new(DType::Q4_K, cols, rows)?;
            let mut raw = random.bytes(shape.raw_bytes());
            for block in raw.chunks_exact_mut(BLOCK) {
                let sign = if random.bits().is_multiple_of(2) { 1.0 } else { -1.0 };
                block[..2].copy_from_slice(&half::f16::from_f32(sign * 1.5e-3).to_le_bytes());
                block[2..4].copy_from_slice(&half::f16::from_f32(7.5e-4).to_le_bytes());
                match kind {
                    // The largest scales, minimums and quants.
                    0 => block[4..].fill(0xFF),
                    1 => block[4..].iter_mut().for_each(|byte| {
                        *byte = if random.bits().is_multiple_of(16) { *byte } else { 0 };
                    }),
                    // The largest scales with quants of 0 and 15.
                    2 => {
                        block[4..16].fill(0xFF);
                        block[16..]
                            .iter_mut()
                            .for_each(|byte| *byte = [0, 0x0F, 0xF0, 0xFF][*byte as usize % 4]);
                    }
                    _ => {}
                }
            }
            let case = LinearCase::from_raw(gpu, shape, raw, random.values(rows))?;
            let mut input = LinearInput::new(gpu, &mut random, DType::Q4_K, tokens, cols)?;
            let mut x = input.x.clone();
            for (at, x) in x.iter_mut().enumerate().filter(|_| kind != 3) {
                let positive = if at / cols % 2 == 0 { true } else { random.bits().is_multiple_of(2) };
                *x = if positive { 1.0 } else { -1.0 };
            }
            input.device_x = Buffer::from_host(&gpu.stream, &x)?;
            let mut outs = Vec::new();
            let wgmma = WgmmaShape::all().map(LinearMethod::Wgmma);
            for method in [LinearMethod::Matmul(MatmulShape::all()[3])].into_iter().chain(wgmma) {
                let mut out = Buffer::<f32>::new(&gpu.device, tokens * rows)?;
                out.view_mut().fill_bytes(&gpu.stream, 0xFF)?;
                input.run(gpu, &linear, tokens, method, &mut [case.product(&mut out)])?;
                outs.push(out.to_host(&gpu.stream)?);
            }
            for (found, block) in outs[1..].iter().zip(WgmmaShape::all()) {
                let what = format!("kind {kind}, {cols} x {rows}, {tokens} tokens by {block:?}");
                ensure_bits(&what, found, &outs[0])?;
            }
        }
    }
    Ok(())
}
