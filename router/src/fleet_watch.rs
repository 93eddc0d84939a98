// SPDX-License-Identifier: Apache-2.0

//! Asks the supervisor how the processes of the fleet are, for `/ready` and metrics, which models
//! the fleet has, and which file each model means while it is swapped. A router without a
//! supervisor knows only the workers that serve.

use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use proto::fleet::v1::fleet_client::FleetClient;
use proto::fleet::v1::{Child, ChildState, GetStatusRequest, Status};
use service::RuntimeDir;
use tokio_util::sync::CancellationToken;
use tonic::transport::Channel;

use crate::registry::WorkerRegistry;

const POLL_INTERVAL: Duration = Duration::from_secs(1);
/// The supervisor answers from memory. One that takes longer is stopped.
const ANSWER_WAIT: Duration = Duration::from_secs(1);

/// One process, as the supervisor last reported it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct ProcessReport {
    pub(crate) name: String,
    pub(crate) is_running: bool,
    /// The process crashes again and again, or with an error that a restart rarely cures.
    pub(crate) is_failed: bool,
    pub(crate) restarts: u32,
}

/// The latest reports. Cheap to clone.
#[derive(Clone, Debug, Default)]
pub(crate) struct FleetWatch {
    processes: Arc<Mutex<Vec<ProcessReport>>>,
}

impl FleetWatch {
    /// The processes by name. Empty without a supervisor that answers.
    pub(crate) fn processes(&self) -> Vec<ProcessReport> {
        self.processes.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }

    pub(crate) fn failed(&self) -> Vec<String> {
        self.processes().into_iter().filter(|process| process.is_failed).map(|process| process.name).collect()
    }

    /// Polls the supervisor until `stop`.
    pub(crate) async fn run(
        self,
        directory: RuntimeDir,
        registry: Arc<WorkerRegistry>,
        stop: CancellationToken,
    ) {
        let socket = directory.supervisor_socket();
        let Ok(channel) = service::grpc::connect_lazy(&socket) else { return };
        let mut client = FleetClient::new(channel);
        let mut poll = tokio::time::interval(POLL_INTERVAL);
        poll.set_missed_tick_behavior(tokio::time::MissedTickBehavior::Delay);
        loop {
            tokio::select! {
                _ = poll.tick() => {}
                () = stop.cancelled() => return,
            }
            let status = if socket.exists() { ask(&mut client).await } else { None };
            if let Some(status) = &status {
                let models = status.models.iter().map(|model| (model.name.clone(), model.digest.to_vec()));
                registry.set_fleet_models(models.collect());
            }
            let children = status.map(|status| status.children).unwrap_or_default();
            let reports = children.into_iter().map(ProcessReport::from).collect();
            *self.processes.lock().unwrap_or_else(PoisonError::into_inner) = reports;
        }
    }
}

async fn ask(client: &mut FleetClient<Channel>) -> Option<Status> {
    let answer = client.get_status(GetStatusRequest { memory: false });
    match service::patience::timeout(ANSWER_WAIT, answer).await {
        Ok(Ok(status)) => Some(status.into_inner()),
        Ok(Err(_)) | Err(_) => None,
    }
}

impl From<Child> for ProcessReport {
    fn from(child: Child) -> Self {
        let state = child.state();
        Self {
            is_running: state == ChildState::Running,
            is_failed: state == ChildState::Failed,
            restarts: child.crashes,
            name: child.name,
        }
    }
}
