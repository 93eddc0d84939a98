// SPDX-License-Identifier: Apache-2.0

//! Requests: input, output, validation, refusal, and the engine's state of each active request.

pub(crate) mod embedding;
pub(crate) mod input;
pub(crate) mod output;
pub(crate) mod refusal;
pub(crate) mod state;
pub(crate) mod validate;
