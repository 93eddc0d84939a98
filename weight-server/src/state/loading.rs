// SPDX-License-Identifier: Apache-2.0

//! Requests, starts, replaces and unloads generations. `catalog` draws the phases of a generation.

use std::collections::BTreeSet;
use std::time::Duration;

use memory::numa::is_host_device;

use super::{MAX_PENDING_LOADS, WeightServerState};
use crate::catalog::{
    BytesSource, Generation, GenerationContents, GenerationIntegrity, GenerationPhase, LoadKey,
    VerificationState,
};
use crate::events::{ChangeNotice, LoadOutcome, LoadParams, WeightServerAction};
use crate::ids::CallId;
use crate::ledger::{LedgerReservation, ReservationKey};
use crate::loader::{CONTEXT_BYTES, PINNED_BYTES};
use crate::refusal::{AttachRefusal, LoadFailure, UnloadRefusal, VerifyFailure};
use crate::waiters::{LoadProgress, Waiter, WaiterId};

impl WeightServerState {
    pub(super) fn handle_load_request(&mut self, call: CallId, params: LoadParams, available_bytes: u64) {
        match self.join_or_create(call, params, available_bytes) {
            Ok(()) => {}
            Err(failure) => self.actions.push(WeightServerAction::ReplyLoad { call, result: Err(failure) }),
        }
    }

    pub(super) fn join_or_create(
        &mut self,
        call: CallId,
        params: LoadParams,
        available_bytes: u64,
    ) -> Result<(), LoadFailure> {
        if self.shutting_down {
            return Err(LoadFailure::ShuttingDown);
        }
        let key = match params.key {
            Ok(key) => key,
            // A resident model needs no file: the file may have been removed.
            Err(failure) => {
                let resident = self.find_ready(&params.model, &params.device);
                let resident = resident.filter(|generation| generation.path() == params.path);
                let id = resident.ok_or(failure)?.id;
                self.reply_resident(call, id);
                return Ok(());
            }
        };
        let same = self
            .generations
            .values_mut()
            .find(|g| g.phase != GenerationPhase::Retiring && g.key.is_same(&key));
        match same {
            Some(generation) if generation.model != params.model => {
                return Err(LoadFailure::LoadedAs { model: generation.model.clone() });
            }
            Some(generation) if generation.is_pending() => {
                generation.waiters.push(Waiter::Call(call));
                return Ok(());
            }
            Some(generation) => {
                let id = generation.id;
                self.reply_resident(call, id);
                return Ok(());
            }
            None => {}
        }
        if let Some(id) = self.find_retired(&params.model, &key) {
            self.revive(id);
            self.reply_resident(call, id);
            return Ok(());
        }
        match self.workers_to_reclaim() {
            0 => self.create_generation(vec![Waiter::Call(call)], params.model, key, available_bytes),
            workers => Err(LoadFailure::AwaitingReclaim { workers }),
        }
    }

    /// A generation that holds exactly this, and whose last leases run out.
    fn find_retired(&self, model: &str, key: &LoadKey) -> Option<u64> {
        let same = |g: &&Generation| {
            g.phase == GenerationPhase::Retiring
                && g.integrity != GenerationIntegrity::Quarantined
                && g.model == model
                && g.key.is_same(key)
        };
        self.generations.values().rfind(same).map(|g| g.id)
    }

    /// Gives a retiring generation its model name back, instead of loading the same bytes again.
    fn revive(&mut self, id: u64) {
        let generation = self.generations.get_mut(&id);
        let generation = generation.expect("invariant: a generation that was just found exists");
        generation.phase = GenerationPhase::Ready;
        let (model, device) = (generation.model.clone(), generation.key.device.clone());
        self.actions.push(WeightServerAction::UnmarkRetired { generation: id });
        self.actions.push(WeightServerAction::Publish(ChangeNotice::Generation(id)));
        let replaced = |g: &&Generation| {
            g.id != id && g.phase == GenerationPhase::Ready && g.model == model && g.key.device == device
        };
        let replaced: Vec<u64> = self.generations.values().filter(replaced).map(|g| g.id).collect();
        for other in replaced {
            self.retire(other);
        }
    }

    pub(super) fn reply_resident(&mut self, call: CallId, generation: u64) {
        let answer = LoadOutcome { generation, read_from_file: false, elapsed: Duration::ZERO };
        self.actions.push(WeightServerAction::ReplyLoad { call, result: Ok(answer) });
    }

