// SPDX-License-Identifier: Apache-2.0

//! The scheduler: decides which sequences compute how many rows in the next step. A plain value
//! without model, clock or I/O.
//!
//! A sequence has tokens and a count of computed tokens; a step has a token budget. There are no
//! separate prefill and decode phases: a decode is a sequence that lacks one row. The scheduler
//! fills a step in this order:
//!
//! 1. Decodes of running sequences, in order of rank.
//! 2. Prefill of running sequences, in order of rank. A prompt that this step cannot complete gets
//!    half of the rows that are left, so that a short prompt need not wait for a long one. While
//!    sequences decode, all prefill rows together are capped (`prefill_row_limit`).
//! 3. Admission of waiting sequences in the order of the [`WaitingQueue`], unless step 1 or 2
//!    preempted a sequence. A sequence is admitted only if all its tokens fit in the blocks that
//!    running sequences do not need. If the first sequence does not fit, the scheduler preempts
//!    paused sequences until it does. If that is not enough, the scheduler tries no later one.
//! 4. Rows that are left go to prompts whose chunks were cut.
//!
//! If blocks run out in step 1 or 2, the scheduler preempts the paused sequence with the last rank,
//! or, without paused ones, the running sequence with the last rank. That sequence releases its
//! blocks, waits again and is recomputed later. Rows that it already had in this step return to the
//! budget.
//!
//! Step 3 skips a sequence whose next block is about to be computed by a prefill of lower rank: a
//! later step finds that block in the prefix cache. It also skips a sequence to be scored while no
//! scoring rows are left. On the oldest-first turn, nothing is skipped: if the oldest sequence
//! waits for a block, admission ends; if it is to be scored, it is admitted without rows.
//!
//! After that, `add_drafts` may use spare rows and blocks for draft tokens. Drafts never take a row
//! from other sequences, never preempt and never enter the prefix cache. `accept_draft` keeps the
//! row of a draft token that the sampler drew too; `release_rejected_drafts` releases the blocks of
//! the others.
//!
//! Invariants:
//!
//! 1. A sequence keeps its rank through preemption. Only paused sequences and those of later rank
//!    are preempted for it. The first sequence that is not paused thus always makes progress.
//! 2. Because `step_tokens >= running_max`, every running sequence that is not paused decodes in
//!    every step.
//! 3. Equal prompts are computed once. A sequence with the prompt of a running leader waits for a
//!    fork. When the prompt is computed, both continue from the same logits and share all blocks.
//!    The sequence that first writes into a shared last block copies it (`StepPlan::copies`).
//! 4. A paused sequence keeps its blocks only while no other sequence needs them. It is not
//!    admitted before it continues.

use crate::kv::block_pool::BlockPool;
use crate::kv::group::KvGroupKind;
use crate::schedule::budget::TokenBudget;
use crate::schedule::integrity::{IntegrityError, SchedulerParts};
use crate::schedule::sequence::{NewSequence, Sequence, SequenceKind, SequenceState};
use crate::schedule::sequence_id::SequenceId;
use crate::schedule::step_plan::{ChunkOutputs, ScheduledChunk, SchedulerLimits, StepPlan};
use crate::schedule::waiting_queue::{ServiceRank, WaitingQueue};

// The paths are explicit because tests/planted compiles this file a second time.
#[path = "scheduler/ahead.rs"]
mod ahead;
#[path = "scheduler/drafts.rs"]
mod drafts;
#[path = "scheduler/forks.rs"]
mod forks;
#[path = "scheduler/pauses.rs"]
mod pauses;

use prefix::BlockHash;
use std::collections::HashMap;

/// Expected output tokens of a request that asks for more, or leaves `max_tokens` open.
const EXPECTED_OUTPUT_TOKENS: usize = 256;

/// Most sequences that one step skips because their prefix is being computed. Each costs a prefix
/// lookup of 11 us for 32,768 tokens, so 0.35 ms for all.
pub const PREFIX_WAITERS_SKIPPED_MAX: usize = 32;

