// SPDX-License-Identifier: Apache-2.0

//! Tests of the GGUF reader and writer in one executable.

#![expect(clippy::unwrap_used, reason = "a panic is how a test fails")]

mod malformed;
mod real_files;
mod round_trip;
mod split;
