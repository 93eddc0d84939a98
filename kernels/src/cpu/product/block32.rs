//! Q8_0, Q4_0, Q4_1, Q5_0 and Q5_1: 32 values with one scale, and for the `_1` types one minimum.

use super::activation::Rounded32;
use super::format::Format;
use crate::cpu::simd::{Rows, Simd};
use bytemuck::{Pod, Zeroable};

/// Word `k` of the 16 rows holds values `4k` to `4k + 3`, as unsigned bytes.
#[derive(Clone, Copy, Pod, Zeroable)]
#[repr(C, align(64))]
pub(super) struct Window32 {
    q: [[u8; 64]; 8],
    d: [f32; 16],
}

#[derive(Clone, Copy, Pod, Zeroable)]
#[repr(C, align(64))]
pub(super) struct Window32Min {
    base: Window32,
    m: [f32; 16],
}

/// Quants are stored with 128 added, so that they are unsigned.
pub(super) enum Q8_0 {}
pub(super) enum Q4_0 {}
pub(super) enum Q4_1 {}
pub(super) enum Q5_0 {}
pub(super) enum Q5_1 {}

impl Format for Q8_0 {
    type Window = Window32;
    type Rounded = Rounded32;
    const LEN: usize = 32;
    const BYTES: usize = 34;

    #[inline(always)]
    fn unpack<S: Simd>(s: S, rows: Rows<'_>, at: usize, window: &mut Window32) {
        s.store(s.gather_f16(rows, at), &mut window.d);
        let sign = s.int(0x8080_8080_u32 as i32);
        for half in 0..2 {
            let words = s.transpose(rows, at + 2 + 16 * half);
            for k in 0..4 {
                s.store_bytes(s.xor(words[k], sign), &mut window.q[4 * half + k]);
            }
        }
    }

    #[inline(always)]
    fn accumulate<S: Simd, const C: usize>(
        s: S,
        windows: &[Window32],
        rounded: [&[Rounded32]; C],
        sums: &mut [S::F; C],
    ) {
        for (b, window) in windows.iter().enumerate() {
            let x = blocks(rounded, b);
            let terms = scaled_dots::<S, C, 128>(s, window, x);
            for c in 0..C {
                sums[c] = s.add(sums[c], terms[c]);
            }
        }
    }
}

/// What Q4_0 and Q5_0 share, and Q4_1 and Q5_1: `$fifth` is where the fifth bits stand, if there are any.
macro_rules! nibbles {
    ($format:ident, $bytes:expr, $window:ident, $offset:expr, $fifth:expr, $quants:expr) => {
        impl Format for $format {
            type Window = $window;
            type Rounded = Rounded32;
            const LEN: usize = 32;
            const BYTES: usize = $bytes;

            #[inline(always)]
            fn unpack<S: Simd>(s: S, rows: Rows<'_>, at: usize, window: &mut $window) {
                window.unpack_scales(s, rows, at);
                let fifth: Option<usize> = $fifth;
                unpack_nibbles(s, rows, at + $quants, fifth.map(|offset| at + offset), window.quants());
            }

            #[inline(always)]
            fn accumulate<S: Simd, const C: usize>(
                s: S,
                windows: &[$window],
                rounded: [&[Rounded32]; C],
                sums: &mut [S::F; C],
            ) {
                for (b, window) in windows.iter().enumerate() {
                    let x = blocks(rounded, b);
                    let terms = window.terms::<S, C, $offset>(s, x);
                    for c in 0..C {
                        sums[c] = s.add(sums[c], terms[c]);
                    }
                }
            }
        }
    };
}

nibbles!(Q4_0, 18, Window32, 8, None, 2);
nibbles!(Q4_1, 20, Window32Min, 0, None, 4);
nibbles!(Q5_0, 22, Window32, 16, Some(2), 6);
nibbles!(Q5_1, 24, Window32Min, 0, Some(4), 8);

