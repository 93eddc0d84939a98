// SPDX-License-Identifier: Apache-2.0

//! [`LeaseGuard`]: a worker's lease, which a thread claims again after a restart of the
//! weight-server.
//!
//! ```text
//!          connection breaks             successor answers
//!   Held ---------------------> Broken ---------------------> Held
//!     |                           | successor does not know the lease
//!     | revoked                   v
//!     +------------------------> Lost
//! ```
//! The mappings stay in every state, so the worker keeps serving.
//!
//! The guard also keeps the model's descriptors. If supervisor and weight-server have died
//! together, the workers are all that is left of a model: the successor asks one of them for the
//! descriptors (ReturnRequested), and nothing is loaded a second time.

use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::path::{Path, PathBuf};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::thread::JoinHandle;
use std::time::Duration;

use memory::mapping::MappingWatch;
use proto::weights::v1::{self as wire, RefusalReason, server_frame, worker_frame};

use crate::attach_error::AttachModelError;
use crate::claim_retry::{ClaimAnswer, ClaimRetry, ClaimStep};
use crate::fd_batches::fd_batches;
use crate::frames::{SEND_TIMEOUT, receive, send, unexpected};
use crate::seqpacket::Connection;

/// A successor answers a re-claim from its tables, without loading.
const RECLAIM_TIMEOUT: Duration = Duration::from_secs(10);

#[derive(Debug, Clone, PartialEq, Eq)]
pub enum LeaseStatus {
    /// The weight-server counts this worker's memory.
    Held,
    /// The weight-server is gone; the lease has been re-claimed this many times without success.
    Broken { attempts: u32 },
    /// The successor does not know the lease: the ledger does not count this worker, whose mappings
    /// alone keep the weights. Or the weights were found damaged.
    Lost { reason: RefusalReason, text: String },
}

/// Holds the lease until it is dropped. Drop the tensors first: only then is their memory reported
/// as unmapped.
#[derive(Debug)]
pub struct LeaseGuard {
    id: u64,
    generation: u64,
    shared: Arc<WatchedLease>,
    mappings: MappingWatch,
    thread: Option<JoinHandle<()>>,
}

#[derive(Debug)]
struct WatchedLease {
    state: Mutex<LeaseState>,
    wake: Condvar,
}

#[derive(Debug)]
struct LeaseState {
    status: LeaseStatus,
    /// The connection on which the thread waits.
    connection: Arc<Connection>,
    /// The manifest and every allocation; empty when the lease is released or lost.
    returnable: Arc<Vec<OwnedFd>>,
    released: bool,
}

impl WatchedLease {
    fn lock(&self) -> MutexGuard<'_, LeaseState> {
        // Nothing that holds the lock can panic half way through a change.
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn lose(&self, reason: RefusalReason, text: String) {
        let mut state = self.lock();
        state.status = LeaseStatus::Lost { reason, text };
        state.returnable = Arc::default();
    }
}

/// How to claim the lease from a successor.
struct ReclaimRequest {
    socket: PathBuf,
    frame: wire::Reclaim,
}

impl LeaseGuard {
    pub(crate) fn hold(
        connection: Connection,
        socket: &Path,
        claim: wire::Reclaim,
        returnable: Vec<OwnedFd>,
        mappings: MappingWatch,
    ) -> io::Result<Self> {
        connection.set_timeouts(None, Some(SEND_TIMEOUT))?;
        let connection = Arc::new(connection);
        let state = LeaseState {
            status: LeaseStatus::Held,
            connection: Arc::clone(&connection),
            returnable: Arc::new(returnable),
            released: false,
        };
        let shared = Arc::new(WatchedLease { state: Mutex::new(state), wake: Condvar::new() });
        let (id, generation) = (claim.lease, claim.generation);
        let claim = ReclaimRequest { socket: socket.to_owned(), frame: claim };
        let watcher = Arc::clone(&shared);
        let thread = std::thread::Builder::new()
            .name(format!("lease-{id}"))
            .spawn(move || watch(&watcher, connection, &claim))?;
        Ok(Self { id, generation, shared, mappings, thread: Some(thread) })
    }

    pub fn id(&self) -> u64 {
        self.id
    }

    pub fn generation(&self) -> u64 {
        self.generation
    }

    pub fn status(&self) -> LeaseStatus {
        self.shared.lock().status.clone()
    }
}

