// SPDX-License-Identifier: Apache-2.0

//! The binary interface between launchers and kernels: structs, constants and kernel signatures.
//!
//! The tables below are the only hand-written definition of the interface:
//!
//! ```text
//! abi/linear.rs ──┬─ this crate: #[repr(C)] structs, constants, a struct of arguments per kernel
//!                 └─ build.rs:   $OUT_DIR/abi/linear.cuh, which kernels/cuda/*.cu include
//! ```
//!
//! Three checks fail the build if Rust and CUDA disagree:
//!
//! 1. The header asserts the size of each struct and the offset of each field as Rust lays them
//!    out.
//! 2. `CHECK_SIGNATURE` (kernels/cuda/signature.cuh) compares a kernel's parameter types with the
//!    table. `kernels/tests/kernel_sources.rs` finds kernels without that line.
//! 3. [`kernel_name!`](super::launch) refuses a name that nvcc did not compile into the image.
//!
//! build.rs compiles this module too, so the module uses nothing but the standard library.

mod header;
#[macro_use]
mod table;

pub(crate) mod attention;
pub(crate) mod attention_wgmma;
pub(crate) mod elementwise;
pub(crate) mod experts;
pub(crate) mod float_linear;
pub(crate) mod kv;
pub(crate) mod linear;
pub(crate) mod naive;
pub(crate) mod shortlist;
pub(crate) mod tiles;
pub(crate) mod wgmma;

#[allow(unused_imports, reason = "build.rs writes headers, the crate launches kernels")]
pub(crate) use header::{CudaType, FieldLayout, KernelArguments, SharedHeader};

/// The generated headers.
#[allow(dead_code, reason = "for build.rs and the tests")]
pub(crate) const HEADERS: [SharedHeader; 11] = [
    attention::HEADER,
    attention_wgmma::HEADER,
    elementwise::HEADER,
    experts::HEADER,
    float_linear::HEADER,
    kv::HEADER,
    linear::HEADER,
    naive::HEADER,
    shortlist::HEADER,
    tiles::HEADER,
    wgmma::HEADER,
];
