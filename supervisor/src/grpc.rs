// SPDX-License-Identifier: Apache-2.0

//! The gRPC service ballast.fleet.v1 on supervisor.sock: commands and status for `ballast ps` and
//! other clients. Other modules use only those of its messages that are plain figures.

mod device_messages;

use std::path::PathBuf;
use std::pin::Pin;
use std::time::Duration;

use proto::fleet::v1 as wire;
use proto::fleet::v1::fleet_server::{Fleet as FleetService, FleetServer, SERVICE_NAME};
use service::admin_audit::{AdminCall, AdminCallKind, AdminCaller};
use service::grpc::UdsListener;
use service::{RuntimeDir, smaps};
use tokio::sync::{broadcast, mpsc};
use tokio::task::JoinHandle;
use tokio_stream::wrappers::ReceiverStream;
use tokio_stream::{Stream, StreamExt};
use tonic::{Request, Response, Status};

use crate::commands::{CommandError, CommandReply, DRAIN_GRACE, FleetCommand};
use crate::device_health::DeviceReport;
use crate::events::SupervisorEvent;
use crate::fleet::CommandSender;
use crate::fleet_devices::HOST;
use crate::ledger_cache::LedgerCache;
use crate::spec::{ChildRole, CopyMemory, CopySpec, ModelSpec, ReloadScope};
use crate::spec_diff::SpecChange;
use crate::state::{BackoffReason, ChildState};
use crate::status::{ChildStatus, CopyStatus, FleetEvent, ModelFailure, ModelState, ModelStatus};

/// Events that wait for one client.
const STREAM_CAPACITY: usize = 16;
/// After the event loop has ended, open calls (the reply to StopFleet, event streams) get this long
/// to end.
const LINGER: Duration = Duration::from_millis(200);

struct FleetApi {
    commands: CommandSender,
    directory: RuntimeDir,
    ledger: LedgerCache,
}

impl FleetApi {
    /// Carries out a command, and logs who gave it.
    async fn audited<T>(
        &self,
        caller: AdminCaller,
        (command, subject): (&'static str, &str),
        make: impl FnOnce(CommandReply<T>) -> FleetCommand,
    ) -> Result<T, Status> {
        let call = begin(caller, command, subject);
        call.end(self.commands.call(make).await)
    }
}

fn begin(caller: AdminCaller, command: &'static str, subject: &str) -> AdminCall {
    AdminCall::begin(caller, AdminCallKind::Command, command, subject)
}

/// Serves until the event loop has ended.
pub(crate) fn serve(
    commands: CommandSender,
    directory: RuntimeDir,
    ledger: LedgerCache,
    listener: UdsListener,
) -> Result<JoinHandle<()>, Status> {
    let event_loop = commands.event_loop.clone();
    let (_, health) = service::grpc::health();
    let (reflection, reflection_alpha) = service::grpc::reflection(proto::FILE_DESCRIPTOR_SET, SERVICE_NAME)
        .map_err(|error| Status::internal(error.to_string()))?;
    let router = service::grpc::server()
        .add_service(FleetServer::new(FleetApi { commands, directory, ledger }))
        .add_service(health)
        .add_service(reflection)
        .add_service(reflection_alpha);
    let stop = {
        let event_loop = event_loop.clone();
        async move { event_loop.closed().await }
    };
    Ok(tokio::spawn(async move {
        tokio::select! {
            served = service::grpc::serve(router, listener, stop) => {
                if let Err(error) = served {
                    tracing::error!(%error, "the fleet API failed");
                }
            }
            () = async { event_loop.closed().await; tokio::time::sleep(LINGER).await } => {}
        }
    }))
}

type EventStream<T> = Pin<Box<dyn Stream<Item = Result<T, Status>> + Send>>;

#[tonic::async_trait]
impl FleetService for FleetApi {
    async fn get_status(
        &self,
        request: Request<wire::GetStatusRequest>,
    ) -> Result<Response<wire::Status>, Status> {
        let request = request.into_inner();
        let ledger = if request.ledger { self.ledger.latest() } else { Vec::new() };
        let status = self.commands.status().await?;
        let mut children: Vec<wire::Child> = status.children.into_iter().map(wire::Child::from).collect();
        if request.memory {
            children = tokio::task::spawn_blocking(move || with_memory(children))
                .await
                .map_err(|error| Status::internal(error.to_string()))?;
        }
        let latest = status.crash_reports.latest.map(|directory| directory.display().to_string());
        Ok(Response::new(wire::Status {
            supervisor_pid: std::process::id(),
            runtime_dir: self.directory.path().display().to_string(),
            children,
            models: status.models.into_iter().map(wire::Model::from).collect(),
            stored_fds: u32::try_from(status.stored_fds).unwrap_or(u32::MAX),
            http_address: status.http_address,
            log_lines_lost: service::logging::lost_lines(),
            latest_crash_report: latest.unwrap_or_default(),
            crash_reports_lost: status.crash_reports.lost,
            devices: status.devices.into_iter().map(wire::Device::from).collect(),
            ledger,
        }))
    }

