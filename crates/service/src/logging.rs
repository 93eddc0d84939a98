// SPDX-License-Identifier: Apache-2.0

//! Logging: one line per event on stderr. `BALLAST_LOG` sets the level (default `info`; `debug`,
//! `worker=trace,info`).
//!
//! Under systemd the journal records time and unit. Lines then begin with a syslog priority `<N>`
//! instead of a time (sd-daemon(3)). No level logs prompts or generated text.

use std::fmt;
use std::io::IsTerminal;

use tracing::{Event, Level, Subscriber};
use tracing_subscriber::EnvFilter;
use tracing_subscriber::fmt::format::Writer;
use tracing_subscriber::fmt::time::{FormatTime, Uptime};
use tracing_subscriber::fmt::{FmtContext, FormatEvent, FormatFields};
use tracing_subscriber::registry::LookupSpan;

use crate::env;

/// Starts logging for this process. `BALLAST_LOG` overrides `default_level`. A second call does
/// nothing.
pub fn init(role: &str, default_level: Level) {
    let filter = match std::env::var(env::LOG) {
        Ok(directives) if !directives.is_empty() => EnvFilter::new(directives),
        _ => EnvFilter::new(default_level.to_string()),
    };
    let journal = std::env::var_os("JOURNAL_STREAM").is_some() && !std::io::stderr().is_terminal();
    let format = RoleFormat { role: role.to_owned(), journal, uptime: Uptime::default() };
    let installed = tracing_subscriber::fmt()
        .with_env_filter(filter)
        .with_writer(std::io::stderr)
        .with_ansi(false)
        .event_format(format)
        .try_init();
    // Only a test harness that runs the code of several processes in one process calls this twice.
    drop(installed);
}

/// Formats `   0.123s  INFO worker-0 text key=value`, or `<6>worker-0 text key=value` for the
/// journal.
struct RoleFormat {
    role: String,
    journal: bool,
    uptime: Uptime,
}

impl<S, N> FormatEvent<S, N> for RoleFormat
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
        let level = *event.metadata().level();
        if self.journal {
            write!(writer, "<{}>{} ", syslog_priority(level), self.role)?;
        } else {
            self.uptime.format_time(&mut writer)?;
            write!(writer, " {level:>5} {} ", self.role)?;
        }
        context.field_format().format_fields(writer.by_ref(), event)?;
        writeln!(writer)
    }
}

fn syslog_priority(level: Level) -> u8 {
    match level {
        Level::ERROR => 3,
        Level::WARN => 4,
        Level::INFO => 6,
        Level::DEBUG | Level::TRACE => 7,
    }
}
