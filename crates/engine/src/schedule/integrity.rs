// SPDX-License-Identifier: Apache-2.0

//! Integrity check of the scheduler: between two steps each sequence is in the lists that its state
//! requires, and in no others. The check visits every sequence; it is for tests and for an idle
//! process.

use crate::kv::block_pool::PoolIntegrityError;
use crate::schedule::sequence::{Sequence, SequenceState};
use crate::schedule::sequence_id::SequenceId;
use crate::schedule::waiting_queue::{QueueIntegrityError, ServiceRank, WaitingQueue};
use prefix::BlockHash;
use std::collections::HashMap;

/// A broken invariant of the engine: a bug, never a consequence of input.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum IntegrityError {
    #[error(transparent)]
    Pool(#[from] PoolIntegrityError),
    #[error("{vacant} sequence ids are listed as vacant, {empty} are")]
    Vacant { vacant: usize, empty: usize },
    #[error(transparent)]
    QueueOrder(#[from] QueueIntegrityError),
    #[error("the waiting queue holds {queued} sequences, {waiting} are in state Waiting and not paused")]
    WaitingCount { queued: usize, waiting: usize },
    #[error("{counted} paused sequences are counted as waiting, {found} are")]
    PausedCount { counted: usize, found: usize },
    #[error("{0:?} waits and is not paused, but is not in the waiting queue at its rank")]
    NotQueued(SequenceId),
    #[error("{0:?} waits but has blocks or computed tokens")]
    WaitsWithBlocks(SequenceId),
    #[error("{0:?} has more computed tokens than its blocks hold, or than tokens")]
    Computed(SequenceId),
    #[error("{listed} sequences are listed as running, {running} are")]
    Running { listed: usize, running: usize },
    #[error("{0:?} is listed as running but is not, or is out of order")]
    RunningOrder(SequenceId),
    #[error("{0:?} awaits a fork but its leader computes no equal prompt, or it holds blocks itself")]
    Joined(SequenceId),
    #[error("{sequence_id:?} counts {counted} followers, {found} await its fork")]
    Followers { sequence_id: SequenceId, counted: u32, found: u32 },
    #[error("{0:?} is listed as leader of a prompt that is not its own")]
    Leader(SequenceId),
    #[error("{0:?} has a request without a sequence, or a sequence without a request")]
    RequestRecord(SequenceId),
    #[error("{named} request ids are known, {live} requests exist")]
    Named { named: usize, live: usize },
    #[error("{listed} deadlines are listed, {live} requests have one")]
    Deadlines { listed: usize, live: usize },
    #[error("admission control counts {counted} waiting requests, {found} wait")]
    QueueLength { counted: usize, found: usize },
    #[error("admission control counts {counted} waiting requests of tenant {tenant}, {found} wait")]
    Admission { tenant: u64, counted: usize, found: usize },
}

/// The scheduler's fields that the check compares with each other.
pub(crate) struct SchedulerParts<'a> {
    pub(crate) sequences: &'a [Option<Sequence>],
    pub(crate) vacant_ids: &'a [SequenceId],
    pub(crate) waiting: &'a WaitingQueue,
    pub(crate) paused_waiting: usize,
    pub(crate) running: &'a [SequenceId],
    pub(crate) prompt_leaders: &'a HashMap<BlockHash, SequenceId>,
    pub(crate) block_tokens: usize,
}

impl SchedulerParts<'_> {
    fn get(&self, sequence_id: SequenceId) -> Option<&Sequence> {
        self.sequences.get(sequence_id.index())?.as_ref()
    }

    pub(crate) fn check(&self) -> Result<(), IntegrityError> {
        let empty = self.sequences.iter().filter(|sequence| sequence.is_none()).count();
        if empty != self.vacant_ids.len()
            || self.vacant_ids.iter().any(|&sequence_id| self.get(sequence_id).is_some())
        {
            return Err(IntegrityError::Vacant { vacant: self.vacant_ids.len(), empty });
        }
        self.waiting.check_integrity()?;
        let mut followers = vec![0; self.sequences.len()];
        let (mut waiting, mut paused) = (0, 0);
        for (index, sequence) in self.sequences.iter().enumerate() {
            if let Some(sequence) = sequence {
                let waits = sequence.state == SequenceState::Waiting;
                waiting += usize::from(waits && !sequence.is_paused);
                paused += usize::from(waits && sequence.is_paused);
                self.check_sequence(SequenceId(index as u32), sequence, &mut followers)?;
            }
        }
        if waiting != self.waiting.len() {
            return Err(IntegrityError::WaitingCount { queued: self.waiting.len(), waiting });
        }
        if paused != self.paused_waiting {
            return Err(IntegrityError::PausedCount { counted: self.paused_waiting, found: paused });
        }
        for (index, (sequence, &found)) in self.sequences.iter().zip(&followers).enumerate() {
            let counted = sequence.as_ref().map_or(0, |sequence| sequence.followers);
            if counted != found {
                return Err(IntegrityError::Followers {
                    sequence_id: SequenceId(index as u32),
                    counted,
                    found,
                });
            }
        }
        self.check_running(self.sequences.len() - empty - waiting - paused)?;
        let foreign = |(prompt, sequence_id): &(&BlockHash, &SequenceId)| {
            self.get(**sequence_id).is_none_or(|leader| leader.prompt_hash() != Some(**prompt))
        };
        match self.prompt_leaders.iter().find(foreign) {
            Some((_, &sequence_id)) => Err(IntegrityError::Leader(sequence_id)),
            None => Ok(()),
        }
    }

    fn check_sequence(
        &self,
        sequence_id: SequenceId,
        sequence: &Sequence,
        followers: &mut [u32],
    ) -> Result<(), IntegrityError> {
        let is_bare = sequence.blocks().is_empty() && sequence.computed() == 0;
        match sequence.state {
            SequenceState::Waiting
                if !sequence.is_paused && self.waiting.at(sequence.rank) != Some(sequence_id) =>
            {
                Err(IntegrityError::NotQueued(sequence_id))
            }
            SequenceState::Waiting if !is_bare => Err(IntegrityError::WaitsWithBlocks(sequence_id)),
            SequenceState::Waiting => Ok(()),
            SequenceState::Running => {
                let room = sequence.blocks().len() * self.block_tokens;
                let is_within = sequence.computed() <= room.min(sequence.tokens().len());
                if is_within { Ok(()) } else { Err(IntegrityError::Computed(sequence_id)) }
            }
            SequenceState::AwaitingFork(leader) => {
                let leads = self.get(leader).is_some_and(|leader| {
                    leader.state == SequenceState::Running
                        && leader.prompt_hash().is_some_and(|own| sequence.prompt_hash() == Some(own))
                });
                if !leads || !is_bare {
                    return Err(IntegrityError::Joined(sequence_id));
                }
                followers[leader.index()] += 1;
                Ok(())
            }
        }
    }

    /// Checks that `running` lists each running sequence once, in order of rank.
    fn check_running(&self, running: usize) -> Result<(), IntegrityError> {
        if self.running.len() != running {
            return Err(IntegrityError::Running { listed: self.running.len(), running });
        }
        let mut last: Option<ServiceRank> = None;
        for &sequence_id in self.running {
            let sequence = self.get(sequence_id).filter(|sequence| sequence.state != SequenceState::Waiting);
            let rank =
                sequence.map(|sequence| sequence.rank).filter(|&rank| last.is_none_or(|last| last < rank));
            last = Some(rank.ok_or(IntegrityError::RunningOrder(sequence_id))?);
        }
        Ok(())
    }
}
