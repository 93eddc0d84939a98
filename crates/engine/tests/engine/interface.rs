// SPDX-License-Identifier: Apache-2.0

//! Tests of the engine's interface except token equality: refusals, ends of requests, cancellation,
//! scoring, failed steps.

use crate::fake::{FakeModel, VOCAB, answers, oracle, request, run_out};
use engine::{
    Engine, EngineConfig, EngineConfigError, EngineOutput, EngineStartError, FinishReason, KvBudget,
    RefuseReason, Request, RequestId, SamplingParamError, SamplingParams, ScoreKind, ScoreRequest,
    StopConditions, TokenUsage,
};
use ops::{KvType, Reference};
use std::sync::atomic::Ordering;
use std::time::Duration;

const NOW: Duration = Duration::ZERO;

fn config() -> EngineConfig {
    EngineConfig { block_tokens: 4, kv_types: KvType::F32.into(), ..EngineConfig::new(KvBudget::Tokens(120)) }
}

fn engine(config: &EngineConfig) -> Engine<Reference> {
    Engine::new(Box::new(FakeModel::new(config)), Reference::new(), config).unwrap()
}

fn finish(outputs: &[EngineOutput], id: u64) -> Option<(FinishReason, TokenUsage)> {
    outputs.iter().find_map(|output| match *output {
        EngineOutput::Finished { id: finished, reason, usage } if finished == RequestId(id) => {
            Some((reason, usage))
        }
        _ => None,
    })
}

#[test]
fn bad_requests_are_refused_by_name_and_leave_no_trace() {
    let mut engine = engine(&config());
    let good = request(1, vec![1, 2, 3], 5);
    let sampling = |sampling: SamplingParams| Request { sampling, ..good.clone() };
    let base = SamplingParams::default;
    let nan = f32::NAN;
    let cases = [
        (Request { prompt: vec![], ..good.clone() }, "the prompt is empty"),
        (Request { prompt: vec![1, 50], ..good.clone() }, "prompt[1] is token 50, the vocabulary has 50"),
        (
            Request { prompt: vec![1; 200], ..good.clone() },
            "prompt of 200 tokens does not fit in the context of 200",
        ),
        (Request { prompt: vec![1; 130], ..good.clone() }, "need 34 KV blocks of 4 tokens, the budget is 30"),
        (request(1, vec![1; 3], 119), "121 tokens of prompt and output need 31 KV blocks"),
        (Request { prior_output: 3, ..good.clone() }, "prior_output is 3 of 3 prompt tokens"),
        (
            Request { prompt: vec![1; 9], prior_output: 5, ..good.clone() },
            "prior_output of 5 tokens reaches max_tokens of 5",
        ),
        (Request { logprobs: Some(21), ..good.clone() }, "logprobs is 21, allowed are 0 to 20"),
        (sampling(SamplingParams { temperature: nan, ..base() }), "temperature is NaN, allowed are 0 to 2"),
        (sampling(SamplingParams { temperature: f32::INFINITY, ..base() }), "temperature is inf"),
        (sampling(SamplingParams { temperature: -0.1, ..base() }), "temperature is -0.1"),
        (sampling(SamplingParams { top_p: 0.0, ..base() }), "top_p is 0, allowed is above 0 and up to 1"),
        (sampling(SamplingParams { top_p: nan, ..base() }), "top_p is NaN"),
        (sampling(SamplingParams { min_p: 1.5, ..base() }), "min_p is 1.5, allowed are 0 to 1"),
        (sampling(SamplingParams { repetition_penalty: 0.0, ..base() }), "repetition_penalty is 0"),
        (
            sampling(SamplingParams { presence_penalty: 2.5, ..base() }),
            "presence_penalty is 2.5, allowed are -2 to 2",
        ),
        (sampling(SamplingParams { frequency_penalty: nan, ..base() }), "frequency_penalty is NaN"),
        (
            sampling(SamplingParams { logit_bias: vec![(0, nan)], ..base() }),
            "logit_bias is NaN, allowed are -100 to",
        ),
        (sampling(SamplingParams { logit_bias: vec![(50, 1.0)], ..base() }), "logit_bias names token 50"),
        (sampling(SamplingParams { logit_bias: vec![(5, 1.0), (5, 2.0)], ..base() }), "token 5 twice"),
    ];
    let count = cases.len() as u64;
    for (request, text) in cases {
        let reason = engine.submit(request).unwrap_err();
        assert!(reason.to_string().contains(text), "{reason}, expected {text}");
    }
    let stop = StopConditions { stop_tokens: vec![99], ..good.stop.clone() };
    assert!(matches!(
        engine.submit(Request { stop, ..good.clone() }),
        Err(RefuseReason::TokenId { field: "stop_tokens", index: 0, token: 99, vocab_size: 50 })
    ));
    assert!(!engine.has_work());
    assert_eq!(engine.stats().refused, count + 1);
    assert_eq!(engine.submit(good.clone()).map(|queued| queued.ahead), Ok(0));
    assert_eq!(engine.submit(good), Err(RefuseReason::DuplicateId(RequestId(1))));
}

