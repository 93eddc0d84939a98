// SPDX-License-Identifier: Apache-2.0

//! Opens the device of a job by its name. Only this file depends on the feature `cuda`.

#[cfg(any(feature = "cuda", test))]
mod file_parts;
#[cfg(any(feature = "cuda", test))]
mod file_reader;
#[cfg(feature = "cuda")]
mod gpu;
#[cfg(feature = "cuda")]
mod gpu_copy;
#[cfg(feature = "cuda")]
mod gpu_error;

use std::fs::File;
use std::os::fd::OwnedFd;

use cuda::DeviceUuid;
use memory::host_import::import_host;
use memory::manifest::{FileIdentity, Manifest};
use memory::numa::is_host_device;
use proto::weights::v1::LoadFailure;
use quant::layout::{LAYOUT_GGML, LAYOUT_TILES};

use super::checksum;
use super::host::HostTarget;
use super::load_error::{DeviceFailure, OpenTargetError};
use super::target::LoadTarget;

/// Imports a generation read-only and computes the checksums of each tensor's chunks.
pub(super) type ComputeChecksums =
    Box<dyn FnOnce(&Manifest, Vec<OwnedFd>) -> Result<Vec<Vec<u128>>, DeviceFailure>>;

/// The layout that all tensors on a device have.
pub(crate) fn layout_for_device(device: &str) -> u32 {
    if is_host_device(device) { LAYOUT_GGML } else { LAYOUT_TILES }
}

/// Opens the device that the model is loaded into. On a GPU this creates the context, which takes
/// a fifth of a second, and pins the host memory of the load. `unified_memory` says whether the
/// ledger counts the device on the host.
pub(super) fn open_target(
    device: &str,
    layout: u32,
    unified_memory: bool,
    files: &[(FileIdentity, File)],
) -> Result<Box<dyn LoadTarget>, OpenTargetError> {
    let expected = layout_for_device(device);
    if layout != expected {
        return Err(OpenTargetError::Layout { layout, device: device.to_owned(), expected });
    }
    match device {
        name if is_host_device(name) => Ok(Box::new(HostTarget::open(name)?)),
        name => Ok(open_gpu(parse_uuid(name)?, unified_memory, files)?),
    }
}

/// Opens the device on which a generation is verified.
pub(super) fn open_for_checksums(device: &str) -> Result<ComputeChecksums, OpenTargetError> {
    match device {
        name if is_host_device(name) => Ok(Box::new(host_checksums)),
        name => Ok(open_gpu_for_checksums(parse_uuid(name)?)?),
    }
}

fn host_checksums(manifest: &Manifest, fds: Vec<OwnedFd>) -> Result<Vec<Vec<u128>>, DeviceFailure> {
    let (tensors, _) =
        import_host(manifest, fds).map_err(|error| DeviceFailure::new(LoadFailure::Device, error))?;
    let chunks = |bytes: &[u8]| bytes.chunks(checksum::CHUNK_BYTES).map(checksum::chunk_checksum).collect();
    Ok(tensors.iter().map(|tensor| chunks(&tensor.bytes)).collect())
}

fn parse_uuid(name: &str) -> Result<DeviceUuid, OpenTargetError> {
    DeviceUuid::parse(name).ok_or_else(|| OpenTargetError::Name { name: name.to_owned() })
}

#[cfg(feature = "cuda")]
fn open_gpu(
    uuid: DeviceUuid,
    unified_memory: bool,
    files: &[(FileIdentity, File)],
) -> Result<Box<dyn LoadTarget>, DeviceFailure> {
    Ok(Box::new(gpu::GpuTarget::open(uuid, unified_memory, files)?))
}

#[cfg(feature = "cuda")]
fn open_gpu_for_checksums(uuid: DeviceUuid) -> Result<ComputeChecksums, DeviceFailure> {
    let context = gpu::open_context(uuid)?;
    Ok(Box::new(move |manifest, fds| Ok(gpu::compute_checksums(&context, manifest, fds)?)))
}

#[cfg(not(feature = "cuda"))]
fn open_gpu(
    _: DeviceUuid,
    _: bool,
    _: &[(FileIdentity, File)],
) -> Result<Box<dyn LoadTarget>, DeviceFailure> {
    Err(built_without_cuda())
}

#[cfg(not(feature = "cuda"))]
fn open_gpu_for_checksums(_: DeviceUuid) -> Result<ComputeChecksums, DeviceFailure> {
    Err(built_without_cuda())
}

#[cfg(not(feature = "cuda"))]
fn built_without_cuda() -> DeviceFailure {
    DeviceFailure::new(LoadFailure::Unsupported, cuda::OpenDriverError::NotBuilt)
}
