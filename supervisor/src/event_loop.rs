// SPDX-License-Identifier: Apache-2.0

//! The event loop of the supervisor: one task owns the children, the FD store and the models. Every
//! other task sends it events.
//!
//! `state.rs` decides about a single child. The event loop decides what concerns several:
//! - which descriptors and tokens a process gets;
//! - which messages a child may send;
//! - in which order a fleet stops;
//! - how a successor adopts the children of a dead supervisor.

mod added_devices;
mod children;
mod commands;
mod copies;
mod crashes;
mod device_lists;
mod devices;
mod idle;
mod notifications;
mod reload;
mod residency;
mod rolling;
mod room;
mod swap;
mod takeover;

use std::collections::BTreeMap;
use std::io;
use std::sync::{Arc, PoisonError};
use std::time::Instant;

use nix::sys::resource::{Resource, getrlimit, setrlimit};
use service::exit::{Exit, HasExit, exit_for_io_error};
use service::grpc::{BindError, ConnectError};
use service::listen::{InheritedFd, ListenError};
use service::notify::NotifyError;
use service::process_limits::StartError;
use service::runtime_dir::{ClaimedRuntimeDir, RuntimeDirError};
use service::{Notify, config};
use tokio::sync::{broadcast, mpsc, watch};
use tokio::task::{AbortHandle, JoinHandle};

use self::children::supervised_child;
use self::room::RoomWait;
use self::swap::RunningSwap;
use self::takeover::LivingChildren;
use crate::attach_token::AttachToken;
use crate::commands::{CommandError, CommandReply};
use crate::crash_reports::CrashReports;
use crate::deadlines::ChildDeadlines;
use crate::device_health::DeviceHealth;
use crate::events::SupervisorEvent;
use crate::fd_store::FdStore;
use crate::fleet::{CommandSender, EVENT_BROADCAST_CAPACITY, FleetHandle, FleetLoss};
use crate::fleet_devices::FleetDevices;
use crate::grpc;
use crate::idle_models::IdleModels;
use crate::ledger_cache::LedgerCache;
use crate::model_copies::ModelCopies;
use crate::model_record::recorded_models;
use crate::model_use::ModelUse;
use crate::notify_server::Checkpoint;
use crate::parent_fd_store::ParentFdStore;
use crate::process::ChildProcess;
use crate::rolling_restart::{RollingEvent, RollingRestart};
use crate::spec::{ChildSpec, FleetSpec, ModelSpec, UnusableModel, WorkerSlot};
use crate::state::{ChildEvent, ChildState, ChildStateMachine};
use crate::status::{ChildStatus, FleetEvent, LastTermination};
use crate::weight_server_admin::WeightServerAdmin;

/// Events that wait for the loop. Senders wait when the queue is full.
const EVENT_QUEUE_CAPACITY: usize = 256;

