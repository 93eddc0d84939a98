// SPDX-License-Identifier: Apache-2.0

//! [`Simd`] on AVX2 with FMA and F16C (Haswell, Zen and later): a vector of 16 lanes is two
//! registers.

use crate::cpu::simd::{Simd, SimdKernel, StridedRows};
use std::arch::x86_64::*;

/// Proof that the processor has the features that [`Avx2::detect`] checks.
#[derive(Clone, Copy, Debug)]
pub(in crate::cpu) struct Avx2(());

impl Avx2 {
    pub(in crate::cpu) fn detect() -> Option<Self> {
        let has = is_x86_feature_detected!("avx2")
            && is_x86_feature_detected!("fma")
            && is_x86_feature_detected!("f16c");
        has.then_some(Self(()))
    }
}

#[target_feature(enable = "avx2,fma,f16c")]
#[inline(never)]
fn run<K: SimdKernel>(s: Avx2, kernel: K) -> K::Output {
    kernel.run(s)
}

/// Calls intrinsics that need no features beyond those of [`run`].
macro_rules! x {
    ($value:expr) => {
        // SAFETY: `self` exists, so `detect` has found every feature that the intrinsic needs.
        // Pointers come from references to arrays of the size that is read or written, and the
        // unaligned forms are used.
        unsafe { $value }
    };
}

/// Applies an intrinsic to both registers of a vector.
macro_rules! both {
    ($op:ident, $a:expr) => {
        x!([$op($a[0]), $op($a[1])])
    };
    ($op:ident, $a:expr, $b:expr) => {
        x!([$op($a[0], $b[0]), $op($a[1], $b[1])])
    };
    ($op:ident, $a:expr, $b:expr, $c:expr) => {
        x!([$op($a[0], $b[0], $c[0]), $op($a[1], $b[1], $c[1])])
    };
}

/// Splits unsigned bytes into the even and the odd ones, each widened to 16 bits.
#[inline(always)]
fn halves_u8(_: Avx2, x: __m256i) -> (__m256i, __m256i) {
    x!((_mm256_and_si256(x, _mm256_set1_epi16(0xff)), _mm256_srli_epi16::<8>(x)))
}

#[inline(always)]
fn halves_i8(_: Avx2, x: __m256i) -> (__m256i, __m256i) {
    x!((_mm256_srai_epi16::<8>(_mm256_slli_epi16::<8>(x)), _mm256_srai_epi16::<8>(x)))
}

impl Simd for Avx2 {
    type F = [__m256; 2];
    type I = [__m256i; 2];

    #[inline(always)]
    fn vectorize<K: SimdKernel>(self, kernel: K) -> K::Output {
        x!(run(self, kernel))
    }

    #[inline(always)]
    fn splat(self, x: f32) -> Self::F {
        x!([_mm256_set1_ps(x); 2])
    }
    #[inline(always)]
    fn load(self, x: &[f32; 16]) -> Self::F {
        x!([_mm256_loadu_ps(x.as_ptr()), _mm256_loadu_ps(x.as_ptr().add(8))])
    }
    #[inline(always)]
    fn store(self, x: Self::F, out: &mut [f32; 16]) {
        x!({
            _mm256_storeu_ps(out.as_mut_ptr(), x[0]);
            _mm256_storeu_ps(out.as_mut_ptr().add(8), x[1]);
        })
    }
    #[inline(always)]
    fn add(self, a: Self::F, b: Self::F) -> Self::F {
        both!(_mm256_add_ps, a, b)
    }
    #[inline(always)]
    fn sub(self, a: Self::F, b: Self::F) -> Self::F {
        both!(_mm256_sub_ps, a, b)
    }
    #[inline(always)]
    fn mul(self, a: Self::F, b: Self::F) -> Self::F {
        both!(_mm256_mul_ps, a, b)
    }
    #[inline(always)]
    fn div(self, a: Self::F, b: Self::F) -> Self::F {
        both!(_mm256_div_ps, a, b)
    }
    #[inline(always)]
    fn max(self, a: Self::F, b: Self::F) -> Self::F {
        both!(_mm256_max_ps, a, b)
    }
    #[inline(always)]
    fn min(self, a: Self::F, b: Self::F) -> Self::F {
        both!(_mm256_min_ps, a, b)
    }
    #[inline(always)]
    fn fma(self, a: Self::F, b: Self::F, c: Self::F) -> Self::F {
        both!(_mm256_fmadd_ps, a, b, c)
    }
    #[inline(always)]
    fn sum(self, x: Self::F) -> f32 {
        x!({
            let x = _mm256_add_ps(x[0], x[1]);
            let x = _mm_add_ps(_mm256_castps256_ps128(x), _mm256_extractf128_ps::<1>(x));
            let x = _mm_add_ps(x, _mm_movehl_ps(x, x));
            _mm_cvtss_f32(_mm_add_ss(x, _mm_movehdup_ps(x)))
        })
    }
    #[inline(always)]
    fn largest(self, x: Self::F) -> f32 {
        x!({
            let x = _mm256_max_ps(x[0], x[1]);
            let x = _mm_max_ps(_mm256_castps256_ps128(x), _mm256_extractf128_ps::<1>(x));
            let x = _mm_max_ps(x, _mm_movehl_ps(x, x));
            _mm_cvtss_f32(_mm_max_ss(x, _mm_movehdup_ps(x)))
        })
    }

