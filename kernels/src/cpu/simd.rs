//! The vocabulary that every host kernel is written in: vectors of 16 lanes, on whatever instructions there are.
//!
//! A kernel is generic code over [`Simd`]; each instruction set is one implementation of the trait. So the order of
//! f32 operations is written once, and all instruction sets give the same bits: every method here is exact (integers)
//! or rounds once per lane as IEEE 754 says. The tests hold the implementations to that.
//!
//! A value of an implementing type is proof that the processor has the instructions: it is only made by
//! [`super::Isa`] after detection, which is what makes the methods safe to call.

use bytemuck::AnyBitPattern;

/// Bytes that memory delivers together.
pub(super) const CACHE_LINE: usize = 64;

/// A function that runs inside one instruction set. `run` and all it calls must be `#[inline(always)]`: code that is
/// not inlined into [`Simd::vectorize`] is compiled without the instructions.
pub(super) trait Kernel {
    type Output;

    fn run<S: Simd>(self, s: S) -> Self::Output;
}

/// Sixteen rows of equal stride in the bytes of a weight.
#[derive(Clone, Copy)]
pub(super) struct Rows<'a> {
    pub(super) bytes: &'a [u8],
    pub(super) stride: usize,
}

impl<'a> Rows<'a> {
    /// What starts `at` bytes into each of the 16 rows: pointer to that of row 0. Panics if `len` bytes there are not
    /// inside the slice for every row, so that implementations may read them.
    #[inline(always)]
    pub(super) fn at(self, at: usize, len: usize) -> *const u8 {
        assert!(at + 15 * self.stride + len <= self.bytes.len());
        self.bytes[at..].as_ptr()
    }

    /// The value at `at` in each row, as it stands.
    #[inline(always)]
    pub(super) fn column<T: AnyBitPattern + Default>(self, at: usize) -> [T; 16] {
        let base = self.at(at, size_of::<T>());
        let mut out = [T::default(); 16];
        for (r, out) in out.iter_mut().enumerate() {
            // SAFETY: `Rows::at` has checked that the bytes of a `T` are inside the slice for each row, and any bits are
            // a `T`.
            *out = unsafe { base.add(r * self.stride).cast::<T>().read_unaligned() };
        }
        out
    }
}

/// Lane `r` belongs to weight row `r` of a group, to element `r` of 16, or to key `r` of 16.
pub(super) trait Simd: Copy + Send + Sync + 'static {
    /// 16 f32.
    type F: Copy;
    /// 16 i32, or the 64 bytes they are made of.
    type I: Copy;

    /// Runs `kernel` compiled for these instructions.
    fn vectorize<K: Kernel>(self, kernel: K) -> K::Output;

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
    /// Lanes 8 apart, then 4, 2 and 1 apart are added.
    fn sum(self, x: Self::F) -> f32;
    /// The largest lane; no lane is NaN.
    fn largest(self, x: Self::F) -> f32;

    /// f16 values, little-endian, at any address.
    fn load_f16(self, x: &[u8; 32]) -> Self::F;
    /// Rounded to nearest even.
    fn store_f16(self, x: Self::F, out: &mut [u8; 32]);
    /// bf16 values, little-endian, at any address.
    fn load_bf16(self, x: &[u8; 32]) -> Self::F;

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
    /// Arithmetic.
    fn sar<const N: u32>(self, x: Self::I) -> Self::I;

    /// Nearest f32.
    fn to_float(self, x: Self::I) -> Self::F;
    /// Nearest integer, ties to even; lanes are within i32.
    fn round(self, x: Self::F) -> Self::I;
    /// The same bits.
    fn as_float(self, x: Self::I) -> Self::F;
    /// The same bits.
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
    fn transpose(self, rows: Rows<'_>, at: usize) -> [Self::I; 4];

    /// A hint that the cache line will be read soon.
    fn prefetch(self, bytes: &[u8]);

    /// Lane `r` is the f16 at `at` in row `r`.
    #[inline(always)]
    fn gather_f16(self, rows: Rows<'_>, at: usize) -> Self::F {
        self.load_f16(&bytemuck::cast(rows.column::<u16>(at)))
    }

    /// Lane `r` is the little-endian u32 at `at` in row `r`.
    #[inline(always)]
    fn gather_u32(self, rows: Rows<'_>, at: usize) -> Self::I {
        self.load_bytes(&bytemuck::cast(rows.column::<u32>(at)))
    }

    /// Up to 16 values, zeros after them.
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

    /// The first `out.len()` lanes, at most 16.
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
