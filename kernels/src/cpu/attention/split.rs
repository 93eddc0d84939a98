//! One split of keys and values for the queries of a tile.

use super::SPLIT;
use crate::cpu::element::Stored;
use crate::cpu::kv::LayerView;
use crate::cpu::math;
use crate::cpu::simd::{Kernel, Simd};
use std::marker::PhantomData;
use std::ops::Range;

/// A head of a row.
#[derive(Clone, Copy)]
pub(super) struct Query<'a> {
    pub(super) values: &'a [f32],
    /// How many keys from position 0 on it sees.
    pub(super) keys: usize,
}

#[derive(Default)]
pub(super) struct SplitScratch {
    /// Scores, then shares: `SPLIT` per query.
    scores: Vec<f32>,
    /// 16 keys side by side, where a block does not hold them so.
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
    /// Per query, as `merge` describes.
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

impl<E: Stored> Kernel for Split<'_, E> {
    type Output = ();

    #[inline(always)]
    fn run<S: Simd>(self, s: S) {
        let Args { view, table, kv_head, queries, from, scale, partials, scratch } = self.args;
        let split = Positions::<E> { view, table, kv_head, from, element: PhantomData };
        let width = 2 + view.shape.head_dim;
        scratch.scores.resize(queries.len() * SPLIT, 0.0);
        let SplitScratch { scores, keys } = scratch;
        let (mut queries, mut scores, mut partials) = (queries, &mut scores[..], partials);
        while !queries.is_empty() {
            let count = match queries.len() {
                8.. => 8,
                4.. => 4,
                2.. => 2,
                _ => 1,
            };
            let (now, later) = queries.split_at(count);
            let (now_scores, later_scores) = scores.split_at_mut(count * SPLIT);
            let (now_partials, later_partials) = partials.split_at_mut(count * width);
            match count {
                8 => split.tile::<S, 8>(s, now, scale, now_scores, now_partials, keys),
                4 => split.tile::<S, 4>(s, now, scale, now_scores, now_partials, keys),
                2 => split.tile::<S, 2>(s, now, scale, now_scores, now_partials, keys),
                _ => split.tile::<S, 1>(s, now, scale, now_scores, now_partials, keys),
            }
            (queries, scores, partials) = (later, later_scores, later_partials);
        }
    }
}

struct Positions<'a, E> {
    view: LayerView<'a>,
    table: &'a [u32],
    kv_head: usize,
    from: usize,
    element: PhantomData<E>,
}

