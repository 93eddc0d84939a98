// SPDX-License-Identifier: Apache-2.0

//! Invariant I5 on a fake model that detects every mistake in a step.
//!
//! The tokens and log-probabilities of each request equal the oracle's, bit for bit. Batch
//! neighbours, chunked prefill, KV cache pressure, shared blocks, order of arrival, drafts and
//! resumes change nothing.

use crate::drafters::{KINDS, drafter};
use crate::fake::{FakeModel, GenerationResult, VOCAB, answers, id_of, oracle, request, run_out};
use engine::{
    DRAFT_DEPTH_MAX, DryBreakers, DryParams, Engine, EngineConfig, EngineOutput, KvBudget, MirostatParams,
    MirostatVersion, Request, SamplingParams, StopConditions,
};
use ops::{KvType, Reference};
use proptest::prelude::*;
use std::collections::{HashMap, VecDeque};
use std::time::Duration;

fn config() -> impl Strategy<Value = EngineConfig> {
    let depth = prop_oneof![Just(0), 1..=DRAFT_DEPTH_MAX];
    (1..9_usize, 12..40_usize, 1..7_usize, 0..20_usize, any::<bool>(), depth).prop_map(
        |(block_tokens, kv_blocks, running_max, more_rows, prefix_cache, depth)| {
            EngineConfig {
                block_tokens,
                kv_types: KvType::F32.into(),
                step_tokens: running_max + more_rows,
                running_max,
                prefix_cache,
                draft_depth_max: depth,
                // No request needs more than 60 tokens. In most cases, several requests compete for
                // the cache.
                ..EngineConfig::new(KvBudget::Tokens((kv_blocks * block_tokens).max(62)))
            }
        },
    )
}

/// Parameters that depend on earlier tokens or need a second random number, and the less common
/// filters.
fn more_params() -> impl Strategy<Value = SamplingParams> {
    let dry = (0.1..2.0_f32, 1.0..2.0_f32, 1..4_u32, prop::option::of(0..40_u32), 0..VOCAB as u32).prop_map(
        |(multiplier, base, allowed_length, last_n, breaker)| DryParams {
            multiplier,
            base,
            allowed_length,
            last_n,
            breakers: DryBreakers::new([vec![breaker], vec![breaker, 1]]),
        },
    );
    let mirostat = (any::<bool>(), 0.5..5.0_f32, 0.05..0.9_f32).prop_map(|(one, tau, eta)| MirostatParams {
        version: if one { MirostatVersion::One } else { MirostatVersion::Two },
        tau,
        eta,
    });
    let maybe = |off: f32, range: std::ops::Range<f32>| prop_oneof![2 => Just(off), 1 => range];
    (
        prop::option::weighted(0.3, dry),
        prop::option::weighted(0.3, mirostat),
        (maybe(0.0, 0.5..3.0), maybe(1.0, 0.2..1.0), maybe(0.0, 0.2..1.0), maybe(0.0, 0.1..1.0)),
    )
        .prop_map(|(dry, mirostat, (top_n_sigma, typical_p, xtc_probability, dynatemp_range))| {
            SamplingParams {
                dry,
                mirostat,
                top_n_sigma,
                typical_p,
                xtc_probability,
                dynatemp_range,
                ..SamplingParams::default()
            }
        })
}

fn params() -> impl Strategy<Value = SamplingParams> {
    let maybe = |off: f32, range: std::ops::Range<f32>| prop_oneof![Just(off), range];
    (
        (
            prop_oneof![Just(0.0_f32), Just(1.0), 0.1..2.0_f32],
            0..10_u32,
            maybe(1.0, 0.1..1.0),
            maybe(0.0, 0.0..0.5),
        ),
        (maybe(1.0, 0.5..2.0), maybe(0.0, -2.0..2.0), maybe(0.0, -2.0..2.0)),
        prop::collection::btree_map(0..VOCAB as u32, -5.0..5.0_f32, 0..3),
        any::<u64>(),
        more_params(),
    )
        .prop_map(|((temperature, top_k, top_p, min_p), penalties, bias, seed, more)| SamplingParams {
            temperature,
            top_k,
            top_p,
            min_p,
            repetition_penalty: penalties.0,
            presence_penalty: penalties.1,
            frequency_penalty: penalties.2,
            logit_bias: bias.into_iter().collect(),
            seed,
            ..more
        })
}

