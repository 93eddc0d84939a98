// SPDX-License-Identifier: Apache-2.0

//! Beam searches beside requests that generate: the outputs have the same bits as those of a search
//! without engine, however the engine computes, shares and preempts the beams.

use crate::fake::{FakeModel, VOCAB, answers, oracle, request, row_of, run_out};
use engine::sample::logprobs::LogProbs;
use engine::{
    Beam, BeamParams, BeamRequest, BeamToken, Engine, EngineConfig, EngineOutput, FinishReason, KvBudget,
    PromptLookup, RefuseReason, Request, RequestId, StopConditions,
};
use models::OutputKind;
use ops::{KvType, Reference};
use proptest::prelude::*;
use std::collections::HashMap;
use std::sync::atomic::Ordering;
use std::time::Duration;

fn beams(id: u64, prompt: Vec<u32>, max_tokens: u32, width: usize, choices: usize) -> BeamRequest {
    BeamRequest {
        id: RequestId(id),
        prompt,
        params: BeamParams { width, choices, length_penalty: 1.0, early_stopping: false },
        stop: StopConditions { max_tokens: Some(max_tokens), ..StopConditions::default() },
        logprobs: None,
        deadline: None,
        priority: 0,
        tenant: 0,
        scope: prefix::Scope::default(),
    }
}

fn config(block_tokens: usize, kv_tokens: usize, step_tokens: usize, running_max: usize) -> EngineConfig {
    EngineConfig {
        block_tokens,
        kv_types: KvType::F32.into(),
        step_tokens,
        running_max,
        ..EngineConfig::new(KvBudget::Tokens(kv_tokens))
    }
}

fn engine(config: &EngineConfig) -> Engine<Reference> {
    Engine::new(Box::new(FakeModel::new(config)), Reference::new(), config).unwrap()
}

/// vLLM's search, as its code does it: no early end unless asked for, every beam with all its
/// tokens. vLLM knows one stop token; of several, the most probable ends a beam.
fn searched(request: &BeamRequest) -> Vec<Beam> {
    let BeamParams { width, choices, length_penalty, early_stopping } = request.params;
    let stop = &request.stop;
    let score = |sum: f64, length: usize| sum / (length.max(1) as f64).powf(f64::from(length_penalty));
    let mut running: Vec<(Vec<BeamToken>, f64)> = vec![(Vec::new(), 0.0)];
    let mut ended: Vec<Beam> = Vec::new();
    for length in 0..stop.max_tokens.unwrap() as usize {
        let mut next = Vec::new();
        for (tokens, sum) in &running {
            let text: Vec<u32> =
                request.prompt.iter().copied().chain(tokens.iter().map(|token| token.token)).collect();
            let logits = row_of(OutputKind::Logits, &text);
            let row = LogProbs::new(&logits).unwrap();
            let all = row.top(VOCAB);
            let early = length < stop.min_tokens as usize;
            let possible = all.iter().filter(|(token, _)| !(early && stop.stop_tokens.contains(token)));
            let mut has_stopped = false;
            for &(token, logprob) in possible.take(2 * width) {
                let sum = sum + f64::from(logprob);
                if stop.stop_tokens.contains(&token) {
                    // Another stop token would end it with the same output.
                    if !std::mem::replace(&mut has_stopped, true) {
                        let score = score(sum, length);
                        ended.push(Beam { tokens: tokens.clone(), stop_token: Some(token), score });
                    }
                } else {
                    let top = row.top(usize::from(request.logprobs.unwrap_or(0)));
                    let mut tokens = tokens.clone();
                    tokens.push(BeamToken { token, logprob, top });
                    next.push((tokens, sum));
                }
            }
        }
        next.sort_by(|a, b| b.1.total_cmp(&a.1));
        next.truncate(width);
        running = next;
        if early_stopping && ended.len() >= width {
            running.clear();
        }
    }
    ended.extend(running.into_iter().map(|(tokens, sum)| {
        let score = score(sum, tokens.len());
        Beam { tokens, stop_token: None, score }
    }));
    ended.sort_by(|a, b| b.score.total_cmp(&a.score));
    ended.truncate(choices);
    ended
}

fn found(outputs: &[EngineOutput]) -> HashMap<RequestId, Vec<Beam>> {
    let beams = |output: &EngineOutput| match output {
        EngineOutput::Beams { id, beams } => Some((*id, beams.clone())),
        _ => None,
    };
    outputs.iter().filter_map(beams).collect()
}

fn progress(output: &EngineOutput, of: RequestId) -> Option<(usize, u64)> {
    match *output {
        EngineOutput::BeamProgress { id, length, computed_tokens } if id == of => {
            Some((length, computed_tokens))
        }
        _ => None,
    }
}

