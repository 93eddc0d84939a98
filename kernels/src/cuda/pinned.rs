//! [`Pinned`]: host memory that the device copies from and to at full speed, without the driver's own staging.

use bytemuck::Pod;
use cudarc::driver::result;

use super::error::Named;
use super::{CudaError, Device};

/// `len` values, zero until written.
pub(super) struct Pinned<T> {
    /// Keeps the context.
    _device: Device,
    values: *mut T,
    len: usize,
}

// SAFETY: plain memory with one owner.
unsafe impl<T: Send> Send for Pinned<T> {}
// SAFETY: through a shared reference it is only read.
unsafe impl<T: Sync> Sync for Pinned<T> {}

impl<T: Pod> Pinned<T> {
    pub(super) fn new(device: &Device, len: usize) -> Result<Self, CudaError> {
        device.bind()?;
        let bytes = (len * size_of::<T>()).max(1);
        // SAFETY: the context is current; freed when self goes.
        let values = unsafe { result::malloc_host(bytes, 0) }.named("cuMemHostAlloc")?.cast::<T>();
        // SAFETY: `bytes` bytes, page-aligned, just allocated; all zeroes are a valid `T`.
        unsafe { values.cast::<u8>().write_bytes(0, bytes) };
        Ok(Self { _device: device.clone(), values, len })
    }

    pub(super) fn as_slice(&self) -> &[T] {
        // SAFETY: `len` initialised values that live as long as self.
        unsafe { std::slice::from_raw_parts(self.values, self.len) }
    }

    /// The caller sees to it that no copy of the device uses the memory meanwhile.
    pub(super) fn as_mut_slice(&mut self) -> &mut [T] {
        // SAFETY: as above, borrowed mutably.
        unsafe { std::slice::from_raw_parts_mut(self.values, self.len) }
    }
}

impl<T> Drop for Pinned<T> {
    fn drop(&mut self) {
        // SAFETY: the owner. The driver waits for copies in flight before it frees.
        let _ = unsafe { result::free_host(self.values.cast()) };
    }
}
