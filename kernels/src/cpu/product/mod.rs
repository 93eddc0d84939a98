// SPDX-License-Identifier: Apache-2.0

//! Matrix products of weights and activations.
//!
//! # Order of additions
//! 1. Quantized weights: int32 sums inside a block are exact. `y = ((0 + t_0) + t_1) + ..` over the
//!    blocks of a row. `t_b` is the block's f32 term, with the bits that `quant::dot` computes.
//!    Therefore results have the bits of `quant::dot`, whatever the number of rows, threads or
//!    instruction set.
//! 2. Float weights: activations are rounded to the weights' type. Lane `k % 16` sums the products
//!    of columns `k` with fused multiply-adds, `k` ascending. At the end, lanes 8, 4, 2 and 1 apart
//!    are added.
//!
//! # How it is computed
//! Sixteen weight rows form a group, one lane each. A block of all 16 rows is transposed, so that
//! one byte multiply-add serves 16 rows and needs no sum across lanes:
//!
//! ```text
//! row 0:  a0 a1 a2 a3 | a4 ..                    word 0: a0 a1 a2 a3  b0 b1 b2 b3 ..
//! row 1:  b0 b1 b2 b3 | b4 ..     transposed     word 1: a4 a5 a6 a7  b4 b5 b6 b7 ..
//!                                                        lane 0       lane 1  (lane r = row r)
//! ```
//!
//! The kernels keep unpacked blocks in a window, which holds the exact quants. With few activation
//! rows the window fits L1. With many it fits L2, and each unpacked block is multiplied with every
//! activation row (`linear`). A single activation row needs no window (`one_row`).
//!
//! | Zen 4, AVX-512, one thread | predicted | measured |
//! |---|---|---|
//! | one row, weights in memory (plain reads: 17 to 26 GB/s, with huge pages 31) | memory | Q8_0 23, Q4_K 24, Q6_K 19, F16 20 GB/s |
//! | one row, weights in L2: the unpacking alone | Q8_0 50, Q4_K 46 GB/s | Q8_0 34, Q4_K 27, Q6_K 24 GB/s |
//! | 256 rows (`vpdpbusd` peak: 469 GOPS) | 8 of 10 issue slots: 375 GOPS | Q8_0 316, Q4_K 335, Q6_K 290 GOPS |
//!
//! Other jobs ran on the machine during the measurement. `cargo bench -p kernels --bench linear`
//! repeats it.

mod activation;
mod block256;
mod block32;
mod float;
mod format;
mod linear;
mod one_row;

pub(super) use activation::{Round, Rounded32};
pub(super) use linear::{ActivationBuffers, LinearLayer, kept_bytes, multiply};

use super::simd::{CACHE_LINE, Simd};

/// Prefetch distance for a single row: the bytes that memory delivers in about 300 ns. The
/// prefetchers of the processor do not follow many strides at once (measured on Zen 4, Q4_K: 8 GB/s
/// without prefetches, 20 GB/s with them).
const AHEAD_BYTES: usize = 8192;

/// Prefetches the cache lines of `bytes[at..at + len]` that exist.
#[inline(always)]
fn prefetch<S: Simd>(s: S, bytes: &[u8], at: usize, len: usize) {
    let ahead = bytes.get(at..).unwrap_or_default();
    for line in ahead[..len.min(ahead.len())].chunks(CACHE_LINE) {
        s.prefetch(line);
    }
}