    pub(super) fn create_generation(
        &mut self,
        waiters: Vec<Waiter>,
        model: String,
        key: LoadKey,
        available_bytes: u64,
    ) -> Result<(), LoadFailure> {
        let pending = self.generations.values().filter(|g| g.is_pending()).count();
        if pending >= MAX_PENDING_LOADS {
            return Err(LoadFailure::TooManyJobs { jobs: pending });
        }
        let id = self.next_generation;
        let file_bytes: u64 = key.files.iter().fold(0, |sum, file| file.bytes.saturating_add(sum));
        // A first bound. The loader's plan gives the exact sizes before it allocates memory for the
        // model.
        let host_bytes = self.first_host_bytes(&key.device, file_bytes);
        self.check_available_memory(id, host_bytes, available_bytes)?;
        let waits = self.has_loader(&key.device);
        let context = if waits { 0 } else { context_bytes(&key.device) };
        let row = LedgerReservation {
            device: key.device.clone(),
            bytes: file_bytes.saturating_add(context),
            fds: 1,
        };
        self.ledger.reserve(ReservationKey::Loading(id), row)?;
        self.next_generation += 1;
        let generation = Generation {
            id,
            model,
            key,
            phase: GenerationPhase::Queued,
            source: BytesSource::default(),
            reads_files: false,
            contents: GenerationContents {
                tensor_bytes: file_bytes,
                host_bytes,
                ..GenerationContents::default()
            },
            done_bytes: 0,
            requested_at: self.now,
            progressed_at: self.now,
            waiters,
            adopted: false,
            integrity: GenerationIntegrity::Loaded,
            verification: VerificationState::default(),
            reload: false,
        };
        self.generations.insert(id, generation);
        self.start_loaders();
        Ok(())
    }

    /// Host memory that a load onto a device takes, before its loader has read the headers.
    fn first_host_bytes(&self, device: &str, file_bytes: u64) -> u64 {
        let staging = if is_host_device(device) { 0 } else { PINNED_BYTES };
        if !self.ledger.takes_host_memory(device) {
            return staging;
        }
        file_bytes.saturating_add(staging).saturating_add(context_bytes(device))
    }

    /// Compares a load's need with the available memory, less what other loads have reserved and
    /// not yet taken.
    pub(super) fn check_available_memory(
        &self,
        id: u64,
        needed: u64,
        available_bytes: u64,
    ) -> Result<(), LoadFailure> {
        let outstanding: u64 = self
            .ledger
            .reservations()
            .filter_map(|(key, row)| match key {
                ReservationKey::Loading(other) if other != id => {
                    Some((self.generations.get(&other)?, row.bytes))
                }
                _ => None,
            })
            .map(|(generation, reserved)| generation.outstanding_bytes(reserved))
            .sum();
        let available = available_bytes.saturating_sub(outstanding);
        if needed > available { Err(LoadFailure::InsufficientMemory { needed, available }) } else { Ok(()) }
    }

    fn has_loader(&self, device: &str) -> bool {
        let loads = self.generations.values().any(|g| g.key.device == device && g.occupies_loader());
        loads || self.ending_loaders.iter().any(|(_, loader)| loader.device == device)
    }

    /// Starts the next load of every device without a running loader. The loader creates its
    /// context before it sends its plan, so the context is reserved first.
    pub(super) fn start_loaders(&mut self) {
        if self.shutting_down {
            return;
        }
        let mut failed_reservations = Vec::new();
        let loading = self.generations.values().filter(|g| g.occupies_loader()).map(|g| &g.key.device);
        let ending = self.ending_loaders.iter().map(|(_, loader)| &loader.device);
        let mut busy: BTreeSet<String> = loading.chain(ending).cloned().collect();
        for generation in self.generations.values_mut().filter(|g| g.phase == GenerationPhase::Queued) {
            let (id, device) = (generation.id, &generation.key.device);
            if busy.contains(device) {
                continue;
            }
            let bytes = generation.contents.tensor_bytes.saturating_add(context_bytes(device));
            match self.ledger.reserve(
                ReservationKey::Loading(id),
                LedgerReservation { device: device.clone(), bytes, fds: 1 },
            ) {
                Ok(()) => {
                    busy.insert(device.clone());
                    generation.phase = GenerationPhase::Starting;
                    generation.progressed_at = self.now;
                    self.actions.push(WeightServerAction::StartLoader { generation: id });
                }
                Err(shortage) => failed_reservations.push((id, shortage)),
            }
        }
        for (id, shortage) in failed_reservations {
            self.fail_load(id, shortage.into());
        }
    }

