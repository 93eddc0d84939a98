// SPDX-License-Identifier: Apache-2.0

//! Chores that are not part of the product: `cargo xtask tidy`, `cargo xtask cuda-images`,
//! `cargo xtask gpu-bundle`, `cargo xtask nightly`.

#![forbid(unsafe_code)]

use std::process::ExitCode;

mod advisories;
mod cuda_images;
mod dependencies;
mod fuzz;
mod gpu_bundle;
mod language;
mod nightly;
mod output;
mod sources;

const USAGE: &str = "usage: cargo xtask <tidy|cuda-images FILE|gpu-bundle|nightly>
  cuda-images names the targets of the CUDA images in an executable; fails if one of a release lacks
  tidy        source rules, dependency sources, licences, duplicate versions, known advisories
  gpu-bundle  packs dist/gpu: executables and a script for a GPU machine without Rust
  nightly     what is too long for every change: long simulations, big models, benchmarks, fuzzing";

fn main() -> ExitCode {
    let task = std::env::args().nth(1);
    // Relative to where the command was given.
    let argument = std::env::args_os().nth(2).and_then(|file| std::path::absolute(file).ok());
    if let Err(error) = std::env::set_current_dir(concat!(env!("CARGO_MANIFEST_DIR"), "/..")) {
        eprintln!("xtask: the checkout that built this is gone: {error}");
        return ExitCode::FAILURE;
    }
    let result = match task.as_deref() {
        Some("tidy") => tidy(),
        Some("cuda-images") => match &argument {
            Some(file) => cuda_images::run(file),
            None => Err(anyhow::anyhow!("{USAGE}")),
        },
        Some("gpu-bundle") => gpu_bundle::run(),
        Some("nightly") => nightly::run(),
        _ => {
            eprintln!("{USAGE}");
            return ExitCode::from(2);
        }
    };
    match result {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("xtask: {error:#}");
            ExitCode::FAILURE
        }
    }
}

/// Runs every check, so that one run shows all there is to mend.
fn tidy() -> anyhow::Result<()> {
    let mut findings = sources::check()?;
    findings.extend(dependencies::check()?);
    findings.extend(advisories::check()?);
    for finding in &findings {
        eprintln!("tidy: {finding}");
    }
    anyhow::ensure!(findings.is_empty(), "{} findings", findings.len());
    eprintln!("tidy: ok");
    Ok(())
}
