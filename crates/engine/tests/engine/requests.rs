// SPDX-License-Identifier: Apache-2.0

//! Random requests against the whole engine, with a fake model that detects every mistake in a
//! step.
//!
//! Seeded requests arrive and are scored, paused, cancelled, overdue or lost in a failed step, with
//! and without drafts. After each step, the engine checks its integrity: blocks, lists, block keys,
//! deadlines, queue positions. A subscriber to KV cache events checks that it knows the cached
//! blocks.

use crate::drafters::{KINDS, drafter};
use crate::fake::{FakeModel, GenerationResult, VOCAB, id_of, oracle, request};
use engine::kv::block_key::BlockKey;
use engine::kv::events::{FULL_SNAPSHOT, KvCacheEvent};
use engine::{
    Engine, EngineConfig, EngineOutput, FinishReason, KvBudget, RefuseReason, Request, RequestId,
    SamplingParams, ScoreKind, ScoreRequest,
};
use ops::{KvType, Reference};
use std::collections::{BTreeMap, HashSet};
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

const SEEDS: u64 = 60;
const STEPS: usize = 250;
const LIVE_MAX: usize = 14;

struct RequestRng(u64);

impl RequestRng {
    fn below(&mut self, end: usize) -> usize {
        self.0 = self.0.wrapping_mul(0x5851_F42D_4C95_7F2D).wrapping_add(0x1405_7B7E_F767_814F);
        (self.0 >> 33) as usize % end
    }

    fn one_in(&mut self, n: usize) -> bool {
        self.below(n) == 0
    }
}

struct ActiveRequest {
    /// The request to generate, or the number of tokens to score.
    wanted: Result<Request, usize>,
    deadline: Option<Duration>,
    answer: GenerationResult,
    scored: usize,
}

#[derive(Debug, Default)]
struct Ends {
    whole: usize,
    cancelled: usize,
    overdue: usize,
    lost: usize,
    refused: usize,
}

struct EngineHarness {
    random: RequestRng,
    engine: Engine<Reference>,
    fail_after: Arc<AtomicUsize>,
    /// Requests that may arrive. The drafters know their answers.
    requests: Vec<Request>,
    live: BTreeMap<RequestId, ActiveRequest>,
    now: Duration,
    out: Vec<EngineOutput>,
    ends: Ends,
    /// Cached blocks according to the events.
    cached: HashSet<BlockKey>,
    next_event: u64,
}

impl EngineHarness {
    fn new(seed: u64) -> Self {
        let mut random = RequestRng(seed);
        let running_max = 1 + random.below(6);
        let config = EngineConfig {
            block_tokens: 1 + random.below(6),
            kv_types: KvType::F32.into(),
            step_tokens: running_max + random.below(30),
            running_max,
            queue_max: 1 + random.below(12),
            prefix_cache: !random.one_in(4),
            draft_depth_max: random.below(7),
            ..EngineConfig::new(KvBudget::Tokens(62 + random.below(100)))
        };
        let requests: Vec<Request> = (0..250).map(|id| some_request(&mut random, id)).collect();
        let model = FakeModel::new(&config);
        let fail_after = model.fail_after();
        let drafter = drafter(random.below(KINDS), &config, &requests);
        let engine = Engine::with_drafter(Box::new(model), drafter, Reference::new(), &config).unwrap();
        let (live, now, out) = (BTreeMap::new(), Duration::ZERO, Vec::new());
        let (ends, cached, next_event) = (Ends::default(), HashSet::new(), FULL_SNAPSHOT);
        Self { random, engine, fail_after, requests, live, now, out, ends, cached, next_event }
    }

    fn run(mut self) -> Ends {
        for _ in 0..STEPS {
            self.happen();
            self.step();
        }
        self.live.keys().for_each(|&id| assert!(self.engine.set_paused(id, false)));
        while self.engine.has_work() {
            self.step();
        }
        assert_eq!((self.live.len(), self.engine.stats().kv_blocks_used), (0, 0));
        assert!(self.engine.reset_prefix_cache());
        self.follow();
        assert!(self.cached.is_empty());
        self.ends
    }

    fn happen(&mut self) {
        while self.live.len() < LIVE_MAX && self.random.one_in(2) {
            self.arrive();
        }
        let some = self.random.below(self.live.len() + 1);
        let Some(&id) = self.live.keys().nth(some) else { return };
        match self.random.below(12) {
            0 => {
                assert!(self.engine.cancel(id, &mut self.out));
                let cancelled = self.out.pop().unwrap();
                assert_eq!(id_of(&cancelled), id);
                self.end(cancelled, false);
            }
            1..4 => assert!(self.engine.set_paused(id, self.random.one_in(2))),
            4 => self.fail_after.store(0, Ordering::Relaxed),
            _ => {}
        }
    }

