// SPDX-License-Identifier: Apache-2.0

//! The merge step that all BPE variants share: repeatedly merge the neighbouring pair with the
//! lowest priority number, the leftmost of equal ones.
//!
//! A heap holds candidate pairs over a linked list of symbols. The time is O(n log n) in the length
//! of the text, whatever the text is: a megabyte of one letter is a legal prompt. The variants
//! differ only in how they compute a pair's priority.

use std::cmp::Reverse;
use std::collections::BinaryHeap;

/// Id of a symbol that is no token of the vocabulary. Such a symbol never merges by id, and is
/// written as byte tokens at the end.
pub(crate) const NO_TOKEN: u32 = u32::MAX;
/// End of the linked list. It also marks a symbol that was merged into its left neighbour.
const NONE: u32 = u32::MAX;

/// A token, or a character without a token. It covers `start..end` of the text that is being
/// encoded.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Symbol {
    pub(crate) id: u32,
    pub(crate) start: u32,
    pub(crate) end: u32,
}

/// The result of merging two neighbours.
#[derive(Debug, Clone, Copy)]
pub(crate) struct MergedPair {
    /// Pairs with a lower number merge first.
    pub(crate) priority: u32,
    pub(crate) id: u32,
}

#[derive(Debug)]
struct MergeNode {
    symbol: Symbol,
    previous: u32,
    next: u32,
}

/// A pair when it was queued. `right` and `end` tell whether the pair is still current.
#[derive(Debug, PartialEq, Eq, PartialOrd, Ord)]
struct MergeCandidate {
    priority: u32,
    left: u32,
    right: u32,
    end: u32,
    id: u32,
}

/// Merges symbols. It is reused for all pieces of a text, so that its buffers are allocated once.
#[derive(Debug, Default)]
pub(crate) struct Merger {
    nodes: Vec<MergeNode>,
    queue: BinaryHeap<Reverse<MergeCandidate>>,
}

impl Merger {
    pub(crate) fn clear(&mut self) {
        self.nodes.clear();
        self.queue.clear();
    }

    /// Appends the next symbol of the piece. Symbols are contiguous, and there are at most
    /// `MAX_INPUT_BYTES` of them, so positions fit into 32 bits.
    pub(crate) fn push(&mut self, symbol: Symbol) {
        let position = self.nodes.len() as u32;
        if let Some(last) = self.nodes.last_mut() {
            last.next = position;
        }
        self.nodes.push(MergeNode { symbol, previous: position.wrapping_sub(1), next: NONE });
    }

    /// Merges until `join` knows no remaining pair.
    pub(crate) fn run(&mut self, join: impl Fn(Symbol, Symbol) -> Option<MergedPair>) {
        // Reuses the queue's buffer. Building a heap at once takes linear time; pushing one by one
        // takes O(n log n).
        let mut initial = std::mem::take(&mut self.queue).into_vec();
        initial.extend(
            (1..self.nodes.len() as u32)
                .filter_map(|right| self.candidate(right - 1, right, &join))
                .map(Reverse),
        );
        self.queue = BinaryHeap::from(initial);

        while let Some(Reverse(best)) = self.queue.pop() {
            let (left, right) = (best.left as usize, best.right as usize);
            if self.nodes[left].next != best.right || self.nodes[right].symbol.end != best.end {
                continue; // one of the two symbols has changed since
            }
            let after = self.nodes[right].next;
            self.nodes[right].next = NONE;
            self.nodes[left].next = after;
            self.nodes[left].symbol =
                Symbol { id: best.id, start: self.nodes[left].symbol.start, end: best.end };
            if after != NONE {
                self.nodes[after as usize].previous = best.left;
                let pair = self.candidate(best.left, after, &join);
                self.queue.extend(pair.map(Reverse));
            }
            let before = self.nodes[left].previous;
            if before != NONE {
                let pair = self.candidate(before, best.left, &join);
                self.queue.extend(pair.map(Reverse));
            }
        }
    }

    fn candidate(
        &self,
        left: u32,
        right: u32,
        join: impl Fn(Symbol, Symbol) -> Option<MergedPair>,
    ) -> Option<MergeCandidate> {
        let second = self.nodes[right as usize].symbol;
        let joined = join(self.nodes[left as usize].symbol, second)?;
        Some(MergeCandidate { priority: joined.priority, left, right, end: second.end, id: joined.id })
    }

    /// The remaining symbols, in order.
    pub(crate) fn symbols(&self) -> impl Iterator<Item = Symbol> {
        let mut at = if self.nodes.is_empty() { NONE } else { 0 };
        std::iter::from_fn(move || {
            let node = self.nodes.get(at as usize)?;
            at = node.next;
            Some(node.symbol)
        })
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    /// Merges numbers. An entry of the table says which pair merges into which number.
    fn merged(ids: &[u32], table: &[(u32, u32, u32)]) -> Vec<u32> {
        let mut merger = Merger::default();
        for (i, &id) in ids.iter().enumerate() {
            merger.push(Symbol { id, start: i as u32, end: i as u32 + 1 });
        }
        merger.run(|left, right| {
            let rank = table.iter().position(|&(l, r, _)| (l, r) == (left.id, right.id))?;
            Some(MergedPair { priority: rank as u32, id: table[rank].2 })
        });
        merger.symbols().map(|s| s.id).collect()
    }

    /// The definition of BPE: find the leftmost pair with the lowest rank, merge it, and start
    /// over.
    fn naive(ids: &[u32], table: &[(u32, u32, u32)]) -> Vec<u32> {
        let mut ids = ids.to_vec();
        loop {
            let best = (0..ids.len().saturating_sub(1))
                .filter_map(|i| {
                    let rank = table.iter().position(|&(l, r, _)| (l, r) == (ids[i], ids[i + 1]))?;
                    Some((rank, i))
                })
                .min();
            let Some((rank, i)) = best else { return ids };
            ids[i] = table[rank].2;
            ids.remove(i + 1);
        }
    }

    proptest! {
        #[test]
        fn heap_merges_as_the_definition_does(
            ids in prop::collection::vec(0u32..4, 0..40),
            table in prop::collection::vec((0u32..8, 0u32..8), 0..20),
        ) {
            // Merged symbols get numbers of their own, so that a rule can apply to the result of
            // another rule.
            let table: Vec<_> = table.iter().enumerate().map(|(i, &(l, r))| (l, r, 4 + (i as u32 % 6))).collect();
            prop_assert_eq!(merged(&ids, &table), naive(&ids, &table));
        }
    }

    #[test]
    fn leftmost_of_equal_pairs_joins_first() {
        assert_eq!(merged(&[0, 0, 0], &[(0, 0, 1)]), vec![1, 0]);
    }
}
