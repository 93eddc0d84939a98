//! The blocks of one sequence: a table for each group of layers, all of one length.
//!
//! A group is a set of layers that need the same part of the past: all of it, a window, or one state. Entries that a group
//! does not need (any more) are the trash block. What differs between the kinds is [`GroupKind::first_read`] and which
//! blocks `grow` takes; so a kind is a value, and one pool serves them all.

use crate::kv::block_key::{BlockId, Name, TRASH};
use crate::kv::block_pool::BlockPool;
use crate::kv::group::GroupKind;
use prefix::BlockHash;

#[derive(Clone, Debug)]
struct Table {
    kind: GroupKind,
    blocks: Vec<BlockId>,
    /// Entries before it have been given back.
    first: usize,
}

#[derive(Debug)]
pub struct Blocks {
    tables: Vec<Table>,
    block_tokens: usize,
    /// Entries that were named, or found by name, or were not worth it.
    named: usize,
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
pub struct Hits {
    /// Its length in blocks of tokens.
    pub blocks: usize,
    /// Pool blocks that nobody holds among those that it takes: holding them takes from the free ones.
    pub free: usize,
}

impl Blocks {
    pub fn new(groups: &[GroupKind], block_tokens: usize) -> Self {
        let table = |&kind| Table { kind, blocks: Vec::new(), first: 0 };
        Self { tables: groups.iter().map(table).collect(), block_tokens, named: 0, forked: false }
    }

    /// Of group 0.
    pub fn table(&self) -> &[BlockId] {
        self.group(0)
    }

    pub fn group(&self, group: usize) -> &[BlockId] {
        self.tables.get(group).map_or(&[], |table| &table.blocks)
    }

    pub fn groups(&self) -> usize {
        self.tables.len()
    }

