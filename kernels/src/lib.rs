//! The fast implementations of `ops::Backend`: [`cpu`] on SIMD instructions, `cuda` behind the feature of that name.

pub mod cpu;
#[cfg(feature = "cuda")]
pub mod cuda;

use ops::{KvType, OpError};

pub use cpu::{Cpu, Isa};

/// That `cuda` can store keys and values as these types; `cpu` can store all. Here without the feature too: a configuration
/// is refused before any kernel is needed.
pub fn cuda_stores(kinds: impl IntoIterator<Item = KvType>) -> Result<(), OpError> {
    match kinds.into_iter().find(|kind| !matches!(kind, KvType::F16 | KvType::F32)) {
        Some(kind) => Err(OpError::KvType { kind, backend: "CUDA", instead: "f16, or --device host" }),
        None => Ok(()),
    }
}
