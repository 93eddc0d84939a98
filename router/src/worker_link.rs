// SPDX-License-Identifier: Apache-2.0

//! The link to one run of a worker, from the discovery of its socket to the end of its connection.
//!
//! ```text
//! connect -> Watch health -> SERVING: GetMetadata, register the worker, call Stats periodically
//!                         -> NOT_SERVING (attaching, draining): remove the worker
//!                         -> end of the stream (the process died): remove the worker, end
//! ```
//!
//! The health watch is an open stream. The kernel closes it when the process dies, so the router
//! notices a death at once and without traffic.

use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;
use proto::worker::v1::worker_client::WorkerClient;
use proto::worker::v1::{self as wire, metadata_frame};
use tokio_util::sync::CancellationToken;
use tokio_util::task::AbortOnDropHandle;
use tonic::Status;
use tonic::transport::Channel;
use tonic_health::pb::health_check_response::ServingStatus;
use tonic_health::pb::{HealthCheckRequest, health_client::HealthClient};

use crate::admission::WorkerCapacity;
use crate::kv_events;
use crate::model::{LoadModelError, ServedModel, ServedModelInfo};
use crate::refused_workers::SocketId;
use crate::registry::WorkerRegistry;
use crate::routing::{ModelKey, WorkerFingerprint, WorkerId, WorkerReport};

/// The name under which a worker reports its health.
const WORKER_HEALTH_SERVICE: &str = "ballast.worker.v1.Worker";
/// Interval of load reports for the routing policy, which counts this router's own streams exactly.
const STATS_INTERVAL: Duration = Duration::from_millis(250);
/// A worker answers these calls from memory. A worker that takes longer hangs.
const CALL_TIMEOUT: Duration = Duration::from_secs(5);
/// A GGUF header with a vocabulary of 256k tokens has about 15 MiB. The parser has limits of its
/// own.
const GGUF_BYTES_MAX: u64 = 256 << 20;

