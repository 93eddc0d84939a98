//! What differs between devices: [`DeviceRuntime`] is where a worker computes, one implementation for each kind of device.
//!
//! Everything else in this crate is generic over the backend; which one it is, is decided where the configured device is
//! looked at (`run::engine_thread`), and nowhere else.

#[cfg(feature = "cuda")]
mod gpu;
mod host;

use memory::attach::{AttachError, Attached, Granted};
use memory::manifest::TensorEntry;
use ops::{Backend, KvTypes, OpError, Weight};
use prefix::{Fingerprint, FingerprintError};
use quant::DType;
use quant::layout::{LAYOUT_GGML, planes};

use crate::memory_plan::Workspace;
use crate::startup_timeline::LazyInit;

#[cfg(feature = "cuda")]
pub(crate) use gpu::{DetectedGpu, GpuRuntime};
pub(crate) use host::HostRuntime;

/// A device that is ready to compute.
pub(crate) trait DeviceRuntime: Sized {
    type Compute: Backend;

    /// The layout of tensor bytes that its kernels read.
    const LAYOUT: u32;

    /// As attach requests and manifests name it: "host", or a GPU's UUID.
    fn device(&self) -> String;

    /// Memory of the device that this process has taken by being there, beside whatever it computes.
    fn context_bytes(&self) -> u64;

    /// The kernels' instruction set: two places with equal ones give equal tokens.
    fn isa(&self, compute: &Self::Compute) -> String;

    /// Device and instruction set, for people.
    fn describe(&self) -> String;

    /// Maps what was granted, read-only: each tensor's data, in the manifest's order.
    fn import(&self, granted: Granted) -> Result<Attached<Vec<TensorData<Self>>>, AttachError>;

    fn compute(&self) -> Result<Self::Compute, OpError>;

    fn measure(compute: &Self::Compute) -> BackendUsage;
}

/// What only the backend itself knows of what it has taken so far.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct BackendUsage {
    /// Device memory of activations, logits, and what kernels keep, now; none where only the process as a whole can be
    /// measured.
    pub(crate) workspace_used: Option<Workspace>,
    pub(crate) lazy: LazyInit,
}

/// How [`DeviceRuntime::measure`] looks to those who know only the backend.
pub(crate) type MeasureBackend<B> = fn(&B) -> BackendUsage;

/// A tensor's bytes as a runtime's backend addresses them.
pub(crate) type TensorData<P> = <<P as DeviceRuntime>::Compute as Backend>::Data;

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

/// What decides a worker's tokens beside the request: its streams can go on at any worker with an equal value.
pub(crate) fn fingerprint<P: DeviceRuntime>(
    digest: [u8; 32],
    runtime: &P,
    compute: &P::Compute,
    kv_types: &KvTypes,
) -> Result<Fingerprint, FingerprintError> {
    // As it is written elsewhere, in the letters that a fingerprint has.
    let kv = kv_types.to_string().replace(',', "+").replace('=', ".");
    Fingerprint::new(digest, P::LAYOUT, &runtime.isa(compute))?.with("kv", &kv)
}

/// A tensor of the manifest with its data.
pub(crate) fn weight<P: DeviceRuntime>(
    tensor: &TensorEntry,
    data: TensorData<P>,
) -> Result<Weight<P::Compute>, TensorImportError> {
    let name = || tensor.name.clone();
    let dtype = DType::from_id(tensor.dtype)
        .map_err(|_| TensorImportError::Type { tensor: name(), dtype: tensor.dtype })?;
    if P::LAYOUT != LAYOUT_GGML && planes(dtype).is_none() {
        return Err(TensorImportError::NoKernel { tensor: name(), dtype });
    }
    // Types without blocks are the same in every layout.
    let any = planes(dtype).is_some_and(<[_]>::is_empty) && tensor.layout == LAYOUT_GGML;
    if tensor.layout != P::LAYOUT && !any {
        let (layout, expected) = (tensor.layout, P::LAYOUT);
        return Err(TensorImportError::Layout { tensor: name(), layout, expected });
    }
    let dim =
        |&dim: &u64| usize::try_from(dim).map_err(|_| TensorImportError::Dimension { tensor: name(), dim });
    let dims = tensor.shape.iter().map(dim).collect::<Result<_, _>>()?;
    Ok(Weight { dtype, dims, layout: tensor.layout, data })
}
