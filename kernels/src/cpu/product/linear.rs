// SPDX-License-Identifier: Apache-2.0

//! Computes linear layers of one input. Divides them into pieces for the threads, and computes a
//! piece window by window.

use super::activation::{Round, Rounded32, Rounded256};
use super::block32::{Lanes32, Q4_0, Q4_1, Q5_0, Q5_1, Q8_0};
use super::block256::{Lanes256, Q2_K, Q3_K, Q4_K, Q5_K, Q6_K};
use super::float;
use super::format::{Accumulate, Format, GROUP, Lanes, RoundedBlock, Unpack, Window};
use super::one_row::{OneRow, lanes_of};
use crate::cpu::Isa;
use crate::cpu::element::{Bf16, F16, F32};
use crate::cpu::pool::ThreadPool;
use crate::cpu::simd::StridedRows;
use crate::cpu::tensor::SharedRows;
use bytemuck::{Pod, Zeroable};
use quant::DType;
use std::ops::Range;
use std::sync::{Mutex, PoisonError};

/// Up to this many activation rows, windows fit L1 and the memory traffic of the weights limits the
/// speed.
const FEW_ROWS: usize = 8;
/// Window bytes for few rows. With the activations, the window fits 32 KiB of L1.
const FEW_WINDOW_BYTES: usize = 8 << 10;
/// Window bytes for many rows. The window leaves half of 1 MiB of L2 to activations and results.
const MANY_WINDOW_BYTES: usize = 256 << 10;
/// Largest piece, in the units of [`LinearLayer::cost`]: about 6 us at memory speed.
const PIECE_COST: usize = 128 << 10;
/// If the total cost of the layers is lower, the calling thread computes them alone. Other threads
/// take 1 to 2 us to notice a job.
const PARALLEL_COST: usize = 96 << 10;
/// If there are fewer values, the calling thread rounds them alone: about 10 us of work.
const PARALLEL_VALUES: usize = 32 << 10;
/// Pieces per thread. With several pieces, a thread that loses its processor delays the others
/// little.
const PIECES_PER_THREAD: usize = 4;

/// One linear layer. Its bytes are a checked number of whole rows.
pub(in crate::cpu) struct LinearLayer<'a> {
    pub(in crate::cpu) dtype: DType,
    pub(in crate::cpu) bytes: &'a [u8],
    pub(in crate::cpu) n_out: usize,
    pub(in crate::cpu) bias: Option<&'a [f32]>,
    pub(in crate::cpu) out: SharedRows<f32>,
}

/// Buffers for quantized activation rows.
#[derive(Default)]
pub(in crate::cpu) struct ActivationBuffers {
    rounded32: Vec<Rounded32>,
    rounded256: Vec<Rounded256>,
    /// Values rounded to F16 and to BF16.
    rounded_f16: Vec<f32>,
    rounded_bf16: Vec<f32>,
    /// The blocks of a single row, 16 blocks interleaved.
    lanes32: Vec<Lanes32>,
    lanes256: Vec<Lanes256>,
    scratch: Vec<Mutex<ProductScratch>>,
}

/// Buffers of one thread.
#[derive(Default)]
struct ProductScratch {
    windows: Vec<CacheLine>,
    /// The last group, padded to 16 rows, or the last blocks of a single row, padded to 16.
    padded: Vec<u8>,
    /// Block terms of a group times a single activation row.
    terms: Vec<f32>,
}

#[derive(Clone, Copy, Pod, Zeroable)]
#[repr(C, align(64))]
struct CacheLine([u8; 64]);

