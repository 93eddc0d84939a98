//! What a worker takes of its device beside the weights, worked out before it starts: `ballast plan` shows it, the
//! weight-server's ledger reserves it.

use engine::{ConfigError, EngineConfig, KvBudget};
use models::{Limits, ModelDescription};
use quant::DType;

use crate::config::{ComputeDevice, DraftSource, WorkerConfig};

mod host;

/// What a context takes of a GPU where nobody says it: 523.6 MiB on an H200 with driver 580.
pub(crate) const CONTEXT_BYTES: u64 = 524 << 20;

/// What a context takes beside the bytes that the driver counts to its process. On an H200 the device had 523.5625 MiB less
/// and the process 518, whether 1, 2, 4 or 8 of them started at once.
#[cfg(any(test, feature = "cuda"))]
const CONTEXT_UNCOUNTED_BYTES: u64 = 5_696 << 10;

/// On the host, without a model to work it out from: a model of 0.6B parameters and a vocabulary of 150,000, steps of 512
/// tokens.
const HOST_WORKSPACE_BYTES: u64 = 192 << 20;

/// Of a model that drafts in the process, without one to work it out from.
const DRAFT_WORKSPACE_BYTES: u64 = 32 << 20;

/// On a GPU, without a model to work it out from: a model of 8B parameters and steps of 2,048 tokens.
const GPU_WORKSPACE_BYTES: u64 = 192 << 20;

/// In bytes of the worker's device.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct MemoryPlan {
    /// Taken by every process on a GPU; 0 on the host.
    pub context: u64,
    /// Keys and values, when the cache is full.
    pub kv: u64,
    pub workspace: Workspace,
}

/// What is reserved with a lease beside context, keys and values; in bytes of the worker's device.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Workspace {
    /// Activations and logits of the largest step; on the host, rows of logits that are kept too.
    pub activations: u64,
    /// What kernels keep between steps.
    pub scratch: u64,
    pub graphs: u64,
    /// Modules, and what else the driver keeps beside a context.
    pub modules: u64,
    /// On the host, whose memory it is: the process itself.
    pub process: u64,
}

impl Workspace {
    pub fn total(&self) -> u64 {
        self.activations + self.scratch + self.graphs + self.modules + self.process
    }

    /// Of two models in one process, which compute in turns: what kernels keep serves both.
    fn shared_with(self, other: Self) -> Self {
        Self {
            activations: self.activations + other.activations,
            scratch: self.scratch.max(other.scratch),
            graphs: self.graphs.max(other.graphs),
            modules: self.modules.max(other.modules),
            process: self.process.max(other.process),
        }
    }
}

impl MemoryPlan {
    /// Of a worker with this configuration. `dtypes` are the types of the model's tensors, each once.
    pub fn of(
        config: &WorkerConfig,
        model: &ModelDescription,
        dtypes: &[DType],
    ) -> Result<Self, ConfigError> {
        let engine = config.engine();
        config.kv_type.check(model.layers)?;
        let layout = engine.kv_layout(model.kv_layers(&config.kv_type))?;
        let kv = layout.blocks as u64 * layout.block_bytes() as u64;
        Ok(match config.device {
            ComputeDevice::Host => {
                Self { context: 0, kv, workspace: host::workspace(config, &layout, model, dtypes) }
            }
            ComputeDevice::Gpu(_) => Self {
                context: CONTEXT_BYTES,
                kv: kv_on_gpu(&layout),
                workspace: workspace_on_gpu(engine.model_limits(model.vocab_size), model, dtypes),
            },
        })
    }

    /// With another model in the worker that drafts for its own. What that keeps of tokens is part of the worker's keys and
    /// values.
    pub fn with_draft(self, config: &WorkerConfig, draft: &ModelDescription, dtypes: &[DType]) -> Self {
        let workspace = match config.device {
            ComputeDevice::Host => host::of_model(config, config.draft_limits(), draft, dtypes),
            ComputeDevice::Gpu(_) => workspace_on_gpu(config.draft_limits(), draft, dtypes),
        };
        Self { workspace: self.workspace.shared_with(workspace), ..self }
    }

    pub fn total(&self) -> u64 {
        self.context + self.kv + self.workspace.total()
    }
}

/// What this process's context takes, from what the driver counted to it before and after the context was made. A number
/// that was there before is of another process, which has this one's number in a namespace of its own.
#[cfg(any(test, feature = "cuda"))]
pub(crate) fn context_bytes(before: Option<u64>, after: Option<u64>) -> u64 {
    match (before, after) {
        (None, Some(counted)) => counted.saturating_add(CONTEXT_UNCOUNTED_BYTES),
        _ => CONTEXT_BYTES,
    }
}

