// SPDX-License-Identifier: Apache-2.0

//! [`Isa`]: detection of the instruction set. All instruction sets give the same bits; see
//! `simd.rs`.

use super::portable::Portable;
use super::simd::{Simd, SimdKernel};
#[cfg(target_arch = "x86_64")]
use super::x86::{Avx2, Avx512};
use std::fmt;

/// An instruction set that this processor has.
#[derive(Clone, Copy, Debug)]
pub struct Isa(IsaKind);

#[derive(Clone, Copy, Debug)]
enum IsaKind {
    Portable(Portable),
    #[cfg(target_arch = "x86_64")]
    Avx2(Avx2),
    #[cfg(target_arch = "x86_64")]
    Avx512(Avx512),
}

impl Isa {
    /// All instruction sets of this processor, the slowest first.
    pub fn available() -> Vec<Self> {
        [IsaKind::Portable(Portable)].into_iter().chain(detected()).map(Self).collect()
    }

    /// The fastest instruction set of this processor.
    pub fn best() -> Self {
        Self::available().pop().unwrap_or(Self(IsaKind::Portable(Portable)))
    }

    /// Name in logs and in the fingerprint of a worker.
    pub fn name(self) -> &'static str {
        match self.0 {
            IsaKind::Portable(_) => "portable",
            #[cfg(target_arch = "x86_64")]
            IsaKind::Avx2(_) => "avx2",
            #[cfg(target_arch = "x86_64")]
            IsaKind::Avx512(_) => "avx512",
        }
    }

    #[inline]
    pub(super) fn run<K: SimdKernel>(self, kernel: K) -> K::Output {
        match self.0 {
            IsaKind::Portable(s) => s.vectorize(kernel),
            #[cfg(target_arch = "x86_64")]
            IsaKind::Avx2(s) => s.vectorize(kernel),
            #[cfg(target_arch = "x86_64")]
            IsaKind::Avx512(s) => s.vectorize(kernel),
        }
    }
}

#[cfg(target_arch = "x86_64")]
fn detected() -> impl Iterator<Item = IsaKind> {
    [Avx2::detect().map(IsaKind::Avx2), Avx512::detect().map(IsaKind::Avx512)].into_iter().flatten()
}

#[cfg(not(target_arch = "x86_64"))]
fn detected() -> impl Iterator<Item = IsaKind> {
    std::iter::empty()
}

impl fmt::Display for Isa {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}
