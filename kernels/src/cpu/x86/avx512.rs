// SPDX-License-Identifier: Apache-2.0

//! [`Simd`] on AVX-512 with VNNI (Ice Lake, Zen 4 and later): a vector of 16 lanes is one register.

use crate::cpu::simd::{Simd, SimdKernel, StridedRows};
use std::arch::x86_64::*;

/// Proof that the processor has the features that [`Avx512::detect`] checks.
#[derive(Clone, Copy, Debug)]
pub(in crate::cpu) struct Avx512(());

impl Avx512 {
    pub(in crate::cpu) fn detect() -> Option<Self> {
        let has = is_x86_feature_detected!("avx512f")
            && is_x86_feature_detected!("avx512bw")
            && is_x86_feature_detected!("avx512dq")
            && is_x86_feature_detected!("avx512vl")
            && is_x86_feature_detected!("avx512vnni")
            && is_x86_feature_detected!("avx2")
            && is_x86_feature_detected!("fma")
            && is_x86_feature_detected!("f16c");
        has.then_some(Self(()))
    }
}

#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx512vnni,avx2,fma,f16c")]
#[inline(never)]
fn run<K: SimdKernel>(s: Avx512, kernel: K) -> K::Output {
    kernel.run(s)
}

/// The first 16 bytes of the rows `r`, `r + 4`, `r + 8` and `r + 12`, each in a 128-bit lane.
///
/// This is a function because the dev profile does not inline closures of this size. Outside of
/// [`run`], each intrinsic is a call.
///
/// # Safety
///
/// The processor has the features of [`run`], and 16 bytes at `base + i * stride` can be read for
/// each of these rows `i`.
#[inline(always)]
unsafe fn load_lanes(base: *const u8, stride: usize, r: usize) -> __m512i {
    // SAFETY: as the caller promises.
    unsafe {
        let x = _mm512_castsi128_si512(_mm_loadu_si128(base.add(r * stride).cast()));
        let x = _mm512_mask_broadcast_i32x4(x, 0x00f0, _mm_loadu_si128(base.add((r + 4) * stride).cast()));
        let x = _mm512_mask_broadcast_i32x4(x, 0x0f00, _mm_loadu_si128(base.add((r + 8) * stride).cast()));
        _mm512_mask_broadcast_i32x4(x, 0xf000, _mm_loadu_si128(base.add((r + 12) * stride).cast()))
    }
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

impl Simd for Avx512 {
    type F = __m512;
    type I = __m512i;

    #[inline(always)]
    fn vectorize<K: SimdKernel>(self, kernel: K) -> K::Output {
        x!(run(self, kernel))
    }

    #[inline(always)]
    fn splat(self, x: f32) -> __m512 {
        x!(_mm512_set1_ps(x))
    }
    #[inline(always)]
    fn load(self, x: &[f32; 16]) -> __m512 {
        x!(_mm512_loadu_ps(x.as_ptr()))
    }
    #[inline(always)]
    fn store(self, x: __m512, out: &mut [f32; 16]) {
        x!(_mm512_storeu_ps(out.as_mut_ptr(), x))
    }
    #[inline(always)]
    fn add(self, a: __m512, b: __m512) -> __m512 {
        x!(_mm512_add_ps(a, b))
    }
    #[inline(always)]
    fn sub(self, a: __m512, b: __m512) -> __m512 {
        x!(_mm512_sub_ps(a, b))
    }
    #[inline(always)]
    fn mul(self, a: __m512, b: __m512) -> __m512 {
        x!(_mm512_mul_ps(a, b))
    }
    #[inline(always)]
    fn div(self, a: __m512, b: __m512) -> __m512 {
        x!(_mm512_div_ps(a, b))
    }
    #[inline(always)]
    fn max(self, a: __m512, b: __m512) -> __m512 {
        x!(_mm512_max_ps(a, b))
    }
    #[inline(always)]
    fn min(self, a: __m512, b: __m512) -> __m512 {
        x!(_mm512_min_ps(a, b))
    }
    #[inline(always)]
    fn fma(self, a: __m512, b: __m512, c: __m512) -> __m512 {
        x!(_mm512_fmadd_ps(a, b, c))
    }
    #[inline(always)]
    fn sum(self, x: __m512) -> f32 {
        x!({
            let x = _mm256_add_ps(_mm512_castps512_ps256(x), _mm512_extractf32x8_ps::<1>(x));
            let x = _mm_add_ps(_mm256_castps256_ps128(x), _mm256_extractf128_ps::<1>(x));
            let x = _mm_add_ps(x, _mm_movehl_ps(x, x));
            _mm_cvtss_f32(_mm_add_ss(x, _mm_movehdup_ps(x)))
        })
    }
    #[inline(always)]
    fn largest(self, x: __m512) -> f32 {
        x!({
            let x = _mm256_max_ps(_mm512_castps512_ps256(x), _mm512_extractf32x8_ps::<1>(x));
            let x = _mm_max_ps(_mm256_castps256_ps128(x), _mm256_extractf128_ps::<1>(x));
            let x = _mm_max_ps(x, _mm_movehl_ps(x, x));
            _mm_cvtss_f32(_mm_max_ss(x, _mm_movehdup_ps(x)))
        })
    }

    #[inline(always)]
    fn load_f16(self, x: &[u8; 32]) -> __m512 {
        x!(_mm512_cvtph_ps(_mm256_loadu_si256(x.as_ptr().cast())))
    }
    #[inline(always)]
    fn store_f16(self, x: __m512, out: &mut [u8; 32]) {
        x!(_mm256_storeu_si256(
            out.as_mut_ptr().cast(),
            _mm512_cvtps_ph::<{ _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC }>(x)
        ))
    }
    #[inline(always)]
    fn load_bf16(self, x: &[u8; 32]) -> __m512 {
        x!({
            let wide = _mm512_cvtepu16_epi32(_mm256_loadu_si256(x.as_ptr().cast()));
            _mm512_castsi512_ps(_mm512_slli_epi32::<16>(wide))
        })
    }
    #[inline(always)]
    fn load_i8(self, x: &[u8; 16]) -> __m512 {
        x!(_mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_loadu_si128(x.as_ptr().cast()))))
    }

    #[inline(always)]
    fn int(self, x: i32) -> __m512i {
        x!(_mm512_set1_epi32(x))
    }
    #[inline(always)]
    fn load_int(self, x: &[i32; 16]) -> __m512i {
        x!(_mm512_loadu_epi32(x.as_ptr()))
    }
    #[inline(always)]
    fn store_int(self, x: __m512i, out: &mut [i32; 16]) {
        x!(_mm512_storeu_epi32(out.as_mut_ptr(), x))
    }
    #[inline(always)]
    fn load_bytes(self, x: &[u8; 64]) -> __m512i {
        x!(_mm512_loadu_si512(x.as_ptr().cast()))
    }
    #[inline(always)]
    fn store_bytes(self, x: __m512i, out: &mut [u8; 64]) {
        x!(_mm512_storeu_si512(out.as_mut_ptr().cast(), x))
    }
    #[inline(always)]
    fn add_int(self, a: __m512i, b: __m512i) -> __m512i {
        x!(_mm512_add_epi32(a, b))
    }
    #[inline(always)]
    fn sub_int(self, a: __m512i, b: __m512i) -> __m512i {
        x!(_mm512_sub_epi32(a, b))
    }
    #[inline(always)]
    fn mul_int(self, a: __m512i, b: __m512i) -> __m512i {
        x!(_mm512_mullo_epi32(a, b))
    }
    #[inline(always)]
    fn and(self, a: __m512i, b: __m512i) -> __m512i {
        x!(_mm512_and_si512(a, b))
    }
    #[inline(always)]
    fn or(self, a: __m512i, b: __m512i) -> __m512i {
        x!(_mm512_or_si512(a, b))
    }
    #[inline(always)]
    fn xor(self, a: __m512i, b: __m512i) -> __m512i {
        x!(_mm512_xor_si512(a, b))
    }
    #[inline(always)]
    fn shl<const N: u32>(self, x: __m512i) -> __m512i {
        x!(_mm512_slli_epi32::<N>(x))
    }
    #[inline(always)]
    fn shr<const N: u32>(self, x: __m512i) -> __m512i {
        x!(_mm512_srli_epi32::<N>(x))
    }
    #[inline(always)]
    fn sar<const N: u32>(self, x: __m512i) -> __m512i {
        x!(_mm512_srai_epi32::<N>(x))
    }

    #[inline(always)]
    fn to_float(self, x: __m512i) -> __m512 {
        x!(_mm512_cvtepi32_ps(x))
    }
    #[inline(always)]
    fn round(self, x: __m512) -> __m512i {
        x!(_mm512_cvtps_epi32(x))
    }
    #[inline(always)]
    fn as_float(self, x: __m512i) -> __m512 {
        x!(_mm512_castsi512_ps(x))
    }
    #[inline(always)]
    fn as_int(self, x: __m512) -> __m512i {
        x!(_mm512_castps_si512(x))
    }
    #[inline(always)]
    fn low_f16(self, x: __m512i) -> __m512 {
        x!(_mm512_cvtph_ps(_mm512_cvtepi32_epi16(x)))
    }

    #[inline(always)]
    fn dot_u8(self, acc: __m512i, w: __m512i, a: __m512i) -> __m512i {
        x!(_mm512_dpbusd_epi32(acc, w, a))
    }
    #[inline(always)]
    fn dot_u7(self, acc: __m512i, w: __m512i, a: __m512i) -> __m512i {
        self.dot_u8(acc, w, a)
    }
    #[inline(always)]
    fn dot_i16(self, acc: __m512i, w: __m512i, a: __m512i) -> __m512i {
        x!(_mm512_dpwssd_epi32(acc, w, a))
    }

    /// Transposes 4 x 4 words in each 128-bit lane. Lane `l` of the loaded vectors holds rows `4l`
    /// to `4l + 3`.
    #[inline(always)]
    fn transpose(self, rows: StridedRows<'_>, at: usize) -> [__m512i; 4] {
        let base = rows.at(at, 16);
        let stride = rows.stride;
        // SAFETY: `self` proves the features, as above. `StridedRows::at` has checked that 16 bytes
        // at `base + r * stride` are inside the slice for each r below 16.
        unsafe {
            let (r0, r1) = (load_lanes(base, stride, 0), load_lanes(base, stride, 1));
            let (r2, r3) = (load_lanes(base, stride, 2), load_lanes(base, stride, 3));
            let (low01, high01) = (_mm512_unpacklo_epi32(r0, r1), _mm512_unpackhi_epi32(r0, r1));
            let (low23, high23) = (_mm512_unpacklo_epi32(r2, r3), _mm512_unpackhi_epi32(r2, r3));
            [
                _mm512_unpacklo_epi64(low01, low23),
                _mm512_unpackhi_epi64(low01, low23),
                _mm512_unpacklo_epi64(high01, high23),
                _mm512_unpackhi_epi64(high01, high23),
            ]
        }
    }

    #[inline(always)]
    fn prefetch(self, bytes: &[u8]) {
        x!(_mm_prefetch::<_MM_HINT_T1>(bytes.as_ptr().cast()))
    }
}
