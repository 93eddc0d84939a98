// SPDX-License-Identifier: Apache-2.0

//! What is too long for every change.

use anyhow::{Context, Result, ensure};
use std::process::Command;

use crate::cuda_images::RELEASE_ARCHS;
use crate::fuzz;

/// Arguments of cargo: tests that are `#[ignore]`d with the reason "nightly", the tests of logs
/// with an executable that ends at a panic as a release does, the benchmarks, and the executable
/// with its GPU part, which starts and says what it lacks where there is none.
const STEPS: [&[&str]; 5] = [
    &["test", "--workspace", "--release", "--", "--ignored", "nightly"],
    &["test", "--package", "ballast", "--test", "end_to_end", "--release", "--", "logs::"],
    &["bench", "--workspace"],
    &["run", "--package", "ballast", "--features", "cuda", "--", "devices"],
    &["run", "--package", "ballast", "--features", "cuda", "--", "doctor"],
];

/// The libraries on 64-bit ARM under qemu, and the executable for it with its GPU part; and all
/// clients of others, of which CI runs the core.
const SCRIPTS: [&[&str]; 2] = [&["scripts/test-aarch64"], &["scripts/test-clients", "all"]];

pub(crate) fn run() -> Result<()> {
    for arguments in STEPS {
        eprintln!("nightly: cargo {}", arguments.join(" "));
        let status = Command::new("cargo")
            .args(arguments)
            .env("BALLAST_CUDA_ARCHS", RELEASE_ARCHS)
            .status()
            .context("running cargo")?;
        ensure!(status.success(), "cargo {} failed", arguments.join(" "));
    }
    for script in SCRIPTS {
        let line = script.join(" ");
        eprintln!("nightly: {line}");
        let status = Command::new(script[0]).args(&script[1..]).status();
        ensure!(status.with_context(|| format!("running {line}"))?.success(), "{line} failed");
    }
    fuzz::run()
}
