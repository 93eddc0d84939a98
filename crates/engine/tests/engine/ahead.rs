// SPDX-License-Identifier: Apache-2.0

//! Steps that are launched before the tokens of the step before are read. `same_tokens.rs` compares
//! their tokens with the oracle's in random cases.

use crate::fake::{FakeModel, answers, oracle, request, run_out};
use engine::{
    Engine, EngineConfig, EngineOutput, FinishReason, KvBudget, Request, RequestId, SampleError,
    SamplingParams, StopConditions,
};
use ops::{KvType, Reference};
use std::sync::atomic::Ordering;
use std::time::Duration;

const NOW: Duration = Duration::ZERO;

fn config() -> EngineConfig {
    EngineConfig {
        block_tokens: 4,
        kv_types: KvType::F32.into(),
        step_tokens: 40,
        running_max: 4,
        ..EngineConfig::new(KvBudget::Tokens(400))
    }
}

fn engine(model: FakeModel) -> Engine<Reference> {
    Engine::new(Box::new(model), Reference::new().running_ahead(), &config()).unwrap()
}

fn greedy(id: u64, prompt: Vec<u32>, max_tokens: u32) -> Request {
    let sampling = SamplingParams { temperature: 0.0, ..SamplingParams::default() };
    Request { sampling, ..request(id, prompt, max_tokens) }
}

fn submit(engine: &mut Engine<Reference>, requests: &[Request]) {
    for request in requests {
        engine.submit(request.clone()).unwrap();
    }
}

fn steps(engine: &mut Engine<Reference>, count: usize, out: &mut Vec<EngineOutput>) {
    for _ in 0..count {
        engine.step(NOW, out).unwrap();
    }
}

fn tokens(out: &[EngineOutput], of: u64) -> Vec<u32> {
    let token = |output: &EngineOutput| match output {
        EngineOutput::Token(token) if token.id == RequestId(of) => Some(token.token),
        _ => None,
    };
    out.iter().filter_map(token).collect()
}

fn reason(out: &[EngineOutput], of: u64) -> Option<FinishReason> {
    out.iter().find_map(|output| match output {
        EngineOutput::Finished { id, reason, .. } if *id == RequestId(of) => Some(*reason),
        _ => None,
    })
}

#[test]
fn every_decode_behind_the_first_is_launched_ahead() {
    let mut engine = engine(FakeModel::new(&config()));
    let requests = [greedy(1, vec![1; 9], 20), greedy(2, vec![2; 9], 12)];
    submit(&mut engine, &requests);
    let mut out = Vec::new();
    for step in 1..=20 {
        engine.step(NOW, &mut out).unwrap();
        assert_eq!(tokens(&out, 1).len(), step, "each step reports a token");
    }
    assert!(!engine.has_work());
    // The prompts are one step, and the first decode comes behind tokens that the host has.
    let stats = engine.stats();
    assert_eq!((stats.steps, stats.steps_ahead), (20, 18));
    let got = answers(out);
    requests.iter().for_each(|request| assert_eq!(got[&request.id], oracle(request)));
}

#[test]
fn tokens_that_the_device_samples_are_those_of_the_host() {
    let mut engine = engine(FakeModel::new(&config()));
    let warm = SamplingParams { temperature: 0.7, seed: 9, ..SamplingParams::default() };
    // The model computes three rows of logits at once.
    let requests = [
        request(1, vec![1; 9], 20),
        Request { sampling: warm, ..request(2, vec![2; 9], 20) },
        greedy(3, vec![3; 9], 20),
        request(4, vec![4; 9], 20),
    ];
    submit(&mut engine, &requests);
    let got = answers(run_out(&mut engine));
    requests.iter().for_each(|request| assert_eq!(got[&request.id], oracle(request)));
    assert_eq!(engine.stats().steps_ahead, 18);
}

#[test]
fn a_row_behind_the_end_of_a_request_is_dropped() {
    let mut engine = engine(FakeModel::new(&config()));
    let endless = greedy(1, vec![3; 6], 30);
    let third = oracle(&endless).tokens[2];
    let stop = StopConditions { stop_tokens: vec![third], ..endless.stop.clone() };
    let stopped = Request { stop, ..endless };
    let other = greedy(2, vec![4; 6], 30);
    engine.submit(stopped.clone()).unwrap();
    engine.submit(other.clone()).unwrap();
    let got = answers(run_out(&mut engine));
    assert_eq!(got[&RequestId(1)], oracle(&stopped));
    assert_eq!(got[&RequestId(2)], oracle(&other));
}

