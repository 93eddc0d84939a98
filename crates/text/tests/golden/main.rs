// SPDX-License-Identifier: Apache-2.0

//! Tests of the public interface with golden data; tests/data/README.md names the source of the
//! expected values.

#![expect(clippy::unwrap_used, reason = "functions shared by tests are tests too")]

mod files;
mod fill_in_middle;
mod from_gguf;
mod hostile;
mod ids;
mod prompts;
