// SPDX-License-Identifier: Apache-2.0

//! A timeout that does not count the time in which this process did not run.
//!
//! The answer to a gRPC call passes through another task of this process. If the process was
//! stopped, the timer and that task wake together, and `tokio::time::timeout` may give up with the
//! answer in the socket.

use std::pin::pin;
use std::time::{Duration, Instant};

/// A timeout is waited for in this many steps.
const STEPS: u32 = 5;
/// Steps that may end late without being counted. A machine that is always late must not make the
/// wait endless.
const LATE_STEPS_MAX: u32 = 3;

#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("no answer within {limit:?}")]
pub struct TimedOut {
    pub limit: Duration,
}

/// Waits for `future` at most `limit`, not counting pauses of this process.
pub async fn timeout<F: Future>(limit: Duration, future: F) -> Result<F::Output, TimedOut> {
    let mut future = pin!(future);
    let step = limit / STEPS;
    let (mut steps, mut late_steps) = (0, 0);
    while steps < STEPS {
        let began = Instant::now();
        if let Ok(output) = tokio::time::timeout(step, future.as_mut()).await {
            return Ok(output);
        }
        match began.elapsed() > 2 * step && late_steps < LATE_STEPS_MAX {
            true => late_steps += 1,
            false => steps += 1,
        }
    }
    Err(TimedOut { limit })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn an_answer_that_comes_after_a_pause_is_received() {
        let (sender, receiver) = tokio::sync::oneshot::channel();
        tokio::spawn(async move {
            // The runtime has one thread: nothing runs during this pause.
            std::thread::sleep(Duration::from_millis(500));
            tokio::task::yield_now().await;
            tokio::time::sleep(Duration::from_millis(5)).await;
            sender.send(7).unwrap();
        });
        assert_eq!(timeout(Duration::from_millis(100), receiver).await, Ok(Ok(7)));
    }

    #[tokio::test]
    async fn a_call_without_an_answer_times_out() {
        let limit = Duration::from_millis(50);
        assert_eq!(timeout(limit, std::future::pending::<()>()).await, Err(TimedOut { limit }));
    }
}
