// SPDX-License-Identifier: Apache-2.0

//! Kills the owners of weights on a GPU. `tests/faults.rs` has the cases for every device; this
//! file adds the checks that need a GPU.

use super::{Gpu, asks};
use crate::harness::api::{generate_all, runtime};
use crate::harness::{ServedFleet, demo_7m, eventually, proc};

/// Returns the name of a driver library that is mapped into the process.
fn driver_of(pid: u32) -> Option<String> {
    let names = proc::mappings(pid).into_iter().map(|mapping| mapping.name);
    names.into_iter().find(|name| name.contains("libcuda") || name.contains("libnvidia"))
}

/// The device-monitor is left out: it has NVML, which loads the driver without initializing it.
fn assert_only_workers_have_the_driver(fleet: &ServedFleet) {
    for process in fleet.processes().into_iter().filter(|process| process.role != "device-monitor") {
        let found = driver_of(process.pid);
        assert_eq!(found.is_some(), process.role == "worker", "{}: {found:?}", process.name);
    }
}

#[test]
fn i3_weights_outlive_every_process_but_the_fd_store() {
    let Some(gpu) = Gpu::here("i3_weights_outlive_every_process_but_the_fd_store") else { return };
    let baseline = gpu.used();
    let folder = tempfile::tempdir().unwrap();
    let model = folder.path().join("model.gguf");
    std::fs::copy(demo_7m(), &model).unwrap();
    let fleet = ServedFleet::start(&model, &["--workers", "2"]);
    std::fs::remove_file(&model).unwrap();
    assert_only_workers_have_the_driver(&fleet);
    let expected = runtime().block_on(generate_all(&fleet.grpc, &asks(4, 40, 100)));

    let killed: Vec<u32> =
        fleet.processes().iter().filter(|p| p.role != "supervisor").map(|p| p.pid).collect();
    for pid in &killed {
        proc::send_signal(*pid, "KILL");
    }
    eventually("the fleet is back", || {
        let now = fleet.try_processes()?;
        let back = now.iter().filter(|p| p.role != "supervisor" && !killed.contains(&p.pid));
        (back.filter(|p| p.state == "ready").count() == killed.len()).then_some(())
    });
    // The file is deleted, so no process can have opened it. A separate process checks the adopted
    // weights against their checksums.
    fleet.wait_until_verified();
    assert_only_workers_have_the_driver(&fleet);
    let again = eventually("requests are served", || {
        let again = runtime().block_on(generate_all(&fleet.grpc, &asks(4, 40, 100)));
        again.iter().all(Result::is_ok).then_some(again)
    });
    for (expected, again) in expected.iter().zip(&again) {
        let (expected, again) = (expected.as_ref().unwrap(), again.as_ref().unwrap());
        assert_eq!(expected.tokens, again.tokens);
        assert_eq!(expected.logprob_bits, again.logprob_bits);
    }
    fleet.stop();
    gpu.assert_back_at(baseline);
}
