// SPDX-License-Identifier: Apache-2.0

//! One model name on several devices: a copy of the weights and workers on each.
//!
//! Without a GPU the devices are the host and its NUMA node 0, which compute alike. With one
//! (BALLAST_TEST_DEVICE), they are the host and the GPU, which do not. With two
//! (BALLAST_TEST_SECOND_DEVICE), they are these.

mod swaps;
mod updates;

use std::collections::BTreeSet;
use std::path::Path;

use serde_json::{Value, json};

use crate::harness::api::{Continuation, TestRequest, generate_all, runtime};
use crate::harness::http::HttpClient;
use crate::harness::{
    FleetProcess, ServedFleet, ballast, demo_7m, demo_22m, device, eventually, first_json_line, gpu_name,
    gpu_uuid, proc, runs_on_host, second_gpu, serve_config, text,
};

/// The names of two devices in the configuration. `None`, with a SKIPPED line, if this machine has
/// only one.
fn two_devices(test: &str) -> Option<[String; 2]> {
    if let Some(second) = second_gpu() {
        return Some([device(), second]);
    }
    let second = match device().as_str() {
        "host" => "host:0".to_owned(),
        gpu => gpu.to_owned(),
    };
    let has_node = Path::new("/sys/devices/system/node/node0").exists();
    if second == "host:0" && !has_node {
        crate::harness::report_skipped(format_args!(
            "{test} needs a second device, and this kernel has no NUMA nodes"
        ));
    }
    (second != "host:0" || has_node).then(|| ["host".to_owned(), second])
}

/// Whether the devices have equal fingerprints, and weights of one layout.
fn are_alike(devices: &[String; 2]) -> bool {
    devices[0].starts_with("host") == devices[1].starts_with("host")
}

fn model(name: &str, path: &Path, devices: &[String], more: &str) -> String {
    format!(
        "[[models]]\nname = {name:?}\npath = {path:?}\ndevice = {devices:?}\nthreads = 1\nkv-tokens = 2048\n\
         {more}\n"
    )
}

fn requests(count: u64, tokens: u32) -> Vec<TestRequest> {
    let request = |seed: u64| TestRequest {
        model: "m".to_owned(),
        prompt: (0..20).map(|i| 10 + i * 13 + seed as u32).collect(),
        max_tokens: tokens,
        temperature: 0.7,
        seed,
        ..TestRequest::default()
    };
    (0..count).map(request).collect()
}

/// The copies of weights that are ready, each with its device and the models that use it.
fn copies(fleet: &ServedFleet) -> BTreeSet<String> {
    let lines = fleet.try_ps_lines().unwrap();
    let ready = lines.iter().filter(|line| line["role"] == "generation" && line["state"] == "ready");
    let words = |line: &Value| {
        let word = |key: &str| line[key].as_str().unwrap().to_owned();
        format!("{} {} {}", word("name"), short(&word("device")), line["used_by"])
    };
    ready.map(words).collect()
}

/// A GPU's UUID becomes the name that the test gave.
fn short(device: &str) -> String {
    // A worker that has not attached yet has the device of its configuration.
    match device.starts_with("host") || device.starts_with("cuda:") {
        true => device.to_owned(),
        // A test may name a GPU by its UUID.
        false if self::device() == device => device.to_owned(),
        false => gpu_name(device),
    }
}

fn expected_copies(devices: &[String], users: &str) -> BTreeSet<String> {
    devices.iter().map(|device| format!("model:m {device} {users}")).collect()
}

/// The devices of the running workers of a model.
fn worker_devices(fleet: &ServedFleet, model: &str) -> Vec<String> {
    let lines = fleet.try_ps_lines().unwrap_or_default();
    let is_running = |line: &&Value| line["model"] == model && line["state"] == "ready";
    let mut devices: Vec<String> = lines
        .iter()
        .filter(|line| line["role"] == "worker")
        .filter(is_running)
        .filter_map(|line| line["device"].as_str())
        .map(short)
        .collect();
    devices.sort_unstable();
    devices
}

