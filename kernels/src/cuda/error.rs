// SPDX-License-Identifier: Apache-2.0

//! Errors of the device as errors of ops.

use cuda::CudaError;

/// Turns an error of the device into the error of an op.
pub(super) fn device_error(op: &'static str) -> impl Fn(CudaError) -> ops::OpError {
    move |error| match error {
        CudaError::OutOfMemory { bytes, free } => {
            let (bytes, free) = (bytes as u64, Some(free as u64));
            ops::OpError::Memory { op, what: "device memory", bytes, free }
        }
        error => ops::OpError::Device { op, source: Box::new(error) },
    }
}
