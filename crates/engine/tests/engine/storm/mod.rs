// SPDX-License-Identifier: Apache-2.0

//! A seeded storm over admission control, scheduler, block pool and drafts, without a model:
//! arrivals, cancels, pauses, failed steps, crashes and memory pressure. Every invariant is checked
//! at every step.
//!
//! Besides the scheduler's own integrity check:
//!
//! 1. Rows stay within the budgets. Each chunk has the next rows of its sequence, and none is
//!    computed twice without a preemption. Every decode that is not paused gets a row.
//! 2. The storm records the content of every slot of every block, and carries out what the plan
//!    writes and copies. Every key that a row reads belongs to the text and salt of its own
//!    sequence.
//! 3. No block is written while another sequence uses it, unless that sequence found it in the
//!    prefix cache in this step.
//! 4. A sequence whose logits are deferred stays as it is, through preemptions too.
//! 5. A draft token is accepted if it was sampled for its own sequence. A rejected one leaves
//!    nothing behind.
//! 6. No waiting sequence is overtaken more often than the bounds of the queue allow, or while the
//!    step could have used it.
//! 7. Tokens that are cached, or are about to be, are not computed again.
//! 8. Subscribers to the pool's events know the cached keys, whether they read often or seldom.
//! 9. A paused sequence is preempted before any other, and is not admitted.
//! 10. At the end all requests have ended and every block is free.

mod content;
mod event_subscribers;
mod recomputed;
mod sampling;
mod waits;

use crate::draft::depth::AcceptanceEstimate;
use crate::draft::draft_tokens::DRAFT_DEPTH_MAX;
use crate::draft::speculation::Speculation;
use crate::kv::group::KvGroupKind;
use crate::schedule::admission::{AdmissionControl, QueueLimits};
use crate::schedule::scheduler::Scheduler;
use crate::schedule::sequence::{NewSequence, SequenceKind, SequenceState};
use crate::schedule::sequence_id::SequenceId;
use crate::schedule::step_plan::{ChunkOutputs, ScheduledChunk, SchedulerLimits};
use event_subscribers::EventSubscribers;
use ops::Reference;
use prefix::Scope;
use recomputed::CachedKeys;
use sampling::{RandomDrafter, VOCAB};
use std::collections::{BTreeMap, BTreeSet};
use waits::WaitRecord;

pub(crate) const STEPS_PER_SEED: usize = 1_000;
const LIVE_MAX: usize = 40;
const TOKENS_MAX: usize = 71;
/// Tenants from this number on come once.
const FIRST_STRANGER: u64 = 1000;

/// Splitmix64: a fixed sequence for each seed.
pub(crate) struct StormRng(pub(crate) u64);

impl StormRng {
    fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9E37_79B9_7F4A_7C15);
        mix(self.0)
    }

    fn below(&mut self, end: usize) -> usize {
        (self.next() % end as u64) as usize
    }

    fn one_in(&mut self, n: usize) -> bool {
        self.below(n) == 0
    }
}

fn mix(mut mixed: u64) -> u64 {
    mixed = (mixed ^ mixed >> 30).wrapping_mul(0xBF58_476D_1CE4_E5B9);
    mixed = (mixed ^ mixed >> 27).wrapping_mul(0x94D0_49BB_1331_11EB);
    mixed ^ mixed >> 31
}

#[derive(Clone)]
struct StormRequest {
    kind: SequenceKind,
    priority: i32,
    tenant: u64,
    /// The first request of its tenant with its priority, and not one to be scored.
    first: bool,
    /// Index among the seed's scopes.
    scope: usize,
    /// Has a constraint: gets no drafts, and its logits may be deferred.
    constrained: bool,
    /// Its logits are deferred.
    late: bool,
    /// Acceptance rate of its drafts.
    acceptance: AcceptanceEstimate,
    tokens: Vec<u32>,
    /// A stand-in for keys and values of each position: a hash of all tokens up to it.
    keys: Vec<u64>,
    tokens_max: usize,
    /// Rows that must be computed before the next row. Follows the plans, not the scheduler.
    computed: usize,
    /// Order of arrival.
    age: u64,
    /// Admitted, without rows so far.
    admitted: bool,
    /// Waits for its first admission.
    queued: bool,
    wait: Option<WaitRecord>,
    /// Was paused while it waited.
    returns: bool,
    arrived: usize,
}

