//! The CUDA backend: kernels embedded as machine code, started through the driver API, which is loaded at run time.
//!
//! Layers: cudarc's `sys` and `result` are the raw one; [`Device`], [`Stream`], [`Event`], [`Buffer`] and [`Family`]
//! own what they name and check what the driver says; launchers, one per .cu file, check shapes and are safe to call.
//!
//! Invariant of the safe layer: memory that a launched kernel uses stays allocated until the kernel has ended.
//! [`Buffer`] keeps it by waiting for the device before it frees; a [`View`] made by hand puts it on its maker.
//! Order between streams is the caller's business: two streams that touch one buffer need an [`Event`] between them.

mod archs;
pub mod argmax;
pub mod attention;
mod backend;
mod buffer;
pub mod checksum;
mod device;
pub mod embed;
mod error;
pub mod experts;
pub mod gather;
pub mod kv_write;
pub mod linear;
pub mod loading;
mod module;
pub mod norm;
pub mod norm_rope_kv;
mod pinned;
mod planes;
pub mod quantize;
pub mod quantized_output;
pub mod repack;
pub mod rope;
pub mod shortlist;
pub mod silu_and_mul;
mod stream;

pub use archs::runs_on;
pub use backend::{
    Cuda, CudaKv, CudaRope, CudaTensor, CudaWorkerShape, DeviceBytes, WeightData, kv_bytes,
    predict_device_bytes,
};
pub use buffer::{Buffer, View, ViewMut};
pub use device::{Device, device_count};
pub use error::CudaError;
pub use module::{Family, Kernel, Launch};
pub use stream::{Event, Graph, Stream};
