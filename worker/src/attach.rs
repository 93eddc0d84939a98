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

use crate::backend::{self, Place, TensorError};
use crate::config::{Config, Draft};
use crate::timeline::Timeline;
use crate::vocabulary::{self, VocabularyError};

/// How long to go on asking for a model that the weight-server does not know yet, or a weight-server that is restarted:
/// in a fleet that comes up, workers may be first. A load in progress is waited for as long as it moves.
const PATIENCE: Duration = Duration::from_secs(30);
const RETRY: Duration = Duration::from_millis(50);

#[derive(Debug, thiserror::Error)]
pub enum AttachError {
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
    Tensor(#[from] TensorError),
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
    Vocabulary(#[from] VocabularyError),
    #[error("the worker cannot be described")]
    Fingerprint(#[from] FingerprintError),
}

impl HasExit for AttachError {
    fn exit(&self) -> Exit {
        match self {
            AttachError::Driver(OpenDriverError::Init(_)) | AttachError::Device(DeviceError::Refused(_)) => {
                Exit::Internal
            }
            AttachError::Driver(_) | AttachError::Device(_) => Exit::Usage,
            AttachError::NoRoom { .. } => Exit::OutOfResources,
            AttachError::Context { .. } => Exit::Internal,
            AttachError::Attach { source: memory::attach::AttachError::Refused { reason, .. }, .. } => {
                match reason {
                    RefusalReason::UnknownModel => Exit::Usage,
                    RefusalReason::LoadFailed => Exit::ModelRefused,
                    RefusalReason::Ledger => Exit::OutOfResources,
                    _ => Exit::PeerLost,
                }
            }
            AttachError::Attach { .. } => Exit::PeerLost,
            AttachError::Metadata(_) | AttachError::Tensor(_) | AttachError::Weights(_) => Exit::ModelRefused,
            AttachError::Build(BuildModelError::Backend(error)) | AttachError::Backend(error) => of_op(error),
            AttachError::Build(_) | AttachError::Vocabulary(_) | AttachError::Window { .. } => {
                Exit::ModelRefused
            }
            AttachError::Start(StartError::Config(_)) => Exit::Usage,
            AttachError::Start(StartError::Kv { source, .. }) => of_op(source),
            AttachError::Fingerprint(_) => Exit::Internal,
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
pub(crate) struct Facts {
    pub(crate) model: String,
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
    pub(crate) timeline: Timeline,
}

/// An engine on attached weights. Fields are dropped in this order: weights must be unmapped before the leases end.
pub(crate) struct Resident<B: Backend> {
    pub(crate) engine: Engine<B>,
    /// Of the model, and of the one that drafts for it.
    pub(crate) leases: Vec<Arc<Lease>>,
    pub(crate) facts: Facts,
}

/// Asks for the configured model, and waits for it. All that the worker will take of the device is reserved with the grant:
/// nothing of it is taken before.
pub(crate) fn reserve<P: Place>(
    device: String,
    config: &Config,
    token: Option<Bytes>,
    notify: &Notify,
) -> Result<Granted, AttachError> {
    let reserved = (config.kv_bytes.0, config.context() + config.workspace());
    wait_for_model::<P>(device, config, &config.model, reserved, token, notify)
}

/// Maps the configured model and builds its engine.
pub(crate) fn bring_up<P: Place>(
    place: &P,
    granted: Granted,
    mut timeline: Timeline,
    config: &Config,
    token: Option<Bytes>,
    notify: &Notify,
) -> Result<Resident<P::Compute>, AttachError> {
    let engine_config = config.engine();
    let Mapped { manifest, metadata, described, table, lease, handoff } =
        map(place, config, &config.model, granted)?;
    let mut leases = vec![Arc::new(lease)];
    timeline.mark("import");
    let mut compute = place.compute().map_err(AttachError::Backend)?;
    let limits = engine_config.model_limits(described.vocab_size);
    let model = models::build(&metadata, table, &mut compute, limits)?;
    timeline.mark("model");
    let drafter: Option<Box<dyn Drafter<P::Compute>>> = match &config.draft {
        Draft::Off => None,
        Draft::Lookup => Some(Box::new(Lookup::default())),
        Draft::Model(name) => {
            // All that the worker takes is reserved with its own model.
            let granted = wait_for_model::<P>(place.device(), config, name, (0, 0), token, notify)?;
            let draft = map(place, config, name, granted)?;
            leases.push(Arc::new(draft.lease));
            vocabulary::check((&config.model, &metadata), (name, &draft.metadata))?;
            let small = models::build(&draft.metadata, draft.table, &mut compute, config.draft_limits())?;
            // A small step takes as long as its weights take to be read.
            let share = draft.manifest.tensor_bytes() as f64 / manifest.tensor_bytes().max(1) as f64;
            timeline.mark("draft");
            tracing::info!(draft = %name, share, "drafting");
            Some(Box::new(DraftModel::new(small, config.step_tokens, share)))
        }
    };
    let (context_tokens, vocabulary) = (model.context_length(), model.vocab_size());
    let fingerprint = backend::fingerprint(manifest.digest, place, &compute, &config.kv_type)?;
    let engine = match drafter {
        None => Engine::new(model, compute, &engine_config)?,
        Some(drafter) => Engine::drafting(model, drafter, compute, &engine_config)?,
    };
    timeline.mark("kv");
    let facts = Facts {
        model: manifest.model.clone(),
        digest: manifest.digest,
        generation: manifest.generation,
        fingerprint: fingerprint.to_string().into(),
        backend: place.describe(),
        device: place.device(),
        context_tokens: config.context_tokens.map_or(context_tokens, |cut| cut.min(context_tokens)),
        vocabulary,
        weight_bytes: manifest.tensor_bytes(),
        context_bytes: place.context_bytes(),
        workspace_bytes: config.workspace(),
        gguf: manifest.gguf_metadata.clone(),
        attach: handoff,
        timeline,
    };
    tracing::info!(
        model = %facts.model,
        device = %facts.device,
        weight_bytes = facts.weight_bytes,
        attach_ms = handoff.as_secs_f64() * 1e3,
        context_bytes = facts.context_bytes,
        timeline = %facts.timeline,
        "attached"
    );
    Ok(Resident { engine, leases, facts })
}

/// A model whose weights are mapped.
struct Mapped<P: Place> {
    manifest: Manifest,
    metadata: gguf::Metadata,
    described: ModelDescription,
    /// Before the lease, as in [`Resident`].
    table: WeightTable<P::Compute>,
    lease: Lease,
    handoff: Duration,
}

fn map<P: Place>(
    place: &P,
    config: &Config,
    model: &str,
    granted: Granted,
) -> Result<Mapped<P>, AttachError> {
    let attached = place.import(granted).map_err(|source| failed(config, model, source))?;
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
        return Err(AttachError::Window { tokens });
    }
    Ok(Mapped { manifest, metadata, described, table, lease, handoff })
}

/// Rows that one step of the engine scores at most.
pub(crate) fn score_rows_max(config: &Config, facts: &Facts) -> usize {
    config.engine().score_rows_max(facts.vocabulary)
}

/// Asks until the model is there. Reserved with the grant are bytes for keys and values, and for everything else.
fn wait_for_model<P: Place>(
    device: String,
    config: &Config,
    model: &str,
    (kv_bytes, workspace_bytes): (u64, u64),
    token: Option<Bytes>,
    notify: &Notify,
) -> Result<Granted, AttachError> {
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
                tell(notify, model, progress);
            }
        });
        match granted {
            Ok(granted) => return Ok(granted),
            Err(error) if may_pass(&error) && moved.elapsed() < PATIENCE => std::thread::sleep(RETRY),
            Err(source) => return Err(failed(config, model, source)),
        }
    }
}

fn failed(config: &Config, model: &str, source: memory::attach::AttachError) -> AttachError {
    let socket = config.weights_socket.display().to_string();
    AttachError::Attach { model: model.to_owned(), socket, source }
}

/// Whether the same request may succeed a little later.
fn may_pass(error: &memory::attach::AttachError) -> bool {
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

fn tell(notify: &Notify, model: &str, progress: LoadingProgress) {
    let percent = progress.done_bytes.saturating_mul(100).checked_div(progress.total_bytes).unwrap_or(0);
    let text = match progress.jobs_ahead {
        0 => format!("waiting for {model}: {percent}% loaded"),
        ahead => format!("waiting for {model}: {ahead} loads ahead"),
    };
    if let Err(error) = notify.status(&text) {
        tracing::debug!(%error, "nobody hears the status");
    }
}
