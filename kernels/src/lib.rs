//! The fast implementations of `ops::Backend`: [`cpu`] on SIMD instructions.

pub mod cpu;

pub use cpu::{Cpu, Isa};
