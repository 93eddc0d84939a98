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
//! 3. Waiting sequences in the order of the [`WaitingQueue`], unless something was preempted. One is admitted only if its whole
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
//! full, is copied by whoever writes into it while others hold it (`StepPlan::copies`).

use crate::kv::block_pool::BlockPool;
use crate::kv::group::KvGroupKind;
use crate::schedule::budget::TokenBudget;
use crate::schedule::integrity::{IntegrityError, SchedulerParts};
use crate::schedule::sequence::{NewSequence, Sequence, SequenceKind, SequenceState};
use crate::schedule::sequence_id::SequenceId;
use crate::schedule::step_plan::{ChunkOutputs, ScheduledChunk, SchedulerLimits, StepPlan};
use crate::schedule::waiting_queue::{ServiceRank, WaitingQueue};

// Named, since tests/planted compiles this file once more from another place.
#[path = "scheduler/forks.rs"]
mod forks;

use prefix::BlockHash;
use std::collections::HashMap;

/// EngineOutput tokens that a request is expected to want if it leaves that open or asks for more.
const EXPECTED_OUTPUT_TOKENS: usize = 256;

/// How many a step passes since they wait for a prefix in progress. Each is looked up first, which takes 11 us for 32,768
/// tokens: 0.35 ms for all of them.
pub const PREFIX_WAITERS_SKIPPED_MAX: usize = 32;

#[derive(Debug)]
pub struct Scheduler {
    limits: SchedulerLimits,
    groups: Vec<KvGroupKind>,
    pool: BlockPool,
    sequences: Vec<Option<Sequence>>,
    vacant_ids: Vec<SequenceId>,
    waiting: WaitingQueue,
    /// In order of rank.
    running: Vec<SequenceId>,
    /// Who computes, or will, the prompt of that name.
    prompt_leaders: HashMap<BlockHash, SequenceId>,
    /// Sequences that were forked from another.
    fork_count: u64,
    plan: StepPlan,
    /// Of this step: prompts in progress, and indices of chunks that were cut.
    prefills: Vec<SequenceId>,
    cut_chunks: Vec<usize>,
    /// Of this step: indices of chunks of decodes that fill a block.
    block_filling_chunks: Vec<usize>,
    /// Who got blocks for drafts in this step.
    drafted_sequences: Vec<SequenceId>,
}

impl Scheduler {
    /// For layers that all read the whole past.
    pub fn new(limits: SchedulerLimits, blocks: usize) -> Self {
        Self::with_groups(limits, blocks, vec![KvGroupKind::Full])
    }

    /// `blocks` are shared by the groups: a block serves the layers of any one of them.
    pub fn with_groups(limits: SchedulerLimits, blocks: usize, groups: Vec<KvGroupKind>) -> Self {
        debug_assert!(limits.step_tokens >= limits.running_max);
        Self {
            limits,
            groups,
            pool: BlockPool::new(blocks),
            sequences: Vec::new(),
            vacant_ids: Vec::new(),
            waiting: WaitingQueue::default(),
            running: Vec::with_capacity(limits.running_max),
            prompt_leaders: HashMap::new(),
            fork_count: 0,
            plan: StepPlan::default(),
            prefills: Vec::new(),
            cut_chunks: Vec::new(),
            block_filling_chunks: Vec::with_capacity(limits.running_max),
            drafted_sequences: Vec::new(),
        }
    }