#[test]
fn a_step_whose_requests_have_all_ended_is_still_waited_for() {
    let mut engine = engine(FakeModel::new(&config()));
    engine.submit(greedy(1, vec![3; 6], 30)).unwrap();
    let mut out = Vec::new();
    steps(&mut engine, 3, &mut out);
    assert!(engine.cancel(RequestId(1), &mut out));
    assert!(engine.has_work(), "a step is in flight");
    let (before, report) = (out.len(), engine.step(NOW, &mut out).unwrap());
    assert_eq!((report.rows, report.tokens_sampled, out.len()), (1, 0, before));
    assert!(!engine.has_work());
    engine.check_integrity().unwrap();
    assert_eq!(engine.stats().kv_blocks_used, 0);
}

/// The new request gets the sequence of the cancelled one.
#[test]
fn a_request_gets_no_token_of_the_one_whose_place_it_takes() {
    let mut engine = engine(FakeModel::new(&config()));
    engine.submit(greedy(1, vec![3; 6], 30)).unwrap();
    let mut out = Vec::new();
    steps(&mut engine, 3, &mut out);
    engine.cancel(RequestId(1), &mut out);
    let next = greedy(2, vec![7; 5], 9);
    engine.submit(next.clone()).unwrap();
    assert_eq!(answers(run_out(&mut engine))[&RequestId(2)], oracle(&next));
}

#[test]
fn blocks_that_steps_ahead_filled_are_found_again() {
    let mut engine = engine(FakeModel::new(&config()));
    let first = greedy(1, vec![5; 6], 21);
    engine.submit(first.clone()).unwrap();
    let answer = answers(run_out(&mut engine)).remove(&RequestId(1)).unwrap();
    assert!(engine.stats().steps_ahead > 10);
    // 6 + 20 tokens are computed: six blocks of four.
    let mut prompt = first.prompt;
    prompt.extend(answer.tokens);
    let second = greedy(2, prompt, 5);
    engine.submit(second.clone()).unwrap();
    let out = run_out(&mut engine);
    assert!(out.contains(&EngineOutput::Admitted { id: RequestId(2), cached_tokens: 24 }));
    assert_eq!(answers(out)[&RequestId(2)], oracle(&second));
}

#[test]
fn no_empty_step_is_launched_behind_requests_that_are_paused() {
    let mut engine = engine(FakeModel::new(&config()));
    engine.submit(greedy(1, vec![5; 6], 40)).unwrap();
    let mut out = Vec::new();
    steps(&mut engine, 3, &mut out);
    engine.set_paused(RequestId(1), true);
    engine.submit(greedy(2, vec![6; 6], 40)).unwrap();
    // The step in flight, then the prompt.
    steps(&mut engine, 2, &mut out);
    assert_eq!((tokens(&out, 1).len(), tokens(&out, 2).len()), (4, 1));
    steps(&mut engine, 3, &mut out);
    engine.set_paused(RequestId(1), false);
    let rest = run_out(&mut engine);
    out.extend(rest);
    let got = answers(out);
    assert_eq!(got[&RequestId(1)], oracle(&greedy(1, vec![5; 6], 40)));
    assert_eq!(got[&RequestId(2)], oracle(&greedy(2, vec![6; 6], 40)));
}

#[test]
fn a_request_that_waits_takes_the_place_of_one_that_ends_at_once() {
    let mut engine = engine(FakeModel::new(&config()));
    // Four run, the fifth waits for the first one's end.
    let requests: Vec<Request> =
        (0..5).map(|id| greedy(id, vec![id as u32 + 1; 6], if id == 0 { 4 } else { 20 })).collect();
    submit(&mut engine, &requests);
    let mut out = Vec::new();
    steps(&mut engine, 4, &mut out);
    assert_eq!((tokens(&out, 0).len(), tokens(&out, 4).len()), (4, 0));
    steps(&mut engine, 1, &mut out);
    assert_eq!((tokens(&out, 1).len(), tokens(&out, 4).len()), (5, 1));
}

#[test]
fn an_arrival_waits_for_the_step_in_flight_alone() {
    let mut engine = engine(FakeModel::new(&config()));
    engine.submit(greedy(1, vec![5; 6], 40)).unwrap();
    let mut out = Vec::new();
    steps(&mut engine, 4, &mut out);
    engine.submit(greedy(2, vec![6; 6], 40)).unwrap();
    out.clear();
    engine.step(NOW, &mut out).unwrap();
    assert_eq!(tokens(&out, 2).len(), 0);
    engine.step(NOW, &mut out).unwrap();
    assert_eq!((tokens(&out, 1).len(), tokens(&out, 2).len()), (2, 1));
}

