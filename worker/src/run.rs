//! The process around the engine: socket first, weights after, drain on a stop.
//!
//! Two threads matter: this one runs all of gRPC (frames are small, and the other threads are for computing), the
//! engine's thread attaches and then steps. Whichever ends first ends the process.

use std::io::{self, Read};
use std::sync::{Arc, OnceLock, Weak};
use std::time::Duration;

use bytes::Bytes;
use memory::attach::Granted;
#[cfg(not(feature = "cuda"))]
use memory::cuda::OpenDriverError;
use memory::lease::{Lease, LeaseStatus};
use proto::weights::v1::RefusalReason;
use proto::worker::v1::worker_server::WorkerServer;
use service::exit::{HasExit, exit_for_io_error};
use service::{Exit, Notify, Shutdown};
use tokio::sync::oneshot;

use crate::attach::{AttachedEngine, AttachedModelInfo, WorkerAttachError, build_engine, request_grant};
#[cfg(feature = "cuda")]
use crate::backend::{DetectedGpu, GpuRuntime};
use crate::backend::{DeviceRuntime, HostRuntime};
use crate::config::{ComputeDevice, WorkerConfig};
use crate::engine_loop::{EngineLoopError, engine_loop};
use crate::grpc::{ServingEngine, WorkerService};
use crate::startup_timeline::StartupTimeline;

/// Longest attach token.
const ATTACH_TOKEN_BYTES_MAX: u64 = 256;
/// Between the last frame of a drained worker and the end of its connections.
const FLUSH_WAIT: Duration = Duration::from_secs(1);
/// How often the lease is looked at for the log; the worker serves whatever it says.
const LEASE_EVERY: Duration = Duration::from_secs(1);

