// SPDX-License-Identifier: Apache-2.0

//! Attention of the queries of a tile over one split of keys and values.

use super::SPLIT;
use crate::cpu::element::{Element, F16, SCALE_BYTES, Stored};
use crate::cpu::kv::LayerView;
use crate::cpu::math;
use crate::cpu::simd::{CACHE_LINE, Simd, SimdKernel};
use std::marker::PhantomData;
use std::ops::Range;

/// One query head of one row.
pub(super) struct Query<'a> {
    pub(super) values: &'a [f32],
    /// Positions that the query attends to.
    pub(super) keys: Range<usize>,
}

#[derive(Default)]
pub(super) struct SplitScratch {
    /// Scores, later shares: `SPLIT` per query.
    scores: Vec<f32>,
    /// 16 keys with their factors, gathered if the block size is not a multiple of 16.
    keys: [Vec<u8>; 2],
}

pub(super) struct Args<'a> {
    pub(super) view: LayerView<'a>,
    pub(super) table: &'a [u32],
    pub(super) kv_head: usize,
    pub(super) queries: &'a [Query<'a>],
    /// First position, a multiple of `SPLIT`.
    pub(super) from: usize,
    pub(super) scale: f32,
    /// The partial results, per query, as `merge` describes.
    pub(super) partials: &'a mut [f32],
    pub(super) scratch: &'a mut SplitScratch,
}

pub(super) struct Split<'a, E> {
    args: Args<'a>,
    element: PhantomData<E>,
}

impl<'a, E> Split<'a, E> {
    pub(super) fn new(args: Args<'a>) -> Self {
        Self { args, element: PhantomData }
    }
}

impl<E: Stored> SimdKernel for Split<'_, E> {
    type Output = ();

    #[inline(always)]
    fn run<S: Simd>(self, s: S) {
        let Args { view, table, kv_head, queries, from, scale, partials, scratch } = self.args;
        let positions = &Positions::<E> { view, table, kv_head, from, element: PhantomData };
        let width = 2 + view.shape.head_dim;
        scratch.scores.resize(queries.len() * SPLIT, 0.0);
        let SplitScratch { scores, keys } = scratch;
        let (mut all_queries, mut all_scores, mut all_partials) = (queries, &mut scores[..], partials);
        while !all_queries.is_empty() {
            let count = match all_queries.len() {
                8.. => 8,
                4.. => 4,
                2.. => 2,
                _ => 1,
            };
            let (queries, later) = all_queries.split_at(count);
            let (scores, later_scores) = all_scores.split_at_mut(count * SPLIT);
            let (partials, later_partials) = all_partials.split_at_mut(count * width);
            match count {
                8 => s.vectorize(Tile::<E, 8> { positions, queries, scale, scores, partials, keys }),
                4 => s.vectorize(Tile::<E, 4> { positions, queries, scale, scores, partials, keys }),
                2 => s.vectorize(Tile::<E, 2> { positions, queries, scale, scores, partials, keys }),
                _ => s.vectorize(Tile::<E, 1> { positions, queries, scale, scores, partials, keys }),
            }
            (all_queries, all_scores, all_partials) = (later, later_scores, later_partials);
        }
    }
}

/// The largest number of scales in the dimensions of one call of `columns`.
const COLUMN_SCALES_MAX: usize = 4;

/// The keys and values of a split, for one head.
struct Positions<'a, E> {
    view: LayerView<'a>,
    table: &'a [u32],
    kv_head: usize,
    from: usize,
    element: PhantomData<E>,
}

/// Computes scores, shares and weighted values of `T` queries.
///
/// The compiler makes a copy per element type, instruction set and `T`. Parts that do not depend on
/// all three are separate kernels, to keep the build short: [`SoftmaxNumerators`] serves every `T`
/// and type, and [`Values`] of one query serves every `T`.
struct Tile<'a, 'b, E, const T: usize> {
    positions: &'a Positions<'a, E>,
    queries: &'a [Query<'b>],
    scale: f32,
    scores: &'a mut [f32],
    partials: &'a mut [f32],
    keys: &'a mut [Vec<u8>; 2],
}

impl<E: Stored, const T: usize> SimdKernel for Tile<'_, '_, E, T> {
    type Output = ();

