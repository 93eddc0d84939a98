//! `ballast.worker.v1.Worker` on the worker's socket. Up from the start; refuses until the weights are attached.

use std::pin::Pin;
use std::sync::{Arc, OnceLock};
use std::time::Duration;

use engine::kv::events::NOTHING_KNOWN;
use engine::schedule::admission::Bounds;
use engine::{EngineStats, Output};
use futures::{Stream, StreamExt, TryStreamExt, stream};
use proto::worker::v1::worker_server::{Worker, WorkerServer};
use proto::worker::v1::{self as wire, metadata_frame};
use tokio::sync::mpsc;
use tokio_stream::wrappers::ReceiverStream;
use tonic::{Request, Response, Status};
use tonic_health::server::HealthReporter;

use crate::attach::AttachedModelInfo;
use crate::config::WorkerConfig;
use crate::engine_loop::{EngineHandle, EngineSnapshot};
use crate::grammar_compiler::GrammarCompiler;
use crate::memory_plan::Workspace;
use crate::process_memory::anonymous_rss_bytes;
use crate::startup_timeline::{PostReadyStages, StartupStage, milliseconds};
use crate::token_channel::StreamItem;
use crate::wire::{
    ScoreFrames, admitted, generate_frame, grammar_source, kv_event_frames, request_from_wire,
    score_request_from_wire, unavailable,
};

/// A piece of the GGUF metadata section.
const METADATA_CHUNK_BYTES: usize = 1 << 20;

/// What a worker has once its weights are attached.
pub(crate) struct ServingEngine {
    pub(crate) handle: EngineHandle,
    pub(crate) info: AttachedModelInfo,
}

/// What serves, and the grammars of its requests.
pub(crate) struct ServingState {
    serving: ServingEngine,
    grammars: GrammarCompiler,
}

/// Set once, when the weights are attached.
pub(crate) type ServingCell = Arc<OnceLock<ServingState>>;

#[derive(Clone)]
pub(crate) struct WorkerService {
    pub(crate) config: Arc<WorkerConfig>,
    pub(crate) serving: ServingCell,
    pub(crate) health: HealthReporter,
}

type FrameStream<T> = Pin<Box<dyn Stream<Item = Result<T, Status>> + Send>>;

#[tonic::async_trait]
impl Worker for WorkerService {
    type GenerateStream = FrameStream<wire::GenerateFrame>;
    type ScoreStream = FrameStream<wire::ScoreFrame>;
    type GetMetadataStream = FrameStream<wire::MetadataFrame>;
    type SubscribeKvEventsStream = FrameStream<wire::KvEventsFrame>;

    async fn generate(
        &self,
        wire: Request<wire::GenerateRequest>,
    ) -> Result<Response<Self::GenerateStream>, Status> {
        let ServingState { serving: ServingEngine { handle, info }, grammars } = self.serving_state()?;
        let mut wire = wire.into_inner();
        check_fingerprint(&wire.fingerprint, info)?;
        let source = wire.grammar.take().map(grammar_source).transpose()?;
        let id = handle.next_id();
        tracing::debug!(%id, request = %wire.request_id, tokens = wire.tokens.len(), "generate");
        let request = request_from_wire(wire, id, handle.now())?;
        let constraint = match source {
            Some(source) => {
                let prior_output = &request.prompt[request.prompt.len() - request.prior_output..];
                Some(grammars.compile(source, prior_output.to_vec()).await?)
            }
            None => None,
        };
        let (queued, outputs) = handle.generate(request, constraint).await?;
        let frames = ReceiverStream::new(outputs).filter_map(async |item| match item {
            Ok(output) => generate_frame(output).map(Ok),
            Err(cut) => Some(Err(cut.into())),
        });
        let first = stream::iter([Ok(admitted(queued.ahead))]);
        Ok(Response::new(Box::pin(first.chain(frames))))
    }

    async fn check_grammar(
        &self,
        wire: Request<wire::CheckGrammarRequest>,
    ) -> Result<Response<wire::CheckGrammarReply>, Status> {
        let ServingState { serving: ServingEngine { info, .. }, grammars } = self.serving_state()?;
        let wire = wire.into_inner();
        check_fingerprint(&wire.fingerprint, info)?;
        // With the first mask, so that one that ends before it begins is found too.
        grammars.compile(grammar_source(wire.grammar.unwrap_or_default())?, Vec::new()).await?;
        Ok(Response::new(wire::CheckGrammarReply {}))
    }

    async fn score(&self, wire: Request<wire::ScoreRequest>) -> Result<Response<Self::ScoreStream>, Status> {
        let ServingEngine { handle, info } = &self.serving_state()?.serving;
        let wire = wire.into_inner();
        check_fingerprint(&wire.fingerprint, info)?;
        let outputs = handle.score(score_request_from_wire(wire, handle.next_id(), handle.now())?).await?;
        let scoring = ScoreStream { outputs, frames: ScoreFrames::default(), end: None };
        let frames = stream::unfold(scoring, async |mut scoring| Some((scoring.next().await?, scoring)));
        Ok(Response::new(Box::pin(frames)))
    }

