// SPDX-License-Identifier: Apache-2.0

//! What differs between devices. A [`DeviceRuntime`] maps weights, creates the compute backend, and
//! measures it. There is one for the host ([`host`]) and one for a GPU ([`gpu`](crate::gpu)).
//!
//! `run` looks at the configured device once. All other code of this crate is generic over the
//! runtime.

pub(crate) mod host;

use handoff::AttachModelError;
use handoff::attach::{AttachedModel, GrantedModel};
use memory::manifest::{Manifest, TensorEntry};
use ops::{Backend, KvTypes, OpError, Weight};
use prefix::{Fingerprint, FingerprintError};
use quant::DType;
use quant::layout::{LAYOUT_GGML, planes};

use crate::startup_timeline::LazyInit;
use crate::workspace::WorkspaceBytes;

/// A device that is ready to compute: context, streams and allocator.
pub(crate) trait DeviceRuntime: Sized {
    type Compute: Backend;

    /// The layout of tensor bytes that the kernels read.
    const LAYOUT: u32;

    /// Whether the backend has kernels for weights of this type.
    fn supports_dtype(dtype: DType) -> bool;

    /// The device's name in attach requests and manifests: "host", or a GPU's UUID.
    fn device(&self) -> String;

    /// Device memory that the context takes, beside whatever the process computes.
    fn context_bytes(&self) -> u64;

    /// The kernels' instruction set. Two runtimes with equal values produce equal tokens.
    fn isa(&self, compute: &Self::Compute) -> String;

    /// Device and instruction set as logs show them.
    fn describe(&self) -> String;

    /// Maps the granted memory read-only. Returns each tensor's data in the manifest's order.
    fn import(&self, granted: GrantedModel)
    -> Result<AttachedModel<Vec<TensorData<Self>>>, AttachModelError>;

    fn compute(&self) -> Result<Self::Compute, OpError>;

    fn measure(compute: &Self::Compute) -> BackendUsage;
}

/// What only the backend itself can measure.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct BackendUsage {
    /// Current device memory of activations, logits and kernel buffers. `None` where only the whole
    /// process can be measured.
    pub(crate) workspace_used: Option<WorkspaceBytes>,
    pub(crate) lazy_init: LazyInit,
}

/// [`DeviceRuntime::measure`] for code that is generic over the backend only.
pub(crate) type MeasureBackend<B> = fn(&B) -> BackendUsage;

/// A tensor's bytes as the runtime's backend addresses them.
pub(crate) type TensorData<R> = <<R as DeviceRuntime>::Compute as Backend>::Data;

#[derive(Debug, thiserror::Error)]
pub enum TensorImportError {
    #[error("tensor {tensor} has the unknown type {dtype}")]
    Type { tensor: String, dtype: u32 },
    #[error(
        "tensor {tensor} has type {dtype}, for which the GPU has no kernel: run the model with --device host"
    )]
    NoKernel { tensor: String, dtype: DType },
    #[error("tensor {tensor} has layout {layout}, this worker reads layout {expected}")]
    Layout { tensor: String, layout: u32, expected: u32 },
    #[error("tensor {tensor} has a dimension of {dim}, more than this machine can address")]
    Dimension { tensor: String, dim: u64 },
}

/// Everything beside the request that decides a worker's tokens. A stream can be resumed on any
/// worker with an equal fingerprint.
pub(crate) fn fingerprint<R: DeviceRuntime>(
    manifest: &Manifest,
    runtime: &R,
    compute: &R::Compute,
    kv_types: &KvTypes,
) -> Result<Fingerprint, FingerprintError> {
    // A fingerprint's alphabet has neither ',' nor '='.
    let kv = kv_types.to_string().replace(',', "+").replace('=', ".");
    let fingerprint = Fingerprint::new(manifest.digest, R::LAYOUT, &runtime.isa(compute))?.with("kv", &kv)?;
    // Earlier versions did not round activations to the type of 16-bit float weights.
    let is_float16 =
        |tensor: &TensorEntry| [DType::F16, DType::BF16].iter().any(|dtype| dtype.id() == tensor.dtype);
    if manifest.tensors.iter().any(is_float16) {
        return fingerprint.with("activations", "rounded");
    }
    Ok(fingerprint)
}

/// Checks a tensor of the manifest and joins it with its data.
pub(crate) fn weight<R: DeviceRuntime>(
    tensor: &TensorEntry,
    data: TensorData<R>,
) -> Result<Weight<R::Compute>, TensorImportError> {
    let name = || tensor.name.clone();
    let dtype = DType::from_id(tensor.dtype)
        .map_err(|_| TensorImportError::Type { tensor: name(), dtype: tensor.dtype })?;
    if !R::supports_dtype(dtype) {
        return Err(TensorImportError::NoKernel { tensor: name(), dtype });
    }
    // Types without blocks have the same bytes in every layout.
    let is_same_in_all_layouts = planes(dtype).is_some_and(<[_]>::is_empty) && tensor.layout == LAYOUT_GGML;
    if tensor.layout != R::LAYOUT && !is_same_in_all_layouts {
        let (layout, expected) = (tensor.layout, R::LAYOUT);
        return Err(TensorImportError::Layout { tensor: name(), layout, expected });
    }
    let dim =
        |&dim: &u64| usize::try_from(dim).map_err(|_| TensorImportError::Dimension { tensor: name(), dim });
    let dims = tensor.shape.iter().map(dim).collect::<Result<_, _>>()?;
    Ok(Weight { dtype, dims, layout: tensor.layout, data })
}
