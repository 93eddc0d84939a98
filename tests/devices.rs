// SPDX-License-Identifier: Apache-2.0

//! Device choice, memory plans, and the doctor.

use crate::harness::admin::weight_server_status;
use crate::harness::api::runtime;
use crate::harness::{ServedFleet, ballast, demo_7m, demo_22m, device, synth, text};
use proto::fleet::v1::LoadModelRequest;
use proto::fleet::v1::fleet_client::FleetClient;
use proto::weights::v1::weight_server_client::WeightServerClient;
use proto::weights::v1::{DeviceMemory, LoadRequest, ReservationKind, device_memory};
use serde_json::Value;
use std::path::Path;

// As documented in docs/OPERATING.md.
const USAGE: i32 = 2;
const OUT_OF_RESOURCES: i32 = 4;

/// Most percent by which a plan may differ from the ledger.
const PLAN_PERCENT: f64 = 3.0;

pub(crate) fn plan(model: &Path, arguments: &[&str]) -> Value {
    let mut command = ballast();
    command.arg("plan").arg(model).args(["--json", "--device", &device()]).args(arguments);
    let output = command.output().unwrap();
    let (stdout, stderr) = text(&output);
    serde_json::from_str(&stdout).unwrap_or_else(|_| panic!("{stdout}{stderr}"))
}

/// Bytes of all ledger reservations of one kind.
fn reserved_bytes(fleet: &ServedFleet, kind: ReservationKind) -> Vec<u64> {
    let status = runtime().block_on(weight_server_status(fleet));
    let reservations = status.ledger.unwrap().reservations;
    reservations.iter().filter(|row| row.kind() == kind).map(|row| row.bytes).collect()
}

#[test]
fn a_plan_is_what_the_ledger_holds_later() {
    for (model, arguments) in [
        (demo_7m(), &["--workers", "2"][..]),
        (demo_22m(), &["--workers", "1", "--kv-tokens", "3000", "--no-pack"]),
        // Three workers that create their contexts at once, while the loader runs.
        (synth("qwen3-moe-tiny", "q8_0"), &["--workers", "3", "--kv-tokens", "2048"]),
        // Seven KV cache groups of two attention spans.
        (synth("gemma3-tiny", "q8_0"), &["--workers", "2"]),
    ] {
        let planned = plan(&model, arguments);
        let fleet = ServedFleet::start(&model, arguments);
        let planned = &planned["models"][0];
        let close = |what: &str, planned: &Value, found: u64| {
            let planned = planned.as_u64().unwrap();
            let percent = (found as f64 / planned as f64 - 1.0) * 100.0;
            assert!(percent.abs() <= PLAN_PERCENT, "{what}: {planned} planned, {found} in the ledger");
        };
        let weights = reserved_bytes(&fleet, ReservationKind::Weights);
        assert_eq!(weights.len(), 1);
        close("weights", &planned["weights"]["total"], weights[0]);
        let leases = reserved_bytes(&fleet, ReservationKind::Lease);
        assert_eq!(leases.len() as u64, planned["workers"].as_u64().unwrap());
        leases.iter().for_each(|&lease| close("a worker", &planned["worker"]["total"], lease));
        fleet.stop();
    }
}

#[test]
fn a_plan_that_does_not_fit_says_what_would() {
    let output = ballast()
        .arg("plan")
        .arg(demo_7m())
        .args(["--device", &device(), "--workers", "3", "--kv-bytes", "4096GiB"])
        .output()
        .unwrap();
    let (stdout, stderr) = text(&output);
    assert_eq!(output.status.code(), Some(OUT_OF_RESOURCES), "{stderr}");
    assert!(stdout.contains("too much"), "{stdout}");
    assert!(stderr.contains(" lacks ") && stderr.contains("0 of 3 workers fit"), "{stderr}");
}

#[test]
fn a_gpu_that_is_not_there_is_named_with_what_to_do() {
    for command in [&["generate", "--prompt", "x"][..], &["serve"], &["plan"]] {
        let output = ballast().args(command).arg(demo_7m()).args(["--device", "cuda:63"]).output().unwrap();
        let (stdout, stderr) = text(&output);
        assert_eq!((output.status.code(), stdout.as_str()), (Some(USAGE), ""), "{stderr}");
        assert!(stderr.starts_with("ballast: cuda:63 cannot be used: "), "{stderr}");
        assert!(stderr.ends_with("; --device host runs without a GPU\n"), "{stderr}");
    }
}

/// No machine has it.
const ABSENT_GPU: &str = "GPU-00112233-4455-6677-8899-aabbccddeeff";

