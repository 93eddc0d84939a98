//! [`Family`]: the kernels of one .cu file, loaded when first used; [`Launch`]: how a kernel is started.

use std::collections::HashMap;
use std::ffi::{CStr, c_void};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Instant;

use cudarc::driver::result;
use cudarc::driver::sys;

use super::error::Named;
use super::{CudaError, Device, Stream};

/// One embedded image on one device. Loading takes about a millisecond and happens at the first [`Family::kernel`].
pub struct Family {
    name: &'static str,
    image: &'static [u8],
    device: Device,
    loaded: Mutex<Loaded>,
}

#[derive(Default)]
struct Loaded {
    module: Option<Arc<Module>>,
    kernels: HashMap<&'static CStr, Kernel>,
}

struct Module {
    raw: sys::CUmodule,
    /// Keeps the context.
    device: Device,
    /// Device memory that was taken for it, counted by the device too.
    bytes: AtomicU64,
}

// SAFETY: a module handle may be used from any thread.
unsafe impl Send for Module {}
// SAFETY: as above.
unsafe impl Sync for Module {}

/// A function on the device. Cheap to clone; keeps its module loaded.
#[derive(Clone)]
pub struct Kernel {
    raw: sys::CUfunction,
    _module: Arc<Module>,
    /// Largest dynamic shared memory allowed so far.
    shared_bytes: Arc<Mutex<u32>>,
}

// SAFETY: a function handle may be used from any thread.
unsafe impl Send for Kernel {}
// SAFETY: as above.
unsafe impl Sync for Kernel {}

/// Grid and block of one start.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Launch {
    pub grid: (u32, u32, u32),
    pub block: u32,
    /// Dynamic shared memory.
    pub shared_bytes: u32,
    /// The kernel may start while its predecessor in the stream is ending; it must wait itself
    /// (`griddepcontrol.wait`) before it touches what the predecessor writes or reads.
    pub overlaps_predecessor: bool,
}

/// The driver takes memory for code in units of 2 MiB, and no family has more than one of code.
const MODULE_BYTES_MAX: u64 = 2 << 20;

/// Above this a kernel has to opt in, what it declares itself included.
const DEFAULT_SHARED_BYTES: u32 = 48 << 10;

impl Family {
    pub fn new(device: &Device, name: &'static str, image: &'static [u8]) -> Self {
        Self { name, image, device: device.clone(), loaded: Mutex::default() }
    }

    pub fn kernel(&self, name: &'static CStr) -> Result<Kernel, CudaError> {
        let mut loaded = self.loaded.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(kernel) = loaded.kernels.get(name) {
            return Ok(kernel.clone());
        }
        let started = Instant::now();
        // The driver may bring code to the device with the module, or with each of its functions.
        let before = self.device.memory_free_bytes()?;
        let module = match &loaded.module {
            Some(module) => module.clone(),
            None => loaded.module.insert(Arc::new(self.load()?)).clone(),
        };
        let mut raw = std::ptr::null_mut();
        // SAFETY: the module is loaded; the name is a C string.
        unsafe { sys::cuModuleGetFunction(&mut raw, module.raw, name.as_ptr()) }
            .result()
            .named("cuModuleGetFunction")?;
        let bytes = plausible(before.saturating_sub(self.device.memory_free_bytes()?) as u64);
        module.bytes.fetch_add(bytes, Ordering::Relaxed);
        self.device.count_module(bytes, started.elapsed());
        let attribute = sys::CUfunction_attribute_enum::CU_FUNC_ATTRIBUTE_SHARED_SIZE_BYTES;
        // SAFETY: the function is loaded.
        let own_bytes = unsafe { result::function::get_function_attribute(raw, attribute) }
            .named("cuFuncGetAttribute")?;
        let allowed = DEFAULT_SHARED_BYTES.saturating_sub(own_bytes.max(0) as u32);
        let kernel = Kernel { raw, _module: module, shared_bytes: Arc::new(Mutex::new(allowed)) };
        loaded.kernels.insert(name, kernel.clone());
        Ok(kernel)
    }

