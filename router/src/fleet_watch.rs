// SPDX-License-Identifier: Apache-2.0

//! Asks the supervisor how the processes of the fleet are, for `/ready` and metrics, which models
//! the fleet has, when their next workers start, and which file each model means while it is
//! swapped. A router without a supervisor knows only the workers that serve.

use std::collections::HashMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use proto::fleet::v1::fleet_client::FleetClient;
use proto::fleet::v1::{Child, ChildState, GetStatusRequest, Model, ModelState, Status};
use service::RuntimeDir;
use tokio::time::Instant;
use tokio_util::sync::CancellationToken;
use tonic::transport::Channel;

use crate::registry::WorkerRegistry;
use crate::worker_outlook::{FleetAnswer, NextWorker};

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

/// One copy of a model's weights, as the supervisor last reported it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct CopyReport {
    pub(crate) model: String,
    pub(crate) device: String,
    pub(crate) is_ready: bool,
    /// The load failed. It is tried again while another copy serves.
    pub(crate) is_failed: bool,
}

#[derive(Debug, Default)]
struct FleetReports {
    processes: Vec<ProcessReport>,
    copies: Vec<CopyReport>,
}

/// The latest reports. Cheap to clone.
#[derive(Clone, Debug, Default)]
pub(crate) struct FleetWatch {
    reports: Arc<Mutex<FleetReports>>,
}

impl FleetWatch {
    /// The processes by name. Empty without a supervisor that answers.
    pub(crate) fn processes(&self) -> Vec<ProcessReport> {
        self.lock().processes.clone()
    }

    /// The copies of all models. Empty without a supervisor that answers.
    pub(crate) fn copies(&self) -> Vec<CopyReport> {
        self.lock().copies.clone()
    }

    fn lock(&self) -> MutexGuard<'_, FleetReports> {
        self.reports.lock().unwrap_or_else(PoisonError::into_inner)
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
            let asked = Instant::now();
            let status = if socket.exists() { ask(&mut client).await } else { None };
            if let Some(status) = &status {
                let models = status.models.iter().map(|model| (model.name.clone(), model.digest.to_vec()));
                registry.set_fleet_models(models.collect());
            }
            let models = status.as_ref().map(|status| next_workers(status, asked));
            registry.set_fleet_answer(models.map(|models| FleetAnswer { asked, models }));
            let status = status.unwrap_or_default();
            let copies = status.models.iter().flat_map(|model| {
                model.copies.iter().map(|copy| CopyReport {
                    model: model.name.clone(),
                    device: copy.device.clone(),
                    is_ready: copy.state() == ModelState::Ready,
                    is_failed: copy.state() == ModelState::Failed,
                })
            });
            let copies = copies.collect();
            let processes = status.children.into_iter().map(ProcessReport::from).collect();
            *self.lock() = FleetReports { processes, copies };
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

/// When the next worker of each model starts.
fn next_workers(status: &Status, asked: Instant) -> HashMap<String, NextWorker> {
    let next_worker = |model: &Model| {
        if model.is_unloading {
            return NextWorker::Never;
        }
        let workers = status.children.iter().filter(|child| child.model == model.name);
        let starts = workers.map(|worker| next_start(worker, asked));
        // The workers of a model that loads start after it.
        let first = match model.state() {
            ModelState::Loading => NextWorker::At(asked),
            _ => NextWorker::Never,
        };
        starts.fold(first, NextWorker::or)
    };
    status.models.iter().map(|model| (model.name.clone(), next_worker(model))).collect()
}

fn next_start(worker: &Child, asked: Instant) -> NextWorker {
    match worker.state() {
        ChildState::Stopped | ChildState::Unspecified => NextWorker::Never,
        ChildState::BackingOff | ChildState::Failed => {
            NextWorker::At(asked + Duration::from_millis(worker.next_start_ms()))
        }
        // One that drains or stops may start again: the supervisor does not say whether it will.
        ChildState::Starting
        | ChildState::Running
        | ChildState::Stopping
        | ChildState::Orphaned
        | ChildState::Draining => NextWorker::At(asked),
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

#[cfg(test)]
mod tests {
    use super::*;

    fn worker(model: &str, state: ChildState, next_start_ms: Option<u64>) -> Child {
        Child { model: model.to_owned(), state: state.into(), next_start_ms, ..Child::default() }
    }

    #[test]
    fn the_next_worker_of_a_model_is_its_first_that_is_not_stopped() {
        let models = [
            ("serves", ModelState::Ready, false),
            ("crashes", ModelState::Ready, false),
            ("drained", ModelState::Ready, false),
            ("unloading", ModelState::Ready, true),
            ("loading", ModelState::Loading, false),
            ("failed", ModelState::Failed, false),
        ];
        let model = |&(name, state, is_unloading): &(&str, ModelState, bool)| Model {
            name: name.to_owned(),
            state: state.into(),
            is_unloading,
            ..Model::default()
        };
        let children = vec![
            worker("serves", ChildState::Stopped, None),
            worker("serves", ChildState::Draining, None),
            worker("crashes", ChildState::Failed, Some(40_000)),
            worker("crashes", ChildState::BackingOff, Some(7_000)),
            worker("drained", ChildState::Stopped, None),
            worker("unloading", ChildState::Draining, None),
            worker("", ChildState::Running, None),
        ];
        let status = Status { models: models.iter().map(model).collect(), children, ..Status::default() };
        let asked = Instant::now();
        let next = next_workers(&status, asked);
        let expected = [
            ("serves", NextWorker::At(asked)),
            ("crashes", NextWorker::At(asked + Duration::from_secs(7))),
            ("drained", NextWorker::Never),
            ("unloading", NextWorker::Never),
            ("loading", NextWorker::At(asked)),
            ("failed", NextWorker::Never),
        ];
        assert_eq!(next, expected.map(|(name, next)| (name.to_owned(), next)).into());
    }
}
