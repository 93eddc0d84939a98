// SPDX-License-Identifier: Apache-2.0

//! A fake model that costs almost nothing and detects every mistake in a step, and an oracle that
//! computes the same output without an engine.
//!
//! The fake "keys and values" of a token are a hash of all tokens up to it. The model derives the
//! hash from the cache cell of the previous token. So a wrong block, slot, position or order, or a
//! wrongly shared block, changes the logits or fails at once.

use engine::sample::draw::SampleContext;
use engine::sample::history::History;
use engine::sample::logprobs::LogProbs;
use engine::sample::sampler::Sampler;
use engine::{
    Engine, EngineConfig, EngineOutput, FinishReason, Request, RequestId, SamplerState, SamplingParams,
};
use models::{Model, OutputKind, TakeOutputs};
use ops::{Backend, KvLayer, KvTypes, OpError, Reference, Step};
use std::collections::HashMap;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

pub(crate) const VOCAB: usize = 50;

pub(crate) struct FakeModel {
    block_tokens: usize,
    context: usize,
    /// By KV slot: the position, and the hash of the tokens up to it.
    cache: HashMap<u32, (u32, u64)>,
    /// Number of steps before one fails.
    fail_after: Arc<AtomicUsize>,
    /// Number of outputs before one is NaN.
    break_after: Arc<AtomicUsize>,
    /// Rows that the model has computed.
    pub(crate) rows: Arc<AtomicUsize>,
}

impl FakeModel {
    pub(crate) fn new(config: &EngineConfig) -> Self {
        Self {
            block_tokens: config.block_tokens,
            context: 200,
            cache: HashMap::new(),
            fail_after: Arc::new(AtomicUsize::new(usize::MAX)),
            break_after: Arc::new(AtomicUsize::new(usize::MAX)),
            rows: Arc::default(),
        }
    }

    pub(crate) fn fail_after(&self) -> Arc<AtomicUsize> {
        self.fail_after.clone()
    }

    pub(crate) fn break_after(&self) -> Arc<AtomicUsize> {
        self.break_after.clone()
    }
}

fn chain(parent: u64, token: u32) -> u64 {
    let mixed = (parent ^ u64::from(token)).wrapping_mul(0x9E37_79B9_7F4A_7C15);
    (mixed ^ mixed >> 29).wrapping_mul(0xBF58_476D_1CE4_E5B9) ^ mixed >> 32
}

/// Logits between -3 and 3.
fn logits(state: u64) -> Vec<f32> {
    (0..VOCAB as u32).map(|token| (chain(state, token + 7777) % 6001) as f32 / 1000.0 - 3.0).collect()
}

/// Values of a hidden state, and labels of the classifier.
pub(crate) const STATE_WIDTH: usize = 3;
pub(crate) const LABELS: usize = 2;

/// As in a model with a large vocabulary, the outputs of a step come in several parts.
const OUTPUTS_AT_ONCE: usize = 3;

/// The row of an output of this kind.
fn output_row(kind: OutputKind, state: u64) -> Vec<f32> {
    let values = |first: u32, count: usize| {
        (first..).take(count).map(|index| (chain(state, index) % 6001) as f32 / 1000.0 - 3.0).collect()
    };
    match kind {
        OutputKind::Logits => logits(state),
        OutputKind::HiddenState => values(9000, STATE_WIDTH),
        OutputKind::Labels => values(9500, LABELS),
    }
}

/// The row that the fake model computes for the last of these tokens.
pub(crate) fn row_of(kind: OutputKind, tokens: &[u32]) -> Vec<f32> {
    output_row(kind, tokens.iter().fold(0, |state, &token| chain(state, token)))
}

impl Model<Reference> for FakeModel {
    fn vocab_size(&self) -> usize {
        VOCAB
    }

    fn context_length(&self) -> usize {
        self.context
    }

