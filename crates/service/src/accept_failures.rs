// SPDX-License-Identifier: Apache-2.0

//! What a listener does when it cannot accept a connection.
//!
//! A process without a free descriptor, or a machine without memory, fails at each attempt, and the
//! waiting connection keeps the listener ready. An attempt at once would take a whole core, and a
//! warning at each attempt would fill the log.

use std::io;
use std::time::{Duration, Instant};

use rustix::io::Errno;

/// Pause before the next attempt: short for a client that waits, and nothing for a processor.
const RETRY_INTERVAL: Duration = Duration::from_millis(100);

/// Time between two warnings of one listener.
const WARNING_INTERVAL: Duration = Duration::from_secs(10);

/// The failed attempts of one listener.
#[derive(Debug, Default)]
pub struct AcceptFailures {
    /// Failures that no warning has counted yet.
    unreported: u64,
    reported: Option<Instant>,
}

impl AcceptFailures {
    /// Returns the time to wait before the next attempt, and warns now and then. `listener` names
    /// the address or the path.
    pub fn failed(&mut self, listener: &str, error: &io::Error, now: Instant) -> Duration {
        if is_of_one_connection(error) {
            return Duration::ZERO;
        }
        if let Some(attempts) = self.count(now) {
            let advice = advice(error);
            tracing::warn!(listener, %error, attempts, "cannot accept connections{advice}");
        }
        RETRY_INTERVAL
    }

    /// The failures to report now, if the last report is old enough.
    fn count(&mut self, now: Instant) -> Option<u64> {
        self.unreported += 1;
        let is_recent = |reported: Instant| now.saturating_duration_since(reported) < WARNING_INTERVAL;
        if self.reported.is_some_and(is_recent) {
            return None;
        }
        self.reported = Some(now);
        Some(std::mem::take(&mut self.unreported))
    }
}

/// Whether only the connection that was to be accepted has failed (accept(2)).
fn is_of_one_connection(error: &io::Error) -> bool {
    matches!(
        error.kind(),
        io::ErrorKind::ConnectionAborted | io::ErrorKind::ConnectionReset | io::ErrorKind::Interrupted
    )
}

fn advice(error: &io::Error) -> &'static str {
    match Errno::from_io_error(error) {
        Some(Errno::MFILE) => "; raise the limit of open files (LimitNOFILE=, ulimit -n)",
        Some(Errno::NFILE) => "; raise the machine's limit of open files (fs.file-max)",
        Some(Errno::NOBUFS | Errno::NOMEM) => "; the machine lacks memory for sockets",
        _ => "",
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_shortage_is_reported_at_once_and_then_every_ten_seconds_with_its_count() {
        let mut failures = AcceptFailures::default();
        let begin = Instant::now();
        let reported: Vec<(u32, u64)> = (0..250)
            .filter_map(|step| Some((step, failures.count(begin + step * RETRY_INTERVAL)?)))
            .collect();
        assert_eq!(reported, [(0, 1), (100, 100), (200, 100)]);
    }

    #[test]
    fn a_client_that_went_away_delays_no_other_one() {
        let mut failures = AcceptFailures::default();
        let mut wait = |errno: Errno| failures.failed("x.sock", &errno.into(), Instant::now());
        assert_eq!(wait(Errno::CONNABORTED), Duration::ZERO);
        for errno in [Errno::MFILE, Errno::NFILE, Errno::NOMEM, Errno::PERM] {
            assert_eq!(wait(errno), RETRY_INTERVAL);
        }
    }
}