    pub(super) fn handle_load_plan(&mut self, id: u64, contents: GenerationContents, available_bytes: u64) {
        let Some(generation) = self.generations.get_mut(&id).filter(|g| g.phase == GenerationPhase::Starting)
        else {
            return;
        };
        let (row, host_bytes) = (contents.reservation(&generation.key.device), contents.host_bytes);
        generation.contents = contents;
        let reserved = self
            .ledger
            .reserve(ReservationKey::Loading(id), row)
            .map_err(LoadFailure::from)
            .and_then(|()| self.check_available_memory(id, host_bytes, available_bytes));
        match reserved {
            Ok(()) => self.begin_loading(id),
            Err(failure) => {
                self.actions.push(WeightServerAction::StopLoader { generation: id });
                self.fail_load(id, failure);
            }
        }
    }

    pub(super) fn handle_load_progress(&mut self, id: u64, done_bytes: u64) {
        let Some(generation) = self.generations.get_mut(&id) else { return };
        if done_bytes > generation.done_bytes {
            generation.done_bytes = done_bytes;
            generation.progressed_at = self.now;
            self.report_progress(id, |waiter| matches!(waiter, Waiter::Call(_)));
        }
    }

    pub(super) fn handle_load_handed_over(&mut self, id: u64, contents: GenerationContents) {
        let Some(generation) = self.generations.get_mut(&id).filter(|g| g.phase == GenerationPhase::Loading)
        else {
            // The model was unloaded in the meantime: its descriptors are closed.
            return self.actions.push(WeightServerAction::RemoveGeneration { generation: id });
        };
        self.ending_loaders.add(id, generation.key.device.clone(), generation.copies_from());
        generation.done_bytes = contents.tensor_bytes;
        generation.phase = GenerationPhase::Storing;
        let row = contents.reservation(&generation.key.device);
        generation.contents = contents;
        // The plan was exact except for the size of the manifest, and the memory is allocated, so
        // the reservation is not checked. The loader exits, so its staging memory is about to be
        // free again.
        self.ledger.reserve_unchecked(ReservationKey::Loading(id), row);
        self.actions.push(WeightServerAction::StoreGeneration { generation: id });
    }

    pub(super) fn handle_loader_ended(&mut self, id: u64) {
        let Some(source) = self.ending_loaders.remove(id) else { return };
        if let Some(source) = source {
            self.end_copy(id, source);
        }
        self.start_loaders();
    }

    pub(super) fn fail_load(&mut self, id: u64, failure: LoadFailure) {
        let Some(generation) = self.generations.remove(&id) else { return };
        self.ledger.release(ReservationKey::Loading(id));
        if let Some(source) = generation.copies_from() {
            self.end_copy(id, source);
        }
        if generation.waiters.is_empty() {
            let (model, failure) = (generation.model.clone(), failure.clone());
            self.actions.push(WeightServerAction::ReportReloadFailure { model, failure });
        }
        for waiter in generation.waiters {
            self.actions.push(match waiter {
                Waiter::Call(call) => WeightServerAction::ReplyLoad { call, result: Err(failure.clone()) },
                Waiter::Worker { connection, .. } => {
                    let (model, failure) = (generation.model.clone(), failure.clone());
                    WeightServerAction::Refuse {
                        connection,
                        refusal: AttachRefusal::LoadFailed { model, failure },
                    }
                }
            });
        }
        self.actions.push(WeightServerAction::Publish(ChangeNotice::GenerationRemoved(id)));
        self.start_loaders();
    }

    pub(super) fn handle_generation_stored(&mut self, id: u64) {
        let Some(generation) = self.generations.get_mut(&id).filter(|g| g.phase == GenerationPhase::Storing)
        else {
            return;
        };
        generation.phase = GenerationPhase::Ready;
        let waiters = std::mem::take(&mut generation.waiters);
        let answer = LoadOutcome {
            generation: id,
            read_from_file: generation.source == BytesSource::Files,
            elapsed: self.now - generation.requested_at,
        };
        self.ledger.commit_load(id);
        self.actions.push(WeightServerAction::Publish(ChangeNotice::Generation(id)));
        self.retire_replaced_generations();
        for waiter in waiters {
            match waiter {
                Waiter::Call(call) => {
                    self.actions.push(WeightServerAction::ReplyLoad { call, result: Ok(answer.clone()) });
                }
                Waiter::Worker { connection, peer, params } => {
                    self.handle_attach_request(connection, peer, params)
                }
            }
        }
        self.start_loaders();
    }