    fn kv_layers(&self, types: &KvTypes) -> Vec<KvLayer> {
        types.layers(1, 1, 4)
    }

    fn copy_blocks(
        &mut self,
        _: &mut Reference,
        _: &mut <Reference as Backend>::Kv,
        copies: &[(u32, u32)],
    ) -> Result<(), OpError> {
        for &(from, to) in copies {
            for place in 0..self.block_tokens as u32 {
                let sequence_id = |block: u32| block * self.block_tokens as u32 + place;
                match self.cache.get(&sequence_id(from)).copied() {
                    Some(cell) => self.cache.insert(sequence_id(to), cell),
                    None => self.cache.remove(&sequence_id(to)),
                };
            }
        }
        Ok(())
    }

    fn output_width(&self, kind: OutputKind) -> usize {
        output_row(kind, 0).len()
    }

    fn forward(
        &mut self,
        backend: &mut Reference,
        _kv: &mut <Reference as Backend>::Kv,
        step: &Step<'_>,
        kinds: &[OutputKind],
        take: &mut TakeOutputs<'_, Reference>,
    ) -> Result<(), OpError> {
        if self.fail_after.fetch_sub(1, Ordering::Relaxed) == 0 {
            return Err(OpError::Memory { op: "fake", what: "a failure on purpose", bytes: 1, free: None });
        }
        self.rows.fetch_add(step.rows(), Ordering::Relaxed);
        let mut states = Vec::new();
        for row in 0..step.rows() {
            let position = step.positions[row];
            let table = step.tables[step.sequences[row] as usize];
            let sequence_id = |position: u32| {
                table[position as usize / self.block_tokens] * self.block_tokens as u32
                    + position % self.block_tokens as u32
            };
            assert_eq!(step.kv_slots[row], sequence_id(position));
            assert_ne!(table[position as usize / self.block_tokens], 0, "a row is written to the null block");
            let parent = match position {
                0 => 0,
                _ => {
                    for earlier in 0..position {
                        let found = self.cache.get(&sequence_id(earlier)).map(|cell| cell.0);
                        assert_eq!(found, Some(earlier), "a key that is not there is read");
                    }
                    self.cache[&sequence_id(position - 1)].1
                }
            };
            let state = chain(parent, backend.token(step.tokens[row]));
            self.cache.insert(sequence_id(position), (position, state));
            states.push(state);
        }
        let kind_of = |output: usize| kinds.get(output).copied().unwrap_or_default();
        let outputs: Vec<usize> = (0..step.outputs.len()).collect();
        let same_kind = outputs.chunk_by(|&a, &b| kind_of(a) == kind_of(b));
        for run in same_kind.flat_map(|run| run.chunks(OUTPUTS_AT_ONCE)) {
            let kind = kind_of(run[0]);
            let row = |&output: &usize| {
                let mut row = output_row(kind, states[step.outputs[output] as usize]);
                if self.break_after.fetch_sub(1, Ordering::Relaxed) == 0 {
                    row[1] = f32::NAN;
                }
                row
            };
            let host: Vec<f32> = run.iter().flat_map(row).collect();
            let mut tensor = backend.tensor(run.len(), self.output_width(kind))?;
            backend.write(&mut tensor, run.len(), &host)?;
            take(backend, run[0]..run[0] + run.len(), &tensor)?;
        }
        Ok(())
    }
}

/// The output of a request: its tokens, the bits of their log-probabilities, and the finish reason.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct GenerationResult {
    pub(crate) tokens: Vec<u32>,
    pub(crate) logprobs: Vec<(u32, Vec<(u32, u32)>)>,
    pub(crate) reason: Option<FinishReason>,
    /// Sampler state after the last token.
    pub(crate) state: SamplerState,
}

impl GenerationResult {
    pub(crate) fn new() -> Self {
        Self { tokens: Vec::new(), logprobs: Vec::new(), reason: None, state: SamplerState::default() }
    }

