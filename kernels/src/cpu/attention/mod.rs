// SPDX-License-Identifier: Apache-2.0

//! Causal attention over a paged KV cache (flash decoding).
//!
//! # Order of operations
//! Positions are divided into splits at absolute multiples of [`SPLIT`]. For each query and split:
//!
//! 1. A score is the sum over dimensions, ascending, by fused multiply-adds, times the scale. For
//!    q8_0, one fused multiply-add per 32 dimensions multiplies their sum with their factor and
//!    adds it.
//! 2. A share (softmax numerator) is `exp(score - largest)`. Shares are summed in 16 lanes by
//!    position.
//! 3. Values times shares are added by fused multiply-adds, positions ascending. For q8_0, the
//!    share is first multiplied with the value's factor and rounded.
//!
//! Positions before an attention window take no part. Splits are merged in ascending order. The
//! result of a query depends on its keys and values only. It does not depend on the tile, the block
//! size, the prefill chunk or the thread.
//!
//! # How it is computed
//! ```text
//! tile:    up to 8 queries = neighbouring rows x query heads of one KV head
//! split:   | positions 0..256 | 256..512 | ..     per split and query: [largest score, sum of shares, weighted values ..]
//! merge:   rescales two splits to the larger score and adds them; at the end, values / sum of shares
//! ```
//!
//! A tile converts keys and values once for up to eight queries. Rows of sequences with the same
//! first blocks also share a tile. Their tile computes the splits of shared blocks together, and
//! the other splits per sequence.
//!
//! A piece of work for a thread is a tile and a KV head. If there are too few pieces (one long
//! sequence, many threads), each split is a piece too.
//!
//! Limiting resource on Zen 4, one thread, heads of 128:
//!
//! 1. One row: memory (16k positions: 15 GB/s, 27 GB/s in L3).
//! 2. Many rows: fused multiply-adds (80 of 117 GFLOPS).

mod merge;
mod split;

use super::kv::{CpuKv, LayerView};
use super::pool::ThreadPool;
use super::scratch::CpuWorkerShape;
use super::step::CpuStep;
use super::tensor::SharedRows;
use super::{Isa, element};
use merge::{MergeSplits, NormalizeHead};
use ops::{AttentionSpan, AttentionSpec, KvType, OpError};
use split::{Query, Split, SplitScratch};
use std::ops::Range;
use std::sync::{Mutex, PoisonError};

/// Positions per split. The scores of a tile (8 KiB) and the keys and values of a split fit in L2
/// together.
pub(super) const SPLIT: usize = 256;
/// Queries per tile. Eight accumulators hide the latency of fused multiply-adds on two pipes.
const TILE: usize = 8;
/// With fewer pieces per thread than this, each split becomes a piece.
const PIECES_PER_THREAD: usize = 2;

/// Buffers that calls reuse.
#[derive(Default)]
pub(super) struct AttentionBuffers {
    threads: Vec<Mutex<AttentionScratch>>,
    /// The partial results of splits that are separate pieces.
    partials: Vec<f32>,
}

#[derive(Default)]
struct AttentionScratch {
    split: SplitScratch,
    partial: Vec<f32>,
    total: Vec<f32>,
}

/// A split of a piece, computed by itself. Its partial results are `start..start + len` of
/// [`AttentionBuffers::partials`].
#[derive(Clone, Copy)]
struct SplitJob {
    piece: usize,
    split: usize,
    start: usize,
    len: usize,
}

/// Bytes of the buffers of [`attend`] for the largest step.
pub(super) fn kept_bytes(shape: &CpuWorkerShape) -> usize {
    let CpuWorkerShape { threads, heads, kv_heads, head_dim, context_tokens, .. } = *shape;
    let queries = TILE.max(heads / kv_heads.max(1));
    let result = queries * (2 + head_dim) * size_of::<f32>();
    let of_thread = queries * SPLIT * size_of::<f32>() + 2 * result;
    // A piece has at least one query head of one row.
    let split_pieces = match PIECES_PER_THREAD * threads {
        most if threads > 1 && most > kv_heads => most - 1,
        _ => 0,
    };
    threads * of_thread + split_pieces * context_tokens.div_ceil(SPLIT) * result
}

/// The operands of one call of the op.
pub(super) struct AttentionCall<'a> {
    pub(super) isa: Isa,
    pub(super) step: &'a CpuStep,
    pub(super) view: LayerView<'a>,
    pub(super) spec: &'a AttentionSpec,
    /// Rows of all heads.
    pub(super) queries: &'a [f32],
    pub(super) out: SharedRows<f32>,
}

