//! The k-quants Q2_K to Q6_K: 256 values in sub-blocks with integer scales under one or two f16 scales.
//!
//! Sub-scales multiply exact int32 dots, so that only one or two f32 terms are formed per 256 values.

#![expect(non_camel_case_types, reason = "names as ggml writes them")]

use super::activation::Rounded256;
use super::format::Format;
use crate::cpu::simd::{Rows, Simd};
use bytemuck::{Pod, Zeroable};

/// One block of 16 rows with `SUBS` sub-blocks; `PAIRS` is half of that.
#[derive(Clone, Copy)]
#[repr(C, align(64))]
pub(super) struct Window256<const SUBS: usize, const PAIRS: usize> {
    /// Word `k` of the 16 rows holds values `4k` to `4k + 3`, as unsigned bytes.
    q: [[u8; 64]; 64],
    scales: [[i32; 16]; SUBS],
    /// What the activation sums of two sub-blocks are multiplied with, as two 16-bit numbers: minima, or where there are
    /// none the scales again, to centre the quants.
    weights: [[i32; 16]; PAIRS],
    d: [f32; 16],
    dmin: [f32; 16],
}

// SAFETY: all bits are values of its arrays; every field is a multiple of 64 bytes, so there is no padding.
unsafe impl<const SUBS: usize, const PAIRS: usize> Zeroable for Window256<SUBS, PAIRS> {}
// SAFETY: as above.
unsafe impl<const SUBS: usize, const PAIRS: usize> Pod for Window256<SUBS, PAIRS> where Self: 'static {}

type Window16 = Window256<16, 8>;
type Window8 = Window256<8, 4>;

pub(super) enum Q2_K {}
pub(super) enum Q3_K {}
pub(super) enum Q4_K {}
pub(super) enum Q5_K {}
pub(super) enum Q6_K {}

macro_rules! format {
    ($format:ident, $bytes:expr, $window:ident, $term:ident, $unpack:ident) => {
        impl Format for $format {
            type Window = $window;
            type Rounded = Rounded256;
            const LEN: usize = 256;
            const BYTES: usize = $bytes;

            #[inline(always)]
            fn unpack<S: Simd>(s: S, rows: Rows<'_>, at: usize, window: &mut $window) {
                $unpack(s, rows, at, window);
            }

            #[inline(always)]
            fn accumulate<S: Simd, const C: usize>(
                s: S,
                windows: &[$window],
                rounded: [&[Rounded256]; C],
                sums: &mut [S::F; C],
            ) {
                for (b, window) in windows.iter().enumerate() {
                    let mut x = [&rounded[0][b]; C];
                    for c in 1..C {
                        x[c] = &rounded[c][b];
                    }
                    accumulate(s, window, x, &$term, sums);
                }
            }
        }
    };
}

format!(Q2_K, 84, Window16, WITH_MINIMA, unpack_q2_k);
format!(Q3_K, 110, Window16, CENTRED_4, unpack_q3_k);
format!(Q4_K, 144, Window8, WITH_MINIMA, unpack_q4_k);
format!(Q5_K, 176, Window8, WITH_MINIMA, unpack_q5_k);
format!(Q6_K, 210, Window16, CENTRED_32, unpack_q6_k);

/// What `weights` of a window are for.
enum Term {
    Minima,
    Centre(i32),
}

const WITH_MINIMA: Term = Term::Minima;
const CENTRED_4: Term = Term::Centre(4);
const CENTRED_32: Term = Term::Centre(32);

#[inline(always)]
fn accumulate<S: Simd, const C: usize, const SUBS: usize, const PAIRS: usize>(
    s: S,
    window: &Window256<SUBS, PAIRS>,
    x: [&Rounded256; C],
    term: &Term,
    sums: &mut [S::F; C],
) {
    let words = 64 / SUBS;
    let mut products = [s.int(0); C];
    for sub in 0..SUBS {
        let mut dots = [s.int(0); C];
        for k in 0..words {
            let word = sub * words + k;
            let w = s.load_bytes(&window.q[word]);
            for c in 0..C {
                let a = s.int(i32::from_ne_bytes(x[c].q[word].map(|q| q as u8)));
                dots[c] = s.dot_u7(dots[c], w, a);
            }
        }
        let scale = s.load_int(&window.scales[sub]);
        for c in 0..C {
            products[c] = s.add_int(products[c], s.mul_int(dots[c], scale));
        }
    }
    let mut corrections = [s.int(0); C];
    for pair in 0..PAIRS {
        let w = s.load_int(&window.weights[pair]);
        for c in 0..C {
            let [low, high] = if SUBS == 16 { x[c].sums16[pair] } else { x[c].sums32[pair] };
            let a = s.int(i32::from(low) & 0xffff | i32::from(high) << 16);
            corrections[c] = s.dot_i16(corrections[c], w, a);
        }
    }
    let d = s.load(&window.d);
    for c in 0..C {
        let da = s.splat(x[c].d);
        let value = match term {
            Term::Minima => {
                let product = s.mul(s.mul(da, d), s.to_float(products[c]));
                let minimum = s.mul(s.mul(da, s.load(&window.dmin)), s.to_float(corrections[c]));
                s.sub(product, minimum)
            }
            Term::Centre(centre) => {
                let products = s.sub_int(products[c], s.mul_int(corrections[c], s.int(*centre)));
                s.mul(s.mul(da, d), s.to_float(products))
            }
        };
        sums[c] = s.add(sums[c], value);
    }
}

