// SPDX-License-Identifier: Apache-2.0

//! [`FleetSnapshot`]: the state of a running fleet, collected from its processes.
//!
//! The supervisor reports the processes, each worker its device memory and its counters, and the
//! weight-server the weights. If a process does not answer, the snapshot lacks only its figures.

use std::collections::HashMap;
use std::time::Duration;

use proto::fleet::v1::{Child, GetStatusRequest, Model, ModelCopy, Status};
use proto::weights::v1::weight_server_client::WeightServerClient;
use proto::weights::v1::{self as weights, Generation};
use proto::worker::v1::worker_client::WorkerClient;
use proto::worker::v1::{StatsReply, StatsRequest};
use service::RuntimeDir;

use crate::cli_error::{CliError, CliResult};
use crate::ps::connect;

/// How long to wait for a process's figures.
const ANSWER_WAIT: Duration = Duration::from_secs(2);

pub(crate) struct FleetSnapshot {
    pub(crate) status: Status,
    /// By name.
    pub(crate) workers: HashMap<String, StatsReply>,
    pub(crate) weight_server: weights::Status,
}

impl FleetSnapshot {
    /// Asks all processes of the fleet. With `memory`, the supervisor reads their mappings, which
    /// takes milliseconds per process.
    pub(crate) async fn take(directory: &RuntimeDir, memory: bool) -> CliResult<Self> {
        let mut client = connect(directory).await?;
        let status = client.get_status(GetStatusRequest { memory, ledger: false }).await;
        let status = status.map_err(|status| CliError::from_status("the supervisor", &status))?.into_inner();
        let (workers, weight_server) = tokio::join!(workers(directory), weight_server(directory));
        Ok(Self { status, workers, weight_server })
    }

    /// The models that use this copy of weights.
    pub(crate) fn users(&self, generation: &Generation) -> Vec<&str> {
        let uses = |model: &&Model| {
            let is_it =
                |copy: &ModelCopy| copy.device == generation.device && copy.weights == generation.model;
            // A supervisor of an earlier version names no copies.
            match model.copies.is_empty() {
                true => model.weights == generation.model,
                false => model.copies.iter().any(is_it),
            }
        };
        self.status.models.iter().filter(uses).map(|model| model.name.as_str()).collect()
    }

    /// The device of a worker. The supervisor knows it also of one that does not run.
    pub(crate) fn device<'a>(&'a self, child: &'a Child) -> Option<&'a str> {
        let told = self.workers.get(&child.name).map(|stats| stats.device.as_str());
        told.or((!child.device.is_empty()).then_some(child.device.as_str()))
    }
}

async fn workers(directory: &RuntimeDir) -> HashMap<String, StatsReply> {
    let mut calls = tokio::task::JoinSet::new();
    for (index, socket) in directory.worker_sockets().unwrap_or_default() {
        calls.spawn(async move {
            let answer = async {
                let channel = service::grpc::connect(&socket).await.ok()?;
                Some(WorkerClient::new(channel).stats(StatsRequest {}).await.ok()?.into_inner())
            };
            let stats = tokio::time::timeout(ANSWER_WAIT, answer).await.ok()??;
            // Before a worker has attached, its figures are zeros.
            (!stats.device.is_empty()).then(|| (format!("worker-{index}"), stats))
        });
    }
    calls.join_all().await.into_iter().flatten().collect()
}

async fn weight_server(directory: &RuntimeDir) -> weights::Status {
    let answer = async {
        let channel = service::grpc::connect(&directory.weights_admin_socket()).await.ok()?;
        let status = WeightServerClient::new(channel).get_status(weights::GetStatusRequest {}).await;
        Some(status.ok()?.into_inner())
    };
    tokio::time::timeout(ANSWER_WAIT, answer).await.ok().flatten().unwrap_or_default()
}
