// SPDX-License-Identifier: Apache-2.0

//! Converts errors of the device into errors of `ops`.

use cuda::CudaError;

/// Returns a function that wraps a [`CudaError`] as an error of the operation `op`.
pub(super) fn device_error(op: &'static str) -> impl Fn(CudaError) -> ops::OpError {
    move |error| match error {
        CudaError::OutOfMemory { bytes, free } => {
            let (bytes, free) = (bytes as u64, Some(free as u64));
            ops::OpError::Memory { op, what: "device memory", bytes, free }
        }
        error => ops::OpError::Device { op, source: Box::new(error) },
    }
}
