// SPDX-License-Identifier: Apache-2.0

//! One model of several that cannot be used: the fleet starts with the others.

use std::path::Path;

use serde_json::{Value, json};

use crate::harness::http::HttpClient;
use crate::harness::{ServedFleet, demo_7m, demo_22m, eventually, model_table, serve_config, text};

fn model_line(fleet: &ServedFleet, name: &str) -> Option<Value> {
    let lines = fleet.try_ps_lines()?;
    lines.into_iter().find(|line| line["role"] == "model" && line["name"] == name)
}

fn complete(fleet: &ServedFleet, model: &str) -> (u16, String) {
    let body = json!({"model": model, "prompt": "def f", "max_tokens": 4});
    HttpClient::connect(fleet).post("/v1/completions", &body)
}

/// Starts a fleet of a good model and this one, which is listed as failed with `why`.
fn start_with(path: &Path, more: &str, why: &str) -> ServedFleet {
    let directory = tempfile::Builder::new().prefix("ballast-test-").tempdir().unwrap();
    let runtime_dir = directory.path().join("run");
    let config = model_table("good", &demo_7m(), "") + &model_table("bad", path, more);
    let fleet = ServedFleet::start_command(directory, serve_config(&runtime_dir, &config));
    assert_eq!(complete(&fleet, "good").0, 200);
    let line = model_line(&fleet, "bad").unwrap();
    assert_eq!(line["state"], "failed", "{line}");
    assert!(line["failure"].as_str().unwrap().contains(why), "{line}");
    let (status, answer) = eventually("the router knows why", || {
        let (status, answer) = complete(&fleet, "bad");
        (status != 404).then_some((status, answer))
    });
    assert!(status == 503 && answer.contains(why), "{status} {answer}");
    let ready: Value = serde_json::from_str(&HttpClient::connect(&fleet).get("/ready").1).unwrap();
    assert_eq!(ready["failed_models"], json!(["bad"]), "{ready}");
    fleet
}

#[test]
fn a_missing_file_stops_no_other_model_and_a_reload_loads_it_when_it_is_there() {
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("m.gguf");
    let fleet = start_with(&file, "", "No such file");
    let refused = fleet.run_command(&["reload"]);
    assert!(!refused.status.success() && text(&refused).1.contains("m.gguf"));
    std::fs::copy(demo_22m(), &file).unwrap();
    assert!(fleet.reload(&[]).contains("model bad is loaded from"));
    eventually("it serves", || (complete(&fleet, "bad").0 == 200).then_some(()));
    assert_eq!(model_line(&fleet, "bad").unwrap()["state"], "ready");
    fleet.stop();
}

#[test]
fn a_file_that_is_no_model_stops_no_other_one_and_unload_takes_it_off_the_list() {
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("m.gguf");
    std::fs::write(&file, "no model").unwrap();
    let fleet = start_with(&file, "", "GGUF");
    assert!(fleet.run_command(&["unload", "bad"]).status.success());
    assert!(model_line(&fleet, "bad").is_none());
    assert_eq!(complete(&fleet, "good").0, 200);
    fleet.stop();
}

#[test]
fn a_model_for_which_the_memory_has_no_room_stops_no_other_one() {
    start_with(&demo_22m(), "kv-bytes = \"4000GiB\"", "are needed on ").stop();
}

#[test]
fn a_fleet_without_a_model_that_can_be_used_does_not_start() {
    let folder = tempfile::tempdir().unwrap();
    let [a, b] = ["a", "b"].map(|name| model_table(name, &folder.path().join(name), ""));
    let output = serve_config(&folder.path().join("run"), &(a + &b)).output().unwrap();
    let (_, stderr) = text(&output);
    assert_eq!(output.status.code(), Some(3), "{stderr}");
    assert!(stderr.contains("No such file"), "{stderr}");
}
