// SPDX-License-Identifier: Apache-2.0

//! Models that leave the memory by themselves: when no request uses them for their `idle-unload`,
//! and when other models need the room (docs/decisions/0050-idle-models-are-unloaded.md).

use std::time::{Duration, Instant};

use serde_json::{Value, json};

use crate::harness::admin::weight_server_status;
use crate::harness::api::{generate_all, runtime};
use crate::harness::http::HttpClient;
use crate::harness::{
    ServedFleet, ballast, demo_7m, demo_22m, eventually, model_table, runs_on_host, serve_config, text,
};
use crate::idle_models::request;

/// The shortest that the configuration takes.
const IDLE_UNLOAD: &str = "idle-unload = \"10s\"";

fn generate(fleet: &ServedFleet, model: &str) -> Vec<u32> {
    runtime().block_on(generate_all(&fleet.grpc, &[request(model)])).remove(0).unwrap().tokens
}

fn model_line(fleet: &ServedFleet, name: &str) -> Option<Value> {
    let lines = fleet.try_ps_lines()?;
    lines.into_iter().find(|line| line["role"] == "model" && line["name"] == name)
}

pub(crate) fn await_state(fleet: &ServedFleet, name: &str, state: &str) {
    eventually(&format!("{name} is {state}"), || (model_line(fleet, name)?["state"] == state).then_some(()));
}

fn worker_pids(fleet: &ServedFleet) -> Vec<u32> {
    fleet.processes_by_role("worker").iter().map(|worker| worker.pid).collect()
}

#[test]
fn a_model_leaves_when_no_request_has_used_it_for_its_time_and_the_next_one_wakes_it() {
    let config = model_table("a", &demo_7m(), IDLE_UNLOAD) + &model_table("b", &demo_22m(), "");
    let directory = tempfile::Builder::new().prefix("ballast-test-").tempdir().unwrap();
    let runtime_dir = directory.path().join("run");
    let fleet = ServedFleet::start_command(directory, serve_config(&runtime_dir, &config));
    let expected = generate(&fleet, "a");
    let workers = worker_pids(&fleet);
    let used = Instant::now();
    while used.elapsed() < Duration::from_secs(14) {
        assert_eq!(generate(&fleet, "a"), expected);
        std::thread::sleep(Duration::from_secs(1));
    }
    assert_eq!(worker_pids(&fleet), workers, "a model in use stays");
    let unused = Instant::now();
    await_state(&fleet, "a", "idle");
    let waited = unused.elapsed();
    assert!(waited > Duration::from_secs(7), "it left after {waited:?}");
    assert_eq!(generate(&fleet, "a"), expected);
    await_state(&fleet, "a", "ready");
    await_state(&fleet, "b", "ready");

    fleet.configure(&config.replace("\"10s\"", "\"1h\""));
    assert_eq!(fleet.reload(&[]).trim(), "idle-unload of model a: 10s -> 1h");
    std::thread::sleep(Duration::from_secs(13));
    await_state(&fleet, "a", "ready");
    fleet.stop();
}

/// Bytes that `plan` counts for all models of the configuration, which are on one device.
pub(crate) fn planned(config: &str) -> u64 {
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("fleet.toml");
    std::fs::write(&file, config).unwrap();
    let output = ballast().args(["plan", "--json", "--config"]).arg(&file).output().unwrap();
    let (stdout, stderr) = text(&output);
    let report: Value = serde_json::from_str(&stdout).unwrap_or_else(|_| panic!("{stdout}{stderr}"));
    let used = |device: &&Value| device["needed"] != 0;
    report["devices"].as_array().unwrap().iter().find(used).unwrap()["needed"].as_u64().unwrap()
}

fn reserved(fleet: &ServedFleet) -> u64 {
    runtime().block_on(weight_server_status(fleet)).ledger.unwrap().reserved_bytes
}

/// Requests one after the other for 20 s. Returns how many were answered.
fn answers_of(fleet: &ServedFleet, model: &str, expected: &[u32]) -> usize {
    let started = Instant::now();
    let mut answers = 0;
    while started.elapsed() < Duration::from_secs(20) {
        assert_eq!(generate(fleet, model), expected);
        answers += 1;
    }
    answers
}

