// SPDX-License-Identifier: Apache-2.0

//! Requests with a constraint (structured output).
//!
//! 1. The engine outputs only tokens that the constraint allows.
//! 2. The constraint accepts every output token, in order.
//! 3. If the constraint is complete, the request ends.
//!
//! Batch neighbours, preemption and resumes change none of this.

use crate::fake::{FakeModel, GenerationResult, VOCAB, answers, oracle, request, run_out};
use engine::{
    Constraint, ConstraintError, Engine, EngineConfig, FinishReason, KvBudget, Request, SamplingParams,
    StopConditions, TokenMask,
};
use ops::{KvType, Reference};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

const END: u32 = 49;

/// Allows an even token after an odd one and the reverse, and END after four or more tokens. The
/// grammar is complete at `length` tokens.
struct Alternating {
    length: usize,
    output: Vec<u32>,
    mask: [u32; 2],
    fails_at: usize,
}

impl Alternating {
    fn boxed(length: usize, output: &[u32]) -> Option<Box<dyn Constraint>> {
        Some(Box::new(Self { length, output: output.to_vec(), mask: [0; 2], fails_at: usize::MAX }))
    }
}

fn allows(output: &[u32], token: u32) -> bool {
    let parity = output.last().map_or(0, |last| (last + 1) % 2);
    if token == END { output.len() >= 4 } else { token % 2 == parity }
}

impl Constraint for Alternating {
    fn token_mask(&mut self) -> Result<TokenMask<'_>, ConstraintError> {
        if self.output.len() == self.fails_at {
            return Err(ConstraintError::DeadEnd);
        }
        if self.output.len() == self.length {
            return Ok(TokenMask::Complete);
        }
        self.mask = [0; 2];
        for token in (0..VOCAB as u32).filter(|&token| allows(&self.output, token)) {
            self.mask[token as usize / 32] |= 1 << (token % 32);
        }
        Ok(TokenMask::Allowed(&self.mask))
    }

    fn accept(&mut self, token: u32) {
        assert!(allows(&self.output, token), "{token} after {:?}", self.output);
        self.output.push(token);
    }
}

fn engine(blocks: usize, running_max: usize) -> Engine<Reference> {
    let config = EngineConfig {
        block_tokens: 4,
        kv_types: KvType::F32.into(),
        step_tokens: 24,
        running_max,
        ..EngineConfig::new(KvBudget::Tokens(blocks * 4))
    };
    Engine::new(Box::new(FakeModel::new(&config)), Reference::new(), &config).unwrap()
}

fn alternating(id: u64, prompt: usize, min_tokens: u32) -> Request {
    Request {
        stop: StopConditions { max_tokens: Some(30), min_tokens, stop_tokens: vec![END] },
        ..request(id, (0..prompt as u32).map(|i| i % 7).collect(), 30)
    }
}

#[test]
fn constrained_output_is_the_same_alone_and_under_pressure() {
    let requests: Vec<Request> =
        (0..24).map(|id| alternating(id, 3 + id as usize % 9, id as u32 % 3 * 4)).collect();
    let length = |request: &Request| 6 + request.id.0 as usize % 20;
    let alone: Vec<GenerationResult> = requests
        .iter()
        .map(|request| {
            let mut engine = engine(40, 1);
            engine.submit_constrained(request.clone(), Alternating::boxed(length(request), &[])).unwrap();
            answers(run_out(&mut engine)).remove(&request.id).unwrap()
        })
        .collect();
    let mut batched = engine(14, 8);
    for request in &requests {
        batched.submit_constrained(request.clone(), Alternating::boxed(length(request), &[])).unwrap();
    }
    let together = answers(run_out(&mut batched));
    assert!(batched.stats().preemptions > 3, "{:?}", batched.stats());
    let mut reasons = [0; 2];
    for (request, alone) in requests.iter().zip(&alone) {
        assert_eq!(&together[&request.id], alone, "{}", request.id);
        assert!(alone.tokens.len() >= (request.stop.min_tokens as usize).min(length(request)));
        match alone.reason {
            Some(FinishReason::Stop(END)) => reasons[0] += 1,
            Some(FinishReason::Complete) => {
                assert_eq!(alone.tokens.len(), length(request));
                reasons[1] += 1;
            }
            other => panic!("{other:?}"),
        }
        // A stream that is resumed at any cut continues with the same tokens.
        for cut in [1, alone.tokens.len() / 2, alone.tokens.len()] {
            let mut resumed = request.clone();
            resumed.prompt.extend(&alone.tokens[..cut]);
            resumed.prior_output = cut;
            let mut engine = engine(40, 1);
            let constraint = Alternating::boxed(length(request), &alone.tokens[..cut]);
            engine.submit_constrained(resumed, constraint).unwrap();
            let rest = answers(run_out(&mut engine)).remove(&request.id).unwrap();
            assert_eq!((&rest.tokens[..], rest.reason), (&alone.tokens[cut..], alone.reason));
        }
    }
    assert!(reasons.iter().all(|&count| count > 2), "both ends are seen: {reasons:?}");
}

