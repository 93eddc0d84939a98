//! What must hold between two steps, beyond the pool's own invariants: each sequence is where its state says, and nobody
//! else is. Looks at everything; for tests, and for a process that is idle.

use crate::kv::block_pool::PoolIntegrityError;
use crate::schedule::sequence::{Sequence, State};
use crate::schedule::sequence_id::Slot;
use crate::schedule::waiting_queue::{Queue, QueueIntegrityError, Rank};
use prefix::BlockHash;
use std::collections::HashMap;

/// A broken invariant of the engine: a bug, never a consequence of input.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum IntegrityError {
    #[error(transparent)]
    Pool(#[from] PoolIntegrityError),
    #[error("{vacant} slots are listed vacant, {empty} are empty")]
    Vacant { vacant: usize, empty: usize },
    #[error(transparent)]
    QueueOrder(#[from] QueueIntegrityError),
    #[error("the queue holds {queued} sequences, {waiting} wait")]
    Queued { queued: usize, waiting: usize },
    #[error("slot {0:?} waits, and the queue does not have it at its rank")]
    NotQueued(Slot),
    #[error("slot {0:?} waits and has blocks or computed tokens")]
    WaitsWithBlocks(Slot),
    #[error("slot {0:?} has computed more than its blocks hold, or than its tokens")]
    Computed(Slot),
    #[error("{listed} sequences are listed as running, {running} are")]
    Running { listed: usize, running: usize },
    #[error("slot {0:?} is listed as running and is not, or out of its order")]
    RunningOrder(Slot),
    #[error("slot {0:?} has joined one that computes no prompt, or holds blocks itself")]
    Joined(Slot),
    #[error("slot {slot:?} counts {counted} followers and has {found}")]
    Followers { slot: Slot, counted: u32, found: u32 },
    #[error("the prompt that slot {0:?} is said to lead is not its own")]
    Leader(Slot),
    #[error("slot {0:?} has a request without a sequence, or a sequence without a request")]
    Task(Slot),
    #[error("{named} requests can be named, {live} are there")]
    Named { named: usize, live: usize },
    #[error("{listed} deadlines are listed, {live} requests have one")]
    Deadlines { listed: usize, live: usize },
    #[error("{counted} requests are counted as queued, {found} are")]
    Queue { counted: usize, found: usize },
    #[error("{counted} requests of tenant {tenant} are counted as queued, {found} are")]
    Admission { tenant: u64, counted: usize, found: usize },
}

/// The scheduler's parts, to be compared with each other.
pub(crate) struct Parts<'a> {
    pub(crate) sequences: &'a [Option<Sequence>],
    pub(crate) vacant: &'a [Slot],
    pub(crate) queue: &'a Queue,
    pub(crate) running: &'a [Slot],
    pub(crate) leaders: &'a HashMap<BlockHash, Slot>,
    pub(crate) block_tokens: usize,
}

impl Parts<'_> {
    fn get(&self, slot: Slot) -> Option<&Sequence> {
        self.sequences.get(slot.0 as usize)?.as_ref()
    }

    pub(crate) fn check(&self) -> Result<(), IntegrityError> {
        let empty = self.sequences.iter().filter(|sequence| sequence.is_none()).count();
        if empty != self.vacant.len() || self.vacant.iter().any(|&slot| self.get(slot).is_some()) {
            return Err(IntegrityError::Vacant { vacant: self.vacant.len(), empty });
        }
        self.queue.check_integrity()?;
        let mut followers = vec![0; self.sequences.len()];
        let mut waiting = 0;
        for (index, sequence) in self.sequences.iter().enumerate() {
            if let Some(sequence) = sequence {
                waiting += usize::from(sequence.state == State::Waiting);
                self.check_sequence(Slot(index as u32), sequence, &mut followers)?;
            }
        }
        if waiting != self.queue.len() {
            return Err(IntegrityError::Queued { queued: self.queue.len(), waiting });
        }
        for (index, (sequence, &found)) in self.sequences.iter().zip(&followers).enumerate() {
            let counted = sequence.as_ref().map_or(0, |sequence| sequence.followers);
            if counted != found {
                return Err(IntegrityError::Followers { slot: Slot(index as u32), counted, found });
            }
        }
        self.check_running(self.sequences.len() - empty - waiting)?;
        let foreign = |(prompt, slot): &(&BlockHash, &Slot)| {
            self.get(**slot).is_none_or(|leader| leader.prompt() != Some(**prompt))
        };
        match self.leaders.iter().find(foreign) {
            Some((_, &slot)) => Err(IntegrityError::Leader(slot)),
            None => Ok(()),
        }
    }

    fn check_sequence(
        &self,
        slot: Slot,
        sequence: &Sequence,
        followers: &mut [u32],
    ) -> Result<(), IntegrityError> {
        let is_bare = sequence.blocks().is_empty() && sequence.computed() == 0;
        match sequence.state {
            State::Waiting if self.queue.at(sequence.rank) != Some(slot) => {
                Err(IntegrityError::NotQueued(slot))
            }
            State::Waiting if !is_bare => Err(IntegrityError::WaitsWithBlocks(slot)),
            State::Waiting => Ok(()),
            State::Running => {
                let room = sequence.blocks().len() * self.block_tokens;
                let is_within = sequence.computed() <= room.min(sequence.tokens().len());
                if is_within { Ok(()) } else { Err(IntegrityError::Computed(slot)) }
            }
            State::Joined(leader) => {
                let leads = self.get(leader).is_some_and(|leader| {
                    leader.state == State::Running
                        && leader.prompt().is_some_and(|own| sequence.prompt() == Some(own))
                });
                if !leads || !is_bare {
                    return Err(IntegrityError::Joined(slot));
                }
                followers[leader.0 as usize] += 1;
                Ok(())
            }
        }
    }

    /// In order of rank, each once.
    fn check_running(&self, running: usize) -> Result<(), IntegrityError> {
        if self.running.len() != running {
            return Err(IntegrityError::Running { listed: self.running.len(), running });
        }
        let mut last: Option<Rank> = None;
        for &slot in self.running {
            let sequence = self.get(slot).filter(|sequence| sequence.state != State::Waiting);
            let rank =
                sequence.map(|sequence| sequence.rank).filter(|&rank| last.is_none_or(|last| last < rank));
            last = Some(rank.ok_or(IntegrityError::RunningOrder(slot))?);
        }
        Ok(())
    }
}
