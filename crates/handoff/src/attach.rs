// SPDX-License-Identifier: Apache-2.0

//! The worker's side of the hand-off: request a model, receive its descriptors, map it, hold the
//! lease.
//!
//! ```text
//! Attach -> Waiting*  -> Grant -> (FdBatch -> BatchReceived)* -> the connection is the lease
//!                     -> AttachRefused
//! ```
//! All calls block. If the weight-server sends nothing for `SILENCE`, the attach fails. The total
//! time has no bound, since loading a large model takes as long as its disk needs.

use std::os::fd::OwnedFd;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use bytes::Bytes;
use cuda::Device;
use memory::device::{DeviceTensor, ImportedModel};
use memory::host_import::{MappedTensor, map_host, verify_host};
use memory::manifest::Manifest;
use memory::mapping::MappingWatch;
use memory::memfd::SealedMemfd;
use proto::weights::v1::{self as wire, server_frame, worker_frame};

use crate::PROTOCOL_VERSION;
use crate::attach_error::{AttachModelError, SILENCE};
use crate::fd_batches::FdCollector;
use crate::frames::{SEND_TIMEOUT, receive, send, unexpected};
use crate::lease::LeaseGuard;
use crate::manifest::{MANIFEST_FORMAT, SplitHandoffError, split_handoff};
use crate::seqpacket::{Connection, SocketError};

/// How long a socket may be missing while the weight-server starts or restarts.
pub const CONNECT_PATIENCE: Duration = Duration::from_secs(10);

const CONNECT_RETRY: Duration = Duration::from_millis(20);

/// What a worker requests.
#[derive(Debug, Clone)]
pub struct AttachRequest {
    pub model: String,
    /// "host" or a GPU's UUID.
    pub device: String,
    /// The layout of tensor bytes that the kernels of the worker expect.
    pub layout: u32,
    /// The token that the supervisor gave to this start of the worker; `None` without a supervisor.
    pub token: Option<Bytes>,
    /// Bytes to reserve in the ledger together with the lease.
    pub kv_bytes: u64,
    pub workspace_bytes: u64,
}

/// Progress of the load that a worker waits for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct LoadingProgress {
    pub done_bytes: u64,
    pub total_bytes: u64,
    /// Loads on the same device that run before this one.
    pub jobs_ahead: u32,
}

/// A granted lease and the descriptors of its model, which is not mapped yet. Dropping it releases
/// the lease.
#[derive(Debug)]
pub struct GrantedModel {
    manifest: Manifest,
    manifest_memfd: SealedMemfd,
    fds: Vec<OwnedFd>,
    connection: Connection,
    socket: PathBuf,
    request: AttachRequest,
    lease: u64,
    generation: u64,
    /// Time from the grant to the last descriptor.
    took: Duration,
    waited: Duration,
}

/// A mapped model and its lease. In host memory the tensors are [`MappedTensor`]s, in the order of
/// the manifest.
#[derive(Debug)]
pub struct AttachedModel<T = Vec<MappedTensor>> {
    pub manifest: Manifest,
    /// Drop all of them, and all slices of their bytes, before the lease.
    pub tensors: T,
    pub lease: LeaseGuard,
    /// Time for receiving and mapping the descriptors: the cost of a worker whose model is
    /// resident.
    pub handoff: Duration,
    /// Time from the request to the grant: connecting, and waiting for a load.
    pub waited: Duration,
}

impl<T> AttachedModel<T> {
    /// Converts the tensors.
    pub fn map<U>(self, convert: impl FnOnce(T) -> U) -> AttachedModel<U> {
        let Self { manifest, tensors, lease, handoff, waited } = self;
        AttachedModel { manifest, tensors: convert(tensors), lease, handoff, waited }
    }
}

/// Attaches a model in host memory.
pub fn attach(
    socket: &Path,
    request: &AttachRequest,
    on_waiting: impl FnMut(LoadingProgress),
) -> Result<AttachedModel, AttachModelError> {
    request_model(socket, request, on_waiting)?.import_host()
}