    pub(super) fn report_progress(&mut self, id: u64, which: impl Fn(&Waiter) -> bool) {
        let generation = self.generations.get(&id);
        let generation = generation.expect("invariant: progress is reported of generations that exist");
        let ahead = self.generations.range(..id).filter(|(_, other)| {
            other.key.device == generation.key.device
                && (other.phase == GenerationPhase::Queued || other.occupies_loader())
        });
        let progress = LoadProgress {
            done_bytes: generation.done_bytes,
            total_bytes: generation.contents.tensor_bytes,
            jobs_ahead: ahead.count() as u32,
        };
        for waiter in generation.waiters.iter().filter(|waiter| which(waiter)) {
            let waiter = match waiter {
                Waiter::Call(call) => WaiterId::Call(*call),
                Waiter::Worker { connection, .. } => WaiterId::Worker(*connection),
            };
            self.actions.push(WeightServerAction::SendProgress { waiter, progress });
        }
    }

    pub(super) fn handle_unload_request(&mut self, call: CallId, model: &str, only: Option<u64>) {
        let result = self.unload(model, only);
        self.actions.push(WeightServerAction::ReplyUnload { call, result });
    }

    pub(super) fn unload(&mut self, model: &str, only: Option<u64>) -> Result<u32, UnloadRefusal> {
        let asked = |g: &Generation| g.model == model && only.is_none_or(|only| g.id == only);
        let ids: Vec<u64> = self
            .generations
            .values()
            .filter(|g| asked(g) && g.phase != GenerationPhase::Retiring)
            .map(|g| g.id)
            .collect();
        // An unload also cancels the reload of a quarantined generation.
        let mut given_up = 0;
        for generation in self.generations.values_mut().filter(|g| asked(g) && g.reload) {
            generation.reload = false;
            given_up += self.leases.count_of_generation(generation.id);
        }
        if ids.is_empty() && given_up > 0 {
            return Ok(given_up as u32);
        }
        if ids.is_empty() {
            return Err(UnloadRefusal::UnknownModel { model: model.to_owned(), known: self.list_models() });
        }
        match self.workers_to_reclaim() {
            0 => {}
            workers => return Err(UnloadRefusal::AwaitingReclaim { workers }),
        }
        let mut leases = given_up;
        for id in ids {
            leases += self.leases.count_of_generation(id);
            self.cancel_verification(id, &VerifyFailure::Unloaded);
            match self.generations.get(&id).map(|generation| generation.phase) {
                Some(GenerationPhase::Ready) => self.retire(id),
                Some(phase) => {
                    self.actions.push(match phase {
                        // This process already holds the descriptors, and the FD store may too.
                        GenerationPhase::Storing => WeightServerAction::RemoveGeneration { generation: id },
                        _ => WeightServerAction::StopLoader { generation: id },
                    });
                    self.fail_load(id, LoadFailure::Unloaded);
                }
                None => {}
            }
        }
        Ok(leases as u32)
    }

    /// Takes the model name from a ready generation. Without leases and copies of it, its memory is
    /// released at once.
    pub(super) fn retire(&mut self, id: u64) {
        let generation = self.generations.get_mut(&id);
        let generation = generation.expect("invariant: only a generation that exists retires");
        generation.phase = GenerationPhase::Retiring;
        self.actions.push(WeightServerAction::Publish(ChangeNotice::Generation(id)));
        if self.is_in_use(id) {
            self.actions.push(WeightServerAction::MarkRetired { generation: id });
        }
        self.drop_if_unused(id);
    }

    pub(super) fn drop_if_unused(&mut self, id: u64) {
        let retiring = self.generations.get(&id).is_some_and(|g| g.phase == GenerationPhase::Retiring);
        if retiring && !self.is_in_use(id) {
            self.cancel_verification(id, &VerifyFailure::Unloaded);
            let gone = self.generations.remove(&id);
            self.ledger.release(ReservationKey::Weights(id));
            self.actions.push(WeightServerAction::RemoveGeneration { generation: id });
            self.actions.push(WeightServerAction::Publish(ChangeNotice::GenerationRemoved(id)));
            if let Some(Generation { reload: true, model, key, .. }) = gone {
                self.reload_model(model, key);
            }
        }
    }
}

/// Device memory of the context of a loader or verifier.
pub(super) fn context_bytes(device: &str) -> u64 {
    if is_host_device(device) { 0 } else { CONTEXT_BYTES }
}
