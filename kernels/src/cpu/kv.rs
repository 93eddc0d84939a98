// SPDX-License-Identifier: Apache-2.0

//! [`CpuKv`]: the KV cache, which is the keys and values of all layers in one anonymous mapping. A
//! block takes no memory before its first write.
//!
//! A block holds the layers of one KV cache group. The group is that of the last write to the
//! block. All blocks have the size that the largest group needs.
//!
//! ```text
//! block:   layer | layer | ..                              each starts at a cache line
//! layer:   key head 0 | key head 1 | .. | value head 0 | value head 1 | ..
//! key head:    keys [dim][token]    | scales [scale][token]
//! value head:  values [token][dim]  | scales [scale][token]
//! ```
//!
//! Only types with scales have the scales. With one load, attention reads one dimension of 16 keys,
//! or 16 dimensions of one value.

use super::element::{Bf16, F16, F32, Q8_0Element, SCALE_BYTES, STORED_TOGETHER, Stored};
use super::simd::{CACHE_LINE, Simd, SimdKernel};
use memmap2::{MmapMut, MmapOptions, UncheckedAdvice};
use ops::{KvLayer, KvLayerLocation, KvLayout, KvType, OpError};
use std::marker::PhantomData;

/// A multiple of the page size of every machine that the kernels run on.
const PAGE_BYTES: usize = 64 << 10;

/// `CpuKv::owners` has one byte per block.
const GROUPS_MAX: usize = 1 << u8::BITS;

pub struct CpuKv {
    layout: KvLayout,
    memory: MmapMut,
    block_bytes: usize,
    /// By layer, the offset in a block of the layer's group.
    layer_offsets: Vec<usize>,
    /// By layer.
    locations: Vec<KvLayerLocation>,
    /// By group and slot, the bytes of that layer in a block.
    part_bytes: Vec<Vec<u64>>,
    /// By block, the group that last wrote to the block.
    owners: Vec<u8>,
    /// By slot, then by block: whether the layer at that slot of the block's group is written.
    written: Vec<Vec<bool>>,
    used_bytes: u64,
}

/// Read access to one layer of a cache.
#[derive(Clone, Copy)]
pub(super) struct LayerView<'a> {
    pub(super) memory: &'a [u8],
    pub(super) block_bytes: usize,
    /// Offset of the layer in a block.
    pub(super) offset: usize,
    pub(super) block_tokens: usize,
    pub(super) shape: KvLayer,
    /// The KV cache group whose block tables list the layer's blocks.
    pub(super) group: usize,
}

impl LayerView<'_> {
    /// Byte offset of the key of `head` at dimension 0 and the first token of `block`.
    #[inline(always)]
    pub(super) fn keys_at(&self, block: usize, head: usize) -> usize {
        let head_bytes = self.block_tokens * self.shape.kind.head_bytes(self.shape.head_dim);
        block * self.block_bytes + self.offset + head * head_bytes
    }

    /// Byte offset of the value of `head` at the first token of `block`.
    #[inline(always)]
    pub(super) fn values_at(&self, block: usize, head: usize) -> usize {
        self.keys_at(block, self.shape.kv_heads + head)
    }
}

impl CpuKv {
    pub(super) fn new(layout: &KvLayout) -> Result<Self, OpError> {
        const OP: &str = "kv";
        if layout.block_tokens == 0 {
            return Err(OpError::Shape { op: OP, what: "tokens of a block", found: 0, expected: 1 });
        }
        let memory = |bytes: usize| {
            let bytes = bytes as u64;
            OpError::Memory { op: OP, what: "keys and values", bytes, free: None }
        };
        let groups = layout.groups();
        let mut layer_offsets = vec![0; layout.layers.len()];
        let mut part_bytes = vec![Vec::new(); groups.len()];
        let mut block_bytes = 0_usize;
        for (group, part_bytes) in groups.iter().zip(&mut part_bytes) {
            let mut end = 0_usize;
            for &layer in &group.layers {
                layer_offsets[layer] = end;
                let bytes = layout.layers[layer].token_bytes().checked_mul(layout.block_tokens);
                let next =
                    bytes.and_then(|bytes| end.checked_add(bytes)?.checked_next_multiple_of(CACHE_LINE));
                end = next.ok_or(memory(usize::MAX))?;
                part_bytes.push(bytes.unwrap_or(0) as u64);
            }
            block_bytes = block_bytes.max(end);
        }
        if groups.len() > GROUPS_MAX {
            let (found, expected) = (groups.len(), GROUPS_MAX);
            return Err(OpError::Shape { op: OP, what: "number of groups of layers", found, expected });
        }
        let len = block_bytes.checked_mul(layout.blocks).ok_or(memory(usize::MAX))?;
        let memory =
            MmapOptions::new().len(len.max(1)).no_reserve_swap().map_anon().map_err(|_| memory(len))?;
        let slots = part_bytes.iter().map(Vec::len).max().unwrap_or(0);
        Ok(Self {
            layout: layout.clone(),
            memory,
            block_bytes,
            layer_offsets,
            locations: layout.layer_locations(&groups),
            part_bytes,
            owners: vec![0; layout.blocks],
            written: vec![vec![false; layout.blocks]; slots],
            used_bytes: 0,
        })
    }

