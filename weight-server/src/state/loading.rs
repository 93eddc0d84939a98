//! Generations: how they are asked for, loaded, replaced and unloaded. `catalog` has the picture.

use std::collections::BTreeSet;
use std::time::Duration;

use memory::manifest::HOST_DEVICE;

use super::{MAX_PENDING_LOADS, State};
use crate::catalog::{Contents, Generation, Integrity, LoadKey, Phase, Verification};
use crate::events::{Action, CallId, LoadAnswer, LoadAsk, LoadProgress, Notice, Waiter, WaiterId};
use crate::ledger::{Row, RowKey};
use crate::loader::{CONTEXT_BYTES, PINNED_BYTES};
use crate::refusal::{LoadFailure, Refusal, UnloadRefusal, VerifyFailure};

impl State {
    pub(super) fn load_asked(&mut self, call: CallId, ask: LoadAsk, available_bytes: u64) {
        match self.join_or_create(call, ask, available_bytes) {
            Ok(()) => {}
            Err(failure) => self.actions.push(Action::AnswerLoad { call, result: Err(failure) }),
        }
    }

    pub(super) fn join_or_create(
        &mut self,
        call: CallId,
        ask: LoadAsk,
        available_bytes: u64,
    ) -> Result<(), LoadFailure> {
        if self.shutting_down {
            return Err(LoadFailure::ShuttingDown);
        }
        let key = match ask.key {
            Ok(key) => key,
            // The file may be gone: what is resident under this name and path does not need it.
            Err(failure) => {
                let resident = self.ready(&ask.model, &ask.device);
                let resident = resident.filter(|generation| generation.path() == ask.path);
                let id = resident.ok_or(failure)?.id;
                self.answer_resident(call, id);
                return Ok(());
            }
        };
        let same = self.generations.values_mut().find(|g| g.phase != Phase::Retiring && g.key.is_same(&key));
        match same {
            Some(generation) if generation.model != ask.model => {
                return Err(LoadFailure::LoadedAs { model: generation.model.clone() });
            }
            Some(generation) if generation.is_pending() => {
                generation.waiters.push(Waiter::Call(call));
                return Ok(());
            }
            Some(generation) => {
                let id = generation.id;
                self.answer_resident(call, id);
                return Ok(());
            }
            None => {}
        }
        match self.leases.unsettled() {
            0 => {
                let waiters = vec![Waiter::Call(call)];
                self.create(waiters, ask.model, key, ask.one_per_tensor, available_bytes)
            }
            workers => Err(LoadFailure::Settling { workers }),
        }
    }

    pub(super) fn answer_resident(&mut self, call: CallId, generation: u64) {
        let answer = LoadAnswer { generation, read_from_file: false, elapsed: Duration::ZERO };
        self.actions.push(Action::AnswerLoad { call, result: Ok(answer) });
    }

    pub(super) fn create(
        &mut self,
        waiters: Vec<Waiter>,
        model: String,
        key: LoadKey,
        one_per_tensor: bool,
        available_bytes: u64,
    ) -> Result<(), LoadFailure> {
        let pending = self.generations.values().filter(|g| g.is_pending()).count();
        if pending >= MAX_PENDING_LOADS {
            return Err(LoadFailure::TooManyJobs { jobs: pending });
        }
        let id = self.next_generation;
        let file_bytes: u64 = key.files.iter().fold(0, |sum, file| file.bytes.saturating_add(sum));
        // First bounds; the loader's plan says it exactly, before anything is allocated for the model.
        let host_bytes = if key.device == HOST_DEVICE { file_bytes } else { PINNED_BYTES };
        self.check_machine(id, host_bytes, available_bytes)?;
        let waits = self.generations.values().any(|g| g.key.device == key.device && g.occupies_loader());
        let context = if waits { 0 } else { context_bytes(&key.device) };
        let row = Row { device: key.device.clone(), bytes: file_bytes.saturating_add(context), fds: 1 };
        self.ledger.reserve(RowKey::Loading(id), row)?;
        self.next_generation += 1;
        let generation = Generation {
            id,
            model,
            key,
            one_per_tensor,
            phase: Phase::Queued,
            contents: Contents { tensor_bytes: file_bytes, host_bytes, ..Contents::default() },
            done_bytes: 0,
            requested_at: self.now,
            progressed_at: self.now,
            waiters,
            adopted: false,
            integrity: Integrity::Loaded,
            verification: Verification::default(),
            reload: false,
        };
        self.generations.insert(id, generation);
        self.start_loaders();
        Ok(())
    }

