//! [`Physical`]: one handle on one allocation of device memory.
//!
//! The driver frees the memory when the last handle, descriptor and mapping of it are gone, in whichever process; so a
//! handle may be dropped before or after its mappings, and dropping it is always safe.

use std::os::fd::{AsFd, OwnedFd};

use super::Device;
use super::driver::{Handle, Refusal};
use super::retry::retrying;

#[derive(Debug)]
pub struct Physical {
    device: Device,
    handle: Handle,
    bytes: u64,
}

impl Physical {
    /// `bytes` are whole granules of the device. Needs no context.
    pub fn create(device: &Device, bytes: u64) -> Result<Self, Refusal> {
        let handle = retrying(|| device.driver().create(device.ordinal(), bytes))?;
        Ok(Self { device: device.clone(), handle, bytes })
    }

    /// Takes a descriptor that another process exported; `bytes` is what it had created.
    pub fn import(device: &Device, fd: impl AsFd, bytes: u64) -> Result<Self, Refusal> {
        let handle = retrying(|| device.driver().import(fd.as_fd()))?;
        Ok(Self { device: device.clone(), handle, bytes })
    }

    pub fn export(&self) -> Result<OwnedFd, Refusal> {
        retrying(|| self.device.driver().export(self.handle))
    }

    pub fn bytes(&self) -> u64 {
        self.bytes
    }

    pub(super) fn handle(&self) -> Handle {
        self.handle
    }
}

impl Drop for Physical {
    fn drop(&mut self) {
        // SAFETY: the handle is this value's own, and nothing uses it after.
        // A refusal has nobody to go to: the driver is broken or shutting down, and frees what this process held.
        let _ = unsafe { self.device.driver().release(self.handle) };
    }
}