    #[inline(always)]
    fn run<S: Simd>(self, s: S) {
        let Self { positions, queries, scale, scores, partials, keys } = self;
        // Each query attends to the keys `first..seen` of the split; any of them to `least..most`.
        let (mut first, mut seen) = ([0; T], [0; T]);
        let (mut least, mut most) = (SPLIT, 0);
        for t in 0..T {
            seen[t] = queries[t].keys.end.saturating_sub(positions.from).min(SPLIT);
            first[t] = queries[t].keys.start.saturating_sub(positions.from).min(seen[t]);
            if first[t] < seen[t] {
                (least, most) = (least.min(first[t]), most.max(seen[t]));
            }
        }
        let mut key = least - least % 16;
        while key < most {
            // With few queries, two vectors of keys give enough independent multiply-adds.
            if T <= 4 && key + 16 < most {
                positions.scores::<S, T, 2>(s, queries, scale, key, least..most, scores, keys);
                key += 32;
            } else {
                positions.scores::<S, T, 1>(s, queries, scale, key, least..most, scores, keys);
                key += 16;
            }
        }
        let dim = positions.view.shape.head_dim;
        let width = 2 + dim;
        for t in 0..T {
            let scores = &mut scores[t * SPLIT..][..SPLIT];
            let (largest, sum) = s.vectorize(SoftmaxNumerators { scores, seen: first[t]..seen[t] });
            partials[t * width..][..2].copy_from_slice(&[largest, sum]);
        }
        // All queries attend to `from..until`; some of them also to keys before it and after it.
        let from = first.into_iter().fold(0, usize::max);
        let until = seen.into_iter().fold(SPLIT, usize::min).max(from);
        let accumulates = first.into_iter().any(|first| first < from);
        for (part, is_common) in [(0..from, false), (from..until, true), (until..SPLIT, false)] {
            if is_common {
                let (shares, partials) = (&*scores, &mut *partials);
                s.vectorize(Values::<E, T> {
                    positions,
                    range: part,
                    dims: 0..dim,
                    accumulates,
                    shares,
                    partials,
                });
                continue;
            }
            // If there is one query, the common range has all its keys.
            if T == 1 {
                continue;
            }
            let is_rest = part.start == until;
            for t in 0..T {
                let range = first[t].max(part.start)..seen[t].min(part.end);
                let is_there = if is_rest { !range.is_empty() } else { accumulates };
                if is_there {
                    let (shares, partials) =
                        (&scores[t * SPLIT..][..SPLIT], &mut partials[t * width..][..width]);
                    let accumulates = is_rest;
                    s.vectorize(Values::<E, 1> {
                        positions,
                        range,
                        dims: 0..dim,
                        accumulates,
                        shares,
                        partials,
                    });
                }
            }
        }
    }
}

/// Adds values times shares, for the keys `range` of the split, to the partial result of each
/// query. Overwrites the partial result unless it `accumulates`.
struct Values<'a, E, const T: usize> {
    positions: &'a Positions<'a, E>,
    range: Range<usize>,
    dims: Range<usize>,
    accumulates: bool,
    shares: &'a [f32],
    partials: &'a mut [f32],
}

impl<E: Stored, const T: usize> SimdKernel for Values<'_, E, T> {
    type Output = ();

    #[inline(always)]
    fn run<S: Simd>(self, s: S) {
        let Self { positions, range, dims, accumulates, shares, partials } = self;
        let (mut d, end) = (dims.start, dims.end);
        while end - d >= 16 {
            // `T` times the number of vectors is at most eight accumulators. Heads of 64 and 128
            // values are the most common and use the widest variant. Narrower variants would serve
            // only the remaining dimensions of other heads.
            d += match (end - d) / 16 {
                8.. if T == 1 => {
                    positions.columns::<S, T, 8>(s, &range, accumulates, d..d + 128, shares, partials)
                }
                4.. if T <= 2 => {
                    positions.columns::<S, T, 4>(s, &range, accumulates, d..d + 64, shares, partials)
                }
                2.. if T == 4 => {
                    positions.columns::<S, T, 2>(s, &range, accumulates, d..d + 32, shares, partials)
                }
                _ => positions.columns::<S, T, 1>(s, &range, accumulates, d..d + 16, shares, partials),
            };
        }
        if d == end {
            return;
        }
        if T == 1 {
            positions.columns::<S, T, 0>(s, &range, accumulates, d..end, shares, partials);
            return;
        }
        let width = 2 + positions.view.shape.head_dim;
        for (shares, partials) in shares.chunks(SPLIT).zip(partials.chunks_mut(width)) {
            let (range, dims) = (range.clone(), d..end);
            s.vectorize(Values::<E, 1> { positions, range, dims, accumulates, shares, partials });
        }
    }
}

