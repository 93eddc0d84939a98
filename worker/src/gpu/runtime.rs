//! A GPU as a [`DeviceRuntime`]: weights in imported device memory, kernels of the CUDA backend.

use kernels::cuda::{Cuda, CudaError, Device as KernelDevice, WeightData};
use memory::attach::{Attached, Granted};
use memory::cuda::nvml::Nvml;
use memory::cuda::{Device, DeviceSelector, open_driver};
use ops::OpError;
use quant::DType;
use quant::layout::{LAYOUT_TILES, planes};

use super::context::context_bytes;
use crate::attach_error::WorkerAttachError;
use crate::backend::{BackendUsage, DeviceRuntime};
use crate::engine_thread::EngineThread;
use crate::run_error::WorkerRunError;
use crate::startup_timeline::LazyInit;

/// The body of [`super::run_engine`].
pub(super) fn run_engine(
    mut thread: EngineThread<'_>,
    selector: DeviceSelector,
) -> Result<(), WorkerRunError> {
    let detected = DetectedGpu::open(selector)?;
    thread.timeline.mark("driver");
    let granted = thread.request_grant::<GpuRuntime>(detected.memory.uuid().to_string())?;
    thread.timeline.mark("wait");
    let runtime = detected.create_context(&granted)?;
    thread.timeline.mark("context");
    thread.run_on(&runtime, granted)
}

/// A GPU whose driver is loaded. The process has no memory on it yet.
struct DetectedGpu {
    memory: Device,
    nvml: Option<Nvml>,
}

struct GpuRuntime {
    memory: Device,
    kernels: KernelDevice,
    context_bytes: u64,
}

impl DetectedGpu {
    fn open(selector: DeviceSelector) -> Result<Self, WorkerAttachError> {
        // Driver and NVML start slowly and independently of each other.
        let (driver, nvml) = std::thread::scope(|scope| {
            let nvml = scope.spawn(Nvml::open);
            (open_driver(), nvml.join().ok().and_then(Result::ok))
        });
        Ok(Self { memory: Device::open(driver?, selector)?, nvml })
    }

    /// Creates the context, whose memory the lease has reserved. Its size comes from the driver's count for this
    /// process: other processes may load and start meanwhile, so the device's free memory says nothing.
    fn create_context(self, _lease: &Granted) -> Result<GpuRuntime, WorkerAttachError> {
        let Self { memory, nvml } = self;
        let counted = || nvml.as_ref()?.process_bytes(memory.uuid()).ok()?;
        let before = counted();
        let failed = |error: CudaError| {
            let (device, is_out_of_memory) = (memory.uuid().to_string(), error.is_lack_of_memory());
            let source = Box::new(error);
            if is_out_of_memory {
                WorkerAttachError::NoRoom { device, source }
            } else {
                WorkerAttachError::Context { device, source }
            }
        };
        let kernels = KernelDevice::open_memory(&memory).map_err(failed)?;
        let context_bytes = context_bytes(before, counted());
        Ok(GpuRuntime { memory, kernels, context_bytes })
    }
}

impl DeviceRuntime for GpuRuntime {
    type Compute = Cuda;

    const LAYOUT: u32 = LAYOUT_TILES;

    const SUPPORTS_ATTENTION_WINDOWS: bool = false;

    fn supports_dtype(dtype: DType) -> bool {
        planes(dtype).is_some()
    }

    fn device(&self) -> String {
        self.memory.uuid().to_string()
    }

    fn context_bytes(&self) -> u64 {
        self.context_bytes
    }

    fn isa(&self, compute: &Cuda) -> String {
        compute.fingerprint()
    }

    fn describe(&self) -> String {
        format!("{} ({})", self.memory.facts().name, self.memory.uuid())
    }

    fn import(&self, granted: Granted) -> Result<Attached<Vec<WeightData>>, memory::attach::AttachError> {
        Ok(granted
            .import_cuda(&self.memory)?
            .map(|tensors| tensors.into_iter().map(WeightData::from).collect()))
    }

    fn compute(&self) -> Result<Cuda, OpError> {
        Cuda::new(&self.kernels)
    }

    fn measure(compute: &Cuda) -> BackendUsage {
        let lazy_init = LazyInit { modules: compute.device().module_time(), graphs: compute.graph_time() };
        BackendUsage { workspace_used: Some(compute.device_bytes().into()), lazy_init }
    }
}
