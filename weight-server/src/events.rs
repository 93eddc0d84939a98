// SPDX-License-Identifier: Apache-2.0

//! The events and actions of the state machine, and the values that they carry. Plain values and
//! closed enums.

use std::path::PathBuf;
use std::time::Duration;

use handoff::lease_record::LeaseRecord;

use crate::catalog::{GenerationContents, LoadKey};
use crate::config::DeviceConfig;
use crate::ids::{CallId, ConnectionId};
use crate::lease_table::WorkerProcess;
use crate::refusal::{AttachRefusal, LoadFailure, UnloadRefusal, VerifyFailure};
use crate::waiters::{AttachParams, LeaseClaim, LoadProgress, WaiterId};

#[derive(Debug)]
pub struct LoadParams {
    pub model: String,
    pub path: PathBuf,
    pub device: String,
    /// The files that are at the path now, or why they cannot be opened.
    pub key: Result<LoadKey, LoadFailure>,
}

#[derive(Debug)]
pub enum WeightServerEvent {
    /// The fleet may use this GPU too.
    DeviceAdded {
        device: DeviceConfig,
        /// What is available of the NUMA node that is the GPU's own memory.
        node_bytes: u64,
    },
    LoadRequested {
        call: CallId,
        params: LoadParams,
        available_bytes: u64,
    },
    LoadPlanned {
        generation: u64,
        contents: GenerationContents,
        available_bytes: u64,
    },
    LoadProgressed {
        generation: u64,
        done_bytes: u64,
    },
    /// The loader writes no more, and exits.
    LoadHandedOver {
        generation: u64,
        contents: GenerationContents,
    },
    /// A loader that has handed over has exited.
    LoaderEnded {
        generation: u64,
    },
    LoadFailed {
        generation: u64,
        failure: LoadFailure,
    },
    GenerationStored {
        generation: u64,
    },
    /// An empty device means any GPU.
    VerifyRequested {
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
    /// Without a generation, all generations of the model are unloaded.
    UnloadRequested {
        call: CallId,
        model: String,
        generation: Option<u64>,
    },
    AttachRequested {
        connection: ConnectionId,
        peer: WorkerProcess,
        params: AttachParams,
    },
    LeaseStored {
        lease: u64,
    },
    Delivered {
        connection: ConnectionId,
    },
    ReclaimRequested {
        connection: ConnectionId,
        peer: WorkerProcess,
        claim: LeaseClaim,
    },
    /// A worker has sent back the descriptors that were asked for, and they match their manifest.
    GenerationReturned {
        connection: ConnectionId,
        generation: AdoptedGeneration,
    },
    /// A worker that may have returned a generation has exited.
    AwaitedProcessEnded {
        pid: i32,
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
    ShutdownRequested,
    /// Time has passed. Arrives at least every second.
    Tick,
}

#[derive(Debug, PartialEq)]
pub enum WeightServerAction {
    StartLoader {
        generation: u64,
    },
    /// Lets the loader allocate: its plan is reserved.
    Proceed {
        generation: u64,
    },
    /// Lets the loader allocate and copy a resident generation.
    ProceedCopying {
        generation: u64,
        source: u64,
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
    ReplyVerify {
        call: CallId,
        result: Result<VerifyOutcome, VerifyFailure>,
    },
    /// Logs that a quarantined model could not be reloaded. No caller waits for that reload.
    ReportReloadFailure {
        model: String,
        failure: LoadFailure,
    },
    /// Logs that a generation is read from its files although a copy is resident.
    ReportCopyFailure {
        generation: u64,
        source: u64,
        failure: LoadFailure,
    },
    /// Marks the generation in the FD store, so that a successor does not resolve the model name to
    /// it.
    MarkRetired {
        generation: u64,
    },
    /// Removes that mark.
    UnmarkRetired {
        generation: u64,
    },
    /// Removes the generation from the FD store and closes its descriptors.
    RemoveGeneration {
        generation: u64,
    },
    /// Stores the lease in the FD store and watches its process.
    StoreLease {
        lease: u64,
        connection: ConnectionId,
        record: LeaseRecord,
    },
    RemoveLease {
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
    /// Asks the worker for the descriptors of a generation that this process has lost.
    RequestReturn {
        connection: ConnectionId,
        fds: u32,
    },
    Refuse {
        connection: ConnectionId,
        refusal: AttachRefusal,
    },
    Close {
        connection: ConnectionId,
    },
    SendProgress {
        waiter: WaiterId,
        progress: LoadProgress,
    },
    ReplyLoad {
        call: CallId,
        result: Result<LoadOutcome, LoadFailure>,
    },
    ReplyUnload {
        call: CallId,
        result: Result<u32, UnloadRefusal>,
    },
    Publish(ChangeNotice),
}

#[derive(Debug, Clone, PartialEq)]
pub struct LoadOutcome {
    pub generation: u64,
    /// False if the bytes were resident, on this device or another one.
    pub read_from_file: bool,
    pub elapsed: Duration,
}

/// The result of a verifier.
#[derive(Debug, Clone, PartialEq)]
pub struct VerifyReport {
    /// Names of the first damaged tensors.
    pub damaged: Vec<String>,
    pub damaged_count: u32,
    pub checked_bytes: u64,
    pub took: Duration,
}

#[derive(Debug, Clone, PartialEq)]
pub struct VerifyOutcome {
    pub generation: u64,
    pub report: VerifyReport,
}

/// A change that clients of WatchEvents see.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum ChangeNotice {
    Generation(u64),
    GenerationRemoved(u64),
    Lease(u64),
    LeaseEnded(u64),
}

/// A generation that was found in the FD store.
#[derive(Debug)]
pub struct AdoptedGeneration {
    pub id: u64,
    pub model: String,
    pub key: LoadKey,
    pub contents: GenerationContents,
    /// The model had been unloaded or replaced before.
    pub retired: bool,
}
