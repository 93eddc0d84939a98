// SPDX-License-Identifier: Apache-2.0

//! A directory of which every model file is a model of the fleet
//! (docs/decisions/0053-models-directory.md).

use std::path::Path;
use std::time::{Duration, Instant};

use serde_json::{Value, json};

use crate::harness::http::HttpClient;
use crate::harness::{
    ServedFleet, ballast, demo_7m, demo_22m, device, eventually, model_table, proc, serve_config, text,
};

fn config(directory: &Path) -> String {
    format!(
        "[models-directory]\npath = {directory:?}\ndevice = {:?}\nidle-unload = \"10min\"\n\
         ctx-size = 512\n",
        device()
    )
}

fn complete(fleet: &ServedFleet, model: &str) -> (u16, String) {
    let body = json!({"model": model, "prompt": "def f", "max_tokens": 8, "temperature": 0});
    let (status, answer) = HttpClient::connect(fleet).post("/v1/completions", &body);
    let answer: Value = serde_json::from_str(&answer).unwrap();
    let text = answer["choices"][0]["text"].as_str().or(answer["error"]["message"].as_str());
    (status, text.unwrap_or_default().to_owned())
}

/// The states of the models, by name.
fn states(fleet: &ServedFleet) -> Option<Vec<(String, String)>> {
    let lines = fleet.try_ps_lines()?;
    let text = |line: &Value, key: &str| line[key].as_str().unwrap().to_owned();
    let models = lines.iter().filter(|line| line["role"] == "model");
    let mut states: Vec<(String, String)> =
        models.map(|line| (text(line, "name"), text(line, "state"))).collect();
    states.sort();
    Some(states)
}

#[track_caller]
fn await_states(fleet: &ServedFleet, expected: &[(&str, &str)]) {
    let owned = |(name, state): &(&str, &str)| ((*name).to_owned(), (*state).to_owned());
    let expected: Vec<(String, String)> = expected.iter().map(owned).collect();
    eventually(&format!("{expected:?}"), || (states(fleet)? == expected).then_some(()));
}

fn start(config: &str) -> ServedFleet {
    let place = tempfile::Builder::new().prefix("ballast-test-").tempdir().unwrap();
    let runtime_dir = place.path().join("run");
    ServedFleet::start_command(place, serve_config(&runtime_dir, config))
}

#[test]
fn files_come_and_go_change_and_are_loaded_for_their_first_request() {
    let folder = tempfile::tempdir().unwrap();
    let directory = folder.path();
    std::fs::copy(demo_7m(), directory.join("small.gguf")).unwrap();
    std::fs::write(directory.join("broken.gguf"), "no model").unwrap();
    std::fs::write(directory.join("notes.txt"), "no model either").unwrap();
    let always = model_table("always", &demo_22m(), "");
    let fleet = start(&(config(directory) + &always));
    await_states(&fleet, &[("always", "ready"), ("broken", "failed"), ("small", "idle")]);
    let (status, small) = complete(&fleet, "small");
    assert_eq!(status, 200);
    await_states(&fleet, &[("always", "ready"), ("broken", "failed"), ("small", "ready")]);

    // A copy takes its time.
    let bytes = std::fs::read(demo_22m()).unwrap();
    std::fs::create_dir(directory.join("publisher")).unwrap();
    let late = directory.join("publisher/late.gguf");
    std::fs::write(&late, &bytes[..bytes.len() / 2]).unwrap();
    std::thread::sleep(Duration::from_secs(2));
    std::fs::write(&late, &bytes).unwrap();
    std::fs::remove_file(directory.join("broken.gguf")).unwrap();
    await_states(&fleet, &[("always", "ready"), ("late", "idle"), ("small", "ready")]);
    // The router asks the supervisor before it calls a model unknown.
    assert_eq!(complete(&fleet, "late"), complete(&fleet, "always"));

    // The model that serves is replaced, and another one leaves.
    let new = directory.join("new");
    std::fs::copy(demo_22m(), &new).unwrap();
    std::fs::rename(&new, directory.join("small.gguf")).unwrap();
    std::fs::remove_file(&late).unwrap();
    await_states(&fleet, &[("always", "ready"), ("small", "idle")]);
    let (_, large) = eventually("the router knows the new file", || {
        Some(complete(&fleet, "small")).filter(|(status, _)| *status == 200)
    });
    assert_eq!(large, complete(&fleet, "always").1);
    assert_ne!(large, small);
    eventually("the router forgets it", || (complete(&fleet, "late").0 == 404).then_some(()));
    fleet.stop();
}

