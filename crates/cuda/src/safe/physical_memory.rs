// SPDX-License-Identifier: Apache-2.0

//! [`PhysicalMemory`]: a handle of one exportable allocation of device memory (CUDA VMM).
//!
//! The driver frees the memory when the last handle, file descriptor and mapping of it are gone, in
//! any process. So a handle may be dropped before or after its mappings.

use std::os::fd::{AsFd, OwnedFd};

use super::Device;
use crate::checked::{AllocationHandle, DriverError, retry_unsupported};

#[derive(Debug)]
pub struct PhysicalMemory {
    device: Device,
    handle: AllocationHandle,
    bytes: u64,
}

impl PhysicalMemory {
    /// Allocates `bytes`, a multiple of the device's granularity. Needs no context.
    pub fn create(device: &Device, bytes: u64) -> Result<Self, DriverError> {
        let handle = retry_unsupported(|| device.driver().create(device.ordinal(), bytes))?;
        Ok(Self { device: device.clone(), handle, bytes })
    }

    /// Imports a file descriptor that another process exported. `bytes` is the size that process
    /// created.
    pub fn import(device: &Device, fd: impl AsFd, bytes: u64) -> Result<Self, DriverError> {
        let handle = retry_unsupported(|| device.driver().import(fd.as_fd()))?;
        Ok(Self { device: device.clone(), handle, bytes })
    }

    pub fn export(&self) -> Result<OwnedFd, DriverError> {
        retry_unsupported(|| self.device.driver().export(self.handle))
    }

    pub fn bytes(&self) -> u64 {
        self.bytes
    }

    pub(super) fn handle(&self) -> AllocationHandle {
        self.handle
    }
}

impl Drop for PhysicalMemory {
    fn drop(&mut self) {
        // SAFETY: the handle is this value's own, and nothing uses it after. An error has no
        // receiver: the driver is broken or shutting down, and frees what this process held.
        let _ = unsafe { self.device.driver().release(self.handle) };
    }
}
