//! `GpuContext` and `GpuLoadTarget` of a build without CUDA: there are none, and asking for one says so.

use std::convert::Infallible;
use std::fs::File;
use std::os::fd::OwnedFd;

use cuda::{DeviceUuid, OpenDriverError};
use memory::device::DeviceTensor;
use memory::manifest::{FileIdentity, Manifest, ManifestDevice};

use super::gpu_error::GpuLoadError;
use super::host_reader::{OpenModelFile, ReadProgress};
use super::job::{FilledAllocations, LoadPlan};

/// As in `gpu`; without a GPU nothing is ever cut.
pub(super) const PART_BYTES: usize = 4 << 20;

pub(super) struct GpuContext(Infallible);

pub(super) struct GpuLoadTarget(Infallible);

impl GpuContext {
    pub(super) fn open(_: DeviceUuid) -> Result<Self, GpuLoadError> {
        Err(GpuLoadError::Driver(OpenDriverError::NotBuilt))
    }

    pub(super) fn import(&self, _: &Manifest, _: Vec<OwnedFd>) -> Result<Vec<DeviceTensor>, GpuLoadError> {
        match self.0 {}
    }

    pub(super) fn sums(&self, _: &[DeviceTensor]) -> Result<Vec<Vec<u128>>, GpuLoadError> {
        match self.0 {}
    }
}

impl GpuLoadTarget {
    pub(super) fn open(_: DeviceUuid, _: &[(FileIdentity, File)]) -> Result<Self, GpuLoadError> {
        Err(GpuLoadError::Driver(OpenDriverError::NotBuilt))
    }

    pub(super) fn entry(&self) -> ManifestDevice {
        match self.0 {}
    }

    pub(super) fn allocated_bytes(&self, _: u64) -> Option<u64> {
        match self.0 {}
    }

    pub(super) fn needs(&self, _: &LoadPlan) -> (u64, u64) {
        match self.0 {}
    }

    pub(super) fn fill(
        &self,
        _: &LoadPlan,
        _: Vec<OpenModelFile>,
        _: usize,
        _: &ReadProgress,
    ) -> Result<FilledAllocations<OwnedFd>, GpuLoadError> {
        match self.0 {}
    }
}
