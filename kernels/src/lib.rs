// SPDX-License-Identifier: Apache-2.0

//! The fast implementations of `ops::Backend`: [`cpu`] on SIMD instructions, `cuda` behind the
//! feature of that name.

pub mod cpu;
#[cfg(feature = "cuda")]
pub mod cuda;

pub use cpu::{Cpu, Isa};
