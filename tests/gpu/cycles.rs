// SPDX-License-Identifier: Apache-2.0

//! Loads, attaches, kills and unloads a hundred times. Afterwards, device memory and descriptors
//! are back at their baseline.

use super::Gpu;
use crate::harness::{ServedFleet, demo_7m, device, eventually, proc, text};
use std::path::{Path, PathBuf};

/// The number of lanes that run at the same time. Each lane has its own model.
const LANES: usize = 4;
const CYCLES: usize = 100;

#[test]
fn i4_device_and_descriptors_are_at_their_baseline_after_a_hundred_lives() {
    let Some(gpu) = Gpu::here("i4_device_and_descriptors_are_at_their_baseline_after_a_hundred_lives") else {
        return;
    };
    let fleet = ServedFleet::start(&demo_7m(), &["--workers", "1"]);
    // The weight-server loads each file only once, so each lane has its own file.
    let folder = tempfile::tempdir().unwrap();
    let models: Vec<PathBuf> =
        (0..LANES).map(|lane| folder.path().join(format!("lane-{lane}.gguf"))).collect();
    for model in &models {
        std::fs::copy(demo_7m(), model).unwrap();
    }
    // One cycle before the measurement, so that everything made on first use exists.
    live_and_die(&fleet, &models[0]);
    let descriptors = || {
        let holders = ["weight-server", "supervisor"].map(|role| fleet.only_process(role).pid);
        holders.map(|pid| proc::open_files(pid).len())
    };
    let (baseline, descriptors_before) = (gpu.used(), descriptors());
    let started = std::time::Instant::now();
    std::thread::scope(|scope| {
        for model in &models {
            scope.spawn(|| (0..CYCLES / LANES).for_each(|_| live_and_die(&fleet, model)));
        }
    });
    eprintln!("measured: {CYCLES} lives in {:.1} s", started.elapsed().as_secs_f64());
    gpu.assert_back_at(baseline);
    eventually("descriptors are back at their baseline", || {
        let now = descriptors();
        (now[0] <= descriptors_before[0] && now[1] <= descriptors_before[1]).then_some(())
    });
    fleet.stop();
}

fn live_and_die(fleet: &ServedFleet, model: &Path) {
    let name = model.file_stem().unwrap().to_str().unwrap();
    let run_command = |arguments: &[&str]| {
        let output = fleet.run_command(arguments);
        assert!(output.status.success(), "{arguments:?}: {}", text(&output).1);
    };
    run_command(&["load", model.to_str().unwrap(), "--name", name, "--workers", "1", "--device", &device()]);
    let worker = eventually("the worker serves", || fleet.serving(name).first().copied());
    proc::send_signal(worker, "KILL");
    run_command(&["unload", name]);
}
