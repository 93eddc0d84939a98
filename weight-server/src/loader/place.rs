//! Where a load goes: the host's memory or one GPU's.

use std::fs::File;

use memory::cuda::DeviceUuid;
use memory::manifest::{FileIdentity, HOST_DEVICE};
use quant::layout::{LAYOUT_GGML, LAYOUT_TILES};

use super::gpu::{Gpu, GpuLoad};
use super::gpu_error::GpuError;

pub(crate) enum Place {
    Host,
    Gpu(GpuLoad),
}

#[derive(Debug, thiserror::Error)]
pub(super) enum PlaceError {
    #[error("layout {layout} is not made on {device}: {expected} is")]
    Layout { layout: u32, device: String, expected: u32 },
    #[error("{name:?} is no device: \"host\" is, and the UUID of a GPU, as nvidia-smi -L shows it")]
    Name { name: String },
    #[error(transparent)]
    Gpu(#[from] GpuError),
}

/// The layout that all tensors on a device have.
pub(crate) fn layout_of(device: &str) -> u32 {
    if device == HOST_DEVICE { LAYOUT_GGML } else { LAYOUT_TILES }
}

/// The GPU that a job names.
pub(super) fn open_gpu(name: &str) -> Result<Gpu, PlaceError> {
    Ok(Gpu::open(uuid(name)?)?)
}

fn uuid(name: &str) -> Result<DeviceUuid, PlaceError> {
    DeviceUuid::parse(name).ok_or_else(|| PlaceError::Name { name: name.to_owned() })
}

impl Place {
    /// Of a GPU this makes the context, which takes a fifth of a second, and what a load of the files takes of the host.
    pub(super) fn open(
        device: &str,
        layout: u32,
        files: &[(FileIdentity, File)],
    ) -> Result<Self, PlaceError> {
        let expected = layout_of(device);
        if layout != expected {
            return Err(PlaceError::Layout { layout, device: device.to_owned(), expected });
        }
        match device {
            HOST_DEVICE => Ok(Self::Host),
            name => Ok(Self::Gpu(GpuLoad::open(uuid(name)?, files)?)),
        }
    }

    pub(super) fn layout(&self) -> u32 {
        match self {
            Self::Host => LAYOUT_GGML,
            Self::Gpu(_) => LAYOUT_TILES,
        }
    }
}
