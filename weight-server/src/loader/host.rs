// SPDX-License-Identifier: Apache-2.0

//! Loads a model into host memory: memfds that are sealed after they are filled.

use std::os::fd::OwnedFd;

use gguf::GgufModel;
use memory::host::HostAllocation;
use memory::manifest::{Allocation, ManifestDevice};
use memory::memfd::SealedMemfd;
use memory::numa::{NumaError, NumaNode, node_of_device};
use memory::pack::PackPlan;
use quant::layout::LAYOUT_GGML;

use super::host_reader::{OpenModelFile, ReadProgress, TensorSource, read_all};
use super::load_error::ModelLoadError;
use super::sandbox::SandboxProfile;
use super::target::{FilledAllocations, LoadOverhead, LoadPlan, LoadTarget};

/// The host's memory, or that of one of its nodes.
pub(super) struct HostTarget {
    device: String,
}

impl HostTarget {
    /// Binds this thread, and the threads that it starts, to the node of the device.
    pub(super) fn open(device: &str) -> Result<Self, NumaError> {
        if let Some(number) = node_of_device(device) {
            let node = NumaNode::find(number)?;
            node.bind_memory()?;
            node.pin_thread()?;
        }
        Ok(Self { device: device.to_owned() })
    }
}

impl LoadTarget for HostTarget {
    fn device(&self) -> ManifestDevice {
        ManifestDevice::host_memory(&self.device)
    }

    fn layout(&self) -> u32 {
        LAYOUT_GGML
    }

    fn sandbox_profile(&self) -> SandboxProfile {
        SandboxProfile::Host
    }

    fn tensor_sizes(&mut self, model: &GgufModel) -> Result<Vec<u64>, ModelLoadError> {
        Ok(model.tensors().map(|(_, tensor)| tensor.bytes).collect())
    }

    fn finish_plan(&mut self, _: &[TensorSource], _: &mut PackPlan) -> Result<(), ModelLoadError> {
        // `PackPlan` rounds to the granularity of host memory already.
        Ok(())
    }

    fn overhead(&self, plan: &LoadPlan) -> LoadOverhead {
        LoadOverhead { device_bytes: 0, host_bytes: plan.pack.allocation_bytes() }
    }

    fn fill(
        &self,
        plan: &LoadPlan,
        files: Vec<OpenModelFile>,
        threads: usize,
        progress: &ReadProgress,
    ) -> Result<FilledAllocations, ModelLoadError> {
        let LoadPlan { sources, pack, .. } = plan;
        let of = pack.allocations.len();
        let mut allocations = Vec::with_capacity(of);
        for (index, &bytes) in pack.allocations.iter().enumerate() {
            let allocation = HostAllocation::create("ballast-weights", bytes)
                .map_err(|source| ModelLoadError::Allocate { bytes, number: index + 1, of, source })?;
            allocations.push(allocation);
        }
        let raw = read_all(sources, &files, pack, &mut allocations, threads, progress)?;
        let sealed = allocations.into_iter().map(HostAllocation::seal).collect::<Result<Vec<_>, _>>();
        let sealed = sealed.map_err(ModelLoadError::Seal)?;
        let entry =
            |memfd: &SealedMemfd| Allocation { device: 0, bytes: memfd.bytes(), inode: memfd.inode() };
        Ok(FilledAllocations {
            entries: sealed.iter().map(entry).collect(),
            fds: sealed.into_iter().map(OwnedFd::from).collect(),
            // Layout 0 is the layout of the file.
            laid_out: raw.clone(),
            raw,
        })
    }
}
