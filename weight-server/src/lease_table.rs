// SPDX-License-Identifier: Apache-2.0

//! The lease table: which process holds which generation, and what it has reserved.
//!
//! ```text
//! Restoring --------- in the FD store ----------+
//!                                               v
//!          in the FD store        all descriptors taken
//! Storing ------------> Granting ------------> Held <---------------+
//!                           |  connection ended  |                  |
//!                           v                    v                  | Reclaim
//!                        Disconnected <----------+ -----------------+
//!                           |                                       |
//!                           | RECLAIM_TIMEOUT                       |
//!                           v                                       |
//!                        Orphaned ----------------------------------+
//! ```
//! Restoring is the start of a lease that this process has lost and its worker has claimed.
//!
//! A lease ends when its process has exited, and from Held also with a Detach frame. Until then its
//! memory counts as used, because the process may still have it mapped. The types here are plain
//! values; `state` changes them.

use std::collections::BTreeMap;
use std::time::Duration;

use handoff::lease_record::LeaseRecord;

use crate::ids::ConnectionId;
use crate::ledger::LedgerReservation;
use crate::tokens::TokenDigest;

/// The process at the other end of a connection, as the kernel identifies it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct WorkerProcess {
    pub pid: i32,
    pub uid: u32,
    /// The start time distinguishes the process from a later one with the same id; 0 if unknown.
    pub start_ticks: u64,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum LeasePhase {
    Restoring { connection: ConnectionId },
    Storing { connection: ConnectionId },
    Granting { connection: ConnectionId },
    Held { connection: ConnectionId },
    Disconnected { since: Duration },
    Orphaned,
}

#[derive(Debug)]
pub struct LeaseEntry {
    pub id: u64,
    pub generation: u64,
    pub worker: WorkerProcess,
    pub device: String,
    pub kv_bytes: u64,
    pub workspace_bytes: u64,
    pub token: Option<(String, TokenDigest)>,
    pub phase: LeasePhase,
    /// The lease was adopted, and its worker has not reclaimed it yet.
    pub awaiting_reclaim: bool,
}

impl LeaseEntry {
    pub fn connection(&self) -> Option<ConnectionId> {
        match self.phase {
            LeasePhase::Restoring { connection }
            | LeasePhase::Storing { connection }
            | LeasePhase::Granting { connection }
            | LeasePhase::Held { connection } => Some(connection),
            LeasePhase::Disconnected { .. } | LeasePhase::Orphaned => None,
        }
    }

    /// KV cache and workspace of the worker, and this process's descriptors for the lease.
    pub fn reservation(&self) -> LedgerReservation {
        /// The connection, the record and the worker's pidfd.
        const FDS: u64 = 3;
        LedgerReservation {
            device: self.device.clone(),
            bytes: self.kv_bytes.saturating_add(self.workspace_bytes),
            fds: FDS,
        }
    }

    pub fn record(&self) -> LeaseRecord {
        LeaseRecord {
            lease: self.id,
            generation: self.generation,
            device: self.device.clone(),
            kv_bytes: self.kv_bytes,
            workspace_bytes: self.workspace_bytes,
            uid: self.worker.uid,
            pid: self.worker.pid,
            pid_start_ticks: self.worker.start_ticks,
            token_name: self.token.as_ref().map(|(name, _)| name.clone()).unwrap_or_default(),
            token_digest: self.token.as_ref().map(|(_, digest)| *digest),
        }
    }

    pub fn adopted(record: LeaseRecord, now: Duration) -> Self {
        Self {
            id: record.lease,
            generation: record.generation,
            worker: WorkerProcess { pid: record.pid, uid: record.uid, start_ticks: record.pid_start_ticks },
            device: record.device,
            kv_bytes: record.kv_bytes,
            workspace_bytes: record.workspace_bytes,
            token: record.token_digest.map(|digest| (record.token_name, digest)),
            phase: LeasePhase::Disconnected { since: now },
            awaiting_reclaim: true,
        }
    }

    /// Whether a reclaim comes from the process to which the lease was granted.
    pub fn is_held_by(&self, peer: &WorkerProcess, token: &TokenDigest) -> bool {
        let same_process = self.worker.pid == peer.pid
            && self.worker.uid == peer.uid
            && (self.worker.start_ticks == peer.start_ticks || self.worker.start_ticks == 0);
        same_process && self.token.as_ref().is_none_or(|(_, digest)| digest == token)
    }
}

#[derive(Debug, Default)]
pub struct LeaseTable {
    leases: BTreeMap<u64, LeaseEntry>,
}

impl LeaseTable {
    pub fn insert(&mut self, lease: LeaseEntry) {
        self.leases.insert(lease.id, lease);
    }

    pub fn get(&self, id: u64) -> Option<&LeaseEntry> {
        self.leases.get(&id)
    }

    pub fn get_mut(&mut self, id: u64) -> Option<&mut LeaseEntry> {
        self.leases.get_mut(&id)
    }

    pub fn remove(&mut self, id: u64) -> Option<LeaseEntry> {
        self.leases.remove(&id)
    }

    pub fn iter(&self) -> impl Iterator<Item = &LeaseEntry> {
        self.leases.values()
    }

    pub fn iter_mut(&mut self) -> impl Iterator<Item = &mut LeaseEntry> {
        self.leases.values_mut()
    }

    pub fn find_by_connection(&self, connection: ConnectionId) -> Option<&LeaseEntry> {
        self.iter().find(|lease| lease.connection() == Some(connection))
    }

    pub fn count_of_generation(&self, generation: u64) -> usize {
        self.iter().filter(|lease| lease.generation == generation).count()
    }

    pub fn count_of_process(&self, worker: &WorkerProcess) -> usize {
        self.iter().filter(|lease| lease.worker == *worker).count()
    }

    pub fn awaiting_reclaim(&self) -> usize {
        self.iter().filter(|lease| lease.awaiting_reclaim).count()
    }

    pub(crate) fn len(&self) -> usize {
        self.leases.len()
    }
}
