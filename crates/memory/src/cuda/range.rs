//! [`AddressRange`]: device addresses, and what is mapped at them.
//!
//! The range owns its mappings: they go before it does, each whole, in the order that the driver demands. Whoever
//! gives addresses of it to kernels keeps the range alive until that work has ended; `unmap` and drop rely on it.

use std::collections::BTreeMap;

use super::driver::{Access, Refusal};
use super::physical::Physical;
use super::retry::retrying;
use super::{Context, Device};

#[derive(Debug)]
pub struct AddressRange {
    device: Device,
    address: u64,
    bytes: u64,
    /// Offset and size of each mapping.
    mapped: BTreeMap<u64, u64>,
}

impl AddressRange {
    /// Reserves addresses: no memory. `bytes` are whole granules, at least one.
    pub fn reserve(device: &Device, bytes: u64) -> Result<Self, Refusal> {
        debug_assert!(bytes > 0 && bytes.is_multiple_of(device.granularity()), "whole granules");
        let address = retrying(|| device.driver().reserve(bytes))?;
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

    /// Puts a whole allocation at an offset; no kernel may touch it before `allow`. The handle may go afterwards.
    pub fn map(&mut self, offset: u64, physical: &Physical) -> Result<(), Refusal> {
        let bytes = physical.bytes();
        let end = offset.checked_add(bytes);
        assert!(end.is_some_and(|end| end <= self.bytes), "a mapping stays inside of its range");
        let before = self.mapped.range(..offset + bytes).next_back();
        assert!(before.is_none_or(|(at, size)| at + size <= offset), "mappings don't overlap");
        retrying(|| {
            // SAFETY: inside of what this value reserved, and unmapped, both checked above; the handle is borrowed.
            unsafe { self.device.driver().map(self.address + offset, bytes, physical.handle()) }
        })?;
        self.mapped.insert(offset, bytes);
        Ok(())
    }

    /// Sets what kernels may do with `[offset, offset + bytes)`, where whole allocations are mapped back to back.
    pub fn allow(&mut self, offset: u64, bytes: u64, access: Access) -> Result<(), Refusal> {
        let mut end = offset;
        for (&at, &size) in self.mapped.range(offset..) {
            if at != end || end >= offset + bytes {
                break;
            }
            end += size;
        }
        assert!(end == offset + bytes, "access is set for whole, adjacent mappings");
        retrying(|| {
            // SAFETY: whole mappings of this range without a gap, checked above.
            unsafe {
                let driver = self.device.driver();
                driver.set_access(self.device.ordinal(), self.address + offset, bytes, access)
            }
        })
    }

    /// Copies bytes into mappings that allow it, complete on return. For little data: kernels write at `address`.
    ///
    /// # Panics
    /// Outside of what is mapped.
    pub fn write(&mut self, context: &Context, offset: u64, bytes: &[u8]) -> Result<(), Refusal> {
        let (mut end, wanted) = (offset, offset.saturating_add(bytes.len() as u64));
        for (&at, &size) in self.mapped.range(..wanted) {
            if at <= end && end < at + size {
                end = at + size;
            }
        }
        assert!(end >= wanted, "inside of what is mapped");
        context.bind()?;
        // SAFETY: inside of mappings of this value, and a context of some device is current; were it another one, or were the
        // mappings read-only, the driver would refuse.
        unsafe { self.device.driver().copy_to_device(self.address + offset, bytes) }
    }

    /// Takes away what one `map` put at `offset`; if it is refused, it is there still. No work on any stream may touch it any
    /// more.
    pub fn unmap(&mut self, offset: u64) -> Result<(), Refusal> {
        let bytes = self.mapped.get(&offset).copied();
        assert!(bytes.is_some(), "only what is mapped can be unmapped");
        // SAFETY: exactly what one `map` filled. Device memory: a kernel that still touched it would fault, which ends
        // this process's context and disturbs nobody else.
        unsafe { self.device.driver().unmap(self.address + offset, bytes.unwrap_or_default()) }?;
        self.mapped.remove(&offset);
        Ok(())
    }
}

impl Drop for AddressRange {
    fn drop(&mut self) {
        let offsets: Vec<u64> = self.mapped.keys().copied().collect();
        for offset in offsets {
            // A refusal has nobody to go to, here and below: after a fault the driver refuses everything, and takes
            // back what this process held when it ends.
            let _ = self.unmap(offset);
        }
        if !self.mapped.is_empty() {
            return;
        }
        // SAFETY: reserved with this size, and nothing is mapped in it any more.
        let _ = unsafe { self.device.driver().free(self.address, self.bytes) };
    }
}