fn prompt(length: u32, start: u32) -> Vec<u32> {
    (0..length).map(|place| (place * place + start / 2) % VOCAB as u32).collect()
}

#[derive(Clone, Debug)]
struct Search {
    prompt: (u32, u32),
    max_tokens: u32,
    width: usize,
    choices: usize,
    length_penalty: f32,
    early_stopping: bool,
    stops: u32,
    min_tokens: u32,
    logprobs: Option<u8>,
}

fn searches() -> impl Strategy<Value = Vec<Search>> {
    let search = (
        (1..30_u32, 0..4_u32),
        1..20_u32,
        (1..7_usize).prop_flat_map(|width| (Just(width), 1..=width)),
        (prop::sample::select(vec![0.0, 1.0, 0.6, -1.5, 3.0]), any::<bool>()),
        0..12_u32,
        0..6_u32,
        prop::option::of(0..4_u8),
    );
    let search = search.prop_map(
        |(
            prompt,
            max_tokens,
            (width, choices),
            (length_penalty, early_stopping),
            stops,
            min_tokens,
            logprobs,
        )| Search {
            prompt,
            max_tokens,
            width,
            choices,
            length_penalty,
            early_stopping,
            stops,
            min_tokens: min_tokens.min(max_tokens),
            logprobs,
        },
    );
    prop::collection::vec(search, 1..5)
}

fn request_of(id: u64, search: &Search) -> BeamRequest {
    let Search { prompt: (length, start), max_tokens, width, choices, .. } = *search;
    let mut request = beams(id, prompt(length, start), max_tokens, width, choices);
    request.params.length_penalty = search.length_penalty;
    request.params.early_stopping = search.early_stopping;
    request.stop.stop_tokens = (0..search.stops).map(|stop| stop * 4).collect();
    request.stop.min_tokens = search.min_tokens;
    request.logprobs = search.logprobs;
    request
}

/// Runs the searches beside requests that generate, and compares all outputs with those that need
/// no engine.
fn check(mut engine: Engine<Reference>, searches: &[Search], generated: &[Request]) {
    let mut expected = HashMap::new();
    for (id, search) in (0..).zip(searches) {
        let request = request_of(id, search);
        expected.insert(request.id, searched(&request));
        engine.submit_beams(request).unwrap();
    }
    for request in generated {
        engine.submit(request.clone()).unwrap();
    }
    let outputs = run_out(&mut engine);
    assert_eq!(found(&outputs), expected);
    for (id, search) in (0..).map(RequestId).zip(searches) {
        let reports: Vec<(usize, u64)> = outputs.iter().filter_map(|output| progress(output, id)).collect();
        let tokens = expected[&id].iter().map(|beam| beam.tokens.len()).max().unwrap();
        let (length, computed) = *reports.last().unwrap();
        assert!(reports[0].0 == 1 && reports.is_sorted() && length >= tokens, "{reports:?}");
        let all: usize = expected[&id].iter().map(|beam| beam.tokens.len()).sum();
        assert!(
            computed <= (search.width * length) as u64 && computed >= all.min(length) as u64,
            "{reports:?}"
        );
    }
    let admitted = outputs.iter().filter(|output| matches!(output, EngineOutput::Admitted { .. })).count();
    assert_eq!(admitted, searches.len() + generated.len(), "a search is admitted once");
    let answers = answers(outputs);
    for request in generated {
        assert_eq!(answers[&request.id], oracle(request));
    }
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 400, ..ProptestConfig::default() })]
    /// Few blocks and few seats: beams are preempted, and wait for each other.
    #[test]
    fn i5_a_search_finds_the_same_outputs_in_every_batch(
        block_tokens in 1..8_usize,
        step_tokens in 7..30_usize,
        running_max in 1..8_usize,
        kv_tokens in 64..200_usize,
        prefix_cache in any::<bool>(),
        searches in searches(),
        others in 0..4_u32,
    ) {
        let config = EngineConfig { prefix_cache, ..config(block_tokens, kv_tokens, step_tokens, running_max) };
        // Some prompts are equal to those of searches, so that these lead or follow.
        let generated: Vec<Request> =
            (0..others).map(|id| request(100 + u64::from(id), prompt(1 + 5 * id, id), 12)).collect();
        check(engine(&config), &searches, &generated);
    }

    #[test]
    fn i5_draft_tokens_of_other_requests_change_no_search(searches in searches(), block_tokens in 1..8_usize) {
        let config = EngineConfig { draft_depth_max: 4, ..config(block_tokens, 256, 64, 12) };
        let drafter = Box::new(PromptLookup::default());
        let model = Box::new(FakeModel::new(&config));
        let engine = Engine::with_drafter(model, drafter, Reference::new(), &config).unwrap();
        let generated: Vec<Request> =
            (0..3).map(|id| request(100 + id, [3, 4, 5, 3, 4, 5, 3, 4].to_vec(), 20)).collect();
        check(engine, &searches, &generated);
    }
}