/// Byte `I` of each lane, unsigned.
#[inline(always)]
fn byte<S: Simd>(s: S, x: S::I, i: usize) -> S::I {
    let low = s.int(0xff);
    match i {
        0 => s.and(x, low),
        1 => s.and(s.shr::<8>(x), low),
        2 => s.and(s.shr::<16>(x), low),
        _ => s.shr::<24>(x),
    }
}

/// Two numbers in the halves of each lane.
#[inline(always)]
fn pair<S: Simd>(s: S, low: S::I, high: S::I) -> S::I {
    s.or(s.and(low, s.int(0xffff)), s.shl::<16>(high))
}

/// Bits of each byte from `2 * j` on.
#[inline(always)]
fn two_bits<S: Simd>(s: S, x: S::I, j: usize) -> S::I {
    let mask = s.int(0x0303_0303);
    match j {
        0 => s.and(x, mask),
        1 => s.and(s.shr::<2>(x), mask),
        2 => s.and(s.shr::<4>(x), mask),
        _ => s.and(s.shr::<6>(x), mask),
    }
}

/// Bit `i` of each byte.
#[inline(always)]
fn one_bit<S: Simd>(s: S, x: S::I, i: usize) -> S::I {
    let mask = s.int(0x0101_0101);
    match i {
        0 => s.and(x, mask),
        1 => s.and(s.shr::<1>(x), mask),
        2 => s.and(s.shr::<2>(x), mask),
        3 => s.and(s.shr::<3>(x), mask),
        4 => s.and(s.shr::<4>(x), mask),
        5 => s.and(s.shr::<5>(x), mask),
        6 => s.and(s.shr::<6>(x), mask),
        _ => s.and(s.shr::<7>(x), mask),
    }
}

/// 32 bytes of each row: word `k` holds bytes `4k` to `4k + 3`.
#[inline(always)]
fn words<S: Simd>(s: S, rows: Rows<'_>, at: usize) -> [S::I; 8] {
    let ([a, b, c, d], [e, f, g, h]) = (s.transpose(rows, at), s.transpose(rows, at + 16));
    [a, b, c, d, e, f, g, h]
}

/// Scales of 16 sub-blocks, four to a word, whose `weights` centre the quants. `bias` is what was added to them.
#[inline(always)]
fn centring_scales<S: Simd>(s: S, window: &mut Window16, packed: [S::I; 4], signed: bool, bias: i32) {
    for (quad, packed) in packed.into_iter().enumerate() {
        let mut scales = [packed; 4];
        for i in 0..4 {
            let scale = byte(s, packed, i);
            let scale = if signed { s.sar::<24>(s.shl::<24>(scale)) } else { scale };
            scales[i] = s.sub_int(scale, s.int(bias));
            s.store_int(scales[i], &mut window.scales[4 * quad + i]);
        }
        s.store_int(pair(s, scales[0], scales[1]), &mut window.weights[2 * quad]);
        s.store_int(pair(s, scales[2], scales[3]), &mut window.weights[2 * quad + 1]);
    }
}

/// Two f16 in a word.
#[inline(always)]
fn two_scales<S: Simd, const SUBS: usize, const PAIRS: usize>(
    s: S,
    window: &mut Window256<SUBS, PAIRS>,
    both: S::I,
) {
    s.store(s.low_f16(both), &mut window.d);
    s.store(s.low_f16(s.shr::<16>(both)), &mut window.dmin);
}

/// Scales and minima of four sub-blocks, four to a word.
#[inline(always)]
fn scales_and_minima<S: Simd, const SUBS: usize, const PAIRS: usize>(
    s: S,
    window: &mut Window256<SUBS, PAIRS>,
    quad: usize,
    scales: S::I,
    minima: S::I,
) {
    for i in 0..4 {
        s.store_int(byte(s, scales, i), &mut window.scales[4 * quad + i]);
    }
    for half in 0..2 {
        let (low, high) = (byte(s, minima, 2 * half), byte(s, minima, 2 * half + 1));
        s.store_int(pair(s, low, high), &mut window.weights[2 * quad + half]);
    }
}

/// scales[16], qs[64], d, dmin.
#[inline(always)]
fn unpack_q2_k<S: Simd>(s: S, rows: Rows<'_>, at: usize, window: &mut Window16) {
    two_scales(s, window, s.gather_u32(rows, at + 80));
    let nibble = s.int(0x0f0f_0f0f);
    let packed = s.transpose(rows, at);
    for quad in 0..4 {
        let minima = s.and(s.shr::<4>(packed[quad]), nibble);
        scales_and_minima(s, window, quad, s.and(packed[quad], nibble), minima);
    }
    for h in 0..2 {
        let qs = words(s, rows, at + 16 + 32 * h);
        for k in 0..8 {
            for j in 0..4 {
                s.store_bytes(two_bits(s, qs[k], j), &mut window.q[32 * h + 8 * j + k]);
            }
        }
    }
}

