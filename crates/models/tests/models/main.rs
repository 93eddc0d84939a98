// SPDX-License-Identifier: Apache-2.0

//! Tests of the models on the reference backend in one executable.

mod golden;
mod refusals;
mod states;
mod transcripts;