/// A client that does not ask the driver itself.
#[test]
fn a_load_onto_a_gpu_that_the_fleet_does_not_see_is_refused_and_changes_nothing() {
    let fleet = ServedFleet::start(&demo_7m(), &["--workers", "1"]);
    let before = fleet.processes();
    let load = |device: &str| {
        runtime().block_on(async {
            let channel = service::grpc::connect(&fleet.runtime_dir().join("supervisor.sock")).await.unwrap();
            let request = LoadModelRequest {
                name: "second".to_owned(),
                path: demo_22m().to_str().unwrap().to_owned(),
                workers: 1,
                device: device.to_owned(),
                ..LoadModelRequest::default()
            };
            FleetClient::new(channel).load_model(request).await.map(drop).unwrap_err()
        })
    };
    for (device, why) in [(ABSENT_GPU, ""), ("cuda:0", "it is no device; a load names \"host\"")] {
        let refusal = load(device);
        assert_eq!(refusal.code(), tonic::Code::InvalidArgument, "{refusal:?}");
        let text = format!("`device` of model \"second\": {device} cannot be used: {why}");
        assert!(refusal.message().starts_with(&text), "{}", refusal.message());
    }
    let pids = |processes: Vec<crate::harness::FleetProcess>| -> Vec<u32> {
        processes.iter().map(|process| process.pid).collect()
    };
    assert_eq!(pids(fleet.processes()), pids(before), "no process came or went");
    fleet.stop();
}

/// A loader would begin with the context of the GPU. This one has no GPU, and fails.
#[test]
fn the_weight_server_hears_of_a_gpu_with_the_first_load_onto_it() {
    let fleet = ServedFleet::start(&demo_7m(), &["--workers", "1"]);
    let load = |device_memory: Option<DeviceMemory>| {
        runtime().block_on(async {
            let socket = fleet.runtime_dir().join("weights-admin.sock");
            let channel = service::grpc::connect(&socket).await.unwrap();
            let request = LoadRequest {
                model: "second".to_owned(),
                path: demo_22m().to_str().unwrap().to_owned(),
                device: ABSENT_GPU.to_owned(),
                no_packing: false,
                device_memory,
            };
            let mut events = WeightServerClient::new(channel).load(request).await.unwrap().into_inner();
            loop {
                match events.message().await {
                    Ok(Some(_)) => {}
                    Ok(None) => panic!("the load has no outcome"),
                    Err(status) => return status.message().to_owned(),
                }
            }
        })
    };
    let row = || {
        let ledger = runtime().block_on(weight_server_status(&fleet)).ledger.unwrap();
        ledger.devices.into_iter().find(|row| row.device == ABSENT_GPU)
    };
    let refusal = load(None);
    assert!(refusal.starts_with(&format!("there is no device {ABSENT_GPU}: known are ")), "{refusal}");
    assert!(row().is_none());
    let memory = DeviceMemory { budget: Some(device_memory::Budget::Bytes(1 << 30)), numa_node: None };
    let failure = load(Some(memory));
    assert!(!failure.starts_with("there is no device"), "{failure}");
    let row = row().unwrap();
    assert_eq!((row.capacity_bytes, row.reserved_bytes), (1 << 30, 0), "{failure}");
    fleet.stop();
}

#[test]
fn what_is_no_device_is_refused_before_anything_starts() {
    let output = ballast().arg("plan").arg(demo_7m()).args(["--device", "gpu0"]).output().unwrap();
    let (_, stderr) = text(&output);
    assert_eq!(output.status.code(), Some(USAGE), "{stderr}");
    assert!(
        stderr.contains("\"gpu0\" is not a device; use auto, host, host:0, cuda:0, or a UUID"),
        "{stderr}"
    );
}

#[test]
fn devices_are_listed_or_their_absence_is_explained() {
    let output = ballast().args(["devices", "--json"]).output().unwrap();
    let (stdout, stderr) = text(&output);
    assert!(output.status.success(), "{stderr}");
    let seen: Value = serde_json::from_str(&stdout).unwrap();
    let gpus = seen["gpus"].as_array().unwrap().len();
    assert_eq!(gpus == 0, seen["problem"].is_string(), "{seen}");
}

#[test]
fn the_choice_is_said_with_its_reason() {
    let output = ballast().arg("plan").arg(demo_7m()).args(["--json", "--device", "auto"]).output().unwrap();
    let (stdout, _) = text(&output);
    let plan: Value = serde_json::from_str(&stdout).unwrap();
    assert!(plan["models"][0]["why"].as_str().is_some_and(|why| !why.is_empty()), "{plan}");
    // With an explicit device there is no reason to print.
    let output = ballast().arg("plan").arg(demo_7m()).args(["--json", "--device", "host"]).output().unwrap();
    let plan: Value = serde_json::from_str(&text(&output).0).unwrap();
    assert_eq!((&plan["models"][0]["device"], &plan["models"][0]["why"]), (&"host".into(), &Value::Null));
}

/// The doctor starts two processes and kills one, as a fleet may.
#[test]
fn the_doctor_finds_this_machine_sound() {
    let output = ballast().args(["doctor", "--json"]).output().unwrap();
    let (stdout, stderr) = text(&output);
    assert!(output.status.success(), "{stdout}{stderr}");
    let report: Value = serde_json::from_str(&stdout).unwrap();
    assert_eq!(report["ok"], true);
    let findings = report["findings"].as_array().unwrap();
    for check in ["memfd seals", "huge pages", "descriptors", "locked memory", "memory", "hand-off", "copy"] {
        let found = findings.iter().find(|finding| finding["part"] == "host" && finding["check"] == check);
        assert!(found.is_some_and(|finding| finding["verdict"] != "failed"), "{check}: {report}");
    }
    assert!(findings.iter().any(|finding| finding["part"] == "driver"), "{report}");
}
