// SPDX-License-Identifier: Apache-2.0

//! The block tables of one sequence: one table for each KV cache group, all of the same length.
//!
//! ```text
//! tokens            0..16   16..32  32..48  48..64
//! full attention  [   3   |   7   |   9   |  12  ]
//! window          [  null |  null |  10   |  13  ]
//! state           [  null |  null |  null |  14  ]
//! ```
//!
//! A group is a set of layers that need the same part of the past: all of it, a window, or one
//! state. Entries that a group does not need are the null block. The kinds differ in
//! [`KvGroupKind::first_entry_read`] and in the blocks that `allocate` takes. One block pool serves
//! all groups.

use crate::kv::block_key::{BlockId, BlockKey, NULL_BLOCK};
use crate::kv::block_pool::BlockPool;
use crate::kv::group::KvGroupKind;
use prefix::BlockHash;

#[derive(Clone, Debug)]
struct GroupTable {
    kind: KvGroupKind,
    blocks: Vec<BlockId>,
    /// Entries before this one have been released.
    first: usize,
}

#[derive(Debug)]
pub struct BlockTables {
    tables: Vec<GroupTable>,
    block_tokens: usize,
    /// Entries that have been offered to the prefix cache, or came from it.
    cached: usize,
    /// After a fork, another sequence may use the last block too. `allocate` checks before a row
    /// writes to it.
    forked: bool,
}

/// A copy of one block's content, to be carried out before the rows of the step are written.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct BlockCopy {
    pub from: BlockId,
    pub to: BlockId,
}

/// The longest cached prefix of a sequence.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct PrefixHit {
    /// Length of the prefix in table entries.
    pub blocks: usize,
    /// Free blocks among those that the prefix needs. Retaining them reduces the number of free
    /// blocks.
    pub free_blocks: usize,
}

impl BlockTables {
    pub fn new(groups: &[KvGroupKind], block_tokens: usize) -> Self {
        let table = |&kind| GroupTable { kind, blocks: Vec::new(), first: 0 };
        Self { tables: groups.iter().map(table).collect(), block_tokens, cached: 0, forked: false }
    }

    /// The block table of group 0.
    pub fn table(&self) -> &[BlockId] {
        self.group(0)
    }

    pub fn group(&self, group: usize) -> &[BlockId] {
        self.tables.get(group).map_or(&[], |table| &table.blocks)
    }

    pub fn group_count(&self) -> usize {
        self.tables.len()
    }

    /// Entries that are in the prefix cache or were skipped.
    pub fn cached_entries(&self) -> usize {
        self.cached
    }

    /// The block tables of all groups.
    pub fn tables(&self) -> impl Iterator<Item = &[BlockId]> {
        self.tables.iter().map(|table| &table.blocks[..])
    }

    /// Entries of each table.
    pub fn len(&self) -> usize {
        self.tables.first().map_or(0, |table| table.blocks.len())
    }

    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Reserves host memory, so that growing to `tokens_max` tokens allocates none.
    pub fn reserve(&mut self, tokens_max: usize) {
        let entries = tokens_max.div_ceil(self.block_tokens);
        for table in &mut self.tables {
            table.blocks.reserve_exact(entries.saturating_sub(table.blocks.len()));
        }
    }

    /// Blocks to allocate before `tokens` tokens are computed in chunks of at most `chunk` rows.
    pub fn blocks_needed(&self, tokens: usize, chunk: usize) -> usize {
        let missing = tokens.div_ceil(self.block_tokens).saturating_sub(self.len());
        self.tables.iter().map(|table| table.kind.blocks_to_allocate(missing, chunk, self.block_tokens)).sum()
    }

    /// The longest prefix of at most `most` entries from which every group can continue.
    pub fn find_prefix(&self, pool: &BlockPool, hashes: &[BlockHash], most: usize) -> PrefixHit {
        let mut blocks = most.min(hashes.len());
        loop {
            let before = blocks;
            for (group, table) in self.tables.iter().enumerate() {
                blocks = self.longest_cached(pool, group, table.kind, hashes, blocks);
            }
            // With one group, or when all groups agree, the first round is the last.
            if blocks == before || self.tables.len() == 1 {
                break;
            }
        }
        let mut free_blocks = 0;
        for (group, table) in self.tables.iter().enumerate() {
            for hash in &hashes[self.first_entry_read(table.kind, blocks)..blocks] {
                free_blocks +=
                    usize::from(lookup(pool, group, hash).is_some_and(|block| pool.is_free(block)));
            }
        }
        PrefixHit { blocks, free_blocks }
    }

