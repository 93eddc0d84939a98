// SPDX-License-Identifier: Apache-2.0

//! The host, or one of its NUMA nodes, as a [`DeviceRuntime`]: weights in sealed memfds, SIMD
//! kernels on threads.

use bytes::Bytes;
use handoff::AttachModelError;
use handoff::attach::{AttachedModel, GrantedModel};
use kernels::{Cpu, Isa};
use memory::numa::NumaNode;
use ops::OpError;
use quant::DType;
use quant::layout::LAYOUT_GGML;

use super::{BackendUsage, DeviceRuntime};
use crate::attach_error::WorkerAttachError;
use crate::config::ComputeDevice;

pub(crate) struct HostRuntime {
    device: ComputeDevice,
    threads: usize,
}

impl HostRuntime {
    /// On a NUMA node, this thread and those that it starts run and allocate there from now on.
    pub(crate) fn open(device: ComputeDevice, threads: usize) -> Result<Self, WorkerAttachError> {
        if let ComputeDevice::HostNode(number) = device {
            let node = NumaNode::find(number)?;
            node.pin_thread()?;
            node.bind_memory()?;
        }
        Ok(Self { device, threads: threads.max(1) })
    }
}

impl DeviceRuntime for HostRuntime {
    type Compute = Cpu;

    const LAYOUT: u32 = LAYOUT_GGML;

    fn supports_dtype(_: DType) -> bool {
        true
    }

    fn device(&self) -> String {
        self.device.to_string()
    }

    fn context_bytes(&self) -> u64 {
        0
    }

    fn isa(&self, compute: &Cpu) -> String {
        compute.isa().name().to_owned()
    }

    fn describe(&self) -> String {
        format!("{} {}", self.device, Isa::best())
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
