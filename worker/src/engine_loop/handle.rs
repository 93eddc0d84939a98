//! The async side of the engine's thread: calls submit through it, follow its figures, and drain it.

use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::mpsc::{SyncSender, TrySendError};
use std::sync::{Arc, Weak};
use std::time::{Duration, Instant};

use engine::{Constraint, Queued, RefuseReason, Request, RequestId, ScoreRequest};
use tokio::sync::{Semaphore, mpsc, oneshot, watch};

use super::kv_subscriber::KV_SUBSCRIBERS_MAX;
use super::{COMMANDS_MAX, EngineCommand, EngineSnapshot, PAUSED_POLL, SubmitReply};
use crate::token_channel::{StreamItem, TOKEN_CAPACITY, score_capacity, token_channel};

/// Why a call got no stream.
#[derive(Debug, thiserror::Error)]
pub(crate) enum SubmitError {
    #[error(transparent)]
    Refused(#[from] RefuseReason),
    #[error("{COMMANDS_MAX} requests wait for the end of a step, no more may")]
    CommandQueueFull,
    #[error("{KV_SUBSCRIBERS_MAX} calls follow the cache already, no more may")]
    TooManySubscribers,
    #[error("the engine has stopped")]
    Stopped,
}

/// Does not own the engine, and keeps its thread alive.
pub(crate) struct EngineHandle {
    pub(super) commands: Arc<SyncSender<EngineCommand>>,
    /// A `Wake` is among the commands.
    pub(super) woken: Arc<AtomicBool>,
    pub(super) snapshot: watch::Receiver<EngineSnapshot>,
    pub(super) epoch: Instant,
    pub(super) score_rows_max: usize,
    pub(super) requests: AtomicU64,
    /// Which log the numbers of the cache's events are of.
    pub(super) kv_log: u64,
    /// Places for those who follow it.
    pub(super) followers: Arc<Semaphore>,
}

/// Ends the sleep of an engine that has nothing to compute until something is there. Does not keep it alive.
#[derive(Clone)]
pub(crate) struct EngineWaker {
    commands: Weak<SyncSender<EngineCommand>>,
    woken: Arc<AtomicBool>,
}

impl EngineWaker {
    /// After what is waited for is in its place. Takes one place among the commands, however often it is called.
    ///
    /// A wake-up may be lost: where there was no room, another waker may have seen `woken` before it is taken back, after the
    /// commands that wake the engine were handled. It looks again after [`PAUSED_POLL`] then.
    pub(crate) fn wake(&self) {
        if !self.woken.swap(true, Ordering::AcqRel)
            && let Some(commands) = self.commands.upgrade()
            // Where there is no room, there are commands that wake it.
            && commands.try_send(EngineCommand::Wake).is_err()
        {
            self.woken.store(false, Ordering::Release);
        }
    }
}

impl EngineHandle {
    pub(crate) fn waker(&self) -> EngineWaker {
        EngineWaker { commands: Arc::downgrade(&self.commands), woken: self.woken.clone() }
    }

    /// The engine's clock.
    pub(crate) fn now(&self) -> Duration {
        self.epoch.elapsed()
    }

    pub(crate) fn next_id(&self) -> RequestId {
        RequestId(self.requests.fetch_add(1, Ordering::Relaxed))
    }

    pub(crate) async fn generate(
        &self,
        request: Request,
        constraint: Option<Box<dyn Constraint>>,
    ) -> Result<(Queued, mpsc::Receiver<StreamItem>), SubmitError> {
        let (channel, receiver) = token_channel(TOKEN_CAPACITY);
        let request = Box::new(request);
        let queued =
            self.submit(|answer| EngineCommand::Generate { request, constraint, channel, answer }).await?;
        Ok((queued, receiver))
    }

    pub(crate) async fn score(
        &self,
        request: ScoreRequest,
    ) -> Result<mpsc::Receiver<StreamItem>, SubmitError> {
        let (channel, receiver) = token_channel(score_capacity(self.score_rows_max));
        self.submit(|answer| EngineCommand::Score { request, channel, answer }).await?;
        Ok(receiver)
    }

    async fn submit(
        &self,
        command: impl FnOnce(SubmitReply) -> EngineCommand,
    ) -> Result<Queued, SubmitError> {
        let (answer, answered) = oneshot::channel();
        self.commands.try_send(command(answer)).map_err(|error| match error {
            TrySendError::Full(_) => SubmitError::CommandQueueFull,
            TrySendError::Disconnected(_) => SubmitError::Stopped,
        })?;
        Ok(answered.await.map_err(|_| SubmitError::Stopped)??)
    }

    /// Forgets all cached prefixes. False, and nothing is done, while a request holds blocks.
    pub(crate) async fn reset_prefix_cache(&self) -> Result<bool, SubmitError> {
        let (answer, answered) = oneshot::channel();
        send_command(&self.commands, EngineCommand::ResetPrefixCache { answer }).await;
        answered.await.map_err(|_| SubmitError::Stopped)
    }

    pub(crate) fn snapshot(&self) -> EngineSnapshot {
        *self.snapshot.borrow()
    }

    /// Refuses new requests, waits for the others to end, cuts them after `grace`; returns how many were cut.
    pub(crate) async fn drain(&self, grace: Duration) -> usize {
        send_command(&self.commands, EngineCommand::Drain).await;
        let mut snapshot = self.snapshot.clone();
        // Draining is set by the command itself: a request that came before it is counted. An engine that has stopped
        // has no streams.
        let all_ended = snapshot.wait_for(|now| now.draining && now.streams == 0);
        let in_time = tokio::time::timeout(grace, all_ended).await.is_ok();
        if in_time {
            return 0;
        }
        let left = self.snapshot().streams;
        send_command(&self.commands, EngineCommand::AbortAll).await;
        drop(snapshot.wait_for(|now| now.streams == 0).await);
        left
    }
}

/// As soon as there is room.
pub(super) async fn send_command(commands: &SyncSender<EngineCommand>, mut command: EngineCommand) {
    loop {
        match commands.try_send(command) {
            Ok(()) | Err(TrySendError::Disconnected(_)) => return,
            Err(TrySendError::Full(back)) => command = back,
        }
        tokio::time::sleep(PAUSED_POLL).await;
    }
}
