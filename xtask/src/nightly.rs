//! What is too long for every change.

use anyhow::{Context, Result, ensure};
use std::process::Command;

/// Tests that are `#[ignore]`d with the reason "nightly", and the benchmarks.
const STEPS: [&[&str]; 2] =
    [&["test", "--workspace", "--release", "--", "--ignored", "nightly"], &["bench", "--workspace"]];

pub(crate) fn run() -> Result<()> {
    for arguments in STEPS {
        eprintln!("nightly: cargo {}", arguments.join(" "));
        let status = Command::new("cargo").args(arguments).status().context("running cargo")?;
        ensure!(status.success(), "cargo {} failed", arguments.join(" "));
    }
    Ok(())
}