/// If only the end token is allowed, the request ends, even below `min_tokens`.
#[test]
fn the_end_of_the_grammar_comes_before_min_tokens() {
    struct OnlyEnd;
    impl Constraint for OnlyEnd {
        fn token_mask(&mut self) -> Result<TokenMask<'_>, ConstraintError> {
            Ok(TokenMask::Allowed(&[0, 1 << (END - 32)]))
        }
        fn accept(&mut self, _: u32) {
            unreachable!("the end is no part of the output");
        }
    }
    for (min_tokens, reason) in [(0, FinishReason::Stop(END)), (9, FinishReason::Complete)] {
        let mut engine = engine(40, 1);
        engine.submit_constrained(alternating(1, 3, min_tokens), Some(Box::new(OnlyEnd))).unwrap();
        let answer = answers(run_out(&mut engine)).remove(&engine::RequestId(1)).unwrap();
        assert_eq!((answer.tokens.len(), answer.reason), (0, Some(reason)));
    }
}

#[test]
fn a_constraint_that_fails_ends_its_own_request_only() {
    let mut engine = engine(40, 4);
    let failing = Alternating { length: 20, output: vec![], mask: [0; 2], fails_at: 3 };
    engine.submit_constrained(alternating(1, 3, 10), Some(Box::new(failing))).unwrap();
    let sampling = SamplingParams::greedy();
    engine.submit(Request { sampling, ..request(2, vec![1, 2], 12) }).unwrap();
    let answers = answers(run_out(&mut engine));
    let failed = &answers[&engine::RequestId(1)];
    assert_eq!(
        (failed.tokens.len(), failed.reason),
        (3, Some(FinishReason::Constraint(ConstraintError::DeadEnd)))
    );
    assert_eq!(answers[&engine::RequestId(2)].tokens.len(), 12);
}

/// Returns `Pending` after each token, `delay(output length)` times.
struct Tardy {
    constraint: Box<dyn Constraint>,
    output: usize,
    asked: usize,
    delay: fn(usize) -> usize,
}

impl Tardy {
    fn boxed(length: usize, delay: fn(usize) -> usize) -> Option<Box<dyn Constraint>> {
        let constraint = Alternating::boxed(length, &[]).unwrap();
        Some(Box::new(Self { constraint, output: 0, asked: 0, delay }))
    }
}

impl Constraint for Tardy {
    fn token_mask(&mut self) -> Result<TokenMask<'_>, ConstraintError> {
        if self.asked < (self.delay)(self.output) {
            self.asked += 1;
            return Ok(TokenMask::Pending);
        }
        self.constraint.token_mask()
    }

    fn accept(&mut self, token: u32) {
        self.constraint.accept(token);
        (self.output, self.asked) = (self.output + 1, 0);
    }
}

/// Returns `Pending` after four tokens until the test opens the gate.
struct Gated {
    constraint: Box<dyn Constraint>,
    open: Arc<AtomicBool>,
    output: usize,
}

/// A [`Gated`] constraint and the flag that opens its gate.
fn gated(length: usize) -> (Option<Box<dyn Constraint>>, Arc<AtomicBool>) {
    let open = Arc::new(AtomicBool::new(false));
    let constraint = Alternating::boxed(length, &[]).unwrap();
    (Some(Box::new(Gated { constraint, open: open.clone(), output: 0 })), open)
}

impl Constraint for Gated {
    fn token_mask(&mut self) -> Result<TokenMask<'_>, ConstraintError> {
        if self.output >= 4 && !self.open.load(Ordering::Relaxed) {
            return Ok(TokenMask::Pending);
        }
        self.constraint.token_mask()
    }

    fn accept(&mut self, token: u32) {
        self.constraint.accept(token);
        self.output += 1;
    }
}

fn alone(request: &Request, constraint: Option<Box<dyn Constraint>>) -> GenerationResult {
    let mut engine = engine(40, 1);
    engine.submit_constrained(request.clone(), constraint).unwrap();
    answers(run_out(&mut engine)).remove(&request.id).unwrap()
}

#[test]
fn a_request_with_a_pending_mask_waits_alone_and_samples_the_same() {
    let mut engine = engine(80, 4);
    let late = alternating(1, 5, 10);
    let others: Vec<Request> = (2..5).map(|id| request(id, vec![id as u32; 6], 40)).collect();
    let (constraint, open) = gated(25);
    engine.submit_constrained(late.clone(), constraint).unwrap();
    for request in &others {
        engine.submit(request.clone()).unwrap();
    }
    let mut out = Vec::new();
    let mut step = |engine: &mut Engine<Reference>| engine.step(Duration::ZERO, &mut out).unwrap();
    // The prompt's last row gives the first token. The mask of the fifth token is pending.
    for _ in 0..5 {
        step(&mut engine);
    }
    assert_eq!(engine.stats().deferred_rows, 1);
    for _ in 0..20 {
        let report = step(&mut engine);
        assert_eq!((report.decode_rows, report.tokens_sampled), (3, 3), "each of the others moves");
    }
    open.store(true, Ordering::Relaxed);
    let report = step(&mut engine);
    assert_eq!((report.decode_rows, report.tokens_sampled), (4, 5), "the late token, and one for each");
    while engine.has_work() {
        engine.step(Duration::ZERO, &mut out).unwrap();
    }
    engine.check_integrity().unwrap();
    let together = answers(out);
    assert_eq!(together[&late.id], alone(&late, Alternating::boxed(25, &[])));
    for request in &others {
        assert_eq!(together[&request.id], oracle(request));
    }
    assert_eq!((engine.stats().deferred_rows, engine.stats().kv_blocks_used), (1, 0));
}

