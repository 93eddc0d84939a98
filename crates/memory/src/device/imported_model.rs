// SPDX-License-Identifier: Apache-2.0

//! [`ImportedModel`]: a model on a GPU that another process loaded, mapped read-only into this
//! process.
//!
//! The import reserves one address range, maps each allocation, and sets the access of the whole
//! range in one call. It closes handles and file descriptors: the mappings alone keep the memory
//! alive.

use std::os::fd::OwnedFd;
use std::sync::Arc;

use cuda::{AddressRange, Context, Device, DeviceAccess, DeviceUuid, DriverError, PhysicalMemory};

use crate::manifest::{DeviceKind, Manifest, ManifestDevice};
use crate::mapping::MappingWatch;

#[derive(Debug)]
pub struct ImportedModel {
    /// In the order of the manifest.
    pub tensors: Vec<DeviceTensor>,
    memory: Arc<AddressRange>,
}

/// A tensor on the device, read-only for kernels. It keeps the whole model mapped. Drop it only
/// when the work that uses its address has ended.
#[derive(Debug, Clone)]
pub struct DeviceTensor {
    pub name: String,
    /// ggml type id.
    pub dtype: u32,
    pub layout: u32,
    /// Fastest dimension first.
    pub shape: Vec<u64>,
    pub bytes: u64,
    address: u64,
    memory: Arc<AddressRange>,
}

impl DeviceTensor {
    /// Valid on the device as long as this value lives.
    pub fn address(&self) -> u64 {
        self.address
    }

    /// Copies bytes of the tensor to the host and returns when the copy is complete. For little
    /// data; kernels read at `address`.
    ///
    /// # Panics
    /// Beyond the end of the tensor.
    pub fn read(&self, context: &Context, offset: u64, bytes: &mut [u8]) -> Result<(), DriverError> {
        let end = offset.checked_add(bytes.len() as u64);
        assert!(end.is_some_and(|end| end <= self.bytes), "inside of the tensor");
        self.memory.read(context, self.address - self.memory.address() + offset, bytes)
    }
}

#[derive(Debug, thiserror::Error)]
pub enum ImportModelError {
    #[error("the model lies on {found}, {expected} was expected")]
    WrongDevice { expected: DeviceUuid, found: String },
    #[error("the manifest lists {expected} allocations, {found} descriptors came")]
    Count { expected: usize, found: usize },
    #[error("the allocations of the manifest exceed any memory")]
    TooLarge,
    #[error(
        "allocation {index} of {bytes} bytes cannot be imported: if driver or device were reset since it was loaded, load the model again"
    )]
    Allocation { index: usize, bytes: u64, source: DriverError },
    #[error("the {bytes} bytes of the model cannot be mapped")]
    Map { bytes: u64, source: DriverError },
}

impl ImportedModel {
    /// Maps the allocations that a manifest describes. The mappings outlive the descriptors.
    pub fn import(device: &Device, manifest: &Manifest, fds: &[OwnedFd]) -> Result<Self, ImportModelError> {
        Self::import_for(device, device, manifest, fds)
    }

    /// Maps a model that lies on `device` for `reader`, which can access that memory
    /// ([`Device::can_access`]).
    pub(super) fn import_for(
        device: &Device,
        reader: &Device,
        manifest: &Manifest,
        fds: &[OwnedFd],
    ) -> Result<Self, ImportModelError> {
        let here = device.uuid().to_string();
        let elsewhere = |found: &&ManifestDevice| found.kind != DeviceKind::Cuda || found.id != here;
        if let Some(found) = manifest.devices.iter().find(elsewhere) {
            return Err(ImportModelError::WrongDevice { expected: device.uuid(), found: found.id.clone() });
        }
        if fds.len() != manifest.allocations.len() {
            return Err(ImportModelError::Count { expected: manifest.allocations.len(), found: fds.len() });
        }
        let (offsets, total) = offsets(device, manifest).ok_or(ImportModelError::TooLarge)?;
        let failed = |source| ImportModelError::Map { bytes: total, source };
        let reserved = reader.allocated_bytes(total).ok_or(ImportModelError::TooLarge)?;
        let mut range = AddressRange::reserve(reader, reserved).map_err(failed)?;
        for (index, (fd, &(offset, bytes))) in fds.iter().zip(&offsets).enumerate() {
            PhysicalMemory::import(device, fd, bytes)
                .and_then(|memory| range.map(offset, &memory))
                .map_err(|source| ImportModelError::Allocation { index, bytes, source })?;
        }
        if total > 0 {
            range.set_access(0, total, DeviceAccess::Read).map_err(failed)?;
        }
        let memory = Arc::new(range);
        let tensors = manifest.tensors.iter().map(|tensor| DeviceTensor {
            name: tensor.name.clone(),
            dtype: tensor.dtype,
            layout: tensor.layout,
            shape: tensor.shape.clone(),
            bytes: tensor.bytes,
            // In range: `Manifest::validate` has checked that tensors lie inside of their
            // allocations.
            address: memory.address() + offsets[tensor.allocation].0 + tensor.offset,
            memory: Arc::clone(&memory),
        });
        Ok(Self { tensors: tensors.collect(), memory })
    }

    /// Tells whether the last tensor is gone.
    pub fn watch(&self) -> MappingWatch {
        MappingWatch::of_device(Arc::downgrade(&self.memory))
    }

    pub fn mapped_bytes(&self) -> u64 {
        self.memory.mapped_bytes()
    }
}

/// Offset and size of each allocation in one range, and the size of the range; `None` if no memory
/// could hold it.
fn offsets(device: &Device, manifest: &Manifest) -> Option<(Vec<(u64, u64)>, u64)> {
    let mut total = 0u64;
    let mut offsets = Vec::with_capacity(manifest.allocations.len());
    for allocation in &manifest.allocations {
        let bytes = device.allocated_bytes(allocation.bytes)?;
        offsets.push((total, bytes));
        total = total.checked_add(bytes)?;
    }
    // An address is the sum of a base and an offset; this limit keeps it below 64 bits.
    (total < 1 << 48).then_some((offsets, total))
}
