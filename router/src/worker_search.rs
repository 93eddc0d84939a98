// SPDX-License-Identifier: Apache-2.0

//! Searches the workers of a model one after the other, for one request. The quarantine decides
//! which of them the request may enter now ([`crate::quarantine`]).

use std::sync::Arc;
use std::time::Duration;

use tokio::time::Instant;

use crate::dispatch::RequestRefusal;
use crate::quarantine::{Blocked, ContentKey};
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
    tried: Vec<WorkerId>,
    /// Workers that the content may not enter now.
    blocked: Vec<WorkerId>,
}

impl<'a, P> WorkerSearch<'a, P> {
    pub(crate) fn new(
        quarantine: &'a Arc<QuarantineController>,
        content: ContentKey,
        deadline: Option<Instant>,
        first: Option<P>,
    ) -> Self {
        let force_at = Instant::now() + ISOLATION_WAIT;
        Self { quarantine, content, deadline, force_at, first, tried: Vec::new(), blocked: Vec::new() }
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
            while let Some(placed) =
                self.first.take().or_else(|| place(&[&self.tried[..], &self.blocked[..]].concat()))
            {
                let (worker, force) = (id_of(&placed), Instant::now() >= self.force_at);
                match self.quarantine.enter(worker, self.content, force) {
                    Ok(stay) => {
                        self.tried.push(worker);
                        return Ok(Some((placed, stay)));
                    }
                    Err(Blocked) => self.blocked.push(worker),
                }
            }
            if self.blocked.is_empty() {
                return Ok(None);
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
            self.blocked.clear();
        }
    }
}

impl<P> Drop for WorkerSearch<'_, P> {
    fn drop(&mut self) {
        self.quarantine.drop_claims(self.content);
    }
}
