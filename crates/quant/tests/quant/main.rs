// SPDX-License-Identifier: Apache-2.0

//! Tests of the formats in one executable.

#![expect(clippy::unwrap_used, reason = "a panic is how a test fails")]

mod encode;
mod golden;
mod layout;
