// SPDX-License-Identifier: Apache-2.0

//! Compares whole models with recorded results, on any backend. Tests of this crate use
//! `ops::Reference`; tests of `kernels` use the CPU and CUDA backends. Cargo feature `testing`.
//!
//! The data is in `tests/data` of this crate. The environment variable `BALLAST_TEST_DATA` names a
//! folder with more.

mod file;
mod golden;
mod runner;
mod states;
mod transcript;

use std::path::{Path, PathBuf};

pub use file::ModelFile;
pub use golden::{Arithmetic, Golden};
pub use runner::Runner;
pub use states::{StateRows, state_rows, with_classifier};
pub use transcript::{Transcript, check_transcripts};

/// The small data set of the repository.
pub fn tree_data() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/data")
}

/// The folder `BALLAST_TEST_DATA`. Without it, prints which test is skipped.
pub fn shared_data(test: &str) -> Option<PathBuf> {
    let path = std::env::var_os("BALLAST_TEST_DATA").map(PathBuf::from);
    if path.is_none() {
        eprintln!("SKIPPED: {test}: set BALLAST_TEST_DATA to run it on the full data");
    }
    path
}

/// The folder of the trained demo models and their transcripts.
pub fn demo_models() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../../demo")
}
