// SPDX-License-Identifier: Apache-2.0

//! What SIGHUP means to a process: its terminal was closed, or an operator or service manager asks
//! it to reload.

use std::fs::File;

use crate::env;

/// The controlling terminal of the process.
const TERMINAL: &str = "/dev/tty";
/// Number of SIGHUP. Bit N-1 of SigIgn in /proc/PID/status stands for signal N.
const SIGHUP_BIT: u64 = 1;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Hangup {
    /// The terminal that the command was started from is gone. It ends as on Ctrl-C.
    TerminalClosed,
    ReloadRequested,
}

/// Remembers how the process was started, which decides about later signals.
#[derive(Clone, Copy, Debug)]
pub(crate) struct HangupPolicy {
    has_terminal: bool,
}

impl HangupPolicy {
    /// Returns `None` if the parent ignores SIGHUP for this process, as nohup(1) does.
    pub(crate) fn at_start() -> Option<Self> {
        let status = std::fs::read_to_string("/proc/self/status").unwrap_or_default();
        // A child of a supervisor ends with the supervisor, not with a terminal.
        let is_child = std::env::var_os(env::LIVENESS_FD).is_some();
        let has_terminal = !is_child && File::open(TERMINAL).is_ok();
        (!is_ignored(&status)).then_some(Self { has_terminal })
    }

    pub(crate) fn meaning(self) -> Hangup {
        match self.has_terminal && File::open(TERMINAL).is_err() {
            true => Hangup::TerminalClosed,
            false => Hangup::ReloadRequested,
        }
    }
}

fn is_ignored(status: &str) -> bool {
    let ignored = status.lines().find_map(|line| line.strip_prefix("SigIgn:"));
    let mask = ignored.and_then(|mask| u64::from_str_radix(mask.trim(), 16).ok());
    mask.is_some_and(|mask| mask & SIGHUP_BIT != 0)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_ignored_hangup_is_seen_in_the_status_of_the_process() {
        assert!(is_ignored("Name:\tx\nSigIgn:\t0000000000001001\n"));
        assert!(!is_ignored("SigIgn:\t0000000000001000\n"));
        assert!(!is_ignored(""));
    }
}
