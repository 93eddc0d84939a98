// SPDX-License-Identifier: Apache-2.0

//! Measures what the engine adds to a model's step: scheduling, prefix cache lookup, sampling.
//!
//! Goals: a step with 4,096 running sequences under 200 us, a lookup over 32,768 tokens under 300
//! us.

use divan::Bencher;
use engine::sample::draw::SampleContext;
use engine::sample::history::History;
use engine::sample::logprobs::LogProbs;
use engine::sample::sampler::Sampler;
use engine::schedule::scheduler::Scheduler;
use engine::schedule::sequence::{NewSequence, SequenceKind};
use engine::schedule::sequence_id::SequenceId;
use engine::schedule::step_plan::{ChunkOutputs, SchedulerLimits};
use engine::{DryBreakers, DryParams, MirostatParams, MirostatVersion, SamplerState, SamplingParams};
use prefix::Scope;

const BLOCK_TOKENS: usize = 16;
/// Vocabulary size of qwen3.
const VOCAB: usize = 151_936;

fn main() {
    divan::main();
}

fn scheduler(running_max: usize, blocks: usize) -> Scheduler {
    let limits = SchedulerLimits {
        block_tokens: BLOCK_TOKENS,
        step_tokens: 2 * running_max + 512,
        running_max,
        score_rows_max: 16,
        draft_rows_max: 8,
        prefix_cache: true,
        can_fork: true,
    };
    Scheduler::new(limits, blocks)
}

fn add(scheduler: &mut Scheduler, tokens: Vec<u32>, tokens_max: usize) -> SequenceId {
    let scope = &Scope::default();
    scheduler.add(NewSequence {
        kind: SequenceKind::Generate,
        priority: 0,
        tenant: 0,
        tokens,
        tokens_max,
        scope,
    })
}

fn step(scheduler: &mut Scheduler, sequence_ids: &mut Vec<SequenceId>) {
    sequence_ids.clear();
    scheduler.schedule(usize::MAX);
    let last = |chunk: &&engine::schedule::step_plan::ScheduledChunk| chunk.outputs == ChunkOutputs::Last;
    sequence_ids.extend(scheduler.plan().chunks.iter().filter(last).map(|chunk| chunk.sequence_id));
    scheduler.commit();
    sequence_ids.iter().for_each(|&sequence_id| scheduler.push_token(sequence_id, 7));
}

/// All sequences decode, each takes a new block every 16 steps, and the queue is empty. The sample
/// count is so high that most steps do not write to a memory page for the first time.
#[divan::bench(args = [64, 512, 4096], sample_count = 800)]
fn decode_step(bencher: Bencher<'_, '_>, running: usize) {
    let blocks_each = 240_000 / running;
    let mut scheduler = scheduler(running, running * blocks_each);
    for i in 0..running as u32 {
        let tokens = (0..1 + i % 16).map(|p| p + i).collect();
        add(&mut scheduler, tokens, (blocks_each - 1) * BLOCK_TOKENS);
    }
    let mut sequence_ids = Vec::with_capacity(running);
    while scheduler.waiting_count() > 0 {
        step(&mut scheduler, &mut sequence_ids);
    }
    bencher.bench_local(|| step(&mut scheduler, &mut sequence_ids));
}

/// Queues, hashes, finds and retains a cached prompt of 32,768 tokens, and releases it again.
#[divan::bench]
fn admit_cached_32k(bencher: Bencher<'_, '_>) {
    let mut scheduler = scheduler(16_384, 4096);
    let tokens: Vec<u32> = (0..32_768).collect();
    let mut sequence_ids = Vec::new();
    let mut admit = |tokens: Vec<u32>| {
        let sequence_id = add(&mut scheduler, tokens, 32_800);
        step(&mut scheduler, &mut sequence_ids);
        scheduler.remove(sequence_id);
    };
    admit(tokens.clone());
    bencher.with_inputs(|| tokens.clone()).bench_local_values(admit);
}

/// The lookup alone, since the hashes are computed when the request arrives.
#[divan::bench]
fn lookup_cached_32k(bencher: Bencher<'_, '_>) {
    let mut scheduler = scheduler(16_384, 4096);
    let sequence_id = add(&mut scheduler, (0..32_768).collect(), 32_800);
    step(&mut scheduler, &mut Vec::new());
    bencher.bench_local(|| {
        scheduler.sequence(sequence_id).map(|sequence| sequence.find_prefix(scheduler.pool()))
    });
}

fn logits() -> Vec<f32> {
    (0..VOCAB as u32).map(|id| (id.wrapping_mul(2_654_435_761) >> 8) as f32 / 1e6 - 8.0).collect()
}

const CHAINS: [&str; 9] = [
    "greedy",
    "temperature",
    "top-k 40",
    "top-p 0.95",
    "penalties",
    "dry over 32k",
    "typical 0.9",
    "mirostat 1",
    "mirostat 2",
];

#[divan::bench(args = CHAINS)]
fn sample(bencher: Bencher<'_, '_>, chain: &str) {
    let base = SamplingParams { temperature: 0.8, ..SamplingParams::default() };
    let params = match chain {
        "greedy" => SamplingParams::greedy(),
        "top-k 40" => SamplingParams { top_k: 40, top_p: 0.95, min_p: 0.05, ..base },
        "top-p 0.95" => SamplingParams { top_p: 0.95, ..base },
        "penalties" => SamplingParams { top_k: 40, frequency_penalty: 0.1, ..base },
        "dry over 32k" => SamplingParams { top_k: 40, dry: Some(dry()), ..base },
        "typical 0.9" => SamplingParams { typical_p: 0.9, ..base },
        "mirostat 1" => SamplingParams { mirostat: mirostat(MirostatVersion::One), ..base },
        "mirostat 2" => SamplingParams { mirostat: mirostat(MirostatVersion::Two), ..base },
        _ => base,
    };
    let prompt: Vec<u32> = match chain {
        "penalties" => (0..1000).collect(),
        _ => (0..32_768).map(|position| position * position % 997).collect(),
    };
    let Ok(mut history) = History::new(&params, &prompt, &[], &SamplerState::default()) else { return };
    let logits = logits();
    let mut sampler = Sampler::default();
    let mut position = 0;
    bencher.bench_local(|| {
        position += 1;
        let draw = SampleContext { params: &params, choice: 0, position, forbidden: &[], allowed: None };
        sampler.sample(&logits, &draw, &mut history)
    });
}

fn dry() -> DryParams {
    let breakers = DryBreakers::new((0..8).map(|token| vec![token]));
    DryParams { multiplier: 0.8, base: 1.75, allowed_length: 2, last_n: None, breakers }
}

fn mirostat(version: MirostatVersion) -> Option<MirostatParams> {
    Some(MirostatParams { version, tau: 5.0, eta: 0.1 })
}

#[divan::bench]
fn logprobs_top_5(bencher: Bencher<'_, '_>) {
    let logits = logits();
    bencher.bench_local(|| LogProbs::new(&logits).map(|row| row.top(5)));
}
