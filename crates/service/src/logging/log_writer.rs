// SPDX-License-Identifier: Apache-2.0

//! [`LogWriter`]: the queue of a process's log lines, and the thread that writes them to stderr.
//!
//! Only this thread waits for a slow stderr. It never ends: a process ends around it. If the system
//! starts no thread, [`LogWriter::flush`] writes what it can.

use std::io::{self, Write};
use std::os::fd::OwnedFd;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Condvar, Mutex, MutexGuard, PoisonError};
use std::thread;
use std::time::{Duration, Instant};

use tracing::Level;

use super::line_queue::{LineBatch, LineQueue};
use super::log_output::{LogOutput, PatientStderr, RawStderr};
use super::log_tail::LogTail;

pub(super) struct LogWriter {
    state: Mutex<WriterState>,
    /// A line waits.
    filled: Condvar,
    /// The thread has written or lost everything that it took.
    written: Condvar,
    lost_lines: AtomicU64,
}

struct WriterState {
    queue: LineQueue,
    /// Batches that the thread has taken.
    taken: u64,
    is_writing: bool,
    is_started: bool,
    /// For a crash report.
    tail: Option<LogTail>,
}

impl LogWriter {
    pub(super) const fn new() -> Self {
        let queue = LineQueue::new();
        Self {
            state: Mutex::new(WriterState {
                queue,
                taken: 0,
                is_writing: false,
                is_started: false,
                tail: None,
            }),
            filled: Condvar::new(),
            written: Condvar::new(),
            lost_lines: AtomicU64::new(0),
        }
    }

    /// Appends text that ends with a line end, or counts its lines as lost. Never waits for stderr.
    /// `time` begins the line in the tail.
    pub(super) fn push(&self, text: &[u8], time: Option<String>) {
        let timed = time.map(|time| [time.as_bytes(), text].concat());
        let mut state = self.lock();
        if let Some(tail) = &mut state.tail {
            // Nothing more can be done about memory that takes no line.
            let _: io::Result<()> = tail.append(timed.as_deref().unwrap_or(text));
        }
        let dropped = state.queue.push(text);
        drop(state);
        self.lost_lines.fetch_add(dropped, Ordering::Relaxed);
        self.filled.notify_one();
    }

    /// Appends all further lines to this memory too.
    pub(super) fn keep_tail(&self, tail: LogTail) {
        self.lock().tail = Some(tail);
    }

    pub(super) fn tail_fd(&self) -> Option<OwnedFd> {
        self.lock().tail.as_ref()?.try_clone_fd().ok()
    }

    pub(super) fn lost_lines(&self) -> u64 {
        self.lost_lines.load(Ordering::Relaxed)
    }

    /// Starts the thread, unless it runs. If the system has no thread left, lines wait in the queue
    /// for the next call.
    pub(super) fn start_thread(&'static self) {
        if std::mem::replace(&mut self.lock().is_started, true) {
            return;
        }
        let spawned = thread::Builder::new().name("log".to_owned()).spawn(|| self.write_for_ever());
        if spawned.is_err() {
            self.lock().is_started = false;
        }
    }

    /// Waits until the lines that are queued now are written or lost, at most for `timeout`.
    pub(super) fn flush(&'static self, timeout: Duration) {
        self.start_thread();
        let mut state = self.lock();
        if !state.is_started {
            let mut batch = LineBatch::default();
            state.queue.take_into(&mut batch);
            drop(state);
            let mut output = LogOutput::new(PatientStderr { until: Instant::now() + timeout });
            let lost = output.write_batch(&batch, report);
            self.lost_lines.fetch_add(lost, Ordering::Relaxed);
            return;
        }
        // The queue now is in the next batch; a batch that is being written comes before it.
        let until = state.taken + u64::from(!state.queue.is_empty());
        let is_pending =
            |state: &mut WriterState| state.taken < until || (state.taken == until && state.is_writing);
        // At the timeout the lines are lost: there is nothing left to do about that.
        let _ = self.written.wait_timeout_while(state, timeout, is_pending);
    }

    fn write_for_ever(&self) {
        let mut output = LogOutput::new(RawStderr);
        let mut batch = LineBatch::default();
        loop {
            self.take_batch(&mut batch);
            let lost = output.write_batch(&batch, report);
            self.lost_lines.fetch_add(lost, Ordering::Relaxed);
            self.lock().is_writing = false;
            self.written.notify_all();
        }
    }

    fn take_batch(&self, batch: &mut LineBatch) {
        let state = self.lock();
        let mut state = self
            .filled
            .wait_while(state, |state| state.queue.is_empty())
            .unwrap_or_else(PoisonError::into_inner);
        state.queue.take_into(batch);
        state.taken += 1;
        state.is_writing = true;
    }

    /// No code that may panic runs under this lock, so the panic hook can take it.
    fn lock(&self) -> MutexGuard<'_, WriterState> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// The line about lost lines.
fn report(lost: u64) -> String {
    let text = format!("stderr was full or failed, so the log has a gap lines_lost={lost}");
    super::whole_line(Level::WARN, &text)
}

/// For `tracing_subscriber`, which writes each event with one call.
impl Write for &LogWriter {
    fn write(&mut self, text: &[u8]) -> io::Result<usize> {
        self.push(text, super::time_in_tail());
        Ok(text.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}