#[track_caller]
fn await_workers(fleet: &ServedFleet, model: &str, expected: &[&String]) {
    let mut expected: Vec<String> = expected.iter().map(|device| (*device).clone()).collect();
    expected.sort_unstable();
    eventually(&format!("workers of {model} on {expected:?}"), || {
        (worker_devices(fleet, model) == expected).then_some(())
    });
}

/// What the supervisor says about a model.
fn model_line(fleet: &ServedFleet, name: &str) -> Option<Value> {
    let lines = fleet.try_ps_lines()?;
    lines.into_iter().find(|line| line["role"] == "model" && line["name"] == name)
}

fn process(fleet: &ServedFleet, name: &str) -> FleetProcess {
    fleet.processes().into_iter().find(|process| process.name == name).unwrap()
}

#[test]
fn one_name_has_a_copy_and_workers_on_each_device_and_uses_all_of_them() {
    let Some(devices) = two_devices("one name on two devices") else { return };
    let [first, second] = &devices;
    let config = model("m", &demo_7m(), &devices, "workers = 1");
    let fleet = ServedFleet::start_config(&format!("{config}[routing]\nmode = \"least-loaded\"\n"));
    assert_eq!(copies(&fleet), expected_copies(&devices, "[\"m\"]"));
    await_workers(&fleet, "m", &[first, second]);
    let http = HttpClient::connect(&fleet);
    let listed: Value = serde_json::from_str(&http.get("/v1/models").1).unwrap();
    assert_eq!((listed["data"].as_array().unwrap().len(), &listed["data"][0]["workers"]), (1, &json!(2)));
    let page = http.get("/metrics").1;
    let lines = |name: &str| page.lines().filter(|line| line.starts_with(name)).collect::<Vec<_>>();
    assert_eq!(lines("ballast:weights_bytes{").len(), 2, "{page}");
    for device in &devices {
        let label = format!("device=\"{}", if device.starts_with("host") { device } else { "GPU-" });
        assert!(lines("ballast:weights_workers{").iter().any(|line| line.contains(&label)), "{page}");
    }
    assert_eq!(lines("ballast:workers{"), ["ballast:workers{model_name=\"m\"} 2"]);
    assert_eq!(lines("ballast:num_permits{").len(), 1, "{page}");
    eventually("both copies are ready", || {
        let ready = http.get("/metrics").1;
        let ready = ready.lines().filter(|line| line.starts_with("ballast:weights_ready{"));
        (ready.filter(|line| line.ends_with(" 1")).count() == 2).then_some(())
    });

    let requests = requests(6, 200);
    let expected = runtime().block_on(generate_all(&fleet.grpc, &requests));
    let victim = process(&fleet, "worker-1");
    let mut on_victim = 0.0;
    let found = runtime().block_on(fleet.generate_during_fault(&requests, || {
        let placed = "ballast:num_streams_placed{model_name=\"m\",engine=\"worker-1\"}";
        on_victim = HttpClient::connect(&fleet).metric(placed).unwrap_or_default();
        proc::send_signal(victim.pid, "KILL");
    }));
    assert!(on_victim > 0.0, "the second device has streams too");
    // Devices that compute alike take each other's streams.
    if are_alike(&devices) {
        let resumes: u32 = found.iter().map(|found| found.as_ref().unwrap().resumes).sum();
        // A GPU may have ended all streams before the fault.
        assert!(resumes > 0 || device() != "host", "a stream moves to the other device");
        for (expected, found) in expected.iter().zip(&found) {
            let (expected, found) = (expected.as_ref().unwrap(), found.as_ref().unwrap());
            assert_eq!((&expected.tokens, &expected.text), (&found.tokens, &found.text));
        }
    }
    await_workers(&fleet, "m", &[first, second]);
    fleet.stop();
}