    /// Queues a sequence. What is scored is not shared: it could not use what it finds.
    pub fn add(&mut self, new: NewSequence<'_>) -> SequenceId {
        let cost = new.tokens.len() + (new.tokens_max - new.tokens.len()).min(EXPECTED_OUTPUT_TOKENS);
        let rank = self.waiting.rank(new.priority, new.tenant, cost as u64);
        let share = self.limits.prefix_cache && new.kind == SequenceKind::Generate;
        let sequence = Sequence::new(new, rank, &self.groups, self.limits.block_tokens, share);
        let prompt = sequence.prompt_hash();
        let sequence_id = match self.vacant_ids.pop() {
            Some(sequence_id) => {
                self.sequences[sequence_id.index()] = Some(sequence);
                sequence_id
            }
            None => {
                self.sequences.push(Some(sequence));
                SequenceId(self.sequences.len() as u32 - 1)
            }
        };
        if let Some(prompt) = prompt
            && self.limits.can_fork
        {
            self.prompt_leaders.entry(prompt).or_insert(sequence_id);
        }
        self.waiting.enter(rank, sequence_id);
        sequence_id
    }

    /// Forgets a sequence, running or waiting; its blocks are free at once.
    pub fn remove(&mut self, sequence_id: SequenceId) {
        self.release_followers(sequence_id);
        let Some(mut sequence) = self.sequences[sequence_id.index()].take() else { return };
        match sequence.state {
            SequenceState::Waiting => self.waiting.leave(sequence.rank),
            SequenceState::Running => self.leave_running(sequence_id, sequence.rank),
            SequenceState::AwaitingFork(leader) => {
                self.leave_running(sequence_id, sequence.rank);
                if let Some(leader) = &mut self.sequences[leader.index()] {
                    leader.followers -= 1;
                }
            }
        }
        self.remove_leader(sequence_id, sequence.take_prompt_hash());
        sequence.release_all(&mut self.pool);
        self.vacant_ids.push(sequence_id);
    }

    pub fn sequence(&self, sequence_id: SequenceId) -> Option<&Sequence> {
        self.sequences.get(sequence_id.index())?.as_ref()
    }

    pub fn push_token(&mut self, sequence_id: SequenceId, token: u32) {
        if let Some(sequence) = &mut self.sequences[sequence_id.index()] {
            sequence.push(token);
        }
    }

    pub fn set_paused(&mut self, sequence_id: SequenceId, is_paused: bool) {
        if let Some(sequence) = &mut self.sequences[sequence_id.index()] {
            sequence.is_paused = is_paused;
            if is_paused {
                self.release_followers(sequence_id);
            }
        }
    }

    pub fn pool(&self) -> &BlockPool {
        &self.pool
    }

    pub fn running_count(&self) -> usize {
        self.running.len()
    }

    pub fn waiting_count(&self) -> usize {
        self.waiting.len()
    }

    /// How many waiting sequences would be admitted before this one, if nobody else came.
    pub fn waiting_ahead(&self, sequence_id: SequenceId) -> usize {
        self.sequence(sequence_id).map_or(0, |sequence| self.waiting.ahead(sequence.rank))
    }

    pub fn fork_count(&self) -> u64 {
        self.fork_count
    }

    pub fn plan(&self) -> &StepPlan {
        &self.plan
    }

    /// Token places in held blocks, and how many of them hold nothing yet: O(running).
    pub fn token_slots(&self) -> (usize, usize) {
        let running = self.running.iter().filter_map(|sequence_id| self.sequence(*sequence_id));
        running.fold((0, 0), |(places, unfilled), sequence| {
            let room = sequence.table().len() * self.limits.block_tokens;
            (places + room, unfilled + room.saturating_sub(sequence.computed()))
        })
    }

    /// Forgets all cached prefixes; `false` while any block is held.
    pub fn reset_prefix_cache(&mut self) -> bool {
        self.pool.reset_prefix_cache()
    }

    /// Forgets cached prefixes that were of no use since the last call.
    pub fn evict_unused_prefixes(&mut self) {
        self.pool.evict_unused();
    }