/// Counts of what happened, so that a test can check its reach.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct StormCounts {
    pub(crate) finished: usize,
    pub(crate) preempted: usize,
    /// Of these, paused ones.
    pub(crate) paused_preempted: usize,
    pub(crate) shared: usize,
    pub(crate) accepted: usize,
    pub(crate) forked: usize,
    pub(crate) copied: usize,
    pub(crate) refused: usize,
    pub(crate) crashes: usize,
    pub(crate) late: usize,
    pub(crate) evictions: u64,
    /// Pool events that subscribers read.
    pub(crate) told: usize,
    /// Snapshots, because a subscriber had missed too many events.
    pub(crate) behind: usize,
    /// Sequences skipped because their prefix was being computed.
    pub(crate) passed: usize,
    /// Cached blocks at admissions.
    pub(crate) found: usize,
    /// Most steps of a request from arrival to end.
    pub(crate) longest: usize,
}

impl std::ops::AddAssign for StormCounts {
    fn add_assign(&mut self, other: Self) {
        self.finished += other.finished;
        self.preempted += other.preempted;
        self.paused_preempted += other.paused_preempted;
        self.shared += other.shared;
        self.accepted += other.accepted;
        self.forked += other.forked;
        self.copied += other.copied;
        self.refused += other.refused;
        self.crashes += other.crashes;
        self.late += other.late;
        self.evictions += other.evictions;
        self.told += other.told;
        self.behind += other.behind;
        self.passed += other.passed;
        self.found += other.found;
        self.longest = self.longest.max(other.longest);
    }
}

pub(crate) struct Storm {
    random: StormRng,
    limits: SchedulerLimits,
    groups: Vec<KvGroupKind>,
    blocks: usize,
    scheduler: Scheduler,
    admission: AdmissionControl,
    bounds: QueueLimits,
    live: BTreeMap<SequenceId, StormRequest>,
    /// Requests lost in a crash, to be submitted again.
    returning: Vec<StormRequest>,
    /// By block, then by slot in it.
    cells: Vec<u64>,
    ages: u64,
    /// The last tenant that came once.
    strangers: u64,
    /// Priorities and tenants that arrived since the last crash.
    seen: BTreeSet<(i32, u64)>,
    scopes: [Scope; 2],
    backend: Reference,
    guesser: RandomDrafter,
    speculation: Speculation,
    depth_max: usize,
    /// Draft tokens of the step, by chunk.
    drafts: Vec<Vec<u32>>,
    /// Drafted and accepted tokens since the last crash.
    counted: (usize, usize),
    /// How often the text continues with the likely token.
    likely_percent: usize,
    /// Microseconds of a step and of each row.
    cost: (usize, usize),
    readers: EventSubscribers,
    cached: CachedKeys,
    summary: StormCounts,
}

impl Storm {
    pub(crate) fn new(seed: u64) -> Self {
        let mut random = StormRng(seed);
        let running_max = 1 + random.below(8);
        let limits = SchedulerLimits {
            block_tokens: 1 + random.below(6),
            step_tokens: running_max + random.below(24),
            running_max,
            score_rows_max: 1 + random.below(6),
            draft_rows_max: random.below(12),
            prefix_cache: !random.one_in(5),
            can_fork: !random.one_in(5),
        };
        let window = KvGroupKind::Window { tokens: 1 + random.below(20) };
        let groups = match random.below(8) {
            0 => vec![KvGroupKind::Full, window],
            1 => vec![KvGroupKind::Full, KvGroupKind::State],
            2 => vec![window, KvGroupKind::State],
            _ => vec![KvGroupKind::Full],
        };
        let blocks = (8 + random.below(24)) * groups.len();
        let queue_max = 4 + random.below(LIVE_MAX);
        let bounds = QueueLimits { queue_max, tenant_queue_max: 1 + random.below(queue_max) };
        let salt = |salt: u8| Scope { salt: vec![salt; usize::from(salt)], extra: Vec::new() };
        let depth_max = random.below(DRAFT_DEPTH_MAX + 1);
        Self {
            returning: Vec::new(),
            strangers: FIRST_STRANGER,
            seen: BTreeSet::new(),
            scopes: [salt(0), salt(1)],
            backend: Reference::new(),
            guesser: RandomDrafter(StormRng(random.next())),
            speculation: Speculation::new(depth_max, VOCAB),
            depth_max,
            drafts: Vec::new(),
            counted: (0, 0),
            likely_percent: [20, 60, 95][random.below(3)],
            cost: (random.below(1000), random.below(300)),
            random,
            limits,
            blocks,
            scheduler: Scheduler::with_groups(limits, blocks, groups.clone()),
            groups,
            admission: AdmissionControl::new(bounds),
            bounds,
            live: BTreeMap::new(),
            cells: vec![0; (blocks + 1) * limits.block_tokens],
            ages: 0,
            readers: EventSubscribers::new(seed),
            cached: CachedKeys::default(),
            summary: StormCounts::default(),
        }
    }

