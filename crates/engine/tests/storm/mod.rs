//! AdmissionControl, scheduler, block pool and drafts under a seeded storm of arrivals, cancels, holds, failed steps, crashes and
//! pressure, without a model; every invariant is checked at every step.
//!
//! Beside the scheduler's own integrity:
//! - rows within the budgets; each chunk the next rows of its sequence, none computed twice without a preemption; every
//!   decode that is not held moves.
//! - content: the storm keeps what each place of each block holds, writes what the plan writes and copies, and every key
//!   that a row reads is the one of its own sequence's text and salt.
//! - no block is written while another sequence holds it, unless that one found it by its content in this step.
//! - a sequence whose row is there and whose token is drawn some steps later stands still, through preemptions too.
//! - a draft counts if it was drawn, for its own sequence, and leaves nothing behind if not.
//! - nobody who waits is passed more often than the queue's bounds say, nor whom the step could have used.
//! - what can be found, or is about to be, is not computed again.
//! - who follows the pool's events, often or seldom, knows what can be found.
//! - at the end all have ended and every block is free.

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
/// Tenants from here on come once.
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
    /// The first of its tenant with its priority, and not to be scored.
    first: bool,
    /// Which of the seed's scopes.
    scope: usize,
    /// Never drafted for, and its tokens may be drawn late.
    constrained: bool,
    /// Its last row is computed, its next token not drawn.
    late: bool,
    /// How often its drafts were right.
    acceptance: AcceptanceEstimate,
    tokens: Vec<u32>,
    /// What stands for keys and values of each position: a hash of all tokens up to it.
    keys: Vec<u64>,
    tokens_max: usize,
    /// Rows of its own that must be computed before a row may be: follows the plans, not the scheduler.
    computed: usize,
    /// Order of arrival.
    age: u64,
    /// It has had no rows since it was admitted.
    admitted: bool,
    /// Never admitted: holds a place in the queue.
    queued: bool,
    wait: Option<WaitRecord>,
    arrived: usize,
}

/// What happened, so that a test can see that it did.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct StormCounts {
    pub(crate) finished: usize,
    pub(crate) preempted: usize,
    pub(crate) shared: usize,
    pub(crate) accepted: usize,
    pub(crate) forked: usize,
    pub(crate) copied: usize,
    pub(crate) refused: usize,
    pub(crate) crashes: usize,
    pub(crate) late: usize,
    pub(crate) evictions: u64,
    /// Events of the pool that readers were told.
    pub(crate) told: usize,
    /// How often one of them had missed too many.
    pub(crate) behind: usize,
    /// How often one that waits for a prefix in progress let another go first.
    pub(crate) passed: usize,
    /// Cached blocks at admissions.
    pub(crate) found: usize,
    /// Steps of a request from arrival to end.
    pub(crate) longest: usize,
}

