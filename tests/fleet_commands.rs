// SPDX-License-Identifier: Apache-2.0

//! Commands to a running fleet: load, unload, and reset-prefix-cache.

use std::os::fd::OwnedFd;
use std::path::Path;
use std::process::Command;

use rustix::net::{
    AddressFamily, SocketAddrUnix, SocketFlags, SocketType, bind, connect, listen, socket_with,
};
use serde_json::{Value, json};

use crate::harness::http::HttpClient;
use crate::harness::{
    ServedFleet, ballast, demo_7m, demo_22m, device, eventually, executable, proc, serve, serve_config, text,
};

fn load(fleet: &ServedFleet, model: &Path, more: &[&str]) {
    let device = device();
    let mut arguments = vec!["load", model.to_str().unwrap(), "--threads", "1", "--device", &device];
    arguments.extend(["--kv-tokens", "1024"].iter().chain(more));
    let output = fleet.run_command(&arguments);
    assert!(output.status.success(), "{arguments:?}: {}", text(&output).1);
}

fn unload(fleet: &ServedFleet, name: &str) {
    let output = fleet.run_command(&["unload", name]);
    assert!(output.status.success(), "{name}: {}", text(&output).1);
}

fn complete(http: &HttpClient, model: &str) -> (u16, String) {
    let body = json!({"model": model, "prompt": "def add(a, b):\n", "max_tokens": 48, "temperature": 0});
    http.post("/v1/completions", &body)
}

/// Returns the model's greedy text as soon as the model is served.
fn answer(http: &HttpClient, model: &str) -> String {
    let served = || complete(http, model);
    let whole = eventually(model, || Some(served()).filter(|(status, _)| *status == 200));
    let whole: Value = serde_json::from_str(&whole.1).unwrap();
    assert_eq!(whole["model"], model);
    whole["choices"][0]["text"].as_str().unwrap().to_owned()
}

/// Copies a model, because a file can be loaded only once.
fn copy(model: &Path, folder: &Path, name: &str) -> std::path::PathBuf {
    let copy = folder.join(name);
    std::fs::copy(model, &copy).unwrap();
    copy
}

#[test]
fn one_content_under_two_names_is_served_under_each_until_that_is_unloaded() {
    let folder = tempfile::tempdir().unwrap();
    let fleet = ServedFleet::start(&demo_7m(), &["--workers", "1", "--threads", "1"]);
    let http = HttpClient::connect(&fleet);
    load(&fleet, &copy(&demo_22m(), folder.path(), "a.gguf"), &["--name", "first"]);
    load(&fleet, &copy(&demo_22m(), folder.path(), "b.gguf"), &["--name", "second"]);
    let text = answer(&http, "first");
    assert_eq!(answer(&http, "second"), text);
    let is_listed = |name: &str| {
        let models: Value = serde_json::from_str(&http.get("/v1/models").1).unwrap();
        models["data"].as_array().unwrap().iter().any(|model| model["id"] == name)
    };
    assert!(is_listed("first"));
    unload(&fleet, "first");
    eventually("the first is unknown", || (complete(&http, "first").0 == 404).then_some(()));
    assert!(!is_listed("first") && is_listed("second"));
    let lines = fleet.try_ps_lines().unwrap();
    assert!(lines.iter().all(|line| line["name"] != "model:first"), "{lines:?}");
    assert_eq!(http.get("/ready").0, 200);
    assert_eq!(answer(&http, "second"), text, "its worker is its own");
    fleet.stop();
}

#[test]
fn load_with_a_draft_loads_what_drafts_unless_it_is_there() {
    let folder = tempfile::tempdir().unwrap();
    let small = copy(&demo_7m(), folder.path(), "small.gguf");
    let fleet = ServedFleet::start(&demo_22m(), &["--workers", "1", "--threads", "1"]);
    let http = HttpClient::connect(&fleet);
    let text_alone = answer(&http, "pycoder-22m-q4_k_m");
    let draft = ["--draft", small.to_str().unwrap()];
    for name in ["loads", "finds"] {
        let model = copy(&demo_22m(), folder.path(), &format!("{name}.gguf"));
        load(&fleet, &model, &[&["--name", name], &draft[..]].concat());
        assert_eq!(answer(&http, name), text_alone, "{name}: drafts change no token");
        let drafted = format!("ballast:spec_decode_num_draft_tokens_total{{model_name=\"{name}\"");
        eventually("tokens are drafted", || http.metric(&drafted).filter(|&tokens| tokens > 0.0));
    }
    let status = fleet.try_ps_lines().unwrap();
    let copies = status.iter().filter(|line| line["name"] == "model:small").count();
    assert_eq!(copies, 1, "{status:?}");
    fleet.stop();
}

