// SPDX-License-Identifier: Apache-2.0

//! Importing a model from host memory: descriptors and their manifest become read-only tensors.

use std::os::fd::OwnedFd;

use bytes::Bytes;

use crate::manifest::{DeviceKind, Manifest, ManifestDevice, TensorEntry};
use crate::mapping::{MappingWatch, map_all};
use crate::memfd::{MemfdError, SealedMemfd};

/// A read-only tensor in host memory. Its bytes keep the mapping alive.
#[derive(Debug, Clone)]
pub struct MappedTensor {
    pub name: String,
    /// ggml type id.
    pub dtype: u32,
    pub layout: u32,
    /// Fastest dimension first.
    pub shape: Vec<u64>,
    pub bytes: Bytes,
}

#[derive(Debug, thiserror::Error)]
pub enum ImportHostError {
    #[error("the manifest lists {expected} allocations, {found} descriptors came")]
    Count { expected: usize, found: usize },
    #[error("allocation {index} is not the one that the manifest describes")]
    Allocation { index: usize, source: MemfdError },
    #[error("the model lies on {device}, not in host memory")]
    Device { device: String },
    #[error("the model cannot be mapped")]
    Map(#[source] MemfdError),
}

/// Checks that the descriptors are the sealed memfds that the manifest describes.
pub fn verify_host(manifest: &Manifest, fds: Vec<OwnedFd>) -> Result<Vec<SealedMemfd>, ImportHostError> {
    if let Some(device) = manifest.devices.iter().find(|device| device.kind != DeviceKind::Host) {
        return Err(ImportHostError::Device { device: device_text(device) });
    }
    if fds.len() != manifest.allocations.len() {
        return Err(ImportHostError::Count { expected: manifest.allocations.len(), found: fds.len() });
    }
    fds.into_iter()
        .zip(&manifest.allocations)
        .enumerate()
        .map(|(index, (fd, allocation))| {
            SealedMemfd::verify(fd)
                .and_then(|memfd| memfd.expect(allocation.bytes, allocation.inode))
                .map_err(|source| ImportHostError::Allocation { index, source })
        })
        .collect()
}

/// Maps a model that lies in host memory, and closes the descriptors.
pub fn import_host(
    manifest: &Manifest,
    fds: Vec<OwnedFd>,
) -> Result<(Vec<MappedTensor>, MappingWatch), ImportHostError> {
    map_host(manifest, &verify_host(manifest, fds)?)
}

/// Maps allocations that [`verify_host`] has checked against this manifest.
pub fn map_host(
    manifest: &Manifest,
    memfds: &[SealedMemfd],
) -> Result<(Vec<MappedTensor>, MappingWatch), ImportHostError> {
    let (views, watch) = map_all(memfds).map_err(ImportHostError::Map)?;
    let tensors = manifest.tensors.iter().map(|entry| tensor(entry, &views)).collect();
    Ok((tensors, watch))
}

fn tensor(entry: &TensorEntry, views: &[Bytes]) -> MappedTensor {
    let start = entry.offset as usize;
    MappedTensor {
        name: entry.name.clone(),
        dtype: entry.dtype,
        layout: entry.layout,
        shape: entry.shape.clone(),
        // In bounds: `Manifest::validate` has checked that tensors lie inside of their allocations,
        // and each mapping has the size of its allocation.
        bytes: views[entry.allocation].slice(start..start + entry.bytes as usize),
    }
}

fn device_text(device: &ManifestDevice) -> String {
    match device.kind {
        DeviceKind::Host => device.id.clone(),
        DeviceKind::Cuda => format!("GPU {}", device.id),
    }
}
