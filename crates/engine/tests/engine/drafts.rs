// SPDX-License-Identifier: Apache-2.0

//! Tests of speculative decoding, except token equality: saved steps, released blocks, prefix cache
//! hits, failing drafters.

use crate::drafters::{Guess, KINDS, Scripted, drafter};
use crate::fake::{FakeModel, answers, oracle, request, run_out};
use engine::draft::draft_tokens::DRAFT_DEPTH_MAX;
use engine::{
    DraftModel, Drafter, Engine, EngineConfig, EngineConfigError, EngineOutput, EngineStartError,
    EngineStats, FinishReason, KvBudget, Request, RequestId, SamplingParams,
};
use ops::{KvType, Reference};
use std::sync::atomic::Ordering;
use std::time::Duration;

const NOW: Duration = Duration::ZERO;

fn config() -> EngineConfig {
    EngineConfig {
        block_tokens: 4,
        kv_types: KvType::F32.into(),
        draft_depth_max: 6,
        ..EngineConfig::new(KvBudget::Tokens(600))
    }
}

fn engine(config: &EngineConfig, drafter: Box<dyn Drafter<Reference>>) -> Engine<Reference> {
    Engine::with_drafter(Box::new(FakeModel::new(config)), drafter, Reference::new(), config).unwrap()
}

/// Runs the requests and checks their answers. Returns the number of steps and the engine's
/// counters.
fn run(config: &EngineConfig, requests: &[Request], guess: Guess) -> (u64, EngineStats) {
    let mut engine = engine(config, Box::new(Scripted::new(guess, requests)));
    for request in requests {
        engine.submit(request.clone()).unwrap();
    }
    let got = answers(run_out(&mut engine));
    for request in requests {
        assert_eq!(got[&request.id], oracle(request), "{}", request.id);
    }
    let stats = engine.stats();
    (stats.steps, stats)
}

fn three(max_tokens: u32) -> Vec<Request> {
    (0..3).map(|id| request(id, vec![id as u32, 7, 9], max_tokens)).collect()
}

#[test]
fn right_drafts_save_steps_and_are_counted_by_place() {
    let requests = three(60);
    let (plain, _) = run(&EngineConfig { draft_depth_max: 0, ..config() }, &requests, Guess::Right);
    let (drafted, stats) = run(&config(), &requests, Guess::Right);
    assert_eq!(plain, 60);
    assert!(drafted < 20, "{drafted} steps");
    assert_eq!(stats.drafts.drafted, stats.drafts.accepted);
    assert_eq!(stats.output_tokens, 180);
    // Each output token comes from a decode row or from a draft row.
    assert!(stats.drafts.accepted_tokens() > 120 && stats.drafts.accepted[0] >= stats.drafts.accepted[5]);
}

#[test]
fn wrong_drafts_are_given_up() {
    let requests = three(150);
    let (steps, stats) = run(&config(), &requests, Guess::Wrong);
    assert_eq!((steps, stats.drafts.accepted_tokens()), (150, 0));
    // At first, drafts use part of the allowed depth. Later, the engine only probes now and then.
    assert!(stats.drafts.drafted_tokens() < 100, "{:?}", stats.drafts);
}

#[test]
fn a_failing_drafter_loses_nothing_but_drafts() {
    let requests = three(20);
    let (steps, stats) = run(&config(), &requests, Guess::Nothing);
    assert_eq!((steps, stats.drafts.drafted_tokens()), (20, 0));
    assert!(stats.drafts.failures > 0);
}

#[test]
fn blocks_hold_no_more_than_tokens_after_each_step() {
    let requests = three(60);
    for kind in 0..KINDS {
        let mut engine = engine(&config(), drafter(kind, &config(), &requests));
        for request in &requests {
            engine.submit(request.clone()).unwrap();
        }
        let mut lengths = [3_usize; 3];
        let mut out = Vec::new();
        while engine.has_work() {
            engine.step(NOW, &mut out).unwrap();
            for output in out.drain(..) {
                match output {
                    EngineOutput::Token(token) => lengths[token.id.0 as usize] = token.position + 1,
                    EngineOutput::Finished { id, .. } => lengths[id.0 as usize] = 0,
                    _ => {}
                }
            }
            let needed: usize = lengths.iter().map(|length| length.div_ceil(4)).sum();
            assert!(engine.stats().kv_blocks_used <= needed, "kind {kind}: {lengths:?}");
            engine.check_integrity().unwrap();
        }
    }
}

