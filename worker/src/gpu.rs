// SPDX-License-Identifier: Apache-2.0

//! The parts of the worker that need CUDA kernels. `cfg(feature = "cuda")` stands in this file and
//! in no other one of this crate. In a build without the feature, a worker on a GPU ends with an
//! error that says so.

use cuda::DeviceSelector;
use models::{ForwardLimits, ModelDescription};
use ops::KvTypes;
use quant::DType;

use crate::engine_thread::EngineThread;
use crate::run_error::WorkerRunError;
use crate::workspace::WorkspaceBytes;

#[cfg(any(test, feature = "cuda"))]
mod context;
#[cfg(feature = "cuda")]
mod runtime;

/// Runs the engine's thread on the selected GPU.
#[cfg(feature = "cuda")]
pub(crate) fn run_engine(thread: EngineThread<'_>, selector: DeviceSelector) -> Result<(), WorkerRunError> {
    runtime::run_engine(thread, selector)
}

#[cfg(not(feature = "cuda"))]
pub(crate) fn run_engine(_: EngineThread<'_>, _: DeviceSelector) -> Result<(), WorkerRunError> {
    Err(crate::attach_error::WorkerAttachError::from(cuda::OpenDriverError::NotBuilt).into())
}

/// Bytes of a KV cache on a GPU. A layout beyond 64 bits counts as `u64::MAX`: the engine refuses
/// to create it.
#[cfg(feature = "cuda")]
pub(crate) fn kv_cache_bytes(layout: &ops::KvLayout) -> u64 {
    kernels::cuda::kv_bytes(layout).unwrap_or(u64::MAX)
}

/// Without the kernels, only a configuration file can select a GPU, and the worker reports it at
/// its start.
#[cfg(not(feature = "cuda"))]
pub(crate) fn kv_cache_bytes(_: &ops::KvLayout) -> u64 {
    0
}

/// What the steps of one model take on a GPU.
#[cfg(feature = "cuda")]
pub(crate) fn workspace(
    limits: ForwardLimits,
    model: &ModelDescription,
    kv_types: &KvTypes,
    dtypes: &[DType],
) -> WorkspaceBytes {
    use kernels::cuda::{CudaWorkerShape, predict_device_bytes};
    let shape = CudaWorkerShape {
        layers: model.layers,
        embedding: model.embedding_length,
        heads: model.heads,
        head_dim: model.head_dim,
        feed_forward: model.feed_forward,
        experts: model.experts,
        experts_used: model.experts_used,
        rows_at_once: limits.rows_at_once(model.experts),
        tensors: model.workspace_tensors(limits).collect(),
        kv_layers: (0..model.layers)
            .map(|layer| (kv_types.of(layer), model.attention_spans[layer]))
            .collect(),
        dtypes: dtypes.to_vec(),
    };
    predict_device_bytes(&shape).into()
}

#[cfg(not(feature = "cuda"))]
pub(crate) fn workspace(_: ForwardLimits, _: &ModelDescription, _: &KvTypes, _: &[DType]) -> WorkspaceBytes {
    WorkspaceBytes { activations: crate::reservation::GPU_WORKSPACE_BYTES, ..WorkspaceBytes::default() }
}

#[cfg(feature = "cuda")]
impl From<kernels::cuda::DeviceBytes> for WorkspaceBytes {
    fn from(bytes: kernels::cuda::DeviceBytes) -> Self {
        let kernels::cuda::DeviceBytes { tensors, scratch, graphs, modules } = bytes;
        Self { activations: tensors, scratch, graphs, modules, process: 0 }
    }
}
