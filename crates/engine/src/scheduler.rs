//! Which sequences get how many rows of the next step. A plain value: no model, no clock, no I/O.
//!
//! A sequence has tokens and a count of computed ones; a step hands out a budget of rows. There is no prefill or decode
//! phase, only more or fewer tokens to compute. Order of one step:
//!
//! 1. Running sequences that lack one row (decodes), in order of rank (priority, then arrival).
//! 2. Running sequences that lack more (prompts in progress), in order of rank, each cut to a chunk.
//!    When blocks run out, the running sequence of the last rank gives all of its own back and waits again, to be
//!    recomputed; rows it already had in this step return to the budget.
//! 3. Waiting sequences in order of rank, unless something was preempted. One is admitted only if its whole sequence
//!    fits beside what the running ones still need. If the first does not fit, none behind it is tried.
//!
//! After that, rows and blocks that nobody needs may go to drafted tokens behind the last rows of a sequence (`extend`):
//! drafts never take a row from others, never preempt and are never found. Of the drafted rows those count that turn out
//! to be the sequence's tokens (`accept`).
//!
//! A sequence keeps its rank through preemption and only lower ranks are preempted for it, so the first always moves;
//! with `step_tokens >= running_max` every decode moves in every step.

use crate::pool::{BlockPool, IntegrityError};
use crate::sequence::{Kind, Rank, Sequence, State};
use prefix::Scope;
use std::collections::BTreeMap;
use std::ops::Bound;

#[derive(Clone, Copy, Debug)]
pub struct Limits {
    pub block_tokens: usize,
    pub step_tokens: usize,
    pub prefill_chunk_max: usize,
    pub running_max: usize,
    /// Rows of `Kind::Score` sequences in a step, each of which has an output.
    pub score_rows_max: usize,
    /// Rows of drafted tokens in a step, each of which has an output.
    pub draft_rows_max: usize,
    pub prefix_cache: bool,
}

/// Index of a live sequence; reused after `remove`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Slot(pub u32);

/// Rows `start..start + rows` of a sequence, and drafted ones behind them.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Chunk {
    pub slot: Slot,
    pub start: usize,
    pub rows: usize,
    /// Rows of drafted tokens at `start + rows ..`, all of which have an output.
    pub drafts: usize,
    /// Which of the other rows have an output: the last one, all, or none.
    pub outputs: ChunkOutputs,
    /// Blocks that became findable with this chunk.
    named: usize,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ChunkOutputs {
    None,
    Last,
    All,
}

/// One step: filled by `schedule`, valid until the next one.
#[derive(Clone, Debug, Default)]
pub struct Plan {
    pub chunks: Vec<Chunk>,
    /// All of them, drafted ones too.
    pub rows: usize,
    pub decode_rows: usize,
    pub draft_rows: usize,
    /// Sequences that left the queue for the first time, with their cached tokens.
    pub admitted: Vec<(Slot, usize)>,
    pub preempted: usize,
}

#[derive(Debug)]
pub struct Scheduler {
    limits: Limits,
    pool: BlockPool,
    sequences: Vec<Option<Sequence>>,
    vacant: Vec<Slot>,
    waiting: BTreeMap<Rank, Slot>,
    /// In order of rank.
    running: Vec<Slot>,
    arrivals: u64,
    plan: Plan,
}

impl Scheduler {
    pub fn new(limits: Limits, blocks: usize) -> Self {
        debug_assert!(limits.step_tokens >= limits.running_max);
        Self {
            limits,
            pool: BlockPool::new(blocks),
            sequences: Vec::new(),
            vacant: Vec::new(),
            waiting: BTreeMap::new(),
            running: Vec::with_capacity(limits.running_max),
            arrivals: 0,
            plan: Plan::default(),
        }
    }

