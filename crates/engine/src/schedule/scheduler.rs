//! Which sequences get how many rows of the next step. A plain value: no model, no clock, no I/O.
//!
//! A sequence has tokens and a count of computed ones; a step hands out a budget of rows. There is no prefill or decode
//! phase, only more or fewer tokens to compute. Order of one step:
//!
//! 1. Running sequences that lack one row (decodes), in order of rank.
//! 2. Running sequences that lack more (prompts in progress), in order of rank. One that this step cannot complete gets half
//!    of the rows that are left, so that a short one need not wait for a long one. Beside decodes, all prompts together get
//!    no more rows than `schedule` is told that streams can bear. When blocks run out, the running sequence of the last rank
//!    gives all of its own back and waits again, to be recomputed; rows it already had in this step return to the budget.
//! 3. Waiting sequences in the order of the [`Queue`], unless something was preempted. One is admitted only if its whole
//!    sequence fits beside what the running ones still need. If the first does not fit, none behind it is tried. One is
//!    passed while a prompt in progress before it is about to compute the very block that it would begin with: it will find
//!    that. So is one to be scored while no rows with outputs are left. On its turn by age none is passed: what follows waits
//!    with it for the block; what is to be scored is admitted without rows.
//! 4. Rows that are left over lengthen the chunks that were cut: a long prompt is held back only for others.
//!
//! After that, rows and blocks that nobody needs may go to drafted tokens behind the last rows of a sequence (`extend`):
//! drafts never take a row from others, never preempt and are never found. Of the drafted rows those count that turn out
//! to be the sequence's tokens (`accept`).
//!
//! A sequence keeps its rank through preemption and only lower ranks are preempted for it, so the first always moves;
//! with `step_tokens >= running_max` every decode moves in every step.
//!
//! Equal prompts are computed once: one that is next while an equal one is in progress joins it, and is forked from it
//! when that is computed. All of them then go on from the same logits and share every block; the last block, if it is not
//! full, is copied by whoever writes into it while others hold it (`Plan::copies`).

use crate::kv::block_pool::BlockPool;
use crate::kv::group::GroupKind;
use crate::schedule::budget::Budget;
use crate::schedule::integrity::{IntegrityError, Parts};
use crate::schedule::sequence::{Kind, NewSequence, Sequence, State};
use crate::schedule::sequence_id::Slot;
use crate::schedule::step_plan::{Chunk, ChunkOutputs, Limits, Plan};
use crate::schedule::waiting_queue::{Queue, Rank};

// Named, since tests/planted compiles this file once more from another place.
#[path = "scheduler/forks.rs"]
mod forks;

use prefix::BlockHash;
use std::collections::HashMap;

/// Output tokens that a request is expected to want if it leaves that open or asks for more.
const OUTPUT_EXPECTED: usize = 256;

/// How many a step passes since they wait for a prefix in progress. Each is looked up first, which takes 11 us for 32,768
/// tokens: 0.35 ms for all of them.
pub const FOLLOWERS_PASSED_MAX: usize = 32;

#[derive(Debug)]
pub struct Scheduler {
    limits: Limits,
    groups: Vec<GroupKind>,
    pool: BlockPool,
    sequences: Vec<Option<Sequence>>,
    vacant: Vec<Slot>,
    queue: Queue,
    /// In order of rank.
    running: Vec<Slot>,
    /// Who computes, or will, the prompt of that name.
    leaders: HashMap<BlockHash, Slot>,
    /// Sequences that were forked from another.
    forks: u64,
    plan: Plan,
    /// Of this step: prompts in progress, and indices of chunks that were cut.
    prompts: Vec<Slot>,
    cut: Vec<usize>,
    /// Of this step: indices of chunks of decodes that fill a block.
    filling: Vec<usize>,
    /// Who got blocks for drafts in this step.
    drafted: Vec<Slot>,
}

impl Scheduler {
    /// For layers that all read the whole past.
    pub fn new(limits: Limits, blocks: usize) -> Self {
        Self::with_groups(limits, blocks, vec![GroupKind::Full])
    }

