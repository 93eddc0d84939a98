// SPDX-License-Identifier: Apache-2.0

//! Element types of float weights and of the KV cache, as bytes at any address.

use super::product::{Round, Rounded32};
use super::simd::{Simd, SimdKernel};
use half::{bf16, f16};

pub(super) trait Element: Send + Sync + 'static {
    const BYTES: usize;

    /// 16 values, before a scale; `bytes` are `16 * BYTES`.
    fn load<S: Simd>(s: S, bytes: &[u8]) -> S::F;

    /// Loads up to 16 values, followed by zeros.
    #[inline(always)]
    fn load_partial<S: Simd>(s: S, bytes: &[u8]) -> S::F {
        let whole = 16 * Self::BYTES;
        if bytes.len() >= whole {
            return Self::load(s, &bytes[..whole]);
        }
        let mut padded = [0; 64];
        padded[..bytes.len()].copy_from_slice(bytes);
        Self::load(s, &padded[..whole])
    }
}

/// Largest number of values that one call stores.
pub(super) const STORED_TOGETHER: usize = 32;

/// An element type of the KV cache. Reads return the bits that `ops::KvType::round` computes for a
/// head.
pub(super) trait Stored: Element {
    /// Values that share a scale: [`STORED_TOGETHER`], or fewer at the end of a head. 0 for types
    /// without scales.
    const SCALED: usize;

    /// Encodes up to [`STORED_TOGETHER`] values of a head to `bytes` and returns their f16 scale,
    /// if the type has scales.
    fn store<S: Simd>(s: S, x: &[f32], bytes: &mut [u8; 4 * STORED_TOGETHER]) -> [u8; SCALE_BYTES];

    /// Number of scales of the key, or of the value, of one head and one token.
    #[inline(always)]
    fn scales(head_dim: usize) -> usize {
        if Self::SCALED == 0 { 0 } else { head_dim.div_ceil(Self::SCALED) }
    }
}

/// Bytes of a scale, which is an f16.
pub(super) const SCALE_BYTES: usize = 2;

pub(super) enum F32 {}
pub(super) enum F16 {}
pub(super) enum Bf16 {}
/// Signed bytes, whose scales are stored separately.
pub(super) enum Q8_0Element {}

impl Element for F32 {
    const BYTES: usize = 4;

    #[inline(always)]
    fn load<S: Simd>(s: S, bytes: &[u8]) -> S::F {
        s.as_float(s.load_bytes(array(bytes)))
    }
}

impl Stored for F32 {
    const SCALED: usize = 0;

    #[inline(always)]
    fn store<S: Simd>(_: S, x: &[f32], bytes: &mut [u8; 4 * STORED_TOGETHER]) -> [u8; SCALE_BYTES] {
        for (bytes, x) in bytes.as_chunks_mut().0.iter_mut().zip(x) {
            *bytes = x.to_le_bytes();
        }
        [0; SCALE_BYTES]
    }
}

impl Element for F16 {
    const BYTES: usize = 2;

    #[inline(always)]
    fn load<S: Simd>(s: S, bytes: &[u8]) -> S::F {
        s.load_f16(array(bytes))
    }
}

impl Stored for F16 {
    const SCALED: usize = 0;

    /// Rounded to nearest even.
    #[inline(always)]
    fn store<S: Simd>(s: S, x: &[f32], bytes: &mut [u8; 4 * STORED_TOGETHER]) -> [u8; SCALE_BYTES] {
        for (bytes, x) in bytes.as_chunks_mut().0.iter_mut().zip(x.chunks(16)) {
            s.store_f16(s.load_partial(x), bytes);
        }
        [0; SCALE_BYTES]
    }
}

impl Element for Bf16 {
    const BYTES: usize = 2;

    #[inline(always)]
    fn load<S: Simd>(s: S, bytes: &[u8]) -> S::F {
        s.load_bf16(array(bytes))
    }
}

impl Stored for Bf16 {
    const SCALED: usize = 0;

    /// Rounded to nearest even.
    #[inline(always)]
    fn store<S: Simd>(_: S, x: &[f32], bytes: &mut [u8; 4 * STORED_TOGETHER]) -> [u8; SCALE_BYTES] {
        for (bytes, &x) in bytes.as_chunks_mut().0.iter_mut().zip(x) {
            *bytes = bf16::from_f32(x).to_le_bytes();
        }
        [0; SCALE_BYTES]
    }
}

impl Element for Q8_0Element {
    const BYTES: usize = 1;

    #[inline(always)]
    fn load<S: Simd>(s: S, bytes: &[u8]) -> S::F {
        s.load_i8(array(bytes))
    }
}

impl Stored for Q8_0Element {
    const SCALED: usize = STORED_TOGETHER;

    #[inline(always)]
    fn store<S: Simd>(s: S, x: &[f32], bytes: &mut [u8; 4 * STORED_TOGETHER]) -> [u8; SCALE_BYTES] {
        let mut whole = [0.0; STORED_TOGETHER];
        whole[..x.len()].copy_from_slice(x);
        let mut rounded = [Rounded32::default()];
        Round { x: &whole, out: &mut rounded }.run(s);
        let [Rounded32 { q, d, .. }] = rounded;
        for (byte, q) in bytes.iter_mut().zip(q.as_flattened()) {
            *byte = q.cast_unsigned();
        }
        f16::from_f32(d).to_le_bytes()
    }
}

#[inline(always)]
fn array<const N: usize>(bytes: &[u8]) -> &[u8; N] {
    bytes.first_chunk().expect("callers cut slices of this length")
}