    /// Queues a sequence of at most `tokens_max` tokens, which must fit in the pool when it is alone there. What is scored
    /// is not shared: it could not use what it finds.
    pub fn add(
        &mut self,
        kind: Kind,
        priority: i32,
        tokens: Vec<u32>,
        tokens_max: usize,
        scope: &Scope,
    ) -> Slot {
        let rank = Rank { priority, arrival: self.arrivals };
        self.arrivals += 1;
        let shared = self.limits.prefix_cache && kind == Kind::Generate;
        let scope = shared.then_some(scope);
        let sequence = Sequence::new(kind, rank, tokens, tokens_max, self.limits.block_tokens, scope);
        let slot = match self.vacant.pop() {
            Some(slot) => {
                self.sequences[slot.0 as usize] = Some(sequence);
                slot
            }
            None => {
                self.sequences.push(Some(sequence));
                Slot(self.sequences.len() as u32 - 1)
            }
        };
        self.waiting.insert(rank, slot);
        slot
    }

    /// Forgets a sequence, running or waiting; its blocks are free at once.
    pub fn remove(&mut self, slot: Slot) {
        let Some(mut sequence) = self.sequences[slot.0 as usize].take() else { return };
        match sequence.state {
            State::Waiting => {
                self.waiting.remove(&sequence.rank);
            }
            State::Running => self.running.retain(|&other| other != slot),
        }
        sequence.free(&mut self.pool);
        self.vacant.push(slot);
    }

    pub fn sequence(&self, slot: Slot) -> Option<&Sequence> {
        self.sequences.get(slot.0 as usize)?.as_ref()
    }

    pub fn push_token(&mut self, slot: Slot, token: u32) {
        if let Some(sequence) = &mut self.sequences[slot.0 as usize] {
            sequence.push(token);
        }
    }

    pub fn hold(&mut self, slot: Slot, held: bool) {
        if let Some(sequence) = &mut self.sequences[slot.0 as usize] {
            sequence.held = held;
        }
    }

    pub fn pool(&self) -> &BlockPool {
        &self.pool
    }

    pub fn running(&self) -> usize {
        self.running.len()
    }

    pub fn waiting(&self) -> usize {
        self.waiting.len()
    }

    /// How many waiting sequences would be admitted before this one.
    pub fn ahead(&self, slot: Slot) -> usize {
        self.sequence(slot).map_or(0, |sequence| self.waiting.range(..sequence.rank).count())
    }

    pub fn plan(&self) -> &Plan {
        &self.plan
    }

    /// Plans the next step. After it, `commit` or `abandon` is called before the next plan.
    pub fn schedule(&mut self) -> &Plan {
        self.plan.clear();
        let mut budget = Budget { rows: self.limits.step_tokens, score_rows: self.limits.score_rows_max };
        self.schedule_running(true, &mut budget);
        self.schedule_running(false, &mut budget);
        if self.plan.preempted == 0 {
            self.admit(&mut budget);
        }
        &self.plan
    }

    /// Blocks that drafts may take: what is free beyond what running sequences will need next.
    pub fn spare_blocks(&self) -> usize {
        let running = self.running.iter().filter_map(|slot| self.sequence(*slot));
        self.pool.free().saturating_sub(running.map(Sequence::reserve).sum())
    }

    /// Room for drafted tokens behind the rows of a planned chunk whose last row has an output: at most `most`, as many as
    /// rows, blocks (which `spare` counts) and the sequence's own end allow. Returns how many rows it got.
    pub fn extend(&mut self, chunk: usize, most: usize, spare: &mut usize) -> usize {
        let limits = self.limits;
        let Some(chunk) = self.plan.chunks.get_mut(chunk) else { return 0 };
        let Some(sequence) = &mut self.sequences[chunk.slot.0 as usize] else { return 0 };
        debug_assert!(chunk.outputs == ChunkOutputs::Last && chunk.drafts == 0);
        let rows = most
            .min(limits.step_tokens - self.plan.rows)
            .min(limits.draft_rows_max - self.plan.draft_rows)
            .min(sequence.draft_tokens_max(*spare));
        let held = sequence.table().len();
        if rows == 0 || !sequence.grow(&mut self.pool, chunk.rows + rows) {
            return 0;
        }
        *spare -= sequence.table().len() - held;
        chunk.drafts = rows;
        self.plan.rows += rows;
        self.plan.draft_rows += rows;
        rows
    }

