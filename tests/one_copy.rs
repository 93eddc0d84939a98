// SPDX-License-Identifier: Apache-2.0

//! Weights exist once in memory: checks /proc/PID/smaps of a fleet with a model of more than 512
//! MiB.

use crate::harness::api::{TestRequest, generate_all, runtime};
use crate::harness::{ServedFleet, proc, runs_on_host, synth};

const WORKERS: usize = 4;

/// Most anonymous memory of a worker without its KV cache: heap, stacks, workspace.
const OTHER_MEMORY_MAX: u64 = 40 << 20;

/// Name of weight memfds in /proc/PID/smaps.
const WEIGHT_MAPPING: &str = "/memfd:ballast-weights";

fn request(seed: u64) -> TestRequest {
    TestRequest {
        prompt: (0..40).map(|i| (i * 31 + seed as u32 * 7) % 1000).collect(),
        max_tokens: 4,
        temperature: 0.0,
        seed,
        ..TestRequest::default()
    }
}

#[test]
fn i1_weights_exist_once_for_four_workers() {
    if !runs_on_host("i1_weights_exist_once_for_four_workers") {
        return;
    }
    let model = synth("qwen3-0.6b", "q8_0");
    let file_bytes = std::fs::metadata(&model).unwrap().len();
    assert!(file_bytes >= 512 << 20, "{file_bytes} bytes");
    let arguments = ["--workers", "4", "--threads", "1", "--kv-tokens", "2048"];
    let fleet = ServedFleet::start(&model, &arguments);
    let requests: Vec<TestRequest> = (0..8).map(request).collect();
    for result in runtime().block_on(generate_all(&fleet.grpc, &requests)) {
        assert_eq!(result.unwrap().tokens.len(), 4);
    }

    let workers = fleet.processes_by_role("worker");
    assert_eq!(workers.len(), WORKERS);
    let mut weight_bytes = 0;
    let mut pss_sum = 0;
    for process in fleet.processes() {
        let mappings = proc::mappings(process.pid);
        let (weights, other): (Vec<_>, Vec<_>) =
            mappings.iter().partition(|m| m.name.starts_with(WEIGHT_MAPPING));
        pss_sum += weights.iter().map(|m| m.pss).sum::<u64>();
        if process.role != "worker" {
            assert!(weights.is_empty(), "{} maps weights", process.name);
            continue;
        }
        assert!(!weights.is_empty(), "{} maps no weights", process.name);
        weight_bytes = weights.iter().map(|m| m.size).sum();
        for mapping in &weights {
            assert_eq!((mapping.anonymous, mapping.swap), (0, 0), "{}: {mapping:?}", process.name);
        }
        let anonymous: u64 = other.iter().map(|m| m.anonymous).sum();
        // Eight requests of up to 48 tokens, if one worker ran all of them; f16 KV cache of 28
        // layers with 8 heads of 128 values.
        let kv_used = 8 * 48 * 28 * 2 * 8 * 128 * 2;
        assert!(
            anonymous <= kv_used + OTHER_MEMORY_MAX,
            "{}: {anonymous} bytes of anonymous memory, KV uses at most {kv_used}",
            process.name
        );
    }
    assert!(weight_bytes >= file_bytes * 9 / 10, "{weight_bytes} bytes mapped of {file_bytes}");
    assert!(pss_sum <= weight_bytes, "the processes hold {pss_sum} bytes of {weight_bytes}");
    eprintln!("weights {weight_bytes} bytes, sum of Pss over {WORKERS} workers {pss_sum}");
    fleet.stop();
}

#[test]
fn four_hundred_allocations_are_handed_over_in_several_batches() {
    if !runs_on_host("four_hundred_allocations_are_handed_over_in_several_batches") {
        return;
    }
    let model = synth("qwen3-many", "q8_0");
    let fleet = ServedFleet::start(&model, &["--workers", "2", "--no-pack"]);
    for worker in fleet.processes_by_role("worker") {
        let weights =
            proc::mappings(worker.pid).into_iter().filter(|m| m.name.starts_with(WEIGHT_MAPPING)).count();
        assert!(weights >= 400, "{}: {weights} mappings", worker.name);
        // One descriptor for each allocation, to be returned to a weight-server that has lost them.
        let descriptors =
            proc::open_files(worker.pid).iter().filter(|f| f.starts_with(WEIGHT_MAPPING)).count();
        assert_eq!(descriptors, weights, "{} keeps other descriptors than its mappings", worker.name);
    }
    let found = runtime().block_on(generate_all(&fleet.grpc, &[request(1), request(1)]));
    assert_eq!(found[0].as_ref().unwrap().tokens, found[1].as_ref().unwrap().tokens);
    fleet.stop();
}
