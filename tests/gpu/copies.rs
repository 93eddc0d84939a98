// SPDX-License-Identifier: Apache-2.0

//! The second GPU's copy of a model is made from the first one's. Measures how much later the
//! second GPU serves. Needs two GPUs.

use super::Gpu;
use crate::harness::api::{TestRequest, generate_all, runtime};
use crate::harness::http::HttpClient;
use crate::harness::{ServedFleet, demo_22m, eventually, report_skipped, second_gpu, serve_config, synth};
use serde_json::Value;
use std::fs::File;
use std::path::Path;

/// The second GPU serves an 8B model at most this much later than the first one.
const SECOND_SERVES_MAX_MS: f64 = 150.0;

const ROUNDS: usize = 3;

/// A fleet with one model on two GPUs.
struct TwoGpus {
    fleet: ServedFleet,
    log: std::path::PathBuf,
}

/// What one start of a fleet took.
#[derive(Debug)]
struct CopyTimes {
    /// From the first copy being ready to the second one.
    copy_ready_ms: f64,
    /// From the first worker serving to the second one, on different GPUs.
    serves_ms: f64,
    copy_ms: f64,
    gigabytes_per_second: f64,
}

pub(super) fn two_gpus(test: &str) -> Option<[String; 2]> {
    let first = Gpu::here(test)?;
    let second = second_gpu();
    if second.is_none() {
        report_skipped(format_args!(
            "{test} needs two GPUs, the second one named by BALLAST_TEST_SECOND_DEVICE: dist/gpu/run two-gpus"
        ));
    }
    Some([first.name, second?])
}

impl TwoGpus {
    fn start(model: &Path, devices: &[String; 2]) -> Self {
        let directory = tempfile::Builder::new().prefix("ballast-test-").tempdir().unwrap();
        let log = directory.path().join("log");
        let config = format!(
            "[[models]]\nname = \"m\"\npath = {model:?}\ndevice = {devices:?}\nworkers = 1\nkv-tokens = 8192\n\
             [routing]\nmode = \"least-loaded\"\n"
        );
        let mut command = serve_config(&directory.path().join("run"), &config);
        command.env("BALLAST_LOG", "info").stderr(File::create(&log).unwrap());
        let fleet = ServedFleet::start_command(directory, command);
        eventually("a worker serves on each GPU", || (fleet.serving("m").len() == 2).then_some(()));
        Self { fleet, log }
    }

    fn lines(&self, role: &str) -> Vec<Value> {
        self.fleet.try_ps_lines().unwrap().into_iter().filter(|line| line["role"] == role).collect()
    }

    fn log(&self) -> String {
        std::fs::read_to_string(&self.log).unwrap()
    }

    /// The copy that was made from the other one.
    fn copy(&self) -> Value {
        let generations = self.lines("generation");
        let [one, two] = &generations[..] else { panic!("{generations:?}") };
        let (copy, source) = if one["copied_from"].is_null() { (two, one) } else { (one, two) };
        assert_eq!(copy["copied_from"], source["device"], "{generations:?}\n{}", self.log());
        assert!(source["copied_from"].is_null(), "{generations:?}");
        copy.clone()
    }

    /// Milliseconds between the times at which the two copies became ready, from the
    /// weight-server's log.
    fn copy_ready_ms(&self) -> f64 {
        let log = self.log();
        let ready = log.lines().filter(|line| line.contains("weight-server") && line.contains("phase=Ready"));
        let time = |line: &str| -> f64 {
            let time = line.split_whitespace().next().unwrap().trim_end_matches('s');
            time.parse().unwrap_or_else(|_| panic!("no time in {line}"))
        };
        let times: Vec<f64> = ready.map(time).collect();
        assert!(times.len() >= 2, "{log}");
        (times[1] - times[0]).abs() * 1e3
    }

    /// Milliseconds between the times at which the two workers were ready.
    fn serves_ms(&self) -> f64 {
        let ready = |line: &Value| line["ready_ms"].as_f64().unwrap() - line["uptime_ms"].as_f64().unwrap();
        let times: Vec<f64> = self.lines("worker").iter().map(ready).collect();
        let [one, two] = times[..] else { panic!("{times:?}") };
        (one - two).abs()
    }