    /// Plans the next step; if sequences decode in it, prompts get `beside` rows at most. After it, `commit` or `abandon` is
    /// called before the next plan.
    pub fn schedule(&mut self, prefill_row_limit: usize) -> &StepPlan {
        self.plan.clear();
        self.cut_chunks.clear();
        self.drafted_sequences.clear();
        let mut budget = TokenBudget::new(&self.limits);
        self.schedule_decodes(&mut budget);
        if self.plan.decode_rows > 0 {
            budget.limit_prefill(prefill_row_limit);
        }
        self.schedule_prefills(&mut budget);
        if self.plan.preempted == 0 {
            self.admit(&mut budget);
            self.extend_cut_chunks(&mut budget);
        }
        &self.plan
    }

    /// Blocks that drafts may take: what is free beyond what running sequences will need next.
    pub fn spare_blocks(&self) -> usize {
        self.pool.free_blocks().saturating_sub(self.reserved_blocks())
    }

    /// Room for drafted tokens behind the rows of a planned chunk whose last row has an output: at most `most`, as many as
    /// rows, blocks (which `spare` counts) and the sequence's own end allow. Returns how many rows it got.
    pub fn add_drafts(&mut self, chunk: usize, most: usize, spare: &mut usize) -> usize {
        let limits = self.limits;
        let Some(chunk) = self.plan.chunks.get_mut(chunk) else { return 0 };
        let Some(sequence) = &mut self.sequences[chunk.sequence_id.index()] else { return 0 };
        debug_assert!(chunk.outputs == ChunkOutputs::Last && chunk.drafts == 0);
        let rows = most
            .min(limits.step_tokens - self.plan.rows)
            .min(limits.draft_rows_max - self.plan.draft_rows)
            .min(sequence.draft_tokens_max(*spare));
        let free = self.pool.free_blocks();
        if rows == 0 || !sequence.allocate(&mut self.pool, chunk.rows + rows, &mut self.plan.copies) {
            return 0;
        }
        *spare = (*spare + self.pool.free_blocks()).saturating_sub(free);
        chunk.drafts = rows;
        self.drafted_sequences.push(chunk.sequence_id);
        self.plan.rows += rows;
        self.plan.draft_rows += rows;
        rows
    }

    /// Takes the last `rows` drafted rows of a chunk out of the plan again.
    pub fn drop_drafts(&mut self, chunk: usize, rows: usize) {
        if let Some(chunk) = self.plan.chunks.get_mut(chunk) {
            chunk.drafts -= rows;
            self.plan.rows -= rows;
            self.plan.draft_rows -= rows;
        }
    }

    /// Whether the drafted row at `position` counts: its guess `token` turned out to be what its sequence has there. Rows of
    /// one sequence come in order, after the tokens before them.
    pub fn accept_draft(&mut self, sequence_id: SequenceId, position: usize, token: u32) -> bool {
        let Some(sequence) = &mut self.sequences[sequence_id.index()] else { return false };
        let right = sequence.tokens().get(position) == Some(&token);
        if right {
            debug_assert_eq!(sequence.computed(), position);
            sequence.commit(&mut self.pool, 1);
            sequence.cache_full_blocks(&mut self.pool, 0);
        }
        right
    }

    /// After the last `accept` of a step: sequences whose drafts were wrong give back the blocks that they do not need.
    pub fn release_rejected_drafts(&mut self) {
        for sequence_id in &self.drafted_sequences {
            if let Some(sequence) = &mut self.sequences[sequence_id.index()] {
                sequence.truncate(&mut self.pool);
            }
        }
    }

    /// The planned rows are computed; whether drafted ones count, `accept` says. Who joined a prompt that is complete now
    /// is forked from it.
    pub fn commit(&mut self) {
        for index in 0..self.plan.chunks.len() {
            let ScheduledChunk { sequence_id, rows, .. } = self.plan.chunks[index];
            let Some(sequence) = &mut self.sequences[sequence_id.index()] else { continue };
            sequence.commit(&mut self.pool, rows);
            if sequence.completes_shared_prompt() {
                let prompt = sequence.take_prompt_hash();
                self.remove_leader(sequence_id, prompt);
                self.fork_followers(sequence_id);
            }
        }
    }

