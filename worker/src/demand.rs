//! What a worker takes of its device beside the weights, worked out before it starts: `ballast plan` shows it, the
//! weight-server's ledger reserves it.

use engine::{ConfigError, EngineConfig, KvBudget};
use models::ModelDescription;
use quant::DType;

use crate::config::{Config, Device};

/// What a context takes of a GPU (driver 580 on an H200: 525 MiB).
pub(crate) const CONTEXT_BYTES: u64 = 525 << 20;

/// Activations and logits on the host, the process itself, and what its allocator keeps.
const HOST_WORKSPACE_BYTES: u64 = 40 << 20;

/// On a GPU, without a model to work it out from: a model of 8B parameters and steps of 2,048 tokens.
const GPU_WORKSPACE_BYTES: u64 = 192 << 20;

/// In bytes of the worker's device.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Demand {
    /// Taken by every process on a GPU; 0 on the host.
    pub context: u64,
    /// Keys and values, when the cache is full.
    pub kv: u64,
    /// Activations and logits of the largest step; on the host, everything beside keys and values.
    pub activations: u64,
    /// What kernels keep between steps.
    pub scratch: u64,
    pub graphs: u64,
    pub modules: u64,
}

impl Demand {
    /// Of a worker with this configuration. `dtypes` are the types of the model's tensors, each once.
    pub fn of(config: &Config, model: &ModelDescription, dtypes: &[DType]) -> Result<Self, ConfigError> {
        let engine = config.engine();
        config.kv_type.check(model.layers)?;
        let layout = engine.kv_layout(model.kv_layers(&config.kv_type))?;
        let kv = layout.blocks as u64 * layout.block_bytes() as u64;
        Ok(match config.device {
            Device::Host => Self { kv, activations: HOST_WORKSPACE_BYTES, ..Self::default() },
            Device::Gpu(_) => on_gpu(engine.model_limits(model.vocab_size), &layout, model, dtypes),
        })
    }

    /// As it is reserved with a lease, beside context, keys and values.
    pub fn workspace(&self) -> u64 {
        self.activations + self.scratch + self.graphs + self.modules
    }

    pub fn total(&self) -> u64 {
        self.context + self.kv + self.workspace()
    }
}

#[cfg(feature = "cuda")]
fn on_gpu(
    limits: models::Limits,
    layout: &ops::KvLayout,
    model: &ModelDescription,
    dtypes: &[DType],
) -> Demand {
    use kernels::cuda::{DeviceBytes, WorkerShape, kv_bytes, predict};
    let DeviceBytes { tensors, scratch, graphs, modules } = predict(&WorkerShape {
        layers: model.layers,
        embedding: model.embedding_length,
        heads: model.heads,
        head_dim: model.head_dim,
        feed_forward: model.feed_forward,
        experts: model.experts,
        experts_used: model.experts_used,
        rows_at_once: limits.rows_at_once(),
        tensor_bytes: model.workspace_bytes(limits),
        dtypes: dtypes.to_vec(),
    });
    // A cache beyond 64 bits is refused where it is made.
    let kv = kv_bytes(layout).unwrap_or(u64::MAX);
    Demand { context: CONTEXT_BYTES, kv, activations: tensors, scratch, graphs, modules }
}

/// Nobody chooses a GPU in a build without its kernels; whoever writes one into a file is told by the worker.
#[cfg(not(feature = "cuda"))]
fn on_gpu(_: models::Limits, _: &ops::KvLayout, _: &ModelDescription, _: &[DType]) -> Demand {
    Demand { context: CONTEXT_BYTES, activations: GPU_WORKSPACE_BYTES, ..Demand::default() }
}

impl Config {
    /// What is reserved beside context, keys and values.
    pub(crate) fn workspace(&self) -> u64 {
        let default = match self.device {
            Device::Host => HOST_WORKSPACE_BYTES,
            Device::Gpu(_) => GPU_WORKSPACE_BYTES,
        };
        self.workspace_bytes.map_or(default, |bytes| bytes.0)
    }

    /// The engine's part of the configuration.
    pub(crate) fn engine(&self) -> EngineConfig {
        EngineConfig {
            kv_types: self.kv_type.clone(),
            step_tokens: self.step_tokens,
            prefill_chunk_max: self.step_tokens,
            running_max: self.running_max,
            queue_max: self.queue_max,
            context_tokens: self.context_tokens,
            draft_depth_max: if self.draft.is_off() { 0 } else { self.draft_depth },
            ..EngineConfig::new(KvBudget::Bytes(self.kv_bytes.0))
        }
    }
}
