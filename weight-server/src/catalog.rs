//! Generations: what is loaded, being loaded, or on its way out.
//!
//! ```text
//!            loader starts      plan reserved      handed over        in the vault
//!   Queued --------------> Starting -------> Loading -------> Storing -------------> Ready
//!                                                                                     | unloaded or replaced
//!                                                              last lease ended       v
//!                                                       gone <------------------- Retiring
//! ```
//! Plain values; `state` moves them.

use std::path::PathBuf;
use std::time::Duration;

use memory::manifest::{Digest, FileIdentity, Manifest};

use crate::events::Waiter;

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
pub(crate) enum Phase {
    /// Another load of the device goes first.
    Queued,
    /// The loader checks the header.
    Starting,
    Loading,
    /// On its way into the vault.
    Storing,
    Ready,
    /// Without a name; gone with its last lease.
    Retiring,
}

/// What a loader or an adopted manifest says about a generation.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub(crate) struct Contents {
    pub(crate) digest: Option<Digest>,
    pub(crate) tensor_bytes: u64,
    pub(crate) allocation_bytes: u64,
    pub(crate) manifest_bytes: u64,
    pub(crate) allocations: u32,
    pub(crate) tensors: u32,
}

impl Contents {
    pub(crate) fn of(manifest: &Manifest, manifest_bytes: u64) -> Self {
        Self {
            digest: Some(manifest.digest),
            tensor_bytes: manifest.tensor_bytes(),
            allocation_bytes: manifest.allocation_bytes(),
            manifest_bytes,
            allocations: manifest.allocations.len() as u32,
            tensors: manifest.tensors.len() as u32,
        }
    }

    /// Bytes and descriptors that the weight-server holds for it: every allocation, and the manifest.
    pub(crate) fn holds(&self) -> (u64, u64) {
        (self.allocation_bytes.saturating_add(self.manifest_bytes), u64::from(self.allocations) + 1)
    }
}

#[derive(Debug)]
pub(crate) struct Generation {
    pub(crate) id: u64,
    pub(crate) model: String,
    pub(crate) key: LoadKey,
    pub(crate) one_per_tensor: bool,
    pub(crate) phase: Phase,
    pub(crate) contents: Contents,
    pub(crate) done_bytes: u64,
    pub(crate) requested_at: Duration,
    /// When the loader last got further; bounds every wait for it.
    pub(crate) progressed_at: Duration,
    pub(crate) waiters: Vec<Waiter>,
    pub(crate) adopted: bool,
}

impl Generation {
    pub(crate) fn path(&self) -> PathBuf {
        self.key.files.first().map(|file| file.path.clone()).unwrap_or_default()
    }

    /// Occupies its device's one loader.
    pub(crate) fn occupies_loader(&self) -> bool {
        matches!(self.phase, Phase::Starting | Phase::Loading)
    }

    /// On its way to ready.
    pub(crate) fn is_pending(&self) -> bool {
        matches!(self.phase, Phase::Queued | Phase::Starting | Phase::Loading | Phase::Storing)
    }

    /// Reserved, but not yet taken from the machine's memory.
    pub(crate) fn outstanding_bytes(&self, reserved: u64) -> u64 {
        if self.is_pending() && self.phase != Phase::Storing {
            reserved.saturating_sub(self.done_bytes)
        } else {
            0
        }
    }
}
