//! A GPU: weights in imported device memory, kernels of the CUDA backend.

use kernels::cuda::{Cuda, Data, Device as KernelDevice};
use memory::attach::{Attached, Granted};
use memory::cuda::nvml::Nvml;
use memory::cuda::{Device, DeviceSelector, open_driver};
use ops::OpError;
use quant::layout::LAYOUT_TILES;

use super::Place;
use crate::attach::AttachError;
use crate::demand::CONTEXT_BYTES;
use crate::timeline::Timeline;

pub(crate) struct Gpu {
    memory: Device,
    kernels: KernelDevice,
    context_bytes: u64,
}

impl Gpu {
    /// Starts the driver and makes a context: half a second, in which a model may well be loading.
    pub(crate) fn open(wanted: DeviceSelector, timeline: &mut Timeline) -> Result<Self, AttachError> {
        // Both start slowly, and know nothing of each other.
        let (driver, nvml) = std::thread::scope(|scope| {
            let nvml = scope.spawn(Nvml::open);
            (open_driver(), nvml.join().ok().and_then(Result::ok))
        });
        timeline.mark("driver");
        let memory = Device::open(driver?, wanted)?;
        let free_bytes = || Some(nvml.as_ref()?.memory(memory.uuid()).ok()??.free_bytes);
        let before = free_bytes();
        let failed =
            |error| AttachError::Context { device: memory.uuid().to_string(), source: Box::new(error) };
        let kernels = KernelDevice::open_memory(&memory).map_err(failed)?;
        let context_bytes = context_bytes(before, free_bytes());
        timeline.mark("context");
        Ok(Self { memory, kernels, context_bytes })
    }
}

/// What the device has less since the context is there; the usual size where that is not known, or where others have so
/// obviously taken or given back memory meanwhile.
fn context_bytes(before: Option<u64>, after: Option<u64>) -> u64 {
    match (before, after) {
        (Some(before), Some(after)) => Some(before.saturating_sub(after))
            .filter(|taken| (CONTEXT_BYTES / 2..CONTEXT_BYTES * 3 / 2).contains(taken))
            .unwrap_or(CONTEXT_BYTES),
        _ => CONTEXT_BYTES,
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

    fn workspace_used(compute: &Cuda) -> Option<u64> {
        Some(compute.device_bytes().total())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_contexts_size_is_measured_unless_others_disturb_it() {
        const GIB: u64 = 1 << 30;
        assert_eq!(context_bytes(Some(80 * GIB), Some(80 * GIB - (600 << 20))), 600 << 20);
        for disturbed in
            [(None, None), (Some(80 * GIB), None), (Some(80 * GIB), Some(70 * GIB)), (Some(1), Some(2))]
        {
            assert_eq!(context_bytes(disturbed.0, disturbed.1), CONTEXT_BYTES, "{disturbed:?}");
        }
    }
}