#[test]
fn a_launch_is_due_only_while_a_step_is_in_flight_whose_duration_is_known() {
    let mut engine = engine(FakeModel::new(&config()));
    engine.submit(greedy(1, vec![5; 6], 7)).unwrap();
    let (mut out, mut due) = (Vec::new(), Vec::new());
    let ms = Duration::from_millis;
    for step in 0..7 {
        engine.step(NOW, &mut out).unwrap();
        assert_eq!(engine.step_was_read(ms(10 * step), ms(10 * (step + 1))), ms(10));
        due.push(engine.launch_due().map(|due| due.as_micros()));
    }
    // The prompt, the first decode, and a step behind another one come first. Nothing is in flight
    // behind the last step.
    assert_eq!(due, [None, None, None, Some(49_250), Some(59_250), Some(69_250), None]);
}

#[test]
fn requests_that_sample_on_the_host_are_not_computed_ahead() {
    let filtered = SamplingParams { top_k: 5, ..SamplingParams::default() };
    // XTC acts at some positions, and is the only filter.
    let xtc = SamplingParams { xtc_probability: 0.5, seed: 3, ..SamplingParams::default() };
    for other in [
        Request { sampling: xtc, ..request(2, vec![6; 6], 20) },
        Request { sampling: filtered, ..request(2, vec![6; 6], 20) },
        Request { logprobs: Some(1), ..greedy(2, vec![6; 6], 20) },
        Request {
            stop: StopConditions { max_tokens: Some(20), min_tokens: 20, stop_tokens: vec![1] },
            ..greedy(2, vec![6; 6], 20)
        },
    ] {
        let mut engine = engine(FakeModel::new(&config()));
        let both = [greedy(1, vec![5; 6], 20), other];
        submit(&mut engine, &both);
        let got = answers(run_out(&mut engine));
        both.iter().for_each(|request| assert_eq!(got[&request.id], oracle(request)));
        assert_eq!(engine.stats().steps_ahead, 0);
    }
}

#[test]
fn tokens_of_a_step_are_reported_before_the_failure_of_the_next() {
    let model = FakeModel::new(&config());
    let fail_after = model.fail_after();
    let mut engine = engine(model);
    let first = greedy(1, vec![5; 6], 20);
    engine.submit(first.clone()).unwrap();
    let mut out = Vec::new();
    steps(&mut engine, 3, &mut out);
    fail_after.store(0, Ordering::Relaxed);
    let error = engine.step(NOW, &mut out).unwrap_err();
    assert_eq!((error.rows, error.requests, error.is_fatal()), (1, 1, false));
    assert_eq!(tokens(&out, 1), oracle(&first).tokens[..4]);
    assert_eq!(reason(&out, 1), Some(FinishReason::StepFailed));
    assert!(!engine.has_work());
    fail_after.store(usize::MAX, Ordering::Relaxed);
    // Nothing that the failed step should have computed is in the prefix cache.
    let mut prompt = first.prompt.clone();
    prompt.extend(tokens(&out, 1));
    let second = greedy(2, prompt, 9);
    engine.submit(second.clone()).unwrap();
    assert_eq!(answers(run_out(&mut engine))[&RequestId(2)], oracle(&second));
}

#[test]
fn a_row_without_a_maximum_ends_its_request_alone() {
    let model = FakeModel::new(&config());
    let break_after = model.break_after();
    let mut engine = engine(model);
    let both = [greedy(1, vec![5; 6], 20), greedy(2, vec![6; 6], 20)];
    submit(&mut engine, &both);
    let mut out = Vec::new();
    steps(&mut engine, 3, &mut out);
    break_after.store(0, Ordering::Relaxed);
    while engine.has_work() {
        engine.step(NOW, &mut out).unwrap();
    }
    assert_eq!(reason(&out, 1), Some(FinishReason::BadLogits(SampleError::NoMaximum)));
    let known = oracle(&both[0]).tokens;
    assert!(known.starts_with(&tokens(&out, 1)) && tokens(&out, 1).len() < known.len());
    assert_eq!(answers(out)[&RequestId(2)], oracle(&both[1]));
}
