//! What this process holds for others: the descriptors of each generation and of each lease.

use std::os::fd::{AsFd, OwnedFd};
use std::sync::Arc;

use memory::import::{ImportError, take_manifest, verify_host};
use memory::manifest::Manifest;
use memory::memfd::{MemfdError, SealedMemfd};

/// All descriptors of one generation, verified against their manifest.
#[derive(Debug)]
pub(crate) struct GenerationFds {
    manifest: SealedMemfd,
    allocations: Vec<SealedMemfd>,
}

impl GenerationFds {
    /// Takes what a loader handed over or a vault kept: the manifest first, then every allocation in its order.
    pub(crate) fn verify(fds: Vec<OwnedFd>) -> Result<(Manifest, Self), ImportError> {
        let kept = fds.first().ok_or(ImportError::NoManifest)?.try_clone();
        let kept = kept.map_err(|source| ImportError::Map(MemfdError::OutOfFds { source }))?;
        let (manifest, allocations) = take_manifest(fds)?;
        let allocations = verify_host(&manifest, allocations)?;
        let kept = SealedMemfd::verify(kept).map_err(|error| ImportError::Manifest(error.into()))?;
        Ok((manifest, Self { manifest: kept, allocations }))
    }

    /// In the order of a hand-off.
    pub(crate) fn all(&self) -> impl Iterator<Item = &SealedMemfd> {
        std::iter::once(&self.manifest).chain(&self.allocations)
    }

    pub(crate) fn manifest(&self) -> &SealedMemfd {
        &self.manifest
    }

    pub(crate) fn allocations(&self) -> &[SealedMemfd] {
        &self.allocations
    }
}

/// What the vault keeps of a lease.
#[derive(Debug, Clone)]
pub(crate) struct LeaseFds {
    pub(crate) record: Arc<SealedMemfd>,
    pub(crate) pidfd: Arc<OwnedFd>,
}

impl LeaseFds {
    pub(crate) fn record(&self) -> std::os::fd::BorrowedFd<'_> {
        self.record.as_fd()
    }
}