#[test]
fn impossible_configurations_are_refused() {
    let refused = |config: EngineConfig| match Engine::new(
        Box::new(FakeModel::new(&config)),
        Reference::new(),
        &config,
    ) {
        Err(EngineStartError::Config(error)) => error,
        Err(other) => panic!("{other}"),
        Ok(_) => panic!("accepted"),
    };
    let zero = |field| EngineConfigError::Zero { field };
    assert_eq!(refused(EngineConfig { running_max: 0, ..config() }), zero("running_max"));
    assert_eq!(refused(EngineConfig { block_tokens: 0, ..config() }), zero("block_tokens"));
    assert_eq!(
        refused(EngineConfig { step_tokens: 63, running_max: 64, ..config() }),
        EngineConfigError::StepBelowRunning { step_tokens: 63, running_max: 64 }
    );
    // One block: 4 tokens * 2 (key and value) * 4 values * 4 bytes = 128 bytes.
    assert_eq!(
        refused(EngineConfig { kv: KvBudget::Bytes(255), ..config() }),
        EngineConfigError::BudgetTooSmall { budget_bytes: 255, needed_bytes: 256 }
    );
    assert_eq!(refused(EngineConfig { kv: KvBudget::Tokens(0), ..config() }), zero("kv_tokens"));
    assert!(matches!(
        refused(EngineConfig { kv: KvBudget::Tokens(usize::MAX), ..config() }),
        EngineConfigError::BudgetTooLarge { .. }
    ));
    let exact = EngineConfig { kv: KvBudget::Bytes(256), ..config() };
    assert_eq!(engine(&exact).stats().kv_blocks, 1);
}

#[test]
fn the_queue_is_bounded() {
    let mut engine = engine(&EngineConfig { queue_max: 2, ..config() });
    assert_eq!(engine.submit(request(1, vec![1], 5)).unwrap().ahead, 0);
    assert_eq!(engine.submit(request(2, vec![1], 5)).unwrap().ahead, 1);
    assert_eq!(
        engine.submit(request(3, vec![1], 5)),
        Err(RefuseReason::QueueFull { waiting: 2, max: 2, retry_after: Duration::from_secs(1) })
    );
    engine.step(NOW, &mut Vec::new()).unwrap();
    assert!(engine.submit(request(3, vec![1], 5)).is_ok());
}

#[test]
fn draining_refuses_new_requests_and_finishes_the_rest() {
    let mut engine = engine(&config());
    engine.submit(request(1, vec![1], 5)).unwrap();
    engine.drain();
    assert_eq!(engine.submit(request(2, vec![1], 5)), Err(RefuseReason::Draining));
    assert!(matches!(finish(&run_out(&mut engine), 1), Some((FinishReason::Length, _))));
}

#[test]
fn cancellation_frees_blocks_at_once_and_is_the_last_output() {
    let mut engine = engine(&config());
    let mut out = Vec::new();
    engine.submit(request(1, vec![1; 9], 50)).unwrap();
    engine.submit(request(2, vec![2; 9], 50)).unwrap();
    for _ in 0..3 {
        engine.step(NOW, &mut out).unwrap();
    }
    let used = engine.stats().kv_blocks_used;
    assert!(engine.cancel(RequestId(1), &mut out));
    assert_eq!(engine.stats().kv_blocks_used, used / 2);
    assert!(!engine.cancel(RequestId(1), &mut out), "it is gone");
    let usage = TokenUsage { prompt_tokens: 9, output_tokens: 3, cached_tokens: 0 };
    assert_eq!(finish(&out, 1), Some((FinishReason::Cancelled, usage)));
    engine.check_integrity().unwrap();
    let request = request(2, vec![2; 9], 50);
    out.extend(run_out(&mut engine));
    assert_eq!(answers(out)[&RequestId(2)], oracle(&request));
}

