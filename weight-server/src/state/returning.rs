// SPDX-License-Identifier: Apache-2.0

//! Takes generations and leases back from workers, after the FD store was lost together with the
//! earlier weight-server.
//!
//! ```text
//! Reclaim of a lease that is not known here
//!   | its generation is known ------------------------------------------------+
//!   | its generation is not known                                              |
//!   v                                                                          |
//! RequestReturn ----> GenerationReturned: the worker's descriptors are those   |
//!   |                   of their manifest                                      |
//!   | the connection      |                                                    v
//!   | ends                +---> adopted; a load of the same bytes stops ---> Restoring --> Held
//!   v
//! the next worker that claims a lease of this generation is asked
//! ```
//! Until every living worker has claimed its leases, attached, or exited, loads and unloads wait:
//! what they would load may be resident. A worker that is stopped is awaited for a bounded time.
//! New leases wait too, for a shorter time: the ledger does not count yet what these workers
//! reserve.
//!
//! Whom to trust: a worker that returns a generation needs an allowed user id and, where tokens are
//! in use, a registered token. Host memory comes sealed, with the sizes and inodes of its manifest;
//! the checksums of what is returned are computed again.

use std::collections::BTreeMap;
use std::time::Duration;

use handoff::fd_batches::MAX_HANDOFF_FDS;
use memory::manifest::HOST_DEVICE;

use super::{
    MAX_CLIENTS, MAX_LEASES_PER_PROCESS, RECLAIM_TIMEOUT, UNKNOWN_RESERVATIONS_WAIT, WeightServerState,
};
use crate::catalog::{Generation, GenerationContents, GenerationIntegrity, GenerationPhase, LoadKey};
use crate::events::{AdoptedGeneration, ChangeNotice, WeightServerAction};
use crate::ids::ConnectionId;
use crate::lease_table::{LeaseEntry, LeasePhase, WorkerProcess};
use crate::ledger::ReservationKey;
use crate::refusal::{AttachRefusal, VerifyFailure};
use crate::tokens::token_digest;
use crate::waiters::{LeaseClaim, Waiter};

/// Generations that workers return at the same time. Each may bring thousands of descriptors.
const MAX_RETURNS: usize = 8;

/// The highest number of a generation or of a lease that a claim may name. A claim raises the next
/// number, and half of all numbers stay for what is granted here.
pub(super) const MAX_CLAIMED_ID: u64 = u64::MAX / 2;

/// A worker that has claimed one lease claims its others (a draft model's) this soon: its attempts
/// are at most a second apart.
const SETTLE_TIME: Duration = Duration::from_secs(2);

#[derive(Debug)]
struct PendingReturn {
    connection: ConnectionId,
    peer: WorkerProcess,
    claim: LeaseClaim,
}

/// Which workers may still return something, and which are asked to.
#[derive(Debug, Default)]
pub(super) struct GenerationReturns {
    /// Until then a supervisor may not have registered all tokens yet.
    tokens_until: Duration,
    /// Until then new leases wait for the workers below.
    reservations_until: Duration,
    /// By process id, until when the worker is awaited.
    awaited: BTreeMap<i32, Duration>,
    /// By generation.
    pending: BTreeMap<u64, PendingReturn>,
}

impl GenerationReturns {
    pub(super) fn awaiting(workers: &[WorkerProcess], now: Duration) -> Self {
        let until = now + RECLAIM_TIMEOUT;
        let awaited = workers.iter().map(|worker| (worker.pid, until)).collect();
        let reservations_until = now + UNKNOWN_RESERVATIONS_WAIT;
        Self { tokens_until: until, reservations_until, awaited, pending: BTreeMap::new() }
    }

    /// Whether workers other than this one may hold memory that the ledger does not count.
    pub(super) fn are_reservations_unknown(&self, pid: i32, now: Duration) -> bool {
        let returning = self.pending.values().map(|pending| pending.peer.pid);
        now < self.reservations_until && self.awaited.keys().copied().chain(returning).any(|of| of != pid)
    }

    pub(super) fn is_awaited(&self, pid: i32) -> bool {
        self.awaited.contains_key(&pid)
    }

    /// The worker has exited.
    pub(super) fn settle(&mut self, pid: i32) {
        self.awaited.remove(&pid);
    }

    /// The worker has connected: it returns everything soon.
    pub(super) fn settle_soon(&mut self, pid: i32, now: Duration) {
        if let Some(until) = self.awaited.get_mut(&pid) {
            *until = (*until).min(now + SETTLE_TIME);
        }
    }

    pub(super) fn expire(&mut self, now: Duration) {
        self.awaited.retain(|_, until| *until > now);
    }

