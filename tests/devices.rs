// SPDX-License-Identifier: Apache-2.0

//! Device choice, memory plans, and the doctor.

use crate::harness::admin::weight_server_status;
use crate::harness::api::runtime;
use crate::harness::{ServedFleet, ballast, demo_7m, demo_22m, device, synth, text};
use proto::weights::v1::ReservationKind;
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
