// SPDX-License-Identifier: Apache-2.0

//! Invariant I5 on real models and backends.
//!
//! Requests give the same bits alone and together, in any order and with any chunk sizes. KV cache
//! pressure, shared prefixes, drafts, thread counts and instruction sets of one kind change
//! nothing.

use crate::fake::{GenerationResult, answers, request, run_out};
use bytes::Bytes;
use engine::{
    DRAFT_DEPTH_MAX, DraftModel, Drafter, Engine, EngineConfig, EngineStats, KvBudget, PromptLookup, Request,
    RequestId, SamplingParams,
};
use kernels::{Cpu, Isa};
use models::testing::{ModelFile, Transcript, demo_models, tree_data};
use ops::{AttentionSpan, Backend, KvType, Reference};
use std::collections::HashMap;
use std::time::Duration;

fn engine<B>(file: &ModelFile, mut backend: B, config: &EngineConfig) -> Engine<B>
where
    B: Backend<Data: From<Bytes>>,
{
    let vocab_size = file.description().unwrap().vocab_size;
    let limits = config.model_limits(vocab_size);
    let weights = file.weights().unwrap();
    let model = models::build(file.header().metadata(), weights, &mut backend, limits).unwrap();
    Engine::new(model, backend, config).unwrap()
}

/// An engine for `file` with drafts from the model `draft`, or from prompt lookup.
fn drafting<B>(
    file: &ModelFile,
    draft: Option<&ModelFile>,
    mut backend: B,
    config: &EngineConfig,
) -> Engine<B>
where
    B: Backend<Data: From<Bytes>>,
{
    let build = |file: &ModelFile, backend: &mut B| {
        let limits = config.model_limits(file.description().unwrap().vocab_size);
        models::build(file.header().metadata(), file.weights().unwrap(), backend, limits).unwrap()
    };
    let model = build(file, &mut backend);
    let drafter: Box<dyn Drafter<B>> = match draft {
        Some(draft) => Box::new(DraftModel::new(build(draft, &mut backend), config.step_tokens, 0.1)),
        None => Box::new(PromptLookup::default()),
    };
    Engine::with_drafter(model, drafter, backend, config).unwrap()
}

/// Runs one request at a time. No prefix is shared, and each prompt takes one step.
fn alone<B: Backend>(engine: &mut Engine<B>, requests: &[Request]) -> HashMap<RequestId, GenerationResult> {
    let mut outputs = Vec::new();
    for request in requests {
        engine.submit(request.clone()).unwrap();
        outputs.extend(run_out(engine));
    }
    answers(outputs)
}

/// Runs all requests in an order that depends on `shuffle`. After each step, `per_step` requests
/// arrive. Two requests with one prompt arrive one after the other.
fn together<B: Backend>(
    engine: &mut Engine<B>,
    requests: &[Request],
    shuffle: u64,
    per_step: usize,
) -> HashMap<RequestId, GenerationResult> {
    let mut order: Vec<&Request> = requests.iter().collect();
    order.sort_by_key(|request| {
        (request.id.0 / 2 + 1).wrapping_mul(shuffle | 1).wrapping_mul(0x9E37_79B9_7F4A_7C15) >> 7
    });
    let mut outputs = Vec::new();
    for arrivals in order.chunks(per_step) {
        arrivals.iter().for_each(|request| {
            engine.submit((*request).clone()).unwrap();
        });
        engine.step(Duration::ZERO, &mut outputs).unwrap();
    }
    outputs.extend(run_out(engine));
    answers(outputs)
}

/// Half of the requests are greedy. Each prompt serves two of them, and the prompts share prefixes.
fn requests(prompts: &[Vec<u32>], count: usize, max_tokens: u32) -> Vec<Request> {
    let sampled = |seed| SamplingParams {
        temperature: 0.8,
        top_k: 50,
        top_p: 0.95,
        min_p: 0.02,
        repetition_penalty: 1.1,
        seed,
        ..SamplingParams::default()
    };
    (0..count as u64)
        .map(|id| {
            let prompt = prompts[id as usize / 2 % prompts.len()].clone();
            let sampling = if id % 2 == 0 { SamplingParams::greedy() } else { sampled(id) };
            Request { sampling, logprobs: Some(3), ..request(id, prompt, max_tokens) }
        })
        .collect()
}

