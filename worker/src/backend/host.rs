// SPDX-License-Identifier: Apache-2.0

//! The host as a [`DeviceRuntime`]: weights in sealed memfds, SIMD kernels on threads.

use bytes::Bytes;
use handoff::AttachModelError;
use handoff::attach::{AttachedModel, GrantedModel};
use kernels::{Cpu, Isa};
use memory::manifest::HOST_DEVICE;
use ops::OpError;
use quant::DType;
use quant::layout::LAYOUT_GGML;

use super::{BackendUsage, DeviceRuntime};

pub(crate) struct HostRuntime {
    threads: usize,
}

impl HostRuntime {
    pub(crate) fn new(threads: usize) -> Self {
        Self { threads: threads.max(1) }
    }
}

impl DeviceRuntime for HostRuntime {
    type Compute = Cpu;

    const LAYOUT: u32 = LAYOUT_GGML;

    fn supports_dtype(_: DType) -> bool {
        true
    }

    fn device(&self) -> String {
        HOST_DEVICE.to_owned()
    }

    fn context_bytes(&self) -> u64 {
        0
    }

    fn isa(&self, compute: &Cpu) -> String {
        compute.isa().name().to_owned()
    }

    fn describe(&self) -> String {
        format!("host {}", Isa::best())
    }

    /// Tensors are slices of the shared mapping, not copies.
    fn import(&self, granted: GrantedModel) -> Result<AttachedModel<Vec<Bytes>>, AttachModelError> {
        Ok(granted.import_host()?.map(|tensors| tensors.into_iter().map(|tensor| tensor.bytes).collect()))
    }

    fn compute(&self) -> Result<Cpu, OpError> {
        Cpu::new(self.threads)
    }

    fn measure(_: &Cpu) -> BackendUsage {
        BackendUsage::default()
    }
}
