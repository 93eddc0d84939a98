// SPDX-License-Identifier: Apache-2.0

//! The specification of a fleet: which processes and models it has. The caller writes it before the
//! fleet starts.

use std::collections::BTreeMap;
use std::os::fd::OwnedFd;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use serde::{Deserialize, Serialize};

use crate::config::SupervisionConfig;
use crate::fleet_devices::{FleetDevices, GpuDevice};
use crate::mps::MpsConfig;
use crate::spec_diff::SettingChange;
use crate::state::RestartPolicy;
use crate::status::ModelFailure;

#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum ChildRole {
    WeightServer,
    Worker,
    Router,
    /// NVIDIA's MPS for the workers.
    Mps,
    /// Reports figures and faults of the GPUs.
    DeviceMonitor,
}

impl ChildRole {
    /// The subcommand of the executable. A child that offers itself for adoption names its role
    /// with it.
    pub const fn subcommand(self) -> &'static str {
        match self {
            ChildRole::WeightServer => "weight-server",
            ChildRole::Worker => "worker",
            ChildRole::Router => "router",
            ChildRole::Mps => "mps",
            ChildRole::DeviceMonitor => "device-monitor",
        }
    }

    /// The kernel's OOM killer prefers workers: a worker restarts in a second, the weights do not.
    pub(crate) const fn oom_score_adj(self) -> i32 {
        match self {
            // Without MPS, all workers lose their contexts.
            ChildRole::WeightServer | ChildRole::Mps => 0,
            ChildRole::Router => 100,
            ChildRole::Worker | ChildRole::DeviceMonitor => 500,
        }
    }

    /// The order in which roles stop: first the router, which accepts requests; last the
    /// weight-server.
    pub(crate) const STOP_ORDER: [ChildRole; 5] = [
        ChildRole::Router,
        ChildRole::Worker,
        ChildRole::Mps,
        ChildRole::DeviceMonitor,
        ChildRole::WeightServer,
    ];

    pub fn policy(self, supervision: &SupervisionConfig) -> RestartPolicy {
        let stop_grace = match self {
            // Open streams may finish: a router that drains for longer asks for more time.
            ChildRole::Router => Duration::from_secs(20),
            ChildRole::Worker => Duration::from_secs(10),
            ChildRole::WeightServer | ChildRole::Mps => Duration::from_secs(5),
            // It has nothing to finish.
            ChildRole::DeviceMonitor => Duration::from_secs(1),
        };
        let max_backoff = match self {
            // No worker can attach without it.
            ChildRole::WeightServer => Duration::from_secs(5),
            ChildRole::Router | ChildRole::Worker | ChildRole::Mps | ChildRole::DeviceMonitor => {
                RestartPolicy::DEFAULT.max_backoff
            }
        };
        let watchdog = supervision.watchdog;
        RestartPolicy { stop_grace, max_backoff, watchdog, ..RestartPolicy::DEFAULT }
    }
}

/// One child: its name in the runtime directory and its configuration.
#[derive(Clone, Debug)]
pub struct ChildSpec {
    pub name: String,
    pub role: ChildRole,
    /// Written to `<name>.toml` before the child starts.
    pub config: toml::Table,
}

impl ChildSpec {
    /// The only child of its role.
    fn of_role(role: ChildRole, config: toml::Table) -> Self {
        Self { name: role.subcommand().to_owned(), role, config }
    }
}

/// One copy of a model's weights.
#[derive(Clone, Debug, PartialEq)]
pub struct CopySpec {
    /// "host", a NUMA node as "host:N", or the UUID of a GPU.
    pub device: String,
    /// The name of the weights at the weight-server, which several models may share. The supervisor
    /// chooses it ([`crate::shared_weights`]).
    pub weights: String,
    /// The configuration that all workers of this copy share; [`FleetSpec::complete_worker_config`]
    /// adds the rest.
    pub worker_config: toml::Table,
    pub memory: CopyMemory,
}

/// What a copy takes of its device, as the weight-server's ledger counts it. In bytes; 0 if it is
/// unknown.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, rename_all = "kebab-case")]
pub struct CopyMemory {
    pub weights_bytes: u64,
    /// Context, KV cache and workspace of each worker.
    pub worker_bytes: u64,
}

