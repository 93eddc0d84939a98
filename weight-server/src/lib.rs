//! The weight-server: owns the one copy of each model, hands it to workers, and outlives nobody's need of it.
//!
//! ```text
//!   worker --- weights.sock ------- share.rs ----.
//!   admin ---- weights-admin.sock - grpc.rs -----+--> driver.rs: one task owns everything
//!   loader --- socket pair -------- loader_child.rs,      |            |            |
//!                                   verifier_child.rs     |            |            |
//!                                             state.rs (pure)   held_fds.rs    fd_store.rs --> parent
//!                                       catalog, lease_table,     (descriptors)
//!                                       ledger, tokens
//! ```
//! It holds descriptors and decides; it never maps a tensor, reads a model file or loads a GPU driver: loaders do, and
//! they are children that end. After its death the FD store returns its descriptors to a successor (`adoption`), while
//! workers go on with what they have mapped.

#![forbid(unsafe_code)]

mod adoption;
mod catalog;
mod config;
mod event_loop;
mod events;
mod fd_store;
mod grpc;
mod handoff_server;
mod held_fds;
mod lease_table;
mod ledger;
pub mod loader;
mod loader_child;
mod refusal;
mod state;
mod status;
mod system_limits;
mod tokens;
mod verifier_child;

use std::collections::BTreeSet;
use std::fs::File;
use std::io;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::{Duration, Instant};

use handoff::seqpacket::{Listener, SocketError};
use memory::manifest::HOST_DEVICE;
use nix::fcntl::{Flock, FlockArg};
use proto::weights::v1::weight_server_server::WeightServerServer;
use service::listen::{InheritedFd, ListenError, inherited_fds};
use service::notify::NotifyError;
use service::supervision::{self, SupervisorState};
use service::{Exit, HasExit, Notify, RuntimeDir, Shutdown};

use adoption::AdoptedState;
use event_loop::{InputSender, LoopInput, WeightServerLoop, WeightServerLoopParts, request_load};
use events::WeightServerEvent;
use fd_store::{FdStoreClient, FdStoreRequest};
use handoff_server::ProtocolViolations;
use refusal::LoadFailure;
use state::{WeightServerLimits, WeightServerState};

pub use config::{DeviceConfig, ModelLoadConfig, WeightServerConfig};
pub use loader_child::LoaderProgram;

/// Admin calls and answers under way when a stop is asked for.
const DRAIN_GRACE: Duration = Duration::from_secs(2);

/// Between attempts to load a configured model while workers of an earlier incarnation come back.
const RECLAIM_RETRY_INTERVAL: Duration = Duration::from_secs(1);

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
    #[error("cannot offer reflection")]
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

/// Body of the process: returns when it was asked to stop.
pub fn run(config: WeightServerConfig) -> Result<(), WeightServerError> {
    run_with_loader(config, LoaderProgram::own())
}

/// As `run`, with another program for loaders: tests have no `ballast` executable.
pub fn run_with_loader(config: WeightServerConfig, loader: LoaderProgram) -> Result<(), WeightServerError> {
    // Before any thread exists: numbers of inherited descriptors are claimed here.
    let inherited = inherited_fds()?;
    let fds = system_limits::fd_capacity()?;
    let notify = Notify::from_env()?;
    let _lock = lock(&config.runtime_dir)?;
    let runtime = tokio::runtime::Builder::new_multi_thread()
        // One works, one is free to answer.
        .worker_threads(2)
        .enable_all()
        .build()
        .map_err(WeightServerError::Runtime)?;
    runtime.block_on(serve(config, loader, inherited, fds, notify))
}

