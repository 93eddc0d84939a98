// SPDX-License-Identifier: Apache-2.0

//! [`Simd`] in plain Rust, for x86-64 without AVX2 and for other architectures (aarch64 compiles it
//! to NEON).
//!
//! Limiting resource: on x86-64 without FMA each fused multiply is a library call; on aarch64 it is
//! one instruction. On x86-64, operations of more than a few instructions are not inlined. Inlined
//! into every kernel, they were 60% of this crate's code and of its build time.

use super::simd::{Simd, SimdKernel, StridedRows};
use half::{bf16, f16};

/// Needs no instructions beyond the target's baseline.
#[derive(Clone, Copy, Debug)]
pub(super) struct Portable;

/// `[f(a[0], b[0]), ..]`.
macro_rules! lanes {
    (|$($x:ident),+| $value:expr) => {{
        let mut out = [Default::default(); 16];
        for i in 0..16 {
            $(let $x = $x[i];)+
            out[i] = $value;
        }
        out
    }};
}

impl Simd for Portable {
    type F = [f32; 16];
    type I = [i32; 16];

    #[inline(never)]
    fn vectorize<K: SimdKernel>(self, kernel: K) -> K::Output {
        kernel.run(self)
    }

    #[inline]
    fn splat(self, x: f32) -> [f32; 16] {
        [x; 16]
    }
    #[inline]
    fn load(self, x: &[f32; 16]) -> [f32; 16] {
        *x
    }
    #[inline]
    fn store(self, x: [f32; 16], out: &mut [f32; 16]) {
        *out = x;
    }
    #[inline]
    fn add(self, a: [f32; 16], b: [f32; 16]) -> [f32; 16] {
        lanes!(|a, b| a + b)
    }
    #[inline]
    fn sub(self, a: [f32; 16], b: [f32; 16]) -> [f32; 16] {
        lanes!(|a, b| a - b)
    }
    #[inline]
    fn mul(self, a: [f32; 16], b: [f32; 16]) -> [f32; 16] {
        lanes!(|a, b| a * b)
    }
    #[cfg_attr(target_arch = "x86_64", inline(never))]
    fn div(self, a: [f32; 16], b: [f32; 16]) -> [f32; 16] {
        lanes!(|a, b| a / b)
    }
    #[cfg_attr(target_arch = "x86_64", inline(never))]
    fn max(self, a: [f32; 16], b: [f32; 16]) -> [f32; 16] {
        lanes!(|a, b| if a > b { a } else { b })
    }
    #[cfg_attr(target_arch = "x86_64", inline(never))]
    fn min(self, a: [f32; 16], b: [f32; 16]) -> [f32; 16] {
        lanes!(|a, b| if a < b { a } else { b })
    }
    #[cfg_attr(target_arch = "x86_64", inline(never))]
    fn fma(self, a: [f32; 16], b: [f32; 16], c: [f32; 16]) -> [f32; 16] {
        lanes!(|a, b, c| a.mul_add(b, c))
    }
    #[cfg_attr(target_arch = "x86_64", inline(never))]
    fn sum(self, mut x: [f32; 16]) -> f32 {
        for half in [8, 4, 2, 1] {
            for i in 0..half {
                x[i] += x[i + half];
            }
        }
        x[0]
    }
    #[cfg_attr(target_arch = "x86_64", inline(never))]
    fn largest(self, x: [f32; 16]) -> f32 {
        x.into_iter().fold(f32::NEG_INFINITY, f32::max)
    }

    #[cfg_attr(target_arch = "x86_64", inline(never))]
    fn load_f16(self, x: &[u8; 32]) -> [f32; 16] {
        let x = x.as_chunks().0;
        lanes!(|x| f16::from_le_bytes(x).to_f32())
    }
    #[cfg_attr(target_arch = "x86_64", inline(never))]
    fn store_f16(self, x: [f32; 16], out: &mut [u8; 32]) {
        for (out, x) in out.as_chunks_mut().0.iter_mut().zip(x) {
            *out = f16::from_f32(x).to_le_bytes();
        }
    }
    #[cfg_attr(target_arch = "x86_64", inline(never))]
    fn load_bf16(self, x: &[u8; 32]) -> [f32; 16] {
        let x = x.as_chunks().0;
        lanes!(|x| bf16::from_le_bytes(x).to_f32())
    }
    #[cfg_attr(target_arch = "x86_64", inline(never))]
    fn load_i8(self, x: &[u8; 16]) -> [f32; 16] {
        lanes!(|x| f32::from(x.cast_signed()))
    }

