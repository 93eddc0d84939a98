//! [`Device`]: a GPU and this process's context on it.

use std::ffi::c_int;
use std::sync::Arc;
use std::sync::OnceLock;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use cudarc::driver::result;
use cudarc::driver::sys::{self, CUdevice_attribute as Attribute};
use memory::cuda::{self as shared, DeviceSelector, DeviceUuid};

use super::CudaError;
use super::error::Named;

/// Cheap to clone; the context goes with the last clone and the last thing made from it.
#[derive(Clone)]
pub struct Device(Arc<Context>);

struct Context {
    device: sys::CUdevice,
    context: sys::CUcontext,
    name: String,
    uuid: DeviceUuid,
    capability: (u32, u32),
    multiprocessors: u32,
    shared_bytes_max: u32,
    /// The same device by the layer that maps memory, once it is needed.
    memory: OnceLock<shared::Device>,
    /// Device memory that modules took when they were loaded.
    module_bytes: AtomicU64,
    /// What loading them took.
    module_nanoseconds: AtomicU64,
}

// SAFETY: a context may be current on any number of threads; the driver's calls on it are thread-safe.
unsafe impl Send for Context {}
// SAFETY: as above; the fields never change, but for atomics.
unsafe impl Sync for Context {}

/// How many GPUs this process sees. The first call loads and starts the driver (0.2 s).
pub fn device_count() -> Result<usize, CudaError> {
    // SAFETY: looks for a library file, whose load has no side effects on us.
    if !unsafe { sys::is_culib_present() } {
        return Err(CudaError::NoDriver);
    }
    result::init().named("cuInit")?;
    Ok(result::device::get_count().named("cuDeviceGetCount")?.max(0) as usize)
}

impl Device {
    /// Opens device `index` and makes its context current on this thread.
    pub fn open(index: usize) -> Result<Self, CudaError> {
        let count = device_count()?;
        if index >= count {
            return Err(CudaError::NoDevice { index, count });
        }
        let device = result::device::get(index as c_int).named("cuDeviceGet")?;
        let uuid = device_uuid(device)?;
        let name = result::device::get_name(device).named("cuDeviceGetName")?;
        let attribute = |attribute| -> Result<u32, CudaError> {
            // SAFETY: `device` came from cuDeviceGet.
            let value = unsafe { result::device::get_attribute(device, attribute) };
            Ok(value.named("cuDeviceGetAttribute")?.max(0) as u32)
        };
        let capability = (
            attribute(Attribute::CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR)?,
            attribute(Attribute::CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR)?,
        );
        let multiprocessors = attribute(Attribute::CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT)?;
        let shared_bytes_max = attribute(Attribute::CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_BLOCK_OPTIN)?;
        // SAFETY: as above; released when the last clone goes.
        let context = unsafe { result::primary_ctx::retain(device) }.named("cuDevicePrimaryCtxRetain")?;
        let device = Self(Arc::new(Context {
            device,
            context,
            name,
            uuid,
            capability,
            multiprocessors,
            shared_bytes_max,
            memory: OnceLock::new(),
            module_bytes: AtomicU64::new(0),
            module_nanoseconds: AtomicU64::new(0),
        }));
        device.bind()?;
        Ok(device)
    }

    pub fn open_uuid(uuid: DeviceUuid) -> Result<Self, CudaError> {
        for index in 0..device_count()? {
            if device_uuid(result::device::get(index as c_int).named("cuDeviceGet")?)? == uuid {
                return Self::open(index);
            }
        }
        Err(CudaError::NoSuchUuid { uuid: uuid.to_string() })
    }

    /// The same device by the layer that maps memory: both hold the device's one primary context, so what that one maps
    /// is there for kernels.
    pub fn open_memory(device: &shared::Device) -> Result<Self, CudaError> {
        let opened = Self::open_uuid(device.uuid())?;
        opened.0.memory.get_or_init(|| device.clone());
        Ok(opened)
    }

    /// What it was opened from, or else the same device opened by that layer now, which starts the driver once more.
    pub(super) fn memory(&self) -> Result<&shared::Device, MemoryLayerError> {
        if let Some(device) = self.0.memory.get() {
            return Ok(device);
        }
        let device = shared::Device::open(shared::open_driver()?, DeviceSelector::Uuid(self.uuid()))?;
        Ok(self.0.memory.get_or_init(|| device))
    }

    /// Makes the context current on the calling thread. Every thread that uses the device calls it once; all else
    /// here assumes it.
    pub fn bind(&self) -> Result<(), CudaError> {
        // SAFETY: the context is retained as long as self.
        unsafe { result::ctx::set_current(self.0.context) }.named("cuCtxSetCurrent")
    }

    /// Waits for everything this process has started on the device.
    pub fn synchronize(&self) -> Result<(), CudaError> {
        self.bind()?;
        result::ctx::synchronize().named("cuCtxSynchronize")
    }

    pub fn name(&self) -> &str {
        &self.0.name
    }

    pub fn uuid(&self) -> DeviceUuid {
        self.0.uuid
    }

    /// Major and minor: (9, 0) on Hopper.
    pub fn capability(&self) -> (u32, u32) {
        self.0.capability
    }

    pub fn multiprocessors(&self) -> u32 {
        self.0.multiprocessors
    }

    /// What one block may have at most, after opting in.
    pub fn shared_bytes_max(&self) -> u32 {
        self.0.shared_bytes_max
    }

    pub fn memory_free_bytes(&self) -> Result<usize, CudaError> {
        self.bind()?;
        Ok(result::mem_get_info().named("cuMemGetInfo")?.0)
    }

    /// Device memory that modules of this process take: as much less was free once each was loaded.
    pub fn module_bytes(&self) -> u64 {
        self.0.module_bytes.load(Ordering::Relaxed)
    }

    /// What loading modules and their kernels has taken so far: each when it was first used.
    pub fn module_time(&self) -> Duration {
        Duration::from_nanos(self.0.module_nanoseconds.load(Ordering::Relaxed))
    }

    pub(super) fn count_module(&self, bytes: u64, took: Duration) {
        self.0.module_bytes.fetch_add(bytes, Ordering::Relaxed);
        self.0.module_nanoseconds.fetch_add(took.as_nanos() as u64, Ordering::Relaxed);
    }

    pub(super) fn forget_module(&self, bytes: u64) {
        self.0.module_bytes.fetch_sub(bytes, Ordering::Relaxed);
    }
}

/// Why the layer that maps memory has no device.
#[derive(Debug, thiserror::Error)]
pub(super) enum MemoryLayerError {
    #[error(transparent)]
    Driver(#[from] shared::OpenDriverError),
    #[error(transparent)]
    Device(#[from] shared::DeviceError),
}

impl Drop for Context {
    fn drop(&mut self) {
        // SAFETY: retained in `open`, and everything made from it holds a clone of the Arc.
        // An error here has nobody to go to: the process is ending or the driver already gone.
        let _ = unsafe { result::primary_ctx::release(self.device) };
    }
}

fn device_uuid(device: sys::CUdevice) -> Result<DeviceUuid, CudaError> {
    let uuid = result::device::get_uuid(device).named("cuDeviceGetUuid")?;
    Ok(DeviceUuid(uuid.bytes.map(|byte| byte as u8)))
}