    fn times(&self) -> CopyTimes {
        let copy = self.copy();
        let (bytes, copy_ms) = (copy["tensor_bytes"].as_f64().unwrap(), copy["copy_ms"].as_f64().unwrap());
        CopyTimes {
            copy_ready_ms: self.copy_ready_ms(),
            serves_ms: self.serves_ms(),
            copy_ms,
            gigabytes_per_second: bytes / copy_ms / 1e6,
        }
    }

    /// Equal requests give equal tokens, whichever GPU runs them, and both GPUs run some.
    fn assert_same_tokens(&self) {
        let request = TestRequest {
            model: "m".to_owned(),
            prompt: (0..60).map(|i| 10 + i * 13).collect(),
            max_tokens: 48,
            temperature: 0.7,
            seed: 5,
            ..TestRequest::default()
        };
        // Prompt tokens that each worker has taken; none for a worker that the router does not
        // know.
        let http = HttpClient::connect(&self.fleet);
        let prompt_tokens = |worker: &Value| {
            let name = worker["name"].as_str().unwrap();
            let labels = format!("model_name=\"m\",engine=\"{name}\"");
            http.metric(&format!("ballast:prefix_cache_queries_total{{{labels}}}"))
        };
        let workers = self.lines("worker");
        for worker in &workers {
            eventually("the router knows both workers", || prompt_tokens(worker));
        }
        let requests = vec![request; 8];
        let found = runtime().block_on(generate_all(&self.fleet.grpc, &requests));
        let found: Vec<&Vec<u32>> = found.iter().map(|found| &found.as_ref().unwrap().tokens).collect();
        assert!(found[0].len() == 48 && found.iter().all(|tokens| *tokens == found[0]), "{found:?}");
        for worker in &workers {
            let what = format!("{} on {} has run a stream", worker["name"], worker["device"]);
            eventually(&what, || prompt_tokens(worker).filter(|&tokens| tokens > 0.0));
        }
    }
}

#[test]
fn i1_the_copy_of_a_second_gpu_comes_from_the_first_and_gives_the_same_tokens() {
    let Some(devices) = two_gpus("a copy from one GPU to another") else { return };
    let fleet = TwoGpus::start(&demo_22m(), &devices);
    fleet.copy();
    fleet.assert_same_tokens();
    let log = fleet.log();
    assert!(!log.contains("cannot copy the weights"), "{log}");
    let copied = log.lines().find(|line| line.contains("copied the weights from another device"));
    eprintln!("measured: 22M model, {}", parts(copied.unwrap()));
    fleet.fleet.stop();
}

#[test]
fn a_second_gpu_serves_an_8b_model_soon_after_the_first() {
    let Some(devices) = two_gpus("the start of an 8B model on two GPUs") else { return };
    let model = synth("qwen3-8b", "q4_k_m");
    let mut serves = Vec::new();
    for round in 1..=ROUNDS {
        let fleet = TwoGpus::start(&model, &devices);
        let CopyTimes { copy_ready_ms, serves_ms, copy_ms, gigabytes_per_second } = fleet.times();
        eprintln!(
            "measured: 8B Q4_K_M, start {round}: the second GPU serves {serves_ms:.0} ms after the first, its \
             copy is ready {copy_ready_ms:.0} ms after the first; bytes copied in {copy_ms:.1} ms, \
             {gigabytes_per_second:.0} GB/s"
        );
        let log = fleet.log();
        let copied = log.lines().find(|line| line.contains("copied the weights from another device"));
        eprintln!("measured: 8B Q4_K_M, start {round}: {}", parts(copied.unwrap()));
        if round == ROUNDS {
            fleet.assert_same_tokens();
        }
        serves.push(serves_ms);
        fleet.fleet.stop();
    }
    serves.sort_by(f64::total_cmp);
    let median = serves[serves.len() / 2];
    let met = if median <= SECOND_SERVES_MAX_MS { "met" } else { "MISSED" };
    eprintln!(
        "measured: 8B Q4_K_M: the second GPU serves {median:.0} ms after the first (median of {ROUNDS}); \
         goal {SECOND_SERVES_MAX_MS} ms: {met}"
    );
    assert!(median <= SECOND_SERVES_MAX_MS, "{serves:?}");
}

/// The parts of a copy, from the loader's log line.
fn parts(line: &str) -> String {
    line.split_once("another device ").map_or(line, |(_, parts)| parts).trim().to_owned()
}
