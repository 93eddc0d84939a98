//! The worker's side of the hand-off: ask for a model, take its descriptors, map it, hold the lease.
//!
//! ```text
//! Attach -> Waiting*  -> Grant -> (FdBatch -> BatchReceived)* -> the connection is the lease
//!                     -> AttachRefused
//! ```
//! Blocking: call it from a thread that may wait. No wait is longer than `SILENCE` without a sign of life; there is no
//! bound on the total, since a large model takes as long as its disk does.

use std::os::fd::OwnedFd;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use bytes::Bytes;
use proto::weights::v1::{self as wire, server_frame, worker_frame};

use crate::cuda::{self, DeviceTensor, ImportModelError, ImportedModel};
use crate::handoff::{Collector, HandoffError, PROTOCOL};
use crate::import::{ImportError, Tensor, import_host, take_manifest};
use crate::lease::Lease;
use crate::manifest::{FORMAT, Manifest};
use crate::mapping::MappingWatch;
use crate::seqpacket::{Connection, FrameError, SocketError};

/// The weight-server reports at least every second while a model loads.
pub const SILENCE: Duration = Duration::from_secs(30);

/// How long a socket may be missing: the weight-server is being started or restarted.
pub const CONNECT_PATIENCE: Duration = Duration::from_secs(10);

const CONNECT_RETRY: Duration = Duration::from_millis(20);

/// A frame of ours is small; a server that doesn't take it is stuck.
pub(crate) const SEND_TIMEOUT: Duration = Duration::from_secs(5);

/// What a worker asks for.
#[derive(Debug, Clone)]
pub struct AttachRequest {
    pub model: String,
    /// "host" or a GPU's UUID.
    pub device: String,
    /// Layout of tensor bytes that the worker's kernels expect.
    pub layout: u32,
    /// What the supervisor gave this worker start; none where nobody did.
    pub token: Option<Bytes>,
    /// Reserved in the ledger with the lease, beside the weights.
    pub kv_bytes: u64,
    pub workspace_bytes: u64,
}

/// How far the load is that a worker waits for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct LoadingProgress {
    pub done_bytes: u64,
    pub total_bytes: u64,
    /// Loads of the same device that come first.
    pub jobs_ahead: u32,
}

/// A granted lease and the descriptors of its model, not mapped yet. Dropping it gives the lease back.
#[derive(Debug)]
pub struct Granted {
    manifest: Manifest,
    fds: Vec<OwnedFd>,
    connection: Connection,
    socket: PathBuf,
    token: Bytes,
    lease: u64,
    generation: u64,
    /// From the grant to the last descriptor.
    took: Duration,
    waited: Duration,
}

/// A model in this process; on the host its tensors are [`Tensor`]s, in the manifest's order.
#[derive(Debug)]
pub struct Attached<T = Vec<Tensor>> {
    pub manifest: Manifest,
    /// Drop every one, and every slice of one, before the lease.
    pub tensors: T,
    pub lease: Lease,
    /// Taking descriptors and mapping them: what a worker costs that finds its model resident.
    pub handoff: Duration,
    /// From the request to the grant: connecting, and waiting for a load.
    pub waited: Duration,
}

impl<T> Attached<T> {
    /// The same model with its tensors as somebody else sees them.
    pub fn map<U>(self, see: impl FnOnce(T) -> U) -> Attached<U> {
        let Self { manifest, tensors, lease, handoff, waited } = self;
        Attached { manifest, tensors: see(tensors), lease, handoff, waited }
    }
}

