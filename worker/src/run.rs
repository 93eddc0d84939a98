// SPDX-License-Identifier: Apache-2.0

//! The worker process: binds its socket first, then attaches the weights, and drains on a stop.
//!
//! The worker has two main threads. This thread serves gRPC: one is enough because frames are
//! small, and the other cores are left for computing. The engine thread attaches the model and then
//! runs steps. If either thread ends, the process ends.

use std::convert::Infallible;
use std::io::Read;
use std::sync::{Arc, OnceLock, Weak};
use std::time::Duration;

use bytes::Bytes;
use handoff::lease::{LeaseGuard, LeaseStatus};
use proto::weights::v1::RefusalReason;
use proto::worker::v1::worker_server::{SERVICE_NAME, WorkerServer};
use service::process_limits::StartError;
use service::{Notify, Shutdown};
use tokio::sync::oneshot;
use tonic_health::server::HealthReporter;
use traces::Tracer;

use crate::attach::AttachedModelInfo;
use crate::backend::DeviceRuntime;
use crate::backend::host::HostRuntime;
use crate::config::{ComputeDevice, WorkerConfig};
use crate::engine_thread::{EngineReady, EngineThread};
use crate::gpu;
use crate::grpc::WorkerService;
use crate::run_error::WorkerRunError;
use crate::startup_timeline::StartupTimeline;
use crate::step_watchdog::wait_for_hung_step;
use crate::use_report::report_use;

/// Longest attach token.
const ATTACH_TOKEN_BYTES_MAX: u64 = 256;
/// Time between the last frame of a drained worker and the end of its connections.
const FLUSH_WAIT: Duration = Duration::from_secs(1);
/// How often the state of a lease is read. Only the log depends on it, except for quarantined
/// weights.
const LEASE_POLL: Duration = Duration::from_secs(1);

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
        let _supervisor = service::supervision::watch_supervisor(
            "worker",
            &config.name,
            token.as_deref(),
            &notify,
            &shutdown,
        )?;
        serve(config, token, &notify, &shutdown).await
    })
}

/// Reads the attach token from the pipe that the supervisor fills for each start. `None` without a
/// supervisor.
fn read_token() -> Result<Option<Bytes>, WorkerRunError> {
    let Some(fd) = service::listen::fd_from_env(service::env::ATTACH_TOKEN_FD)? else { return Ok(None) };
    let mut token = Vec::new();
    std::fs::File::from(fd)
        .take(ATTACH_TOKEN_BYTES_MAX)
        .read_to_end(&mut token)
        .map_err(WorkerRunError::Token)?;
    Ok(Some(token.into()))
}

/// The worker without its process: serves until `shutdown` is requested and all streams have ended
/// or are aborted.
pub async fn serve(
    config: WorkerConfig,
    token: Option<Bytes>,
    notify: &Notify,
    shutdown: &Shutdown,
) -> Result<(), WorkerRunError> {
    let timeline = StartupTimeline::start();
    let listener = service::grpc::bind(&config.listen)?.allow(&config.allow_users);
    let (health, health_service) = service::grpc::health();
    health.set_not_serving::<WorkerServer<WorkerService>>().await;
    let tracer = Tracer::start(config.tracing.as_ref(), "ballast-worker", &config.name)?;
    let config = Arc::new(config);
    let service = WorkerService {
        config: config.clone(),
        state: Arc::new(OnceLock::new()),
        health: health.clone(),
        shutdown: shutdown.clone(),
        tracer: tracer.clone(),
    };
    let (reflection, reflection_alpha) = service::grpc::reflection(proto::FILE_DESCRIPTOR_SET, SERVICE_NAME)?;
    let server = service::grpc::server()
        .add_service(
            WorkerServer::new(service.clone())
                .max_decoding_message_size(service::grpc::MESSAGE_BYTES_MAX)
                .max_encoding_message_size(service::grpc::MESSAGE_BYTES_MAX),
        )
        .add_service(health_service)
        .add_service(reflection)
        .add_service(reflection_alpha);
    notify.ready()?;

    let (ready_sender, ready) = oneshot::channel();
    let (ended_sender, ended) = oneshot::channel();
    {
        let (config, notify) = (config.clone(), notify.clone());
        let body = move || {
            let thread =
                EngineThread { timeline, config: &config, token, notify: &notify, ready: ready_sender };
            // The receiver is gone once the process is stopping.
            drop(ended_sender.send(run_engine_thread(thread)));
        };
        let engine = std::thread::Builder::new().name("engine".to_owned()).spawn(body);
        engine.map_err(|error| WorkerRunError::Thread(StartError(error)))?;
    }

    let (flushed_sender, flushed) = oneshot::channel::<()>();
    let stop = {
        let drained = drain_on_request(&service, health, notify, shutdown);
        async move {
            drained.await;
            drop(flushed_sender);
        }
    };
    // The engine's thread is not joined. The end of the process ends it, even in the middle of a
    // step, and tells the weight-server that nothing is mapped here any more.
    let ended = tokio::select! {
        served = service::grpc::serve(server, listener, stop) => served.map_err(WorkerRunError::Serve),
        _ = async { drop(flushed.await); tokio::time::sleep(FLUSH_WAIT).await } => Ok(()),
        () = shutdown.forced() => Ok(()),
        ended = ended => Err(match ended {
            Ok(Err(error)) => error,
            Ok(Ok(())) | Err(_) => WorkerRunError::EngineLost,
        }),
        never = serve_when_ready(&service, ready, notify) => never.map(|never| match never {}),
    };
    // Nothing else runs on this thread any more.
    tracer.flush();
    ended
}

