// SPDX-License-Identifier: Apache-2.0

//! The async side of the engine loop: calls submit requests, read snapshots, and drain the engine.

use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::mpsc::{SyncSender, TrySendError};
use std::sync::{Arc, Weak};
use std::time::{Duration, Instant};

use engine::{BeamRequest, Constraint, EmbedRequest, Queued, Request, RequestId, ScoreRequest};
use tokio::sync::{Semaphore, mpsc, oneshot, watch};

use super::active_stream::ActiveStream;
use super::command::{EngineCommand, EngineSnapshot, SubmitError, SubmitReply, send_command};
use super::kv_subscriber::KvEventSubscriber;
use crate::call_trace::CallTrace;
use crate::step_watchdog::StepCounter;
use crate::stream_trace::StreamTrace;
use crate::token_channel::{RESULT_CAPACITY, StreamItem, TOKEN_CAPACITY, score_capacity, token_channel};

/// Keeps the engine loop running. The engine loop ends when all handles are dropped.
pub(crate) struct EngineHandle {
    pub(super) commands: Arc<SyncSender<EngineCommand>>,
    /// Whether a `Wake` is among the queued commands.
    pub(super) is_wake_queued: Arc<AtomicBool>,
    pub(super) snapshot: watch::Receiver<EngineSnapshot>,
    pub(super) epoch: Instant,
    pub(super) score_rows_max: usize,
    pub(super) next_request_id: AtomicU64,
    pub(super) kv_log: u64,
    pub(super) kv_subscribers: Arc<Semaphore>,
    pub(super) steps: StepCounter,
}

/// Wakes the engine loop when a mask is ready. Does not keep the engine loop running.
#[derive(Clone)]
pub(crate) struct EngineWaker {
    commands: Weak<SyncSender<EngineCommand>>,
    is_wake_queued: Arc<AtomicBool>,
}

impl EngineWaker {
    /// Call this after the result is stored where the engine looks for it. Occupies at most one
    /// entry of the command queue, however often it is called.
    ///
    /// A wake-up can be lost. If the queue is full, `is_wake_queued` is briefly true although no
    /// `Wake` is queued. Another waker may see this value after the engine loop has emptied the
    /// queue. The engine loop then looks again after `PAUSED_POLL`.
    pub(crate) fn wake(&self) {
        if !self.is_wake_queued.swap(true, Ordering::AcqRel)
            && let Some(commands) = self.commands.upgrade()
            // A full queue holds commands that wake the engine loop.
            && commands.try_send(EngineCommand::Wake).is_err()
        {
            self.is_wake_queued.store(false, Ordering::Release);
        }
    }
}

impl EngineHandle {
    /// Shows whether the engine's thread advances.
    pub(crate) fn steps(&self) -> StepCounter {
        self.steps.clone()
    }

    pub(crate) fn waker(&self) -> EngineWaker {
        EngineWaker { commands: Arc::downgrade(&self.commands), is_wake_queued: self.is_wake_queued.clone() }
    }

    pub(crate) fn snapshots(&self) -> watch::Receiver<EngineSnapshot> {
        self.snapshot.clone()
    }

    /// The engine's clock.
    pub(crate) fn now(&self) -> Duration {
        self.epoch.elapsed()
    }

    pub(crate) fn next_id(&self) -> RequestId {
        RequestId(self.next_request_id.fetch_add(1, Ordering::Relaxed))
    }

    pub(crate) async fn generate(
        &self,
        request: Request,
        constraint: Option<Box<dyn Constraint>>,
        call: CallTrace,
    ) -> Result<(Queued, mpsc::Receiver<StreamItem>), SubmitError> {
        let (channel, receiver) = token_channel(TOKEN_CAPACITY);
        let stream = ActiveStream { channel, trace: StreamTrace::submit(call, self.now()) };
        let request = Box::new(request);
        let queued =
            self.submit(|reply| EngineCommand::Generate { request, constraint, stream, reply }).await?;
        Ok((queued, receiver))
    }

