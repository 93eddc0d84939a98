//! How long it takes until a worker serves a model of 8 billion weights, and how fast weights come onto the device.

use super::{Gpu, MIB};
use crate::harness::{Fleet, ballast, demo_7m, device, serve, synth, text};
use serde_json::Value;
use std::path::Path;
use std::process::Command;

const FIRST_TOKEN_MAX_MS: f64 = 1000.0;

/// Slower than this, weights do not come out of memory.
const MEMORY_RATE_MIN: f64 = 15e9;

#[test]
fn a_new_worker_of_an_8b_model_gives_its_first_token_within_a_second() {
    let Some(_) = Gpu::here("a_new_worker_of_an_8b_model_gives_its_first_token_within_a_second") else {
        return;
    };
    let model = synth("qwen3-8b", "q4_k_m");
    let output = ballast()
        .args(["bench", "lives", "--json", "--rounds", "3", "--kv-tokens", "8192", "--device", &device()])
        .arg(&model)
        .output()
        .unwrap();
    let (stdout, stderr) = text(&output);
    assert!(output.status.success(), "{stderr}");
    let report: Value = serde_json::from_str(&stdout).unwrap();
    for what in ["one_more_worker", "dead_worker_back"] {
        let mut times: Vec<f64> = report[what]
            .as_array()
            .unwrap()
            .iter()
            .map(|life| life["first_token_ms"].as_f64().unwrap())
            .collect();
        times.sort_by(f64::total_cmp);
        eprintln!("measured: {what}, 8B Q4_K_M, ms from the order to its first token: {times:.0?}");
        assert!(times[times.len() / 2] < FIRST_TOKEN_MAX_MS, "{what}: {times:?}");
    }

    let fleet = Fleet::start(&model, &["--workers", "1", "--kv-tokens", "8192"]);
    let line = fleet.line("worker-0").unwrap();
    eprintln!("measured: time line of a worker in ms: {}", line["timeline_ms"]);
    assert!(line["timeline_ms"]["import"].as_f64().unwrap() < 50.0, "{line}");
    fleet.stop();
}

#[test]
fn weights_come_from_memory_at_its_speed_and_from_the_disk_at_the_drives() {
    let Some(gpu) = Gpu::here("weights_come_from_memory_at_its_speed_and_from_the_disk_at_the_drives") else {
        return;
    };
    let model = synth("qwen3-8b", "q4_k_m");
    let folder = tempfile::Builder::new().prefix("ballast-disk-").tempdir_in("/tmp").unwrap();
    let on_disk = folder.path().join("model.gguf");
    std::fs::copy(&model, &on_disk).unwrap();
    let baseline = gpu.used();
    let from_scratch = rate_of_load(&model);
    eprintln!("measured: load from {}: {:.1} GB/s", model.parent().unwrap().display(), from_scratch / 1e9);
    let cached = rate_of_load(&on_disk);
    eprintln!("measured: load from the page cache: {:.1} GB/s", cached / 1e9);
    forget(&on_disk);
    let started = std::time::Instant::now();
    let disk = rate_of_load(&on_disk);
    eprintln!(
        "measured: load from the disk: {:.1} GB/s, whole command {:.1} s",
        disk / 1e9,
        started.elapsed().as_secs_f64()
    );
    eprintln!("measured: the disk by dd with O_DIRECT: {}", raw_rate(&on_disk));
    assert!(cached > MEMORY_RATE_MIN, "{cached} bytes a second from the page cache");
    gpu.assert_back_at(baseline);
}

/// Bytes a second of the part of a load that reads, by the loader's own clock.
fn rate_of_load(model: &Path) -> f64 {
    let directory = tempfile::tempdir().unwrap();
    let log = directory.path().join("log");
    let mut command = serve(directory.path(), &demo_7m(), &["--workers", "1"]);
    command.env("BALLAST_LOG", "info").stderr(std::fs::File::create(&log).unwrap());
    let fleet = Fleet::start_by(directory, command);
    let output = fleet.order(&[
        "load",
        model.to_str().unwrap(),
        "--name",
        "big",
        "--workers",
        "0",
        "--device",
        &device(),
    ]);
    assert!(output.status.success(), "{}", text(&output).1);
    let said = std::fs::read_to_string(&log).unwrap();
    let filled = |line: &&str| line.contains("filled the GPU's memory");
    let line = said.lines().rfind(filled).unwrap_or_else(|| panic!("no load in {said}"));
    eprintln!("measured: {}", &line[line.find("filled").unwrap()..]);
    let rate = line.split("gigabytes_per_second=").nth(1).unwrap_or_else(|| panic!("no rate in {line}"));
    let rate: f64 = rate.split_whitespace().next().unwrap().parse().unwrap();
    let bytes = std::fs::metadata(model).unwrap().len();
    assert!(bytes > 4000 * MIB);
    fleet.stop();
    rate * 1e9
}

/// Drops the file from the page cache.
fn forget(file: &Path) {
    let mut of = std::ffi::OsString::from("of=");
    of.push(file);
    let status = Command::new("dd")
        .args(["oflag=nocache", "conv=notrunc,fdatasync", "count=0", "status=none"])
        .arg(of)
        .status()
        .unwrap();
    assert!(status.success());
}

/// What dd says of reading the file around the page cache.
fn raw_rate(file: &Path) -> String {
    let mut input = std::ffi::OsString::from("if=");
    input.push(file);
    let output = Command::new("dd")
        .args(["of=/dev/null", "iflag=direct", "bs=16M", "count=128"])
        .arg(input)
        .output()
        .unwrap();
    text(&output).1.lines().last().unwrap_or_default().to_owned()
}
