// SPDX-License-Identifier: Apache-2.0

//! Grants, reclaims and ends leases. `lease_table` draws the phases of a lease.

use handoff::PROTOCOL_VERSION;
use handoff::manifest::MANIFEST_FORMAT;

use super::{MAX_CLIENTS, MAX_LEASES_PER_PROCESS, WeightServerState};
use crate::catalog::{Generation, GenerationIntegrity, GenerationPhase};
use crate::events::{ChangeNotice, WeightServerAction};
use crate::ids::ConnectionId;
use crate::lease_table::{LeaseEntry, LeasePhase, WorkerProcess};
use crate::ledger::{ReservationError, ReservationKey};
use crate::refusal::AttachRefusal;
use crate::tokens::token_digest;
use crate::waiters::{AttachParams, LeaseClaim, Waiter};

impl WeightServerState {
    pub(super) fn handle_attach_request(
        &mut self,
        connection: ConnectionId,
        peer: WorkerProcess,
        params: AttachParams,
    ) {
        if let Err(refusal) = self.try_attach(connection, peer, params) {
            self.actions.push(WeightServerAction::Refuse { connection, refusal });
        }
    }

    pub(super) fn try_attach(
        &mut self,
        connection: ConnectionId,
        peer: WorkerProcess,
        params: AttachParams,
    ) -> Result<(), AttachRefusal> {
        self.returns.settle_soon(peer.pid, self.now);
        let token = self.check_attach(&peer, &params)?;
        let Some(generation) = self.find_ready(&params.model, &params.device) else {
            return self.wait_for_load(connection, peer, params);
        };
        if params.layout != generation.key.layout {
            return Err(AttachRefusal::Layout {
                model: params.model,
                wanted: params.layout,
                held: generation.key.layout,
            });
        }
        if self.returns.are_reservations_unknown(peer.pid, self.now) {
            return Err(AttachRefusal::NotYet {
                what: "other workers have not told yet what they have reserved",
            });
        }
        let lease = LeaseEntry {
            id: self.next_lease,
            generation: generation.id,
            worker: peer,
            device: params.device,
            kv_bytes: params.kv_bytes,
            workspace_bytes: params.workspace_bytes,
            token,
            phase: LeasePhase::Storing { connection },
            awaiting_reclaim: false,
        };
        self.ledger
            .reserve(ReservationKey::Lease(lease.id), lease.reservation())
            .map_err(|s| too_large(s, &lease))?;
        self.next_lease += 1;
        self.actions.push(WeightServerAction::StoreLease {
            lease: lease.id,
            connection,
            record: lease.record(),
        });
        self.actions.push(WeightServerAction::Publish(ChangeNotice::Lease(lease.id)));
        self.leases.insert(lease);
        Ok(())
    }

    /// Checks that do not depend on the model. Returns the token's name and digest if tokens are
    /// required.
    pub(super) fn check_attach(
        &self,
        peer: &WorkerProcess,
        params: &AttachParams,
    ) -> Result<Option<(String, [u8; 32])>, AttachRefusal> {
        if self.shutting_down {
            return Err(AttachRefusal::ShuttingDown);
        }
        if !self.uids.contains(&peer.uid) {
            return Err(AttachRefusal::PeerUid { uid: peer.uid });
        }
        if params.protocol != PROTOCOL_VERSION {
            return Err(AttachRefusal::Protocol { found: params.protocol });
        }
        let token = if self.tokens.required() {
            let digest = token_digest(&params.token);
            let name = self.tokens.name_of(&digest).ok_or(AttachRefusal::Token)?;
            Some((name.to_owned(), digest))
        } else {
            None
        };
        // A worker reads its own format and the one before.
        if !(MANIFEST_FORMAT..=MANIFEST_FORMAT + 1).contains(&params.manifest_format) {
            return Err(AttachRefusal::ManifestFormat { found: params.manifest_format });
        }
        let leases = self.leases.count_of_process(peer);
        if leases >= MAX_LEASES_PER_PROCESS {
            return Err(AttachRefusal::LeasesOfProcess { pid: peer.pid, leases });
        }
        let waiting: usize = self.generations.values().map(|generation| generation.waiters.len()).sum();
        if self.leases.len() + waiting >= MAX_CLIENTS {
            return Err(AttachRefusal::Busy { clients: MAX_CLIENTS });
        }
        Ok(token)
    }

    pub(super) fn wait_for_load(
        &mut self,
        connection: ConnectionId,
        peer: WorkerProcess,
        params: AttachParams,
    ) -> Result<(), AttachRefusal> {
        let here =
            |g: &&mut Generation| g.model == params.model && g.key.device == params.device && g.is_pending();
        let Some(generation) = self.generations.values_mut().rfind(here) else {
            let elsewhere = |g: &&Generation| g.model == params.model && g.phase != GenerationPhase::Retiring;
            let held = self.generations.values().find(elsewhere).map(|g| g.key.device.clone());
            return Err(match held {
                Some(held) => AttachRefusal::Device { model: params.model, wanted: params.device, held },
                None => AttachRefusal::UnknownModel { model: params.model, known: self.list_models() },
            });
        };
        let id = generation.id;
        generation.waiters.push(Waiter::Worker { connection, peer, params });
        self.report_progress(
            id,
            |waiter| matches!(waiter, Waiter::Worker { connection: c, .. } if *c == connection),
        );
        Ok(())
    }