    /// A worker that was asked for descriptors has gone: the next one is asked.
    pub(super) fn cancel(&mut self, connection: ConnectionId) {
        self.pending.retain(|_, pending| pending.connection != connection);
    }
}

/// Whether the claim is about this load of a model.
fn names(claim: &LeaseClaim, contents: &GenerationContents, key: &LoadKey) -> bool {
    contents.digest.is_some_and(|digest| claim.digest == digest[..])
        && contents.manifest_inode == claim.manifest_inode
        && key.device == claim.device
}

impl WeightServerState {
    /// Workers that may still claim leases, known ones or lost ones.
    pub(super) fn workers_to_reclaim(&self) -> usize {
        self.leases.awaiting_reclaim() + self.returns.awaited.len() + self.returns.pending.len()
    }

    /// A claim of a lease that this process does not know.
    pub(super) fn reclaim_lost(
        &mut self,
        connection: ConnectionId,
        peer: WorkerProcess,
        claim: LeaseClaim,
    ) -> Result<(), AttachRefusal> {
        self.check_claim(&peer, &claim)?;
        let unknown = AttachRefusal::UnknownLease { lease: claim.lease, generation: claim.generation };
        match self.generations.get(&claim.generation) {
            Some(found) if found.integrity == GenerationIntegrity::Quarantined => {
                Err(AttachRefusal::Quarantined { model: found.model.clone(), generation: found.id })
            }
            Some(found) => {
                if found.is_pending() || !names(&claim, &found.contents, &found.key) {
                    return Err(unknown);
                }
                self.restore_lease(connection, peer, claim);
                Ok(())
            }
            None => self.request_return(connection, peer, claim),
        }
    }

    /// Checks who claims.
    fn check_claim(&self, peer: &WorkerProcess, claim: &LeaseClaim) -> Result<(), AttachRefusal> {
        if !self.uids.contains(&peer.uid) {
            return Err(AttachRefusal::PeerUid { uid: peer.uid });
        }
        // A lease of another process has this number, or the worker has nothing to return.
        let is_unknown = self.leases.get(claim.lease).is_some() || claim.fds == 0;
        if is_unknown || claim.lease.max(claim.generation) > MAX_CLAIMED_ID {
            return Err(AttachRefusal::UnknownLease { lease: claim.lease, generation: claim.generation });
        }
        if self.tokens.required() && self.tokens.name_of(&token_digest(&claim.token)).is_none() {
            return Err(match self.now < self.returns.tokens_until {
                true => AttachRefusal::NotYet { what: "the token of this worker is not registered yet" },
                false => AttachRefusal::Token,
            });
        }
        let leases = self.leases.count_of_process(peer);
        if leases >= MAX_LEASES_PER_PROCESS {
            return Err(AttachRefusal::LeasesOfProcess { pid: peer.pid, leases });
        }
        if self.leases.len() >= MAX_CLIENTS {
            return Err(AttachRefusal::Busy { clients: MAX_CLIENTS });
        }
        Ok(())
    }

    fn request_return(
        &mut self,
        connection: ConnectionId,
        peer: WorkerProcess,
        claim: LeaseClaim,
    ) -> Result<(), AttachRefusal> {
        let (generation, fds) = (claim.generation, claim.fds);
        let too_many = fds > MAX_HANDOFF_FDS || u64::from(fds) > self.ledger.free_fds();
        if too_many || generation == 0 {
            return Err(AttachRefusal::UnknownLease { lease: claim.lease, generation });
        }
        if self.returns.pending.contains_key(&generation) || self.returns.pending.len() >= MAX_RETURNS {
            return Err(AttachRefusal::NotYet { what: "another worker is returning its weights" });
        }
        self.next_generation = self.next_generation.max(generation + 1);
        self.returns.pending.insert(generation, PendingReturn { connection, peer, claim });
        self.actions.push(WeightServerAction::RequestReturn { connection, fds });
        Ok(())
    }

