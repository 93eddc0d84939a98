// SPDX-License-Identifier: Apache-2.0

//! Searches the workers of a model one after the other, for one request. The quarantine decides
//! which of them the request may enter now ([`crate::quarantine`]).

use std::sync::Arc;
use std::time::Duration;

use tokio::time::Instant;

use crate::opening::{RequestRefusal, WorkerChoice, WorkerTries};
use crate::quarantine::ContentKey;
use crate::quarantine_control::{QuarantineController, StreamStay};
use crate::routing::WorkerId;

/// How long a request waits for a worker without trials of other requests. Then it enters any.
const ISOLATION_WAIT: Duration = Duration::from_secs(30);

/// A search for workers that were not tried yet and that the content may enter.
pub(crate) struct WorkerSearch<'a, P> {
    quarantine: &'a Arc<QuarantineController>,
    content: ContentKey,
    deadline: Option<Instant>,
    /// From then on, the content enters workers with trials of others.
    force_at: Instant,
    first: Option<P>,
    tries: WorkerTries,
}

impl<'a, P> WorkerSearch<'a, P> {
    pub(crate) fn new(
        quarantine: &'a Arc<QuarantineController>,
        content: ContentKey,
        deadline: Option<Instant>,
        first: Option<P>,
    ) -> Self {
        let force_at = Instant::now() + ISOLATION_WAIT;
        Self { quarantine, content, deadline, force_at, first, tries: WorkerTries::default() }
    }

    /// The next worker. `place` chooses one that is not among those in its argument.
    pub(crate) async fn next(
        &mut self,
        place: impl Fn(&[WorkerId]) -> Option<P>,
        id_of: impl Fn(&P) -> WorkerId,
    ) -> Result<Option<(P, StreamStay)>, RequestRefusal> {
        loop {
            if let Some(entry) = self.quarantine.find(self.content) {
                return Err(RequestRefusal::Quarantined(entry));
            }
            let trial_ended = self.quarantine.trial_ended();
            let mut trial_ended = std::pin::pin!(trial_ended);
            trial_ended.as_mut().enable();
            let enter = |worker| {
                let force = Instant::now() >= self.force_at;
                self.quarantine.enter(worker, self.content, force)
            };
            match self.tries.next(self.first.take(), &place, &id_of, enter) {
                WorkerChoice::Enter(placed, stay) => return Ok(Some((placed, stay))),
                WorkerChoice::Exhausted => return Ok(None),
                WorkerChoice::Blocked => {}
            }
            let retry = self.force_at.min(Instant::now() + self.quarantine.retry_in());
            let retry = self.deadline.map_or(retry, |deadline| deadline.min(retry));
            tokio::select! {
                () = trial_ended => {}
                () = tokio::time::sleep_until(retry) => {}
            }
            if self.deadline.is_some_and(|deadline| Instant::now() >= deadline) {
                return Err(RequestRefusal::DeadlineExceeded);
            }
        }
    }
}

impl<P> Drop for WorkerSearch<'_, P> {
    fn drop(&mut self) {
        self.quarantine.drop_claims(self.content);
    }
}
