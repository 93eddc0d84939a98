// SPDX-License-Identifier: Apache-2.0

//! Brings the models of the weight-server in line with those of the fleet.
//!
//! ```text
//! weight-server is ready, or adopted; or a worker of weights that the fleet lacks is gone
//!   |  tokens of the workers; which models are resident?
//!   v
//! ResidentWeights --- some are not of this fleet ----> they are unloaded
//!   |                                                        |
//!   v                                        LeftoversUnloaded
//! every model is requested <---------------------------------'
//!   |
//!   v
//! CopyLoaded: workers that have older weights of the copy are restarted
//! ```
//! The weight-server compares a request with what is resident: files, device, layout and packing.

use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;

use super::children::supervised_child;
use super::room::RoomWait;
use super::{ManagedModel, SupervisedChild, SupervisorLoop};
use crate::events::SupervisorEvent;
use crate::idle_models::IdleModel;
use crate::model_record::{RecordedModel, store_models};
use crate::resident_models::{self, WeightsOnDevice};
use crate::shared_weights;
use crate::spec::{ChildRole, ModelSpec, WorkerSlot};
use crate::state::ChildEvent;

impl SupervisorLoop {
    /// A weight-server that has just become ready knows no tokens, and perhaps no models, or others
    /// than this fleet.
    pub(super) fn sync_weight_server(&mut self, name: &Arc<str>) {
        if self.children.get(name).is_none_or(|c| c.spec.role != ChildRole::WeightServer) {
            return;
        }
        for worker in self.children.keys() {
            self.register_token(worker);
        }
        let (admin, event_loop) = (self.admin.clone(), self.commands.event_loop.clone());
        self.replace_sync_task(tokio::spawn(async move {
            let resident = admin.resident_weights().await;
            // Without an event loop the result is of no use.
            let _: Result<(), _> = event_loop.send(SupervisorEvent::ResidentWeights { resident }).await;
        }));
    }

    /// Registers the token of a running worker.
    pub(super) fn register_token(&self, name: &Arc<str>) {
        let Some(child) = self.children.get(name) else { return };
        if let (Some(token), None) = (&child.token, &child.token_registration) {
            let (admin, worker, token) = (self.admin.clone(), name.to_string(), token.clone());
            tokio::spawn(async move {
                if let Err(status) = admin.allow_token(worker.clone(), token).await {
                    tracing::warn!(worker, %status, "the weight-server refused the token of a worker");
                }
            });
        }
    }

    /// Unloads the copies that are not of this fleet, then requests those that are.
    pub(super) fn unload_leftovers(&mut self, resident: Vec<WeightsOnDevice>) {
        let leftovers = resident_models::leftovers(resident, |copy| self.has_copy(copy));
        if leftovers.is_empty() {
            return self.request_models();
        }
        let (admin, event_loop) = (self.admin.clone(), self.commands.event_loop.clone());
        self.replace_sync_task(tokio::spawn(async move {
            for copy in leftovers {
                let WeightsOnDevice { weights, device } = &copy;
                tracing::info!(weights, device, "unloading weights that have left the configuration");
                if let Err(status) = admin.clone().unload(&copy).await {
                    tracing::warn!(weights, device, %status, "cannot unload weights that have left the configuration");
                }
            }
            let _: Result<(), _> = event_loop.send(SupervisorEvent::LeftoversUnloaded).await;
        }));
    }

    /// A worker of weights that this fleet does not have is gone. It may have returned them to the
    /// weight-server after the leftovers were unloaded, so they are looked for once more.
    pub(super) fn unload_returned(&mut self, slot: &WorkerSlot) {
        let copy = WeightsOnDevice { weights: slot.weights.clone(), device: slot.device.clone() };
        self.unload_leftover(&copy);
    }

    /// Unloads a copy, unless the fleet has it.
    pub(super) fn unload_leftover(&mut self, copy: &WeightsOnDevice) {
        if self.has_copy(copy) {
            return;
        }
        let is_server = |child: &SupervisedChild| child.spec.role == ChildRole::WeightServer;
        let server = self.children.iter().find(|(_, child)| is_server(child));
        if let Some(server) = server.map(|(name, _)| name.clone()) {
            self.sync_weight_server(&server);
        }
    }

