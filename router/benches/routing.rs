// SPDX-License-Identifier: Apache-2.0

//! Measures what prefix-aware routing costs a request, and a worker's KV cache events.
//!
//! Goals: hashing a prompt of 32,768 tokens under 400 us, once; placing it among 8 workers with 64
//! streams each under 100 us, since a lock is held; 256 events, as many as are applied under one
//! lock, under 100 us.

#![expect(clippy::unwrap_used, reason = "a measurement fails by panicking")]

use std::time::Duration;

use divan::{Bencher, black_box};
use router::RoutingMode;
use router::routing::{
    KvCacheChange, KvEventFeed, ModelKey, PromptPrefix, RoutingPolicy, StreamDemand, WorkerFingerprint,
    WorkerId, WorkerProfile,
};

const WORKERS: u64 = 8;
const STREAMS: u64 = 64;
const PROMPT_TOKENS: usize = 32_768;
const NOW: Duration = Duration::ZERO;

fn main() {
    divan::main();
}

fn prompt(seed: u32) -> Vec<u32> {
    (0..PROMPT_TOKENS as u32).map(|n| n.wrapping_mul(seed + 1)).collect()
}

fn key() -> ModelKey {
    ModelKey { name: "model".into(), fingerprint: WorkerFingerprint(vec![1]) }
}

fn stored(prompt: &PromptPrefix) -> Vec<KvCacheChange> {
    prompt.hashes().iter().map(|&block| KvCacheChange::Stored { block, group: 0 }).collect()
}

#[divan::bench]
fn hash_a_long_prompt(bencher: Bencher<'_, '_>) {
    let tokens = prompt(0);
    bencher.bench_local(|| PromptPrefix::new("", black_box(&tokens)));
}

/// All streams have the prompt, so each comparison is as long as it can be.
#[divan::bench(args = [true, false])]
fn place_a_long_prompt(bencher: Bencher<'_, '_>, events: bool) {
    let (key, prefix) = (key(), PromptPrefix::new("", &prompt(0)));
    let mut policy = RoutingPolicy::new(RoutingMode::Auto);
    let mut demand = StreamDemand { input_tokens: PROMPT_TOKENS as u64, ..StreamDemand::none(&key) };
    demand.prefix = &prefix;
    for id in (0..WORKERS).map(WorkerId) {
        let (name, device) = (id.0.to_string().into(), "host".into());
        let profile =
            WorkerProfile { name, model: key.clone(), device, running_max: 128, kv_tokens: 1 << 20 };
        policy.add_worker(id, profile, NOW);
        if events {
            policy.apply_kv_changes(id, &stored(&prefix));
            policy.set_kv_feed(id, KvEventFeed::Live);
        }
    }
    let others: Vec<PromptPrefix> =
        (0..STREAMS * WORKERS).map(|_| PromptPrefix::new("", &prompt(0))).collect();
    for other in &others {
        let demand = StreamDemand { prefix: other, ..demand };
        let mut placed = policy.place_stream(&demand, &[], None, NOW).unwrap();
        policy.end_prefill(&mut placed);
    }
    bencher.bench_local(|| {
        let mut placed = policy.place_stream(black_box(&demand), &[], None, NOW).unwrap();
        policy.end_prefill(&mut placed);
        policy.end_stream(placed, NOW);
    });
}

#[divan::bench]
fn apply_256_events(bencher: Bencher<'_, '_>) {
    let mut policy = RoutingPolicy::new(RoutingMode::Auto);
    let (name, device) = ("0".into(), "host".into());
    let profile = WorkerProfile { name, model: key(), device, running_max: 128, kv_tokens: 1 << 20 };
    policy.add_worker(WorkerId(0), profile, NOW);
    let changes = stored(&PromptPrefix::new("", &prompt(0)[..256 * 16]));
    let removed = |change: &KvCacheChange| match *change {
        KvCacheChange::Stored { block, group } => KvCacheChange::Removed { block, group },
        other => other,
    };
    let removals: Vec<KvCacheChange> = changes.iter().map(removed).collect();
    bencher.bench_local(|| {
        policy.apply_kv_changes(WorkerId(0), black_box(&changes[..128]));
        policy.apply_kv_changes(WorkerId(0), black_box(&removals[..128]));
    });
}
