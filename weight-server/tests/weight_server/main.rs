// SPDX-License-Identifier: Apache-2.0

//! Tests the weight-server as a process, with real sockets, loader children and deaths.

#![expect(clippy::unwrap_used, reason = "a test that cannot go on should say where")]
#![expect(clippy::print_stdout, reason = "the worker role answers on standard output")]

mod adoption;
mod copies;
mod devices;
mod fake_fd_store;
mod faults;
mod gpu;
mod handoff;
mod support;