#[derive(Clone, Debug, PartialEq)]
pub struct ModelSpec {
    pub name: String,
    pub path: PathBuf,
    /// The number of workers of each copy at the start.
    pub workers: u32,
    /// At least one, each on a device of its own.
    pub copies: Vec<CopySpec>,
    /// Whether small tensors share allocations.
    pub pack: bool,
    /// Identifies the model's files and their versions: equal texts are equal files. Empty:
    /// unknown.
    pub files: String,
    /// The path that the configuration names. It differs from `path` after a swap. It is empty for
    /// a model that a command loaded.
    pub configured_path: PathBuf,
    /// The model becomes idle when no request has used it for this long. `None`: never.
    pub idle_unload: Option<Duration>,
    /// The first request loads the model, not the start of the fleet.
    pub on_demand: bool,
    /// Why the model is on the host although GPUs were to be tried first.
    pub fallback: Option<String>,
    /// The model's table in the configuration. A command that replaces the file starts from it.
    pub settings: toml::Table,
}

impl ModelSpec {
    /// Whether one copy of the weights on a common device serves both models.
    pub fn has_same_weights(&self, other: &ModelSpec) -> bool {
        !self.files.is_empty() && self.files == other.files && self.pack == other.pack
    }

    /// Whether a copy of the weights serves both models.
    pub fn has_same_copy(&self, other: &ModelSpec) -> bool {
        self.has_same_weights(other) && self.devices().any(|device| other.copy_on(device).is_some())
    }

    /// The name of the weights on a device of the model.
    pub fn weights_on(&self, device: &str) -> Option<&str> {
        self.copy_on(device).map(|copy| copy.weights.as_str())
    }

    /// In the order of the configuration.
    pub fn devices(&self) -> impl Iterator<Item = &str> {
        self.copies.iter().map(|copy| copy.device.as_str())
    }

    pub fn copy_on(&self, device: &str) -> Option<&CopySpec> {
        self.copies.iter().find(|copy| copy.device == device)
    }

    /// The names of the weights of all copies.
    pub fn weights(&self) -> impl Iterator<Item = &str> {
        self.copies.iter().map(|copy| copy.weights.as_str())
    }

    /// The workers of all copies at the start.
    pub fn total_workers(&self) -> u32 {
        self.workers.saturating_mul(u32::try_from(self.copies.len()).unwrap_or(u32::MAX))
    }

    /// A setting of the workers that is equal for all copies.
    fn worker_setting(&self, key: &str) -> Option<&toml::Value> {
        self.copies.first().and_then(|copy| copy.worker_config.get(key))
    }

    /// Every name in requests, that of the model first.
    pub fn names(&self) -> impl Iterator<Item = &str> {
        std::iter::once(self.name.as_str()).chain(self.aliases())
    }

    pub(crate) fn aliases(&self) -> impl Iterator<Item = &str> {
        let aliases = self.worker_setting("aliases").and_then(toml::Value::as_array);
        aliases.into_iter().flatten().filter_map(toml::Value::as_str)
    }

    /// The model that drafts for this one.
    pub fn draft(&self) -> Option<&str> {
        self.worker_setting("draft").and_then(toml::Value::as_str)
    }
}

/// The number of a worker in the fleet, and what it serves.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct WorkerSlot {
    /// Unique in the fleet; part of the worker's socket name.
    pub index: u32,
    /// The model's name in requests.
    pub model: String,
    /// The name of its weights at the weight-server.
    pub weights: String,
    /// The device of its copy.
    pub device: String,
}

impl WorkerSlot {
    pub fn name(&self) -> String {
        format!("worker-{}", self.index)
    }
}

/// Adds the settings of one worker to the configuration that all workers of its model share.
pub type CompleteWorkerConfig = Arc<dyn Fn(&WorkerSlot, &mut toml::Table) + Send + Sync>;

/// What the configuration says when it is read again.
#[derive(Clone, Debug)]
pub struct ReloadedSpec {
    pub router: toml::Table,
    pub models: Vec<ModelSpec>,
    /// Of the models directory.
    pub unusable: Vec<UnusableModel>,
    /// Changes since the start that only a restart of the supervisor applies.
    pub not_applied: Vec<SettingChange>,
    /// The GPUs of the models.
    pub gpus: Vec<GpuDevice>,
}

