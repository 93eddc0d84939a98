// SPDX-License-Identifier: Apache-2.0

//! Runs the checks of `models::testing` on whole models on the device, as the tests of the host
//! backends do.
//!
//! File paths are relative to the current folder, which is the root of the tree.

use std::path::Path;

use anyhow::{Result, ensure};
use kernels::cuda::Cuda;
use models::testing::{Arithmetic, Golden, check_transcripts};

use crate::TestGpu;

const ARCHITECTURES: &[&str] = &["gemma3", "llama", "qwen2", "qwen3", "qwen3moe"];
/// If two logits are closer than this, llama.cpp's own rounding of activations decides their order.
const GAP_MIN: f32 = 0.3;

pub(crate) fn goldens(gpu: &TestGpu) -> Result<()> {
    let mut folders = vec![Path::new("crates/models/tests/data").to_owned()];
    folders.extend(std::env::var_os("BALLAST_TEST_DATA").map(|data| Path::new(&data).join("data/golden")));
    let (mut checked, mut failed) = (0, 0);
    for folder in folders {
        for golden in Golden::all(&folder, ARCHITECTURES)? {
            match golden.file()?.description() {
                Err(error) if format!("{error:#}").contains("cannot be computed with") => {
                    println!("SKIPPED: {}: {error:#}", golden.name);
                    continue;
                }
                description => description?,
            };
            // A golden opens a backend several times. The device is known to exist, so `unwrap`
            // cannot fail.
            #[expect(clippy::unwrap_used, reason = "a test")]
            let make = || Cuda::new(&gpu.device).unwrap();
            match golden.check(make, Arithmetic::Rounded) {
                Ok(()) => checked += 1,
                Err(error) => {
                    failed += 1;
                    println!("  {}: {error:#}", golden.name);
                }
            }
        }
    }
    ensure!(failed == 0 && checked > 0, "{checked} golden models passed, {failed} failed");
    println!("  {checked} golden models");
    Ok(())
}

pub(crate) fn transcripts(gpu: &TestGpu) -> Result<()> {
    for name in ["pycoder-7m-q8_0", "pycoder-22m-q4_k_m"] {
        let model = Path::new("demo").join(name).with_extension("gguf");
        let transcripts = Path::new("demo").join(name).with_extension("greedy.jsonl");
        #[expect(clippy::unwrap_used, reason = "a test")]
        let make = || Cuda::new(&gpu.device).unwrap();
        let decided = check_transcripts(&model, &transcripts, make, GAP_MIN, usize::MAX)?;
        println!("  {name}: {decided} steps");
        ensure!(decided > 500, "{name}: only {decided} steps were decided");
    }
    Ok(())
}
