//! From descriptors and their manifest to tensors: the only place on the receiving side that knows what a device's
//! descriptor is.

use std::os::fd::OwnedFd;

use bytes::Bytes;

use crate::manifest::{DeviceKind, Manifest, ManifestDevice, TensorEntry};
use crate::mapping::{MappingWatch, map_all};
use crate::memfd::{MemfdError, SealedMemfd};

/// A tensor of the host, read-only; its bytes keep the mapping alive.
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
    #[error("allocation {index} is not what the manifest says")]
    Allocation { index: usize, source: MemfdError },
    #[error("the model lies on {device}: this build reads host memory only")]
    Device { device: String },
    #[error("the model cannot be mapped")]
    Map(#[source] MemfdError),
}

/// Checks that descriptors are the sealed memfds which the manifest describes.
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

/// Maps a model that lies on the host; the descriptors are closed.
pub fn import_host(
    manifest: &Manifest,
    fds: Vec<OwnedFd>,
) -> Result<(Vec<MappedTensor>, MappingWatch), ImportHostError> {
    let memfds = verify_host(manifest, fds)?;
    let (views, watch) = map_all(&memfds).map_err(ImportHostError::Map)?;
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
        // In bounds: a manifest's tensors lie inside their allocations, and each view has its allocation's size.
        bytes: views[entry.allocation].slice(start..start + entry.bytes as usize),
    }
}

fn device_text(device: &ManifestDevice) -> String {
    match device.kind {
        DeviceKind::Host => device.id.clone(),
        DeviceKind::Cuda => format!("GPU {}", device.id),
    }
}
