// SPDX-License-Identifier: Apache-2.0

//! [`LazyModule`]: the kernels of one .cu file, loaded at their first use; [`Kernel`]: one of them,
//! ready to be launched.

use std::collections::HashMap;
use std::ffi::{CStr, c_void};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Instant;

use super::{Context, CudaError, Device, Stream};
use crate::checked::{DriverError, ErrorCode, LaunchConfig, RawFunction, RawModule};

/// One embedded image (a fatbin) on one device. The first [`LazyModule::kernel`] loads it, which
/// takes about a millisecond.
pub struct LazyModule {
    name: &'static str,
    image: &'static [u8],
    device: Device,
    loaded: Mutex<LoadedKernels>,
}

#[derive(Default)]
struct LoadedKernels {
    module: Option<Arc<LoadedModule>>,
    kernels: HashMap<&'static CStr, Kernel>,
}

struct LoadedModule {
    raw: RawModule,
    context: Context,
    /// Device memory that the module takes; the device counts it too.
    bytes: AtomicU64,
}

/// A function on the device. Cheap to clone; keeps its module loaded.
#[derive(Clone)]
pub struct Kernel {
    raw: RawFunction,
    module: Arc<LoadedModule>,
    /// Largest dynamic shared memory that the kernel has opted in to so far.
    shared_bytes: Arc<Mutex<u32>>,
}

/// The driver allocates memory for code in units of 2 MiB, and no image has more than one unit of
/// code.
const MODULE_BYTES_MAX: u64 = 2 << 20;

/// A kernel that needs more shared memory, including what it declares itself, has to opt in.
const DEFAULT_SHARED_BYTES: u32 = 48 << 10;

impl LazyModule {
    /// `image` is a fatbin, a cubin, or PTX text that ends with a zero; whole in each case.
    pub fn new(device: &Device, name: &'static str, image: &'static [u8]) -> Self {
        Self { name, image, device: device.clone(), loaded: Mutex::default() }
    }

    pub fn kernel(&self, name: &'static CStr) -> Result<Kernel, CudaError> {
        let mut loaded = self.loaded.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(kernel) = loaded.kernels.get(name) {
            return Ok(kernel.clone());
        }
        let started = Instant::now();
        let context = self.device.context()?;
        // The driver may bring code to the device with the module, or with each of its functions.
        let before = context.memory_info()?.free_bytes;
        let module = match &loaded.module {
            Some(module) => module.clone(),
            None => loaded.module.insert(Arc::new(self.load(&context)?)).clone(),
        };
        // SAFETY: the module is loaded.
        let raw = unsafe { context.driver().module_function(module.raw, name) }?;
        let bytes = plausible(before.saturating_sub(context.memory_info()?.free_bytes));
        module.bytes.fetch_add(bytes, Ordering::Relaxed);
        self.device.count_module(bytes, started.elapsed());
        // SAFETY: the function is loaded.
        let own_bytes = unsafe { context.driver().static_shared_bytes(raw) }?;
        let allowed = DEFAULT_SHARED_BYTES.saturating_sub(own_bytes);
        let kernel = Kernel { raw, module, shared_bytes: Arc::new(Mutex::new(allowed)) };
        loaded.kernels.insert(name, kernel.clone());
        Ok(kernel)
    }

    fn load(&self, context: &Context) -> Result<LoadedModule, CudaError> {
        // SAFETY: the image is whole and static, by the contract of `new`.
        match unsafe { context.driver().load_module(self.image) } {
            Err(DriverError { code: ErrorCode::NO_BINARY_FOR_GPU, .. }) => {
                let (major, minor) = self.device.capability();
                Err(CudaError::NoCode { module: self.name, major, minor })
            }
            raw => Ok(LoadedModule { raw: raw?, context: context.clone(), bytes: AtomicU64::new(0) }),
        }
    }
}

/// Memory that other processes took while the module was loaded is not the module's.
fn plausible(taken: u64) -> u64 {
    if taken <= MODULE_BYTES_MAX { taken } else { 0 }
}

impl Drop for LoadedModule {
    fn drop(&mut self) {
        // SAFETY: the owner; unloading waits for kernels in flight.
        let _ = unsafe { self.context.driver().unload_module(self.raw) };
        self.context.device().forget_module(self.bytes.load(Ordering::Relaxed));
    }
}

impl Kernel {
    /// # Safety
    /// `arguments` are as many as the kernel has parameters, each pointing to a value of the
    /// parameter's type, and what the kernel reads and writes with them is valid until it has
    /// ended.
    pub unsafe fn launch(
        &self,
        stream: &Stream,
        config: LaunchConfig,
        arguments: &mut [*mut c_void],
    ) -> Result<(), CudaError> {
        self.allow_shared(config.shared_bytes)?;
        // SAFETY: the function is loaded, the stream lives, and the arguments are right by this
        // function's contract.
        Ok(unsafe { stream.driver().launch(self.raw, &config, stream.raw(), arguments) }?)
    }

    /// Blocks of this shape that fit one multiprocessor at once.
    pub fn blocks_per_multiprocessor(&self, block: u32, shared_bytes: u32) -> Result<u32, CudaError> {
        self.allow_shared(shared_bytes)?;
        let driver = self.module.context.driver();
        // SAFETY: the function is loaded.
        Ok(unsafe { driver.blocks_per_multiprocessor(self.raw, block, shared_bytes) }?)
    }

    /// Clusters of a launch like `config` that the device runs at the same time; 0 if it cannot run
    /// one.
    pub fn active_clusters(&self, config: &LaunchConfig) -> Result<u32, CudaError> {
        self.allow_shared(config.shared_bytes)?;
        let driver = self.module.context.driver();
        // SAFETY: the function is loaded.
        match unsafe { driver.active_clusters(self.raw, config) } {
            Err(DriverError { code: ErrorCode::INVALID_CLUSTER_SIZE, .. }) => Ok(0),
            clusters => Ok(clusters?),
        }
    }

    fn allow_shared(&self, bytes: u32) -> Result<(), CudaError> {
        let mut allowed = self.shared_bytes.lock().unwrap_or_else(PoisonError::into_inner);
        if bytes > *allowed {
            // SAFETY: the function is loaded.
            unsafe { self.module.context.driver().set_max_dynamic_shared_bytes(self.raw, bytes) }?;
            *allowed = bytes;
        }
        Ok(())
    }
}
