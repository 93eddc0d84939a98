// SPDX-License-Identifier: Apache-2.0

//! What the router knows of one worker's prefix cache.
//!
//! 1. The blocks that the worker's events name. If the events stop, they count for
//!    [`ESTIMATE_AGE_MAX`] longer.
//! 2. The prompts of streams that run there: the worker computes them, or holds their blocks. Those
//!    that ended a moment ago count too, because their last events may be under way.
//! 3. While no events arrive, also the prompts that were placed there ([`PlacedPrompts`]).

use std::collections::{BTreeMap, VecDeque};
use std::time::Duration;

use super::placed_prompts::PlacedPrompts;
use super::stored_blocks::{KvCacheChange, StoredBlocks};
use super::{ESTIMATE_AGE_MAX, PrefixHash, PromptPrefix, RouterTime};

/// An event arrives within a step of the worker.
const ENDED_AGE_MAX: Duration = Duration::from_secs(2);
/// Ended prompts that are kept, and their blocks: 512 KiB.
const ENDED_MAX: usize = 128;
const ENDED_BLOCKS_MAX: usize = 1 << 16;

/// Whether the events of a worker arrive.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum KvEventFeed {
    /// Blocks of an earlier feed are those of this time.
    Lost(RouterTime),
    Live,
}

#[derive(Debug)]
pub(super) struct WorkerPrefixes {
    feed: KvEventFeed,
    stored: StoredBlocks,
    /// By number of the placement.
    running: BTreeMap<u64, PromptPrefix>,
    ended: VecDeque<(RouterTime, PromptPrefix)>,
    placed: PlacedPrompts,
}

impl WorkerPrefixes {
    pub(super) fn new(kv_tokens: u64, now: RouterTime) -> Self {
        Self {
            feed: KvEventFeed::Lost(now),
            stored: StoredBlocks::default(),
            running: BTreeMap::new(),
            ended: VecDeque::new(),
            placed: PlacedPrompts::new(kv_tokens),
        }
    }

    pub(super) fn apply(&mut self, changes: &[KvCacheChange]) {
        changes.iter().for_each(|&change| self.stored.apply(change));
    }

    pub(super) fn set_feed(&mut self, feed: KvEventFeed) {
        if feed == KvEventFeed::Live {
            self.placed.clear();
        }
        self.feed = feed;
    }

    pub(super) fn is_live(&self) -> bool {
        self.feed == KvEventFeed::Live
    }

    /// Tokens of the prompt that the worker has or computes.
    pub(super) fn cached_tokens(&self, prompt: &PromptPrefix, now: RouterTime) -> u64 {
        let is_known = match self.feed {
            KvEventFeed::Live => true,
            KvEventFeed::Lost(at) => now.saturating_sub(at) <= ESTIMATE_AGE_MAX,
        };
        let stored = if is_known { self.stored.cached_tokens(prompt) } else { 0 };
        let running = self.running.values();
        let ended = self.ended.iter().filter(|(at, _)| now.saturating_sub(*at) <= ENDED_AGE_MAX);
        let prompts = running.chain(ended.map(|(_, prompt)| prompt));
        let common = prompts.map(|other| prompt.common_tokens(other)).max().unwrap_or(0);
        stored.max(common).max(self.placed.cached_tokens(prompt, now))
    }

    pub(super) fn begin_stream(&mut self, prompt: &PromptPrefix, placement: u64, now: RouterTime) {
        if !self.is_live() {
            self.placed.insert(prompt, placement, now);
        }
        if !prompt.hashes().is_empty() {
            self.running.insert(placement, prompt.clone());
        }
    }

    /// `is_computed`: the worker has computed the prompt.
    pub(super) fn end_stream(&mut self, placement: u64, is_computed: bool, now: RouterTime) {
        let Some(prompt) = self.running.remove(&placement).filter(|_| is_computed) else { return };
        self.ended.push_back((now, prompt));
        while self.ended.len() > ENDED_MAX
            || self.ended_blocks() > ENDED_BLOCKS_MAX
            || self.ended.front().is_some_and(|(at, _)| now.saturating_sub(*at) > ENDED_AGE_MAX)
        {
            self.ended.pop_front();
        }
    }

