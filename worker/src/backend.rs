//! Decides which backend computes, and how a handed-over tensor becomes one of its weights. No other file names one.

use memory::import::Tensor;
use memory::manifest::LAYOUT_GGML;
use ops::{KvType, OpError, Weight};
use prefix::{Fingerprint, FingerprintError};
use quant::DType;

/// The backend of this build.
pub(crate) type Compute = kernels::Cpu;

/// The layout of tensor bytes that it reads.
pub(crate) const LAYOUT: u32 = LAYOUT_GGML;

/// What keys and values are stored as.
pub(crate) const KV_TYPE: KvType = KvType::F16;

#[derive(Debug, thiserror::Error)]
pub enum TensorError {
    #[error("tensor {tensor} has the unknown type {dtype}")]
    Type { tensor: String, dtype: u32 },
    #[error("tensor {tensor} has layout {layout}, this build reads layout {LAYOUT}")]
    Layout { tensor: String, layout: u32 },
    #[error("tensor {tensor} has a dimension of {dim}, more than this machine can address")]
    Dimension { tensor: String, dim: u64 },
}

pub(crate) fn start(threads: usize) -> Result<Compute, OpError> {
    kernels::Cpu::new(threads.max(1))
}

/// Its name and instruction set, for people.
pub(crate) fn describe(backend: &Compute) -> String {
    format!("host {}", backend.isa())
}

/// What decides this worker's tokens beside the request: its streams can go on at any worker with an equal value.
pub(crate) fn fingerprint(digest: [u8; 32], backend: &Compute) -> Result<Fingerprint, FingerprintError> {
    let kv = match KV_TYPE {
        KvType::F16 => "f16",
        KvType::F32 => "f32",
    };
    Fingerprint::new(digest, LAYOUT, backend.isa().name())?.with("kv", kv)
}

/// The weight shares the tensor's mapping.
pub(crate) fn weight(tensor: &Tensor) -> Result<Weight<Compute>, TensorError> {
    let name = || tensor.name.clone();
    let dtype = DType::from_id(tensor.dtype)
        .map_err(|_| TensorError::Type { tensor: name(), dtype: tensor.dtype })?;
    if tensor.layout != LAYOUT {
        return Err(TensorError::Layout { tensor: name(), layout: tensor.layout });
    }
    let dim = |&dim: &u64| usize::try_from(dim).map_err(|_| TensorError::Dimension { tensor: name(), dim });
    let dims = tensor.shape.iter().map(dim).collect::<Result<_, _>>()?;
    Ok(Weight { dtype, dims, layout: tensor.layout, data: tensor.bytes.clone() })
}