    async fn get_metadata(
        &self,
        _: Request<wire::GetMetadataRequest>,
    ) -> Result<Response<Self::GetMetadataStream>, Status> {
        let ServingEngine { handle, info } = &self.serving_state()?.serving;
        let gguf = info.gguf.clone();
        let first = metadata_frame::Frame::Description(self.description(info, handle.snapshot().stats));
        // Slices of the mapping, not copies.
        let pieces = (0..gguf.len()).step_by(METADATA_CHUNK_BYTES).map(move |at| {
            metadata_frame::Frame::Gguf(gguf.slice(at..gguf.len().min(at + METADATA_CHUNK_BYTES)))
        });
        let frames = std::iter::once(first).chain(pieces);
        let frames = frames.map(|frame| Ok(wire::MetadataFrame { frame: Some(frame) }));
        Ok(Response::new(Box::pin(stream::iter(frames))))
    }

    async fn subscribe_kv_events(
        &self,
        wire: Request<wire::SubscribeKvEventsRequest>,
    ) -> Result<Response<Self::SubscribeKvEventsStream>, Status> {
        let ServingEngine { handle, info } = &self.serving_state()?.serving;
        let wire = wire.into_inner();
        check_fingerprint(&wire.fingerprint, info)?;
        let log = handle.kv_log();
        let from = if wire.log_id == log { wire.from_event } else { NOTHING_KNOWN };
        let updates = stream::try_unfold(handle.follow(from)?, async |mut follower| {
            let update = follower.next().await?;
            Ok::<_, Status>(Some((update, follower)))
        });
        // The next update is asked for when the last one's frames are on their way.
        let frames = updates.map_ok(move |update| stream::iter(kv_event_frames(log, update).map(Ok)));
        Ok(Response::new(Box::pin(frames.try_flatten())))
    }

    async fn reset_prefix_cache(
        &self,
        _: Request<wire::ResetPrefixCacheRequest>,
    ) -> Result<Response<wire::ResetPrefixCacheReply>, Status> {
        if self.serving_state()?.serving.handle.reset_prefix_cache().await? {
            Ok(Response::new(wire::ResetPrefixCacheReply {}))
        } else {
            Err(Status::failed_precondition("requests hold blocks of the cache: try again when none runs"))
        }
    }

    async fn stats(&self, _: Request<wire::StatsRequest>) -> Result<Response<wire::StatsReply>, Status> {
        let private_bytes = anonymous_rss_bytes().map_err(|error| Status::internal(error.to_string()))?;
        let Some(ServingState { serving: ServingEngine { handle, info }, .. }) = self.serving.get() else {
            return Ok(Response::new(wire::StatsReply { private_bytes, ..Default::default() }));
        };
        let now = handle.snapshot();
        let stats = now.stats;
        let depth = self.config.engine().draft_depth_max;
        // A token takes a place in a block of each group.
        let tokens = |blocks: usize| (blocks * stats.kv_block_tokens / stats.kv_groups.max(1)) as u64;
        Ok(Response::new(wire::StatsReply {
            draining: now.draining,
            attach_ms: info.attach.as_secs_f64() * 1e3,
            weight_bytes: info.weight_bytes,
            private_bytes,
            running: stats.running as u32,
            waiting: stats.waiting as u32,
            kv_total_tokens: tokens(stats.kv_blocks),
            kv_used_tokens: tokens(stats.kv_blocks_used),
            kv_cached_tokens: tokens(stats.kv_blocks_cached),
            kv_unfilled_tokens: now.kv.unfilled as u64,
            kv_used_bytes: (stats.kv_blocks_used * stats.kv_block_bytes) as u64,
            steps: stats.steps,
            prompt_tokens_computed: stats.prompt_tokens_computed,
            prompt_tokens_cached: stats.prompt_tokens_cached,
            output_tokens: stats.output_tokens,
            preemptions: stats.preemptions,
            evictions: stats.evictions,
            finished: stats.finished,
            refused: stats.refused,
            draft_tokens_per_position: stats.drafts.drafted[..depth].to_vec(),
            accepted_tokens_per_position: stats.drafts.accepted[..depth].to_vec(),
            draft_failures: stats.drafts.failures,
            forks: stats.forks,
            deferred_logits: stats.late_rows,
            device: info.device.clone(),
            context_bytes: info.context_bytes,
            kv_reserved_bytes: self.config.kv_bytes.0,
            workspace_bytes: info.workspace_bytes,
            startup_stages: timeline(info, &now),
            ready_ms: milliseconds(info.timeline.total()),
            kv_mapped_bytes: Some(now.kv.bytes),
            workspace_used: now.measured.workspace_used.map(workspace),
            next_kv_event: stats.kv_events,
        }))
    }