/// Looks for a GPU by its UUID among those that a process of the fleet sees. The error says why it
/// cannot be used. It may block for as long as the driver does.
pub type FindGpu = Arc<dyn Fn(&str) -> Result<GpuDevice, String> + Send + Sync>;

/// Reads the configuration again.
#[derive(Clone)]
pub struct ConfigReader {
    /// Reads and checks all of it. The error says what is wrong, and where.
    pub read: Arc<dyn Fn(ReloadScope) -> Result<ReloadedSpec, String> + Send + Sync>,
    /// What was read last is applied.
    pub accept: Arc<dyn Fn() + Send + Sync>,
}

/// What is read again.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ReloadScope {
    /// All, to see what would change.
    Preview,
    All,
    /// The models directory, and nothing of the configuration.
    ModelsDirectory,
}

/// A model of the configuration whose file cannot be used. The fleet lists it as failed.
#[derive(Clone, Debug)]
pub struct UnusableModel {
    pub name: String,
    pub path: PathBuf,
    pub failure: ModelFailure,
    pub is_from_directory: bool,
}

/// The whole fleet.
pub struct FleetSpec {
    /// Without `devices`.
    pub weight_server: toml::Table,
    pub router: toml::Table,
    /// The GPUs that the fleet uses.
    pub devices: FleetDevices,
    pub find_gpu: FindGpu,
    /// The workers of GPUs share them through MPS. It runs if the fleet uses a GPU.
    pub mps: Option<MpsConfig>,
    /// The configuration of the device monitor, without its devices. It runs if the fleet uses a
    /// GPU.
    pub device_monitor: Option<toml::Table>,
    /// Every process of the router inherits it. Connections that arrive during a restart wait in
    /// the socket's queue.
    pub router_socket: Option<OwnedFd>,
    /// The address of the router, for information only.
    pub http_address: String,
    /// The log level of the children, unless BALLAST_LOG sets another.
    pub log: tracing::Level,
    pub models: Vec<ModelSpec>,
    pub unusable: Vec<UnusableModel>,
    pub supervision: SupervisionConfig,
    /// Called for every worker, also for those that are added while the fleet runs.
    pub complete_worker_config: CompleteWorkerConfig,
    /// Absent for a fleet without a configuration file.
    pub read_again: Option<ConfigReader>,
}

impl FleetSpec {
    /// The children that the fleet starts with, in start order. `living` are the workers of a dead
    /// supervisor that still run.
    pub fn initial_children(
        &self,
        living: &BTreeMap<u32, WorkerSlot>,
    ) -> Vec<(ChildSpec, Option<WorkerSlot>)> {
        let mut children = vec![
            ChildSpec::of_role(ChildRole::WeightServer, self.devices.weight_server(&self.weight_server)),
            ChildSpec::of_role(ChildRole::Router, self.router.clone()),
        ];
        children.extend(self.device_children());
        let mut children: Vec<(ChildSpec, Option<WorkerSlot>)> =
            children.into_iter().map(|spec| (spec, None)).collect();
        let weights_of = |name: &str, device: &str| {
            let model = self.models.iter().find(|model| model.name == name)?;
            model.weights_on(device).map(str::to_owned)
        };
        let workers = assign_workers(&self.models, living);
        let workers =
            workers.into_iter().map(|(index, model, copy)| self.worker_spec(index, model, copy, weights_of));
        children.extend(workers);
        children
    }

    /// What runs beside the workers of GPUs.
    pub(crate) fn device_children(&self) -> Vec<ChildSpec> {
        if self.devices.is_empty() {
            return Vec::new();
        }
        let mps = self.mps.iter().map(|mps| {
            let directory = toml::Value::String(mps.directory.display().to_string());
            let config = toml::Table::from_iter([("directory".to_owned(), directory)]);
            ChildSpec::of_role(ChildRole::Mps, config)
        });
        let monitor = self.device_monitor.iter();
        let monitor =
            monitor.map(|config| ChildSpec::of_role(ChildRole::DeviceMonitor, self.devices.monitor(config)));
        mps.chain(monitor).collect()
    }

