// SPDX-License-Identifier: Apache-2.0

//! SplitMix64 numbers for tests, from a seed, and weights made of them.

use bytes::Bytes;
use quant::DType;

/// SplitMix64.
pub(crate) struct SplitMix64(pub(crate) u64);

impl SplitMix64 {
    pub(crate) fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut z = self.0;
        z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        z ^ (z >> 31)
    }

    /// -1 to 1.
    pub(crate) fn unit(&mut self) -> f32 {
        (self.next() >> 40) as f32 / (1_u32 << 23) as f32 - 1.0
    }

    pub(crate) fn values(&mut self, len: usize) -> Vec<f32> {
        (0..len).map(|_| self.unit()).collect()
    }
}

/// Types with kernels.
pub(crate) const DTYPES: [DType; 13] = [
    DType::F32,
    DType::F16,
    DType::BF16,
    DType::Q8_0,
    DType::Q4_0,
    DType::Q4_1,
    DType::Q5_0,
    DType::Q5_1,
    DType::Q2_K,
    DType::Q3_K,
    DType::Q4_K,
    DType::Q5_K,
    DType::Q6_K,
];

/// Rows of values that were encoded, at an odd address.
pub(crate) fn encoded(random: &mut SplitMix64, dtype: DType, cols: usize, rows: usize) -> Bytes {
    let values = random.values(cols * rows);
    let mut bytes = vec![0; 1 + dtype.row_bytes((cols * rows) as u64).unwrap() as usize];
    quant::encode(dtype, &values, &mut bytes[1..]).unwrap();
    Bytes::from(bytes).slice(1..)
}