#[test]
fn prompts_are_forgotten_when_that_is_ordered() {
    let fleet = ServedFleet::start(&demo_7m(), &["--workers", "2", "--threads", "1"]);
    let http = HttpClient::connect(&fleet);
    let body = json!({"prompt": "def add(a, b):\n".repeat(8), "max_tokens": 8, "n": 4, "temperature": 1});
    http.post_json("/v1/completions", &body);
    let cached = || -> f64 {
        let metrics = http.get("/metrics").1;
        let lines = metrics.lines().filter(|line| line.starts_with("ballast:kv_cached_tokens{"));
        lines.filter_map(|line| line.rsplit(' ').next()?.parse::<f64>().ok()).sum()
    };
    eventually("the prompt is kept", || (cached() > 0.0).then_some(()));
    let output = fleet.run_command(&["reset-prefix-cache"]);
    assert!(output.status.success(), "{}", text(&output).1);
    eventually("nothing is kept", || (cached() == 0.0).then_some(()));
    fleet.stop();
}

#[test]
fn each_command_is_in_the_log_with_user_and_process_of_its_caller() {
    let directory = tempfile::Builder::new().prefix("ballast-test-").tempdir().unwrap();
    let folder = tempfile::tempdir().unwrap();
    let log = folder.path().join("log");
    let config = format!("[[models]]\nname = \"m\"\npath = {:?}\nworkers = 1\nthreads = 1\n", demo_7m());
    let mut command = serve_config(&directory.path().join("run"), &config);
    command.env("BALLAST_LOG", "info").stderr(std::fs::File::create(&log).unwrap());
    let fleet = ServedFleet::start_command(directory, command);
    let (other, uid) = (demo_22m(), rustix::process::geteuid().as_raw());
    let other = other.to_str().unwrap();
    let device = device();
    let load = ["load", other, "--name", "other", "--workers", "0", "--device", &device];
    for (arguments, subject, is_refused) in [
        (&load[..], "other", false),
        (&["swap", "other", other], "other", true),
        (&["unload", "other"], "other", false),
        (&["unload", "other"], "other", true),
        (&["add-worker", "m"], "m", false),
        (&["remove-worker", "worker-1"], "worker-1", false),
        (&["restart", "worker-0"], "worker-0", false),
        (&["reload", "--dry-run"], "dry run", false),
        (&["drain", "worker-0"], "worker-0", false),
    ] {
        let mut command = ballast();
        command.args(arguments).arg("--runtime-dir").arg(fleet.runtime_dir());
        let child = command.stderr(std::process::Stdio::null()).spawn().unwrap();
        let caller = format!("uid={uid} pid={}", child.id());
        let status = child.wait_with_output().unwrap().status;
        assert_eq!(status.success(), !is_refused, "{arguments:?}");
        let expected = format!("admin command command={:?} subject={subject:?} {caller}", arguments[0]);
        let refused = format!("admin command failed command={:?} subject={subject:?} {caller}", arguments[0]);
        eventually(&expected, || {
            let log = std::fs::read_to_string(&log).unwrap();
            (log.contains(&expected) && log.contains(&refused) == is_refused).then_some(())
        });
    }
    fleet.stop();
}

