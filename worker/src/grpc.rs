// SPDX-License-Identifier: Apache-2.0

//! `ballast.worker.v1.Worker` on the worker's socket. The service runs from the start, and refuses
//! calls until the weights are attached.

use std::pin::Pin;
use std::sync::{Arc, OnceLock};
use std::time::Duration;

use engine::EngineStats;
use engine::kv::events::FULL_SNAPSHOT;
use engine::schedule::admission::QueueLimits;
use futures::{Stream, StreamExt, TryStreamExt, stream};
use proto::worker::v1::worker_server::{Worker, WorkerServer};
use proto::worker::v1::{self as wire, metadata_frame};
use service::Shutdown;
use tokio_stream::wrappers::ReceiverStream;
use tonic::{Request, Response, Status};
use tonic_health::server::HealthReporter;
use traces::Tracer;

use crate::attach::AttachedModelInfo;
use crate::call_trace::{CallLabel, CallTrace};
use crate::config::WorkerConfig;
use crate::engine_thread::ServingEngine;
use crate::grammar_compiler::{GrammarCompiler, GrammarModel};
use crate::pooling::pooling_to_wire;
use crate::process_memory::anonymous_rss_bytes;
use crate::wire::defaults::sampling_defaults;
use crate::wire::frames::{admitted, generate_frame, kv_event_frames};
use crate::wire::request::{
    beam_request_from_wire, embed_request_from_wire, grammar_source, request_from_wire,
    score_request_from_wire,
};
use crate::wire::status::unavailable;

mod beam_stream;
mod embedding;
mod score_stream;
mod stats_reply;

/// The GGUF metadata section is sent in chunks of this size.
const METADATA_CHUNK_BYTES: usize = 1 << 20;
/// The supervisor stops a worker at once when it has drained.
const STOP_WAIT: Duration = Duration::from_secs(2);

/// What serves calls once the weights are attached.
pub(crate) struct ServingState {
    engine: ServingEngine,
    grammars: GrammarCompiler,
}

#[derive(Clone)]
pub(crate) struct WorkerService {
    pub(crate) config: Arc<WorkerConfig>,
    /// Set once, when the weights are attached.
    pub(crate) state: Arc<OnceLock<ServingState>>,
    pub(crate) health: HealthReporter,
    pub(crate) shutdown: Shutdown,
    pub(crate) tracer: Tracer,
}

type FrameStream<T> = Pin<Box<dyn Stream<Item = Result<T, Status>> + Send>>;

#[tonic::async_trait]
impl Worker for WorkerService {
    type GenerateStream = FrameStream<wire::GenerateFrame>;
    type SearchBeamsStream = FrameStream<wire::GenerateFrame>;
    type ScoreStream = FrameStream<wire::ScoreFrame>;
    type GetMetadataStream = FrameStream<wire::MetadataFrame>;
    type SubscribeKvEventsStream = FrameStream<wire::KvEventsFrame>;

    async fn generate(
        &self,
        wire: Request<wire::GenerateRequest>,
    ) -> Result<Response<Self::GenerateStream>, Status> {
        let (metadata, _, wire) = wire.into_parts();
        let call = CallTrace::begin(&self.tracer, "generate", &wire.request_id, &metadata);
        let label = call.label.clone();
        self.start_generating(wire, call).await.inspect_err(|status| label.log_refusal(status))
    }

    async fn search_beams(
        &self,
        wire: Request<wire::SearchBeamsRequest>,
    ) -> Result<Response<Self::SearchBeamsStream>, Status> {
        let (metadata, _, wire) = wire.into_parts();
        let request_id = wire.generation.as_ref().map_or("", |generation| &generation.request_id);
        let call = CallTrace::begin(&self.tracer, "search beams", request_id, &metadata);
        let label = call.label.clone();
        self.start_beam_search(wire, call).await.inspect_err(|status| label.log_refusal(status))
    }

