// SPDX-License-Identifier: Apache-2.0

//! [`RunningFleet`]: a fleet that a command has started. The command waits until it serves, uses
//! it, and stops it.

use std::collections::{HashMap, HashSet};
use std::time::{Duration, Instant};

use proto::v1::inference_client::InferenceClient;
use service::listen::HTTP_SOCKET_NAME;
use service::logging::print_line;
use service::printable::printable_lines;
use service::runtime_dir::{ClaimedRuntimeDir, remove_dead_dirs};
use service::{Exit, Notify, RuntimeDir, Shutdown};
use supervisor::{
    BackoffReason, ChildRole, ChildState, ChildStatus, FleetEvent, FleetHandle, FleetStatus, ModelState,
    ModelStatus, ReloadScope, Termination, recorded_models,
};
use tokio::sync::broadcast::error::RecvError;
use tonic::transport::Channel;

use crate::chat_templates::{UnusableTemplate, read_chat_templates};
use crate::cli_error::{CliError, CliResult, IoContext};
use crate::device_choice::DeviceChoice;
use crate::fleet_config::FleetConfig;
use crate::fleet_models::FleetModels;
use crate::models_directory::watch_directory;
use crate::progress_bar::{ProgressBar, ProgressUnit, WorkProgress};
use crate::served_workers::served_workers;
use crate::sized_model::SizedModel;

/// The start fails after this time without any progress: no byte loaded and no child's state
/// changed.
const PROGRESS_WAIT: Duration = Duration::from_secs(60);
/// How often the router is asked whether it serves all workers. The router scans for workers every
/// 100 ms.
const ROUTER_POLL_INTERVAL: Duration = Duration::from_millis(10);

/// Runs a command's future on a runtime of its own.
pub(crate) fn block_on<T>(work: impl Future<Output = CliResult<T>>) -> CliResult<T> {
    supervisor::raise_descriptor_limit()?;
    let runtime = tokio::runtime::Builder::new_multi_thread()
        .worker_threads(2)
        .enable_all()
        .build()
        .with_context(|| "cannot start a runtime".to_owned())?;
    let outcome = runtime.block_on(work);
    // This does not wait for a thread that reads standard input.
    runtime.shutdown_background();
    outcome
}

pub(crate) struct RunningFleet {
    pub(crate) fleet: FleetHandle,
    pub(crate) shutdown: Shutdown,
    models: HashMap<String, u32>,
    /// The devices of each model, in the order of the configuration.
    pub(crate) devices: Vec<(String, DeviceChoice)>,
    progress: ProgressBar,
    /// Models whose fault was printed.
    reported: HashSet<String>,
    /// Models may come with files of the models directory.
    is_watching: bool,
}

impl RunningFleet {
    /// Starts the processes. `notify` is the service manager; `log` is the log level of the
    /// children.
    pub(crate) async fn start(config: &FleetConfig, notify: Notify, log: tracing::Level) -> CliResult<Self> {
        let shutdown = Shutdown::install().with_context(|| "cannot listen to signals".to_owned())?;
        let inherited = service::listen::inherited_fds()?;
        let (mut activated, kept): (Vec<_>, Vec<_>) =
            inherited.into_iter().partition(|fd| fd.name == HTTP_SOCKET_NAME);
        service::supervision::watch_supervisor("supervisor", "supervisor", None, &notify, &shutdown)?;
        remove_dead_dirs();
        let claimed = ClaimedRuntimeDir::claim(config.runtime_dir.as_deref())?;
        let socket = activated.pop().map(|activated| activated.fd);
        let FleetModels { config, resident, mut sized, unusable, found } = tokio::select! {
            read = FleetModels::read(config, claimed.directory()) => read?,
            () = shutdown.requested() => return Err(CliError::interrupted()),
        };
        let on_fault = match claimed.directory().living_children().is_ok_and(|living| !living.is_empty()) {
            true => UnusableTemplate::KeepPresent,
            false => UnusableTemplate::Refuse,
        };
        read_chat_templates(&mut sized, &recorded_models(claimed.directory()), on_fault).await?;
        let mut plan = config.plan(claimed.directory(), socket, log, &sized, &resident)?;
        plan.unusable = unusable;
        let of_model = |model: SizedModel| {
            let name = model.name;
            model.copies.into_iter().map(move |copy| (name.clone(), copy.choice))
        };
        let devices = sized.into_iter().flat_map(of_model).collect();
        let models = plan.models.iter().map(|m| (m.name.clone(), m.workers)).collect();
        let fleet = FleetHandle::start(plan, claimed, notify, kept).await?;
        let is_watching = config.models_directory.is_some();
        if let Some(directory) = config.models_directory {
            fleet.reload_on(watch_directory(directory, found)?, ReloadScope::ModelsDirectory);
        }
        Ok(Self {
            fleet,
            shutdown,
            models,
            devices,
            progress: ProgressBar::start(),
            reported: HashSet::new(),
            is_watching,
        })
    }

