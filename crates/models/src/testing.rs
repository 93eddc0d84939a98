//! Whole models against recorded results, generic over the backend: the same checks run on
//! `ops::Reference` here and on the fast backends in their own tests. Cargo feature `testing`.
//!
//! Data: `tests/data` of this crate, and the larger set that the environment variable
//! `BALLAST_TEST_DATA` points to.

mod file;
mod golden;
mod runner;
mod transcript;

use std::path::{Path, PathBuf};

pub use file::ModelFile;
pub use golden::{Arithmetic, Golden};
pub use runner::Runner;
pub use transcript::{Transcript, check_transcripts};

/// The small set that stands in the tree.
pub fn tree_data() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/data")
}

/// `BALLAST_TEST_DATA`, or none with a message that says which test had to do without.
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