/// Blocks filled by accepted drafts are cached. No block is cached under the text of rejected
/// drafts.
#[test]
fn the_prefix_cache_holds_what_was_put_out_and_nothing_else() {
    let first = request(0, vec![1, 2, 3], 60);
    let whole = [&first.prompt[..], &oracle(&first).tokens].concat();
    for kind in 0..KINDS {
        let mut engine = engine(&config(), drafter(kind, &config(), std::slice::from_ref(&first)));
        engine.submit(first.clone()).unwrap();
        run_out(&mut engine);
        // The same text arrives as a prompt. All its blocks are cached, except the block of its
        // last token.
        let again = request(1, whole.clone(), 3);
        engine.submit(again.clone()).unwrap();
        let out = run_out(&mut engine);
        let cached = (whole.len() - 1) / 4 * 4;
        assert!(
            out.contains(&EngineOutput::Admitted { id: RequestId(1), cached_tokens: cached }),
            "kind {kind}, {cached} expected: {:?}",
            out[0]
        );
        assert_eq!(answers(out)[&RequestId(1)], oracle(&again), "kind {kind}");
    }
}

#[test]
fn drafts_never_preempt_and_take_no_row_of_others() {
    // Eight decodes in a step of 9 rows leave one row for drafts.
    let config = EngineConfig { running_max: 8, step_tokens: 9, ..config() };
    let requests: Vec<Request> = (0..8).map(|id| request(id, vec![id as u32; 5], 30)).collect();
    let mut engine = engine(&config, Box::new(Scripted::new(Guess::Right, &requests)));
    for request in &requests {
        engine.submit(request.clone()).unwrap();
    }
    let mut out = Vec::new();
    let mut drafts = 0;
    while engine.has_work() {
        let report = engine.step(NOW, &mut out).unwrap();
        assert!(report.rows <= 9);
        if report.decode_rows == 8 {
            assert!(report.draft_rows <= 1);
        }
        drafts += report.draft_rows;
    }
    assert!(drafts > 10);
    assert_eq!(engine.stats().preemptions, 0);
    let got = answers(out);
    requests.iter().for_each(|request| assert_eq!(got[&request.id], oracle(request)));

    // At their ends, two sequences of 30 computed tokens fill the 16 blocks of the cache. Drafts
    // must not take a block from the other sequence.
    let tight = EngineConfig { kv: KvBudget::Tokens(64), ..config };
    let requests: Vec<Request> = (0..2).map(|id| request(id, vec![id as u32; 5], 26)).collect();
    for guess in [Guess::Right, Guess::Wrong] {
        let (_, stats) = run(&tight, &requests, guess);
        assert_eq!(stats.preemptions, 0);
    }
}

/// A stop token or `max_tokens` in the middle of right drafts ends the output there.
#[test]
fn an_end_inside_a_draft_is_the_end() {
    let free = oracle(&request(1, vec![1, 2, 3], 40));
    let place = (4..30).find(|&place| !free.tokens[..place].contains(&free.tokens[place])).unwrap();
    let mut stopped = request(1, vec![1, 2, 3], 40);
    stopped.stop.stop_tokens = vec![free.tokens[place]];
    for max_tokens in [1, 2, 5, 6, 7, 8, 13] {
        run(&config(), &[request(1, vec![1, 2, 3], max_tokens)], Guess::Right);
    }
    let mut engine =
        engine(&config(), Box::new(Scripted::new(Guess::Right, &[request(1, vec![1, 2, 3], 40)])));
    engine.submit(stopped.clone()).unwrap();
    let got = &answers(run_out(&mut engine))[&RequestId(1)];
    assert_eq!(got.reason, Some(FinishReason::Stop(free.tokens[place])));
    assert_eq!(got, &oracle(&stopped));
}

