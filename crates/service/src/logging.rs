// SPDX-License-Identifier: Apache-2.0

//! Logging: one line per event on stderr. `BALLAST_LOG` sets the level (default `info`; `debug`,
//! `worker=trace,info`).
//!
//! Under systemd the journal records time and unit. Lines then begin with a syslog priority `<N>`
//! (sd-daemon(3)). `BALLAST_LOG_FORMAT=json` makes each line a JSON object. No level logs prompts
//! or generated text.
//!
//! A broken or stalled stderr costs lines, and nothing else (decision 0025):
//!
//! 1. Logging never waits, fails or panics. It appends to a bounded queue; one thread writes.
//! 2. If the queue is full or a write fails, lines are lost and counted. Once a write works again,
//!    a line says how many.
//! 3. [`flush`] and the panic hook wait a bounded time, so the last lines are written if stderr
//!    takes them.
//! 4. If the supervisor writes crash reports, each line is also in a [`LogTail`] before the call
//!    that logs it returns.

mod line_format;
mod line_queue;
mod log_output;
mod log_tail;
mod log_writer;
mod panic_hook;

use std::fmt;
use std::os::fd::OwnedFd;
use std::sync::OnceLock;
use std::time::Duration;

use tracing::{Event, Level, Subscriber};
use tracing_subscriber::EnvFilter;
use tracing_subscriber::fmt::format::Writer;
use tracing_subscriber::fmt::{FmtContext, FormatEvent, FormatFields};
use tracing_subscriber::registry::LookupSpan;

use crate::env;
use crate::listen::fd_from_env;
use line_format::LineFormat;
pub use log_tail::LogTail;
use log_writer::LogWriter;

/// Longest wait for stderr at the end of a process. A reader that is there takes microseconds.
const FLUSH_WAIT: Duration = Duration::from_secs(1);

static LOG: LogWriter = LogWriter::new();
static FORMAT: OnceLock<LineFormat> = OnceLock::new();

/// Starts logging for this process. `BALLAST_LOG` overrides `default_level`. A second call does
/// nothing.
pub fn init(role: &str, default_level: Level) {
    init_without_thread(role, default_level);
    start_thread();
}

/// The first part of [`init`], for a process that enters a sandbox: lines wait in the queue until
/// [`start_thread`]. A thread from before a sandbox would stay outside of it.
pub fn init_without_thread(role: &str, default_level: Level) {
    let filter = match std::env::var(env::LOG) {
        Ok(directives) if !directives.is_empty() => EnvFilter::new(directives),
        _ => EnvFilter::new(default_level.to_string()),
    };
    let format = FORMAT.get_or_init(|| LineFormat::from_env(role));
    let tail = fd_from_env(env::LOG_TAIL_FD);
    if let Ok(Some(memory)) = tail {
        LOG.keep_tail(LogTail::from_fd(memory));
    } else if let Err(error) = &tail {
        print_line(&format!("ballast: {error}: a crash report will lack log lines"));
    }
    panic_hook::install();
    let installed = tracing_subscriber::fmt()
        .with_env_filter(filter)
        .with_writer(|| &LOG)
        .with_ansi(false)
        // Its own reports are eprintln!, which panics if stderr is broken.
        .log_internal_errors(false)
        .event_format(EventLine { format })
        .try_init();
    // Only a test harness that runs the code of several processes in one process calls this twice.
    drop(installed);
    if let Some(unknown) = line_format::unknown_format() {
        tracing::warn!(format = %unknown, "{} is neither \"text\" nor \"json\": lines are text", env::LOG_FORMAT);
    }
}

/// Starts the thread that writes to stderr, unless it runs. Without a thread lines wait in the
/// queue.
pub fn start_thread() {
    LOG.start_thread();
}

/// Adds a line for a person who started this process: without prefix, unless lines are JSON.
pub fn print_line(text: &str) {
    let line = match FORMAT.get().filter(|format| format.is_json()) {
        Some(format) => format.line(Level::INFO, text),
        None => format!("{text}\n"),
    };
    LOG.push(line.as_bytes(), time_in_tail());
}

/// The journal has the time of each line, a crash report has not.
fn time_in_tail() -> Option<String> {
    FORMAT.get().and_then(LineFormat::time_for_tail)
}

/// A line without fields. A process that has not called [`init`] has no format.
fn whole_line(level: Level, text: &str) -> String {
    FORMAT.get().map_or_else(|| format!("{text}\n"), |format| format.line(level, text))
}

/// Waits until stderr has taken all lines so far, but not for long.
pub fn flush() {
    LOG.flush(FLUSH_WAIT);
}

/// Lines of this process that stderr did not take.
pub fn lost_lines() -> u64 {
    LOG.lost_lines()
}

/// Where this process keeps its last lines, if its supervisor writes crash reports.
pub(crate) fn tail_fd() -> Option<OwnedFd> {
    LOG.tail_fd()
}

/// Formats an event as one line.
struct EventLine {
    format: &'static LineFormat,
}

impl<S, N> FormatEvent<S, N> for EventLine
where
    S: Subscriber + for<'a> LookupSpan<'a>,
    N: for<'a> FormatFields<'a> + 'static,
{
    fn format_event(
        &self,
        context: &FmtContext<'_, S, N>,
        mut writer: Writer<'_>,
        event: &Event<'_>,
    ) -> fmt::Result {
        if self.format.is_json() {
            return self.format.write_json_event(event, &mut writer);
        }
        self.format.write_prefix(*event.metadata().level(), &mut writer)?;
        context.field_format().format_fields(writer.by_ref(), event)?;
        writeln!(writer)
    }
}
