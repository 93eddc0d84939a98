// SPDX-License-Identifier: Apache-2.0

//! [`CudaError`]: what can go wrong with buffers, streams and kernels.

use super::PinError;
use crate::checked::DriverError;

/// A failed driver call, or a request that no driver can fulfil.
#[derive(Debug, thiserror::Error)]
pub enum CudaError {
    #[error(transparent)]
    Driver(#[from] DriverError),
    #[error(transparent)]
    Pin(#[from] PinError),
    #[error("out of device memory: {bytes} bytes requested, {free} bytes free")]
    OutOfMemory { bytes: usize, free: usize },
    #[error("kernels of {module} hold no code for compute capability {major}.{minor}")]
    NoCode { module: &'static str, major: u32, minor: u32 },
    #[error("{what}: {found} bytes, expected {expected}")]
    Length { what: &'static str, found: usize, expected: usize },
}

impl CudaError {
    /// Whether the device has less free memory than was requested.
    pub fn is_out_of_memory(&self) -> bool {
        match self {
            Self::OutOfMemory { .. } => true,
            Self::Driver(error) => error.is_out_of_memory(),
            _ => false,
        }
    }
}
