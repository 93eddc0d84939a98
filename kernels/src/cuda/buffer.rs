//! [`Buffer`]: device memory of this process; [`View`] and [`ViewMut`]: typed ranges of device memory, whoever owns it.

use std::marker::PhantomData;

use bytemuck::Pod;
use cudarc::driver::result;
use cudarc::driver::sys;

use super::error::Named;
use super::{CudaError, Device, Stream};

/// `len` values on the device, uninitialised until written.
pub struct Buffer<T> {
    device: Device,
    address: u64,
    len: usize,
    values: PhantomData<T>,
}

/// Read access to device memory.
pub struct View<'a, T> {
    address: u64,
    len: usize,
    owner: PhantomData<&'a [T]>,
}

/// Write access to device memory.
pub struct ViewMut<'a, T> {
    address: u64,
    len: usize,
    owner: PhantomData<&'a mut [T]>,
}

impl<T> Clone for View<'_, T> {
    fn clone(&self) -> Self {
        *self
    }
}

impl<T> Copy for View<'_, T> {}

impl<T: Pod> Buffer<T> {
    pub fn new(device: &Device, len: usize) -> Result<Self, CudaError> {
        device.bind()?;
        // The driver refuses empty allocations.
        let bytes = (len * size_of::<T>()).max(1);
        // SAFETY: the context is current; freed when self goes.
        let address = match unsafe { result::malloc_sync(bytes) } {
            Ok(address) => address,
            Err(error) if error.0 == sys::CUresult::CUDA_ERROR_OUT_OF_MEMORY => {
                return Err(CudaError::OutOfMemory { bytes, free: device.memory_free_bytes()? });
            }
            Err(source) => return Err(CudaError::Call { call: "cuMemAlloc", source }),
        };
        Ok(Self { device: device.clone(), address, len, values: PhantomData })
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

    pub fn view(&self) -> View<'_, T> {
        View { address: self.address, len: self.len, owner: PhantomData }
    }

    pub fn view_mut(&mut self) -> ViewMut<'_, T> {
        ViewMut { address: self.address, len: self.len, owner: PhantomData }
    }

    /// All values, once the work given to `stream` has ended.
    pub fn to_host(&self, stream: &Stream) -> Result<Vec<T>, CudaError> {
        self.view().to_host(stream)
    }
}

impl<T> Drop for Buffer<T> {
    fn drop(&mut self) {
        // SAFETY: the owner. Kernels in flight may still use the memory, so the device is waited for; where that
        // fails the context is gone, and the memory with it.
        unsafe {
            if self.device.synchronize().is_ok() {
                let _ = result::free_sync(self.address);
            }
        }
    }
}

impl<'a, T: Pod> View<'a, T> {
    /// # Safety
    /// `len` values of `T` at `address`, aligned, readable from the device and initialised for `'a` and until work given
    /// during `'a` has ended.
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

    /// None if the range goes beyond the view.
    pub fn slice(&self, start: usize, len: usize) -> Option<Self> {
        (start.checked_add(len)? <= self.len).then(|| Self {
            address: self.address + (start * size_of::<T>()) as u64,
            len,
            owner: PhantomData,
        })
    }

    pub fn bytes(&self) -> View<'a, u8> {
        View { address: self.address, len: self.len * size_of::<T>(), owner: PhantomData }
    }

    pub fn to_host(&self, stream: &Stream) -> Result<Vec<T>, CudaError> {
        let mut host = vec![T::zeroed(); self.len];
        self.copy_to_host(stream, &mut host)?;
        Ok(host)
    }

    /// Waits for the stream and copies.
    pub fn copy_to_host(&self, stream: &Stream, host: &mut [T]) -> Result<(), CudaError> {
        let (found, expected) = (size_of_val(host), self.len * size_of::<T>());
        if found != expected {
            return Err(CudaError::Length { what: "copy to host", found, expected });
        }
        // SAFETY: the view is readable by its contract, `host` has its length and outlives the copy waited for.
        unsafe { result::memcpy_dtoh_async(host, self.address, stream.raw()) }.named("cuMemcpyDtoH")?;
        stream.synchronize()
    }
}

impl<'a, T: Pod> ViewMut<'a, T> {
    /// # Safety
    /// As [`View::from_raw`], writable, and nothing else uses it during `'a`.
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

    pub fn as_view(&self) -> View<'_, T> {
        View { address: self.address, len: self.len, owner: PhantomData }
    }

    pub fn reborrow(&mut self) -> ViewMut<'_, T> {
        ViewMut { address: self.address, len: self.len, owner: PhantomData }
    }

    /// None if the range goes beyond the view.
    pub fn slice_mut(&mut self, start: usize, len: usize) -> Option<ViewMut<'_, T>> {
        (start.checked_add(len)? <= self.len).then(|| ViewMut {
            address: self.address + (start * size_of::<T>()) as u64,
            len,
            owner: PhantomData,
        })
    }

    /// Complete on return.
    pub fn copy_from_host(&mut self, stream: &Stream, host: &[T]) -> Result<(), CudaError> {
        let (found, expected) = (size_of_val(host), self.len * size_of::<T>());
        if found != expected {
            return Err(CudaError::Length { what: "copy from host", found, expected });
        }
        // SAFETY: the view is writable by its contract, `host` has its length and outlives the copy waited for.
        unsafe { result::memcpy_htod_async(self.address, host, stream.raw()) }.named("cuMemcpyHtoD")?;
        stream.synchronize()
    }

    pub fn copy_from(&mut self, stream: &Stream, source: View<'_, T>) -> Result<(), CudaError> {
        let (found, expected) = (source.len * size_of::<T>(), self.len * size_of::<T>());
        if found != expected {
            return Err(CudaError::Length { what: "copy on the device", found, expected });
        }
        // SAFETY: both views are valid by their contracts and have this length.
        unsafe { result::memcpy_dtod_async(self.address, source.address, expected, stream.raw()) }
            .named("cuMemcpyDtoD")
    }

    pub fn fill_bytes(&mut self, stream: &Stream, byte: u8) -> Result<(), CudaError> {
        // SAFETY: the view is writable by its contract.
        unsafe { result::memset_d8_async(self.address, byte, self.len * size_of::<T>(), stream.raw()) }
            .named("cuMemsetD8")
    }
}
