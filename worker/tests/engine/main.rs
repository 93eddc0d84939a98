// SPDX-License-Identifier: Apache-2.0

//! The worker on the real engine and a small real model, fed by a minimal weight-server.

#![expect(clippy::unwrap_used, reason = "a test fails by panicking")]

mod drafts;
mod fake_weight_server;
#[path = "../../../router/tests/fleet/figures.rs"]
mod figures;
mod generate;
mod grammars;
mod harness;
mod kv_events;
mod lifecycle;
mod score;
