// SPDX-License-Identifier: Apache-2.0

//! [`Simd`]: vectors of 16 lanes for one instruction set. All CPU kernels are generic over this
//! trait.
//!
//! 1. All instruction sets give the same bits. Each method is exact (integers) or rounds once per
//!    lane as in IEEE 754, and a kernel writes the order of f32 operations once. The tests compare
//!    the implementations.
//! 2. A value of an implementing type proves that the processor has the instructions, since only
//!    [`super::Isa`] makes one, after detection. Therefore the methods are safe to call.

use bytemuck::AnyBitPattern;

/// Bytes of a cache line.
pub(super) const CACHE_LINE: usize = 64;

/// A function that is compiled for each instruction set. `run` and the functions that it calls must
/// be `#[inline(always)]`, since only code inlined into [`Simd::vectorize`] is compiled with the
/// instructions.
pub(super) trait SimdKernel {
    type Output;

    fn run<S: Simd>(self, s: S) -> Self::Output;
}

/// Sixteen rows at equal distances in the bytes of a weight.
#[derive(Clone, Copy)]
pub(super) struct StridedRows<'a> {
    pub(super) bytes: &'a [u8],
    pub(super) stride: usize,
}

impl<'a> StridedRows<'a> {
    /// Pointer to byte `at` of row 0. Panics unless `len` bytes from there are inside the slice for
    /// each of the 16 rows, so that implementations may read them.
    #[inline(always)]
    pub(super) fn at(self, at: usize, len: usize) -> *const u8 {
        assert!(at + 15 * self.stride + len <= self.bytes.len());
        self.bytes[at..].as_ptr()
    }

    /// The value of type `T` at byte `at` of each row.
    #[inline(always)]
    pub(super) fn column<T: AnyBitPattern + Default>(self, at: usize) -> [T; 16] {
        let base = self.at(at, size_of::<T>());
        let mut out = [T::default(); 16];
        for (r, out) in out.iter_mut().enumerate() {
            // SAFETY: `StridedRows::at` has checked that the bytes of a `T` are inside the slice
            // for each row, and any bits are a `T`.
            *out = unsafe { base.add(r * self.stride).cast::<T>().read_unaligned() };
        }
        out
    }
}

