// SPDX-License-Identifier: Apache-2.0

//! Tests of single rules. `simulation` checks them together.

use proptest::prelude::*;

use super::prompt_prefix::PREFIX_BLOCK_TOKENS;
use super::*;

const RUNNING_MAX: u32 = 4;
const NOW: RouterTime = Duration::ZERO;
const GPU: &str = "GPU-0";

fn model(n: u8) -> ModelKey {
    ModelKey::numbered(n)
}

fn profile(id: u64, model: ModelKey, device: &str, running_max: u32, kv_tokens: u64) -> WorkerProfile {
    let (name, device) = (format!("worker-{id}").into(), device.into());
    WorkerProfile { name, model, device, running_max, kv_tokens }
}

fn add_worker(policy: &mut RoutingPolicy, id: u64, model: ModelKey, running_max: u32) {
    policy.add_worker(WorkerId(id), profile(id, model, "host", running_max, 0), NOW);
}

fn policy_with(workers: u64) -> RoutingPolicy {
    let mut policy = RoutingPolicy::default();
    for id in 0..workers {
        add_worker(&mut policy, id, model(0), RUNNING_MAX);
    }
    policy
}

/// Places a stream without a prompt.
fn place(
    policy: &mut RoutingPolicy,
    model: &ModelKey,
    tried: &[WorkerId],
    preferred: Option<WorkerId>,
) -> Option<WorkerId> {
    let placement = policy.place_stream(&unique(model, 0), tried, preferred, NOW)?;
    Some(placement.worker)
}

/// Ends a stream that [`place`] has placed.
fn end(policy: &mut RoutingPolicy, worker: WorkerId) {
    let placement = StreamPlacement {
        worker,
        reason: RoutingReason::LeastLoaded,
        cached_tokens: 0,
        number: 0,
        share: worker_load::expected_share(&unique(&model(0), 0), 0),
        spread_by_deaths: None,
    };
    policy.end_stream(placement, NOW);
}

#[test]
fn equal_workers_take_turns() {
    let mut policy = policy_with(3);
    let chosen: Vec<_> = (0..6).map(|_| place(&mut policy, &model(0), &[], None).unwrap().0).collect();
    assert_eq!(chosen, [0, 1, 2, 0, 1, 2]);
}

#[test]
fn a_worker_that_reports_a_queue_is_avoided() {
    let mut policy = policy_with(2);
    policy.update_load(WorkerId(0), WorkerReport { running: 1, waiting: 2, ..WorkerReport::default() }, NOW);
    let chosen: Vec<_> = (0..4).map(|_| place(&mut policy, &model(0), &[], None).unwrap().0).collect();
    assert_eq!(chosen, [1, 1, 1, 0]);
}

#[test]
fn own_streams_in_a_report_count_once() {
    let mut policy = policy_with(2);
    let busy = place(&mut policy, &model(0), &[], None).unwrap();
    policy.update_load(busy, WorkerReport { running: 1, ..WorkerReport::default() }, NOW);
    end(&mut policy, busy);
    let chosen: Vec<_> = (0..2).map(|_| place(&mut policy, &model(0), &[], None).unwrap()).collect();
    assert!(chosen.contains(&busy), "its only stream has ended");
}

#[test]
fn the_emptier_kv_cache_breaks_a_tie() {
    let mut policy = policy_with(2);
    let report =
        |kv_used_tokens| WorkerReport { kv_used_tokens, kv_total_tokens: 1000, ..WorkerReport::default() };
    policy.update_load(WorkerId(0), report(900), NOW);
    policy.update_load(WorkerId(1), report(100), NOW);
    assert_eq!(place(&mut policy, &model(0), &[], None), Some(WorkerId(1)));
}

#[test]
fn choices_of_a_prompt_stay_on_one_worker_while_it_has_capacity() {
    let mut policy = policy_with(3);
    let first = place(&mut policy, &model(0), &[], None).unwrap();
    let mut place_preferred = |tried: &[_]| place(&mut policy, &model(0), tried, Some(first)).unwrap();
    assert_eq!([place_preferred(&[]), place_preferred(&[]), place_preferred(&[])], [first; 3]);
    let (fifth, sixth) = (place_preferred(&[]), place_preferred(&[]));
    assert!(
        fifth != first && sixth != first && fifth != sixth,
        "the first worker runs four sequences: {fifth:?}, {sixth:?}"
    );
    end(&mut policy, first);
    assert_ne!(place(&mut policy, &model(0), &[first], Some(first)), Some(first), "it has refused");
    assert_eq!(place(&mut policy, &model(0), &[], Some(first)), Some(first));
    policy.remove_worker(first);
    assert!(place(&mut policy, &model(0), &[], Some(first)).is_some_and(|next| next != first));
}

