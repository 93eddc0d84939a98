// SPDX-License-Identifier: Apache-2.0

//! A successor of a dead supervisor compares what is resident with its configuration: files, paths,
//! packing and models.

use std::path::Path;
use std::process::Command;

use serde_json::json;

use crate::harness::admin::try_weight_server_status;
use crate::harness::api::{TestRequest, generate_all, runtime};
use crate::harness::http::HttpClient;
use crate::harness::{
    ServedFleet, ballast, demo_7m, demo_22m, device, eventually, first_json_line, proc, serve, text,
};

const ONE_WORKER: [&str; 4] = ["--workers", "1", "--threads", "1"];
const TWO_WORKERS: [&str; 4] = ["--workers", "2", "--threads", "1"];

fn request() -> TestRequest {
    TestRequest { prompt: (0..20).map(|i| 10 + i * 13).collect(), max_tokens: 24, ..TestRequest::default() }
}

/// The greedy continuation of one prompt, which tells the demo models apart. `None` while workers
/// restart.
fn try_continuation(fleet: &ServedFleet) -> Option<Vec<u32>> {
    let found = runtime().block_on(generate_all(&fleet.grpc, &[request()])).remove(0);
    found.ok().map(|done| done.tokens)
}

fn continuation(fleet: &ServedFleet) -> Vec<u32> {
    eventually("a request is answered", || try_continuation(fleet))
}

/// What a fleet of its own generates with the model.
fn expected(model: &Path) -> Vec<u32> {
    let fleet = ServedFleet::start(model, &ONE_WORKER);
    let tokens = continuation(&fleet);
    fleet.stop();
    tokens
}

impl ServedFleet {
    /// Kills the supervisor, runs `between`, and starts a successor with the command.
    pub(crate) fn take_over(&mut self, between: impl FnOnce(), mut successor: Command) {
        proc::send_signal(self.supervisor.id(), "KILL");
        let _ = self.supervisor.wait();
        between();
        let mut successor = successor.spawn().unwrap();
        first_json_line(&mut successor);
        self.supervisor = successor;
    }
}

fn pids(fleet: &ServedFleet, role: &str) -> Vec<u32> {
    fleet.processes_by_role(role).iter().map(|process| process.pid).collect()
}

/// Waits until the weight-server holds exactly one generation, and returns its model and path.
#[track_caller]
fn only_generation(fleet: &ServedFleet) -> proto::weights::v1::Generation {
    eventually("one generation is left", || {
        let mut generations = runtime().block_on(try_weight_server_status(fleet))?.generations;
        (generations.len() == 1).then(|| generations.remove(0))
    })
}

#[test]
fn a_successor_serves_the_file_that_replaced_the_resident_one() {
    let folder = tempfile::tempdir().unwrap();
    let model = folder.path().join("model.gguf");
    std::fs::copy(demo_7m(), &model).unwrap();
    let mut fleet = ServedFleet::start(&model, &TWO_WORKERS);
    let before = pids(&fleet, "worker");
    let replace = || {
        let new = folder.path().join("new");
        std::fs::copy(demo_22m(), &new).unwrap();
        std::fs::rename(&new, &model).unwrap();
    };
    fleet.take_over(replace, serve(fleet.runtime_dir(), &model, &TWO_WORKERS));
    let expected = expected(&demo_22m());
    eventually("the new file is served", || {
        (try_continuation(&fleet).as_ref() == Some(&expected)).then_some(())
    });
    only_generation(&fleet);
    let after = eventually("both workers are back", || {
        let now = fleet.processes_by_role("worker");
        now.iter().all(|worker| worker.state == "ready").then(|| pids(&fleet, "worker"))
    });
    assert!(before.iter().all(|pid| !after.contains(pid)), "{before:?}, {after:?}");
    fleet.stop();
}

