// SPDX-License-Identifier: Apache-2.0

//! Counts heap allocations in steady state.
//!
//! A scheduler step allocates nothing. An engine step allocates as often for 8 sequences as for
//! 128. At admission, the scheduler reserves what a sequence will need. At construction, the block
//! pool reserves what it needs.
//!
//! Outside of steady state, a request's arrival and its admission allocate, and its end frees
//! memory.

#![expect(clippy::unwrap_used, reason = "a panic is how a test fails")]

use allocation_counter::measure;
use engine::{
    Engine, EngineConfig, EngineOutput, KvBudget, PromptLookup, Request, RequestId, SamplingParams,
};
use models::{Model, OutputKind, TakeOutputs};
use ops::{Backend, KvLayer, KvTypes, OpError, Reference, Step};
use std::time::Duration;

use engine::schedule::scheduler::Scheduler;
use engine::schedule::sequence::{NewSequence, SequenceKind};
use engine::schedule::sequence_id::SequenceId;
use engine::schedule::step_plan::{ChunkOutputs, SchedulerLimits};
use prefix::Scope;

const BLOCK_TOKENS: usize = 16;
const RUNNING: usize = 512;
const STEPS: usize = 400;

/// Runs one step in which every sequence gets a token. Some sequences have drafts, and some of the
/// drafts are right.
fn step(scheduler: &mut Scheduler, sequence_ids: &mut Vec<(SequenceId, usize)>, number: usize) {
    sequence_ids.clear();
    scheduler.schedule(usize::MAX);
    let mut spare = scheduler.spare_blocks();
    for index in 0..scheduler.plan().chunks.len() {
        let chunk = scheduler.plan().chunks[index];
        if chunk.outputs != ChunkOutputs::Last {
            continue;
        }
        let drafts =
            if (index + number).is_multiple_of(5) { scheduler.add_drafts(index, 3, &mut spare) } else { 0 };
        sequence_ids.push((chunk.sequence_id, drafts));
    }
    scheduler.commit();
    for &(sequence_id, drafts) in &*sequence_ids {
        let mut token = number as u32 % 3;
        scheduler.push_token(sequence_id, token);
        for _ in 0..drafts.min(number % 3) {
            let last = scheduler.sequence(sequence_id).map_or(0, |sequence| sequence.tokens().len() - 1);
            assert!(scheduler.accept_draft(sequence_id, last, token));
            token = number as u32 % 5;
            scheduler.push_token(sequence_id, token);
        }
    }
    scheduler.release_rejected_drafts();
}

#[test]
fn a_step_of_decodes_allocates_nothing() {
    let blocks_each = 64;
    let limits = SchedulerLimits {
        block_tokens: BLOCK_TOKENS,
        step_tokens: 4 * RUNNING,
        running_max: RUNNING,
        score_rows_max: 16,
        draft_rows_max: RUNNING,
        prefix_cache: true,
        can_fork: true,
    };
    let mut scheduler = Scheduler::new(limits, RUNNING * blocks_each);
    let tokens_max = blocks_each * BLOCK_TOKENS;
    let add = |scheduler: &mut Scheduler, first: u32, tokens_max: usize| {
        let tokens = (0..1 + first % 40).map(|place| first * 64 + place).collect();
        let scope = &Scope::default();
        scheduler.add(NewSequence {
            kind: SequenceKind::Generate,
            priority: 0,
            tenant: 0,
            tokens,
            tokens_max,
            scope,
        })
    };
    let mut sequence_ids = Vec::new();
    // Earlier sequences fill the prefix cache, so that each block that a step takes is a cached
    // one.
    let before: Vec<SequenceId> =
        (0..RUNNING as u32).map(|index| add(&mut scheduler, 1_000_000 + index, tokens_max)).collect();
    (0..700).for_each(|number| step(&mut scheduler, &mut sequence_ids, number));
    before.into_iter().for_each(|sequence_id| scheduler.remove(sequence_id));
    for index in 0..RUNNING as u32 {
        add(&mut scheduler, index, tokens_max);
    }
    while scheduler.waiting_count() > 0 {
        step(&mut scheduler, &mut sequence_ids, 1);
    }
    (0..10).for_each(|number| step(&mut scheduler, &mut sequence_ids, number));

    let (evicted, cached) = (scheduler.pool().evictions(), scheduler.pool().cached_blocks());
    let counted = measure(|| (0..STEPS).for_each(|number| step(&mut scheduler, &mut sequence_ids, number)));
    assert_eq!(scheduler.running_count(), RUNNING);
    assert!(scheduler.pool().evictions() > evicted + 5_000, "blocks were taken from the cache of {cached}");
    assert_eq!(counted.count_total, 0, "allocations in {STEPS} steps of {RUNNING} sequences: {counted:?}");
}