#[test]
fn i1_the_second_of_two_devices_that_start_at_once_copies_from_the_first() {
    let Some(devices) = two_devices("a copy of a copy") else { return };
    let config = model("m", &demo_22m(), &devices, "workers = 1");
    let fleet = ServedFleet::start_config(&config);
    await_workers(&fleet, "m", &[&devices[0], &devices[1]]);
    let lines = fleet.try_ps_lines().unwrap();
    let generations: Vec<&Value> = lines.iter().filter(|line| line["role"] == "generation").collect();
    let [one, two] = generations[..] else { panic!("{generations:?}") };
    let sources = [&one["copied_from"], &two["copied_from"]];
    if are_alike(&devices) {
        // Whichever load planned first has read the file.
        let is_copy = |copy: &Value, of: &Value| copy["copied_from"] == of["device"];
        assert!(is_copy(one, two) != is_copy(two, one), "{sources:?}");
        assert!(sources.iter().any(|source| source.is_null()), "{sources:?}");
        let copy = if one["copied_from"].is_null() { two } else { one };
        assert!(copy["copy_ms"].as_f64().unwrap() > 0.0, "{copy}");
    } else {
        // The layouts differ.
        assert!(sources.iter().all(|source| source.is_null()), "{sources:?}");
    }
    fleet.stop();
}

#[test]
fn commands_concern_the_copies_of_a_name_together_or_say_that_they_cannot() {
    let Some(devices) = two_devices("commands to a model on two devices") else { return };
    let [first, second] = &devices;
    let config = model("m", &demo_7m(), &devices, "workers = 1");
    let other = model("other", &demo_22m(), &devices[..1], "workers = 1");
    let directory = tempfile::Builder::new().prefix("ballast-test-").tempdir().unwrap();
    let runtime_dir = directory.path().join("run");
    let command = serve_config(&runtime_dir, &format!("{config}{other}"));
    let file = runtime_dir.with_extension("toml");
    let fleet = ServedFleet::start_command(directory, command);

    fleet.run(&["add-worker", "m"]);
    fleet.run(&["add-worker", "m"]);
    await_workers(&fleet, "m", &[first, first, second, second]);
    fleet.run(&["remove-worker", "worker-0"]);
    await_workers(&fleet, "m", &[first, second, second]);
    fleet.run(&["add-worker", "m"]);
    await_workers(&fleet, "m", &[first, first, second, second]);
    fleet.run(&["restart", "--rolling", "--model", "m"]);
    await_workers(&fleet, "m", &[first, first, second, second]);

    // One more on each device than the file said before.
    let wanted = model("m", &demo_7m(), &devices, "workers = 2");
    std::fs::write(&file, format!("{wanted}{other}")).unwrap();
    let reloaded = crate::harness::text(&fleet.run_command(&["reload"])).0;
    assert_eq!(reloaded.trim(), "workers of model m: 1 -> 2 on each of 2 devices");
    await_workers(&fleet, "m", &[first, first, first, second, second, second]);
    let fewer = model("m", &demo_7m(), &devices[..1], "workers = 2");
    std::fs::write(&file, format!("{fewer}{other}")).unwrap();
    let reloaded = crate::harness::text(&fleet.run_command(&["reload"])).0;
    let named = |device: &String| if device.starts_with("host") { device.clone() } else { gpu_uuid(device) };
    let expected = format!("devices of model m: {}, {} -> {}", named(first), named(second), named(first));
    assert_eq!(reloaded.trim(), expected);
    await_workers(&fleet, "m", &[first, first, first]);
    let elsewhere = model("m", &demo_7m(), &devices[1..], "workers = 2");
    std::fs::write(&file, format!("{elsewhere}{other}")).unwrap();
    let reloaded = text(&fleet.run_command(&["reload"])).0;
    assert!(
        reloaded.starts_with("not applied until the supervisor restarts: device of model m"),
        "{reloaded}"
    );

    fleet.run(&["unload", "m", "--timeout", "1s"]);
    eventually("both copies of m are gone", || {
        let left = copies(&fleet);
        (left.len() == 1 && left.iter().all(|copy| copy.starts_with("model:other "))).then_some(())
    });
    assert!(worker_devices(&fleet, "m").is_empty());
    fleet.stop();
}

