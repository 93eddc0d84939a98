// SPDX-License-Identifier: Apache-2.0

//! The interface of a device that a model is loaded into, with the plan and the result of a load.

use std::os::fd::OwnedFd;
use std::time::Duration;

use gguf::GgufModel;
use memory::manifest::{Allocation, ManifestDevice};
use memory::pack::PackPlan;

use super::copy::SourceGeneration;
use super::host_reader::{OpenModelFile, ReadProgress, TensorSource};
use super::load_error::ModelLoadError;
use super::sandbox::SandboxProfile;

/// Memory that a model is loaded into: the host's or one GPU's.
///
/// A load calls the methods in this order: `tensor_sizes`, `finish_plan`, `overhead`, then `fill`
/// or `copy`.
pub(super) trait LoadTarget: Sync {
    /// The device's entry in the manifest.
    fn device(&self) -> ManifestDevice;

    /// The layout of all tensors on the device.
    fn layout(&self) -> u32;

    /// The other GPUs whose memory the device can access.
    fn peer_devices(&self) -> Vec<String> {
        Vec::new()
    }

    /// What the process must keep access to while it loads.
    fn sandbox_profile(&self) -> SandboxProfile;

    /// Bytes of each tensor in the device's layout.
    fn tensor_sizes(&mut self, model: &GgufModel) -> Result<Vec<u64>, ModelLoadError>;

    /// Completes the plan: rounds the allocations to the device's granularity.
    fn finish_plan(&mut self, sources: &[TensorSource], pack: &mut PackPlan) -> Result<(), ModelLoadError>;

    /// Memory that the load takes until it is done.
    fn overhead(&self, plan: &LoadPlan) -> LoadOverhead;

    /// Allocates the model, fills it from the files, and ends all writing to it.
    fn fill(
        &self,
        plan: &LoadPlan,
        files: Vec<OpenModelFile>,
        threads: usize,
        progress: &ReadProgress,
    ) -> Result<FilledAllocations, ModelLoadError>;

    /// Allocates the model, copies it from another device, and ends all writing to it. The source
    /// has the plan's tensors.
    fn copy(
        &self,
        plan: &LoadPlan,
        source: &SourceGeneration,
        threads: usize,
        progress: &ReadProgress,
    ) -> Result<CopiedAllocations, ModelLoadError>;
}

/// Where each tensor is, in the files and in memory.
pub(super) struct LoadPlan {
    pub(super) sources: Vec<TensorSource>,
    /// Bytes of each tensor in memory.
    pub(super) tensor_sizes: Vec<u64>,
    pub(super) pack: PackPlan,
}

/// Memory that a load takes until it is done.
pub(super) struct LoadOverhead {
    /// Of the device, beside the allocations.
    pub(super) device_bytes: u64,
    /// Of the host. If the device is the host or shares its memory, it includes the allocations.
    pub(super) host_bytes: u64,
}

/// The copied memory of a model.
pub(super) struct CopiedAllocations {
    pub(super) fds: Vec<OwnedFd>,
    /// Their entries in the manifest.
    pub(super) entries: Vec<Allocation>,
    /// Checksums of each tensor's chunks in memory.
    pub(super) laid_out: Vec<Vec<u128>>,
    /// Time in which the bytes were copied.
    pub(super) copy_time: Duration,
}

/// The filled memory of a model, with the checksums of each tensor's chunks.
pub(super) struct FilledAllocations {
    pub(super) fds: Vec<OwnedFd>,
    /// Their entries in the manifest.
    pub(super) entries: Vec<Allocation>,
    /// Checksums of the bytes in the files.
    pub(super) raw: Vec<Vec<u128>>,
    /// Checksums of the bytes in memory.
    pub(super) laid_out: Vec<Vec<u128>>,
}
