// SPDX-License-Identifier: Apache-2.0

//! The prompts that this router has placed on one worker: an estimate of its prefix cache, for a
//! worker whose KV cache events do not arrive.
//!
//! The estimate holds as many tokens as the worker's KV cache, drops the blocks that were placed
//! longest ago, and forgets those older than [`ESTIMATE_AGE_MAX`].

use std::collections::{BTreeMap, HashMap};

use super::prompt_prefix::PREFIX_BLOCK_TOKENS;
use super::{ESTIMATE_AGE_MAX, PrefixHash, PromptPrefix, RouterTime};

/// The estimate keeps each fourth block only: it tells long prefixes from short ones.
const STRIDE: usize = 4;
/// Maximum number of blocks: 4 million tokens of prompts.
const BLOCKS_MAX: u64 = 1 << 16;
/// Memory of a block in both maps, about.
const BLOCK_BYTES: usize = 96;

#[derive(Debug)]
pub(super) struct PlacedPrompts {
    /// When and by which placement the block was placed last.
    placed: HashMap<PrefixHash, Placed>,
    /// The same blocks, the oldest first.
    order: BTreeMap<Placed, PrefixHash>,
    blocks_max: usize,
}

/// Of one placement, the last blocks of the prompt come first: without the first blocks, the later
/// ones are useless.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
struct Placed {
    at: RouterTime,
    placement: u64,
    from_end: usize,
}

impl PlacedPrompts {
    pub(super) fn new(kv_tokens: u64) -> Self {
        let blocks_max = (kv_tokens / (STRIDE * PREFIX_BLOCK_TOKENS) as u64).min(BLOCKS_MAX) as usize;
        Self { placed: HashMap::new(), order: BTreeMap::new(), blocks_max }
    }

    /// Tokens of the longest known prefix.
    pub(super) fn cached_tokens(&self, prompt: &PromptPrefix, now: RouterTime) -> u64 {
        let is_new = |placed: &Placed| now.saturating_sub(placed.at) <= ESTIMATE_AGE_MAX;
        let strided = prompt.hashes().iter().skip(STRIDE - 1).step_by(STRIDE);
        let known = strided.take_while(|hash| self.placed.get(hash).is_some_and(is_new));
        (known.count() * STRIDE * PREFIX_BLOCK_TOKENS) as u64
    }

    /// Remembers a placed prompt. `placement` increases from call to call.
    pub(super) fn insert(&mut self, prompt: &PromptPrefix, placement: u64, now: RouterTime) {
        let strided = prompt.hashes().iter().skip(STRIDE - 1).step_by(STRIDE).take(self.blocks_max);
        for (from_end, &hash) in strided.rev().enumerate() {
            let newest = Placed { at: now, placement, from_end };
            if let Some(before) = self.placed.insert(hash, newest) {
                self.order.remove(&before);
            }
            self.order.insert(newest, hash);
        }
        while let Some((oldest, hash)) = self.order.first_key_value()
            && (self.placed.len() > self.blocks_max || now.saturating_sub(oldest.at) > ESTIMATE_AGE_MAX)
        {
            self.placed.remove(hash);
            self.order.pop_first();
        }
    }

    pub(super) fn clear(&mut self) {
        (self.placed, self.order) = Default::default();
    }

    pub(super) fn bytes(&self) -> u64 {
        (self.placed.len() * BLOCK_BYTES) as u64
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;

    const NOW: RouterTime = Duration::ZERO;

    fn prompt(seed: u32, count: usize) -> PromptPrefix {
        let tokens: Vec<u32> = (0..count as u32).map(|n| n.wrapping_mul(7) + seed * 1000).collect();
        PromptPrefix::new("", &tokens)
    }

    #[test]
    fn a_prompt_is_known_in_steps_of_64_tokens_until_it_is_old() {
        let mut placed = PlacedPrompts::new(1 << 20);
        placed.insert(&prompt(1, 1000), 1, NOW);
        assert_eq!(placed.cached_tokens(&prompt(1, 1000), ESTIMATE_AGE_MAX), 960, "15 full steps");
        assert_eq!(placed.cached_tokens(&prompt(1, 150), NOW), 128);
        assert_eq!(placed.cached_tokens(&prompt(2, 1000), NOW), 0);
        let late = ESTIMATE_AGE_MAX + Duration::from_secs(1);
        assert_eq!(placed.cached_tokens(&prompt(1, 1000), late), 0);
        placed.insert(&PromptPrefix::default(), 2, late);
        assert_eq!((placed.bytes(), placed.order.len()), (0, 0), "old blocks take no memory");
    }

    #[test]
    fn the_oldest_placement_is_dropped_first_and_its_end_before_its_beginning() {
        let mut placed = PlacedPrompts::new(20 * 64);
        let [first, second] = [1, 2].map(|seed| prompt(seed, 640));
        placed.insert(&first, 1, NOW);
        placed.insert(&second, 2, NOW);
        placed.insert(&first, 3, NOW);
        placed.insert(&prompt(3, 256), 4, NOW);
        assert_eq!(placed.cached_tokens(&first, NOW), 640);
        assert_eq!(placed.cached_tokens(&second, NOW), 384, "4 of 10 blocks were dropped");
        assert_eq!((placed.placed.len(), placed.order.len()), (20, 20));
    }
}
