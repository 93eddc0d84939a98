// SPDX-License-Identifier: Apache-2.0

//! Reproducible random values.

/// An xorshift64* generator, which is good enough for test data.
pub(crate) struct TestRng(u64);

impl TestRng {
    pub(crate) fn new(seed: u64) -> Self {
        Self(seed.wrapping_mul(0x9E37_79B9_7F4A_7C15) | 1)
    }

    pub(crate) fn bits(&mut self) -> u64 {
        self.0 ^= self.0 >> 12;
        self.0 ^= self.0 << 25;
        self.0 ^= self.0 >> 27;
        self.0.wrapping_mul(0x2545_F491_4F6C_DD1D)
    }

    /// A nearly normal value with variance 1. As in activations, a few values are large.
    pub(crate) fn value(&mut self) -> f32 {
        let bits = self.bits();
        let sum: i64 = (0..4).map(|at| i64::from((bits >> (16 * at)) as u16)).sum();
        let value = (sum - 2 * 65_535) as f32 / 37_837.0;
        if bits.is_multiple_of(251) { value * 20.0 } else { value }
    }

    pub(crate) fn values(&mut self, len: usize) -> Vec<f32> {
        (0..len).map(|_| self.value()).collect()
    }

    pub(crate) fn bytes(&mut self, len: usize) -> Vec<u8> {
        let mut bytes: Vec<u8> = (0..len.div_ceil(8)).flat_map(|_| self.bits().to_le_bytes()).collect();
        bytes.truncate(len);
        bytes
    }
}