    /// Number of KV cache groups, each with its own block tables.
    pub(super) fn groups(&self) -> usize {
        self.part_bytes.len()
    }

    /// Bytes of the layers that are written and not released. The remaining bytes of their pages do
    /// not count.
    pub fn used_bytes(&self) -> u64 {
        self.used_bytes
    }

    /// Releases the blocks from number `first` on, and returns their pages to the operating system.
    pub(super) fn trim(&mut self, first: usize) -> Result<(), OpError> {
        for (slot, written) in self.written.iter_mut().enumerate() {
            let owners = self.owners.iter().skip(first);
            for (written, &owner) in written.iter_mut().skip(first).zip(owners) {
                if std::mem::take(written) {
                    self.used_bytes -= self.part_bytes[usize::from(owner)][slot];
                }
            }
        }
        let start = first.saturating_mul(self.block_bytes).checked_next_multiple_of(PAGE_BYTES);
        let Some(start) = start.filter(|&start| start < self.memory.len()) else { return Ok(()) };
        let len = self.memory.len() - start;
        // SAFETY: the range is inside the mapping, which is anonymous. No slice of the mapping
        // lives beside the mutable borrow, and bytes that become zeros are valid bytes.
        let advised = unsafe { self.memory.unchecked_advise_range(UncheckedAdvice::DontNeed, start, len) };
        advised.map_err(|source| OpError::Device { op: "trim", source: source.into() })
    }

    /// Marks all layers of a block as not written.
    fn forget(&mut self, block: usize) {
        let parts = &self.part_bytes[usize::from(self.owners[block])];
        for (written, bytes) in self.written.iter_mut().zip(parts) {
            if std::mem::take(&mut written[block]) {
                self.used_bytes -= bytes;
            }
        }
    }

    /// Copies block `from` to block `to`. Refuses a block of which a layer is not written.
    pub(super) fn copy(&mut self, from: usize, to: usize) -> Result<(), OpError> {
        const OP: &str = "kv_copy";
        let len = self.layout.blocks;
        if let Some(index) = [from, to].into_iter().find(|&block| block >= len) {
            return Err(OpError::Index { op: OP, what: "block", index, len });
        }
        let owner = self.owners[from];
        let Some(parts) = self.part_bytes.get(usize::from(owner)) else { return Ok(()) };
        if !self.written.iter().take(parts.len()).all(|written| written[from]) {
            return Err(OpError::Unwritten { op: OP, block: from });
        }
        self.own(to, owner);
        for (written, bytes) in self.written.iter_mut().zip(&self.part_bytes[usize::from(owner)]) {
            if !std::mem::replace(&mut written[to], true) {
                self.used_bytes += bytes;
            }
        }
        let source = from * self.block_bytes..(from + 1) * self.block_bytes;
        self.memory.copy_within(source, to * self.block_bytes);
        Ok(())
    }

    /// Assigns a block to a group. If the block belonged to another group, its contents are lost.
    fn own(&mut self, block: usize, group: u8) {
        if self.owners[block] != group {
            self.forget(block);
            self.owners[block] = group;
        }
    }

    pub(super) fn view(&self, op: &'static str, layer: usize) -> Result<LayerView<'_>, OpError> {
        let len = self.layout.layers.len();
        let shape =
            *self.layout.layers.get(layer).ok_or(OpError::Index { op, what: "layer", index: layer, len })?;
        Ok(LayerView {
            memory: &self.memory,
            block_bytes: self.block_bytes,
            offset: self.layer_offsets[layer],
            block_tokens: self.layout.block_tokens,
            shape,
            group: self.locations[layer].group,
        })
    }

    /// Checks that the blocks of `table` exist and that keys and values of `layer` are written
    /// there.
    pub(super) fn check_written(&self, op: &'static str, layer: usize, table: &[u32]) -> Result<(), OpError> {
        let KvLayerLocation { group, slot } = self.locations[layer];
        let written = &self.written[slot];
        for &block in table {
            match written.get(block as usize) {
                Some(true) if usize::from(self.owners[block as usize]) == group => {}
                Some(_) => return Err(OpError::Unwritten { op, block: block as usize }),
                None => {
                    let (index, len) = (block as usize, written.len());
                    return Err(OpError::Index { op, what: "block", index, len });
                }
            }
        }
        Ok(())
    }

    /// Marks the blocks of `slots` as written by `layer`, and returns a writer for them.
    pub(super) fn writer(
        &mut self,
        op: &'static str,
        layer: usize,
        slots: &[u32],
    ) -> Result<LayerWriter, OpError> {
        let (tokens, len) = (self.layout.block_tokens, self.layout.blocks);
        let blocks = || slots.iter().map(|&slot| slot as usize / tokens);
        if let Some(index) = blocks().find(|&block| block >= len) {
            return Err(OpError::Index { op, what: "block", index, len });
        }
        let LayerView { block_bytes, offset, shape, .. } = self.view(op, layer)?;
        let KvLayerLocation { group, slot } = self.locations[layer];
        for block in blocks() {
            self.own(block, group as u8);
            if !std::mem::replace(&mut self.written[slot][block], true) {
                self.used_bytes += self.part_bytes[group][slot];
            }
        }
        let memory = self.memory.as_mut_ptr();
        Ok(LayerWriter { memory, len: self.memory.len(), block_bytes, offset, block_tokens: tokens, shape })
    }
}

/// Write access to one layer of a cache, for several threads.
#[derive(Clone, Copy)]
pub(super) struct LayerWriter {
    memory: *mut u8,
    len: usize,
    block_bytes: usize,
    offset: usize,
    block_tokens: usize,
    shape: KvLayer,
}

// SAFETY: the pointer points to bytes. The contract of `LayerWriter::write` makes threads write
// different heads.
unsafe impl Sync for LayerWriter {}

/// A kernel that writes one head of several rows. Threads that run it at the same time write
/// different heads.
pub(super) struct Write<'a, E> {
    writer: LayerWriter,
    head: usize,
    slots: &'a [u32],
    /// Rows of all KV heads.
    keys: &'a [f32],
    values: &'a [f32],
    element: PhantomData<E>,
}

