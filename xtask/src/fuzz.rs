// SPDX-License-Identifier: Apache-2.0

//! Runs every fuzz target for some minutes.

use anyhow::{Context, Result, bail, ensure};
use std::path::Path;
use std::process::{Command, Stdio};

/// The installed version of cargo-fuzz, if there is none yet.
const CARGO_FUZZ: &str = "cargo-fuzz@0.13.2";
/// Time of each target: 25 minutes for all.
const SECONDS: u32 = 150;
/// Of all targets, so that the crates that they share are built once.
const TARGET_DIRECTORY: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/../target/fuzz");
/// Crates with fuzz targets, and their targets.
const TARGETS: [(&str, &[&str]); 6] = [
    ("crates/gguf", &["header"]),
    ("crates/handoff", &["frames", "manifest"]),
    ("crates/text", &["tokenizer", "metadata", "template"]),
    ("router", &["http_body", "grpc_request"]),
    ("weight-server", &["worker_connections"]),
    ("worker", &["worker_request"]),
];

pub(crate) fn run() -> Result<()> {
    install_cargo_fuzz()?;
    for (directory, targets) in TARGETS {
        for target in targets {
            run_target(directory, target)?;
        }
    }
    Ok(())
}

fn install_cargo_fuzz() -> Result<()> {
    let found = Command::new("cargo").args(["fuzz", "--version"]).stdout(Stdio::null()).status();
    if found.context("running cargo")?.success() {
        return Ok(());
    }
    let installed = Command::new("cargo").args(["install", "--locked", CARGO_FUZZ]).status();
    ensure!(installed.context("running cargo")?.success(), "cannot install {CARGO_FUZZ}");
    Ok(())
}

/// Starts from the inputs in `fuzz/seeds/TARGET`, which include those that once failed, and from
/// what earlier runs on this machine have found.
fn run_target(directory: &str, target: &str) -> Result<()> {
    eprintln!("nightly: cargo fuzz run {target} in {directory} for {SECONDS} s");
    let corpus = format!("fuzz/corpus/{target}");
    std::fs::create_dir_all(Path::new(directory).join(&corpus))
        .with_context(|| format!("making {corpus}"))?;
    let seeds = format!("fuzz/seeds/{target}");
    let seeds = Path::new(directory).join(&seeds).is_dir().then_some(seeds);
    let status = Command::new("cargo")
        .args(["fuzz", "run", "--target-dir", TARGET_DIRECTORY, target, &corpus])
        .args(seeds)
        .args(["--", &format!("-max_total_time={SECONDS}"), "-timeout=20", "-rss_limit_mb=4096"])
        .current_dir(directory)
        // cargo-fuzz needs options of the compiler that the stable toolchain hides.
        .env("RUSTC_BOOTSTRAP", "1")
        .status()
        .context("running cargo")?;
    if !status.success() {
        bail!(
            "fuzz target {target} of {directory} failed: the input is in {directory}/fuzz/artifacts; \
             mend the fault, and keep the input in {directory}/fuzz/seeds/{target}"
        );
    }
    Ok(())
}
