// SPDX-License-Identifier: Apache-2.0

//! Tests of the bounds of prefix-aware routing. `prefix_simulation` checks its use.

use super::*;

const NOW: RouterTime = Duration::ZERO;
const SEATS: u32 = 8;

fn key() -> ModelKey {
    ModelKey::numbered(0)
}

/// Workers from 0 on, of these devices, whose events arrive.
fn policy_with(mode: RoutingMode, devices: &[&str]) -> RoutingPolicy {
    let mut policy = RoutingPolicy::new(mode);
    for (id, &device) in (0..).zip(devices) {
        let (name, device) = (format!("worker-{id}").into(), device.into());
        let profile = WorkerProfile { name, model: key(), device, running_max: SEATS, kv_tokens: 1 << 20 };
        policy.add_worker(WorkerId(id), profile, NOW);
        policy.set_kv_feed(WorkerId(id), KvEventFeed::Live);
    }
    policy
}

fn prompt() -> PromptPrefix {
    PromptPrefix::new("", &(0..4000).collect::<Vec<u32>>())
}

fn store(policy: &mut RoutingPolicy, worker: u64, prompt: &PromptPrefix) {
    let stored = |&block| KvCacheChange::Stored { block, group: 0 };
    let changes: Vec<KvCacheChange> = prompt.hashes().iter().map(stored).collect();
    policy.apply_kv_changes(WorkerId(worker), &changes);
}

fn demand<'a>(model: &'a ModelKey, prefix: &'a PromptPrefix) -> StreamDemand<'a> {
    StreamDemand { input_tokens: 4000, output_tokens_max: 100, prefix, ..StreamDemand::none(model) }
}

fn place(policy: &mut RoutingPolicy, prompt: &PromptPrefix) -> (u64, RoutingReason) {
    let placed = policy.place_stream(&demand(&key(), prompt), &[], None, NOW).unwrap();
    (placed.worker.0, placed.reason)
}

fn report(policy: &mut RoutingPolicy, worker: u64, running: u32) {
    policy.update_load(WorkerId(worker), WorkerReport { running, ..WorkerReport::default() }, NOW);
}

#[test]
fn a_cached_prompt_leads_to_its_worker_within_the_slack() {
    let mut policy = policy_with(RoutingMode::Auto, &["host"; 3]);
    store(&mut policy, 2, &prompt());
    assert_eq!(place(&mut policy, &prompt()), (2, RoutingReason::Prefix));
    assert_eq!(place(&mut policy, &PromptPrefix::default()), (0, RoutingReason::LeastLoaded));
    assert_eq!(place(&mut policy, &PromptPrefix::default()), (1, RoutingReason::LeastLoaded));
    // Two more streams than the least loaded worker are a quarter of the seats.
    report(&mut policy, 2, 3);
    assert_eq!(place(&mut policy, &prompt()), (2, RoutingReason::Prefix));
    report(&mut policy, 2, 4);
    assert_ne!(place(&mut policy, &prompt()).0, 2);
}

#[test]
fn a_full_stalled_or_tried_worker_is_not_chosen_for_its_cache() {
    let mut policy = policy_with(RoutingMode::Auto, &["host"; 2]);
    store(&mut policy, 0, &prompt());
    let (key, prompt) = (key(), prompt());
    let chosen = |policy: &RoutingPolicy, tried: &[WorkerId], now| {
        policy.choose_worker(&demand(&key, &prompt), tried, now).unwrap().0
    };
    assert_eq!(chosen(&policy, &[], NOW), 0);
    assert_eq!(chosen(&policy, &[WorkerId(0)], NOW), 1);
    let late = Duration::from_secs(5);
    policy.update_load(WorkerId(1), WorkerReport::default(), late);
    assert_eq!(chosen(&policy, &[], late), 1, "worker 0 has not reported");
    policy.update_load(WorkerId(1), WorkerReport { running: 7, ..WorkerReport::default() }, late);
    policy.update_load(WorkerId(0), WorkerReport { running: SEATS, ..WorkerReport::default() }, late);
    assert_eq!(chosen(&policy, &[], late), 1, "worker 0 is full");
    policy.update_load(WorkerId(0), WorkerReport { running: 7, ..WorkerReport::default() }, late);
    assert_eq!(chosen(&policy, &[], late), 0);
    policy.remove_worker(WorkerId(0));
    assert_eq!(chosen(&policy, &[], late), 1);
}

#[test]
fn if_all_are_full_a_cached_prompt_may_wait_behind_one_stream_more() {
    let mut policy = policy_with(RoutingMode::Auto, &["host"; 2]);
    store(&mut policy, 0, &prompt());
    for (running, expected) in [(9, 0), (10, 1)] {
        report(&mut policy, 0, running);
        report(&mut policy, 1, SEATS);
        let chosen = policy.choose_worker(&demand(&key(), &prompt()), &[], NOW);
        assert_eq!(chosen, Some(WorkerId(expected)), "{running} and {SEATS} streams");
    }
}

#[test]
fn equal_prompts_that_arrive_together_are_computed_once_and_then_spread() {
    let mut policy = policy_with(RoutingMode::Auto, &["host"; 3]);
    let chosen: Vec<u64> = (0..9).map(|_| place(&mut policy, &prompt()).0).collect();
    assert_eq!(chosen, [0, 0, 0, 1, 1, 1, 2, 2, 2]);
}

#[test]
fn chats_return_to_their_gpu_and_are_packed_there() {
    let mut policy = policy_with(RoutingMode::Auto, &["GPU-0", "GPU-0", "GPU-1", "GPU-1"]);
    store(&mut policy, 1, &prompt());
    assert_eq!(place(&mut policy, &PromptPrefix::default()), (0, RoutingReason::Packed));
    assert_eq!(place(&mut policy, &prompt()), (1, RoutingReason::Prefix));
    assert_eq!(place(&mut policy, &prompt()), (1, RoutingReason::Prefix));
    assert_eq!(place(&mut policy, &PromptPrefix::default()), (2, RoutingReason::Packed));
    assert_eq!(place(&mut policy, &PromptPrefix::default()), (2, RoutingReason::Packed));
}

#[test]
fn a_prompt_that_a_worker_may_not_share_leads_nowhere() {
    let mut policy = policy_with(RoutingMode::PrefixAware, &["host"; 2]);
    store(&mut policy, 1, &PromptPrefix::new("secret", &(0..4000).collect::<Vec<u32>>()));
    assert_eq!(place(&mut policy, &prompt()), (0, RoutingReason::LeastLoaded));
}

#[test]
fn power_of_two_compares_two_random_workers_and_avoids_full_ones() {
    let mut policy = policy_with(RoutingMode::PowerOfTwo, &["host"; 6]);
    store(&mut policy, 5, &prompt());
    let mut counts = [0; 6];
    for _ in 0..36 {
        let (worker, reason) = place(&mut policy, &prompt());
        assert_eq!(reason, RoutingReason::PowerOfTwo);
        counts[worker as usize] += 1;
    }
    assert!(counts.iter().all(|count| (3..=8).contains(count)), "{counts:?}");
    assert!(counts.iter().any(|&count| count != 6), "two workers know less than all: {counts:?}");
    let fill = 48 - 36;
    (0..fill).for_each(|_| _ = place(&mut policy, &prompt()));
    let full = (0..6).filter(|&id| policy.own_streams(WorkerId(id)) == SEATS).count();
    assert_eq!(full, 6, "no worker is full while another is free");
}
