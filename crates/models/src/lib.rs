// SPDX-License-Identifier: Apache-2.0

//! Model architectures over [`ops::Backend`]: a model takes metadata and weights, and computes
//! logits.
//!
//! [`build`] looks up the architecture name of the metadata in the registry. A file per
//! architecture (`llama.rs`, `qwen3.rs`, ...) reads its metadata keys and names its tensors. The
//! architectures share `decoder.rs`, `attention.rs`, `feed_forward.rs` and `rope.rs`. This crate
//! does not depend on requests, on the scheduler or on the source of weights.
//!
//! [`validate`] runs the same checks without tensor data, so that a worker refuses a bad file
//! before it attaches weights.

#![forbid(unsafe_code)]

mod attention;
mod config;
mod decoder;
mod feed_forward;
mod gemma3;
mod llama;
mod model;
mod pooling;
mod qwen2;
mod qwen3;
mod registry;
mod rope;
mod scratch;
#[cfg(feature = "testing")]
pub mod testing;
mod weights;

pub use config::ModelConfigError;
pub use model::{BuildModelError, ForwardLimits, Model, ModelDescription, OutputKind, TakeOutputs};
pub use pooling::Pooling;
pub use registry::{TensorHead, build, validate};
pub use weights::{WeightError, WeightTable};