    /// The planned rows were not computed: what they would have filled must not be found. The sequences of the plan are
    /// to be removed, since they may hold blocks that others of them should have filled.
    pub fn abandon(&mut self) {
        for chunk in &self.plan.chunks {
            if let Some(sequence) = &mut self.sequences[chunk.sequence_id.index()] {
                sequence.uncache_last(&mut self.pool, chunk.cached_blocks);
            }
        }
    }

    /// Checks the pool against the tables of all sequences, and their states against queue and lists.
    pub fn check_integrity(&self) -> Result<(), IntegrityError> {
        let Self { sequences, vacant_ids, waiting, running, prompt_leaders, limits, .. } = self;
        let tables = sequences.iter().flatten().flat_map(|sequence| sequence.blocks().tables());
        self.pool.check_integrity(tables)?;
        SchedulerParts {
            sequences,
            vacant_ids,
            waiting,
            running,
            prompt_leaders,
            block_tokens: limits.block_tokens,
        }
        .check()
    }

    fn schedule_decodes(&mut self, budget: &mut TokenBudget) {
        self.prefills.clear();
        self.block_filling_chunks.clear();
        let mut index = 0;
        while index < self.running.len() {
            let sequence_id = self.running[index];
            index += 1;
            let Some(sequence) = &mut self.sequences[sequence_id.index()] else { break };
            let wanted = sequence.rows_wanted();
            if wanted == 0 {
                continue;
            }
            if wanted > 1 || sequence.kind == SequenceKind::Score {
                self.prefills.push(sequence_id);
                continue;
            }
            // Most have room for one token more.
            if sequence.allocate(&mut self.pool, 1, &mut self.plan.copies) {
                if sequence.fills_block(1) {
                    self.block_filling_chunks.push(self.plan.chunks.len());
                }
                let (start, outputs) = (sequence.computed(), ChunkOutputs::Last);
                budget.spend(SequenceKind::Generate, true, 1);
                self.plan.rows += 1;
                self.plan.decode_rows += 1;
                self.plan.chunks.push(ScheduledChunk {
                    sequence_id,
                    start,
                    rows: 1,
                    drafts: 0,
                    outputs,
                    cached_blocks: 0,
                });
            } else {
                let rank = sequence.rank;
                if !self.schedule_rows(sequence_id, 1, budget) {
                    // It was itself the last of the running ones.
                    break;
                }
                // With who was preempted, those that had joined it have left, and they may have come before.
                index = self.running_index(rank) + 1;
            }
        }
        // Apart from the others: what they look at lies far apart in memory, and so the processor waits for several at
        // once. Who was preempted above came behind all of them.
        for &index in &self.block_filling_chunks {
            let chunk = &mut self.plan.chunks[index];
            if let Some(sequence) = &mut self.sequences[chunk.sequence_id.index()] {
                chunk.cached_blocks = sequence.cache_full_blocks(&mut self.pool, chunk.rows);
            }
        }
    }

    fn schedule_prefills(&mut self, budget: &mut TokenBudget) {
        for index in 0..self.prefills.len() {
            let sequence_id = self.prefills[index];
            let Some(sequence) = &self.sequences[sequence_id.index()] else { break };
            // None, if it was preempted meanwhile.
            let rows = budget.chunk_rows(&self.limits, sequence.kind, sequence.rows_wanted());
            if rows > 0 && !self.schedule_rows(sequence_id, rows, budget) {
                break;
            }
        }
    }

    /// Gives `slot` its rows, preempting lower ranks while blocks are short. `false`: it was preempted itself.
    fn schedule_rows(&mut self, sequence_id: SequenceId, rows: usize, budget: &mut TokenBudget) -> bool {
        loop {
            let Some(sequence) = &mut self.sequences[sequence_id.index()] else { return false };
            if sequence.allocate(&mut self.pool, rows, &mut self.plan.copies) {
                break;
            }
            match self.running.last() {
                Some(&victim) => {
                    self.preempt(victim, budget);
                    if victim == sequence_id {
                        return false;
                    }
                }
                None => return false,
            }
        }
        self.add_chunk(sequence_id, rows, budget);
        true
    }

