//! Generations: what is loaded, being loaded, or on its way out.
//!
//! ```text
//!            loader starts      plan reserved      handed over        in the FD store
//!   Queued --------------> Starting -------> Loading -------> Storing -------------> Ready
//!                                                                                     | unloaded or replaced
//!                                                              last lease ended       v
//!                                                       gone <------------------- Retiring
//! ```
//! Plain values; `state` moves them.

use std::path::PathBuf;
use std::time::Duration;

use memory::manifest::{Digest, FileIdentity, HOST_DEVICE, Manifest};

use crate::events::{CallId, Waiter};
use crate::ledger::Reservation;

/// What makes two loads the same: one job serves both.
#[derive(Debug, Clone)]
pub(crate) struct LoadKey {
    pub(crate) files: Vec<FileIdentity>,
    pub(crate) device: String,
    pub(crate) layout: u32,
}

impl LoadKey {
    pub(crate) fn is_same(&self, other: &Self) -> bool {
        self.device == other.device
            && self.layout == other.layout
            && self.files.len() == other.files.len()
            && self.files.iter().zip(&other.files).all(|(a, b)| a.is_same_file(b))
    }
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum GenerationPhase {
    /// Another load of the device goes first.
    Queued,
    /// The loader checks the header.
    Starting,
    Loading,
    /// On its way into the FD store.
    Storing,
    Ready,
    /// Without a name; gone with its last lease.
    Retiring,
}

/// What a loader or an adopted manifest says about a generation.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub(crate) struct GenerationContents {
    pub(crate) digest: Option<Digest>,
    pub(crate) tensor_bytes: u64,
    pub(crate) allocation_bytes: u64,
    pub(crate) manifest_bytes: u64,
    pub(crate) allocations: u32,
    pub(crate) tensors: u32,
    /// Of the device beside the allocations, while it loads.
    pub(crate) staging_bytes: u64,
    /// Of the host, while it loads; on the host and on boards that share its memory, also of the allocations.
    pub(crate) host_bytes: u64,
}

impl GenerationContents {
    pub(crate) fn from_manifest(manifest: &Manifest, manifest_bytes: u64) -> Self {
        Self {
            digest: Some(manifest.digest),
            tensor_bytes: manifest.tensor_bytes(),
            allocation_bytes: manifest.allocation_bytes(),
            manifest_bytes,
            allocations: manifest.allocations.len() as u32,
            tensors: manifest.tensors.len() as u32,
            staging_bytes: 0,
            host_bytes: 0,
        }
    }

    /// What it takes of its device, and descriptors of the weight-server: every allocation, and the manifest, which lies on
    /// the host wherever the model does.
    pub(crate) fn reservation(&self, device: &str) -> Reservation {
        let manifest = if device == HOST_DEVICE { self.manifest_bytes } else { 0 };
        let bytes = self.allocation_bytes.saturating_add(manifest).saturating_add(self.staging_bytes);
        Reservation { device: device.to_owned(), bytes, fds: u64::from(self.allocations) + 1 }
    }
}

/// Whether the bytes are those that were loaded.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum GenerationIntegrity {
    /// Our loader took the checksums, or the kernel's seals keep every byte.
    Loaded,
    /// On a GPU, adopted: whoever held it meanwhile could have written to it.
    Unverified,
    Verified,
    /// Its checksums are others than the manifest's.
    Quarantined,
}

/// Checking the bytes of a generation on a GPU.
#[derive(Debug, Default)]
pub(crate) struct VerificationState {
    pub(crate) running: bool,
    /// Admin calls that wait for it.
    pub(crate) calls: Vec<CallId>,
    /// One that could not be done is tried again, later.
    pub(crate) not_before: Duration,
}

#[derive(Debug)]
pub(crate) struct Generation {
    pub(crate) id: u64,
    pub(crate) model: String,
    pub(crate) key: LoadKey,
    pub(crate) one_per_tensor: bool,
    pub(crate) phase: GenerationPhase,
    pub(crate) contents: GenerationContents,
    pub(crate) done_bytes: u64,
    pub(crate) requested_at: Duration,
    /// When the loader last got further; bounds every wait for it.
    pub(crate) progressed_at: Duration,
    pub(crate) waiters: Vec<Waiter>,
    pub(crate) adopted: bool,
    pub(crate) integrity: GenerationIntegrity,
    pub(crate) verification: VerificationState,
    /// Quarantined, and not yet loaded anew.
    pub(crate) reload: bool,
}

impl Generation {
    pub(crate) fn path(&self) -> PathBuf {
        self.key.files.first().map(|file| file.path.clone()).unwrap_or_default()
    }

    /// Occupies its device's one loader.
    pub(crate) fn occupies_loader(&self) -> bool {
        matches!(self.phase, GenerationPhase::Starting | GenerationPhase::Loading)
    }

    /// On its way to ready.
    pub(crate) fn is_pending(&self) -> bool {
        matches!(
            self.phase,
            GenerationPhase::Queued
                | GenerationPhase::Starting
                | GenerationPhase::Loading
                | GenerationPhase::Storing
        )
    }

    /// Reserved, but not yet taken from the host's memory.
    pub(crate) fn outstanding_bytes(&self, reserved: u64) -> u64 {
        match self.phase {
            GenerationPhase::Storing | GenerationPhase::Ready | GenerationPhase::Retiring => 0,
            GenerationPhase::Queued | GenerationPhase::Starting | GenerationPhase::Loading
                if self.key.device == HOST_DEVICE =>
            {
                reserved.saturating_sub(self.done_bytes)
            }
            // Of the host it takes little, and that at once.
            GenerationPhase::Queued | GenerationPhase::Starting | GenerationPhase::Loading => {
                match self.done_bytes {
                    0 => self.contents.host_bytes,
                    _ => 0,
                }
            }
        }
    }
}