const VOCAB: usize = 16;
/// Most tokens of a sequence in the engine tests.
const CONTEXT: usize = 2_048;

/// A model that allocates nothing. The next token depends only on the current token, so the text
/// repeats itself.
struct Still {
    logits: <Reference as Backend>::Tensor,
    host: Vec<f32>,
}

impl Model<Reference> for Still {
    fn vocab_size(&self) -> usize {
        VOCAB
    }

    fn context_length(&self) -> usize {
        CONTEXT
    }

    fn kv_layers(&self, types: &KvTypes) -> Vec<KvLayer> {
        types.layers(1, 1, 4)
    }

    fn output_width(&self, _: OutputKind) -> usize {
        VOCAB
    }

    fn forward(
        &mut self,
        backend: &mut Reference,
        _: &mut <Reference as Backend>::Kv,
        step: &Step<'_>,
        _: &[OutputKind],
        take: &mut TakeOutputs<'_, Reference>,
    ) -> Result<(), OpError> {
        self.host.clear();
        for &row in step.outputs {
            let next = (step.tokens[row as usize] as usize + 1) % VOCAB;
            self.host.extend((0..VOCAB).map(|token| if token == next { 9.0 } else { -9.0 }));
        }
        let rows = step.outputs.len();
        backend.write(&mut self.logits, rows, &self.host)?;
        take(backend, 0..rows, &self.logits)
    }
}

/// Returns the allocations and the sampled tokens of `STEPS` engine steps in which every sequence
/// decodes.
fn engine_allocates(running: usize, drafts: bool, sampling: &SamplingParams) -> (u64, usize) {
    const STEPS: usize = 100;
    let config = EngineConfig {
        step_tokens: 4 * running,
        running_max: running,
        queue_max: 2 * running,
        draft_depth_max: if drafts { 2 } else { 0 },
        ..EngineConfig::new(KvBudget::Tokens(running * CONTEXT))
    };
    let mut backend = Reference::new();
    let outputs = config.model_limits(VOCAB).outputs_max;
    let logits = backend.tensor(outputs, VOCAB).unwrap();
    let model = Box::new(Still { logits, host: Vec::with_capacity(outputs * VOCAB) });
    let mut engine =
        Engine::with_drafter(model, Box::new(PromptLookup::default()), backend, &config).unwrap();
    for id in 0..running as u64 {
        let prompt =
            (0..20 + id as usize % 9).map(|place| (place + id as usize) as u32 % VOCAB as u32).collect();
        let sampling = SamplingParams { seed: id, ..sampling.clone() };
        let request = Request { sampling, ..Request::new(RequestId(id), prompt, 1_900) };
        engine.submit(request).unwrap();
    }
    let mut out: Vec<EngineOutput> = Vec::with_capacity(64 * running);
    let mut tokens = 0;
    let mut step = || {
        out.clear();
        let report = engine.step(Duration::ZERO, &mut out).unwrap();
        engine.observe(&report, Duration::from_millis(1));
        tokens += report.tokens_sampled;
    };
    (0..60).for_each(|_| step());
    let counted = measure(|| (0..STEPS).for_each(|_| step()));
    assert_eq!(engine.stats().running, running, "all of them decode");
    (counted.count_total, tokens)
}

#[test]
fn a_step_of_the_engine_allocates_as_often_for_many_sequences_as_for_few() {
    let history = SamplingParams { repetition_penalty: 1.1, ..SamplingParams::default() };
    for sampling in [SamplingParams::greedy(), SamplingParams::default(), history] {
        for drafts in [false, true] {
            let (few, few_tokens) = engine_allocates(8, drafts, &sampling);
            let (many, tokens) = engine_allocates(128, drafts, &sampling);
            eprintln!("drafts {drafts}: {few} allocations for {few_tokens} tokens, {many} for {tokens}");
            assert!(tokens > 10 * few_tokens);
            assert_eq!(few, many, "allocations of 100 steps: they grow with the number of sequences");
        }
    }
}
