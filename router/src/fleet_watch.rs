// SPDX-License-Identifier: Apache-2.0

//! Asks the supervisor how the processes of the fleet are, for `/ready` and metrics, which models
//! the fleet has, when their next workers start, and which file each model means while it is
//! swapped. A router without a supervisor knows only the workers that serve.

use std::collections::HashMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use proto::fleet::v1::fleet_client::FleetClient;
use proto::fleet::v1::{
    Child, ChildState, Device, GetStatusRequest, Model, ModelState, Status, WakeModelRequest,
};
use service::RuntimeDir;
use tokio::time::Instant;
use tokio_util::sync::CancellationToken;
use tonic::transport::Channel;

use crate::registry::{ModelFiles, WorkerRegistry};
use crate::worker_outlook::{FleetAnswer, NextWorker, SupervisorReply};

const POLL_INTERVAL: Duration = Duration::from_secs(1);
/// The shortest time between two questions for the sake of requests.
const ANSWER_INTERVAL_MIN: Duration = Duration::from_millis(100);
/// The supervisor answers from memory. One that takes longer is stopped.
const ANSWER_WAIT: Duration = Duration::from_secs(1);
/// How long after a look at the fleet the memory ledger is asked for. The page looks once a second,
/// and a hidden one not at all.
const LEDGER_WISH: Duration = Duration::from_secs(10);

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
    idle: Vec<String>,
    failed_models: Vec<String>,
    devices: Vec<Device>,
    on_fallback: Vec<String>,
    /// `None`: the supervisor does not answer.
    status: Option<Arc<Status>>,
    /// When a request last wanted the memory ledger.
    ledger_wanted: Option<Instant>,
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

    /// The models that a request would wake.
    pub(crate) fn idle(&self) -> Vec<String> {
        self.lock().idle.clone()
    }

    /// The models that cannot be loaded.
    pub(crate) fn failed_models(&self) -> Vec<String> {
        self.lock().failed_models.clone()
    }

    /// Figures and quarantines.
    pub(crate) fn devices(&self) -> Vec<Device> {
        self.lock().devices.clone()
    }

    /// The models that are on the host although GPUs were to be tried first.
    pub(crate) fn on_fallback(&self) -> Vec<String> {
        self.lock().on_fallback.clone()
    }

    /// All that the supervisor has said. From now on it is asked for the memory ledger, too.
    pub(crate) fn look(&self) -> Option<Arc<Status>> {
        let mut reports = self.lock();
        reports.ledger_wanted = Some(Instant::now());
        reports.status.clone()
    }

    fn wants_ledger(&self, now: Instant) -> bool {
        self.lock().ledger_wanted.is_some_and(|wanted| now.duration_since(wanted) <= LEDGER_WISH)
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
        let mut is_refused = false;
        let mut asked = Instant::now();
        loop {
            // However many requests name unknown models.
            let answer_is_wanted = async {
                registry.answer_is_wanted().await;
                tokio::time::sleep_until(asked + ANSWER_INTERVAL_MIN).await;
            };
            tokio::select! {
                _ = poll.tick() => {}
                // What the supervisor has refused is asked for again with the next poll.
                () = registry.wake_is_wanted(), if !is_refused => {}
                () = answer_is_wanted => {}
                () = stop.cancelled() => return,
            }
            is_refused = false;
            for name in registry.models_to_wake() {
                is_refused |= !wake(&mut client, name).await;
            }
            asked = Instant::now();
            let ledger = self.wants_ledger(asked);
            let has_supervisor = socket.exists();
            let status = if has_supervisor { ask(&mut client, ledger).await } else { None };
            if let Some(status) = &status {
                let models = status.models.iter().map(|model| (model.name.clone(), model.digest.to_vec()));
                registry.set_fleet_models(models.collect());
                let files = status.models.iter().map(|model| {
                    let (name, digest) = (model.name.clone(), model.digest.to_vec());
                    ModelFiles { name, digest, files: model.files.clone() }
                });
                registry.set_fleet_files(files.collect());
            }
            let reply = match &status {
                Some(status) => SupervisorReply::Answer(FleetAnswer {
                    asked,
                    models: next_workers(status, asked),
                    failures: failures(status),
                    aliases: aliases(status),
                }),
                None if has_supervisor => SupervisorReply::Silence,
                None => SupervisorReply::NoSupervisor,
            };
            // The reports come first: a client whose request this reply ends may ask for them next.
            self.lock().update(status, asked);
            registry.set_fleet_reply(reply);
        }
    }
}

