// SPDX-License-Identifier: Apache-2.0

//! Retries of calls that the driver answers with 801 (not supported) for a moment.
//!
//! Others have seen `cuMemMap` return 801 when many MPS clients import at once while further
//! processes initialize. A device that lacks a feature returns 801 for ever, so the number of
//! attempts is bounded.

use std::time::Duration;

use super::{DriverError, ErrorCode};

/// With the pause between two attempts: half a second, after which the answer is taken as final.
pub const UNSUPPORTED_ATTEMPTS: u32 = 50;

pub const UNSUPPORTED_PAUSE: Duration = Duration::from_millis(10);

/// Repeats a call while it fails with 801, at most [`UNSUPPORTED_ATTEMPTS`] times.
pub(crate) fn retry_unsupported<T>(
    mut call: impl FnMut() -> Result<T, DriverError>,
) -> Result<T, DriverError> {
    for _ in 1..UNSUPPORTED_ATTEMPTS {
        match call() {
            Err(DriverError { code: ErrorCode::NOT_SUPPORTED, .. }) => std::thread::sleep(UNSUPPORTED_PAUSE),
            result => return result,
        }
    }
    call()
}
