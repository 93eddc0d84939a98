//! From logits to a token.

mod candidates;
pub mod constraint;
pub(crate) mod deferred_logits;
pub mod draw;
mod dry;
pub mod error;
pub mod history;
pub mod logprobs;
mod math;
mod mirostat;
pub(crate) mod output_rows;
pub mod params;
mod penalties;
pub mod random;
pub mod sampler;
pub mod sampler_state;
