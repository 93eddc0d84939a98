//! From a model's name to an engine that can take requests: asks the weight-server, waits for a load in progress, maps,
//! builds. Blocking; runs on the thread that then steps the engine.

use std::sync::Arc;
use std::time::{Duration, Instant};

use bytes::Bytes;
use engine::{Engine, EngineConfig, KvBudget, StartError};
use memory::attach::{AttachRequest, Attached, LoadingProgress, attach};
use memory::lease::Lease;
use memory::manifest::HOST_DEVICE;
use models::{BuildModelError, TensorHead, WeightError, WeightTable};
use ops::OpError;
use prefix::FingerprintError;
use proto::weights::v1::RefusalReason;
use quant::DType;
use service::exit::HasExit;
use service::{Exit, Notify};

use crate::backend::{self, Compute, TensorError};
use crate::config::{Config, Device};

/// How long to go on asking for a model that the weight-server does not know yet, or a weight-server that is restarted:
/// in a fleet that comes up, workers may be first. A load in progress is waited for as long as it moves.
const PATIENCE: Duration = Duration::from_secs(30);
const RETRY: Duration = Duration::from_millis(50);

/// Activations, logits and the process itself beside the KV cache, as reserved in the ledger.
const WORKSPACE_BYTES: u64 = 40 << 20;

#[derive(Debug, thiserror::Error)]
pub enum AttachError {
    #[error("cannot attach model {model:?} from {socket}")]
    Attach { model: String, socket: String, source: memory::attach::AttachError },
    #[error("the model's metadata")]
    Metadata(#[from] gguf::MetadataError),
    #[error(transparent)]
    Tensor(#[from] TensorError),
    #[error("the model's tensors")]
    Weights(#[from] WeightError),
    #[error("the model cannot be built")]
    Build(#[from] BuildModelError),
    #[error("the compute backend cannot start")]
    Backend(#[source] OpError),
    #[error(transparent)]
    Start(#[from] StartError),
    #[error("the worker cannot be described")]
    Fingerprint(#[from] FingerprintError),
}

impl HasExit for AttachError {
    fn exit(&self) -> Exit {
        match self {
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
            AttachError::Build(_) => Exit::ModelRefused,
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
    pub(crate) context_tokens: usize,
    pub(crate) vocabulary: usize,
    pub(crate) weight_bytes: u64,
    /// The GGUF metadata section, in the manifest's mapping.
    pub(crate) gguf: Bytes,
    /// From the weight-server's grant to the last mapping.
    pub(crate) attach: Duration,
}

/// An engine on attached weights. Fields are dropped in this order: weights must be unmapped before the lease ends.
pub(crate) struct Resident {
    pub(crate) engine: Engine<Compute>,
    pub(crate) lease: Arc<Lease>,
    pub(crate) facts: Facts,
}

/// Attaches the configured model and builds its engine.
pub(crate) fn bring_up(
    config: &Config,
    token: Option<Bytes>,
    notify: &Notify,
) -> Result<Resident, AttachError> {
    let started = Instant::now();
    let Attached { manifest, tensors, lease, handoff, waited } = wait_for_model(config, token, notify)?;
    let metadata = gguf::Metadata::parse(manifest.gguf_metadata.clone())?;
    let mut table = WeightTable::new();
    let mut heads = Vec::with_capacity(tensors.len());
    for tensor in &tensors {
        let weight = backend::weight(tensor)?;
        heads.push((weight.dtype, &tensor.name, &tensor.shape));
        table.insert(tensor.name.clone(), weight)?;
    }
    let heads = heads.into_iter().map(|(dtype, name, dims): (DType, _, _)| TensorHead { name, dtype, dims });
    let described = models::validate(&metadata, heads)?;

    let mut compute = backend::start(config.threads).map_err(AttachError::Backend)?;
    let engine_config = engine_config(config);
    let limits = engine_config.model_limits(described.vocab_size);
    let model = models::build(&metadata, table, &mut compute, limits)?;
    let facts = Facts {
        model: manifest.model.clone(),
        digest: manifest.digest,
        generation: manifest.generation,
        fingerprint: backend::fingerprint(manifest.digest, &compute)?.to_string().into(),
        backend: backend::describe(&compute),
        context_tokens: config
            .context_tokens
            .map_or(model.context_length(), |cut| cut.min(model.context_length())),
        vocabulary: model.vocab_size(),
        weight_bytes: manifest.tensor_bytes(),
        gguf: manifest.gguf_metadata.clone(),
        attach: handoff,
    };
    let engine = Engine::new(model, compute, &engine_config)?;
    tracing::info!(
        model = %facts.model,
        attach_ms = handoff.as_secs_f64() * 1e3,
        waited_ms = waited.as_secs_f64() * 1e3,
        total_ms = started.elapsed().as_secs_f64() * 1e3,
        weight_bytes = facts.weight_bytes,
        "attached"
    );
    Ok(Resident { engine, lease: Arc::new(lease), facts })
}

fn engine_config(config: &Config) -> EngineConfig {
    EngineConfig {
        kv_type: backend::KV_TYPE,
        step_tokens: config.step_tokens,
        prefill_chunk_max: config.step_tokens,
        running_max: config.running_max,
        queue_max: config.queue_max,
        context_tokens: config.context_tokens,
        ..EngineConfig::new(KvBudget::Bytes(config.kv_bytes.0))
    }
}

/// Rows that one step of the engine scores at most.
pub(crate) fn score_rows_max(config: &Config, facts: &Facts) -> usize {
    engine_config(config).model_limits(facts.vocabulary).outputs_max - config.running_max
}

fn wait_for_model(config: &Config, token: Option<Bytes>, notify: &Notify) -> Result<Attached, AttachError> {
    let Device::Host = config.device;
    let request = AttachRequest {
        model: config.model.clone(),
        device: HOST_DEVICE.to_owned(),
        layout: backend::LAYOUT,
        token,
        kv_bytes: config.kv_bytes.0,
        workspace_bytes: WORKSPACE_BYTES,
    };
    let mut moved = Instant::now();
    let mut last = None;
    loop {
        let attached = attach(&config.weights_socket, &request, |progress| {
            if last.replace(progress) != Some(progress) {
                moved = Instant::now();
                tell(notify, &config.model, progress);
            }
        });
        match attached {
            Ok(attached) => return Ok(attached),
            Err(error) if may_pass(&error) && moved.elapsed() < PATIENCE => std::thread::sleep(RETRY),
            Err(source) => {
                let socket = config.weights_socket.display().to_string();
                return Err(AttachError::Attach { model: config.model.clone(), socket, source });
            }
        }
    }
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