    type WatchEventsStream = EventStream<wire::Event>;

    async fn watch_events(
        &self,
        _request: Request<wire::WatchEventsRequest>,
    ) -> Result<Response<Self::WatchEventsStream>, Status> {
        let mut events = self.commands.events.subscribe();
        let event_loop = self.commands.event_loop.clone();
        let (sender, receiver) = mpsc::channel(STREAM_CAPACITY);
        tokio::spawn(async move {
            loop {
                let event = tokio::select! {
                    event = events.recv() => event,
                    () = event_loop.closed() => return,
                };
                let event = match event {
                    Ok(event) => wire::Event::from(event),
                    Err(broadcast::error::RecvError::Lagged(missed)) => {
                        wire::Event { kind: Some(wire::event::Kind::MissedEvents(missed)) }
                    }
                    Err(broadcast::error::RecvError::Closed) => return,
                };
                if sender.send(Ok(event)).await.is_err() {
                    return;
                }
            }
        });
        Ok(Response::new(Box::pin(ReceiverStream::new(receiver))))
    }

    async fn restart_child(
        &self,
        request: Request<wire::RestartChildRequest>,
    ) -> Result<Response<wire::RestartChildResponse>, Status> {
        let caller = AdminCaller::of(&request);
        let wire::RestartChildRequest { name, drain_ms } = request.into_inner();
        let drain = drain_ms.map(Duration::from_millis);
        let subject = name.clone();
        self.audited(caller, ("restart", &subject), |reply| FleetCommand::Restart { name, drain, reply })
            .await?;
        Ok(Response::new(wire::RestartChildResponse {}))
    }

    async fn drain_worker(
        &self,
        request: Request<wire::DrainWorkerRequest>,
    ) -> Result<Response<wire::DrainWorkerResponse>, Status> {
        let caller = AdminCaller::of(&request);
        let wire::DrainWorkerRequest { name, grace_ms } = request.into_inner();
        let (grace, subject) = (Duration::from_millis(grace_ms), name.clone());
        self.audited(caller, ("drain", &subject), |reply| FleetCommand::Drain { name, grace, reply }).await?;
        Ok(Response::new(wire::DrainWorkerResponse {}))
    }

    type LoadModelStream = EventStream<wire::LoadModelEvent>;

