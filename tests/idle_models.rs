// SPDX-License-Identifier: Apache-2.0

//! Models that are unloaded while no request uses them, and loaded again for the next one
//! (docs/decisions/0050-idle-models-are-unloaded.md).

use std::path::Path;
use std::time::{Duration, Instant};

use serde_json::{Value, json};

use crate::harness::api::{Continuation, TestRequest, generate_all, runtime};
use crate::harness::http::HttpClient;
use crate::harness::{ServedFleet, demo_7m, demo_22m, eventually, model_table, proc, serve_config};

pub(crate) fn request(model: &str) -> TestRequest {
    TestRequest {
        model: model.to_owned(),
        prompt: (0..20).map(|i| 10 + i * 13).collect(),
        max_tokens: 24,
        ..TestRequest::default()
    }
}

fn generate(fleet: &ServedFleet, model: &str, count: usize) -> Vec<Continuation> {
    let found = runtime().block_on(generate_all(&fleet.grpc, &vec![request(model); count]));
    found.into_iter().map(Result::unwrap).collect()
}

/// The lines of `ps` about a model: its own, its workers', and those of its weights.
fn lines_of(fleet: &ServedFleet, model: &str) -> Option<(Value, Vec<Value>)> {
    let lines = fleet.try_ps_lines()?;
    let own = lines.iter().find(|line| line["role"] == "model" && line["name"] == model)?.clone();
    let weights = format!("model:{model}");
    let is_part = |line: &&Value| line["model"] == model || line["name"] == weights.as_str();
    Some((own, lines.iter().filter(is_part).cloned().collect()))
}

/// Waits until the model has neither workers nor weights.
fn await_idle(fleet: &ServedFleet, model: &str) -> Value {
    eventually(&format!("{model} is idle"), || {
        let (own, parts) = lines_of(fleet, model)?;
        (own["state"] == "idle" && parts.is_empty()).then_some(own)
    })
}

fn ready(fleet: &ServedFleet) -> Value {
    serde_json::from_str(&HttpClient::connect(fleet).get("/ready").1).unwrap()
}

fn two_models(file_of_a: &Path) -> String {
    model_table("a", file_of_a, "") + &model_table("b", &demo_22m(), "")
}

#[test]
fn an_idle_model_holds_no_memory_and_requests_wake_it_once() {
    let fleet = ServedFleet::start_config(&two_models(&demo_7m()));
    let expected = generate(&fleet, "a", 1).remove(0);
    fleet.run(&["unload", "a", "--idle"]);
    await_idle(&fleet, "a");
    fleet.run(&["unload", "a", "--idle"]);
    let listed: Value = serde_json::from_str(&HttpClient::connect(&fleet).get("/v1/models").1).unwrap();
    let names: Vec<&str> =
        listed["data"].as_array().unwrap().iter().map(|model| model["id"].as_str().unwrap()).collect();
    assert!(names.contains(&"a") && names.contains(&"b"), "{listed}");
    eventually("/ready names it", || (ready(&fleet)["idle"] == json!(["a"])).then_some(()));
    generate(&fleet, "b", 2);
    await_idle(&fleet, "a");

    let found = generate(&fleet, "a", 6);
    assert!(found.iter().all(|found| (&found.tokens, &found.text) == (&expected.tokens, &expected.text)));
    let (own, parts) = lines_of(&fleet, "a").unwrap();
    assert_eq!(own["state"], "ready");
    let count = |role: &str| parts.iter().filter(|line| line["role"] == role).count();
    assert_eq!((count("worker"), count("generation")), (1, 1), "{parts:?}");
    eventually("no model is idle", || (ready(&fleet)["idle"] == json!([])).then_some(()));
    fleet.stop();
}

#[test]
fn a_fleet_of_idle_models_is_ready_and_a_person_wakes_one() {
    let fleet = ServedFleet::start_config(&model_table("a", &demo_7m(), ""));
    fleet.run(&["unload", "a", "--idle"]);
    await_idle(&fleet, "a");
    eventually("/ready says 200", || (HttpClient::connect(&fleet).get("/ready").0 == 200).then_some(()));
    for arguments in [&["add-worker", "a"][..], &["swap", "a", demo_22m().to_str().unwrap()]] {
        let said = fleet.refusal(arguments);
        assert!(said.contains("model \"a\" is idle"), "{arguments:?}: {said}");
    }
    assert!(fleet.refusal(&["wake", "b"]).contains("no model is called \"b\""));
    fleet.run(&["wake", "a"]);
    fleet.run(&["wake", "a"]);
    eventually("its worker serves", || {
        let (own, parts) = lines_of(&fleet, "a")?;
        (own["state"] == "ready" && parts.iter().any(|line| line["state"] == "ready")).then_some(())
    });
    generate(&fleet, "a", 1);
    fleet.run(&["unload", "a", "--idle"]);
    fleet.run(&["unload", "a"]);
    eventually("it has left the fleet", || {
        let lines = fleet.try_ps_lines()?;
        (!lines.iter().any(|line| line["role"] == "model")).then_some(())
    });
    fleet.stop();
}