    /// `weights_of` returns the name of the weights of a model of the fleet on a device.
    pub(crate) fn worker_spec(
        &self,
        index: u32,
        model: &ModelSpec,
        copy: &CopySpec,
        weights_of: impl Fn(&str, &str) -> Option<String>,
    ) -> (ChildSpec, Option<WorkerSlot>) {
        let (name, weights, device) = (model.name.clone(), copy.weights.clone(), copy.device.clone());
        let slot = WorkerSlot { index, model: name, weights, device };
        let mut config = copy.worker_config.clone();
        (self.complete_worker_config)(&slot, &mut config);
        // The worker asks the weight-server for its draft model.
        if let Some(weights) = model.draft().and_then(|draft| weights_of(draft, &copy.device)) {
            config.insert("draft".to_owned(), toml::Value::String(weights));
        }
        (ChildSpec { name: slot.name(), role: ChildRole::Worker, config }, Some(slot))
    }
}

/// Numbers the workers of all copies. A living worker keeps its number, if its model still has the
/// same weights on its device; other workers get numbers that no living one has.
fn assign_workers<'a>(
    models: &'a [ModelSpec],
    living: &BTreeMap<u32, WorkerSlot>,
) -> Vec<(u32, &'a ModelSpec, &'a CopySpec)> {
    let mut unused = (0u32..).filter(|index| !living.contains_key(index));
    let mut assigned = Vec::new();
    for (model, copy) in models.iter().flat_map(|model| model.copies.iter().map(move |copy| (model, copy))) {
        let serves = |slot: &WorkerSlot| {
            (&slot.model, &slot.weights, &slot.device) == (&model.name, &copy.weights, &copy.device)
        };
        let kept = living.iter().filter(|(_, slot)| serves(slot)).map(|(index, _)| *index);
        let kept: Vec<u32> = kept.take(model.workers as usize).collect();
        let new = model.workers as usize - kept.len();
        let indexes: Vec<u32> = kept.into_iter().chain(unused.by_ref().take(new)).collect();
        assigned.extend(indexes.into_iter().map(|index| (index, model, copy)));
    }
    assigned
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn living_workers_keep_their_numbers_whatever_the_order_of_the_models() {
        let copy = |weights: &str, device: &str| CopySpec {
            device: device.to_owned(),
            weights: weights.to_owned(),
            worker_config: toml::Table::new(),
            memory: CopyMemory::default(),
        };
        let model = |name: &str, workers| ModelSpec {
            name: name.to_owned(),
            path: PathBuf::new(),
            workers,
            copies: vec![copy(name, "host")],
            pack: true,
            files: String::new(),
            configured_path: PathBuf::new(),
            idle_unload: None,
            on_demand: false,
            fallback: None,
            settings: toml::Table::new(),
        };
        let models = [model("new", 1), model("b", 2), model("a", 2)];
        let numbers = |living: &[(u32, &str)]| -> Vec<(u32, String)> {
            let slot = |index: u32, of: &str| {
                let (model, weights) = of.split_once('/').unwrap_or((of, of));
                let device = "host".to_owned();
                WorkerSlot { index, model: model.to_owned(), weights: weights.to_owned(), device }
            };
            let living = living.iter().map(|&(index, of)| (index, slot(index, of))).collect();
            let assigned = assign_workers(&models, &living);
            assigned.into_iter().map(|(index, model, _)| (index, model.name.clone())).collect()
        };
        let expected = |list: [(u32, &str); 5]| list.map(|(index, of)| (index, of.to_owned()));
        assert_eq!(numbers(&[]), expected([(0, "new"), (1, "b"), (2, "b"), (3, "a"), (4, "a")]));
        let living = [(0, "a"), (1, "a"), (2, "b"), (5, "gone"), (6, "b/other"), (7, "a")];
        assert_eq!(numbers(&living), expected([(3, "new"), (2, "b"), (4, "b"), (0, "a"), (1, "a")]));

        let spread = [ModelSpec { copies: vec![copy("m", "host:0"), copy("m", "host:1")], ..model("m", 2) }];
        let slot = |index, device: &str| {
            let (model, weights, device) = ("m".to_owned(), "m".to_owned(), device.to_owned());
            (index, WorkerSlot { index, model, weights, device })
        };
        let living = [slot(0, "host:1"), slot(1, "gone"), slot(2, "host:0")].into();
        let assigned = assign_workers(&spread, &living);
        let assigned: Vec<(u32, &str)> =
            assigned.iter().map(|(index, _, copy)| (*index, copy.device.as_str())).collect();
        assert_eq!(assigned, [(2, "host:0"), (3, "host:0"), (0, "host:1"), (4, "host:1")]);
    }
}