#[test]
fn a_fleet_may_begin_with_an_empty_directory_and_a_successor_knows_what_was_loaded() {
    let folder = tempfile::tempdir().unwrap();
    let directory = folder.path();
    let place = tempfile::Builder::new().prefix("ballast-test-").tempdir().unwrap();
    let runtime_dir = place.path().join("run");
    let config = config(directory);
    let mut fleet = ServedFleet::start_command(place, serve_config(&runtime_dir, &config));
    for name in ["a", "b"] {
        std::fs::copy(demo_7m(), directory.join(name).with_extension("gguf")).unwrap();
    }
    await_states(&fleet, &[("a", "idle"), ("b", "idle")]);
    let expected = complete(&fleet, "a");
    assert_eq!(expected.0, 200);
    await_states(&fleet, &[("a", "ready"), ("b", "idle")]);
    let worker = fleet.only_process("worker").pid;
    fleet.take_over(|| {}, serve_config(&runtime_dir, &config));
    await_states(&fleet, &[("a", "ready"), ("b", "idle")]);
    assert!(fleet.only_process("worker").pid == worker && proc::is_alive(worker));
    assert_eq!(complete(&fleet, "a"), expected);
    assert_eq!(complete(&fleet, "b"), expected);
    fleet.stop();
}

#[test]
fn a_file_that_is_replaced_while_it_serves_is_the_model_of_later_requests() {
    let folder = tempfile::tempdir().unwrap();
    let directory = folder.path();
    std::fs::copy(demo_22m(), directory.join("m.gguf")).unwrap();
    let always = model_table("always", &demo_7m(), "");
    let fleet = start(&(config(directory) + &always));
    assert_eq!(complete(&fleet, "m").0, 200);
    let new = directory.join("new");
    std::fs::copy(demo_7m(), &new).unwrap();
    std::thread::scope(|scope| {
        // Requests one after the other: the model is never unused.
        let client = scope.spawn(|| {
            let (started, mut answers) = (Instant::now(), Vec::new());
            while started.elapsed() < Duration::from_secs(25) {
                answers.push(complete(&fleet, "m"));
            }
            answers
        });
        std::thread::sleep(Duration::from_secs(1));
        std::fs::rename(&new, directory.join("m.gguf")).unwrap();
        let answers = client.join().unwrap();
        assert_eq!(answers.last(), Some(&complete(&fleet, "always")));
        // At most the one that was tokenized for the old file when that left.
        let refused = answers.iter().filter(|(status, _)| *status == 503).count();
        let served = answers.iter().filter(|(status, _)| *status == 200).count();
        assert!(refused <= 1 && refused + served == answers.len(), "{refused} of {}", answers.len());
    });
    fleet.stop();
}

/// The settings of the directory suit one file and not the other one.
#[test]
fn a_file_that_the_settings_do_not_suit_is_failed_and_stops_no_other_one() {
    let folder = tempfile::tempdir().unwrap();
    let directory = folder.path();
    std::fs::copy(demo_7m(), directory.join("short.gguf")).unwrap();
    let settings = config(directory).replace("ctx-size = 512", "ctx-size = 100000");
    // No other model: the fleet waits for files that can be used.
    let fleet = start(&settings);
    await_states(&fleet, &[("short", "failed")]);
    let lines = fleet.try_ps_lines().unwrap();
    let failure = lines.iter().find(|line| line["name"] == "short").unwrap()["failure"].clone();
    assert!(failure.as_str().unwrap().contains("--ctx-size is 100000"), "{failure}");
    std::fs::remove_file(directory.join("short.gguf")).unwrap();
    await_states(&fleet, &[]);
    fleet.stop();
}

/// The file comes back while its streams still finish.
#[test]
fn a_file_that_goes_and_comes_back_is_a_model_again() {
    let folder = tempfile::tempdir().unwrap();
    let directory = folder.path();
    let file = directory.join("m.gguf");
    std::fs::copy(demo_7m(), &file).unwrap();
    let fleet = start(&config(directory));
    let expected = complete(&fleet, "m");
    assert_eq!(expected.0, 200);
    std::fs::remove_file(&file).unwrap();
    await_states(&fleet, &[]);
    std::fs::copy(demo_7m(), &file).unwrap();
    await_states(&fleet, &[("m", "idle")]);
    let found = eventually("the router knows it", || {
        Some(complete(&fleet, "m")).filter(|(status, _)| *status == 200)
    });
    assert_eq!(found, expected);
    // A command may have the name first.
    let command = fleet.run_command(&["load", demo_22m().to_str().unwrap(), "--name", "n"]);
    assert!(command.status.success(), "{}", text(&command).1);
    std::fs::copy(demo_7m(), directory.join("n.gguf")).unwrap();
    std::fs::copy(demo_7m(), directory.join("o.gguf")).unwrap();
    await_states(&fleet, &[("m", "ready"), ("n", "ready"), ("o", "idle")]);
    fleet.stop();
}

#[test]
fn a_directory_that_cannot_be_read_and_wrong_settings_are_named() {
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("fleet.toml");
    for (settings, expected) in [
        ("path = \"missing\"", "cannot read the models directory"),
        ("path = \".\"\nworkers = 0", "`models-directory.workers` is 0"),
        ("path = \".\"\nidle-unload = \"1s\"", "`models-directory.idle-unload`: 1s is too short"),
        ("path = \".\"\nrecursive = true", "recursive"),
    ] {
        std::fs::write(&file, format!("[models-directory]\n{settings}\n")).unwrap();
        for command in ["plan", "serve"] {
            let output = ballast().args([command, "--config"]).arg(&file).output().unwrap();
            let (_, stderr) = text(&output);
            assert!(!output.status.success() && stderr.contains(expected), "{command} {settings}: {stderr}");
        }
    }
}