    /// Runs the storm, then a calm until every request has ended.
    pub(crate) fn run(mut self) -> StormCounts {
        let storm = STEPS_PER_SEED * 9 / 10;
        (0..storm).for_each(|step| self.step(step, true));
        // At worst one row a step, with each request recomputed as often as it is preempted.
        let patience = LIVE_MAX * TOKENS_MAX * 10;
        let mut step = storm;
        while !self.live.is_empty() || !self.returning.is_empty() {
            self.step(step, false);
            step += 1;
            assert!(step < storm + patience, "{} requests starve", self.live.len());
        }
        assert_eq!((self.scheduler.running_count(), self.scheduler.waiting_count()), (0, 0));
        assert_eq!(self.admission.waiting(), 0, "permits of the queue have leaked");
        assert_eq!(self.scheduler.pool().free_blocks(), self.blocks, "blocks have leaked");
        self.summary.evictions += self.scheduler.pool().evictions();
        assert!(self.scheduler.reset_prefix_cache());
        assert_eq!(self.scheduler.pool().in_use_end(), 1, "a block is still cached or in use");
        self.check_integrity();
        self.readers.read_events(self.scheduler.pool(), true, &mut self.summary);
        self.summary
    }

    fn step(&mut self, step: usize, storm: bool) {
        if storm {
            self.happen(step);
        } else {
            let live: Vec<SequenceId> = self.live.keys().copied().collect();
            live.into_iter().for_each(|sequence_id| self.set_paused(sequence_id, false));
        }
        self.come_back();
        self.sample_deferred(step);
        self.notice_waits();
        let decodes: Vec<SequenceId> = self
            .live
            .keys()
            .copied()
            .filter(|&sequence_id| {
                let sequence = self.scheduler.sequence(sequence_id).unwrap();
                sequence.rows_wanted() == 1 && sequence.is_decode()
            })
            .collect();
        let prefill_row_limit = if self.random.one_in(3) { usize::MAX } else { self.random.below(30) };
        self.cached.read_events(self.scheduler.pool());
        let (computing, paused) = (self.running(false), self.running(true).len());
        self.scheduler.schedule(prefill_row_limit);
        self.check_preemptions(&computing);
        self.summary.paused_preempted += paused - self.running(true).len();
        self.note_admissions(step);
        self.check_nothing_is_recomputed();
        self.draft();
        self.check_plan(&decodes, prefill_row_limit);
        if storm && self.random.one_in(200) {
            self.spoil();
            self.scheduler.abandon();
            let lost: Vec<SequenceId> =
                self.scheduler.plan().chunks.iter().map(|chunk| chunk.sequence_id).collect();
            lost.into_iter().for_each(|sequence_id| self.end(sequence_id, step));
        } else {
            self.compute();
            self.scheduler.commit();
            self.grow(step);
        }
        self.check_integrity();
        self.readers.read_events(self.scheduler.pool(), false, &mut self.summary);
    }

    fn check_integrity(&self) {
        self.scheduler.check_integrity().unwrap_or_else(|broken| panic!("{broken}"));
    }

    /// Events from outside the engine.
    fn happen(&mut self, step: usize) {
        while self.live.len() + self.returning.len() < LIVE_MAX && self.random.one_in(2) {
            // Several choices of one prompt arrive together.
            let choices = if self.random.one_in(2) { 1 + self.random.below(5) } else { 1 };
            let request = self.request();
            (0..choices).for_each(|_| self.arrive(&request, step));
        }
        if self.random.one_in(15)
            && let Some(sequence_id) = self.some_live()
        {
            self.end(sequence_id, step);
        }
        if self.random.one_in(6)
            && let Some(sequence_id) = self.some_live()
        {
            let is_paused = self.random.one_in(2);
            self.set_paused(sequence_id, is_paused);
        }
        if self.random.one_in(100) {
            self.scheduler.evict_unused_prefixes();
        }
        if self.random.one_in(1000) {
            self.crash();
        }
    }

