// SPDX-License-Identifier: Apache-2.0

//! The interface of drafters.

use crate::draft::depth::DraftingCost;
use crate::draft::draft_tokens::DraftTokens;
use crate::schedule::scheduler::Scheduler;
use crate::schedule::sequence_id::SequenceId;
use ops::{Backend, KvLayer, KvLayout, KvType, OpError};

/// A sequence that may have up to `depth` draft tokens. Its blocks have space for them.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct DraftRequest {
    pub sequence_id: SequenceId,
    pub depth: usize,
    /// Index of the sequence's chunk in the plan.
    pub(crate) chunk: usize,
}

/// Proposes draft tokens. The proposals affect speed only, so any proposal is allowed.
pub trait Drafter<B: Backend>: Send {
    /// KV layers that the drafter needs for each token, from the same KV budget.
    fn kv_layers(&self, _: KvType) -> Vec<KvLayer> {
        Vec::new()
    }

    /// Called once with the layout of the drafter's cache. The drafter uses the model's blocks.
    fn start(&mut self, _: &mut B, _: &KvLayout) -> Result<(), OpError> {
        Ok(())
    }

    /// Fills the empty `drafts[i]` with up to `wanted[i].depth` tokens. After an error the step
    /// runs without drafts.
    fn propose(
        &mut self,
        backend: &mut B,
        scheduler: &Scheduler,
        wanted: &[DraftRequest],
        drafts: &mut [DraftTokens],
    ) -> Result<DraftingCost, OpError>;

    /// Memory of the drafter's cache now.
    fn kv_bytes(&self, _: &B) -> u64 {
        0
    }

    /// Releases memory of blocks from number `blocks` on, none of which is in use or cached.
    fn trim(&mut self, _: &mut B, _blocks: usize) -> Result<(), OpError> {
        Ok(())
    }

    /// The sequence has ended.
    fn forget(&mut self, sequence_id: SequenceId);

    /// Cost of drafting one token as a share of the model's step.
    fn share(&self) -> f64 {
        0.0
    }
}