#[test]
fn two_models_of_one_file_share_the_copy_on_a_device_that_both_name() {
    let Some(devices) = two_devices("two models that share a device") else { return };
    let config = model("m", &demo_7m(), &devices, "workers = 1");
    let both = model("both", &demo_7m(), &devices[1..], "workers = 1");
    let fleet = ServedFleet::start_config(&format!("{config}{both}"));
    let shared = || {
        BTreeSet::from([
            format!("model:m {} [\"m\"]", devices[0]),
            format!("model:m {} [\"both\",\"m\"]", devices[1]),
        ])
    };
    assert_eq!(copies(&fleet), shared());
    fleet.run(&["unload", "m"]);
    let left = BTreeSet::from([format!("model:m {} [\"both\"]", devices[1])]);
    eventually("only the shared copy is left", || (copies(&fleet) == left).then_some(()));
    let done = runtime().block_on(generate_all(
        &fleet.grpc,
        &[TestRequest { model: "both".to_owned(), ..requests(1, 10).remove(0) }],
    ));
    assert!(done[0].is_ok(), "{done:?}");
    fleet.stop();
}

#[test]
fn a_model_shares_the_copies_of_two_models_that_are_on_one_device_each() {
    let Some(devices) = two_devices("a model beside two others") else { return };
    let one = |name: &str, devices: &[String]| model(name, &demo_7m(), devices, "workers = 1");
    let config = [one("a", &devices[..1]), one("c", &devices[1..]), one("b", &devices)].concat();
    let fleet = ServedFleet::start_config(&config);
    let [first, second] = &devices;
    await_workers(&fleet, "b", &[first, second]);
    let shared =
        BTreeSet::from([format!("model:a {first} [\"a\",\"b\"]"), format!("model:c {second} [\"b\",\"c\"]")]);
    assert_eq!(copies(&fleet), shared);
    fleet.stop();
}

#[test]
fn a_model_that_could_not_be_loaded_is_not_loaded_by_the_next_weight_server() {
    if !runs_on_host("a load that fails") {
        return;
    }
    let small = "workers = 1\nctx-size = 64\nstep-tokens = 8\npack = false";
    let host = ["host".to_owned()];
    let (other, m) = (model("other", &demo_7m(), &host, small), model("m", &demo_22m(), &host, small));
    let folder = tempfile::tempdir().unwrap();
    let ((other_weights, other_worker), (weights, worker)) =
        (planned(&other, folder.path()), planned(&m, folder.path()));
    let budget = (weights + worker).max(other_weights + other_worker + weights / 2);
    assert!(budget < other_weights + other_worker + weights);
    let fleet = ServedFleet::start_config(&format!("host-budget = \"{budget}\"\n{other}"));
    let file = demo_22m();
    let arguments = "--workers 1 --threads 1 --kv-tokens 2048 --ctx-size 64 --step-tokens 8 --no-pack";
    let load = ["load", file.to_str().unwrap(), "--name", "m", "--device", "host"];
    let load = [&load[..], &arguments.split(' ').collect::<Vec<_>>()].concat();
    let said = fleet.refusal(&load);
    assert!(said.contains("are needed on host"), "{said}");
    fleet.run(&["unload", "other"]);
    let before = fleet.only_process("weight-server").pid;
    proc::send_signal(before, "KILL");
    eventually("the next weight-server", || {
        let next = fleet.processes_by_role("weight-server");
        (next.len() == 1 && next[0].pid != before).then_some(())
    });
    // A load would begin at once, and end long before this time has passed.
    std::thread::sleep(std::time::Duration::from_secs(1));
    assert_eq!(copies(&fleet), BTreeSet::new());
    assert_eq!(model_line(&fleet, "m").unwrap()["state"], "failed");
    fleet.run(&load);
    await_workers(&fleet, "m", &[&host[0]]);
    fleet.stop();
}

