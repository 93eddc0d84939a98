// SPDX-License-Identifier: Apache-2.0

//! A device that is taken out of service: its streams go on elsewhere, other devices do not notice,
//! and everybody who asks is told why.

use std::path::Path;
use std::time::{Duration, Instant};

use proto::fleet::v1::DeviceReport;
use serde_json::{Value, json};

use crate::harness::admin::report_device;
use crate::harness::api::{TestRequest, generate_all, runtime};
use crate::harness::http::HttpClient;
use crate::harness::{ServedFleet, demo_7m, demo_22m, eventually, proc, runs_on_host, serve_config, text};

const FIRST: &str = "host";
const SECOND: &str = "host:0";

/// Whether this machine has both devices; says so if not.
fn has_devices(test: &str) -> bool {
    if !runs_on_host(test) {
        return false;
    }
    let has_node = Path::new("/sys/devices/system/node/node0").exists();
    if !has_node {
        crate::harness::report_skipped(format_args!("{test} needs a kernel with NUMA nodes"));
    }
    has_node
}

fn model(name: &str, path: &Path, devices: &[&str]) -> String {
    format!(
        "[[models]]\nname = {name:?}\npath = {path:?}\ndevice = {devices:?}\nworkers = 1\nthreads = 1\n\
         kv-tokens = 4096\n"
    )
}

