// SPDX-License-Identifier: Apache-2.0

//! The operations that models are written in: the trait [`Backend`], and [`Reference`], its scalar
//! implementation.
//!
//! A model calls these ops and nothing else. The `kernels` crate implements them with SIMD and
//! CUDA.
//!
//! 1. Each method has a caller among the models of this repository.
//! 2. A fused op has a default body of plain ops. That body specifies the fused kernel.
//! 3. The result of a row does not depend on the other rows of the step (invariant I5).

#![forbid(unsafe_code)]

mod backend;
mod experts;
mod kv;
mod kv_types;
pub mod rank;
mod reference;
mod rope;
mod shortlist;
pub mod softmax;
mod step;
mod weight;

pub use backend::{
    Activation, AttentionSpec, Backend, GELU_CUBIC, GELU_LINEAR, NO_ARGMAX, OpError, finite_argmax,
};
pub use experts::{ExpertChoice, choose_experts};
pub use kv::{AttentionSpan, KvGroup, KvLayer, KvLayerLocation, KvLayout, KvType, UnknownKvType};
pub use kv_types::{KvTypes, KvTypesError};
pub use reference::{HostKv, HostTensor, Reference};
pub use rope::{RopePairing, RopeSpec};
pub use shortlist::{DrawParams, SHORTLIST_LEN, Shortlist};
pub use step::{DRAWN_TOKEN, Step};
pub use weight::{Experts, Linear, Weight};
