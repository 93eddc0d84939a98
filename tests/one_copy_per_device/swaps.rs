// SPDX-License-Identifier: Apache-2.0

//! Swaps of a model on several devices: the new file is on all of them, or on none.

use std::collections::BTreeSet;
use std::path::Path;

use super::{
    are_alike, await_workers, copies, expected_copies, model, model_line, planned, requests, two_devices,
};
use crate::harness::api::{generate_all, runtime};
use crate::harness::{ServedFleet, demo_7m, demo_22m, eventually, runs_on_host};

#[test]
fn a_swap_replaces_the_copies_on_all_devices_or_none() {
    let Some(devices) = two_devices("a swap on two devices") else { return };
    let is_alike = are_alike(&devices);
    let [first, second] = &devices;
    let config = model("m", &demo_7m(), &devices, "workers = 1");
    let fleet = ServedFleet::start_config(&format!("{config}[routing]\nmode = \"least-loaded\"\n"));
    await_workers(&fleet, "m", &[first, second]);
    fleet.run(&["add-worker", "m"]);
    await_workers(&fleet, "m", &[first, first, second]);
    let path = || model_line(&fleet, "m").unwrap()["path"].clone();
    let before = path();

    let folder = tempfile::tempdir().unwrap();
    let damaged = folder.path().join("cut.gguf");
    let bytes = std::fs::read(demo_22m()).unwrap();
    std::fs::write(&damaged, &bytes[..bytes.len() - 4096]).unwrap();
    fleet.refusal(&["swap", "m", damaged.to_str().unwrap()]);
    assert_eq!((path(), copies(&fleet)), (before, expected_copies(&devices, "[\"m\"]")));
    await_workers(&fleet, "m", &[first, first, second]);

    let requests = requests(6, 100);
    let old = runtime().block_on(generate_all(&fleet.grpc, &requests));
    let file = demo_22m();
    // Streams of the old file end whole, while the new one takes over.
    let during = runtime().block_on(
        fleet.generate_during_fault(&requests, || fleet.run(&["swap", "m", file.to_str().unwrap()])),
    );
    for (old, during) in old.iter().zip(&during) {
        let (old, during) = (&old.as_ref().unwrap().tokens, &during.as_ref().unwrap().tokens);
        // On another device a request may have other tokens, but as many.
        assert!(old == during || (!is_alike && old.len() == during.len()), "{old:?} {during:?}");
    }
    assert_eq!(path(), file.to_str().unwrap());
    let swapped: BTreeSet<String> =
        devices.iter().map(|device| format!("model:m#2 {device} [\"m\"]")).collect();
    assert_eq!(copies(&fleet), swapped);
    await_workers(&fleet, "m", &[first, first, second]);
    let new = runtime().block_on(generate_all(&fleet.grpc, &requests));
    for (old, new) in old.iter().zip(&new) {
        assert_ne!(old.as_ref().unwrap().tokens, new.as_ref().unwrap().tokens);
    }
    fleet.stop();
}

#[test]
fn a_swap_that_fits_on_one_of_two_devices_is_undone() {
    if !runs_on_host("a swap without memory") {
        return;
    }
    let Some(devices) = two_devices("a swap without memory") else { return };
    let small = "workers = 1\nctx-size = 64\nstep-tokens = 8";
    let one = |path: &Path, devices: &[String]| model("m", path, devices, small);
    let folder = tempfile::tempdir().unwrap();
    let (weights, worker) = planned(&one(&demo_7m(), &devices[..1]), folder.path());
    let (new_weights, _) = planned(&one(&demo_22m(), &devices[..1]), folder.path());
    // One copy of the new file fits beside the two of the old one.
    let budget = 2 * (weights + worker) + new_weights + new_weights / 2;
    let config = one(&demo_7m(), &devices);
    let fleet = ServedFleet::start_config(&format!("host-budget = \"{budget}\"\n{config}"));
    await_workers(&fleet, "m", &[&devices[0], &devices[1]]);
    let file = demo_22m();
    let said = fleet.refusal(&["swap", "m", file.to_str().unwrap()]);
    assert!(said.contains("are needed on host"), "{said}");
    eventually("nothing of the new file is left", || {
        (copies(&fleet) == expected_copies(&devices, "[\"m\"]")).then_some(())
    });
    let done = runtime().block_on(generate_all(&fleet.grpc, &requests(4, 20)));
    assert!(done.iter().all(Result::is_ok), "{done:?}");
    fleet.stop();
}