    #[inline(always)]
    fn load_f16(self, x: &[u8; 32]) -> Self::F {
        x!([
            _mm256_cvtph_ps(_mm_loadu_si128(x.as_ptr().cast())),
            _mm256_cvtph_ps(_mm_loadu_si128(x.as_ptr().add(16).cast())),
        ])
    }
    #[inline(always)]
    fn store_f16(self, x: Self::F, out: &mut [u8; 32]) {
        x!({
            let low = _mm256_cvtps_ph::<_MM_FROUND_TO_NEAREST_INT>(x[0]);
            let high = _mm256_cvtps_ph::<_MM_FROUND_TO_NEAREST_INT>(x[1]);
            _mm_storeu_si128(out.as_mut_ptr().cast(), low);
            _mm_storeu_si128(out.as_mut_ptr().add(16).cast(), high);
        })
    }
    #[inline(always)]
    fn load_bf16(self, x: &[u8; 32]) -> Self::F {
        x!({
            let low = _mm256_cvtepu16_epi32(_mm_loadu_si128(x.as_ptr().cast()));
            let high = _mm256_cvtepu16_epi32(_mm_loadu_si128(x.as_ptr().add(16).cast()));
            [
                _mm256_castsi256_ps(_mm256_slli_epi32::<16>(low)),
                _mm256_castsi256_ps(_mm256_slli_epi32::<16>(high)),
            ]
        })
    }
    #[inline(always)]
    fn load_i8(self, x: &[u8; 16]) -> Self::F {
        x!({
            let x = _mm_loadu_si128(x.as_ptr().cast());
            [
                _mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(x)),
                _mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(_mm_unpackhi_epi64(x, x))),
            ]
        })
    }

    #[inline(always)]
    fn int(self, x: i32) -> Self::I {
        x!([_mm256_set1_epi32(x); 2])
    }
    #[inline(always)]
    fn load_int(self, x: &[i32; 16]) -> Self::I {
        x!([_mm256_loadu_si256(x.as_ptr().cast()), _mm256_loadu_si256(x.as_ptr().add(8).cast())])
    }
    #[inline(always)]
    fn store_int(self, x: Self::I, out: &mut [i32; 16]) {
        x!({
            _mm256_storeu_si256(out.as_mut_ptr().cast(), x[0]);
            _mm256_storeu_si256(out.as_mut_ptr().add(8).cast(), x[1]);
        })
    }
    #[inline(always)]
    fn load_bytes(self, x: &[u8; 64]) -> Self::I {
        x!([_mm256_loadu_si256(x.as_ptr().cast()), _mm256_loadu_si256(x.as_ptr().add(32).cast())])
    }
    #[inline(always)]
    fn store_bytes(self, x: Self::I, out: &mut [u8; 64]) {
        x!({
            _mm256_storeu_si256(out.as_mut_ptr().cast(), x[0]);
            _mm256_storeu_si256(out.as_mut_ptr().add(32).cast(), x[1]);
        })
    }
    #[inline(always)]
    fn add_int(self, a: Self::I, b: Self::I) -> Self::I {
        both!(_mm256_add_epi32, a, b)
    }
    #[inline(always)]
    fn sub_int(self, a: Self::I, b: Self::I) -> Self::I {
        both!(_mm256_sub_epi32, a, b)
    }
    #[inline(always)]
    fn mul_int(self, a: Self::I, b: Self::I) -> Self::I {
        both!(_mm256_mullo_epi32, a, b)
    }
    #[inline(always)]
    fn and(self, a: Self::I, b: Self::I) -> Self::I {
        both!(_mm256_and_si256, a, b)
    }
    #[inline(always)]
    fn or(self, a: Self::I, b: Self::I) -> Self::I {
        both!(_mm256_or_si256, a, b)
    }
    #[inline(always)]
    fn xor(self, a: Self::I, b: Self::I) -> Self::I {
        both!(_mm256_xor_si256, a, b)
    }
    #[inline(always)]
    fn shl<const N: u32>(self, x: Self::I) -> Self::I {
        x!({
            let count = _mm_cvtsi32_si128(N as i32);
            [_mm256_sll_epi32(x[0], count), _mm256_sll_epi32(x[1], count)]
        })
    }
    #[inline(always)]
    fn shr<const N: u32>(self, x: Self::I) -> Self::I {
        x!({
            let count = _mm_cvtsi32_si128(N as i32);
            [_mm256_srl_epi32(x[0], count), _mm256_srl_epi32(x[1], count)]
        })
    }
    #[inline(always)]
    fn sar<const N: u32>(self, x: Self::I) -> Self::I {
        x!({
            let count = _mm_cvtsi32_si128(N as i32);
            [_mm256_sra_epi32(x[0], count), _mm256_sra_epi32(x[1], count)]
        })
    }

    #[inline(always)]
    fn to_float(self, x: Self::I) -> Self::F {
        both!(_mm256_cvtepi32_ps, x)
    }
    #[inline(always)]
    fn round(self, x: Self::F) -> Self::I {
        both!(_mm256_cvtps_epi32, x)
    }
    #[inline(always)]
    fn as_float(self, x: Self::I) -> Self::F {
        both!(_mm256_castsi256_ps, x)
    }
    #[inline(always)]
    fn as_int(self, x: Self::F) -> Self::I {
        both!(_mm256_castps_si256, x)
    }
    #[inline(always)]
    fn low_f16(self, x: Self::I) -> Self::F {
        x!({
            let mask = _mm256_set1_epi32(0xffff);
            // The pack works within 128-bit lanes, so 64-bit words come out in the order 0, 2, 1,
            // 3. The permutation restores the order.
            let packed = _mm256_packus_epi32(_mm256_and_si256(x[0], mask), _mm256_and_si256(x[1], mask));
            let ordered = _mm256_permute4x64_epi64::<0b11_01_10_00>(packed);
            [
                _mm256_cvtph_ps(_mm256_castsi256_si128(ordered)),
                _mm256_cvtph_ps(_mm256_extracti128_si256::<1>(ordered)),
            ]
        })
    }

    /// `vpmaddubsw` would saturate. Therefore this widens even and odd bytes to 16 bits.
    #[inline(always)]
    fn dot_u8(self, acc: Self::I, w: Self::I, a: Self::I) -> Self::I {
        let mut out = acc;
        for i in 0..2 {
            let ((w_even, w_odd), (a_even, a_odd)) = (halves_u8(self, w[i]), halves_i8(self, a[i]));
            out[i] = x!({
                let sum =
                    _mm256_add_epi32(_mm256_madd_epi16(w_even, a_even), _mm256_madd_epi16(w_odd, a_odd));
                _mm256_add_epi32(acc[i], sum)
            });
        }
        out
    }
    /// The sum of two products is at most 2 * 127 * 128 = 32,512, so `vpmaddubsw` is exact.
    #[inline(always)]
    fn dot_u7(self, acc: Self::I, w: Self::I, a: Self::I) -> Self::I {
        let mut out = acc;
        for i in 0..2 {
            out[i] = x!({
                let pairs = _mm256_maddubs_epi16(w[i], a[i]);
                _mm256_add_epi32(acc[i], _mm256_madd_epi16(pairs, _mm256_set1_epi16(1)))
            });
        }
        out
    }
    #[inline(always)]
    fn dot_i16(self, acc: Self::I, w: Self::I, a: Self::I) -> Self::I {
        self.add_int(acc, both!(_mm256_madd_epi16, w, a))
    }

    /// Transposes 4 x 4 words in each 128-bit lane. Lane `l` of the loaded vectors holds rows `4l`
    /// to `4l + 3`.
    #[inline(always)]
    fn transpose(self, rows: StridedRows<'_>, at: usize) -> [Self::I; 4] {
        let base = rows.at(at, 16);
        let mut out = [self.int(0); 4];
        for half in 0..2 {
            // SAFETY: `self` proves the features, as above. `StridedRows::at` has checked that 16
            // bytes at `base + r * stride` are inside the slice for each r below 16.
            unsafe {
                let row = |r: usize| _mm_loadu_si128(base.add((8 * half + r) * rows.stride).cast());
                let pair =
                    |r: usize| _mm256_inserti128_si256::<1>(_mm256_castsi128_si256(row(r)), row(r + 4));
                let (r0, r1, r2, r3) = (pair(0), pair(1), pair(2), pair(3));
                let (low01, high01) = (_mm256_unpacklo_epi32(r0, r1), _mm256_unpackhi_epi32(r0, r1));
                let (low23, high23) = (_mm256_unpacklo_epi32(r2, r3), _mm256_unpackhi_epi32(r2, r3));
                out[0][half] = _mm256_unpacklo_epi64(low01, low23);
                out[1][half] = _mm256_unpackhi_epi64(low01, low23);
                out[2][half] = _mm256_unpacklo_epi64(high01, high23);
                out[3][half] = _mm256_unpackhi_epi64(high01, high23);
            }
        }
        out
    }

    #[inline(always)]
    fn prefetch(self, bytes: &[u8]) {
        x!(_mm_prefetch::<_MM_HINT_T1>(bytes.as_ptr().cast()))
    }
}
