// SPDX-License-Identifier: Apache-2.0

//! [`LogOutput`]: writes batches of log lines to stderr, and says what was lost before.

use std::io::{self, Write};
use std::os::fd::AsFd;
use std::time::{Duration, Instant};

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::io::Errno;

use super::line_queue::{LineBatch, count_lines};

/// A write of so many bytes to a pipe is not split by those of other processes (PIPE_BUF, pipe(7)).
const ATOMIC_BYTES_MAX: usize = 4096;

/// Stderr as the writer thread uses it: without the lock of `std::io::Stderr`, which other threads
/// would then wait for.
pub(super) struct RawStderr;

impl Write for RawStderr {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        let stderr = io::stderr();
        loop {
            match rustix::io::write(&stderr, bytes) {
                Err(Errno::INTR) => {}
                // Another process made the shared pipe non-blocking. This thread may wait.
                Err(Errno::AGAIN) => {
                    match poll(&mut [PollFd::from_borrowed_fd(stderr.as_fd(), PollFlags::OUT)], None) {
                        Ok(_) | Err(Errno::INTR) => {}
                        Err(errno) => return Err(errno.into()),
                    }
                }
                written => return Ok(written?),
            }
        }
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

/// Stderr for a thread that may wait until a given time only.
pub(super) struct PatientStderr {
    pub(super) until: Instant,
}

impl Write for PatientStderr {
    /// A pipe with room takes [`ATOMIC_BYTES_MAX`] at once, so the write does not wait.
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        let left = self.until.saturating_duration_since(Instant::now()).max(Duration::from_millis(1));
        let left = Timespec::try_from(left).map_err(io::Error::other)?;
        let stderr = io::stderr();
        match poll(&mut [PollFd::from_borrowed_fd(stderr.as_fd(), PollFlags::OUT)], Some(&left))? {
            0 => Err(io::ErrorKind::TimedOut.into()),
            _ => Ok(rustix::io::write(&stderr, &bytes[..bytes.len().min(ATOMIC_BYTES_MAX)])?),
        }
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

pub(super) struct LogOutput<W> {
    out: W,
    /// Lost lines that no written line has reported yet.
    unreported: u64,
    /// The last write ended within a line.
    mid_line: bool,
}

impl<W: Write> LogOutput<W> {
    pub(super) const fn new(out: W) -> Self {
        Self { out, unreported: 0, mid_line: false }
    }

    /// Writes a batch. `report` formats the line about lost ones. Returns the number of lines of
    /// the batch that failed writes have lost.
    pub(super) fn write_batch(&mut self, batch: &LineBatch, report: impl Fn(u64) -> String) -> u64 {
        let lines = count_lines(&batch.bytes);
        let lost = match self.recover(&report) {
            true => lines - count_lines(&batch.bytes[..self.write_lines(&batch.bytes)]),
            false => lines,
        };
        self.unreported += lost + batch.dropped_lines;
        if lost == 0 {
            self.recover(&report);
        }
        lost
    }

    /// Ends a line that a failed write cut, and reports lost lines. Returns false if the output
    /// still fails.
    fn recover(&mut self, report: impl Fn(u64) -> String) -> bool {
        if self.mid_line && self.write(b"\n") == 0 {
            return false;
        }
        if self.unreported > 0 {
            let line = report(self.unreported);
            if self.write(line.as_bytes()) < line.len() {
                return false;
            }
            self.unreported = 0;
        }
        true
    }

    /// Writes whole lines at once, because several processes write to the same pipe. Returns how
    /// many bytes were written.
    fn write_lines(&mut self, lines: &[u8]) -> usize {
        let mut written = 0;
        while written < lines.len() {
            let next = first_lines(&lines[written..]);
            let done = self.write(next);
            written += done;
            if done < next.len() {
                break;
            }
        }
        written
    }

    /// Writes as much as possible and returns how much that was.
    fn write(&mut self, bytes: &[u8]) -> usize {
        let mut written = 0;
        while written < bytes.len() {
            match self.out.write(&bytes[written..]) {
                Ok(0) | Err(_) => break,
                Ok(more) => written += more,
            }
        }
        if written > 0 {
            self.mid_line = bytes[written - 1] != b'\n';
        }
        written
    }
}

/// The first lines that fit into one atomic write, or the first line, if it is longer.
fn first_lines(lines: &[u8]) -> &[u8] {
    let head = &lines[..lines.len().min(ATOMIC_BYTES_MAX)];
    let end = head.iter().rposition(|byte| *byte == b'\n');
    let end = end.or_else(|| lines.iter().position(|byte| *byte == b'\n'));
    &lines[..end.map_or(lines.len(), |at| at + 1)]
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn writes_end_with_a_line_end_and_fit_into_an_atomic_write() {
        let line = |bytes: usize| [vec![b'.'; bytes - 1], vec![b'\n']].concat();
        assert_eq!(first_lines(&[line(10), line(20)].concat()).len(), 30);
        assert_eq!(first_lines(&[line(10), line(ATOMIC_BYTES_MAX - 10)].concat()).len(), ATOMIC_BYTES_MAX);
        assert_eq!(first_lines(&[line(10), line(ATOMIC_BYTES_MAX)].concat()).len(), 10);
        assert_eq!(first_lines(&[line(9000), line(10)].concat()).len(), 9000);
    }

    /// A disk with this much space left.
    #[derive(Default)]
    struct Disk {
        text: Vec<u8>,
        room: usize,
    }

    impl Write for Disk {
        fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
            // Short writes, as pipes and disks make them.
            let fits = bytes.len().min(self.room).min(5);
            if fits == 0 {
                return Err(io::ErrorKind::StorageFull.into());
            }
            self.room -= fits;
            self.text.extend_from_slice(&bytes[..fits]);
            Ok(fits)
        }

        fn flush(&mut self) -> io::Result<()> {
            Ok(())
        }
    }

    fn batch(text: &str, dropped_lines: u64) -> LineBatch {
        LineBatch { bytes: text.as_bytes().to_vec(), dropped_lines }
    }

    fn report(lost: u64) -> String {
        format!("lost {lost}\n")
    }

    #[test]
    fn dropped_lines_are_reported_after_the_lines_before_them() {
        let mut output = LogOutput::new(Disk { room: 100, ..Disk::default() });
        assert_eq!(output.write_batch(&batch("first line\n", 3), report), 0);
        assert_eq!(output.write_batch(&batch("next\n", 0), report), 0);
        assert_eq!(String::from_utf8_lossy(&output.out.text), "first line\nlost 3\nnext\n");
    }

    #[test]
    fn after_a_full_disk_the_log_continues_on_a_new_line_with_the_number_of_lost_ones() {
        let mut output = LogOutput::new(Disk { room: 8, ..Disk::default() });
        assert_eq!(output.write_batch(&batch("one\ntwo and three\n", 0), report), 1);
        assert_eq!(output.write_batch(&batch("four\nfive\n", 1), report), 2);
        output.out.room = 100;
        assert_eq!(output.write_batch(&batch("six\n", 0), report), 0);
        assert_eq!(String::from_utf8_lossy(&output.out.text), "one\ntwo \nlost 4\nsix\n");
    }
}