/// Bytes of the buffers of [`multiply`] for so many rows of at most `n_in` values.
pub(in crate::cpu) fn kept_bytes(rows: usize, n_in: usize, threads: usize, dtypes: &[DType]) -> usize {
    let rounded_to = |format| dtypes.iter().any(|dtype| dtype.activation() == Some(format));
    let mut row = 0;
    if rounded_to(DType::Q8_0) || rounded_to(DType::Q8_1) {
        row += n_in / 32 * size_of::<Rounded32>();
    }
    if rounded_to(DType::Q8_K) {
        row += n_in / 256 * size_of::<Rounded256>();
    }
    row += [DType::F16, DType::BF16].into_iter().filter(|&format| rounded_to(format)).count()
        * n_in
        * size_of::<f32>();
    // Windows, and the padded rows that they may be made of.
    rows * row + threads * 2 * MANY_WINDOW_BYTES
}

/// `out[r] = weight x[r] (+ bias)` for each layer. `x` has rows of `n_in` values. All layers have a
/// type with a kernel.
pub(in crate::cpu) fn multiply(
    isa: Isa,
    pool: &mut ThreadPool,
    input: &mut ActivationBuffers,
    x: &[f32],
    n_in: usize,
    layers: &[LinearLayer<'_>],
) {
    if x.is_empty() || n_in == 0 {
        return;
    }
    let rows = x.len() / n_in;
    input.rounded32.clear();
    input.rounded256.clear();
    let needs = |format| layers.iter().any(|layer| layer.dtype.activation() == Some(format));
    if needs(DType::Q8_0) || needs(DType::Q8_1) {
        round(pool, x, n_in, &mut input.rounded32, 32, |x, out| isa.run(Round { x, out }));
    }
    if needs(DType::Q8_K) {
        round(pool, x, n_in, &mut input.rounded256, 256, |x, out| isa.run(Round { x, out }));
    }
    if needs(DType::F16) {
        round(pool, x, n_in, &mut input.rounded_f16, 1, float::round_to_f16);
    }
    if needs(DType::BF16) {
        round(pool, x, n_in, &mut input.rounded_bf16, 1, float::round_to_bf16);
    }
    if rows == 1 {
        lanes_of(&input.rounded32, &mut input.lanes32);
        lanes_of(&input.rounded256, &mut input.lanes256);
    }
    input.scratch.resize_with(pool.threads(), Mutex::default);

    let cost: usize = layers.iter().map(|layer| layer.cost(rows)).sum();
    let threads = if cost < PARALLEL_COST { 1 } else { pool.threads() };
    let mut pieces: Vec<(usize, Range<usize>)> = Vec::new();
    for (index, layer) in layers.iter().enumerate() {
        let groups = layer.n_out.div_ceil(GROUP);
        let largest = PIECE_COST * groups / layer.cost(rows).max(1);
        let balanced = groups.div_ceil(PIECES_PER_THREAD * threads);
        let step = largest.min(balanced).max(1);
        pieces.extend((0..groups).step_by(step).map(|from| (index, from..(from + step).min(groups))));
    }
    let input = &*input;
    let work = |piece: usize, thread: usize| {
        let (index, groups) = &pieces[piece];
        let layer = &layers[*index];
        let mut scratch = input.scratch[thread].lock().unwrap_or_else(PoisonError::into_inner);
        let r32 = (&input.rounded32[..], &input.lanes32[..]);
        let r256 = (&input.rounded256[..], &input.lanes256[..]);
        let job = LinearPiece { isa, layer, groups: groups.clone(), rows, n_in };
        match layer.dtype {
            DType::F32 => float::product::<F32>(isa, layer, groups.clone(), x, n_in),
            DType::F16 => float::product::<F16>(isa, layer, groups.clone(), &input.rounded_f16, n_in),
            DType::BF16 => float::product::<Bf16>(isa, layer, groups.clone(), &input.rounded_bf16, n_in),
            DType::Q8_0 => job.product::<Q8_0>(r32, &mut scratch),
            DType::Q4_0 => job.product::<Q4_0>(r32, &mut scratch),
            DType::Q4_1 => job.product::<Q4_1>(r32, &mut scratch),
            DType::Q5_0 => job.product::<Q5_0>(r32, &mut scratch),
            DType::Q5_1 => job.product::<Q5_1>(r32, &mut scratch),
            DType::Q2_K => job.product::<Q2_K>(r256, &mut scratch),
            DType::Q3_K => job.product::<Q3_K>(r256, &mut scratch),
            DType::Q4_K => job.product::<Q4_K>(r256, &mut scratch),
            DType::Q5_K => job.product::<Q5_K>(r256, &mut scratch),
            DType::Q6_K => job.product::<Q6_K>(r256, &mut scratch),
            // The caller has checked that the type has an activation format. Only the types above
            // have one.
            _ => {}
        }
    };
    if threads == 1 {
        (0..pieces.len()).for_each(|piece| work(piece, 0));
    } else {
        pool.run(pieces.len(), &work);
    }
}

impl LinearLayer<'_> {
    /// The cost of a layer: its weight bytes, scaled by the number of rows. Eight rows take about
    /// twice the time of one.
    fn cost(&self, rows: usize) -> usize {
        self.bytes.len() * (7 + rows) / 8
    }
}

