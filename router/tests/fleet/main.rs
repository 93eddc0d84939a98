// SPDX-License-Identifier: Apache-2.0

//! End-to-end tests of the router: real clients, and fake workers that replay a script.

#![expect(clippy::unwrap_used, reason = "a test fails by panicking")]

mod admission;
mod chat;
mod completions;
mod errors;
mod fake_worker;
mod faults;
mod figures;
mod grpc;
mod harness;
mod routing;
mod tools;
mod watching;
