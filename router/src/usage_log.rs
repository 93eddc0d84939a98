// SPDX-License-Identifier: Apache-2.0

//! The usage log: one line of JSON for each request that has ended, appended to a file.
//!
//! 1. Writing a line never waits and never fails a request. It goes into a bounded queue; a thread
//!    writes.
//! 2. Lines that the queue or the file does not take are lost and counted.
//! 3. Before each line the thread looks whether the path still means the open file, so a file that
//!    was renamed or removed is replaced by a new one.

use std::fs::{File, Metadata, OpenOptions};
use std::io::{self, Write};
use std::os::unix::fs::{MetadataExt, OpenOptionsExt};
use std::path::PathBuf;
use std::sync::Arc;
use std::sync::mpsc::{Receiver, SyncSender, sync_channel};
use std::time::Duration;

use crate::metrics;

/// Lines that wait for the file: some seconds of a busy router, in about a megabyte.
const QUEUED_LINES_MAX: usize = 4096;
/// Longest wait for the file at the end of the process.
const FLUSH_WAIT: Duration = Duration::from_secs(1);

enum UsageCommand {
    Line(String),
    /// Replies when all lines before it are written or lost.
    Flush(SyncSender<()>),
}

#[derive(Debug)]
pub(crate) struct UsageLog {
    commands: SyncSender<UsageCommand>,
}

impl UsageLog {
    /// Starts the thread that writes to this file. The file may come later.
    pub(crate) fn start(path: PathBuf) -> io::Result<Arc<Self>> {
        let (commands, received) = sync_channel(QUEUED_LINES_MAX);
        let thread = std::thread::Builder::new().name("usage-log".to_owned());
        thread.spawn(move || write_lines(UsageFile::new(path), &received))?;
        Ok(Arc::new(Self { commands }))
    }

    pub(crate) fn append(&self, line: String) {
        if self.commands.try_send(UsageCommand::Line(line)).is_err() {
            metrics::record_lost_usage_line();
        }
    }

    /// Waits until the lines so far are written, for a second at most.
    pub(crate) fn flush(&self) {
        let (reply, done) = sync_channel(1);
        if self.commands.try_send(UsageCommand::Flush(reply)).is_ok() {
            // Without an answer in time, the lines are lost with the process.
            let _ = done.recv_timeout(FLUSH_WAIT);
        }
    }
}

fn write_lines(mut file: UsageFile, commands: &Receiver<UsageCommand>) {
    let mut is_failing = false;
    while let Ok(command) = commands.recv() {
        let line = match command {
            UsageCommand::Line(line) => line,
            UsageCommand::Flush(reply) => {
                // The caller may have given up.
                let _ = reply.try_send(());
                continue;
            }
        };
        let written = file.append(&line);
        if written.is_err() {
            metrics::record_lost_usage_line();
        }
        match (&written, is_failing) {
            (Err(error), false) => {
                tracing::error!(path = %file.path.display(), %error, "the usage log loses lines");
            }
            (Ok(()), true) => tracing::info!(path = %file.path.display(), "the usage log is written again"),
            _ => {}
        }
        is_failing = written.is_err();
    }
}

struct UsageFile {
    path: PathBuf,
    open: Option<File>,
    /// A line was cut: the next one begins after a line feed.
    is_torn: bool,
}

impl UsageFile {
    fn new(path: PathBuf) -> Self {
        Self { path, open: None, is_torn: false }
    }

    fn append(&mut self, line: &str) -> io::Result<()> {
        let is_torn = self.is_torn;
        let file = self.current()?;
        let text = format!("{}{line}\n", if is_torn { "\n" } else { "" });
        let written = append_all(file, text.as_bytes());
        self.is_torn = match written {
            Ok(()) => false,
            Err(CutLine { written, .. }) => is_torn || written > 0,
        };
        written.map_err(|cut| cut.error)
    }

    /// The file at the path, opened anew if it is another one.
    fn current(&mut self) -> io::Result<&mut File> {
        let identity = |metadata: Metadata| (metadata.dev(), metadata.ino());
        let at_path = std::fs::metadata(&self.path).map(identity).ok();
        let opened = self.open.as_ref().and_then(|file| file.metadata().ok()).map(identity);
        if opened.is_none() || opened != at_path {
            // Names of tenants and models are for the fleet's user.
            let file = OpenOptions::new().append(true).create(true).mode(0o600).open(&self.path)?;
            self.open = Some(file);
            self.is_torn = false;
        }
        self.open.as_mut().ok_or_else(|| io::ErrorKind::NotFound.into())
    }
}

/// A write that failed after some bytes.
struct CutLine {
    written: usize,
    error: io::Error,
}

fn append_all(file: &mut File, bytes: &[u8]) -> Result<(), CutLine> {
    let mut written = 0;
    while written < bytes.len() {
        match file.write(&bytes[written..]) {
            Ok(0) => return Err(CutLine { written, error: io::ErrorKind::WriteZero.into() }),
            Ok(count) => written += count,
            Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
            Err(error) => return Err(CutLine { written, error }),
        }
    }
    Ok(())
}
