// SPDX-License-Identifier: Apache-2.0

//! Streams KV cache events to one call.
//!
//! The engine keeps no state for a subscriber. Once its reader has taken the last update, the
//! subscriber waits for news and asks for it. The engine answers with the events that its log still
//! holds, or with a snapshot. A slow reader therefore costs the engine nothing, and the worker the
//! memory of one update.

use std::sync::Weak;
use std::sync::mpsc::SyncSender;

use engine::RefuseReason;
use engine::kv::events::KvEventBatch;
use tokio::sync::{OwnedSemaphorePermit, oneshot, watch};

use super::command::{EngineCommand, EngineSnapshot, SubmitError, send_command};

/// Does not keep the engine loop alive.
pub(crate) struct KvEventSubscriber {
    pub(super) commands: Weak<SyncSender<EngineCommand>>,
    pub(super) snapshot: watch::Receiver<EngineSnapshot>,
    /// Number of the first event that the call has not received.
    pub(super) next: u64,
    /// One of `KV_SUBSCRIBERS_MAX`.
    pub(super) _permit: OwnedSemaphorePermit,
}

impl KvEventSubscriber {
    /// Waits for new events. An error ends the subscription: the worker drains, or its engine has
    /// stopped.
    pub(crate) async fn next(&mut self) -> Result<KvEventBatch, SubmitError> {
        let next = self.next;
        let changed = self.snapshot.wait_for(|now| now.is_draining || now.stats.kv_events != next);
        let is_draining = changed.await.map_err(|_| SubmitError::Stopped)?.is_draining;
        if is_draining {
            return Err(RefuseReason::Draining.into());
        }
        let (reply, received) = oneshot::channel();
        let commands = self.commands.upgrade().ok_or(SubmitError::Stopped)?;
        send_command(&commands, EngineCommand::KvEvents { from: next, reply }).await;
        drop(commands);
        let update = received.await.map_err(|_| SubmitError::Stopped)?;
        self.next = update.next;
        Ok(update)
    }
}
