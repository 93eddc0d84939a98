// SPDX-License-Identifier: Apache-2.0

//! Checks kv_write.cu and norm_rope_kv.cu. After a write, the cache holds the bytes of the host's
//! rounding at the addresses where kernels read them. No other byte changes.

use anyhow::{Result, ensure};
use kernels::cuda::Buffer;
use kernels::cuda::kv_write::{KvLayerAddress, KvWriteKernels, head_bytes};
use kernels::cuda::norm_rope_kv::{NormRopeKvKernels, NormRopeKvOperands};
use kernels::cuda::rope::RopeAngles;
use ops::{KvType, RopePairing};
use quant::{BlockFormat, BlockQ8_0};

use crate::TestGpu;
use crate::random::TestRng;

const KV_HEADS: usize = 3;
const BLOCKS: usize = 4;
/// The bytes of a cache before the first write.
const UNTOUCHED: u8 = 0xAA;

/// The shape of one layer's cache.
#[derive(Clone, Copy, Debug)]
struct CacheShape {
    kind: KvType,
    head_dim: usize,
    block_tokens: usize,
}

impl CacheShape {
    fn head_bytes(self) -> Result<usize> {
        let bytes = head_bytes(self.kind, self.head_dim, self.block_tokens);
        Ok(bytes.ok_or_else(|| anyhow::anyhow!("{self:?} is too large"))? as usize)
    }

    /// Returns the cache after all heads of each row were written to `slots`.
    fn expected(self, keys: &[f32], values: &[f32], slots: &[u32]) -> Result<Vec<u8>> {
        let head_bytes = self.head_bytes()?;
        let mut cache = vec![UNTOUCHED; BLOCKS * KV_HEADS * 2 * head_bytes];
        let width = KV_HEADS * self.head_dim;
        for (row, &slot) in slots.iter().enumerate() {
            let (block, token) = (slot as usize / self.block_tokens, slot as usize % self.block_tokens);
            for (is_value, x) in [keys, values].into_iter().enumerate() {
                for head in 0..KV_HEADS {
                    let x = &x[row * width + head * self.head_dim..][..self.head_dim];
                    let start = ((block * KV_HEADS + head) * 2 + is_value) * head_bytes;
                    self.store(x, token, &mut cache[start..start + head_bytes]);
                }
            }
        }
        Ok(cache)
    }

    fn store(self, x: &[f32], token: usize, to: &mut [u8]) {
        let dim = self.head_dim;
        let mut put = |at: usize, bytes: &[u8]| to[at..at + bytes.len()].copy_from_slice(bytes);
        match self.kind {
            KvType::F32 => put(token * dim * 4, bytemuck::cast_slice(x)),
            KvType::F16 => {
                let bits = |x: &f32| half::f16::from_f32(x.clamp(-65504.0, 65504.0)).to_bits();
                put(token * dim * 2, bytemuck::cast_slice(&x.iter().map(bits).collect::<Vec<u16>>()));
            }
            KvType::Bf16 => {
                let largest = half::bf16::MAX.to_f32();
                let bits = |x: &f32| half::bf16::from_f32(x.clamp(-largest, largest)).to_bits();
                put(token * dim * 2, bytemuck::cast_slice(&x.iter().map(bits).collect::<Vec<u16>>()));
            }
            KvType::Q8_0 => {
                // With the largest scale, 127 times the scale is finite in f16.
                let largest = 127.0 * 515.5;
                let scales = (dim * self.block_tokens).next_multiple_of(4);
                let token_scales = dim.div_ceil(32).next_multiple_of(2);
                for (part, x) in x.chunks(32).enumerate() {
                    let mut whole = [0.0; 32];
                    for (to, x) in whole.iter_mut().zip(x) {
                        *to = x.clamp(-largest, largest);
                    }
                    let block = BlockQ8_0::encode(&whole);
                    put(token * dim + 32 * part, bytemuck::cast_slice(&block.qs[..x.len()]));
                    put(scales + (token * token_scales + part) * 2, bytemuck::bytes_of(&block.d));
                }
            }
        }
    }
}

