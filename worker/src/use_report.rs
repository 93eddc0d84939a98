// SPDX-License-Identifier: Apache-2.0

//! Tells the supervisor that requests use this worker, so that it knows since when a model is
//! unused. A worker that no request uses sends nothing.

use service::Notify;
use service::supervision::USE_REPORT_PERIOD;
use tokio::sync::watch;

use crate::engine_loop::EngineSnapshot;

/// Finds out whether requests have used the engine since the last look. A plain value.
#[derive(Debug)]
struct UseMonitor {
    /// Steps and ended requests at the last look.
    seen: (u64, u64),
}

impl UseMonitor {
    fn new(now: &EngineSnapshot) -> Self {
        Self { seen: counters(now) }
    }

    /// A stream whose reader has stalled makes no step, and is a use nevertheless.
    fn is_used(&mut self, now: &EngineSnapshot) -> bool {
        let counters = counters(now);
        std::mem::replace(&mut self.seen, counters) != counters || now.streams > 0
    }
}

fn counters(snapshot: &EngineSnapshot) -> (u64, u64) {
    (snapshot.stats.steps, snapshot.stats.finished)
}

/// Reports each use, once per period. Ends with the engine.
pub(crate) async fn report_use(mut engine: watch::Receiver<EngineSnapshot>, notify: &Notify) {
    let mut monitor = UseMonitor::new(&engine.borrow_and_update());
    loop {
        if !monitor.is_used(&engine.borrow_and_update()) {
            match engine.changed().await {
                Ok(()) => continue,
                Err(_) => return,
            }
        }
        // A supervisor that has not read the messages before this one counts no time either.
        if let Err(error) = notify.used() {
            tracing::debug!(%error, "cannot report the use to the supervisor");
        }
        tokio::time::sleep(USE_REPORT_PERIOD).await;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn steps_ended_requests_and_stalled_streams_are_uses() {
        let mut now = EngineSnapshot::default();
        let mut monitor = UseMonitor::new(&now);
        assert!(!monitor.is_used(&now));
        now.stats.kv_blocks_cached += 1;
        assert!(!monitor.is_used(&now), "a prefix that expires is no use");
        now.stats.steps += 1;
        assert!(monitor.is_used(&now) && !monitor.is_used(&now));
        now.stats.finished += 1;
        assert!(monitor.is_used(&now) && !monitor.is_used(&now));
        now.streams = 1;
        assert!(monitor.is_used(&now) && monitor.is_used(&now));
        now.streams = 0;
        assert!(!monitor.is_used(&now));
    }
}
