//! From a model's name to an engine that can take requests: asks the weight-server, waits for a load in progress, maps,
//! builds. Blocking; runs on the thread that then steps the engine.

use std::sync::Arc;
use std::time::{Duration, Instant};

use bytes::Bytes;
use engine::{DraftModel, Drafter, Engine, Lookup, StartError};
use memory::attach::{AttachRequest, Granted, LoadingProgress};
use memory::cuda::{DeviceError, OpenDriverError};
use memory::lease::Lease;
use memory::manifest::Manifest;
use models::{BuildModelError, ModelDescription, TensorHead, WeightError, WeightTable};
use ops::{Backend, OpError};
use prefix::FingerprintError;
use proto::weights::v1::RefusalReason;
use quant::DType;
use service::exit::HasExit;
use service::{Exit, Notify};

use crate::backend::{self, DeviceRuntime, TensorImportError};
use crate::config::{DraftSource, WorkerConfig};
use crate::draft_vocabulary::{self, DraftVocabularyError};
use crate::startup_timeline::StartupTimeline;

/// How long to go on asking for a model that the weight-server does not know yet, or a weight-server that is restarted:
/// in a fleet that comes up, workers may be first. A load in progress is waited for as long as it moves.
const RETRY_FOR: Duration = Duration::from_secs(30);
const RETRY_PERIOD: Duration = Duration::from_millis(50);