#[test]
fn of_several_fleets_each_is_listed_with_its_supervisor_and_its_models() {
    let parent = tempfile::Builder::new().prefix("ballast-test-").tempdir().unwrap();
    let start = |number: u32, name: &str| {
        // Looks like a fleet without `--runtime-dir` if this is XDG_RUNTIME_DIR.
        let directory = parent.path().join(format!("ballast-{number}"));
        let command = serve(&directory, &demo_7m(), &["--workers", "1", "--threads", "1", "--name", name]);
        ServedFleet::start_command(tempfile::tempdir().unwrap(), command)
    };
    let (first, second) = (start(1, "first"), start(2, "second"));
    let ps = || ballast().arg("ps").env("XDG_RUNTIME_DIR", parent.path()).output().unwrap();
    let fleet = |fleet: &ServedFleet, state: &str| {
        format!("{} (supervisor {}, {state})", fleet.runtime_dir().display(), fleet.supervisor.id())
    };
    // A supervisor has a second to answer. On a busy machine it may need more.
    let is_listed = |second_state: &str| {
        let expected = format!(
            "several fleets are running: choose one with --runtime-dir: {}; {}",
            fleet(&first, "model first"),
            fleet(&second, second_state)
        );
        (0..60).any(|_| {
            let output = ps();
            output.status.code() == Some(2) && text(&output).1.contains(&expected)
        })
    };
    assert!(is_listed("model second"), "{}", text(&ps()).1);
    proc::send_signal(second.supervisor.id(), "STOP");
    let is_listed_as_silent = is_listed("does not answer");
    // Also if the test fails: cleaning up asks the supervisor.
    proc::send_signal(second.supervisor.id(), "CONT");
    assert!(is_listed_as_silent);
    first.stop();
    second.stop();
}

// As documented in docs/OPERATING.md.
const PEER_LOST: i32 = 5;
const SILENT: &str = "the process does not answer, it is stopped or overloaded";

#[test]
fn a_command_says_that_its_supervisor_does_not_answer() {
    let fleet = ServedFleet::start(&demo_7m(), &["--workers", "1", "--threads", "1"]);
    proc::send_signal(fleet.supervisor.id(), "STOP");
    let output = fleet.run_command(&["ps"]);
    proc::send_signal(fleet.supervisor.id(), "CONT");
    assert_eq!(output.status.code(), Some(PEER_LOST));
    assert_eq!(text(&output).1, format!("ballast: the supervisor: {SILENT}\n"));
    fleet.stop();
}

/// Connects until the queue of the listener is full.
fn fill_queue(socket: &Path) -> Vec<OwnedFd> {
    let address = SocketAddrUnix::new(socket).unwrap();
    let connect_one = || {
        let client =
            socket_with(AddressFamily::UNIX, SocketType::STREAM, SocketFlags::NONBLOCK, None).unwrap();
        connect(&client, &address).map(|()| client)
    };
    std::iter::from_fn(|| connect_one().ok()).collect()
}

#[test]
fn a_supervisor_that_accepts_no_connection_holds_up_no_command() {
    let parent = tempfile::Builder::new().prefix("ballast-test-").tempdir().unwrap();
    // Looks like the fleet of a stopped supervisor whose queue is short.
    let silent = parent.path().join("ballast-1");
    std::fs::create_dir(&silent).unwrap();
    let socket = silent.join("supervisor.sock");
    let listener = socket_with(AddressFamily::UNIX, SocketType::STREAM, SocketFlags::CLOEXEC, None).unwrap();
    bind(&listener, &SocketAddrUnix::new(&socket).unwrap()).unwrap();
    listen(&listener, 0).unwrap();
    let _clients = fill_queue(&socket);
    let ps = || {
        let mut command = Command::new("timeout");
        command.args(["--signal=KILL", "20"]).arg(executable()).arg("ps");
        command.env("XDG_RUNTIME_DIR", parent.path()).output().unwrap()
    };
    let output = ps();
    assert_eq!(output.status.code(), Some(PEER_LOST), "{}", text(&output).1);
    let expected = format!("ballast: cannot connect to {}: {SILENT}\n", socket.display());
    assert_eq!(text(&output).1, expected);

    let directory = parent.path().join("ballast-2");
    let command = serve(&directory, &demo_7m(), &["--workers", "1", "--threads", "1"]);
    let fleet = ServedFleet::start_command(tempfile::tempdir().unwrap(), command);
    let output = ps();
    let expected = format!("several fleets are running: choose one with --runtime-dir: {}", silent.display());
    assert!(text(&output).1.contains(&expected), "{}", text(&output).1);
    assert!(text(&output).1.contains("(does not answer)"), "{}", text(&output).1);
    fleet.stop();
}