/// Starts serving once the engine is ready, then watches the leases. Returns only on an error.
async fn serve_when_ready(
    service: &WorkerService,
    ready: oneshot::Receiver<EngineReady>,
    notify: &Notify,
) -> Result<Infallible, WorkerRunError> {
    // An error means that the attach failed. The end of the engine's thread then says why.
    if let Ok(EngineReady { engine, leases }) = ready.await {
        let AttachedModelInfo { name, attach, timeline, .. } = &engine.info;
        let text = format!(
            "serving {name}, attached in {:.1} ms, {:.0} ms after its start",
            attach.as_secs_f64() * 1e3,
            timeline.since_start().as_secs_f64() * 1e3,
        );
        let (steps, timeout) = (engine.handle.steps(), service.config.step_timeout());
        let device = service.config.device;
        let snapshots = engine.handle.snapshots();
        service.start_serving(engine).await;
        // A stopped supervisor reads no status.
        if let Err(error) = notify.status(&text).and_then(|()| notify.serving()) {
            tracing::debug!(%error, "cannot report the status to the supervisor");
        }
        tokio::select! {
            lost = futures::future::try_join_all(leases.into_iter().map(watch_lease)) => drop(lost?),
            () = wait_for_hung_step(steps, timeout) => {
                return Err(WorkerRunError::StepHangs { timeout, device });
            }
            // The end of the engine's thread says why it ended.
            () = report_use(snapshots, notify) => {}
        }
    }
    std::future::pending().await
}

/// Waits for the request to stop, then drains.
fn drain_on_request(
    service: &WorkerService,
    mut health: HealthReporter,
    notify: &Notify,
    shutdown: &Shutdown,
) -> impl Future<Output = ()> + Send + 'static {
    let (service, notify, requested) = (service.clone(), notify.clone(), shutdown.requested());
    async move {
        requested.await;
        if let Err(error) = notify.stopping() {
            tracing::debug!(%error, "cannot tell the supervisor that this worker stops");
        }
        let aborted = service.drain_within(service.config.drain).await;
        tracing::info!(aborted, "drained");
        // Ends open health watches: the server waits for every stream.
        health.clear_service_status(<WorkerServer<WorkerService> as tonic::server::NamedService>::NAME).await;
    }
}

/// Runs the engine on the configured device. All code behind this is generic over the device's
/// runtime.
fn run_engine_thread(mut thread: EngineThread<'_>) -> Result<(), WorkerRunError> {
    thread.timeline.mark("sockets");
    match thread.config.device {
        ComputeDevice::Host | ComputeDevice::HostNode(_) => {
            let runtime = HostRuntime::open(thread.config.device, thread.config.threads)?;
            let granted = thread.request_grant::<HostRuntime>(runtime.device())?;
            thread.timeline.mark("wait");
            thread.run_on(&runtime, granted)
        }
        ComputeDevice::Gpu(selector) => gpu::run_engine(thread, selector),
    }
}

/// Logs what becomes of a lease. The worker serves in every state of the lease, except that
/// quarantined weights are an error.
async fn watch_lease(lease: Weak<LeaseGuard>) -> Result<(), WorkerRunError> {
    let mut last = LeaseStatus::Held;
    while let Some(lease) = lease.upgrade() {
        let status = lease.status();
        drop(lease);
        let is_same_state = std::mem::discriminant(&status) == std::mem::discriminant(&last);
        match &status {
            _ if is_same_state => {}
            LeaseStatus::Held => tracing::info!("the new weight-server has adopted the lease"),
            LeaseStatus::Broken { .. } => {
                tracing::warn!("the weight-server is gone, this worker keeps serving");
            }
            LeaseStatus::Lost { reason: RefusalReason::Quarantined, text } => {
                return Err(WorkerRunError::Quarantined { text: text.clone() });
            }
            LeaseStatus::Lost { text, .. } => {
                tracing::error!(
                    reason = %text,
                    "the weight-server does not know the lease, this worker keeps serving without one"
                );
            }
        }
        last = status;
        tokio::time::sleep(LEASE_POLL).await;
    }
    Ok(())
}
