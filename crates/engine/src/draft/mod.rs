//! Drafts: guesses at a sequence's next tokens, computed behind its last token in the same step and kept as far as they
//! turn out right.
//!
//! A step computes the rows `[last token, d1, .., dD]`. The sampler draws from the first row as it always does; if what
//! it draws is `d1`, the second row holds the logits that the next step would have computed, and so on. Whatever is
//! drawn is put out, so a wrong draft costs rows and never changes a token (invariant I5): random numbers are keyed by
//! position, kernels give a row the same bits in any company, and the keys of wrong rows are overwritten before
//! anything reads them.
//!
//! A [`Drafter`] says what may follow, `depth` how far it is worth guessing, `speculation` joins them with the plan.

mod depth;
mod lookup;
mod model;
mod speculation;

use crate::scheduler::{Scheduler, Slot};
use ops::{Backend, KvLayer, KvLayout, KvType, OpError};

pub use depth::{Acceptance, StepCost, Work, depth};
pub use lookup::Lookup;
pub use model::DraftModel;
pub use speculation::{DraftStats, Speculation};

/// Most tokens that are drafted for one sequence in a step: the gain of one more falls with each, and every stream keeps
/// room for that many outputs of a step.
pub const DRAFT_DEPTH_MAX: usize = 16;

/// A sequence for which up to `depth` tokens are wanted. Its blocks have room for them.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Wanted {
    pub slot: Slot,
    pub depth: usize,
    /// Index of its chunk in the plan.
    pub(crate) chunk: usize,
}

/// Drafted tokens of one sequence.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Draft {
    tokens: [u32; DRAFT_DEPTH_MAX],
    len: usize,
}

impl Draft {
    /// Tokens beyond [`DRAFT_DEPTH_MAX`] are dropped.
    pub fn push(&mut self, token: u32) {
        if let Some(place) = self.tokens.get_mut(self.len) {
            *place = token;
            self.len += 1;
        }
    }

    pub fn tokens(&self) -> &[u32] {
        &self.tokens[..self.len]
    }

    fn truncate(&mut self, len: usize) {
        self.len = self.len.min(len);
    }
}

/// Guesses tokens. What it guesses decides speed only, so it may be wrong in any way.
pub trait Drafter<B: Backend>: Send {
    /// What it keeps for each token beside the model's own keys and values, from the same budget.
    fn kv_layers(&self, _: KvType) -> Vec<KvLayer> {
        Vec::new()
    }

    /// Called once, with its share of the cache: the blocks are the model's.
    fn start(&mut self, _: &mut B, _: &KvLayout) -> Result<(), OpError> {
        Ok(())
    }

    /// Fills `drafts[i]`, empty before, with up to `wanted[i].depth` tokens. An error loses this step's drafts only.
    fn propose(
        &mut self,
        backend: &mut B,
        scheduler: &Scheduler,
        wanted: &[Wanted],
        drafts: &mut [Draft],
    ) -> Result<Work, OpError>;

    /// Memory that its share of the cache takes now.
    fn kv_bytes(&self, _: &B) -> u64 {
        0
    }

    /// Nothing is held or can be found in blocks from number `blocks` on: their memory may go.
    fn trim(&mut self, _: &mut B, _blocks: usize) -> Result<(), OpError> {
        Ok(())
    }

    /// The sequence in this slot has ended.
    fn forget(&mut self, slot: Slot);

    /// What drafting one token costs, as a share of a step of the model itself.
    fn share(&self) -> f64 {
        0.0
    }
}