    fn request(&mut self) -> StormRequest {
        let capacity = self.blocks / self.groups.len() * self.limits.block_tokens;
        let len = 1 + self.random.below(capacity.min(40));
        let text = self.random.below(3) as u32;
        let own = self.random.below(len + 1);
        let tokens: Vec<u32> = (0..len)
            .map(|i| if i < len - own { text * 100 + i as u32 } else { 1000 + self.random.below(50) as u32 })
            .collect();
        let (kind, tokens_max) = match self.random.below(16) {
            0 | 1 => (SequenceKind::Score, len),
            2 => (SequenceKind::EmbedLast, len),
            3 => (SequenceKind::EmbedAll, len),
            _ => (SequenceKind::Generate, (len + 1 + self.random.below(30)).min(capacity + 1).max(len + 1)),
        };
        let scope = self.random.below(self.scopes.len());
        let keys = tokens.iter().scan(mix(scope as u64), |key, &token| {
            *key = next_key(*key, token);
            Some(*key)
        });
        let tenant = match self.random.one_in(8) {
            true => {
                self.strangers += 1;
                self.strangers
            }
            false => self.random.below(4) as u64,
        };
        StormRequest {
            kind,
            priority: self.random.below(3) as i32 - 1,
            tenant,
            first: false,
            admitted: false,
            scope,
            constrained: kind == SequenceKind::Generate && self.random.one_in(12),
            late: false,
            acceptance: AcceptanceEstimate::default(),
            keys: keys.collect(),
            tokens,
            tokens_max,
            computed: 0,
            age: 0,
            queued: true,
            wait: None,
            returns: false,
            arrived: 0,
        }
    }

    fn arrive(&mut self, request: &StormRequest, step: usize) {
        let (waiting, own) = (self.admission.waiting(), self.queued_of(request.tenant));
        let admitted = self.admission.try_enter(request.priority, request.tenant);
        let places = self.admission.capacity_for(request.priority);
        let room = waiting < places && (request.tenant == 0 || own < self.bounds.tenant_queue_max);
        assert_eq!(admitted.is_ok(), room, "{waiting} wait, {own} of the tenant");
        if admitted.is_err() {
            self.summary.refused += 1;
            return;
        }
        self.add(StormRequest { arrived: step, ..request.clone() });
    }

    fn add(&mut self, mut live: StormRequest) {
        let sequence_id = self.scheduler.add(NewSequence {
            kind: live.kind,
            priority: live.priority,
            tenant: live.tenant,
            tokens: live.tokens.clone(),
            tokens_max: live.tokens_max,
            scope: &self.scopes[live.scope],
        });
        self.speculation.begin(sequence_id);
        self.ages += 1;
        live.age = self.ages;
        live.first = self.seen.insert((live.priority, live.tenant)) && live.kind == SequenceKind::Generate;
        assert!(self.live.insert(sequence_id, live).is_none(), "a sequence id is used twice");
    }

    fn queued_of(&self, tenant: u64) -> usize {
        self.live.values().filter(|live| live.queued && live.tenant == tenant).count()
    }

    /// The process dies. Its requests arrive again with an empty cache, as the router resumes them.
    fn crash(&mut self) {
        self.summary.crashes += 1;
        self.summary.evictions += self.scheduler.pool().evictions();
        self.scheduler = Scheduler::with_groups(self.limits, self.blocks, self.groups.clone());
        self.readers.forget();
        self.cached.forget();
        self.admission = AdmissionControl::new(self.bounds);
        self.speculation = Speculation::new(self.depth_max, VOCAB);
        self.counted = (0, 0);
        self.seen.clear();
        self.cells.fill(0);
        for (_, live) in std::mem::take(&mut self.live) {
            let acceptance = AcceptanceEstimate::default();
            self.returning.push(StormRequest {
                queued: true,
                computed: 0,
                wait: None,
                returns: false,
                late: false,
                acceptance,
                ..live
            });
        }
    }

    /// Submits lost requests again, in order, up to the queue limit.
    fn come_back(&mut self) {
        for live in std::mem::take(&mut self.returning) {
            match self.admission.try_enter(live.priority, live.tenant) {
                Ok(()) => self.add(live),
                Err(_) => self.returning.push(live),
            }
        }
    }

    fn some_live(&mut self) -> Option<SequenceId> {
        if self.live.is_empty() {
            return None;
        }
        let index = self.random.below(self.live.len());
        self.live.keys().nth(index).copied()
    }

    fn end(&mut self, sequence_id: SequenceId, step: usize) {
        self.scheduler.remove(sequence_id);
        if let Some(live) = self.live.remove(&sequence_id) {
            if live.queued {
                self.admission.leave(live.tenant);
            }
            self.summary.longest = self.summary.longest.max(step - live.arrived);
            self.summary.finished += 1;
        }
    }

