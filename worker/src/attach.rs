// SPDX-License-Identifier: Apache-2.0

//! From a model's name to an engine: requests a grant from the weight-server, waits for a load in
//! progress, maps the weights, and builds the engine. Blocking; runs on the engine's thread.

use std::io::ErrorKind;
use std::sync::Arc;
use std::time::{Duration, Instant};

use bytes::Bytes;
use engine::{DraftModel, Drafter, Engine, PromptLookup};
use handoff::attach::{AttachRequest, GrantedModel, LoadingProgress};
use handoff::lease::LeaseGuard;
use handoff::seqpacket::SocketError;
use memory::manifest::Manifest;
use models::{ModelDescription, Pooling, TensorHead, WeightTable};
use ops::Backend;
use proto::weights::v1::RefusalReason;
use quant::DType;
use service::{Notify, RunningClock};

use crate::attach_error::WorkerAttachError;
use crate::backend::{self, DeviceRuntime};
use crate::config::{DraftSource, WorkerConfig};
use crate::draft_vocabulary;
use crate::pooling::effective_pooling;
use crate::startup_timeline::StartupTimeline;

/// How long to ask for a model that the weight-server does not know yet, or a weight-server that
/// restarts. When a fleet starts, workers may be first. A load in progress is awaited for as long
/// as it advances.
const RETRY_FOR: Duration = Duration::from_secs(30);
/// An attempt counts for at most this long, so that a pause of this process (SIGSTOP, a frozen
/// cgroup) does not end the wait.
const ATTEMPT_COUNTS_MAX: Duration = Duration::from_secs(10);
const RETRY_PERIOD: Duration = Duration::from_millis(50);

/// What every attach request of a worker needs.
#[derive(Clone, Copy)]
pub(crate) struct AttachContext<'a> {
    pub(crate) config: &'a WorkerConfig,
    pub(crate) token: Option<&'a Bytes>,
    pub(crate) notify: &'a Notify,
}

/// What stays constant for the attached model.
#[derive(Debug)]
pub(crate) struct AttachedModelInfo {
    /// In requests.
    pub(crate) name: String,
    pub(crate) aliases: Vec<String>,
    pub(crate) digest: [u8; 32],
    pub(crate) generation: u64,
    /// Text form of the fingerprint.
    pub(crate) fingerprint: Bytes,
    pub(crate) backend: String,
    /// "host", or a GPU's UUID.
    pub(crate) device: String,
    pub(crate) context_tokens: usize,
    pub(crate) vocab_size: usize,
    /// How embeddings are made. `None`: the worker makes none.
    pub(crate) pooling: Option<Pooling>,
    /// Values of a hidden state.
    pub(crate) embedding_length: usize,
    pub(crate) weight_bytes: u64,
    /// Device memory that the context takes.
    pub(crate) context_bytes: u64,
    /// Device memory that is reserved for activations and kernels.
    pub(crate) workspace_bytes: u64,
    /// The GGUF metadata section, in the manifest's mapping.
    pub(crate) gguf: Bytes,
    /// The time to receive the descriptors and map them.
    pub(crate) attach: Duration,
    /// From the start of the process to the built engine.
    pub(crate) timeline: StartupTimeline,
}

/// An engine on attached weights. Fields are dropped in this order: weights must be unmapped before
/// the leases end.
pub(crate) struct AttachedEngine<B: Backend> {
    pub(crate) engine: Engine<B>,
    /// The leases of the model and of its draft model.
    pub(crate) leases: Vec<Arc<LeaseGuard>>,
    pub(crate) info: AttachedModelInfo,
}

/// Waits until the weight-server grants the configured model. The grant reserves all device memory
/// that the worker will take, and the worker takes none of it before.
pub(crate) fn request_grant<R: DeviceRuntime>(
    device: String,
    context: &AttachContext<'_>,
) -> Result<GrantedModel, WorkerAttachError> {
    let config = context.config;
    let reserved = ReservedBytes {
        kv: config.kv_bytes.0,
        workspace: config.reserved_context_bytes() + config.reserved_workspace_bytes(),
    };
    wait_for_grant::<R>(device, &config.model, reserved, context)
}

