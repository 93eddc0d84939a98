// SPDX-License-Identifier: Apache-2.0

//! Unpacks the byte layouts of Q2_K to Q6_K, 16 blocks at once. A block is in one lane of each
//! vector.

use crate::cpu::product::format::Sink;
use crate::cpu::simd::{Simd, StridedRows};

/// Byte `i` of each lane, zero-extended.
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

/// Packs two 16-bit numbers into each lane.
#[inline(always)]
fn pair<S: Simd>(s: S, low: S::I, high: S::I) -> S::I {
    s.or(s.and(low, s.int(0xffff)), s.shl::<16>(high))
}

/// Bits `2j` and `2j + 1` of each byte.
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

/// Loads 32 bytes of each row. Word `k` holds bytes `4k` to `4k + 3`.
#[inline(always)]
fn words<S: Simd>(s: S, rows: StridedRows<'_>, at: usize) -> [S::I; 8] {
    let ([a, b, c, d], [e, f, g, h]) = (s.transpose(rows, at), s.transpose(rows, at + 16));
    [a, b, c, d, e, f, g, h]
}

/// Unpacks the scales of 16 sub-blocks, four to a word. They also weight the activation sums, which
/// centres the quants. `bias` is the number that the format adds to stored scales.
#[inline(always)]
fn centring_scales<S: Simd>(s: S, packed: [S::I; 4], signed: bool, bias: i32, sink: &mut impl Sink<S>) {
    for (quad, packed) in packed.into_iter().enumerate() {
        let mut scales = [packed; 4];
        for i in 0..4 {
            let scale = byte(s, packed, i);
            let scale = if signed { s.sar::<24>(s.shl::<24>(scale)) } else { scale };
            scales[i] = s.sub_int(scale, s.int(bias));
            sink.sub_scale(s, 4 * quad + i, scales[i]);
        }
        sink.sum_weights(s, 2 * quad, pair(s, scales[0], scales[1]));
        sink.sum_weights(s, 2 * quad + 1, pair(s, scales[2], scales[3]));
    }
}

/// Unpacks `d` and `dmin`, two f16 in a word.
#[inline(always)]
fn two_scales<S: Simd>(s: S, both: S::I, sink: &mut impl Sink<S>) {
    sink.scale(s, s.low_f16(both));
    sink.second_scale(s, s.low_f16(s.shr::<16>(both)));
}

/// Passes on the scales and minima of four sub-blocks, four to a word.
#[inline(always)]
fn scales_and_minima<S: Simd>(s: S, quad: usize, scales: S::I, minima: S::I, sink: &mut impl Sink<S>) {
    for i in 0..4 {
        sink.sub_scale(s, 4 * quad + i, byte(s, scales, i));
    }
    for half in 0..2 {
        let (low, high) = (byte(s, minima, 2 * half), byte(s, minima, 2 * half + 1));
        sink.sum_weights(s, 2 * quad + half, pair(s, low, high));
    }
}

/// Unpacks Q2_K. The fields of a block are `scales[16], qs[64], d, dmin`.
#[inline(always)]
pub(super) fn unpack_q2_k<S: Simd>(s: S, rows: StridedRows<'_>, at: usize, sink: &mut impl Sink<S>) {
    two_scales(s, s.gather_u32(rows, at + 80), sink);
    let nibble = s.int(0x0f0f_0f0f);
    let packed = s.transpose(rows, at);
    for quad in 0..4 {
        let minima = s.and(s.shr::<4>(packed[quad]), nibble);
        scales_and_minima(s, quad, s.and(packed[quad], nibble), minima, sink);
    }
    for h in 0..2 {
        let qs = words(s, rows, at + 16 + 32 * h);
        for j in 0..4 {
            let mut values = qs;
            for k in 0..8 {
                values[k] = two_bits(s, qs[k], j);
            }
            sink.values(s, 4 * h + j, values);
        }
    }
}