/// Masks are pending at some tokens, blocks are scarce, and equal prompts are forked. Every token
/// stays the same.
#[test]
fn pending_masks_change_no_token_under_memory_pressure() {
    let mut requests: Vec<Request> =
        (0..24).map(|id| alternating(id, 3 + id as usize % 9, id as u32 % 3 * 4)).collect();
    for choice in 0..4 {
        requests.push(Request { choice, ..alternating(100 + u64::from(choice), 10, 6) });
    }
    let length = |request: &Request| 6 + request.id.0 as usize % 20;
    let delay = |output: usize| [0, 1, 0, 9, 2, 0, 40][output % 7];
    let mut batched = engine(14, 8);
    for request in requests.iter().rev() {
        batched.submit_constrained(request.clone(), Tardy::boxed(length(request), delay)).unwrap();
    }
    let mut out = Vec::new();
    let mut waited = 0;
    while batched.has_work() {
        waited += usize::from(batched.step(Duration::ZERO, &mut out).unwrap().rows == 0);
    }
    batched.check_integrity().unwrap();
    let stats = batched.stats();
    assert!(stats.preemptions > 3 && stats.forks > 0 && stats.deferred_rows > 100 && waited > 0, "{stats:?}");
    let together = answers(out);
    for request in &requests {
        assert_eq!(together[&request.id], alone(request, Alternating::boxed(length(request), &[])));
    }
}

#[test]
fn a_request_with_a_pending_mask_ends_by_cancellation_deadline_or_mask_timeout() {
    let mut engine = engine(40, 4);
    let mut out = Vec::new();
    let step = |engine: &mut Engine<Reference>, seconds, out: &mut Vec<_>| {
        engine.step(Duration::from_secs(seconds), out).unwrap()
    };
    let mut gates = Vec::new();
    for id in 1..4 {
        let deadline = (id == 2).then_some(Duration::from_secs(5));
        let (constraint, open) = gated(25);
        engine.submit_constrained(Request { deadline, ..alternating(id, 5, 10) }, constraint).unwrap();
        gates.push(open);
    }
    for _ in 0..9 {
        step(&mut engine, 1, &mut out);
    }
    assert_eq!((engine.stats().deferred_rows, engine.stats().running), (3, 3));
    assert_eq!(step(&mut engine, 1, &mut out).rows, 0, "there is nothing to compute");
    let used = engine.stats().kv_blocks_used;
    assert!(engine.cancel(engine::RequestId(1), &mut out));
    assert_eq!(engine.stats().kv_blocks_used, used - 2, "its own blocks are free at once");
    step(&mut engine, 5, &mut out);
    assert_eq!(engine.stats().running, 1);
    // The engine draws no token for an ended request, even if a new request has the same id.
    engine.submit(request(4, vec![1, 2], 12)).unwrap();
    gates.iter().for_each(|open| open.store(true, Ordering::Relaxed));
    while engine.has_work() {
        step(&mut engine, 5, &mut out);
    }
    engine.check_integrity().unwrap();
    let answers = answers(out);
    let end = |id| (answers[&engine::RequestId(id)].tokens.len(), answers[&engine::RequestId(id)].reason);
    assert_eq!(end(1), (4, Some(FinishReason::Cancelled)));
    assert_eq!(end(2), (4, Some(FinishReason::Deadline)));
    assert_eq!(answers[&engine::RequestId(3)], alone(&alternating(3, 5, 10), Alternating::boxed(25, &[])));
    assert_eq!(answers[&engine::RequestId(4)], oracle(&request(4, vec![1, 2], 12)));

    /// Returns `Pending` 30 times, then a timeout.
    struct Lost(usize);
    impl Constraint for Lost {
        fn token_mask(&mut self) -> Result<TokenMask<'_>, ConstraintError> {
            self.0 += 1;
            if self.0 > 30 { Err(ConstraintError::MaskTimeout) } else { Ok(TokenMask::Pending) }
        }
        fn accept(&mut self, _: u32) {
            unreachable!("nothing is drawn");
        }
    }
    let answer = {
        let mut engine = self::engine(40, 4);
        engine.submit_constrained(alternating(1, 5, 10), Some(Box::new(Lost(0)))).unwrap();
        let mut out = Vec::new();
        while engine.has_work() {
            engine.step(Duration::ZERO, &mut out).unwrap();
        }
        assert_eq!(engine.stats().kv_blocks_used, 0);
        self::answers(out).remove(&engine::RequestId(1)).unwrap()
    };
    assert_eq!(
        (answer.tokens.len(), answer.reason),
        (0, Some(FinishReason::Constraint(ConstraintError::MaskTimeout)))
    );
}