    pub(crate) async fn search_beams(
        &self,
        request: BeamRequest,
        call: CallTrace,
    ) -> Result<(Queued, mpsc::Receiver<StreamItem>), SubmitError> {
        let (channel, receiver) = token_channel(RESULT_CAPACITY);
        let stream = ActiveStream { channel, trace: StreamTrace::submit(call, self.now()) };
        let queued = self.submit(|reply| EngineCommand::SearchBeams { request, stream, reply }).await?;
        Ok((queued, receiver))
    }

    pub(crate) async fn score(
        &self,
        request: ScoreRequest,
        call: CallTrace,
    ) -> Result<mpsc::Receiver<StreamItem>, SubmitError> {
        let (channel, receiver) = token_channel(score_capacity(self.score_rows_max));
        let stream = ActiveStream { channel, trace: StreamTrace::submit(call, self.now()) };
        self.submit(|reply| EngineCommand::Score { request, stream, reply }).await?;
        Ok(receiver)
    }

    pub(crate) async fn embed(
        &self,
        request: EmbedRequest,
        call: CallTrace,
    ) -> Result<mpsc::Receiver<StreamItem>, SubmitError> {
        let (channel, receiver) = token_channel(RESULT_CAPACITY);
        let stream = ActiveStream { channel, trace: StreamTrace::submit(call, self.now()) };
        self.submit(|reply| EngineCommand::Embed { request, stream, reply }).await?;
        Ok(receiver)
    }

    async fn submit(
        &self,
        command: impl FnOnce(SubmitReply) -> EngineCommand,
    ) -> Result<Queued, SubmitError> {
        let (reply, received) = oneshot::channel();
        self.commands.try_send(command(reply)).map_err(|error| match error {
            TrySendError::Full(_) => SubmitError::CommandQueueFull,
            TrySendError::Disconnected(_) => SubmitError::Stopped,
        })?;
        Ok(received.await.map_err(|_| SubmitError::Stopped)??)
    }

    /// Clears the prefix cache. Returns false, and changes nothing, while a request uses blocks.
    pub(crate) async fn reset_prefix_cache(&self) -> Result<bool, SubmitError> {
        let (reply, received) = oneshot::channel();
        send_command(&self.commands, EngineCommand::ResetPrefixCache { reply }).await;
        received.await.map_err(|_| SubmitError::Stopped)
    }

    /// Identifies the log that event numbers count in.
    pub(crate) fn kv_log(&self) -> u64 {
        self.kv_log
    }

    /// Subscribes from event `from` on. If the log no longer holds that event, the first update is
    /// a snapshot.
    pub(crate) fn subscribe_kv_events(&self, from: u64) -> Result<KvEventSubscriber, SubmitError> {
        let permit = self.kv_subscribers.clone().try_acquire_owned();
        Ok(KvEventSubscriber {
            commands: Arc::downgrade(&self.commands),
            snapshot: self.snapshot.clone(),
            next: from,
            _permit: permit.map_err(|_| SubmitError::TooManySubscribers)?,
        })
    }

    pub(crate) fn snapshot(&self) -> EngineSnapshot {
        *self.snapshot.borrow()
    }

    /// Refuses new requests and waits for the running ones. Aborts those that still run after
    /// `grace`, and returns their number.
    pub(crate) async fn drain(&self, grace: Duration) -> usize {
        send_command(&self.commands, EngineCommand::Drain).await;
        let mut snapshot = self.snapshot.clone();
        // The command sets `is_draining`, so every request submitted before it is in `streams`. A
        // stopped engine has no streams, and the wait ends.
        let all_ended = snapshot.wait_for(|now| now.is_draining && now.streams == 0);
        let is_in_time = service::patience::timeout(grace, all_ended).await.is_ok();
        if is_in_time {
            return 0;
        }
        let aborted = self.snapshot().streams;
        send_command(&self.commands, EngineCommand::AbortAll).await;
        drop(snapshot.wait_for(|now| now.streams == 0).await);
        aborted
    }
}
