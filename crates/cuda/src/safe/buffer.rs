// SPDX-License-Identifier: Apache-2.0

//! [`Buffer`]: device memory of this process (cuMemAlloc).

use std::marker::PhantomData;

use bytemuck::Pod;

use super::{Context, CudaError, Device, DeviceView, DeviceViewMut, Stream};

/// `len` values on the device, uninitialized until written.
pub struct Buffer<T> {
    context: Context,
    address: u64,
    len: usize,
    values: PhantomData<T>,
}

impl<T: Pod> Buffer<T> {
    pub fn new(device: &Device, len: usize) -> Result<Self, CudaError> {
        let context = device.context()?;
        // The driver refuses empty allocations.
        let bytes = (len * size_of::<T>()).max(1);
        let address = match context.driver().allocate(bytes) {
            Err(error) if error.is_out_of_memory() => {
                let free = context.memory_info()?.free_bytes as usize;
                return Err(CudaError::OutOfMemory { bytes, free });
            }
            address => address?,
        };
        Ok(Self { context, address, len, values: PhantomData })
    }

    /// A copy of `host`, complete on return.
    pub fn from_host(stream: &Stream, host: &[T]) -> Result<Self, CudaError> {
        let mut buffer = Self::new(stream.device(), host.len())?;
        buffer.view_mut().copy_from_host(stream, host)?;
        Ok(buffer)
    }

    pub fn len(&self) -> usize {
        self.len
    }

    pub fn is_empty(&self) -> bool {
        self.len == 0
    }

    pub fn view(&self) -> DeviceView<'_, T> {
        // SAFETY: `len` values at `address`, which the buffer keeps allocated until work on them
        // has ended.
        unsafe { DeviceView::from_raw(self.address, self.len) }
    }

    pub fn view_mut(&mut self) -> DeviceViewMut<'_, T> {
        // SAFETY: as above, borrowed mutably.
        unsafe { DeviceViewMut::from_raw(self.address, self.len) }
    }

    /// All values, once the work enqueued to `stream` has ended.
    pub fn to_host(&self, stream: &Stream) -> Result<Vec<T>, CudaError> {
        self.view().to_host(stream)
    }
}

impl<T> Drop for Buffer<T> {
    fn drop(&mut self) {
        // Kernels in flight may still use the memory, so the device is waited for. If that fails,
        // the context is gone, and the memory with it.
        if self.context.synchronize().is_ok() {
            // SAFETY: the owner, and all work that could use the memory has ended.
            let _ = unsafe { self.context.driver().free(self.address) };
        }
    }
}