impl<E: Stored> Positions<'_, E> {
    /// Computes the scores of `U` vectors of 16 keys from key `key` of the split on. Only keys in
    /// `there` exist.
    #[expect(clippy::too_many_arguments, reason = "operands of one op, each of its own type")]
    #[inline(always)]
    fn scores<S: Simd, const T: usize, const U: usize>(
        &self,
        s: S,
        queries: &[Query<'_>],
        scale: f32,
        key: usize,
        there: Range<usize>,
        scores: &mut [f32],
        gathered: &mut [Vec<u8>; 2],
    ) {
        let there = self.from + there.start..self.from + there.end;
        let dim = self.view.shape.head_dim;
        let is_direct = self.view.block_tokens.is_multiple_of(16);
        let together = if is_direct { self.view.block_tokens } else { 16 };
        let stride = together * E::BYTES;
        // Of the last dimension, the kernel reads 16 keys only, not a whole stride.
        let len = (dim - 1) * stride + 16 * E::BYTES;
        let none = &self.view.memory[..0];
        let (mut keys, mut ahead, mut factors) = ([none; U], [none; U], [none; U]);
        for (u, gathered) in gathered.iter_mut().take(U).enumerate() {
            let position = self.from + key + 16 * u;
            if is_direct {
                keys[u] = &self.view.memory[self.key_byte(position)..][..len];
                if E::SCALED > 0 {
                    factors[u] = &self.view.memory[self.key_factor_byte(position)..];
                }
                if position + 16 * U < there.end {
                    ahead[u] = &self.view.memory[self.key_byte(position + 16 * U)..][..len];
                }
            } else {
                self.gather(position, &there, gathered);
                keys[u] = &gathered[..len];
                factors[u] = &gathered[dim * stride..];
            }
        }
        let mut q = [&queries[0].values[..dim]; T];
        for t in 1..T {
            q[t] = &queries[t].values[..dim];
        }
        let mut sums = [[s.splat(0.0); U]; T];
        if E::SCALED == 0 {
            sums = products::<E, S, T, U>(s, &q, (&keys, &ahead), stride, 0..dim);
        }
        for scale in 0..E::scales(dim) {
            let dims = scale * E::SCALED..dim.min((scale + 1) * E::SCALED);
            let part = products::<E, S, T, U>(s, &q, (&keys, &ahead), stride, dims);
            for u in 0..U {
                let factors = &factors[u][scale * together * SCALE_BYTES..][..16 * SCALE_BYTES];
                let factor = F16::load(s, factors);
                for t in 0..T {
                    sums[t][u] = s.fma(part[t][u], factor, sums[t][u]);
                }
            }
        }
        for t in 0..T {
            for u in 0..U {
                let out = &mut scores[t * SPLIT + key + 16 * u..][..16];
                s.store_partial(s.mul(sums[t][u], s.splat(scale)), out);
            }
        }
    }

    /// Byte offset of dimension 0 of the key at `position`.
    #[inline(always)]
    fn key_byte(&self, position: usize) -> usize {
        let tokens = self.view.block_tokens;
        let block = self.table[position / tokens] as usize;
        self.view.keys_at(block, self.kv_head) + position % tokens * E::BYTES
    }

    /// Byte offset of the first factor of the key at `position`.
    #[inline(always)]
    fn key_factor_byte(&self, position: usize) -> usize {
        let (dim, tokens) = (self.view.shape.head_dim, self.view.block_tokens);
        let block = self.table[position / tokens] as usize;
        let factors = self.view.keys_at(block, self.kv_head) + dim * tokens * E::BYTES;
        factors + position % tokens * SCALE_BYTES
    }

    /// Gathers 16 keys from `position` on, one dimension after the other, then their factors. Keys
    /// outside `there` are zero. The function only copies bytes, so one copy serves all instruction
    /// sets.
    #[inline(never)]
    fn gather(&self, position: usize, there: &Range<usize>, out: &mut Vec<u8>) {
        let (dim, tokens) = (self.view.shape.head_dim, self.view.block_tokens);
        let factors_at = dim * 16 * E::BYTES;
        out.clear();
        out.resize(factors_at + E::scales(dim) * 16 * SCALE_BYTES, 0);
        for lane in there.start.saturating_sub(position)..16.min(there.end - position) {
            let at = self.key_byte(position + lane);
            for d in 0..dim {
                let key = &self.view.memory[at + d * tokens * E::BYTES..][..E::BYTES];
                out[(d * 16 + lane) * E::BYTES..][..E::BYTES].copy_from_slice(key);
            }
            for scale in 0..E::scales(dim) {
                let at = self.key_factor_byte(position + lane) + scale * tokens * SCALE_BYTES;
                let factor = &self.view.memory[at..][..SCALE_BYTES];
                out[factors_at + (scale * 16 + lane) * SCALE_BYTES..][..SCALE_BYTES].copy_from_slice(factor);
            }
        }
    }

    /// Multiplies the shares of `count` keys of a block from `position` on with the factors of the
    /// values' scales in `dims`.
    #[inline(always)]
    fn scale_shares<S: Simd, const T: usize>(
        &self,
        s: S,
        position: usize,
        count: usize,
        dims: &Range<usize>,
        shares: &[f32],
        scaled: &mut [[[f32; 16]; COLUMN_SCALES_MAX]; T],
    ) {
        let (dim, tokens) = (self.view.shape.head_dim, self.view.block_tokens);
        let (block, token) = (self.table[position / tokens] as usize, position % tokens);
        let factors = self.view.values_at(block, self.kv_head) + dim * tokens * E::BYTES;
        let first = dims.start / E::SCALED;
        for scale in first..dims.end.div_ceil(E::SCALED) {
            let at = factors + (scale * tokens + token) * SCALE_BYTES;
            let factor = F16::load_partial(s, &self.view.memory[at..at + count * SCALE_BYTES]);
            for t in 0..T {
                let shares = s.load_partial(&shares[t * SPLIT..][..count]);
                s.store(s.mul(shares, factor), &mut scaled[t][scale - first]);
            }
        }
    }

    /// [`Values`] for the dimensions `dims`: `V` vectors of 16, or fewer than 16 values if `V` is
    /// 0. Returns the number of dimensions.
    #[inline(always)]
    fn columns<S: Simd, const T: usize, const V: usize>(
        &self,
        s: S,
        range: &Range<usize>,
        accumulates: bool,
        dims: Range<usize>,
        shares: &[f32],
        partials: &mut [f32],
    ) -> usize {
        let (dim, tokens) = (self.view.shape.head_dim, self.view.block_tokens);
        let width = 2 + dim;
        // With `V` = 0, one vector holds the fewer than 16 values.
        let vectors = V.max(1);
        let values_of =
            |v: usize| if V == 0 { dims.clone() } else { dims.start + 16 * v..dims.start + 16 * v + 16 };
        let mut sums = [[s.splat(0.0); 8]; T];
        if accumulates {
            for t in 0..T {
                for v in 0..vectors {
                    sums[t][v] = s.load_partial(&partials[t * width + 2..][values_of(v)]);
                }
            }
        }
        let mut key = range.start;
        // Shares times factors, for the scales of these dimensions. A type with scales takes at
        // most 16 keys at a time.
        let mut scaled = [[[0.0_f32; 16]; COLUMN_SCALES_MAX]; T];
        let per_scale = E::SCALED.max(1);
        let keys_max = if E::SCALED > 0 { 16 } else { usize::MAX };
        while key < range.end {
            let position = self.from + key;
            let (block, token) = (self.table[position / tokens] as usize, position % tokens);
            let count = (tokens - token).min(range.end - key).min(keys_max);
            if E::SCALED > 0 {
                self.scale_shares::<S, T>(s, position, count, &dims, &shares[key..], &mut scaled);
            }
            let at = self.view.values_at(block, self.kv_head) + (token * dim + dims.start) * E::BYTES;
            let len = ((count - 1) * dim + dims.len()) * E::BYTES;
            let values = &self.view.memory[at..at + len];
            let next_block = self.table.get(position / tokens + 1).filter(|_| key + count < range.end);
            let ahead = next_block.map(|&block| {
                &self.view.memory[self.view.values_at(block as usize, self.kv_head) + dims.start * E::BYTES..]
            });
            let ahead = ahead.unwrap_or_default();
            for i in 0..count {
                for line in (0..dims.len() * E::BYTES).step_by(CACHE_LINE) {
                    s.prefetch(ahead.get(i * dim * E::BYTES + line..).unwrap_or_default());
                }
                let row = &values[i * dim * E::BYTES..][..dims.len() * E::BYTES];
                for v in 0..vectors {
                    let value = if V == 0 {
                        E::load_partial(s, row)
                    } else {
                        E::load(s, &row[16 * v * E::BYTES..16 * (v + 1) * E::BYTES])
                    };
                    for t in 0..T {
                        let share = if E::SCALED > 0 {
                            scaled[t][(dims.start % per_scale + 16 * v) / per_scale][i]
                        } else {
                            shares[t * SPLIT + key + i]
                        };
                        sums[t][v] = s.fma(s.splat(share), value, sums[t][v]);
                    }
                }
            }
            key += count;
        }
        for t in 0..T {
            for v in 0..vectors {
                s.store_partial(sums[t][v], &mut partials[t * width + 2..][values_of(v)]);
            }
        }
        dims.len()
    }
}