#[test]
fn a_successor_notices_a_file_that_was_changed_in_place_with_its_times_kept() {
    let folder = tempfile::tempdir().unwrap();
    let model = folder.path().join("model.gguf");
    std::fs::copy(demo_7m(), &model).unwrap();
    let mut fleet = ServedFleet::start(&model, &ONE_WORKER);
    let generation = only_generation(&fleet).generation;
    // One letter of the model's name in the header: size, times and inode stay.
    let change = || {
        let times = std::fs::metadata(&model).unwrap().modified().unwrap();
        let mut bytes = std::fs::read(&model).unwrap();
        let at = bytes.windows(7).position(|window| window == b"pycoder").unwrap();
        bytes[at] = b'P';
        std::fs::write(&model, bytes).unwrap();
        std::fs::File::options().write(true).open(&model).unwrap().set_modified(times).unwrap();
    };
    fleet.take_over(change, serve(fleet.runtime_dir(), &model, &ONE_WORKER));
    eventually("the changed file is loaded", || {
        let generations = runtime().block_on(try_weight_server_status(&fleet))?.generations;
        (generations.len() == 1 && generations[0].generation != generation).then_some(())
    });
    fleet.stop();
}

#[test]
fn a_successor_serves_the_path_of_its_configuration() {
    let folder = tempfile::tempdir().unwrap();
    let [old, new] = ["old", "new"].map(|version| {
        let folder = folder.path().join(version);
        std::fs::create_dir(&folder).unwrap();
        folder.join("model.gguf")
    });
    std::fs::copy(demo_7m(), &old).unwrap();
    std::fs::copy(demo_22m(), &new).unwrap();
    let mut fleet = ServedFleet::start(&old, &ONE_WORKER);
    fleet.take_over(|| {}, serve(fleet.runtime_dir(), &new, &ONE_WORKER));
    let expected = expected(&demo_22m());
    eventually("the new path is served", || {
        (try_continuation(&fleet).as_ref() == Some(&expected)).then_some(())
    });
    assert_eq!(Path::new(&only_generation(&fleet).path), new);
    fleet.stop();
}

#[test]
fn a_successor_applies_the_packing_of_its_configuration() {
    let mut fleet = ServedFleet::start(&demo_7m(), &ONE_WORKER);
    let packed = only_generation(&fleet);
    assert!(packed.allocations < packed.tensors);
    let unpacked = [&ONE_WORKER[..], &["--no-pack"]].concat();
    fleet.take_over(|| {}, serve(fleet.runtime_dir(), &demo_7m(), &unpacked));
    let tensors = packed.tensors;
    eventually("every tensor has an allocation", || {
        let generations = runtime().block_on(try_weight_server_status(&fleet))?.generations;
        (generations.len() == 1 && generations[0].allocations == tensors).then_some(())
    });
    assert_eq!(continuation(&fleet).len(), 24);
    fleet.stop();
}

#[test]
fn a_missing_mount_does_not_cost_a_resident_fleet() {
    let folder = tempfile::tempdir().unwrap();
    let mount = folder.path().join("mount");
    std::fs::create_dir(&mount).unwrap();
    let model = mount.join("model.gguf");
    std::fs::copy(demo_7m(), &model).unwrap();
    let mut fleet = ServedFleet::start(&model, &TWO_WORKERS);
    let tokens = continuation(&fleet);
    let roles = ["router", "weight-server", "worker"];
    let before: Vec<Vec<u32>> = roles.iter().map(|role| pids(&fleet, role)).collect();
    let unmount = || std::fs::rename(&mount, folder.path().join("elsewhere")).unwrap();
    fleet.take_over(unmount, serve(fleet.runtime_dir(), &model, &TWO_WORKERS));
    assert_eq!(continuation(&fleet), tokens);
    let after: Vec<Vec<u32>> = roles.iter().map(|role| pids(&fleet, role)).collect();
    assert_eq!(before, after, "children were restarted");
    only_generation(&fleet);

    // A restarted worker has its configuration and its weights, although the file is away.
    proc::send_signal(before[2][0], "KILL");
    eventually("a new worker serves", || {
        let now = fleet.processes_by_role("worker");
        now.iter().all(|w| w.state == "ready" && w.pid != before[2][0]).then_some(())
    });
    assert_eq!(continuation(&fleet), tokens);
    fleet.stop();
}

/// `ballast serve` with a configuration file of demo models.
fn serve_config(runtime_dir: &Path, config: &Path, models: &[(&str, &Path)]) -> Command {
    let device = device();
    let model = |(name, path): &(&str, &Path)| {
        format!(
            "[[models]]\nname = {name:?}\npath = {path:?}\nworkers = 1\nthreads = 1\nkv-tokens = 1024\n\
             device = {device:?}\n"
        )
    };
    std::fs::write(config, models.iter().map(model).collect::<String>()).unwrap();
    let mut command = ballast();
    command.args(["serve", "--json", "--listen", "127.0.0.1:0", "--config"]).arg(config);
    command.arg("--runtime-dir").arg(runtime_dir).stdout(std::process::Stdio::piped());
    command
}

