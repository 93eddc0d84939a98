// SPDX-License-Identifier: Apache-2.0

//! Models whose layers have different attention spans, with one block table per KV cache group.
//!
//! The engine releases blocks behind a window while their sequence runs. Answers do not depend on
//! releases, shared blocks, preemption or drafts.

use crate::fake::{GenerationResult, VOCAB, answers, request, run_out};
use engine::{
    DraftModel, Engine, EngineConfig, EngineConfigError, EngineStartError, KvBudget, PromptLookup,
    RefuseReason, Request, RequestId,
};
use models::{Model, OutputKind, TakeOutputs};
use ops::{AttentionSpan, Backend, KvLayer, KvLayout, KvTypes, OpError, Reference, Step};
use std::collections::HashMap;
use std::time::Duration;

const FULL: AttentionSpan = AttentionSpan::Full;

fn window(tokens: usize) -> AttentionSpan {
    AttentionSpan::Window { tokens }
}

/// A model that stores, for each group and slot, the hash of all tokens up to it. For each row, the
/// model reads every position in the group's span. A wrong block, or one that was released too
/// early, gives another hash or none.
struct Windows {
    layers: Vec<KvLayer>,
    groups: Vec<AttentionSpan>,
    block_tokens: usize,
    /// By KV slot: the group, and the hash of the tokens up to it.
    cells: HashMap<u32, (usize, u64)>,
}

impl Windows {
    fn new(spans: &[AttentionSpan], config: &EngineConfig) -> Self {
        let layer = |&span| KvLayer { kv_heads: 1, head_dim: 4, kind: config.kv_types.rest(), span };
        let layers: Vec<KvLayer> = spans.iter().map(layer).collect();
        let layout = KvLayout { block_tokens: config.block_tokens, blocks: 1, layers };
        let groups = layout.groups().iter().map(|group| group.span).collect();
        Self { layers: layout.layers, groups, block_tokens: config.block_tokens, cells: HashMap::new() }
    }
}

fn chain(parent: u64, token: u32) -> u64 {
    let mixed = (parent ^ u64::from(token)).wrapping_mul(0x9E37_79B9_7F4A_7C15);
    (mixed ^ mixed >> 29).wrapping_mul(0xBF58_476D_1CE4_E5B9) ^ mixed >> 32
}

impl Model<Reference> for Windows {
    fn vocab_size(&self) -> usize {
        VOCAB
    }

    fn context_length(&self) -> usize {
        400
    }

    fn kv_layers(&self, _: &KvTypes) -> Vec<KvLayer> {
        self.layers.clone()
    }

