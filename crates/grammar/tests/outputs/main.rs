//! What is generated under a grammar parses and validates, whatever the model says.

#![expect(clippy::unwrap_used, reason = "a panic is how a test fails")]

mod languages;
mod refusals;
mod schemas;
mod token_chooser;
mod vocabularies;

use proptest::test_runner::{Config, RngSeed};

/// The same cases every time: what a change breaks is found with the change. Others by PROPTEST_RNG_SEED, more by
/// PROPTEST_CASES.
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
