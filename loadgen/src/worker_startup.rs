// SPDX-License-Identifier: Apache-2.0

//! Measures worker startup: attach time, one more worker, and the replacement of a killed worker.

use std::error::Error as _;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use proto::fleet::v1::{AddWorkerRequest, Role};
use proto::v1::{ListModelsRequest, Sampling};
use proto::worker::v1::worker_client::WorkerClient;
use proto::worker::v1::{self as wire, generate_frame, metadata_frame};
use rustix::process::{Pid, Signal, kill_process};
use serde::Serialize;
use tonic::transport::Channel;
use tonic::{Code, Status};

use crate::fleet::{FleetError, MeasuredFleet, call_error};

/// Poll interval for a new worker, whose startup takes some tens of milliseconds.
const POLL_INTERVAL: Duration = Duration::from_millis(1);
/// Timeout of a worker's startup.
const STARTUP_TIMEOUT: Duration = Duration::from_secs(60);

#[derive(Debug, thiserror::Error)]
pub enum WorkerStartupError {
    #[error(transparent)]
    Fleet(#[from] FleetError),
    #[error("the fleet has no running worker")]
    NoWorker,
    #[error("{name} is not a worker name")]
    Name { name: String },
    #[error("cannot kill {name}, process {pid}")]
    Kill { name: String, pid: u32, source: rustix::io::Errno },
    #[error("{name} did not serve within {} s", STARTUP_TIMEOUT.as_secs())]
    Timeout { name: String },
    #[error("the new worker's stream failed")]
    Stream(#[source] Box<Status>),
}

/// Times from the command to add a worker, or from the death of one, until the new worker serves.
#[derive(Clone, Debug, Serialize)]
pub struct WorkerStartup {
    pub name: String,
    /// Until its socket accepts connections.
    pub socket_ms: f64,
    /// Until its weights are attached and its metadata can be read.
    pub serving_ms: f64,
    /// Until the first token of a stream that starts as soon as the worker serves.
    pub first_token_ms: f64,
    /// Until the router has registered it.
    pub router_ms: f64,
    /// The part of `serving_ms` for attaching the weights, by the worker's own clock.
    pub attach_ms: f64,
}

/// The attach times of all workers, by their own clocks, in milliseconds.
pub async fn attach_times(fleet: &MeasuredFleet) -> Result<Vec<f64>, WorkerStartupError> {
    Ok(worker_stats(fleet).await?.iter().map(|stats| stats.attach_ms).collect())
}

/// The statistics of each worker.
pub(crate) async fn worker_stats(fleet: &MeasuredFleet) -> Result<Vec<wire::StatsReply>, WorkerStartupError> {
    let mut replies = Vec::new();
    for (_, socket) in workers(fleet).await? {
        let mut client = WorkerClient::new(service::grpc::connect(&socket).await.map_err(FleetError::from)?);
        replies.push(client.stats(wire::StatsRequest {}).await.map_err(call_error("Stats"))?.into_inner());
    }
    Ok(replies)
}

/// Vocabulary size of the served model.
pub async fn vocabulary_size(fleet: &MeasuredFleet) -> Result<u32, WorkerStartupError> {
    Ok(first_worker(fleet).await?.1.vocabulary)
}

/// A client of the first worker's socket, and what the worker serves.
pub(crate) async fn first_worker(
    fleet: &MeasuredFleet,
) -> Result<(WorkerClient<Channel>, wire::WorkerDescription), WorkerStartupError> {
    let (_, socket) = workers(fleet).await?.into_iter().next().ok_or(WorkerStartupError::NoWorker)?;
    let mut client = connect(&socket).await;
    let description = describe(&mut client).await.map_err(call_error("GetMetadata"))?;
    Ok((client, description))
}

/// Adds a worker to the running fleet.
pub async fn add_worker(fleet: &MeasuredFleet) -> Result<WorkerStartup, WorkerStartupError> {
    let serving = serving_workers(fleet).await?;
    let mut supervisor = fleet.supervisor().await?;
    let start = Instant::now();
    let added = supervisor.add_worker(AddWorkerRequest::default()).await.map_err(call_error("AddWorker"))?;
    measure_startup(fleet, added.into_inner().name, 0, start, serving + 1).await
}

/// Kills one worker with SIGKILL and waits for its successor.
pub async fn replace_killed_worker(fleet: &MeasuredFleet) -> Result<WorkerStartup, WorkerStartupError> {
    let status = fleet.status().await?;
    let victim = status.children.into_iter().find(|child| child.role() == Role::Worker && child.pid != 0);
    let victim = victim.ok_or(WorkerStartupError::NoWorker)?;
    let serving = serving_workers(fleet).await?;
    let pid = i32::try_from(victim.pid).ok().and_then(Pid::from_raw).ok_or(WorkerStartupError::NoWorker)?;
    let start = Instant::now();
    kill_process(pid, Signal::KILL).map_err(|source| WorkerStartupError::Kill {
        name: victim.name.clone(),
        pid: victim.pid,
        source,
    })?;
    measure_startup(fleet, victim.name, victim.pid, start, serving).await
}

/// Measures the startup of worker `name` from `start`. `old_pid` is the process that it replaces.
async fn measure_startup(
    fleet: &MeasuredFleet,
    name: String,
    old_pid: u32,
    start: Instant,
    serving_then: u32,
) -> Result<WorkerStartup, WorkerStartupError> {
    let socket = socket_of(fleet, &name)?;
    let elapsed_ms = || start.elapsed().as_secs_f64() * 1e3;
    let life = async {
        let (mut client, description, socket_ms) = loop {
            let mut client = connect(&socket).await;
            let socket_ms = elapsed_ms();
            match attached(&mut client, old_pid).await {
                Some(description) => break (client, description, socket_ms),
                None => tokio::time::sleep(POLL_INTERVAL).await,
            }
        };
        let serving_ms = elapsed_ms();
        first_token(&mut client, &description).await?;
        let first_token_ms = elapsed_ms();
        while serving_workers(fleet).await? < serving_then {
            tokio::time::sleep(POLL_INTERVAL).await;
        }
        let (router_ms, attach_ms) = (elapsed_ms(), description.attach_ms);
        Ok(WorkerStartup { name: name.clone(), socket_ms, serving_ms, first_token_ms, router_ms, attach_ms })
    };
    let timeout = |_| WorkerStartupError::Timeout { name: name.clone() };
    tokio::time::timeout(STARTUP_TIMEOUT, life).await.map_err(timeout)?
}

/// Waits until the worker behind `client` has attached its weights. `None` if it is the old process
/// or is gone.
async fn attached(client: &mut WorkerClient<Channel>, old_pid: u32) -> Option<wire::WorkerDescription> {
    loop {
        match describe(client).await {
            Ok(description) => return Some(description).filter(|description| description.pid != old_pid),
            // The worker itself reports that it has not attached yet. A status of the transport has
            // the broken connection as its source.
            Err(status) if status.code() == Code::Unavailable && status.source().is_none() => {
                tokio::time::sleep(POLL_INTERVAL).await;
            }
            Err(_) => return None,
        }
    }
}

fn socket_of(fleet: &MeasuredFleet, name: &str) -> Result<PathBuf, WorkerStartupError> {
    let index = name.strip_prefix("worker-").and_then(|index| index.parse().ok());
    Ok(fleet
        .directory()
        .worker_socket(index.ok_or_else(|| WorkerStartupError::Name { name: name.to_owned() })?))
}

async fn workers(fleet: &MeasuredFleet) -> Result<Vec<(u32, PathBuf)>, WorkerStartupError> {
    let sockets = fleet.directory().worker_sockets().map_err(FleetError::Read)?;
    if sockets.is_empty() { Err(WorkerStartupError::NoWorker) } else { Ok(sockets) }
}

/// Workers that the router has registered.
async fn serving_workers(fleet: &MeasuredFleet) -> Result<u32, WorkerStartupError> {
    let models =
        fleet.client().await?.list_models(ListModelsRequest {}).await.map_err(call_error("ListModels"))?;
    Ok(models.into_inner().models.iter().map(|model| model.workers).sum())
}

async fn connect(socket: &Path) -> WorkerClient<Channel> {
    loop {
        match service::grpc::connect(socket).await {
            Ok(channel) => return WorkerClient::new(channel),
            Err(_) => tokio::time::sleep(POLL_INTERVAL).await,
        }
    }
}

async fn describe(client: &mut WorkerClient<Channel>) -> Result<wire::WorkerDescription, Status> {
    let mut frames = client.get_metadata(wire::GetMetadataRequest {}).await?.into_inner();
    match frames.message().await?.and_then(|frame| frame.frame) {
        Some(metadata_frame::Frame::Description(description)) => Ok(description),
        _ => Err(Status::internal("the first frame is not a description")),
    }
}

async fn first_token(
    client: &mut WorkerClient<Channel>,
    worker: &wire::WorkerDescription,
) -> Result<(), WorkerStartupError> {
    let request = wire::GenerateRequest {
        fingerprint: worker.fingerprint.clone(),
        tokens: vec![1, 2, 3, 4],
        prompt_tokens: 4,
        max_tokens: 1,
        sampling: Some(Sampling { temperature: Some(0.0), seed: Some(0), ..Default::default() }),
        ..Default::default()
    };
    let failed = |status| WorkerStartupError::Stream(Box::new(status));
    let mut frames = client.generate(request).await.map_err(failed)?.into_inner();
    while let Some(frame) = frames.message().await.map_err(failed)? {
        if matches!(frame.frame, Some(generate_frame::Frame::Tokens(_))) {
            return Ok(());
        }
    }
    Err(failed(Status::internal("the stream ended before its first token")))
}