    fn load(&self) -> Result<Module, CudaError> {
        self.device.bind()?;
        // SAFETY: the image is a fatbin that nvcc made, whole and static.
        match unsafe { result::module::load_data(self.image.as_ptr().cast()) } {
            Ok(raw) => Ok(Module { raw, device: self.device.clone(), bytes: AtomicU64::new(0) }),
            Err(error) if error.0 == sys::CUresult::CUDA_ERROR_NO_BINARY_FOR_GPU => Err(self.no_code()),
            Err(source) => Err(CudaError::Call { call: "cuModuleLoadData", source }),
        }
    }

    fn no_code(&self) -> CudaError {
        let (major, minor) = self.device.capability();
        CudaError::NoCode { family: self.name, major, minor }
    }
}

/// What others have taken of the device meanwhile is no module's.
fn plausible(taken: u64) -> u64 {
    if taken <= MODULE_BYTES_MAX { taken } else { 0 }
}

impl Drop for Module {
    fn drop(&mut self) {
        // SAFETY: the owner; unloading waits for kernels in flight.
        let _ = unsafe { result::module::unload(self.raw) };
        self.device.forget_module(self.bytes.load(Ordering::Relaxed));
    }
}

impl Kernel {
    /// # Safety
    /// `arguments` are as many as the kernel has parameters, each pointing to a value of the parameter's type, and what
    /// the kernel reads and writes with them is valid until it has ended.
    pub unsafe fn launch(
        &self,
        stream: &Stream,
        launch: Launch,
        arguments: &mut [*mut c_void],
    ) -> Result<(), CudaError> {
        self.allow_shared(launch.shared_bytes)?;
        let mut attribute = sys::CUlaunchAttribute {
            id: sys::CUlaunchAttributeID::CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION,
            pad: [0; 4],
            value: sys::CUlaunchAttributeValue { programmaticStreamSerializationAllowed: 1 },
        };
        let config = sys::CUlaunchConfig {
            gridDimX: launch.grid.0,
            gridDimY: launch.grid.1,
            gridDimZ: launch.grid.2,
            blockDimX: launch.block,
            blockDimY: 1,
            blockDimZ: 1,
            sharedMemBytes: launch.shared_bytes,
            hStream: stream.raw(),
            attrs: &mut attribute,
            numAttrs: u32::from(launch.overlaps_predecessor),
        };
        // SAFETY: the function is loaded, the stream lives, and the arguments are right by this function's contract.
        unsafe { sys::cuLaunchKernelEx(&config, self.raw, arguments.as_mut_ptr(), std::ptr::null_mut()) }
            .result()
            .named("cuLaunchKernelEx")
    }

    /// Blocks of this shape that fit one multiprocessor at once.
    pub fn blocks_per_multiprocessor(&self, block: u32, shared_bytes: u32) -> Result<u32, CudaError> {
        self.allow_shared(shared_bytes)?;
        // SAFETY: the function is loaded.
        let blocks = unsafe {
            result::occupancy::max_active_block_per_multiprocessor(
                self.raw,
                block as i32,
                shared_bytes as usize,
            )
        };
        Ok(blocks.named("cuOccupancyMaxActiveBlocksPerMultiprocessor")?.max(0) as u32)
    }

    fn allow_shared(&self, bytes: u32) -> Result<(), CudaError> {
        let mut allowed = self.shared_bytes.lock().unwrap_or_else(PoisonError::into_inner);
        if bytes > *allowed {
            let attribute = sys::CUfunction_attribute_enum::CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES;
            // SAFETY: the function is loaded.
            unsafe { result::function::set_function_attribute(self.raw, attribute, bytes as i32) }
                .named("cuFuncSetAttribute")?;
            *allowed = bytes;
        }
        Ok(())
    }
}

/// The image that build.rs made of `kernels/cuda/<stem>.cu`.
macro_rules! image {
    ($stem:literal) => {
        include_bytes!(concat!(env!("OUT_DIR"), "/", $stem, ".fatbin")).as_slice()
    };
}
pub(super) use image;

/// Pointers to the arguments of a kernel, for [`Kernel::launch`].
macro_rules! arguments {
    ($($argument:expr),* $(,)?) => {
        &mut [$((&raw const $argument).cast_mut().cast::<std::ffi::c_void>()),*]
    };
}
pub(super) use arguments;
