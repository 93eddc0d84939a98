//! Prompts that have a beginning in common and are in progress at once: who leads, who has joined or waits for what another is
//! about to compute, and what happens when a prompt is complete or given up.

use super::Scheduler;
use crate::kv::block_tables::Hits;
use crate::schedule::sequence::State;
use crate::schedule::sequence_id::Slot;
use crate::schedule::step_plan::Fork;
use prefix::BlockHash;

impl Scheduler {
    /// Who computes the same prompt as this waiting one, right now.
    pub(super) fn leader(&self, slot: Slot) -> Option<Slot> {
        let sequence = self.sequence(slot)?;
        let leader = *self.leaders.get(&sequence.prompt()?)?;
        let found = self.sequence(leader)?;
        // It may have been put out already: a preempted one is longer than its prompt was.
        let same = found.prompt() == sequence.prompt() && found.tokens() == sequence.tokens();
        (leader != slot && found.state == State::Running && !found.held && same).then_some(leader)
    }

    /// The block that this waiting one would begin with, behind what it finds now, is about to be computed for another that
    /// comes before it.
    pub(super) fn follows(&self, slot: Slot, hits: Hits) -> bool {
        let Some(waiting) = self.sequence(slot) else { return false };
        let Some(next) = waiting.hash(hits.blocks) else { return false };
        let end = (hits.blocks + 1) * self.limits.block_tokens;
        self.cut.iter().map(|&index| &self.plan.chunks[index]).any(|chunk| {
            let ahead = self.sequence(chunk.slot).filter(|ahead| ahead.rank < waiting.rank);
            chunk.start + chunk.rows < end && ahead.is_some_and(|ahead| ahead.hash(hits.blocks) == Some(next))
        })
    }

    /// `slot` computes its prompt no more; the next equal one that comes leads.
    pub(super) fn end_lead(&mut self, slot: Slot, prompt: Option<BlockHash>) {
        if let Some(prompt) = prompt
            && self.leaders.get(&prompt) == Some(&slot)
        {
            self.leaders.remove(&prompt);
        }
    }

    pub(super) fn fork(&mut self, leader: Slot) {
        if self.sequence(leader).is_none_or(|leader| leader.followers == 0) {
            return;
        }
        let Some(mut leading) = self.sequences[leader.0 as usize].take() else { return };
        for &slot in &self.running {
            if let Some(follower) = &mut self.sequences[slot.0 as usize]
                && follower.state == State::Joined(leader)
            {
                follower.fork(&mut self.pool, &mut leading);
                follower.take_prompt();
                self.plan.forked.push(Fork { leader, follower: slot });
                self.forks += 1;
            }
        }
        leading.followers = 0;
        self.sequences[leader.0 as usize] = Some(leading);
    }

    /// Who joined a sequence that does not go on has to compute the prompt itself.
    pub(super) fn release_followers(&mut self, leader: Slot) {
        match self.sequences.get_mut(leader.0 as usize) {
            Some(Some(leading)) if leading.followers > 0 => leading.followers = 0,
            _ => return,
        }
        for index in (0..self.running.len()).rev() {
            let slot = self.running[index];
            if let Some(follower) = &mut self.sequences[slot.0 as usize]
                && follower.state == State::Joined(leader)
            {
                follower.state = State::Waiting;
                self.queue.enter(follower.rank, slot);
                self.running.remove(index);
            }
        }
    }
}