#[test]
fn a_successor_keeps_the_copies_that_its_list_still_names() {
    let Some(devices) = two_devices("a takeover with another list of devices") else { return };
    let [first, second] = &devices;
    let directory = tempfile::Builder::new().prefix("ballast-test-").tempdir().unwrap();
    let runtime_dir = directory.path().join("run");
    let config = |devices: &[String]| model("m", &demo_7m(), devices, "workers = 1");
    let mut fleet = ServedFleet::start_command(directory, serve_config(&runtime_dir, &config(&devices)));
    let pids = |fleet: &ServedFleet| -> Vec<u32> {
        fleet.processes_by_role("worker").iter().map(|worker| worker.pid).collect()
    };
    let succeed = |fleet: &mut ServedFleet, devices: &[String]| {
        proc::send_signal(fleet.only_process("weight-server").pid, "KILL");
        proc::send_signal(fleet.supervisor.id(), "KILL");
        fleet.supervisor.wait().unwrap();
        let mut successor = serve_config(&runtime_dir, &config(devices)).spawn().unwrap();
        first_json_line(&mut successor);
        fleet.supervisor = successor;
    };
    let before = pids(&fleet);
    assert_eq!(before.len(), 2);
    succeed(&mut fleet, &devices);
    eventually("both copies are adopted", || {
        (copies(&fleet) == expected_copies(&devices, "[\"m\"]")).then_some(())
    });
    assert_eq!(pids(&fleet), before, "no worker restarts");

    let host_worker = process(&fleet, "worker-0").pid;
    succeed(&mut fleet, &devices[..1]);
    eventually("the copy that the list lacks is unloaded", || {
        (copies(&fleet) == expected_copies(&devices[..1], "[\"m\"]")).then_some(())
    });
    await_workers(&fleet, "m", &[first]);
    // A process on a GPU takes time to end.
    eventually("only the other worker is left", || (pids(&fleet) == [host_worker]).then_some(()));
    succeed(&mut fleet, &devices);
    eventually("the second copy is loaded again", || {
        (copies(&fleet) == expected_copies(&devices, "[\"m\"]")).then_some(())
    });
    await_workers(&fleet, "m", &[first, second]);
    assert_eq!(process(&fleet, "worker-0").pid, host_worker);
    let done = runtime().block_on(generate_all(&fleet.grpc, &requests(4, 20)));
    assert!(done.iter().all(Result::is_ok), "{done:?}");
    fleet.stop();
}

/// Bytes that `ballast plan` names: weights and one worker.
fn planned(config: &str, folder: &Path) -> (u64, u64) {
    let file = folder.join("plan.toml");
    std::fs::write(&file, config).unwrap();
    let output = ballast().args(["plan", "--json", "--config"]).arg(&file).output().unwrap();
    let report: Value = serde_json::from_str(&text(&output).0).unwrap();
    let of = |part: &str| report["models"][0][part]["total"].as_u64().unwrap();
    (of("weights"), of("worker"))
}

/// A fleet with another model, into which m was loaded from `file` onto both devices, and which has
/// memory for one copy of m. `None`, with a SKIPPED line, where that cannot be.
fn short_of_memory(test: &str, file: &Path) -> Option<(ServedFleet, [String; 2])> {
    if !runs_on_host(test) {
        return None;
    }
    let devices = two_devices(test)?;
    // Without packing, the weights take more than the workers.
    let one = |name: &str, path: &Path| {
        let (device, small) = (&devices[..1], "ctx-size = 64\nstep-tokens = 8\npack = false");
        format!(
            "[[models]]\nname = {name:?}\npath = {path:?}\ndevice = {device:?}\nthreads = 1\nkv-tokens = 64\n\
             workers = 1\n{small}\n"
        )
    };
    let folder = tempfile::tempdir().unwrap();
    let (weights, worker) = planned(&one("m", file), folder.path());
    let (other_weights, other_worker) = planned(&one("other", &demo_7m()), folder.path());
    // Both copies of m never fit beside the other model, and they do without it.
    let budget = (other_weights + other_worker) + (weights + worker) + weights / 2;
    assert!(weights / 2 > worker && other_weights + other_worker > weights / 2 + worker);
    let other = one("other", &demo_7m());
    let fleet = ServedFleet::start_config(&format!("host-budget = \"{budget}\"\n{other}"));
    let small = "--workers 1 --threads 1 --kv-tokens 64 --ctx-size 64 --step-tokens 8 --no-pack";
    let load = ["load", file.to_str().unwrap(), "--name", "m", "--device", "host,host:0"];
    let output = fleet.run_command(&[&load[..], &small.split(' ').collect::<Vec<_>>()].concat());
    let (_, said) = text(&output);
    assert!(output.status.success() && said.contains("which is tried again"), "{said}");
    Some((fleet, devices))
}

