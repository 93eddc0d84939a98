//! Leases: how workers get them, claim them anew, and lose them. `lease_table` has the picture.

use memory::handoff::PROTOCOL;
use memory::manifest::FORMAT;

use super::{MAX_CLIENTS, MAX_LEASES_PER_PROCESS, State};
use crate::catalog::{Generation, Integrity, Phase};
use crate::events::{Action, Ask, ConnectionId, Notice, Waiter};
use crate::lease_table::{Lease, LeasePhase, Peer};
use crate::ledger::{Row, RowKey, Shortage};
use crate::refusal::Refusal;
use crate::tokens::digest;

impl State {
    pub(super) fn attach_asked(&mut self, connection: ConnectionId, peer: Peer, ask: Ask) {
        if let Err(refusal) = self.attach(connection, peer, ask) {
            self.actions.push(Action::Refuse { connection, refusal });
        }
    }

    pub(super) fn attach(&mut self, connection: ConnectionId, peer: Peer, ask: Ask) -> Result<(), Refusal> {
        let token = self.admit(&peer, &ask)?;
        let Some(generation) = self.ready(&ask.model, &ask.device) else {
            return self.wait_for_load(connection, peer, ask);
        };
        if ask.layout != generation.key.layout {
            return Err(Refusal::Layout {
                model: ask.model,
                wanted: ask.layout,
                held: generation.key.layout,
            });
        }
        let lease = Lease {
            id: self.next_lease,
            generation: generation.id,
            worker: peer,
            device: ask.device,
            kv_bytes: ask.kv_bytes,
            workspace_bytes: ask.workspace_bytes,
            token,
            phase: LeasePhase::Storing { connection },
            unsettled: false,
        };
        self.ledger.reserve(RowKey::Lease(lease.id), lease_row(&lease)).map_err(|s| too_large(s, &lease))?;
        self.next_lease += 1;
        self.actions.push(Action::StoreLease { lease: lease.id, connection, record: lease.record() });
        self.actions.push(Action::Publish(Notice::Lease(lease.id)));
        self.leases.insert(lease);
        Ok(())
    }

    /// Checks that do not depend on the model; the token's name and digest where tokens are in use.
    pub(super) fn admit(&self, peer: &Peer, ask: &Ask) -> Result<Option<(String, [u8; 32])>, Refusal> {
        if self.shutting_down {
            return Err(Refusal::ShuttingDown);
        }
        if !self.uids.contains(&peer.uid) {
            return Err(Refusal::PeerUid { uid: peer.uid });
        }
        if ask.protocol != PROTOCOL {
            return Err(Refusal::Protocol { found: ask.protocol });
        }
        let token = if self.tokens.required() {
            let digest = digest(&ask.token);
            let name = self.tokens.name_of(&digest).ok_or(Refusal::Token)?;
            Some((name.to_owned(), digest))
        } else {
            None
        };
        // A worker reads its own format and the one before.
        if !(FORMAT..=FORMAT + 1).contains(&ask.manifest_format) {
            return Err(Refusal::ManifestFormat { found: ask.manifest_format });
        }
        let leases = self.leases.of_process(peer);
        if leases >= MAX_LEASES_PER_PROCESS {
            return Err(Refusal::LeasesOfProcess { pid: peer.pid, leases });
        }
        let waiting: usize = self.generations.values().map(|generation| generation.waiters.len()).sum();
        if self.leases.len() + waiting >= MAX_CLIENTS {
            return Err(Refusal::Busy { clients: MAX_CLIENTS });
        }
        Ok(token)
    }

    pub(super) fn wait_for_load(
        &mut self,
        connection: ConnectionId,
        peer: Peer,
        ask: Ask,
    ) -> Result<(), Refusal> {
        let here = |g: &&mut Generation| g.model == ask.model && g.key.device == ask.device && g.is_pending();
        let Some(generation) = self.generations.values_mut().rfind(here) else {
            let elsewhere = |g: &&Generation| g.model == ask.model && g.phase != Phase::Retiring;
            let held = self.generations.values().find(elsewhere).map(|g| g.key.device.clone());
            return Err(match held {
                Some(held) => Refusal::Device { model: ask.model, wanted: ask.device, held },
                None => Refusal::UnknownModel { model: ask.model, known: self.known_models() },
            });
        };
        let id = generation.id;
        generation.waiters.push(Waiter::Worker { connection, peer, ask });
        self.tell_waiters(
            id,
            |waiter| matches!(waiter, Waiter::Worker { connection: c, .. } if *c == connection),
        );
        Ok(())
    }

