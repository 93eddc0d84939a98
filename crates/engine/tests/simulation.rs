//! Scheduler and block pool under a seeded storm of arrivals, cancels, holds and pressure, without a model. Every
//! invariant is checked at every step; a failure prints its seed.
//!
//! Beside the pool's own integrity: rows within the budget, each chunk exactly the next rows of its sequence with blocks
//! and its drafts for all of them, no block that is written while another sequence holds it, every decode that is not held moves in
//! every step, all blocks free at the end, and nobody waits for ever.

#![expect(clippy::unwrap_used, reason = "a panic is how a test fails")]

use engine::pool::BlockId;
use engine::scheduler::{Chunk, ChunkOutputs, Limits, Scheduler, Slot};
use engine::sequence::{Kind, State};
use prefix::Scope;
use std::collections::{BTreeMap, HashMap};

/// Steps of all seeds together; `BALLAST_SIMULATION_STEPS` asks for more.
const STEPS: usize = 1_000_000;
const STEPS_PER_SEED: usize = 1_000;

/// Splitmix64: a fixed sequence for each seed.
struct Random(u64);

impl Random {
    fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9E37_79B9_7F4A_7C15);
        let mut mixed = self.0;
        mixed = (mixed ^ mixed >> 30).wrapping_mul(0xBF58_476D_1CE4_E5B9);
        mixed = (mixed ^ mixed >> 27).wrapping_mul(0x94D0_49BB_1331_11EB);
        mixed ^ mixed >> 31
    }

    fn below(&mut self, end: usize) -> usize {
        (self.next() % end as u64) as usize
    }

    fn one_in(&mut self, n: usize) -> bool {
        self.below(n) == 0
    }
}

struct Live {
    tokens_max: usize,
    /// Rows of its own that must be computed before a row may be: follows the plans, not the scheduler.
    computed: usize,
    arrived: usize,
}

struct Simulation {
    random: Random,
    limits: Limits,
    blocks: usize,
    scheduler: Scheduler,
    live: BTreeMap<Slot, Live>,
    /// Steps of a request from arrival to end, longest so far.
    longest: usize,
    finished: usize,
    preempted: usize,
    shared: usize,
    accepted: usize,
}

impl Simulation {
    fn new(seed: u64) -> Self {
        let mut random = Random(seed);
        let running_max = 1 + random.below(8);
        let limits = Limits {
            block_tokens: 1 + random.below(6),
            step_tokens: running_max + random.below(24),
            prefill_chunk_max: 1 + random.below(24),
            running_max,
            score_rows_max: 1 + random.below(6),
            draft_rows_max: random.below(12),
            prefix_cache: !random.one_in(4),
        };
        let blocks = 8 + random.below(24);
        Self {
            random,
            limits,
            blocks,
            scheduler: Scheduler::new(limits, blocks),
            live: BTreeMap::new(),
            longest: 0,
            finished: 0,
            preempted: 0,
            shared: 0,
            accepted: 0,
        }
    }

