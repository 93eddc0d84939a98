// SPDX-License-Identifier: Apache-2.0

//! Waits for the events of a response, and says when a keep-alive comment is due.

use std::pin::Pin;
use std::time::Duration;

use tokio::sync::mpsc;
use tokio::time::{Instant, Sleep, sleep};

use crate::choice::ChoiceEvent;

/// Proxies close connections after some tens of seconds without data. A long prefill takes longer.
const KEEP_ALIVE_INTERVAL: Duration = Duration::from_secs(10);
/// Clients skip a comment.
pub(super) const KEEP_ALIVE_COMMENT: &[u8] = b": keep-alive\n\n";

/// The events of a response. One timer serves the whole stream: a timer for each token would be set
/// and cancelled again for each token.
pub(super) struct PacedEvents {
    events: mpsc::Receiver<ChoiceEvent>,
    timer: Pin<Box<Sleep>>,
    last_event: Instant,
    interval: Duration,
}

impl PacedEvents {
    pub(super) fn new(events: mpsc::Receiver<ChoiceEvent>) -> Self {
        Self::with_interval(events, KEEP_ALIVE_INTERVAL)
    }

    fn with_interval(events: mpsc::Receiver<ChoiceEvent>, interval: Duration) -> Self {
        Self { events, timer: Box::pin(sleep(interval)), last_event: Instant::now(), interval }
    }

    /// The next event, however long it takes.
    pub(super) async fn recv(&mut self) -> Option<ChoiceEvent> {
        self.events.recv().await
    }

    /// An event that is there already.
    pub(super) fn try_next(&mut self) -> Result<ChoiceEvent, mpsc::error::TryRecvError> {
        self.events.try_recv()
    }

    /// The next event as [`Self::recv`] returns it, or `None` if no event comes for the interval.
    pub(super) async fn next(&mut self) -> Option<Option<ChoiceEvent>> {
        loop {
            tokio::select! {
                biased;
                event = self.events.recv() => {
                    self.last_event = Instant::now();
                    return Some(event);
                }
                () = &mut self.timer => {}
            }
            let (now, due) = (Instant::now(), self.last_event + self.interval);
            if now < due {
                // Events have come since the timer was set.
                self.timer.as_mut().reset(due);
                continue;
            }
            self.last_event = now;
            self.timer.as_mut().reset(now + self.interval);
            return None;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::choice::OutputDelta;

    #[tokio::test]
    async fn a_stream_needs_a_sign_of_life_an_interval_after_its_last_event() {
        let interval = Duration::from_millis(200);
        let (sender, receiver) = mpsc::channel(4);
        let mut events = PacedEvents::with_interval(receiver, interval);
        let begin = Instant::now();
        assert!(events.next().await.is_none());
        assert!(begin.elapsed() >= interval);
        sleep(interval / 2).await;
        sender.send(ChoiceEvent::Output(OutputDelta::default())).await.unwrap();
        assert!(matches!(events.next().await, Some(Some(ChoiceEvent::Output(_)))));
        for _ in 0..2 {
            let last = Instant::now();
            assert!(events.next().await.is_none());
            // The timer has a resolution of 1 ms.
            assert!(last.elapsed() + Duration::from_millis(2) >= interval, "{:?}", last.elapsed());
        }
        drop(sender);
        assert!(matches!(events.next().await, Some(None)));
    }
}
