//! Q2_K to Q6_K: 256 values whose sub-blocks have integer scales under one or two f16 scales.
//!
//! Each file has the block of one type, its quants as plain integers, its sub-scales, and the arithmetic on them.

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

/// Values per block of every K type.
const LEN: usize = 256;