/// Unpacks Q3_K. The fields of a block are `hmask[32], qs[64], scales[12], d`.
#[inline(always)]
pub(super) fn unpack_q3_k<S: Simd>(s: S, rows: StridedRows<'_>, at: usize, sink: &mut impl Sink<S>) {
    // This reads 16 bytes, from two bytes before the scales, so that it reads nothing beyond the
    // block.
    let [t0, t1, t2, t3] = s.transpose(rows, at + 94);
    let a = s.or(s.shr::<16>(t0), s.shl::<16>(t1));
    let b = s.or(s.shr::<16>(t1), s.shl::<16>(t2));
    let c = s.or(s.shr::<16>(t2), s.shl::<16>(t3));
    sink.scale(s, s.low_f16(s.shr::<16>(t3)));
    let nibble = s.int(0x0f0f_0f0f);
    let mut packed =
        [s.and(a, nibble), s.and(b, nibble), s.and(s.shr::<4>(a), nibble), s.and(s.shr::<4>(b), nibble)];
    for quad in 0..4 {
        packed[quad] = s.or(packed[quad], s.shl::<4>(two_bits(s, c, quad)));
    }
    centring_scales(s, packed, false, 32, sink);
    let hmask = words(s, rows, at);
    for h in 0..2 {
        let qs = words(s, rows, at + 32 + 32 * h);
        for j in 0..4 {
            let mut values = qs;
            for k in 0..8 {
                let high = s.shl::<2>(one_bit(s, hmask[k], 4 * h + j));
                values[k] = s.or(two_bits(s, qs[k], j), high);
            }
            sink.values(s, 4 * h + j, values);
        }
    }
}

/// Unpacks `d, dmin, scales[12]` of Q4_K and Q5_K.
#[inline(always)]
fn unpack_affine_header<S: Simd>(s: S, rows: StridedRows<'_>, at: usize, sink: &mut impl Sink<S>) {
    let [d, a, b, c] = s.transpose(rows, at);
    two_scales(s, d, sink);
    let (six, nibble) = (s.int(0x3f3f_3f3f), s.int(0x0f0f_0f0f));
    scales_and_minima(s, 0, s.and(a, six), s.and(b, six), sink);
    let scales = s.or(s.and(c, nibble), s.shl::<4>(two_bits(s, a, 3)));
    let minima = s.or(s.and(s.shr::<4>(c), nibble), s.shl::<4>(two_bits(s, b, 3)));
    scales_and_minima(s, 1, scales, minima, sink);
}

/// Unpacks Q4_K. The fields of a block are `d, dmin, scales[12], qs[128]`.
#[inline(always)]
pub(super) fn unpack_q4_k<S: Simd>(s: S, rows: StridedRows<'_>, at: usize, sink: &mut impl Sink<S>) {
    unpack_affine_header(s, rows, at, sink);
    let nibble = s.int(0x0f0f_0f0f);
    for g in 0..4 {
        let qs = words(s, rows, at + 16 + 32 * g);
        let (mut low, mut high) = (qs, qs);
        for k in 0..8 {
            low[k] = s.and(qs[k], nibble);
            high[k] = s.and(s.shr::<4>(qs[k]), nibble);
        }
        sink.values(s, 2 * g, low);
        sink.values(s, 2 * g + 1, high);
    }
}

/// Unpacks Q5_K. The fields of a block are `d, dmin, scales[12], qh[32], qs[128]`.
#[inline(always)]
pub(super) fn unpack_q5_k<S: Simd>(s: S, rows: StridedRows<'_>, at: usize, sink: &mut impl Sink<S>) {
    unpack_affine_header(s, rows, at, sink);
    let nibble = s.int(0x0f0f_0f0f);
    let qh = words(s, rows, at + 16);
    for g in 0..4 {
        let qs = words(s, rows, at + 48 + 32 * g);
        let (mut low, mut high) = (qs, qs);
        for k in 0..8 {
            low[k] = s.or(s.and(qs[k], nibble), s.shl::<4>(one_bit(s, qh[k], 2 * g)));
            high[k] = s.or(s.and(s.shr::<4>(qs[k]), nibble), s.shl::<4>(one_bit(s, qh[k], 2 * g + 1)));
        }
        sink.values(s, 2 * g, low);
        sink.values(s, 2 * g + 1, high);
    }
}

/// Unpacks Q6_K. The fields of a block are `ql[128], qh[64], scales[16], d`.
#[inline(always)]
pub(super) fn unpack_q6_k<S: Simd>(s: S, rows: StridedRows<'_>, at: usize, sink: &mut impl Sink<S>) {
    sink.scale(s, s.gather_f16(rows, at + 208));
    centring_scales(s, s.transpose(rows, at + 192), true, 0, sink);
    let nibble = s.int(0x0f0f_0f0f);
    for h in 0..2 {
        let qh = words(s, rows, at + 128 + 32 * h);
        for p in 0..2 {
            let ql = words(s, rows, at + 64 * h + 32 * p);
            let (mut low, mut high) = (ql, ql);
            for k in 0..8 {
                low[k] = s.or(s.and(ql[k], nibble), s.shl::<4>(two_bits(s, qh[k], p)));
                high[k] = s.or(s.and(s.shr::<4>(ql[k]), nibble), s.shl::<4>(two_bits(s, qh[k], p + 2)));
            }
            sink.values(s, 4 * h + p, low);
            sink.values(s, 4 * h + p + 2, high);
        }
    }
}
