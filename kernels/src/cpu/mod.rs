//! The fast host backend.
//!
//! Results of a row depend on nothing but the row (and its sequence): not on the number of rows, threads, chunks, or the
//! instruction set. `product` and `attention` define their orders of additions; everything else works lane by lane, or
//! sums in the lanes of `simd`. Weights are read where they are and never copied, except into windows of a step.

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