    fn check_plan(&mut self, decodes: &[SequenceId], prefill_row_limit: usize) {
        let plan = self.scheduler.plan();
        assert_eq!(plan.draft_rows, plan.chunks.iter().map(|chunk| chunk.drafts).sum::<usize>());
        assert_eq!(plan.rows, plan.chunks.iter().map(|chunk| chunk.rows + chunk.drafts).sum::<usize>());
        assert!(plan.draft_rows <= self.limits.draft_rows_max);
        assert!(plan.rows <= self.limits.step_tokens, "{} rows", plan.rows);
        assert!(self.scheduler.running_count() <= self.limits.running_max);
        self.summary.preempted += plan.preempted;
        self.summary.copied += plan.copies.len();
        let mut score_rows = 0;
        let decode_moves = plan.chunks.iter().any(|chunk| decodes.contains(&chunk.sequence_id));
        let prompt_rows = plan.rows - plan.decode_rows - plan.draft_rows;
        let most =
            if decode_moves { prefill_row_limit.max(1) } else { usize::MAX }.min(self.limits.step_tokens);
        assert!(prompt_rows <= most, "{prompt_rows} rows of prompts beside decodes");
        // A prompt that is not completed gets more than half of the rows, or than a block, only if
        // all prefills have rows.
        let half = (most / 2).max(self.limits.block_tokens);
        let greedy = plan.chunks.iter().any(|c| c.outputs == ChunkOutputs::None && c.rows > half);
        let has_rows =
            |sequence_id: &SequenceId| plan.chunks.iter().any(|chunk| chunk.sequence_id == *sequence_id);
        let in_progress = |sequence_id: &SequenceId| {
            let sequence = self.scheduler.sequence(*sequence_id).unwrap();
            sequence.kind != SequenceKind::Score && sequence.rows_wanted() > 0
        };
        assert!(!greedy || self.live.keys().filter(|sequence_id| in_progress(sequence_id)).all(has_rows));
        for &ScheduledChunk { sequence_id, start, rows, drafts, outputs, .. } in &plan.chunks {
            let sequence = self.scheduler.sequence(sequence_id).unwrap();
            assert!(rows > 0);
            assert!(sequence.state == SequenceState::Running);
            let live = self.live.get_mut(&sequence_id).unwrap();
            // Rows follow each other, except for cached blocks. Only the first rows of an admission
            // start over.
            let found = start % self.limits.block_tokens == 0 && self.limits.prefix_cache;
            let follows = start == live.computed || (found && start > live.computed);
            let starts_over = std::mem::take(&mut live.admitted) && (found || start == 0);
            assert!(follows || starts_over, "rows from {start} on are computed after {}", live.computed);
            live.computed = start + rows;
            let end = start + rows;
            match (live.kind, outputs) {
                (SequenceKind::Score, outputs) => {
                    score_rows += rows;
                    assert_eq!(outputs, ChunkOutputs::All);
                }
                (SequenceKind::EmbedAll, outputs) => assert_eq!(outputs, ChunkOutputs::All),
                (SequenceKind::Generate | SequenceKind::EmbedLast, ChunkOutputs::Last) => {
                    assert_eq!(end, live.tokens.len());
                }
                (SequenceKind::Generate | SequenceKind::EmbedLast, _) => assert!(end < live.tokens.len()),
            }
            // The last token is never computed.
            assert!(drafts == 0 || (outputs == ChunkOutputs::Last && end + drafts < live.tokens_max));
            assert!(
                sequence.blocks().len() * self.limits.block_tokens >= end + drafts,
                "rows without a block"
            );
        }
        assert!(score_rows <= self.limits.score_rows_max);
        for &sequence_id in decodes {
            let moved = plan.chunks.iter().any(|chunk| chunk.sequence_id == sequence_id);
            let preempted = self.scheduler.sequence(sequence_id).unwrap().state == SequenceState::Waiting;
            assert!(moved || preempted, "a decode stood still");
        }
    }
}

fn next_key(parent: u64, token: u32) -> u64 {
    mix(parent ^ u64::from(token).wrapping_mul(0x9E37_79B9_7F4A_7C15) | 1 << 63)
}

/// Runs one seed. An error says which invariant is broken.
pub(crate) fn run(seed: u64) -> Result<StormCounts, String> {
    std::panic::catch_unwind(|| Storm::new(seed).run()).map_err(|cause| {
        let text = cause.downcast_ref::<String>().cloned();
        text.or_else(|| cause.downcast_ref::<&str>().map(|&text| text.to_owned())).unwrap_or_default()
    })
}