/// Rows with values of all magnitudes, with halves of quantization steps, and with parts that are
/// all zero.
fn rows(random: &mut TestRng, rows: usize, head_dim: usize) -> Vec<f32> {
    let special =
        [0.0, -0.0, 1.0, -1.0, 63.5, -0.5, 1e-3, -1e-8, 6e-8, 1e-40, -1e-45, 65_504.0, -7e4, 8.3e6, f32::MAX];
    let mut x = random.values(rows * KV_HEADS * head_dim);
    for (i, part) in x.chunks_mut(32).enumerate() {
        match i % 5 {
            0 => part[i % part.len()] = special[i / 5 % special.len()],
            1 => part.iter_mut().for_each(|x| *x = (*x * 40.0).round() * 0.5),
            2 => part.iter_mut().for_each(|x| *x *= special[i / 5 % special.len()]),
            _ => {}
        }
    }
    x
}

pub(crate) fn caches_hold_the_bytes_of_the_host(gpu: &TestGpu) -> Result<()> {
    let (writes, heads) = (KvWriteKernels::new(&gpu.device), NormRopeKvKernels::new(&gpu.device));
    let mut random = TestRng::new(51);
    for kind in KvType::ALL {
        for (head_dim, block_tokens) in
            [(64, 16), (96, 16), (128, 16), (128, 1), (96, 7), (80, 24), (5, 16), (1, 3)]
        {
            let shape = CacheShape { kind, head_dim, block_tokens };
            let tokens = (BLOCKS * block_tokens) as u32;
            // Every second slot, from the last one down. The slots between them must not change.
            let slots: Vec<u32> = (0..tokens).rev().step_by(2).collect();
            let count = slots.len();
            let (keys, values) = (rows(&mut random, count, head_dim), rows(&mut random, count, head_dim));
            let expected = shape.expected(&keys, &values, &slots)?;
            let stream = &gpu.stream;
            let (device_keys, device_values) =
                (Buffer::from_host(stream, &keys)?, Buffer::from_host(stream, &values)?);
            let device_slots = Buffer::from_host(stream, &slots)?;
            for fused in [false, true] {
                let mut cache = Buffer::<u8>::new(&gpu.device, expected.len())?;
                cache.view_mut().fill_bytes(stream, UNTOUCHED)?;
                let head_bytes = shape.head_bytes()? as u32;
                let layer = KvLayerAddress {
                    base: cache.view().address(),
                    unit_bytes: expected.len() as u64,
                    layer_offset: 0,
                    block_bytes: 2 * KV_HEADS as u32 * head_bytes,
                    head_bytes,
                    unit_shift: 31,
                    block_tokens: block_tokens as u32,
                };
                if fused {
                    let mut queries = Buffer::from_host(stream, &vec![0.0; count * head_dim])?;
                    let mut own_keys = Buffer::from_host(stream, &keys)?;
                    let none = Buffer::<f32>::new(&gpu.device, 0)?;
                    let angles = RopeAngles {
                        pairing: RopePairing::Halves,
                        inverse_frequencies: none.view(),
                        magnitude: 1.0,
                    };
                    let rows = NormRopeKvOperands {
                        queries: queries.view_mut(),
                        keys: own_keys.view_mut(),
                        values: device_values.view(),
                        norms: None,
                        positions: device_slots.view(),
                        slots: device_slots.view(),
                        angles,
                        head_dim,
                        kv_heads: KV_HEADS,
                    };
                    // SAFETY: the cache has the shape that the layer describes, and it has every
                    // slot.
                    unsafe { heads.launch(stream, layer, kind, &rows)? };
                    stream.synchronize()?;
                } else {
                    let (keys, values, slots) =
                        (device_keys.view(), device_values.view(), device_slots.view());
                    // SAFETY: as above.
                    unsafe { writes.launch(stream, layer, kind, keys, values, slots, KV_HEADS, head_dim)? };
                }
                let found = cache.to_host(stream)?;
                let differs = found.iter().zip(&expected).position(|(found, expected)| found != expected);
                ensure!(
                    found.len() == expected.len() && differs.is_none(),
                    "{shape:?}, fused: {fused}: byte {differs:?} of {}",
                    expected.len()
                );
            }
        }
    }
    Ok(())
}
