// SPDX-License-Identifier: Apache-2.0

//! Measures the time until a worker serves a model of 8 billion weights, and the rate at which
//! weights are loaded onto the device.

use super::{Gpu, asks};
use crate::harness::api::{generate_all, runtime};
use crate::harness::{ServedFleet, ballast, demo_7m, device, eventually, serve, synth, text};
use serde_json::Value;
use std::fs::File;
use std::io::{Read, Seek, SeekFrom};
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::Instant;

const FIRST_TOKEN_MAX_MS: f64 = 1000.0;

/// The stages of a worker's start, in order. The last three belong to its first work.
const STAGES: [&str; 11] = [
    "exec",
    "sockets",
    "driver",
    "wait",
    "context",
    "import",
    "model",
    "kv",
    "modules",
    "first_step",
    "graphs",
];
/// The number of stages that a worker has completed when it is ready.
const READY: usize = 8;

#[test]
fn a_new_worker_of_an_8b_model_gives_its_first_token_within_a_second() {
    let Some(_) = Gpu::here("a_new_worker_of_an_8b_model_gives_its_first_token_within_a_second") else {
        return;
    };
    let model = synth("qwen3-8b", "q4_k_m");
    let output = ballast()
        .args([
            "bench",
            "worker-starts",
            "--json",
            "--rounds",
            "3",
            "--kv-tokens",
            "8192",
            "--device",
            &device(),
        ])
        .arg(&model)
        .output()
        .unwrap();
    let (stdout, stderr) = text(&output);
    assert!(output.status.success(), "{stderr}");
    let report: Value = serde_json::from_str(&stdout).unwrap();
    for what in ["added_worker", "restarted_worker"] {
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

    let fleet = ServedFleet::start(&model, &["--workers", "1", "--kv-tokens", "8192"]);
    time_line(&fleet, "worker-0", "was there before its model");
    assert!(fleet.run_command(&["add-worker"]).status.success());
    eventually("both workers serve", || (fleet.serving("qwen3-8b-q4_k_m").len() == 2).then_some(()));
    // The router would give the first worker all requests.
    assert!(fleet.run_command(&["drain", "worker-0"]).status.success());
    time_line(&fleet, "worker-1", "found its model there");
    fleet.stop();
}

/// Makes a worker compute, and checks that every stage of its start was measured.
fn time_line(fleet: &ServedFleet, worker: &str, which: &str) {
    let line = eventually("a step has been recorded", || {
        for done in runtime().block_on(generate_all(&fleet.grpc, &asks(2, 100, 16))) {
            assert_eq!(done.unwrap().tokens.len(), 16);
        }
        fleet.line(worker).filter(|line| line["timeline_ms"]["graphs"].is_number())
    });
    let stages = STAGES.map(|name| {
        let ms = line["timeline_ms"][name].as_f64();
        (name, ms.unwrap_or_else(|| panic!("no {name} in {line}")))
    });
    assert_eq!(line["timeline_ms"].as_object().unwrap().len(), STAGES.len(), "{line}");
    let ready = line["ready_ms"].as_f64().unwrap();
    let text = stages.map(|(name, ms)| format!("{name} {ms:.1}")).join(", ");
    eprintln!("measured: time line of a worker that {which}, in ms: {text}; ready {ready:.1}");
    let sum: f64 = stages[..READY].iter().map(|(_, ms)| ms).sum();
    assert!((sum - ready).abs() < 0.1, "{sum} of {ready} ms");
    // The start time of a process has a resolution of 10 ms, so `exec` may be zero. All other
    // stages take some time.
    for (name, ms) in &stages[1..] {
        assert!(*ms > 0.0, "{name} took nothing: {text}");
    }
    assert!(line["timeline_ms"]["import"].as_f64().unwrap() < 50.0, "{line}");
}

/// The goals for loads, as shares of the possible rate: of pinned copies to the device, and of
/// plain disk reads.
const OF_PINNED: f64 = 0.85;
const OF_DISK: f64 = 0.9;
const ROUNDS: usize = 5;

/// Rates differ between machines, so the test prints the rates and no rate fails it.
#[test]
#[ignore = "a measurement, which dist/gpu/run bench makes"]
fn loads_as_shares_of_what_memory_and_disk_can_give() {
    let Some(gpu) = Gpu::here("loads_as_shares_of_what_memory_and_disk_can_give") else {
        return;
    };
    let model = synth("qwen3-8b", "q4_k_m");
    let folder = tempfile::Builder::new().prefix("ballast-disk-").tempdir_in("/tmp").unwrap();
    let on_disk = folder.path().join("model.gguf");
    std::fs::copy(&model, &on_disk).unwrap();
    File::open(&on_disk).unwrap().sync_all().unwrap();
    let baseline = gpu.used();
    let pinned = pinned_rate();
    let memory = model.parent().unwrap().display().to_string();
    let loads = Loads::start();
    verdict(&memory, loads.rates(&model, |_| ()), pinned, "of pinned copies", OF_PINNED);
    verdict("the page cache", loads.rates(&on_disk, |_| ()), pinned, "of pinned copies", OF_PINNED);
    let read = || {
        forget(&on_disk);
        read_rate(&on_disk)
    };
    let plain = median([read(), read(), read()].to_vec());
    verdict("the disk", loads.rates(&on_disk, forget), plain, "of plain reads", OF_DISK);
    loads.fleet.stop();
    gpu.assert_back_at(baseline);
}

fn verdict(from: &str, rates: Vec<f64>, possible: f64, what: &str, goal: f64) {
    let (rate, each) = (median(rates.clone()), rates.iter().map(|rate| rate / 1e9).collect::<Vec<_>>());
    let met = if rate >= goal * possible { "met" } else { "MISSED" };
    eprintln!(
        "measured: loads from {from}: {:.1} GB/s of {each:.1?}, {:.0}% of the {:.1} GB/s {what}; goal {:.0}%: {met}",
        rate / 1e9,
        100.0 * rate / possible,
        possible / 1e9,
        100.0 * goal
    );
}

fn median(mut values: Vec<f64>) -> f64 {
    values.sort_by(f64::total_cmp);
    values[values.len() / 2]
}

/// The rate of copies from pinned memory to the device, as `ballast doctor` measures it.
fn pinned_rate() -> f64 {
    let output = ballast().args(["doctor", "--json"]).output().unwrap();
    let (stdout, stderr) = text(&output);
    let report: Value = serde_json::from_str(&stdout).unwrap_or_else(|_| panic!("{stdout}{stderr}"));
    let findings = report["findings"].as_array().unwrap();
    let rate =
        findings.iter().find_map(|finding| finding["values"]["pinned_to_device_bytes_per_second"].as_f64());
    rate.unwrap_or_else(|| panic!("no rate of pinned copies in {report}"))
}

/// A fleet that loads a large model again and again, and its log.
struct Loads {
    fleet: ServedFleet,
    log: PathBuf,
}

impl Loads {
    fn start() -> Self {
        let directory = tempfile::tempdir().unwrap();
        let log = directory.path().join("log");
        let mut command = serve(directory.path(), &demo_7m(), &["--workers", "1"]);
        command.env("BALLAST_LOG", "info").stderr(File::create(&log).unwrap());
        Self { fleet: ServedFleet::start_command(directory, command), log }
    }

    /// The bytes per second of reading and copying, measured by the loader itself.
    fn rates(&self, model: &Path, prepare: impl Fn(&Path)) -> Vec<f64> {
        let run_command = |arguments: &[&str]| {
            let output = self.fleet.run_command(arguments);
            assert!(output.status.success(), "{}", text(&output).1);
        };
        let one = |_| {
            prepare(model);
            let path = model.to_str().unwrap();
            run_command(&["load", path, "--name", "big", "--workers", "0", "--device", &device()]);
            run_command(&["unload", "big"]);
            let said = std::fs::read_to_string(&self.log).unwrap();
            let filled = said.lines().rfind(|line| line.contains("filled the GPU's memory"));
            let rate = filled.and_then(|line| line.split("gigabytes_per_second=").nth(1));
            let rate = rate.unwrap_or_else(|| panic!("no rate of a load in {said}"));
            rate.split_whitespace().next().unwrap().parse::<f64>().unwrap() * 1e9
        };
        (0..ROUNDS).map(one).collect()
    }
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

/// The bytes per second of several threads that read a file at the same time.
fn read_rate(file: &Path) -> f64 {
    const THREADS: u64 = 8;
    let bytes = file.metadata().unwrap().len();
    let started = Instant::now();
    std::thread::scope(|scope| {
        for thread in 0..THREADS {
            scope.spawn(move || {
                let (from, to) = (bytes * thread / THREADS, bytes * (thread + 1) / THREADS);
                let mut part = File::open(file).unwrap();
                part.seek(SeekFrom::Start(from)).unwrap();
                let mut part = part.take(to - from);
                let mut buffer = vec![0; 8 << 20];
                while part.read(&mut buffer).unwrap() > 0 {}
            });
        }
    });
    bytes as f64 / started.elapsed().as_secs_f64()
}