#[test]
fn free_capacity_comes_before_fewer_streams() {
    let mut policy = RoutingPolicy::default();
    add_worker(&mut policy, 0, model(0), 1);
    add_worker(&mut policy, 1, model(0), 8);
    policy.update_load(WorkerId(1), WorkerReport { running: 3, ..WorkerReport::default() }, NOW);
    let chosen: Vec<_> = (0..3).map(|_| place(&mut policy, &model(0), &[], None).unwrap().0).collect();
    assert_eq!(chosen, [0, 1, 1]);
}

#[test]
fn a_stream_never_goes_to_another_model_or_a_tried_worker() {
    let mut policy = policy_with(2);
    add_worker(&mut policy, 9, model(9), RUNNING_MAX);
    assert_eq!(place(&mut policy, &model(9), &[], None), Some(WorkerId(9)));
    assert_eq!(place(&mut policy, &model(9), &[WorkerId(9)], None), None);
    assert_eq!(place(&mut policy, &model(0), &[WorkerId(0)], None), Some(WorkerId(1)));
    assert_eq!(place(&mut policy, &model(5), &[], None), None);
    let renamed = ModelKey { name: "another".into(), ..model(0) };
    assert_eq!(place(&mut policy, &renamed, &[], None), None, "equal content under another name");
}

#[test]
fn a_removed_worker_is_not_chosen_and_its_streams_may_still_end() {
    let mut policy = policy_with(2);
    let first = place(&mut policy, &model(0), &[], None).unwrap();
    policy.remove_worker(first);
    end(&mut policy, first);
    assert_eq!(place(&mut policy, &model(0), &[], None), Some(WorkerId(1)));
    assert_eq!(policy.worker_count(&model(0)), 1);
}

/// Workers `0..workers` on one GPU.
fn packed_with(workers: u64, kv_tokens: u64) -> RoutingPolicy {
    let mut policy = RoutingPolicy::default();
    for id in 0..workers {
        policy.add_worker(WorkerId(id), profile(id, model(0), GPU, RUNNING_MAX, kv_tokens), NOW);
    }
    policy
}

fn demand<'a>(model: &'a ModelKey, input_tokens: u64, prefix: &'a PromptPrefix) -> StreamDemand<'a> {
    StreamDemand { input_tokens, output_tokens_max: 100, prefix, ..StreamDemand::none(model) }
}

/// A prompt that shares nothing with others.
fn unique(model: &ModelKey, input_tokens: u64) -> StreamDemand<'_> {
    StreamDemand { input_tokens, output_tokens_max: 100, ..StreamDemand::none(model) }
}

#[test]
fn workers_of_a_gpu_are_filled_one_after_the_other() {
    let mut policy = packed_with(3, 0);
    let mut place_next = || place(&mut policy, &model(0), &[], None).unwrap().0;
    let chosen: Vec<_> = (0..14).map(|_| place_next()).collect();
    assert_eq!(chosen[..12], [0, 0, 0, 0, 1, 1, 1, 1, 2, 2, 2, 2]);
    assert_eq!(chosen[12..], [0, 1], "all are full: the least loaded one");
}

#[test]
fn the_mode_decides_whether_workers_are_packed() {
    for (mode, device, expected) in [
        (RoutingMode::Auto, GPU, [0, 0]),
        (RoutingMode::Auto, "host", [0, 1]),
        (RoutingMode::Auto, "host:1", [0, 1]),
        (RoutingMode::Auto, "", [0, 1]),
        (RoutingMode::Packed, "host", [0, 0]),
        (RoutingMode::LeastLoaded, GPU, [0, 1]),
        (RoutingMode::PrefixAware, GPU, [0, 1]),
    ] {
        let mut policy = RoutingPolicy::new(mode);
        for id in 0..2 {
            policy.add_worker(WorkerId(id), profile(id, model(0), device, 4, 0), NOW);
        }
        let chosen = [(); 2].map(|()| place(&mut policy, &model(0), &[], None).unwrap().0);
        assert_eq!(chosen, expected, "{mode:?} on {device:?}");
    }
}

#[test]
fn an_idle_gpu_keeps_the_worker_that_served_last() {
    let mut policy = packed_with(3, 0);
    let first = place(&mut policy, &model(0), &[], None).unwrap();
    let second = place(&mut policy, &model(0), &[first], None).unwrap();
    end(&mut policy, first);
    end(&mut policy, second);
    assert_eq!(place(&mut policy, &model(0), &[], None), Some(second));
}

