// SPDX-License-Identifier: Apache-2.0

//! [`TokenTree`]: the tokens of all beams. Beams share the tokens of their common past.

use crate::request::output::BeamToken;

/// A token of the tree: its index. Indices of parents are lower than those of their children.
pub(super) type NodeId = u32;

/// The tree is compacted when it has twice the tokens that were left the last time, and never below
/// this size.
const COMPACT_AT_MIN: usize = 1024;

#[derive(Debug)]
struct Node {
    parent: Option<NodeId>,
    token: BeamToken,
}

#[derive(Debug)]
pub(super) struct TokenTree {
    nodes: Vec<Node>,
    compact_at: usize,
}

impl Default for TokenTree {
    fn default() -> Self {
        Self { nodes: Vec::new(), compact_at: COMPACT_AT_MIN }
    }
}

impl TokenTree {
    pub(super) fn push(&mut self, parent: Option<NodeId>, token: BeamToken) -> NodeId {
        self.nodes.push(Node { parent, token });
        self.nodes.len() as NodeId - 1
    }

    /// The tokens up to this one. `None`: no tokens.
    pub(super) fn path(&self, mut last: Option<NodeId>) -> Vec<BeamToken> {
        let mut tokens = Vec::new();
        while let Some(id) = last {
            let node = &self.nodes[id as usize];
            tokens.push(node.token.clone());
            last = node.parent;
        }
        tokens.reverse();
        tokens
    }

    /// Drops the tokens that lead to none of `ends`, if the tree has grown enough, and updates
    /// `ends`.
    pub(super) fn compact<'a>(&mut self, ends: impl Iterator<Item = &'a mut Option<NodeId>>) {
        if self.nodes.len() < self.compact_at {
            return;
        }
        let ends: Vec<_> = ends.collect();
        let mut is_kept = vec![false; self.nodes.len()];
        for end in &ends {
            let mut next = **end;
            while let Some(id) = next.filter(|&id| !is_kept[id as usize]) {
                is_kept[id as usize] = true;
                next = self.nodes[id as usize].parent;
            }
        }
        // A parent has its new index before its children need it.
        let mut new_ids: Vec<NodeId> = vec![0; self.nodes.len()];
        let mut kept = Vec::new();
        for (id, mut node) in std::mem::take(&mut self.nodes).into_iter().enumerate() {
            if is_kept[id] {
                node.parent = node.parent.map(|parent| new_ids[parent as usize]);
                new_ids[id] = kept.len() as NodeId;
                kept.push(node);
            }
        }
        self.nodes = kept;
        for end in ends {
            *end = end.map(|id| new_ids[id as usize]);
        }
        self.compact_at = COMPACT_AT_MIN.max(2 * self.nodes.len());
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn token(token: u32) -> BeamToken {
        BeamToken { token, logprob: -1.0, top: Vec::new() }
    }

    fn ids(tree: &TokenTree, end: Option<NodeId>) -> Vec<u32> {
        tree.path(end).iter().map(|token| token.token).collect()
    }

    #[test]
    fn a_compacted_tree_has_the_same_paths() {
        let mut tree = TokenTree::default();
        let (mut long, mut other) = (None, None);
        for index in 0..2000 {
            long = Some(tree.push(long, token(index)));
            if index == 500 {
                other = Some(tree.push(long, token(7000)));
            }
            // Tokens that lead nowhere.
            tree.push(long, token(9000));
        }
        let before = [ids(&tree, long), ids(&tree, other)];
        let mut empty = None;
        tree.compact([&mut long, &mut other, &mut empty].into_iter());
        assert_eq!([ids(&tree, long), ids(&tree, other)], before);
        assert_eq!((tree.nodes.len(), empty), (2001, None));
        // The next compaction waits until the tree has doubled.
        tree.push(long, token(1));
        tree.compact([&mut long].into_iter());
        assert_eq!(tree.nodes.len(), 2002);
    }
}
