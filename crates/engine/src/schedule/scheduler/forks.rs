// SPDX-License-Identifier: Apache-2.0

//! Equal prompts and common prefixes that are being computed: leaders, followers that await a fork,
//! and sequences that wait for a prefix.

use super::{Scheduler, expect_sequence};
use crate::kv::block_tables::PrefixHit;
use crate::schedule::sequence::SequenceState;
use crate::schedule::sequence_id::SequenceId;
use crate::schedule::step_plan::Fork;
use prefix::BlockHash;

impl Scheduler {
    /// The running sequence that computes the same prompt as this waiting one.
    pub(super) fn leader(&self, sequence_id: SequenceId) -> Option<SequenceId> {
        let sequence = self.sequence(sequence_id)?;
        let leader = *self.prompt_leaders.get(&sequence.prompt_hash()?)?;
        let found = self.sequence(leader)?;
        // A leader that was preempted after its first output token is longer than its prompt.
        let same = found.prompt_hash() == sequence.prompt_hash() && found.tokens() == sequence.tokens();
        (leader != sequence_id && found.state == SequenceState::Running && !found.is_paused && same)
            .then_some(leader)
    }

    /// Whether a chunk of a sequence with lower rank will soon compute the next block of this
    /// waiting sequence.
    pub(super) fn awaits_prefix(&self, sequence_id: SequenceId, prefix_hit: PrefixHit) -> bool {
        let Some(waiting) = self.sequence(sequence_id) else { return false };
        let Some(next) = waiting.hash(prefix_hit.blocks) else { return false };
        let end = (prefix_hit.blocks + 1) * self.limits.block_tokens;
        self.cut_chunks.iter().map(|&index| &self.plan.chunks[index]).any(|chunk| {
            let ahead = self.sequence(chunk.sequence_id).filter(|ahead| ahead.rank < waiting.rank);
            chunk.start + chunk.rows < end
                && ahead.is_some_and(|ahead| ahead.hash(prefix_hit.blocks) == Some(next))
        })
    }

    /// The sequence no longer computes this prompt. The next equal prompt gets a new leader.
    pub(super) fn remove_leader(&mut self, sequence_id: SequenceId, prompt: Option<BlockHash>) {
        if let Some(prompt) = prompt
            && self.prompt_leaders.get(&prompt) == Some(&sequence_id)
        {
            self.prompt_leaders.remove(&prompt);
        }
    }

    pub(super) fn fork_followers(&mut self, leader: SequenceId) {
        if self.sequence(leader).is_none_or(|leader| leader.followers == 0) {
            return;
        }
        let Some(mut leading) = self.sequences[leader.index()].take() else {
            panic!("{leader:?} has followers but was removed")
        };
        for &sequence_id in &self.running {
            if let Some(follower) = &mut self.sequences[sequence_id.index()]
                && follower.state == SequenceState::AwaitingFork(leader)
            {
                follower.fork(&mut self.pool, &mut leading);
                follower.take_prompt_hash();
                self.plan.forked.push(Fork { leader, follower: sequence_id });
                self.fork_count += 1;
            }
        }
        leading.followers = 0;
        self.sequences[leader.index()] = Some(leading);
    }

    /// Adds a sequence with the tokens of `parent`, which it has computed unless it was preempted.
    /// If `parent` is running and there is a seat, the two share its blocks. Else the new sequence
    /// waits, and computes the tokens that it does not find in the prefix cache.
    pub fn branch(&mut self, parent: SequenceId) -> SequenceId {
        let rank_of_parent = expect_sequence(&mut self.sequences, parent).rank;
        let rank = self.waiting.rank_behind(rank_of_parent);
        let has_seat = self.limits.can_fork && !self.is_running_full();
        let leading = expect_sequence(&mut self.sequences, parent);
        let mut branch = leading.branch(rank, &self.groups);
        let is_forked = has_seat && leading.state == SequenceState::Running;
        if is_forked {
            branch.fork(&mut self.pool, leading);
            self.fork_count += 1;
        }
        let sequence_id = self.assign_id(branch);
        match is_forked {
            true => self.enter_running(sequence_id, rank),
            false => self.waiting.enter(rank, sequence_id),
        }
        sequence_id
    }

    /// Returns followers to the waiting queue, because their leader does not continue. They compute
    /// the prompt themselves.
    pub(super) fn release_followers(&mut self, leader: SequenceId) {
        match self.sequences.get_mut(leader.index()) {
            Some(Some(leading)) if leading.followers > 0 => leading.followers = 0,
            _ => return,
        }
        for index in (0..self.running.len()).rev() {
            let sequence_id = self.running[index];
            if let Some(follower) = &mut self.sequences[sequence_id.index()]
                && follower.state == SequenceState::AwaitingFork(leader)
            {
                follower.state = SequenceState::Waiting;
                self.enter_waiting(sequence_id);
                self.running.remove(index);
            }
        }
    }
}
