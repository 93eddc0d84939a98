// SPDX-License-Identifier: Apache-2.0

//! [`LoadProgressBar`]: the progress bar of a load, on a terminal.
//!
//! A thread draws it. A terminal that takes no output (Ctrl-S, a hung connection) stops that thread
//! and nothing else.

use std::io::IsTerminal;
use std::sync::mpsc::{self, Receiver, SyncSender};
use std::time::Duration;

use indicatif::{ProgressBar, ProgressStyle};
use service::printable::printable;

/// Longest wait for the terminal until the bar is gone. Later output would stand behind it.
const CLEAR_WAIT: Duration = Duration::from_millis(200);

/// How far the load of a model is.
pub(crate) struct LoadingModel {
    pub(crate) model: String,
    pub(crate) done: u64,
    pub(crate) total: u64,
}

/// Dropping it clears the bar, without waiting for that.
pub(crate) struct LoadProgressBar {
    thread: Option<DrawingThread>,
}

struct DrawingThread {
    loaded: SyncSender<LoadingModel>,
    /// Closed when the bar is gone.
    cleared: Receiver<()>,
}

impl LoadProgressBar {
    /// Shows nothing if standard error is no terminal.
    pub(crate) fn start() -> Self {
        let thread = std::io::stderr().is_terminal().then(DrawingThread::start).flatten();
        Self { thread }
    }

    pub(crate) fn show(&self, loaded: LoadingModel) {
        if let Some(thread) = &self.thread {
            // While the thread draws, newer figures are dropped: more will follow.
            let _ = thread.loaded.try_send(loaded);
        }
    }

    pub(crate) fn clear(&mut self) {
        if let Some(DrawingThread { loaded, cleared }) = self.thread.take() {
            drop(loaded);
            // Ends with an error in both cases: the bar is gone, or the terminal takes no output.
            let _ = cleared.recv_timeout(CLEAR_WAIT);
        }
    }
}

impl DrawingThread {
    fn start() -> Option<Self> {
        let (loaded, figures) = mpsc::sync_channel(1);
        let (clearing, cleared) = mpsc::channel();
        let draw = move || {
            draw(&figures);
            drop(clearing);
        };
        std::thread::Builder::new().name("progress".to_owned()).spawn(draw).ok()?;
        Some(Self { loaded, cleared })
    }
}

/// Draws until the sender is gone.
fn draw(figures: &Receiver<LoadingModel>) {
    let style = ProgressStyle::with_template("{msg} {wide_bar} {bytes} of {total_bytes}");
    let bar = ProgressBar::new(0).with_style(style.unwrap_or_else(|_| ProgressStyle::default_bar()));
    for LoadingModel { model, done, total } in figures {
        bar.set_length(total);
        bar.set_position(done);
        bar.set_message(printable(&model));
    }
    bar.finish_and_clear();
}
