// SPDX-License-Identifier: Apache-2.0

//! Checks errors about GPUs. Ballast prints one line that says what to do, exits with the
//! documented code, and leaves no memory allocated.

use super::Gpu;
use crate::harness::{ballast, demo_7m, text};
use std::process::Output;

// The exit codes of docs/OPERATING.md.
const USAGE: i32 = 2;
const OUT_OF_RESOURCES: i32 = 4;

#[track_caller]
fn check(output: &Output, code: i32, words: &[&str]) {
    let (_, stderr) = text(output);
    assert_eq!(output.status.code(), Some(code), "{stderr}");
    for word in words {
        assert!(stderr.contains(word), "{stderr:?} does not say {word:?}");
    }
    let last = stderr.lines().find(|line| line.starts_with("ballast: ")).unwrap_or_default();
    eprintln!("measured: exit code {code}: {last}");
}

fn generate(arguments: &[&str]) -> Output {
    let mut command = ballast();
    command.arg("generate").arg(demo_7m()).args(["--prompt", "x", "--max-tokens", "4"]).args(arguments);
    command.output().unwrap()
}

#[test]
fn an_absent_device_is_named_and_the_present_ones_are_listed() {
    let Some(gpu) = Gpu::here("an_absent_device_is_named_and_the_present_ones_are_listed") else { return };
    let baseline = gpu.used();
    check(&generate(&["--device", "cuda:63"]), USAGE, &["cuda:63", "cuda:0"]);
    let uuid = "GPU-00000000-0000-0000-0000-000000000000";
    check(&generate(&["--device", uuid]), USAGE, &[uuid, "cuda:0"]);
    gpu.assert_back_at(baseline);
}

#[test]
fn too_little_device_memory_says_how_much_is_missing() {
    let Some(gpu) = Gpu::here("too_little_device_memory_says_how_much_is_missing") else { return };
    let baseline = gpu.used();
    let large = ["--device", &gpu.name, "--kv-bytes", "4096GiB"];
    check(&generate(&large), OUT_OF_RESOURCES, &["are needed", "are free", "KV cache of at most", "fits"]);
    let mut plan = ballast();
    plan.arg("plan").arg(demo_7m()).args(large);
    check(&plan.output().unwrap(), OUT_OF_RESOURCES, &[" lacks ", "0 of 2 workers fit", "--kv-bytes"]);
    let folder = tempfile::tempdir().unwrap();
    let config = folder.path().join("ballast.toml");
    let model = std::fs::canonicalize(demo_7m()).unwrap();
    let text = format!(
        "gpu-budget = \"600MiB\"\n[[models]]\nname = \"m\"\npath = {model:?}\ndevice = \"{}\"\nworkers = 4\nkv-tokens = 4096\n",
        gpu.name
    );
    std::fs::write(&config, text).unwrap();
    let output =
        ballast().args(["serve", "--listen", "127.0.0.1:0", "--config"]).arg(&config).output().unwrap();
    check(&output, OUT_OF_RESOURCES, &["MiB"]);
    gpu.assert_back_at(baseline);
}