    async fn drain(&self, wire: Request<wire::DrainRequest>) -> Result<Response<wire::DrainReply>, Status> {
        let grace = Duration::from_millis(wire.into_inner().grace_ms);
        Ok(Response::new(wire::DrainReply { streams_cut: self.drain_within(grace).await as u32 }))
    }
}

impl WorkerService {
    /// Weights are attached: requests are taken from now on.
    pub(crate) async fn start_serving(&self, serving: ServingEngine) {
        let grammars =
            GrammarCompiler::new(serving.info.gguf.clone(), self.config.threads, serving.handle.waker());
        if self.serving.set(ServingState { serving, grammars }).is_ok() {
            self.health.set_serving::<WorkerServer<Self>>().await;
        }
    }

    /// Sends the router elsewhere, lets streams end, cuts the rest; returns how many were cut.
    pub(crate) async fn drain_within(&self, grace: Duration) -> usize {
        self.health.set_not_serving::<WorkerServer<Self>>().await;
        match self.serving.get() {
            Some(live) => live.serving.handle.drain(grace).await,
            None => 0,
        }
    }

    fn serving_state(&self) -> Result<&ServingState, Status> {
        self.serving.get().ok_or_else(|| unavailable("the weights are not attached yet"))
    }

    fn description(&self, info: &AttachedModelInfo, stats: EngineStats) -> wire::WorkerDescription {
        let bounds = Bounds::of_queue(self.config.queue_max);
        wire::WorkerDescription {
            worker: self.config.name.clone(),
            pid: std::process::id(),
            model: info.name.clone(),
            digest: info.digest.to_vec().into(),
            generation: info.generation,
            fingerprint: info.fingerprint.clone(),
            backend: info.backend.clone(),
            context_tokens: u32::try_from(info.context_tokens).unwrap_or(u32::MAX),
            vocabulary: info.vocabulary as u32,
            running_max: self.config.running_max as u32,
            queue_max: bounds.places(0) as u32,
            batch_queue_max: bounds.places(1) as u32,
            tenant_queue_max: bounds.tenant_queue_max as u32,
            weight_bytes: info.weight_bytes,
            gguf_bytes: info.gguf.len() as u64,
            attach_ms: info.attach.as_secs_f64() * 1e3,
            kv_blocks: stats.kv_blocks as u64,
            kv_block_tokens: stats.kv_block_tokens as u32,
        }
    }
}

/// Stages until the engine was there, and those of its first work once there is some.
fn timeline(info: &AttachedModelInfo, now: &EngineSnapshot) -> Vec<wire::StartupStage> {
    let later = PostReadyStages { first_step: now.first_step, lazy: now.measured.lazy };
    let stages = info.timeline.stages().iter().copied().chain(later.stages());
    stages
        .map(|StartupStage { name, took }| wire::StartupStage {
            name: name.to_owned(),
            ms: milliseconds(took),
        })
        .collect()
}

fn workspace(used: Workspace) -> wire::WorkspaceUsage {
    // A process is measured as a whole, in `private_bytes`.
    let Workspace { activations, scratch, graphs, modules, process: _ } = used;
    wire::WorkspaceUsage { activations, scratch, graphs, modules }
}

/// A socket's name says little after a restart: the caller says whom it means.
fn check_fingerprint(meant: &[u8], info: &AttachedModelInfo) -> Result<(), Status> {
    if meant == info.fingerprint {
        return Ok(());
    }
    let own = String::from_utf8_lossy(&info.fingerprint);
    Err(Status::failed_precondition(format!("this worker is another one: {own}")))
}

/// A score's outputs on their way to frames.
struct ScoreStream {
    outputs: mpsc::Receiver<StreamItem>,
    frames: ScoreFrames,
    end: Option<Result<(), Status>>,
}

impl ScoreStream {
    async fn next(&mut self) -> Option<Result<wire::ScoreFrame, Status>> {
        // Fills a frame with what there is; what comes later goes into the next.
        while self.end.is_none() && !self.frames.is_full() {
            match self.outputs.recv().await {
                Some(Ok(Output::Finished { .. })) => self.end = Some(Ok(())),
                Some(Ok(output)) => self.frames.push(output),
                Some(Err(cut)) => self.end = Some(Err(cut.into())),
                None => self.end = Some(Err(Status::unavailable("the engine has stopped"))),
            }
        }
        match (self.frames.take(), self.end.take()) {
            (Some(frame), end) => {
                self.end = end;
                Some(Ok(frame))
            }
            (None, Some(Err(status))) => {
                self.end = Some(Ok(()));
                Some(Err(status))
            }
            (None, _) => None,
        }
    }
}