    pub(crate) fn directory(&self) -> &RuntimeDir {
        self.fleet.directory()
    }

    /// Connects to the router's public API.
    pub(crate) fn client(&self) -> CliResult<InferenceClient<Channel>> {
        let channel = service::grpc::connect_lazy(&self.directory().router_socket())?;
        Ok(InferenceClient::new(channel)
            .max_decoding_message_size(service::grpc::MESSAGE_BYTES_MAX)
            .max_encoding_message_size(service::grpc::MESSAGE_BYTES_MAX))
    }

    /// Does the work, then stops the fleet in any case. Ctrl-C cancels the work.
    pub(crate) async fn finish<T>(
        mut self,
        work: impl AsyncFnOnce(&mut Self) -> CliResult<T>,
    ) -> CliResult<T> {
        let requested = self.shutdown.requested();
        let outcome = tokio::select! {
            outcome = work(&mut self) => outcome,
            () = requested => Err(CliError::interrupted()),
        };
        self.progress.clear();
        self.stop().await;
        outcome
    }

    pub(crate) async fn status(&self) -> CliResult<FleetStatus> {
        self.fleet.status().await.map_err(|error| CliError::new(Exit::Internal, error.to_string()))
    }

    /// Waits until a command has stopped the fleet.
    pub(crate) async fn ended(&mut self) {
        self.fleet.stopped().await;
    }

    async fn stop(mut self) {
        self.fleet.stop().await;
        let forced = self.shutdown.forced();
        let in_time = tokio::select! {
            () = self.fleet.stopped() => true,
            () = forced => false,
        };
        if !in_time {
            self.fleet.kill().await;
            self.fleet.stopped().await;
        }
    }

    /// Waits until the router serves every model with all its workers. A fault of an adopted fleet
    /// is reported only: its other processes serve.
    pub(crate) async fn ready(&mut self) -> CliResult {
        match self.wait_until_served().await {
            Err(failure) if self.fleet.has_adopted() && failure.exit != Exit::Interrupted => {
                tracing::error!(reason = failure.message(), "the adopted fleet is not complete");
                Ok(())
            }
            outcome => outcome,
        }
    }

    async fn wait_until_served(&mut self) -> CliResult {
        let mut events = self.fleet.events();
        let mut client = self.client()?;
        self.check_all().await?;
        let mut last_change = Instant::now();
        let mut poll = tokio::time::interval(ROUTER_POLL_INTERVAL);
        poll.set_missed_tick_behavior(tokio::time::MissedTickBehavior::Delay);
        loop {
            tokio::select! {
                event = events.recv() => match event {
                    Ok(FleetEvent::Model(ModelStatus { name, state: ModelState::Loading { done_bytes, total_bytes }, .. })) => {
                        last_change = Instant::now();
                        self.progress.show(WorkProgress { name, unit: ProgressUnit::Bytes, done: done_bytes, total: total_bytes });
                    }
                    Ok(_) | Err(RecvError::Lagged(_)) => {
                        last_change = Instant::now();
                        self.check_all().await?;
                    }
                    Err(RecvError::Closed) => return Err(CliError::new(Exit::Internal, "the fleet stopped while it was starting")),
                },
                _ = poll.tick() => {
                    if self.is_served(&mut client).await {
                        // Perhaps no model can be served at all.
                        self.check_all().await?;
                        self.progress.clear();
                        return Ok(());
                    }
                    if last_change.elapsed() > PROGRESS_WAIT {
                        return Err(self.stalled().await);
                    }
                }
            }
        }
    }

    async fn is_served(&self, client: &mut InferenceClient<Channel>) -> bool {
        // If the router does not answer, it is still starting or restarting.
        let Ok(reply) = client.list_models(proto::v1::ListModelsRequest {}).await else { return false };
        let served = served_workers(reply.into_inner());
        let Ok(status) = self.fleet.status().await else { return false };
        let faults = model_faults(&status);
        let is_served = |(name, workers): (&String, &u32)| {
            if faults.iter().any(|(faulty, _)| faulty == name) {
                return true;
            }
            // Its file has left the models directory.
            let Some(model) = status.models.iter().find(|model| model.name == *name) else { return true };
            // The others serve without a copy that cannot be loaded.
            let copies = model.copies.len() - model.failed_copies().count();
            let expected = workers.saturating_mul(u32::try_from(copies).unwrap_or(u32::MAX));
            expected == 0 || served.get(name).is_some_and(|found| *found >= expected)
        };
        let is_settled = |model: &ModelStatus| model.copies.len() <= 1 || model.state == ModelState::Ready;
        status.models.iter().all(is_settled) && self.models.iter().all(is_served)
    }