    fn copy_blocks(
        &mut self,
        _: &mut Reference,
        _: &mut <Reference as Backend>::Kv,
        copies: &[(u32, u32)],
    ) -> Result<(), OpError> {
        let tokens = self.block_tokens as u32;
        for &(from, to) in copies {
            for place in 0..tokens {
                match self.cells.get(&(from * tokens + place)).copied() {
                    Some(cell) => self.cells.insert(to * tokens + place, cell),
                    None => self.cells.remove(&(to * tokens + place)),
                };
            }
        }
        Ok(())
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
        step.check("forward")?;
        let (groups, tokens) = (step.groups(), self.block_tokens);
        assert_eq!(groups, self.groups.len());
        let mut states = Vec::new();
        for row in 0..step.rows() {
            let position = step.positions[row] as usize;
            let sequence_id = |group: usize, position: usize| {
                let table = step.tables[step.sequences[row] as usize * groups + group];
                assert_ne!(
                    table[position / tokens],
                    0,
                    "group {group}: a row writes or reads the null block"
                );
                table[position / tokens] * tokens as u32 + (position % tokens) as u32
            };
            // The hash of the tokens before this row, from the first group. If that group's span
            // excludes the previous position, the hash is 0.
            let before = position.checked_sub(1).map_or(0, |last| {
                match self.groups[0].first_position(position) <= last {
                    true => self.cells[&sequence_id(0, last)].1,
                    false => 0,
                }
            });
            let state = chain(before, step.tokens[row]);
            for (group, span) in self.groups.iter().enumerate() {
                assert_eq!(step.kv_slots[row * groups + group], sequence_id(group, position));
                self.cells.insert(sequence_id(group, position), (group, state));
                for seen in span.first_position(position)..position {
                    let cell = self.cells.get(&sequence_id(group, seen)).copied();
                    let by_first = match self.groups[0].first_position(position) <= seen {
                        true => self.cells.get(&sequence_id(0, seen)).map(|cell| cell.1),
                        false => cell.map(|cell| cell.1),
                    };
                    assert!(by_first.is_some(), "group {group}: position {seen} was never written");
                    assert_eq!(
                        cell,
                        by_first.map(|hash| (group, hash)),
                        "position {seen} as {position} sees it"
                    );
                }
            }
            states.push(state);
        }
        let logits = |state: u64| (0..VOCAB as u32).map(move |token| chain(state, token + 7777) % 6001);
        let wanted = step.outputs.iter().flat_map(|&row| logits(states[row as usize]));
        let host: Vec<f32> = wanted.map(|x| x as f32 / 1000.0 - 3.0).collect();
        let mut tensor = backend.tensor(step.outputs.len().max(1), VOCAB)?;
        backend.write(&mut tensor, step.outputs.len(), &host)?;
        take(backend, 0..step.outputs.len(), &tensor)
    }
}

fn engine(spans: &[AttentionSpan], config: &EngineConfig) -> Engine<Reference> {
    Engine::new(Box::new(Windows::new(spans, config)), Reference::new(), config).unwrap()
}

fn config() -> EngineConfig {
    EngineConfig {
        block_tokens: 4,
        step_tokens: 16,
        running_max: 4,
        ..EngineConfig::new(KvBudget::Tokens(400))
    }
}

fn prompt(text: u32, len: u32) -> Vec<u32> {
    (0..len).map(|place| (place * 7 + text * place / 9) % VOCAB as u32).collect()
}

/// Blocks that one sequence reads in a step that computes its last `rows` tokens up to `end`.
fn blocks_read(groups: &[AttentionSpan], end: usize, rows: usize, block_tokens: usize) -> usize {
    let blocks =
        |span: &AttentionSpan| end.div_ceil(block_tokens) - span.first_position(end - rows) / block_tokens;
    groups.iter().map(blocks).sum()
}

#[test]
fn blocks_behind_a_window_are_free_while_their_sequence_runs() {
    let spans = [window(6), window(6), FULL, window(30)];
    let mut engine = engine(&spans, &config());
    assert_eq!(engine.stats().kv_groups, 4);
    engine.submit(request(1, prompt(0, 50), 120)).unwrap();
    let (mut out, mut computed) = (Vec::new(), 0);
    let mut most = 0;
    while engine.has_work() {
        let rows = engine.step(Duration::ZERO, &mut out).unwrap().rows;
        computed += rows;
        if engine.has_work() {
            // A group releases blocks only when it takes one. So each of the 3 windows may hold one
            // block more.
            let expected = blocks_read(&spans, computed, rows, 4);
            let used = engine.stats().kv_blocks_used;
            assert!(
                (expected..=expected + 3).contains(&used),
                "{used} blocks at {computed}, {expected} are read"
            );
            most = most.max(used);
        }
    }
    assert_eq!(computed, 50 + 119);
    // The full group needs 43 blocks, and each window what the longest chunk needs.
    assert!(most <= 43 + 2 * 7 + 13, "{most} blocks");
    assert!(engine.stats().kv_blocks_used == 0);
    engine.check_integrity().unwrap();
}