    pub(super) fn handle_generation_returned(
        &mut self,
        connection: ConnectionId,
        generation: AdoptedGeneration,
    ) {
        let id = generation.id;
        let asked = self.returns.pending.iter().find(|(_, pending)| pending.connection == connection);
        let asked = asked.map(|(generation, _)| *generation);
        let pending = asked.and_then(|asked| self.returns.pending.remove(&asked));
        let is_claimed = |pending: &PendingReturn| {
            pending.claim.generation == id && names(&pending.claim, &generation.contents, &generation.key)
        };
        let refusal = match &pending {
            // The connection has ended in the meantime.
            None => None,
            Some(_) if self.shutting_down => Some(AttachRefusal::ShuttingDown),
            Some(pending) if !is_claimed(pending) => {
                Some(AttachRefusal::Violation { what: "another generation was returned than was claimed" })
            }
            // The number was granted or claimed by another worker while the descriptors came.
            Some(PendingReturn { claim, .. }) if self.leases.get(claim.lease).is_some() => {
                Some(AttachRefusal::UnknownLease { lease: claim.lease, generation: id })
            }
            Some(_) => None,
        };
        let (Some(PendingReturn { peer, claim, .. }), None) = (pending, &refusal) else {
            self.actions.extend(refusal.map(|refusal| WeightServerAction::Refuse { connection, refusal }));
            return self.discard_returned(id);
        };
        let waiters = self.cancel_loads_of(&generation);
        if self.host_capacity_is_measured && self.ledger.takes_host_memory(&generation.key.device) {
            let held = generation.contents.reservation(&generation.key.device).bytes;
            self.ledger.raise_capacity(HOST_DEVICE, held);
        }
        self.adopt_generation(generation);
        if let Some(adopted) = self.generations.get_mut(&id) {
            adopted.integrity = GenerationIntegrity::Unverified;
        }
        self.actions.push(WeightServerAction::StoreGeneration { generation: id });
        self.actions.push(WeightServerAction::Publish(ChangeNotice::Generation(id)));
        self.restore_lease(connection, peer, claim);
        self.retire_replaced_generations();
        for waiter in waiters {
            match waiter {
                Waiter::Call(call) => self.reply_resident(call, id),
                Waiter::Worker { connection, peer, params } => {
                    self.handle_attach_request(connection, peer, params)
                }
            }
        }
        self.start_loaders();
        self.start_verifiers();
    }

    /// Closes the descriptors of a return that is not wanted, unless descriptors of a generation
    /// with this number are held. A load has none before its hand-over.
    fn discard_returned(&mut self, id: u64) {
        let has_fds = |g: &Generation| g.phase != GenerationPhase::Queued && !g.occupies_loader();
        if !self.generations.get(&id).is_some_and(has_fds) {
            self.actions.push(WeightServerAction::RemoveGeneration { generation: id });
        }
    }

    /// Stops loads of the bytes that were just returned, and returns their waiters.
    fn cancel_loads_of(&mut self, returned: &AdoptedGeneration) -> Vec<Waiter> {
        let same = self
            .generations
            .values()
            .filter(|g| g.is_pending() && g.model == returned.model && g.key.is_same(&returned.key));
        let same: Vec<(u64, GenerationPhase)> = same.map(|g| (g.id, g.phase)).collect();
        let mut waiters = Vec::new();
        for (id, phase) in same {
            self.cancel_verification(id, &VerifyFailure::Unloaded);
            self.actions.push(match phase {
                GenerationPhase::Storing => WeightServerAction::RemoveGeneration { generation: id },
                _ => WeightServerAction::StopLoader { generation: id },
            });
            self.ledger.release(ReservationKey::Loading(id));
            let gone = self.generations.remove(&id);
            let source = gone.as_ref().and_then(Generation::copies_from);
            waiters.extend(gone.into_iter().flat_map(|gone| gone.waiters));
            if let Some(source) = source {
                self.end_copy(id, source);
            }
            self.actions.push(WeightServerAction::Publish(ChangeNotice::GenerationRemoved(id)));
        }
        waiters
    }

    /// The memory of the lease is in use already, so it is reserved whatever the capacity is.
    fn restore_lease(&mut self, connection: ConnectionId, peer: WorkerProcess, claim: LeaseClaim) {
        let digest = token_digest(&claim.token);
        let lease = LeaseEntry {
            id: claim.lease,
            generation: claim.generation,
            worker: peer,
            device: claim.device,
            kv_bytes: claim.kv_bytes,
            workspace_bytes: claim.workspace_bytes,
            token: self.tokens.name_of(&digest).map(|name| (name.to_owned(), digest)),
            phase: LeasePhase::Restoring { connection },
            awaiting_reclaim: false,
        };
        self.next_lease = self.next_lease.max(lease.id + 1);
        self.ledger.reserve_unchecked(ReservationKey::Lease(lease.id), lease.reservation());
        let (id, record) = (lease.id, lease.record());
        self.actions.push(WeightServerAction::StoreLease { lease: id, connection, record });
        self.actions.push(WeightServerAction::Publish(ChangeNotice::Lease(id)));
        self.leases.insert(lease);
        self.returns.settle_soon(peer.pid, self.now);
    }
}