impl std::ops::AddAssign for StormCounts {
    fn add_assign(&mut self, other: Self) {
        self.finished += other.finished;
        self.preempted += other.preempted;
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
    /// Lost in a crash, on their way back.
    returning: Vec<StormRequest>,
    /// By block, then by place in it.
    cells: Vec<u64>,
    ages: u64,
    /// The last tenant that came once.
    strangers: u64,
    /// Priority and tenant of those who have come since the last crash.
    seen: BTreeSet<(i32, u64)>,
    scopes: [Scope; 2],
    backend: Reference,
    guesser: RandomDrafter,
    speculation: Speculation,
    depth_max: usize,
    /// Drafted tokens of the step, by chunk.
    drafts: Vec<Vec<u32>>,
    /// Drafted and accepted tokens since the last crash.
    counted: (usize, usize),
    /// How often the text goes on as is likely.
    likely_percent: usize,
    /// Microseconds of a step and of each row.
    cost: (usize, usize),
    readers: EventSubscribers,
    findable: CachedKeys,
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
            findable: CachedKeys::default(),
            summary: StormCounts::default(),
        }
    }

    /// Storm, then calm until everything that is there has ended.
    pub(crate) fn run(mut self) -> StormCounts {
        let storm = STEPS_PER_SEED * 9 / 10;
        (0..storm).for_each(|step| self.step(step, true));
        // One row a step at worst, each request recomputed as often as it is preempted.
        let patience = LIVE_MAX * TOKENS_MAX * 10;
        let mut step = storm;
        while !self.live.is_empty() || !self.returning.is_empty() {
            self.step(step, false);
            step += 1;
            assert!(step < storm + patience, "{} requests starve", self.live.len());
        }
        assert_eq!((self.scheduler.running_count(), self.scheduler.waiting_count()), (0, 0));
        assert_eq!(self.admission.waiting(), 0, "places of the queue have leaked");
        assert_eq!(self.scheduler.pool().free_blocks(), self.blocks, "blocks have leaked");
        self.summary.evictions += self.scheduler.pool().evictions();
        assert!(self.scheduler.reset_prefix_cache());
        assert_eq!(self.scheduler.pool().in_use_end(), 1, "something is left to be found");
        self.check_integrity();
        self.readers.look(self.scheduler.pool(), true, &mut self.summary);
        self.summary
    }

    fn step(&mut self, step: usize, storm: bool) {
        if storm {
            self.happen(step);
        } else {
            self.live.keys().for_each(|&sequence_id| self.scheduler.set_paused(sequence_id, false));
        }
        self.come_back();
        self.draw_late(step);
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
        let beside = if self.random.one_in(3) { usize::MAX } else { self.random.below(30) };
        self.findable.look(self.scheduler.pool());
        self.scheduler.schedule(beside);
        self.note_admissions(step);
        self.check_nothing_is_recomputed();
        self.draft();
        self.check_plan(&decodes, beside);
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
        self.readers.look(self.scheduler.pool(), false, &mut self.summary);
    }

    fn check_integrity(&self) {
        self.scheduler.check_integrity().unwrap_or_else(|broken| panic!("{broken}"));
    }

    /// What comes from outside.
    fn happen(&mut self, step: usize) {
        while self.live.len() + self.returning.len() < LIVE_MAX && self.random.one_in(2) {
            // Several choices of one prompt come together.
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
            let held = self.random.one_in(2);
            self.scheduler.set_paused(sequence_id, held);
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
        let (kind, tokens_max) = if self.random.one_in(8) {
            (SequenceKind::Score, len)
        } else {
            (SequenceKind::Generate, (len + 1 + self.random.below(30)).min(capacity + 1).max(len + 1))
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
        assert!(self.live.insert(sequence_id, live).is_none(), "a sequence_id is given twice");
    }

    fn queued_of(&self, tenant: u64) -> usize {
        self.live.values().filter(|live| live.queued && live.tenant == tenant).count()
    }

    /// The process dies; what it had comes again to an empty cache, as the router resumes it.
    fn crash(&mut self) {
        self.summary.crashes += 1;
        self.summary.evictions += self.scheduler.pool().evictions();
        self.scheduler = Scheduler::with_groups(self.limits, self.blocks, self.groups.clone());
        self.readers.forget();
        self.findable.forget();
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
                late: false,
                acceptance,
                ..live
            });
        }
    }

    /// As many of the lost ones as there are places for, in order.
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

    fn check_plan(&mut self, decodes: &[SequenceId], beside: usize) {
        let plan = self.scheduler.plan();
        assert_eq!(plan.draft_rows, plan.chunks.iter().map(|chunk| chunk.drafts).sum::<usize>());
        assert_eq!(plan.rows, plan.chunks.iter().map(|chunk| chunk.rows + chunk.drafts).sum::<usize>());
        assert!(plan.draft_rows <= self.limits.draft_rows_max);
        assert!(plan.rows <= self.limits.step_tokens, "{} rows", plan.rows);
        assert!(self.scheduler.running_count() <= self.limits.running_max);
        assert!(plan.preempted == 0 || plan.admitted.is_empty());
        self.summary.preempted += plan.preempted;
        self.summary.copied += plan.copies.len();
        let mut score_rows = 0;
        let decode_moves = plan.chunks.iter().any(|chunk| decodes.contains(&chunk.sequence_id));
        let prompt_rows = plan.rows - plan.decode_rows - plan.draft_rows;
        let most = if decode_moves { beside.max(1) } else { usize::MAX }.min(self.limits.step_tokens);
        assert!(prompt_rows <= most, "{prompt_rows} rows of prompts beside decodes");
        // More than half, or than a block, goes to a prompt that is not completed only when all in progress have rows.
        let half = (most / 2).max(self.limits.block_tokens);
        let greedy = plan.chunks.iter().any(|c| c.outputs == ChunkOutputs::None && c.rows > half);
        let has_rows =
            |sequence_id: &SequenceId| plan.chunks.iter().any(|chunk| chunk.sequence_id == *sequence_id);
        let in_progress = |sequence_id: &SequenceId| {
            let sequence = self.scheduler.sequence(*sequence_id).unwrap();
            sequence.kind == SequenceKind::Generate && sequence.rows_wanted() > 0
        };
        assert!(!greedy || self.live.keys().filter(|sequence_id| in_progress(sequence_id)).all(has_rows));
        for &ScheduledChunk { sequence_id, start, rows, drafts, outputs, .. } in &plan.chunks {
            let sequence = self.scheduler.sequence(sequence_id).unwrap();
            assert!(rows > 0);
            assert!(sequence.state == SequenceState::Running);
            let live = self.live.get_mut(&sequence_id).unwrap();
            // Rows follow each other, but for blocks that are found. Only the first ones of an admission start over.
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
                (SequenceKind::Generate, ChunkOutputs::Last) => assert_eq!(end, live.tokens.len()),
                (SequenceKind::Generate, _) => assert!(end < live.tokens.len()),
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

/// Runs one seed; what was broken, if something was.
pub(crate) fn run(seed: u64) -> Result<StormCounts, String> {
    std::panic::catch_unwind(|| Storm::new(seed).run()).map_err(|cause| {
        let text = cause.downcast_ref::<String>().cloned();
        text.or_else(|| cause.downcast_ref::<&str>().map(|&text| text.to_owned())).unwrap_or_default()
    })
}
