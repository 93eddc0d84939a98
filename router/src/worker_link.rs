//! One worker incarnation, from the moment its socket is found to the end of its connection.
//!
//! ```text
//! connect -> Watch health -> SERVING: GetMetadata, join the fleet, Stats now and then
//!                         -> NOT_SERVING (attaching, draining): leave
//!                         -> end of the watch (the process died): leave, end
//! ```
//!
//! The health watch is an open stream: the kernel closes it with the process, so a death is known at once and without
//! traffic.

use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use proto::worker::v1::worker_client::WorkerClient;
use proto::worker::v1::{self as wire, metadata_frame};
use tokio_util::sync::CancellationToken;
use tonic::Status;
use tonic::transport::Channel;
use tonic_health::pb::health_check_response::ServingStatus;
use tonic_health::pb::{HealthCheckRequest, health_client::HealthClient};

use crate::admission::Seats;
use crate::fleet::Fleet;
use crate::model::{Description, LoadModelError, Model};
use crate::placement::{Fingerprint, ModelKey, Report, WorkerId};

/// The name under which a worker reports its health.
const WORKER_SERVICE: &str = "ballast.worker.v1.Worker";
/// Load reports for placement; streams of this router are counted exactly anyway.
const STATS_EVERY: Duration = Duration::from_millis(250);
/// A worker answers from memory; one that does not is stuck.
const ANSWER_WAIT: Duration = Duration::from_secs(5);
/// A GGUF header with a vocabulary of 256k tokens has about 15 MiB; the parser has caps of its own.
const GGUF_BYTES_MAX: u64 = 256 << 20;