    /// Takes the last `rows` drafted rows of a chunk out of the plan again.
    pub fn shorten(&mut self, chunk: usize, rows: usize) {
        if let Some(chunk) = self.plan.chunks.get_mut(chunk) {
            chunk.drafts -= rows;
            self.plan.rows -= rows;
            self.plan.draft_rows -= rows;
        }
    }

    /// The first drafted row that is not computed for its sequence yet turned out to be its next token.
    pub fn accept(&mut self, slot: Slot) {
        if let Some(sequence) = &mut self.sequences[slot.0 as usize] {
            sequence.commit(1);
            sequence.name_full_blocks(&mut self.pool, 0);
        }
    }

    /// After the last `accept` of a step: sequences whose drafts were wrong give back the blocks that they do not need.
    pub fn settle(&mut self) {
        for chunk in self.plan.chunks.iter().filter(|chunk| chunk.outputs == ChunkOutputs::Last) {
            if let Some(sequence) = &mut self.sequences[chunk.slot.0 as usize] {
                sequence.trim(&mut self.pool);
            }
        }
    }

    /// The planned rows are computed; whether drafted ones count, `accept` says.
    pub fn commit(&mut self) {
        for chunk in &self.plan.chunks {
            if let Some(sequence) = &mut self.sequences[chunk.slot.0 as usize] {
                sequence.commit(chunk.rows);
            }
        }
    }

    /// The planned rows were not computed: what they would have filled must not be found. The sequences of the plan are
    /// to be removed, since they may hold blocks that others of them should have filled.
    pub fn abandon(&mut self) {
        for chunk in &self.plan.chunks {
            if let Some(sequence) = &mut self.sequences[chunk.slot.0 as usize] {
                sequence.unname(&mut self.pool, chunk.named);
            }
        }
    }

    /// Checks the pool against the tables of all sequences.
    pub fn check_integrity(&self) -> Result<(), IntegrityError> {
        self.pool.check_integrity(self.sequences.iter().flatten().map(Sequence::table))
    }

    fn schedule_running(&mut self, decodes: bool, budget: &mut Budget) {
        let mut index = 0;
        while index < self.running.len() {
            let slot = self.running[index];
            let Some(sequence) = &self.sequences[slot.0 as usize] else { break };
            let planned = sequence.is_decode() == decodes && !sequence.held;
            let rows = if planned { budget.chunk(&self.limits, sequence) } else { 0 };
            if rows > 0 && !self.place(slot, rows, budget) {
                // It was itself the last of the running ones.
                break;
            }
            index += 1;
        }
    }

    /// Gives `slot` its rows, preempting lower ranks while blocks are short. `false`: it was preempted itself.
    fn place(&mut self, slot: Slot, rows: usize, budget: &mut Budget) -> bool {
        loop {
            let Some(sequence) = &mut self.sequences[slot.0 as usize] else { return false };
            if sequence.grow(&mut self.pool, rows) {
                break;
            }
            match self.running.last() {
                Some(&victim) => {
                    self.preempt(victim, budget);
                    if victim == slot {
                        return false;
                    }
                }
                None => return false,
            }
        }
        self.take_rows(slot, rows, budget);
        true
    }

    fn take_rows(&mut self, slot: Slot, rows: usize, budget: &mut Budget) {
        let Some(sequence) = &mut self.sequences[slot.0 as usize] else { return };
        let outputs = match sequence.kind {
            Kind::Score => ChunkOutputs::All,
            Kind::Generate if rows == sequence.remaining() => ChunkOutputs::Last,
            Kind::Generate => ChunkOutputs::None,
        };
        let named = sequence.name_full_blocks(&mut self.pool, rows);
        budget.spend(sequence.kind, rows);
        self.plan.rows += rows;
        self.plan.decode_rows += usize::from(sequence.is_decode());
        self.plan.chunks.push(Chunk { slot, start: sequence.computed(), rows, drafts: 0, outputs, named });
    }