    fn ended_blocks(&self) -> usize {
        self.ended.iter().map(|(_, prompt)| prompt.hashes().len()).sum()
    }

    /// Memory that depends on what the worker and clients send. The running prompts are part of
    /// their requests.
    pub(super) fn bytes(&self) -> u64 {
        let ended = (self.ended_blocks() * size_of::<PrefixHash>()) as u64;
        self.stored.bytes() + self.placed.bytes() + ended
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const NOW: RouterTime = Duration::ZERO;

    fn prompt(seed: u32) -> PromptPrefix {
        PromptPrefix::new("", &[seed; 640])
    }

    fn store(prefixes: &mut WorkerPrefixes, prompt: &PromptPrefix) {
        let stored = |&block| KvCacheChange::Stored { block, group: 0 };
        prefixes.apply(&prompt.hashes().iter().map(stored).collect::<Vec<_>>());
    }

    #[test]
    fn with_events_the_worker_has_what_they_name_and_what_it_computes() {
        let mut prefixes = WorkerPrefixes::new(1 << 20, NOW);
        prefixes.set_feed(KvEventFeed::Live);
        store(&mut prefixes, &prompt(1));
        prefixes.begin_stream(&prompt(2), 1, NOW);
        let known =
            |prefixes: &WorkerPrefixes, now| [1, 2, 3].map(|seed| prefixes.cached_tokens(&prompt(seed), now));
        assert_eq!(known(&prefixes, NOW), [640, 640, 0]);
        prefixes.end_stream(1, true, NOW);
        assert_eq!(known(&prefixes, NOW), [640, 640, 0], "its events may be under way");
        prefixes.apply(&[KvCacheChange::Cleared]);
        assert_eq!(known(&prefixes, 2 * ENDED_AGE_MAX), [0; 3], "the events name none of them");
        prefixes.begin_stream(&prompt(3), 2, NOW);
        prefixes.end_stream(2, false, NOW);
        assert_eq!(known(&prefixes, NOW)[2], 0, "it was not computed");
    }

    #[test]
    fn without_events_placed_prompts_count_and_old_knowledge_does_not() {
        let mut prefixes = WorkerPrefixes::new(1 << 20, NOW);
        prefixes.begin_stream(&prompt(1), 1, NOW);
        prefixes.end_stream(1, true, NOW);
        assert_eq!(prefixes.cached_tokens(&prompt(1), ESTIMATE_AGE_MAX), 640);
        prefixes.set_feed(KvEventFeed::Live);
        assert_eq!(prefixes.cached_tokens(&prompt(1), ESTIMATE_AGE_MAX), 0, "the events name no block");
        store(&mut prefixes, &prompt(1));
        let lost = Duration::from_secs(1000);
        prefixes.set_feed(KvEventFeed::Lost(lost));
        prefixes.begin_stream(&prompt(2), 2, lost);
        prefixes.end_stream(2, true, lost);
        let known = |now| [1, 2].map(|seed| prefixes.cached_tokens(&prompt(seed), now));
        assert_eq!(known(lost + ESTIMATE_AGE_MAX), [640, 640]);
        assert_eq!(known(lost + 2 * ESTIMATE_AGE_MAX), [0, 0]);
    }

    #[test]
    fn ended_prompts_are_bounded() {
        let mut prefixes = WorkerPrefixes::new(0, NOW);
        for placement in 0..1000 {
            prefixes.begin_stream(&prompt(placement as u32), placement, NOW);
            prefixes.end_stream(placement, true, NOW);
        }
        assert_eq!((prefixes.ended.len(), prefixes.bytes()), (ENDED_MAX, (ENDED_MAX * 40 * 8) as u64));
        let long = PromptPrefix::new("", &[1; ENDED_BLOCKS_MAX * 16]);
        for placement in 1000..1003 {
            prefixes.begin_stream(&long, placement, NOW);
            prefixes.end_stream(placement, true, NOW);
        }
        assert_eq!(prefixes.ended.len(), 1, "only the last long one");
    }
}
