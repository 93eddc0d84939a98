// SPDX-License-Identifier: Apache-2.0

//! The descriptors that this process holds for each generation and each lease.
//!
//! Descriptors of host memory are checked here: they must be sealed memfds of the size and inode in
//! the manifest. Only the GPU driver can check descriptors of device memory. This process never
//! loads it, so a verifier child does.

use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::Arc;

use handoff::manifest::{SplitHandoffError, split_handoff};
use memory::host_import::{ImportHostError, verify_host};
use memory::manifest::{DeviceKind, Manifest};
use memory::memfd::{MemfdError, SealedMemfd};

/// Why descriptors do not form the generation that their manifest describes.
#[derive(Debug, thiserror::Error)]
pub(crate) enum GenerationFdsError {
    #[error(transparent)]
    Split(#[from] SplitHandoffError),
    #[error(transparent)]
    Host(#[from] ImportHostError),
    #[error(transparent)]
    Duplicate(MemfdError),
}

/// All descriptors of one generation, checked against their manifest.
#[derive(Debug)]
pub(crate) struct GenerationFds {
    manifest: SealedMemfd,
    allocations: Vec<OwnedFd>,
}

impl GenerationFds {
    /// Takes descriptors from a loader or from the FD store: the manifest first, then every
    /// allocation in the manifest's order.
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

/// The descriptors that the FD store keeps of a lease.
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
