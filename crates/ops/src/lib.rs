//! The op vocabulary that models are written in ([`Backend`]), and [`Reference`], its slow obvious implementation.
//!
//! A model calls these ops and nothing else; `kernels` implements them fast. A method exists because a model that we
//! ship calls it. A fused op has a default body made of plain ops: that body is the fused kernel's specification.

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
pub use step::Step;
pub use weight::{Experts, Linear, Weight};