/// As many bytes as no device has, for a cache beyond 64 bits: that is refused where it is made.
#[cfg(feature = "cuda")]
fn kv_on_gpu(layout: &ops::KvLayout) -> u64 {
    kernels::cuda::kv_bytes(layout).unwrap_or(u64::MAX)
}

#[cfg(feature = "cuda")]
fn workspace_on_gpu(limits: Limits, model: &ModelDescription, dtypes: &[DType]) -> Workspace {
    use kernels::cuda::{CudaWorkerShape, predict_device_bytes};
    let shape = CudaWorkerShape {
        layers: model.layers,
        embedding: model.embedding_length,
        heads: model.heads,
        head_dim: model.head_dim,
        feed_forward: model.feed_forward,
        experts: model.experts,
        experts_used: model.experts_used,
        rows_at_once: limits.rows_at_once(),
        tensors: model.workspace_tensors(limits).collect(),
        dtypes: dtypes.to_vec(),
    };
    predict_device_bytes(&shape).into()
}

#[cfg(feature = "cuda")]
impl From<kernels::cuda::DeviceBytes> for Workspace {
    fn from(bytes: kernels::cuda::DeviceBytes) -> Self {
        let kernels::cuda::DeviceBytes { tensors, scratch, graphs, modules } = bytes;
        Self { activations: tensors, scratch, graphs, modules, process: 0 }
    }
}

/// Nobody chooses a GPU in a build without its kernels; whoever writes one into a file is told by the worker.
#[cfg(not(feature = "cuda"))]
fn kv_on_gpu(_: &ops::KvLayout) -> u64 {
    0
}

#[cfg(not(feature = "cuda"))]
fn workspace_on_gpu(_: Limits, _: &ModelDescription, _: &[DType]) -> Workspace {
    Workspace { activations: GPU_WORKSPACE_BYTES, ..Workspace::default() }
}

impl WorkerConfig {
    /// Reserved before there is one to be measured.
    pub(crate) fn context(&self) -> u64 {
        match self.device {
            ComputeDevice::Host => 0,
            ComputeDevice::Gpu(_) => CONTEXT_BYTES,
        }
    }

    /// What is reserved beside context, keys and values, of all models in the process.
    pub(crate) fn workspace(&self) -> u64 {
        let default = match self.device {
            ComputeDevice::Host => HOST_WORKSPACE_BYTES,
            ComputeDevice::Gpu(_) => GPU_WORKSPACE_BYTES,
        };
        let draft = if matches!(self.draft, DraftSource::Model(_)) { DRAFT_WORKSPACE_BYTES } else { 0 };
        self.workspace_bytes.map_or(default + draft, |bytes| bytes.0)
    }

    /// How large a step of the model that drafts may be.
    pub(crate) fn draft_limits(&self) -> Limits {
        Limits { rows_max: self.step_tokens, outputs_max: self.running_max }
    }

    /// The engine's part of the configuration.
    pub(crate) fn engine(&self) -> EngineConfig {
        EngineConfig {
            kv_types: self.kv_type.clone(),
            step_tokens: self.step_tokens,
            running_max: self.running_max,
            queue_max: self.queue_max,
            context_tokens: self.context_tokens,
            draft_depth_max: if self.draft.is_off() { 0 } else { self.draft_depth },
            ..EngineConfig::new(KvBudget::Bytes(self.kv_bytes.0))
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn two_models_of_a_process_share_what_kernels_keep() {
        let large = Workspace { activations: 20, scratch: 10, graphs: 2, modules: 14, process: 9 };
        let small = Workspace { activations: 5, scratch: 11, graphs: 1, modules: 14, process: 0 };
        let both = Workspace { activations: 25, scratch: 11, graphs: 2, modules: 14, process: 9 };
        assert_eq!((large.shared_with(small), small.shared_with(large)), (both, both));
    }

    #[test]
    fn a_context_takes_what_the_driver_says_of_this_process_and_of_no_other() {
        let as_seen = context_bytes(None, Some(518 << 20));
        assert_eq!(as_seen, 548_995_072);
        assert!(as_seen.abs_diff(CONTEXT_BYTES) < 1 << 20);
        assert_eq!(context_bytes(None, Some(300 << 20)) >> 20, 305);
        for unsaid in [(None, None), (Some(70 << 30), Some(70 << 30)), (Some(70 << 30), None)] {
            assert_eq!(context_bytes(unsaid.0, unsaid.1), CONTEXT_BYTES, "{unsaid:?}");
        }
    }
}
