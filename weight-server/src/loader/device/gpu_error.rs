// SPDX-License-Identifier: Apache-2.0

//! What can fail between a loader and a GPU.

use cuda::{DeviceError, DriverError, OpenDriverError, PinError};
use memory::device::{AllocateError, CopyModelError, FinishError, ImportModelError};
use proto::weights::v1::LoadFailure;
use quant::layout::LayoutError;

use super::file_parts::RowsTooLong;
use crate::loader::host_reader::TensorReadError;
use crate::loader::load_error::{DeviceFailure, ModelLoadError, read_failure};

#[derive(Debug, thiserror::Error)]
pub(super) enum GpuLoadError {
    #[error(transparent)]
    Driver(#[from] OpenDriverError),
    #[error(transparent)]
    Device(#[from] DeviceError),
    #[error("the GPU shares its memory with the host: its `budget` must be \"host\"")]
    UnifiedMemory,
    #[error("the GPU has memory of its own: its `budget` must be a size, not \"host\"")]
    OwnMemory,
    #[error("cannot create a context on the GPU")]
    Context(#[from] DriverError),
    #[error("cannot allocate host memory for staging buffers")]
    Pages(#[source] std::io::Error),
    #[error(transparent)]
    Pin(#[from] PinError),
    #[error("tensor {tensor} cannot be laid out for a GPU: load the model on the host")]
    Tiles { tensor: String, source: LayoutError },
    #[error("the model cannot be transferred to a GPU: load it on the host")]
    Rows(#[from] RowsTooLong),
    #[error("an allocation of {bytes} bytes exceeds the address space")]
    TooLarge { bytes: u64 },
    #[error("cannot allocate the model on the GPU")]
    Allocate(#[from] AllocateError),
    #[error("cannot export the loaded model")]
    Finish(#[from] FinishError),
    #[error("cannot import the generation")]
    Import(#[from] ImportModelError),
    #[error(transparent)]
    Read(#[from] TensorReadError),
    #[error("{name:?} is not the UUID of a GPU")]
    SourceName { name: String },
    #[error("the GPU of the copy cannot be opened")]
    SourceDevice(#[source] DeviceError),
    #[error("cannot copy the model from another GPU")]
    Copy(#[from] CopyModelError),
    #[error("the GPU failed")]
    Cuda(#[from] kernels::cuda::CudaError),
    #[error("cannot transfer the model to the GPU")]
    Upload(#[from] kernels::cuda::loading::UploadError),
}

impl GpuLoadError {
    fn failure(&self) -> LoadFailure {
        match self {
            Self::Driver(_)
            | Self::Device(_)
            | Self::UnifiedMemory
            | Self::OwnMemory
            | Self::Tiles { .. }
            | Self::Rows(_) => LoadFailure::Unsupported,
            Self::Allocate(AllocateError::OutOfFds { .. }) => LoadFailure::OutOfFds,
            Self::Allocate(AllocateError::OutOfMemory { .. } | AllocateError::TooLarge { .. })
            | Self::Pin(PinError::Driver { .. })
            | Self::Pages(_)
            | Self::TooLarge { .. } => LoadFailure::OutOfMemory,
            Self::Read(error) => read_failure(error),
            _ => LoadFailure::Device,
        }
    }
}

impl From<GpuLoadError> for DeviceFailure {
    fn from(error: GpuLoadError) -> Self {
        Self::new(error.failure(), error)
    }
}

impl From<GpuLoadError> for ModelLoadError {
    fn from(error: GpuLoadError) -> Self {
        Self::Device(error.into())
    }
}
