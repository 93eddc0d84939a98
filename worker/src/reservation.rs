// SPDX-License-Identifier: Apache-2.0

//! What a worker reserves at the weight-server before its model is known, and the engine's part of
//! its configuration.

use engine::{EngineConfig, KvBudget};
use models::ForwardLimits;

use crate::config::{ComputeDevice, DraftSource, WorkerConfig};

/// Memory of a CUDA context, where nothing measures it: 523.6 MiB on an H200 with driver 580.
pub(crate) const CONTEXT_BYTES: u64 = 524 << 20;

/// Host workspace without a model to compute it from: a model of 0.6B parameters and a vocabulary
/// of 150,000, with steps of 512 tokens.
const HOST_WORKSPACE_BYTES: u64 = 192 << 20;

/// Additional workspace of a draft model, without a model to compute it from: a model of 0.6B
/// parameters, with the default steps of the device.
const HOST_DRAFT_WORKSPACE_BYTES: u64 = 32 << 20;
const GPU_DRAFT_WORKSPACE_BYTES: u64 = 104 << 20;

/// GPU workspace without a model to compute it from: a dense model of 8B parameters, with steps of
/// 2,048 tokens.
pub(crate) const GPU_WORKSPACE_BYTES: u64 = 290 << 20;

impl WorkerConfig {
    /// Bytes reserved for the CUDA context before it exists and can be measured.
    pub(crate) fn reserved_context_bytes(&self) -> u64 {
        match self.device {
            ComputeDevice::Host | ComputeDevice::HostNode(_) => 0,
            ComputeDevice::Gpu(_) => CONTEXT_BYTES,
        }
    }

    /// Bytes reserved beside context and KV cache, for all models in the process.
    pub(crate) fn reserved_workspace_bytes(&self) -> u64 {
        let (default, of_draft) = match self.device {
            ComputeDevice::Host | ComputeDevice::HostNode(_) => {
                (HOST_WORKSPACE_BYTES, HOST_DRAFT_WORKSPACE_BYTES)
            }
            ComputeDevice::Gpu(_) => (GPU_WORKSPACE_BYTES, GPU_DRAFT_WORKSPACE_BYTES),
        };
        let draft = if matches!(self.draft, DraftSource::Model(_)) { of_draft } else { 0 };
        self.workspace_bytes.map_or(default + draft, |bytes| bytes.0)
    }

    /// Limits of a step of the draft model.
    pub(crate) fn draft_limits(&self) -> ForwardLimits {
        ForwardLimits { rows_max: self.step_tokens(), outputs_max: self.running_max }
    }

    pub(crate) fn engine_config(&self) -> EngineConfig {
        EngineConfig {
            kv_types: self.kv_type.clone(),
            step_tokens: self.step_tokens(),
            running_max: self.running_max,
            queue_max: self.queue_max,
            context_tokens: self.context_tokens,
            draft_depth_max: if self.draft.is_off() { 0 } else { self.draft_depth },
            ..EngineConfig::new(KvBudget::Bytes(self.kv_bytes.0))
        }
    }
}