/// Requests a model, waits until it is loaded, and receives its descriptors.
pub fn request_model(
    socket: &Path,
    request: &AttachRequest,
    mut on_waiting: impl FnMut(LoadingProgress),
) -> Result<GrantedModel, AttachModelError> {
    let started = Instant::now();
    let connection = connect(socket)?;
    connection.set_timeouts(Some(SILENCE), Some(SEND_TIMEOUT)).map_err(AttachModelError::Lease)?;
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
    let mut collector = FdCollector::new(grant.fds)?;
    while !collector.is_complete() {
        match receive(&connection)? {
            (server_frame::Kind::Fds(batch), fds) => {
                let receipt = collector.accept(&batch, fds)?;
                send(&connection, worker_frame::Kind::BatchReceived(receipt))?;
            }
            (other, _) => return Err(unexpected("descriptors", other)),
        }
    }
    let fds = collector.into_fds();
    let manifest_fd = fds.first().ok_or(SplitHandoffError::NoManifest)?.try_clone();
    let manifest_memfd = SealedMemfd::verify(manifest_fd.map_err(AttachModelError::Keep)?)
        .map_err(|error| SplitHandoffError::Manifest(error.into()))?;
    let (manifest, fds) = split_handoff(fds)?;
    Ok(GrantedModel {
        manifest,
        manifest_memfd,
        fds,
        connection,
        socket: socket.to_owned(),
        request: request.clone(),
        lease: grant.lease,
        generation: grant.generation,
        took: granted.elapsed(),
        waited: granted - started,
    })
}

impl GrantedModel {
    /// Maps a model that lies in host memory.
    pub fn import_host(self) -> Result<AttachedModel, AttachModelError> {
        self.import(|manifest, fds| {
            let memfds = verify_host(manifest, fds)?;
            let (tensors, watch) = map_host(manifest, &memfds)?;
            Ok((tensors, watch, memfds.into_iter().map(OwnedFd::from).collect()))
        })
    }

    /// Maps a model that lies on this GPU. The model stays mapped while any of its tensors lives.
    pub fn import_cuda(self, device: &Device) -> Result<AttachedModel<Vec<DeviceTensor>>, AttachModelError> {
        self.import(|manifest, fds| {
            let model = ImportedModel::import(device, manifest, &fds)?;
            let watch = model.watch();
            Ok((model.tensors, watch, fds))
        })
    }

    fn import<T>(
        self,
        import: impl FnOnce(&Manifest, Vec<OwnedFd>) -> Result<(T, MappingWatch, Vec<OwnedFd>), AttachModelError>,
    ) -> Result<AttachedModel<T>, AttachModelError> {
        let Self {
            manifest,
            manifest_memfd,
            fds,
            connection,
            socket,
            request,
            lease,
            generation,
            took,
            waited,
        } = self;
        // The time between grant and import does not count: the worker may have created a context.
        let started = Instant::now();
        let (tensors, mappings, kept) = import(&manifest, fds)?;
        let handoff = took + started.elapsed();
        let manifest_inode = manifest_memfd.inode();
        let returnable: Vec<OwnedFd> = std::iter::once(manifest_memfd.into()).chain(kept).collect();
        let claim = wire::Reclaim {
            protocol: PROTOCOL_VERSION,
            generation,
            lease,
            token: request.token.unwrap_or_default(),
            digest: Bytes::copy_from_slice(&manifest.digest),
            device: request.device,
            kv_bytes: request.kv_bytes,
            workspace_bytes: request.workspace_bytes,
            fds: returnable.len() as u32,
            manifest_inode,
        };
        let lease = LeaseGuard::hold(connection, &socket, claim, returnable, mappings)
            .map_err(AttachModelError::Lease)?;
        Ok(AttachedModel { manifest, tensors, lease, handoff, waited })
    }
}

fn attach_frame(request: &AttachRequest) -> wire::Attach {
    wire::Attach {
        protocol: PROTOCOL_VERSION,
        layout: request.layout,
        manifest_format: MANIFEST_FORMAT,
        device: request.device.clone(),
        model: request.model.clone(),
        token: request.token.clone().unwrap_or_default(),
        kv_bytes: request.kv_bytes,
        workspace_bytes: request.workspace_bytes,
    }
}

/// Connects, and waits for a socket that does not exist yet.
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
