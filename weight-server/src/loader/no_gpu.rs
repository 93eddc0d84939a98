//! `Gpu` and `GpuLoad` of a build without CUDA: there are none, and asking for one says so.

use std::convert::Infallible;
use std::fs::File;
use std::os::fd::OwnedFd;

use memory::cuda::{DeviceTensor, DeviceUuid, OpenDriverError};
use memory::manifest::{Device, FileIdentity, Manifest};

use super::gpu_error::GpuError;
use super::job::{Filled, Plan};
use super::read::{OpenFile, Progress};

/// As in `gpu`; without a GPU nothing is ever cut.
pub(super) const PART_BYTES: usize = 4 << 20;

pub(super) struct Gpu(Infallible);

pub(super) struct GpuLoad(Infallible);

impl Gpu {
    pub(super) fn open(_: DeviceUuid) -> Result<Self, GpuError> {
        Err(GpuError::Driver(OpenDriverError::NotBuilt))
    }

    pub(super) fn import(&self, _: &Manifest, _: Vec<OwnedFd>) -> Result<Vec<DeviceTensor>, GpuError> {
        match self.0 {}
    }

    pub(super) fn sums(&self, _: &[DeviceTensor]) -> Result<Vec<Vec<u128>>, GpuError> {
        match self.0 {}
    }
}

impl GpuLoad {
    pub(super) fn open(_: DeviceUuid, _: &[(FileIdentity, File)]) -> Result<Self, GpuError> {
        Err(GpuError::Driver(OpenDriverError::NotBuilt))
    }

    pub(super) fn entry(&self) -> Device {
        match self.0 {}
    }

    pub(super) fn allocated_bytes(&self, _: u64) -> Option<u64> {
        match self.0 {}
    }

    pub(super) fn needs(&self, _: &Plan) -> (u64, u64) {
        match self.0 {}
    }

    pub(super) fn fill(
        &self,
        _: &Plan,
        _: Vec<OpenFile>,
        _: usize,
        _: &Progress,
    ) -> Result<Filled<OwnedFd>, GpuError> {
        match self.0 {}
    }
}
