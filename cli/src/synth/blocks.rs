// SPDX-License-Identifier: Apache-2.0

//! Random quantized blocks of every supported type, made without a quantizer: quants are random
//! bits, and scale fields are set so that the values have mean 0 and the wanted deviation.

use bytemuck::{AnyBitPattern, NoUninit};
use half::{bf16, f16};
use quant::{
    BlockQ2_K, BlockQ3_K, BlockQ4_0, BlockQ4_1, BlockQ4_K, BlockQ5_0, BlockQ5_1, BlockQ5_K, BlockQ6_K,
    BlockQ8_0, DType, HalfBytes,
};

/// SplitMix64: one round of multiply and xor per eight bytes, and every seed gives a good sequence.
pub(super) struct WeightRng(u64);

impl WeightRng {
    /// The sequence of one tensor of a file.
    pub(super) fn new(seed: u64, tensor: u64) -> Self {
        let mut start = Self(seed ^ tensor.rotate_left(32));
        Self(start.next())
    }

    fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mixed = (self.0 ^ (self.0 >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        let mixed = (mixed ^ (mixed >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        mixed ^ (mixed >> 31)
    }

    fn fill(&mut self, out: &mut [u8]) {
        let (words, rest) = out.as_chunks_mut::<8>();
        for word in words {
            *word = self.next().to_le_bytes();
        }
        let last = self.next().to_le_bytes();
        rest.copy_from_slice(&last[..rest.len()]);
    }

    /// A uniform number around 0 with the given standard deviation.
    fn uniform(&mut self, deviation: f32) -> f32 {
        let unit = (self.next() >> 40) as f32 / (1 << 23) as f32 - 1.0;
        // A uniform number between -1 and 1 has a standard deviation of 1/sqrt(3).
        unit * deviation * 3_f32.sqrt()
    }
}

/// Fills `out`, which holds whole blocks of `dtype`, with values of the given deviation. Types
/// without scale fields here stay random bits; no recipe uses them.
pub(super) fn fill(dtype: DType, deviation: f32, random: &mut WeightRng, out: &mut [u8]) {
    match dtype {
        DType::F32 => each(out, |value: &mut [u8; 4]| *value = random.uniform(deviation).to_le_bytes()),
        DType::F16 => {
            each(out, |value: &mut [u8; 2]| *value = f16::from_f32(random.uniform(deviation)).to_le_bytes());
        }
        DType::BF16 => {
            each(out, |value: &mut [u8; 2]| *value = bf16::from_f32(random.uniform(deviation)).to_le_bytes());
        }
        _ => {
            random.fill(out);
            set_scales(dtype, deviation, out);
        }
    }
}

/// Standard deviation of integers that are uniform over `count` consecutive values.
fn spread(count: f32) -> f32 {
    ((count * count - 1.0) / 12.0).sqrt()
}

/// Root mean square of 0, 1, ... `largest`.
fn root_mean_square(largest: f32) -> f32 {
    (largest * (2.0 * largest + 1.0) / 6.0).sqrt()
}

/// Signed quants have mean -1/2. A random sign of the scale makes the mean over many blocks 0.
fn signed(scale: f32, random_bit: bool) -> HalfBytes {
    HalfBytes::from_f32(if random_bit { -scale } else { scale })
}

fn set_scales(dtype: DType, deviation: f32, out: &mut [u8]) {
    match dtype {
        DType::Q8_0 => {
            // Quantizers never write -128.
            let d = deviation / spread(255.0);
            each(out, |block: &mut BlockQ8_0| {
                block.qs = block.qs.map(|q| q.max(-127));
                block.d = signed(d, block.qs[0] & 1 != 0);
            });
        }
        DType::Q4_0 => {
            let d = deviation / spread(16.0);
            each(out, |block: &mut BlockQ4_0| block.d = signed(d, block.qs[0] & 1 != 0));
        }
        DType::Q5_0 => {
            let d = deviation / spread(32.0);
            each(out, |block: &mut BlockQ5_0| block.d = signed(d, block.qs[0] & 1 != 0));
        }
        DType::Q4_1 => {
            let d = deviation / spread(16.0);
            let (d, m) = (HalfBytes::from_f32(d), HalfBytes::from_f32(-7.5 * d));
            each(out, |block: &mut BlockQ4_1| (block.d, block.m) = (d, m));
        }
        DType::Q5_1 => {
            let d = deviation / spread(32.0);
            let (d, m) = (HalfBytes::from_f32(d), HalfBytes::from_f32(-15.5 * d));
            each(out, |block: &mut BlockQ5_1| (block.d, block.m) = (d, m));
        }
        DType::Q2_K => {
            let d = deviation / spread(4.0) / root_mean_square(15.0);
            let (d, dmin) = (HalfBytes::from_f32(d), HalfBytes::from_f32(1.5 * d));
            each(out, |block: &mut BlockQ2_K| {
                (block.d, block.dmin) = (d, dmin);
                block.scales = block.scales.map(|scale| (scale & 15) * 0x11);
            });
        }
        DType::Q3_K => {
            let d = deviation / spread(8.0) / spread(64.0);
            each(out, |block: &mut BlockQ3_K| block.d = signed(d, block.qs[0] & 1 != 0));
        }
        DType::Q4_K => {
            let (d, dmin) = affine(deviation, 16.0);
            each(out, |block: &mut BlockQ4_K| {
                (block.d, block.dmin) = (d, dmin);
                equal_scales_and_minima(&mut block.scales);
            });
        }
        DType::Q5_K => {
            let (d, dmin) = affine(deviation, 32.0);
            each(out, |block: &mut BlockQ5_K| {
                (block.d, block.dmin) = (d, dmin);
                equal_scales_and_minima(&mut block.scales);
            });
        }
        DType::Q6_K => {
            let d = deviation / spread(64.0) / spread(256.0);
            each(out, |block: &mut BlockQ6_K| block.d = signed(d, block.ql[0] & 1 != 0));
        }
        _ => {}
    }
}

/// Scale and minimum that center sub-blocks of equal scale and minimum, with `count` possible
/// quants.
fn affine(deviation: f32, count: f32) -> (HalfBytes, HalfBytes) {
    let d = deviation / spread(count) / root_mean_square(63.0);
    (HalfBytes::from_f32(d), HalfBytes::from_f32(d * (count - 1.0) / 2.0))
}

/// Sets the minimum of each of the eight packed pairs to its scale. Bytes 0 to 3 and 4 to 7 hold
/// the high bits of both; the two nibbles of bytes 8 to 11 hold the low bits of the last four
/// pairs.
fn equal_scales_and_minima(packed: &mut [u8; 12]) {
    packed.copy_within(0..4, 4);
    for byte in &mut packed[8..] {
        *byte = (*byte & 15) * 0x11;
    }
}

fn each<B: AnyBitPattern + NoUninit>(out: &mut [u8], set: impl FnMut(&mut B)) {
    // All these blocks have alignment 1, and `out` holds whole blocks.
    bytemuck::cast_slice_mut::<u8, B>(out).iter_mut().for_each(set);
}
