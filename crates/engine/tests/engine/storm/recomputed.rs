// SPDX-License-Identifier: Apache-2.0

//! Checks that the scheduler does not compute cached blocks again, nor blocks that another sequence
//! in the same step computes. The pool's events tell which blocks are cached.

use super::content::reads;
use super::{Storm, StormRequest};
use crate::kv::block_key::BlockKey;
use crate::kv::block_pool::BlockPool;
use crate::kv::events::{FULL_SNAPSHOT, KvCacheEvent};
use crate::kv::group::KvGroupKind;
use crate::schedule::sequence_id::SequenceId;
use crate::schedule::step_plan::ScheduledChunk;
use prefix::BlockHash;
use std::collections::HashSet;

/// Keys of the cached blocks before a step is planned, according to the pool's events.
#[derive(Default)]
pub(super) struct CachedKeys {
    next: u64,
    keys: HashSet<BlockKey>,
}

impl CachedKeys {
    pub(super) fn read_events(&mut self, pool: &BlockPool) {
        let update = pool.events_since(self.next);
        for event in update.events {
            match event {
                KvCacheEvent::BlockStored(key) => drop(self.keys.insert(key)),
                KvCacheEvent::BlockRemoved(key) => drop(self.keys.remove(&key)),
                KvCacheEvent::AllBlocksCleared => self.keys.clear(),
            }
        }
        self.next = update.next;
    }

    /// Starts over, since the pool was replaced.
    pub(super) fn forget(&mut self) {
        *self = Self { next: FULL_SNAPSHOT, keys: HashSet::new() };
    }

    /// Keys that stayed cached throughout planning. `None` if more happened than the event log
    /// holds.
    fn kept(&self, pool: &BlockPool) -> Option<HashSet<BlockKey>> {
        let mut kept = self.keys.clone();
        for event in pool.events_since(self.next).events {
            match event {
                KvCacheEvent::BlockStored(_) => {}
                KvCacheEvent::BlockRemoved(key) => drop(kept.remove(&key)),
                KvCacheEvent::AllBlocksCleared => return None,
            }
        }
        Some(kept)
    }
}

impl Storm {
    /// Checks the step that was just planned. Each admitted sequence starts behind its longest
    /// cached prefix, and not with a block that an earlier sequence is about to compute.
    pub(super) fn check_nothing_is_recomputed(&mut self) {
        if !self.limits.prefix_cache {
            return;
        }
        let kept = self.cached.kept(self.scheduler.pool());
        for &ScheduledChunk { sequence_id, start, .. } in &self.scheduler.plan().chunks {
            let live = &self.live[&sequence_id];
            if !live.admitted || !live.kind.uses_prefix_cache() {
                continue;
            }
            let found = start / self.limits.block_tokens;
            if let Some(kept) = &kept {
                let cached = self.cached_blocks(live, kept);
                assert!(found >= cached, "{cached} cached blocks, and from block {found} on is recomputed");
                self.summary.found += cached;
            }
            let is_promoted = self.scheduler.sequence(sequence_id).unwrap().rank.is_promoted();
            assert!(
                is_promoted || !self.is_computed_before(sequence_id, found),
                "two compute block {found} at once"
            );
        }
    }

    /// Blocks of the longest cached prefix from which every group can continue. At least one token
    /// is left to compute.
    fn cached_blocks(&self, live: &StormRequest, names: &HashSet<BlockKey>) -> usize {
        let bt = self.limits.block_tokens;
        let hashes: Vec<BlockHash> =
            prefix::block_hashes(&self.scopes[live.scope], &live.tokens, bt).collect();
        let is_cached = |blocks: &usize| {
            self.groups.iter().enumerate().all(|(group, &kind): (usize, &KvGroupKind)| {
                let mut read = reads(kind, blocks * bt, 0).map(|position| position / bt);
                read.all(|block| names.contains(&BlockKey { hash: hashes[block], group: group as u8 }))
            })
        };
        (0..=(live.tokens.len() - 1) / bt).rev().find(is_cached).unwrap_or(0)
    }

    /// Whether a prompt before `sequence_id` in rank has rows in this step, but completes this
    /// block of the same text only later.
    fn is_computed_before(&self, sequence_id: SequenceId, block: usize) -> bool {
        let end = (block + 1) * self.limits.block_tokens;
        self.prompts_before(sequence_id)
            .any(|(chunk, common)| chunk.start + chunk.rows < end && end <= common)
    }

    /// Whether a prompt in progress before `sequence_id` in rank is to compute full blocks that
    /// both have.
    pub(super) fn follows(&self, sequence_id: SequenceId) -> bool {
        let bt = self.limits.block_tokens;
        self.prompts_before(sequence_id).any(|(chunk, common)| chunk.start < common / bt * bt)
    }

    /// Chunks of prompts before `sequence_id` in rank, each with the number of tokens that both
    /// begin with.
    fn prompts_before(&self, sequence_id: SequenceId) -> impl Iterator<Item = (&ScheduledChunk, usize)> {
        let rank = |sequence_id: SequenceId| self.scheduler.sequence(sequence_id).unwrap().rank;
        let keys = &self.live[&sequence_id].keys;
        // Only earlier chunks count: a sequence that was planned later may have been promoted
        // since.
        let placed =
            self.scheduler.plan().chunks.iter().take_while(move |chunk| chunk.sequence_id != sequence_id);
        let chunks = placed.filter(move |chunk| {
            self.limits.prefix_cache
                && self.live[&chunk.sequence_id].kind.uses_prefix_cache()
                && rank(chunk.sequence_id) < rank(sequence_id)
        });
        // Each key is a hash of all tokens up to it.
        chunks.map(move |chunk| {
            let theirs = &self.live[&chunk.sequence_id].keys;
            (chunk, keys.iter().zip(theirs).take_while(|(ours, theirs)| ours == theirs).count())
        })
    }
}
