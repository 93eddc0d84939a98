// SPDX-License-Identifier: Apache-2.0

//! Updates of a model on two devices while streams run: each stream is equal to its reference.
//! `swaps` has the swaps.

use std::path::{Path, PathBuf};

use super::{are_alike, await_workers, copies, expected_copies, model, requests, two_devices};
use crate::harness::api::{TestRequest, runtime};
use crate::harness::upgrade::{complete_all, complete_during, copy_of_executable, serve_with};
use crate::harness::{ServedFleet, demo_7m, eventually, report_skipped, serve_config, text};

/// A fleet with a model on devices that compute alike.
struct UpdatedFleet {
    fleet: ServedFleet,
    devices: [String; 2],
    config: PathBuf,
    requests: Vec<TestRequest>,
    expected: Vec<Vec<u32>>,
}

fn config(devices: &[String]) -> String {
    let model = model("m", &demo_7m(), devices, "workers = 1");
    format!("{model}[routing]\nmode = \"least-loaded\"\n[router]\ndrain = \"300s\"\n")
}

impl UpdatedFleet {
    /// `program` is the executable; `None`, with a SKIPPED line, if a stream may have other tokens
    /// on the other device.
    fn start(test: &str, used: usize, program: Option<&Path>) -> Option<Self> {
        let devices = two_devices(test)?;
        if !are_alike(&devices) {
            report_skipped(format_args!("{test} needs two devices that compute alike"));
            return None;
        }
        let directory = tempfile::Builder::new().prefix("ballast-test-").tempdir().unwrap();
        let runtime_dir = directory.path().join("run");
        let mut command = serve_config(&runtime_dir, &config(&devices[..used]));
        if let Some(program) = program {
            command = serve_with(program, &command);
        }
        let fleet = ServedFleet::start_command(directory, command);
        let requests = requests(4, 150);
        let expected = runtime().block_on(complete_all(&fleet.grpc, &requests));
        Some(Self { fleet, devices, config: runtime_dir.with_extension("toml"), requests, expected })
    }

    /// Streams run during the change.
    fn assert_whole_during(&mut self, what: &str, change: impl FnOnce(&mut ServedFleet)) {
        let grpc = self.fleet.grpc.clone();
        let rounds = complete_during(&grpc, &self.requests, &self.expected, || change(&mut self.fleet));
        assert!(rounds > 0);
        eprintln!("measured: {} streams were whole during {what}", rounds * self.requests.len());
    }

    fn reload(&self, devices: &[String]) -> String {
        std::fs::write(&self.config, config(devices)).unwrap();
        let output = self.fleet.run_command(&["reload"]);
        assert!(output.status.success(), "{output:?}");
        text(&output).0
    }
}

fn await_copies(fleet: &ServedFleet, devices: &[String]) {
    eventually(&format!("copies on {devices:?}"), || {
        (copies(fleet) == expected_copies(devices, "[\"m\"]")).then_some(())
    });
}

#[test]
fn i6_streams_are_whole_while_a_reload_adds_a_device_and_takes_one_away() {
    let test = "a reload of the list of devices";
    let Some(mut updated) = UpdatedFleet::start(test, 1, None) else { return };
    let [first, second] = updated.devices.clone();
    let devices = [first.clone(), second.clone()];
    await_copies(&updated.fleet, &devices[..1]);
    let grpc = updated.fleet.grpc.clone();
    let rounds = complete_during(&grpc, &updated.requests, &updated.expected, || {
        let changed = updated.reload(&devices);
        assert!(changed.starts_with("devices of model m: "), "{changed}");
        await_workers(&updated.fleet, "m", &[&first, &second]);
        await_copies(&updated.fleet, &devices);
        updated.reload(&devices[1..]);
        await_workers(&updated.fleet, "m", &[&second]);
        await_copies(&updated.fleet, &devices[1..]);
    });
    assert!(rounds > 0);
    eprintln!("measured: {} streams were whole during {test}", rounds * updated.requests.len());
    updated.fleet.run(&["add-worker", "m"]);
    await_workers(&updated.fleet, "m", &[&second, &second]);
    // A successor reads the new list.
    updated.fleet.succeed(serve_config(updated.fleet.runtime_dir(), &config(&devices[1..])));
    await_copies(&updated.fleet, &devices[1..]);
    updated.fleet.stop();
}

#[test]
fn i6_streams_are_whole_while_the_workers_of_two_devices_restart_one_after_the_other() {
    let Some(mut updated) = UpdatedFleet::start("a rolling restart on two devices", 2, None) else { return };
    let pids = |fleet: &ServedFleet| -> Vec<u32> {
        fleet.processes_by_role("worker").iter().map(|worker| worker.pid).collect()
    };
    let before = pids(&updated.fleet);
    updated.assert_whole_during("a rolling restart on two devices", |fleet| {
        fleet.run(&["restart", "--rolling", "--model", "m"]);
    });
    let after = pids(&updated.fleet);
    assert!(after.len() == 2 && after.iter().all(|pid| !before.contains(pid)), "{before:?} {after:?}");
    await_workers(&updated.fleet, "m", &[&updated.devices[0], &updated.devices[1]]);
    updated.fleet.stop();
}

#[test]
fn i6_streams_are_whole_while_another_executable_takes_over_two_devices() {
    let folder = tempfile::tempdir().unwrap();
    let (old, new) = (copy_of_executable(folder.path(), "old"), copy_of_executable(folder.path(), "new"));
    let test = "an upgrade on two devices";
    let Some(mut updated) = UpdatedFleet::start(test, 2, Some(&old)) else { return };
    let devices = updated.devices.clone();
    updated.assert_whole_during(test, |fleet| {
        std::fs::remove_file(&old).unwrap();
        fleet.succeed(serve_with(&new, &serve_config(fleet.runtime_dir(), &config(&devices))));
        fleet.replace_processes(&new);
    });
    await_workers(&updated.fleet, "m", &[&devices[0], &devices[1]]);
    await_copies(&updated.fleet, &devices);
    updated.fleet.stop();
}