    /// Adds an output of this request.
    pub(crate) fn take(&mut self, output: EngineOutput) {
        assert_eq!(self.reason, None, "an output after the last: {output:?}");
        match output {
            EngineOutput::Token(token) => {
                self.tokens.push(token.token);
                self.state = token.sampler_state;
                self.logprobs.extend(token.logprob.map(|logprob| bits(logprob, &token.top)));
            }
            EngineOutput::Finished { reason, .. } => self.reason = Some(reason),
            _ => {}
        }
    }
}

fn bits(logprob: f32, top: &[(u32, f32)]) -> (u32, Vec<(u32, u32)>) {
    (logprob.to_bits(), top.iter().map(|&(token, logprob)| (token, logprob.to_bits())).collect())
}

pub(crate) fn id_of(output: &EngineOutput) -> RequestId {
    match *output {
        EngineOutput::Admitted { id, .. }
        | EngineOutput::Logits { id, .. }
        | EngineOutput::Scored { id, .. }
        | EngineOutput::Embedding { id, .. }
        | EngineOutput::BeamProgress { id, .. }
        | EngineOutput::Beams { id, .. }
        | EngineOutput::Finished { id, .. } => id,
        EngineOutput::Token(ref token) => token.id,
    }
}

/// Computes the fake model's answer to a request, each token from the whole sequence.
pub(crate) fn oracle(request: &Request) -> GenerationResult {
    let mut answer = GenerationResult::new();
    let mut tokens = request.prompt.clone();
    let own = tokens.len() - request.prior_output;
    let mut state = request.sampler_state;
    while answer.reason.is_none() {
        let row = logits(tokens.iter().fold(0, |state, &token| chain(state, token)));
        let (prompt, output) = tokens.split_at(own);
        let mut history = History::new(&request.sampling, prompt, output, &state).unwrap();
        let early = tokens.len() - own < request.stop.min_tokens as usize;
        let draw = SampleContext {
            params: &request.sampling,
            choice: request.choice,
            position: tokens.len(),
            forbidden: if early { &request.stop.stop_tokens } else { &[] },
            allowed: None,
        };
        let token = Sampler::default().sample(&row, &draw, &mut history).unwrap();
        state = history.state();
        if request.stop.stop_tokens.contains(&token) {
            answer.reason = Some(FinishReason::Stop(token));
            break;
        }
        tokens.push(token);
        answer.tokens.push(token);
        answer.state = state;
        if let Some(count) = request.logprobs {
            let row = LogProbs::new(&row).unwrap();
            answer.logprobs.push(bits(row.of(token), &row.top(count.into())));
        }
        if request.stop.max_tokens == Some((tokens.len() - own) as u32) {
            answer.reason = Some(FinishReason::Length);
        }
    }
    answer
}

pub(crate) fn request(id: u64, prompt: Vec<u32>, max_tokens: u32) -> Request {
    let sampling = SamplingParams { seed: id, ..SamplingParams::default() };
    Request { sampling, ..Request::new(RequestId(id), prompt, max_tokens) }
}

/// Runs the engine until it has no work. Returns all outputs in order.
pub(crate) fn run_out<B: Backend>(engine: &mut Engine<B>) -> Vec<EngineOutput> {
    let mut out = Vec::new();
    while engine.has_work() {
        let report = engine.step(Duration::ZERO, &mut out).unwrap();
        assert!(report.rows > 0, "a step with work did nothing");
    }
    engine.check_integrity().unwrap();
    assert_eq!(engine.stats().kv_blocks_used, 0);
    out
}

/// Collects the outputs of each request.
pub(crate) fn answers(outputs: Vec<EngineOutput>) -> HashMap<RequestId, GenerationResult> {
    let mut answers: HashMap<RequestId, GenerationResult> = HashMap::new();
    for output in outputs {
        answers.entry(id_of(&output)).or_insert_with(GenerationResult::new).take(output);
    }
    answers
}