#[derive(Debug)]
pub struct Scheduler {
    limits: SchedulerLimits,
    groups: Vec<KvGroupKind>,
    pool: BlockPool,
    sequences: Vec<Option<Sequence>>,
    vacant_ids: Vec<SequenceId>,
    waiting: WaitingQueue,
    /// Sequences in state `Waiting` that are paused, and so not in the queue.
    paused_waiting: usize,
    /// In order of rank.
    running: Vec<SequenceId>,
    /// The sequence that computes, or will compute, the prompt with this hash.
    prompt_leaders: HashMap<BlockHash, SequenceId>,
    /// Forks since the start.
    fork_count: u64,
    plan: StepPlan,
    /// Of this step: running sequences with a prefill, and indices of chunks that were cut.
    prefills: Vec<SequenceId>,
    cut_chunks: Vec<usize>,
    /// Of this step: indices of decode chunks that fill a block.
    block_filling_chunks: Vec<usize>,
    /// Of this step: sequences with blocks for draft tokens.
    drafted_sequences: Vec<SequenceId>,
}

impl Scheduler {
    /// A scheduler for a model whose layers all have full attention.
    pub fn new(limits: SchedulerLimits, blocks: usize) -> Self {
        Self::with_groups(limits, blocks, vec![KvGroupKind::Full])
    }

