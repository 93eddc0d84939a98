// SPDX-License-Identifier: Apache-2.0

//! The draft tokens of one sequence.

/// Most draft tokens of a sequence in a step. Each further token gains less, and every stream keeps
/// space for that many outputs of a step.
pub const DRAFT_DEPTH_MAX: usize = 16;

/// The draft tokens of one sequence.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct DraftTokens {
    tokens: [u32; DRAFT_DEPTH_MAX],
    len: usize,
}

impl DraftTokens {
    /// Drops tokens beyond [`DRAFT_DEPTH_MAX`].
    pub fn push(&mut self, token: u32) {
        if let Some(place) = self.tokens.get_mut(self.len) {
            *place = token;
            self.len += 1;
        }
    }

    pub fn tokens(&self) -> &[u32] {
        &self.tokens[..self.len]
    }

    pub(super) fn truncate(&mut self, len: usize) {
        self.len = self.len.min(len);
    }
}
