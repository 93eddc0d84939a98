// SPDX-License-Identifier: Apache-2.0

//! Collects what a crash report says about a child whose process has ended unexpectedly.

use std::sync::Arc;
use std::time::{Duration, Instant, SystemTime};

use service::logging::LogTail;

use super::SupervisorLoop;
use crate::crash_reports::CrashReport;
use crate::process::ChildProcess;
use crate::state::{AfterExit, ChildState, Termination};

/// What is left of a process after it was reaped.
pub(super) struct DeadProcess {
    pid: u32,
    uptime: Duration,
    was_adopted: bool,
    log_tail: Option<LogTail>,
}

impl DeadProcess {
    pub(super) fn of(process: &mut ChildProcess) -> Self {
        Self {
            pid: process.pid,
            uptime: process.since.elapsed(),
            was_adopted: process.is_adopted(),
            log_tail: process.log_tail.take(),
        }
    }
}

impl SupervisorLoop {
    /// Call it before the state machine learns of the exit.
    pub(super) fn report_crash(&mut self, name: &Arc<str>, process: DeadProcess, end: &Termination) {
        let Some(child) = self.children.get(name).filter(|child| !child.machine.is_stopping()) else {
            return;
        };
        let report = CrashReport {
            time: SystemTime::now(),
            child: name.to_string(),
            role: child.spec.role,
            pid: process.pid,
            model: child.slot.as_ref().map(|slot| slot.model.clone()),
            configuration: self.directory.directory().config(name),
            termination: end.clone(),
            was_hung: child.machine.state() == ChildState::Killing { then: AfterExit::CountAsCrash },
            was_adopted: process.was_adopted,
            uptime: process.uptime,
            restarts: child.machine.crashes(),
            crashes_before: child.machine.consecutive_crashes(),
            status_text: child.status_text.clone(),
            log_tail: process.log_tail,
            ledger: self.crash_reports.ledger(Instant::now()),
        };
        self.crash_reports.add(report);
    }
}