    #[inline]
    fn int(self, x: i32) -> [i32; 16] {
        [x; 16]
    }
    #[inline]
    fn load_int(self, x: &[i32; 16]) -> [i32; 16] {
        *x
    }
    #[inline]
    fn store_int(self, x: [i32; 16], out: &mut [i32; 16]) {
        *out = x;
    }
    #[inline]
    fn load_bytes(self, x: &[u8; 64]) -> [i32; 16] {
        let x = x.as_chunks().0;
        lanes!(|x| i32::from_le_bytes(x))
    }
    #[inline]
    fn store_bytes(self, x: [i32; 16], out: &mut [u8; 64]) {
        for (out, x) in out.as_chunks_mut().0.iter_mut().zip(x) {
            *out = x.to_le_bytes();
        }
    }
    #[inline]
    fn add_int(self, a: [i32; 16], b: [i32; 16]) -> [i32; 16] {
        lanes!(|a, b| a.wrapping_add(b))
    }
    #[inline]
    fn sub_int(self, a: [i32; 16], b: [i32; 16]) -> [i32; 16] {
        lanes!(|a, b| a.wrapping_sub(b))
    }
    #[cfg_attr(target_arch = "x86_64", inline(never))]
    fn mul_int(self, a: [i32; 16], b: [i32; 16]) -> [i32; 16] {
        lanes!(|a, b| a.wrapping_mul(b))
    }
    #[inline]
    fn and(self, a: [i32; 16], b: [i32; 16]) -> [i32; 16] {
        lanes!(|a, b| a & b)
    }
    #[inline]
    fn or(self, a: [i32; 16], b: [i32; 16]) -> [i32; 16] {
        lanes!(|a, b| a | b)
    }
    #[inline]
    fn xor(self, a: [i32; 16], b: [i32; 16]) -> [i32; 16] {
        lanes!(|a, b| a ^ b)
    }
    #[inline]
    fn shl<const N: u32>(self, x: [i32; 16]) -> [i32; 16] {
        lanes!(|x| x << N)
    }
    #[inline]
    fn shr<const N: u32>(self, x: [i32; 16]) -> [i32; 16] {
        lanes!(|x| (x as u32 >> N) as i32)
    }
    #[inline]
    fn sar<const N: u32>(self, x: [i32; 16]) -> [i32; 16] {
        lanes!(|x| x >> N)
    }

    #[cfg_attr(target_arch = "x86_64", inline(never))]
    fn to_float(self, x: [i32; 16]) -> [f32; 16] {
        lanes!(|x| x as f32)
    }
    #[cfg_attr(target_arch = "x86_64", inline(never))]
    fn round(self, x: [f32; 16]) -> [i32; 16] {
        lanes!(|x| x.round_ties_even() as i32)
    }
    #[inline]
    fn as_float(self, x: [i32; 16]) -> [f32; 16] {
        lanes!(|x| f32::from_bits(x as u32))
    }
    #[inline]
    fn as_int(self, x: [f32; 16]) -> [i32; 16] {
        lanes!(|x| x.to_bits() as i32)
    }
    #[cfg_attr(target_arch = "x86_64", inline(never))]
    fn low_f16(self, x: [i32; 16]) -> [f32; 16] {
        lanes!(|x| f16::from_bits(x as u16).to_f32())
    }

    #[cfg_attr(target_arch = "x86_64", inline(never))]
    fn dot_u8(self, acc: [i32; 16], w: [i32; 16], a: [i32; 16]) -> [i32; 16] {
        lanes!(|acc, w, a| {
            let (w, a) = (w.to_le_bytes(), a.to_le_bytes());
            let mut sum: i32 = acc;
            for i in 0..4 {
                sum = sum.wrapping_add(i32::from(w[i]) * i32::from(a[i] as i8));
            }
            sum
        })
    }
    #[inline]
    fn dot_u7(self, acc: [i32; 16], w: [i32; 16], a: [i32; 16]) -> [i32; 16] {
        self.dot_u8(acc, w, a)
    }
    #[cfg_attr(target_arch = "x86_64", inline(never))]
    fn dot_i16(self, acc: [i32; 16], w: [i32; 16], a: [i32; 16]) -> [i32; 16] {
        lanes!(|acc, w, a| {
            let low = i32::from(w as i16) * i32::from(a as i16);
            let high = (w >> 16) * (a >> 16);
            acc.wrapping_add(low).wrapping_add(high)
        })
    }

    #[cfg_attr(target_arch = "x86_64", inline(never))]
    fn transpose(self, rows: StridedRows<'_>, at: usize) -> [[i32; 16]; 4] {
        let mut out = [[0; 16]; 4];
        for (r, words) in rows.column::<[[u8; 4]; 4]>(at).into_iter().enumerate() {
            for (out, word) in out.iter_mut().zip(words) {
                out[r] = i32::from_le_bytes(word);
            }
        }
        out
    }

    #[inline]
    fn prefetch(self, _bytes: &[u8]) {}
}