/// Dot products over `dims` of `T` queries and `U` vectors of 16 keys, whose dimensions are
/// `stride` bytes apart. Prefetches `ahead`.
#[inline(always)]
fn products<E: Stored, S: Simd, const T: usize, const U: usize>(
    s: S,
    queries: &[&[f32]; T],
    (keys, ahead): (&[&[u8]; U], &[&[u8]; U]),
    stride: usize,
    dims: Range<usize>,
) -> [[S::F; U]; T] {
    let end = dims.end.saturating_sub(1) * stride + 16 * E::BYTES;
    assert!(keys.iter().all(|keys| end <= keys.len()));
    let mut sums = [[s.splat(0.0); U]; T];
    for d in dims {
        let mut k = [s.splat(0.0); U];
        let is_next_line = d * stride % CACHE_LINE < stride;
        for u in 0..U {
            if is_next_line {
                s.prefetch(ahead[u].get(d * stride..).unwrap_or_default());
            }
            // SAFETY: the read of the last dimension ends at `end`, which the assertion keeps
            // inside the slice.
            k[u] = E::load(s, unsafe { keys[u].get_unchecked(d * stride..d * stride + 16 * E::BYTES) });
        }
        for t in 0..T {
            let q = s.splat(queries[t][d]);
            for u in 0..U {
                sums[t][u] = s.fma(q, k[u], sums[t][u]);
            }
        }
    }
    sums
}

