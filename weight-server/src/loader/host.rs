// SPDX-License-Identifier: Apache-2.0

//! Loads a model into host memory: memfds that are sealed after they are filled, from files or from
//! the memfds of another device.

use std::os::fd::OwnedFd;
use std::path::PathBuf;
use std::time::Instant;

use gguf::GgufModel;
use memory::host::HostAllocation;
use memory::host_import::{ImportHostError, verify_host};
use memory::manifest::{Allocation, ManifestDevice};
use memory::memfd::{MemfdError, SealedMemfd};
use memory::numa::{NumaError, NumaNode, node_of_device};
use memory::pack::PackPlan;
use quant::layout::LAYOUT_GGML;

use super::copy::{CopyError, SourceGeneration};
use super::host_reader::{OpenModelFile, ReadProgress, TensorSource, read_all};
use super::load_error::ModelLoadError;
use super::sandbox::SandboxProfile;
use super::target::{CopiedAllocations, FilledAllocations, LoadOverhead, LoadPlan, LoadTarget};

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
        let mut allocations = allocate(&plan.pack)?;
        let raw = read_all(&plan.sources, &files, &plan.pack, &mut allocations, threads, progress)?;
        let (entries, fds) = seal(allocations)?;
        // Layout 0 is the layout of the file.
        Ok(FilledAllocations { entries, fds, laid_out: raw.clone(), raw })
    }

    /// The source's memfds are read like files.
    fn copy(
        &self,
        plan: &LoadPlan,
        source: &SourceGeneration,
        threads: usize,
        progress: &ReadProgress,
    ) -> Result<CopiedAllocations, ModelLoadError> {
        let device = source.device();
        let memfds =
            open_memfds(source).map_err(|source| CopyError::Host { device: device.clone(), source })?;
        let name = |index: usize| PathBuf::from(format!("allocation {index} on {device}"));
        let files: Vec<OpenModelFile> = memfds
            .into_iter()
            .enumerate()
            .map(|(index, memfd)| OpenModelFile { path: name(index), file: OwnedFd::from(memfd).into() })
            .collect();
        let tensors = source.manifest.tensors.iter().map(|tensor| TensorSource {
            name: tensor.name.clone(),
            file: tensor.allocation,
            offset: tensor.offset,
            bytes: tensor.bytes,
        });
        let tensors: Vec<TensorSource> = tensors.collect();
        let mut allocations = allocate(&plan.pack)?;
        let started = Instant::now();
        let laid_out = read_all(&tensors, &files, &plan.pack, &mut allocations, threads, progress)?;
        let copy_time = started.elapsed();
        let (entries, fds) = seal(allocations)?;
        tracing::info!(
            source = device,
            bytes = plan.pack.tensor_bytes,
            copy_ms = copy_time.as_millis() as u64,
            gigabytes_per_second = plan.pack.tensor_bytes as f64 / copy_time.as_secs_f64() / 1e9,
            "copied the weights from another device"
        );
        Ok(CopiedAllocations { fds, entries, laid_out, copy_time })
    }
}

fn allocate(pack: &PackPlan) -> Result<Vec<HostAllocation>, ModelLoadError> {
    let of = pack.allocations.len();
    let mut allocations = Vec::with_capacity(of);
    for (index, &bytes) in pack.allocations.iter().enumerate() {
        let allocation = HostAllocation::create("ballast-weights", bytes)
            .map_err(|source| ModelLoadError::Allocate { bytes, number: index + 1, of, source })?;
        allocations.push(allocation);
    }
    Ok(allocations)
}

/// Ends all writing. Returns the allocations' entries in the manifest, and their descriptors.
fn seal(allocations: Vec<HostAllocation>) -> Result<(Vec<Allocation>, Vec<OwnedFd>), ModelLoadError> {
    let sealed = allocations.into_iter().map(HostAllocation::seal).collect::<Result<Vec<_>, _>>();
    let sealed = sealed.map_err(ModelLoadError::Seal)?;
    let entry = |memfd: &SealedMemfd| Allocation { device: 0, bytes: memfd.bytes(), inode: memfd.inode() };
    Ok((sealed.iter().map(entry).collect(), sealed.into_iter().map(OwnedFd::from).collect()))
}

/// The source's allocations, checked against its manifest. The descriptors stay the source's.
fn open_memfds(source: &SourceGeneration) -> Result<Vec<SealedMemfd>, ImportHostError> {
    let duplicates = source.fds.iter().map(OwnedFd::try_clone).collect::<Result<Vec<_>, _>>();
    let duplicates = duplicates.map_err(|source| ImportHostError::Map(MemfdError::OutOfFds { source }))?;
    verify_host(&source.manifest, duplicates)
}
