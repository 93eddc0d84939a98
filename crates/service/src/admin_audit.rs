// SPDX-License-Identifier: Apache-2.0

//! Records in the log who calls an administrative service, what for, and how the call ends.
//!
//! A call has two lines. The first comes before the call is carried out, because some take minutes:
//!
//! ```text
//! admin command command="unload" subject="qwen3-8b" uid=1000 pid=4711
//! admin command failed command="unload" subject="qwen3-8b" uid=1000 pid=4711 took_ms=3 error=...
//! ```
//!
//! 1. A call has exactly one last line: it `succeeded`, it `failed`, or it is `unanswered`.
//! 2. Text of a caller is cut, and the format of log lines escapes it.

use std::time::Instant;

use tonic::transport::server::UdsConnectInfo;
use tonic::{Request, Status};

use crate::printable::excerpt;

/// Writes one line. The target is the same in all processes, for filters such as
/// `BALLAST_LOG=warn,admin_audit=info`.
macro_rules! record {
    ($level:ident, $call:expr, $took_ms:expr, $error:expr, $text:literal) => {{
        let AdminCaller { uid, pid } = $call.caller;
        let (command, subject, took_ms, error) = ($call.command, $call.subject.as_str(), $took_ms, $error);
        tracing::$level!(target: "admin_audit", command, subject, uid, pid, took_ms, error, $text);
    }};
}

/// A name of a model has at most 256 bytes. A caller may send 4 MiB instead.
const SUBJECT_CHARS_MAX: usize = 256;
/// Errors quote file names, and a path has at most 4,096 bytes.
const ERROR_CHARS_MAX: usize = 8192;

/// The process at the other end of a connection, as the kernel names it (SO_PEERCRED). The pid is
/// that of the process that connected; it may have ended since.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct AdminCaller {
    pub uid: Option<u32>,
    pub pid: Option<i32>,
}

impl AdminCaller {
    pub fn of<T>(request: &Request<T>) -> Self {
        let peer = request.extensions().get::<UdsConnectInfo>().and_then(|info| info.peer_cred);
        Self { uid: peer.map(|peer| peer.uid()), pid: peer.and_then(|peer| peer.pid()) }
    }
}

/// How much a call matters to a person who reads the log.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum AdminCallKind {
    /// Lines have the level `info`, or `warn` if the call fails.
    Command,
    /// A step of a command that another process has recorded: lines have the level `debug`.
    Step,
}

/// A call that is in the log and has not ended.
#[derive(Debug)]
#[must_use = "a call that is dropped counts as unanswered"]
pub struct AdminCall {
    caller: AdminCaller,
    kind: AdminCallKind,
    command: &'static str,
    subject: String,
    started: Instant,
    has_ended: bool,
}

impl AdminCall {
    /// `subject` is a model or a process. Call it before the request is checked, so that a request
    /// with wrong fields is in the log too.
    pub fn begin(caller: AdminCaller, kind: AdminCallKind, command: &'static str, subject: &str) -> Self {
        let subject = excerpt(subject, SUBJECT_CHARS_MAX);
        let call = Self { caller, kind, command, subject, started: Instant::now(), has_ended: false };
        let (took_ms, error) = (None::<u64>, None::<&str>);
        match kind {
            AdminCallKind::Command => record!(info, call, took_ms, error, "admin command"),
            AdminCallKind::Step => record!(debug, call, took_ms, error, "admin command"),
        }
        call
    }

    /// Records the outcome and returns it.
    pub fn end<T, E: Into<Status>>(mut self, outcome: Result<T, E>) -> Result<T, Status> {
        let outcome = outcome.map_err(Into::into);
        self.has_ended = true;
        let took_ms = self.elapsed_ms();
        let error = outcome.as_ref().err().map(|error| excerpt(error.message(), ERROR_CHARS_MAX));
        let error = error.as_deref();
        match (self.kind, error.is_some()) {
            (AdminCallKind::Command, false) => record!(info, self, took_ms, error, "admin command succeeded"),
            (AdminCallKind::Command, true) => record!(warn, self, took_ms, error, "admin command failed"),
            (AdminCallKind::Step, false) => record!(debug, self, took_ms, error, "admin command succeeded"),
            (AdminCallKind::Step, true) => record!(debug, self, took_ms, error, "admin command failed"),
        }
        outcome
    }

    fn elapsed_ms(&self) -> u64 {
        u64::try_from(self.started.elapsed().as_millis()).unwrap_or(u64::MAX)
    }
}

impl Drop for AdminCall {
    /// The caller has gone, or the process stops. A command that was accepted goes on, and its
    /// outcome is told to no caller.
    fn drop(&mut self) {
        if self.has_ended {
            return;
        }
        let (took_ms, error) = (self.elapsed_ms(), None::<&str>);
        match self.kind {
            AdminCallKind::Command => record!(info, self, took_ms, error, "admin command unanswered"),
            AdminCallKind::Step => record!(debug, self, took_ms, error, "admin command unanswered"),
        }
    }
}
