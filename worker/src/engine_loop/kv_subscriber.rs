//! Follows what the cache begins and ceases to hold, for one call.
//!
//! The engine keeps nothing for a follower: this one asks when there is news and its reader has taken the last, and gets what
//! the log still has, or a snapshot. So a reader that is slow, or takes nothing at all, costs the engine nothing, and memory
//! for one update.

use std::sync::mpsc::SyncSender;
use std::sync::{Arc, Weak};

use engine::RefuseReason;
use engine::kv::events::Update;
use tokio::sync::{OwnedSemaphorePermit, oneshot, watch};

use super::handle::send_command;
use super::{EngineCommand, EngineHandle, EngineSnapshot, SubmitError};

/// Each may hold an update (a name of 33 bytes for every block of the cache at most), and each asks the engine between steps.
pub(super) const KV_SUBSCRIBERS_MAX: usize = 16;

/// Does not keep the engine alive.
pub(crate) struct KvEventSubscriber {
    commands: Weak<SyncSender<EngineCommand>>,
    snapshot: watch::Receiver<EngineSnapshot>,
    /// Number of the first event that is not known.
    next: u64,
    _place: OwnedSemaphorePermit,
}

impl EngineHandle {
    /// What a follower's numbers are of.
    pub(crate) fn kv_log(&self) -> u64 {
        self.kv_log
    }

    /// From event `from` on, or from a snapshot where these are gone.
    pub(crate) fn follow(&self, from: u64) -> Result<KvEventSubscriber, SubmitError> {
        let place =
            self.followers.clone().try_acquire_owned().map_err(|_| SubmitError::TooManySubscribers)?;
        let (commands, snapshot) = (Arc::downgrade(&self.commands), self.snapshot.clone());
        Ok(KvEventSubscriber { commands, snapshot, next: from, _place: place })
    }
}

impl KvEventSubscriber {
    /// Waits until there is something new. An error is the end: the worker drains, or its engine has stopped.
    pub(crate) async fn next(&mut self) -> Result<Update, SubmitError> {
        let next = self.next;
        let news = self.snapshot.wait_for(|now| now.draining || now.stats.kv_events != next);
        let draining = news.await.map_err(|_| SubmitError::Stopped)?.draining;
        if draining {
            return Err(RefuseReason::Draining.into());
        }
        let (answer, answered) = oneshot::channel();
        let commands = self.commands.upgrade().ok_or(SubmitError::Stopped)?;
        send_command(&commands, EngineCommand::KvEvents { from: next, answer }).await;
        drop(commands);
        let update = answered.await.map_err(|_| SubmitError::Stopped)?;
        self.next = update.next;
        Ok(update)
    }
}