    /// The groups share `blocks`: each block serves the layers of one group at a time.
    pub fn with_groups(limits: SchedulerLimits, blocks: usize, groups: Vec<KvGroupKind>) -> Self {
        assert!(limits.step_tokens >= limits.running_max, "every running sequence decodes in every step");
        Self {
            limits,
            groups,
            pool: BlockPool::new(blocks),
            sequences: Vec::new(),
            vacant_ids: Vec::new(),
            waiting: WaitingQueue::default(),
            paused_waiting: 0,
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

    /// Adds a sequence to the waiting queue. Sequences that need an output of every
    /// row do not use the prefix cache.
    pub fn add(&mut self, new: NewSequence<'_>) -> SequenceId {
        let cost = new.tokens.len() + (new.tokens_max - new.tokens.len()).min(EXPECTED_OUTPUT_TOKENS);
        let rank = self.waiting.rank(new.priority, new.tenant, cost as u64);
        let share = self.limits.prefix_cache && new.kind.uses_prefix_cache();
        let sequence = Sequence::new(new, rank, &self.groups, self.limits.block_tokens, share);
        let prompt = sequence.prompt_hash();
        let sequence_id = self.assign_id(sequence);
        if let Some(prompt) = prompt
            && self.limits.can_fork
        {
            self.prompt_leaders.entry(prompt).or_insert(sequence_id);
        }
        self.waiting.enter(rank, sequence_id);
        sequence_id
    }

    fn assign_id(&mut self, sequence: Sequence) -> SequenceId {
        match self.vacant_ids.pop() {
            Some(sequence_id) => {
                self.sequences[sequence_id.index()] = Some(sequence);
                sequence_id
            }
            None => {
                self.sequences.push(Some(sequence));
                SequenceId(self.sequences.len() as u32 - 1)
            }
        }
    }

    /// Removes a running or waiting sequence and releases its blocks.
    pub fn remove(&mut self, sequence_id: SequenceId) {
        self.release_followers(sequence_id);
        let Some(mut sequence) = self.sequences[sequence_id.index()].take() else {
            panic!("{sequence_id:?} is removed twice or was never added")
        };
        match sequence.state {
            SequenceState::Waiting => self.leave_waiting(&sequence),
            SequenceState::Running => self.leave_running(sequence_id, sequence.rank),
            SequenceState::AwaitingFork(leader) => {
                self.leave_running(sequence_id, sequence.rank);
                expect_sequence(&mut self.sequences, leader).followers -= 1;
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
        let sequence = expect_sequence(&mut self.sequences, sequence_id);
        sequence.push(token);
        // A step that was planned ahead may have filled a block.
        sequence.cache_full_blocks(&mut self.pool, 0);
    }

    pub fn pool(&self) -> &BlockPool {
        &self.pool
    }

    pub fn running_count(&self) -> usize {
        self.running.len()
    }

    /// Sequences without blocks: those that wait for admission, and preempted ones that are paused.
    pub fn waiting_count(&self) -> usize {
        self.waiting.len() + self.paused_waiting
    }

    /// Waiting sequences that would be admitted before this one without further arrivals.
    pub fn waiting_ahead(&self, sequence_id: SequenceId) -> usize {
        self.sequence(sequence_id).map_or(0, |sequence| self.waiting.ahead(sequence.rank))
    }

    pub fn fork_count(&self) -> u64 {
        self.fork_count
    }

    pub fn plan(&self) -> &StepPlan {
        &self.plan
    }

    /// Slots in the blocks of running sequences, and how many of them are unfilled: O(running).
    pub fn token_slots(&self) -> (usize, usize) {
        let running = self.running.iter().filter_map(|sequence_id| self.sequence(*sequence_id));
        running.fold((0, 0), |(slots, unfilled), sequence| {
            let own = sequence.table().len() * self.limits.block_tokens;
            (slots + own, unfilled + own.saturating_sub(sequence.computed()))
        })
    }

    /// Clears the prefix cache. Returns `false` and does nothing while any block is in use.
    pub fn reset_prefix_cache(&mut self) -> bool {
        self.pool.reset_prefix_cache()
    }

    /// Evicts cached blocks that were not used since the last call.
    pub fn evict_unused_prefixes(&mut self) {
        self.pool.evict_unused();
    }

    /// Plans the next step. If sequences decode in it, prefill gets at most `prefill_row_limit`
    /// rows. The caller then calls `commit` or `abandon` before the next plan.
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

    /// Records that the planned rows are computed; `accept_draft` decides about draft rows. Forks
    /// the followers of prompts that are now complete.
    pub fn commit(&mut self) {
        for index in 0..self.plan.chunks.len() {
            let ScheduledChunk { sequence_id, rows, .. } = self.plan.chunks[index];
            let sequence = expect_sequence(&mut self.sequences, sequence_id);
            sequence.commit(&mut self.pool, rows);
            if sequence.completes_shared_prompt() {
                let prompt = sequence.take_prompt_hash();
                self.remove_leader(sequence_id, prompt);
                self.fork_followers(sequence_id);
            }
        }
    }

    /// Removes the blocks of a failed step from the prefix cache. The caller then removes the
    /// sequences of the plan, since they may use blocks that other sequences of the step should
    /// have filled.
    pub fn abandon(&mut self) {
        for chunk in &self.plan.chunks {
            // Sequences of a step that was planned ahead may have ended meanwhile.
            if let Some(sequence) = &mut self.sequences[chunk.sequence_id.index()] {
                sequence.uncache_last(&mut self.pool, chunk.cached_blocks);
            }
        }
    }

    /// Checks the pool against all block tables, and the state of each sequence against the queue
    /// and the lists.
    pub fn check_integrity(&self) -> Result<(), IntegrityError> {
        let Self { sequences, vacant_ids, waiting, paused_waiting, running, prompt_leaders, limits, .. } =
            self;
        let tables = sequences.iter().flatten().flat_map(|sequence| sequence.blocks().tables());
        self.pool.check_integrity(tables)?;
        SchedulerParts {
            sequences,
            vacant_ids,
            waiting,
            paused_waiting: *paused_waiting,
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
            let sequence = expect_sequence(&mut self.sequences, sequence_id);
            let wanted = sequence.rows_wanted();
            if wanted == 0 {
                continue;
            }
            if wanted > 1 || sequence.kind != SequenceKind::Generate {
                self.prefills.push(sequence_id);
                continue;
            }
            // Most decodes need no new block.
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
                    // The sequence preempted itself, as the last one running.
                    break;
                }
                // Followers of preempted sequences have left `running` too, possibly before this
                // index.
                index = self.running_index(rank) + 1;
            }
        }
        // A separate loop: these accesses miss the cache, and the processor overlaps several of
        // them. Preempted chunks came after all of these.
        for &index in &self.block_filling_chunks {
            let chunk = &mut self.plan.chunks[index];
            let sequence = expect_sequence(&mut self.sequences, chunk.sequence_id);
            chunk.cached_blocks = sequence.cache_full_blocks(&mut self.pool, chunk.rows);
        }
    }

    fn schedule_prefills(&mut self, budget: &mut TokenBudget) {
        for index in 0..self.prefills.len() {
            let sequence_id = self.prefills[index];
            let sequence = expect_sequence(&mut self.sequences, sequence_id);
            // Zero if the sequence was preempted by an earlier one.
            let rows = budget.chunk_rows(&self.limits, sequence.kind, sequence.rows_wanted());
            if rows > 0 && !self.schedule_rows(sequence_id, rows, budget) {
                break;
            }
        }
    }

    /// Gives the sequence its rows, and preempts other sequences while blocks are short. Returns
    /// `false` if the sequence preempted itself.
    fn schedule_rows(&mut self, sequence_id: SequenceId, rows: usize, budget: &mut TokenBudget) -> bool {
        loop {
            let sequence = expect_sequence(&mut self.sequences, sequence_id);
            if sequence.allocate(&mut self.pool, rows, &mut self.plan.copies) {
                break;
            }
            let Some(victim) = self.last_paused().or(self.running.last().copied()) else {
                panic!("{sequence_id:?} gets rows but no sequence is running")
            };
            self.preempt(victim, budget);
            if victim == sequence_id {
                return false;
            }
        }
        self.add_chunk(sequence_id, rows, budget);
        true
    }

    fn add_chunk(&mut self, sequence_id: SequenceId, rows: usize, budget: &mut TokenBudget) {
        let sequence = expect_sequence(&mut self.sequences, sequence_id);
        let outputs = match sequence.kind {
            SequenceKind::Score | SequenceKind::EmbedAll => ChunkOutputs::All,
            SequenceKind::Generate | SequenceKind::EmbedLast if rows == sequence.remaining() => {
                ChunkOutputs::Last
            }
            SequenceKind::Generate | SequenceKind::EmbedLast => ChunkOutputs::None,
        };
        if rows < sequence.remaining() && sequence.kind != SequenceKind::Score {
            self.cut_chunks.push(self.plan.chunks.len());
        }
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

    /// Returns a running sequence to the waiting queue.
    fn preempt(&mut self, victim: SequenceId, budget: &mut TokenBudget) {
        self.release_followers(victim);
        let sequence = expect_sequence(&mut self.sequences, victim);
        assert!(!sequence.is_last_token_drawn(), "a step that is planned ahead preempts no sequence");
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
        if let SequenceState::AwaitingFork(leader) = state {
            expect_sequence(&mut self.sequences, leader).followers -= 1;
        }
        self.leave_running(victim, rank);
        self.enter_waiting(victim);
        self.plan.preempted += 1;
    }

    fn admit(&mut self, budget: &mut TokenBudget) {
        if self.waiting.is_empty() || (self.is_running_full() && self.last_paused().is_none()) {
            return;
        }
        let mut reserved = self.reserved_blocks();
        let (mut skipped, mut followers) = (None, 0);
        while budget.rows_for(SequenceKind::Generate) > 0
            && let Some(next) = self.waiting.next(skipped)
        {
            let sequence_id = next.sequence_id;
            let leader = self.leader(sequence_id);
            let sequence = expect_sequence(&mut self.sequences, sequence_id);
            let rows_are_left = budget.rows_for(sequence.kind) > 0;
            if !rows_are_left && !next.is_oldest_turn {
                // No scoring rows are left in this step. Other sequences need not wait for that.
                skipped = Some(next.rank);
                continue;
            }
            let prefix_hit = sequence.find_prefix(&self.pool);
            if leader.is_none() && self.awaits_prefix(sequence_id, prefix_hit) {
                // On the oldest-first turn the sequence is not skipped: otherwise it could be
                // skipped forever.
                if next.is_oldest_turn || followers == PREFIX_WAITERS_SKIPPED_MAX {
                    break;
                }
                followers += 1;
                skipped = Some(next.rank);
                continue;
            }
            let sequence = expect_sequence(&mut self.sequences, sequence_id);
            let needed = match leader {
                Some(_) => sequence.blocks().group_count(),
                None => sequence.blocks_needed(prefix_hit, self.limits.step_tokens) + prefix_hit.free_blocks,
            };
            if self.is_running_full() || needed + reserved > self.pool.free_blocks() {
                // The prefix hit may be among the blocks that this releases, so the loop looks
                // again.
                let Some(victim) = self.last_paused() else { break };
                self.preempt(victim, budget);
                reserved = self.reserved_blocks();
                continue;
            }
            let rank = self.waiting.admit(next);
            let sequence = expect_sequence(&mut self.sequences, sequence_id);
            sequence.rank = rank;
            let cached = match leader {
                Some(leader) => {
                    sequence.state = SequenceState::AwaitingFork(leader);
                    // Counts as cached: all tokens but the last, which each sequence must compute.
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
                expect_sequence(&mut self.sequences, leader).followers += 1;
            } else if rows_are_left {
                self.schedule_first_rows(sequence_id, budget);
            }
            reserved += self
                .sequence(sequence_id)
                .map_or(0, |joined| joined.blocks_to_reserve(self.limits.step_tokens));
        }
    }

    /// Schedules the first rows of a sequence that was just admitted. Blocks that it shares may be
    /// filled by this step. If the step fails, the engine removes the sequences with rows in it.
    fn schedule_first_rows(&mut self, sequence_id: SequenceId, budget: &mut TokenBudget) {
        let sequence = expect_sequence(&mut self.sequences, sequence_id);
        let rows = budget.chunk_rows(&self.limits, sequence.kind, sequence.remaining());
        let grown = sequence.allocate(&mut self.pool, rows, &mut self.plan.copies);
        assert!(grown && rows > 0, "{sequence_id:?} was admitted without blocks for its first {rows} rows");
        self.add_chunk(sequence_id, rows, budget);
    }

    /// Gives the rest of the budget to cut chunks, in order.
    fn extend_cut_chunks(&mut self, budget: &mut TokenBudget) {
        for &index in &self.cut_chunks {
            let chunk = &mut self.plan.chunks[index];
            let sequence = expect_sequence(&mut self.sequences, chunk.sequence_id);
            let more = (sequence.remaining() - chunk.rows).min(budget.rows_for(SequenceKind::Generate));
            if more == 0 || !sequence.allocate(&mut self.pool, chunk.rows + more, &mut self.plan.copies) {
                continue;
            }
            chunk.rows += more;
            chunk.cached_blocks += sequence.cache_full_blocks(&mut self.pool, chunk.rows);
            if chunk.rows == sequence.remaining() && chunk.outputs == ChunkOutputs::None {
                chunk.outputs = ChunkOutputs::Last;
            }
            self.plan.rows += more;
            budget.spend(SequenceKind::Generate, false, more);
        }
    }

    /// Blocks that running sequences still need for the tokens they have, and for their next
    /// tokens.
    fn reserved_blocks(&self) -> usize {
        let running = self.running.iter().filter_map(|sequence_id| self.sequence(*sequence_id));
        running.map(|sequence| sequence.blocks_to_reserve(self.limits.step_tokens)).sum()
    }

    fn enter_running(&mut self, sequence_id: SequenceId, rank: ServiceRank) {
        let at = self.running_index(rank);
        self.running.insert(at, sequence_id);
    }

    fn leave_running(&mut self, sequence_id: SequenceId, rank: ServiceRank) {
        // `remove` has taken the sequence out already. The ranks of the others lead to its index.
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

/// The sequence with this id. The plan, the queue and the running list hold only ids of sequences
/// that were added and not yet removed.
#[inline]
fn expect_sequence(sequences: &mut [Option<Sequence>], sequence_id: SequenceId) -> &mut Sequence {
    match &mut sequences[sequence_id.index()] {
        Some(sequence) => sequence,
        None => panic!("{sequence_id:?} is scheduled but was removed"),
    }
}
