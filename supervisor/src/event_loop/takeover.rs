// SPDX-License-Identifier: Apache-2.0

//! Adopts the children of a dead supervisor.
//!
//! A process that the runtime directory records becomes the orphan of the child with the same name.
//! It is supervised as soon as it offers itself. A worker of a model or of weights that this fleet
//! no longer has is stopped. Workers whose configuration has changed are restarted, one after the
//! other. So is a device monitor whose configuration or executable has changed.

use std::collections::BTreeMap;
use std::os::fd::OwnedFd;
use std::sync::Arc;

use service::logging::LogTail;
use service::{RuntimeDir, config};

use super::children::{supervised_child, watch_exit};
use super::{FleetStartError, SupervisorLoop};
use crate::attach_token::AttachToken;
use crate::orphans::{OrphanPlace, place_orphan, slot_of_worker, worker_index};
use crate::process::ChildProcess;
use crate::spec::{ChildRole, ChildSpec, WorkerSlot};
use crate::state::ChildEvent;

/// What a dead supervisor has left running.
#[derive(Debug, Default)]
pub(super) struct LivingChildren {
    /// Process ids by the names of the children.
    processes: BTreeMap<String, u32>,
    /// The configurations with which the workers were started, by their numbers.
    workers: BTreeMap<u32, toml::Table>,
    /// The configuration of the device monitor.
    monitor: Option<toml::Table>,
}

impl LivingChildren {
    /// Read before this supervisor writes its own configurations.
    pub(super) fn find(directory: &RuntimeDir) -> Result<Self, FleetStartError> {
        let living = directory.living_children().map_err(FleetStartError::RuntimeDir)?;
        let (mut workers, mut monitor) = (BTreeMap::new(), None);
        for (name, _) in &living {
            if let Some(index) = worker_index(name) {
                workers.insert(index, config::load(&directory.config(name))?);
            } else if name == ChildRole::DeviceMonitor.subcommand() {
                monitor = config::load(&directory.config(name)).ok();
            }
        }
        Ok(Self { processes: living.into_iter().collect(), workers, monitor })
    }

    pub(super) fn is_empty(&self) -> bool {
        self.processes.is_empty()
    }

    /// The configuration with which a process was started, of those that restart if it differs.
    fn recorded(&self, name: &str) -> Option<&toml::Table> {
        match worker_index(name) {
            Some(index) => self.workers.get(&index),
            None => self.monitor.as_ref().filter(|_| name == ChildRole::DeviceMonitor.subcommand()),
        }
    }

    pub(super) fn slots(&self) -> BTreeMap<u32, WorkerSlot> {
        self.workers.iter().map(|(&index, config)| (index, slot_of_worker(index, config))).collect()
    }
}

impl SupervisorLoop {
    /// The weights of models whose workers live are there already. What may be idle waits for room
    /// again, if its workers have died with the supervisor or if it has waited before.
    pub(super) fn set_served_models(&mut self, living: &LivingChildren) {
        let (slots, now) = (living.slots(), self.deadlines.running_time());
        for model in self.models.values_mut() {
            let is_of = |slot: &WorkerSlot| slot.model == model.spec.name;
            let is_served = slots.values().any(is_of);
            if is_served {
                model.room_wait = None;
                // Its workers told the predecessor when they began to serve.
                model.model_use.served(now);
            }
            if is_served || model.spec.idle_unload.is_none() {
                model
                    .copies
                    .set_served(|device| slots.values().any(|slot| is_of(slot) && slot.device == device));
            }
        }
    }

