//! The state as others may see it: plain copies for the admin service.

use std::path::PathBuf;

use crate::catalog::{Contents, Generation, Integrity, Phase};
use crate::events::Notice;
use crate::lease_table::{Lease, LeasePhase};
use crate::ledger::{Row, RowKey};
use crate::state::State;

#[derive(Debug, Clone)]
pub(crate) struct GenerationView {
    pub(crate) id: u64,
    pub(crate) model: String,
    pub(crate) phase: Phase,
    pub(crate) device: String,
    pub(crate) layout: u32,
    pub(crate) path: PathBuf,
    pub(crate) contents: Contents,
    pub(crate) done_bytes: u64,
    pub(crate) adopted: bool,
    pub(crate) integrity: Integrity,
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
pub(crate) struct Snapshot {
    pub(crate) generations: Vec<GenerationView>,
    pub(crate) leases: Vec<LeaseView>,
    pub(crate) rows: Vec<(RowKey, Row)>,
    /// Capacity and reserved bytes of each.
    pub(crate) devices: Vec<(String, u64, u64)>,
    pub(crate) capacity_fds: u64,
    pub(crate) tokens_required: bool,
    pub(crate) vault: bool,
    pub(crate) violations: u64,
    pub(crate) adoption_notes: Vec<String>,
}

#[derive(Debug, Clone)]
pub(crate) enum Change {
    Generation(GenerationView),
    GenerationGone(u64),
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
        }
    }
}

impl LeaseView {
    fn of(lease: &Lease) -> Self {
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

impl Snapshot {
    pub(crate) fn of(state: &State, vault: bool, violations: u64, adoption_notes: Vec<String>) -> Self {
        Self {
            generations: state.generations().map(GenerationView::of).collect(),
            leases: state.leases().map(LeaseView::of).collect(),
            rows: state.ledger().rows().map(|(key, row)| (key, row.clone())).collect(),
            devices: state.ledger().devices().map(|(id, all, held)| (id.to_owned(), all, held)).collect(),
            capacity_fds: state.ledger().capacity_fds(),
            tokens_required: state.tokens_required(),
            vault,
            violations,
            adoption_notes,
        }
    }
}

impl Change {
    /// What a notice is about, as it is now; nothing if it is gone again already.
    pub(crate) fn of(state: &State, notice: Notice) -> Option<Self> {
        match notice {
            Notice::Generation(id) => state.generation(id).map(GenerationView::of).map(Self::Generation),
            Notice::GenerationGone(id) => Some(Self::GenerationGone(id)),
            Notice::Lease(id) => state.lease(id).map(LeaseView::of).map(Self::Lease),
            Notice::LeaseEnded(id) => Some(Self::LeaseEnded(id)),
        }
    }
}
