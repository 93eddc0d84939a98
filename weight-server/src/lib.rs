// SPDX-License-Identifier: Apache-2.0

//! The weight-server owns the one copy of each model's weights and hands it to workers.
//!
//! ```text
//!   worker --- weights.sock ------- handoff_server.rs --.
//!   admin ---- weights-admin.sock - grpc.rs ------------+--> event_loop.rs: owns the state
//!   loader --- socket pair -------- loader_child.rs,           |            |            |
//!                                   verifier_child.rs          |            |            |
//!                                           state.rs (pure)  held_fds.rs   fd_store.rs --> parent
//!                                     catalog, lease_table,  (descriptors)
//!                                    ledger, tokens
//! ```
//! The weight-server holds descriptors and decides. It never maps a tensor, reads a model file or
//! loads a GPU driver: short-lived loader children do that. After its death a successor inherits
//! the descriptors from the FD store (`adoption`), while workers keep using the memory that they
//! have mapped.

#![forbid(unsafe_code)]

mod adoption;
pub mod awaited_workers;
pub mod catalog;
mod config;
mod event_loop;
pub mod events;
mod fd_store;
mod grpc;
mod handoff_server;
mod held_fds;
pub mod ids;
pub mod lease_table;
pub mod ledger;
mod load_permit;
pub mod loader;
mod loader_child;
mod messages;
mod model_files;
pub mod refusal;
pub mod state;
mod status;
pub mod stored_fds;
mod system_limits;
mod text_check_child;
pub mod tokens;
mod verifier_child;
pub mod waiters;

#[cfg(feature = "fuzzing")]
pub use event_loop::fuzzing;

use std::collections::BTreeSet;
use std::fs::File;
use std::io;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::{Duration, Instant};

use handoff::seqpacket::{Listener, SocketError};
use memory::manifest::HOST_DEVICE;
use memory::numa::is_host_device;
use nix::fcntl::{Flock, FlockArg};
use proto::weights::v1::weight_server_server::{SERVICE_NAME, WeightServerServer};
use service::listen::{InheritedFd, ListenError, inherited_fds};
use service::notify::NotifyError;
use service::supervision::{self, SupervisorState};
use service::{Exit, HasExit, Notify, RuntimeDir, Shutdown};

use adoption::AdoptedState;
use event_loop::{WeightServerLoop, WeightServerLoopParts};
use events::WeightServerEvent;
use fd_store::{FdStoreClient, FdStoreRequest};
use handoff_server::ProtocolViolations;
use messages::{InputSender, LoopInput};
use model_files::request_load;
use refusal::LoadFailure;
use state::{InheritedState, WeightServerLimits, WeightServerState};

pub use config::{DeviceBudget, DeviceConfig, ModelLoadConfig, WeightServerConfig};
pub use loader_child::LoaderProgram;
pub use text_check_child::{
    CheckedText, GivenTemplate, TextCheckError, check_chat_template, check_text_of_file,
};

/// For admin calls and replies in progress when the process is asked to stop.
const DRAIN_GRACE: Duration = Duration::from_secs(2);

/// The wait before a configured model is requested again while workers of an earlier incarnation
/// may reclaim their leases, or while too many loads wait.
const LOAD_RETRY_INTERVAL: Duration = Duration::from_secs(1);

