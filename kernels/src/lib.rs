//! The fast implementations of `ops::Backend`: [`cpu`] on SIMD instructions, `cuda` behind the feature of that name.

pub mod cpu;
#[cfg(feature = "cuda")]
pub mod cuda;

pub use cpu::{Cpu, Isa};

/// What `cuda` can store keys and values as; `cpu` knows every type. Here without the feature too, so that nobody need
/// build kernels to refuse a configuration.
pub const CUDA_KV_TYPES: [ops::KvType; 2] = [ops::KvType::F16, ops::KvType::F32];