    async fn check_grammar(
        &self,
        wire: Request<wire::CheckGrammarRequest>,
    ) -> Result<Response<wire::CheckGrammarReply>, Status> {
        let (metadata, _, wire) = wire.into_parts();
        let label = CallLabel::new(&wire.request_id, &metadata);
        self.compile_grammar(wire).await.inspect_err(|status| label.log_refusal(status))
    }

    async fn score(&self, wire: Request<wire::ScoreRequest>) -> Result<Response<Self::ScoreStream>, Status> {
        let (metadata, _, wire) = wire.into_parts();
        let call = CallTrace::begin(&self.tracer, "score", &wire.request_id, &metadata);
        let label = call.label.clone();
        self.start_scoring(wire, call).await.inspect_err(|status| label.log_refusal(status))
    }

    async fn embed(&self, wire: Request<wire::EmbedRequest>) -> Result<Response<wire::EmbedReply>, Status> {
        let (metadata, _, wire) = wire.into_parts();
        let call = CallTrace::begin(&self.tracer, "embed", &wire.request_id, &metadata);
        let label = call.label.clone();
        self.compute_embedding(wire, call).await.inspect_err(|status| label.log_refusal(status))
    }

    async fn get_metadata(
        &self,
        _: Request<wire::GetMetadataRequest>,
    ) -> Result<Response<Self::GetMetadataStream>, Status> {
        let ServingEngine { handle, info } = &self.serving_state()?.engine;
        let gguf = info.gguf.clone();
        let first = metadata_frame::Frame::Description(self.description(info, handle.snapshot().stats));
        // Chunks are slices of the mapping, not copies.
        let chunks = (0..gguf.len()).step_by(METADATA_CHUNK_BYTES).map(move |at| {
            metadata_frame::Frame::Gguf(gguf.slice(at..gguf.len().min(at + METADATA_CHUNK_BYTES)))
        });
        let frames = std::iter::once(first).chain(chunks);
        let frames = frames.map(|frame| Ok(wire::MetadataFrame { frame: Some(frame) }));
        Ok(Response::new(Box::pin(stream::iter(frames))))
    }

    async fn subscribe_kv_events(
        &self,
        wire: Request<wire::SubscribeKvEventsRequest>,
    ) -> Result<Response<Self::SubscribeKvEventsStream>, Status> {
        let ServingEngine { handle, info } = &self.serving_state()?.engine;
        let wire = wire.into_inner();
        check_fingerprint(&wire.fingerprint, info)?;
        let log = handle.kv_log();
        let from = if wire.log_id == log { wire.from_event } else { FULL_SNAPSHOT };
        let subscriber = handle.subscribe_kv_events(from)?;
        let updates = stream::try_unfold(subscriber, async |mut subscriber| {
            let update = subscriber.next().await?;
            Ok::<_, Status>(Some((update, subscriber)))
        });
        // The stream asks for the next update after it has sent all frames of the last one.
        let frames = updates.map_ok(move |update| stream::iter(kv_event_frames(log, update).map(Ok)));
        Ok(Response::new(Box::pin(frames.try_flatten())))
    }

    async fn reset_prefix_cache(
        &self,
        _: Request<wire::ResetPrefixCacheRequest>,
    ) -> Result<Response<wire::ResetPrefixCacheReply>, Status> {
        if self.serving_state()?.engine.handle.reset_prefix_cache().await? {
            Ok(Response::new(wire::ResetPrefixCacheReply {}))
        } else {
            Err(Status::failed_precondition("running requests use blocks of the cache: retry when none runs"))
        }
    }

    async fn stats(&self, _: Request<wire::StatsRequest>) -> Result<Response<wire::StatsReply>, Status> {
        let private_bytes = anonymous_rss_bytes().map_err(|error| Status::internal(error.to_string()))?;
        let stats = match self.state.get() {
            Some(state) => stats_reply::stats_reply(&self.config, &state.engine),
            None => wire::StatsReply::default(),
        };
        let trace_spans_dropped = self.tracer.dropped_spans();
        Ok(Response::new(wire::StatsReply { private_bytes, trace_spans_dropped, ..stats }))
    }

