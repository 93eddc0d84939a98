// SPDX-License-Identifier: Apache-2.0

//! [`LogTail`]: the last lines of a process's log, in memory that outlives the process.
//!
//! The supervisor makes the memory (a memfd) and passes it to a child. The child appends each line
//! that it logs, also while stderr is stalled. After the death of the child, however sudden, the
//! supervisor reads the lines. No page of a disk is involved, so an append never waits.
//!
//! ```text
//! 0        8                                  8 + RING_BYTES
//! | end    | ring: byte n of the log is at n % RING_BYTES |
//! ```
//!
//! 1. `end` counts all bytes ever appended. It is written after them.
//! 2. A reader takes at most [`TAIL_BYTES_MAX`] bytes before `end`. The ring is longer by one
//!    append, so a process that dies within an append damages nothing that is read.

use std::fs::File;
use std::io;
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::fs::FileExt;

use rustix::fs::{FallocateFlags, MemfdFlags, fallocate, memfd_create};

/// What a reader gets at most. Several hundred lines: at level `info`, the life of a worker.
const TAIL_BYTES_MAX: usize = 64 << 10;
/// More lines are not read by a person. It bounds a log of very short lines.
const TAIL_LINES_MAX: usize = 500;
/// The longest append. It holds a panic with its backtrace; what is longer is cut.
const APPEND_BYTES_MAX: usize = 16 << 10;
/// A reader also looks at the byte before the first that it takes: a line end, or within a line.
const RING_BYTES: usize = 1 + TAIL_BYTES_MAX + APPEND_BYTES_MAX;
const END_BYTES: usize = size_of::<u64>();

/// One end of the memory, for appends or for reads.
#[derive(Debug)]
pub struct LogTail {
    memory: File,
    end: u64,
}

impl LogTail {
    /// Makes the memory. All of it is allocated now, so that no append lacks memory.
    pub fn create() -> io::Result<Self> {
        let memory = memfd_create("ballast-log-tail", MemfdFlags::CLOEXEC)?;
        fallocate(&memory, FallocateFlags::empty(), 0, (END_BYTES + RING_BYTES) as u64)?;
        Ok(Self { memory: memory.into(), end: 0 })
    }

    /// The memory that another process has made.
    pub fn from_fd(memory: OwnedFd) -> Self {
        Self { memory: memory.into(), end: 0 }
    }

    /// Another descriptor of the same memory.
    pub fn try_clone_fd(&self) -> io::Result<OwnedFd> {
        self.memory.as_fd().try_clone_to_owned()
    }

    /// Appends text that ends with a line end. One process appends.
    pub(super) fn append(&mut self, text: &[u8]) -> io::Result<()> {
        let is_cut = text.len() > APPEND_BYTES_MAX;
        let kept = if is_cut { &text[..APPEND_BYTES_MAX - 1] } else { text };
        self.write(kept)?;
        if is_cut {
            self.write(b"\n")?;
        }
        self.memory.write_all_at(&self.end.to_ne_bytes(), 0)
    }

    fn write(&mut self, bytes: &[u8]) -> io::Result<()> {
        let at = (self.end % RING_BYTES as u64) as usize;
        let (first, wrapped) = bytes.split_at(bytes.len().min(RING_BYTES - at));
        self.memory.write_all_at(first, (END_BYTES + at) as u64)?;
        if !wrapped.is_empty() {
            self.memory.write_all_at(wrapped, END_BYTES as u64)?;
        }
        self.end += bytes.len() as u64;
        Ok(())
    }

    /// The last lines, whole, oldest first. The content may be anything: another process wrote it.
    pub fn read(&self) -> io::Result<Vec<u8>> {
        let mut end = [0; END_BYTES];
        self.memory.read_exact_at(&mut end, 0)?;
        let mut ring = vec![0; RING_BYTES];
        self.memory.read_exact_at(&mut ring, END_BYTES as u64)?;
        let end = u64::from_ne_bytes(end);
        let available = end.min(TAIL_BYTES_MAX as u64 + 1);
        let begin = ((end - available) % RING_BYTES as u64) as usize;
        ring.rotate_left(begin);
        ring.truncate(available as usize);
        let is_cut = end > TAIL_BYTES_MAX as u64;
        Ok(last_lines(&ring, is_cut).to_vec())
    }
}

