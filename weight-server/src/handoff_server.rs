// SPDX-License-Identifier: Apache-2.0

//! The hand-off socket: accepts workers, runs the protocol with each, and reports to the event
//! loop.
//!
//! Each connection has one task, which makes no decisions: it turns first frames into inputs, and
//! commands of the event loop into frames. A client that sends descriptors, malformed frames or
//! frames out of order is refused, counted and disconnected. No client can block another.

use std::os::fd::{BorrowedFd, OwnedFd};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use handoff::event_loop::{AsyncConnection, AsyncListener};
use handoff::fd_batches::{FdCollector, fd_batches};
use handoff::pidfd;
use handoff::seqpacket::{Connection, FrameError, Listener};
use proto::weights::v1::{self as wire, ServerFrame, WorkerFrame, server_frame, worker_frame};
use service::accept_failures::AcceptFailures;
use tokio::sync::{Semaphore, mpsc};

use crate::adoption;
use crate::events::{AdoptedGeneration, WeightServerEvent};
use crate::held_fds::GenerationFds;
use crate::ids::ConnectionId;
use crate::lease_table::WorkerProcess;
use crate::messages::{ConnectionCommand, InputSender, LoopInput};
use crate::model_files::blocking;
use crate::refusal::AttachRefusal;
use crate::state::MAX_CLIENTS;
use crate::waiters::{AttachParams, LeaseClaim};

/// A worker sends its first frame right after it has connected.
const FIRST_FRAME_TIMEOUT: Duration = Duration::from_secs(5);

/// A worker takes a batch of descriptors in microseconds. One that does not is stopped or hostile.
const BATCH_TIMEOUT: Duration = Duration::from_secs(10);

const SEND_TIMEOUT: Duration = Duration::from_secs(5);

/// Commands that wait for one connection: progress reports and one grant.
const COMMAND_QUEUE_CAPACITY: usize = 16;

/// How often the path of the socket is checked. Cleaners of /tmp delete old sockets.
const PATH_CHECK_INTERVAL: Duration = Duration::from_secs(1);

/// Counts protocol violations of clients, for `ballast ps` and tests.
#[derive(Debug, Default)]
pub(crate) struct ProtocolViolations(AtomicU64);

impl ProtocolViolations {
    pub(crate) fn count(&self) -> u64 {
        self.0.load(Ordering::Relaxed)
    }
}

/// Accepts connections until the task is aborted.
pub(crate) async fn accept_loop(
    listener: Listener,
    inputs: InputSender,
    violations: Arc<ProtocolViolations>,
) -> std::io::Result<()> {
    let mut listener = AsyncListener::new(listener)?;
    let mut check = tokio::time::interval(PATH_CHECK_INTERVAL);
    check.set_missed_tick_behavior(tokio::time::MissedTickBehavior::Delay);
    let slots = Arc::new(Semaphore::new(MAX_CLIENTS));
    // Closed for a moment when no descriptor is left, so that the listener can accept and refuse
    // waiting clients.
    let mut spare = Some(spare_fd()?);
    let mut failures = AcceptFailures::default();
    let mut next = 0u64;
    loop {
        // The semaphore is never closed.
        let Ok(slot) = Arc::clone(&slots).acquire_owned().await else { return Ok(()) };
        let connection = loop {
            let accepted = tokio::select! {
                accepted = listener.accept() => accepted,
                _ = check.tick() => {
                    restore_path(&mut listener);
                    continue;
                }
            };
            match accepted {
                Ok(connection) => break connection,
                Err(error) => {
                    let wait = failures.failed("the hand-off socket", &error, Instant::now());
                    drop(spare.take());
                    listener.reject_next();
                    tokio::time::sleep(wait).await;
                    spare = spare_fd().ok();
                }
            }
        };
        next += 1;
        let client = WorkerConnection {
            id: ConnectionId(next),
            inputs: inputs.clone(),
            violations: Arc::clone(&violations),
        };
        tokio::spawn(async move {
            client.serve(connection).await;
            drop(slot);
        });
    }
}