    /// Fails if a child has an error that waiting cannot cure, or all models that are to have
    /// workers. The fault of one of several models is printed: the others serve.
    async fn check_all(&mut self) -> CliResult {
        let status = self.status().await?;
        let serves_no_model = |child: &&ChildStatus| child.model.is_none();
        status.children.iter().filter(serves_no_model).try_for_each(check_child)?;
        let faults = model_faults(&status);
        let is_faulty = |name: &String| faults.iter().any(|(faulty, _)| faulty == name);
        let mut expected = self.models.iter().filter(|(_, workers)| **workers > 0);
        let all_fail = !self.is_watching && expected.all(|(name, _)| is_faulty(name));
        for (name, failure) in faults {
            if all_fail {
                return Err(failure);
            }
            if self.reported.insert(name.clone()) {
                let text = format!("model {name}: {}; the other models are served", failure.message());
                print_line(&printable_lines(&text));
            }
        }
        Ok(())
    }

    async fn stalled(&self) -> CliError {
        let (mut waiting, mut router) = (Vec::new(), String::new());
        if let Ok(status) = self.fleet.status().await {
            let statuses = status.children.iter().filter(|child| child.role == ChildRole::Router);
            router = statuses.map(|child| child.status_text.clone()).collect();
            let not_running = |c: &&ChildStatus| !matches!(c.state, ChildState::Running { .. });
            waiting.extend(status.children.iter().filter(not_running).map(|c| c.name.clone()));
        }
        let on_whom = match waiting.is_empty() {
            true => format!("the router does not serve all workers ({router})"),
            false => format!("still waiting for {}", waiting.join(", ")),
        };
        CliError::new(
            Exit::PeerLost,
            format!(
                "the fleet does not start: no progress for {PROGRESS_WAIT:?}, {on_whom}; set BALLAST_LOG=debug for details"
            ),
        )
    }
}

/// The models with an error that waiting cannot cure, each with the first of its errors. One that
/// cannot be loaded is named for that, because its workers fail as a consequence.
fn model_faults(status: &FleetStatus) -> Vec<(String, CliError)> {
    let failed = |model: &ModelStatus| match &model.state {
        ModelState::Failed(failure) => Some((
            model.name.clone(),
            CliError::new(failure.exit, format!("cannot load {}: {}", model.path.display(), failure.text)),
        )),
        ModelState::Loading { .. } | ModelState::Ready | ModelState::Idle(_) => None,
    };
    let mut faults: Vec<(String, CliError)> = status.models.iter().filter_map(failed).collect();
    let is_ready = |child: &ChildStatus, model: &ModelStatus| {
        let mut copies = model.copies.iter();
        copies.any(|copy| Some(&copy.device) == child.device.as_ref() && copy.state == ModelState::Ready)
    };
    for model in &status.models {
        if faults.iter().any(|(faulty, _)| *faulty == model.name) {
            continue;
        }
        let draft = model.settings.get("draft").and_then(toml::Value::as_str);
        let of_draft = faults.iter().find(|(faulty, _)| Some(faulty.as_str()) == draft);
        let of_draft = of_draft.map(|(_, failure)| CliError::new(failure.exit, failure.message()));
        let workers = status.children.iter().filter(|child| child.model.as_ref() == Some(&model.name));
        let mut workers = workers.filter(|child| is_ready(child, model));
        if let Some(failure) = of_draft.or_else(|| workers.find_map(|child| check_child(child).err())) {
            faults.push((model.name.clone(), failure));
        }
    }
    faults
}

/// Fails if a child cannot start, unless a restart may help.
fn check_child(child: &ChildStatus) -> CliResult {
    let Some(last_termination) = &child.last_termination else { return Ok(()) };
    let exit = last_termination.exit().unwrap_or(Exit::Internal);
    let is_failed = matches!(
        child.state,
        ChildState::BackingOff { reason: BackoffReason::CrashLoop | BackoffReason::PermanentError(_), .. }
    );
    let hopeless = is_failed
        || matches!(exit, Exit::Usage | Exit::ModelRefused | Exit::AddressInUse | Exit::OutOfResources);
    if !hopeless {
        return Ok(());
    }
    let who = match (child.role, &child.model) {
        (ChildRole::Worker, Some(model)) => format!("{} cannot serve {model}", child.name),
        _ => format!("the {} cannot start", child.name),
    };
    Err(CliError::new(exit, format!("{who}: {}", last_end_words(last_termination))))
}

/// The end of a process that could not even report why.
const OUT_OF_RESOURCES: Termination = Termination::ExitCode(Exit::OutOfResources as i32);

fn last_end_words(last_termination: &supervisor::LastTermination) -> String {
    match last_termination.status_text.as_str() {
        "" if last_termination.termination == OUT_OF_RESOURCES => {
            format!(
                "{OUT_OF_RESOURCES}: memory, processes or threads ran out; its line in the log says which"
            )
        }
        "" => last_termination.termination.to_string(),
        words => words.to_owned(),
    }
}