#[derive(Debug, thiserror::Error)]
enum LinkError {
    #[error(transparent)]
    Connect(#[from] service::grpc::ConnectError),
    #[error("{call} failed")]
    Call { call: &'static str, source: Box<Status> },
    #[error("{call} took longer than {CALL_TIMEOUT:?}")]
    Timeout { call: &'static str },
    #[error("invalid metadata: {what}")]
    Metadata { what: &'static str },
    #[error(transparent)]
    ServedModel(#[from] LoadModelError),
}

/// Links to the worker behind the socket until it goes away or `stop`.
pub(crate) async fn run(id: SocketId, registry: Arc<WorkerRegistry>, stop: CancellationToken) {
    let socket = &id.0;
    let mut link = WorkerLink { registry, id: id.clone(), registered: None, events: None };
    let ended = tokio::select! {
        ended = link.run(socket) => ended,
        () = stop.cancelled() => Ok(()),
    };
    let was_serving = link.registered.is_some();
    link.remove_worker();
    match ended {
        // The socket has no process, or no listener yet. The next scan tries again.
        Err(LinkError::Connect(error)) => {
            tracing::debug!(socket = %socket.display(), %error, "cannot connect to a worker")
        }
        Err(error) if error.is_refusal() => {
            let error = service::exit::one_line(&error);
            let pause = link.registry.refuse(id.clone(), &error);
            tracing::warn!(socket = %socket.display(), %error, ?pause, "cannot serve a worker");
        }
        Err(error) => {
            let error = service::exit::one_line(&error);
            tracing::warn!(socket = %socket.display(), was_serving, %error, "worker lost");
        }
        Ok(()) => {}
    }
}

impl LinkError {
    /// The worker answers, but the router cannot serve its model.
    fn is_refusal(&self) -> bool {
        matches!(self, Self::Metadata { .. } | Self::ServedModel(_))
    }
}

struct WorkerMetadata {
    name: String,
    device: Arc<str>,
    capacity: WorkerCapacity,
    model: Arc<ServedModel>,
}

struct WorkerLink {
    registry: Arc<WorkerRegistry>,
    id: SocketId,
    registered: Option<WorkerId>,
    /// The task that follows its prefix cache.
    events: Option<AbortOnDropHandle<()>>,
}

impl WorkerLink {
    async fn run(&mut self, socket: &std::path::Path) -> Result<(), LinkError> {
        let channel = service::grpc::connect(socket).await?;
        let mut client = WorkerClient::new(channel.clone())
            .max_decoding_message_size(service::grpc::MESSAGE_BYTES_MAX)
            .max_encoding_message_size(service::grpc::MESSAGE_BYTES_MAX);
        let request = HealthCheckRequest { service: WORKER_HEALTH_SERVICE.to_owned() };
        let mut watch = with_timeout("Watch", HealthClient::new(channel).watch(request)).await?.into_inner();
        let mut stats = tokio::time::interval(STATS_INTERVAL);
        stats.set_missed_tick_behavior(tokio::time::MissedTickBehavior::Delay);
        loop {
            tokio::select! {
                health = watch.message() => match health {
                    Ok(Some(health)) if health.status() == ServingStatus::Serving => self.register_worker(&mut client).await?,
                    Ok(Some(_)) => self.remove_worker(),
                    Ok(None) => return Ok(()),
                    Err(status) => return Err(LinkError::Call { call: "Watch", source: Box::new(status) }),
                },
                _ = stats.tick(), if self.registered.is_some() => self.update_report(&mut client).await?,
            }
        }
    }

    async fn register_worker(&mut self, client: &mut WorkerClient<Channel>) -> Result<(), LinkError> {
        if self.registered.is_some() {
            return Ok(());
        }
        let WorkerMetadata { name, device, capacity, model } =
            service::patience::timeout(CALL_TIMEOUT, self.read_metadata(client))
                .await
                .map_err(|_| LinkError::Timeout { call: "GetMetadata" })??;
        tracing::info!(worker = %name, model = model.name(), "worker registered");
        let fingerprint = Bytes::copy_from_slice(&model.key().fingerprint.0);
        let worker = self.registry.register(name, model, client.clone(), device, capacity);
        self.registered = Some(worker);
        let events = kv_events::follow(client.clone(), self.registry.clone(), worker, fingerprint);
        self.events = Some(AbortOnDropHandle::new(tokio::spawn(events)));
        // Afterwards: between the two, no request may find neither the model nor a worker that has
        // not told it.
        self.registry.accept(&self.id);
        Ok(())
    }

    fn remove_worker(&mut self) {
        self.events = None;
        if let Some(worker) = self.registered.take() {
            self.registry.remove(worker);
        }
    }

    async fn update_report(&mut self, client: &mut WorkerClient<Channel>) -> Result<(), LinkError> {
        let stats = with_timeout("Stats", client.stats(wire::StatsRequest {})).await?.into_inner();
        if let Some(worker) = self.registered {
            let report = WorkerReport {
                running: stats.running,
                waiting: stats.waiting,
                steps: stats.steps,
                kv_used_tokens: stats.kv_used_tokens,
                kv_total_tokens: stats.kv_total_tokens,
                prompt_tokens_computed: stats.prompt_tokens_computed,
                prompt_tokens_cached: stats.prompt_tokens_cached,
                preemptions: stats.preemptions,
                evictions: stats.evictions,
                forks: stats.forks,
                deferred_logits: stats.deferred_logits,
                log_lines_lost: stats.log_lines_lost,
                trace_spans_dropped: stats.trace_spans_dropped,
                kv_cached_tokens: stats.kv_cached_tokens,
                kv_unfilled_tokens: stats.kv_unfilled_tokens,
                kv_mapped_bytes: stats.kv_mapped_bytes.unwrap_or(0),
                draft_tokens: stats.draft_tokens_per_position.iter().sum(),
                accepted_draft_tokens: stats.accepted_tokens_per_position.iter().sum(),
            };
            self.registry.update_report(worker, report);
        }
        Ok(())
    }

    /// The worker's name, device, capacity and model. Reads the GGUF section only for a model with
    /// new content or another chat template.
    async fn read_metadata(&self, client: &mut WorkerClient<Channel>) -> Result<WorkerMetadata, LinkError> {
        let failed = |status| LinkError::Call { call: "GetMetadata", source: Box::new(status) };
        let mut frames = client.get_metadata(wire::GetMetadataRequest {}).await.map_err(failed)?.into_inner();
        let Some(metadata_frame::Frame::Description(wire)) =
            frames.message().await.map_err(failed)?.and_then(|frame| frame.frame)
        else {
            return Err(LinkError::Metadata { what: "the first frame is not a description" });
        };
        let capacity = WorkerCapacity {
            running_max: wire.running_max,
            queue_max: wire.queue_max,
            batch_queue_max: wire.batch_queue_max,
            tenant_queue_max: wire.tenant_queue_max,
            kv_blocks: wire.kv_blocks,
            kv_block_tokens: wire.kv_block_tokens,
        };
        let pooling = wire.pooling();
        let (name, device) = (wire.worker, Arc::from(wire.device));
        let description = ServedModelInfo {
            key: ModelKey {
                name: wire.model.into(),
                fingerprint: WorkerFingerprint(wire.fingerprint.to_vec()),
            },
            aliases: wire.aliases,
            chat_template: wire.chat_template.map(Into::into),
            sampling_defaults: wire.sampling_defaults.unwrap_or_default(),
            digest: wire.digest.to_vec(),
            generation: wire.generation,
            context_tokens: wire.context_tokens,
            vocabulary: wire.vocabulary,
            weight_bytes: wire.weight_bytes,
            pooling,
            embedding_length: wire.embedding_length,
        };
        let known = self.registry.model_with_content(&description);
        if let Some(known) = known.as_ref().filter(|known| known.has_text_of(&description)) {
            let model = Arc::new(known.with_description(description));
            return Ok(WorkerMetadata { name, device, capacity, model });
        }
        if wire.gguf_bytes > GGUF_BYTES_MAX {
            return Err(LinkError::Metadata { what: "the GGUF section has more than 256 MiB" });
        }
        let mut gguf = Vec::new();
        while let Some(frame) = frames.message().await.map_err(failed)? {
            let Some(metadata_frame::Frame::Gguf(part)) = frame.frame else {
                return Err(LinkError::Metadata { what: "a second description" });
            };
            if gguf.len() + part.len() > wire.gguf_bytes as usize {
                return Err(LinkError::Metadata { what: "more GGUF bytes than announced" });
            }
            gguf.extend_from_slice(&part);
        }
        if gguf.len() as u64 != wire.gguf_bytes {
            return Err(LinkError::Metadata { what: "fewer GGUF bytes than announced" });
        }
        // Building the merge table of a large vocabulary takes tens of milliseconds.
        let load = move || ServedModel::load(description, gguf, known.as_deref());
        let loaded = tokio::task::spawn_blocking(load).await;
        let model =
            loaded.map_err(|_| LinkError::Metadata { what: "loading the tokenizer was interrupted" })??;
        Ok(WorkerMetadata { name, device, capacity, model: Arc::new(model) })
    }
}

async fn with_timeout<T>(
    call: &'static str,
    answer: impl Future<Output = Result<tonic::Response<T>, Status>>,
) -> Result<tonic::Response<T>, LinkError> {
    service::patience::timeout(CALL_TIMEOUT, answer)
        .await
        .map_err(|_| LinkError::Timeout { call })?
        .map_err(|status| LinkError::Call { call, source: Box::new(status) })
}
