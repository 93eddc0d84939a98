// SPDX-License-Identifier: Apache-2.0

//! GPUs that the fleet begins to use while it runs, because a load or a reload names them.
//!
//! ```text
//! load names GPU --> find_gpu (a child asks the driver) --> DevicesFound
//!   --> spec.devices --> weight-server.toml: for the next weight-server, and for a successor
//!                    --> requests to load: the present weight-server adds a row to its ledger
//!                    --> MPS starts, the device monitor starts (again)
//! ```

use std::sync::Arc;

use service::config;

use super::children::supervised_child;
use super::{SupervisorLoop, answer};
use crate::commands::{CommandError, CommandReply};
use crate::events::SupervisorEvent;
use crate::fleet_devices::{GpuDevice, is_host_device, recorded_gpus};
use crate::spec::{ChildRole, ChildSpec, ModelSpec};
use crate::state::ChildEvent;

impl SupervisorLoop {
    /// Looks for the GPUs of the model that the fleet does not use yet, in a task: a driver may
    /// take seconds to answer.
    pub(super) fn load_by_command(&mut self, model: ModelSpec, reply: CommandReply<()>) {
        let is_unknown = |device: &&str| !is_host_device(device) && self.spec.devices.get(device).is_none();
        let unknown: Vec<String> = model.devices().filter(is_unknown).map(str::to_owned).collect();
        if unknown.is_empty() {
            return answer(reply, self.load_model(model, true));
        }
        let (find_gpu, event_loop) = (self.spec.find_gpu.clone(), self.commands.event_loop.clone());
        tokio::task::spawn_blocking(move || {
            let find = |device: &String| {
                let unusable = |why| {
                    let (model, device) = (model.name.clone(), device.clone());
                    CommandError::DeviceUnusable { model, device, why }
                };
                find_gpu(device).map_err(unusable)
            };
            let found = unknown.iter().map(find).collect();
            let model = Box::new(model);
            // Without an event loop the result is of no use.
            let _: Result<(), _> =
                event_loop.blocking_send(SupervisorEvent::DevicesFound { found, model, reply });
        });
    }

    pub(super) fn devices_found(
        &mut self,
        found: Result<Vec<GpuDevice>, CommandError>,
        model: ModelSpec,
        reply: CommandReply<()>,
    ) {
        let outcome = found.and_then(|gpus| {
            self.load_model(model, true)?;
            // The load begins later, when the ledger has been read.
            self.add_devices(gpus);
            Ok(())
        });
        answer(reply, outcome);
    }

    pub(super) fn add_devices(&mut self, gpus: Vec<GpuDevice>) {
        let ids: Vec<&str> = gpus.iter().map(|gpu| gpu.id.as_str()).collect();
        let text = ids.join(", ");
        if !self.spec.devices.add_all(gpus) {
            return;
        }
        tracing::info!(devices = text, "the fleet uses further GPUs");
        self.known_devices.send_replace(self.spec.devices.clone());
        let table = self.spec.devices.weight_server(&self.spec.weight_server);
        self.set_config(&Arc::from(ChildRole::WeightServer.subcommand()), table);
        for spec in self.spec.device_children() {
            self.start_device_child(spec);
        }
    }

    /// One that runs starts again if its configuration differs.
    fn start_device_child(&mut self, spec: ChildSpec) {
        let name: Arc<str> = spec.name.as_str().into();
        let event = match self.children.get(&name).map(|child| child.spec.config == spec.config) {
            Some(true) => return,
            Some(false) => {
                self.set_config(&name, spec.config);
                ChildEvent::Restart
            }
            None => match self.add_child(spec, None) {
                Ok(_) => ChildEvent::Start,
                Err(error) => {
                    let cause = service::exit::one_line(&error);
                    return tracing::error!(child = %name, cause, "cannot add a child");
                }
            },
        };
        self.apply_event(&name, event);
    }

    /// For the next process of the child, and for a successor of this one.
    fn set_config(&mut self, name: &Arc<str>, table: toml::Table) {
        let path = self.directory.directory().config(name);
        let child = supervised_child(&mut self.children, name);
        child.spec.config = table;
        if let Err(error) = config::store(&path, &child.spec.config) {
            let cause = service::exit::one_line(&error);
            tracing::error!(child = %name, cause, "cannot store the configuration: a successor lacks the new GPUs");
        }
    }

    /// The GPUs that the predecessor's models have and this configuration does not name. Called
    /// before any child has a configuration.
    pub(super) fn add_recorded_devices(&mut self) {
        let idle = self.idle_models.iter().map(|model| &model.spec);
        let used: Vec<&str> = self.specs().chain(idle).flat_map(ModelSpec::devices).collect();
        let mut gpus = recorded_gpus(self.directory.directory());
        gpus.retain(|gpu| used.contains(&gpu.id.as_str()));
        self.spec.devices.add_all(gpus);
        self.known_devices.send_replace(self.spec.devices.clone());
    }
}
