// SPDX-License-Identifier: Apache-2.0

//! The summary of `ballast generate`: the shared weights, the memory of each worker, and the speed.

use std::collections::BTreeSet;
use std::fmt;
use std::time::Duration;

use proto::weights::v1::GetStatusRequest;
use proto::weights::v1::weight_server_client::WeightServerClient;
use proto::worker::v1::worker_client::WorkerClient;
use proto::worker::v1::{StatsReply, StatsRequest};
use service::ByteSize;

use crate::cli_error::{CliError, CliResult};
use crate::completion::PromptCompletion;
use crate::running_fleet::RunningFleet;

pub(crate) struct GenerationRun {
    /// Time from the fleet's readiness to the last token.
    pub(crate) elapsed: Duration,
    pub(crate) finished: Vec<PromptCompletion>,
}

pub(crate) struct RunSummary {
    /// ByteSize of tensors, and of the memory that holds them.
    tensor_bytes: u64,
    /// Bytes of the memory that holds them, with padding.
    weight_bytes: u64,
    /// Devices that have a copy of the weights.
    devices: usize,
    workers: Vec<(u32, StatsReply)>,
    /// Devices of the models.
    device: String,
    measured: GenerationRun,
}

impl RunSummary {
    /// Asks the weight-server and the workers, which must still run.
    pub(crate) async fn collect(fleet: &RunningFleet, measured: GenerationRun) -> CliResult<Self> {
        let directory = fleet.directory();
        let channel = service::grpc::connect(&directory.weights_admin_socket()).await?;
        let status = WeightServerClient::new(channel).get_status(GetStatusRequest {}).await;
        let status =
            status.map_err(|status| CliError::from_status("the weight-server", &status))?.into_inner();
        let mut workers = Vec::new();
        // Skips a worker that does not answer.
        for (index, socket) in directory.worker_sockets().unwrap_or_default() {
            let Ok(channel) = service::grpc::connect(&socket).await else { continue };
            if let Ok(stats) = WorkerClient::new(channel).stats(StatsRequest {}).await {
                workers.push((index, stats.into_inner()));
            }
        }
        Ok(Self {
            tensor_bytes: status.generations.iter().map(|g| g.tensor_bytes).sum(),
            weight_bytes: status.generations.iter().map(|g| g.allocation_bytes).sum(),
            workers,
            devices: status.generations.iter().map(|g| &g.device).collect::<BTreeSet<_>>().len(),
            device: fleet.devices.iter().map(|(_, choice)| choice.to_string()).collect::<Vec<_>>().join(", "),
            measured,
        })
    }
}

impl fmt::Display for RunSummary {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let GenerationRun { elapsed, finished } = &self.measured;
        writeln!(
            f,
            "\nweights     {} bytes in memory once{}, shared by {} workers ({} with padding)",
            self.tensor_bytes / self.devices.max(1) as u64,
            if self.devices > 1 { " on each device" } else { "" },
            self.workers.len(),
            ByteSize(self.weight_bytes / self.devices.max(1) as u64).rounded(),
        )?;
        writeln!(f, "device      {}", self.device)?;
        for (index, stats) in &self.workers {
            writeln!(
                f,
                "worker-{index}    {} of private memory ({} of it KV cache), attached to the weights in {:.1} ms",
                ByteSize(stats.private_bytes).rounded(),
                ByteSize(stats.kv_used_bytes).rounded(),
                stats.attach_ms,
            )?;
        }
        let tokens: usize = finished.iter().map(|done| done.tokens.len()).sum();
        let seconds = elapsed.as_secs_f64();
        let first = finished.iter().map(|done| done.first_token_ms).fold(f64::INFINITY, f64::min);
        write!(f, "speed       {tokens} tokens in {seconds:.2} s: {:.1} tokens/s", tokens as f64 / seconds)?;
        match finished.len() {
            0 => writeln!(f),
            1 => writeln!(f, ", first token after {first:.0} ms"),
            prompts => writeln!(f, " for {prompts} prompts, first token after {first:.0} ms"),
        }
    }
}