#[test]
fn a_long_sequence_needs_a_budget_for_its_full_layers_only() {
    let spans = [window(6), FULL, window(6), window(6), window(6), window(6)];
    let block_bytes = engine(&spans, &config()).stats().kv_block_bytes as u64;
    // For 300 tokens, the full group needs all 75 blocks. Each of the five windows needs the blocks
    // of its window and of the largest step.
    let blocks = 75 + 5 * (2 + 6 + 1);
    let tight = EngineConfig { kv: KvBudget::Bytes((blocks + 1) * block_bytes), ..config() };
    let mut engine = engine(&spans, &tight);
    engine.submit(request(1, prompt(0, 40), 261)).unwrap();
    // The second request hits the prefix of the first one. That hit costs no blocks in the window
    // groups.
    engine.submit(request(2, prompt(0, 40), 261)).unwrap();
    let refused = engine.submit(request(3, prompt(0, 40), 262)).unwrap_err();
    let RefuseReason::NeverFits { tokens, needed, block_tokens: 4, blocks: budget } = refused else {
        panic!("{refused}");
    };
    assert_eq!((tokens, needed as u64, budget as u64), (301, blocks + 1, blocks));
    // A request without `max_tokens` continues until the budget is used.
    let mut open = request(4, prompt(1, 3), 1);
    open.stop.max_tokens = None;
    engine.submit(open).unwrap();
    let answers = answers(run_out(&mut engine));
    assert_eq!(answers[&RequestId(1)].tokens.len(), 261);
    assert_eq!(answers[&RequestId(2)].tokens.len(), 261);
    assert_eq!(answers[&RequestId(4)].tokens.len(), 301 - 3);
}

#[test]
fn a_budget_in_tokens_is_for_these_tokens_however_short_their_sequences_are() {
    let groups = |spans: &[AttentionSpan]| {
        let engine = engine(spans, &config());
        let stats = engine.stats();
        (stats.kv_groups, stats.kv_blocks)
    };
    assert_eq!(groups(&[FULL; 3]), (1, 100));
    assert_eq!(groups(&[window(9); 3]), (1, 100));
    assert_eq!(groups(&[window(9), window(9), FULL]), (3, 300));
    assert_eq!(groups(&[window(9), FULL, window(9), FULL]), (2, 200));
}

/// Runs one request at a time, with enough blocks, without prefix cache and drafts.
fn alone(
    spans: &[AttentionSpan],
    config: &EngineConfig,
    requests: &[Request],
) -> HashMap<RequestId, GenerationResult> {
    let roomy = EngineConfig {
        kv: KvBudget::Tokens(4000),
        prefix_cache: false,
        draft_depth_max: 0,
        ..config.clone()
    };
    let mut engine = engine(spans, &roomy);
    let mut outputs = Vec::new();
    for request in requests {
        engine.submit(request.clone()).unwrap();
        outputs.extend(run_out(&mut engine));
    }
    answers(outputs)
}

struct WindowRng(u64);

impl WindowRng {
    fn below(&mut self, end: usize) -> usize {
        self.0 = self.0.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        (self.0 >> 33) as usize % end
    }
}

