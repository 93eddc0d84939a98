// SPDX-License-Identifier: Apache-2.0

//! [`BeamGroup`]: the sequences of one beam search, and the rows that they have computed.
//!
//! 1. Beam `i` of the search is sequence `i` of the group.
//! 2. A sequence whose row is known waits for the others. It is paused meanwhile: others may take
//!    its blocks, so that the group cannot wait for blocks that it holds itself.

use crate::beam::search::{BeamSearch, RankedTokens, SearchStep};
use crate::sample::error::SampleError;
use crate::sample::logprobs::LogProbs;
use crate::schedule::sequence_id::SequenceId;

pub(crate) struct BeamGroup {
    search: BeamSearch,
    sequences: Vec<SequenceId>,
    /// Of each sequence: its row's most probable tokens, once it is computed.
    rows: Vec<Option<RankedTokens>>,
}

impl BeamGroup {
    pub(crate) fn new(search: BeamSearch, first: SequenceId) -> Self {
        Self { search, sequences: vec![first], rows: vec![None] }
    }

    pub(crate) fn sequences(&self) -> &[SequenceId] {
        &self.sequences
    }

    /// Takes the row of a sequence. Returns whether all rows are known now.
    pub(crate) fn take_row(&mut self, sequence_id: SequenceId, logits: &[f32]) -> Result<bool, SampleError> {
        let Some(index) = self.sequences.iter().position(|&member| member == sequence_id) else {
            panic!("{sequence_id:?} has a row for a beam search that it does not belong to")
        };
        self.rows[index] = Some(LogProbs::new(logits)?.top(self.search.tokens_wanted()));
        Ok(self.rows.iter().all(Option::is_some))
    }

    /// The next step of the search, once all rows are known.
    pub(crate) fn advance(&mut self) -> SearchStep {
        let rows: Vec<RankedTokens> = self.rows.iter_mut().filter_map(Option::take).collect();
        self.search.advance(&rows)
    }

    /// Tokens that each running beam has, and those of all beams so far.
    pub(crate) fn progress(&self) -> (usize, u64) {
        self.search.progress()
    }

    /// The sequences of the next step, in the order of its beams.
    pub(crate) fn continue_with(&mut self, sequences: Vec<SequenceId>) {
        assert_eq!(sequences.len(), self.search.running(), "each beam has a sequence");
        self.rows = vec![None; sequences.len()];
        self.sequences = sequences;
    }
}