    fn add_chunk(&mut self, sequence_id: SequenceId, rows: usize, budget: &mut TokenBudget) {
        let Some(sequence) = &mut self.sequences[sequence_id.index()] else { return };
        let outputs = match sequence.kind {
            SequenceKind::Score => ChunkOutputs::All,
            SequenceKind::Generate if rows == sequence.remaining() => ChunkOutputs::Last,
            SequenceKind::Generate => {
                self.cut_chunks.push(self.plan.chunks.len());
                ChunkOutputs::None
            }
        };
        let cached_blocks = sequence.cache_full_blocks(&mut self.pool, rows);
        let decode = sequence.is_decode();
        budget.spend(sequence.kind, decode, rows);
        self.plan.rows += rows;
        self.plan.decode_rows += usize::from(decode);
        self.plan.chunks.push(ScheduledChunk {
            sequence_id,
            start: sequence.computed(),
            rows,
            drafts: 0,
            outputs,
            cached_blocks,
        });
    }

    /// The last of the running sequences goes back to its place in the queue.
    fn preempt(&mut self, victim: SequenceId, budget: &mut TokenBudget) {
        self.release_followers(victim);
        let Some(sequence) = &mut self.sequences[victim.index()] else { return };
        if let Some(at) = self.plan.chunks.iter().position(|chunk| chunk.sequence_id == victim) {
            let chunk = self.plan.chunks.remove(at);
            self.plan.rows -= chunk.rows;
            let decode = sequence.is_decode();
            self.plan.decode_rows -= usize::from(decode);
            budget.refund(sequence.kind, decode, chunk.rows);
            sequence.uncache_last(&mut self.pool, chunk.cached_blocks);
        }
        let (state, rank) = (sequence.state, sequence.rank);
        sequence.release_all(&mut self.pool);
        sequence.state = SequenceState::Waiting;
        if let SequenceState::AwaitingFork(leader) = state
            && let Some(leader) = &mut self.sequences[leader.index()]
        {
            leader.followers -= 1;
        }
        self.leave_running(victim, rank);
        self.waiting.enter(rank, victim);
        self.plan.preempted += 1;
    }

    fn admit(&mut self, budget: &mut TokenBudget) {
        if self.waiting.is_empty() || self.running.len() >= self.limits.running_max {
            return;
        }
        let mut reserved = self.reserved_blocks();
        let (mut skipped, mut followers) = (None, 0);
        while budget.rows_for(SequenceKind::Generate) > 0
            && self.running.len() < self.limits.running_max
            && let Some(next) = self.waiting.next(skipped)
        {
            let sequence_id = next.sequence_id;
            let leader = self.leader(sequence_id);
            let Some(sequence) = &self.sequences[sequence_id.index()] else { break };
            let rows_are_left = budget.rows_for(sequence.kind) > 0;
            if !rows_are_left && !next.is_oldest_turn {
                // Rows with outputs are used up for this step: others need not wait behind it, but for its turn by age.
                skipped = Some(next.rank);
                continue;
            }
            let prefix_hit = sequence.find_prefix(&self.pool);
            if leader.is_none() && self.awaits_prefix(sequence_id, prefix_hit) {
                // Others need not wait behind it, but for its turn by age: else it might be passed for ever.
                if next.is_oldest_turn || followers == PREFIX_WAITERS_SKIPPED_MAX {
                    break;
                }
                followers += 1;
                skipped = Some(next.rank);
                continue;
            }
            let Some(sequence) = &self.sequences[sequence_id.index()] else { break };
            let needed = match leader {
                Some(_) => sequence.blocks().group_count(),
                None => sequence.blocks_needed(prefix_hit, self.limits.step_tokens) + prefix_hit.free_blocks,
            };
            if needed + reserved > self.pool.free_blocks() {
                break;
            }
            let Some(sequence) = &mut self.sequences[sequence_id.index()] else { break };
            let rank = self.waiting.admit(next);
            sequence.rank = rank;
            let cached = match leader {
                Some(leader) => {
                    sequence.state = SequenceState::AwaitingFork(leader);
                    // As if found: all but the token that at least must be computed.
                    sequence.remaining() - 1
                }
                None => {
                    sequence.reuse_prefix(&mut self.pool, prefix_hit.blocks);
                    sequence.state = SequenceState::Running;
                    sequence.computed()
                }
            };
            if !sequence.was_admitted {
                sequence.was_admitted = true;
                self.plan.admitted.push((sequence_id, cached));
            }
            self.enter_running(sequence_id, rank);
            if let Some(leader) = leader {
                if let Some(leader) = &mut self.sequences[leader.index()] {
                    leader.followers += 1;
                }
            } else if rows_are_left {
                self.schedule_first_rows(sequence_id, budget);
            }
            reserved += self
                .sequence(sequence_id)
                .map_or(0, |joined| joined.blocks_to_reserve(self.limits.step_tokens));
        }
    }