    pub(super) fn handle_lease_stored(&mut self, id: u64) {
        let Some(lease) = self.leases.get_mut(id) else { return };
        let generation = lease.generation;
        // If the connection has ended in the meantime, the lease is in another phase.
        match lease.phase {
            LeasePhase::Storing { connection } => {
                lease.phase = LeasePhase::Granting { connection };
                self.actions.push(WeightServerAction::Deliver { connection, lease: id, generation });
            }
            LeasePhase::Restoring { connection } => {
                lease.phase = LeasePhase::Held { connection };
                self.actions.push(WeightServerAction::Reclaimed { connection, lease: id, generation });
                self.actions.push(WeightServerAction::Publish(ChangeNotice::Lease(id)));
            }
            _ => {}
        }
    }

    pub(super) fn handle_delivered(&mut self, connection: ConnectionId) {
        let Some(id) = self.leases.find_by_connection(connection).map(|lease| lease.id) else { return };
        let lease = self.leases.get_mut(id).expect("invariant: a lease found by its connection exists");
        lease.phase = LeasePhase::Held { connection };
        self.actions.push(WeightServerAction::Publish(ChangeNotice::Lease(id)));
    }

    pub(super) fn reclaim(
        &mut self,
        connection: ConnectionId,
        peer: WorkerProcess,
        claim: LeaseClaim,
    ) -> Result<(), AttachRefusal> {
        if self.shutting_down {
            return Err(AttachRefusal::ShuttingDown);
        }
        if claim.protocol != PROTOCOL_VERSION {
            return Err(AttachRefusal::Protocol { found: claim.protocol });
        }
        let LeaseClaim { generation, lease, .. } = claim;
        let digest = token_digest(&claim.token);
        let Some(held) = self.leases.get_mut(lease).filter(|held| held.generation == generation) else {
            return self.reclaim_lost(connection, peer, claim);
        };
        // The reply does not reveal that the lease exists.
        if !held.is_held_by(&peer, &digest) {
            return Err(AttachRefusal::UnknownLease { lease, generation });
        }
        if let Some(found) = self.generations.get(&generation)
            && found.integrity == GenerationIntegrity::Quarantined
        {
            return Err(AttachRefusal::Quarantined { model: found.model.clone(), generation });
        }
        // The worker has noticed the end of the old connection before this process did.
        if let Some(old) = held.connection() {
            self.actions.push(WeightServerAction::Close { connection: old });
        }
        held.phase = LeasePhase::Held { connection };
        held.awaiting_reclaim = false;
        self.actions.push(WeightServerAction::Reclaimed { connection, lease, generation });
        self.actions.push(WeightServerAction::Publish(ChangeNotice::Lease(lease)));
        Ok(())
    }

    pub(super) fn handle_connection_ended(&mut self, connection: ConnectionId) {
        self.returns.cancel(connection);
        for generation in self.generations.values_mut() {
            generation
                .waiters
                .retain(|waiter| !matches!(waiter, Waiter::Worker { connection: c, .. } if *c == connection));
        }
        let Some(id) = self.leases.find_by_connection(connection).map(|lease| lease.id) else { return };
        let lease = self.leases.get_mut(id).expect("invariant: a lease found by its connection exists");
        lease.phase = LeasePhase::Disconnected { since: self.now };
        self.actions.push(WeightServerAction::Publish(ChangeNotice::Lease(id)));
    }

    pub(super) fn end_lease(&mut self, id: u64) {
        let Some(lease) = self.leases.remove(id) else { return };
        self.ledger.release(ReservationKey::Lease(id));
        if let Some(connection) = lease.connection() {
            self.actions.push(WeightServerAction::Close { connection });
        }
        self.actions.push(WeightServerAction::RemoveLease { lease: id });
        self.actions.push(WeightServerAction::Publish(ChangeNotice::LeaseEnded(id)));
        self.drop_if_unused(lease.generation);
    }
}

/// If the KV cache does not fit, the refusal says what would.
fn too_large(shortage: ReservationError, lease: &LeaseEntry) -> AttachRefusal {
    match shortage {
        ReservationError::InsufficientMemory { free, .. } if free > lease.workspace_bytes => {
            let (workspace, kv_fits) = (lease.workspace_bytes, free - lease.workspace_bytes);
            AttachRefusal::LeaseTooLarge { shortage, workspace, kv_fits }
        }
        shortage => AttachRefusal::Reservation(shortage),
    }
}
