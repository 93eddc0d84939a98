//! Prompts that have a beginning in common and are in progress at once: who leads, who has joined or waits for what another is
//! about to compute, and what happens when a prompt is complete or given up.

use super::Scheduler;
use crate::kv::block_tables::PrefixHit;
use crate::schedule::sequence::SequenceState;
use crate::schedule::sequence_id::SequenceId;
use crate::schedule::step_plan::Fork;
use prefix::BlockHash;

impl Scheduler {
    /// Who computes the same prompt as this waiting one, right now.
    pub(super) fn leader(&self, sequence_id: SequenceId) -> Option<SequenceId> {
        let sequence = self.sequence(sequence_id)?;
        let leader = *self.prompt_leaders.get(&sequence.prompt_hash()?)?;
        let found = self.sequence(leader)?;
        // It may have been put out already: a preempted one is longer than its prompt was.
        let same = found.prompt_hash() == sequence.prompt_hash() && found.tokens() == sequence.tokens();
        (leader != sequence_id && found.state == SequenceState::Running && !found.is_paused && same)
            .then_some(leader)
    }

    /// The block that this waiting one would begin with, behind what it finds now, is about to be computed for another that
    /// comes before it.
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

    /// `slot` computes its prompt no more; the next equal one that comes leads.
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
        let Some(mut leading) = self.sequences[leader.index()].take() else { return };
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

    /// Who joined a sequence that does not go on has to compute the prompt itself.
    pub(super) fn release_followers(&mut self, leader: SequenceId) {
        match self.sequences.get_mut(leader.0 as usize) {
            Some(Some(leading)) if leading.followers > 0 => leading.followers = 0,
            _ => return,
        }
        for index in (0..self.running.len()).rev() {
            let sequence_id = self.running[index];
            if let Some(follower) = &mut self.sequences[sequence_id.index()]
                && follower.state == SequenceState::AwaitingFork(leader)
            {
                follower.state = SequenceState::Waiting;
                self.waiting.enter(follower.rank, sequence_id);
                self.running.remove(index);
            }
        }
    }
}
