//! `Reference`: plain loops, wide accumulation, no SIMD, no threads: the ground truth that kernels are compared with.

/// The slow obvious backend.
#[derive(Debug, Default)]
pub struct Reference {}