    /// Holds what a load needs against what the machine has, less what other loads are about to take.
    pub(super) fn check_machine(
        &self,
        id: u64,
        needed: u64,
        available_bytes: u64,
    ) -> Result<(), LoadFailure> {
        let promised: u64 = self
            .ledger
            .rows()
            .filter_map(|(key, row)| match key {
                RowKey::Loading(other) if other != id => Some((self.generations.get(&other)?, row.bytes)),
                _ => None,
            })
            .map(|(generation, reserved)| generation.outstanding_bytes(reserved))
            .sum();
        let available = available_bytes.saturating_sub(promised);
        if needed > available { Err(LoadFailure::Machine { needed, available }) } else { Ok(()) }
    }

    /// Starts the next load of every device that has none running. A loader's context is there before its plan, so it is
    /// reserved first.
    pub(super) fn start_loaders(&mut self) {
        if self.shutting_down {
            return;
        }
        let mut without_room = Vec::new();
        let mut busy: BTreeSet<String> =
            self.generations.values().filter(|g| g.occupies_loader()).map(|g| g.key.device.clone()).collect();
        for generation in self.generations.values_mut().filter(|g| g.phase == Phase::Queued) {
            let (id, device) = (generation.id, &generation.key.device);
            if busy.contains(device) {
                continue;
            }
            let bytes = generation.contents.tensor_bytes.saturating_add(context_bytes(device));
            match self.ledger.reserve(RowKey::Loading(id), Row { device: device.clone(), bytes, fds: 1 }) {
                Ok(()) => {
                    busy.insert(device.clone());
                    generation.phase = Phase::Starting;
                    generation.progressed_at = self.now;
                    self.actions.push(Action::StartLoader { generation: id });
                }
                Err(shortage) => without_room.push((id, shortage)),
            }
        }
        for (id, shortage) in without_room {
            self.load_failed(id, shortage.into());
        }
    }

    pub(super) fn load_planned(&mut self, id: u64, contents: Contents, available_bytes: u64) {
        let Some(generation) = self.generations.get_mut(&id).filter(|g| g.phase == Phase::Starting) else {
            return;
        };
        let (row, host_bytes) = (contents.holds(&generation.key.device), contents.host_bytes);
        generation.contents = contents;
        generation.phase = Phase::Loading;
        generation.progressed_at = self.now;
        let reserved = self
            .ledger
            .reserve(RowKey::Loading(id), row)
            .map_err(LoadFailure::from)
            .and_then(|()| self.check_machine(id, host_bytes, available_bytes));
        match reserved {
            Ok(()) => {
                self.actions.push(Action::Proceed { generation: id });
                self.actions.push(Action::Publish(Notice::Generation(id)));
            }
            Err(failure) => {
                self.actions.push(Action::StopLoader { generation: id });
                self.load_failed(id, failure);
            }
        }
    }

    pub(super) fn load_progressed(&mut self, id: u64, done_bytes: u64) {
        let Some(generation) = self.generations.get_mut(&id) else { return };
        if done_bytes > generation.done_bytes {
            generation.done_bytes = done_bytes;
            generation.progressed_at = self.now;
            self.tell_waiters(id, |waiter| matches!(waiter, Waiter::Call(_)));
        }
    }

    pub(super) fn handed_over(&mut self, id: u64, contents: Contents) {
        let Some(generation) = self.generations.get_mut(&id).filter(|g| g.phase == Phase::Loading) else {
            // Unloaded meanwhile: what came is dropped with the loader.
            return self.actions.push(Action::ForgetGeneration { generation: id });
        };
        generation.done_bytes = contents.tensor_bytes;
        generation.phase = Phase::Storing;
        let row = contents.holds(&generation.key.device);
        generation.contents = contents;
        // The plan was exact but for the manifest's size, and the memory is there: book it as it is. What was taken for the
        // time of the load is free again: the loader has ended.
        self.ledger.adopt(RowKey::Loading(id), row);
        self.actions.push(Action::StoreGeneration { generation: id });
    }

    pub(super) fn load_failed(&mut self, id: u64, failure: LoadFailure) {
        let Some(generation) = self.generations.remove(&id) else { return };
        self.ledger.release(RowKey::Loading(id));
        if generation.waiters.is_empty() {
            let (model, failure) = (generation.model.clone(), failure.clone());
            self.actions.push(Action::ReportReload { model, failure });
        }
        for waiter in generation.waiters {
            self.actions.push(match waiter {
                Waiter::Call(call) => Action::AnswerLoad { call, result: Err(failure.clone()) },
                Waiter::Worker { connection, .. } => {
                    let (model, failure) = (generation.model.clone(), failure.clone());
                    Action::Refuse { connection, refusal: Refusal::LoadFailed { model, failure } }
                }
            });
        }
        self.actions.push(Action::Publish(Notice::GenerationGone(id)));
        self.start_loaders();
    }

