// SPDX-License-Identifier: Apache-2.0

//! A fleet that starts on one of two GPUs, and later loads a model onto the other one. Needs two
//! GPUs.

use std::time::Instant;

use super::copies::two_gpus;
use super::{Gpu, MIB};
use crate::harness::api::{TestRequest, generate_all, runtime};
use crate::harness::{ServedFleet, demo_22m, eventually, gpu_uuid, proc, serve_config};
use serde_json::Value;

/// Nothing of the fleet is on the GPU: no context, which takes hundreds of MiB.
const UNUSED_MAX: u64 = 8 * MIB;

fn requests(model: &str) -> Vec<TestRequest> {
    let request = |seed: u64| TestRequest {
        model: model.to_owned(),
        prompt: (0..40).map(|i| (10 + i * 13 + seed as u32 * 7) % 1000).collect(),
        max_tokens: 100,
        temperature: 0.7,
        seed,
        ..TestRequest::default()
    };
    (0..4).map(request).collect()
}

/// Tokens and log probabilities of the requests.
fn answers(fleet: &ServedFleet, model: &str) -> Vec<(Vec<u32>, Vec<u32>)> {
    let found = runtime().block_on(generate_all(&fleet.grpc, &requests(model)));
    found.into_iter().map(|found| found.map(|found| (found.tokens, found.logprob_bits)).unwrap()).collect()
}

/// What the supervisor says about a GPU.
fn device_line(fleet: &ServedFleet, uuid: &str) -> Option<Value> {
    fleet.try_ps_lines()?.into_iter().find(|line| line["role"] == "device" && line["device"] == uuid)
}

fn await_serving(fleet: &ServedFleet, model: &str) {
    eventually(&format!("a worker serves {model}"), || (fleet.serving(model).len() == 1).then_some(()));
}

#[test]
fn a_gpu_that_no_model_names_costs_nothing_until_a_load_names_it() {
    let Some(devices) = two_gpus("a load onto a GPU that the fleet did not start with") else { return };
    let [first, second] = &devices;
    let (gpu, uuid) = (Gpu { name: second.clone() }, gpu_uuid(second));
    let baseline = gpu.used();
    let config = format!(
        "[[models]]\nname = \"a\"\npath = {:?}\ndevice = {first:?}\nworkers = 1\nkv-tokens = 8192\n",
        demo_22m()
    );
    let mut fleet = ServedFleet::start_config(&config);
    await_serving(&fleet, "a");
    let expected = answers(&fleet, "a");
    let unused = gpu.used().saturating_sub(baseline);
    eprintln!("measured: the second GPU has {} KiB more in use beside a fleet on the first", unused / 1024);
    assert!(unused <= UNUSED_MAX, "{unused} bytes on a GPU without a model");
    assert!(device_line(&fleet, &uuid).is_none());

    let file = demo_22m();
    let load = ["load", file.to_str().unwrap(), "--name", "b", "--kv-tokens", "8192", "--device", second];
    let started = Instant::now();
    fleet.run(&load);
    let loaded = started.elapsed();
    await_serving(&fleet, "b");
    eprintln!(
        "measured: a load onto a GPU that is new to the fleet: weights after {:.0} ms, a worker after {:.0} ms",
        loaded.as_secs_f64() * 1e3,
        started.elapsed().as_secs_f64() * 1e3
    );
    assert_eq!(answers(&fleet, "b"), expected, "equal GPUs compute alike");
    let line = eventually("the device monitor reports on the new GPU", || {
        device_line(&fleet, &uuid).filter(|line| !line["temperature_celsius"].is_null())
    });
    eprintln!("measured: the new GPU reports {} C", line["temperature_celsius"]);

    // The next supervisor has the GPU neither in its configuration nor in a command.
    let before = fleet.serving("b");
    fleet.succeed(serve_config(fleet.runtime_dir(), &config));
    await_serving(&fleet, "b");
    assert_eq!(fleet.serving("b"), before, "the worker is adopted");
    proc::send_signal(fleet.only_process("weight-server").pid, "KILL");
    eventually("the next weight-server has the weights", || {
        let lines = fleet.try_ps_lines()?;
        let is_here = |line: &&Value| line["role"] == "generation" && line["device"] == uuid.as_str();
        lines.iter().find(is_here).filter(|line| line["state"] == "ready").map(drop)
    });
    fleet.run(&["add-worker", "b"]);
    eventually("a second worker on the new GPU", || (fleet.serving("b").len() == 2).then_some(()));
    assert_eq!(answers(&fleet, "b"), expected);

    fleet.run(&["unload", "b"]);
    gpu.assert_back_at(baseline);
    assert_eq!(answers(&fleet, "a"), expected);
    fleet.stop();
}