/// Maps the configured model and builds its engine.
pub(crate) fn build_engine<R: DeviceRuntime>(
    runtime: &R,
    granted: GrantedModel,
    mut timeline: StartupTimeline,
    context: &AttachContext<'_>,
) -> Result<AttachedEngine<R::Compute>, WorkerAttachError> {
    let config = context.config;
    let engine_config = config.engine_config();
    let MappedModel { manifest, metadata, description, weights, lease, handoff } =
        map_model(runtime, config, &config.model, granted)?;
    let mut leases = vec![Arc::new(lease)];
    timeline.mark("import");
    let mut compute = runtime.compute().map_err(WorkerAttachError::Backend)?;
    let limits = engine_config.model_limits(description.vocab_size);
    let model = models::build(&metadata, weights, &mut compute, limits)?;
    timeline.mark("model");
    let drafter: Option<Box<dyn Drafter<R::Compute>>> = match &config.draft {
        DraftSource::Off => None,
        DraftSource::Lookup => Some(Box::new(PromptLookup::default())),
        DraftSource::Model(name) => {
            // The grant of the worker's own model has reserved the memory of the draft model too.
            let granted = wait_for_grant::<R>(runtime.device(), name, ReservedBytes::default(), context)?;
            let draft = map_model(runtime, config, name, granted)?;
            leases.push(Arc::new(draft.lease));
            draft_vocabulary::check((config.served_model(), &metadata), (name, &draft.metadata))?;
            let draft_model =
                models::build(&draft.metadata, draft.weights, &mut compute, config.draft_limits())?;
            // The cost of a draft step relative to a step of the model: a small step is bound by
            // reading weights.
            let share = draft.manifest.tensor_bytes() as f64 / manifest.tensor_bytes().max(1) as f64;
            timeline.mark("draft");
            tracing::info!(draft = %name, share, "attached the draft model");
            Some(Box::new(DraftModel::new(draft_model, config.step_tokens(), share)))
        }
    };
    let (context_length, vocab_size) = (model.context_length(), model.vocab_size());
    let fingerprint = backend::fingerprint(&manifest, runtime, &compute, &config.kv_type)?;
    let engine = match drafter {
        None => Engine::new(model, compute, &engine_config)?,
        Some(drafter) => Engine::with_drafter(model, drafter, compute, &engine_config)?,
    };
    timeline.mark("kv");
    let info = AttachedModelInfo {
        name: config.served_model().to_owned(),
        aliases: config.aliases.clone(),
        digest: manifest.digest,
        generation: manifest.generation,
        fingerprint: fingerprint.to_string().into(),
        backend: runtime.describe(),
        device: runtime.device(),
        context_tokens: config.context_tokens.map_or(context_length, |limit| limit.min(context_length)),
        vocab_size,
        pooling: effective_pooling(config.pooling, description.pooling),
        embedding_length: description.embedding_length,
        weight_bytes: manifest.tensor_bytes(),
        context_bytes: runtime.context_bytes(),
        workspace_bytes: config.reserved_workspace_bytes(),
        gguf: manifest.gguf_metadata.clone(),
        attach: handoff,
        timeline,
    };
    tracing::info!(
        model = %info.name,
        weights = %manifest.model,
        device = %info.device,
        weight_bytes = info.weight_bytes,
        attach_ms = handoff.as_secs_f64() * 1e3,
        context_bytes = info.context_bytes,
        timeline = %info.timeline,
        "attached"
    );
    Ok(AttachedEngine { engine, leases, info })
}

/// A model whose weights are mapped.
struct MappedModel<R: DeviceRuntime> {
    manifest: Manifest,
    metadata: gguf::Metadata,
    description: ModelDescription,
    /// Dropped before the lease, as in [`AttachedEngine`].
    weights: WeightTable<R::Compute>,
    lease: LeaseGuard,
    handoff: Duration,
}

