// SPDX-License-Identifier: Apache-2.0

//! Spreads the blocks of small kernels over the multiprocessors (decision 0067).
//!
//! A kernel that may start before the previous one has ended finds few multiprocessors free. These
//! would get as many blocks as fit, and the others none: on an H200, norms of 64 rows of 4,096 took
//! 6.0 us, with up to four blocks on a multiprocessor, and spread they take 2.8. Shared memory that
//! the kernel does not use leaves no room for more than a multiprocessor's share.

use super::Device;

/// Blocks from which on they are spread. Fewer find room, and the blocks of the next product can
/// start beside them.
const BLOCKS_MIN: u32 = 8;
/// Blocks of a multiprocessor up to which they are spread. More divide the work evenly enough.
const SHARE_MAX: u32 = 8;
/// Shared memory of a multiprocessor that each of its blocks takes beside its own (CUDA C++
/// Programming Guide, compute capabilities).
const RESERVED_BYTES: u32 = 1 << 10;
/// Shared memory is given to blocks in such units (same source).
const UNIT_BYTES: u32 = 128;

/// Dynamic shared memory of each of `blocks` blocks with which they are spread; 0 if they are not.
pub(super) fn shared_bytes_to_spread(device: &Device, blocks: u32) -> u32 {
    bytes(device.multiprocessors(), device.shared_bytes_max(), blocks)
}

/// `block_bytes_max` is what one block may have. Together with what is reserved for it, this is all
/// that a multiprocessor has.
fn bytes(multiprocessors: u32, block_bytes_max: u32, blocks: u32) -> u32 {
    let share = blocks.div_ceil(multiprocessors.max(1));
    if blocks < BLOCKS_MIN || share > SHARE_MAX {
        return 0;
    }
    // The least with which one block more than the share does not fit.
    let all = block_bytes_max + RESERVED_BYTES;
    (all / (share + 1) + 1).saturating_sub(RESERVED_BYTES).next_multiple_of(UNIT_BYTES)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Blocks that fit a multiprocessor.
    fn fitting(block_bytes_max: u32, bytes: u32) -> u32 {
        (block_bytes_max + RESERVED_BYTES) / (bytes + RESERVED_BYTES)
    }

    #[test]
    fn a_multiprocessor_has_room_for_its_share_and_no_more() {
        // sm_90, sm_80 and sm_120.
        for (multiprocessors, block_bytes_max) in [(132, 227 << 10), (108, 163 << 10), (188, 99 << 10)] {
            for blocks in BLOCKS_MIN..=SHARE_MAX * multiprocessors {
                let bytes = bytes(multiprocessors, block_bytes_max, blocks);
                let share = blocks.div_ceil(multiprocessors);
                assert_eq!(fitting(block_bytes_max, bytes), share, "{blocks} on {multiprocessors}");
            }
        }
    }

    #[test]
    fn few_blocks_and_many_are_not_spread() {
        assert_eq!(bytes(132, 227 << 10, BLOCKS_MIN - 1), 0);
        assert_eq!(bytes(132, 227 << 10, SHARE_MAX * 132 + 1), 0);
    }

    #[test]
    fn a_device_without_figures_is_no_error() {
        assert_eq!(bytes(0, 0, 8), 0);
    }
}
