// SPDX-License-Identifier: Apache-2.0

//! Tests of the engine in one executable, one module per topic.
//!
//! Two others stay separate: `allocations.rs` replaces the global allocator, and `planted/`
//! compiles the scheduler's sources as its own crate.

#![expect(clippy::unwrap_used, reason = "a panic is how a test fails")]

mod ahead;
mod beam_search;
mod block_pool;
mod constraint;
mod drafters;
mod drafts;
mod embeddings;
mod fake;
mod interface;
mod llama_samplers;
mod real_models;
mod requests;
mod same_tokens;
mod sampler;
mod scheduler;
mod shortlist;
mod simulation;
mod storm;
mod waiting_queue;
mod windows;

// `storm` names these modules through `crate`: `tests/planted` compiles it with doubles of them.
use engine::{draft, kv, schedule};