impl<E: Stored> Positions<'_, E> {
    /// Scores, shares and sums of values of `T` queries.
    #[inline(always)]
    fn tile<S: Simd, const T: usize>(
        &self,
        s: S,
        queries: &[Query<'_>],
        scale: f32,
        scores: &mut [f32],
        partials: &mut [f32],
        keys: &mut [Vec<u8>; 2],
    ) {
        // Keys of this split that each query sees.
        let mut seen = [0; T];
        for t in 0..T {
            seen[t] = queries[t].keys.saturating_sub(self.from).min(SPLIT);
        }
        let most = seen.into_iter().fold(0, usize::max);
        let mut key = 0;
        while key < most {
            // Two vectors of keys for few queries, so that enough multiply-adds are independent.
            if T <= 4 && key + 16 < most {
                self.scores::<S, T, 2>(s, queries, scale, (key, most), scores, keys);
                key += 32;
            } else {
                self.scores::<S, T, 1>(s, queries, scale, (key, most), scores, keys);
                key += 16;
            }
        }
        let width = 2 + self.view.shape.head_dim;
        for t in 0..T {
            let partial = &mut partials[t * width..][..2];
            (partial[0], partial[1]) = shares(s, &mut scores[t * SPLIT..][..SPLIT], seen[t]);
        }
        // What all queries see together, then the rest of each.
        let common = seen.into_iter().fold(SPLIT, usize::min);
        self.values::<S, T>(s, 0..common, scores, partials);
        for t in 0..T {
            let (scores, partials) = (&scores[t * SPLIT..][..SPLIT], &mut partials[t * width..][..width]);
            if seen[t] > common {
                self.values::<S, 1>(s, common..seen[t], scores, partials);
            }
        }
    }

    /// Scores of `U` vectors of 16 keys from `key` on, counted in the split, of which the first `most` are there.
    #[inline(always)]
    fn scores<S: Simd, const T: usize, const U: usize>(
        &self,
        s: S,
        queries: &[Query<'_>],
        scale: f32,
        (key, most): (usize, usize),
        scores: &mut [f32],
        gathered: &mut [Vec<u8>; 2],
    ) {
        let until = self.from + most;
        let dim = self.view.shape.head_dim;
        let is_direct = self.view.block_tokens.is_multiple_of(16);
        let stride = if is_direct { self.view.block_tokens * E::BYTES } else { 16 * E::BYTES };
        // The last dimension needs 16 keys only, not a whole stride.
        let len = (dim - 1) * stride + 16 * E::BYTES;
        let mut keys = [&self.view.memory[..0]; U];
        for (u, gathered) in gathered.iter_mut().take(U).enumerate() {
            let position = self.from + key + 16 * u;
            keys[u] = if is_direct {
                let block = self.table[position / self.view.block_tokens] as usize;
                let at = self.view.keys_at(block, self.kv_head);
                &self.view.memory[at + position % self.view.block_tokens * E::BYTES..][..len]
            } else {
                self.gather(position, until, gathered);
                &gathered[..len]
            };
        }
        let mut q = [&queries[0].values[..dim]; T];
        for t in 1..T {
            q[t] = &queries[t].values[..dim];
        }
        let mut sums = [[s.splat(0.0); U]; T];
        for d in 0..dim {
            let mut k = [s.splat(0.0); U];
            for u in 0..U {
                k[u] = E::load(s, &keys[u][d * stride..d * stride + 16 * E::BYTES]);
            }
            for t in 0..T {
                let q = s.splat(q[t][d]);
                for u in 0..U {
                    sums[t][u] = s.fma(q, k[u], sums[t][u]);
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

    /// 16 keys from `position` on, one dimension after the other; zeros from position `until` on.
    #[inline(always)]
    fn gather(&self, position: usize, until: usize, out: &mut Vec<u8>) {
        let (dim, tokens) = (self.view.shape.head_dim, self.view.block_tokens);
        out.clear();
        out.resize(dim * 16 * E::BYTES, 0);
        for lane in 0..16.min(until - position) {
            let position = position + lane;
            let block = self.table[position / tokens] as usize;
            let at = self.view.keys_at(block, self.kv_head) + position % tokens * E::BYTES;
            for d in 0..dim {
                let key = &self.view.memory[at + d * tokens * E::BYTES..][..E::BYTES];
                out[(d * 16 + lane) * E::BYTES..][..E::BYTES].copy_from_slice(key);
            }
        }
    }

    /// Adds values times shares of the keys `range` of the split to each query's partial result.
    #[inline(always)]
    fn values<S: Simd, const T: usize>(
        &self,
        s: S,
        range: Range<usize>,
        shares: &[f32],
        partials: &mut [f32],
    ) {
        let dim = self.view.shape.head_dim;
        let mut d = 0;
        while d < dim {
            // T times vectors is at most eight accumulators.
            match (dim - d) / 16 {
                8.. if T == 1 => d += self.columns::<S, T, 8>(s, &range, d, shares, partials),
                4.. if T <= 2 => d += self.columns::<S, T, 4>(s, &range, d, shares, partials),
                2.. if T <= 4 => d += self.columns::<S, T, 2>(s, &range, d, shares, partials),
                _ => d += self.columns::<S, T, 1>(s, &range, d, shares, partials),
            }
        }
    }

    /// As `values` for `V` vectors of dimensions from `d` on, the last of which may be partial; gives their number.
    #[inline(always)]
    fn columns<S: Simd, const T: usize, const V: usize>(
        &self,
        s: S,
        range: &Range<usize>,
        d: usize,
        shares: &[f32],
        partials: &mut [f32],
    ) -> usize {
        let (dim, tokens) = (self.view.shape.head_dim, self.view.block_tokens);
        let width = 2 + dim;
        let len = (16 * V).min(dim - d);
        let mut sums = [[s.splat(0.0); V]; T];
        if range.start > 0 {
            for t in 0..T {
                for v in 0..V {
                    let from = t * width + 2 + d + 16 * v;
                    sums[t][v] = s.load_partial(&partials[from..from + 16.min(dim - d - 16 * v)]);
                }
            }
        }
        let mut key = range.start;
        while key < range.end {
            let position = self.from + key;
            let (block, token) = (self.table[position / tokens] as usize, position % tokens);
            let count = (tokens - token).min(range.end - key);
            let at = self.view.values_at(block, self.kv_head) + (token * dim + d) * E::BYTES;
            let values = &self.view.memory[at..at + ((count - 1) * dim + len) * E::BYTES];
            for i in 0..count {
                let row = &values[i * dim * E::BYTES..][..len * E::BYTES];
                for v in 0..V {
                    let from = 16 * v * E::BYTES;
                    let to = (from + 16 * E::BYTES).min(row.len());
                    let value = E::load_partial(s, &row[from..to]);
                    for t in 0..T {
                        let share = s.splat(shares[t * SPLIT + key + i]);
                        sums[t][v] = s.fma(share, value, sums[t][v]);
                    }
                }
            }
            key += count;
        }
        for t in 0..T {
            for v in 0..V {
                let from = t * width + 2 + d + 16 * v;
                s.store_partial(sums[t][v], &mut partials[from..from + 16.min(dim - d - 16 * v)]);
            }
        }
        len
    }
}

/// Turns the first `seen` scores into shares of the largest, and gives the largest score and the sum of shares. What
/// stands behind them becomes zero up to a multiple of 16.
#[inline(always)]
fn shares<S: Simd>(s: S, scores: &mut [f32], seen: usize) -> (f32, f32) {
    if seen == 0 {
        return (f32::NEG_INFINITY, 0.0);
    }
    let end = seen.next_multiple_of(16);
    let first = scores[0];
    scores[seen..end].fill(first);
    let mut largest = s.splat(first);
    for score in scores[..end].as_chunks::<16>().0 {
        largest = s.max(s.load(score), largest);
    }
    let largest = s.largest(largest);
    for score in scores[..end].as_chunks_mut::<16>().0 {
        let share = math::exp(s, s.sub(s.load(score), s.splat(largest)));
        s.store(share, score);
    }
    scores[seen..end].fill(0.0);
    let mut sum = s.splat(0.0);
    for share in scores[..end].as_chunks::<16>().0 {
        sum = s.add(sum, s.load(share));
    }
    (largest, s.sum(sum))
}
