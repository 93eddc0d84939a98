// SPDX-License-Identifier: Apache-2.0

//! Compares linear/wgmma_product.cuh and the other methods with one of the 8-bit products at the
//! limits of exact sums.

use kernels::cuda::Buffer;
use kernels::cuda::linear::{LinearKernels, LinearMethod, MatmulShape, has_wgmma_kernels};
use quant::DType;
use quant::layout::Tiles;

use crate::TestGpu;
use crate::linear::{LinearCase, LinearInput, ensure_bits, methods};
use crate::random::TestRng;

/// How blocks of a type are filled.
pub(crate) struct BlockBytes {
    pub(crate) dtype: DType,
    /// Where the f16 scales are.
    halves: &'static [usize],
    /// Sub-scales, which are filled with `scales`.
    sub_scales: std::ops::Range<usize>,
    scales: [u8; 2],
    /// Bytes of quants with the largest magnitudes: the first for all, or a random one of the four.
    quants: [u8; 4],
}

pub(crate) const BLOCKS: [BlockBytes; 6] = [
    BlockBytes {
        dtype: DType::Q4_K,
        halves: &[0, 2],
        sub_scales: 4..16,
        scales: [0xFF, 0xFF],
        quants: [0xFF, 0x0F, 0xF0, 0],
    },
    BlockBytes {
        dtype: DType::Q5_K,
        halves: &[0, 2],
        sub_scales: 4..16,
        scales: [0xFF, 0xFF],
        quants: [0xFF, 0x0F, 0xF0, 0],
    },
    BlockBytes {
        dtype: DType::Q6_K,
        halves: &[208],
        sub_scales: 192..208,
        scales: [0x80, 0x7F],
        quants: [0, 0x0F, 0xF0, 0xFF],
    },
    BlockBytes::without_sub_scales(DType::Q8_0, [0x80, 0x7F, 0x81, 0x80]),
    BlockBytes::without_sub_scales(DType::Q4_0, [0, 0x0F, 0xF0, 0xFF]),
    BlockBytes::without_sub_scales(DType::Q5_0, [0, 0x0F, 0xF0, 0xFF]),
];
/// Kinds of weights: the largest quants and sub-scales; 1 byte of 16 is not zero; the largest ones
/// with random signs; and random bytes.
pub(crate) const KINDS: usize = 4;
pub(crate) const RANDOM_KIND: usize = 3;

impl BlockBytes {
    const fn without_sub_scales(dtype: DType, quants: [u8; 4]) -> Self {
        Self { dtype, halves: &[0], sub_scales: 0..0, scales: [0; 2], quants }
    }

    pub(crate) fn fill(&self, random: &mut TestRng, kind: usize, raw: &mut [u8]) {
        for block in raw.chunks_exact_mut(self.dtype.block_bytes()) {
            for (at, byte) in block.iter_mut().enumerate() {
                let draw = random.bits() as usize;
                let is_scale = self.sub_scales.contains(&at);
                match kind {
                    0 => *byte = if is_scale { self.scales[0] } else { self.quants[0] },
                    1 if !draw.is_multiple_of(16) => *byte = 0,
                    2 => *byte = if is_scale { self.scales[draw % 2] } else { self.quants[draw % 4] },
                    _ => {}
                }
            }
            let sign = if random.bits().is_multiple_of(2) { 1.0 } else { -1.0 };
            for (&at, value) in self.halves.iter().zip([sign * 1.5e-3, 7.5e-4]) {
                block[at..at + 2].copy_from_slice(&half::f16::from_f32(value).to_le_bytes());
            }
        }
    }
}

/// Compares all methods for blocks whose sums are as large as they can be, sparse or of any bits.
pub(crate) fn extreme_blocks_give_the_same_bits_on_wgmma(gpu: &TestGpu) -> anyhow::Result<()> {
    if !has_wgmma_kernels(&gpu.device, DType::Q4_K) {
        println!("SKIPPED: this GPU or build has no wgmma");
        return Ok(());
    }
    for blocks in &BLOCKS {
        compare(gpu, blocks)?;
    }
    Ok(())
}

fn compare(gpu: &TestGpu, blocks: &BlockBytes) -> anyhow::Result<()> {
    let linear = LinearKernels::new(&gpu.device);
    let mut random = TestRng::new(16);
    let dtype = blocks.dtype;
    for (cols, rows, tokens) in [
        (256, 16, 1),
        (1024, 145, 8),
        (4096, 40, 13),
        (512, 145, 70),
        (1024, 1040, 128),
        (1280, 17_000, 40),
        (4096, 515, 300),
        (768, 130, 417),
    ] {
        for kind in 0..KINDS {
            let shape = Tiles::new(dtype, cols, rows)?;
            let mut raw = random.bytes(shape.raw_bytes());
            blocks.fill(&mut random, kind, &mut raw);
            let case = LinearCase::from_raw(gpu, shape, raw, random.values(rows))?;
            let mut input = LinearInput::new(gpu, &mut random, dtype, tokens, cols)?;
            let mut x = input.x.clone();
            for (at, x) in x.iter_mut().enumerate().filter(|_| kind != RANDOM_KIND) {
                let positive = if at / cols % 2 == 0 { true } else { random.bits().is_multiple_of(2) };
                *x = if positive { 1.0 } else { -1.0 };
            }
            input.device_x = Buffer::from_host(&gpu.stream, &x)?;
            let mut run = |method| -> anyhow::Result<Vec<f32>> {
                let mut out = Buffer::<f32>::new(&gpu.device, tokens * rows)?;
                out.view_mut().fill_bytes(&gpu.stream, 0xFF)?;
                input.run(gpu, &linear, tokens, method, &mut [case.product(&mut out)])?;
                Ok(out.to_host(&gpu.stream)?)
            };
            let expected = run(LinearMethod::Matmul(MatmulShape::all()[3]))?;
            for method in methods(gpu, dtype, tokens) {
                let what = format!("{dtype}, kind {kind}, {cols} x {rows}, {tokens} tokens by {method:?}");
                ensure_bits(&what, &run(method)?, &expected)?;
            }
        }
    }
    Ok(())
}