#[test]
fn the_streams_of_a_lost_worker_go_to_one_other_worker() {
    let mut policy = packed_with(3, 0);
    let lost = [(); 4].map(|()| place(&mut policy, &model(0), &[], None).unwrap());
    assert_eq!(lost, [WorkerId(0); 4]);
    policy.remove_worker(WorkerId(0));
    let resumed = lost.map(|worker| {
        end(&mut policy, worker);
        place(&mut policy, &model(0), &[], None).unwrap()
    });
    assert_eq!(resumed, [WorkerId(1); 4]);
}

#[test]
fn streams_with_which_workers_died_are_spread_although_others_are_packed() {
    let (mut policy, key) = (packed_with(3, 0), model(0));
    let mut place_with = |deaths: u32| {
        let demand = StreamDemand { spread_by_deaths: NonZeroU32::new(deaths), ..StreamDemand::none(&key) };
        policy.place_stream(&demand, &[], None, NOW).unwrap()
    };
    assert_eq!([(); 3].map(|()| place_with(0).worker.0), [0; 3]);
    let spread = [4, 5, 5, 5].map(&mut place_with);
    assert_eq!(spread.each_ref().map(|placement| placement.worker.0), [1, 2, 0, 1], "4 is the fewest");
    spread.into_iter().for_each(|placement| policy.end_stream(placement, NOW));
    assert_eq!(place(&mut policy, &key, &[], None), Some(WorkerId(0)), "the fullest");
}

#[test]
fn several_gpus_share_the_streams_of_all_models() {
    let mut policy = RoutingPolicy::default();
    for (id, device, key) in [(0, GPU, 0), (1, GPU, 0), (2, "GPU-1", 0), (3, "GPU-1", 0), (4, GPU, 1)] {
        policy.add_worker(WorkerId(id), profile(id, model(key), device, 8, 0), NOW);
    }
    let mut place_next = |key| place(&mut policy, &model(key), &[], None).unwrap().0;
    assert_eq!([(); 4].map(|()| place_next(0)), [0, 2, 2, 0], "the device that served last breaks a tie");
    assert_eq!([(); 3].map(|()| place_next(1)), [4; 3]);
    assert_eq!([(); 3].map(|()| place_next(0)), [2; 3], "the first GPU computes for the other model");
}

#[test]
fn a_kv_cache_is_filled_to_seven_eighths() {
    let (mut policy, key) = (packed_with(2, 1000), model(0));
    let long = unique(&key, 300);
    let mut place_next = || policy.place_stream(&long, &[], None, NOW).unwrap();
    let first = [place_next(), place_next()];
    assert_eq!(first.each_ref().map(|placement| placement.worker.0), [0; 2], "800 of 1,000 tokens");
    assert_eq!(place_next().worker.0, 1);
    let [ended, _] = first;
    policy.end_stream(ended, NOW);
    // The report counts streams of other routers too.
    let report = WorkerReport { kv_used_tokens: 700, kv_total_tokens: 1000, ..WorkerReport::default() };
    policy.update_load(WorkerId(0), report, NOW);
    assert_eq!(policy.place_stream(&long, &[], None, NOW).unwrap().worker.0, 1);
    policy.update_load(WorkerId(0), WorkerReport { kv_used_tokens: 400, ..report }, NOW);
    assert_eq!(policy.choose_worker(&long, &[], NOW), Some(WorkerId(0)));
}

#[test]
fn an_empty_worker_takes_a_prompt_of_any_length() {
    let (mut policy, key) = (packed_with(2, 1000), model(0));
    assert_eq!(policy.place_stream(&unique(&key, 990), &[], None, NOW).unwrap().worker.0, 0);
}

#[test]
fn a_backlog_of_four_seconds_of_prefill_sends_prompts_to_another_worker() {
    let (mut policy, key) = (packed_with(2, 0), model(0));
    let prompt = unique(&key, 3000);
    let mut first = policy.place_stream(&prompt, &[], None, NOW).unwrap();
    let second = policy.place_stream(&prompt, &[], None, NOW).unwrap();
    assert_eq!((first.worker, second.worker), (WorkerId(0), WorkerId(0)), "no rate is known yet");
    for (at, prompt_tokens_computed) in [(250, 0), (500, 250), (750, 500)] {
        let report = WorkerReport { prompt_tokens_computed, ..WorkerReport::default() };
        policy.update_load(WorkerId(0), report, Duration::from_millis(at));
    }
    let now = Duration::from_millis(750);
    assert_eq!(policy.choose_worker(&prompt, &[], now), Some(WorkerId(1)), "9,000 tokens at 1,000/s");
    policy.end_prefill(&mut first);
    policy.end_prefill(&mut first);
    assert_eq!(policy.choose_worker(&prompt, &[], now), Some(WorkerId(1)), "6,000 tokens");
    assert_eq!(policy.choose_worker(&unique(&key, 900), &[], now), Some(WorkerId(0)));
    policy.end_stream(first, NOW);
    policy.end_stream(second, NOW);
    assert_eq!(policy.choose_worker(&prompt, &[], now), Some(WorkerId(0)));
}