/// Operations on 16 lanes. Lane `r` is for weight row `r` of a group, for element `r` of 16, or for
/// key `r` of 16.
pub(super) trait Simd: Copy + Send + Sync + 'static {
    /// 16 f32.
    type F: Copy;
    /// 16 i32, or their 64 bytes.
    type I: Copy;

    /// Runs `kernel`, compiled for these instructions as a separate function. A kernel may call
    /// another kernel with `vectorize`, so that many callers share one compiled copy.
    fn vectorize<K: SimdKernel>(self, kernel: K) -> K::Output;

    fn splat(self, x: f32) -> Self::F;
    fn load(self, x: &[f32; 16]) -> Self::F;
    fn store(self, x: Self::F, out: &mut [f32; 16]);
    fn add(self, a: Self::F, b: Self::F) -> Self::F;
    fn sub(self, a: Self::F, b: Self::F) -> Self::F;
    fn mul(self, a: Self::F, b: Self::F) -> Self::F;
    fn div(self, a: Self::F, b: Self::F) -> Self::F;
    /// The larger; `b` if one is NaN.
    fn max(self, a: Self::F, b: Self::F) -> Self::F;
    /// The smaller; `b` if one is NaN.
    fn min(self, a: Self::F, b: Self::F) -> Self::F;
    /// `a * b + c`, rounded once.
    fn fma(self, a: Self::F, b: Self::F, c: Self::F) -> Self::F;
    /// Adds lanes 8 apart, then 4, 2 and 1 apart.
    fn sum(self, x: Self::F) -> f32;
    /// The largest lane; no lane is NaN.
    fn largest(self, x: Self::F) -> f32;

    /// f16 values, little-endian, at any address.
    fn load_f16(self, x: &[u8; 32]) -> Self::F;
    /// Rounded to nearest even.
    fn store_f16(self, x: Self::F, out: &mut [u8; 32]);
    /// bf16 values, little-endian, at any address.
    fn load_bf16(self, x: &[u8; 32]) -> Self::F;
    /// Signed bytes, exactly.
    fn load_i8(self, x: &[u8; 16]) -> Self::F;

    fn int(self, x: i32) -> Self::I;
    fn load_int(self, x: &[i32; 16]) -> Self::I;
    fn store_int(self, x: Self::I, out: &mut [i32; 16]);
    fn load_bytes(self, x: &[u8; 64]) -> Self::I;
    fn store_bytes(self, x: Self::I, out: &mut [u8; 64]);
    fn add_int(self, a: Self::I, b: Self::I) -> Self::I;
    fn sub_int(self, a: Self::I, b: Self::I) -> Self::I;
    /// Low 32 bits of the products.
    fn mul_int(self, a: Self::I, b: Self::I) -> Self::I;
    fn and(self, a: Self::I, b: Self::I) -> Self::I;
    fn or(self, a: Self::I, b: Self::I) -> Self::I;
    fn xor(self, a: Self::I, b: Self::I) -> Self::I;
    fn shl<const N: u32>(self, x: Self::I) -> Self::I;
    fn shr<const N: u32>(self, x: Self::I) -> Self::I;
    /// Shifts in copies of the sign bit.
    fn sar<const N: u32>(self, x: Self::I) -> Self::I;

    /// Nearest f32.
    fn to_float(self, x: Self::I) -> Self::F;
    /// Nearest integer, ties to even; lanes are within i32.
    fn round(self, x: Self::F) -> Self::I;
    /// Reinterprets the bits as f32.
    fn as_float(self, x: Self::I) -> Self::F;
    /// Reinterprets the bits as i32.
    fn as_int(self, x: Self::F) -> Self::I;
    /// The low 16 bits of each lane as f16.
    fn low_f16(self, x: Self::I) -> Self::F;

    /// Per lane, `acc` plus the sum of four products of unsigned (`w`) and signed (`a`) bytes.
    fn dot_u8(self, acc: Self::I, w: Self::I, a: Self::I) -> Self::I;
    /// As `dot_u8`, for `w` below 128.
    fn dot_u7(self, acc: Self::I, w: Self::I, a: Self::I) -> Self::I;
    /// Per lane, `acc` plus the sum of two products of signed 16-bit values.
    fn dot_i16(self, acc: Self::I, w: Self::I, a: Self::I) -> Self::I;

    /// 16 bytes of each row: lane `r` of vector `k` holds bytes `4k` to `4k + 3` of row `r`.
    fn transpose(self, rows: StridedRows<'_>, at: usize) -> [Self::I; 4];

    /// Prefetches the cache line of the first byte.
    fn prefetch(self, bytes: &[u8]);

    /// Lane `r` is the f16 at `at` in row `r`.
    #[inline(always)]
    fn gather_f16(self, rows: StridedRows<'_>, at: usize) -> Self::F {
        self.load_f16(&bytemuck::cast(rows.column::<u16>(at)))
    }

    /// Lane `r` is the little-endian u32 at `at` in row `r`.
    #[inline(always)]
    fn gather_u32(self, rows: StridedRows<'_>, at: usize) -> Self::I {
        self.load_bytes(&bytemuck::cast(rows.column::<u32>(at)))
    }

    /// Loads up to 16 values, followed by zeros.
    #[inline(always)]
    fn load_partial(self, x: &[f32]) -> Self::F {
        match x.first_chunk() {
            Some(x) => self.load(x),
            None => {
                let mut padded = [0.0; 16];
                padded[..x.len()].copy_from_slice(x);
                self.load(&padded)
            }
        }
    }

    /// Stores the first `out.len()` lanes, at most 16.
    #[inline(always)]
    fn store_partial(self, x: Self::F, out: &mut [f32]) {
        let len = out.len();
        match out.first_chunk_mut() {
            Some(out) => self.store(x, out),
            None => {
                let mut lanes = [0.0; 16];
                self.store(x, &mut lanes);
                out.copy_from_slice(&lanes[..len]);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::cpu::Isa;

    /// Runs every method on the same operands and returns the bits of the results.
    struct All<'a> {
        floats: [&'a [f32; 16]; 3],
        ints: [&'a [i32; 16]; 3],
        bytes: &'a [u8],
    }

    impl SimdKernel for All<'_> {
        type Output = Vec<Vec<u32>>;

        #[inline(always)]
        fn run<S: Simd>(self, s: S) -> Self::Output {
            let [a, b, c] = self.floats.map(|x| s.load(x));
            let [i, j, k] = self.ints.map(|x| s.load_int(x));
            let seven_bits = s.and(i, s.int(0x7f7f_7f7f));
            let small = s.mul(s.to_float(s.sar::<8>(i)), s.splat(0.37));
            let rows = StridedRows { bytes: self.bytes, stride: 19 };
            let mut out = Vec::new();
            let floats = [
                s.splat(1.5),
                s.add(a, b),
                s.sub(a, b),
                s.mul(a, b),
                s.div(a, b),
                s.max(a, b),
                s.min(a, b),
                s.fma(a, b, c),
                s.to_float(i),
                s.as_float(s.as_int(a)),
                s.low_f16(s.and(i, s.int(0x7bff))),
                s.load_partial(&self.floats[0][..5]),
            ];
            for x in floats {
                let mut lanes = [0.0; 16];
                s.store(x, &mut lanes);
                out.push(lanes.map(f32::to_bits).to_vec());
            }
            let [t0, t1, t2, t3] = s.transpose(rows, 3);
            let ints = [
                s.add_int(i, j),
                s.sub_int(i, j),
                s.mul_int(i, j),
                s.and(i, j),
                s.or(i, j),
                s.xor(i, j),
                s.shl::<5>(i),
                s.shr::<5>(i),
                s.sar::<5>(i),
                s.round(small),
                s.dot_u8(i, j, k),
                s.dot_u7(j, seven_bits, k),
                s.dot_i16(i, j, k),
                s.gather_u32(rows, 1),
                s.as_int(s.gather_f16(rows, 2)),
                t0,
                t1,
                t2,
                t3,
            ];
            for x in ints {
                let mut lanes = [0; 16];
                s.store_int(x, &mut lanes);
                out.push(lanes.map(|x| x as u32).to_vec());
            }
            let (mut halves, mut words) = ([0; 32], [0; 64]);
            s.store_f16(a, &mut halves);
            s.store_bytes(i, &mut words);
            out.push(halves.iter().map(|&x| u32::from(x)).collect());
            out.push(words.iter().map(|&x| u32::from(x)).collect());
            let quarter = words.first_chunk().unwrap_or(&[0; 16]);
            let loaded = [
                s.load_f16(&halves),
                s.load_bf16(&halves),
                s.load_i8(quarter),
                s.as_float(s.load_bytes(&words)),
            ];
            for x in loaded {
                let mut lanes = [0.0; 16];
                s.store(x, &mut lanes);
                out.push(lanes.map(f32::to_bits).to_vec());
            }
            let mut part = [9.0; 7];
            s.store_partial(b, &mut part);
            out.push(part.map(f32::to_bits).to_vec());
            out.push(vec![s.sum(a).to_bits(), s.largest(c).to_bits()]);
            out
        }
    }

    #[test]
    fn every_instruction_set_computes_the_same() {
        let mut state = 7_u64;
        let mut next = || {
            state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
            (state >> 32) as u32
        };
        for round in 0..2_000 {
            // Ordinary, huge, tiny and subnormal magnitudes; never NaN or infinite.
            let mut float = || match next() % 8 {
                0 => 0.0,
                1 => f32::from_bits(next() & 0x807f_ffff),
                2 => f32::from_bits(next() & 0x8fff_ffff),
                3 => (next() as i32) as f32 * 1e9,
                _ => (next() as i32) as f32 / 1e8,
            };
            let floats: [[f32; 16]; 3] = std::array::from_fn(|_| std::array::from_fn(|_| float()));
            let ints: [[i32; 16]; 3] = std::array::from_fn(|_| std::array::from_fn(|_| next() as i32));
            // The f16 values among these bytes are finite, since an implementation may copy NaN
            // with other bits.
            let bytes: Vec<u8> = (0..15 * 19 + 19).map(|_| next() as u8 & 0x7b).collect();
            let results: Vec<_> = Isa::available()
                .into_iter()
                .map(|isa| {
                    let (floats, ints) = (floats.each_ref(), ints.each_ref());
                    (isa.name(), isa.run(All { floats, ints, bytes: &bytes }))
                })
                .collect();
            for (name, result) in &results[1..] {
                for (method, (found, expected)) in result.iter().zip(&results[0].1).enumerate() {
                    assert_eq!(found, expected, "{name}, result {method}, round {round}");
                }
            }
        }
    }
}
