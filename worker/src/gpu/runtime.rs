// SPDX-License-Identifier: Apache-2.0

//! A GPU as a [`DeviceRuntime`]: weights in imported device memory, kernels of the CUDA backend.

use std::path::Path;
use std::time::{Duration, Instant};

use cuda::nvml::Nvml;
use cuda::{Context, Device, DeviceSelector, DriverError, open_driver};
use handoff::attach::{AttachedModel, GrantedModel};
use kernels::cuda::{Cuda, WeightData};
use ops::OpError;
use quant::DType;
use quant::layout::{LAYOUT_TILES, planes};
use turns::{TurnBounds, Turns};

use super::context::context_bytes;
use crate::attach_error::WorkerAttachError;
use crate::backend::{BackendUsage, DeviceRuntime};
use crate::engine_thread::EngineThread;
use crate::run_error::WorkerRunError;
use crate::startup_timeline::LazyInit;

/// The pipe that the MPS daemon makes when it accepts clients.
const MPS_CONTROL_PIPE: &str = "control";
/// MPS starts with the fleet, and again within a second after it ended.
const MPS_WAIT: Duration = Duration::from_secs(10);
const MPS_POLL: Duration = Duration::from_millis(10);

/// The body of [`super::run_engine`].
pub(super) fn run_engine(
    mut thread: EngineThread<'_>,
    selector: DeviceSelector,
) -> Result<(), WorkerRunError> {
    if let Some(directory) = &thread.config.mps_directory {
        wait_for_mps(directory)?;
    }
    let detected = DetectedGpu::open(selector)?;
    thread.timeline.mark("driver");
    let granted = thread.request_grant::<GpuRuntime>(detected.device.uuid().to_string())?;
    thread.timeline.mark("wait");
    let turns = match &thread.config.turn_file {
        Some(path) => Some(Turns::open(path, TurnBounds::default()).map_err(WorkerAttachError::from)?),
        None => None,
    };
    let runtime = detected.create_context(&granted, turns)?;
    thread.timeline.mark("context");
    thread.run_on(&runtime, granted)
}

/// Waits until MPS accepts clients: without it, the driver would compute without MPS and say
/// nothing.
fn wait_for_mps(directory: &Path) -> Result<(), WorkerAttachError> {
    let start = Instant::now();
    while !directory.join(MPS_CONTROL_PIPE).exists() {
        if start.elapsed() > MPS_WAIT {
            return Err(WorkerAttachError::Mps { directory: directory.to_owned() });
        }
        std::thread::sleep(MPS_POLL);
    }
    Ok(())
}

/// A GPU whose driver is loaded. The process has no memory on it yet.
struct DetectedGpu {
    device: Device,
    nvml: Option<Nvml>,
}

struct GpuRuntime {
    context: Context,
    context_bytes: u64,
    turns: Option<Turns>,
}

impl DetectedGpu {
    fn open(selector: DeviceSelector) -> Result<Self, WorkerAttachError> {
        // Driver and NVML start slowly and independently of each other.
        let (driver, nvml) = std::thread::scope(|scope| {
            let nvml = scope.spawn(Nvml::open);
            (open_driver(), nvml.join().ok().and_then(Result::ok))
        });
        Ok(Self { device: Device::open(driver?, selector)?, nvml })
    }

    /// Creates the context, whose memory the lease has reserved. Its size comes from the driver's
    /// count for this process: other processes may load and start meanwhile, so the device's free
    /// memory says nothing.
    fn create_context(
        self,
        _lease: &GrantedModel,
        turns: Option<Turns>,
    ) -> Result<GpuRuntime, WorkerAttachError> {
        let Self { device, nvml } = self;
        let counted = || nvml.as_ref()?.process_bytes(device.uuid()).ok()?;
        let before = counted();
        let failed = |error: DriverError| {
            let (device, source) = (device.uuid().to_string(), Box::new(error));
            if error.is_out_of_memory() {
                WorkerAttachError::NoRoom { device, source }
            } else {
                WorkerAttachError::Context { device, source }
            }
        };
        let context = device.context().map_err(failed)?;
        let context_bytes = context_bytes(before, counted());
        Ok(GpuRuntime { context, context_bytes, turns })
    }
}

impl DeviceRuntime for GpuRuntime {
    type Compute = Cuda;

    const LAYOUT: u32 = LAYOUT_TILES;

    fn supports_dtype(dtype: DType) -> bool {
        planes(dtype).is_some()
    }

    fn device(&self) -> String {
        self.context.device().uuid().to_string()
    }

    fn context_bytes(&self) -> u64 {
        self.context_bytes
    }

    fn isa(&self, compute: &Cuda) -> String {
        compute.fingerprint()
    }

    fn describe(&self) -> String {
        format!("{} ({})", self.context.device().info().name, self.context.device().uuid())
    }

    fn import(
        &self,
        granted: GrantedModel,
    ) -> Result<AttachedModel<Vec<WeightData>>, handoff::AttachModelError> {
        Ok(granted
            .import_cuda(self.context.device())?
            .map(|tensors| tensors.into_iter().map(WeightData::from).collect()))
    }

    fn compute(&self) -> Result<Cuda, OpError> {
        let mut compute = Cuda::new(self.context.device())?;
        if let Some(turns) = &self.turns {
            compute.set_turns(turns.clone());
        }
        Ok(compute)
    }

    fn measure(compute: &Cuda) -> BackendUsage {
        let lazy_init = LazyInit { modules: compute.device().module_time(), graphs: compute.graph_time() };
        BackendUsage { workspace_used: Some(compute.device_bytes().into()), lazy_init }
    }
}
