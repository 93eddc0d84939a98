//! What a fleet consists of: decided by whoever starts it, before anything runs.

use std::os::fd::OwnedFd;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use crate::state::RestartPolicy;

#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum ChildRole {
    WeightServer,
    Worker,
    Router,
}

impl ChildRole {
    /// The subcommand of the executable; also how a child names its role when it offers itself.
    pub const fn subcommand(self) -> &'static str {
        match self {
            ChildRole::WeightServer => "weight-server",
            ChildRole::Worker => "worker",
            ChildRole::Router => "router",
        }
    }

    /// Whom the kernel's OOM killer takes first: a worker is back in a second, the weights are not.
    pub(crate) const fn oom_score_adj(self) -> i32 {
        match self {
            ChildRole::WeightServer => 0,
            ChildRole::Router => 100,
            ChildRole::Worker => 500,
        }
    }

    /// Stop order: first who takes requests, last who owns the weights.
    pub(crate) const STOP_ORDER: [ChildRole; 3] =
        [ChildRole::Router, ChildRole::Worker, ChildRole::WeightServer];

    pub(crate) const fn policy(self) -> RestartPolicy {
        let stop_grace = match self {
            // Streams in flight may end; the router's own drain is shorter.
            ChildRole::Router => Duration::from_secs(20),
            ChildRole::Worker => Duration::from_secs(10),
            ChildRole::WeightServer => Duration::from_secs(5),
        };
        RestartPolicy { stop_grace, ..RestartPolicy::DEFAULT }
    }
}

/// One child: its name in the runtime directory and the text of its configuration file.
#[derive(Clone, Debug)]
pub struct ChildSpec {
    pub name: String,
    pub role: ChildRole,
    /// Written to `<name>.toml` before the child starts.
    pub config: toml::Table,
}

#[derive(Clone, Debug, PartialEq)]
pub struct ModelSpec {
    pub name: String,
    pub path: PathBuf,
    /// Workers at the start.
    pub workers: u32,
    /// "host", or a GPU's UUID.
    pub device: String,
    /// Pack small tensors into shared allocations.
    pub pack: bool,
    /// What all its workers are configured with; completed by [`FleetSpec::worker`].
    pub worker_config: toml::Table,
}

/// The place of a worker in the fleet.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct WorkerSlot {
    /// Unique in the fleet; part of the socket's name.
    pub index: u32,
    pub model: String,
}

impl WorkerSlot {
    pub fn name(&self) -> String {
        format!("worker-{}", self.index)
    }
}

/// Adds to a model's worker configuration what belongs to one place.
pub type CompleteWorkerConfig = Arc<dyn Fn(&WorkerSlot, &mut toml::Table) + Send + Sync>;

/// The whole fleet.
pub struct FleetSpec {
    pub weight_server: toml::Table,
    pub router: toml::Table,
    /// Handed to every incarnation of the router: connections that come while it is restarted wait in the socket's queue.
    pub router_socket: Option<OwnedFd>,
    /// For information: where the router listens.
    pub http_address: String,
    /// Log level of the children, unless BALLAST_LOG says otherwise.
    pub log: tracing::Level,
    pub models: Vec<ModelSpec>,
    /// Completes the configuration of a worker with what is its own; workers are also added while the fleet runs.
    pub complete_worker_config: CompleteWorkerConfig,
}

impl FleetSpec {
    /// The children that are there from the start, in start order.
    pub(crate) fn initial_children(&self) -> Vec<(ChildSpec, Option<WorkerSlot>)> {
        let fixed = |role: ChildRole, config: &toml::Table| {
            (ChildSpec { name: role.subcommand().to_owned(), role, config: config.clone() }, None)
        };
        let mut children =
            vec![fixed(ChildRole::WeightServer, &self.weight_server), fixed(ChildRole::Router, &self.router)];
        let models = self.models.iter().flat_map(|model| (0..model.workers).map(move |_| model));
        children.extend((0..).zip(models).map(|(index, model)| self.worker_spec(index, model)));
        children
    }

    pub(crate) fn worker_spec(&self, index: u32, model: &ModelSpec) -> (ChildSpec, Option<WorkerSlot>) {
        let slot = WorkerSlot { index, model: model.name.clone() };
        let mut config = model.worker_config.clone();
        (self.complete_worker_config)(&slot, &mut config);
        (ChildSpec { name: slot.name(), role: ChildRole::Worker, config }, Some(slot))
    }
}