    fn longest_cached(
        &self,
        pool: &BlockPool,
        group: usize,
        kind: KvGroupKind,
        hashes: &[BlockHash],
        most: usize,
    ) -> usize {
        let is_found = |index: &usize| lookup(pool, group, &hashes[*index]).is_some();
        if kind == KvGroupKind::Full {
            return (0..most).take_while(is_found).count();
        }
        // A prefix that needs a missing block is too long, and so is every longer prefix that needs
        // it.
        let mut blocks = most;
        while let Some(missing) =
            (self.first_entry_read(kind, blocks)..blocks).rev().find(|index| !is_found(index))
        {
            blocks = missing;
        }
        blocks
    }

    fn first_entry_read(&self, kind: KvGroupKind, blocks: usize) -> usize {
        kind.first_entry_read(blocks * self.block_tokens, self.block_tokens).min(blocks)
    }

    /// Retains the blocks that every group needs of the first `blocks` entries of the cached
    /// prefix.
    pub fn reuse_prefix(&mut self, pool: &mut BlockPool, hashes: &[BlockHash], blocks: usize) {
        assert!(self.is_empty(), "only an admitted sequence without blocks takes over others");
        for group in 0..self.tables.len() {
            let first = self.first_entry_read(self.tables[group].kind, blocks);
            let table = &mut self.tables[group];
            table.first = first;
            table.blocks.resize(first, NULL_BLOCK);
            for hash in &hashes[first..blocks] {
                let Some(block) = lookup(pool, group, hash) else {
                    panic!("a block of the prefix hit of this step is not cached any more: {hash:?}")
                };
                pool.retain(block);
                table.blocks.push(block);
            }
        }
        self.cached = blocks;
    }

    /// Allocates blocks for `rows` tokens after `computed` ones, or nothing if the pool has too
    /// few. It releases blocks that these rows no longer read. A shared last block is replaced by a
    /// new block, into which the step copies the content (`copies`).
    pub fn allocate(
        &mut self,
        pool: &mut BlockPool,
        computed: usize,
        rows: usize,
        copies: &mut Vec<BlockCopy>,
    ) -> bool {
        let (bt, len) = (self.block_tokens, self.len());
        let wanted = (computed + rows).div_ceil(bt).max(len);
        if wanted == len && !self.forked {
            return true;
        }
        self.release_unread(pool, computed);
        let written = computed / bt;
        let shared = |table: &GroupTable| {
            table.blocks.get(written).is_some_and(|&block| block != NULL_BLOCK && !pool.is_writable(block))
        };
        let mut needed = 0;
        for table in &self.tables {
            needed += match table.kind {
                KvGroupKind::State => usize::from(wanted > len),
                KvGroupKind::Full | KvGroupKind::Window { .. } => wanted - len,
            };
            needed += usize::from(self.forked && shared(table));
        }
        if needed > pool.free_blocks() {
            return false;
        }
        for table in &mut self.tables {
            if self.forked
                && let Some(entry) = table.blocks.get_mut(written)
                && *entry != NULL_BLOCK
                && !pool.is_writable(*entry)
            {
                let own = allocate_counted(pool);
                copies.push(BlockCopy { from: *entry, to: own });
                pool.release(*entry);
                *entry = own;
            }
            if table.kind == KvGroupKind::State && wanted > len {
                table.blocks.resize(wanted - 1, NULL_BLOCK);
            }
            while table.blocks.len() < wanted {
                table.blocks.push(allocate_counted(pool));
            }
        }
        self.forked = false;
        true
    }

    /// Releases blocks that no row from `computed` on reads.
    fn release_unread(&mut self, pool: &mut BlockPool, computed: usize) {
        for table in &mut self.tables {
            let first = table.kind.first_entry_read(computed, self.block_tokens).min(table.blocks.len());
            for entry in table.blocks.get_mut(table.first..first).into_iter().flatten() {
                if *entry != NULL_BLOCK {
                    pool.release(std::mem::replace(entry, NULL_BLOCK));
                }
            }
            table.first = table.first.max(first);
        }
    }

