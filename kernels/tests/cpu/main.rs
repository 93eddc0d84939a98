// SPDX-License-Identifier: Apache-2.0

//! Tests of the CPU backend in one executable, and the check of CUDA sources that needs no GPU.
//!
//! `kv_memory.rs` stays separate, because it measures the memory of its process. `gpu/` has tests
//! for a machine with a GPU.

#![expect(clippy::unwrap_used, reason = "a panic is how a test fails")]

mod kernel_sources;
mod linear;
mod models;
mod ops;
mod random;
mod rows;
#[path = "../shared/split_mix.rs"]
mod split_mix;
#[path = "../shared/window_case.rs"]
mod window_case;
mod windows;
