// SPDX-License-Identifier: Apache-2.0

//! [`AddressRange`]: reserved device addresses and the allocations that are mapped at them.
//!
//! ```text
//! offset   0            a            b                   bytes
//!          | allocation | allocation |      unmapped     |
//! ```
//! # Invariants
//! 1. Mappings lie inside of the range and do not overlap; each holds one whole allocation.
//! 2. The range owns its mappings: it unmaps each of them, whole, before it frees the addresses.
//! 3. A caller that gives an address of it to a kernel keeps the range alive until that work has
//!    ended. `unmap` and drop rely on this.

use std::collections::BTreeMap;

use super::{Context, Device, PhysicalMemory};
use crate::checked::{DeviceAccess, DriverError, retry_unsupported};

#[derive(Debug)]
pub struct AddressRange {
    device: Device,
    address: u64,
    bytes: u64,
    /// Offset and size of each mapping.
    mapped: BTreeMap<u64, u64>,
}

impl AddressRange {
    /// Reserves addresses, without memory. `bytes` is a multiple of the granularity and above 0.
    pub fn reserve(device: &Device, bytes: u64) -> Result<Self, DriverError> {
        debug_assert!(bytes > 0 && bytes.is_multiple_of(device.granularity()), "whole granules");
        let address = retry_unsupported(|| device.driver().reserve(bytes))?;
        Ok(Self { device: device.clone(), address, bytes, mapped: BTreeMap::new() })
    }

    pub fn device(&self) -> &Device {
        &self.device
    }

    pub fn address(&self) -> u64 {
        self.address
    }

    pub fn bytes(&self) -> u64 {
        self.bytes
    }

    pub fn mapped_bytes(&self) -> u64 {
        self.mapped.values().sum()
    }

    /// Maps a whole allocation at an offset. Kernels may touch it after `set_access`. The handle
    /// may be dropped afterwards.
    ///
    /// # Panics
    /// If the mapping leaves the range or overlaps another one.
    pub fn map(&mut self, offset: u64, memory: &PhysicalMemory) -> Result<(), DriverError> {
        let bytes = memory.bytes();
        let end = offset.checked_add(bytes);
        assert!(end.is_some_and(|end| end <= self.bytes), "a mapping stays inside of its range");
        let before = self.mapped.range(..offset + bytes).next_back();
        assert!(before.is_none_or(|(at, size)| at + size <= offset), "mappings don't overlap");
        retry_unsupported(|| {
            // SAFETY: inside of what this value reserved, and unmapped, both checked above; the
            // handle is borrowed.
            unsafe { self.device.driver().map(self.address + offset, bytes, memory.handle()) }
        })?;
        self.mapped.insert(offset, bytes);
        Ok(())
    }

    /// Sets what kernels may do with `[offset, offset + bytes)`, where whole allocations are mapped
    /// back to back.
    ///
    /// # Panics
    /// If the range is not mapped like this.
    pub fn set_access(&mut self, offset: u64, bytes: u64, access: DeviceAccess) -> Result<(), DriverError> {
        let mut end = offset;
        for (&at, &size) in self.mapped.range(offset..) {
            if at != end || end >= offset + bytes {
                break;
            }
            end += size;
        }
        assert!(end == offset + bytes, "access is set for whole, adjacent mappings");
        retry_unsupported(|| {
            // SAFETY: whole mappings of this range without a gap, checked above.
            unsafe {
                let driver = self.device.driver();
                driver.set_access(self.device.ordinal(), self.address + offset, bytes, access)
            }
        })
    }

    /// Copies bytes into writable mappings and returns when the copy is complete. For little data;
    /// kernels and streams write to `address`.
    ///
    /// # Panics
    /// Outside of what is mapped.
    pub fn write(&mut self, context: &Context, offset: u64, bytes: &[u8]) -> Result<(), DriverError> {
        self.assert_mapped(offset, bytes.len());
        context.bind()?;
        // SAFETY: inside of mappings of this value, and a context of some device is current; were
        // it another one, or were the mappings read-only, the driver would refuse.
        unsafe { self.device.driver().copy_to_device(self.address + offset, bytes) }
    }

    /// Copies bytes of readable mappings to the host and returns when the copy is complete. For
    /// little data; kernels and streams read at `address`.
    ///
    /// # Panics
    /// Outside of what is mapped.
    pub fn read(&self, context: &Context, offset: u64, bytes: &mut [u8]) -> Result<(), DriverError> {
        self.assert_mapped(offset, bytes.len());
        context.bind()?;
        // SAFETY: inside of mappings of this value, and a context of some device is current; were
        // it another one, the driver would refuse.
        unsafe { self.device.driver().copy_to_host(bytes, self.address + offset) }
    }

    fn assert_mapped(&self, offset: u64, bytes: usize) {
        let (mut end, wanted) = (offset, offset.saturating_add(bytes as u64));
        for (&at, &size) in self.mapped.range(..wanted) {
            if at <= end && end < at + size {
                end = at + size;
            }
        }
        assert!(end >= wanted, "inside of what is mapped");
    }

    /// Unmaps the allocation that one `map` put at `offset`; if the driver fails, it stays mapped.
    /// No work on any stream may touch it any more.
    ///
    /// # Panics
    /// If no mapping starts at `offset`.
    pub fn unmap(&mut self, offset: u64) -> Result<(), DriverError> {
        let bytes = self.mapped.get(&offset).copied();
        assert!(bytes.is_some(), "only what is mapped can be unmapped");
        // SAFETY: exactly what one `map` filled. Device memory: a kernel that still touched it
        // would fault, which ends this process's context and disturbs no other process.
        unsafe { self.device.driver().unmap(self.address + offset, bytes.unwrap_or_default()) }?;
        self.mapped.remove(&offset);
        Ok(())
    }
}

impl Drop for AddressRange {
    fn drop(&mut self) {
        let offsets: Vec<u64> = self.mapped.keys().copied().collect();
        for offset in offsets {
            // An error has no receiver, here and below: after a fault every call fails, and the
            // driver takes back what this process held when the process ends.
            let _ = self.unmap(offset);
        }
        if !self.mapped.is_empty() {
            return;
        }
        // SAFETY: reserved with this size, and nothing is mapped in it any more.
        let _ = unsafe { self.device.driver().free_addresses(self.address, self.bytes) };
    }
}
