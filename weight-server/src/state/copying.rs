// SPDX-License-Identifier: Apache-2.0

//! Decides where a load takes its bytes from: its files, or the copy of the same files on another
//! device. docs/decisions/0052-further-copies-come-from-the-first.md has the reasons.
//!
//! ```text
//! Starting --plan reserved--> Loading from a copy    a copy is ready
//!                      '----> AwaitingSource         a copy is being made
//!                      '----> Loading from the files
//! AwaitingSource -----------> Loading                the copy is ready, or has failed
//! Loading from a copy ------> Queued                 it failed: the files are read, once
//! ```
//! Invariants:
//! 1. A load waits for a loader that works: one that reads files, copies, or has not planned yet.
//!    So no loads wait for each other.
//! 2. The source of a copy stays until its loader is done. Its reservation is `Copying`.

use memory::numa::is_host_device;

use super::WeightServerState;
use super::loading::context_bytes;
use crate::catalog::{BytesSource, Generation, GenerationIntegrity, GenerationPhase};
use crate::events::{ChangeNotice, WeightServerAction};
use crate::ledger::{LedgerReservation, ReservationKey};
use crate::refusal::{LoadFailure, LoaderErrorKind};

enum SourceChoice {
    Files,
    Wait,
    Copy { source: u64, device: String, context_bytes: u64 },
}

impl WeightServerState {
    /// Lets a loader whose plan is reserved begin, or wait for a copy of the same files.
    pub(super) fn begin_loading(&mut self, id: u64) {
        let choice = self.choose_source(id);
        let action = match choice {
            SourceChoice::Wait => None,
            SourceChoice::Files => Some(WeightServerAction::Proceed { generation: id }),
            SourceChoice::Copy { source, device, context_bytes } => {
                let row = LedgerReservation { device: device.clone(), bytes: context_bytes, fds: 0 };
                match self.ledger.reserve(ReservationKey::Copying(id), row) {
                    Ok(()) => {
                        self.pending(id).source = BytesSource::Copy { generation: source, device };
                        Some(WeightServerAction::ProceedCopying { generation: id, source })
                    }
                    // The source's device has no room for the loader's context.
                    Err(shortage) => {
                        self.report_copy_failure(id, source, shortage.into());
                        self.pending(id).reads_files = true;
                        Some(WeightServerAction::Proceed { generation: id })
                    }
                }
            }
        };
        let now = self.now;
        let generation = self.pending(id);
        generation.progressed_at = now;
        generation.phase = match action {
            Some(_) => GenerationPhase::Loading,
            None => GenerationPhase::AwaitingSource,
        };
        self.actions.extend(action);
        self.actions.push(WeightServerAction::Publish(ChangeNotice::Generation(id)));
    }

    /// Lets every load begin whose source is ready or gone, the oldest first.
    pub(super) fn resume_waiting_loads(&mut self) {
        let waiting = self.generations.values().filter(|g| g.phase == GenerationPhase::AwaitingSource);
        let waiting: Vec<u64> = waiting.map(|g| g.id).collect();
        for id in waiting {
            if !matches!(self.choose_source(id), SourceChoice::Wait) {
                self.begin_loading(id);
            }
        }
    }

    fn choose_source(&self, id: u64) -> SourceChoice {
        let this = self.generations.get(&id);
        let this = this.expect("invariant: only a generation that exists is loaded");
        if this.reads_files {
            return SourceChoice::Files;
        }
        let same = || {
            let elsewhere = |g: &&Generation| g.key.device != this.key.device;
            self.generations.values().filter(elsewhere).filter(|g| g.key.has_same_bytes(&this.key))
        };
        let ready = same().filter(|g| g.phase == GenerationPhase::Ready);
        if let Some(source) = ready.min_by_key(|source| (source_context_bytes(source, this), source.id)) {
            return SourceChoice::Copy {
                source: source.id,
                device: source.key.device.clone(),
                context_bytes: source_context_bytes(source, this),
            };
        }
        let works = |g: &Generation| match g.phase {
            GenerationPhase::Loading | GenerationPhase::Storing => true,
            GenerationPhase::Starting => g.id < id,
            _ => false,
        };
        if same().any(works) { SourceChoice::Wait } else { SourceChoice::Files }
    }

    /// A loader has failed. If it was copying, the files are read instead, unless no attempt could
    /// do better.
    pub(super) fn handle_load_failed(&mut self, id: u64, failure: LoadFailure) {
        let source = self.generations.get(&id).and_then(Generation::copies_from);
        let Some(source) = source.filter(|_| may_succeed_from_files(&failure)) else {
            return self.fail_load(id, failure);
        };
        let is_damaged = matches!(failure, LoadFailure::Loader { kind: LoaderErrorKind::SourceDamaged, .. });
        self.report_copy_failure(id, source, failure);
        let generation = self.pending(id);
        generation.reads_files = true;
        generation.source = BytesSource::Files;
        generation.phase = GenerationPhase::Queued;
        generation.done_bytes = 0;
        self.end_copy(id, source);
        if is_damaged {
            self.doubt_integrity(source);
        }
        self.start_loaders();
    }

    /// The loader of `id` no longer maps `source`. Comes after the phase has changed.
    pub(super) fn end_copy(&mut self, id: u64, source: u64) {
        self.ledger.release(ReservationKey::Copying(id));
        self.drop_if_unused(source);
    }

    /// Whether leases or copies need the memory of a generation that has no name any more.
    pub(super) fn is_in_use(&self, id: u64) -> bool {
        self.leases.count_of_generation(id) > 0
            || self.generations.values().any(|g| g.copies_from() == Some(id))
            || self.ending_loaders.iter().any(|(_, loader)| loader.source == Some(id))
    }

    /// A copy has other checksums than the manifest of its source: either the source is damaged, or
    /// the copy was. A check tells.
    fn doubt_integrity(&mut self, id: u64) {
        let resident = |g: &&mut Generation| {
            matches!(g.phase, GenerationPhase::Ready | GenerationPhase::Retiring)
                && g.integrity != GenerationIntegrity::Quarantined
        };
        if let Some(generation) = self.generations.get_mut(&id).filter(resident) {
            generation.integrity = GenerationIntegrity::Unverified;
            self.start_verifiers();
        }
    }

    fn report_copy_failure(&mut self, generation: u64, source: u64, failure: LoadFailure) {
        self.actions.push(WeightServerAction::ReportCopyFailure { generation, source, failure });
    }

    fn pending(&mut self, id: u64) -> &mut Generation {
        self.generations.get_mut(&id).expect("invariant: a pending generation exists")
    }
}

/// Device memory of the source that the copy takes: the context of a loader whose GPU cannot access
/// the source's.
fn source_context_bytes(source: &Generation, copy: &Generation) -> u64 {
    let device = &source.key.device;
    let is_peer = is_host_device(device) || copy.contents.peer_devices.contains(device);
    if is_peer { 0 } else { context_bytes(device) }
}

/// Reading the files needs as much memory as a copy, and the same headers and texts.
fn may_succeed_from_files(failure: &LoadFailure) -> bool {
    match failure {
        LoadFailure::Loader { kind, .. } => !matches!(
            kind,
            LoaderErrorKind::OutOfMemory
                | LoaderErrorKind::OutOfFds
                | LoaderErrorKind::ModelRefused
                | LoaderErrorKind::File
                | LoaderErrorKind::FileChanged
        ),
        LoadFailure::LoaderLost { .. } | LoadFailure::NoProgress { .. } => true,
        _ => false,
    }
}
