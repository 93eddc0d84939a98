//! The vocabulary of the state machine: what can happen to it, and what it can want done. Plain values, closed enums.

use std::path::PathBuf;
use std::time::Duration;

use bytes::Bytes;
use memory::lease_record::LeaseRecord;

use crate::catalog::{Contents, LoadKey};
use crate::lease_table::Peer;
use crate::refusal::{LoadFailure, Refusal, UnloadRefusal, VerifyFailure};

#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub(crate) struct ConnectionId(pub(crate) u64);

#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub(crate) struct CallId(pub(crate) u64);

/// Who is told about a load.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum Waiter {
    /// An admin call.
    Call(CallId),
    /// A worker that attaches as soon as the model is ready.
    Worker { connection: ConnectionId, peer: Peer, ask: Ask },
}

/// An Attach frame.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Ask {
    pub(crate) protocol: u32,
    pub(crate) layout: u32,
    pub(crate) manifest_format: u32,
    pub(crate) device: String,
    pub(crate) model: String,
    pub(crate) token: Bytes,
    pub(crate) kv_bytes: u64,
    pub(crate) workspace_bytes: u64,
}

#[derive(Debug)]
pub(crate) struct LoadAsk {
    pub(crate) model: String,
    pub(crate) path: PathBuf,
    pub(crate) device: String,
    /// What stands at the path now, or why that cannot be told.
    pub(crate) key: Result<LoadKey, LoadFailure>,
    pub(crate) one_per_tensor: bool,
}

#[derive(Debug)]
pub(crate) enum Event {
    LoadAsked {
        call: CallId,
        ask: LoadAsk,
        available_bytes: u64,
    },
    LoadPlanned {
        generation: u64,
        contents: Contents,
        available_bytes: u64,
    },
    LoadProgressed {
        generation: u64,
        done_bytes: u64,
    },
    LoadHandedOver {
        generation: u64,
        contents: Contents,
    },
    LoadFailed {
        generation: u64,
        failure: LoadFailure,
    },
    GenerationStored {
        generation: u64,
    },
    /// An empty device is any GPU.
    VerifyAsked {
        call: CallId,
        model: String,
        device: String,
    },
    Verified {
        generation: u64,
        report: VerifyReport,
    },
    VerifyFailed {
        generation: u64,
        failure: VerifyFailure,
    },
    UnloadAsked {
        call: CallId,
        model: String,
    },
    AttachAsked {
        connection: ConnectionId,
        peer: Peer,
        ask: Ask,
    },
    LeaseStored {
        lease: u64,
    },
    Delivered {
        connection: ConnectionId,
    },
    ReclaimAsked {
        connection: ConnectionId,
        peer: Peer,
        protocol: u32,
        generation: u64,
        lease: u64,
        token: Bytes,
    },
    Detached {
        connection: ConnectionId,
    },
    ConnectionEnded {
        connection: ConnectionId,
    },
    ProcessEnded {
        lease: u64,
    },
    ShutdownAsked,
    /// Time passes; comes at least every second.
    Tick,
}

#[derive(Debug, PartialEq)]
pub(crate) enum Action {
    StartLoader {
        generation: u64,
    },
    /// What the loader planned is reserved.
    Proceed {
        generation: u64,
    },
    StopLoader {
        generation: u64,
    },
    StoreGeneration {
        generation: u64,
    },
    StartVerifier {
        generation: u64,
    },
    StopVerifier {
        generation: u64,
    },
    AnswerVerify {
        call: CallId,
        result: Result<VerifyAnswer, VerifyFailure>,
    },
    /// A quarantined model could not be loaded anew: nobody asked, so somebody has to be told.
    ReportReload {
        model: String,
        failure: LoadFailure,
    },
    /// A successor must not give it its name back.
    MarkRetired {
        generation: u64,
    },
    /// Out of the vault, and its descriptors closed.
    ForgetGeneration {
        generation: u64,
    },
    /// Into the vault, and watch its process.
    StoreLease {
        lease: u64,
        connection: ConnectionId,
        record: LeaseRecord,
    },
    ForgetLease {
        lease: u64,
    },
    Deliver {
        connection: ConnectionId,
        lease: u64,
        generation: u64,
    },
    Reclaimed {
        connection: ConnectionId,
        lease: u64,
        generation: u64,
    },
    Refuse {
        connection: ConnectionId,
        refusal: Refusal,
    },
    Close {
        connection: ConnectionId,
    },
    TellWaiting {
        waiter: WaiterId,
        progress: LoadProgress,
    },
    AnswerLoad {
        call: CallId,
        result: Result<LoadAnswer, LoadFailure>,
    },
    AnswerUnload {
        call: CallId,
        result: Result<u32, UnloadRefusal>,
    },
    Publish(Notice),
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum WaiterId {
    Call(CallId),
    Worker(ConnectionId),
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct LoadProgress {
    pub(crate) done_bytes: u64,
    pub(crate) total_bytes: u64,
    pub(crate) jobs_ahead: u32,
}

#[derive(Debug, Clone, PartialEq)]
pub(crate) struct LoadAnswer {
    pub(crate) generation: u64,
    pub(crate) read_from_file: bool,
    pub(crate) elapsed: Duration,
}

/// What a verifier found.
#[derive(Debug, Clone, PartialEq)]
pub(crate) struct VerifyReport {
    /// Names of the first few damaged tensors.
    pub(crate) damaged: Vec<String>,
    pub(crate) damaged_count: u32,
    pub(crate) checked_bytes: u64,
    pub(crate) took: Duration,
}

#[derive(Debug, Clone, PartialEq)]
pub(crate) struct VerifyAnswer {
    pub(crate) generation: u64,
    pub(crate) report: VerifyReport,
}

/// Something changed that an operator may want to see.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Notice {
    Generation(u64),
    GenerationGone(u64),
    Lease(u64),
    LeaseEnded(u64),
}

/// A generation found in the vault.
#[derive(Debug)]
pub(crate) struct AdoptedGeneration {
    pub(crate) id: u64,
    pub(crate) model: String,
    pub(crate) key: LoadKey,
    pub(crate) contents: Contents,
    /// It had lost its name already.
    pub(crate) retired: bool,
}
