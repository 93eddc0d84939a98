// SPDX-License-Identifier: Apache-2.0

//! Sampling: from a row of logits to one token.
//!
//! - [`params`]: the sampling parameters of a request.
//! - [`sampler`]: logits processors, filters and the draw.
//! - [`constraint`] and `deferred_logits`: structured output with token bitmasks.
//! - `output_rows`: what a step copies from the device.
//! - [`random`]: random numbers keyed by seed, choice and position.

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
