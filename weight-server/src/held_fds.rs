//! What this process holds for others: the descriptors of each generation and of each lease.
//!
//! Those of host memory are checked here: sealed memfds of the size and inode that the manifest says. What a descriptor of
//! device memory is only the driver can tell, which this process never loads: a verifier child asks it.

use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::Arc;

use handoff::manifest::{SplitHandoffError, split_handoff};
use memory::host_import::{ImportHostError, verify_host};
use memory::manifest::{DeviceKind, Manifest};
use memory::memfd::{MemfdError, SealedMemfd};

/// Why descriptors are not the generation that their manifest describes.
#[derive(Debug, thiserror::Error)]
pub(crate) enum GenerationFdsError {
    #[error(transparent)]
    Split(#[from] SplitHandoffError),
    #[error(transparent)]
    Host(#[from] ImportHostError),
    #[error(transparent)]
    Duplicate(MemfdError),
}

/// All descriptors of one generation, verified against their manifest.
#[derive(Debug)]
pub(crate) struct GenerationFds {
    manifest: SealedMemfd,
    allocations: Vec<OwnedFd>,
}

impl GenerationFds {
    /// Takes what a loader handed over or a FD store kept: the manifest first, then every allocation in its order.
    pub(crate) fn verify(fds: Vec<OwnedFd>) -> Result<(Manifest, Self), GenerationFdsError> {
        let kept = fds.first().ok_or(SplitHandoffError::NoManifest)?.try_clone();
        let kept = kept.map_err(|source| GenerationFdsError::Duplicate(MemfdError::OutOfFds { source }))?;
        let (manifest, allocations) = split_handoff(fds)?;
        let on_host = manifest.devices.iter().all(|device| device.kind == DeviceKind::Host);
        let allocations = if on_host {
            verify_host(&manifest, allocations)?.into_iter().map(OwnedFd::from).collect()
        } else {
            allocations
        };
        let kept = SealedMemfd::verify(kept).map_err(GenerationFdsError::Duplicate)?;
        Ok((manifest, Self { manifest: kept, allocations }))
    }

    /// In the order of a hand-off.
    pub(crate) fn all(&self) -> impl Iterator<Item = BorrowedFd<'_>> {
        std::iter::once(self.manifest.as_fd()).chain(self.allocations.iter().map(AsFd::as_fd))
    }

    pub(crate) fn manifest(&self) -> &SealedMemfd {
        &self.manifest
    }

    pub(crate) fn allocations(&self) -> &[OwnedFd] {
        &self.allocations
    }
}

/// What the FD store keeps of a lease.
#[derive(Debug, Clone)]
pub(crate) struct LeaseFds {
    pub(crate) record: Arc<SealedMemfd>,
    pub(crate) pidfd: Arc<OwnedFd>,
}

impl LeaseFds {
    pub(crate) fn record(&self) -> BorrowedFd<'_> {
        self.record.as_fd()
    }
}