    /// `blocks` are shared by the groups: a block serves the layers of any one of them.
    pub fn with_groups(limits: Limits, blocks: usize, groups: Vec<GroupKind>) -> Self {
        debug_assert!(limits.step_tokens >= limits.running_max);
        Self {
            limits,
            groups,
            pool: BlockPool::new(blocks),
            sequences: Vec::new(),
            vacant: Vec::new(),
            queue: Queue::default(),
            running: Vec::with_capacity(limits.running_max),
            leaders: HashMap::new(),
            forks: 0,
            plan: Plan::default(),
            prompts: Vec::new(),
            cut: Vec::new(),
            filling: Vec::with_capacity(limits.running_max),
            drafted: Vec::new(),
        }
    }

    /// Queues a sequence. What is scored is not shared: it could not use what it finds.
    pub fn add(&mut self, new: NewSequence<'_>) -> Slot {
        let cost = new.tokens.len() + (new.tokens_max - new.tokens.len()).min(OUTPUT_EXPECTED);
        let rank = self.queue.rank(new.priority, new.tenant, cost as u64);
        let share = self.limits.prefix_cache && new.kind == Kind::Generate;
        let sequence = Sequence::new(new, rank, &self.groups, self.limits.block_tokens, share);
        let prompt = sequence.prompt();
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
        if let Some(prompt) = prompt
            && self.limits.forks
        {
            self.leaders.entry(prompt).or_insert(slot);
        }
        self.queue.enter(rank, slot);
        slot
    }