    /// Inserts the blocks that `end` tokens fill into the prefix cache, and returns how many
    /// entries these are. A step writes keys and values before it reads them, so another sequence
    /// of the same step may use them. States enter later, by [`Self::cache_states`].
    pub fn cache_full(&mut self, pool: &mut BlockPool, hashes: &[BlockHash], end: usize) -> usize {
        let (before, full) = (self.cached, (end / self.block_tokens).min(hashes.len()));
        for (index, &hash) in hashes.iter().enumerate().take(full).skip(before) {
            for (group, table) in self.tables.iter().enumerate() {
                if table.blocks[index] != NULL_BLOCK && table.kind != KvGroupKind::State {
                    pool.cache_insert(table.blocks[index], BlockKey { hash, group: group as u8 });
                }
            }
        }
        self.cached = full.max(before);
        self.cached - before
    }

    /// After a step that computed the first `end` tokens, inserts states at the end of a block into
    /// the prefix cache.
    pub fn cache_states(&mut self, pool: &mut BlockPool, hashes: &[BlockHash], end: usize) {
        let index = (end / self.block_tokens).wrapping_sub(1);
        if !end.is_multiple_of(self.block_tokens) || index >= hashes.len() {
            return;
        }
        for (group, table) in self.tables.iter().enumerate() {
            if table.kind == KvGroupKind::State && table.blocks[index] != NULL_BLOCK {
                pool.cache_insert(table.blocks[index], BlockKey { hash: hashes[index], group: group as u8 });
            }
        }
    }

    /// Removes the last `entries` entries from the prefix cache, because their step failed or will
    /// not run.
    pub fn uncache_last(&mut self, pool: &mut BlockPool, entries: usize) {
        self.cached -= entries;
        for table in &self.tables {
            for &block in &table.blocks[self.cached..][..entries] {
                if block != NULL_BLOCK {
                    pool.cache_remove(block);
                }
            }
        }
    }

    /// Retains all blocks of the first `tokens` tokens of `other`. The sequence that writes first
    /// copies the last block.
    pub fn fork(&mut self, pool: &mut BlockPool, other: &mut Self, tokens: usize) {
        assert!(self.is_empty(), "only an admitted sequence without blocks takes over others");
        let entries = tokens.div_ceil(self.block_tokens);
        for (table, theirs) in self.tables.iter_mut().zip(&other.tables) {
            // Blocks behind these hold draft tokens.
            table.blocks.extend_from_slice(&theirs.blocks[..entries]);
            table.first = theirs.first;
            table.blocks.iter().filter(|&&block| block != NULL_BLOCK).for_each(|&block| pool.retain(block));
        }
        self.cached = other.cached;
        self.forked = true;
        other.forked = true;
    }

    /// Releases the blocks behind the first `tokens` tokens.
    pub fn truncate(&mut self, pool: &mut BlockPool, tokens: usize) {
        let needed = tokens.div_ceil(self.block_tokens);
        for table in &mut self.tables {
            while table.blocks.len() > needed
                && let Some(block) = table.blocks.pop()
            {
                if block != NULL_BLOCK {
                    pool.release(block);
                }
            }
        }
    }

    /// Releases all blocks, the last one first, so that the blocks of common prefixes are evicted
    /// last.
    pub fn release_all(&mut self, pool: &mut BlockPool) {
        for table in &mut self.tables {
            table
                .blocks
                .drain(..)
                .rev()
                .filter(|&block| block != NULL_BLOCK)
                .for_each(|block| pool.release(block));
            table.first = 0;
        }
        self.cached = 0;
        self.forked = false;
    }
}

fn lookup(pool: &BlockPool, group: usize, hash: &BlockHash) -> Option<BlockId> {
    pool.lookup(&BlockKey { hash: *hash, group: group as u8 })
}

/// Allocates a block after the caller has compared its need with the number of free blocks.
fn allocate_counted(pool: &mut BlockPool) -> BlockId {
    match pool.allocate() {
        Some(block) => block,
        None => panic!("the pool counted a free block but has none"),
    }
}
