// SPDX-License-Identifier: Apache-2.0

//! Messages between the event loop and the tasks around it: inputs to the loop, and its commands to
//! the connections of workers.

use std::os::fd::OwnedFd;
use std::sync::Arc;

use tokio::sync::{mpsc, oneshot, watch};

use crate::catalog::GenerationContents;
use crate::config::DeviceConfig;
use crate::events::{AdoptedGeneration, LoadOutcome, LoadParams, VerifyOutcome, WeightServerEvent};
use crate::held_fds::GenerationFds;
use crate::ids::ConnectionId;
use crate::lease_table::WorkerProcess;
use crate::refusal::{AttachRefusal, LoadFailure, UnloadRefusal, VerifyFailure};
use crate::status::StatusSnapshot;
use crate::tokens::{TokenDigest, TokenError};
use crate::waiters::{AttachParams, LeaseClaim, LoadProgress};

/// Inputs that wait for the event loop. Handling one is cheaper than producing it. Senders wait
/// when the queue is full.
const INPUT_QUEUE_CAPACITY: usize = 1024;

/// Everything that reaches the event loop: plain events, and inputs with descriptors or reply
/// channels.
#[derive(Debug)]
pub(crate) enum LoopInput {
    Event(WeightServerEvent),
    Attach {
        connection: ConnectionId,
        peer: WorkerProcess,
        pidfd: OwnedFd,
        params: AttachParams,
        commands: mpsc::Sender<ConnectionCommand>,
    },
    Reclaim {
        connection: ConnectionId,
        peer: WorkerProcess,
        pidfd: OwnedFd,
        claim: LeaseClaim,
        commands: mpsc::Sender<ConnectionCommand>,
    },
    /// A worker has sent back a generation.
    Returned {
        connection: ConnectionId,
        generation: AdoptedGeneration,
        fds: Arc<GenerationFds>,
    },
    LoadHandedOver {
        generation: u64,
        contents: GenerationContents,
        fds: GenerationFds,
    },
    /// The fleet may use this GPU too from now on.
    AddDevice {
        device: DeviceConfig,
    },
    Load {
        params: LoadParams,
        call: LoadCall,
    },
    Unload {
        model: String,
        generation: Option<u64>,
        answer: oneshot::Sender<Result<u32, UnloadRefusal>>,
    },
    Verify {
        model: String,
        device: String,
        answer: oneshot::Sender<Result<VerifyOutcome, VerifyFailure>>,
    },
    AllowToken {
        name: String,
        digest: TokenDigest,
        answer: oneshot::Sender<Result<(), TokenError>>,
    },
    ForgetToken {
        name: String,
    },
    Status {
        answer: oneshot::Sender<StatusSnapshot>,
    },
    /// A new supervisor runs, whose FD store is empty.
    SupervisorReplaced,
}

/// The event loop's ends of an admin call that waits for a load.
#[derive(Debug)]
pub(crate) struct LoadCall {
    pub(crate) progress: watch::Sender<Option<LoadProgress>>,
    pub(crate) answer: oneshot::Sender<Result<LoadOutcome, LoadFailure>>,
}

/// Sends inputs to the event loop. Cheap to clone.
#[derive(Debug, Clone)]
pub(crate) struct InputSender(mpsc::Sender<LoopInput>);

impl InputSender {
    pub(crate) fn channel() -> (Self, mpsc::Receiver<LoopInput>) {
        let (sender, receiver) = mpsc::channel(INPUT_QUEUE_CAPACITY);
        (Self(sender), receiver)
    }

    pub(crate) async fn send(&self, input: LoopInput) {
        // The event loop ends only with the process.
        let _ = self.0.send(input).await;
    }

    pub(crate) fn send_blocking(&self, input: LoopInput) {
        let _ = self.0.blocking_send(input);
    }
}

/// What the event loop tells one connection to do.
#[derive(Debug)]
pub(crate) enum ConnectionCommand {
    Waiting(LoadProgress),
    Refuse(AttachRefusal),
    Deliver {
        lease: u64,
        generation: u64,
        fds: Arc<GenerationFds>,
    },
    Reclaimed {
        lease: u64,
        generation: u64,
    },
    /// Receive this many descriptors from the worker.
    RequestReturn {
        fds: u32,
    },
    Close,
}
