// SPDX-License-Identifier: Apache-2.0

//! `cargo xtask gpu-bundle`: packs what a GPU machine without Rust needs into dist/gpu.
//!
//! `run` (a copy of scripts/gpu-run) and one archive: the release executable, the test executables,
//! stripped, and the libraries that tests preload. Models and golden files are read from the
//! tree beside it. Tests come from the dev profile: it optimises, and a test that fails must
//! unwind, which the release profile does not.

use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use anyhow::{Context, Result, bail, ensure};
use cargo_metadata::Message;

const FOLDER: &str = "dist/gpu";
const STAGING: &str = "target/gpu-bundle";
const ARCHIVE: &str = "binaries.tar.xz";
const RUN: &str = "scripts/gpu-run";
/// Libraries that tests load into processes of a fleet.
const LIBRARIES: [&str; 6] = [
    "tests/clock_jumps.c",
    "tests/crash_on_request.c",
    "tests/fake_nvml.c",
    "tests/gpu/stray_write.c",
    "tests/gpu/unified_memory.c",
    "tests/hanging_mount.c",
];

/// Of xz. All executables take 90 MiB. With 8 MiB, the default, the archive has 25.6 MB instead of
/// 20.0.
const DICTIONARY_MIB: u32 = 128;
/// What travels to a GPU machine beside the tree.
const BUNDLE_BYTES_MAX: u64 = 24 << 20;

/// Only what the machines at hand can run; set the variable for another.
const ARCHS: (&str, &str) = ("BALLAST_CUDA_ARCHS", "sm_90a");

/// Test targets by the name they have in the bundle.
const TESTS: [Test; 4] = [
    Test { package: "ballast", target: "end_to_end", name: "fleet-tests" },
    Test { package: "kernels", target: "gpu", name: "kernel-tests" },
    Test { package: "handoff", target: "cuda", name: "memory-tests" },
    Test { package: "weight-server", target: "weight_server", name: "weight-tests" },
];

struct Test {
    package: &'static str,
    target: &'static str,
    name: &'static str,
}

pub(crate) fn run() -> Result<()> {
    let staging = Path::new(STAGING);
    make_empty(staging)?;
    let built = build(&["build", "--release", "--package", "ballast", "--features", "ballast/cuda"])?;
    strip(&executable(&built, "ballast", false)?, &staging.join("ballast"))?;
    let mut arguments = vec!["test", "--no-run"];
    let features: Vec<String> = TESTS.iter().map(|test| format!("{}/cuda", test.package)).collect();
    let features = features.join(",");
    for test in &TESTS {
        arguments.extend(["--package", test.package, "--test", test.target]);
    }
    arguments.extend(["--features", &features]);
    let built = build(&arguments)?;
    for test in &TESTS {
        strip(&executable(&built, test.target, true)?, &staging.join(test.name))?;
    }
    for source in LIBRARIES {
        let name = Path::new(source).file_name().context("a library has a name")?;
        let library = staging.join(name).with_extension("so");
        let options = ["-O2", "-Wall", "-Wextra", "-Werror", "-shared", "-fPIC", "-o"];
        tool("cc", &[&options[..], &[text(&library)?, source, "-ldl"]].concat())?;
    }
    pack(staging)
}

/// Runs cargo and gives what it has made.
fn build(arguments: &[&str]) -> Result<Vec<cargo_metadata::Artifact>> {
    eprintln!("gpu-bundle: cargo {}", arguments.join(" "));
    let mut cargo = Command::new("cargo");
    cargo.args(arguments).args(["--locked", "--message-format", "json-render-diagnostics"]);
    if std::env::var_os(ARCHS.0).is_none() {
        cargo.env(ARCHS.0, ARCHS.1);
    }
    let mut child = cargo.stdout(Stdio::piped()).spawn().context("running cargo")?;
    let stdout = child.stdout.take().context("the output of cargo")?;
    let mut artifacts = Vec::new();
    for message in Message::parse_stream(std::io::BufReader::new(stdout)) {
        if let Message::CompilerArtifact(artifact) = message.context("reading what cargo says")? {
            artifacts.push(artifact);
        }
    }
    let status = child.wait().context("waiting for cargo")?;
    ensure!(status.success(), "cargo {} failed", arguments.join(" "));
    Ok(artifacts)
}

/// Nothing of an earlier bundle travels with this one.
fn make_empty(folder: &Path) -> Result<()> {
    if folder.exists() {
        std::fs::remove_dir_all(folder).with_context(|| format!("emptying {}", folder.display()))?;
    }
    std::fs::create_dir_all(folder).with_context(|| format!("making {}", folder.display()))
}

fn executable(artifacts: &[cargo_metadata::Artifact], target: &str, test: bool) -> Result<PathBuf> {
    let found =
        artifacts.iter().find(|artifact| artifact.target.name == target && artifact.target.is_test() == test);
    let path = found.and_then(|artifact| artifact.executable.as_ref());
    Ok(path.with_context(|| format!("cargo has made no executable of {target}"))?.into())
}

fn strip(from: &Path, to: &Path) -> Result<()> {
    tool("strip", &["-o", text(to)?, text(from)?])
}

/// Puts everything into the folder, and says what each part takes. Three executables hold the same
/// kernels, and xz finds them again if its dictionary has room for all executables.
fn pack(staging: &Path) -> Result<()> {
    let folder = Path::new(FOLDER);
    make_empty(folder)?;
    let archive = folder.join(ARCHIVE);
    let xz = format!("xz --lzma2=preset=6,dict={DICTIONARY_MIB}MiB");
    let tar = ["--owner=0", "--group=0", "-C", text(staging)?, "-I", &xz, "-cf", text(&archive)?, "."];
    tool("tar", &tar)?;
    let script = folder.join("run");
    std::fs::copy(RUN, &script).with_context(|| format!("copying {RUN}"))?;
    for entry in std::fs::read_dir(staging)? {
        let entry = entry?;
        eprintln!("gpu-bundle: {:>11} bytes {}", entry.metadata()?.len(), entry.file_name().display());
    }
    let total = archive.metadata()?.len() + script.metadata()?.len();
    ensure!(total <= BUNDLE_BYTES_MAX, "{FOLDER} has {total} bytes, at most {BUNDLE_BYTES_MAX} may travel");
    eprintln!("gpu-bundle: {total:>11} bytes {FOLDER}, packed; on the GPU machine: {FOLDER}/run tests");
    Ok(())
}

fn tool(name: &str, arguments: &[&str]) -> Result<()> {
    let status = Command::new(name).args(arguments).status().with_context(|| format!("running {name}"))?;
    if !status.success() {
        bail!("{name} {} failed", arguments.join(" "));
    }
    Ok(())
}

fn text(path: &Path) -> Result<&str> {
    path.to_str().with_context(|| format!("{} is not UTF-8", path.display()))
}