    /// Forgets a sequence, running or waiting; its blocks are free at once.
    pub fn remove(&mut self, slot: Slot) {
        self.release_followers(slot);
        let Some(mut sequence) = self.sequences[slot.0 as usize].take() else { return };
        match sequence.state {
            State::Waiting => self.queue.leave(sequence.rank),
            State::Running => self.leave_running(slot, sequence.rank),
            State::Joined(leader) => {
                self.leave_running(slot, sequence.rank);
                if let Some(leader) = &mut self.sequences[leader.0 as usize] {
                    leader.followers -= 1;
                }
            }
        }
        self.end_lead(slot, sequence.take_prompt());
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
            if held {
                self.release_followers(slot);
            }
        }
    }

    pub fn pool(&self) -> &BlockPool {
        &self.pool
    }

    pub fn running(&self) -> usize {
        self.running.len()
    }

    pub fn waiting(&self) -> usize {
        self.queue.len()
    }

    /// How many waiting sequences would be admitted before this one, if nobody else came.
    pub fn ahead(&self, slot: Slot) -> usize {
        self.sequence(slot).map_or(0, |sequence| self.queue.ahead(sequence.rank))
    }

    pub fn forks(&self) -> u64 {
        self.forks
    }

    pub fn plan(&self) -> &Plan {
        &self.plan
    }

    /// Token places in held blocks, and how many of them hold nothing yet: O(running).
    pub fn unfilled(&self) -> (usize, usize) {
        let running = self.running.iter().filter_map(|slot| self.sequence(*slot));
        running.fold((0, 0), |(places, unfilled), sequence| {
            let room = sequence.table().len() * self.limits.block_tokens;
            (places + room, unfilled + room.saturating_sub(sequence.computed()))
        })
    }

    /// Forgets all cached prefixes; `false` while any block is held.
    pub fn reset_prefix_cache(&mut self) -> bool {
        self.pool.reset()
    }

    /// Forgets cached prefixes that were of no use since the last call.
    pub fn forget_unused_prefixes(&mut self) {
        self.pool.forget_unused();
    }

    /// Plans the next step; if sequences decode in it, prompts get `beside` rows at most. After it, `commit` or `abandon` is
    /// called before the next plan.
    pub fn schedule(&mut self, beside: usize) -> &Plan {
        self.plan.clear();
        self.cut.clear();
        self.drafted.clear();
        let mut budget = Budget::new(&self.limits);
        self.schedule_decodes(&mut budget);
        if self.plan.decode_rows > 0 {
            budget.bound_prompts(beside);
        }
        self.schedule_prompts(&mut budget);
        if self.plan.preempted == 0 {
            self.admit(&mut budget);
            self.lengthen(&mut budget);
        }
        &self.plan
    }

    /// Blocks that drafts may take: what is free beyond what running sequences will need next.
    pub fn spare_blocks(&self) -> usize {
        self.pool.free().saturating_sub(self.reserved())
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
        let free = self.pool.free();
        if rows == 0 || !sequence.grow(&mut self.pool, chunk.rows + rows, &mut self.plan.copies) {
            return 0;
        }
        *spare = (*spare + self.pool.free()).saturating_sub(free);
        chunk.drafts = rows;
        self.drafted.push(chunk.slot);
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

    /// Whether the drafted row at `position` counts: its guess `token` turned out to be what its sequence has there. Rows of
    /// one sequence come in order, after the tokens before them.
    pub fn accept(&mut self, slot: Slot, position: usize, token: u32) -> bool {
        let Some(sequence) = &mut self.sequences[slot.0 as usize] else { return false };
        let right = sequence.tokens().get(position) == Some(&token);
        if right {
            debug_assert_eq!(sequence.computed(), position);
            sequence.commit(&mut self.pool, 1);
            sequence.name_full_blocks(&mut self.pool, 0);
        }
        right
    }

    /// After the last `accept` of a step: sequences whose drafts were wrong give back the blocks that they do not need.
    pub fn settle(&mut self) {
        for slot in &self.drafted {
            if let Some(sequence) = &mut self.sequences[slot.0 as usize] {
                sequence.trim(&mut self.pool);
            }
        }
    }

    /// The planned rows are computed; whether drafted ones count, `accept` says. Who joined a prompt that is complete now
    /// is forked from it.
    pub fn commit(&mut self) {
        for index in 0..self.plan.chunks.len() {
            let Chunk { slot, rows, .. } = self.plan.chunks[index];
            let Some(sequence) = &mut self.sequences[slot.0 as usize] else { continue };
            sequence.commit(&mut self.pool, rows);
            if sequence.ends_lead() {
                let prompt = sequence.take_prompt();
                self.end_lead(slot, prompt);
                self.fork(slot);
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

    /// Checks the pool against the tables of all sequences, and their states against queue and lists.
    pub fn check_integrity(&self) -> Result<(), IntegrityError> {
        let Self { sequences, vacant, queue, running, leaders, limits, .. } = self;
        let tables = sequences.iter().flatten().flat_map(|sequence| sequence.blocks().tables());
        self.pool.check_integrity(tables)?;
        Parts { sequences, vacant, queue, running, leaders, block_tokens: limits.block_tokens }.check()
    }

    fn schedule_decodes(&mut self, budget: &mut Budget) {
        self.prompts.clear();
        self.filling.clear();
        let mut index = 0;
        while index < self.running.len() {
            let slot = self.running[index];
            index += 1;
            let Some(sequence) = &mut self.sequences[slot.0 as usize] else { break };
            let wanted = sequence.wanted();
            if wanted == 0 {
                continue;
            }
            if wanted > 1 || sequence.kind == Kind::Score {
                self.prompts.push(slot);
                continue;
            }
            // Most have room for one token more.
            if sequence.grow(&mut self.pool, 1, &mut self.plan.copies) {
                if sequence.fills_a_block(1) {
                    self.filling.push(self.plan.chunks.len());
                }
                let (start, outputs) = (sequence.computed(), ChunkOutputs::Last);
                budget.spend(Kind::Generate, true, 1);
                self.plan.rows += 1;
                self.plan.decode_rows += 1;
                self.plan.chunks.push(Chunk { slot, start, rows: 1, drafts: 0, outputs, named: 0 });
            } else {
                let rank = sequence.rank;
                if !self.place(slot, 1, budget) {
                    // It was itself the last of the running ones.
                    break;
                }
                // With who was preempted, those that had joined it have left, and they may have come before.
                index = self.place_in_running(rank) + 1;
            }
        }
        // Apart from the others: what they look at lies far apart in memory, and so the processor waits for several at
        // once. Who was preempted above came behind all of them.
        for &index in &self.filling {
            let chunk = &mut self.plan.chunks[index];
            if let Some(sequence) = &mut self.sequences[chunk.slot.0 as usize] {
                chunk.named = sequence.name_full_blocks(&mut self.pool, chunk.rows);
            }
        }
    }

    fn schedule_prompts(&mut self, budget: &mut Budget) {
        for index in 0..self.prompts.len() {
            let slot = self.prompts[index];
            let Some(sequence) = &self.sequences[slot.0 as usize] else { break };
            // None, if it was preempted meanwhile.
            let rows = budget.chunk(&self.limits, sequence.kind, sequence.wanted());
            if rows > 0 && !self.place(slot, rows, budget) {
                break;
            }
        }
    }

    /// Gives `slot` its rows, preempting lower ranks while blocks are short. `false`: it was preempted itself.
    fn place(&mut self, slot: Slot, rows: usize, budget: &mut Budget) -> bool {
        loop {
            let Some(sequence) = &mut self.sequences[slot.0 as usize] else { return false };
            if sequence.grow(&mut self.pool, rows, &mut self.plan.copies) {
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
            Kind::Generate => {
                self.cut.push(self.plan.chunks.len());
                ChunkOutputs::None
            }
        };
        let named = sequence.name_full_blocks(&mut self.pool, rows);
        let decode = sequence.is_decode();
        budget.spend(sequence.kind, decode, rows);
        self.plan.rows += rows;
        self.plan.decode_rows += usize::from(decode);
        self.plan.chunks.push(Chunk { slot, start: sequence.computed(), rows, drafts: 0, outputs, named });
    }

    /// The last of the running sequences goes back to its place in the queue.
    fn preempt(&mut self, victim: Slot, budget: &mut Budget) {
        self.release_followers(victim);
        let Some(sequence) = &mut self.sequences[victim.0 as usize] else { return };
        if let Some(at) = self.plan.chunks.iter().position(|chunk| chunk.slot == victim) {
            let chunk = self.plan.chunks.remove(at);
            self.plan.rows -= chunk.rows;
            let decode = sequence.is_decode();
            self.plan.decode_rows -= usize::from(decode);
            budget.refund(sequence.kind, decode, chunk.rows);
            sequence.unname(&mut self.pool, chunk.named);
        }
        let (state, rank) = (sequence.state, sequence.rank);
        sequence.free(&mut self.pool);
        sequence.state = State::Waiting;
        if let State::Joined(leader) = state
            && let Some(leader) = &mut self.sequences[leader.0 as usize]
        {
            leader.followers -= 1;
        }
        self.leave_running(victim, rank);
        self.queue.enter(rank, victim);
        self.plan.preempted += 1;
    }

    fn admit(&mut self, budget: &mut Budget) {
        if self.queue.is_empty() || self.running.len() >= self.limits.running_max {
            return;
        }
        let mut reserved = self.reserved();
        let (mut passed, mut followers) = (None, 0);
        while budget.of(Kind::Generate) > 0
            && self.running.len() < self.limits.running_max
            && let Some(next) = self.queue.next(passed)
        {
            let slot = next.slot;
            let leader = self.leader(slot);
            let Some(sequence) = &self.sequences[slot.0 as usize] else { break };
            let rows_are_left = budget.of(sequence.kind) > 0;
            if !rows_are_left && !next.by_age {
                // Rows with outputs are used up for this step: others need not wait behind it, but for its turn by age.
                passed = Some(next.rank);
                continue;
            }
            let hits = sequence.hits(&self.pool);
            if leader.is_none() && self.follows(slot, hits) {
                // Others need not wait behind it, but for its turn by age: else it might be passed for ever.
                if next.by_age || followers == FOLLOWERS_PASSED_MAX {
                    break;
                }
                followers += 1;
                passed = Some(next.rank);
                continue;
            }
            let Some(sequence) = &self.sequences[slot.0 as usize] else { break };
            let needed = match leader {
                Some(_) => sequence.blocks().groups(),
                None => sequence.needed(hits, self.limits.step_tokens) + hits.free,
            };
            if needed + reserved > self.pool.free() {
                break;
            }
            let Some(sequence) = &mut self.sequences[slot.0 as usize] else { break };
            let rank = self.queue.admit(next);
            sequence.rank = rank;
            let cached = match leader {
                Some(leader) => {
                    sequence.state = State::Joined(leader);
                    // As if found: all but the token that at least must be computed.
                    sequence.remaining() - 1
                }
                None => {
                    sequence.adopt(&mut self.pool, hits.blocks);
                    sequence.state = State::Running;
                    sequence.computed()
                }
            };
            if !sequence.admitted {
                sequence.admitted = true;
                self.plan.admitted.push((slot, cached));
            }
            self.enter_running(slot, rank);
            if let Some(leader) = leader {
                if let Some(leader) = &mut self.sequences[leader.0 as usize] {
                    leader.followers += 1;
                }
            } else if rows_are_left {
                self.start(slot, budget);
            }
            reserved += self.sequence(slot).map_or(0, |joined| joined.reserve(self.limits.step_tokens));
        }
    }

    /// The first rows of a sequence that was just admitted. It gets some even if it is held: blocks that it shares may be
    /// filled by this very step, and what a step that fails takes along are the sequences with rows in it.
    fn start(&mut self, slot: Slot, budget: &mut Budget) {
        let Some(sequence) = &mut self.sequences[slot.0 as usize] else { return };
        let rows = budget.chunk(&self.limits, sequence.kind, sequence.remaining());
        let grown = sequence.grow(&mut self.pool, rows, &mut self.plan.copies);
        debug_assert!(grown && rows > 0, "the gate counted these blocks as free");
        self.take_rows(slot, rows, budget);
    }

    /// Gives what is left of the budget to prompts whose chunks were cut, in order.
    fn lengthen(&mut self, budget: &mut Budget) {
        for &index in &self.cut {
            let chunk = &mut self.plan.chunks[index];
            let Some(sequence) = &mut self.sequences[chunk.slot.0 as usize] else { continue };
            let more = (sequence.remaining() - chunk.rows).min(budget.of(Kind::Generate));
            if more == 0 || !sequence.grow(&mut self.pool, chunk.rows + more, &mut self.plan.copies) {
                continue;
            }
            chunk.rows += more;
            chunk.named += sequence.name_full_blocks(&mut self.pool, chunk.rows);
            if chunk.rows == sequence.remaining() {
                chunk.outputs = ChunkOutputs::Last;
            }
            self.plan.rows += more;
            budget.spend(Kind::Generate, false, more);
        }
    }

    /// Blocks that running sequences still need for the tokens they have, and for the next ones.
    fn reserved(&self) -> usize {
        let running = self.running.iter().filter_map(|slot| self.sequence(*slot));
        running.map(|sequence| sequence.reserve(self.limits.step_tokens)).sum()
    }

    fn enter_running(&mut self, slot: Slot, rank: Rank) {
        let at = self.place_in_running(rank);
        self.running.insert(at, slot);
    }

    fn leave_running(&mut self, slot: Slot, rank: Rank) {
        // The sequence itself may be out of its slot by now; ranks of the others lead to its place.
        let at = self.place_in_running(rank);
        if self.running.get(at) == Some(&slot) {
            self.running.remove(at);
        } else {
            self.running.retain(|&other| other != slot);
        }
    }

    fn place_in_running(&self, rank: Rank) -> usize {
        self.running.partition_point(|&other| {
            self.sequences[other.0 as usize].as_ref().is_some_and(|other| other.rank < rank)
        })
    }
}