/// Only one weight-server per runtime directory; the kernel gives the lock back when it dies.
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
    let supervisor = supervision::watch_supervisor("weight-server", "weight-server", &notify, &shutdown)?;
    let (inputs, queue) = InputSender::channel();
    let fd_store =
        FdStoreClient::start(notify.clone(), inputs.clone()).map_err(WeightServerError::Runtime)?;
    let violations = Arc::new(ProtocolViolations::default());

    let adopted = adoption::adopt(inherited);
    report(&adopted, &fd_store);
    let driver = driver(&config, loader, adopted, fds, &inputs, fd_store, &violations, started);
    let changes = driver.changes();
    let driver = tokio::spawn(driver.run(queue));

    // After adoption: whoever connects from now on finds every lease known.
    let directory = RuntimeDir::at(&config.runtime_dir);
    let listener = Listener::bind(&directory.weights_socket())?;
    let admin_listener = service::grpc::bind(&directory.weights_admin_socket())?;
    let accept = tokio::spawn(handoff_server::accept_loop(listener, inputs.clone(), violations));
    let (health_reporter, health) = service::grpc::health();
    let admin = WeightServerServer::new(grpc::AdminService { inputs: inputs.clone(), changes });
    health_reporter.set_serving::<WeightServerServer<grpc::AdminService>>().await;
    let reflection =
        service::grpc::reflection(proto::FILE_DESCRIPTOR_SET).map_err(WeightServerError::Reflection)?;
    let router = service::grpc::server().add_service(health).add_service(reflection).add_service(admin);
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
    inputs.send(LoopInput::WeightServerEvent(WeightServerEvent::ShutdownRequested)).await;
    match shutdown.within(DRAIN_GRACE, admin).await {
        Ok(ended) => ended.map_err(WeightServerError::Task)?.map_err(WeightServerError::AdminService),
        // Watchers of events stay as long as they are let.
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
    started: Instant,
) -> WeightServerLoop {
    let on_host = adopted.generations.iter().filter(|(generation, _)| generation.key.device == HOST_DEVICE);
    let held: u64 = on_host.map(|(generation, _)| generation.contents.reservation(HOST_DEVICE).bytes).sum();
    // What is adopted is in use already, so it comes on top of what is available.
    let budget = config
        .host_budget
        .map_or_else(|| system_limits::available_bytes().saturating_add(held), |bytes| bytes.0);
    let own_uid = nix::unistd::geteuid().as_raw();
    let limits = WeightServerLimits {
        device_bytes: config
            .devices
            .iter()
            .map(|device| (device.id.clone(), device.budget.0))
            .chain([(HOST_DEVICE.to_owned(), budget)])
            .collect(),
        fds,
        uids: config.allow_uids.clone().unwrap_or_else(|| BTreeSet::from([own_uid])),
    };
    let AdoptedState { generations, leases, names_to_remove: _, notes } = adopted;
    let holdings = generations.iter().map(|(generation, fds)| (generation.id, Arc::clone(fds))).collect();
    let lease_fds = leases.iter().map(|(record, fds)| (record.lease, fds.clone())).collect();
    let generations = generations.into_iter().map(|(generation, _)| generation).collect();
    let leases = leases.into_iter().map(|(record, _)| record).collect();
    let parts = WeightServerLoopParts {
        state: WeightServerState::new(limits, generations, leases, started.elapsed()),
        inputs: inputs.clone(),
        loader,
        loader_threads: config.loader_threads(),
        fd_store,
        violations: Arc::clone(violations),
        adoption_notes: notes.iter().map(|note| service::exit::one_line(note)).collect(),
        generations: holdings,
        leases: lease_fds,
    };
    WeightServerLoop::new(parts, started)
}

/// Says what was adopted, and has the FD store remove what was not.
fn report(adopted: &AdoptedState, fd_store: &FdStoreClient) {
    for (generation, _) in &adopted.generations {
        tracing::info!(
            generation = generation.id,
            model = generation.model,
            "adopted without reading its file"
        );
    }
    for (record, _) in &adopted.leases {
        tracing::info!(
            lease = record.lease,
            pid = record.pid,
            "adopted a lease; its worker is expected back"
        );
    }
    for note in &adopted.notes {
        tracing::warn!(note = service::exit::one_line(note), "adoption");
    }
    for name in &adopted.names_to_remove {
        fd_store.send(FdStoreRequest::Remove { name: name.clone() });
    }
}

/// A new supervisor starts with an empty FD store.
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

/// Loads what the configuration names, one after the other.
async fn load_configured_models(models: Vec<ModelLoadConfig>, inputs: InputSender) {
    for model in models {
        loop {
            let ModelLoadConfig { name, path, device, pack } = model.clone();
            let asked = request_load(&inputs, name, path, device, !pack).await;
            let (_progress, answer) = asked;
            match answer.await {
                Ok(Err(LoadFailure::AwaitingReclaim { .. })) => {
                    tokio::time::sleep(RECLAIM_RETRY_INTERVAL).await
                }
                // A failure has been logged where every load's is.
                _ => break,
            }
        }
    }
}