impl Window32 {
    #[inline(always)]
    fn unpack_scales<S: Simd>(&mut self, s: S, rows: Rows<'_>, at: usize) {
        s.store(s.gather_f16(rows, at), &mut self.d);
    }

    #[inline(always)]
    fn quants(&mut self) -> &mut [[u8; 64]; 8] {
        &mut self.q
    }

    #[inline(always)]
    fn terms<S: Simd, const C: usize, const OFFSET: i32>(&self, s: S, x: [&Rounded32; C]) -> [S::F; C] {
        scaled_dots::<S, C, OFFSET>(s, self, x)
    }
}

impl Window32Min {
    #[inline(always)]
    fn unpack_scales<S: Simd>(&mut self, s: S, rows: Rows<'_>, at: usize) {
        let both = s.gather_u32(rows, at);
        s.store(s.low_f16(both), &mut self.base.d);
        s.store(s.low_f16(s.shr::<16>(both)), &mut self.m);
    }

    #[inline(always)]
    fn quants(&mut self) -> &mut [[u8; 64]; 8] {
        &mut self.base.q
    }

    #[inline(always)]
    fn terms<S: Simd, const C: usize, const OFFSET: i32>(&self, s: S, x: [&Rounded32; C]) -> [S::F; C] {
        let mut terms = scaled_dots::<S, C, OFFSET>(s, &self.base, x);
        let m = s.load(&self.m);
        for c in 0..C {
            terms[c] = s.add(terms[c], s.mul(m, s.splat(x[c].s)));
        }
        terms
    }
}

/// Block `b` of each activation row.
#[inline(always)]
fn blocks<'a, const C: usize>(rounded: [&'a [Rounded32]; C], b: usize) -> [&'a Rounded32; C] {
    let mut out = [&rounded[0][b]; C];
    for c in 1..C {
        out[c] = &rounded[c][b];
    }
    out
}

/// `(d_w d_a) sum of (q - OFFSET) a`, per lane and activation row.
#[inline(always)]
fn scaled_dots<S: Simd, const C: usize, const OFFSET: i32>(
    s: S,
    window: &Window32,
    x: [&Rounded32; C],
) -> [S::F; C] {
    let mut dots = [s.int(0); C];
    for c in 0..C {
        dots[c] = s.int(-OFFSET * x[c].sum);
    }
    for k in 0..8 {
        let w = s.load_bytes(&window.q[k]);
        for c in 0..C {
            let a = s.int(i32::from_ne_bytes(x[c].q[k].map(|q| q as u8)));
            dots[c] = if OFFSET == 128 { s.dot_u8(dots[c], w, a) } else { s.dot_u7(dots[c], w, a) };
        }
    }
    let d = s.load(&window.d);
    let mut terms = [d; C];
    for c in 0..C {
        terms[c] = s.mul(s.mul(d, s.splat(x[c].d)), s.to_float(dots[c]));
    }
    terms
}

/// 16 bytes of nibbles: low ones are values 0 to 15, high ones 16 to 31. Bit e of the word at `fifth` is the fifth bit
/// of value e.
#[inline(always)]
fn unpack_nibbles<S: Simd>(s: S, rows: Rows<'_>, at: usize, fifth: Option<usize>, q: &mut [[u8; 64]; 8]) {
    let nibble = s.int(0x0f0f_0f0f);
    let words = s.transpose(rows, at);
    let mut fifth = fifth.map(|at| s.gather_u32(rows, at));
    let mut values = [nibble; 8];
    for k in 0..4 {
        values[k] = s.and(words[k], nibble);
        values[k + 4] = s.and(s.shr::<4>(words[k]), nibble);
    }
    for k in 0..8 {
        let mut value = values[k];
        if let Some(bits) = fifth {
            // The product puts bit i at 8i.
            let spread = s.mul_int(s.and(bits, s.int(0xf)), s.int(0x0020_4081));
            value = s.or(value, s.shl::<4>(s.and(spread, s.int(0x0101_0101))));
            fifth = Some(s.shr::<4>(bits));
        }
        s.store_bytes(value, &mut q[k]);
    }
}