/// Checks that the rows' block tables are long enough and that their blocks are written.
pub(super) fn check(
    op: &'static str,
    step: &CpuStep,
    kv: &CpuKv,
    layer: usize,
    view: &LayerView<'_>,
) -> Result<(), OpError> {
    let tokens = view.block_tokens;
    let is_same = |a: &u32, b: &u32| step.sequences[*a as usize] == step.sequences[*b as usize];
    for rows in step.order.chunk_by(is_same) {
        let (table, index) = (step.table(rows[0] as usize, view.group), last_position(step, rows) / tokens);
        let first = first_position(step, rows, view.shape.span) / tokens;
        let Some(read) = table.get(first..=index) else {
            let len = table.len();
            return Err(OpError::Index { op, what: "entry of the block table", index, len });
        };
        kv.check_written(op, layer, read)?;
    }
    Ok(())
}

/// Computes the op: divides it into pieces for the threads, and merges splits.
pub(super) fn attend(pool: &mut ThreadPool, buffers: &mut AttentionBuffers, call: &AttentionCall<'_>) {
    let spec = call.spec;
    let group = spec.heads / spec.kv_heads;
    let tiles: Vec<&[u32]> = call.tiles((TILE / group).max(1)).collect();
    let pieces: Vec<(&[u32], usize)> =
        (0..spec.kv_heads).flat_map(|head| tiles.iter().map(move |&tile| (tile, head))).collect();
    buffers.threads.resize_with(pool.threads(), Mutex::default);
    let AttentionBuffers { threads, partials } = buffers;
    let threads = &threads[..];

    let splits_of = |rows: &[u32]| call.splits_of(rows);
    let most_splits = tiles.iter().map(|rows| splits_of(rows).len()).max().unwrap_or(0);
    let is_short_of_pieces = pieces.len() < PIECES_PER_THREAD * pool.threads() && pool.threads() > 1;
    if most_splits <= 1 || !is_short_of_pieces {
        pool.run(pieces.len(), &|piece, thread| {
            let (rows, kv_head) = pieces[piece];
            let mut scratch = threads[thread].lock().unwrap_or_else(PoisonError::into_inner);
            let AttentionScratch { split: split_scratch, partial, total } = &mut *scratch;
            let queries = call.queries_of(rows, kv_head);
            let width = call.partial_width();
            partial.resize(queries.len() * width, 0.0);
            total.resize(queries.len() * width, 0.0);
            let splits = splits_of(rows);
            let first = splits.start;
            for split in splits {
                let into = if split == first { &mut *total } else { &mut *partial };
                call.split(&queries, rows, kv_head, split, into, split_scratch);
                if split > first {
                    call.isa.run(MergeSplits { total, partial, width });
                }
            }
            call.finish(rows, kv_head, total);
        });
        return;
    }

    // Each split of each piece has its own slice of `partials`. After all are computed, they are
    // merged.
    let width = call.partial_width();
    let mut split_jobs = Vec::new();
    let mut len = 0;
    for (index, (rows, _)) in pieces.iter().enumerate() {
        let size = rows.len() * group * width;
        for split in splits_of(rows) {
            split_jobs.push(SplitJob { piece: index, split, start: len, len: size });
            len += size;
        }
    }
    partials.resize(len.max(partials.len()), 0.0);
    let cols = partials.len();
    let shared = SharedRows::new(partials, cols);
    pool.run(split_jobs.len(), &|job, thread| {
        let SplitJob { piece, split, start, len } = split_jobs[job];
        let (rows, kv_head) = pieces[piece];
        let mut scratch = threads[thread].lock().unwrap_or_else(PoisonError::into_inner);
        // SAFETY: `partials` is borrowed until this function ends, and the slices do not overlap.
        let partial = unsafe { shared.part(0, start, len) };
        let queries = call.queries_of(rows, kv_head);
        call.split(&queries, rows, kv_head, split, partial, &mut scratch.split);
    });
    for same_piece in split_jobs.chunk_by(|a, b| a.piece == b.piece) {
        let SplitJob { piece, start, len, .. } = same_piece[0];
        let (rows, kv_head) = pieces[piece];
        let (total, rest) = partials[start..].split_at_mut(len);
        for partial in rest.chunks_exact(len).take(same_piece.len() - 1) {
            call.isa.run(MergeSplits { total, partial, width });
        }
        call.finish(rows, kv_head, total);
    }
}

/// The first position that any of the rows attends to.
fn first_position(step: &CpuStep, rows: &[u32], span: AttentionSpan) -> usize {
    rows.iter().map(|&row| span.first_position(step.positions[row as usize] as usize)).min().unwrap_or(0)
}

fn last_position(step: &CpuStep, rows: &[u32]) -> usize {
    rows.iter().map(|&row| step.positions[row as usize]).max().unwrap_or(0) as usize
}