impl FleetReports {
    fn update(&mut self, status: Option<Status>, asked: Instant) {
        let status = status.map(Arc::new);
        self.status.clone_from(&status);
        let status = status.unwrap_or_default();
        let copies = status.models.iter().flat_map(|model| {
            model.copies.iter().map(|copy| CopyReport {
                model: model.name.clone(),
                device: copy.device.clone(),
                is_ready: copy.state() == ModelState::Ready,
                is_failed: copy.state() == ModelState::Failed,
            })
        });
        self.copies = copies.collect();
        let is_idle = |model: &&Model| next_worker(model, &[], asked) == NextWorker::OnDemand;
        self.idle = status.models.iter().filter(is_idle).map(|model| model.name.clone()).collect();
        self.failed_models = failures(&status).into_keys().collect();
        self.failed_models.sort_unstable();
        self.processes = status.children.iter().map(ProcessReport::from).collect();
        let on_fallback = status.models.iter().filter(|model| !model.fallback.is_empty());
        self.on_fallback = on_fallback.map(|model| model.name.clone()).collect();
        self.devices.clone_from(&status.devices);
    }
}

async fn ask(client: &mut FleetClient<Channel>, ledger: bool) -> Option<Status> {
    let answer = client.get_status(GetStatusRequest { memory: false, ledger });
    match service::patience::timeout(ANSWER_WAIT, answer).await {
        Ok(Ok(status)) => Some(status.into_inner()),
        Ok(Err(_)) | Err(_) => None,
    }
}

/// Wakes an idle model. Returns false if the supervisor does not answer or refuses.
async fn wake(client: &mut FleetClient<Channel>, name: String) -> bool {
    let answer = client.wake_model(WakeModelRequest { name: name.clone(), on_demand: true });
    let answer = service::patience::timeout(ANSWER_WAIT, answer).await;
    match &answer {
        Ok(Ok(_)) => tracing::info!(model = name, "woken for a request"),
        Ok(Err(status)) => tracing::warn!(model = name, %status, "cannot wake a model for a request"),
        Err(_) => tracing::warn!(model = name, "the supervisor does not answer: cannot wake a model"),
    }
    matches!(answer, Ok(Ok(_)))
}

/// When the next worker of each model starts.
fn next_workers(status: &Status, asked: Instant) -> HashMap<String, NextWorker> {
    let models = status.models.iter();
    models.map(|model| (model.name.clone(), next_worker(model, &status.children, asked))).collect()
}

/// Why models cannot be loaded. Those whose copies are tried again are not among them.
fn failures(status: &Status) -> HashMap<String, String> {
    let failed = status.models.iter().filter(|model| {
        matches!(model.state(), ModelState::Failed | ModelState::Idle) && !model.failure.is_empty()
    });
    failed.map(|model| (model.name.clone(), model.failure.clone())).collect()
}

fn aliases(status: &Status) -> HashMap<String, String> {
    let of = |model: &Model| {
        let name = model.name.clone();
        model.aliases.clone().into_iter().map(move |alias| (alias, name.clone()))
    };
    status.models.iter().flat_map(of).collect()
}

fn next_worker(model: &Model, children: &[Child], asked: Instant) -> NextWorker {
    match model.state() {
        ModelState::Idle if model.failure.is_empty() => return NextWorker::OnDemand,
        ModelState::Idle => return NextWorker::Never,
        _ if model.wakes_after => return NextWorker::At(asked),
        _ if model.becomes_idle => return NextWorker::OnDemand,
        _ if model.is_unloading => return NextWorker::Never,
        _ => {}
    }
    let workers = children.iter().filter(|child| child.model == model.name);
    let starts = workers.map(|worker| next_start(worker, asked));
    // The workers of a model that loads start after it.
    let first = match model.state() {
        ModelState::Loading => NextWorker::At(asked),
        _ => NextWorker::Never,
    };
    starts.fold(first, NextWorker::or)
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

impl From<&Child> for ProcessReport {
    fn from(child: &Child) -> Self {
        let state = child.state();
        Self {
            is_running: state == ChildState::Running,
            is_failed: state == ChildState::Failed,
            restarts: child.crashes,
            name: child.name.clone(),
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
            ("idle", ModelState::Idle, false),
            ("becomes idle", ModelState::Ready, true),
            ("could not be woken", ModelState::Idle, false),
            ("wakes after", ModelState::Ready, true),
        ];
        let model = |&(name, state, is_unloading): &(&str, ModelState, bool)| Model {
            name: name.to_owned(),
            state: state.into(),
            is_unloading,
            becomes_idle: name == "becomes idle" || name == "wakes after",
            wakes_after: name == "wakes after",
            failure: if name == "could not be woken" { "no room" } else { "" }.to_owned(),
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
            ("idle", NextWorker::OnDemand),
            ("becomes idle", NextWorker::OnDemand),
            ("could not be woken", NextWorker::Never),
            ("wakes after", NextWorker::At(asked)),
        ];
        assert_eq!(next, expected.map(|(name, next)| (name.to_owned(), next)).into());
    }
}
