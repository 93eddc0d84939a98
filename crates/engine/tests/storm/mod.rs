//! Admission, scheduler, block pool and drafts under a seeded storm of arrivals, cancels, holds, failed steps, crashes and
//! pressure, without a model; every invariant is checked at every step.
//!
//! Beside the pool's own integrity:
//! - rows within the budgets; each chunk exactly the next rows of its sequence; every decode that is not held moves.
//! - content: the storm keeps what each place of each block holds, writes what the plan writes and copies, and every key
//!   that a row reads is the one of its own sequence's text.
//! - no block is written while another sequence holds it, unless that one found it by its content in this step.
//! - nobody who waits is passed more often than the queue's bound says.
//! - at the end all have ended and every block is free.

mod content;

use crate::admission::{Admission, Bounds};
use crate::blocks::GroupKind;
use crate::queue::AGED_EVERY;
use crate::scheduler::{Chunk, ChunkOutputs, Fork, Limits, Scheduler, Slot};
use crate::sequence::{Kind, NewSequence, State};
use prefix::Scope;
use std::collections::BTreeMap;
use std::time::Duration;

pub(crate) const STEPS_PER_SEED: usize = 1_000;
const LIVE_MAX: usize = 40;
const TOKENS_MAX: usize = 71;

/// Splitmix64: a fixed sequence for each seed.
pub(crate) struct Random(pub(crate) u64);

impl Random {
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

struct Live {
    kind: Kind,
    priority: i32,
    tenant: u64,
    tokens: Vec<u32>,
    /// What stands for keys and values of each position: a hash of all tokens up to it.
    keys: Vec<u64>,
    tokens_max: usize,
    /// Rows of its own that must be computed before a row may be: follows the plans, not the scheduler.
    computed: usize,
    /// Order of arrival.
    age: u64,
    /// Never admitted: holds a place in the queue.
    queued: bool,
    wait: Option<Wait>,
    arrived: usize,
}

/// What the queue's bound promises to one that waits.
#[derive(Clone, Copy, Default)]
struct Wait {
    admissions: u32,
    turns: u32,
}

/// What happened, so that a test can see that it did.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Summary {
    pub(crate) finished: usize,
    pub(crate) preempted: usize,
    pub(crate) shared: usize,
    pub(crate) accepted: usize,
    pub(crate) forked: usize,
    pub(crate) copied: usize,
    pub(crate) refused: usize,
    pub(crate) crashes: usize,
    pub(crate) evictions: u64,
    /// Steps of a request from arrival to end.
    pub(crate) longest: usize,
}

impl std::ops::AddAssign for Summary {
    fn add_assign(&mut self, other: Self) {
        self.finished += other.finished;
        self.preempted += other.preempted;
        self.shared += other.shared;
        self.accepted += other.accepted;
        self.forked += other.forked;
        self.copied += other.copied;
        self.refused += other.refused;
        self.crashes += other.crashes;
        self.evictions += other.evictions;
        self.longest = self.longest.max(other.longest);
    }
}

pub(crate) struct Storm {
    random: Random,
    limits: Limits,
    groups: Vec<GroupKind>,
    blocks: usize,
    scheduler: Scheduler,
    admission: Admission,
    bounds: Bounds,
    live: BTreeMap<Slot, Live>,
    /// By block, then by place in it.
    cells: Vec<u64>,
    ages: u64,
    summary: Summary,
}

impl Storm {
    pub(crate) fn new(seed: u64) -> Self {
        let mut random = Random(seed);
        let running_max = 1 + random.below(8);
        let limits = Limits {
            block_tokens: 1 + random.below(6),
            step_tokens: running_max + random.below(24),
            running_max,
            score_rows_max: 1 + random.below(6),
            draft_rows_max: random.below(12),
            prefix_cache: !random.one_in(5),
            forks: !random.one_in(5),
        };
        let window = GroupKind::Window { tokens: 1 + random.below(20) };
        let groups = match random.below(8) {
            0 => vec![GroupKind::Full, window],
            1 => vec![GroupKind::Full, GroupKind::State],
            2 => vec![window, GroupKind::State],
            _ => vec![GroupKind::Full],
        };
        let blocks = (8 + random.below(24)) * groups.len();
        let queue_max = 4 + random.below(LIVE_MAX);
        let bounds = Bounds { queue_max, tenant_queue_max: 1 + random.below(queue_max) };
        Self {
            random,
            limits,
            blocks,
            scheduler: Scheduler::with_groups(limits, blocks, groups.clone()),
            groups,
            admission: Admission::new(bounds),
            bounds,
            live: BTreeMap::new(),
            cells: vec![0; (blocks + 1) * limits.block_tokens],
            ages: 0,
            summary: Summary::default(),
        }
    }