    async fn load_model(
        &self,
        request: Request<wire::LoadModelRequest>,
    ) -> Result<Response<Self::LoadModelStream>, Status> {
        let caller = AdminCaller::of(&request);
        let request = request.into_inner();
        let name = request.name.clone();
        let call = begin(caller, "load", &name);
        let model = match model_spec(request) {
            Ok(model) => model,
            Err(error) => return call.end(Err(error)),
        };
        let mut events = self.commands.events.subscribe();
        if let Err(error) = self.commands.call(|reply| FleetCommand::LoadModel { model, reply }).await {
            return call.end(Err(error));
        }
        let (sender, receiver) = mpsc::channel(STREAM_CAPACITY);
        tokio::spawn(async move {
            loop {
                let model = match events.recv().await {
                    Ok(FleetEvent::Model(model)) if model.name == name => model,
                    Ok(FleetEvent::ModelRemoved(removed)) if removed == name => {
                        let text = format!("model {name:?} was unloaded before it was ready");
                        let _: Result<(), _> = sender.send(call.end(Err(Status::aborted(text)))).await;
                        return;
                    }
                    Ok(_) | Err(broadcast::error::RecvError::Lagged(_)) => continue,
                    Err(broadcast::error::RecvError::Closed) => return,
                };
                let (last, message) = match &model.state {
                    ModelState::Loading { .. } => {
                        (false, Ok(wire::load_model_event::Kind::Progress(model.into())))
                    }
                    ModelState::Ready => (true, Ok(wire::load_model_event::Kind::Loaded(model.into()))),
                    ModelState::Failed(failure) | ModelState::Idle(Some(failure)) => {
                        (true, Err(failure.to_status()))
                    }
                    ModelState::Idle(None) => (
                        true,
                        Err(Status::aborted(format!("model {name:?} became idle before it was ready"))),
                    ),
                };
                let message = message.map(|kind| wire::LoadModelEvent { kind: Some(kind) });
                if last {
                    // A client that is gone does not change how the load has ended.
                    let _: Result<(), _> = sender.send(call.end(message)).await;
                    return;
                }
                if sender.send(message).await.is_err() {
                    return;
                }
            }
        });
        Ok(Response::new(Box::pin(ReceiverStream::new(receiver).fuse())))
    }

    async fn unload_model(
        &self,
        request: Request<wire::UnloadModelRequest>,
    ) -> Result<Response<wire::UnloadModelResponse>, Status> {
        let caller = AdminCaller::of(&request);
        let wire::UnloadModelRequest { name, drain_ms, keep_idle } = request.into_inner();
        let (grace, subject) = (drain_grace(drain_ms), name.clone());
        let command = if keep_idle { "unload-idle" } else { "unload" };
        let unload = |reply| FleetCommand::UnloadModel { name, grace, keep_idle, reply };
        self.audited(caller, (command, &subject), unload).await?;
        Ok(Response::new(wire::UnloadModelResponse {}))
    }

    async fn wake_model(
        &self,
        request: Request<wire::WakeModelRequest>,
    ) -> Result<Response<wire::WakeModelResponse>, Status> {
        let caller = AdminCaller::of(&request);
        let wire::WakeModelRequest { name, on_demand } = request.into_inner();
        let subject = name.clone();
        let wake = |reply| FleetCommand::WakeModel { name, on_demand, reply };
        self.audited(caller, ("wake", &subject), wake).await?;
        Ok(Response::new(wire::WakeModelResponse {}))
    }

    async fn add_worker(
        &self,
        request: Request<wire::AddWorkerRequest>,
    ) -> Result<Response<wire::AddWorkerResponse>, Status> {
        let caller = AdminCaller::of(&request);
        let model = request.into_inner().model;
        let subject = model.clone();
        let name = self
            .audited(caller, ("add-worker", &subject), |reply| FleetCommand::AddWorker { model, reply })
            .await?;
        Ok(Response::new(wire::AddWorkerResponse { name }))
    }

    async fn remove_worker(
        &self,
        request: Request<wire::RemoveWorkerRequest>,
    ) -> Result<Response<wire::RemoveWorkerResponse>, Status> {
        let caller = AdminCaller::of(&request);
        let wire::RemoveWorkerRequest { name, drain_ms } = request.into_inner();
        let (grace, subject) = (drain_grace(drain_ms), name.clone());
        let remove = |reply| FleetCommand::RemoveWorker { name, grace, reply };
        self.audited(caller, ("remove-worker", &subject), remove).await?;
        Ok(Response::new(wire::RemoveWorkerResponse {}))
    }

