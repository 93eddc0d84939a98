//! Element types of float weights and of the key/value cache, as bytes at any address.

use super::simd::Simd;

pub(super) trait Element: Send + Sync + 'static {
    const BYTES: usize;

    /// 16 values; `bytes` are `16 * BYTES`.
    fn load<S: Simd>(s: S, bytes: &[u8]) -> S::F;

    /// Up to 16 values, zeros after them.
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

/// An element type that keys and values are kept in.
pub(super) trait Stored: Element {
    /// 16 values, rounded to nearest even.
    fn store<S: Simd>(s: S, x: S::F, bytes: &mut [u8; 64]);
}

pub(super) enum F32 {}
pub(super) enum F16 {}
pub(super) enum Bf16 {}

impl Element for F32 {
    const BYTES: usize = 4;

    #[inline(always)]
    fn load<S: Simd>(s: S, bytes: &[u8]) -> S::F {
        s.as_float(s.load_bytes(array(bytes)))
    }
}

impl Stored for F32 {
    #[inline(always)]
    fn store<S: Simd>(s: S, x: S::F, bytes: &mut [u8; 64]) {
        s.store_bytes(s.as_int(x), bytes);
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
    #[inline(always)]
    fn store<S: Simd>(s: S, x: S::F, bytes: &mut [u8; 64]) {
        let mut halves = [0; 32];
        s.store_f16(x, &mut halves);
        bytes[..32].copy_from_slice(&halves);
    }
}

impl Element for Bf16 {
    const BYTES: usize = 2;

    #[inline(always)]
    fn load<S: Simd>(s: S, bytes: &[u8]) -> S::F {
        s.load_bf16(array(bytes))
    }
}

#[inline(always)]
fn array<const N: usize>(bytes: &[u8]) -> &[u8; N] {
    bytes.first_chunk().expect("callers cut slices of this length")
}
