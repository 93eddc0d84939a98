//! Models, written once over [`ops::Backend`]: metadata and weights in, logits out.
//!
//! [`build`] reads the architecture's name from the metadata and finds its builder in the registry.
//! An architecture file says which keys and tensors its files have; the blocks they share
//! (attention, feed-forward, rope) stand in files of their own. Nothing here knows of requests,
//! batching policy or where weights came from.
//!
//! [`validate`] runs the same code without a byte of tensor data, so that a bad file is refused
//! before anything is attached.

#![forbid(unsafe_code)]

mod attention;
mod config;
mod decoder;
mod feed_forward;
mod gemma3;
mod llama;
mod model;
mod qwen2;
mod qwen3;
mod registry;
mod rope;
mod scratch;
#[cfg(feature = "testing")]
pub mod testing;
mod weights;

pub use config::ModelConfigError;
pub use model::{BuildModelError, Model, ModelDescription, ModelLimits, TakeLogits};
pub use registry::{TensorHead, build, validate};
pub use weights::{WeightError, WeightTable};