fn one_by_one() -> EngineConfig {
    EngineConfig {
        kv_types: KvType::F16.into(),
        prefix_cache: false,
        running_max: 64,
        queue_max: 64,
        ..EngineConfig::new(KvBudget::Tokens(4096))
    }
}

/// Configurations that chunk and batch the same work in different ways.
fn variants(pressure_tokens: usize) -> Vec<EngineConfig> {
    let base = EngineConfig { prefix_cache: true, ..one_by_one() };
    vec![
        base.clone(),
        EngineConfig { step_tokens: 64, ..base.clone() },
        EngineConfig { running_max: 9, step_tokens: 29, block_tokens: 8, ..base.clone() },
        EngineConfig { kv: KvBudget::Tokens(pressure_tokens), step_tokens: 71, ..base.clone() },
        EngineConfig { kv: KvBudget::Tokens(pressure_tokens), prefix_cache: false, ..base },
    ]
}

fn check_variants<B>(
    file: &ModelFile,
    requests: &[Request],
    expected: &HashMap<RequestId, GenerationResult>,
    pressure_tokens: usize,
    make: impl Fn() -> B,
) where
    B: Backend<Data: From<Bytes>>,
{
    let mut preemptions = 0;
    let (mut cached, mut forks) = (0, 0);
    for (index, config) in variants(pressure_tokens).into_iter().enumerate() {
        let mut engine = engine(file, make(), &config);
        let got = together(&mut engine, requests, index as u64 * 77, 1 + index * 5);
        for request in requests {
            assert_eq!(got[&request.id], expected[&request.id], "{} with {config:?}", request.id);
        }
        preemptions += engine.stats().preemptions;
        cached += engine.stats().prompt_tokens_cached;
        forks += engine.stats().forks;
    }
    assert!(preemptions > 0 && cached > 0, "{preemptions} preemptions, {cached} cached tokens: no pressure");
    assert!(forks > 0, "no prompt was computed for two");
}

#[test]
fn reference_gives_the_same_tokens_with_any_batch_neighbours() {
    let file = ModelFile::open(&tree_data().join("qwen3.Q4_K_M.gguf")).unwrap();
    let vocab_size = file.description().unwrap().vocab_size as u32;
    let prompts: Vec<Vec<u32>> = (0..6_u32)
        .map(|i| {
            (0..18 + 9 * (i % 3))
                .map(|p| (if p < 17 { p * 5 } else { p * 31 + i * 17 }) % vocab_size)
                .collect()
        })
        .collect();
    let requests = requests(&prompts, 12, 20);
    let expected = alone(&mut engine(&file, Reference::new(), &one_by_one()), &requests);
    check_variants(&file, &requests, &expected, 160, Reference::new);
}

/// The prompts are longer than the window, and three of them share a prefix.
#[test]
fn a_model_with_windows_keeps_the_promise_too() {
    let file = ModelFile::open(&tree_data().join("gemma3.gguf")).unwrap();
    let windows = file
        .description()
        .unwrap()
        .attention_spans
        .iter()
        .filter(|&&span| span != AttentionSpan::Full)
        .count();
    assert_eq!(windows, 5, "of six layers");
    let prompts: Vec<Vec<u32>> = (0..6_u32)
        .map(|i| {
            let head = if i < 3 { 40 } else { i };
            (0..30 + 12 * (i % 4)).map(|p| (if p < head { p * 5 } else { p * 31 + i * 17 }) % 256).collect()
        })
        .collect();
    let requests = requests(&prompts, 12, 90);
    for isa in Isa::available() {
        let make = || Cpu::with_isa(2, isa).unwrap();
        let expected = alone(&mut engine(&file, make(), &one_by_one()), &requests);
        check_variants(&file, &requests, &expected, 176, make);
    }
    let stats = check_drafts((&file, None), &requests, 176);
    assert!(stats.drafts.drafted_tokens() > 0, "{stats:?}");
    // A draft model with full attention, whose drafts are wrong most of the time.
    let draft = ModelFile::open(&tree_data().join("llama.Q8_0.gguf")).unwrap();
    let stats = check_drafts((&file, Some(&draft)), &requests, 176);
    assert!(stats.drafts.drafted_tokens() > 0, "{stats:?}");
}

fn pycoder(name: &str) -> (ModelFile, Vec<Transcript>) {
    let file = ModelFile::open(&demo_models().join(format!("{name}.gguf"))).unwrap();
    (file, Transcript::all(&demo_models().join(format!("{name}.greedy.jsonl"))).unwrap())
}