    /// How many entries have their name.
    pub fn named(&self) -> usize {
        self.named
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
    pub fn needed(&self, tokens: usize, chunk: usize) -> usize {
        let missing = tokens.div_ceil(self.block_tokens).saturating_sub(self.len());
        self.tables.iter().map(|table| table.kind.taken(missing, chunk, self.block_tokens)).sum()
    }

    /// The longest prefix of at most `most` blocks that every group can go on from.
    pub fn hits(&self, pool: &BlockPool, hashes: &[BlockHash], most: usize) -> Hits {
        let mut blocks = most.min(hashes.len());
        loop {
            let before = blocks;
            for (group, table) in self.tables.iter().enumerate() {
                blocks = self.longest(pool, group, table.kind, hashes, blocks);
            }
            // With one group, or when all agree, the first round is the last.
            if blocks == before || self.tables.len() == 1 {
                break;
            }
        }
        let mut free = 0;
        for (group, table) in self.tables.iter().enumerate() {
            for hash in &hashes[self.first_read(table.kind, blocks)..blocks] {
                free += usize::from(found(pool, group, hash).is_some_and(|block| pool.is_free(block)));
            }
        }
        Hits { blocks, free }
    }

    fn longest(
        &self,
        pool: &BlockPool,
        group: usize,
        kind: GroupKind,
        hashes: &[BlockHash],
        most: usize,
    ) -> usize {
        let is_found = |index: &usize| found(pool, group, &hashes[*index]).is_some();
        if kind == GroupKind::Full {
            return (0..most).take_while(is_found).count();
        }
        // A prefix that needs a block which is not there is too long, and so are those that need it too.
        let mut blocks = most;
        while let Some(missing) = (self.first_read(kind, blocks)..blocks).rev().find(|index| !is_found(index))
        {
            blocks = missing;
        }
        blocks
    }

    fn first_read(&self, kind: GroupKind, blocks: usize) -> usize {
        kind.first_read(blocks * self.block_tokens, self.block_tokens).min(blocks)
    }

    /// Holds what every group needs of the first `blocks` blocks of the cached prefix.
    pub fn adopt(&mut self, pool: &mut BlockPool, hashes: &[BlockHash], blocks: usize) {
        debug_assert!(self.is_empty());
        for group in 0..self.tables.len() {
            let first = self.first_read(self.tables[group].kind, blocks);
            let table = &mut self.tables[group];
            table.first = first;
            table.blocks.resize(first, TRASH);
            for hash in &hashes[first..blocks] {
                let block = found(pool, group, hash).unwrap_or(TRASH);
                debug_assert_ne!(block, TRASH, "hits were counted in this step");
                pool.hold(block);
                table.blocks.push(block);
            }
        }
        self.named = blocks;
    }

    /// Blocks for `rows` more tokens behind `computed` ones, or nothing when there are too few. Gives back what the rows
    /// do not read any more. A block that a fork shares is exchanged for one of our own, whose content `copies` brings.
    pub fn grow(
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
        self.leave_behind(pool, computed);
        let written = computed / bt;
        let shared = |table: &Table| {
            table.blocks.get(written).is_some_and(|&block| block != TRASH && !pool.is_writable(block))
        };
        let mut needed = 0;
        for table in &self.tables {
            needed += match table.kind {
                GroupKind::State => usize::from(wanted > len),
                GroupKind::Full | GroupKind::Window { .. } => wanted - len,
            };
            needed += usize::from(self.forked && shared(table));
        }
        if needed > pool.free() {
            return false;
        }
        for table in &mut self.tables {
            if self.forked
                && let Some(entry) = table.blocks.get_mut(written)
                && *entry != TRASH
                && !pool.is_writable(*entry)
                && let Some(own) = pool.take()
            {
                copies.push(BlockCopy { from: *entry, to: own });
                pool.release(*entry);
                *entry = own;
            }
            if table.kind == GroupKind::State && wanted > len {
                table.blocks.resize(wanted - 1, TRASH);
            }
            while table.blocks.len() < wanted
                && let Some(block) = pool.take()
            {
                table.blocks.push(block);
            }
        }
        self.forked = false;
        true
    }

    /// Gives back blocks that no row from `computed` on reads.
    fn leave_behind(&mut self, pool: &mut BlockPool, computed: usize) {
        for table in &mut self.tables {
            let first = table.kind.first_read(computed, self.block_tokens).min(table.blocks.len());
            for entry in table.blocks.get_mut(table.first..first).into_iter().flatten() {
                if *entry != TRASH {
                    pool.release(std::mem::replace(entry, TRASH));
                }
            }
            table.first = table.first.max(first);
        }
    }

    /// Makes blocks findable that are full with `end` tokens; returns how many entries that were. Keys and values of a step
    /// are written before they are read, so another sequence of the same step may find them; states are not, see
    /// [`Self::name_states`].
    pub fn name_full(&mut self, pool: &mut BlockPool, hashes: &[BlockHash], end: usize) -> usize {
        let (before, full) = (self.named, (end / self.block_tokens).min(hashes.len()));
        for (index, &hash) in hashes.iter().enumerate().take(full).skip(before) {
            for (group, table) in self.tables.iter().enumerate() {
                if table.blocks[index] != TRASH && table.kind != GroupKind::State {
                    pool.name(table.blocks[index], Name { hash, group: group as u8 });
                }
            }
        }
        self.named = full.max(before);
        self.named - before
    }

    /// After a step that computed the first `end` tokens: states at the end of a block become findable.
    pub fn name_states(&mut self, pool: &mut BlockPool, hashes: &[BlockHash], end: usize) {
        let index = (end / self.block_tokens).wrapping_sub(1);
        if !end.is_multiple_of(self.block_tokens) || index >= hashes.len() {
            return;
        }
        for (group, table) in self.tables.iter().enumerate() {
            if table.kind == GroupKind::State && table.blocks[index] != TRASH {
                pool.name(table.blocks[index], Name { hash: hashes[index], group: group as u8 });
            }
        }
    }

    /// Takes the last `entries` names back: their step will not run, or has failed.
    pub fn unname(&mut self, pool: &mut BlockPool, entries: usize) {
        self.named -= entries;
        for table in &self.tables {
            for &block in &table.blocks[self.named..][..entries] {
                if block != TRASH {
                    pool.unname(block);
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
            table.blocks.iter().filter(|&&block| block != TRASH).for_each(|&block| pool.hold(block));
        }
        self.named = other.named;
        self.forked = true;
        other.forked = true;
    }

    /// Gives back the blocks behind the first `tokens` tokens.
    pub fn trim(&mut self, pool: &mut BlockPool, tokens: usize) {
        let needed = tokens.div_ceil(self.block_tokens);
        for table in &mut self.tables {
            while table.blocks.len() > needed
                && let Some(block) = table.blocks.pop()
            {
                if block != TRASH {
                    pool.release(block);
                }
            }
        }
    }

    /// Gives all blocks back, the last one first: what many share stays in the cache longest.
    pub fn free(&mut self, pool: &mut BlockPool) {
        for table in &mut self.tables {
            table
                .blocks
                .drain(..)
                .rev()
                .filter(|&block| block != TRASH)
                .for_each(|block| pool.release(block));
            table.first = 0;
        }
        self.named = 0;
        self.forked = false;
    }
}

fn found(pool: &BlockPool, group: usize, hash: &BlockHash) -> Option<BlockId> {
    pool.find(&Name { hash: *hash, group: group as u8 })
}