#[derive(Debug, thiserror::Error)]
pub enum WorkerRunError {
    #[error("cannot start the runtime of the worker")]
    Runtime(#[source] io::Error),
    #[error("cannot start the engine's thread")]
    Thread(#[source] io::Error),
    #[error("cannot listen for signals")]
    Signals(#[source] io::Error),
    #[error(transparent)]
    Notify(#[from] service::notify::NotifyError),
    #[error(transparent)]
    Inherit(#[from] service::listen::ListenError),
    #[error("cannot read the attach token")]
    Token(#[source] io::Error),
    #[error(transparent)]
    Socket(#[from] service::grpc::BindError),
    #[error("cannot describe the gRPC services")]
    Reflection(#[from] tonic_reflection::server::Error),
    #[error("the gRPC server failed")]
    Serve(#[source] tonic::transport::Error),
    #[error(transparent)]
    Attach(#[from] WorkerAttachError),
    #[error(
        "{device} failed under this worker, which ends; the weights are mapped read-only, others that use them go on"
    )]
    Engine { device: String, source: engine::StepError },
    /// Blocks could be shared wrongly from here on: better no text than wrong text.
    #[error("the books of the KV cache do not add up while nobody uses it; this worker ends")]
    Integrity(#[source] engine::IntegrityError),
    #[error("the weights were found damaged, this worker attaches them anew: {text}")]
    Quarantined { text: String },
    #[error("the engine's thread ended without a reason")]
    EngineLost,
}

impl HasExit for WorkerRunError {
    fn exit(&self) -> Exit {
        match self {
            WorkerRunError::Runtime(source)
            | WorkerRunError::Thread(source)
            | WorkerRunError::Signals(source) => exit_for_io_error(source),
            WorkerRunError::Token(_) => Exit::Usage,
            WorkerRunError::Notify(error) => error.exit(),
            WorkerRunError::Inherit(error) => error.exit(),
            WorkerRunError::Socket(error) => error.exit(),
            WorkerRunError::Attach(error) => error.exit(),
            WorkerRunError::Quarantined { .. } => Exit::PeerLost,
            WorkerRunError::Reflection(_)
            | WorkerRunError::Serve(_)
            | WorkerRunError::Engine { .. }
            | WorkerRunError::Integrity(_)
            | WorkerRunError::EngineLost => Exit::Internal,
        }
    }
}

/// Runs the worker until it has drained.
pub fn run(config: WorkerConfig) -> Result<(), WorkerRunError> {
    service::logging::init(&config.name, tracing::Level::INFO);
    let token = read_token()?;
    let runtime = tokio::runtime::Builder::new_current_thread()
        .enable_all()
        .build()
        .map_err(WorkerRunError::Runtime)?;
    runtime.block_on(async {
        let shutdown = Shutdown::install().map_err(WorkerRunError::Signals)?;
        let notify = Notify::from_env()?;
        let _supervisor = service::supervision::watch_supervisor("worker", &config.name, &notify, &shutdown)?;
        serve(config, token, &notify, &shutdown).await
    })
}

/// One per worker start, from a pipe that the supervisor filled; none without a supervisor.
fn read_token() -> Result<Option<Bytes>, WorkerRunError> {
    let Some(fd) = service::listen::fd_from_env(service::env::ATTACH_TOKEN_FD)? else { return Ok(None) };
    let mut token = Vec::new();
    std::fs::File::from(fd)
        .take(ATTACH_TOKEN_BYTES_MAX)
        .read_to_end(&mut token)
        .map_err(WorkerRunError::Token)?;
    Ok(Some(token.into()))
}

/// The worker without its process: serves until `shutdown` is requested and the streams have ended or are cut.
pub async fn serve(
    config: WorkerConfig,
    token: Option<Bytes>,
    notify: &Notify,
    shutdown: &Shutdown,
) -> Result<(), WorkerRunError> {
    let timeline = StartupTimeline::start();
    let listener = service::grpc::bind(&config.listen)?;
    let (mut health, health_service) = service::grpc::health();
    health.set_not_serving::<WorkerServer<WorkerService>>().await;
    let config = Arc::new(config);
    let service =
        WorkerService { config: config.clone(), serving: Arc::new(OnceLock::new()), health: health.clone() };
    let server = service::grpc::server()
        .add_service(
            WorkerServer::new(service.clone())
                .max_decoding_message_size(service::grpc::MESSAGE_BYTES_MAX)
                .max_encoding_message_size(service::grpc::MESSAGE_BYTES_MAX),
        )
        .add_service(health_service)
        .add_service(service::grpc::reflection(proto::FILE_DESCRIPTOR_SET)?);
    notify.ready()?;

    let (attached, when_attached) = oneshot::channel();
    let (ended, when_ended) = oneshot::channel();
    {
        let (config, notify) = (config.clone(), notify.clone());
        let body = move || {
            // Nobody waits for it any more once the process is stopping.
            drop(ended.send(engine_thread(timeline, &config, token, &notify, attached)));
        };
        std::thread::Builder::new().name("engine".to_owned()).spawn(body).map_err(WorkerRunError::Thread)?;
    }

    let beginning = async {
        // Without a sender the attach failed, and `when_ended` says why.
        if let Ok(Ready { serving, leases }) = when_attached.await {
            let AttachedModelInfo { name: model, attach, timeline, .. } = &serving.info;
            let text = format!(
                "serving {model}, attached in {:.1} ms, {:.0} ms after its start",
                attach.as_secs_f64() * 1e3,
                timeline.since_start().as_secs_f64() * 1e3,
            );
            service.start_serving(serving).await;
            notify.status(&text)?;
            futures::future::try_join_all(leases.into_iter().map(watch_lease)).await?;
        }
        std::future::pending::<Result<std::convert::Infallible, WorkerRunError>>().await
    };
    let drained = {
        let (service, notify, requested) = (service.clone(), notify.clone(), shutdown.requested());
        let grace = config.drain;
        async move {
            requested.await;
            if let Err(error) = notify.stopping() {
                tracing::debug!(%error, "nobody hears that this worker stops");
            }
            let cut = service.drain_within(grace).await;
            tracing::info!(cut, "drained");
            // Ends the watches: the server waits for open streams.
            health
                .clear_service_status(<WorkerServer<WorkerService> as tonic::server::NamedService>::NAME)
                .await;
        }
    };
    let (flushed, when_flushed) = oneshot::channel::<()>();
    let stop = async {
        drained.await;
        drop(flushed);
    };
    // The engine's thread is not joined: the end of the process ends it, in the middle of a step too, and tells the
    // weight-server that nothing is mapped here any more.
    tokio::select! {
        served = service::grpc::serve(server, listener, stop) => served.map_err(WorkerRunError::Serve),
        _ = async { drop(when_flushed.await); tokio::time::sleep(FLUSH_WAIT).await } => Ok(()),
        () = shutdown.forced() => Ok(()),
        ended = when_ended => Err(match ended {
            Ok(Err(error)) => error,
            Ok(Ok(())) | Err(_) => WorkerRunError::EngineLost,
        }),
        never = beginning => never.map(|never| match never {}),
    }
}

/// What the engine's thread announces once it can step.
struct Ready {
    serving: ServingEngine,
    leases: Vec<Weak<Lease>>,
}

/// The one runtime that knows which devices there are; from here on everything is generic over the backend.
fn engine_thread(
    mut timeline: StartupTimeline,
    config: &WorkerConfig,
    token: Option<Bytes>,
    notify: &Notify,
    attached: oneshot::Sender<Ready>,
) -> Result<(), WorkerRunError> {
    // Until the engine exists.
    timeline.mark("sockets");
    match config.device {
        ComputeDevice::Host => {
            let runtime = HostRuntime::new(config.threads);
            let granted = request_grant::<HostRuntime>(runtime.device(), config, token.clone(), notify)?;
            timeline.mark("wait");
            run_on(&runtime, granted, timeline, config, token, notify, attached)
        }
        #[cfg(feature = "cuda")]
        ComputeDevice::Gpu(wanted) => {
            let found = DetectedGpu::open(wanted)?;
            timeline.mark("driver");
            let granted = request_grant::<GpuRuntime>(found.device(), config, token.clone(), notify)?;
            timeline.mark("wait");
            let runtime = found.enter(&granted)?;
            timeline.mark("context");
            run_on(&runtime, granted, timeline, config, token, notify, attached)
        }
        #[cfg(not(feature = "cuda"))]
        ComputeDevice::Gpu(_) => Err(WorkerAttachError::from(OpenDriverError::NotBuilt).into()),
    }
}

fn run_on<P: DeviceRuntime>(
    runtime: &P,
    granted: Granted,
    timeline: StartupTimeline,
    config: &WorkerConfig,
    token: Option<Bytes>,
    notify: &Notify,
    attached: oneshot::Sender<Ready>,
) -> Result<(), WorkerRunError> {
    let AttachedEngine { engine, leases, info } =
        build_engine(runtime, granted, timeline, config, token, notify)?;
    let score_rows_max = crate::attach::score_rows_max(config, &info);
    let (handle, engine_loop) = engine_loop(engine, score_rows_max, P::measure, info.timeline.clone());
    let ready = Ready {
        serving: ServingEngine { handle, info },
        leases: leases.iter().map(Arc::downgrade).collect(),
    };
    if attached.send(ready).is_err() {
        // Stopped meanwhile: the weights go before the leases.
        drop(engine_loop);
        return Ok(());
    }
    // Consumes the engine; the leases end after it.
    let stepped = engine_loop.run();
    drop(leases);
    stepped.map_err(|error| match error {
        EngineLoopError::Step(source) => WorkerRunError::Engine { device: runtime.describe(), source },
        EngineLoopError::Integrity(source) => WorkerRunError::Integrity(source),
    })
}

/// Says in the log what becomes of the lease. The worker serves in every state, unless the weights are not to be trusted.
async fn watch_lease(lease: Weak<Lease>) -> Result<(), WorkerRunError> {
    let mut last = LeaseStatus::Held;
    while let Some(lease) = lease.upgrade() {
        let status = lease.status();
        drop(lease);
        let same_state = std::mem::discriminant(&status) == std::mem::discriminant(&last);
        match &status {
            _ if same_state => {}
            LeaseStatus::Held => tracing::info!("the lease is held by the new weight-server"),
            LeaseStatus::Broken { .. } => tracing::warn!("the weight-server is gone, serving on"),
            LeaseStatus::Lost { reason: RefusalReason::Quarantined, text } => {
                return Err(WorkerRunError::Quarantined { text: text.clone() });
            }
            LeaseStatus::Lost { text, .. } => {
                tracing::error!(reason = %text, "the weight-server does not know the lease, serving on unaccounted");
            }
        }
        last = status;
        tokio::time::sleep(LEASE_EVERY).await;
    }
    Ok(())
}