    /// The last of the running sequences goes back to its place in the queue.
    fn preempt(&mut self, victim: Slot, budget: &mut Budget) {
        let Some(sequence) = &mut self.sequences[victim.0 as usize] else { return };
        if let Some(at) = self.plan.chunks.iter().position(|chunk| chunk.slot == victim) {
            let chunk = self.plan.chunks.remove(at);
            self.plan.rows -= chunk.rows;
            self.plan.decode_rows -= usize::from(sequence.is_decode());
            budget.refund(sequence.kind, chunk.rows);
            sequence.unname(&mut self.pool, chunk.named);
        }
        sequence.free(&mut self.pool);
        sequence.state = State::Waiting;
        self.waiting.insert(sequence.rank, victim);
        self.running.pop();
        self.plan.preempted += 1;
    }

    fn admit(&mut self, budget: &mut Budget) {
        if self.waiting.is_empty() || budget.rows == 0 {
            return;
        }
        let running = self.running.iter().filter_map(|slot| self.sequence(*slot));
        let mut reserved: usize = running.map(Sequence::reserve).sum();
        let mut passed = None;
        while budget.rows > 0
            && self.running.len() < self.limits.running_max
            && let Some((rank, slot)) = self.waiting_after(passed)
            && let Some(sequence) = &mut self.sequences[slot.0 as usize]
        {
            if budget.of(sequence.kind) == 0 {
                // Rows with outputs are used up for this step: others need not wait behind it.
                passed = Some(rank);
                continue;
            }
            let hits = sequence.hits(&self.pool);
            let whole = sequence.tokens().len().div_ceil(self.limits.block_tokens) - hits.blocks;
            if whole + hits.free + reserved > self.pool.free() {
                break;
            }
            sequence.adopt(&mut self.pool, hits.blocks);
            let rows = budget.chunk(&self.limits, sequence);
            let grown = sequence.grow(&mut self.pool, rows);
            debug_assert!(grown, "the gate counted these blocks as free");
            sequence.state = State::Running;
            if !sequence.admitted {
                sequence.admitted = true;
                self.plan.admitted.push((slot, sequence.computed()));
            }
            reserved += sequence.reserve();
            self.waiting.remove(&rank);
            let at = self.running.partition_point(|&other| {
                self.sequences[other.0 as usize].as_ref().is_some_and(|other| other.rank < rank)
            });
            self.running.insert(at, slot);
            self.take_rows(slot, rows, budget);
        }
    }

    fn waiting_after(&self, passed: Option<Rank>) -> Option<(Rank, Slot)> {
        let from = passed.map_or(Bound::Unbounded, Bound::Excluded);
        self.waiting.range((from, Bound::Unbounded)).next().map(|(&rank, &slot)| (rank, slot))
    }
}

impl Plan {
    fn clear(&mut self) {
        self.chunks.clear();
        self.admitted.clear();
        self.rows = 0;
        self.decode_rows = 0;
        self.draft_rows = 0;
        self.preempted = 0;
    }
}

/// Rows of the step that are left.
struct Budget {
    rows: usize,
    score_rows: usize,
}

impl Budget {
    fn of(&self, kind: Kind) -> usize {
        match kind {
            Kind::Generate => self.rows,
            Kind::Score => self.rows.min(self.score_rows),
        }
    }

    fn chunk(&self, limits: &Limits, sequence: &Sequence) -> usize {
        sequence.remaining().min(limits.prefill_chunk_max).min(self.of(sequence.kind))
    }

    fn spend(&mut self, kind: Kind, rows: usize) {
        self.rows -= rows;
        if kind == Kind::Score {
            self.score_rows -= rows;
        }
    }

    fn refund(&mut self, kind: Kind, rows: usize) {
        self.rows += rows;
        if kind == Kind::Score {
            self.score_rows += rows;
        }
    }
}
