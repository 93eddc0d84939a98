// SPDX-License-Identifier: Apache-2.0

//! The table of sampling parameters. Router, worker, engine, command line and `docs/SAMPLING.md`
//! take names, ranges and defaults from [`PARAMETERS`].
//!
//! To add a parameter with a float value, change five files:
//!
//! 1. `crates/sampling-params/src/table.rs`: the constant, its entry in [`PARAMETERS`], and its
//!    name in [`with_parameter_names!`].
//! 2. `proto/proto/ballast/v1/ballast.proto`: the field of `Sampling`, with the next number.
//! 3. `crates/engine/src/sample/params.rs`: the field of `SamplingParams`, its default and its
//!    check.
//! 4. The file in `crates/engine/src/sample/` where the parameter has its effect.
//! 5. `docs/SAMPLING.md`, which a test of this crate generates.
//!
//! The structs and conversions of router and worker are generated from [`with_parameter_names!`].

#![forbid(unsafe_code)]

mod defaults;
mod parameter;
mod table;

pub use defaults::{SamplingDefaultError, SamplingDefaults};
pub use parameter::{
    FloatBounds, FloatParameter, IntegerDefault, IntegerParameter, OtherParameter, Parameter, ParameterType,
};
pub use table::*;