    fn arrive(&mut self) {
        let deadline =
            self.random.one_in(3).then(|| self.now + Duration::from_millis(self.random.below(60) as u64));
        let Some(wanted) = self.requests.pop() else { return };
        let id = wanted.id;
        let (queued, wanted) = match self.random.one_in(8) {
            true => {
                let tokens = wanted.prompt.clone();
                let count = tokens.len();
                let score = ScoreRequest { id, tokens, kind: ScoreKind::Logits, deadline, priority: 0 };
                (self.engine.submit_score(score), Err(count))
            }
            false => (self.engine.submit(Request { deadline, ..wanted.clone() }), Ok(wanted)),
        };
        match queued {
            Ok(_) => {
                let live = ActiveRequest { wanted, deadline, answer: GenerationResult::new(), scored: 0 };
                assert!(self.live.insert(id, live).is_none());
                let again = self.engine.submit(request(id.0, vec![1], 1));
                assert_eq!(again.unwrap_err(), RefuseReason::DuplicateId(id));
            }
            Err(refused) => {
                let full =
                    matches!(refused, RefuseReason::QueueFull { .. } | RefuseReason::TenantQueueFull { .. });
                assert!(full, "{refused}");
                self.ends.refused += 1;
            }
        }
        self.engine.check_integrity().unwrap();
    }

    fn step(&mut self) {
        self.now += Duration::from_millis(1 + self.random.below(3) as u64);
        let failed = self.engine.step(self.now, &mut self.out).is_err();
        self.engine.check_integrity().unwrap();
        if self.random.one_in(4) {
            self.follow();
        }
        for output in std::mem::take(&mut self.out) {
            match output {
                EngineOutput::Finished { .. } => self.end(output, failed),
                EngineOutput::Logits { id, position, .. } => {
                    let live = self.live.get_mut(&id).unwrap();
                    assert_eq!(position, live.scored);
                    live.scored += 1;
                }
                output => self.live.get_mut(&id_of(&output)).unwrap().answer.take(output),
            }
        }
        assert_eq!(self.engine.has_work(), !self.live.is_empty());
        let next = self.live.values().filter_map(|live| live.deadline).min();
        assert_eq!(self.engine.next_deadline(), next);
        assert!(next.is_none_or(|next| next > self.now), "a request outlives its deadline");
    }

    fn follow(&mut self) {
        let update = self.engine.kv_events(self.next_event);
        apply(update.events, &mut self.cached);
        self.next_event = update.next;
        assert_eq!(self.next_event, self.engine.stats().kv_events);
        let mut cached = HashSet::new();
        apply(self.engine.kv_events(FULL_SNAPSHOT).events, &mut cached);
        assert_eq!(self.cached, cached);
    }

    /// Checks a request's last output. The request has its complete answer, or the beginning of the
    /// answer and a reason.
    fn end(&mut self, output: EngineOutput, failed: bool) {
        let EngineOutput::Finished { id, reason, .. } = output else { return };
        let ActiveRequest { wanted, deadline, answer, scored } = self.live.remove(&id).unwrap();
        match reason {
            FinishReason::Cancelled => self.ends.cancelled += 1,
            FinishReason::StepFailed => {
                assert!(failed);
                self.ends.lost += 1;
            }
            FinishReason::Deadline => {
                assert!(deadline.unwrap() <= self.now, "ended too early");
                self.ends.overdue += 1;
            }
            _ => self.ends.whole += 1,
        }
        let cut =
            matches!(reason, FinishReason::Cancelled | FinishReason::StepFailed | FinishReason::Deadline);
        match wanted {
            Err(count) => assert!(if cut { scored <= count } else { scored == count }),
            Ok(request) => {
                let expected = oracle(&request);
                match cut {
                    true => assert!(expected.tokens.starts_with(&answer.tokens)),
                    false => assert_eq!((answer.tokens, Some(reason)), (expected.tokens, expected.reason)),
                }
            }
        }
    }
}

fn apply(events: Vec<KvCacheEvent>, cached: &mut HashSet<BlockKey>) {
    for event in events {
        match event {
            KvCacheEvent::BlockStored(name) => assert!(cached.insert(name), "stored twice"),
            KvCacheEvent::BlockRemoved(name) => assert!(cached.remove(&name), "removed, but never stored"),
            KvCacheEvent::AllBlocksCleared => cached.clear(),
        }
    }
}

/// The prompt begins with a part of one of two common texts and ends with its own tail.
fn some_request(random: &mut RequestRng, id: u64) -> Request {
    let (text, common) = (random.below(2), random.below(25));
    let mut prompt: Vec<u32> = (0..common).map(|place| ((place * 7 + text) % VOCAB) as u32).collect();
    prompt.extend((0..1 + random.below(6)).map(|_| random.below(VOCAB) as u32));
    let max_tokens = 1 + random.below(24) as u32;
    let sampling = match random.one_in(2) {
        true => SamplingParams::greedy(),
        false => SamplingParams { seed: id, ..SamplingParams::default() },
    };
    Request {
        sampling,
        priority: random.below(3) as i32 - 1,
        tenant: random.below(4) as u64,
        ..request(id, prompt, max_tokens)
    }
}

#[test]
fn every_request_ends_once_and_as_promised() {
    let mut total = Ends::default();
    for seed in 0..SEEDS {
        // Names the seed of a failure.
        let ends = std::panic::catch_unwind(|| EngineHarness::new(seed).run());
        let ends = ends.unwrap_or_else(|_| panic!("seed {seed}"));
        total.whole += ends.whole;
        total.cancelled += ends.cancelled;
        total.overdue += ends.overdue;
        total.lost += ends.lost;
        total.refused += ends.refused;
    }
    eprintln!("{total:?}");
    let seeds = SEEDS as usize;
    assert!(total.whole > 10 * seeds && total.cancelled > seeds && total.overdue > seeds);
    assert!(total.lost > seeds && total.refused > seeds);
}
