// SPDX-License-Identifier: Apache-2.0

//! [`EmbeddingState`]: pools the rows of a sequence into one vector.
//!
//! 1. Rows are added in order of position, in f64. So the vector does not depend on how the prompt
//!    was divided into steps (I5).
//! 2. A row that is computed again after a preemption is not added twice.

use crate::request::input::EmbedRequest;
use crate::sample::error::SampleError;
use crate::schedule::sequence::SequenceKind;
use models::{OutputKind, Pooling};

pub(crate) struct EmbeddingState {
    pooling: Pooling,
    /// Of the rows so far.
    sum: Vec<f64>,
    /// Next position to add.
    next: usize,
}

/// How the scheduler computes a sequence with this pooling.
pub(crate) fn sequence_kind(pooling: Pooling) -> SequenceKind {
    match pooling {
        Pooling::Mean => SequenceKind::EmbedAll,
        Pooling::Last | Pooling::Rank => SequenceKind::EmbedLast,
    }
}

impl EmbeddingState {
    pub(crate) fn new(request: &EmbedRequest) -> Self {
        Self { pooling: request.pooling, sum: Vec::new(), next: 0 }
    }

    pub(crate) fn output_kind(&self) -> OutputKind {
        match self.pooling {
            Pooling::Mean | Pooling::Last => OutputKind::HiddenState,
            Pooling::Rank => OutputKind::Labels,
        }
    }

    /// Adds the row of a position. Returns the vector with the last row.
    pub(crate) fn add(
        &mut self,
        position: usize,
        tokens: usize,
        row: &[f32],
    ) -> Result<Option<Vec<f32>>, SampleError> {
        if let Some(index) = row.iter().position(|value| !value.is_finite()) {
            return Err(SampleError::HiddenState { index });
        }
        let is_last = position + 1 == tokens;
        if self.pooling != Pooling::Mean {
            return Ok(is_last.then(|| row.to_vec()));
        }
        if position >= self.next {
            self.next = position + 1;
            self.sum.resize(row.len(), 0.0);
            self.sum.iter_mut().zip(row).for_each(|(sum, &value)| *sum += f64::from(value));
        }
        Ok(is_last.then(|| self.sum.iter().map(|sum| (sum / tokens as f64) as f32).collect()))
    }
}
