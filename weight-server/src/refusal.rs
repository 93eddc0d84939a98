// SPDX-License-Identifier: Apache-2.0

//! Why a load failed, an attach was refused, or an unload or a verification was not done: one
//! closed enum each.

use handoff::PROTOCOL_VERSION;
use handoff::manifest::MANIFEST_FORMAT;
use service::ByteSize;

use crate::ledger::ReservationError;

/// What a loader reports; the text is the loader's own.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum LoaderErrorKind {
    File,
    ModelRefused,
    FileChanged,
    Truncated,
    OutOfMemory,
    OutOfFds,
    Unsupported,
    Device,
    /// The copy of a resident generation has other checksums than its manifest.
    SourceDamaged,
}

#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum LoadFailure {
    #[error("{text}")]
    Loader { kind: LoaderErrorKind, text: String },
    #[error("the loader was lost: {how}; nothing of the model is left in memory")]
    LoaderLost { how: String },
    #[error("the loader made no progress for {seconds} s: check the disk that holds the model")]
    NoProgress { seconds: u64 },
    #[error(transparent)]
    Reservation(#[from] ReservationError),
    #[error(
        "{} are needed, the machine has {} available: free memory, or raise the cgroup's limit",
        ByteSize(*.needed).rounded(), ByteSize(*.available).rounded()
    )]
    InsufficientMemory { needed: u64, available: u64 },
    #[error("the load was cancelled: the model was unloaded in the meantime")]
    Unloaded,
    #[error("the same file is loaded as {model:?}: ask for that, or unload it first")]
    LoadedAs { model: String },
    #[error("{jobs} loads are in progress, which is the limit: try again when one is done")]
    TooManyJobs { jobs: usize },
    #[error(
        "workers of the previous weight-server have not reclaimed their leases yet ({workers} are missing): try again in a few seconds"
    )]
    AwaitingReclaim { workers: usize },
    #[error("the weight-server is shutting down")]
    ShuttingDown,
}

#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum AttachRefusal {
    #[error(
        "hand-off protocol {found} is not supported, {PROTOCOL_VERSION} is: use the weight-server's own executable"
    )]
    Protocol { found: u32 },
    #[error("layout {wanted} was asked for, model {model:?} has layout {held}")]
    Layout { model: String, wanted: u32, held: u32 },
    #[error("manifests of format {MANIFEST_FORMAT} cannot be read by a worker that knows {found}")]
    ManifestFormat { found: u32 },
    #[error("model {model:?} is not on device {wanted:?}, it is on {held:?}")]
    Device { model: String, wanted: String, held: String },
    #[error("model {model:?} is not loaded; loaded are: {known}")]
    UnknownModel { model: String, known: String },
    #[error("model {model:?} could not be loaded: {failure}")]
    LoadFailed { model: String, failure: LoadFailure },
    #[error("the attach token is missing or no longer valid")]
    Token,
    #[error("user id {uid} may not attach here")]
    PeerUid { uid: u32 },
    #[error(transparent)]
    Reservation(#[from] ReservationError),
    #[error(
        "{shortage}; beside a workspace of {}, a KV cache of at most {} fits",
        ByteSize(*.workspace).rounded(), ByteSize(*.kv_fits).rounded()
    )]
    LeaseTooLarge { shortage: ReservationError, workspace: u64, kv_fits: u64 },
    #[error(
        "the weights of model {model:?}, generation {generation}, are damaged: attach again, the model is being reloaded"
    )]
    Quarantined { model: String, generation: u64 },
    #[error("lease {lease} of generation {generation} is not known: attach again")]
    UnknownLease { lease: u64, generation: u64 },
    #[error("process {pid} has {leases} leases, which is the limit")]
    LeasesOfProcess { pid: i32, leases: usize },
    #[error("{what}: try again in a moment")]
    NotYet { what: &'static str },
    #[error("{clients} clients wait or hold leases, which is the limit: try again later")]
    Busy { clients: usize },
    #[error("the weight-server is shutting down")]
    ShuttingDown,
    #[error("the connection broke the protocol: {what}")]
    Violation { what: &'static str },
}

/// Why a generation was not verified.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum VerifyFailure {
    #[error("model {model:?} is not loaded on a GPU{}; loaded are: {known}", of_device(.device))]
    UnknownModel { model: String, device: String, known: String },
    #[error("{text}")]
    Verifier { kind: LoaderErrorKind, text: String },
    #[error("the verifier was lost: {how}")]
    Lost { how: String },
    #[error(transparent)]
    Reservation(#[from] ReservationError),
    #[error("the model was unloaded in the meantime")]
    Unloaded,
    #[error("the weight-server is shutting down")]
    ShuttingDown,
}

fn of_device(device: &str) -> String {
    if device.is_empty() { String::new() } else { format!(" as {device}") }
}

#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum UnloadRefusal {
    #[error("model {model:?} is not loaded; loaded are: {known}")]
    UnknownModel { model: String, known: String },
    #[error(
        "workers of the previous weight-server have not reclaimed their leases yet ({workers} are missing): try again in a few seconds"
    )]
    AwaitingReclaim { workers: usize },
}
