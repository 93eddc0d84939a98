// SPDX-License-Identifier: Apache-2.0

//! Workers that this router cannot serve, and when it asks them again. A plain value, which
//! [`crate::registry`] owns.
//!
//! A worker whose model the router cannot serve stays the same until it restarts, with another
//! socket. Reading its metadata takes time, so the router asks it after growing pauses.

use std::collections::HashMap;
use std::path::PathBuf;
use std::time::Duration;

use tokio::time::Instant;

/// The first pause; each refusal doubles it.
const FIRST_PAUSE: Duration = Duration::from_secs(1);
const PAUSE_MAX: Duration = Duration::from_secs(60);
/// Most characters of a reason in the router's status.
const REASON_CHARS_MAX: usize = 400;

/// Path and inode of a worker's socket, which identify one run of a worker.
pub(crate) type SocketId = (PathBuf, u64);

#[derive(Debug, Default)]
pub(crate) struct RefusedWorkers {
    refusals: HashMap<SocketId, Refusal>,
}

#[derive(Debug)]
struct Refusal {
    reason: String,
    pause: Duration,
    retry_at: Instant,
}

impl RefusedWorkers {
    /// Returns the pause until the worker is asked again.
    pub(crate) fn refuse(&mut self, socket: SocketId, reason: &str, now: Instant) -> Duration {
        let last = self.refusals.get(&socket).map(|refusal| refusal.pause);
        let pause = last.map_or(FIRST_PAUSE, |last| (last * 2).min(PAUSE_MAX));
        let reason = reason.chars().take(REASON_CHARS_MAX).collect();
        self.refusals.insert(socket, Refusal { reason, pause, retry_at: now + pause });
        pause
    }

    /// The worker is served now.
    pub(crate) fn accept(&mut self, socket: &SocketId) {
        self.refusals.remove(socket);
    }

    pub(crate) fn may_ask(&self, socket: &SocketId, now: Instant) -> bool {
        self.refusals.get(socket).is_none_or(|refusal| refusal.retry_at <= now)
    }

    pub(crate) fn contains(&self, socket: &SocketId) -> bool {
        self.refusals.contains_key(socket)
    }

    /// Forgets workers that are gone. Returns true if there were any.
    pub(crate) fn retain(&mut self, exists: impl Fn(&SocketId) -> bool) -> bool {
        let before = self.refusals.len();
        self.refusals.retain(|socket, _| exists(socket));
        self.refusals.len() < before
    }

    /// One line about all refused workers, or `None` if there are none.
    pub(crate) fn summary(&self) -> Option<String> {
        let mut refusals: Vec<_> = self.refusals.iter().collect();
        refusals.sort_by_key(|(socket, _)| *socket);
        let ((first, _), refusal) = refusals.first()?;
        let name = first.file_stem().unwrap_or_default().to_string_lossy();
        let others = match refusals.len() - 1 {
            0 => String::new(),
            others => format!(" (and {others} others)"),
        };
        Some(format!("cannot serve {name}{others}: {}", refusal.reason))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn socket(n: u64) -> SocketId {
        (format!("/run/worker-{n}.sock").into(), n)
    }

    #[test]
    fn pauses_double_up_to_a_minute_and_start_anew_after_the_worker_was_served() {
        let (mut refused, start) = (RefusedWorkers::default(), Instant::now());
        assert!(refused.may_ask(&socket(1), start));
        let pauses: Vec<u64> = (0..8).map(|_| refused.refuse(socket(1), "bad", start).as_secs()).collect();
        assert_eq!(pauses, [1, 2, 4, 8, 16, 32, 60, 60]);
        assert!(!refused.may_ask(&socket(1), start + Duration::from_secs(59)));
        assert!(refused.may_ask(&socket(1), start + PAUSE_MAX));
        assert!(refused.may_ask(&socket(2), start), "another run of a worker");
        refused.accept(&socket(1));
        assert_eq!(refused.refuse(socket(1), "bad", start), FIRST_PAUSE);
    }

    #[test]
    fn summary_names_a_worker_and_bounds_its_reason() {
        let (mut refused, now) = (RefusedWorkers::default(), Instant::now());
        assert_eq!(refused.summary(), None);
        refused.refuse(socket(7), &"x".repeat(5000), now);
        refused.refuse(socket(3), "bad tokenizer", now);
        assert_eq!(refused.summary().unwrap(), "cannot serve worker-3 (and 1 others): bad tokenizer");
        assert!(refused.retain(|socket| socket.1 == 7));
        assert!(refused.summary().unwrap().len() < 500);
        assert!(refused.retain(|_| false));
        assert_eq!(refused.summary(), None);
    }
}