impl LayerWriter {
    /// Writes `head` of each row to the row's slot.
    ///
    /// # Safety
    /// The cache is still borrowed mutably for this use, and no other thread writes the same head
    /// at the same time.
    pub(super) unsafe fn write(
        self,
        isa: super::Isa,
        head: usize,
        slots: &[u32],
        keys: &[f32],
        values: &[f32],
    ) {
        match self.shape.kind {
            KvType::F32 => isa.run(Write::<F32>::new(self, head, slots, keys, values)),
            KvType::F16 => isa.run(Write::<F16>::new(self, head, slots, keys, values)),
            KvType::Bf16 => isa.run(Write::<Bf16>::new(self, head, slots, keys, values)),
            KvType::Q8_0 => isa.run(Write::<Q8_0Element>::new(self, head, slots, keys, values)),
        }
    }

    /// The `len` bytes at `at`, which are in the head that the caller writes.
    #[inline(always)]
    fn bytes<'a>(self, at: usize, len: usize) -> &'a mut [u8] {
        assert!(at + len <= self.len);
        // SAFETY: the assertion keeps the range inside the mapping. The slice is exclusive by the
        // contract of `write`: `Write` asks for bytes of its own head only, and drops each slice
        // before the next.
        unsafe { std::slice::from_raw_parts_mut(self.memory.add(at), len) }
    }
}

impl<'a, E> Write<'a, E> {
    fn new(writer: LayerWriter, head: usize, slots: &'a [u32], keys: &'a [f32], values: &'a [f32]) -> Self {
        Self { writer, head, slots, keys, values, element: PhantomData }
    }
}

impl<E: Stored> SimdKernel for Write<'_, E> {
    type Output = ();

    #[inline(always)]
    fn run<S: Simd>(self, s: S) {
        let w = self.writer;
        let (dim, tokens) = (w.shape.head_dim, w.block_tokens);
        let row_values = w.shape.kv_heads * dim;
        let head_bytes = tokens * w.shape.kind.head_bytes(dim);
        let rows = self.keys.chunks_exact(row_values).zip(self.values.chunks_exact(row_values));
        for (&slot, (key, value)) in self.slots.iter().zip(rows) {
            let (block, token) = (slot as usize / tokens, slot as usize % tokens);
            let layer = block * w.block_bytes + w.offset;
            let keys_at = layer + self.head * head_bytes;
            let values_at = layer + (w.shape.kv_heads + self.head) * head_bytes;
            for (part, d) in (0..dim).step_by(STORED_TOGETHER).enumerate() {
                let count = STORED_TOGETHER.min(dim - d);
                let from = self.head * dim + d;
                let scale_at = tokens * dim * E::BYTES + (part * tokens + token) * SCALE_BYTES;
                let mut bytes = [0; 4 * STORED_TOGETHER];
                let key_scale = E::store(s, &key[from..from + count], &mut bytes);
                for (i, key) in bytes.chunks_exact(E::BYTES).take(count).enumerate() {
                    let at = keys_at + ((d + i) * tokens + token) * E::BYTES;
                    w.bytes(at, E::BYTES).copy_from_slice(key);
                }
                let value_scale = E::store(s, &value[from..from + count], &mut bytes);
                let at = values_at + (token * dim + d) * E::BYTES;
                w.bytes(at, count * E::BYTES).copy_from_slice(&bytes[..count * E::BYTES]);
                if E::SCALED > 0 {
                    w.bytes(keys_at + scale_at, SCALE_BYTES).copy_from_slice(&key_scale);
                    w.bytes(values_at + scale_at, SCALE_BYTES).copy_from_slice(&value_scale);
                }
            }
        }
    }
}
