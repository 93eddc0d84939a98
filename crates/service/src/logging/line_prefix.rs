// SPDX-License-Identifier: Apache-2.0

//! [`LinePrefix`]: the start of every log line.

use std::fmt;
use std::io::IsTerminal;

use tracing::Level;
use tracing_subscriber::fmt::format::Writer;
use tracing_subscriber::fmt::time::{FormatTime, Uptime};

/// Writes `   0.123s  INFO worker-0 `, or `<6>worker-0 ` for the journal.
pub(super) struct LinePrefix {
    role: String,
    journal: bool,
    uptime: Uptime,
}

impl LinePrefix {
    pub(super) fn new(role: &str) -> Self {
        let journal = std::env::var_os("JOURNAL_STREAM").is_some() && !std::io::stderr().is_terminal();
        Self { role: role.to_owned(), journal, uptime: Uptime::default() }
    }

    pub(super) fn write(&self, level: Level, out: &mut impl fmt::Write) -> fmt::Result {
        if self.journal {
            write!(out, "<{}>{} ", syslog_priority(level), self.role)
        } else {
            self.uptime.format_time(&mut Writer::new(out))?;
            write!(out, " {level:>5} {} ", self.role)
        }
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
