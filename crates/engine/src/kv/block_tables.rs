//! The blocks of one sequence: a table for each group of layers, all of one length.
//!
//! A group is a set of layers that need the same part of the past: all of it, a window, or one state. Entries that a group
//! does not need (any more) are the trash block. What differs between the kinds is [`KvGroupKind::first_entry_read`] and which
//! blocks `grow` takes; so a kind is a value, and one pool serves them all.

use crate::kv::block_key::{BlockId, BlockKey, NULL_BLOCK};
use crate::kv::block_pool::BlockPool;
use crate::kv::group::KvGroupKind;
use prefix::BlockHash;

#[derive(Clone, Debug)]
struct GroupTable {
    kind: KvGroupKind,
    blocks: Vec<BlockId>,
    /// Entries before it have been given back.
    first: usize,
}

#[derive(Debug)]
pub struct BlockTables {
    tables: Vec<GroupTable>,
    block_tokens: usize,
    /// Entries that were named, or found by name, or were not worth it.
    cached: usize,
    /// Somebody may hold the last block too, since a fork: it is looked at before it is written.
    forked: bool,
}

/// A copy of one block's content that has to happen before the rows of the step are written.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct BlockCopy {
    pub from: BlockId,
    pub to: BlockId,
}

/// The longest cached prefix of a sequence.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct PrefixHit {
    /// Its length in blocks of tokens.
    pub blocks: usize,
    /// Pool blocks that nobody holds among those that it takes: holding them takes from the free ones.
    pub free_blocks: usize,
}

impl BlockTables {
    pub fn new(groups: &[KvGroupKind], block_tokens: usize) -> Self {
        let table = |&kind| GroupTable { kind, blocks: Vec::new(), first: 0 };
        Self { tables: groups.iter().map(table).collect(), block_tokens, cached: 0, forked: false }
    }

    /// Of group 0.
    pub fn table(&self) -> &[BlockId] {
        self.group(0)
    }

    pub fn group(&self, group: usize) -> &[BlockId] {
        self.tables.get(group).map_or(&[], |table| &table.blocks)
    }

    pub fn group_count(&self) -> usize {
        self.tables.len()
    }

    /// How many entries have their name.
    pub fn cached_entries(&self) -> usize {
        self.cached
    }

    /// Every table, for the integrity check.
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

    /// No allocation while the sequence grows to `tokens_max`.
    pub fn reserve(&mut self, tokens_max: usize) {
        let entries = tokens_max.div_ceil(self.block_tokens);
        for table in &mut self.tables {
            table.blocks.reserve_exact(entries.saturating_sub(table.blocks.len()));
        }
    }

    /// Blocks to take before `tokens` tokens are computed in chunks of at most `chunk` rows.
    pub fn blocks_needed(&self, tokens: usize, chunk: usize) -> usize {
        let missing = tokens.div_ceil(self.block_tokens).saturating_sub(self.len());
        self.tables.iter().map(|table| table.kind.blocks_to_allocate(missing, chunk, self.block_tokens)).sum()
    }

    /// The longest prefix of at most `most` blocks that every group can go on from.
    pub fn find_prefix(&self, pool: &BlockPool, hashes: &[BlockHash], most: usize) -> PrefixHit {
        let mut blocks = most.min(hashes.len());
        loop {
            let before = blocks;
            for (group, table) in self.tables.iter().enumerate() {
                blocks = self.longest_cached(pool, group, table.kind, hashes, blocks);
            }
            // With one group, or when all agree, the first round is the last.
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
        // A prefix that needs a block which is not there is too long, and so are those that need it too.
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

    /// Holds what every group needs of the first `blocks` blocks of the cached prefix.
    pub fn reuse_prefix(&mut self, pool: &mut BlockPool, hashes: &[BlockHash], blocks: usize) {
        debug_assert!(self.is_empty());
        for group in 0..self.tables.len() {
            let first = self.first_entry_read(self.tables[group].kind, blocks);
            let table = &mut self.tables[group];
            table.first = first;
            table.blocks.resize(first, NULL_BLOCK);
            for hash in &hashes[first..blocks] {
                let block = lookup(pool, group, hash).unwrap_or(NULL_BLOCK);
                debug_assert_ne!(block, NULL_BLOCK, "hits were counted in this step");
                pool.retain(block);
                table.blocks.push(block);
            }
        }
        self.cached = blocks;
    }

    /// BlockTables for `rows` more tokens behind `computed` ones, or nothing when there are too few. Gives back what the rows
    /// do not read any more. A block that a fork shares is exchanged for one of our own, whose content `copies` brings.
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
                && let Some(own) = pool.allocate()
            {
                copies.push(BlockCopy { from: *entry, to: own });
                pool.release(*entry);
                *entry = own;
            }
            if table.kind == KvGroupKind::State && wanted > len {
                table.blocks.resize(wanted - 1, NULL_BLOCK);
            }
            while table.blocks.len() < wanted
                && let Some(block) = pool.allocate()
            {
                table.blocks.push(block);
            }
        }
        self.forked = false;
        true
    }

    /// Gives back blocks that no row from `computed` on reads.
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

    /// Makes blocks findable that are full with `end` tokens; returns how many entries that were. Keys and values of a step
    /// are written before they are read, so another sequence of the same step may find them; states are not, see
    /// [`Self::cache_states`].
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

    /// After a step that computed the first `end` tokens: states at the end of a block become findable.
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

    /// Takes the last `entries` names back: their step will not run, or has failed.
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

    /// Holds what `other` holds for its first `tokens` tokens; whoever goes on first does so in a block of its own.
    pub fn fork(&mut self, pool: &mut BlockPool, other: &mut Self, tokens: usize) {
        debug_assert!(self.is_empty());
        let entries = tokens.div_ceil(self.block_tokens);
        for (table, theirs) in self.tables.iter_mut().zip(&other.tables) {
            // Behind them stand the blocks of drafts.
            table.blocks.extend_from_slice(&theirs.blocks[..entries]);
            table.first = theirs.first;
            table.blocks.iter().filter(|&&block| block != NULL_BLOCK).for_each(|&block| pool.retain(block));
        }
        self.cached = other.cached;
        self.forked = true;
        other.forked = true;
    }

    /// Gives back the blocks behind the first `tokens` tokens.
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

    /// Gives all blocks back, the last one first: what many share stays in the cache longest.
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
