// SPDX-License-Identifier: Apache-2.0

//! Copies of the state for the admin service: status snapshots and change events.

use std::path::PathBuf;

use memory::numa::node_of_device;

use crate::catalog::{BytesSource, Generation, GenerationContents, GenerationIntegrity, GenerationPhase};
use crate::events::ChangeNotice;
use crate::lease_table::{LeaseEntry, LeasePhase};
use crate::ledger::{LedgerReservation, ReservationKey};
use crate::state::WeightServerState;

#[derive(Debug, Clone)]
pub(crate) struct GenerationView {
    pub(crate) id: u64,
    pub(crate) model: String,
    pub(crate) phase: GenerationPhase,
    pub(crate) device: String,
    pub(crate) layout: u32,
    pub(crate) path: PathBuf,
    pub(crate) contents: GenerationContents,
    pub(crate) done_bytes: u64,
    pub(crate) adopted: bool,
    pub(crate) integrity: GenerationIntegrity,
    /// The device that the bytes were copied from.
    pub(crate) copied_from: Option<String>,
}

#[derive(Debug, Clone)]
pub(crate) struct LeaseView {
    pub(crate) id: u64,
    pub(crate) generation: u64,
    pub(crate) phase: LeasePhase,
    pub(crate) uid: u32,
    pub(crate) pid: i32,
    pub(crate) token_name: String,
    pub(crate) kv_bytes: u64,
    pub(crate) workspace_bytes: u64,
}

#[derive(Debug)]
pub(crate) struct StatusSnapshot {
    pub(crate) generations: Vec<GenerationView>,
    pub(crate) leases: Vec<LeaseView>,
    pub(crate) reservations: Vec<(ReservationKey, LedgerReservation)>,
    /// Capacity and reserved bytes of each device.
    pub(crate) devices: Vec<(String, u64, u64)>,
    /// GPUs whose reservations count on the host.
    pub(crate) unified_devices: Vec<String>,
    pub(crate) capacity_fds: u64,
    pub(crate) tokens_required: bool,
    pub(crate) registered_tokens: usize,
    pub(crate) fd_store: bool,
    pub(crate) violations: u64,
    pub(crate) adoption_notes: Vec<String>,
}

#[derive(Debug, Clone)]
pub(crate) enum CatalogChange {
    Generation(GenerationView),
    GenerationRemoved(u64),
    Lease(LeaseView),
    LeaseEnded(u64),
}

impl GenerationView {
    fn of(generation: &Generation) -> Self {
        Self {
            id: generation.id,
            model: generation.model.clone(),
            phase: generation.phase,
            device: generation.key.device.clone(),
            layout: generation.key.layout,
            path: generation.path(),
            contents: generation.contents.clone(),
            done_bytes: generation.done_bytes,
            adopted: generation.adopted,
            integrity: generation.integrity,
            copied_from: match &generation.source {
                BytesSource::Copy { device, .. } => Some(device.clone()),
                BytesSource::Files => None,
            },
        }
    }
}

impl LeaseView {
    fn of(lease: &LeaseEntry) -> Self {
        Self {
            id: lease.id,
            generation: lease.generation,
            phase: lease.phase,
            uid: lease.worker.uid,
            pid: lease.worker.pid,
            token_name: lease.token.as_ref().map(|(name, _)| name.clone()).unwrap_or_default(),
            kv_bytes: lease.kv_bytes,
            workspace_bytes: lease.workspace_bytes,
        }
    }
}

impl StatusSnapshot {
    pub(crate) fn of(
        state: &WeightServerState,
        fd_store: bool,
        violations: u64,
        adoption_notes: Vec<String>,
    ) -> Self {
        Self {
            generations: state.generations().map(GenerationView::of).collect(),
            leases: state.leases().map(LeaseView::of).collect(),
            reservations: state
                .ledger()
                .reservations()
                .map(|(key, reservation)| (key, reservation.clone()))
                .collect(),
            // A node that no model names is only a part of the host.
            devices: state
                .ledger()
                .devices()
                .filter(|(id, _, held)| *held > 0 || node_of_device(id).is_none())
                .map(|(id, all, held)| (id.to_owned(), all, held))
                .collect(),
            unified_devices: state.ledger().unified().map(str::to_owned).collect(),
            capacity_fds: state.ledger().capacity_fds(),
            tokens_required: state.tokens_required(),
            registered_tokens: state.registered_tokens(),
            fd_store,
            violations,
            adoption_notes,
        }
    }
}

impl CatalogChange {
    /// The current state of what the notice is about; `None` if it has been removed.
    pub(crate) fn of(state: &WeightServerState, notice: ChangeNotice) -> Option<Self> {
        match notice {
            ChangeNotice::Generation(id) => {
                state.generation(id).map(GenerationView::of).map(Self::Generation)
            }
            ChangeNotice::GenerationRemoved(id) => Some(Self::GenerationRemoved(id)),
            ChangeNotice::Lease(id) => state.lease(id).map(LeaseView::of).map(Self::Lease),
            ChangeNotice::LeaseEnded(id) => Some(Self::LeaseEnded(id)),
        }
    }
}
