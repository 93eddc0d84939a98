// SPDX-License-Identifier: Apache-2.0

//! The CPU backend: [`Cpu`] implements `ops::Backend` with SIMD and threads.
//!
//! 1. The result of a row depends on the row and its sequence only, not on batch neighbours,
//!    threads, prefill chunks or the instruction set (invariant I5). The heads of `product` and
//!    `attention` define the order of additions. All other ops work lane by lane or sum in the 16
//!    lanes of `simd`.
//! 2. Kernels read weights in place. They copy only unpacked blocks, into buffers that fit the
//!    cache.

#![expect(clippy::needless_range_loop, reason = "one index counts the lanes or rows of several arrays")]

mod attention;
mod backend;
mod element;
mod isa;
mod kv;
mod math;
mod pool;
mod portable;
mod product;
mod rope;
mod rows;
mod scratch;
mod simd;
mod step;
mod tensor;
mod weight;
#[cfg(target_arch = "x86_64")]
mod x86;

pub use backend::Cpu;
pub use isa::Isa;
pub use kv::CpuKv;
pub use rope::CpuRope;
pub use scratch::{CpuWorkerShape, predict_host_bytes};
pub use tensor::CpuTensor;