    pub(super) fn request_models(&mut self) {
        // What no weight-server could load waits for a command, also at the next weight-server.
        let is_wanted = |model: &ManagedModel| {
            model.unloading.is_none() && model.room_wait.is_none() && !model.copies.has_given_up()
        };
        let wanted = self.models.iter().filter(|(_, model)| is_wanted(model));
        let wanted: Vec<String> = wanted.map(|(name, _)| name.clone()).collect();
        for name in wanted {
            self.load_copies(&name);
        }
        self.request_room(Duration::ZERO);
    }

    /// Restarts the workers with these process ids: they have older weights of their model.
    pub(super) fn restart_processes(&mut self, pids: &[u32]) {
        let is_meant = |pid: u32| pids.contains(&pid);
        let workers = self.children.iter().filter(|(_, child)| {
            child.spec.role == ChildRole::Worker && child.process.as_ref().is_some_and(|p| is_meant(p.pid))
        });
        let workers: Vec<Arc<str>> = workers.map(|(name, _)| name.clone()).collect();
        for name in workers {
            tracing::info!(child = %name, "restarting: the weights of its model have changed");
            supervised_child(&mut self.children, &name).is_outdated = false;
            self.apply_event(&name, ChildEvent::Restart);
        }
    }

    /// The models of the fleet, and both files of a swap.
    pub(super) fn specs(&self) -> impl Iterator<Item = &ModelSpec> {
        let swapped = self.swap.iter().flat_map(|swap| [&swap.old, &swap.new]);
        self.models.values().map(|model| &model.spec).chain(swapped)
    }

    /// Adds the models of the configuration, and those that a command has loaded into the fleet of
    /// the predecessor.
    pub(super) fn add_initial_models(&mut self, recorded: &[RecordedModel]) {
        let configured = std::mem::take(&mut self.spec.models);
        let is_configured = |name: &str| configured.iter().any(|model| model.name == name);
        let by_command = recorded.iter().filter(|model| model.by_command && !is_configured(&model.name));
        let mut models: Vec<ModelSpec> = by_command.map(RecordedModel::spec).collect();
        let first_configured = models.len();
        models.extend(configured);
        // Idle models have no weights, and get a name for them when they are loaded.
        let loaded: Vec<RecordedModel> = recorded.iter().filter(|known| !known.idle).cloned().collect();
        shared_weights::name_all(&mut models, &loaded);
        let configured = models.split_off(first_configured);
        // A model of the configuration whose file has changed is another one.
        let is_idle = |model: &ModelSpec| {
            let known = recorded.iter().find(|known| known.name == model.name && known.path == model.path);
            known.map_or(model.on_demand, |known| known.idle)
        };
        for (specs, by_command) in [(models, true), (configured, false)] {
            for spec in specs {
                if is_idle(&spec) {
                    self.idle_models.insert(IdleModel::new(spec, by_command, Bytes::new()));
                    continue;
                }
                if !by_command {
                    self.spec.models.push(spec.clone());
                }
                self.add_model(spec, by_command, RoomWait::new(false, self.deadlines.running_time()));
            }
        }
    }

    pub(super) fn add_model(&mut self, spec: ModelSpec, by_command: bool, wait: RoomWait) {
        self.models.insert(spec.name.clone(), ManagedModel::new(spec, by_command, Some(wait)));
    }

    /// Writes down which models the fleet has, for a successor.
    pub(super) fn record_models(&self) {
        let recorded = |model: &ManagedModel| RecordedModel::of(&model.spec, model.by_command);
        let idle = |model: &IdleModel| RecordedModel {
            idle: true,
            ..RecordedModel::of(&model.spec, model.by_command)
        };
        let models = self.models.values().map(recorded).chain(self.idle_models.iter().map(idle)).collect();
        if let Err(error) = store_models(self.directory.directory(), models) {
            let cause = service::exit::one_line(&error);
            tracing::error!(cause, "cannot record the fleet's models: a successor would not know them");
        }
    }

    fn replace_sync_task(&mut self, task: tokio::task::JoinHandle<()>) {
        if let Some(earlier) = self.sync_task.replace(task.abort_handle()) {
            earlier.abort();
        }
    }
}
