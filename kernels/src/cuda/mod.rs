// SPDX-License-Identifier: Apache-2.0

//! The CUDA backend. The crate embeds its kernels as machine code and launches them through the
//! CUDA driver API, which is loaded at run time.
//!
//! The crate `cuda` owns devices, streams, buffers and kernels. This module has two parts:
//!
//! - one launcher per .cu file, which checks shapes and so is safe to call;
//! - [`Cuda`], the backend that calls the launchers.

mod abi;
pub mod act_and_mul;
mod archs;
pub mod argmax;
pub mod attention;
mod attention_names;
mod attention_prefill;
mod backend;
pub mod checksum;
pub mod embed;
mod error;
pub mod experts;
mod f32_linear;
pub mod float_linear;
mod fused_experts;
mod fused_linear;
pub mod gather;
pub mod kv_write;
mod launch;
pub mod linear;
mod linear_names;
pub mod loading;
mod mixed_linear;
mod module;
pub mod naive;
pub mod norm;
pub mod norm_rope_kv;
mod pair_grouping;
mod planes;
pub mod quantize;
pub mod quantized_output;
pub mod repack;
pub mod rope;
mod row_experts;
pub mod shortlist;
mod skinny_experts;
mod skinny_linear;
mod spread;
mod wgmma_experts;
mod wgmma_linear;
pub mod word_copies;

pub use archs::{compiled_archs, runs_on};
pub use backend::{
    Cuda, CudaKv, CudaRope, CudaTensor, CudaWorkerShape, DeviceBytes, WeightData, kv_bytes,
    predict_device_bytes,
};
pub use cuda::{
    Buffer, CudaError, Device, DeviceView, DeviceViewMut, Event, Graph, Kernel, LaunchConfig, LazyModule,
    PinnedBuffer, Stream,
};
