//! A GPU: weights in imported device memory, kernels of the CUDA backend.

use kernels::cuda::{Cuda, CudaError, Data, Device as KernelDevice};
use memory::attach::{Attached, Granted};
use memory::cuda::nvml::Nvml;
use memory::cuda::{Device, DeviceSelector, open_driver};
use ops::OpError;
use quant::layout::LAYOUT_TILES;

use super::Place;
use crate::attach::AttachError;
use crate::demand::{Workspace, context_bytes};
use crate::timeline::Timeline;

pub(crate) struct Gpu {
    memory: Device,
    kernels: KernelDevice,
    context_bytes: u64,
}

impl Gpu {
    /// Starts the driver and makes a context: a fifth of a second or more, in which a model may well be loading and other
    /// workers start. What the device as a whole has less meanwhile says nothing of this process.
    pub(crate) fn open(wanted: DeviceSelector, timeline: &mut Timeline) -> Result<Self, AttachError> {
        // Both start slowly, and know nothing of each other.
        let (driver, nvml) = std::thread::scope(|scope| {
            let nvml = scope.spawn(Nvml::open);
            (open_driver(), nvml.join().ok().and_then(Result::ok))
        });
        timeline.mark("driver");
        let memory = Device::open(driver?, wanted)?;
        let counted = || nvml.as_ref()?.process_bytes(memory.uuid()).ok()?;
        let before = counted();
        let failed = |error: CudaError| {
            let (device, no_room) = (memory.uuid().to_string(), error.is_lack_of_memory());
            let source = Box::new(error);
            if no_room {
                AttachError::NoRoom { device, source }
            } else {
                AttachError::Context { device, source }
            }
        };
        let kernels = KernelDevice::open_memory(&memory).map_err(failed)?;
        let context_bytes = context_bytes(before, counted());
        timeline.mark("context");
        Ok(Self { memory, kernels, context_bytes })
    }
}

impl Place for Gpu {
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

    fn import(&self, granted: Granted) -> Result<Attached<Vec<Data>>, memory::attach::AttachError> {
        Ok(granted.import_cuda(&self.memory)?.map(|tensors| tensors.into_iter().map(Data::from).collect()))
    }

    fn compute(&self) -> Result<Cuda, OpError> {
        Cuda::new(&self.kernels)
    }

    fn workspace_used(compute: &Cuda) -> Option<Workspace> {
        Some(compute.device_bytes().into())
    }
}