/// Quantizes every row to `out`, on all threads if there are enough values.
fn round<B: Copy + Default + Send>(
    pool: &mut ThreadPool,
    x: &[f32],
    n_in: usize,
    out: &mut Vec<B>,
    block: usize,
    round: impl Fn(&[f32], &mut [B]) + Sync,
) {
    let rows = x.len() / n_in;
    out.resize(x.len() / block, B::default());
    let blocks = n_in / block;
    let shared = SharedRows::new(out, blocks);
    let round_row = |r: usize, _: usize| {
        // SAFETY: `out` is borrowed until the end of this function, and each call takes another
        // row.
        let out = unsafe { shared.part(r, 0, blocks) };
        round(&x[r * n_in..][..n_in], out);
    };
    if x.len() < PARALLEL_VALUES {
        (0..rows).for_each(|r| round_row(r, 0));
    } else {
        pool.run(rows, &round_row);
    }
}

/// Consecutive groups of one layer, computed by one thread.
struct LinearPiece<'a> {
    isa: Isa,
    layer: &'a LinearLayer<'a>,
    groups: Range<usize>,
    rows: usize,
    n_in: usize,
}

impl LinearPiece<'_> {
    fn product<Q: Format>(
        &self,
        (rounded, lanes): (&[RoundedBlock<Q>], &[Lanes<Q>]),
        scratch: &mut ProductScratch,
    ) {
        if self.rows == 1 {
            return self.product_of_one::<Q>(lanes, scratch);
        }
        let blocks = self.n_in / Q::LEN;
        let window_bytes = size_of::<Window<Q>>();
        let few = self.rows <= FEW_ROWS;
        let budget = if few { FEW_WINDOW_BYTES } else { MANY_WINDOW_BYTES };
        // `depth` is the number of blocks per window along the input dimension. `width` is the
        // number of groups whose windows are kept together.
        let depth = (budget / window_bytes).clamp(1, blocks);
        let width = if few { 1 } else { (budget / window_bytes / depth).max(1) };

        let lines = width * depth * window_bytes / size_of::<CacheLine>();
        if scratch.windows.len() < lines {
            scratch.windows.resize(lines, CacheLine::zeroed());
        }
        let windows: &mut [Window<Q>] = bytemuck::cast_slice_mut(&mut scratch.windows[..lines]);

        for first in self.groups.clone().step_by(width) {
            let groups = first..(first + width).min(self.groups.end);
            for from in (0..blocks).step_by(depth) {
                let span = from..(from + depth).min(blocks);
                for (group, windows) in groups.clone().zip(windows.chunks_mut(depth)) {
                    self.unpack::<Q>(group, &span, &mut windows[..span.len()], &mut scratch.padded);
                }
                let mut row = 0;
                while row < self.rows {
                    let left = self.rows - row;
                    for (group, windows) in groups.clone().zip(windows.chunks(depth)) {
                        let windows = &windows[..span.len()];
                        match left {
                            8.. => self.accumulate::<Q, 8>(group, &span, windows, rounded, row),
                            4.. => self.accumulate::<Q, 4>(group, &span, windows, rounded, row),
                            2.. => self.accumulate::<Q, 2>(group, &span, windows, rounded, row),
                            _ => self.accumulate::<Q, 1>(group, &span, windows, rounded, row),
                        }
                    }
                    row += match left {
                        8.. => 8,
                        4.. => 4,
                        2.. => 2,
                        _ => 1,
                    };
                }
            }
        }
    }

    fn product_of_one<Q: Format>(&self, lanes: &[Lanes<Q>], scratch: &mut ProductScratch) {
        let row_bytes = self.n_in / Q::LEN * Q::BYTES;
        let outputs = self.groups.start * GROUP..(self.groups.end * GROUP).min(self.layer.n_out);
        self.isa.run(OneRow::<Q> {
            layer: &self.layer.bytes[outputs.start * row_bytes..],
            bytes: &self.layer.bytes[outputs.start * row_bytes..outputs.end * row_bytes],
            blocks: self.n_in / Q::LEN,
            lanes,
            bias: self.layer.bias.map(|bias| &bias[outputs.clone()]),
            // SAFETY: the layer's tensor is borrowed while `multiply` runs, and each group belongs
            // to one piece.
            out: unsafe { self.layer.out.part(0, outputs.start, outputs.len()) },
            terms: &mut scratch.terms,
            padded: &mut scratch.padded,
        });
    }

    fn unpack<Q: Format>(
        &self,
        group: usize,
        span: &Range<usize>,
        windows: &mut [Window<Q>],
        padded: &mut Vec<u8>,
    ) {
        let row_bytes = self.n_in / Q::LEN * Q::BYTES;
        let group_bytes = GROUP * row_bytes;
        let bytes = &self.layer.bytes[group * group_bytes..];
        let at = span.start * Q::BYTES;
        if bytes.len() >= group_bytes {
            let rows = StridedRows { bytes: &bytes[..group_bytes], stride: row_bytes };
            // Prefetches the bytes of the next group in memory order.
            let ahead = bytes.get(group_bytes + GROUP * at..).unwrap_or_default();
            self.isa.run(Unpack::<Q> { rows, at, windows, ahead });
        } else {
            let span_bytes = span.len() * Q::BYTES;
            padded.clear();
            padded.resize(GROUP * span_bytes, 0);
            for (row, padded) in bytes.chunks_exact(row_bytes).zip(padded.chunks_exact_mut(span_bytes)) {
                padded.copy_from_slice(&row[at..][..span_bytes]);
            }
            let rows = StridedRows { bytes: padded, stride: span_bytes };
            self.isa.run(Unpack::<Q> { rows, at: 0, windows, ahead: &[] });
        }
    }

    fn accumulate<Q: Format, const C: usize>(
        &self,
        group: usize,
        span: &Range<usize>,
        windows: &[Window<Q>],
        rounded: &[RoundedBlock<Q>],
        row: usize,
    ) {
        let blocks = self.n_in / Q::LEN;
        let from = group * GROUP;
        let len = GROUP.min(self.layer.n_out - from);
        let bias = self.layer.bias.filter(|_| span.end == blocks).map(|bias| &bias[from..][..len]);
        self.isa.run(Accumulate::<Q::BlockFamily, C> {
            windows,
            rounded: std::array::from_fn(|c| &rounded[(row + c) * blocks..][..blocks][span.clone()]),
            // SAFETY: the layer's tensor is borrowed while `multiply` runs, each group belongs to
            // one piece, and the rows are different ones.
            sums: std::array::from_fn(|c| unsafe { self.layer.out.part(row + c, from, len) }),
            first: span.start == 0,
            bias,
            quants: Q::QUANTS,
        });
    }
}