/// The last [`TAIL_LINES_MAX`] lines. `is_cut`: the text begins within a line, or with a line end.
fn last_lines(text: &[u8], is_cut: bool) -> &[u8] {
    let is_line_end = |byte: &u8| *byte == b'\n';
    let first_whole =
        if is_cut { text.iter().position(is_line_end).map_or(text.len(), |at| at + 1) } else { 0 };
    let text = &text[first_whole..];
    let ends = text.iter().enumerate().rev().filter(|(_, byte)| is_line_end(byte));
    // The line end before the first line that is kept.
    let before = ends.map(|(at, _)| at).nth(TAIL_LINES_MAX);
    &text[before.map_or(0, |at| at + 1)..]
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn appended(lines: &[Vec<u8>]) -> LogTail {
        let mut tail = LogTail::create().unwrap();
        lines.iter().for_each(|line| tail.append(line).unwrap());
        tail
    }

    fn line(number: usize, bytes: usize) -> Vec<u8> {
        format!("{number} {}\n", "x".repeat(bytes)).into_bytes()
    }

    #[test]
    fn another_descriptor_reads_what_was_appended() {
        let tail = appended(&[b"one\n".to_vec(), b"two\nthree\n".to_vec()]);
        let reader = LogTail::from_fd(tail.try_clone_fd().unwrap());
        drop(tail);
        assert_eq!(reader.read().unwrap(), b"one\ntwo\nthree\n");
    }

    #[test]
    fn at_most_so_many_lines_are_read() {
        let lines: Vec<_> = (0..TAIL_LINES_MAX + 7).map(|number| line(number, 1)).collect();
        assert_eq!(appended(&lines).read().unwrap(), lines[7..].concat());
    }

    #[test]
    fn a_line_that_fits_exactly_is_read() {
        const FITTING: usize = 256;
        let line = [vec![b'x'; TAIL_BYTES_MAX / FITTING - 1], vec![b'\n']].concat();
        let lines = vec![line; FITTING + 1];
        assert_eq!(appended(&lines).read().unwrap(), lines[1..].concat());
    }

    #[test]
    fn a_text_that_is_too_long_is_cut_and_ends_with_a_line_end() {
        let read = appended(&[line(1, 2 * RING_BYTES), b"next\n".to_vec()]).read().unwrap();
        assert_eq!(read.len(), APPEND_BYTES_MAX + "next\n".len());
        assert!(read.ends_with(b"x\nnext\n"));
    }

    #[test]
    fn a_process_that_dies_within_an_append_damages_no_line() {
        let lines: Vec<_> = (0..900).map(|number| line(number, 150)).collect();
        let mut tail = appended(&lines);
        let before = tail.read().unwrap();
        // The last append has not written its end.
        tail.write(&line(7, APPEND_BYTES_MAX - 3)).unwrap();
        assert_eq!(tail.read().unwrap(), before);
    }

    #[test]
    fn memory_with_any_content_is_read_within_bounds() {
        let tail = LogTail::create().unwrap();
        for end in [1, RING_BYTES as u64 - 1, u64::MAX - 1, u64::MAX] {
            tail.memory.write_all_at(&end.to_ne_bytes(), 0).unwrap();
            assert!(tail.read().unwrap().len() <= TAIL_BYTES_MAX);
        }
        tail.memory.set_len(100).unwrap();
        assert!(tail.read().is_err());
    }

    proptest! {
        #[test]
        fn the_tail_is_the_end_of_the_log_in_whole_lines(
            lengths in proptest::collection::vec(0usize..9000, 1..60),
        ) {
            let lines: Vec<_> = lengths.iter().enumerate().map(|(number, &bytes)| line(number, bytes)).collect();
            let (all, read) = (lines.concat(), appended(&lines).read().unwrap());
            prop_assert!(all.ends_with(&read) && read.len() <= TAIL_BYTES_MAX);
            // The line before does not fit.
            let kept = read.iter().filter(|byte| **byte == b'\n').count();
            let before = lines.len().checked_sub(kept + 1).map_or(usize::MAX, |at| lines[at].len());
            prop_assert!(before == usize::MAX || read.len() + before > TAIL_BYTES_MAX);
        }
    }
}
