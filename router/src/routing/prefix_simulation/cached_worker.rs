// SPDX-License-Identifier: Apache-2.0

//! A worker with a finite prefix cache: seats, prefill in order of arrival, decode before prefill,
//! eviction of the least recently used block, ends of prompts first.

use std::collections::{BTreeMap, HashMap, VecDeque};

use crate::routing::prompt_prefix::PREFIX_BLOCK_TOKENS;
use crate::routing::{KvCacheChange, PrefixHash, PromptPrefix};

/// Rows that a worker computes in a tick: 2,000 tokens a second.
const ROWS_PER_TICK: u64 = 40;

/// A stream as its worker sees it.
pub(super) struct CachedStream {
    pub(super) number: u64,
    /// Of prompt and output: what the cache holds when the stream has ended.
    pub(super) blocks: PromptPrefix,
    pub(super) prompt_tokens: u64,
    pub(super) output_tokens: u64,
}

struct Running {
    stream: CachedStream,
    computed: u64,
    output: u64,
    /// Blocks that the stream holds, in order.
    held: Vec<PrefixHash>,
}

/// What happened to a stream in a tick.
pub(super) enum StreamEvent {
    FirstToken(u64),
    Ended(u64),
}

pub(super) struct CachedWorker {
    seats: usize,
    rows: u64,
    capacity: usize,
    waiting: VecDeque<CachedStream>,
    running: Vec<Running>,
    /// Number of holders, and the place in `unused` if there are none.
    blocks: HashMap<PrefixHash, (u32, u64)>,
    unused: BTreeMap<u64, PrefixHash>,
    released: u64,
    /// Not yet reported.
    pub(super) changes: Vec<KvCacheChange>,
    pub(super) prompt_tokens: u64,
    pub(super) cached_tokens: u64,
}

impl CachedWorker {
    /// `size`: how many usual workers it stands for.
    pub(super) fn new(size: u64, seats: usize, cache_tokens: u64) -> Self {
        Self {
            seats: seats * size as usize,
            rows: ROWS_PER_TICK * size,
            capacity: (size * cache_tokens) as usize / PREFIX_BLOCK_TOKENS,
            waiting: VecDeque::new(),
            running: Vec::new(),
            blocks: HashMap::new(),
            unused: BTreeMap::new(),
            released: 0,
            changes: vec![KvCacheChange::Cleared],
            prompt_tokens: 0,
            cached_tokens: 0,
        }
    }

    pub(super) fn start(&mut self, stream: CachedStream) {
        self.waiting.push_back(stream);
    }

    pub(super) fn load(&self) -> (u32, u32) {
        (self.running.len() as u32, self.waiting.len() as u32)
    }

    pub(super) fn tick(&mut self) -> Vec<StreamEvent> {
        self.admit();
        let (mut rows, mut events) = (self.rows, Vec::new());
        for index in 0..self.running.len() {
            let now = &mut self.running[index];
            let is_decoding = now.computed == now.stream.prompt_tokens;
            let todo = if is_decoding { 1 } else { now.stream.prompt_tokens - now.computed };
            let todo = todo.min(rows);
            rows -= todo;
            match is_decoding {
                true => now.output += todo,
                false => now.computed += todo,
            }
            if !is_decoding && now.computed == now.stream.prompt_tokens {
                events.push(StreamEvent::FirstToken(now.stream.number));
            }
            self.store_computed(index);
        }
        while let Some(at) = self.running.iter().position(|now| now.output >= now.stream.output_tokens) {
            let ended = self.running.remove(at);
            events.push(StreamEvent::Ended(ended.stream.number));
            ended.held.into_iter().rev().for_each(|block| self.release(block));
        }
        // Decoding streams come first in the next tick.
        self.running.sort_by_key(|now| now.computed < now.stream.prompt_tokens);
        events
    }

    /// A stream waits for the prefix that a running one is about to compute.
    fn admit(&mut self) {
        while self.running.len() < self.seats
            && let Some(stream) = self.waiting.front()
        {
            let computes = |now: &Running| {
                let shared = stream.blocks.common_tokens(&now.stream.blocks);
                now.computed < shared.min(now.stream.prompt_tokens)
            };
            if self.running.iter().any(computes) {
                return;
            }
            let Some(stream) = self.waiting.pop_front() else { return };
            let usable = (stream.prompt_tokens.saturating_sub(1) as usize) / PREFIX_BLOCK_TOKENS;
            let known = stream.blocks.hashes().iter().take(usable);
            let held: Vec<PrefixHash> =
                known.take_while(|block| self.blocks.contains_key(block)).copied().collect();
            held.iter().for_each(|&block| self.hold(block));
            let computed = (held.len() * PREFIX_BLOCK_TOKENS) as u64;
            self.cached_tokens += computed;
            self.prompt_tokens += stream.prompt_tokens;
            self.running.push(Running { stream, computed, output: 0, held });
        }
    }

    fn store_computed(&mut self, index: usize) {
        loop {
            let now = &self.running[index];
            let full = ((now.computed + now.output) as usize) / PREFIX_BLOCK_TOKENS;
            let next = now.stream.blocks.hashes().get(now.held.len()).copied();
            let Some(block) = next.filter(|_| now.held.len() < full) else { return };
            self.hold(block);
            self.running[index].held.push(block);
        }
    }

    fn hold(&mut self, block: PrefixHash) {
        if let Some((holders, place)) = self.blocks.get_mut(&block) {
            if *holders == 0 {
                self.unused.remove(place);
            }
            *holders += 1;
            return;
        }
        if self.blocks.len() >= self.capacity
            && let Some((_, evicted)) = self.unused.pop_first()
        {
            self.blocks.remove(&evicted);
            self.changes.push(KvCacheChange::Removed { block: evicted, group: 0 });
        }
        self.blocks.insert(block, (1, 0));
        self.changes.push(KvCacheChange::Stored { block, group: 0 });
    }

    fn release(&mut self, block: PrefixHash) {
        self.released += 1;
        let Some((holders, place)) = self.blocks.get_mut(&block) else { return };
        *holders -= 1;
        if *holders == 0 {
            *place = self.released;
            self.unused.insert(self.released, block);
        }
    }
}
