// SPDX-License-Identifier: Apache-2.0

//! What the registry's routing policy hears of the workers' prefix caches.

use super::WorkerRegistry;
use crate::routing::{KvCacheChange, KvEventFeed, WorkerId};

/// Changes of a prefix cache that are applied under one lock: some 60 us.
const KV_CHANGES_AT_ONCE: usize = 256;

impl WorkerRegistry {
    /// Applies changes of a worker's prefix cache. The lock is free between parts, so that a worker
    /// with many changes delays no request.
    pub(crate) fn apply_kv_changes(&self, id: WorkerId, changes: &[KvCacheChange]) {
        for part in changes.chunks(KV_CHANGES_AT_ONCE) {
            self.lock().routing.apply_kv_changes(id, part);
        }
    }

    /// Notes that all changes of a worker's prefix cache have been applied.
    pub(crate) fn follow_kv_changes(&self, id: WorkerId) {
        self.lock().routing.set_kv_feed(id, KvEventFeed::Live);
    }

    /// Notes that no more changes of a worker's prefix cache arrive.
    pub(crate) fn lose_kv_changes(&self, id: WorkerId) {
        self.lock().routing.set_kv_feed(id, KvEventFeed::Lost(self.now()));
    }
}