    fn arrive(&mut self, step: usize) {
        let capacity = self.blocks * self.limits.block_tokens;
        let len = 1 + self.random.below(capacity.min(40));
        let text = self.random.below(3) as u32;
        let own = self.random.below(len + 1);
        let tokens: Vec<u32> = (0..len)
            .map(|i| if i < len - own { text * 100 + i as u32 } else { 1000 + self.random.below(50) as u32 })
            .collect();
        let priority = self.random.below(3) as i32;
        let (kind, tokens_max) = if self.random.one_in(8) {
            (Kind::Score, len)
        } else {
            (Kind::Generate, (len + 1 + self.random.below(30)).min(capacity + 1))
        };
        let slot = self.scheduler.add(kind, priority, tokens, tokens_max, &Scope::default());
        self.live.insert(slot, Live { tokens_max, computed: 0, arrived: step });
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
            self.longest = self.longest.max(step - live.arrived);
            self.finished += 1;
        }
    }

    fn step(&mut self, step: usize, storm: bool) {
        if storm {
            while self.live.len() < 40 && self.random.one_in(2) {
                self.arrive(step);
            }
            if self.random.one_in(15)
                && let Some(slot) = self.some_live()
            {
                self.end(slot, step);
            }
        }
        if self.random.one_in(6)
            && let Some(slot) = self.some_live()
        {
            let held = storm && self.random.one_in(2);
            self.scheduler.hold(slot, held);
        }
        if !storm {
            self.live.keys().for_each(|&slot| self.scheduler.hold(slot, false));
        }
        let decodes: Vec<Slot> = self
            .live
            .keys()
            .copied()
            .filter(|&slot| {
                let sequence = self.scheduler.sequence(slot).unwrap();
                sequence.state == State::Running && sequence.is_decode() && !sequence.held
            })
            .collect();
        self.scheduler.schedule();
        self.draft();
        self.check_plan(&decodes);
        if self.random.one_in(200) {
            self.scheduler.abandon();
            let lost: Vec<Slot> = self.scheduler.plan().chunks.iter().map(|chunk| chunk.slot).collect();
            lost.into_iter().for_each(|slot| self.end(slot, step));
        } else {
            self.scheduler.commit();
            self.grow(step);
        }
        self.scheduler.check_integrity().unwrap();
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

    fn check_plan(&mut self, decodes: &[Slot]) {
        let plan = self.scheduler.plan().clone();
        assert_eq!(plan.draft_rows, plan.chunks.iter().map(|chunk| chunk.drafts).sum::<usize>());
        assert_eq!(plan.rows, plan.chunks.iter().map(|chunk| chunk.rows).sum::<usize>() + plan.draft_rows);
        assert!(plan.draft_rows <= self.limits.draft_rows_max);
        assert!(plan.rows <= self.limits.step_tokens, "{} rows", plan.rows);
        assert!(self.scheduler.running() <= self.limits.running_max);
        assert!(plan.preempted == 0 || plan.admitted.is_empty());
        self.preempted += plan.preempted;
        let mut writers: HashMap<BlockId, Slot> = HashMap::new();
        let mut score_rows = 0;
        for &Chunk { slot, start, rows, drafts, outputs, .. } in &plan.chunks {
            let sequence = self.scheduler.sequence(slot).unwrap();
            assert!(rows > 0 && rows <= self.limits.prefill_chunk_max);
            assert!(sequence.state == State::Running);
            let live = self.live.get_mut(&slot).unwrap();
            // Rows follow each other, except that a preemption starts over, at a prefix found in the cache.
            let readmitted = start % self.limits.block_tokens == 0;
            assert!(start == live.computed || readmitted, "rows {start} after {}", live.computed);
            live.computed = start + rows;
            let end = start + rows;
            match (sequence.kind, outputs) {
                (Kind::Score, outputs) => {
                    score_rows += rows;
                    assert_eq!(outputs, ChunkOutputs::All);
                }
                (Kind::Generate, ChunkOutputs::Last) => assert_eq!(end, sequence.tokens().len()),
                (Kind::Generate, _) => assert!(end < sequence.tokens().len()),
            }
            let end = end + drafts;
            // The last token is never computed.
            assert!(drafts == 0 || (outputs == ChunkOutputs::Last && end < live.tokens_max));
            assert!(sequence.table().len() * self.limits.block_tokens >= end, "rows without a block");
            for position in start..end {
                let block = sequence.table()[position / self.limits.block_tokens];
                assert_ne!(block, 0);
                assert_eq!(*writers.entry(block).or_insert(slot), slot, "two sequences write block {block}");
            }
        }
        assert!(score_rows <= self.limits.score_rows_max);
        self.check_sharing(&writers);
        for &slot in decodes {
            let moved = plan.chunks.iter().any(|chunk| chunk.slot == slot);
            let preempted = self.scheduler.sequence(slot).unwrap().state == State::Waiting;
            assert!(moved || preempted, "a decode stood still");
        }
    }

    /// A block that is written may be held by another only if that other found it by its content, in this very step:
    /// then both have the same tokens up to its end.
    fn check_sharing(&mut self, writers: &HashMap<BlockId, Slot>) {
        for &other in self.live.keys() {
            let theirs = self.scheduler.sequence(other).unwrap();
            for (index, block) in theirs.table().iter().enumerate() {
                let Some(&writer) = writers.get(block) else { continue };
                if writer != other {
                    let ours = self.scheduler.sequence(writer).unwrap();
                    let end = (index + 1) * self.limits.block_tokens;
                    assert_eq!(
                        ours.tokens()[..end],
                        theirs.tokens()[..end],
                        "a partial or foreign block is shared"
                    );
                    self.shared += 1;
                }
            }
        }
    }

    fn grow(&mut self, step: usize) {
        for chunk in self.scheduler.plan().chunks.clone() {
            let sequence = self.scheduler.sequence(chunk.slot).unwrap();
            assert_eq!(sequence.computed(), chunk.start + chunk.rows);
            if sequence.kind == Kind::Score && sequence.remaining() == 0 {
                self.end(chunk.slot, step);
            } else if chunk.outputs == ChunkOutputs::Last {
                self.draw(chunk, step);
            }
        }
        self.scheduler.settle();
        for (&slot, live) in &self.live {
            let sequence = self.scheduler.sequence(slot).unwrap();
            let most = sequence.tokens().len().div_ceil(self.limits.block_tokens);
            assert!(sequence.table().len() <= most, "blocks of wrong drafts are kept");
            assert!(sequence.remaining() > 0 && sequence.tokens().len() < live.tokens_max + 1);
        }
    }

    /// The token of the last row and those of drafted rows that were right.
    fn draw(&mut self, chunk: Chunk, step: usize) {
        let right = if self.random.one_in(2) { chunk.drafts } else { self.random.below(chunk.drafts + 1) };
        for row in 0..=right {
            if row > 0 {
                self.scheduler.accept(chunk.slot);
                self.live.get_mut(&chunk.slot).unwrap().computed += 1;
                self.accepted += 1;
            }
            let tokens = self.scheduler.sequence(chunk.slot).unwrap().tokens().len();
            if tokens + 1 == self.live[&chunk.slot].tokens_max || self.random.one_in(400) {
                self.end(chunk.slot, step);
                return;
            }
            let token = 2000 + self.random.below(3) as u32;
            self.scheduler.push_token(chunk.slot, token);
        }
    }

    /// Storm, then calm until everything that is there has ended.
    fn run(&mut self) {
        let storm = STEPS_PER_SEED * 9 / 10;
        (0..storm).for_each(|step| self.step(step, true));
        // 40 requests of at most 71 tokens, one row a step at worst, each recomputed as often as it is preempted.
        let patience = 40 * 71 * 10;
        let mut step = storm;
        while !self.live.is_empty() {
            self.step(step, false);
            step += 1;
            assert!(step < storm + patience, "{} requests starve", self.live.len());
        }
        assert_eq!((self.scheduler.running(), self.scheduler.waiting()), (0, 0));
        assert_eq!(self.scheduler.pool().free(), self.blocks, "blocks have leaked");
    }
}

