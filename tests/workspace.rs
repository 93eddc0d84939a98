// SPDX-License-Identifier: Apache-2.0

//! Compares the memory of a host worker, without weights and KV cache, with its plan.

use crate::devices::plan;
use crate::harness::api::{TestRequest, connect, generate, generate_all, runtime};
use crate::harness::{ServedFleet, eventually, proc, runs_on_host, synth};
use proto::v1::grammar::Kind;

/// A plan is an upper bound: deferred logits, for example, rarely fill all their rows. But it may
/// be at most this many times the memory in use.
const PLANNED_TIMES_MAX: u64 = 3;

/// The default class's share of a worker's permits, minus one for the request that keeps the worker
/// busy.
const STREAMS: u64 = 67;

fn request(seed: u64, prompt_tokens: u32, max_tokens: u32) -> TestRequest {
    let prompt = (0..prompt_tokens).map(|i| (i * 31 + seed as u32 * 977) % 100_000).collect();
    // Sampling on the host copies whole rows of logits.
    TestRequest { prompt, max_tokens, temperature: 1.1, seed, ..TestRequest::default() }
}

/// Anonymous memory of the only worker, without its KV cache.
fn found(fleet: &ServedFleet) -> Option<u64> {
    let status = fleet.try_ps_lines()?;
    let line = status.iter().find(|line| line["role"] == "worker")?;
    let mapped = line["device_memory"]["kv_mapped"].as_u64()?;
    let mappings = proc::mappings(line["pid"].as_u64()? as u32);
    Some(mappings.iter().map(|mapping| mapping.anonymous).sum::<u64>().saturating_sub(mapped))
}

#[test]
fn i4_a_worker_that_has_worked_holds_what_was_planned_and_gives_rows_back() {
    if !runs_on_host("i4_a_worker_that_has_worked_holds_what_was_planned_and_gives_rows_back") {
        return;
    }
    let model = synth("qwen3-wide", "q8_0");
    let arguments = ["--workers", "1", "--threads", "2", "--kv-tokens", "16384", "--step-tokens", "2048"];
    let worker = &plan(&model, &arguments)["models"][0]["worker"];
    let part = |name: &str| worker[name].as_u64().unwrap();
    let planned = part("activations") + part("scratch") + part("process");
    assert_eq!(planned + part("kv"), part("total"), "{worker}");
    let fleet = ServedFleet::start(&model, &arguments);
    let runtime = runtime();
    let all = |requests: Vec<TestRequest>| {
        for done in runtime.block_on(generate_all(&fleet.grpc, &requests)) {
            done.unwrap();
        }
    };
    // The largest step.
    all((0..4).map(|seed| request(seed, 1000, 2)).collect());
    let lasting = runtime.spawn({
        let url = fleet.grpc.clone();
        async move { generate(&mut connect(&url).await, &request(4, 16, 6000), |_| {}).await.map(drop) }
    });
    all((5..5 + STREAMS).map(|seed| request(seed, 16, 8)).collect());
    let word = Kind::Regex("[a-z]{4,8}".to_owned());
    all((0..STREAMS / 2)
        .map(|seed| TestRequest { grammar: Some(word.clone()), ..request(seed, 16, 8) })
        .collect());
    let busy = found(&fleet).unwrap();
    assert!(!lasting.is_finished(), "an idle worker gives memory back");
    let mib = |bytes: u64| bytes >> 20;
    eprintln!("measured: {} of {} MiB planned beside the cache: {worker}", mib(busy), mib(planned));
    assert!(busy <= planned, "{busy} bytes are held, {planned} were planned: {worker}");
    assert!(busy * PLANNED_TIMES_MAX >= planned, "{busy} bytes are held, {planned} were planned: {worker}");
    lasting.abort();
    // In one step at least an eighth of the streams had a row of logits, however busy the machine.
    let rows = STREAMS / 8 * 151_936 * 4;
    eventually("an idle worker gives rows of logits back", || {
        found(&fleet).filter(|idle| idle + rows <= busy)
    });
    fleet.stop();
}
