// SPDX-License-Identifier: Apache-2.0

//! The x86-64 instruction sets, and which of them the processor has.

mod avx2;
mod avx512;

pub(super) use avx2::Avx2;
pub(super) use avx512::Avx512;
