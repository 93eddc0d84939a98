// SPDX-License-Identifier: Apache-2.0

//! [`LineQueue`]: log lines that wait for the writer, with a bound in bytes.
//!
//! If a line does not fit, it is dropped: the lines before it tell how the trouble began.

/// Some thousand lines. The writer holds as much again while it writes.
pub(super) const QUEUE_BYTES_MAX: usize = 1 << 20;

#[derive(Debug, Default, PartialEq, Eq)]
pub(super) struct LineQueue {
    bytes: Vec<u8>,
    dropped_lines: u64,
}

/// What a queue held at one time. The dropped lines belong after the bytes.
#[derive(Debug, Default, PartialEq, Eq)]
pub(super) struct LineBatch {
    pub(super) bytes: Vec<u8>,
    pub(super) dropped_lines: u64,
}

impl LineQueue {
    pub(super) const fn new() -> Self {
        Self { bytes: Vec::new(), dropped_lines: 0 }
    }

    /// Appends text that ends with a line end. Returns the number of lines that it dropped.
    pub(super) fn push(&mut self, text: &[u8]) -> u64 {
        // After a loss nothing is queued until the next batch, so that the report of the loss has
        // its place in the order.
        if self.dropped_lines == 0 && self.bytes.len() + text.len() <= QUEUE_BYTES_MAX {
            self.bytes.extend_from_slice(text);
            return 0;
        }
        let dropped = count_lines(text);
        self.dropped_lines += dropped;
        dropped
    }

    pub(super) fn is_empty(&self) -> bool {
        self.bytes.is_empty() && self.dropped_lines == 0
    }

    /// Takes everything into `batch`, whose memory the queue uses from then on.
    pub(super) fn take_into(&mut self, batch: &mut LineBatch) {
        batch.bytes.clear();
        std::mem::swap(&mut self.bytes, &mut batch.bytes);
        batch.dropped_lines = std::mem::take(&mut self.dropped_lines);
    }
}

pub(super) fn count_lines(text: &[u8]) -> u64 {
    text.iter().filter(|byte| **byte == b'\n').count() as u64
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn line(bytes: usize) -> Vec<u8> {
        let mut line = vec![b'.'; bytes - 1];
        line.push(b'\n');
        line
    }

    #[test]
    fn a_full_queue_keeps_its_oldest_lines_and_counts_the_others() {
        let mut queue = LineQueue::new();
        assert_eq!(queue.push(&line(QUEUE_BYTES_MAX - 1)), 0);
        assert_eq!(queue.push(b"does not fit\n"), 1);
        assert_eq!(queue.push(b"\n"), 1, "a line after a gap would hide the gap");
        assert_eq!(queue.push(b"two\nlines\n"), 2);
        let mut batch = LineBatch::default();
        queue.take_into(&mut batch);
        assert_eq!(batch, LineBatch { bytes: line(QUEUE_BYTES_MAX - 1), dropped_lines: 4 });
        assert!(queue.is_empty());
        assert_eq!(queue.push(b"fits again\n"), 0);
    }

    proptest! {
        #[test]
        fn every_line_is_taken_or_counted_in_bounded_memory(
            lengths in proptest::collection::vec(1usize..300_000, 1..40),
            take_every in 1usize..10,
        ) {
            let (mut queue, mut batch) = (LineQueue::new(), LineBatch::default());
            let (mut taken, mut dropped) = (0, 0);
            for (index, length) in lengths.iter().enumerate() {
                queue.push(&line(*length));
                prop_assert!(queue.bytes.len() <= QUEUE_BYTES_MAX);
                if index % take_every == 0 {
                    queue.take_into(&mut batch);
                    taken += count_lines(&batch.bytes);
                    dropped += batch.dropped_lines;
                }
            }
            queue.take_into(&mut batch);
            taken += count_lines(&batch.bytes);
            dropped += batch.dropped_lines;
            prop_assert_eq!(taken + dropped, lengths.len() as u64);
        }
    }
}