#[derive(Debug, thiserror::Error)]
enum LinkError {
    #[error(transparent)]
    Connect(#[from] service::grpc::ConnectError),
    #[error("{call} failed")]
    Call { call: &'static str, source: Box<Status> },
    #[error("{call} took longer than {ANSWER_WAIT:?}")]
    Slow { call: &'static str },
    #[error("metadata: {what}")]
    Metadata { what: &'static str },
    #[error(transparent)]
    Model(#[from] LoadModelError),
}

/// Follows the worker behind `socket` until it goes away or `stop`.
pub(crate) async fn follow(socket: PathBuf, fleet: Arc<Fleet>, stop: CancellationToken) {
    let mut link = Link { fleet, joined: None };
    let ended = tokio::select! {
        ended = link.run(&socket) => ended,
        () = stop.cancelled() => Ok(()),
    };
    let was_serving = link.joined.is_some();
    link.leave();
    match ended {
        // A socket without a process, or one that is about to get its listener: the next scan tries again.
        Err(LinkError::Connect(error)) => tracing::debug!(socket = %socket.display(), %error, "no worker"),
        Err(error) => {
            let error = service::exit::one_line(&error);
            tracing::warn!(socket = %socket.display(), was_serving, %error, "worker lost");
        }
        Ok(()) => {}
    }
}

struct Link {
    fleet: Arc<Fleet>,
    joined: Option<WorkerId>,
}

impl Link {
    async fn run(&mut self, socket: &std::path::Path) -> Result<(), LinkError> {
        let channel = service::grpc::connect(socket).await?;
        let mut client = WorkerClient::new(channel.clone())
            .max_decoding_message_size(service::grpc::MESSAGE_BYTES_MAX)
            .max_encoding_message_size(service::grpc::MESSAGE_BYTES_MAX);
        let request = HealthCheckRequest { service: WORKER_SERVICE.to_owned() };
        let mut watch = timely("Watch", HealthClient::new(channel).watch(request)).await?.into_inner();
        let mut stats = tokio::time::interval(STATS_EVERY);
        stats.set_missed_tick_behavior(tokio::time::MissedTickBehavior::Delay);
        loop {
            tokio::select! {
                health = watch.message() => match health {
                    Ok(Some(health)) if health.status() == ServingStatus::Serving => self.join(&mut client).await?,
                    Ok(Some(_)) => self.leave(),
                    Ok(None) => return Ok(()),
                    Err(status) => return Err(LinkError::Call { call: "Watch", source: Box::new(status) }),
                },
                _ = stats.tick(), if self.joined.is_some() => self.report(&mut client).await?,
            }
        }
    }

    async fn join(&mut self, client: &mut WorkerClient<Channel>) -> Result<(), LinkError> {
        if self.joined.is_some() {
            return Ok(());
        }
        let (name, seats, model) = tokio::time::timeout(ANSWER_WAIT, self.metadata(client))
            .await
            .map_err(|_| LinkError::Slow { call: "GetMetadata" })??;
        tracing::info!(worker = %name, model = model.name(), "worker joined");
        self.joined = Some(self.fleet.join(name, model, client.clone(), seats));
        Ok(())
    }

    fn leave(&mut self) {
        if let Some(worker) = self.joined.take() {
            self.fleet.leave(worker);
        }
    }

    async fn report(&mut self, client: &mut WorkerClient<Channel>) -> Result<(), LinkError> {
        let stats = timely("Stats", client.stats(wire::StatsRequest {})).await?.into_inner();
        if let Some(worker) = self.joined {
            let report = Report {
                running: stats.running,
                waiting: stats.waiting,
                kv_used_tokens: stats.kv_used_tokens,
                kv_total_tokens: stats.kv_total_tokens,
                prompt_tokens_computed: stats.prompt_tokens_computed,
                prompt_tokens_cached: stats.prompt_tokens_cached,
                preemptions: stats.preemptions,
                evictions: stats.evictions,
                forks: stats.forks,
                late_rows: stats.deferred_logits,
                kv_cached_tokens: stats.kv_cached_tokens,
                kv_unfilled_tokens: stats.kv_unfilled_tokens,
                kv_mapped_bytes: stats.kv_mapped_bytes.unwrap_or(0),
                drafted: stats.draft_tokens_per_position.iter().sum(),
                accepted: stats.accepted_tokens_per_position.iter().sum(),
            };
            self.fleet.report(worker, report);
        }
        Ok(())
    }

    /// The worker's name, its room and its model. The GGUF section is read only where no worker with that content came before.
    async fn metadata(
        &self,
        client: &mut WorkerClient<Channel>,
    ) -> Result<(String, Seats, Arc<Model>), LinkError> {
        let failed = |status| LinkError::Call { call: "GetMetadata", source: Box::new(status) };
        let mut frames = client.get_metadata(wire::GetMetadataRequest {}).await.map_err(failed)?.into_inner();
        let Some(metadata_frame::Frame::Description(wire)) =
            frames.message().await.map_err(failed)?.and_then(|frame| frame.frame)
        else {
            return Err(LinkError::Metadata { what: "the first frame is not a description" });
        };
        let seats = Seats {
            running_max: wire.running_max,
            queue_max: wire.queue_max,
            batch_queue_max: wire.batch_queue_max,
            tenant_queue_max: wire.tenant_queue_max,
            kv_blocks: wire.kv_blocks,
            kv_block_tokens: wire.kv_block_tokens,
        };
        let description = Description {
            key: ModelKey { name: wire.model.into(), fingerprint: Fingerprint(wire.fingerprint.to_vec()) },
            digest: wire.digest.to_vec(),
            generation: wire.generation,
            context_tokens: wire.context_tokens,
            vocabulary: wire.vocabulary,
            weight_bytes: wire.weight_bytes,
        };
        if let Some(sibling) = self.fleet.sibling(&description.key, &description.digest) {
            return Ok((wire.worker, seats, Arc::new(sibling.with(description))));
        }
        if wire.gguf_bytes > GGUF_BYTES_MAX {
            return Err(LinkError::Metadata { what: "the GGUF section has more than 256 MiB" });
        }
        let mut gguf = Vec::new();
        while let Some(frame) = frames.message().await.map_err(failed)? {
            let Some(metadata_frame::Frame::Gguf(piece)) = frame.frame else {
                return Err(LinkError::Metadata { what: "a second description" });
            };
            if gguf.len() + piece.len() > wire.gguf_bytes as usize {
                return Err(LinkError::Metadata { what: "more GGUF bytes than announced" });
            }
            gguf.extend_from_slice(&piece);
        }
        if gguf.len() as u64 != wire.gguf_bytes {
            return Err(LinkError::Metadata { what: "fewer GGUF bytes than announced" });
        }
        // Building the merge table of a large vocabulary takes tens of milliseconds.
        let loaded = tokio::task::spawn_blocking(move || Model::load(description, gguf)).await;
        let model =
            loaded.map_err(|_| LinkError::Metadata { what: "loading the tokenizer was interrupted" })??;
        Ok((wire.worker, seats, Arc::new(model)))
    }
}

async fn timely<T>(
    call: &'static str,
    answer: impl Future<Output = Result<tonic::Response<T>, Status>>,
) -> Result<tonic::Response<T>, LinkError> {
    tokio::time::timeout(ANSWER_WAIT, answer)
        .await
        .map_err(|_| LinkError::Slow { call })?
        .map_err(|status| LinkError::Call { call, source: Box::new(status) })
}
