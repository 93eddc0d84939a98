//! What could be found is not computed: against what the pool's events tell, and the rows of others in the same step.

use super::content::reads;
use super::{Live, Storm};
use crate::kv::block_key::Name;
use crate::kv::block_pool::BlockPool;
use crate::kv::events::{Event, NOTHING_KNOWN};
use crate::kv::group::GroupKind;
use crate::schedule::sequence::Kind;
use crate::schedule::sequence_id::Slot;
use crate::schedule::step_plan::Chunk;
use prefix::BlockHash;
use std::collections::HashSet;

/// What can be found, as told before a step is planned.
#[derive(Default)]
pub(super) struct Findable {
    next: u64,
    names: HashSet<Name>,
}

impl Findable {
    pub(super) fn look(&mut self, pool: &BlockPool) {
        let update = pool.events_since(self.next);
        for event in update.events {
            match event {
                Event::Stored(name) => drop(self.names.insert(name)),
                Event::Removed(name) => drop(self.names.remove(&name)),
                Event::Cleared => self.names.clear(),
            }
        }
        self.next = update.next;
    }

    /// The pool is another one.
    pub(super) fn forget(&mut self) {
        *self = Self { next: NOTHING_KNOWN, names: HashSet::new() };
    }

    /// What could be found all through the planning; unknown, if more happened than the log holds.
    fn kept(&self, pool: &BlockPool) -> Option<HashSet<Name>> {
        let mut kept = self.names.clone();
        for event in pool.events_since(self.next).events {
            match event {
                Event::Stored(_) => {}
                Event::Removed(name) => drop(kept.remove(&name)),
                Event::Cleared => return None,
            }
        }
        Some(kept)
    }
}

impl Storm {
    /// Of the step that was just planned: whoever was admitted begins behind the longest prefix that could be found, and
    /// not with a block that one before it is about to compute.
    pub(super) fn check_nothing_is_recomputed(&mut self) {
        if !self.limits.prefix_cache {
            return;
        }
        let kept = self.findable.kept(self.scheduler.pool());
        for &Chunk { slot, start, .. } in &self.scheduler.plan().chunks {
            let live = &self.live[&slot];
            if !live.admitted || live.kind == Kind::Score {
                continue;
            }
            let found = start / self.limits.block_tokens;
            if let Some(kept) = &kept {
                let findable = self.findable_blocks(live, kept);
                assert!(
                    found >= findable,
                    "{findable} cached blocks, and from block {found} on is recomputed"
                );
                self.summary.found += findable;
            }
            let is_aged = self.scheduler.sequence(slot).unwrap().rank.is_aged();
            assert!(is_aged || !self.is_computed_before(slot, found), "two compute block {found} at once");
        }
    }

    /// Blocks of the longest prefix from which every group can go on, with at least one token left to compute.
    fn findable_blocks(&self, live: &Live, names: &HashSet<Name>) -> usize {
        let bt = self.limits.block_tokens;
        let hashes: Vec<BlockHash> =
            prefix::block_hashes(&self.scopes[live.scope], &live.tokens, bt).collect();
        let is_findable = |blocks: &usize| {
            self.groups.iter().enumerate().all(|(group, &kind): (usize, &GroupKind)| {
                let mut read = reads(kind, blocks * bt, 0).map(|position| position / bt);
                read.all(|block| names.contains(&Name { hash: hashes[block], group: group as u8 }))
            })
        };
        (0..=(live.tokens.len() - 1) / bt).rev().find(is_findable).unwrap_or(0)
    }

    /// One before it in rank has rows in this step, has not computed that block of the same text, and will.
    fn is_computed_before(&self, slot: Slot, block: usize) -> bool {
        let end = (block + 1) * self.limits.block_tokens;
        self.prompts_before(slot).any(|(chunk, common)| chunk.start + chunk.rows < end && end <= common)
    }

    /// A prompt in progress before this one in rank is to compute full blocks that both have.
    pub(super) fn follows(&self, slot: Slot) -> bool {
        let bt = self.limits.block_tokens;
        self.prompts_before(slot).any(|(chunk, common)| chunk.start < common / bt * bt)
    }

    /// Chunks of prompts before `slot` in rank, and how many tokens both begin with.
    fn prompts_before(&self, slot: Slot) -> impl Iterator<Item = (&Chunk, usize)> {
        let rank = |slot: Slot| self.scheduler.sequence(slot).unwrap().rank;
        let keys = &self.live[&slot].keys;
        // Whoever was placed later may have gone by age since.
        let placed = self.scheduler.plan().chunks.iter().take_while(move |chunk| chunk.slot != slot);
        let chunks = placed.filter(move |chunk| {
            self.limits.prefix_cache
                && self.live[&chunk.slot].kind == Kind::Generate
                && rank(chunk.slot) < rank(slot)
        });
        // Each key stands for all tokens up to it.
        chunks.map(move |chunk| {
            let theirs = &self.live[&chunk.slot].keys;
            (chunk, keys.iter().zip(theirs).take_while(|(ours, theirs)| ours == theirs).count())
        })
    }
}