/// Replaces the scores `seen` by their shares, and returns the largest score and the sum of shares.
/// Other entries of the same vectors of 16 become zero.
struct SoftmaxNumerators<'a> {
    scores: &'a mut [f32],
    seen: Range<usize>,
}

impl SimdKernel for SoftmaxNumerators<'_> {
    type Output = (f32, f32);

    #[inline(always)]
    fn run<S: Simd>(self, s: S) -> (f32, f32) {
        let Self { scores, seen } = self;
        if seen.is_empty() {
            return (f32::NEG_INFINITY, 0.0);
        }
        let start = seen.start - seen.start % 16;
        let scores = &mut scores[start..seen.end.next_multiple_of(16)];
        let seen = seen.start - start..seen.end - start;
        let first = scores[seen.start];
        scores[..seen.start].fill(first);
        scores[seen.end..].fill(first);
        let mut largest = s.splat(first);
        for score in scores.as_chunks::<16>().0 {
            largest = s.max(s.load(score), largest);
        }
        let largest = s.largest(largest);
        for score in scores.as_chunks_mut::<16>().0 {
            let share = math::exp(s, s.sub(s.load(score), s.splat(largest)));
            s.store(share, score);
        }
        scores[..seen.start].fill(0.0);
        scores[seen.end..].fill(0.0);
        let mut sum = s.splat(0.0);
        for share in scores.as_chunks::<16>().0 {
            sum = s.add(sum, s.load(share));
        }
        (largest, s.sum(sum))
    }
}
