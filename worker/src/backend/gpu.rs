//! A GPU: weights in imported device memory, kernels of the CUDA backend.

use kernels::cuda::{Cuda, CudaError, Device as KernelDevice, WeightData};
use memory::attach::{Attached, Granted};
use memory::cuda::nvml::Nvml;
use memory::cuda::{Device, DeviceSelector, open_driver};
use ops::OpError;
use quant::layout::LAYOUT_TILES;

use super::{BackendUsage, DeviceRuntime};
use crate::attach::WorkerAttachError;
use crate::memory_plan::context_bytes;
use crate::startup_timeline::LazyInit;

/// The driver has been started; nothing of the device's memory is taken.
pub(crate) struct DetectedGpu {
    memory: Device,
    nvml: Option<Nvml>,
}

pub(crate) struct GpuRuntime {
    memory: Device,
    kernels: KernelDevice,
    context_bytes: u64,
}

impl DetectedGpu {
    pub(crate) fn open(wanted: DeviceSelector) -> Result<Self, WorkerAttachError> {
        // Both start slowly, and know nothing of each other.
        let (driver, nvml) = std::thread::scope(|scope| {
            let nvml = scope.spawn(Nvml::open);
            (open_driver(), nvml.join().ok().and_then(Result::ok))
        });
        Ok(Self { memory: Device::open(driver?, wanted)?, nvml })
    }

    pub(crate) fn device(&self) -> String {
        self.memory.uuid().to_string()
    }

    /// Makes a context, which the lease has reserved. Others may load and start meanwhile: what the device as a whole has less
    /// afterwards says nothing of this process.
    pub(crate) fn enter(self, _lease: &Granted) -> Result<GpuRuntime, WorkerAttachError> {
        let Self { memory, nvml } = self;
        let counted = || nvml.as_ref()?.process_bytes(memory.uuid()).ok()?;
        let before = counted();
        let failed = |error: CudaError| {
            let (device, no_room) = (memory.uuid().to_string(), error.is_lack_of_memory());
            let source = Box::new(error);
            if no_room {
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
        let lazy = LazyInit { modules: compute.device().module_time(), graphs: compute.graph_time() };
        BackendUsage { workspace_used: Some(compute.device_bytes().into()), lazy }
    }
}