#[test]
fn sixty_four_requests_give_the_same_tokens_with_any_batch_neighbours() {
    let (file, transcripts) = pycoder("pycoder-7m-q8_0");
    // Prompts of 20 to 60 tokens. Longer prompts continue shorter ones.
    let prompts: Vec<Vec<u32>> = (0..16)
        .map(|i| {
            let transcript = &transcripts[i % 8];
            let whole = [&transcript.prompt_tokens[..], &transcript.tokens[..]].concat();
            whole[..20 + i * 2 + i / 8 * 10].to_vec()
        })
        .collect();
    let requests = requests(&prompts, 64, 16);
    let expected = alone(&mut engine(&file, Cpu::new(1).unwrap(), &one_by_one()), &requests);
    let distinct: std::collections::HashSet<_> = expected.values().map(|answer| &answer.tokens).collect();
    assert!(distinct.len() > 32, "sampled requests differ: {}", distinct.len());
    for threads in [1, 2] {
        check_variants(&file, &requests, &expected, 640, || Cpu::new(threads).unwrap());
    }
}

#[test]
fn memory_of_a_burst_comes_back_though_requests_go_on_coming() {
    let (file, _) = pycoder("pycoder-7m-q8_0");
    let config = EngineConfig { prefix_cache: true, ..one_by_one() };
    let mut engine = engine(&file, Cpu::new(1).unwrap(), &config);
    let prompt = |text: u32| (0..60).map(|place| 100 + text * 60 + place).collect();
    let prompts: Vec<Vec<u32>> = (0..12).map(prompt).collect();
    let burst = requests(&prompts, prompts.len(), 4);
    together(&mut engine, &burst, 3, burst.len());
    engine.release_memory().unwrap();
    let after_burst = engine.kv_cache_usage().bytes;
    // One request arrives again and again, like a probe.
    let mut bytes = Vec::new();
    for _ in 0..4 {
        alone(&mut engine, &burst[11..]);
        engine.evict_unused_prefixes();
        engine.release_memory().unwrap();
        bytes.push(engine.kv_cache_usage().bytes);
    }
    let one = after_burst / 12;
    assert!(bytes[3] <= 4 * one, "of {after_burst} bytes {bytes:?} stay for one prompt");
    let found = engine.stats().prompt_tokens_cached;
    alone(&mut engine, &burst[11..]);
    assert!(engine.stats().prompt_tokens_cached > found + 32, "what is asked for is still there");
    engine.check_integrity().unwrap();
}

#[test]
fn what_an_idle_engine_gives_back_is_computed_again() {
    let (file, transcripts) = pycoder("pycoder-7m-q8_0");
    let prompts: Vec<Vec<u32>> =
        transcripts[..4].iter().map(|transcript| transcript.tokens[..40].to_vec()).collect();
    let requests = requests(&prompts, 8, 12);
    let expected = alone(&mut engine(&file, Cpu::new(1).unwrap(), &one_by_one()), &requests);
    let config = EngineConfig { prefix_cache: true, ..one_by_one() };
    let mut engine = engine(&file, Cpu::new(1).unwrap(), &config);
    assert_eq!(engine.kv_cache_usage().bytes, 0);
    assert_eq!(together(&mut engine, &requests, 5, 3), expected);
    let block_bytes = engine.stats().kv_block_bytes as u64;
    let used = engine.kv_cache_usage().bytes;
    engine.release_memory().unwrap();
    let kept = engine.kv_cache_usage().bytes;
    let cached = engine.stats().kv_blocks_cached as u64 * block_bytes;
    assert!((cached..used).contains(&kept), "{kept} of {used} bytes are kept for {cached} that can be found");
    assert_eq!(together(&mut engine, &requests, 9, 3), expected);
    assert!(engine.stats().prompt_tokens_cached > 0);
    assert!(engine.reset_prefix_cache());
    engine.release_memory().unwrap();
    assert_eq!((engine.kv_cache_usage().bytes, engine.stats().kv_blocks_cached), (0, 0));
    engine.check_integrity().unwrap();
    assert_eq!(together(&mut engine, &requests, 13, 3), expected);
}

