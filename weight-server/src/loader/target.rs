//! Where a load goes: the host's memory or one GPU's.

use std::fs::File;

use cuda::DeviceUuid;
use memory::manifest::{FileIdentity, HOST_DEVICE};
use quant::layout::{LAYOUT_GGML, LAYOUT_TILES};

use super::gpu::{GpuContext, GpuLoadTarget};
use super::gpu_error::GpuLoadError;

pub(crate) enum LoadTarget {
    Host,
    Gpu(GpuLoadTarget),
}

#[derive(Debug, thiserror::Error)]
pub(super) enum LoadTargetError {
    #[error("layout {layout} is not made on {device}: {expected} is")]
    Layout { layout: u32, device: String, expected: u32 },
    #[error("{name:?} is no device: \"host\" is, and the UUID of a GPU, as nvidia-smi -L shows it")]
    Name { name: String },
    #[error(transparent)]
    Gpu(#[from] GpuLoadError),
}

/// The layout that all tensors on a device have.
pub(crate) fn layout_for_device(device: &str) -> u32 {
    if device == HOST_DEVICE { LAYOUT_GGML } else { LAYOUT_TILES }
}

/// The GPU that a job names.
pub(super) fn open_gpu(name: &str) -> Result<GpuContext, LoadTargetError> {
    Ok(GpuContext::open(uuid(name)?)?)
}

fn uuid(name: &str) -> Result<DeviceUuid, LoadTargetError> {
    DeviceUuid::parse(name).ok_or_else(|| LoadTargetError::Name { name: name.to_owned() })
}

impl LoadTarget {
    /// Of a GPU this makes the context, which takes a fifth of a second, and what a load of the files takes of the host.
    pub(super) fn open(
        device: &str,
        layout: u32,
        files: &[(FileIdentity, File)],
    ) -> Result<Self, LoadTargetError> {
        let expected = layout_for_device(device);
        if layout != expected {
            return Err(LoadTargetError::Layout { layout, device: device.to_owned(), expected });
        }
        match device {
            HOST_DEVICE => Ok(Self::Host),
            name => Ok(Self::Gpu(GpuLoadTarget::open(uuid(name)?, files)?)),
        }
    }

    pub(super) fn layout(&self) -> u32 {
        match self {
            Self::Host => LAYOUT_GGML,
            Self::Gpu(_) => LAYOUT_TILES,
        }
    }
}
