// SPDX-License-Identifier: Apache-2.0

//! [`CrashReport`]: what is known about a child that ended unexpectedly, and the files that say it.

use std::path::PathBuf;
use std::time::{Duration, SystemTime};

use jiff::Timestamp;
use serde_json::{Value, json};
use service::logging::LogTail;

use super::ledger_watch::KnownLedger;
use crate::spec::ChildRole;
use crate::state::Termination;

#[derive(Debug)]
pub(crate) struct CrashReport {
    pub(crate) time: SystemTime,
    pub(crate) child: String,
    pub(crate) role: ChildRole,
    pub(crate) pid: u32,
    /// The model of a worker.
    pub(crate) model: Option<String>,
    pub(crate) configuration: PathBuf,
    pub(crate) termination: Termination,
    /// The supervisor killed the process, because it was silent for too long.
    pub(crate) was_hung: bool,
    /// The process is that of an earlier supervisor: its uptime counts from the adoption.
    pub(crate) was_adopted: bool,
    pub(crate) uptime: Duration,
    /// How often the child had been restarted after a crash.
    pub(crate) restarts: u32,
    /// Crashes since the child was healthy, without this one.
    pub(crate) crashes_before: u32,
    /// The last STATUS= text of the process.
    pub(crate) status_text: String,
    pub(crate) log_tail: Option<LogTail>,
    pub(crate) ledger: Option<KnownLedger>,
}

impl CrashReport {
    /// Names sort by time. The process id keeps two crashes of the same millisecond apart.
    pub(crate) fn name(&self) -> String {
        format!("{}-{}-{}", self.timestamp().strftime("%Y%m%dT%H%M%S%.3fZ"), self.child, self.pid)
    }

    fn timestamp(&self) -> Timestamp {
        Timestamp::try_from(self.time).unwrap_or(Timestamp::UNIX_EPOCH)
    }

    /// The files by name. What is not known has no file.
    pub(crate) fn files(&self) -> Vec<(&'static str, Vec<u8>)> {
        let log = self.log_tail.as_ref().and_then(|tail| match tail.read() {
            Ok(lines) => Some(lines),
            Err(error) => {
                tracing::debug!(child = self.child, %error, "cannot read the last log lines");
                None
            }
        });
        let mut files = vec![("report.json", pretty(&self.summary(log.as_deref())))];
        files.extend(log.map(|lines| ("log.txt", lines)));
        files.extend(self.ledger.as_ref().map(|ledger| ("ledger.json", pretty(&ledger.to_json()))));
        files
    }

    fn summary(&self, log: Option<&[u8]>) -> Value {
        let (exit_code, signal) = match self.termination {
            Termination::ExitCode(code) => (Some(code), None),
            Termination::Signal(signal) => (None, Some(signal)),
            Termination::Unknown | Termination::SpawnFailed(_) => (None, None),
        };
        json!({
            "time": self.timestamp().to_string(),
            "child": self.child,
            "role": self.role.subcommand(),
            "pid": self.pid,
            "model": self.model,
            "reason": self.termination.to_string(),
            "exit_code": exit_code,
            "signal": signal,
            "was_hung": self.was_hung,
            "status": self.status_text,
            "uptime_ms": u64::try_from(self.uptime.as_millis()).unwrap_or(u64::MAX),
            "was_adopted": self.was_adopted,
            "restarts": self.restarts,
            "consecutive_crashes": self.crashes_before + 1,
            "configuration": self.configuration.display().to_string(),
            "supervisor_version": env!("CARGO_PKG_VERSION"),
            "log_lines": log.map(|lines| lines.iter().filter(|byte| **byte == b'\n').count()),
            "ledger_age_ms": self.ledger.as_ref().map(KnownLedger::age_ms),
        })
    }
}

fn pretty(value: &Value) -> Vec<u8> {
    format!("{value:#}\n").into_bytes()
}

#[cfg(test)]
pub(super) mod tests {
    use super::*;

    pub(crate) fn report(child: &str, pid: u32) -> CrashReport {
        CrashReport {
            time: SystemTime::UNIX_EPOCH + Duration::from_millis(1_795_433_007_045),
            child: child.to_owned(),
            role: ChildRole::Worker,
            pid,
            model: Some("m".to_owned()),
            configuration: "/run/ballast/worker-0.toml".into(),
            termination: Termination::Signal(11),
            was_hung: false,
            was_adopted: false,
            uptime: Duration::from_millis(1500),
            restarts: 2,
            crashes_before: 0,
            status_text: "serving".to_owned(),
            log_tail: None,
            ledger: None,
        }
    }

    #[test]
    fn names_begin_with_the_time_of_the_crash_to_the_millisecond() {
        assert_eq!(report("worker-0", 4711).name(), "20261123T112327.045Z-worker-0-4711");
    }

    #[test]
    fn what_is_not_known_has_no_file() {
        let files = report("worker-0", 4711).files();
        assert_eq!(files.iter().map(|(name, _)| *name).collect::<Vec<_>>(), ["report.json"]);
        let summary: Value = serde_json::from_slice(&files[0].1).unwrap();
        assert_eq!((&summary["log_lines"], &summary["ledger_age_ms"]), (&Value::Null, &Value::Null));
        assert_eq!((&summary["signal"], &summary["exit_code"]), (&json!(11), &Value::Null));
        assert_eq!(summary["reason"], "killed by SIGSEGV");
        assert_eq!((&summary["restarts"], &summary["consecutive_crashes"]), (&json!(2), &json!(1)));
    }

    #[test]
    fn a_log_without_lines_is_a_file_without_lines() {
        let mut silent = report("worker-0", 4711);
        silent.log_tail = Some(LogTail::create().unwrap());
        assert!(silent.files().contains(&("log.txt", Vec::new())));
    }
}
