// SPDX-License-Identifier: Apache-2.0

//! The generations: every load of a model, from its request until its memory is released.
//!
//! ```text
//!          loader starts       plan reserved      handed over        in the FD store
//! Queued --------------> Starting -------> Loading -------> Storing -------------> Ready
//!                            '-> AwaitingSource -^                                  |
//!                                                            unloaded or replaced   |
//!                                                  last lease ended                 v
//!                                         removed <-------------------------- Retiring
//! ```
//! A load waits in AwaitingSource while another device gets a copy of the same files
//! (`state/copying.rs`). The types here are plain values; `state` changes them.

use std::path::PathBuf;
use std::time::Duration;

use memory::manifest::{Digest, FileIdentity, Manifest};
use memory::memfd::SealedMemfd;
use memory::numa::is_host_device;

use crate::ids::CallId;
use crate::ledger::LedgerReservation;
use crate::waiters::Waiter;

/// Identifies a load. Requests with the same key share one load.
#[derive(Debug, Clone)]
pub struct LoadKey {
    pub files: Vec<FileIdentity>,
    pub device: String,
    pub layout: u32,
    /// Every tensor has an allocation of its own.
    pub one_per_tensor: bool,
}

impl LoadKey {
    pub fn is_same(&self, other: &Self) -> bool {
        self.device == other.device && self.has_same_bytes(other)
    }

    /// Equal files in an equal layout, on whatever devices: one can be copied from the other.
    pub fn has_same_bytes(&self, other: &Self) -> bool {
        self.layout == other.layout
            && self.one_per_tensor == other.one_per_tensor
            && self.files.len() == other.files.len()
            && self.files.iter().zip(&other.files).all(|(a, b)| a.is_same_file(b))
    }
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum GenerationPhase {
    /// Another load on the same device comes first.
    Queued,
    /// The loader checks the headers of the model files.
    Starting,
    /// The plan is reserved. The loader waits for the copy of the same files on another device.
    AwaitingSource,
    Loading,
    /// The descriptors are being stored in the FD store.
    Storing,
    Ready,
    /// The model name no longer resolves to this generation; its memory is released with the last
    /// lease.
    Retiring,
}

/// Sizes and digest of a generation, from the loader's plan or from an adopted manifest.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct GenerationContents {
    pub digest: Option<Digest>,
    pub tensor_bytes: u64,
    pub allocation_bytes: u64,
    pub manifest_bytes: u64,
    /// Tells two loads of one model apart.
    pub manifest_inode: u64,
    pub allocations: u32,
    pub tensors: u32,
    /// When the load ended.
    pub created_unix_seconds: u64,
    /// Device memory that the load takes beside the allocations, until it is done.
    pub staging_bytes: u64,
    /// Host memory that the load takes. On the host, and on boards that share its memory, it
    /// includes the allocations.
    pub host_bytes: u64,
    /// GPUs whose memory the loader's GPU can access.
    pub peer_devices: Vec<String>,
    /// How long the copy from another device took, with the check of its checksums.
    pub copy_time: Duration,
}

/// Where the bytes of a generation come from.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub enum BytesSource {
    #[default]
    Files,
    /// The copy of the same files on another device.
    Copy { generation: u64, device: String },
}

impl GenerationContents {
    pub fn from_manifest(manifest: &Manifest, memfd: &SealedMemfd) -> Self {
        Self {
            digest: Some(manifest.digest),
            tensor_bytes: manifest.tensor_bytes(),
            allocation_bytes: manifest.allocation_bytes(),
            manifest_bytes: memfd.bytes(),
            manifest_inode: memfd.inode(),
            allocations: manifest.allocations.len() as u32,
            tensors: manifest.tensors.len() as u32,
            created_unix_seconds: manifest.created_unix_seconds,
            ..Self::default()
        }
    }

    /// What the generation reserves: its device's memory, and one descriptor for each allocation
    /// and for the manifest. The manifest is in host memory on every device.
    pub fn reservation(&self, device: &str) -> LedgerReservation {
        let manifest = if is_host_device(device) { self.manifest_bytes } else { 0 };
        let bytes = self.allocation_bytes.saturating_add(manifest).saturating_add(self.staging_bytes);
        LedgerReservation { device: device.to_owned(), bytes, fds: u64::from(self.allocations) + 1 }
    }
}

/// Whether the bytes in memory are known to be those that were loaded.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum GenerationIntegrity {
    /// This weight-server's loader computed the checksums, or the kernel's seals protect the bytes.
    Loaded,
    /// Returned by a worker, or adopted on a GPU, where a process that had it mapped could have
    /// written to it.
    Unverified,
    Verified,
    /// The checksums differ from those in the manifest.
    Quarantined,
}

/// The state of checking a generation's bytes on a GPU.
#[derive(Debug, Default)]
pub struct VerificationState {
    pub running: bool,
    /// Admin calls that wait for the result.
    pub calls: Vec<CallId>,
    /// A check that failed is not repeated before this time.
    pub not_before: Duration,
}

#[derive(Debug)]
pub struct Generation {
    pub id: u64,
    pub model: String,
    pub key: LoadKey,
    pub phase: GenerationPhase,
    pub source: BytesSource,
    /// A copy from another device has failed.
    pub reads_files: bool,
    pub contents: GenerationContents,
    pub done_bytes: u64,
    pub requested_at: Duration,
    /// When the loader last made progress. A load without progress is stopped.
    pub progressed_at: Duration,
    pub waiters: Vec<Waiter>,
    pub adopted: bool,
    pub integrity: GenerationIntegrity,
    pub verification: VerificationState,
    /// The generation is quarantined, and its model must be loaded again.
    pub reload: bool,
}

impl Generation {
    pub fn path(&self) -> PathBuf {
        self.key.files.first().map(|file| file.path.clone()).unwrap_or_default()
    }

    /// A device has one loader at a time, and this generation's loader is it.
    pub fn occupies_loader(&self) -> bool {
        self.phase == GenerationPhase::AwaitingSource || self.is_loader_busy()
    }

    /// The loader has work, and its progress is due.
    pub fn is_loader_busy(&self) -> bool {
        matches!(self.phase, GenerationPhase::Starting | GenerationPhase::Loading)
    }

    /// The generation whose memory the loader reads now.
    pub fn copies_from(&self) -> Option<u64> {
        match self.source {
            BytesSource::Copy { generation, .. } if self.phase == GenerationPhase::Loading => {
                Some(generation)
            }
            _ => None,
        }
    }

    /// The generation is on its way to Ready.
    pub fn is_pending(&self) -> bool {
        matches!(self.phase, GenerationPhase::Queued | GenerationPhase::Storing) || self.occupies_loader()
    }

    /// Memory that is reserved but not yet taken from the host.
    pub fn outstanding_bytes(&self, reserved: u64) -> u64 {
        match self.phase {
            GenerationPhase::Storing | GenerationPhase::Ready | GenerationPhase::Retiring => 0,
            _ if is_host_device(&self.key.device) => reserved.saturating_sub(self.done_bytes),
            // A load onto a GPU takes little host memory, and takes it before its first progress
            // report.
            _ => match self.done_bytes {
                0 => self.contents.host_bytes,
                _ => 0,
            },
        }
    }
}