#[test]
fn models_that_do_not_fit_together_leave_for_each_other_and_others_stay() {
    if !runs_on_host("a budget of the host") {
        return;
    }
    let (a, b) = (model_table("a", &demo_22m(), IDLE_UNLOAD), model_table("b", &demo_22m(), IDLE_UNLOAD));
    // Another layout, so that it does not share the weights of "a".
    let b = b.replace("threads = 1", "threads = 1\npack = false\naliases = [\"other-b\"]");
    let kept = model_table("kept", &demo_7m(), "");
    let budget = planned(&kept) + planned(&a).max(planned(&b)) + (4 << 20);
    let config = format!("host-budget = \"{budget}\"\n{a}{b}{kept}");
    let fleet = ServedFleet::start_config(&config);
    await_state(&fleet, "a", "ready");
    await_state(&fleet, "b", "idle");
    let kept_worker = |fleet: &ServedFleet| {
        let lines = fleet.try_ps_lines().unwrap();
        lines.iter().find(|line| line["role"] == "worker" && line["model"] == "kept").unwrap()["pid"].clone()
    };
    let (expected, worker) = (generate(&fleet, "kept"), kept_worker(&fleet));
    // No request has used "a": it leaves at once.
    // The router has heard neither "b" nor its alias.
    eventually("/v1/models lists it", || {
        let listed = HttpClient::connect(&fleet).get("/v1/models").1;
        let listed: Value = serde_json::from_str(&listed).unwrap();
        let models = listed["data"].as_array().unwrap();
        let workers = |id: &str| Some(models.iter().find(|model| model["id"] == id)?["workers"].clone());
        (["a", "b", "other-b"].map(workers) == [1, 0, 0].map(|n| Some(Value::from(n)))).then_some(())
    });
    let of_b = generate(&fleet, "other-b");
    await_state(&fleet, "a", "idle");
    assert!(reserved(&fleet) <= budget);
    // "b" has just been used: it leaves after a while. No request waits in vain.
    let of_a = generate(&fleet, "a");
    await_state(&fleet, "b", "idle");
    assert_eq!(of_a, of_b, "it is the same file");
    std::thread::scope(|scope| {
        let clients = [("a", &of_a), ("b", &of_a), ("kept", &expected)]
            .map(|(model, expected)| scope.spawn(|| answers_of(&fleet, model, expected)));
        let answers = clients.map(|client| client.join().unwrap());
        assert!(answers.iter().all(|answers| *answers >= 2), "{answers:?}");
    });
    assert_eq!(kept_worker(&fleet), worker);
    fleet.stop();
}

/// A model waits for the room of one that is in use, and the supervisor dies.
#[test]
fn a_successor_goes_on_with_a_model_that_waits_for_room() {
    if !runs_on_host("a budget of the host") {
        return;
    }
    let a = model_table("a", &demo_22m(), IDLE_UNLOAD);
    let b = model_table("b", &demo_7m(), IDLE_UNLOAD);
    let budget = planned(&a).max(planned(&b)) + (4 << 20);
    let config = format!("host-budget = \"{budget}\"\n{a}{b}");
    let directory = tempfile::Builder::new().prefix("ballast-test-").tempdir().unwrap();
    let runtime_dir = directory.path().join("run");
    let mut fleet = ServedFleet::start_command(directory, serve_config(&runtime_dir, &config));
    let expected = generate(&fleet, "a");
    let grpc = fleet.grpc.clone();
    let waiting =
        std::thread::spawn(move || runtime().block_on(generate_all(&grpc, &[request("b")])).remove(0));
    eventually("b waits for room", || (model_line(&fleet, "b")?["state"] == "loading").then_some(()));
    fleet.take_over(|| {}, serve_config(&runtime_dir, &config));
    let of_b = waiting.join().unwrap().unwrap().tokens;
    assert_eq!(generate(&fleet, "a"), expected);
    assert_eq!(generate(&fleet, "b"), of_b);
    assert!(reserved(&fleet) <= budget);
    fleet.stop();
}

#[test]
fn a_model_for_which_no_other_can_make_room_is_refused_with_the_figures() {
    if !runs_on_host("a budget of the host") {
        return;
    }
    let kept = model_table("kept", &demo_22m(), "");
    let large =
        model_table("large", &demo_22m(), IDLE_UNLOAD).replace("threads = 1", "threads = 1\npack = false");
    let budget = planned(&kept) + (4 << 20);
    let fleet = ServedFleet::start_config(&format!("host-budget = \"{budget}\"\n{kept}{large}"));
    await_state(&fleet, "large", "idle");
    let body = json!({"model": "large", "prompt": "def f", "max_tokens": 4});
    let started = Instant::now();
    let (status, answer) = HttpClient::connect(&fleet).post("/v1/completions", &body);
    assert!(started.elapsed() < Duration::from_secs(5), "{:?}", started.elapsed());
    assert_eq!(status, 503, "{answer}");
    let line = model_line(&fleet, "large").unwrap();
    let failure = line["failure"].as_str().unwrap();
    assert!(answer.contains("cannot be loaded") && answer.contains("are needed on host"), "{answer}");
    assert!(failure.contains("are needed on host") && failure.contains("raise the budget"), "{failure}");
    generate(&fleet, "kept");
    fleet.stop();
}