#[test]
fn quantized_blocks_of_256_keep_the_promise_too() {
    let (file, transcripts) = pycoder("pycoder-22m-q4_k_m");
    let prompts: Vec<Vec<u32>> =
        transcripts[..4].iter().map(|transcript| transcript.tokens[..30].to_vec()).collect();
    let requests = requests(&prompts, 12, 10);
    for isa in Isa::available() {
        let make = || Cpu::with_isa(2, isa).unwrap();
        let expected = alone(&mut engine(&file, make(), &one_by_one()), &requests);
        check_variants(&file, &requests, &expected, 144, make);
    }
}

#[test]
fn greedy_output_is_the_recorded_one_up_to_the_first_close_call() {
    let (file, transcripts) = pycoder("pycoder-7m-q8_0");
    let config = EngineConfig { queue_max: transcripts.len(), ..one_by_one() };
    let mut engine = engine(&file, Cpu::new(2).unwrap(), &config);
    for (line, transcript) in transcripts.iter().enumerate() {
        let prompt = transcript.prompt_tokens.clone();
        let request = request(line as u64, prompt, transcript.tokens.len() as u32);
        engine.submit(Request { sampling: SamplingParams::greedy(), ..request }).unwrap();
    }
    let answers = answers(run_out(&mut engine));
    let mut compared = 0;
    for (line, transcript) in transcripts.iter().enumerate() {
        // Below this gap, llama.cpp's own rounding of activations decides the token.
        let close = transcript.gap.iter().position(|&gap| gap < 0.3).unwrap_or(transcript.gap.len());
        let answer = &answers[&RequestId(line as u64)];
        assert_eq!(answer.tokens[..close], transcript.tokens[..close], "line {line}");
        compared += close;
    }
    println!("{compared} tokens compared over {} prompts", transcripts.len());
    assert!(compared > 10 * transcripts.len());
}

/// Checks that the output with drafts equals the output without, alone and in a batch. Returns the
/// counters of the run alone.
fn check_drafts(
    (file, draft): (&ModelFile, Option<&ModelFile>),
    requests: &[Request],
    pressure_tokens: usize,
) -> EngineStats {
    let make = || Cpu::new(2).unwrap();
    let expected = alone(&mut engine(file, make(), &one_by_one()), requests);
    let drafted = |config| EngineConfig { draft_depth_max: 4, ..config };
    for (index, config) in variants(pressure_tokens).into_iter().enumerate() {
        let mut engine = drafting(file, draft, make(), &drafted(config.clone()));
        let got = together(&mut engine, requests, index as u64 * 77, 1 + index * 5);
        for request in requests {
            assert_eq!(got[&request.id], expected[&request.id], "{} with {config:?}", request.id);
        }
        assert_eq!(engine.stats().drafts.failures, 0);
    }
    let deep = EngineConfig { draft_depth_max: DRAFT_DEPTH_MAX, ..one_by_one() };
    let mut engine = drafting(file, draft, make(), &deep);
    assert_eq!(alone(&mut engine, requests), expected, "alone");
    engine.stats()
}

#[test]
fn drafts_of_the_small_model_change_no_token_of_the_large_one() {
    let (file, transcripts) = pycoder("pycoder-22m-q4_k_m");
    let (draft, _) = pycoder("pycoder-7m-q8_0");
    let prompts: Vec<Vec<u32>> =
        transcripts[..6].iter().map(|transcript| transcript.tokens[..30].to_vec()).collect();
    let stats = check_drafts((&file, Some(&draft)), &requests(&prompts, 12, 24), 200);
    // Half of the requests sample at temperature 0.8. The draft model cannot foresee their tokens.
    assert!(stats.drafts.accepted_tokens() * 10 > stats.drafts.drafted_tokens() * 3, "{stats:?}");
    assert!(stats.steps * 10 < stats.output_tokens * 7, "{stats:?}");
}

#[test]
fn drafts_from_the_text_itself_change_no_token() {
    let (file, transcripts) = pycoder("pycoder-7m-q8_0");
    // Each prompt holds a text and then its first half again, as in an edit.
    let prompts: Vec<Vec<u32>> = transcripts[..6]
        .iter()
        .map(|transcript| [&transcript.tokens[..40], &transcript.tokens[..20]].concat())
        .collect();
    let stats = check_drafts((&file, None), &requests(&prompts, 12, 24), 300);
    assert!(stats.drafts.accepted_tokens() > 40, "{stats:?}");
}