    /// Storm, then calm until everything that is there has ended.
    pub(crate) fn run(mut self) -> Summary {
        let storm = STEPS_PER_SEED * 9 / 10;
        (0..storm).for_each(|step| self.step(step, true));
        // One row a step at worst, each request recomputed as often as it is preempted.
        let patience = LIVE_MAX * TOKENS_MAX * 10;
        let mut step = storm;
        while !self.live.is_empty() {
            self.step(step, false);
            step += 1;
            assert!(step < storm + patience, "{} requests starve", self.live.len());
        }
        assert_eq!((self.scheduler.running(), self.scheduler.waiting()), (0, 0));
        assert_eq!(self.admission.waiting(), 0, "places of the queue have leaked");
        assert_eq!(self.scheduler.pool().free(), self.blocks, "blocks have leaked");
        self.summary.evictions += self.scheduler.pool().evictions();
        assert!(self.scheduler.reset_prefix_cache());
        assert_eq!(self.scheduler.pool().tail(), 1, "something is left to be found");
        self.scheduler.check_integrity().unwrap();
        self.summary
    }

    fn step(&mut self, step: usize, storm: bool) {
        if storm {
            self.happen(step);
        } else {
            self.live.keys().for_each(|&slot| self.scheduler.hold(slot, false));
            self.notice_waits();
        }
        let decodes: Vec<Slot> = self
            .live
            .keys()
            .copied()
            .filter(|&slot| {
                let sequence = self.scheduler.sequence(slot).unwrap();
                sequence.wanted() == 1 && sequence.is_decode()
            })
            .collect();
        let beside = if self.random.one_in(3) { usize::MAX } else { self.random.below(30) };
        self.scheduler.schedule(beside);
        self.note_admissions(step);
        self.draft();
        self.check_plan(&decodes, beside);
        if storm && self.random.one_in(200) {
            self.spoil();
            self.scheduler.abandon();
            let lost: Vec<Slot> = self.scheduler.plan().chunks.iter().map(|chunk| chunk.slot).collect();
            lost.into_iter().for_each(|slot| self.end(slot, step));
        } else {
            self.compute();
            self.scheduler.commit();
            self.grow(step);
        }
        self.scheduler.check_integrity().unwrap();
    }

    /// What comes from outside.
    fn happen(&mut self, step: usize) {
        while self.live.len() < LIVE_MAX && self.random.one_in(2) {
            // Several choices of one prompt come together.
            let choices = if self.random.one_in(4) { 1 + self.random.below(4) } else { 1 };
            let request = self.request();
            (0..choices).for_each(|_| self.arrive(&request, step));
        }
        if self.random.one_in(15)
            && let Some(slot) = self.some_live()
        {
            self.end(slot, step);
        }
        if self.random.one_in(6)
            && let Some(slot) = self.some_live()
        {
            let held = self.random.one_in(2);
            self.scheduler.hold(slot, held);
        }
        if self.random.one_in(1000) {
            self.crash();
        }
        self.notice_waits();
    }