    pub(super) fn adopt_orphans(&mut self, living: &LivingChildren) -> Result<(), FleetStartError> {
        for (name, &pid) in &living.processes {
            let recorded = living.recorded(name);
            let known = self.children.get_key_value(name.as_str());
            let place = place_orphan(name, known.map(|(_, child)| &child.spec.config), recorded);
            let (known, is_outdated) = match (place, known, recorded) {
                (OrphanPlace::Child { is_outdated }, Some((known, _)), _) => {
                    (Some(known.clone()), is_outdated)
                }
                (OrphanPlace::RecordedWorker { index }, _, Some(config)) => {
                    (Some(self.add_recorded_worker(name, index, config)?), false)
                }
                _ => (None, false),
            };
            let Ok(process) = ChildProcess::orphan(pid) else { continue };
            let Some(name) = known else {
                tracing::warn!(child = name, pid, "terminating a process that is not part of this fleet");
                process.terminate();
                continue;
            };
            let child = supervised_child(&mut self.children, &name);
            child.start_number += 1;
            // Commands replace the processes that streams depend on, at a moment that an operator
            // chooses. No stream depends on the monitor.
            let is_old_monitor = child.spec.role == ChildRole::DeviceMonitor && process.executes_other_file();
            child.is_outdated = is_outdated || is_old_monitor;
            let watched = watch_exit(&process, name.clone(), child.start_number, child.checkpoints.clone());
            watched.map_err(FleetStartError::RuntimeDir)?;
            child.process = Some(process);
            self.apply_event(&name, ChildEvent::OrphanFound);
        }
        self.remove_workers_of_other_weights();
        let directory = self.directory.directory();
        directory
            .remove_files_of_dead_children(|name| self.children.contains_key(name))
            .map_err(FleetStartError::RuntimeDir)
    }

    /// The spec does not list a worker that was added while the dead supervisor ran, or whose model
    /// has left the configuration.
    fn add_recorded_worker(
        &mut self,
        name: &str,
        index: u32,
        config: &toml::Table,
    ) -> Result<Arc<str>, FleetStartError> {
        let slot = slot_of_worker(index, config);
        let spec = ChildSpec { name: name.to_owned(), role: ChildRole::Worker, config: config.clone() };
        self.add_child(spec, Some(slot))
    }

    fn remove_workers_of_other_weights(&mut self) {
        let is_gone = |slot: &WorkerSlot| {
            self.models
                .get(&slot.model)
                .is_none_or(|model| model.spec.weights_on(&slot.device) != Some(slot.weights.as_str()))
        };
        let gone = self.children.iter().filter(|(_, child)| child.slot.as_ref().is_some_and(is_gone));
        let gone: Vec<Arc<str>> = gone.map(|(name, _)| name.clone()).collect();
        for name in gone {
            tracing::info!(child = %name, "stopping a worker: this fleet does not have its model, or not its weights on its device");
            self.remove_worker(&name);
        }
    }

    /// An orphan offers itself for adoption. From now on it notices when this supervisor dies.
    pub(super) fn adopt_offered(&mut self, name: &Arc<str>, fds: Vec<OwnedFd>, token: Option<AttachToken>) {
        // The sender decides what it sends: an offer may come without its socket.
        let mut fds = fds.into_iter();
        let Some(socket) = fds.next() else { return };
        let log_tail = fds.next().map(LogTail::from_fd);
        let child = supervised_child(&mut self.children, name);
        let process = child
            .process
            .as_mut()
            .expect("invariant: the sender of a handled message is the child's process");
        match process.adopt(socket, log_tail) {
            Ok(()) => {
                tracing::info!(child = %name, pid = process.pid, "adopted");
                let (is_outdated, is_worker) = (std::mem::take(&mut child.is_outdated), child.slot.is_some());
                // The process is the one that the dead supervisor has recorded, so its token is.
                child.token = token;
                self.apply_event(name, ChildEvent::OrphanAdopted);
                self.register_token(name);
                self.sync_weight_server(name);
                if is_outdated {
                    tracing::info!(child = %name, "restarting: its configuration or its executable has changed");
                    match is_worker {
                        true => self.restart_rolling(vec![name.clone()]),
                        false => self.apply_event(name, ChildEvent::Restart),
                    }
                }
            }
            Err(error) => {
                tracing::warn!(child = %name, %error, "an orphan went away during its adoption")
            }
        }
    }
}