#[test]
fn answers_do_not_depend_on_pressure_chunks_shared_blocks_or_drafts() {
    let (mut preempted, mut cached, mut forks, mut drafts, mut evictions) = (0, 0, 0, 0, 0);
    for seed in 0..150 {
        let random = &mut WindowRng(seed);
        let (short, long) = (1 + random.below(20), 1 + random.below(60));
        let spans: &[AttentionSpan] = match random.below(5) {
            0 => &[FULL, window(short)],
            1 => &[window(short), window(short), FULL, window(long)],
            2 => &[window(short), window(long), window(short), FULL, FULL],
            3 => &[window(short)],
            _ => &[window(long), window(short)],
        };
        let running_max = 1 + random.below(6);
        let config = EngineConfig {
            block_tokens: 1 + random.below(8),
            step_tokens: running_max + random.below(30),
            running_max,
            draft_depth_max: random.below(5),
            ..config()
        };
        let prompts: Vec<Vec<u32>> =
            (0..8).map(|_| prompt(random.below(3) as u32, 1 + random.below(90) as u32)).collect();
        let requests: Vec<Request> = (0..16)
            .map(|id| request(id as u64, prompts[id / 2].clone(), 1 + random.below(60) as u32))
            .collect();
        let expected = alone(spans, &config, &requests);
        // The fewest blocks that the longest request needs alone. With one block less, the engine
        // refuses that request.
        let longest =
            requests.iter().max_by_key(|r| r.prompt.len() as u32 + r.stop.max_tokens.unwrap()).unwrap();
        let block_bytes = engine(spans, &config).stats().kv_block_bytes as u64;
        let with_blocks =
            |blocks| EngineConfig { kv: KvBudget::Bytes((blocks + 1) * block_bytes), ..config.clone() };
        let fits = |blocks: u64| engine(spans, &with_blocks(blocks)).submit(longest.clone()).is_ok();
        let least = (1..4000).find(|&blocks| fits(blocks)).unwrap();
        for more in [0, least / 2] {
            let model = Box::new(Windows::new(spans, &config));
            let drafter = Box::new(PromptLookup::default());
            let mut engine =
                Engine::with_drafter(model, drafter, Reference::new(), &with_blocks(least + more)).unwrap();
            let mut outputs = Vec::new();
            for request in &requests {
                engine.submit(request.clone()).unwrap();
                if random.below(3) == 0 {
                    engine.step(Duration::ZERO, &mut outputs).unwrap();
                    engine.check_integrity().unwrap();
                }
            }
            outputs.extend(run_out(&mut engine));
            assert_eq!(answers(outputs), expected, "seed {seed}, {spans:?}, {config:?}");
            let stats = engine.stats();
            preempted += stats.preemptions;
            cached += stats.prompt_tokens_cached;
            forks += stats.forks;
            drafts += stats.drafts.drafted_tokens();
            evictions += stats.evictions;
        }
    }
    let seen = [preempted, cached, forks, drafts, evictions];
    assert!(seen.iter().all(|&count| count > 100), "{seen:?}: too little happened");
}

#[test]
fn a_draft_model_keeps_everything_or_does_not_draft() {
    let drafting = |spans: &[AttentionSpan], of_draft: &[AttentionSpan]| {
        let config = EngineConfig { draft_depth_max: 2, ..config() };
        let draft = DraftModel::new(Box::new(Windows::new(of_draft, &config)), 16, 0.1);
        Engine::with_drafter(
            Box::new(Windows::new(spans, &config)),
            Box::new(draft),
            Reference::new(),
            &config,
        )
    };
    for (spans, of_draft, text) in [
        (
            &[FULL, window(8)][..],
            &[FULL, window(5)][..],
            "a layer of the draft model attends only to the last 5 tokens",
        ),
        (&[window(8)], &[FULL], "each layer of the model attends only to the last 8 tokens"),
    ] {
        match drafting(spans, of_draft) {
            Err(EngineStartError::Config(error @ EngineConfigError::DraftWindow { .. })) => {
                assert!(error.to_string().starts_with(text), "{error}");
            }
            Err(error) => panic!("{error}"),
            Ok(_) => panic!("{spans:?} with drafts of {of_draft:?} is not refused"),
        }
    }
    // If a layer of the model has full attention, the draft model shares that layer's block table.
    let spans = [FULL, window(8)];
    let requests: Vec<Request> = (0..6).map(|id| request(id, prompt(id as u32 / 2, 30), 40)).collect();
    let expected = alone(&spans, &config(), &requests);
    let mut engine = drafting(&spans, &[FULL]).unwrap();
    requests.iter().for_each(|request| {
        engine.submit(request.clone()).unwrap();
    });
    assert_eq!(answers(run_out(&mut engine)), expected);
    assert!(engine.stats().drafts.drafted_tokens() > 0 && engine.stats().drafts.failures == 0);
}
