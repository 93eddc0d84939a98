//! Weights exist once on the device, and what a further worker costs is known and small.

use super::{Gpu, MIB, asks};
use crate::harness::api::{generate_all, runtime};
use crate::harness::{Fleet, eventually, synth, text};
use serde_json::Value;

/// Of a worker beside its context and its KV cache, by the tokens of a step.
const BESIDE_MAX: [(&str, u64); 2] = [("512", 64 * MIB), ("2048", 192 * MIB)];

/// How far the ledger may be off what the management library says.
const LEDGER_PERCENT: f64 = 3.0;

#[test]
fn i1_weights_exist_once_on_the_device_and_a_second_worker_costs_little() {
    let Some(gpu) = Gpu::here("i1_weights_exist_once_on_the_device_and_a_second_worker_costs_little") else {
        return;
    };
    let model = synth("qwen3-0.6b", "q8_0");
    for (step_tokens, beside_max) in BESIDE_MAX {
        let baseline = gpu.used();
        let fleet =
            Fleet::start(&model, &["--workers", "1", "--kv-tokens", "8192", "--step-tokens", step_tokens]);
        work(&fleet);
        let one = gpu.used();
        let added = fleet.order(&["add-worker"]);
        assert!(added.status.success(), "{}", text(&added).1);
        eventually("both workers serve", || (fleet.serving("qwen3-0.6b-q8_0").len() == 2).then_some(()));
        work(&fleet);
        let two = gpu.used();

        let part = |line: &Value, name: &str| line["device_memory"][name].as_u64().unwrap_or(0);
        let second = fleet.line("worker-1").unwrap();
        let (context, kv) = (part(&second, "context"), part(&second, "kv_reserved"));
        let cost = two - one;
        eprintln!(
            "measured: second worker at {step_tokens} tokens a step: {} MiB, of which context {} and KV at most {}: {}",
            cost / MIB,
            context / MIB,
            kv / MIB,
            second["device_memory"]
        );
        assert!(context > 0 && kv > 0, "{second}");
        assert!(cost <= context + kv + beside_max, "a second worker costs {cost} bytes: {second}");

        let status = fleet.try_status().unwrap();
        let weights: u64 = status
            .iter()
            .filter(|line| line["role"] == "generation")
            .map(|line| line["allocation_bytes"].as_u64().unwrap())
            .sum();
        assert!(weights >= 600 * MIB, "{weights}");
        let workers: u64 = status
            .iter()
            .filter(|line| line["role"] == "worker")
            .map(|line| part(line, "context") + part(line, "kv_mapped") + part(line, "workspace_used"))
            .sum();
        let (ledger, found) = (weights + workers, two - baseline);
        let percent = (found as f64 / ledger as f64 - 1.0) * 100.0;
        eprintln!(
            "measured: two workers and one copy of {} MiB: ledger {} MiB, device {} MiB ({percent:+.1}%)",
            weights / MIB,
            ledger / MIB,
            found / MIB
        );
        assert!(percent.abs() <= LEDGER_PERCENT, "{status:#?}");
        fleet.stop();
        gpu.assert_back_at(baseline);
    }
}

/// Prompts that fill steps, and batches of several sizes, so that all that grows has grown.
fn work(fleet: &Fleet) {
    for (count, prompt_tokens) in [(2, 3000), (16, 100)] {
        for done in runtime().block_on(generate_all(&fleet.grpc, &asks(count, prompt_tokens, 32))) {
            assert_eq!(done.unwrap().tokens.len(), 32);
        }
    }
}
