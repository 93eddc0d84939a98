// SPDX-License-Identifier: Apache-2.0

//! Runs the [`QuarantinePolicy`]: lets streams enter workers, and tells the policy about their
//! output and their losses.
//!
//! A small lock guards the policy. It is held for a few map operations and never across an await.

use std::num::NonZeroU32;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use tokio::sync::Notify;
use tokio::sync::futures::Notified;
use tokio::time::Instant;

use crate::admission::Uptime;
use crate::metrics;
use crate::quarantine::{
    Blocked, ContentHasher, ContentKey, LossVerdict, QuarantineEntry, QuarantinePolicy, StreamId,
};
use crate::request_trace::LoggedRequest;
use crate::routing::WorkerId;

#[derive(Debug)]
pub(crate) struct QuarantineController {
    start: Instant,
    pub(crate) hasher: ContentHasher,
    policy: Mutex<QuarantinePolicy>,
    /// A trial ended, so a blocked stream may enter a worker.
    changed: Notify,
}

/// A stay of a stream on a worker, from before the call to its end. Dropping it ends the stay.
#[derive(Debug)]
pub(crate) struct StreamStay {
    controller: Arc<QuarantineController>,
    worker: WorkerId,
    content: ContentKey,
    id: StreamId,
}

impl QuarantineController {
    pub(crate) fn new(quarantine_for: Duration) -> Arc<Self> {
        Arc::new(Self {
            start: Instant::now(),
            hasher: ContentHasher::default(),
            policy: Mutex::new(QuarantinePolicy::new(quarantine_for)),
            changed: Notify::new(),
        })
    }

    pub(crate) fn find(&self, content: ContentKey) -> Option<QuarantineEntry> {
        let now = self.now();
        self.lock().find(content, now)
    }

    /// Number of workers that died with the content, if its streams are to be spread.
    pub(crate) fn deaths_to_spread(&self, content: ContentKey) -> Option<NonZeroU32> {
        let now = self.now();
        self.lock().deaths_to_spread(content, now)
    }

    /// Puts a stream on trial at a worker, before the worker gets it.
    pub(crate) fn enter(
        self: &Arc<Self>,
        worker: WorkerId,
        content: ContentKey,
        force: bool,
    ) -> Result<StreamStay, Blocked> {
        let now = self.now();
        let id = self.lock().enter(worker, content, now, force)?;
        Ok(StreamStay { controller: self.clone(), worker, content, id })
    }

    /// Completes when a trial ends after this call.
    pub(crate) fn trial_ended(&self) -> Notified<'_> {
        self.changed.notified()
    }

    /// Time after which a blocked stream should try again even if no trial ends. Then a trial has
    /// taken too long, or the wait of a content is over.
    pub(crate) fn retry_in(&self) -> Duration {
        let now = self.now();
        self.lock().next_change(now)
    }

    /// The stream waits for no worker any more.
    pub(crate) fn drop_claims(&self, content: ContentKey) {
        self.lock().drop_claims(content);
        self.changed.notify_waiters();
    }

    /// Number of contents in quarantine.
    pub(crate) fn quarantined(&self) -> usize {
        let now = self.now();
        self.lock().quarantined(now)
    }

    fn now(&self) -> Uptime {
        self.start.elapsed()
    }

    fn lock(&self) -> MutexGuard<'_, QuarantinePolicy> {
        // A panic under this lock is a bug that ends the process in release builds (panic = abort).
        self.policy.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl StreamStay {
    /// The stream has this many output tokens, of all its workers together.
    pub(crate) fn record_output(&self, output_tokens: usize) {
        let Self { controller, worker, content, id } = self;
        let now = controller.now();
        if controller.lock().record_output(*worker, *id, *content, output_tokens, now) {
            controller.changed.notify_waiters();
        }
    }

    /// The stream has ended as it should.
    pub(crate) fn record_completion(&self) {
        self.controller.lock().record_completion(self.content);
    }

    /// The worker died. Logs a request that goes into quarantine.
    pub(crate) fn record_loss(&self, output_tokens: usize, request: LoggedRequest<'_>) -> LossVerdict {
        let Self { controller, worker, content, id } = self;
        let now = controller.now();
        let verdict = controller.lock().record_loss(*worker, *id, *content, output_tokens, now);
        if let LossVerdict::Quarantine { entry, is_new: true } = verdict {
            metrics::record_quarantine(request.model);
            tracing::error!(
                request_id = %request.request_id,
                trace_id = request.trace_id(),
                model = request.model,
                %content,
                losses = entry.losses,
                quarantine_s = entry.remaining.as_secs(),
                "a request ended its workers: requests with its content are refused"
            );
        }
        verdict
    }
}

impl Drop for StreamStay {
    fn drop(&mut self) {
        self.controller.lock().leave(self.worker, self.id);
        self.controller.changed.notify_waiters();
    }
}
