//! What can go wrong between a loader and a GPU, with and without CUDA in the build.

use cuda::DriverError;
use cuda::{DeviceError, OpenDriverError, PinError};
use memory::device::{AllocateError, FinishError, ImportModelError};

use super::host_reader::TensorReadError;

#[derive(Debug, thiserror::Error)]
pub(super) enum GpuLoadError {
    #[error(transparent)]
    Driver(#[from] OpenDriverError),
    #[error(transparent)]
    Device(#[from] DeviceError),
    #[error("the GPU gives no context")]
    Context(#[from] DriverError),
    #[cfg(feature = "cuda")]
    #[error("there is no host memory to copy from")]
    Pages(#[source] std::io::Error),
    #[error(transparent)]
    Pin(#[from] PinError),
    #[error("the model does not get onto the GPU")]
    Allocate(#[from] AllocateError),
    #[error("the loaded model cannot be handed over")]
    Finish(#[from] FinishError),
    #[error("the generation cannot be imported")]
    Import(#[from] ImportModelError),
    #[error(transparent)]
    Read(#[from] TensorReadError),
    #[cfg(feature = "cuda")]
    #[error("the GPU failed")]
    Cuda(#[from] kernels::cuda::CudaError),
    #[cfg(feature = "cuda")]
    #[error("the model cannot be brought to the GPU")]
    Upload(#[from] kernels::cuda::loading::UploadError),
}