    async fn drain(&self, wire: Request<wire::DrainRequest>) -> Result<Response<wire::DrainReply>, Status> {
        let grace = Duration::from_millis(wire.into_inner().grace_ms);
        // A call is dropped with its connection. The drain goes on: a supervisor that dies has a
        // successor, which does not know of it.
        let drained = tokio::spawn(self.clone().drain_and_end(grace));
        let cut = drained.await.map_err(|_| Status::internal("the drain was interrupted"))?;
        Ok(Response::new(wire::DrainReply { streams_cut: cut as u32 }))
    }
}

impl WorkerService {
    /// Accepts requests from now on.
    pub(crate) async fn start_serving(&self, engine: ServingEngine) {
        let AttachedModelInfo { gguf, vocab_size, .. } = &engine.info;
        let model = GrammarModel { gguf: gguf.clone(), vocab_size: *vocab_size as u32 };
        let grammars = GrammarCompiler::new(model, self.config.threads, engine.handle.waker());
        if self.state.set(ServingState { engine, grammars }).is_ok() {
            self.health.set_serving::<WorkerServer<Self>>().await;
        }
    }

    /// Reports "not serving", so that the router chooses other workers, and waits for running
    /// streams. Aborts those that still run after `grace`, and returns their number.
    pub(crate) async fn drain_within(&self, grace: Duration) -> usize {
        self.health.set_not_serving::<WorkerServer<Self>>().await;
        match self.state.get() {
            Some(state) => state.engine.handle.drain(grace).await,
            None => 0,
        }
    }

    /// Drains, and ends the process some time later. A drained worker that stayed would be lost for
    /// its fleet: no router uses it, and no supervisor replaces a process that runs.
    async fn drain_and_end(self, grace: Duration) -> usize {
        let cut = self.drain_within(grace).await;
        let Self { shutdown, .. } = self;
        tokio::spawn(async move {
            tokio::time::sleep(STOP_WAIT).await;
            if !shutdown.is_requested() {
                tracing::warn!("drained, but not stopped within {STOP_WAIT:?}: this worker ends");
                shutdown.request();
            }
        });
        cut
    }

    async fn start_generating(
        &self,
        mut wire: wire::GenerateRequest,
        call: CallTrace,
    ) -> Result<Response<FrameStream<wire::GenerateFrame>>, Status> {
        let ServingState { engine: ServingEngine { handle, info }, grammars } = self.serving_state()?;
        check_fingerprint(&wire.fingerprint, info)?;
        let source = wire.grammar.take().map(grammar_source).transpose()?;
        let id = handle.next_id();
        call.log_begin(id, "generate", wire.tokens.len());
        let request = request_from_wire(wire, id, handle.now())?;
        let constraint = match source {
            Some(source) => {
                let prior_output = &request.prompt[request.prompt.len() - request.prior_output..];
                Some(grammars.compile(source, prior_output.to_vec()).await?)
            }
            None => None,
        };
        let (queued, outputs) = handle.generate(request, constraint, call).await?;
        let frames = ReceiverStream::new(outputs).filter_map(async |item| match item {
            Ok(output) => generate_frame(output).map(Ok),
            Err(abort) => Some(Err(abort.into())),
        });
        let first = stream::iter([Ok(admitted(queued.ahead))]);
        Ok(Response::new(Box::pin(first.chain(frames))))
    }

    async fn start_beam_search(
        &self,
        wire: wire::SearchBeamsRequest,
        call: CallTrace,
    ) -> Result<Response<FrameStream<wire::GenerateFrame>>, Status> {
        let ServingEngine { handle, info } = &self.serving_state()?.engine;
        check_fingerprint(wire.generation.as_ref().map_or(&[], |generation| &generation.fingerprint), info)?;
        let id = handle.next_id();
        let request = beam_request_from_wire(wire, id, handle.now())?;
        call.log_begin(id, "search beams", request.prompt.len());
        let choices = request.params.choices;
        let (queued, outputs) = handle.search_beams(request, call).await?;
        Ok(Response::new(Box::pin(beam_stream::frames(queued.ahead, choices, outputs))))
    }