    async fn swap_model(
        &self,
        request: Request<wire::SwapModelRequest>,
    ) -> Result<Response<wire::SwapModelResponse>, Status> {
        let caller = AdminCaller::of(&request);
        let wire::SwapModelRequest { model, drain_ms } = request.into_inner();
        let call = begin(caller, "swap", model.as_ref().map_or("", |model| model.name.as_str()));
        let missing = || Status::invalid_argument("model: missing");
        let model = match model.ok_or_else(missing).and_then(model_spec) {
            Ok(model) => model,
            Err(error) => return call.end(Err(error)),
        };
        let grace = drain_grace(drain_ms);
        let swap = |reply| FleetCommand::SwapModel { model, grace, reply };
        let swapped = call.end(self.commands.call(swap).await)?;
        let configured_path = swapped.map(|path| path.display().to_string()).unwrap_or_default();
        Ok(Response::new(wire::SwapModelResponse { configured_path }))
    }

    async fn reload(
        &self,
        request: Request<wire::ReloadRequest>,
    ) -> Result<Response<wire::ReloadResponse>, Status> {
        let caller = AdminCaller::of(&request);
        let dry_run = request.into_inner().dry_run;
        let subject = if dry_run { "dry run" } else { "" };
        let scope = if dry_run { ReloadScope::Preview } else { ReloadScope::All };
        let reload = |reply| FleetCommand::Reload { scope, reply };
        let changes = self.audited(caller, ("reload", subject), reload).await?;
        let changes = changes.iter().map(SpecChange::to_string).collect();
        Ok(Response::new(wire::ReloadResponse { changes }))
    }

    async fn quarantine_device(
        &self,
        request: Request<wire::QuarantineDeviceRequest>,
    ) -> Result<Response<wire::QuarantineDeviceResponse>, Status> {
        let caller = AdminCaller::of(&request);
        let wire::QuarantineDeviceRequest { device, reason } = request.into_inner();
        let subject = device.clone();
        let quarantine = |reply| FleetCommand::QuarantineDevice { device, reason, reply };
        self.audited(caller, ("quarantine", &subject), quarantine).await?;
        Ok(Response::new(wire::QuarantineDeviceResponse {}))
    }

    async fn end_quarantine(
        &self,
        request: Request<wire::EndQuarantineRequest>,
    ) -> Result<Response<wire::EndQuarantineResponse>, Status> {
        let caller = AdminCaller::of(&request);
        let device = request.into_inner().device;
        let subject = device.clone();
        let end = |reply| FleetCommand::EndQuarantine { device, reply };
        self.audited(caller, ("end-quarantine", &subject), end).await?;
        Ok(Response::new(wire::EndQuarantineResponse {}))
    }

    async fn report_devices(
        &self,
        request: Request<wire::ReportDevicesRequest>,
    ) -> Result<Response<wire::ReportDevicesResponse>, Status> {
        let reports = request.into_inner().devices.into_iter().map(DeviceReport::from).collect();
        let sent = self.commands.event_loop.send(SupervisorEvent::DevicesReported { reports }).await;
        sent.map_err(|_| Status::from(CommandError::Stopping))?;
        Ok(Response::new(wire::ReportDevicesResponse {}))
    }