#[derive(Debug, thiserror::Error)]
pub enum WorkerAttachError {
    #[error(transparent)]
    Driver(#[from] OpenDriverError),
    #[error(transparent)]
    Device(#[from] DeviceError),
    #[error(
        "the GPU {device} has no room for a context, which takes half a GiB: end what else holds its memory"
    )]
    NoRoom { device: String, source: Box<dyn std::error::Error + Send + Sync> },
    #[error("the GPU {device} gives no context: nvidia-smi may say why, --device host runs without it")]
    Context { device: String, source: Box<dyn std::error::Error + Send + Sync> },
    #[error("cannot attach model {model:?} from {socket}")]
    Attach { model: String, socket: String, source: memory::attach::AttachError },
    #[error("the model's metadata")]
    Metadata(#[from] gguf::MetadataError),
    #[error(transparent)]
    Tensor(#[from] TensorImportError),
    #[error(
        "the model has layers that see a window of {tokens} tokens, for which the GPU has no kernel: run the model with \
         --device host"
    )]
    Window { tokens: usize },
    #[error("the model's tensors")]
    Weights(#[from] WeightError),
    #[error("the model cannot be built")]
    Build(#[from] BuildModelError),
    #[error("the compute backend cannot start")]
    Backend(#[source] OpError),
    #[error(transparent)]
    Start(#[from] StartError),
    #[error(transparent)]
    Vocabulary(#[from] DraftVocabularyError),
    #[error("the worker cannot be described")]
    Fingerprint(#[from] FingerprintError),
}

impl HasExit for WorkerAttachError {
    fn exit(&self) -> Exit {
        match self {
            WorkerAttachError::Driver(OpenDriverError::Init(_))
            | WorkerAttachError::Device(DeviceError::Refused(_)) => Exit::Internal,
            WorkerAttachError::Driver(_) | WorkerAttachError::Device(_) => Exit::Usage,
            WorkerAttachError::NoRoom { .. } => Exit::OutOfResources,
            WorkerAttachError::Context { .. } => Exit::Internal,
            WorkerAttachError::Attach {
                source: memory::attach::AttachError::Refused { reason, .. }, ..
            } => match reason {
                RefusalReason::UnknownModel => Exit::Usage,
                RefusalReason::LoadFailed => Exit::ModelRefused,
                RefusalReason::Ledger => Exit::OutOfResources,
                _ => Exit::PeerLost,
            },
            WorkerAttachError::Attach { .. } => Exit::PeerLost,
            WorkerAttachError::Metadata(_) | WorkerAttachError::Tensor(_) | WorkerAttachError::Weights(_) => {
                Exit::ModelRefused
            }
            WorkerAttachError::Build(BuildModelError::Backend(error)) | WorkerAttachError::Backend(error) => {
                of_op(error)
            }
            WorkerAttachError::Build(_)
            | WorkerAttachError::Vocabulary(_)
            | WorkerAttachError::Window { .. } => Exit::ModelRefused,
            WorkerAttachError::Start(StartError::Config(_)) => Exit::Usage,
            WorkerAttachError::Start(StartError::Kv { source, .. }) => of_op(source),
            WorkerAttachError::Fingerprint(_) => Exit::Internal,
        }
    }
}

fn of_op(error: &OpError) -> Exit {
    match error {
        OpError::Memory { .. } => Exit::OutOfResources,
        _ => Exit::Internal,
    }
}

/// Everything about the attached model that does not change any more.
#[derive(Debug)]
pub(crate) struct AttachedModelInfo {
    pub(crate) name: String,
    pub(crate) digest: [u8; 32],
    pub(crate) generation: u64,
    /// Text form of the fingerprint.
    pub(crate) fingerprint: Bytes,
    pub(crate) backend: String,
    /// "host", or a GPU's UUID.
    pub(crate) device: String,
    pub(crate) context_tokens: usize,
    pub(crate) vocabulary: usize,
    pub(crate) weight_bytes: u64,
    /// Device memory that the context takes, and what is reserved for activations and kernels.
    pub(crate) context_bytes: u64,
    pub(crate) workspace_bytes: u64,
    /// The GGUF metadata section, in the manifest's mapping.
    pub(crate) gguf: Bytes,
    /// Taking descriptors and mapping them.
    pub(crate) attach: Duration,
    /// From the process's start to the engine.
    pub(crate) timeline: StartupTimeline,
}

/// An engine on attached weights. Fields are dropped in this order: weights must be unmapped before the leases end.
pub(crate) struct AttachedEngine<B: Backend> {
    pub(crate) engine: Engine<B>,
    /// Of the model, and of the one that drafts for it.
    pub(crate) leases: Vec<Arc<Lease>>,
    pub(crate) info: AttachedModelInfo,
}

/// Asks for the configured model, and waits for it. All that the worker will take of the device is reserved with the grant:
/// nothing of it is taken before.
pub(crate) fn request_grant<P: DeviceRuntime>(
    device: String,
    config: &WorkerConfig,
    token: Option<Bytes>,
    notify: &Notify,
) -> Result<Granted, WorkerAttachError> {
    let reserved = (config.kv_bytes.0, config.context() + config.workspace());
    wait_for_grant::<P>(device, config, &config.model, reserved, token, notify)
}

/// Maps the configured model and builds its engine.
pub(crate) fn build_engine<P: DeviceRuntime>(
    runtime: &P,
    granted: Granted,
    mut timeline: StartupTimeline,
    config: &WorkerConfig,
    token: Option<Bytes>,
    notify: &Notify,
) -> Result<AttachedEngine<P::Compute>, WorkerAttachError> {
    let engine_config = config.engine();
    let MappedModel { manifest, metadata, described, table, lease, handoff } =
        map_model(runtime, config, &config.model, granted)?;
    let mut leases = vec![Arc::new(lease)];
    timeline.mark("import");
    let mut compute = runtime.compute().map_err(WorkerAttachError::Backend)?;
    let limits = engine_config.model_limits(described.vocab_size);
    let model = models::build(&metadata, table, &mut compute, limits)?;
    timeline.mark("model");
    let drafter: Option<Box<dyn Drafter<P::Compute>>> = match &config.draft {
        DraftSource::Off => None,
        DraftSource::Lookup => Some(Box::new(Lookup::default())),
        DraftSource::Model(name) => {
            // All that the worker takes is reserved with its own model.
            let granted = wait_for_grant::<P>(runtime.device(), config, name, (0, 0), token, notify)?;
            let draft = map_model(runtime, config, name, granted)?;
            leases.push(Arc::new(draft.lease));
            draft_vocabulary::check((&config.model, &metadata), (name, &draft.metadata))?;
            let small = models::build(&draft.metadata, draft.table, &mut compute, config.draft_limits())?;
            // A small step takes as long as its weights take to be read.
            let share = draft.manifest.tensor_bytes() as f64 / manifest.tensor_bytes().max(1) as f64;
            timeline.mark("draft");
            tracing::info!(draft = %name, share, "drafting");
            Some(Box::new(DraftModel::new(small, config.step_tokens, share)))
        }
    };
    let (context_tokens, vocabulary) = (model.context_length(), model.vocab_size());
    let fingerprint = backend::fingerprint(manifest.digest, runtime, &compute, &config.kv_type)?;
    let engine = match drafter {
        None => Engine::new(model, compute, &engine_config)?,
        Some(drafter) => Engine::drafting(model, drafter, compute, &engine_config)?,
    };
    timeline.mark("kv");
    let info = AttachedModelInfo {
        name: manifest.model.clone(),
        digest: manifest.digest,
        generation: manifest.generation,
        fingerprint: fingerprint.to_string().into(),
        backend: runtime.describe(),
        device: runtime.device(),
        context_tokens: config.context_tokens.map_or(context_tokens, |cut| cut.min(context_tokens)),
        vocabulary,
        weight_bytes: manifest.tensor_bytes(),
        context_bytes: runtime.context_bytes(),
        workspace_bytes: config.workspace(),
        gguf: manifest.gguf_metadata.clone(),
        attach: handoff,
        timeline,
    };
    tracing::info!(
        model = %info.name,
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
struct MappedModel<P: DeviceRuntime> {
    manifest: Manifest,
    metadata: gguf::Metadata,
    described: ModelDescription,
    /// Before the lease, as in [`AttachedEngine`].
    table: WeightTable<P::Compute>,
    lease: Lease,
    handoff: Duration,
}

fn map_model<P: DeviceRuntime>(
    runtime: &P,
    config: &WorkerConfig,
    model: &str,
    granted: Granted,
) -> Result<MappedModel<P>, WorkerAttachError> {
    let attached = runtime.import(granted).map_err(|source| attach_failed(config, model, source))?;
    let memory::attach::Attached { manifest, tensors, lease, handoff, waited: _ } = attached;
    let metadata = gguf::Metadata::parse(manifest.gguf_metadata.clone())?;
    let mut table = WeightTable::new();
    let mut heads = Vec::with_capacity(tensors.len());
    for (tensor, data) in manifest.tensors.iter().zip(tensors) {
        let weight = backend::weight::<P>(tensor, data)?;
        heads.push((weight.dtype, &tensor.name, &tensor.shape));
        table.insert(tensor.name.clone(), weight)?;
    }
    let heads = heads.into_iter().map(|(dtype, name, dims): (DType, _, _)| TensorHead { name, dtype, dims });
    let described = models::validate(&metadata, heads)?;
    if !P::Compute::SUPPORTS_WINDOWS
        && let Some(tokens) = described.attention_spans.iter().find_map(|span| span.window_tokens())
    {
        return Err(WorkerAttachError::Window { tokens });
    }
    Ok(MappedModel { manifest, metadata, described, table, lease, handoff })
}

/// Rows that one step of the engine scores at most.
pub(crate) fn score_rows_max(config: &WorkerConfig, info: &AttachedModelInfo) -> usize {
    config.engine().score_rows_max(info.vocabulary)
}

/// Asks until the model is there. Reserved with the grant are bytes for keys and values, and for everything else.
fn wait_for_grant<P: DeviceRuntime>(
    device: String,
    config: &WorkerConfig,
    model: &str,
    (kv_bytes, workspace_bytes): (u64, u64),
    token: Option<Bytes>,
    notify: &Notify,
) -> Result<Granted, WorkerAttachError> {
    let request = AttachRequest {
        model: model.to_owned(),
        device,
        layout: P::LAYOUT,
        token,
        kv_bytes,
        workspace_bytes,
    };
    let mut moved = Instant::now();
    let mut last = None;
    loop {
        let granted = memory::attach::take(&config.weights_socket, &request, |progress| {
            if last.replace(progress) != Some(progress) {
                moved = Instant::now();
                report_progress(notify, model, progress);
            }
        });
        match granted {
            Ok(granted) => return Ok(granted),
            Err(error) if is_transient(&error) && moved.elapsed() < RETRY_FOR => {
                std::thread::sleep(RETRY_PERIOD)
            }
            Err(source) => return Err(attach_failed(config, model, source)),
        }
    }
}

fn attach_failed(
    config: &WorkerConfig,
    model: &str,
    source: memory::attach::AttachError,
) -> WorkerAttachError {
    let socket = config.weights_socket.display().to_string();
    WorkerAttachError::Attach { model: model.to_owned(), socket, source }
}

/// Whether the same request may succeed a little later.
fn is_transient(error: &memory::attach::AttachError) -> bool {
    use memory::attach::AttachError as E;
    match error {
        E::Refused { reason, .. } => matches!(
            reason,
            RefusalReason::UnknownModel
                | RefusalReason::Busy
                | RefusalReason::ShuttingDown
                | RefusalReason::Token
        ),
        // The weight-server died in the middle: its successor will answer.
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
        tracing::debug!(%error, "nobody hears the status");
    }
}