#[test]
fn a_copy_that_cannot_be_loaded_is_named_and_comes_when_there_is_memory() {
    let Some((fleet, devices)) = short_of_memory("a copy that does not fit", &demo_22m()) else { return };
    let states = || {
        let line = model_line(&fleet, "m")?;
        let states: Vec<String> = line["copies"]
            .as_array()?
            .iter()
            .map(|copy| copy["state"].as_str().unwrap().to_owned())
            .collect();
        Some((line["state"].as_str()?.to_owned(), states))
    };
    let (model_state, found) = states().unwrap();
    assert_eq!(model_state, "ready");
    assert_eq!(found.iter().filter(|state| *state == "ready").count(), 1, "{found:?}");
    eventually("one worker of m runs", || (worker_devices(&fleet, "m").len() == 1).then_some(()));
    let http = HttpClient::connect(&fleet);
    let failed = eventually("the router knows it", || {
        let ready: Value = serde_json::from_str(&http.get("/ready").1).ok()?;
        let failed = ready["failed_copies"].as_array()?.clone();
        (failed.len() == 1).then(|| failed[0].clone())
    });
    let device = failed["device"].as_str().unwrap();
    assert_eq!(failed["model"], "m");
    let metric = format!("ballast:weights_failed{{model_name=\"m\",device=\"{device}\"}}");
    assert_eq!(http.metric(&metric), Some(1.0));
    let table = text(&fleet.run_command(&["ps"])).0;
    assert!(table.contains(&format!("  on {device}: failed: ")), "{table}");
    let done = runtime().block_on(generate_all(&fleet.grpc, &requests(2, 8)));
    assert!(done.iter().all(Result::is_ok), "the other copy serves: {done:?}");

    fleet.run(&["unload", "other"]);
    await_workers(&fleet, "m", &[&devices[0], &devices[1]]);
    assert_eq!(states().unwrap().1, ["ready", "ready"]);
    eventually("the router knows that too", || (http.metric(&metric) == Some(0.0)).then_some(()));
    fleet.stop();
}

#[test]
fn a_copy_with_other_content_than_the_others_is_refused_and_they_go_on() {
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("m.gguf");
    std::fs::copy(demo_22m(), &file).unwrap();
    let Some((fleet, _)) = short_of_memory("a file that is replaced", &file) else { return };
    let expected = runtime().block_on(generate_all(&fleet.grpc, &requests(2, 8)));
    let other = folder.path().join("other.gguf");
    std::fs::copy(demo_7m(), &other).unwrap();
    std::fs::rename(&other, &file).unwrap();
    fleet.run(&["unload", "other"]);
    eventually("the copy of the other file is refused", || {
        let line = model_line(&fleet, "m")?;
        let copies = line["copies"].as_array()?.clone();
        let refused = "the file has other content than the copy on ";
        let is_refused = |copy: &Value| copy["failure"].as_str().is_some_and(|why| why.starts_with(refused));
        (copies.iter().any(is_refused) && line["state"] == "ready").then_some(())
    });
    eventually("its weights are gone", || (copies(&fleet).len() == 1).then_some(()));
    assert_eq!(worker_devices(&fleet, "m").len(), 1);
    let done = runtime().block_on(generate_all(&fleet.grpc, &requests(2, 8)));
    let texts = |all: &[Result<Continuation, tonic::Status>]| -> Vec<String> {
        all.iter().map(|one| one.as_ref().unwrap().text.clone()).collect()
    };
    assert_eq!(texts(&done), texts(&expected));
    fleet.stop();
}