    async fn stop_fleet(
        &self,
        request: Request<wire::StopFleetRequest>,
    ) -> Result<Response<wire::StopFleetResponse>, Status> {
        let call = begin(AdminCaller::of(&request), "stop", "");
        self.commands.send(FleetCommand::Stop).await;
        call.end(Ok::<_, Status>(()))?;
        Ok(Response::new(wire::StopFleetResponse {}))
    }
}

fn drain_grace(milliseconds: Option<u64>) -> Duration {
    milliseconds.map_or(DRAIN_GRACE, Duration::from_millis)
}

fn model_spec(request: wire::LoadModelRequest) -> Result<ModelSpec, Status> {
    let wire::LoadModelRequest {
        name,
        path,
        workers,
        worker_config,
        device,
        no_packing,
        files,
        settings,
        further_copies,
        idle_unload_ms,
        weights_bytes,
        worker_bytes,
        fallback,
    } = request;
    let table = |field: &str, text: &str| {
        let parsed = text.parse::<toml::Table>();
        parsed.map_err(|error| Status::invalid_argument(format!("{field}: {}", error.message())))
    };
    let first = wire::FurtherCopy { device, worker_config, weights_bytes, worker_bytes };
    let mut copies: Vec<CopySpec> = Vec::new();
    for wire::FurtherCopy { device, worker_config, weights_bytes, worker_bytes } in
        std::iter::once(first).chain(further_copies)
    {
        let device = if device.is_empty() { HOST.to_owned() } else { device };
        if copies.iter().any(|copy| copy.device == device) {
            return Err(Status::invalid_argument(format!("further_copies: {device} is named twice")));
        }
        // The event loop names the weights.
        let weights = String::new();
        let worker_config = table("worker_config", &worker_config)?;
        let memory = CopyMemory { weights_bytes, worker_bytes };
        copies.push(CopySpec { device, weights, worker_config, memory });
    }
    Ok(ModelSpec {
        name,
        path: path.into(),
        workers,
        copies,
        pack: !no_packing,
        files,
        configured_path: PathBuf::new(),
        idle_unload: idle_unload_ms.map(Duration::from_millis),
        on_demand: false,
        fallback: (!fallback.is_empty()).then_some(fallback),
        settings: table("settings", &settings)?,
    })
}

/// The name of the memfds that hold weights, as smaps shows it.
const WEIGHT_MAPPINGS: &str = "/memfd:ballast-weights";

fn with_memory(mut children: Vec<wire::Child>) -> Vec<wire::Child> {
    for child in children.iter_mut().filter(|c| c.pid != 0) {
        // A process that has just exited has no memory to report.
        let Ok(mappings) = smaps::mappings_of_process(child.pid) else { continue };
        let all = smaps::sum_mappings(&mappings, |_| true);
        let weights = smaps::sum_mappings(&mappings, |name| name.starts_with(WEIGHT_MAPPINGS));
        child.memory = Some(wire::Memory {
            resident: all.rss,
            proportional: all.pss,
            anonymous: all.anonymous,
            swap: all.swap,
            weights_resident: weights.rss,
            weights_proportional: weights.pss,
            weights_anonymous: weights.anonymous,
        });
    }
    children
}

impl From<ChildStatus> for wire::Child {
    fn from(child: ChildStatus) -> Self {
        Self {
            name: child.name,
            role: wire::Role::from(child.role).into(),
            state: wire::ChildState::from(child.state).into(),
            pid: child.pid,
            crashes: child.crashes,
            uptime_ms: u64::try_from(child.uptime.as_millis()).unwrap_or(u64::MAX),
            status_text: child.status_text,
            last_termination: child.last_termination.map(|end| end.to_string()).unwrap_or_default(),
            model: child.model.unwrap_or_default(),
            device: child.device.unwrap_or_default(),
            memory: None,
            consecutive_crashes: child.consecutive_crashes,
            next_start_ms: child
                .next_start_in
                .map(|wait| u64::try_from(wait.as_millis()).unwrap_or(u64::MAX)),
        }
    }
}

impl From<ChildRole> for wire::Role {
    fn from(role: ChildRole) -> Self {
        match role {
            ChildRole::WeightServer => wire::Role::WeightServer,
            ChildRole::Worker => wire::Role::Worker,
            ChildRole::Router => wire::Role::Router,
            ChildRole::Mps => wire::Role::Mps,
            ChildRole::DeviceMonitor => wire::Role::DeviceMonitor,
        }
    }
}

impl From<ChildState> for wire::ChildState {
    fn from(state: ChildState) -> Self {
        match state {
            ChildState::Stopped => wire::ChildState::Stopped,
            ChildState::Orphaned { .. } => wire::ChildState::Orphaned,
            ChildState::Starting { .. } => wire::ChildState::Starting,
            ChildState::Running { .. } => wire::ChildState::Running,
            ChildState::Draining { .. } => wire::ChildState::Draining,
            ChildState::Stopping { .. } | ChildState::Killing { .. } => wire::ChildState::Stopping,
            ChildState::BackingOff { reason: BackoffReason::Crash, .. } => wire::ChildState::BackingOff,
            ChildState::BackingOff { .. } => wire::ChildState::Failed,
        }
    }
}

impl From<ModelStatus> for wire::Model {
    fn from(model: ModelStatus) -> Self {
        let (state, done_bytes, total_bytes, failure) = state_parts(model.state);
        Self {
            name: model.name,
            aliases: model.aliases,
            files: model.files,
            path: model.path.display().to_string(),
            state: state.into(),
            done_bytes,
            total_bytes,
            failure,
            weights: model.copies.first().map_or_else(String::new, |copy| copy.weights.clone()),
            digest: model.digest,
            settings: model.settings.to_string(),
            is_unloading: model.is_unloading,
            becomes_idle: model.becomes_idle,
            wakes_after: model.wakes_after,
            fallback: model.fallback.unwrap_or_default(),
            copies: model.copies.into_iter().map(wire::ModelCopy::from).collect(),
        }
    }
}

impl From<CopyStatus> for wire::ModelCopy {
    fn from(copy: CopyStatus) -> Self {
        let CopyStatus { device, weights, state } = copy;
        let (state, done_bytes, total_bytes, failure) = state_parts(state);
        Self { device, state: state.into(), done_bytes, total_bytes, failure, weights }
    }
}

fn state_parts(state: ModelState) -> (wire::ModelState, u64, u64, String) {
    match state {
        ModelState::Loading { done_bytes, total_bytes } => {
            (wire::ModelState::Loading, done_bytes, total_bytes, String::new())
        }
        ModelState::Ready => (wire::ModelState::Ready, 0, 0, String::new()),
        ModelState::Failed(failure) => (wire::ModelState::Failed, 0, 0, failure.text),
        ModelState::Idle(failure) => {
            (wire::ModelState::Idle, 0, 0, failure.map(|failure| failure.text).unwrap_or_default())
        }
    }
}

impl From<FleetEvent> for wire::Event {
    fn from(event: FleetEvent) -> Self {
        let kind = match event {
            FleetEvent::Child(child) => wire::event::Kind::Child(child.into()),
            FleetEvent::ChildRemoved(name) => wire::event::Kind::ChildRemoved(name),
            FleetEvent::Model(model) => wire::event::Kind::Model(model.into()),
            FleetEvent::ModelRemoved(name) => wire::event::Kind::ModelRemoved(name),
        };
        Self { kind: Some(kind) }
    }
}

impl From<CommandError> for Status {
    fn from(error: CommandError) -> Self {
        let text = error.to_string();
        match error {
            CommandError::UnknownChild { .. }
            | CommandError::UnknownModel { .. }
            | CommandError::UnknownDevice { .. } => Status::not_found(text),
            CommandError::NotAWorker { .. }
            | CommandError::AmbiguousModel { .. }
            | CommandError::NoConfiguration
            | CommandError::DeviceUnusable { .. }
            | CommandError::Configuration { .. } => Status::invalid_argument(text),
            CommandError::NameTaken { .. } => Status::already_exists(text),
            CommandError::StartFailed { .. } | CommandError::TooManyWorkers { .. } => {
                Status::resource_exhausted(text)
            }
            CommandError::UnloadFailed { .. }
            | CommandError::SwapRefused { .. }
            | CommandError::ModelIsIdle { .. }
            | CommandError::NotQuarantined { .. }
            | CommandError::DeviceQuarantined { .. } => Status::failed_precondition(text),
            CommandError::SwapRuns { .. } => Status::aborted(text),
            CommandError::WakeFailed { failure, .. } => ModelFailure { text, ..failure }.to_status(),
            CommandError::SwapFailed { failure, .. } => ModelFailure { text, ..failure }.to_status(),
            CommandError::Stopping => Status::unavailable(text),
        }
    }
}
