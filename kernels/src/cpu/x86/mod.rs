// SPDX-License-Identifier: Apache-2.0

//! Vectors for the x86-64 instruction sets AVX2 and AVX-512, with the detection of each.

mod avx2;
mod avx512;

pub(super) use avx2::Avx2;
pub(super) use avx512::Avx512;