    async fn compile_grammar(
        &self,
        wire: wire::CheckGrammarRequest,
    ) -> Result<Response<wire::CheckGrammarReply>, Status> {
        let ServingState { engine: ServingEngine { info, .. }, grammars } = self.serving_state()?;
        check_fingerprint(&wire.fingerprint, info)?;
        // Compiling computes the first mask, so it also finds a grammar that allows no first token.
        grammars.compile(grammar_source(wire.grammar.unwrap_or_default())?, Vec::new()).await?;
        Ok(Response::new(wire::CheckGrammarReply {}))
    }

    async fn start_scoring(
        &self,
        wire: wire::ScoreRequest,
        call: CallTrace,
    ) -> Result<Response<FrameStream<wire::ScoreFrame>>, Status> {
        let ServingEngine { handle, info } = &self.serving_state()?.engine;
        check_fingerprint(&wire.fingerprint, info)?;
        let id = handle.next_id();
        call.log_begin(id, "score", wire.tokens.len());
        let outputs = handle.score(score_request_from_wire(wire, id, handle.now())?, call).await?;
        Ok(Response::new(Box::pin(score_stream::frames(outputs))))
    }

    async fn compute_embedding(
        &self,
        wire: wire::EmbedRequest,
        call: CallTrace,
    ) -> Result<Response<wire::EmbedReply>, Status> {
        let ServingEngine { handle, info } = &self.serving_state()?.engine;
        check_fingerprint(&wire.fingerprint, info)?;
        let pooling = embedding::check_pooling(wire.pooling, info.pooling)?;
        let id = handle.next_id();
        call.log_begin(id, "embed", wire.tokens.len());
        let request = embed_request_from_wire(wire, pooling, id, handle.now());
        Ok(Response::new(embedding::embedding(handle.embed(request, call).await?).await?))
    }

    fn serving_state(&self) -> Result<&ServingState, Status> {
        self.state.get().ok_or_else(|| unavailable("the weights are not attached yet"))
    }

    fn description(&self, info: &AttachedModelInfo, stats: EngineStats) -> wire::WorkerDescription {
        let bounds = QueueLimits::for_queue(self.config.queue_max);
        wire::WorkerDescription {
            worker: self.config.name.clone(),
            pid: std::process::id(),
            model: info.name.clone(),
            digest: info.digest.to_vec().into(),
            generation: info.generation,
            fingerprint: info.fingerprint.clone(),
            backend: info.backend.clone(),
            context_tokens: u32::try_from(info.context_tokens).unwrap_or(u32::MAX),
            vocabulary: info.vocab_size as u32,
            running_max: self.config.running_max as u32,
            queue_max: bounds.capacity_for(0) as u32,
            batch_queue_max: bounds.capacity_for(1) as u32,
            tenant_queue_max: bounds.tenant_queue_max as u32,
            weight_bytes: info.weight_bytes,
            gguf_bytes: info.gguf.len() as u64,
            attach_ms: info.attach.as_secs_f64() * 1e3,
            kv_blocks: stats.kv_blocks as u64,
            kv_block_tokens: stats.kv_block_tokens as u32,
            device: info.device.clone(),
            aliases: info.aliases.clone(),
            chat_template: self.config.chat_template_text().map(str::to_owned),
            sampling_defaults: Some(sampling_defaults(&self.config.sampling)),
            pooling: pooling_to_wire(info.pooling).into(),
            embedding_length: info.embedding_length as u32,
        }
    }
}

/// Checks that the caller means this worker. A restarted worker has the same socket but may have
/// another fingerprint.
fn check_fingerprint(expected: &[u8], info: &AttachedModelInfo) -> Result<(), Status> {
    if expected == info.fingerprint {
        return Ok(());
    }
    let own = String::from_utf8_lossy(&info.fingerprint);
    Err(Status::failed_precondition(format!("the request is for another worker: this worker is {own}")))
}