#[test]
fn deadlines_end_running_and_waiting_requests() {
    let mut engine = engine(&EngineConfig { running_max: 1, step_tokens: 8, ..config() });
    let at =
        |id, seconds| Request { deadline: Some(Duration::from_secs(seconds)), ..request(id, vec![1], 50) };
    engine.submit(at(1, 10)).unwrap();
    engine.submit(at(2, 5)).unwrap();
    let mut out = Vec::new();
    engine.step(Duration::from_secs(1), &mut out).unwrap();
    assert_eq!(engine.next_deadline(), Some(Duration::from_secs(5)));
    engine.step(Duration::from_secs(5), &mut out).unwrap();
    assert_eq!(finish(&out, 2).unwrap().0, FinishReason::Deadline);
    assert_eq!(engine.step(Duration::from_secs(10), &mut out).unwrap().rows, 0);
    assert_eq!(
        finish(&out, 1).unwrap(),
        (FinishReason::Deadline, TokenUsage { prompt_tokens: 1, output_tokens: 2, cached_tokens: 0 })
    );
    assert_eq!((engine.has_work(), engine.next_deadline(), engine.stats().kv_blocks_used), (false, None, 0));
}

#[test]
fn open_ended_output_stops_at_the_context_or_the_budget() {
    let open = Request { stop: StopConditions::default(), ..request(1, vec![1; 10], 0) };
    let length = |tokens| {
        let mut engine = engine(&EngineConfig { kv: KvBudget::Tokens(tokens), ..config() });
        engine.submit(open.clone()).unwrap();
        finish(&run_out(&mut engine), 1).unwrap()
    };
    // The cache holds 120 tokens. The 121st is only sampled, so it needs no slot.
    assert_eq!(
        length(120),
        (FinishReason::Length, TokenUsage { prompt_tokens: 10, output_tokens: 111, cached_tokens: 0 })
    );
    assert_eq!(length(400).1.output_tokens, 190);
}

#[test]
fn a_stop_token_ends_the_output_and_is_not_part_of_it() {
    let mut request = request(1, vec![1, 2, 3], 40);
    let free = oracle(&request);
    let stop = free.tokens[10];
    let first = free.tokens.iter().position(|&token| token == stop).unwrap();
    request.stop.stop_tokens = vec![stop];
    let mut engine = engine(&config());
    engine.submit(request.clone()).unwrap();
    let answer = &answers(run_out(&mut engine))[&RequestId(1)];
    assert_eq!(answer.tokens, free.tokens[..first]);
    assert_eq!(answer.reason, Some(FinishReason::Stop(stop)));
    // Before `min_tokens`, the sampler never draws the stop token.
    request.stop.min_tokens = 20;
    engine.submit(request).unwrap();
    let answer = &answers(run_out(&mut engine))[&RequestId(1)];
    assert!(answer.tokens.len() >= 20 && !answer.tokens[..20].contains(&stop));
}

#[test]
fn an_equal_prompt_is_found_in_the_cache() {
    let mut engine = engine(&config());
    engine.submit(request(1, vec![5; 23], 4)).unwrap();
    run_out(&mut engine);
    engine.submit(request(2, vec![5; 23], 4)).unwrap();
    let out = run_out(&mut engine);
    assert!(out.contains(&EngineOutput::Admitted { id: RequestId(2), cached_tokens: 20 }));
    assert_eq!(finish(&out, 2).unwrap().1.cached_tokens, 20);
    assert_eq!((engine.stats().prompt_tokens_cached, engine.stats().prompt_tokens_computed), (20, 26));
}