#[test]
fn a_million_steps_break_no_invariant() {
    let steps = std::env::var("BALLAST_SIMULATION_STEPS").map_or(STEPS, |steps| steps.parse().unwrap());
    let (mut finished, mut preempted, mut shared, mut evictions, mut accepted) = (0, 0, 0, 0, 0);
    for seed in 0..(steps / STEPS_PER_SEED) as u64 {
        let run = std::panic::catch_unwind(|| {
            let mut simulation = Simulation::new(seed);
            simulation.run();
            let evictions = simulation.scheduler.pool().evictions();
            (simulation.finished, simulation.preempted, simulation.shared, evictions, simulation.accepted)
        });
        let Ok(run) = run else { panic!("seed {seed} broke an invariant") };
        finished += run.0;
        preempted += run.1;
        shared += run.2;
        evictions += run.3;
        accepted += run.4;
    }
    println!(
        "{finished} requests, {preempted} preemptions, {shared} blocks shared while written, {evictions} evictions, \
         {accepted} drafted tokens accepted"
    );
    // Otherwise the storm tests nothing.
    let runs = steps / STEPS_PER_SEED;
    assert!(
        finished > 50 * runs
            && preempted > 10 * runs
            && shared > runs
            && evictions as usize > 100 * runs
            && accepted > 100 * runs
    );
}
