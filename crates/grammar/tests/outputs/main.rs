// SPDX-License-Identifier: Apache-2.0

//! Outputs generated under a grammar parse and validate, whatever logits the model computes.

#![expect(clippy::unwrap_used, reason = "a panic is how a test fails")]

mod languages;
mod limits;
mod refusals;
mod schemas;
mod token_chooser;
mod vocabularies;

use proptest::test_runner::{Config, RngSeed};

/// Runs the same cases every time, so that a failure belongs to the change that caused it.
/// PROPTEST_RNG_SEED selects other cases, and PROPTEST_CASES their number.
fn cases(count: u32) -> Config {
    let default = Config::default();
    let asked_for = std::env::var_os("PROPTEST_CASES").is_some();
    Config {
        cases: if asked_for { default.cases } else { count },
        rng_seed: match default.rng_seed {
            RngSeed::Random => RngSeed::Fixed(1),
            fixed @ RngSeed::Fixed(_) => fixed,
        },
        failure_persistence: None,
        ..default
    }
}