    pub(super) fn lease_stored(&mut self, id: u64) {
        let Some(lease) = self.leases.get_mut(id) else { return };
        // A connection that broke meanwhile has moved the lease on.
        if let LeasePhase::Storing { connection } = lease.phase {
            lease.phase = LeasePhase::Granting { connection };
            self.actions.push(Action::Deliver { connection, lease: id, generation: lease.generation });
        }
    }

    pub(super) fn delivered(&mut self, connection: ConnectionId) {
        let Some(id) = self.leases.by_connection(connection).map(|lease| lease.id) else { return };
        if let Some(lease) = self.leases.get_mut(id) {
            lease.phase = LeasePhase::Held { connection };
            self.actions.push(Action::Publish(Notice::Lease(id)));
        }
    }

    pub(super) fn reclaim(
        &mut self,
        connection: ConnectionId,
        peer: &Peer,
        protocol: u32,
        generation: u64,
        lease: u64,
        token: &[u8],
    ) -> Result<(), Refusal> {
        if self.shutting_down {
            return Err(Refusal::ShuttingDown);
        }
        if protocol != PROTOCOL {
            return Err(Refusal::Protocol { found: protocol });
        }
        let digest = digest(token);
        let unknown = Refusal::UnknownLease { lease, generation };
        let Some(held) = self.leases.get_mut(lease).filter(|held| held.generation == generation) else {
            return Err(unknown);
        };
        // Who it belongs to is nobody else's business: the same answer.
        if !held.belongs_to(peer, &digest) {
            return Err(unknown);
        }
        if let Some(found) = self.generations.get(&generation)
            && found.integrity == Integrity::Quarantined
        {
            return Err(Refusal::Quarantined { model: found.model.clone(), generation });
        }
        // The worker knows better than we do that the old connection is gone.
        if let Some(old) = held.connection() {
            self.actions.push(Action::Close { connection: old });
        }
        held.phase = LeasePhase::Held { connection };
        held.unsettled = false;
        self.actions.push(Action::Reclaimed { connection, lease, generation });
        self.actions.push(Action::Publish(Notice::Lease(lease)));
        Ok(())
    }

    pub(super) fn connection_ended(&mut self, connection: ConnectionId) {
        for generation in self.generations.values_mut() {
            generation
                .waiters
                .retain(|waiter| !matches!(waiter, Waiter::Worker { connection: c, .. } if *c == connection));
        }
        let Some(id) = self.leases.by_connection(connection).map(|lease| lease.id) else { return };
        if let Some(lease) = self.leases.get_mut(id) {
            lease.phase = LeasePhase::Disconnected { since: self.now };
            self.actions.push(Action::Publish(Notice::Lease(id)));
        }
    }

    pub(super) fn end_lease(&mut self, id: u64) {
        let Some(lease) = self.leases.remove(id) else { return };
        self.ledger.release(RowKey::Lease(id));
        if let Some(connection) = lease.connection() {
            self.actions.push(Action::Close { connection });
        }
        self.actions.push(Action::ForgetLease { lease: id });
        self.actions.push(Action::Publish(Notice::LeaseEnded(id)));
        self.drop_if_unused(lease.generation);
    }
}

/// Says what would fit, where it is the KV cache that does not.
fn too_large(shortage: Shortage, lease: &Lease) -> Refusal {
    match shortage {
        Shortage::Bytes { free, .. } if free > lease.workspace_bytes => {
            let (workspace, kv_fits) = (lease.workspace_bytes, free - lease.workspace_bytes);
            Refusal::LeaseTooLarge { shortage, workspace, kv_fits }
        }
        shortage => Refusal::Ledger(shortage),
    }
}

pub(super) fn lease_row(lease: &Lease) -> Row {
    /// The connection, the record and the worker's pidfd.
    const FDS: u64 = 3;
    Row {
        device: lease.device.clone(),
        bytes: lease.kv_bytes.saturating_add(lease.workspace_bytes),
        fds: FDS,
    }
}