#[derive(Debug, thiserror::Error)]
pub enum WeightServerError {
    #[error(transparent)]
    FdLimit(#[from] system_limits::FdLimitError),
    #[error(transparent)]
    Inherited(#[from] ListenError),
    #[error(transparent)]
    Notify(#[from] NotifyError),
    #[error("runtime directory {} cannot be used", path.display())]
    RuntimeDir { path: PathBuf, source: io::Error },
    #[error("another weight-server runs in {}", path.display())]
    InUse { path: PathBuf },
    #[error(transparent)]
    HandoffSocket(#[from] SocketError),
    #[error(transparent)]
    AdminSocket(#[from] service::grpc::BindError),
    #[error("cannot offer gRPC reflection")]
    Reflection(#[source] tonic_reflection::server::Error),
    #[error("the admin service failed")]
    AdminService(#[source] tonic::transport::Error),
    #[error("the hand-off socket failed")]
    Accept(#[source] io::Error),
    #[error("cannot start the runtime")]
    Runtime(#[source] io::Error),
    #[error("a task of the weight-server ended")]
    Task(#[source] tokio::task::JoinError),
}

impl HasExit for WeightServerError {
    fn exit(&self) -> Exit {
        match self {
            Self::FdLimit(_) => Exit::OutOfResources,
            Self::Inherited(error) => error.exit(),
            Self::Notify(error) => error.exit(),
            Self::AdminSocket(error) => error.exit(),
            Self::RuntimeDir { source, .. } | Self::Accept(source) | Self::Runtime(source) => {
                service::exit::exit_for_io_error(source)
            }
            Self::HandoffSocket(SocketError::Io { source, .. }) => service::exit::exit_for_io_error(source),
            Self::InUse { .. } | Self::HandoffSocket(_) => Exit::AddressInUse,
            Self::Reflection(_) | Self::AdminService(_) | Self::Task(_) => Exit::Internal,
        }
    }
}

/// Runs the process until it is asked to stop.
pub fn run(config: WeightServerConfig) -> Result<(), WeightServerError> {
    run_with_loader(config, LoaderProgram::own())
}

/// Like `run`, with another loader program: tests have no `ballast` executable.
pub fn run_with_loader(config: WeightServerConfig, loader: LoaderProgram) -> Result<(), WeightServerError> {
    // Inherited descriptors are claimed by number, so this comes before any thread exists.
    let inherited = inherited_fds()?;
    let fds = system_limits::fd_capacity()?;
    let notify = Notify::from_env()?;
    let _lock = lock(&config.runtime_dir)?;
    let runtime = tokio::runtime::Builder::new_multi_thread()
        // One thread works, the other can answer.
        .worker_threads(2)
        .enable_all()
        .build()
        .map_err(WeightServerError::Runtime)?;
    runtime.block_on(serve(config, loader, inherited, fds, notify))
}

/// Locks the runtime directory for one weight-server. The kernel releases the lock when the process
/// dies.
fn lock(path: &Path) -> Result<Flock<File>, WeightServerError> {
    let unusable = |source| WeightServerError::RuntimeDir { path: path.to_owned(), source };
    let directory = File::open(path).map_err(unusable)?;
    match Flock::lock(directory, FlockArg::LockExclusiveNonblock) {
        Ok(lock) => Ok(lock),
        Err((_, nix::errno::Errno::EWOULDBLOCK)) => Err(WeightServerError::InUse { path: path.to_owned() }),
        Err((_, errno)) => Err(unusable(errno.into())),
    }
}

async fn serve(
    config: WeightServerConfig,
    loader: LoaderProgram,
    inherited: Vec<InheritedFd>,
    fds: u64,
    notify: Notify,
) -> Result<(), WeightServerError> {
    let started = Instant::now();
    let shutdown = Shutdown::install().map_err(WeightServerError::Runtime)?;
    let supervisor =
        supervision::watch_supervisor("weight-server", "weight-server", None, &notify, &shutdown)?;
    let (inputs, queue) = InputSender::channel();
    let fd_store =
        FdStoreClient::start(notify.clone(), inputs.clone()).map_err(WeightServerError::Runtime)?;
    let violations = Arc::new(ProtocolViolations::default());

    let adopted = adoption::adopt(inherited);
    log_adoption(&adopted, &fd_store);
    let supervised = matches!(*supervisor.borrow(), SupervisorState::Present { .. });
    let driver = driver(&config, loader, adopted, fds, &inputs, fd_store, &violations, supervised, started);
    let changes = driver.changes();
    let driver = tokio::spawn(driver.run(queue));

    // The sockets open after adoption: a worker that connects now finds its lease.
    let directory = RuntimeDir::at(&config.runtime_dir);
    let listener = Listener::bind(&directory.weights_socket())?;
    let admin_listener = service::grpc::bind(&directory.weights_admin_socket())?;
    let accept = tokio::spawn(handoff_server::accept_loop(listener, inputs.clone(), violations));
    let (health_reporter, health) = service::grpc::health();
    let admin = WeightServerServer::new(grpc::AdminService { inputs: inputs.clone(), changes });
    health_reporter.set_serving::<WeightServerServer<grpc::AdminService>>().await;
    let (reflection, reflection_alpha) = service::grpc::reflection(proto::FILE_DESCRIPTOR_SET, SERVICE_NAME)
        .map_err(WeightServerError::Reflection)?;
    let router = service::grpc::server()
        .add_service(health)
        .add_service(reflection)
        .add_service(reflection_alpha)
        .add_service(admin);
    let admin = tokio::spawn(service::grpc::serve(router, admin_listener, shutdown.requested()));
    notify.ready()?;
    tokio::spawn(watch_supervisor(supervisor, inputs.clone()));
    tokio::spawn(load_configured_models(config.models, inputs.clone()));

    tokio::select! {
        () = shutdown.requested() => {}
        ended = accept => return ended.map_err(WeightServerError::Task)?.map_err(WeightServerError::Accept),
        ended = driver => return ended.map_err(WeightServerError::Task),
    }
    notify.stopping()?;
    inputs.send(LoopInput::Event(WeightServerEvent::ShutdownRequested)).await;
    match shutdown.within(DRAIN_GRACE, admin).await {
        Ok(ended) => ended.map_err(WeightServerError::Task)?.map_err(WeightServerError::AdminService),
        // Streams of WatchEvents stay open until they are cut off.
        Err(cut) => {
            tracing::debug!(%cut, "admin calls were cut off");
            Ok(())
        }
    }
}

#[expect(clippy::too_many_arguments, reason = "the one place where the parts of the process meet")]
fn driver(
    config: &WeightServerConfig,
    loader: LoaderProgram,
    adopted: AdoptedState,
    fds: u64,
    inputs: &InputSender,
    fd_store: FdStoreClient,
    violations: &Arc<ProtocolViolations>,
    supervised: bool,
    started: Instant,
) -> WeightServerLoop {
    let (device_bytes, unified_devices) = config.device_budgets();
    let gpu_nodes = config.gpu_nodes();
    let takes_host_memory = |device: &str| is_host_device(device) || unified_devices.contains(device);
    let on_host =
        adopted.generations.iter().filter(|(generation, _)| takes_host_memory(&generation.key.device));
    let held: u64 =
        on_host.map(|(generation, _)| generation.contents.reservation(&generation.key.device).bytes).sum();
    // Adopted memory is in use already, so it comes on top of what is available.
    let budget = config.host_budget.map_or_else(
        || system_limits::available_bytes_without(&gpu_nodes).saturating_add(held),
        |bytes| bytes.0,
    );
    let limits = WeightServerLimits {
        device_bytes: device_bytes
            .into_iter()
            .chain([(HOST_DEVICE.to_owned(), budget)])
            .chain(system_limits::node_bytes_without(&gpu_nodes))
            .collect(),
        unified_devices,
        fds,
        uids: allowed_uids(config),
        host_capacity_is_measured: config.host_budget.is_none(),
        tokens_required: supervised,
    };
    let AdoptedState { generations, leases, names_to_remove, notes } = adopted;
    let holdings = generations.iter().map(|(generation, fds)| (generation.id, Arc::clone(fds))).collect();
    let lease_fds = leases.iter().map(|(record, fds)| (record.lease, fds.clone())).collect();
    let awaited = awaited_workers::find(&RuntimeDir::at(&config.runtime_dir), &leases);
    let has_lost_generation = names_to_remove.iter().any(|name| name.starts_with('g'));
    let knows_history = !has_lost_generation && awaited.is_empty();
    let inherited = InheritedState {
        first_id: awaited_workers::first_id(knows_history, std::process::id()),
        generations: generations.into_iter().map(|(generation, _)| generation).collect(),
        leases: leases.into_iter().map(|(record, _)| record).collect(),
        awaited: awaited.iter().map(|(worker, _)| *worker).collect(),
    };
    let parts = WeightServerLoopParts {
        state: WeightServerState::new(limits, inherited, started.elapsed()),
        inputs: inputs.clone(),
        loader,
        loader_threads: config.loader_threads(),
        fd_store,
        violations: Arc::clone(violations),
        adoption_notes: notes.iter().map(|note| service::exit::one_line(note)).collect(),
        generations: holdings,
        leases: lease_fds,
        awaited,
    };
    WeightServerLoop::new(parts, started)
}

/// The users whose processes may attach.
fn allowed_uids(config: &WeightServerConfig) -> BTreeSet<u32> {
    match &config.allow_users {
        Some(users) => users.iter().map(|user| user.0).collect(),
        None => BTreeSet::from([nix::unistd::geteuid().as_raw()]),
    }
}

/// Logs what was adopted, and removes what was dropped from the FD store.
fn log_adoption(adopted: &AdoptedState, fd_store: &FdStoreClient) {
    for (generation, _) in &adopted.generations {
        tracing::info!(
            generation = generation.id,
            model = generation.model,
            "adopted a generation without reading its file"
        );
    }
    for (record, _) in &adopted.leases {
        tracing::info!(
            lease = record.lease,
            pid = record.pid,
            "adopted a lease; waiting for its worker to reclaim it"
        );
    }
    for note in &adopted.notes {
        tracing::warn!(note = service::exit::one_line(note), "adoption");
    }
    for name in &adopted.names_to_remove {
        fd_store.send(FdStoreRequest::Remove { name: name.clone() });
    }
}

/// Stores all descriptors again when a new supervisor runs, whose FD store is empty.
async fn watch_supervisor(
    mut supervisor: tokio::sync::watch::Receiver<SupervisorState>,
    inputs: InputSender,
) {
    while supervisor.changed().await.is_ok() {
        let now = *supervisor.borrow_and_update();
        if matches!(now, SupervisorState::Present { .. }) {
            inputs.send(LoopInput::SupervisorReplaced).await;
        }
    }
}

/// Requests all configured models at once, so that a worker waits for any of them. The loads onto
/// one device still run one after the other.
async fn load_configured_models(models: Vec<ModelLoadConfig>, inputs: InputSender) {
    let loads = models.into_iter().map(|model| load_configured_model(model, inputs.clone()));
    futures::future::join_all(loads).await;
}

async fn load_configured_model(model: ModelLoadConfig, inputs: InputSender) {
    loop {
        let ModelLoadConfig { name, path, device, pack } = model.clone();
        let (_progress, answer) = request_load(&inputs, name, path, device, !pack).await;
        match answer.await {
            Ok(Err(LoadFailure::AwaitingReclaim { .. } | LoadFailure::TooManyJobs { .. })) => {
                tokio::time::sleep(LOAD_RETRY_INTERVAL).await
            }
            // A failed load has been logged by the event loop.
            _ => return,
        }
    }
}
