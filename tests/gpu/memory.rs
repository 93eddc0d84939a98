// SPDX-License-Identifier: Apache-2.0

//! Checks that weights exist once on the device, and that an additional worker costs little memory,
//! which a plan predicts.

use super::{Gpu, MIB, asks};
use crate::devices::plan;
use crate::harness::api::{generate_all, runtime};
use crate::harness::{ServedFleet, eventually, synth, text};
use serde_json::Value;

/// The largest memory of a worker besides its context and KV cache, by the tokens of a step.
const BESIDE_MAX: [(&str, u64); 2] = [("512", 64 * MIB), ("2048", 192 * MIB)];

/// The largest difference in percent between the ledger and NVML's figure, and between a plan and
/// either of them.
const PERCENT_MAX: f64 = 3.0;

/// The unit in which the driver allocates. No part of a worker can be measured more exactly.
const UNIT: u64 = 2 * MIB;

/// Prompt tokens that fill the cache. A cache of 8,192 tokens, rounded up to whole units of the
/// device, has room for 8,688.
const FULL: u32 = 8600;

#[test]
fn i1_weights_exist_once_on_the_device_and_a_second_worker_costs_little() {
    let Some(gpu) = Gpu::here("i1_weights_exist_once_on_the_device_and_a_second_worker_costs_little") else {
        return;
    };
    let model = synth("qwen3-0.6b", "q8_0");
    for (step_tokens, beside_max) in BESIDE_MAX {
        let arguments = ["--workers", "1", "--kv-tokens", "8192", "--step-tokens", step_tokens];
        let planned = &plan(&model, &arguments)["models"][0]["worker"];
        let baseline = gpu.used();
        // Both workers shall work.
        let spread = [&arguments[..], &["--routing", "least-loaded"]].concat();
        let fleet = ServedFleet::start(&model, &spread);
        work(&fleet);
        let asked = runtime().block_on(generate_all(&fleet.grpc, &asks(1, FULL, 32)));
        assert_eq!(asked.into_iter().next().unwrap().unwrap().tokens.len(), 32);
        let alone = eventually("its cache is full", || {
            fleet.line("worker-0").filter(|line| line["device_memory"]["kv_mapped"] == planned["kv"])
        });
        let one = gpu.used();
        is_as_planned(planned, &alone["device_memory"]);
        let added = fleet.run_command(&["add-worker"]);
        assert!(added.status.success(), "{}", text(&added).1);
        eventually("both workers serve", || (fleet.serving("qwen3-0.6b-q8_0").len() == 2).then_some(()));
        work(&fleet);
        // An idle worker may still be releasing memory of its cache.
        let mapped = |status: &[Value]| -> Vec<Value> {
            status.iter().map(|line| line["device_memory"]["kv_mapped"].clone()).collect()
        };
        let (status, two) = eventually("the caches stand still", || {
            let (before, two) = (fleet.try_ps_lines()?, gpu.used());
            let status = fleet.try_ps_lines()?;
            (mapped(&before) == mapped(&status)).then_some((status, two))
        });

        let named = |name: &str| status.iter().find(|line| line["name"] == name).unwrap();
        let part = |line: &Value, name: &str| line["device_memory"][name].as_u64().unwrap_or(0);
        let workspace = |line: &Value| line["device_memory"]["workspace_used"]["total"].as_u64().unwrap_or(0);
        let second = named("worker-1");
        let (context, kv) = (part(second, "context"), part(second, "kv_mapped"));
        // The first worker has released cache memory since `one` was measured, so both figures
        // exclude its cache.
        let cost = (two - part(named("worker-0"), "kv_mapped")) - (one - part(&alone, "kv_mapped"));
        eprintln!(
            "measured: second worker at {step_tokens} tokens a step: {} MiB, of which context {} and KV {}: {}",
            cost / MIB,
            context / MIB,
            kv / MIB,
            second["device_memory"]
        );
        assert!(context > 0 && kv > 0, "{second}");
        assert!(cost <= context + kv + beside_max, "a second worker costs {cost} bytes: {second}");

        let weights: u64 = status
            .iter()
            .filter(|line| line["role"] == "generation")
            .map(|line| line["allocation_bytes"].as_u64().unwrap())
            .sum();
        assert!(weights >= 600 * MIB, "{weights}");
        let workers: u64 = status
            .iter()
            .filter(|line| line["role"] == "worker")
            .map(|line| part(line, "context") + part(line, "kv_mapped") + workspace(line))
            .sum();
        let (ledger, found) = (weights + workers, two - baseline);
        let percent = (found as f64 / ledger as f64 - 1.0) * 100.0;
        eprintln!(
            "measured: two workers and one copy of {} MiB: ledger {} MiB, device {} MiB ({percent:+.1}%)",
            weights / MIB,
            ledger / MIB,
            found / MIB
        );
        assert!(percent.abs() <= PERCENT_MAX, "{status:#?}");
        fleet.stop();
        gpu.assert_back_at(baseline);
    }
}

/// Compares a worker with a full cache with its plan, part by part.
fn is_as_planned(planned: &Value, found: &Value) {
    let bytes = |value: &Value| value.as_u64().unwrap_or_else(|| panic!("{planned} {found}"));
    let used = &found["workspace_used"];
    let mut sums = [0, 0];
    let mut line = Vec::new();
    for (part, found) in [
        ("context", &found["context"]),
        ("kv", &found["kv_mapped"]),
        ("activations", &used["activations"]),
        ("scratch", &used["scratch"]),
        ("graphs", &used["graphs"]),
        ("modules", &used["modules"]),
    ] {
        let (planned, found) = (bytes(&planned[part]), bytes(found));
        sums = [sums[0] + planned, sums[1] + found];
        let unlike = found.abs_diff(planned);
        let mib = |bytes: u64| bytes as f64 / MIB as f64;
        line.push(format!("{part} {:.1} / {:.1}", mib(planned), mib(found)));
        assert!(
            unlike <= UNIT || unlike as f64 <= PERCENT_MAX / 100.0 * planned as f64,
            "{part}: {planned} planned, {found} found"
        );
    }
    let percent = (sums[1] as f64 / sums[0] as f64 - 1.0) * 100.0;
    eprintln!(
        "measured: a worker with a full cache, MiB planned / found: {}; {percent:+.2}%",
        line.join(", ")
    );
    assert_eq!(sums[0], bytes(&planned["total"]));
    assert!(percent.abs() <= PERCENT_MAX, "{planned} {found}");
}

/// Sends prompts that fill steps, and batches of several sizes. After this, all buffers that grow
/// have grown.
fn work(fleet: &ServedFleet) {
    for (count, prompt_tokens) in [(2, 3000), (16, 100)] {
        for done in runtime().block_on(generate_all(&fleet.grpc, &asks(count, prompt_tokens, 32))) {
            assert_eq!(done.unwrap().tokens.len(), 32);
        }
    }
}
