// SPDX-License-Identifier: Apache-2.0

//! What calls and the engine loop exchange: commands in, replies and snapshots out.

use std::sync::mpsc::{SyncSender, TrySendError};
use std::time::Duration;

use engine::kv::events::KvEventBatch;
use engine::{
    BeamRequest, Constraint, EmbedRequest, EngineStats, KvCacheUsage, Queued, RefuseReason, Request,
    ScoreRequest,
};
use tokio::sync::oneshot;

use super::active_stream::ActiveStream;
use crate::backend::BackendUsage;

/// Commands that may wait for the end of a step. Further requests are refused.
pub(super) const COMMANDS_MAX: usize = 256;
/// Subscribers to KV cache events. Each one may hold one update: at most a key of 33 bytes for
/// every block of the cache. Each one also sends commands that the engine loop handles between
/// steps.
pub(super) const KV_SUBSCRIBERS_MAX: usize = 16;
/// The poll interval while every request is paused or waits for its grammar mask. It bounds the
/// cost of a lost wake-up ([`EngineWaker::wake`](super::EngineWaker::wake)).
pub(super) const PAUSED_POLL: Duration = Duration::from_millis(2);

pub(super) enum EngineCommand {
    Generate {
        request: Box<Request>,
        constraint: Option<Box<dyn Constraint>>,
        stream: ActiveStream,
        reply: SubmitReply,
    },
    SearchBeams {
        request: BeamRequest,
        stream: ActiveStream,
        reply: SubmitReply,
    },
    Score {
        request: ScoreRequest,
        stream: ActiveStream,
        reply: SubmitReply,
    },
    Embed {
        request: EmbedRequest,
        stream: ActiveStream,
        reply: SubmitReply,
    },
    /// Asks for the KV cache events from number `from` on.
    KvEvents {
        from: u64,
        reply: oneshot::Sender<KvEventBatch>,
    },
    /// Replies whether the prefix cache was cleared.
    ResetPrefixCache {
        reply: oneshot::Sender<bool>,
    },
    Drain,
    AbortAll,
    /// A mask that a request waits for is ready: the next step uses it.
    Wake,
}

pub(super) type SubmitReply = oneshot::Sender<Result<Queued, RefuseReason>>;

/// The engine's state after the last step or command.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct EngineSnapshot {
    pub(crate) stats: EngineStats,
    /// Streams that have not ended.
    pub(crate) streams: usize,
    pub(crate) is_draining: bool,
    /// Duration of the first step, which also loads kernels and maps memory.
    pub(crate) first_step: Duration,
    /// Sampled at most every `KV_USAGE_PERIOD`.
    pub(crate) kv_usage: KvCacheUsage,
    pub(crate) backend_usage: BackendUsage,
}

/// Why a call got no stream.
#[derive(Debug, thiserror::Error)]
pub(crate) enum SubmitError {
    #[error(transparent)]
    Refused(#[from] RefuseReason),
    #[error("{COMMANDS_MAX} requests wait for the end of a step, which is the limit")]
    CommandQueueFull,
    #[error("{KV_SUBSCRIBERS_MAX} calls subscribe to KV cache events, which is the limit")]
    TooManySubscribers,
    #[error("the engine has stopped")]
    Stopped,
}

/// Sends a command as soon as the queue has room. Does nothing if the engine loop has ended.
pub(super) async fn send_command(commands: &SyncSender<EngineCommand>, mut command: EngineCommand) {
    loop {
        match commands.try_send(command) {
            Ok(()) | Err(TrySendError::Disconnected(_)) => return,
            Err(TrySendError::Full(unsent)) => command = unsent,
        }
        tokio::time::sleep(PAUSED_POLL).await;
    }
}