    fn request(&mut self) -> Live {
        let capacity = self.blocks / self.groups.len() * self.limits.block_tokens;
        let len = 1 + self.random.below(capacity.min(40));
        let text = self.random.below(3) as u32;
        let own = self.random.below(len + 1);
        let tokens: Vec<u32> = (0..len)
            .map(|i| if i < len - own { text * 100 + i as u32 } else { 1000 + self.random.below(50) as u32 })
            .collect();
        let (kind, tokens_max) = if self.random.one_in(8) {
            (Kind::Score, len)
        } else {
            (Kind::Generate, (len + 1 + self.random.below(30)).min(capacity + 1).max(len + 1))
        };
        let keys = tokens.iter().scan(0, |key, &token| {
            *key = next_key(*key, token);
            Some(*key)
        });
        Live {
            kind,
            priority: self.random.below(3) as i32 - 1,
            tenant: self.random.below(4) as u64,
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

    fn arrive(&mut self, request: &Live, step: usize) {
        let (waiting, own) = (self.admission.waiting(), self.queued_of(request.tenant));
        let admitted = self.admission.enter(request.priority, request.tenant);
        let places = self.admission.places(request.priority);
        let room = waiting < places && (request.tenant == 0 || own < self.bounds.tenant_queue_max);
        assert_eq!(admitted.is_ok(), room, "{waiting} wait, {own} of the tenant");
        if admitted.is_err() {
            self.summary.refused += 1;
            return;
        }
        let live = Live { tokens: request.tokens.clone(), keys: request.keys.clone(), ..*request };
        self.add(Live { arrived: step, ..live });
    }

    fn add(&mut self, mut live: Live) {
        let slot = self.scheduler.add(NewSequence {
            kind: live.kind,
            priority: live.priority,
            tenant: live.tenant,
            tokens: live.tokens.clone(),
            tokens_max: live.tokens_max,
            scope: &Scope::default(),
        });
        self.ages += 1;
        live.age = self.ages;
        assert!(self.live.insert(slot, live).is_none(), "a slot is given twice");
    }

    fn queued_of(&self, tenant: u64) -> usize {
        self.live.values().filter(|live| live.queued && live.tenant == tenant).count()
    }

    /// The process dies; what it had comes again, to an empty cache, as the router resumes it.
    fn crash(&mut self) {
        self.summary.crashes += 1;
        self.summary.evictions += self.scheduler.pool().evictions();
        self.scheduler = Scheduler::with_groups(self.limits, self.blocks, self.groups.clone());
        self.admission = Admission::new(Bounds { queue_max: 8 * LIVE_MAX, tenant_queue_max: 8 * LIVE_MAX });
        self.cells.fill(0);
        for (_, live) in std::mem::take(&mut self.live) {
            self.admission.enter(live.priority, live.tenant).unwrap();
            self.add(Live { queued: true, computed: 0, wait: None, ..live });
        }
        self.bounds = Bounds { queue_max: 8 * LIVE_MAX, tenant_queue_max: 8 * LIVE_MAX };
    }

    fn some_live(&mut self) -> Option<Slot> {
        if self.live.is_empty() {
            return None;
        }
        let index = self.random.below(self.live.len());
        self.live.keys().nth(index).copied()
    }

    fn end(&mut self, slot: Slot, step: usize) {
        self.scheduler.remove(slot);
        if let Some(live) = self.live.remove(&slot) {
            if live.queued {
                self.admission.leave(live.tenant);
            }
            self.summary.longest = self.summary.longest.max(step - live.arrived);
            self.summary.finished += 1;
        }
    }

    /// Those who have entered the queue: each older one that lives may be served before, once for each time it enters.
    fn notice_waits(&mut self) {
        let entered: Vec<(Slot, u64)> = self
            .live
            .iter()
            .filter(|(slot, live)| {
                live.wait.is_none() && self.scheduler.sequence(**slot).unwrap().state == State::Waiting
            })
            .map(|(&slot, live)| (slot, live.age))
            .collect();
        for &(_, age) in &entered {
            let younger = self.live.values_mut().filter(|live| live.age > age);
            younger.filter_map(|live| live.wait.as_mut()).for_each(|wait| wait.turns += 1);
        }
        for (slot, age) in entered {
            let older = self.live.values().filter(|live| live.age < age).count() as u32;
            self.live.get_mut(&slot).unwrap().wait = Some(Wait { admissions: 0, turns: older + 1 });
        }
    }

    fn note_admissions(&mut self, step: usize) {
        let admitted: Vec<Slot> = self
            .live
            .iter()
            .filter(|(slot, live)| {
                live.wait.is_some() && self.scheduler.sequence(**slot).unwrap().state != State::Waiting
            })
            .map(|(&slot, _)| slot)
            .collect();
        let first: Vec<Slot> = self.scheduler.plan().admitted.iter().map(|&(slot, _)| slot).collect();
        for live in self.live.values_mut() {
            let Some(wait) = &mut live.wait else { continue };
            wait.admissions += admitted.len() as u32;
            // Of those admitted in one step, some came after it.
            let bound = AGED_EVERY * wait.turns + admitted.len() as u32;
            assert!(
                live.kind == Kind::Score || wait.admissions <= bound,
                "a request starves: {} admissions, at most {bound} are promised",
                wait.admissions
            );
        }
        for slot in admitted {
            let live = self.live.get_mut(&slot).unwrap();
            live.wait = None;
            assert_eq!(first.contains(&slot), live.queued, "reported once, when first admitted");
            if std::mem::replace(&mut live.queued, false) {
                self.admission.admitted(live.tenant, Duration::from_millis(step as u64));
            }
        }
        self.notice_waits();
    }

    /// Drafts behind some of the chunks that end with their sequence's last token.
    fn draft(&mut self) {
        let mut spare = self.scheduler.spare_blocks();
        let preempted = self.scheduler.plan().preempted;
        for index in 0..self.scheduler.plan().chunks.len() {
            let chunk = self.scheduler.plan().chunks[index];
            if chunk.outputs == ChunkOutputs::Last && !self.random.one_in(3) {
                let most = 1 + self.random.below(6);
                let rows = self.scheduler.extend(index, most, &mut spare);
                assert!(rows <= most);
                let fewer = self.random.below(rows + 1);
                self.scheduler.shorten(index, if self.random.one_in(4) { fewer } else { 0 });
            }
        }
        assert_eq!(self.scheduler.plan().preempted, preempted, "a draft preempts");
    }

    fn check_plan(&mut self, decodes: &[Slot], beside: usize) {
        let plan = self.scheduler.plan();
        assert_eq!(plan.draft_rows, plan.chunks.iter().map(|chunk| chunk.drafts).sum::<usize>());
        assert_eq!(plan.rows, plan.chunks.iter().map(|chunk| chunk.rows + chunk.drafts).sum::<usize>());
        assert!(plan.draft_rows <= self.limits.draft_rows_max);
        assert!(plan.rows <= self.limits.step_tokens, "{} rows", plan.rows);
        assert!(self.scheduler.running() <= self.limits.running_max);
        assert!(plan.preempted == 0 || plan.admitted.is_empty());
        self.summary.preempted += plan.preempted;
        self.summary.copied += plan.copies.len();
        let mut score_rows = 0;
        let decode_moves = plan.chunks.iter().any(|chunk| decodes.contains(&chunk.slot));
        let prompt_rows = plan.rows - plan.decode_rows - plan.draft_rows;
        let most = if decode_moves { beside.max(1) } else { usize::MAX }.min(self.limits.step_tokens);
        assert!(prompt_rows <= most, "{prompt_rows} rows of prompts beside decodes");
        // More than half, or than a block, goes to a prompt that is not completed only when all in progress have rows.
        let half = (most / 2).max(self.limits.block_tokens);
        let greedy = plan.chunks.iter().any(|c| c.outputs == ChunkOutputs::None && c.rows > half);
        let has_rows = |slot: &Slot| plan.chunks.iter().any(|chunk| chunk.slot == *slot);
        let in_progress = |slot: &Slot| {
            let sequence = self.scheduler.sequence(*slot).unwrap();
            sequence.kind == Kind::Generate && sequence.wanted() > 0
        };
        assert!(!greedy || self.live.keys().filter(|slot| in_progress(slot)).all(has_rows));
        for &Chunk { slot, start, rows, drafts, outputs, .. } in &plan.chunks {
            let sequence = self.scheduler.sequence(slot).unwrap();
            assert!(rows > 0);
            assert!(sequence.state == State::Running);
            let live = self.live.get_mut(&slot).unwrap();
            // Rows follow each other, except that a preemption starts over, at a prefix found in the cache.
            let readmitted = start % self.limits.block_tokens == 0;
            assert!(start == live.computed || readmitted, "rows {start} after {}", live.computed);
            live.computed = start + rows;
            let end = start + rows;
            match (live.kind, outputs) {
                (Kind::Score, outputs) => {
                    score_rows += rows;
                    assert_eq!(outputs, ChunkOutputs::All);
                }
                (Kind::Generate, ChunkOutputs::Last) => assert_eq!(end, live.tokens.len()),
                (Kind::Generate, _) => assert!(end < live.tokens.len()),
            }
            // The last token is never computed.
            assert!(drafts == 0 || (outputs == ChunkOutputs::Last && end + drafts < live.tokens_max));
            assert!(
                sequence.blocks().len() * self.limits.block_tokens >= end + drafts,
                "rows without a block"
            );
        }
        assert!(score_rows <= self.limits.score_rows_max);
        for &slot in decodes {
            let moved = plan.chunks.iter().any(|chunk| chunk.slot == slot);
            let preempted = self.scheduler.sequence(slot).unwrap().state == State::Waiting;
            assert!(moved || preempted, "a decode stood still");
        }
    }

    fn grow(&mut self, step: usize) {
        let chunks = self.scheduler.plan().chunks.clone();
        let forked = self.scheduler.plan().forked.clone();
        for chunk in chunks {
            let sequence = self.scheduler.sequence(chunk.slot).unwrap();
            assert_eq!(sequence.computed(), chunk.start + chunk.rows);
            if sequence.kind == Kind::Score && sequence.remaining() == 0 {
                self.end(chunk.slot, step);
            } else if chunk.outputs == ChunkOutputs::Last {
                self.draw(chunk.slot, chunk.drafts, step);
            }
        }
        for Fork { leader, follower: slot } in forked {
            self.summary.forked += 1;
            let live = self.live.get_mut(&slot).unwrap();
            live.computed = live.tokens.len();
            assert_ne!(leader, slot);
            let sequence = self.scheduler.sequence(slot).unwrap();
            assert_eq!((sequence.remaining(), sequence.state), (0, State::Running));
            self.draw(slot, 0, step);
        }
        self.scheduler.settle();
        for (&slot, live) in &self.live {
            let sequence = self.scheduler.sequence(slot).unwrap();
            let most = sequence.tokens().len().div_ceil(self.limits.block_tokens);
            assert!(sequence.blocks().len() <= most, "blocks of wrong drafts are kept");
            assert_eq!(sequence.tokens(), live.tokens);
            assert!(sequence.remaining() > 0 && live.tokens.len() <= live.tokens_max);
        }
        self.notice_waits();
    }

    /// The token of the last row and those of drafted rows that were right.
    fn draw(&mut self, slot: Slot, drafts: usize, step: usize) {
        let right = if self.random.one_in(2) { drafts } else { self.random.below(drafts + 1) };
        for row in 0..=right {
            let bt = self.limits.block_tokens;
            let live = self.live.get_mut(&slot).unwrap();
            if row > 0 {
                // The drafted token was this one: its key is in place.
                let position = live.computed;
                let blocks = self.scheduler.sequence(slot).unwrap().blocks();
                for group in 0..self.groups.len() {
                    let block = blocks.group(group)[position / bt] as usize;
                    self.cells[block * bt + position % bt] = live.keys[position] ^ group as u64;
                }
                self.scheduler.accept(slot);
                live.computed += 1;
                self.summary.accepted += 1;
            }
            if live.tokens.len() + 1 == live.tokens_max || self.random.one_in(400) {
                self.end(slot, step);
                return;
            }
            let token = 2000 + self.random.below(3) as u32;
            live.tokens.push(token);
            live.keys.push(next_key(live.keys.last().copied().unwrap_or(0), token));
            self.scheduler.push_token(slot, token);
        }
    }
}

fn next_key(parent: u64, token: u32) -> u64 {
    mix(parent ^ u64::from(token).wrapping_mul(0x9E37_79B9_7F4A_7C15) | 1 << 63)
}

/// Runs one seed; what was broken, if something was.
pub(crate) fn run(seed: u64) -> Result<Summary, String> {
    std::panic::catch_unwind(|| Storm::new(seed).run()).map_err(|cause| {
        let text = cause.downcast_ref::<String>().cloned();
        text.or_else(|| cause.downcast_ref::<&str>().map(|&text| text.to_owned())).unwrap_or_default()
    })
}