/// Each prompt begins with a part of one of two common texts and ends with its own tail. So
/// requests share prefixes.
fn one_request() -> impl Strategy<Value = Request> {
    let prompt = (0..2_u32, 0..30_usize, prop::collection::vec(0..VOCAB as u32, 1..8));
    let stop = (1..20_u32, 0..8_u32, prop::collection::vec(0..VOCAB as u32, 0..3));
    (prompt, stop, params(), prop::option::of(0..4_u8), 0..3_u32, -1..2_i32).prop_map(
        |(
            (text, common, tail),
            (max_tokens, min_tokens, stop_tokens),
            sampling,
            logprobs,
            choice,
            priority,
        )| {
            let mut prompt: Vec<u32> = (0..common as u32).map(|i| (i * 7 + text) % VOCAB as u32).collect();
            prompt.extend(tail);
            Request {
                sampling,
                stop: StopConditions { max_tokens: Some(max_tokens), min_tokens, stop_tokens },
                logprobs,
                choice,
                priority,
                ..request(0, prompt, max_tokens)
            }
        },
    )
}

/// When requests arrive, resume and pause, and which drafter serves them.
struct SubmissionSchedule {
    /// Steps between one arrival and the next.
    gaps: Vec<usize>,
    /// For each request: after how many tokens its stream is cut and resumed.
    cuts: Vec<Option<usize>>,
    /// For each step: whether the first request is paused.
    paused: Vec<bool>,
    kind: usize,
    backend: Reference,
}

/// A backend, and the number of the first requests whose tokens are drawn on the host.
fn backend() -> impl Strategy<Value = (Reference, usize)> {
    (any::<bool>(), prop_oneof![Just(0), 1..16_usize, Just(usize::MAX)]).prop_map(|(runs_ahead, sampled)| {
        (if runs_ahead { Reference::new().running_ahead() } else { Reference::new() }, sampled)
    })
}

/// The device draws the tokens of most of these requests, greedily or with random numbers.
fn drawn_on_device(index: usize, request: Request) -> Request {
    let (temperature, seed) = ([0.0, 1.0, 0.6][index % 3], request.sampling.seed);
    // One of eight has a filter that acts at some positions: then the host draws.
    let xtc_probability = if seed % 8 == 0 { 0.5 } else { 0.0 };
    let sampling = SamplingParams { temperature, seed, xtc_probability, ..SamplingParams::default() };
    Request { sampling, logprobs: None, ..request }
}

/// Numbers the requests. The device draws the tokens of all but the first `sampled`.
fn numbered(requests: Vec<Request>, sampled: usize) -> Vec<Request> {
    let number = |(index, request)| {
        let request = Request { id: engine::RequestId(index as u64), ..request };
        if index < sampled { request } else { drawn_on_device(index, request) }
    };
    requests.into_iter().enumerate().map(number).collect()
}

