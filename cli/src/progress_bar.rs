// SPDX-License-Identifier: Apache-2.0

//! [`ProgressBar`]: how far a command is, on a terminal and not with `--json`.
//!
//! A thread draws it. A terminal that takes no output (Ctrl-S, a hung connection) stops that thread
//! and nothing else.

use std::io::IsTerminal;
use std::sync::mpsc::{self, Receiver, SyncSender};
use std::time::Duration;

use indicatif::ProgressStyle;
use service::printable::printable;

use crate::json_output;

/// Longest wait for the terminal until the bar is gone. Later output would stand behind it.
const CLEAR_WAIT: Duration = Duration::from_millis(200);

/// What is counted.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(crate) enum ProgressUnit {
    Bytes,
    Requests,
    Tokens,
}

impl ProgressUnit {
    fn template(self) -> &'static str {
        match self {
            Self::Bytes => "{msg} {wide_bar} {bytes} of {total_bytes}, {bytes_per_sec}",
            Self::Requests => "{msg} {wide_bar} {pos} of {len} requests, {per_sec}",
            Self::Tokens => "{msg} {wide_bar} {pos} of {len} tokens, {per_sec}",
        }
    }
}

/// How far the work on a thing is.
pub(crate) struct WorkProgress {
    pub(crate) name: String,
    pub(crate) unit: ProgressUnit,
    pub(crate) done: u64,
    pub(crate) total: u64,
}

/// Dropping it clears the bar, without waiting for that.
pub(crate) struct ProgressBar {
    thread: Option<DrawingThread>,
}

struct DrawingThread {
    made: SyncSender<WorkProgress>,
    /// Closed when the bar is gone.
    cleared: Receiver<()>,
}

impl ProgressBar {
    /// Shows nothing if standard error is no terminal, or with `--json`.
    pub(crate) fn start() -> Self {
        let is_shown = std::io::stderr().is_terminal() && !json_output::is_requested();
        Self { thread: is_shown.then(DrawingThread::start).flatten() }
    }

    pub(crate) fn show(&self, progress: WorkProgress) {
        if let Some(thread) = &self.thread {
            // While the thread draws, newer figures are dropped: more will follow.
            let _ = thread.made.try_send(progress);
        }
    }

    pub(crate) fn clear(&mut self) {
        if let Some(DrawingThread { made, cleared }) = self.thread.take() {
            drop(made);
            // Ends with an error in both cases: the bar is gone, or the terminal takes no output.
            let _ = cleared.recv_timeout(CLEAR_WAIT);
        }
    }
}

impl DrawingThread {
    fn start() -> Option<Self> {
        let (made, figures) = mpsc::sync_channel(1);
        let (clearing, cleared) = mpsc::channel();
        let draw = move || {
            draw(&figures);
            drop(clearing);
        };
        std::thread::Builder::new().name("progress".to_owned()).spawn(draw).ok()?;
        Some(Self { made, cleared })
    }
}

/// Draws until the sender is gone, at most 20 times a second.
fn draw(figures: &Receiver<WorkProgress>) {
    let bar = indicatif::ProgressBar::new(0);
    let mut drawn = None;
    for WorkProgress { name, unit, done, total } in figures {
        if drawn.as_ref() != Some(&(name.clone(), unit)) {
            let style = ProgressStyle::with_template(unit.template());
            bar.set_style(style.unwrap_or_else(|_| ProgressStyle::default_bar()));
            bar.set_message(printable(&name));
            // The rate is that of this thing.
            bar.reset_eta();
            drawn = Some((name, unit));
        }
        bar.set_length(total);
        bar.set_position(done);
    }
    bar.finish_and_clear();
}