impl Drop for LeaseGuard {
    fn drop(&mut self) {
        let connection = {
            let mut state = self.shared.lock();
            state.released = true;
            // A descriptor keeps memory alive as a mapping does.
            state.returnable = Arc::default();
            Arc::clone(&state.connection)
        };
        // Without this frame the weight-server keeps the lease until this process ends, which is
        // right while anything is still mapped.
        if self.mappings.is_unmapped() {
            // If the connection is broken, the end of the process releases the lease.
            let _ = send(&connection, worker_frame::Kind::Detach(wire::Detach {}));
        }
        connection.shutdown();
        self.shared.wake.notify_all();
        if let Some(thread) = self.thread.take() {
            // The thread has no result, and a panic in it has been reported.
            let _ = thread.join();
        }
    }
}

/// The thread: waits for the end of each connection and then claims the lease again.
fn watch(shared: &WatchedLease, mut connection: Arc<Connection>, claim: &ReclaimRequest) {
    loop {
        // On a held lease, a refusal means that the lease is lost. Other frames, of later servers,
        // are ignored.
        while let Ok((frame, _)) = connection.receive::<wire::ServerFrame>() {
            if let Some(server_frame::Kind::Refused(refused)) = frame.kind {
                return shared.lose(refused.reason(), refused.text);
            }
        }
        match reclaim(shared, claim) {
            Some(next) => connection = next,
            None => return,
        }
    }
}

/// Claims the lease until it is held again. Returns `None` if it is released or lost meanwhile.
fn reclaim(shared: &WatchedLease, claim: &ReclaimRequest) -> Option<Arc<Connection>> {
    let mut retry = ClaimRetry::default();
    for attempts in 0.. {
        let mut state = shared.lock();
        if state.released {
            return None;
        }
        state.status = LeaseStatus::Broken { attempts };
        let (state, _) = shared
            .wake
            .wait_timeout_while(state, retry.next_wait(), |state| !state.released)
            .unwrap_or_else(PoisonError::into_inner);
        let (released, returnable) = (state.released, Arc::clone(&state.returnable));
        drop(state);
        if released {
            return None;
        }
        let (answer, claimed) = match try_reclaim(claim, &returnable) {
            Ok(connection) => (ClaimAnswer::Reclaimed, Ok(connection)),
            Err(AttachModelError::Refused { reason, text }) => (ClaimAnswer::Refused(reason), Err(text)),
            Err(error) => (ClaimAnswer::Nothing, Err(error.to_string())),
        };
        match (ClaimRetry::handle(answer), claimed) {
            (ClaimStep::Held, Ok(connection)) => {
                let connection = Arc::new(connection);
                let mut state = shared.lock();
                if state.released {
                    return None;
                }
                state.status = LeaseStatus::Held;
                state.connection = Arc::clone(&connection);
                return Some(connection);
            }
            (ClaimStep::Lost(reason), Err(text)) => {
                shared.lose(reason, text);
                return None;
            }
            _ => {}
        }
    }
    None
}

fn try_reclaim(claim: &ReclaimRequest, returnable: &[OwnedFd]) -> Result<Connection, AttachModelError> {
    let connection = Connection::connect(&claim.socket)?;
    connection.set_timeouts(Some(RECLAIM_TIMEOUT), Some(SEND_TIMEOUT)).map_err(AttachModelError::Lease)?;
    send(&connection, worker_frame::Kind::Reclaim(claim.frame.clone()))?;
    let mut answer = receive(&connection)?.0;
    if let server_frame::Kind::ReturnRequested(_) = answer {
        return_descriptors(&connection, returnable)?;
        answer = receive(&connection)?.0;
    }
    match answer {
        server_frame::Kind::Reclaimed(_) => {}
        other => return Err(unexpected("a re-claim's answer", other)),
    }
    connection.set_timeouts(None, Some(SEND_TIMEOUT)).map_err(AttachModelError::Lease)?;
    Ok(connection)
}

/// Sends the descriptors back. One batch is outstanding at a time.
fn return_descriptors(connection: &Connection, returnable: &[OwnedFd]) -> Result<(), AttachModelError> {
    for batch in fd_batches(returnable.len() as u32) {
        let part = &returnable[batch.first as usize..(batch.first + batch.count) as usize];
        let part: Vec<BorrowedFd<'_>> = part.iter().map(AsFd::as_fd).collect();
        let frame = wire::WorkerFrame { kind: Some(worker_frame::Kind::Fds(batch)) };
        connection.send(&frame, &part)?;
        match receive(connection)?.0 {
            server_frame::Kind::BatchReceived(receipt) if receipt.batch == batch.batch => {}
            other => return Err(unexpected("an acknowledgement", other)),
        }
    }
    Ok(())
}