#[test]
fn a_worker_that_does_not_report_or_step_gets_no_streams() {
    let mut policy = packed_with(2, 0);
    let chosen = |policy: &RoutingPolicy, seconds| {
        let now = Duration::from_secs(seconds);
        policy.choose_worker(&StreamDemand::none(&model(0)), &[], now).unwrap().0
    };
    place(&mut policy, &model(0), &[], None);
    let report_both = |policy: &mut RoutingPolicy, seconds, first| {
        policy.update_load(WorkerId(0), first, Duration::from_secs(seconds));
        policy.update_load(WorkerId(1), WorkerReport::default(), Duration::from_secs(seconds));
    };
    let stepped = |steps| WorkerReport { running: 1, steps, ..WorkerReport::default() };
    report_both(&mut policy, 1, stepped(1));
    assert_eq!(chosen(&policy, 1), 0);
    // A stopped process: the other one reports on.
    policy.update_load(WorkerId(1), WorkerReport::default(), Duration::from_secs(6));
    assert_eq!(chosen(&policy, 6), 1);
    // A process whose engine hangs.
    for seconds in 7..=14 {
        report_both(&mut policy, seconds, stepped(2));
    }
    assert_eq!(chosen(&policy, 14), 0);
    for seconds in 15..=18 {
        report_both(&mut policy, seconds, stepped(2));
    }
    assert_eq!(chosen(&policy, 18), 1);
    report_both(&mut policy, 19, stepped(3));
    assert_eq!(chosen(&policy, 19), 0);
    assert_eq!(chosen(&policy, 60), 1, "without any report: the least loaded one");
}

#[test]
fn a_long_cached_prefix_comes_before_the_fullest_worker_of_the_device() {
    let (mut policy, key) = (packed_with(2, 1 << 20), model(0));
    let prompt: Vec<u32> = (0..3000).collect();
    let prefix = PromptPrefix::new("", &prompt);
    let placed = policy.place_stream(&demand(&key, 3000, &prefix), &[WorkerId(0)], None, NOW).unwrap();
    assert_eq!(placed.worker, WorkerId(1));
    policy.end_stream(placed, NOW);
    let busy = policy.place_stream(&unique(&key, 10), &[WorkerId(1)], None, NOW).unwrap();
    assert_eq!(busy.worker, WorkerId(0));
    let chosen =
        |prefix: &PromptPrefix| policy.choose_worker(&demand(&key, 3000, prefix), &[], NOW).unwrap().0;
    assert_eq!(chosen(&prefix), 1);
    let gain = PREFIX_GAIN_TOKENS as usize;
    assert_eq!(chosen(&PromptPrefix::new("", &prompt[..gain])), 1);
    let shorter = PromptPrefix::new("", &prompt[..gain - PREFIX_BLOCK_TOKENS]);
    assert_eq!(chosen(&shorter), 0, "a shorter prefix is not worth a second worker");
    assert_eq!(chosen(&PromptPrefix::new("tenant", &prompt)), 0);
}

proptest! {
    /// A stream always goes to a worker with the fewest streams, whichever streams end.
    #[test]
    fn streams_are_spread_evenly(
        workers in 1u64..6,
        ends in proptest::collection::vec(any::<u16>(), 1..80),
    ) {
        let mut policy = policy_with(workers);
        let mut running = Vec::new();
        for choice in ends {
            let fewest = (0..workers).map(|id| policy.own_streams(WorkerId(id))).min().unwrap();
            let chosen = place(&mut policy, &model(0), &[], None).unwrap();
            prop_assert_eq!(policy.own_streams(chosen), fewest + 1);
            running.push(chosen);
            if choice % 3 == 0 {
                end(&mut policy, running.swap_remove(usize::from(choice) % running.len()));
            }
        }
        let total: u32 = (0..workers).map(|id| policy.own_streams(WorkerId(id))).sum();
        prop_assert_eq!(total as usize, running.len());
    }
}
