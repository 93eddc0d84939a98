//! What can go wrong between this process and a GPU.

use cudarc::driver::DriverError;

/// A failed call of the driver, or a request that no driver can fulfil.
#[derive(Debug, thiserror::Error)]
pub enum CudaError {
    #[error(
        "no CUDA driver: libcuda.so.1 cannot be loaded; install NVIDIA's driver, or run with --device host"
    )]
    NoDriver,
    #[error("there is no CUDA device {index}: {count} found")]
    NoDevice { index: usize, count: usize },
    #[error("no CUDA device has UUID {uuid}")]
    NoSuchUuid { uuid: String },
    #[error("{call} failed: {}", describe(.source))]
    Call { call: &'static str, source: DriverError },
    #[error("out of device memory: {bytes} bytes wanted, {free} free")]
    OutOfMemory { bytes: usize, free: usize },
    #[error("kernels of {family} hold no code for compute capability {major}.{minor}")]
    NoCode { family: &'static str, major: u32, minor: u32 },
    #[error("{what}: {found} bytes, expected {expected}")]
    Length { what: &'static str, found: usize, expected: usize },
}

impl CudaError {
    /// Whether the device has less memory left than was asked for.
    pub fn is_lack_of_memory(&self) -> bool {
        let code = cudarc::driver::sys::CUresult::CUDA_ERROR_OUT_OF_MEMORY;
        match self {
            Self::OutOfMemory { .. } => true,
            Self::Call { source, .. } => source.0 == code,
            _ => false,
        }
    }
}

/// Names a call in its error.
pub(super) trait Named<T> {
    fn named(self, call: &'static str) -> Result<T, CudaError>;
}

impl<T> Named<T> for Result<T, DriverError> {
    fn named(self, call: &'static str) -> Result<T, CudaError> {
        self.map_err(|source| CudaError::Call { call, source })
    }
}

fn describe(error: &DriverError) -> String {
    let text = |text: Result<&std::ffi::CStr, DriverError>| {
        text.map_or_else(|_| "unknown".to_owned(), |text| text.to_string_lossy().into_owned())
    };
    format!("{} ({})", text(error.error_string()), text(error.error_name()))
}

/// Turns a failure of the device into that of an op.
pub(super) fn device_error(op: &'static str) -> impl Fn(CudaError) -> ops::OpError {
    move |error| match error {
        CudaError::OutOfMemory { bytes, free } => {
            let (bytes, free) = (bytes as u64, Some(free as u64));
            ops::OpError::Memory { op, what: "device memory", bytes, free }
        }
        error => ops::OpError::Device { op, source: Box::new(error) },
    }
}
