//! What a worker takes of its device beside the weights, worked out before it starts: `ballast plan` shows it, the
//! weight-server's ledger reserves it.

use engine::{ConfigError, EngineConfig};
use models::ModelDescription;

use crate::backend::KV_TYPE;
use crate::config::{Config, Device};

/// What a context takes of a GPU (driver 580 on an H200: 525 MiB).
pub(crate) const CONTEXT_BYTES: u64 = 525 << 20;

/// Activations and logits on the host, the process itself, and what its allocator keeps.
const HOST_WORKSPACE_BYTES: u64 = 40 << 20;

/// Modules, graphs, and what the kernels keep between steps.
const KERNEL_BYTES: u64 = 64 << 20;

/// Without a model to work it out from: enough for 512 rows of a model of 8B parameters.
const DEFAULT_GPU_WORKSPACE_BYTES: u64 = 256 << 20;

/// In bytes of the worker's device.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Demand {
    /// Taken by every process on a GPU; 0 on the host.
    pub context: u64,
    /// Keys and values, when the cache is full.
    pub kv: u64,
    /// Activations and logits of the largest step.
    pub workspace: u64,
    /// Modules, graphs, and what kernels keep between steps; part of the workspace on the host.
    pub kernels: u64,
}

impl Demand {
    /// Of a worker with this configuration, for a model of this shape.
    pub fn of(config: &Config, model: &ModelDescription) -> Result<Self, ConfigError> {
        let engine = config.engine();
        let layout = engine.kv_layout(model.kv_layers(KV_TYPE))?;
        let limits = engine.model_limits(model.vocab_size);
        let kv = layout.blocks as u64 * layout.block_bytes() as u64;
        Ok(match config.device {
            Device::Host => Self { context: 0, kv, workspace: HOST_WORKSPACE_BYTES, kernels: 0 },
            Device::Gpu(_) => Self {
                context: CONTEXT_BYTES,
                kv,
                workspace: model.workspace_bytes(limits),
                kernels: KERNEL_BYTES,
            },
        })
    }

    pub fn total(&self) -> u64 {
        self.context + self.kv + self.workspace + self.kernels
    }
}

impl Config {
    /// What is reserved beside keys and values where nobody has worked it out from a model.
    pub(crate) fn workspace(&self) -> u64 {
        let default = match self.device {
            Device::Host => HOST_WORKSPACE_BYTES,
            Device::Gpu(_) => DEFAULT_GPU_WORKSPACE_BYTES + KERNEL_BYTES,
        };
        self.workspace_bytes.map_or(default, |bytes| bytes.0)
    }

    /// The engine's part of the configuration.
    pub(crate) fn engine(&self) -> EngineConfig {
        EngineConfig {
            kv_type: KV_TYPE,
            step_tokens: self.step_tokens,
            prefill_chunk_max: self.step_tokens,
            running_max: self.running_max,
            queue_max: self.queue_max,
            context_tokens: self.context_tokens,
            ..EngineConfig::new(engine::KvBudget::Bytes(self.kv_bytes.0))
        }
    }
}
