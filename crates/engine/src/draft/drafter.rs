//! What proposes draft tokens.

use crate::draft::depth::DraftingCost;
use crate::draft::draft_tokens::DraftTokens;
use crate::schedule::scheduler::Scheduler;
use crate::schedule::sequence_id::SequenceId;
use ops::{Backend, KvLayer, KvLayout, KvType, OpError};

/// A sequence for which up to `depth` tokens are wanted. Its blocks have room for them.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct DraftRequest {
    pub sequence_id: SequenceId,
    pub depth: usize,
    /// Index of its chunk in the plan.
    pub(crate) chunk: usize,
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
        wanted: &[DraftRequest],
        drafts: &mut [DraftTokens],
    ) -> Result<DraftingCost, OpError>;

    /// Memory that its share of the cache takes now.
    fn kv_bytes(&self, _: &B) -> u64 {
        0
    }

    /// Nothing is held or can be found in blocks from number `blocks` on: their memory may go.
    fn trim(&mut self, _: &mut B, _blocks: usize) -> Result<(), OpError> {
        Ok(())
    }

    /// The sequence in this slot has ended.
    fn forget(&mut self, sequence_id: SequenceId);

    /// What drafting one token costs, as a share of a step of the model itself.
    fn share(&self) -> f64 {
        0.0
    }
}