fn map_model<R: DeviceRuntime>(
    runtime: &R,
    config: &WorkerConfig,
    model: &str,
    granted: GrantedModel,
) -> Result<MappedModel<R>, WorkerAttachError> {
    let attached = runtime.import(granted).map_err(|source| attach_failed(config, model, source))?;
    let handoff::attach::AttachedModel { manifest, tensors, lease, handoff, waited: _ } = attached;
    let metadata = gguf::Metadata::parse(manifest.gguf_metadata.clone())?;
    let mut weights = WeightTable::new();
    let mut heads = Vec::with_capacity(tensors.len());
    for (tensor, data) in manifest.tensors.iter().zip(tensors) {
        let weight = backend::weight::<R>(tensor, data)?;
        heads.push((weight.dtype, &tensor.name, &tensor.shape));
        weights.insert(tensor.name.clone(), weight)?;
    }
    let heads = heads.into_iter().map(|(dtype, name, dims): (DType, _, _)| TensorHead { name, dtype, dims });
    let description = models::validate(&metadata, heads)?;
    Ok(MappedModel { manifest, metadata, description, weights, lease, handoff })
}

/// Device bytes that a grant reserves.
#[derive(Clone, Copy, Default)]
struct ReservedBytes {
    kv: u64,
    /// Everything beside weights and KV cache.
    workspace: u64,
}

/// Repeats the attach request until the weight-server grants the model.
fn wait_for_grant<R: DeviceRuntime>(
    device: String,
    model: &str,
    reserved: ReservedBytes,
    context: &AttachContext<'_>,
) -> Result<GrantedModel, WorkerAttachError> {
    let request = AttachRequest {
        model: model.to_owned(),
        device,
        layout: R::LAYOUT,
        token: context.token.cloned(),
        kv_bytes: reserved.kv,
        workspace_bytes: reserved.workspace,
    };
    let mut clock = RunningClock::new(Instant::now(), ATTEMPT_COUNTS_MAX);
    let mut advanced_at = clock.now();
    let mut last = None;
    loop {
        let mut has_advanced = false;
        let granted = handoff::attach::request_model(&context.config.weights_socket, &request, |progress| {
            if last.replace(progress) != Some(progress) {
                has_advanced = true;
                report_progress(context.notify, model, progress);
            }
        });
        let now = clock.advance(Instant::now());
        if has_advanced {
            advanced_at = now;
        }
        match granted {
            Ok(granted) => return Ok(granted),
            Err(error) if is_transient(&error) && now - advanced_at < RETRY_FOR => {
                std::thread::sleep(RETRY_PERIOD);
            }
            Err(source) => return Err(attach_failed(context.config, model, source)),
        }
    }
}

fn attach_failed(config: &WorkerConfig, model: &str, source: handoff::AttachModelError) -> WorkerAttachError {
    let socket = config.weights_socket.display().to_string();
    WorkerAttachError::Attach { model: model.to_owned(), socket, source }
}

/// Whether the same request may succeed a little later.
fn is_transient(error: &handoff::AttachModelError) -> bool {
    use handoff::AttachModelError as E;
    match error {
        E::Refused { reason, .. } => matches!(
            reason,
            RefusalReason::UnknownModel
                // The copies of a model on several devices are requested one after the other.
                | RefusalReason::Device
                | RefusalReason::Busy
                | RefusalReason::ShuttingDown
                | RefusalReason::Token
        ),
        // The modes of socket and directories exclude this worker's user, and stay as they are.
        E::Socket(SocketError::Io { source, .. }) if source.kind() == ErrorKind::PermissionDenied => false,
        // The weight-server died during the hand-off: its successor answers the next request.
        E::Socket(_) | E::Connection(_) => true,
        _ => false,
    }
}

fn report_progress(notify: &Notify, model: &str, progress: LoadingProgress) {
    let percent = progress.done_bytes.saturating_mul(100).checked_div(progress.total_bytes).unwrap_or(0);
    let text = match progress.jobs_ahead {
        0 => format!("waiting for {model}: {percent}% loaded"),
        ahead => format!("waiting for {model}: {ahead} loads ahead"),
    };
    if let Err(error) = notify.status(&text) {
        tracing::debug!(%error, "cannot report the status to the supervisor");
    }
}
