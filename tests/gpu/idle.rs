// SPDX-License-Identifier: Apache-2.0

//! Idle models on a GPU: how long a request waits for one that it wakes, and for one that needs the
//! memory of another model.

use std::path::Path;
use std::time::{Duration, Instant};

use super::Gpu;
use crate::harness::admin::weight_server_status;
use crate::harness::api::{TestRequest, generate_all, runtime};
use crate::harness::{ServedFleet, synth};
use crate::idle_clock::{await_state, planned};

const ROUNDS: usize = 3;
/// After its last request, a model counts as in use for 4 s.
const UNUSED: Duration = Duration::from_millis(4500);

fn table(name: &str, model: &Path, gpu: &Gpu, more: &str) -> String {
    let device = &gpu.name;
    format!(
        "[[models]]\nname = {name:?}\npath = {model:?}\ndevice = {device:?}\nworkers = 1\nkv-tokens = 8192\n\
         idle-unload = \"1h\"\n{more}\n"
    )
}

/// The tokens, and how long they took.
fn generate(fleet: &ServedFleet, model: &str) -> (Vec<u32>, Duration) {
    let request = TestRequest {
        model: model.to_owned(),
        prompt: (0..60).map(|i| 10 + i * 13).collect(),
        max_tokens: 8,
        ..TestRequest::default()
    };
    let started = Instant::now();
    let found = runtime().block_on(generate_all(&fleet.grpc, &[request])).remove(0);
    (found.unwrap().tokens, started.elapsed())
}

fn milliseconds(mut times: Vec<Duration>) -> String {
    times.sort_unstable();
    times.iter().map(|time| format!("{:.0}", time.as_secs_f64() * 1e3)).collect::<Vec<_>>().join(" ")
}

#[test]
fn a_request_wakes_an_8b_model_and_models_leave_for_each_other_within_the_budget() {
    let Some(gpu) = Gpu::here("a request that wakes a model") else { return };
    let baseline = gpu.used();
    let model = synth("qwen3-8b", "q4_k_m");
    // Another layout: a copy of its own.
    let (a, b) = (table("a", &model, &gpu, ""), table("b", &model, &gpu, "pack = false"));
    // The loader has a context beside the weights.
    let budget = planned(&a).max(planned(&b)) + (1 << 30);
    let fleet = ServedFleet::start_config(&format!("gpu-budget = \"{budget}\"\n{a}{b}"));
    await_state(&fleet, "a", "ready");
    await_state(&fleet, "b", "idle");
    let (expected, warm) = generate(&fleet, "a");
    let (_, served) = generate(&fleet, "a");

    let mut woken = Vec::new();
    for _ in 0..ROUNDS {
        assert!(fleet.run_command(&["unload", "a", "--idle"]).status.success());
        await_state(&fleet, "a", "idle");
        let (tokens, time) = generate(&fleet, "a");
        assert_eq!(tokens, expected);
        woken.push(time);
    }
    let mut replaced = Vec::new();
    for name in ["b", "a"].repeat(ROUNDS) {
        std::thread::sleep(UNUSED);
        let (tokens, time) = generate(&fleet, name);
        assert_eq!(tokens, expected);
        replaced.push(time);
        let ledger = runtime().block_on(weight_server_status(&fleet)).ledger.unwrap();
        let on_gpu = ledger.devices.iter().find(|device| device.device != "host").unwrap();
        assert!(on_gpu.reserved_bytes <= budget, "{on_gpu:?}");
    }
    println!(
        "measured: a request of 60 + 8 tokens to 8B Q4_K_M: the first one {:.0} ms, served {:.0} ms; \
         to an idle model {} ms; in the place of another model {} ms",
        warm.as_secs_f64() * 1e3,
        served.as_secs_f64() * 1e3,
        milliseconds(woken),
        milliseconds(replaced)
    );
    fleet.stop();
    gpu.assert_back_at(baseline);
}
