// SPDX-License-Identifier: Apache-2.0

//! The source of a copy: a resident generation of the same files on another device.
//!
//! ```text
//! weight-server                          loader
//!   CopyJob                     ->
//!   FdBatch + descriptors       ->       (manifest first)
//!                               <-       BatchReceived
//!                                        compares the manifest with its own plan
//!                                        copies each tensor, computes the checksums
//!                                        compares them with the manifest
//! ```
//! The copy gets a manifest of its own. Its digest follows from the headers that this loader has
//! read and from the source's checksums of the file, so it must be the source's digest.

use std::os::fd::OwnedFd;

use gguf::GgufModel;
use handoff::manifest::{SplitHandoffError, split_handoff};
use handoff::seqpacket::Connection;
use memory::host_import::ImportHostError;
use memory::manifest::{Checksum, FileIdentity, Manifest, TensorEntry};
use proto::weights::v1 as wire;

use super::channel::{LoaderError, ReceiveFdsError, receive_fds};
use super::checksum;
use super::target::LoadPlan;

/// A generation on another device.
#[derive(Debug)]
pub(super) struct SourceGeneration {
    pub(super) manifest: Manifest,
    pub(super) fds: Vec<OwnedFd>,
}

/// Why a resident generation cannot be copied.
#[derive(Debug, thiserror::Error)]
pub(super) enum CopyError {
    #[error("the weight-server sent inconsistent descriptors of the copy on another device")]
    Receive(#[source] ReceiveFdsError),
    #[error("cannot read the manifest of the copy on another device")]
    Manifest(#[from] SplitHandoffError),
    #[error("the copy on {device} is of other files")]
    Files { device: String },
    #[error("the copy on {device} has {found} tensors, the file has {expected}")]
    Count { device: String, found: usize, expected: usize },
    #[error("tensor {tensor} has another type, shape, size or layout on {device}")]
    Tensor { device: String, tensor: String },
    #[error("the copy on {device} cannot be read")]
    Host { device: String, source: ImportHostError },
    #[error("tensors that differ from their checksums on {device}: {damaged}, the first is {tensor}")]
    Checksums { device: String, damaged: usize, tensor: String },
    #[error("the digest of the copy differs from that of its source on {device}")]
    Digest { device: String },
}

impl SourceGeneration {
    pub(super) fn receive(
        connection: &Connection,
        job: wire::CopyJob,
    ) -> Result<Result<Self, CopyError>, LoaderError> {
        let fds = match receive_fds(connection, job.fds) {
            Err(ReceiveFdsError::Loader(error)) => return Err(error),
            Err(error) => return Ok(Err(CopyError::Receive(error))),
            Ok(fds) => fds,
        };
        Ok(split_handoff(fds).map(|(manifest, fds)| Self { manifest, fds }).map_err(CopyError::from))
    }

    /// The device that the source lies on.
    pub(super) fn device(&self) -> String {
        self.manifest.devices.first().map(|device| device.id.clone()).unwrap_or_default()
    }

    /// Checks that the source has the tensors of these files, in the layout of the target.
    pub(super) fn check(
        &self,
        files: &[FileIdentity],
        model: &GgufModel,
        plan: &LoadPlan,
        layout: u32,
    ) -> Result<(), CopyError> {
        let Manifest { files: found, tensors, .. } = &self.manifest;
        let is_same = found.len() == files.len() && found.iter().zip(files).all(|(a, b)| a.is_same_file(b));
        if !is_same {
            return Err(CopyError::Files { device: self.device() });
        }
        let expected = plan.tensor_sizes.len();
        if tensors.len() != expected {
            return Err(CopyError::Count { device: self.device(), found: tensors.len(), expected });
        }
        for ((entry, (_, tensor)), &bytes) in tensors.iter().zip(model.tensors()).zip(&plan.tensor_sizes) {
            let TensorEntry { name, dtype, shape, shard, .. } = entry;
            let is_same = *name == tensor.name
                && *dtype == tensor.dtype.id()
                && *shape == tensor.dims
                && shard.is_none()
                && (entry.layout, entry.bytes) == (layout, bytes);
            if !is_same {
                return Err(CopyError::Tensor { device: self.device(), tensor: tensor.name.clone() });
            }
        }
        Ok(())
    }

    /// Compares the checksums of the copy's chunks with the manifest.
    pub(super) fn compare(&self, chunks: &[Vec<u128>]) -> Result<(), CopyError> {
        let differs = |(entry, chunks): &(&TensorEntry, &Vec<u128>)| {
            checksum::tensor_checksum(chunks) != entry.checksum
        };
        let mut damaged = self.manifest.tensors.iter().zip(chunks).filter(differs);
        match damaged.next() {
            None => Ok(()),
            Some((first, _)) => Err(CopyError::Checksums {
                device: self.device(),
                damaged: damaged.count() + 1,
                tensor: first.name.clone(),
            }),
        }
    }

    /// The checksums of each tensor in the file and in memory.
    pub(super) fn checksums(&self) -> Vec<(Checksum, Checksum)> {
        self.manifest.tensors.iter().map(|tensor| (tensor.raw_checksum, tensor.checksum)).collect()
    }
}