#[derive(Debug, thiserror::Error)]
pub enum AttachError {
    #[error(transparent)]
    Socket(#[from] SocketError),
    #[error("the weight-server refused: {text}")]
    Refused { reason: wire::RefusalReason, text: String },
    #[error("the connection to the weight-server broke")]
    Connection(#[source] FrameError),
    #[error("the weight-server gave no sign of life for {} s", SILENCE.as_secs())]
    Silence,
    #[error("the weight-server sent {found} where {expected} was due")]
    Unexpected { expected: &'static str, found: &'static str },
    #[error("the hand-off is inconsistent")]
    Handoff(#[from] HandoffError),
    #[error("the model that was handed over cannot be used")]
    Import(#[from] ImportError),
    #[error("the model that was handed over cannot be used")]
    ImportDevice(#[from] ImportModelError),
    #[error("cannot watch the lease")]
    Lease(#[source] std::io::Error),
}

impl From<FrameError> for AttachError {
    fn from(error: FrameError) -> Self {
        match error {
            FrameError::NotReady => Self::Silence,
            error => Self::Connection(error),
        }
    }
}

/// Attaches a model from the host's memory.
pub fn attach(
    socket: &Path,
    request: &AttachRequest,
    on_waiting: impl FnMut(LoadingProgress),
) -> Result<Attached, AttachError> {
    take(socket, request, on_waiting)?.import_host()
}

/// Asks for a model, waits for a load of it, and takes its descriptors.
pub fn take(
    socket: &Path,
    request: &AttachRequest,
    mut on_waiting: impl FnMut(LoadingProgress),
) -> Result<Granted, AttachError> {
    let started = Instant::now();
    let connection = connect(socket)?;
    connection.set_timeouts(Some(SILENCE), Some(SEND_TIMEOUT)).map_err(AttachError::Lease)?;
    send(&connection, worker_frame::Kind::Attach(attach_frame(request)))?;

    let grant = loop {
        match receive(&connection)? {
            (server_frame::Kind::Waiting(waiting), _) => on_waiting(LoadingProgress {
                done_bytes: waiting.done_bytes,
                total_bytes: waiting.total_bytes,
                jobs_ahead: waiting.jobs_ahead,
            }),
            (server_frame::Kind::Grant(grant), _) => break grant,
            (other, _) => return Err(unexpected("a grant", other)),
        }
    };
    let granted = Instant::now();
    let mut collector = Collector::new(grant.fds)?;
    while !collector.is_complete() {
        match receive(&connection)? {
            (server_frame::Kind::Fds(batch), fds) => {
                let receipt = collector.accept(&batch, fds)?;
                send(&connection, worker_frame::Kind::BatchReceived(receipt))?;
            }
            (other, _) => return Err(unexpected("descriptors", other)),
        }
    }
    let (manifest, fds) = take_manifest(collector.into_fds())?;
    Ok(Granted {
        manifest,
        fds,
        connection,
        socket: socket.to_owned(),
        token: request.token.clone().unwrap_or_default(),
        lease: grant.lease,
        generation: grant.generation,
        took: granted.elapsed(),
        waited: granted - started,
    })
}

impl Granted {
    /// Maps a model that lies on the host.
    pub fn import_host(self) -> Result<Attached, AttachError> {
        self.import(|manifest, fds| Ok(import_host(manifest, fds)?))
    }

    /// Maps a model that lies on this GPU. It stays mapped while any of its tensors lives.
    pub fn import_cuda(self, device: &cuda::Device) -> Result<Attached<Vec<DeviceTensor>>, AttachError> {
        self.import(|manifest, fds| {
            let model = ImportedModel::import(device, manifest, fds)?;
            let watch = MappingWatch::device(model.watch());
            Ok((model.tensors, watch))
        })
    }

    fn import<T>(
        self,
        import: impl FnOnce(&Manifest, Vec<OwnedFd>) -> Result<(T, MappingWatch), AttachError>,
    ) -> Result<Attached<T>, AttachError> {
        let Self { manifest, fds, connection, socket, token, lease, generation, took, waited } = self;
        // Its holder may have made a context meanwhile.
        let started = Instant::now();
        let (tensors, mappings) = import(&manifest, fds)?;
        let handoff = took + started.elapsed();
        let lease = Lease::hold(connection, &socket, lease, generation, token, mappings)
            .map_err(AttachError::Lease)?;
        Ok(Attached { manifest, tensors, lease, handoff, waited })
    }
}

fn attach_frame(request: &AttachRequest) -> wire::Attach {
    wire::Attach {
        protocol: PROTOCOL,
        layout: request.layout,
        manifest_format: FORMAT,
        device: request.device.clone(),
        model: request.model.clone(),
        token: request.token.clone().unwrap_or_default(),
        kv_bytes: request.kv_bytes,
        workspace_bytes: request.workspace_bytes,
    }
}

/// Connects, waiting for a socket that is not there yet.
fn connect(socket: &Path) -> Result<Connection, SocketError> {
    let deadline = Instant::now() + CONNECT_PATIENCE;
    loop {
        match Connection::connect(socket) {
            Err(SocketError::NotServed { .. }) if Instant::now() < deadline => {
                std::thread::sleep(CONNECT_RETRY)
            }
            result => return result,
        }
    }
}

pub(crate) fn send(connection: &Connection, kind: worker_frame::Kind) -> Result<(), FrameError> {
    connection.send(&wire::WorkerFrame { kind: Some(kind) }, &[])
}

pub(crate) type Frame = (server_frame::Kind, Vec<std::os::fd::OwnedFd>);

/// The next frame; a refusal is an error wherever it comes.
pub(crate) fn receive(connection: &Connection) -> Result<Frame, AttachError> {
    let (frame, fds) = connection.receive::<wire::ServerFrame>()?;
    match frame.kind {
        Some(server_frame::Kind::Refused(refused)) => {
            Err(AttachError::Refused { reason: refused.reason(), text: refused.text })
        }
        Some(kind) => Ok((kind, fds)),
        None => Err(AttachError::Unexpected { expected: "a frame", found: "an unknown kind" }),
    }
}

pub(crate) fn unexpected(expected: &'static str, kind: server_frame::Kind) -> AttachError {
    let found = match kind {
        server_frame::Kind::Refused(_) => "a refusal",
        server_frame::Kind::Waiting(_) => "a progress report",
        server_frame::Kind::Grant(_) => "a grant",
        server_frame::Kind::Fds(_) => "descriptors",
        server_frame::Kind::Reclaimed(_) => "a re-claim's answer",
    };
    AttachError::Unexpected { expected, found }
}
