//! Products of weight rows and activation rows.
//!
//! # The order of additions
//! Quantised weights: int32 inside a block is exact; `y = ((0 + t_0) + t_1) + ..` over the blocks of a row, where `t_b`
//! is the block's f32 term exactly as `quant::dot` forms it. So results are the same bits as those of `quant::dot`,
//! whatever the number of rows, threads or instruction set.
//! Float weights: lane `k % 16` sums the products of columns `k` with fused multiply-adds, `k` ascending, and lanes 8,
//! 4, 2 and 1 apart are added at the end.
//!
//! # How it is computed
//! Sixteen weight rows make a group, one lane each. A block of all 16 rows is transposed to "four bytes of row 0, four
//! of row 1, ...", so that one multiply-add of bytes serves 16 rows and needs no sums across lanes. With few activation
//! rows a window of such blocks stays in L1; with many it is some groups in L2, unpacked once and multiplied with every
//! activation row (`linear`). A single activation row needs no windows (`one_row`). Windows hold the exact quants.
//!
//! | Zen 4, AVX-512, one thread | predicted | measured |
//! |---|---|---|
//! | one row, weights in memory (plain reads: 17 to 26 GB/s, with huge pages 31) | memory | Q8_0 23, Q4_K 24, Q6_K 19, F16 20 GB/s |
//! | one row, weights in L2: the unpacking alone | Q8_0 50, Q4_K 46 GB/s | Q8_0 34, Q4_K 27, Q6_K 24 GB/s |
//! | 256 rows (`vpdpbusd` peak: 469 GOPS) | 8 of 10 issue slots: 375 GOPS | Q8_0 316, Q4_K 335, Q6_K 290 GOPS |
//!
//! Measured with other jobs on the machine; `cargo bench -p kernels --bench linear` repeats it.

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

/// How far ahead a single row asks for lines of weights: what memory delivers in some 300 ns. The hardware's own
/// prefetchers do not follow many strides at once (measured on Zen 4, Q4_K: 8 GB/s without, 20 with).
const AHEAD_BYTES: usize = 8192;

/// Asks for the lines of `bytes[at..at + len]`, as far as there are such.
#[inline(always)]
fn prefetch<S: Simd>(s: S, bytes: &[u8], at: usize, len: usize) {
    let ahead = bytes.get(at..).unwrap_or_default();
    for line in ahead[..len.min(ahead.len())].chunks(CACHE_LINE) {
        s.prefetch(line);
    }
}
