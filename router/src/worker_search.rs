// SPDX-License-Identifier: Apache-2.0

//! Searches the workers of a model one after the other, for one request. The quarantine decides
//! which of them the request may enter now ([`crate::quarantine`]).

use std::sync::Arc;

use tokio::time::Instant;

use crate::opening::{IsolationWait, RequestRefusal, WorkerChoice, WorkerTries};
use crate::quarantine::ContentKey;
use crate::quarantine_control::{QuarantineController, StreamStay};
use crate::routing::WorkerId;

/// A search for workers that were not tried yet and that the content may enter.
pub(crate) struct WorkerSearch<'a, P> {
    quarantine: &'a Arc<QuarantineController>,
    content: ContentKey,
    deadline: Option<Instant>,
    isolation: IsolationWait,
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
        let (isolation, tries) = (IsolationWait::default(), WorkerTries::default());
        Self { quarantine, content, deadline, isolation, first, tries }
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
            let force = self.isolation.is_over();
            let enter = |worker| self.quarantine.enter(worker, self.content, force);
            match self.tries.next(self.first.take(), &place, &id_of, enter) {
                WorkerChoice::Enter(placed, stay) => return Ok(Some((placed, stay))),
                WorkerChoice::Exhausted => return Ok(None),
                WorkerChoice::Blocked => {}
            }
            let blocked_at = Instant::now();
            let retry = blocked_at + self.isolation.next_wait(self.quarantine.retry_in());
            let retry = self.deadline.map_or(retry, |deadline| deadline.min(retry));
            tokio::select! {
                () = trial_ended => {}
                () = tokio::time::sleep_until(retry) => {}
            }
            self.isolation.count(blocked_at.elapsed());
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