    /// The first rows of a sequence that was just admitted. It gets some even if it is held: blocks that it shares may be
    /// filled by this very step, and what a step that fails takes along are the sequences with rows in it.
    fn schedule_first_rows(&mut self, sequence_id: SequenceId, budget: &mut TokenBudget) {
        let Some(sequence) = &mut self.sequences[sequence_id.index()] else { return };
        let rows = budget.chunk_rows(&self.limits, sequence.kind, sequence.remaining());
        let grown = sequence.allocate(&mut self.pool, rows, &mut self.plan.copies);
        debug_assert!(grown && rows > 0, "the gate counted these blocks as free");
        self.add_chunk(sequence_id, rows, budget);
    }

    /// Gives what is left of the budget to prompts whose chunks were cut, in order.
    fn extend_cut_chunks(&mut self, budget: &mut TokenBudget) {
        for &index in &self.cut_chunks {
            let chunk = &mut self.plan.chunks[index];
            let Some(sequence) = &mut self.sequences[chunk.sequence_id.index()] else { continue };
            let more = (sequence.remaining() - chunk.rows).min(budget.rows_for(SequenceKind::Generate));
            if more == 0 || !sequence.allocate(&mut self.pool, chunk.rows + more, &mut self.plan.copies) {
                continue;
            }
            chunk.rows += more;
            chunk.cached_blocks += sequence.cache_full_blocks(&mut self.pool, chunk.rows);
            if chunk.rows == sequence.remaining() {
                chunk.outputs = ChunkOutputs::Last;
            }
            self.plan.rows += more;
            budget.spend(SequenceKind::Generate, false, more);
        }
    }

    /// Blocks that running sequences still need for the tokens they have, and for the next ones.
    fn reserved_blocks(&self) -> usize {
        let running = self.running.iter().filter_map(|sequence_id| self.sequence(*sequence_id));
        running.map(|sequence| sequence.blocks_to_reserve(self.limits.step_tokens)).sum()
    }

    fn enter_running(&mut self, sequence_id: SequenceId, rank: ServiceRank) {
        let at = self.running_index(rank);
        self.running.insert(at, sequence_id);
    }

    fn leave_running(&mut self, sequence_id: SequenceId, rank: ServiceRank) {
        // The sequence itself may be out of its slot by now; ranks of the others lead to its place.
        let at = self.running_index(rank);
        if self.running.get(at) == Some(&sequence_id) {
            self.running.remove(at);
        } else {
            self.running.retain(|&other| other != sequence_id);
        }
    }

    fn running_index(&self, rank: ServiceRank) -> usize {
        self.running.partition_point(|&other| {
            self.sequences[other.index()].as_ref().is_some_and(|other| other.rank < rank)
        })
    }
}
