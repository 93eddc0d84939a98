//! Requests with a constraint: what it does not allow is never put out, it hears of every token in order, and its end is
//! the request's; whatever the batch, preemption or a resume.

#![expect(clippy::unwrap_used, reason = "a panic is how a test fails")]

#[expect(dead_code, reason = "other tests use the rest")]
mod fake;

use engine::{
    Allowed, Constraint, ConstraintError, Engine, EngineConfig, FinishReason, KvBudget, Request,
    SamplingParams, StopConditions,
};
use fake::{Answer, FakeModel, VOCAB, answers, request, run_out};
use ops::{KvType, Reference};

const END: u32 = 49;

/// After an odd token only even ones and the other way round, END after four, and nothing after `length`.
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
    fn allowed(&mut self) -> Result<Allowed<'_>, ConstraintError> {
        if self.output.len() == self.fails_at {
            return Err(ConstraintError::DeadEnd);
        }
        if self.output.len() == self.length {
            return Ok(Allowed::Nothing);
        }
        self.mask = [0; 2];
        for token in (0..VOCAB as u32).filter(|&token| allows(&self.output, token)) {
            self.mask[token as usize / 32] |= 1 << (token % 32);
        }
        Ok(Allowed::Tokens(&self.mask))
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
        prefill_chunk_max: 8,
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
    let alone: Vec<Answer> = requests
        .iter()
        .map(|request| {
            let mut engine = engine(40, 1);
            engine.submit_constrained(request.clone(), Alternating::boxed(length(request), &[])).unwrap();
            answers(run_out(&mut engine)).remove(&request.id).unwrap()
        })
        .collect();
    let mut crowd = engine(14, 8);
    for request in &requests {
        crowd.submit_constrained(request.clone(), Alternating::boxed(length(request), &[])).unwrap();
    }
    let together = answers(run_out(&mut crowd));
    assert!(crowd.stats().preemptions > 3, "{:?}", crowd.stats());
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
        // Cut anywhere and sent again: the rest is the same.
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

/// Where only the end is left, it comes, however short the output is.
#[test]
fn the_end_of_the_grammar_comes_before_min_tokens() {
    struct OnlyEnd;
    impl Constraint for OnlyEnd {
        fn allowed(&mut self) -> Result<Allowed<'_>, ConstraintError> {
            Ok(Allowed::Tokens(&[0, 1 << (END - 32)]))
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