#[test]
fn a_model_that_left_the_configuration_leaves_the_memory() {
    let directory = tempfile::Builder::new().prefix("ballast-test-").tempdir().unwrap();
    let folder = tempfile::tempdir().unwrap();
    let config = folder.path().join("ballast.toml");
    let (small, large) = (demo_7m(), demo_22m());
    let command = serve_config(directory.path(), &config, &[("small", &small), ("large", &large)]);
    let mut fleet = ServedFleet::start_command(directory, command);
    let kept = fleet.processes_by_role("worker");
    let command = serve_config(fleet.runtime_dir(), &config, &[("large", &large)]);
    fleet.take_over(|| {}, command);
    let generation = only_generation(&fleet);
    assert_eq!(generation.model, "large");
    eventually("one worker is left", || (pids(&fleet, "worker").len() == 1).then_some(()));
    assert_eq!(pids(&fleet, "worker"), [kept[1].pid], "the worker of the model that stays goes on");
    let models: Vec<_> = fleet.try_ps_lines().unwrap();
    let listed = |name: &str| models.iter().any(|line| line["name"] == format!("model:{name}"));
    assert!(listed("large") && !listed("small"), "{models:?}");
    let all: Vec<u32> = fleet.processes().iter().map(|process| process.pid).collect();
    let limit = generation.allocation_bytes + generation.allocation_bytes / 5;
    eventually("the memory of the other model is free", || {
        (device() != "host" || proc::memfd_bytes(&all) < limit).then_some(())
    });
    fleet.stop();
}

#[test]
fn a_model_under_a_new_name_is_served_under_that_name_only() {
    let directory = tempfile::Builder::new().prefix("ballast-test-").tempdir().unwrap();
    let folder = tempfile::tempdir().unwrap();
    let config = folder.path().join("ballast.toml");
    let model = demo_7m();
    let command = serve_config(directory.path(), &config, &[("before", &model)]);
    let mut fleet = ServedFleet::start_command(directory, command);
    let http = HttpClient::connect(&fleet);
    let ask = |model: &str| {
        let body = json!({"model": model, "prompt": "def add(a, b):\n", "max_tokens": 24, "temperature": 0});
        let (status, text) = http.post("/v1/completions", &body);
        let answer: serde_json::Value = serde_json::from_str(&text).unwrap();
        (status == 200).then(|| answer["choices"][0]["text"].as_str().unwrap().to_owned())
    };
    let text = eventually("the first name is served", || ask("before"));
    let command = serve_config(fleet.runtime_dir(), &config, &[("after", &model)]);
    fleet.take_over(|| {}, command);
    assert_eq!(only_generation(&fleet).model, "after");
    assert_eq!(eventually("the new name is served", || ask("after")), text);
    assert_eq!(ask("before"), None);
    fleet.stop();
}

#[test]
fn a_model_that_a_command_loaded_outlives_the_supervisor_and_can_be_unloaded() {
    let mut fleet = ServedFleet::start(&demo_7m(), &ONE_WORKER);
    let second = demo_22m();
    let load =
        ["load", second.to_str().unwrap(), "--name", "second", "--threads", "1", "--device", &device()];
    let output = fleet.run_command(&load);
    assert!(output.status.success(), "{}", text(&output).1);
    eventually("its worker is ready", || {
        let workers = fleet.processes_by_role("worker");
        (workers.len() == 2 && workers.iter().all(|worker| worker.state == "ready")).then_some(())
    });
    let before = pids(&fleet, "worker");
    fleet.take_over(|| {}, serve(fleet.runtime_dir(), &demo_7m(), &ONE_WORKER));
    assert_eq!(before, pids(&fleet, "worker"));
    let lines = fleet.try_ps_lines().unwrap();
    assert!(lines.iter().any(|line| line["name"] == "model:second"), "{lines:?}");
    let output = fleet.run_command(&["unload", "second"]);
    assert!(output.status.success(), "{}", text(&output).1);
    only_generation(&fleet);
    fleet.stop();
}
