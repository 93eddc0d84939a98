//! Refusals that pass: the driver answers 801 (not supported) for a moment while other processes initialise.
//!
//! Seen by others from `cuMemMap` when many MPS clients import at once; a device that really cannot do something says
//! so for ever. So the answer is believed after a bounded number of attempts.

use std::time::Duration;

use super::driver::{Code, Refusal};

/// Together with the pause: half a second, then it is meant.
pub const UNSUPPORTED_ATTEMPTS: u32 = 50;

pub const UNSUPPORTED_PAUSE: Duration = Duration::from_millis(10);

/// Makes a call until it gets another answer than 801, or too often.
pub(super) fn retrying<T>(mut call: impl FnMut() -> Result<T, Refusal>) -> Result<T, Refusal> {
    for _ in 1..UNSUPPORTED_ATTEMPTS {
        match call() {
            Err(Refusal { code: Code::NOT_SUPPORTED, .. }) => std::thread::sleep(UNSUPPORTED_PAUSE),
            answer => return answer,
        }
    }
    call()
}
