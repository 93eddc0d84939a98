// SPDX-License-Identifier: Apache-2.0

//! The memory that a worker will take of its device beside the weights, computed before the worker
//! starts. `ballast plan` shows the plan, and the weight-server's ledger reserves it.

use engine::EngineConfigError;
use models::ModelDescription;
use quant::DType;

use crate::config::{ComputeDevice, WorkerConfig};
use crate::gpu;
use crate::reservation::CONTEXT_BYTES;
use crate::workspace::WorkspaceBytes;

mod host;

/// In bytes of the worker's device.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct MemoryPlan {
    /// The CUDA context, which every process on a GPU has; 0 on the host.
    pub context: u64,
    /// The KV cache when it is full.
    pub kv: u64,
    pub workspace: WorkspaceBytes,
}

impl MemoryPlan {
    /// The plan of a worker with this configuration. `dtypes` holds each type of the model's
    /// tensors once.
    pub fn of(
        config: &WorkerConfig,
        model: &ModelDescription,
        dtypes: &[DType],
    ) -> Result<Self, EngineConfigError> {
        let engine = config.engine_config();
        config.kv_type.check(model.layers)?;
        let layout = engine.kv_layout(model.kv_layers(&config.kv_type))?;
        let kv = layout.blocks as u64 * layout.block_bytes() as u64;
        Ok(match config.device {
            ComputeDevice::Host | ComputeDevice::HostNode(_) => {
                Self { context: 0, kv, workspace: host::worker_workspace(config, &layout, model, dtypes) }
            }
            ComputeDevice::Gpu(_) => Self {
                context: CONTEXT_BYTES,
                kv: gpu::kv_cache_bytes(&layout),
                workspace: {
                    let limits = engine.model_limits(model.vocab_size);
                    gpu::workspace(limits, model, &config.kv_type, dtypes)
                },
            },
        })
    }

    /// The plan with a draft model added. Its KV cache is part of the worker's KV budget.
    pub fn with_draft(self, config: &WorkerConfig, draft: &ModelDescription, dtypes: &[DType]) -> Self {
        let workspace = match config.device {
            ComputeDevice::Host | ComputeDevice::HostNode(_) => {
                host::model_workspace(config, config.draft_limits(), draft, dtypes)
            }
            ComputeDevice::Gpu(_) => gpu::workspace(config.draft_limits(), draft, &config.kv_type, dtypes),
        };
        Self { workspace: self.workspace.shared_with(workspace), ..self }
    }

    pub fn total(&self) -> u64 {
        self.context + self.kv + self.workspace.total()
    }
}
