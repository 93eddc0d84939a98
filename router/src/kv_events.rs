// SPDX-License-Identifier: Apache-2.0

//! Follows the prefix cache of one worker, from its KV cache events.
//!
//! The router keeps no events: it applies each frame before it takes the next, and the transport
//! stops the worker meanwhile. The worker keeps a short log and sends a snapshot to a reader that
//! is too far behind. [`EventSequence`] finds gaps, after which a snapshot is asked for.

mod sequence;

use std::time::Duration;

use bytes::Bytes;
use proto::worker::v1::worker_client::WorkerClient;
use proto::worker::v1::{self as wire, kv_event};
use tonic::transport::Channel;
use tonic::{Code, Status};

use crate::registry::WorkerRegistry;
use crate::routing::{KvCacheChange, PrefixHash, WorkerId};
use sequence::{EventGap, EventSequence, FrameHead};

/// Pause before a broken subscription is renewed. A worker that drains refuses it until its end.
const RESUBSCRIBE_PAUSE: Duration = Duration::from_secs(1);

#[derive(Debug, thiserror::Error)]
enum FollowError {
    #[error(transparent)]
    Call(#[from] Status),
    #[error(transparent)]
    Gap(#[from] EventGap),
    #[error("event {index} of a frame has {what}")]
    Event { index: usize, what: &'static str },
    #[error("the stream of events ended")]
    Ended,
}

impl FollowError {
    /// The worker never sends events that this router can use.
    fn is_final(&self) -> bool {
        match self {
            Self::Call(status) => status.code() == Code::Unimplemented,
            Self::Event { .. } => true,
            Self::Gap(_) | Self::Ended => false,
        }
    }
}

/// Tells the registry of each change, until the task is aborted.
pub(crate) async fn follow(
    mut client: WorkerClient<Channel>,
    registry: std::sync::Arc<WorkerRegistry>,
    worker: WorkerId,
    fingerprint: Bytes,
) {
    let mut sequence = EventSequence::default();
    loop {
        let ended = follow_once(&mut client, &registry, worker, &fingerprint, &mut sequence).await;
        registry.lose_kv_changes(worker);
        if ended.is_final() {
            let error = service::exit::one_line(&ended);
            return tracing::warn!(?worker, error, "routing estimates the prefix cache of a worker");
        }
        tracing::debug!(?worker, error = %ended, "KV cache events lost");
        tokio::time::sleep(RESUBSCRIBE_PAUSE).await;
    }
}

async fn follow_once(
    client: &mut WorkerClient<Channel>,
    registry: &WorkerRegistry,
    worker: WorkerId,
    fingerprint: &Bytes,
    sequence: &mut EventSequence,
) -> FollowError {
    let (log_id, from_event) = sequence.position();
    let request = wire::SubscribeKvEventsRequest { fingerprint: fingerprint.clone(), log_id, from_event };
    let mut frames = match client.subscribe_kv_events(request).await {
        Ok(reply) => reply.into_inner(),
        Err(status) => return status.into(),
    };
    if from_event > 0 {
        // If the worker has nothing new, no frame says that nothing is missing.
        registry.follow_kv_changes(worker);
    }
    loop {
        let frame = match frames.message().await {
            Ok(Some(frame)) => frame,
            Ok(None) => return FollowError::Ended,
            Err(status) => return status.into(),
        };
        if let Err(error) = apply(frame, registry, worker, sequence) {
            return error;
        }
    }
}

fn apply(
    frame: wire::KvEventsFrame,
    registry: &WorkerRegistry,
    worker: WorkerId,
    sequence: &mut EventSequence,
) -> Result<(), FollowError> {
    let changes = frame.events.iter().enumerate().map(|(index, event)| change(index, event));
    let changes = changes.collect::<Result<Vec<KvCacheChange>, FollowError>>()?;
    let is_complete = sequence.accept(FrameHead {
        log: frame.log_id,
        next: frame.next_event,
        events: changes.len() as u64,
        is_cleared: changes.first() == Some(&KvCacheChange::Cleared),
    })?;
    registry.apply_kv_changes(worker, &changes);
    if is_complete {
        registry.follow_kv_changes(worker);
    }
    Ok(())
}

fn change(index: usize, event: &wire::KvEvent) -> Result<KvCacheChange, FollowError> {
    let block = |block: &wire::KvBlock| match <&[u8; 32]>::try_from(&block.hash[..]) {
        Ok(hash) => Ok((PrefixHash::from(hash), block.group)),
        Err(_) => Err(FollowError::Event { index, what: "a hash that is not of 32 bytes" }),
    };
    match &event.event {
        Some(kv_event::Event::Stored(stored)) => {
            let (block, group) = block(stored)?;
            Ok(KvCacheChange::Stored { block, group })
        }
        Some(kv_event::Event::Removed(removed)) => {
            let (block, group) = block(removed)?;
            Ok(KvCacheChange::Removed { block, group })
        }
        Some(kv_event::Event::Cleared(wire::AllBlocksCleared {})) => Ok(KvCacheChange::Cleared),
        None => Err(FollowError::Event { index, what: "no content" }),
    }
}