#[test]
fn an_idle_model_stays_idle_whichever_process_dies() {
    let directory = tempfile::Builder::new().prefix("ballast-test-").tempdir().unwrap();
    let runtime_dir = directory.path().join("run");
    let config = two_models(&demo_7m());
    let mut fleet = ServedFleet::start_command(directory, serve_config(&runtime_dir, &config));
    let expected = generate(&fleet, "a", 1).remove(0);
    fleet.run(&["unload", "a", "--idle"]);
    await_idle(&fleet, "a");
    for role in ["router", "weight-server"] {
        let before = fleet.only_process(role).pid;
        proc::send_signal(before, "KILL");
        eventually(&format!("the next {role}"), || {
            let next = fleet.try_processes()?.into_iter().find(|process| process.role == role)?;
            (next.pid != before && next.state == "ready").then_some(())
        });
        await_idle(&fleet, "a");
    }
    // Its router has never heard of the model.
    fleet.take_over(|| {}, serve_config(&runtime_dir, &config));
    await_idle(&fleet, "a");
    let found = generate(&fleet, "a", 3);
    assert!(found.iter().all(|found| found.tokens == expected.tokens));
    generate(&fleet, "b", 1);
    fleet.stop();
}

#[test]
fn a_model_that_cannot_be_woken_is_refused_at_once_with_the_reason_until_it_can() {
    let folder = tempfile::tempdir().unwrap();
    let (file, away) = (folder.path().join("a.gguf"), folder.path().join("away.gguf"));
    std::fs::copy(demo_7m(), &file).unwrap();
    let fleet = ServedFleet::start_config(&two_models(&file));
    let expected = generate(&fleet, "a", 1).remove(0);
    fleet.run(&["unload", "a", "--idle"]);
    await_idle(&fleet, "a");
    std::fs::rename(&file, &away).unwrap();
    let started = Instant::now();
    let http = HttpClient::connect(&fleet);
    let body = json!({"model": "a", "prompt": "def f", "max_tokens": 4});
    let (status, answer) = http.post("/v1/completions", &body);
    assert_eq!(status, 503, "{answer}");
    assert!(started.elapsed() < Duration::from_secs(15), "{:?}", started.elapsed());
    let own = await_idle(&fleet, "a");
    assert!(own["failure"].as_str().unwrap().contains("a.gguf"), "{own}");
    // The next requests do not wait for another wake.
    let again = Instant::now();
    assert_eq!(http.post("/v1/completions", &body).0, 503);
    assert!(again.elapsed() < Duration::from_secs(5), "{:?}", again.elapsed());
    generate(&fleet, "b", 1);
    std::fs::rename(&away, &file).unwrap();
    fleet.run(&["wake", "a"]);
    let found = eventually("it serves again", || {
        let found = runtime().block_on(generate_all(&fleet.grpc, &[request("a")])).remove(0);
        found.ok()
    });
    assert_eq!(found.tokens, expected.tokens);
    fleet.stop();
}

/// A stream runs on, and a request that comes meanwhile is answered after it, by one new load.
#[test]
fn a_request_that_comes_while_a_model_becomes_idle_wakes_it_after_that() {
    let fleet = ServedFleet::start_config(&two_models(&demo_7m()));
    let expected = generate(&fleet, "a", 1).remove(0);
    let long = TestRequest { max_tokens: 900, ..request("a") };
    let (first, second) = std::thread::scope(|scope| {
        let grpc = &fleet.grpc;
        let stream = scope.spawn(|| runtime().block_on(generate_all(grpc, &[long])).remove(0));
        std::thread::sleep(Duration::from_millis(100));
        let unload = scope.spawn(|| fleet.run(&["unload", "a", "--idle"]));
        eventually("its worker drains", || {
            let (_, parts) = lines_of(&fleet, "a")?;
            parts.iter().all(|line| line["role"] != "worker" || line["state"] != "ready").then_some(())
        });
        let second = generate(&fleet, "a", 3);
        unload.join().unwrap();
        (stream.join().unwrap(), second)
    });
    assert_eq!(first.unwrap().tokens.len(), 900);
    assert!(second.iter().all(|found| found.tokens == expected.tokens));
    fleet.stop();
}

#[test]
fn a_reload_changes_and_removes_idle_models() {
    let directory = tempfile::Builder::new().prefix("ballast-test-").tempdir().unwrap();
    let runtime_dir = directory.path().join("run");
    let fleet = ServedFleet::start_command(directory, serve_config(&runtime_dir, &two_models(&demo_7m())));
    fleet.run(&["unload", "a", "--idle"]);
    await_idle(&fleet, "a");
    let two_workers = model_table("a", &demo_7m(), "").replace("workers = 1", "workers = 2");
    let b = model_table("b", &demo_22m(), "");
    fleet.configure(&(two_workers + &b));
    assert_eq!(fleet.reload(&[]).trim(), "workers of model a: 1 -> 2");
    await_idle(&fleet, "a");
    generate(&fleet, "a", 1);
    eventually("two workers", || {
        let (_, parts) = lines_of(&fleet, "a")?;
        let workers = parts.iter().filter(|line| line["role"] == "worker" && line["state"] == "ready");
        (workers.count() == 2).then_some(())
    });
    fleet.run(&["unload", "a", "--idle"]);
    fleet.configure(&b);
    fleet.reload(&[]);
    eventually("a has left the fleet", || {
        let lines = fleet.try_ps_lines()?;
        (!lines.iter().any(|line| line["role"] == "model" && line["name"] == "a")).then_some(())
    });
    generate(&fleet, "b", 1);
    fleet.stop();
}
