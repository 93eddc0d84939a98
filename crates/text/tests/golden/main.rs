//! Tests of the public interface on golden data; tests/data/README.md says where the expected values come from.

#![expect(clippy::unwrap_used, reason = "functions shared by tests are tests too")]

mod files;
mod from_gguf;
mod hostile;
mod ids;
mod prompts;
