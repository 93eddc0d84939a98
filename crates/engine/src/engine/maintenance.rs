// SPDX-License-Identifier: Apache-2.0

//! What the engine reports and releases between steps: statistics, KV cache events, memory and the
//! integrity check.

use super::{Drafting, Engine};
use crate::draft::speculation::DraftStats;
use crate::integrity::RequestRecords;
use crate::kv::events::KvEventBatch;
use crate::schedule::integrity::IntegrityError;
use crate::stats::{EngineStats, KvCacheUsage};
use ops::{Backend, OpError};

impl<B: Backend> Engine<B> {
    /// The backend, for memory accounting.
    pub fn backend(&self) -> &B {
        &self.backend
    }

    pub fn stats(&self) -> EngineStats {
        let pool = self.scheduler.pool();
        EngineStats {
            running: self.scheduler.running_count(),
            waiting: self.scheduler.waiting_count(),
            kv_blocks_used: pool.used_blocks(),
            kv_blocks_free: pool.free_blocks(),
            kv_blocks_cached: pool.cached_blocks(),
            evictions: pool.evictions(),
            kv_events: pool.next_event_number(),
            forks: self.scheduler.fork_count(),
            drafts: self.drafting.as_ref().map_or_else(DraftStats::default, |now| now.speculation.stats()),
            ..self.stats
        }
    }

    /// Memory and fragmentation of the KV cache. It visits every running sequence, so it is not for
    /// every step.
    pub fn kv_cache_usage(&self) -> KvCacheUsage {
        let (token_capacity, unused_tokens) = self.scheduler.token_slots();
        let drafts = self.drafting.as_ref().map_or(0, |now| now.drafter.kv_bytes(&self.backend));
        KvCacheUsage { bytes: self.backend.kv_bytes(&self.kv) + drafts, token_capacity, unused_tokens }
    }

    /// KV cache events from number `from` on. Call it between steps.
    pub fn kv_events(&self, from: u64) -> KvEventBatch {
        self.scheduler.pool().events_since(from)
    }

    /// Releases KV memory behind the last block that is in use or cached, and buffers for logits.
    /// Call it between steps.
    pub fn release_memory(&mut self) -> Result<(), OpError> {
        self.rows.release_memory();
        self.deferred.release_memory();
        let blocks = self.scheduler.pool().in_use_end() as usize;
        if let Some(Drafting { drafter, .. }) = &mut self.drafting {
            drafter.trim(&mut self.backend, blocks)?;
        }
        self.backend.trim(&mut self.kv, blocks)
    }

    /// Evicts cached blocks that no request has used since the last call. Call it between steps.
    pub fn evict_unused_prefixes(&mut self) {
        self.scheduler.evict_unused_prefixes();
    }

    /// Clears the prefix cache. Returns `false` and does nothing while any request uses blocks.
    pub fn reset_prefix_cache(&mut self) -> bool {
        self.scheduler.reset_prefix_cache()
    }

    /// Checks block reference counts against all sequences, and all lists of requests and sequences
    /// against each other. It visits the whole pool: for an idle process.
    pub fn check_integrity(&self) -> Result<(), IntegrityError> {
        let Self { requests, sequence_ids, deadlines, admission, scheduler, .. } = self;
        scheduler.check_integrity()?;
        RequestRecords { requests, sequence_ids, deadlines, admission, scheduler }.check()
    }
}
