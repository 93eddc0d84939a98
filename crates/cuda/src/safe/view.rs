// SPDX-License-Identifier: Apache-2.0

//! [`DeviceView`] and [`DeviceViewMut`]: typed ranges of device memory, whichever allocation they
//! lie in.

use std::marker::PhantomData;

use bytemuck::Pod;

use super::{CudaError, Stream};

/// Read access to device memory.
pub struct DeviceView<'a, T> {
    address: u64,
    len: usize,
    owner: PhantomData<&'a [T]>,
}

/// Write access to device memory.
pub struct DeviceViewMut<'a, T> {
    address: u64,
    len: usize,
    owner: PhantomData<&'a mut [T]>,
}

impl<T> Clone for DeviceView<'_, T> {
    fn clone(&self) -> Self {
        *self
    }
}

impl<T> Copy for DeviceView<'_, T> {}

impl<'a, T: Pod> DeviceView<'a, T> {
    /// # Safety
    /// `len` values of `T` at `address`, aligned, readable from the device and initialized for `'a`
    /// and until work enqueued during `'a` has ended.
    pub unsafe fn from_raw(address: u64, len: usize) -> Self {
        Self { address, len, owner: PhantomData }
    }

    pub fn address(&self) -> u64 {
        self.address
    }

    pub fn len(&self) -> usize {
        self.len
    }

    pub fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// A part of the view; `None` if the range leaves the view.
    pub fn slice(&self, start: usize, len: usize) -> Option<Self> {
        (start.checked_add(len)? <= self.len).then(|| Self {
            address: self.address + (start * size_of::<T>()) as u64,
            len,
            owner: PhantomData,
        })
    }

    pub fn bytes(&self) -> DeviceView<'a, u8> {
        DeviceView { address: self.address, len: self.len * size_of::<T>(), owner: PhantomData }
    }

    pub fn to_host(&self, stream: &Stream) -> Result<Vec<T>, CudaError> {
        let mut host = vec![T::zeroed(); self.len];
        self.copy_to_host(stream, &mut host)?;
        Ok(host)
    }

    /// Copies to `host` behind the work of `stream` and returns when the copy is complete.
    pub fn copy_to_host(&self, stream: &Stream, host: &mut [T]) -> Result<(), CudaError> {
        let (found, expected) = (size_of_val(host), self.len * size_of::<T>());
        if found != expected {
            return Err(CudaError::Length { what: "copy to host", found, expected });
        }
        // SAFETY: the view is readable by its contract, `host` has its length and outlives the copy
        // waited for.
        unsafe { stream.enqueue_copy_to_host(host, self.address) }?;
        stream.synchronize()
    }
}

impl<'a, T: Pod> DeviceViewMut<'a, T> {
    /// # Safety
    /// As [`DeviceView::from_raw`], writable, and nothing else uses it during `'a`.
    pub unsafe fn from_raw(address: u64, len: usize) -> Self {
        Self { address, len, owner: PhantomData }
    }

    pub fn address(&self) -> u64 {
        self.address
    }

    pub fn len(&self) -> usize {
        self.len
    }

    pub fn is_empty(&self) -> bool {
        self.len == 0
    }

    pub fn as_view(&self) -> DeviceView<'_, T> {
        DeviceView { address: self.address, len: self.len, owner: PhantomData }
    }

    pub fn reborrow(&mut self) -> DeviceViewMut<'_, T> {
        DeviceViewMut { address: self.address, len: self.len, owner: PhantomData }
    }

    /// A part of the view; `None` if the range leaves the view.
    pub fn slice_mut(&mut self, start: usize, len: usize) -> Option<DeviceViewMut<'_, T>> {
        (start.checked_add(len)? <= self.len).then(|| DeviceViewMut {
            address: self.address + (start * size_of::<T>()) as u64,
            len,
            owner: PhantomData,
        })
    }

    /// Copies `host` to the device and returns when the copy is complete.
    pub fn copy_from_host(&mut self, stream: &Stream, host: &[T]) -> Result<(), CudaError> {
        let (found, expected) = (size_of_val(host), self.len * size_of::<T>());
        if found != expected {
            return Err(CudaError::Length { what: "copy from host", found, expected });
        }
        // SAFETY: the view is writable by its contract, `host` has its length and outlives the copy
        // waited for.
        unsafe { stream.enqueue_copy_to_device(self.address, host) }?;
        stream.synchronize()
    }

    pub fn copy_from(&mut self, stream: &Stream, source: DeviceView<'_, T>) -> Result<(), CudaError> {
        let (found, expected) = (source.len * size_of::<T>(), self.len * size_of::<T>());
        if found != expected {
            return Err(CudaError::Length { what: "copy on the device", found, expected });
        }
        // SAFETY: both views are valid by their contracts and have this length.
        unsafe { stream.enqueue_copy_on_device(self.address, source.address, expected) }
    }

    pub fn fill_bytes(&mut self, stream: &Stream, byte: u8) -> Result<(), CudaError> {
        // SAFETY: the view is writable by its contract.
        let fill = unsafe {
            stream.driver().enqueue_fill(stream.raw(), self.address, byte, self.len * size_of::<T>())
        };
        Ok(fill?)
    }
}
