// SPDX-License-Identifier: Apache-2.0

//! [`Device`]: a GPU that can share memory between processes; [`Context`]: its primary context.
//!
//! A `Device` takes no device memory. Its context does (half a GiB), so the context is retained
//! only when something needs it, and released with the last object that lives in it:
//!
//! ```text
//! Device ---- context() ----> Context <---- Stream, Event, Buffer, LazyModule, PinnedBuffer
//!                             retained while any of these lives; clones of a Device share it
//! ```

use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, Weak};
use std::time::Duration;

use super::{CudaError, DeviceSelector};
use crate::checked::{
    DeviceInfo, DeviceUuid, DriverApi, DriverError, MemoryInfo, RawContext, retry_unsupported,
};

/// Cheap to clone.
#[derive(Debug, Clone)]
pub struct Device(Arc<OpenedDevice>);

#[derive(Debug)]
struct OpenedDevice {
    driver: Arc<dyn DriverApi>,
    info: DeviceInfo,
    granularity: u64,
    context: Mutex<Weak<RetainedContext>>,
    /// Device memory that loaded modules take.
    module_bytes: AtomicU64,
    /// Time spent on loading modules.
    module_nanoseconds: AtomicU64,
}

#[derive(Debug, thiserror::Error)]
pub enum DeviceError {
    #[error("there is no GPU {wanted}; {}", list(.present))]
    Absent { wanted: DeviceSelector, present: Vec<DeviceInfo> },
    #[error(
        "{name} ({uuid}) has no virtual memory management: its memory cannot be shared between processes"
    )]
    NoVmm { name: String, uuid: DeviceUuid },
    #[error(
        "{name} ({uuid}) cannot export memory as file descriptors: a Linux driver outside of WSL is needed"
    )]
    NoPosixFd { name: String, uuid: DeviceUuid },
    #[error("the GPU cannot be used (nvidia-smi may say more; the host's memory can be used without it)")]
    Driver(#[from] DriverError),
}

/// Every GPU that this process sees, in the driver's order.
pub fn devices(driver: &dyn DriverApi) -> Result<Vec<DeviceInfo>, DriverError> {
    (0..driver.device_count()?).map(|ordinal| driver.device_info(ordinal)).collect()
}

impl Device {
    pub fn open(driver: Arc<dyn DriverApi>, wanted: DeviceSelector) -> Result<Self, DeviceError> {
        let mut present = devices(&*driver)?;
        let Some(index) = present.iter().position(|info| wanted.matches(info)) else {
            return Err(DeviceError::Absent { wanted, present });
        };
        let info = present.swap_remove(index);
        let DeviceInfo { name, uuid, .. } = &info;
        if !info.vmm {
            return Err(DeviceError::NoVmm { name: name.clone(), uuid: *uuid });
        }
        if !info.posix_fd {
            return Err(DeviceError::NoPosixFd { name: name.clone(), uuid: *uuid });
        }
        let granularity = retry_unsupported(|| driver.granularity(info.ordinal))?;
        Ok(Self(Arc::new(OpenedDevice {
            driver,
            info,
            granularity,
            context: Mutex::default(),
            module_bytes: AtomicU64::new(0),
            module_nanoseconds: AtomicU64::new(0),
        })))
    }

    pub fn info(&self) -> &DeviceInfo {
        &self.0.info
    }

    pub fn uuid(&self) -> DeviceUuid {
        self.0.info.uuid
    }

    pub fn name(&self) -> &str {
        &self.0.info.name
    }

    /// Major and minor compute capability: (9, 0) on Hopper.
    pub fn capability(&self) -> (u32, u32) {
        (self.0.info.compute_capability / 10, self.0.info.compute_capability % 10)
    }

    pub fn multiprocessors(&self) -> u32 {
        self.0.info.multiprocessors
    }

    /// Dynamic shared memory that one block may have at most, after the kernel has opted in.
    pub fn shared_bytes_max(&self) -> u32 {
        self.0.info.max_shared_bytes_per_block
    }

    /// Sizes and addresses of exportable allocations are multiples of this.
    pub fn granularity(&self) -> u64 {
        self.0.granularity
    }

    /// Whether this device can map the memory of another one. A device always maps its own.
    pub fn can_access(&self, other: &Self) -> Result<bool, DriverError> {
        if self.uuid() == other.uuid() {
            return Ok(true);
        }
        self.driver().can_access_peer(self.ordinal(), other.ordinal())
    }

