// SPDX-License-Identifier: Apache-2.0

//! Scheduling: which sequences compute how many rows in the next step.
//!
//! - [`admission`] bounds the waiting requests and estimates when a refused client should retry.
//! - [`waiting_queue`] orders waiting sequences by priority and fair share.
//! - [`scheduler`] turns running and waiting sequences into a [`step_plan`].
//! - `launch_timer` says when a step is launched behind the one that runs.
//! - `prefill_rate` estimates how many prefill rows decoding sequences can bear.
//! - [`integrity`] checks all of it between two steps.

pub mod admission;
pub(crate) mod batch;
pub(crate) mod budget;
pub mod integrity;
pub(crate) mod launch_timer;
pub(crate) mod prefill_rate;
pub mod scheduler;
pub mod sequence;
pub mod sequence_id;
pub mod step_plan;
pub mod waiting_queue;
