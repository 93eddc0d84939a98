// SPDX-License-Identifier: Apache-2.0

//! A fleet on a GPU that seems to have no memory of its own. A library that is preloaded into all
//! processes changes the driver's answer (unified_memory.c); everything else is the real GPU.

use super::{Gpu, asks};
use crate::harness::admin::weight_server_status;
use crate::harness::api::{TestRequest, generate_all, runtime};
use crate::harness::{ServedFleet, ballast, demo_7m, demo_22m, preload_library, serve_config, text};
use serde_json::Value;
use std::path::Path;

const USAGE: i32 = 2;
const BUDGET: u64 = 8 << 30;

/// A model on the host and one on the GPU.
fn config(gpu: &Gpu) -> String {
    let table = |name: &str, model: &Path, device: &str| {
        format!(
            "[[models]]\nname = {name:?}\npath = {model:?}\ndevice = {device:?}\nworkers = 1\nkv-tokens = 4096\n"
        )
    };
    let (host, gpu) = (table("on-host", &demo_7m(), "host"), table("on-gpu", &demo_22m(), &gpu.name));
    format!("host-budget = \"{BUDGET}\"\n{host}{gpu}")
}

fn tokens(fleet: &ServedFleet) -> Vec<Vec<u32>> {
    let named = |request| TestRequest { model: "on-gpu".to_owned(), ..request };
    let asks: Vec<TestRequest> = asks(2, 40, 32).into_iter().map(named).collect();
    let found = runtime().block_on(generate_all(&fleet.grpc, &asks));
    found.into_iter().map(|found| found.unwrap().tokens).collect()
}

#[test]
fn a_fleet_on_unified_memory_has_one_row_for_host_and_gpu_and_gives_the_same_tokens() {
    let Some(gpu) = Gpu::here("a fleet on unified memory") else { return };
    let baseline = gpu.used();
    let config = config(&gpu);
    let expected = {
        let fleet = ServedFleet::start_config(&config);
        let expected = tokens(&fleet);
        fleet.stop();
        expected
    };
    let directory = tempfile::Builder::new().prefix("ballast-test-").tempdir().unwrap();
    let library = preload_library("gpu/unified_memory", directory.path());

    let file = directory.path().join("plan.toml");
    std::fs::write(&file, &config).unwrap();
    let plan = |file| {
        let mut command = ballast();
        command.env("LD_PRELOAD", &library).args(["plan", "--json", "--config"]).arg(file);
        command.output().unwrap()
    };
    let planned: Value = serde_json::from_str(&text(&plan(&file)).0).unwrap();
    let [row] = &planned["devices"].as_array().unwrap()[..] else { panic!("{planned:#}") };
    assert_eq!((&row["device"], &row["budget"]), (&Value::from("host"), &Value::from(BUDGET)));
    assert_eq!(row["unified"].as_array().map(Vec::len), Some(1), "{row:#}");
    // The driver would say what its own memory has.
    assert!(row["free"].as_u64().unwrap() <= host_bytes(), "{row:#}");
    std::fs::write(&file, format!("gpu-budget = \"8GiB\"\n{}", config.replace("\"host\"", "\"cuda:0\"")))
        .unwrap();
    let refused = plan(&file);
    let (_, why) = text(&refused);
    assert_eq!(refused.status.code(), Some(USAGE), "{why}");
    assert!(why.contains("has no memory of its own"), "{why}");

    let mut command = serve_config(directory.path(), &config);
    command.env("LD_PRELOAD", &library);
    let fleet = ServedFleet::start_command(directory, command);
    assert_eq!(tokens(&fleet), expected, "kernels that read the loader's slots in place");
    let ledger = runtime().block_on(weight_server_status(&fleet)).ledger.unwrap();
    let [row] = &ledger.devices[..] else { panic!("{ledger:#?}") };
    let of_rows: u64 = ledger.reservations.iter().map(|row| row.bytes).sum();
    assert_eq!((row.device.as_str(), row.capacity_bytes, row.unified_devices.len()), ("host", BUDGET, 1));
    assert_eq!((row.reserved_bytes, ledger.capacity_bytes), (of_rows, BUDGET));
    assert!(ledger.reservations.iter().any(|row| row.device == "host"), "{ledger:#?}");
    assert!(ledger.reservations.iter().any(|of| row.unified_devices.contains(&of.device)), "{ledger:#?}");
    fleet.stop();
    gpu.assert_back_at(baseline);
}

fn host_bytes() -> u64 {
    let text = std::fs::read_to_string("/proc/meminfo").unwrap();
    let total = text.lines().find_map(|line| line.strip_prefix("MemTotal:")?.trim().strip_suffix(" kB"));
    total.unwrap().trim().parse::<u64>().unwrap() * 1024
}
