// SPDX-License-Identifier: Apache-2.0

//! Models that leave the memory by themselves: when no request uses them for their `idle-unload`,
//! and when other models need the room (docs/decisions/0050-idle-models-are-unloaded.md).

use std::time::{Duration, Instant};

use serde_json::Value;

use crate::harness::api::{TestRequest, generate_all, runtime};
use crate::harness::{ServedFleet, demo_7m, demo_22m, eventually, model_table, serve_config};

/// The shortest that the configuration takes.
const IDLE_UNLOAD: &str = "idle-unload = \"10s\"";

fn generate(fleet: &ServedFleet, model: &str) -> Vec<u32> {
    let request = TestRequest {
        model: model.to_owned(),
        prompt: (0..20).map(|i| 10 + i * 13).collect(),
        max_tokens: 24,
        ..TestRequest::default()
    };
    runtime().block_on(generate_all(&fleet.grpc, &[request])).remove(0).unwrap().tokens
}

fn model_line(fleet: &ServedFleet, name: &str) -> Option<Value> {
    let lines = fleet.try_ps_lines()?;
    lines.into_iter().find(|line| line["role"] == "model" && line["name"] == name)
}

fn await_state(fleet: &ServedFleet, name: &str, state: &str) {
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