fn restore_path(listener: &mut AsyncListener) {
    match listener.restore_path() {
        Ok(false) => {}
        Ok(true) => tracing::warn!("the hand-off socket was deleted, it is bound again"),
        // The directory may be gone too. The supervisor creates it again.
        Err(error) => tracing::debug!(%error, "the hand-off socket was deleted and cannot be bound yet"),
    }
}

fn spare_fd() -> std::io::Result<OwnedFd> {
    Ok(std::fs::File::open("/dev/null")?.into())
}

pub(crate) struct WorkerConnection {
    pub(crate) id: ConnectionId,
    pub(crate) inputs: InputSender,
    pub(crate) violations: Arc<ProtocolViolations>,
}

/// Why a connection ended. None of these is an error of the weight-server.
#[derive(Debug)]
enum ConnectionEnd {
    /// The peer or the event loop closed the connection.
    Over,
    Broken(FrameError),
    Violation(&'static str),
}

impl From<FrameError> for ConnectionEnd {
    fn from(error: FrameError) -> Self {
        match error {
            FrameError::Closed => Self::Over,
            FrameError::Malformed(_) => Self::Violation("a frame cannot be decoded"),
            FrameError::Receive(handoff::fd_passing::ReceiveError::TooLong { .. }) => {
                Self::Violation("a frame is too long")
            }
            error => Self::Broken(error),
        }
    }
}

impl WorkerConnection {
    async fn serve(self, connection: Connection) {
        let peer = identify(&connection);
        self.serve_peer(connection, peer).await;
    }

    /// Serves a process that has been identified, with its pidfd.
    pub(crate) async fn serve_peer(
        self,
        connection: Connection,
        peer: std::io::Result<(WorkerProcess, OwnedFd)>,
    ) {
        let connection = match AsyncConnection::new(connection) {
            Ok(connection) => connection,
            Err(error) => return tracing::warn!(%error, "cannot serve a worker"),
        };
        let end = match peer {
            Ok((peer, pidfd)) => self.serve_frames(&connection, peer, pidfd).await.err(),
            // The peer process has exited already.
            Err(_) => None,
        };
        match end {
            Some(ConnectionEnd::Violation(what)) => {
                self.violations.0.fetch_add(1, Ordering::Relaxed);
                tracing::warn!(connection = self.id.0, what, "a client broke the hand-off protocol");
                // The client may no longer read.
                let _ = refuse(&connection, &AttachRefusal::Violation { what }).await;
            }
            Some(ConnectionEnd::Broken(error)) => {
                let cause = service::exit::one_line(&error);
                tracing::info!(connection = self.id.0, cause, "a worker's connection failed");
            }
            Some(ConnectionEnd::Over) | None => {}
        }
        self.inputs.send(LoopInput::Event(WeightServerEvent::ConnectionEnded { connection: self.id })).await;
    }

    async fn serve_frames(
        &self,
        connection: &AsyncConnection,
        peer: WorkerProcess,
        pidfd: OwnedFd,
    ) -> Result<(), ConnectionEnd> {
        let (commands, mut command_queue) = mpsc::channel(COMMAND_QUEUE_CAPACITY);
        let (frame, fds) = connection.receive_within::<WorkerFrame>(FIRST_FRAME_TIMEOUT).await?;
        let input = match without_fds(frame, fds)? {
            worker_frame::Kind::Attach(attach) => {
                LoopInput::Attach { connection: self.id, peer, pidfd, params: attach.into(), commands }
            }
            worker_frame::Kind::Reclaim(claim) => {
                LoopInput::Reclaim { connection: self.id, peer, pidfd, claim: claim.into(), commands }
            }
            _ => return Err(ConnectionEnd::Violation("the first frame is neither Attach nor Reclaim")),
        };
        self.inputs.send(input).await;
        loop {
            tokio::select! {
                order = command_queue.recv() => match order {
                    Some(order) => self.execute(connection, order).await?,
                    None => return Ok(()),
                },
                frame = connection.receive::<WorkerFrame>() => {
                    let (frame, fds) = frame?;
                    match without_fds(frame, fds)? {
                        worker_frame::Kind::Detach(_) => {
                            self.inputs.send(LoopInput::Event(WeightServerEvent::Detached { connection: self.id })).await;
                        }
                        _ => return Err(ConnectionEnd::Violation("a frame came out of order")),
                    }
                }
            }
        }
    }