#[test]
fn beams_share_the_blocks_of_their_common_past() {
    let config = config(4, 4096, 256, 16);
    let model = FakeModel::new(&config);
    let rows = model.rows.clone();
    let mut engine = Engine::new(Box::new(model), Reference::new(), &config).unwrap();
    let search = beams(1, prompt(101, 0), 20, 8, 8);
    let expected = searched(&search);
    engine.submit_beams(search).unwrap();
    let (mut out, mut most) = (Vec::new(), 0);
    while engine.has_work() {
        engine.step(Duration::ZERO, &mut out).unwrap();
        most = most.max(engine.stats().kv_blocks_used);
    }
    assert_eq!(found(&out)[&RequestId(1)], expected);
    // The prompt once, then at most one row for each beam and token but the last.
    assert_eq!(rows.load(Ordering::Relaxed), 101 + 8 * 19);
    // 25 full blocks of the prompt, and up to 6 further ones for each beam.
    assert!(most <= 25 + 8 * 6, "{most} blocks");
    assert!(engine.stats().forks > 0);
}

#[test]
fn a_failed_step_ends_a_search_once_and_leaves_nothing() {
    let config = config(4, 256, 64, 8);
    let model = FakeModel::new(&config);
    let fail_after = model.fail_after();
    let mut engine = Engine::new(Box::new(model), Reference::new(), &config).unwrap();
    engine.submit_beams(beams(1, prompt(10, 0), 20, 4, 4)).unwrap();
    let mut out = Vec::new();
    for _ in 0..5 {
        engine.step(Duration::ZERO, &mut out).unwrap();
    }
    fail_after.store(0, Ordering::Relaxed);
    out.clear();
    assert!(engine.step(Duration::ZERO, &mut out).is_err());
    let [EngineOutput::Finished { reason: FinishReason::StepFailed, .. }] = &out[..] else {
        panic!("{out:?}")
    };
    assert!(!engine.has_work());
    fail_after.store(usize::MAX, Ordering::Relaxed);
    engine.submit_beams(beams(1, prompt(10, 0), 20, 4, 4)).unwrap();
    run_out(&mut engine);
}

#[test]
fn a_search_ends_at_its_deadline_or_when_it_is_cancelled() {
    for steps in 1..12 {
        let mut engine = engine(&config(4, 256, 64, 8));
        let deadline = Some(Duration::from_secs(9));
        engine.submit_beams(BeamRequest { deadline, ..beams(1, prompt(10, 0), 20, 4, 4) }).unwrap();
        engine.submit_beams(beams(2, prompt(7, 1), 20, 5, 1)).unwrap();
        let mut out = Vec::new();
        for _ in 0..steps {
            engine.step(Duration::ZERO, &mut out).unwrap();
        }
        assert_eq!(engine.next_deadline(), deadline);
        out.clear();
        assert!(engine.cancel(RequestId(2), &mut out));
        engine.step(Duration::from_secs(9), &mut out).unwrap();
        let reasons: Vec<FinishReason> = out
            .iter()
            .map(|output| match output {
                EngineOutput::Finished { reason, .. } => *reason,
                other => panic!("{other:?}"),
            })
            .collect();
        assert_eq!(reasons, [FinishReason::Cancelled, FinishReason::Deadline]);
        assert!(!engine.has_work());
        engine.check_integrity().unwrap();
        assert_eq!(engine.stats().kv_blocks_used, 0);
    }
}

#[test]
fn parameters_out_of_range_are_refused_by_name() {
    let mut engine = engine(&config(4, 256, 64, 8));
    let mut refused = |width, choices, length_penalty| {
        let mut request = beams(1, vec![1], 4, width, choices);
        request.params.length_penalty = length_penalty;
        match engine.submit_beams(request) {
            Err(RefuseReason::Param(error)) => error.to_string(),
            other => panic!("{other:?}"),
        }
    };
    assert!(refused(0, 0, 1.0).starts_with("beam_width"));
    assert!(refused(17, 1, 1.0).starts_with("beam_width"));
    assert!(refused(4, 5, 1.0).starts_with("choices"));
    assert!(refused(4, 0, 1.0).starts_with("choices"));
    assert!(refused(4, 4, f32::NAN).starts_with("length_penalty"));
    assert!(refused(4, 4, -11.0).starts_with("length_penalty"));
}