impl AttentionCall<'_> {
    /// Divides the rows into tiles of at most `rows_max` rows. In the first split of a tile's first
    /// row, its rows attend to the same keys.
    fn tiles(&self, rows_max: usize) -> impl Iterator<Item = &[u32]> {
        let first_split = |row: u32| self.splits_of(&[row]).start;
        let runs = self
            .step
            .order
            .chunk_by(move |&a, &b| self.sees_the_same(first_split(a), a as usize, b as usize));
        runs.flat_map(move |run| run.chunks(rows_max))
    }

    /// The splits with positions that any of the rows attends to.
    fn splits_of(&self, rows: &[u32]) -> Range<usize> {
        let first = first_position(self.step, rows, self.view.shape.span);
        first / SPLIT..last_position(self.step, rows) / SPLIT + 1
    }

    /// Whether two rows read the same blocks in a split: they belong to one sequence, or both
    /// attend to the whole split and share all its blocks.
    fn sees_the_same(&self, split: usize, a: usize, b: usize) -> bool {
        let (step, tokens) = (self.step, self.view.block_tokens);
        let end = (split + 1) * SPLIT;
        let blocks = |row: usize| {
            let is_seen = step.positions[row] as usize + 1 >= end;
            step.table(row, self.view.group)
                .get(split * SPLIT / tokens..end.div_ceil(tokens))
                .filter(|_| is_seen)
        };
        step.sequences[a] == step.sequences[b] || blocks(a).is_some_and(|of_a| blocks(b) == Some(of_a))
    }

    /// Values per partial result: largest score, sum of shares, and a head of weighted values.
    fn partial_width(&self) -> usize {
        2 + self.spec.head_dim
    }

    /// Query heads of `kv_head` in each row.
    fn queries_of(&self, rows: &[u32], kv_head: usize) -> Vec<Query<'_>> {
        let (dim, group) = (self.spec.head_dim, self.spec.heads / self.spec.kv_heads);
        let heads = kv_head * group..(kv_head + 1) * group;
        rows.iter()
            .map(|&row| row as usize)
            .flat_map(|r| heads.clone().map(move |head| (r, head)))
            .map(|(r, head)| Query {
                values: &self.queries[(r * self.spec.heads + head) * dim..][..dim],
                keys: self.view.shape.span.first_position(self.step.positions[r] as usize)
                    ..self.step.positions[r] as usize + 1,
            })
            .collect()
    }

    /// Computes one split for the queries of a tile, together for rows that read the same blocks.
    fn split(
        &self,
        mut queries: &[Query<'_>],
        rows: &[u32],
        kv_head: usize,
        split: usize,
        mut partials: &mut [f32],
        scratch: &mut SplitScratch,
    ) {
        let (group, width) = (self.spec.heads / self.spec.kv_heads, self.partial_width());
        for rows in rows.chunk_by(|&a, &b| self.sees_the_same(split, a as usize, b as usize)) {
            let (now, later) = queries.split_at(rows.len() * group);
            let (now_partials, later_partials) = partials.split_at_mut(now.len() * width);
            self.split_of_blocks(
                now,
                self.step.table(rows[0] as usize, self.view.group),
                kv_head,
                split,
                now_partials,
                scratch,
            );
            (queries, partials) = (later, later_partials);
        }
    }

    fn split_of_blocks(
        &self,
        queries: &[Query<'_>],
        table: &[u32],
        kv_head: usize,
        split: usize,
        partials: &mut [f32],
        scratch: &mut SplitScratch,
    ) {
        let (view, scale) = (self.view, self.spec.scale);
        let args =
            split::Args { view, table, kv_head, queries, from: split * SPLIT, scale, partials, scratch };
        match self.view.shape.kind {
            KvType::F32 => self.isa.run(Split::<element::F32>::new(args)),
            KvType::F16 => self.isa.run(Split::<element::F16>::new(args)),
            KvType::Bf16 => self.isa.run(Split::<element::Bf16>::new(args)),
            KvType::Q8_0 => self.isa.run(Split::<element::Q8_0Element>::new(args)),
        }
    }

    fn finish(&self, rows: &[u32], kv_head: usize, totals: &[f32]) {
        let (dim, group) = (self.spec.head_dim, self.spec.heads / self.spec.kv_heads);
        let totals = totals.chunks_exact(self.partial_width());
        let heads = rows.iter().flat_map(|&r| (0..group).map(move |i| (r as usize, kv_head * group + i)));
        for ((r, head), total) in heads.zip(totals) {
            // SAFETY: the tensor is borrowed while `attend` runs, and a head of a row belongs to
            // one piece.
            let out = unsafe { self.out.part(r, head * dim, dim) };
            self.isa.run(NormalizeHead { total, out });
        }
    }
}