#[test]
fn a_fleet_starts_if_one_of_its_copies_can_be_loaded_and_not_if_none_can() {
    if !runs_on_host("the budget of the host") {
        return;
    }
    let Some(devices) = two_devices("a start with a copy that does not fit") else { return };
    let small = "workers = 1\nctx-size = 64\nstep-tokens = 8\npack = false";
    let config = model("m", &demo_22m(), &devices, small).replace("kv-tokens = 2048", "kv-tokens = 64");
    let folder = tempfile::tempdir().unwrap();
    let (weights, worker) = planned(&config, folder.path());
    let with_budget = |budget: u64| format!("host-budget = \"{budget}\"\n{config}");
    let fleet = ServedFleet::start_config(&with_budget(weights + worker + weights / 2));
    assert_eq!(copies(&fleet).len(), 1);
    assert_eq!(worker_devices(&fleet, "m").len(), 1);
    let done = runtime().block_on(generate_all(&fleet.grpc, &requests(1, 8)));
    assert!(done[0].is_ok(), "{done:?}");
    fleet.stop();

    let output = serve_config(&folder.path().join("run"), &with_budget(weights / 2)).output().unwrap();
    let (_, said) = text(&output);
    assert_eq!(output.status.code(), Some(4), "{said}");
    assert!(said.contains("cannot load") && said.contains("are missing"), "{said}");
}

#[test]
fn a_wrong_list_of_devices_is_refused_and_the_key_is_named() {
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("fleet.toml");
    let plan = |config: &str| {
        std::fs::write(&file, config).unwrap();
        let output = ballast().args(["plan", "--config"]).arg(&file).output().unwrap();
        let (printed, error) = text(&output);
        (output.status.code(), printed + &error)
    };
    let one = |name: &str, device: &str, more: &str| {
        format!("[[models]]\nname = {name:?}\npath = {:?}\ndevice = {device}\n{more}\n", demo_7m())
    };
    for (device, part) in [
        ("[]", "`device` is an empty list"),
        ("[\"host\", \"host\"]", "`device` names host twice"),
        ("[\"host\", \"gpu0\"]", "`device`: \"gpu0\" is not a device"),
        ("[\"host\", \"auto\"]", "`device`: \"auto\" chooses devices itself"),
        ("[\"host\", \"host:900\"]", "NUMA node 900 is not one of this machine"),
        ("[\"host\", \"cuda:900\"]", "`device` of model \"m\": cuda:900 cannot be used"),
    ] {
        let (code, said) = plan(&one("m", device, ""));
        assert!(code == Some(2) && said.contains(part), "{device}: {code:?} {said}");
    }
    let Some(devices) = two_devices("a draft model on two devices") else { return };
    let list = format!("{devices:?}");
    let draft = one("small", &list, "workers = 0");
    let (code, said) = plan(&format!("{}{draft}", one("m", "\"host\"", "draft = \"small\"")));
    assert!(code == Some(2) && said.contains("`device` of \"small\" names several devices"), "{said}");
    let draft = one("small", "\"host\"", "workers = 0");
    let (code, said) = plan(&format!("{}{draft}", one("m", &list, "draft = \"small\"")));
    assert!(code == Some(2) && said.contains("its `draft` is the model \"small\""), "{said}");

    let (_, said) = plan(&one("m", &list, "workers = 1\nkv-tokens = 256"));
    let names_host = said.contains("model m on host\n") && said.contains("\ndevice host: ");
    assert!(devices[0] != "host" || names_host, "{said}");
    assert_eq!(
        said.matches("\nmodel m on ").count() + usize::from(said.starts_with("model m on ")),
        2,
        "{said}"
    );
    if devices == ["host", "host:0"] {
        assert!(said.contains("model m on host:0\n") && said.contains("\ndevice host:0: "), "{said}");
        // Every GPU, and there is none.
        let (code, said) = plan(&one("m", "\"all\"", "workers = 1\nkv-tokens = 256"));
        assert!(code == Some(2) && said.contains("\"all\" means every GPU, and none can be used"), "{said}");
    }
}