/// hmask[32], qs[64], scales[12], d.
#[inline(always)]
fn unpack_q3_k<S: Simd>(s: S, rows: Rows<'_>, at: usize, window: &mut Window16) {
    // Read from two bytes before the scales, so that nothing beyond the block is touched.
    let tail = s.transpose(rows, at + 94);
    let word = |low: S::I, high: S::I| s.or(s.shr::<16>(low), s.shl::<16>(high));
    let (a, b, c) = (word(tail[0], tail[1]), word(tail[1], tail[2]), word(tail[2], tail[3]));
    s.store(s.low_f16(s.shr::<16>(tail[3])), &mut window.d);
    let nibble = s.int(0x0f0f_0f0f);
    let low =
        [s.and(a, nibble), s.and(b, nibble), s.and(s.shr::<4>(a), nibble), s.and(s.shr::<4>(b), nibble)];
    let mut packed = low;
    for quad in 0..4 {
        packed[quad] = s.or(low[quad], s.shl::<4>(two_bits(s, c, quad)));
    }
    centring_scales(s, window, packed, false, 32);
    let hmask = words(s, rows, at);
    for h in 0..2 {
        let qs = words(s, rows, at + 32 + 32 * h);
        for k in 0..8 {
            for j in 0..4 {
                let high = s.shl::<2>(one_bit(s, hmask[k], 4 * h + j));
                s.store_bytes(s.or(two_bits(s, qs[k], j), high), &mut window.q[32 * h + 8 * j + k]);
            }
        }
    }
}

/// d, dmin, scales[12] of Q4_K and Q5_K.
#[inline(always)]
fn unpack_affine_header<S: Simd>(s: S, rows: Rows<'_>, at: usize, window: &mut Window8) {
    let [d, a, b, c] = s.transpose(rows, at);
    two_scales(s, window, d);
    let (six, nibble) = (s.int(0x3f3f_3f3f), s.int(0x0f0f_0f0f));
    scales_and_minima(s, window, 0, s.and(a, six), s.and(b, six));
    let scales = s.or(s.and(c, nibble), s.shl::<4>(two_bits(s, a, 3)));
    let minima = s.or(s.and(s.shr::<4>(c), nibble), s.shl::<4>(two_bits(s, b, 3)));
    scales_and_minima(s, window, 1, scales, minima);
}

/// d, dmin, scales[12], qs[128].
#[inline(always)]
fn unpack_q4_k<S: Simd>(s: S, rows: Rows<'_>, at: usize, window: &mut Window8) {
    unpack_affine_header(s, rows, at, window);
    let nibble = s.int(0x0f0f_0f0f);
    for g in 0..4 {
        let qs = words(s, rows, at + 16 + 32 * g);
        for k in 0..8 {
            s.store_bytes(s.and(qs[k], nibble), &mut window.q[16 * g + k]);
            s.store_bytes(s.and(s.shr::<4>(qs[k]), nibble), &mut window.q[16 * g + 8 + k]);
        }
    }
}

/// d, dmin, scales[12], qh[32], qs[128].
#[inline(always)]
fn unpack_q5_k<S: Simd>(s: S, rows: Rows<'_>, at: usize, window: &mut Window8) {
    unpack_affine_header(s, rows, at, window);
    let nibble = s.int(0x0f0f_0f0f);
    let qh = words(s, rows, at + 16);
    for g in 0..4 {
        let qs = words(s, rows, at + 48 + 32 * g);
        for k in 0..8 {
            let low = s.or(s.and(qs[k], nibble), s.shl::<4>(one_bit(s, qh[k], 2 * g)));
            let high = s.or(s.and(s.shr::<4>(qs[k]), nibble), s.shl::<4>(one_bit(s, qh[k], 2 * g + 1)));
            s.store_bytes(low, &mut window.q[16 * g + k]);
            s.store_bytes(high, &mut window.q[16 * g + 8 + k]);
        }
    }
}

/// ql[128], qh[64], scales[16], d.
#[inline(always)]
fn unpack_q6_k<S: Simd>(s: S, rows: Rows<'_>, at: usize, window: &mut Window16) {
    s.store(s.gather_f16(rows, at + 208), &mut window.d);
    centring_scales(s, window, s.transpose(rows, at + 192), true, 0);
    let nibble = s.int(0x0f0f_0f0f);
    for h in 0..2 {
        let qh = words(s, rows, at + 128 + 32 * h);
        for p in 0..2 {
            let ql = words(s, rows, at + 64 * h + 32 * p);
            for k in 0..8 {
                let low = s.or(s.and(ql[k], nibble), s.shl::<4>(two_bits(s, qh[k], p)));
                let high = s.or(s.and(s.shr::<4>(ql[k]), nibble), s.shl::<4>(two_bits(s, qh[k], p + 2)));
                s.store_bytes(low, &mut window.q[32 * h + 8 * p + k]);
                s.store_bytes(high, &mut window.q[32 * h + 8 * (p + 2) + k]);
            }
        }
    }
}