    pub(super) fn generation_stored(&mut self, id: u64) {
        let Some(generation) = self.generations.get_mut(&id).filter(|g| g.phase == Phase::Storing) else {
            return;
        };
        generation.phase = Phase::Ready;
        let waiters = std::mem::take(&mut generation.waiters);
        let answer =
            LoadAnswer { generation: id, read_from_file: true, elapsed: self.now - generation.requested_at };
        self.ledger.settle(id);
        self.actions.push(Action::Publish(Notice::Generation(id)));
        self.retire_replaced();
        for waiter in waiters {
            match waiter {
                Waiter::Call(call) => {
                    self.actions.push(Action::AnswerLoad { call, result: Ok(answer.clone()) });
                }
                Waiter::Worker { connection, peer, ask } => self.attach_asked(connection, peer, ask),
            }
        }
        self.start_loaders();
    }

    pub(super) fn tell_waiters(&mut self, id: u64, which: impl Fn(&Waiter) -> bool) {
        let Some(generation) = self.generations.get(&id) else { return };
        let ahead = self.generations.range(..id).filter(|(_, other)| {
            other.key.device == generation.key.device
                && (other.phase == Phase::Queued || other.occupies_loader())
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
            self.actions.push(Action::TellWaiting { waiter, progress });
        }
    }

    pub(super) fn unload_asked(&mut self, call: CallId, model: &str) {
        let result = self.unload(model);
        self.actions.push(Action::AnswerUnload { call, result });
    }

    pub(super) fn unload(&mut self, model: &str) -> Result<u32, UnloadRefusal> {
        let ids: Vec<u64> = self
            .generations
            .values()
            .filter(|g| g.model == model && g.phase != Phase::Retiring)
            .map(|g| g.id)
            .collect();
        // What was quarantined is not wanted back either.
        let mut given_up = 0;
        for generation in self.generations.values_mut().filter(|g| g.model == model && g.reload) {
            generation.reload = false;
            given_up += self.leases.of_generation(generation.id);
        }
        if ids.is_empty() && given_up > 0 {
            return Ok(given_up as u32);
        }
        if ids.is_empty() {
            return Err(UnloadRefusal::UnknownModel { model: model.to_owned(), known: self.known_models() });
        }
        match self.leases.unsettled() {
            0 => {}
            workers => return Err(UnloadRefusal::Settling { workers }),
        }
        let mut leases = given_up;
        for id in ids {
            leases += self.leases.of_generation(id);
            self.stop_verifying(id, &VerifyFailure::Unloaded);
            match self.generations.get(&id).map(|generation| generation.phase) {
                Some(Phase::Ready) => self.retire(id),
                Some(phase) => {
                    self.actions.push(match phase {
                        // Its descriptors are here already, and perhaps in the vault.
                        Phase::Storing => Action::ForgetGeneration { generation: id },
                        _ => Action::StopLoader { generation: id },
                    });
                    self.load_failed(id, LoadFailure::Unloaded);
                }
                None => {}
            }
        }
        Ok(leases as u32)
    }

    /// Takes the name from a ready generation; the memory goes at once if nobody holds it.
    pub(super) fn retire(&mut self, id: u64) {
        if let Some(generation) = self.generations.get_mut(&id) {
            generation.phase = Phase::Retiring;
            self.actions.push(Action::Publish(Notice::Generation(id)));
            if self.leases.of_generation(id) > 0 {
                self.actions.push(Action::MarkRetired { generation: id });
            }
            self.drop_if_unused(id);
        }
    }

    pub(super) fn drop_if_unused(&mut self, id: u64) {
        let retiring = self.generations.get(&id).is_some_and(|g| g.phase == Phase::Retiring);
        if retiring && self.leases.of_generation(id) == 0 {
            self.stop_verifying(id, &VerifyFailure::Unloaded);
            let gone = self.generations.remove(&id);
            self.ledger.release(RowKey::Weights(id));
            self.actions.push(Action::ForgetGeneration { generation: id });
            self.actions.push(Action::Publish(Notice::GenerationGone(id)));
            if let Some(Generation { reload: true, model, key, one_per_tensor, .. }) = gone {
                self.reload(model, key, one_per_tensor);
            }
        }
    }
}

/// What a loader takes of a device by being there.
fn context_bytes(device: &str) -> u64 {
    if device == HOST_DEVICE { 0 } else { CONTEXT_BYTES }
}