    /// The other devices of this process whose memory this one can map.
    pub fn peers(&self) -> Result<Vec<DeviceUuid>, DriverError> {
        let mut peers = Vec::new();
        for other in devices(self.driver())?.into_iter().filter(|other| other.uuid != self.uuid()) {
            if self.driver().can_access_peer(self.ordinal(), other.ordinal)? {
                peers.push(other.uuid);
            }
        }
        Ok(peers)
    }

    /// The size of an allocation that holds `bytes`. Exporter and importer use the same rounding.
    /// `None` if the size exceeds 64 bits.
    pub fn allocated_bytes(&self, bytes: u64) -> Option<u64> {
        bytes.max(1).checked_next_multiple_of(self.0.granularity)
    }

    /// `None` if no context of this device is current on this thread, and if the memory is the
    /// host's: the driver does not count pages that the kernel would reclaim for an allocation.
    pub fn memory_info(&self) -> Option<MemoryInfo> {
        if self.info().integrated { None } else { self.driver().memory_info(self.ordinal()).ok() }
    }

    /// The device's primary context, current on this thread on return. Retains the context unless a
    /// clone of this `Device` has done so already.
    pub fn context(&self) -> Result<Context, DriverError> {
        let mut live = self.live_context();
        let context = match live.upgrade() {
            Some(retained) => Context(retained),
            None => {
                let raw = retry_unsupported(|| self.driver().retain_context(self.ordinal()))?;
                let retained = Arc::new(RetainedContext { device: self.clone(), raw });
                *live = Arc::downgrade(&retained);
                Context(retained)
            }
        };
        drop(live);
        context.bind()?;
        Ok(context)
    }

    /// Makes the device's context current on this thread.
    pub fn bind(&self) -> Result<(), CudaError> {
        self.context()?;
        Ok(())
    }

    /// Waits for all work that this process has started on the device.
    pub fn synchronize(&self) -> Result<(), CudaError> {
        let live = self.live_context().upgrade();
        // Without a context there is no work.
        live.map_or(Ok(()), |retained| Ok(Context(retained).synchronize()?))
    }

    /// Device memory that modules of this process take: the free memory that loading each of them
    /// cost.
    pub fn module_bytes(&self) -> u64 {
        self.0.module_bytes.load(Ordering::Relaxed)
    }

    /// Time spent so far on loading modules and their kernels, each at its first use.
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

    /// The driver, for measurements and for copies whose addresses the caller vouches for.
    pub fn driver(&self) -> &dyn DriverApi {
        &*self.0.driver
    }

    pub(super) fn ordinal(&self) -> u32 {
        self.0.info.ordinal
    }

    fn live_context(&self) -> MutexGuard<'_, Weak<RetainedContext>> {
        // A panic cannot leave the pointer half written.
        self.0.context.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Keeps the primary context retained: half a GiB of device memory while any clone of it lives in
/// this process.
#[derive(Debug, Clone)]
pub struct Context(Arc<RetainedContext>);

#[derive(Debug)]
struct RetainedContext {
    device: Device,
    raw: RawContext,
}

impl Context {
    /// Makes the context current on the calling thread.
    pub fn bind(&self) -> Result<(), DriverError> {
        // SAFETY: retained as long as self. A thread that has it current after that can only get
        // errors: every use of device memory in this crate holds on to a context.
        unsafe { self.driver().set_current(self.0.raw) }
    }

    /// Waits for all work that this process has started on the device.
    pub fn synchronize(&self) -> Result<(), DriverError> {
        self.bind()?;
        self.driver().synchronize()
    }

    pub fn memory_info(&self) -> Result<MemoryInfo, DriverError> {
        self.bind()?;
        self.driver().memory_info(self.device().ordinal())
    }

    pub fn device(&self) -> &Device {
        &self.0.device
    }

    pub(super) fn driver(&self) -> &dyn DriverApi {
        self.0.device.driver()
    }
}

impl Drop for RetainedContext {
    fn drop(&mut self) {
        // SAFETY: retained once, by `Device::context`; every object that lives in the context keeps
        // this value. An error has no receiver: the driver is broken or shutting down, and releases
        // the context itself.
        let _ = unsafe { self.device.driver().release_context(self.device.ordinal()) };
    }
}

fn list(devices: &[DeviceInfo]) -> String {
    if devices.is_empty() {
        return "this process sees none".to_owned();
    }
    let names: Vec<String> =
        devices.iter().map(|info| format!("cuda:{} {} ({})", info.ordinal, info.name, info.uuid)).collect();
    format!("this process sees {}", names.join(", "))
}
