// SPDX-License-Identifier: Apache-2.0

//! Locates and opens test data.

use std::io::Write;
use std::path::{Path, PathBuf};

pub(crate) fn tree_data() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/data")
}

/// A folder of the large data set. Prints a SKIPPED line and returns `None` if BALLAST_TEST_DATA is
/// not set.
pub(crate) fn full_data(folder: &str) -> Option<PathBuf> {
    match std::env::var_os("BALLAST_TEST_DATA") {
        Some(root) => Some(Path::new(&root).join(folder)),
        None => {
            // Bypasses the test runner, which shows the output of failed tests only.
            let mut stderr = std::io::stderr();
            writeln!(stderr, "SKIPPED: BALLAST_TEST_DATA is not set, {folder} is not tested").unwrap();
            None
        }
    }
}

pub(crate) fn file_metadata(path: &Path) -> gguf::Metadata {
    gguf::GgufModel::open(path).unwrap().metadata().clone()
}