#[test]
fn scoring_reports_every_position_once_despite_preemption() {
    // A request of higher rank preempts the score request in the middle.
    let config = EngineConfig { kv: KvBudget::Tokens(48), step_tokens: 4, running_max: 2, ..config() };
    let mut engine = engine(&config);
    let tokens: Vec<u32> = (0..30).collect();
    let score = |id, kind| ScoreRequest {
        id: RequestId(id),
        tokens: tokens.clone(),
        kind,
        deadline: None,
        priority: 1,
    };
    engine.submit_score(score(1, ScoreKind::Logprobs { top: 2 })).unwrap();
    let mut out = Vec::new();
    for _ in 0..3 {
        engine.step(NOW, &mut out).unwrap();
    }
    engine.submit(Request { priority: 0, ..request(2, vec![3; 10], 30) }).unwrap();
    engine.set_paused(RequestId(1), true);
    while engine.stats().preemptions == 0 {
        engine.step(NOW, &mut out).unwrap();
    }
    engine.set_paused(RequestId(1), false);
    out.extend(run_out(&mut engine));
    engine.submit_score(score(3, ScoreKind::Logits)).unwrap();
    out.extend(run_out(&mut engine));

    let scored: Vec<_> = out
        .iter()
        .filter_map(|output| match output {
            EngineOutput::Scored { position, token, logprob, top, .. } => {
                Some((*position, *token, *logprob, top.clone()))
            }
            _ => None,
        })
        .collect();
    let rows: Vec<(usize, Vec<f32>)> = out
        .iter()
        .filter_map(|output| match output {
            EngineOutput::Logits { position, logits, .. } => Some((*position, logits.clone())),
            _ => None,
        })
        .collect();
    assert_eq!(scored.iter().map(|row| row.0).collect::<Vec<_>>(), (1..30).collect::<Vec<_>>());
    assert_eq!(rows.iter().map(|row| row.0).collect::<Vec<_>>(), (0..30).collect::<Vec<_>>());
    for (position, token, logprob, top) in scored {
        assert_eq!(token, tokens[position]);
        let row = &rows[position - 1].1;
        assert_eq!(row.len(), VOCAB);
        let total: f64 = row.iter().map(|&logit| f64::from(logit).exp()).sum();
        assert!((f64::from(logprob) - (f64::from(row[token as usize]) - total.ln())).abs() < 1e-5);
        assert_eq!(top.len(), 2);
        assert!(row.iter().all(|&logit| logit <= row[top[0].0 as usize]));
    }
    assert_eq!(finish(&out, 1).unwrap().0, FinishReason::Scored);
    assert_eq!(finish(&out, 3).unwrap().0, FinishReason::Scored);
}

#[test]
fn a_failed_step_ends_its_requests_and_only_those() {
    let config = EngineConfig { running_max: 2, step_tokens: 20, ..config() };
    let model = FakeModel::new(&config);
    let fail_after = model.fail_after();
    let mut engine = Engine::new(Box::new(model), Reference::new(), &config).unwrap();
    let waiting = request(3, vec![1; 13], 5);
    engine.submit(request(1, vec![1; 13], 5)).unwrap();
    engine.submit(request(2, vec![2; 13], 5)).unwrap();
    engine.submit(waiting.clone()).unwrap();
    fail_after.store(0, Ordering::Relaxed);
    let mut out = Vec::new();
    let error = engine.step(NOW, &mut out).unwrap_err();
    assert!(!error.is_fatal());
    assert_eq!((error.rows, error.requests), (20, 2));
    assert_eq!(finish(&out, 1).unwrap().0, FinishReason::StepFailed);
    assert_eq!(finish(&out, 2).unwrap().0, FinishReason::StepFailed);
    // The third prompt equals the first, whose blocks the failed step did not fill.
    let rest = run_out(&mut engine);
    assert!(rest.contains(&EngineOutput::Admitted { id: RequestId(3), cached_tokens: 0 }));
    assert_eq!(answers(rest)[&RequestId(3)], oracle(&waiting));
}

#[test]
fn parameters_are_checked_in_the_open_too() {
    assert_eq!(
        SamplingParams { min_p: -1.0, ..SamplingParams::default() }.check(10),
        Err(SamplingParamError::Range { field: "min_p", value: -1.0, min: 0.0, max: 1.0 })
    );
}

/// The test reports 10 ms per row. So prefill may lengthen a step by 100 ms, or by the lowest row
/// limit.
#[test]
fn streams_go_on_while_a_long_prompt_is_computed() {
    let config = EngineConfig { step_tokens: 128, ..config() };
    let config = EngineConfig { kv: KvBudget::Tokens(400), ..config };
    let mut engine = engine(&config);
    let mut out = Vec::new();
    let mut step = |engine: &mut Engine<Reference>| {
        let report = engine.step(NOW, &mut out).unwrap();
        engine.observe(&report, Duration::from_millis(10) * report.rows as u32);
        let got = out.drain(..).filter(|output| matches!(output, EngineOutput::Token(_))).count();
        (report.rows, got)
    };
    let endless = |id, prompt| Request { prompt, ..request(id, vec![1], 60) };
    engine.submit(endless(1, vec![1; 20])).unwrap();
    assert_eq!(step(&mut engine), (20, 1));
    engine.submit(endless(2, (0..130).map(|i| i % 7).collect())).unwrap();
    for _ in 0..4 {
        assert_eq!(step(&mut engine), (33, 1));
    }
    assert_eq!(step(&mut engine), (3, 2));
    assert_eq!(step(&mut engine), (2, 2));
    // No sequence decodes, so the prompt gets all rows.
    assert!(engine.cancel(RequestId(1), &mut Vec::new()) && engine.cancel(RequestId(2), &mut Vec::new()));
    engine.submit(endless(3, (0..130).map(|i| i * 3 % 7).collect())).unwrap();
    assert_eq!(step(&mut engine), (128, 0));
}
