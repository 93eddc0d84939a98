// SPDX-License-Identifier: Apache-2.0

//! [`LineFormat`]: how a log line looks.

use std::fmt::{self, Write};
use std::io::IsTerminal;

use tracing::field::{Field, Visit};
use tracing::{Event, Level};
use tracing_subscriber::fmt::format::Writer;
use tracing_subscriber::fmt::time::{FormatTime, SystemTime, Uptime};

use crate::env;

/// Keys of every JSON line. A field of the same name gets an underscore.
const OWN_KEYS: [&str; 4] = ["timestamp", "level", "process", "message"];

/// The value of the environment variable, if it names no format.
pub(super) fn unknown_format() -> Option<String> {
    let format = std::env::var_os(env::LOG_FORMAT)?;
    let is_known = ["", "text", "json"].iter().any(|known| format == *known);
    (!is_known).then(|| format.to_string_lossy().into_owned())
}

/// The format of all lines of a process:
///
/// - `   0.123s  INFO worker-0 text key=value`, with the time since the start;
/// - a JSON object: `timestamp` (RFC 3339, UTC), `level`, `process`, `message` and the fields.
///
/// A line for the journal begins with `<N>`, its priority. Text then has neither time nor level.
pub(super) struct LineFormat {
    process: String,
    is_journal: bool,
    is_json: bool,
    uptime: Uptime,
}

impl LineFormat {
    /// The format that the environment asks for.
    pub(super) fn from_env(process: &str) -> Self {
        Self {
            process: process.to_owned(),
            is_journal: std::env::var_os("JOURNAL_STREAM").is_some() && !std::io::stderr().is_terminal(),
            is_json: std::env::var_os(env::LOG_FORMAT).is_some_and(|format| format == "json"),
            uptime: Uptime::default(),
        }
    }

    pub(super) fn is_json(&self) -> bool {
        self.is_json
    }

    /// The time since the start, for lines that lack a time.
    pub(super) fn time_for_tail(&self) -> Option<String> {
        let mut time = String::new();
        let is_without = self.is_journal && !self.is_json;
        (is_without && self.uptime.format_time(&mut Writer::new(&mut time)).is_ok()).then(|| time + " ")
    }

    /// The start of a text line.
    pub(super) fn write_prefix(&self, level: Level, out: &mut impl Write) -> fmt::Result {
        if self.is_journal {
            write!(out, "<{}>{} ", syslog_priority(level), self.process)
        } else {
            self.uptime.format_time(&mut Writer::new(out))?;
            write!(out, " {level:>5} {} ", self.process)
        }
    }

    /// A whole line without fields. The text of a text line may have several lines.
    pub(super) fn line(&self, level: Level, text: &str) -> String {
        let mut line = String::new();
        // A String takes every text.
        let _: fmt::Result = match self.is_json {
            true => self.write_json(level, &mut line, |object| object.add("message", &text)),
            false => self.write_prefix(level, &mut line).and_then(|()| writeln!(line, "{text}")),
        };
        line
    }

    /// A whole JSON line for an event.
    pub(super) fn write_json_event(&self, event: &Event<'_>, out: &mut impl Write) -> fmt::Result {
        let mut line = String::new();
        self.write_json(*event.metadata().level(), &mut line, |object| event.record(object))?;
        out.write_str(&line)
    }

    fn write_json(
        &self,
        level: Level,
        line: &mut String,
        fill: impl FnOnce(&mut JsonObject<'_>),
    ) -> fmt::Result {
        let mut timestamp = String::new();
        SystemTime.format_time(&mut Writer::new(&mut timestamp))?;
        if self.is_journal {
            write!(line, "<{}>", syslog_priority(level))?;
        }
        line.push('{');
        let mut object = JsonObject { line, is_empty: true };
        object.add("timestamp", &timestamp);
        object.add("level", &level.as_str());
        object.add("process", &self.process);
        fill(&mut object);
        line.push_str("}\n");
        Ok(())
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

/// The inner part of a JSON object, written key by key.
struct JsonObject<'a> {
    line: &'a mut String,
    is_empty: bool,
}

impl JsonObject<'_> {
    fn add(&mut self, key: &str, value: &impl serde::Serialize) {
        // Only a map with keys that are no strings cannot be written, and no field is a map.
        let Ok(value) = serde_json::to_string(value) else { return };
        let comma = if std::mem::take(&mut self.is_empty) { "" } else { "," };
        let _: fmt::Result = write!(self.line, "{comma}{}:{value}", serde_json::Value::from(key));
    }

    fn add_field(&mut self, field: &Field, value: &impl serde::Serialize) {
        match field.name() {
            "message" => self.add("message", value),
            name if OWN_KEYS.contains(&name) => self.add(&format!("{name}_"), value),
            name => self.add(name, value),
        }
    }
}

impl Visit for JsonObject<'_> {
    fn record_f64(&mut self, field: &Field, value: f64) {
        self.add_field(field, &value);
    }

    fn record_i64(&mut self, field: &Field, value: i64) {
        self.add_field(field, &value);
    }

    fn record_u64(&mut self, field: &Field, value: u64) {
        self.add_field(field, &value);
    }

    fn record_bool(&mut self, field: &Field, value: bool) {
        self.add_field(field, &value);
    }

    fn record_str(&mut self, field: &Field, value: &str) {
        self.add_field(field, &value);
    }

    fn record_debug(&mut self, field: &Field, value: &dyn fmt::Debug) {
        self.add_field(field, &format!("{value:?}"));
    }
}
