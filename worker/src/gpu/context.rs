// SPDX-License-Identifier: Apache-2.0

//! The size of a CUDA context, from what the driver counts for a process.

use crate::reservation::CONTEXT_BYTES;

/// What a context takes beyond the bytes that the driver counts for its process. On an H200, the
/// device's free memory fell by 523.5625 MiB and the process counted 518, with 1, 2, 4 or 8
/// processes starting at once.
const CONTEXT_UNCOUNTED_BYTES: u64 = 5_696 << 10;

/// The bytes of this process's context, from the driver's count before and after its creation.
///
/// A count before creation belongs to another process: process ids of two namespaces can be equal.
pub(super) fn context_bytes(before: Option<u64>, after: Option<u64>) -> u64 {
    match (before, after) {
        (None, Some(counted)) => counted.saturating_add(CONTEXT_UNCOUNTED_BYTES),
        _ => CONTEXT_BYTES,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn context_bytes_come_from_the_driver_only_if_it_counted_this_process_alone() {
        let measured = context_bytes(None, Some(518 << 20));
        assert_eq!(measured, 548_995_072);
        assert!(measured.abs_diff(CONTEXT_BYTES) < 1 << 20);
        assert_eq!(context_bytes(None, Some(300 << 20)) >> 20, 305);
        for unusable in [(None, None), (Some(70 << 30), Some(70 << 30)), (Some(70 << 30), None)] {
            assert_eq!(context_bytes(unusable.0, unusable.1), CONTEXT_BYTES, "{unusable:?}");
        }
    }
}