#[derive(Debug, thiserror::Error)]
pub enum FleetStartError {
    #[error(transparent)]
    Config(#[from] config::ConfigFileError),
    #[error(transparent)]
    Bind(#[from] BindError),
    #[error(transparent)]
    Connect(#[from] ConnectError),
    #[error("descriptors from systemd's FD store cannot be taken over")]
    Inherit(#[from] ListenError),
    #[error("systemd cannot be notified")]
    Notify(#[from] NotifyError),
    #[error("cannot bind the notify socket of {child}")]
    NotifySocket { child: String, source: io::Error },
    #[error("cannot read the runtime directory")]
    RuntimeDir(#[source] io::Error),
    #[error(
        "at most {limit} descriptors may be open (RLIMIT_NOFILE), this fleet needs {needed}: raise the limit with `ulimit -n`"
    )]
    FewDescriptors { limit: u64, needed: u64 },
    #[error("cannot start a thread")]
    Thread(#[source] StartError),
    #[error("cannot raise the limit of open descriptors (RLIMIT_NOFILE)")]
    DescriptorLimit(#[source] io::Error),
    #[error("cannot offer gRPC reflection")]
    Reflection(#[source] tonic::Status),
}

impl HasExit for FleetStartError {
    fn exit(&self) -> Exit {
        match self {
            FleetStartError::Config(error) => error.exit(),
            FleetStartError::Bind(error) => error.exit(),
            FleetStartError::Connect(error) => error.exit(),
            FleetStartError::Inherit(error) => error.exit(),
            FleetStartError::Notify(error) => error.exit(),
            FleetStartError::FewDescriptors { .. } => Exit::OutOfResources,
            FleetStartError::DescriptorLimit(source)
            | FleetStartError::NotifySocket { source, .. }
            | FleetStartError::RuntimeDir(source) => exit_for_io_error(source),
            FleetStartError::Thread(error) => error.exit(),
            FleetStartError::Reflection(_) => Exit::Internal,
        }
    }
}

struct SupervisedChild {
    spec: ChildSpec,
    slot: Option<WorkerSlot>,
    machine: ChildStateMachine,
    process: Option<ChildProcess>,
    /// Counts process starts. An event about an earlier process has a smaller number and is
    /// ignored.
    start_number: u64,
    /// The attach token of the current process. Unknown for an adopted worker.
    token: Option<AttachToken>,
    /// Set while the task that registers the token with the weight-server runs; the process starts
    /// after it.
    token_registration: Option<AbortHandle>,
    forwarder: JoinHandle<()>,
    /// To the task that forwards the notifications.
    checkpoints: mpsc::Sender<Checkpoint>,
    status_text: String,
    last_termination: Option<LastTermination>,
    /// The adopted process was started with another configuration.
    is_outdated: bool,
    /// Callers that wait until the child has no process.
    waits_for_stop: Vec<CommandReply<()>>,
    /// Set when the child is to be removed after it stopped, with the caller that waits for the
    /// removal.
    removed: Option<Option<CommandReply<()>>>,
}

struct ManagedModel {
    spec: ModelSpec,
    /// A command loaded the model: the configuration does not name it.
    by_command: bool,
    copies: ModelCopies,
    /// The load of each copy, by device.
    tasks: BTreeMap<String, AbortHandle>,
    unloading: Option<Unload>,
    /// The model was idle and has not been ready since.
    is_waking: bool,
    model_use: ModelUse,
    /// It is not requested yet.
    room_wait: Option<RoomWait>,
    /// Its file has changed: what it is to be when it is idle.
    replacement: Option<ModelSpec>,
}

/// An unload that is in progress.
struct Unload {
    reply: CommandReply<()>,
    keep_idle: bool,
    /// The model was woken meanwhile: it is loaded again at the end.
    wake_after: bool,
}

struct SupervisorLoop {
    spec: FleetSpec,
    directory: ClaimedRuntimeDir,
    /// The directory was deleted, and this process cannot create it.
    is_directory_damaged: bool,
    loss: FleetLoss,
    children: BTreeMap<Arc<str>, SupervisedChild>,
    models: BTreeMap<String, ManagedModel>,
    idle_models: IdleModels,
    /// Models of the configuration without a usable file, by name, until a reload or a command
    /// loads them.
    unusable: BTreeMap<String, UnusableModel>,
    fd_store: FdStore,
    /// The second copy of the FD store, if the parent is systemd.
    parent_fds: ParentFdStore,
    admin: WeightServerAdmin,
    /// The devices of `spec`, for requests to the weight-server.
    known_devices: watch::Sender<FleetDevices>,
    crash_reports: CrashReports,
    /// The supervisor's own parent.
    parent: Notify,
    reported_summary: String,
    /// Workers that get new settings.
    rolling: RollingRestart,
    swap: Option<RunningSwap>,
    /// The number of the last swap.
    last_swap: u64,
    commands: CommandSender,
    /// Compares what is resident in a new weight-server with `models`.
    sync_task: Option<AbortHandle>,
    /// Reads the ledger for models that wait for room.
    room_task: Option<AbortHandle>,
    health: DeviceHealth,
    /// Unloads of what quarantined devices held, by device.
    quarantine_unloads: BTreeMap<String, AbortHandle>,
    stopping: bool,
    deadlines: ChildDeadlines,
}

impl FleetHandle {
    /// Starts the fleet in a claimed runtime directory. If a dead supervisor left running children
    /// there, they are adopted. `stored` holds the descriptors that systemd's FD store returned.
    pub async fn start(
        mut spec: FleetSpec,
        directory: ClaimedRuntimeDir,
        parent: Notify,
        stored: Vec<InheritedFd>,
    ) -> Result<FleetHandle, FleetStartError> {
        let at_start = spec.models.iter().filter(|model| !model.on_demand);
        check_descriptors(at_start.map(|model| u64::from(model.total_workers())).sum())?;
        let names = directory.directory().clone();
        let (sender, receiver) = mpsc::channel(EVENT_QUEUE_CAPACITY);
        let commands =
            CommandSender { event_loop: sender, events: broadcast::channel(EVENT_BROADCAST_CAPACITY).0 };
        let api = service::grpc::bind(&names.supervisor_socket())?;
        let channel = service::grpc::connect_lazy(&names.weights_admin_socket())?;
        let known_devices = watch::Sender::new(spec.devices.clone());
        let admin = WeightServerAdmin::new(channel, known_devices.subscribe());
        let ledger = LedgerCache::new(admin.clone());
        let crash_reports = CrashReports::start(spec.supervision.crash_reports.as_deref(), &admin)
            .map_err(|error| FleetStartError::Thread(StartError(error)))?;
        let deadlines = ChildDeadlines::new(Instant::now(), spec.supervision.watchdog);
        let unusable = spec.unusable.drain(..).map(|model| (model.name.clone(), model)).collect();
        let mut event_loop = SupervisorLoop {
            spec,
            directory,
            is_directory_damaged: false,
            loss: FleetLoss::default(),
            children: BTreeMap::new(),
            models: BTreeMap::new(),
            idle_models: IdleModels::default(),
            unusable,
            fd_store: FdStore::default(),
            parent_fds: ParentFdStore::start(parent.clone())
                .map_err(|error| FleetStartError::Thread(StartError(error)))?,
            admin,
            known_devices,
            crash_reports,
            parent,
            reported_summary: String::new(),
            rolling: RollingRestart::default(),
            swap: None,
            last_swap: 0,
            commands: commands.clone(),
            sync_task: None,
            room_task: None,
            health: DeviceHealth::default(),
            quarantine_unloads: BTreeMap::new(),
            stopping: false,
            deadlines,
        };
        for InheritedFd { name, fd } in stored {
            if let Err(error) = event_loop.fd_store.store(&name, Arc::new(fd)) {
                tracing::warn!(name, %error, "lost a descriptor from systemd's FD store");
            }
        }
        event_loop.add_initial_models(&recorded_models(&names));
        event_loop.record_models();
        event_loop.add_recorded_devices();
        let living = LivingChildren::find(&names)?;
        if !living.is_empty() {
            event_loop.set_served_models(&living);
        }
        for (spec, slot) in event_loop.spec.initial_children(&living.slots()) {
            event_loop.add_child(spec, slot)?;
        }
        event_loop.adopt_orphans(&living)?;
        event_loop.restore_quarantines();
        let wanted = event_loop.children.iter().filter(|(_, child)| child.removed.is_none());
        let wanted: Vec<Arc<str>> = wanted.map(|(name, _)| name.clone()).collect();
        for name in wanted {
            event_loop.apply_event(&name, ChildEvent::Start);
        }
        let served =
            grpc::serve(commands.clone(), names.clone(), ledger, api).map_err(FleetStartError::Reflection)?;
        let loss = event_loop.loss.clone();
        let task = tokio::spawn(event_loop.run(receiver));
        let has_adopted = !living.is_empty();
        Ok(FleetHandle { commands, directory: names, has_adopted, loss, tasks: vec![task, served] })
    }
}

impl SupervisorLoop {
    async fn run(mut self, mut events: mpsc::Receiver<SupervisorEvent>) {
        while !(self.stopping && self.advance_shutdown()) {
            tokio::select! {
                // The event loop holds a sender itself, so the channel closes only after the loop
                // ends.
                Some(event) = events.recv() => self.handle(event),
                () = tokio::time::sleep_until(self.next_tick().into()) => self.tick(),
            }
            self.report_summary();
        }
        for child in self.children.values() {
            child.forwarder.abort();
        }
        for model in self.models.values() {
            model.abort();
        }
        // The last removals are sent before this process ends.
        self.parent_fds.flush().await;
        self.crash_reports.finish().await;
    }

    /// Creates the runtime directory again if it was deleted. Stops the fleet if another supervisor
    /// has claimed its path: children of both would answer there.
    fn check_directory(&mut self) {
        let restored = self.directory.restore();
        let was_damaged = std::mem::replace(&mut self.is_directory_damaged, restored.is_err());
        match restored {
            Ok(false) => {}
            Ok(true) => self.rewrite_files(),
            Err(error @ RuntimeDirError::InUse { .. }) => {
                tracing::error!(%error, "the runtime directory was deleted and claimed by another supervisor");
                *self.loss.lock().unwrap_or_else(PoisonError::into_inner) = Some(error);
                self.stopping = true;
            }
            Err(error) if !was_damaged => {
                tracing::error!(%error, "the runtime directory was deleted and cannot be created again yet");
            }
            Err(_) => {}
        }
    }

    /// Writes the files of a restored directory. The owners of the sockets bind them again.
    fn rewrite_files(&self) {
        let names = self.directory.directory();
        tracing::warn!(directory = %names.path().display(), "the runtime directory was deleted, it is restored");
        for (name, child) in &self.children {
            let stored = config::store(&names.config(name), &child.spec.config);
            let recorded = child.process.as_ref().map_or(Ok(()), |p| names.record_child(name, p.pid));
            if stored.is_err() || recorded.is_err() {
                tracing::error!(child = %name, ?stored, ?recorded, "cannot restore the files of the child");
            }
        }
        self.record_models();
    }

    fn next_tick(&self) -> Instant {
        let deadlines = self.children.iter().map(|(name, child)| (name, child.machine.deadline()));
        self.deadlines.next_tick(deadlines)
    }

    /// Reports passed deadlines. The event loop acts on them after the notifications that the
    /// children have sent before.
    fn tick(&mut self) {
        let paused_before = self.deadlines.paused();
        let deadlines = self.children.iter().map(|(name, child)| (name, child.machine.deadline()));
        let passed = self.deadlines.report_passed(Instant::now(), deadlines);
        let pause = self.deadlines.paused() - paused_before;
        if !pause.is_zero() {
            tracing::warn!(?pause, "this process did not run: all deadlines of children move");
        }
        self.check_directory();
        self.unload_unused(self.deadlines.running_time());
        self.return_due_devices(self.deadlines.running_time());
        for name in passed {
            let child = supervised_child(&mut self.children, &name);
            if child.checkpoints.try_send(Checkpoint::DeadlinePassed).is_err() {
                self.deadlines.clear_report(&name);
            }
        }
    }

    fn deadline_passed(&mut self, name: &Arc<str>) {
        self.deadlines.clear_report(name);
        if self.children.contains_key(name) {
            self.apply_event(name, ChildEvent::Tick);
        }
    }

    fn handle(&mut self, event: SupervisorEvent) {
        match event {
            SupervisorEvent::NotificationReceived { child, notification } => {
                self.handle_notification(&child, notification)
            }
            SupervisorEvent::ProcessExited { child, start_number } => {
                self.process_exited(&child, start_number)
            }
            SupervisorEvent::DeadlinePassed { child } => self.deadline_passed(&child),
            SupervisorEvent::WorkerDrained { child, start_number } => {
                self.worker_drained(&child, start_number)
            }
            SupervisorEvent::TokenAllowed { child, start_number, refusal } => {
                self.token_allowed(&child, start_number, refusal)
            }
            SupervisorEvent::ResidentWeights { resident } => self.unload_leftovers(resident),
            SupervisorEvent::LeftoversUnloaded => self.request_models(),
            SupervisorEvent::LedgerRead { ledger } => self.ledger_read(ledger),
            // The load was begun before the device was quarantined.
            SupervisorEvent::CopyStateChanged { device, .. } if self.health.reason(&device).is_some() => {}
            SupervisorEvent::CopyStateChanged { name, device, state } => {
                self.copy_state_changed(&name, &device, state)
            }
            SupervisorEvent::CopyLoaded { name, device, loaded } => self.copy_loaded(&name, &device, loaded),
            SupervisorEvent::WorkersOutdated { pids } => self.restart_processes(&pids),
            SupervisorEvent::ModelUnloaded { name, refusal } => self.model_unloaded(&name, refusal),
            SupervisorEvent::WorkerJoined { child, is_used: true } => self.roll(RollingEvent::Joined(&child)),
            SupervisorEvent::WorkerJoined { child, is_used: false } => {
                self.roll(RollingEvent::Failed(&child))
            }
            SupervisorEvent::SwapAdvanced { number, event } => self.swap_advanced(number, event),
            SupervisorEvent::ConfigurationRead { read, scope, reply } => {
                self.configuration_read(read, scope, reply)
            }
            SupervisorEvent::DevicesFound { found, model, reply } => self.devices_found(found, *model, reply),
            SupervisorEvent::DevicesReported { reports } => self.devices_reported(reports),
            SupervisorEvent::Command(command) => self.handle_command(command),
        }
    }

    fn publish_child(&self, name: &Arc<str>) {
        if let Some(child) = self.children.get(name) {
            self.publish(FleetEvent::Child(child.status(self.deadlines.running_time())));
        }
    }

    fn publish(&self, event: FleetEvent) {
        // An event without subscribers is dropped.
        let _: Result<usize, _> = self.commands.events.send(event);
    }

    /// Tells the service manager in one line how the fleet is, if that has changed.
    fn report_summary(&mut self) {
        if !self.parent.has_parent() {
            return;
        }
        let summary = self.status().summary();
        if summary != self.reported_summary {
            match self.parent.status(&summary) {
                Ok(()) => self.reported_summary = summary,
                Err(error) => tracing::debug!(%error, "cannot report the status to the service manager"),
            }
        }
    }
}

impl SupervisedChild {
    fn status(&self, now: Instant) -> ChildStatus {
        let next_start_in = match self.machine.state() {
            ChildState::BackingOff { deadline, .. } => Some(deadline.saturating_duration_since(now)),
            _ => None,
        };
        ChildStatus {
            name: self.spec.name.clone(),
            role: self.spec.role,
            state: self.machine.state(),
            pid: self.process.as_ref().map_or(0, |p| p.pid),
            crashes: self.machine.crashes(),
            consecutive_crashes: self.machine.consecutive_crashes(),
            next_start_in,
            uptime: self.process.as_ref().map(|p| p.since.elapsed()).unwrap_or_default(),
            status_text: self.status_text.clone(),
            last_termination: self.last_termination.clone(),
            model: self.slot.as_ref().map(|s| s.model.clone()),
            device: self.slot.as_ref().map(|s| s.device.clone()),
        }
    }
}

/// Enough for the sockets and pipes of the supervisor and of the embedding process. Workers and the
/// FD store come on top.
const MIN_DESCRIPTORS: u64 = 256;

/// Raises the soft limit of open descriptors to the hard limit. Call it before anything else is
/// opened. The FD store may hold thousands of descriptors; the usual soft limit of 1024 exists for
/// programs that use select(2).
pub fn raise_descriptor_limit() -> Result<(), FleetStartError> {
    let limit = |source: nix::Error| FleetStartError::DescriptorLimit(source.into());
    let (_, hard) = getrlimit(Resource::RLIMIT_NOFILE).map_err(limit)?;
    if hard < MIN_DESCRIPTORS {
        return Err(FleetStartError::FewDescriptors { limit: hard, needed: MIN_DESCRIPTORS });
    }
    setrlimit(Resource::RLIMIT_NOFILE, hard, hard).map_err(limit)
}

/// A worker takes a notify socket, two pidfds, a liveness socket and the memory of its last log
/// lines. For a moment it takes the pipe of its token, a connection and the descriptors of its
/// start.
const DESCRIPTORS_PER_WORKER: u64 = 9;

fn check_descriptors(workers: u64) -> Result<(), FleetStartError> {
    let limit = |source: nix::Error| FleetStartError::DescriptorLimit(source.into());
    let (soft, _) = getrlimit(Resource::RLIMIT_NOFILE).map_err(limit)?;
    let needed = MIN_DESCRIPTORS + workers * DESCRIPTORS_PER_WORKER;
    match soft < needed {
        true => Err(FleetStartError::FewDescriptors { limit: soft, needed }),
        false => Ok(()),
    }
}

/// The caller may have gone away.
fn answer<T>(reply: CommandReply<T>, result: Result<T, CommandError>) {
    let _: Result<(), _> = reply.send(result);
}
