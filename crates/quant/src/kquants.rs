// SPDX-License-Identifier: Apache-2.0

//! K-quants, Q2_K to Q6_K: super-blocks of 256 values. Sub-blocks have integer scales, which one or
//! two f16 scales of the super-block multiply.
//!
//! Each file has the block struct of one type, and functions that unpack its quants and its
//! sub-block scales.

mod fit;
mod packed_scales;
mod q2_k;
mod q3_k;
mod q4_k;
mod q5_k;
mod q6_k;

pub use q2_k::BlockQ2_K;
pub use q3_k::BlockQ3_K;
pub use q4_k::BlockQ4_K;
pub use q5_k::BlockQ5_K;
pub use q6_k::BlockQ6_K;

/// Values per super-block of every K-quant.
const LEN: usize = 256;