fn served_as_if_alone(
    config: &EngineConfig,
    requests: Vec<Request>,
    plan: SubmissionSchedule,
) -> Result<(), TestCaseError> {
    let SubmissionSchedule { gaps, cuts, paused, kind, backend } = plan;
    let model = Box::new(FakeModel::new(config));
    let mut engine = Engine::with_drafter(model, drafter(kind, config, &requests), backend, config).unwrap();
    let mut arrivals: VecDeque<(usize, Request)> = gaps.iter().copied().zip(requests.clone()).collect();
    let mut cuts: HashMap<_, _> =
        requests.iter().zip(cuts).filter_map(|(request, cut)| Some((request.id, cut?))).collect();
    let mut got: HashMap<_, GenerationResult> =
        requests.iter().map(|request| (request.id, GenerationResult::new())).collect();
    let mut out = Vec::new();
    let mut paused = paused.into_iter();
    while engine.has_work() || !arrivals.is_empty() {
        while let Some((gap, _)) = arrivals.front_mut() {
            if *gap > 0 && engine.has_work() {
                *gap -= 1;
                break;
            }
            let (_, request) = arrivals.pop_front().unwrap();
            engine.submit(request).unwrap();
        }
        if let Some(paused) = paused.next() {
            engine.set_paused(engine::RequestId(0), paused);
        } else {
            engine.set_paused(engine::RequestId(0), false);
        }
        let report = engine.step(Duration::ZERO, &mut out).unwrap();
        prop_assert!(report.rows <= config.step_tokens);
        engine.check_integrity().unwrap();
        for output in out.drain(..) {
            got.get_mut(&id_of(&output)).unwrap().take(output);
        }
        // Resume: the test cancels the request and submits it again with its output so far.
        for (index, request) in requests.iter().enumerate() {
            let answer = got.get_mut(&request.id).unwrap();
            if cuts.get(&request.id).is_some_and(|&cut| cut <= answer.tokens.len())
                && answer.reason.is_none()
                && engine.cancel(request.id, &mut out)
            {
                cuts.remove(&request.id);
                out.clear();
                let mut resumed = request.clone();
                resumed.prompt.extend(&answer.tokens);
                resumed.prior_output = answer.tokens.len();
                resumed.sampler_state = answer.state;
                arrivals.push_back((index % 3, resumed));
            }
        }
    }
    for request in &requests {
        prop_assert_eq!(&got[&request.id], &oracle(request));
    }
    prop_assert_eq!(engine.stats().kv_blocks_used, 0);
    Ok(())
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(400))]

    #[test]
    fn tokens_do_not_depend_on_batch_neighbours(
        config in config(),
        requests in prop::collection::vec(one_request(), 1..16),
        gaps in prop::collection::vec(0..4_usize, 16),
        cuts in prop::collection::vec(prop::option::of(0..12_usize), 16),
        paused in prop::collection::vec(any::<bool>(), 64),
        kind in 0..KINDS,
        (backend, sampled) in backend(),
    ) {
        let plan = SubmissionSchedule { gaps, cuts, paused, kind, backend };
        served_as_if_alone(&config, numbered(requests, sampled), plan)?;
    }

    /// The choices of a prompt arrive together, so that the scheduler forks them. The choices
    /// differ in everything but the prompt.
    #[test]
    fn choices_of_one_prompt_do_not_depend_on_each_other(
        config in config(),
        requests in prop::collection::vec((one_request(), prop::collection::vec(one_request(), 1..6)), 1..4),
        gaps in prop::collection::vec(0..4_usize, 18),
        cuts in prop::collection::vec(prop::option::of(0..12_usize), 18),
        paused in prop::collection::vec(any::<bool>(), 64),
        kind in 0..KINDS,
        (backend, sampled) in backend(),
    ) {
        let (mut together, mut pauses) = (Vec::new(), Vec::new());
        for (gap, (first, others)) in gaps.into_iter().zip(requests) {
            let prompt = first.prompt.clone();
            pauses.extend(std::iter::once(gap).chain(others.iter().map(|_| 0)));
            let same_prompt = |other| Request { prompt: prompt.clone(), ..other };
            together.extend(std::iter::once(first).chain(others.into_iter().map(same_prompt)));
        }
        let plan = SubmissionSchedule { gaps: pauses, cuts, paused, kind, backend };
        served_as_if_alone(&config, numbered(together, sampled), plan)?;
    }
}

/// A fixed case with KV cache pressure, in which the engine preempts, evicts and shares blocks.
#[test]
fn pressure_preempts_and_answers_stay_the_same() {
    let config = EngineConfig {
        block_tokens: 4,
        kv_types: KvType::F32.into(),
        step_tokens: 20,
        running_max: 8,
        ..EngineConfig::new(KvBudget::Tokens(120))
    };
    let requests: Vec<Request> =
        (0..40_u64).map(|id| request(id, (0..10 + id as u32 % 7).map(|i| i % 5).collect(), 40)).collect();
    let mut engine = Engine::new(Box::new(FakeModel::new(&config)), Reference::new(), &config).unwrap();
    for request in &requests {
        engine.submit(request.clone()).unwrap();
    }
    let outputs: Vec<EngineOutput> = run_out(&mut engine);
    let stats = engine.stats();
    assert!(stats.preemptions > 10 && stats.prompt_tokens_cached > 100 && stats.evictions > 10, "{stats:?}");
    let got = answers(outputs);
    for request in &requests {
        assert_eq!(got[&request.id], oracle(request), "{}", request.id);
    }
}