/// Model `m` on both devices; streams are spread over them.
fn config() -> String {
    format!("{}[routing]\nmode = \"least-loaded\"\n", model("m", &demo_7m(), &[FIRST, SECOND]))
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

fn line(fleet: &ServedFleet, name: &str) -> Option<Value> {
    fleet.try_ps_lines()?.into_iter().find(|line| line["name"] == name)
}

fn device(fleet: &ServedFleet, name: &str) -> Option<Value> {
    line(fleet, &format!("device:{name}"))
}

/// The process ids of the ready workers of model `m` on a device.
fn workers_on(fleet: &ServedFleet, device: &str) -> Vec<u64> {
    let lines = fleet.try_ps_lines().unwrap_or_default();
    let workers = lines.iter().filter(|line| line["role"] == "worker" && line["state"] == "ready");
    let workers = workers.filter(|line| line["model"] == "m" && line["device"] == device);
    workers.map(|line| line["pid"].as_u64().unwrap()).collect()
}

fn copies_on(fleet: &ServedFleet, device: &str) -> usize {
    let lines = fleet.try_ps_lines().unwrap();
    lines.iter().filter(|line| line["role"] == "generation" && line["device"] == device).count()
}

fn await_workers(fleet: &ServedFleet) {
    eventually("a worker on each device", || {
        [FIRST, SECOND].iter().all(|device| workers_on(fleet, device).len() == 1).then_some(())
    });
}

fn get(fleet: &ServedFleet, path: &str) -> Value {
    serde_json::from_str(&HttpClient::connect(fleet).get(path).1).unwrap()
}

#[test]
fn streams_of_a_quarantined_device_go_on_elsewhere_until_a_command_returns_it() {
    if !has_devices("a quarantined device") {
        return;
    }
    let directory = tempfile::Builder::new().prefix("ballast-test-").tempdir().unwrap();
    let runtime_dir = directory.path().join("run");
    let mut fleet = ServedFleet::start_command(directory, serve_config(&runtime_dir, &config()));
    await_workers(&fleet);
    let untouched = workers_on(&fleet, FIRST);
    let requests = requests(6, 300);
    let expected = runtime().block_on(generate_all(&fleet.grpc, &requests));
    let found = runtime().block_on(fleet.generate_during_fault(&requests, || {
        fleet.run(&["quarantine", SECOND, "--reason", "the fan is loud"]);
    }));
    let resumes: u32 = found.iter().map(|found| found.as_ref().unwrap().resumes).sum();
    assert!(resumes > 0, "a stream moves to the other device");
    for (expected, found) in expected.iter().zip(&found) {
        let (expected, found) = (expected.as_ref().unwrap(), found.as_ref().unwrap());
        assert_eq!((&expected.tokens, &expected.text), (&found.tokens, &found.text));
    }

    eventually("what the device held is gone", || {
        (workers_on(&fleet, SECOND).is_empty() && copies_on(&fleet, SECOND) == 0).then_some(())
    });
    assert_eq!(workers_on(&fleet, FIRST), untouched, "the other device does not notice");
    let known = json!([{"device": SECOND, "reason": "the fan is loud"}]);
    eventually("the router knows", || (get(&fleet, "/health")["quarantined_devices"] == known).then_some(()));
    assert_eq!(get(&fleet, "/ready")["quarantined_devices"], known);
    let metric = |device: &str| {
        HttpClient::connect(&fleet).metric(&format!("ballast:device_quarantined{{device=\"{device}\"}}"))
    };
    assert_eq!((metric(FIRST), metric(SECOND)), (Some(0.0), Some(1.0)));
    let quarantine = device(&fleet, SECOND).unwrap()["quarantine"].clone();
    assert_eq!((&quarantine["reason"], &quarantine["ends_in_ms"]), (&json!("the fan is loud"), &Value::Null));
    let table = text(&fleet.run_command(&["ps"])).0;
    assert!(table.contains("(until a command ends it): the fan is loud"), "{table}");

    // Nothing comes back by other ways.
    fleet.run(&["add-worker", "m"]);
    eventually("the new worker is on the other device", || {
        (workers_on(&fleet, FIRST).len() == 2).then_some(())
    });
    let said = fleet.refusal(&["swap", "m", demo_22m().to_str().unwrap()]);
    assert!(said.contains("host:0 is quarantined: the fan is loud"), "{said}");
    let weight_server = fleet.only_process("weight-server").pid;
    proc::send_signal(weight_server, "KILL");
    eventually("the next weight-server", || {
        let next = fleet.processes_by_role("weight-server");
        next.iter().any(|next| next.pid != weight_server && next.state == "ready").then_some(())
    });
    fleet.take_over(|| (), serve_config(fleet.runtime_dir(), &config()));
    eventually("the successor knows", || {
        (device(&fleet, SECOND)?["quarantine"]["reason"] == "the fan is loud").then_some(())
    });
    // A worker would start at once, and be ready long before this time has passed.
    std::thread::sleep(Duration::from_secs(1));
    assert!(workers_on(&fleet, SECOND).is_empty() && copies_on(&fleet, SECOND) == 0);

    fleet.run(&["quarantine", SECOND, "--end"]);
    eventually("the device serves again", || (workers_on(&fleet, SECOND).len() == 1).then_some(()));
    assert_eq!(copies_on(&fleet, SECOND), 1);
    assert_eq!(device(&fleet, SECOND).unwrap()["quarantine"], Value::Null);
    let again = runtime().block_on(generate_all(&fleet.grpc, &requests));
    assert!(expected.iter().zip(&again).all(|(e, a)| e.as_ref().unwrap().text == a.as_ref().unwrap().text));
    let said = fleet.refusal(&["quarantine", SECOND, "--end"]);
    assert!(said.contains("host:0 is not quarantined"), "{said}");
    let said = fleet.refusal(&["quarantine", "host:7"]);
    assert!(said.contains("no model of this fleet uses the device \"host:7\""), "{said}");
    fleet.stop();
}

#[test]
fn faults_that_the_driver_reports_quarantine_their_device_at_once() {
    if !has_devices("a fault of a device") {
        return;
    }
    let alone = model("alone", &demo_22m(), &[SECOND]);
    let fleet = ServedFleet::start_config(&format!("{alone}{}", config()));
    await_workers(&fleet);
    let report = |more: DeviceReport| DeviceReport { device: SECOND.to_owned(), ..more };
    // A process that reads beyond its memory, and a device that is not of this fleet.
    runtime().block_on(async {
        report_device(&fleet, report(DeviceReport { new_xids: vec![31], ..DeviceReport::default() })).await;
        let other =
            DeviceReport { device: "GPU-x".to_owned(), new_xids: vec![79], ..DeviceReport::default() };
        report_device(&fleet, other).await;
    });
    let known = device(&fleet, SECOND).unwrap();
    assert_eq!((&known["xids"], &known["quarantine"]), (&json!({"31": 1}), &Value::Null));
    assert_eq!(device(&fleet, "GPU-x"), None);

    let requests = requests(6, 300);
    let expected = runtime().block_on(generate_all(&fleet.grpc, &requests));
    let began = Instant::now();
    let found = runtime().block_on(fleet.generate_during_fault(&requests, || {
        let lost = report(DeviceReport { new_xids: vec![79], ..DeviceReport::default() });
        runtime().block_on(report_device(&fleet, lost));
    }));
    for (expected, found) in expected.iter().zip(&found) {
        assert_eq!(expected.as_ref().unwrap().text, found.as_ref().unwrap().text, "{:?}", began.elapsed());
    }
    let reason = "Xid 79: the GPU has fallen off the bus";
    let known = eventually("the device is quarantined", || {
        device(&fleet, SECOND).filter(|device| device["quarantine"]["reason"] == reason)
    });
    assert!(known["quarantine"]["ends_in_ms"].as_u64().unwrap() > 40_000, "{known}");
    let http = HttpClient::connect(&fleet);
    let xids = format!("ballast:device_xid_errors_total{{device=\"{SECOND}\",xid=\"79\"}}");
    eventually("the metric", || (http.metric(&xids) == Some(1.0)).then_some(()));

    // A model without another device says why it does not serve; others do.
    let ask = |model: &str| {
        let body = json!({"model": model, "prompt": "def f(", "max_tokens": 4});
        http.post("/v1/completions", &body)
    };
    let why = format!("it cannot be loaded: {SECOND} is quarantined: {reason}");
    eventually("the model is refused with the reason", || {
        let (status, body) = ask("alone");
        assert!(status == 503 || status == 200, "{status} {body}");
        body.contains(&why).then_some(())
    });
    assert_eq!(ask("m").0, 200);
    let file = demo_22m();
    let load = ["load", file.to_str().unwrap(), "--name", "new", "--device", SECOND, "--threads", "1"];
    let said = fleet.refusal(&load);
    assert!(said.contains(reason), "{said}");

    // An idle model cannot be woken meanwhile, and can be as soon as its device is back.
    fleet.run(&["unload", "alone", "--idle"]);
    eventually("the wake fails", || {
        ask("alone");
        let line = line(&fleet, "alone").filter(|line| line["role"] == "model")?;
        (line["state"] == "idle" && line["failure"].as_str()?.contains(reason)).then_some(())
    });
    fleet.run(&["quarantine", SECOND, "--end"]);
    let returned = Instant::now();
    eventually("the idle model is served", || (ask("alone").0 == 200).then_some(()));
    // A wake that has failed is tried again after 30 s.
    assert!(returned.elapsed() < Duration::from_secs(20), "{:?}", returned.elapsed());
    eventually("a worker of m is back", || (workers_on(&fleet, SECOND).len() == 1).then_some(()));
    fleet.stop();
}