#[test]
fn text_that_repeats_itself_is_drafted_from_itself() {
    // Greedy sampling with a strong bias for token 3: the model repeats that token.
    let prompt: Vec<u32> = (0..24).map(|i| i % 6).collect();
    let sampling = SamplingParams { logit_bias: vec![(3, 50.0)], ..SamplingParams::greedy() };
    let request = Request { sampling, ..request(1, prompt, 50) };
    let mut engine = engine(&config(), drafter(0, &config(), &[]));
    engine.submit(request.clone()).unwrap();
    let got = answers(run_out(&mut engine));
    assert_eq!(got[&RequestId(1)], oracle(&request));
    assert!(engine.stats().steps < 25, "{} steps", engine.stats().steps);
}

/// The draft model equals the model, so every greedy draft is right.
#[test]
fn a_draft_model_is_fed_each_token_once_and_finds_what_others_left() {
    let config = config();
    let model = FakeModel::new(&config);
    let rows = model.rows.clone();
    let mut engine = engine(&config, Box::new(DraftModel::new(Box::new(model), config.step_tokens, 0.0)));
    let greedy = |id, prompt: Vec<u32>, max_tokens| Request {
        sampling: SamplingParams::greedy(),
        ..request(id, prompt, max_tokens)
    };
    let first = greedy(1, (0..60).map(|i| i % 7).collect(), 40);
    engine.submit(first.clone()).unwrap();
    let answer = &answers(run_out(&mut engine))[&RequestId(1)];
    assert_eq!(answer, &oracle(&first));
    let stats = engine.stats();
    assert_eq!(stats.drafts.drafted, stats.drafts.accepted, "its own drafts are wrong");
    // Four steps for the prompt, then about five tokens per step.
    assert!(stats.steps <= 4 + 10, "{} steps", stats.steps);
    // The draft model computes each token once, except the tokens of the last step.
    let fed = rows.swap(0, Ordering::Relaxed);
    assert!((90..100).contains(&fed), "{fed} rows");

    // The first request's text arrives as a prompt. The cached blocks also hold the draft model's
    // keys and values.
    let second = greedy(2, [&first.prompt[..], &answer.tokens[..30]].concat(), 7);
    engine.submit(second.clone()).unwrap();
    assert_eq!(answers(run_out(&mut engine))[&RequestId(2)], oracle(&second));
    assert!(rows.load(Ordering::Relaxed) <= 4 + 7, "{rows:?} rows");
    assert_eq!(engine.stats().drafts.failures, 0);
}

#[test]
fn preempted_sequences_are_drafted_on() {
    let config = EngineConfig { kv: KvBudget::Tokens(120), prefix_cache: false, ..config() };
    for kind in 0..KINDS {
        let requests: Vec<Request> = (0..12)
            .map(|id| Request {
                sampling: SamplingParams::greedy(),
                ..request(id, (0..10 + id as u32).collect(), 40)
            })
            .collect();
        let mut engine = engine(&config, drafter(kind, &config, &requests));
        for request in &requests {
            engine.submit(request.clone()).unwrap();
        }
        let got = answers(run_out(&mut engine));
        requests.iter().for_each(|request| assert_eq!(got[&request.id], oracle(request), "kind {kind}"));
        let stats = engine.stats();
        assert!(stats.preemptions > 0, "kind {kind}: {stats:?}");
        if kind == 1 {
            assert_eq!(stats.drafts.failures, 0);
            assert!(stats.drafts.accepted_tokens() * 10 > stats.drafts.drafted_tokens() * 9);
        }
    }
}

#[test]
fn a_depth_beyond_what_streams_keep_room_for_is_refused() {
    let config = EngineConfig { draft_depth_max: DRAFT_DEPTH_MAX + 1, ..config() };
    let refused = Engine::new(Box::new(FakeModel::new(&config)), Reference::new(), &config);
    assert!(matches!(refused, Err(EngineStartError::Config(EngineConfigError::DraftDepth { depth: 17 }))));
}
