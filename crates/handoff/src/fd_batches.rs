// SPDX-License-Identifier: Apache-2.0

//! Sending many descriptors: batches of at most 128, each acknowledged before the next one is sent.
//!
//! ```text
//! sender                                receiver
//! FdBatch { batch, first, count } ----> FdCollector::accept
//!   with `count` descriptors       <--- BatchReceived { batch }
//! ```
//! Both sides of the sequence are plain values without a socket: the event loop of the
//! weight-server, a loader and a worker follow the same rules, each with its own kind of waiting.

use std::os::fd::OwnedFd;

use proto::weights::v1::{BatchReceived, FdBatch};

/// Below the kernel's limit of 253 descriptors a packet. The kernel also counts unread descriptors
/// against RLIMIT_NOFILE of the sender; with one outstanding batch, a limit as small as 64 fails
/// sends only together with other traffic.
pub const FDS_PER_BATCH: u32 = 128;

/// Above every real hand-off: one descriptor for each tensor of the largest models makes a few
/// thousand.
pub const MAX_HANDOFF_FDS: u32 = 65_536;

#[derive(Debug, thiserror::Error, PartialEq, Eq)]
pub enum FdBatchError {
    #[error("batch {found} arrived instead of batch {expected}")]
    OutOfOrder { expected: u32, found: u32 },
    #[error("a batch announced {announced} descriptors and carried {carried}")]
    Count { announced: u32, carried: usize },
    #[error("a batch of {count} descriptors at {first} exceeds the {expected} announced")]
    Excess { first: u32, count: u32, expected: u32 },
    #[error("a hand-off of {fds} descriptors exceeds the limit of {MAX_HANDOFF_FDS}")]
    TooMany { fds: u32 },
}

/// Splits `fds` descriptors into batches.
pub fn fd_batches(fds: u32) -> impl Iterator<Item = FdBatch> {
    (0..fds.div_ceil(FDS_PER_BATCH)).map(move |batch| {
        let first = batch * FDS_PER_BATCH;
        FdBatch { batch, first, count: FDS_PER_BATCH.min(fds - first) }
    })
}

/// Collects batches until all announced descriptors have arrived.
#[derive(Debug)]
pub struct FdCollector {
    expected: u32,
    next_batch: u32,
    fds: Vec<OwnedFd>,
}

impl FdCollector {
    pub fn new(expected: u32) -> Result<Self, FdBatchError> {
        if expected > MAX_HANDOFF_FDS {
            return Err(FdBatchError::TooMany { fds: expected });
        }
        Ok(Self { expected, next_batch: 0, fds: Vec::new() })
    }

    /// Accepts one batch, and returns the acknowledgement to send.
    pub fn accept(&mut self, batch: &FdBatch, fds: Vec<OwnedFd>) -> Result<BatchReceived, FdBatchError> {
        if batch.batch != self.next_batch || batch.first as usize != self.fds.len() {
            return Err(FdBatchError::OutOfOrder { expected: self.next_batch, found: batch.batch });
        }
        if batch.count as usize != fds.len() || batch.count == 0 || batch.count > FDS_PER_BATCH {
            return Err(FdBatchError::Count { announced: batch.count, carried: fds.len() });
        }
        if batch.count > self.expected - batch.first {
            return Err(FdBatchError::Excess {
                first: batch.first,
                count: batch.count,
                expected: self.expected,
            });
        }
        self.fds.extend(fds);
        self.next_batch += 1;
        Ok(BatchReceived { batch: batch.batch })
    }

    pub fn is_complete(&self) -> bool {
        self.fds.len() == self.expected as usize
    }

    pub fn into_fds(self) -> Vec<OwnedFd> {
        self.fds
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn fds(count: u32) -> Vec<OwnedFd> {
        let null = OwnedFd::from(std::fs::File::open("/dev/null").unwrap());
        (0..count).map(|_| null.try_clone().unwrap()).collect()
    }

    #[test]
    fn batches_out_of_order_or_of_wrong_size_are_refused() {
        let batch = |batch, first, count| FdBatch { batch, first, count };
        let mut collector = FdCollector::new(200).unwrap();
        assert!(matches!(collector.accept(&batch(1, 0, 2), fds(2)), Err(FdBatchError::OutOfOrder { .. })));
        assert!(matches!(collector.accept(&batch(0, 2, 2), fds(2)), Err(FdBatchError::OutOfOrder { .. })));
        assert!(matches!(collector.accept(&batch(0, 0, 3), fds(2)), Err(FdBatchError::Count { .. })));
        assert!(matches!(collector.accept(&batch(0, 0, 0), fds(0)), Err(FdBatchError::Count { .. })));
        assert!(matches!(collector.accept(&batch(0, 0, 129), fds(129)), Err(FdBatchError::Count { .. })));
        collector.accept(&batch(0, 0, 128), fds(128)).unwrap();
        assert!(matches!(collector.accept(&batch(1, 128, 73), fds(73)), Err(FdBatchError::Excess { .. })));
        assert!(!collector.is_complete());
        collector.accept(&batch(1, 128, 72), fds(72)).unwrap();
        assert!(collector.is_complete());
        assert!(matches!(collector.accept(&batch(2, 200, 1), fds(1)), Err(FdBatchError::Excess { .. })));
        assert!(matches!(FdCollector::new(u32::MAX), Err(FdBatchError::TooMany { .. })));
    }

    proptest! {
        #[test]
        fn any_count_of_descriptors_is_collected_whole(count in 0u32..600) {
            let mut collector = FdCollector::new(count).unwrap();
            for batch in fd_batches(count) {
                collector.accept(&batch, fds(batch.count)).unwrap();
            }
            prop_assert!(collector.is_complete());
            prop_assert_eq!(collector.into_fds().len(), count as usize);
        }
    }
}