    async fn execute(
        &self,
        connection: &AsyncConnection,
        order: ConnectionCommand,
    ) -> Result<(), ConnectionEnd> {
        match order {
            ConnectionCommand::Waiting(progress) => {
                let waiting = wire::Waiting {
                    done_bytes: progress.done_bytes,
                    total_bytes: progress.total_bytes,
                    jobs_ahead: progress.jobs_ahead,
                };
                Ok(send(connection, server_frame::Kind::Waiting(waiting)).await?)
            }
            ConnectionCommand::Refuse(refusal) => {
                tracing::info!(connection = self.id.0, %refusal, "refused a worker");
                refuse(connection, &refusal).await?;
                Err(ConnectionEnd::Over)
            }
            ConnectionCommand::Deliver { lease, generation, fds } => {
                deliver_descriptors(connection, lease, generation, &fds).await?;
                self.inputs
                    .send(LoopInput::Event(WeightServerEvent::Delivered { connection: self.id }))
                    .await;
                Ok(())
            }
            ConnectionCommand::Reclaimed { lease, generation } => {
                let reclaimed = wire::Reclaimed { lease, generation };
                Ok(send(connection, server_frame::Kind::Reclaimed(reclaimed)).await?)
            }
            ConnectionCommand::RequestReturn { fds } => {
                let (generation, fds) = receive_generation(connection, fds).await?;
                let returned = LoopInput::Returned { connection: self.id, generation, fds };
                self.inputs.send(returned).await;
                Ok(())
            }
            ConnectionCommand::Close => Err(ConnectionEnd::Over),
        }
    }
}

/// Identifies the peer process and opens a pidfd on it.
fn identify(connection: &Connection) -> std::io::Result<(WorkerProcess, OwnedFd)> {
    let peer = connection.peer()?;
    let pidfd = pidfd::of_peer(connection)?;
    let start_ticks = pidfd::start_ticks(peer.pid).unwrap_or(0);
    Ok((WorkerProcess { pid: peer.pid, uid: peer.uid, start_ticks }, pidfd))
}

/// Descriptors from a client are closed here.
fn without_fds(frame: WorkerFrame, fds: Vec<OwnedFd>) -> Result<worker_frame::Kind, ConnectionEnd> {
    if !fds.is_empty() {
        return Err(ConnectionEnd::Violation("the client sent file descriptors"));
    }
    frame.kind.ok_or(ConnectionEnd::Violation("a frame has an unknown kind"))
}

async fn send(connection: &AsyncConnection, kind: server_frame::Kind) -> Result<(), FrameError> {
    connection.send_within(SEND_TIMEOUT, &ServerFrame { kind: Some(kind) }, &[]).await
}

async fn refuse(connection: &AsyncConnection, refusal: &AttachRefusal) -> Result<(), FrameError> {
    let refused = wire::AttachRefused { reason: refusal.reason().into(), text: refusal.to_string() };
    send(connection, server_frame::Kind::Refused(refused)).await
}

/// Sends the grant, then all descriptors. One batch is outstanding at a time.
async fn deliver_descriptors(
    connection: &AsyncConnection,
    lease: u64,
    generation: u64,
    fds: &GenerationFds,
) -> Result<(), ConnectionEnd> {
    let all: Vec<BorrowedFd<'_>> = fds.all().collect();
    let grant = wire::Grant { lease, generation, fds: all.len() as u32 };
    send(connection, server_frame::Kind::Grant(grant)).await?;
    for batch in fd_batches(all.len() as u32) {
        let part = &all[batch.first as usize..(batch.first + batch.count) as usize];
        let frame = ServerFrame { kind: Some(server_frame::Kind::Fds(batch)) };
        connection.send_within(BATCH_TIMEOUT, &frame, part).await?;
        let (receipt, carried) = connection.receive_within::<WorkerFrame>(BATCH_TIMEOUT).await?;
        match without_fds(receipt, carried)? {
            worker_frame::Kind::BatchReceived(receipt) if receipt.batch == batch.batch => {}
            _ => return Err(ConnectionEnd::Violation("a batch was not acknowledged in order")),
        }
    }
    Ok(())
}

/// Asks a worker for the descriptors of its generation, and checks them as it is done with those of
/// the FD store. One batch is outstanding at a time.
async fn receive_generation(
    connection: &AsyncConnection,
    fds: u32,
) -> Result<(AdoptedGeneration, Arc<GenerationFds>), ConnectionEnd> {
    let inconsistent = |_| ConnectionEnd::Violation("returned descriptors are inconsistent");
    let mut collector = FdCollector::new(fds).map_err(inconsistent)?;
    send(connection, server_frame::Kind::ReturnRequested(wire::ReturnRequested {})).await?;
    while !collector.is_complete() {
        let (frame, fds) = connection.receive_within::<WorkerFrame>(BATCH_TIMEOUT).await?;
        let Some(worker_frame::Kind::Fds(batch)) = frame.kind else {
            return Err(ConnectionEnd::Violation("a frame came instead of descriptors"));
        };
        let receipt = collector.accept(&batch, fds).map_err(inconsistent)?;
        send(connection, server_frame::Kind::BatchReceived(receipt)).await?;
    }
    // The manifest of a large model has megabytes.
    let checked = blocking(move || adoption::read_returned(collector.into_fds())).await;
    checked.map_err(|error| {
        let cause = service::exit::one_line(&error);
        tracing::warn!(cause, "a worker returned descriptors that do not match their manifest");
        ConnectionEnd::Violation("returned descriptors do not match their manifest")
    })
}

impl From<wire::Reclaim> for LeaseClaim {
    fn from(claim: wire::Reclaim) -> Self {
        Self {
            protocol: claim.protocol,
            generation: claim.generation,
            lease: claim.lease,
            token: claim.token,
            digest: claim.digest,
            device: claim.device,
            kv_bytes: claim.kv_bytes,
            workspace_bytes: claim.workspace_bytes,
            fds: claim.fds,
            manifest_inode: claim.manifest_inode,
        }
    }
}

impl From<wire::Attach> for AttachParams {
    fn from(attach: wire::Attach) -> Self {
        Self {
            protocol: attach.protocol,
            layout: attach.layout,
            manifest_format: attach.manifest_format,
            device: attach.device,
            model: attach.model,
            token: attach.token,
            kv_bytes: attach.kv_bytes,
            workspace_bytes: attach.workspace_bytes,
        }
    }
}

impl AttachRefusal {
    pub fn reason(&self) -> wire::RefusalReason {
        use wire::RefusalReason as Reason;
        match self {
            Self::Protocol { .. } => Reason::Protocol,
            Self::Layout { .. } => Reason::Layout,
            Self::ManifestFormat { .. } => Reason::ManifestFormat,
            Self::Device { .. } => Reason::Device,
            Self::UnknownModel { .. } => Reason::UnknownModel,
            Self::LoadFailed { .. } => Reason::LoadFailed,
            Self::Token => Reason::Token,
            Self::PeerUid { .. } => Reason::PeerUid,
            Self::Reservation(_) => Reason::Ledger,
            Self::UnknownLease { .. } => Reason::UnknownLease,
            Self::Quarantined { .. } => Reason::Quarantined,
            Self::LeaseTooLarge { .. } => Reason::Ledger,
            Self::LeasesOfProcess { .. } => Reason::Ledger,
            Self::Busy { .. } | Self::NotYet { .. } => Reason::Busy,
            Self::ShuttingDown => Reason::ShuttingDown,
            Self::Violation { .. } => Reason::Violation,
        }
    }
}
