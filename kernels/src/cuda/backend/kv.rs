// SPDX-License-Identifier: Apache-2.0

//! [`CudaKv`] holds the KV cache of all layers in one address range. The range grows when blocks
//! are written for the first time.
//!
//! A block holds the layers of one KV cache group: that of the last write to the block. The layers
//! with the same place in their groups share memory; its blocks have the size of the largest of
//! these layers. The range grows in units of 2^k blocks. Inside a unit the blocks of each place are
//! contiguous, so that attention reads long ranges.
//!
//! 1. The first unit is mapped from the beginning.
//! 2. A unit is mapped before the step that first writes to it. This happens mostly while the
//!    device is busy with the previous step.
//! 3. When the engine trims the cache, units are unmapped after all work has ended.
//! 4. Addresses never change, so captured graphs stay valid.

use std::any::Any;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, Weak};

use cuda::{Context, Device, ResizableMemory, ResizeError};
use ops::{AttentionSpan, KvGroup, KvLayer, KvLayerLocation, KvLayout, OpError};

use super::block_set::BlockSet;
use super::step::KvBlocks;
use crate::cuda::Stream;
use crate::cuda::error::device_error;
use crate::cuda::kv_write::{KvLayerAddress, head_bytes};

const OP: &str = "kv";
/// The smallest unit. Mapping a unit takes about 100 us whatever its size.
const UNIT_BYTES_MIN: u64 = 32 << 20;
/// The part of each layer begins at a multiple of this.
const ALIGN: u64 = 256;
/// On every GPU so far, the driver maps device memory in multiples of this. Before memory is
/// mapped, the driver states its own granularity.
const GRANULARITY: u64 = 2 << 20;
/// `CudaKv::owners` has one byte per block.
const GROUPS_MAX: usize = 1 << u8::BITS;

pub struct CudaKv {
    layout: KvLayout,
    shape: UnitLayout,
    memory: Arc<Mutex<MappedKv>>,
    address: u64,
    /// By layer.
    locations: Vec<KvLayerLocation>,
    /// By block, the group that last wrote to the block. Empty if there is one group.
    owners: Vec<u8>,
    /// The written blocks, by layer. A layer has none of the blocks that other groups own.
    written: Vec<BlockSet>,
    /// The layers of each group, by slot.
    groups: Vec<Vec<usize>>,
    /// The groups of each span.
    spans: Vec<(AttentionSpan, Vec<usize>)>,
}

/// How a cache is divided into units.
struct UnitLayout {
    /// Bytes of a unit, before rounding up to the driver's granularity.
    bytes: u64,
    /// A unit has 2^shift blocks.
    shift: u32,
    count: u64,
    /// By slot of a group.
    slots: Vec<UnitSlot>,
}

/// The layers with one place in their groups.
#[derive(Clone, Copy)]
struct UnitSlot {
    /// Offset in a unit.
    offset: u64,
    /// Bytes between two blocks.
    block_bytes: u32,
}

/// The commands in flight share this value, so the memory is unmapped only after they have ended.
struct MappedKv {
    range: ResizableMemory,
    context: Context,
    /// The number of units that steps will need soon.
    ahead: u64,
}

/// Lets the backend map the cache units that steps will need soon.
pub(super) struct UnitPrefetch(Weak<Mutex<MappedKv>>);

/// The device memory of a cache after every block has been written. None if it overflows 64 bits.
pub fn kv_bytes(layout: &KvLayout) -> Option<u64> {
    let units = UnitLayout::new(layout)?;
    units.bytes.checked_next_multiple_of(GRANULARITY)?.checked_mul(units.count)
}

impl UnitLayout {
    fn new(layout: &KvLayout) -> Option<Self> {
        let slot_bytes = slot_bytes(layout)?;
        let block_bytes = slot_bytes.iter().map(|&bytes| u64::from(bytes)).sum::<u64>().max(1);
        let blocks = UNIT_BYTES_MIN.div_ceil(block_bytes).next_power_of_two();
        let blocks = blocks.min((layout.blocks as u64).next_power_of_two());
        let mut bytes = 0_u64;
        let mut slots = Vec::with_capacity(slot_bytes.len());
        for block_bytes in slot_bytes {
            slots.push(UnitSlot { offset: bytes, block_bytes });
            let of_slot = u64::from(block_bytes).checked_mul(blocks)?;
            bytes = bytes.checked_add(of_slot)?.checked_next_multiple_of(ALIGN)?;
        }
        let count = (layout.blocks as u64).div_ceil(blocks).max(1);
        Some(Self { bytes: bytes.max(1), shift: blocks.trailing_zeros(), count, slots })
    }

    /// The number of units that hold the first `blocks` blocks.
    fn of_blocks(&self, blocks: usize) -> u64 {
        (blocks as u64).div_ceil(1 << self.shift)
    }
}

impl MappedKv {
    fn grow_to(&mut self, op: &'static str, units: u64) -> Result<(), OpError> {
        let bytes = units.saturating_sub(self.range.units()).saturating_mul(self.range.unit_bytes());
        self.range.grow_to(&self.context, units).map_err(|error| grow_error(op, bytes, error))
    }
}

impl UnitPrefetch {
    /// Maps the units that steps will need soon. If memory is short, this reports no error: the
    /// step that needs the unit does. Returns None if the cache was dropped.
    pub(super) fn map(&self) -> Option<()> {
        let memory = self.0.upgrade()?;
        let mut memory = memory.lock().unwrap_or_else(PoisonError::into_inner);
        let ahead = memory.ahead;
        if memory.range.units() < ahead && memory.grow_to(OP, ahead).is_err() {
            memory.ahead = 0;
        }
        Some(())
    }
}

impl CudaKv {
    pub(super) fn new(device: &Device, layout: &KvLayout) -> Result<Self, OpError> {
        if layout.block_tokens == 0 {
            return Err(OpError::Shape { op: OP, what: "tokens of a block", found: 0, expected: 1 });
        }
        let groups = layout.groups();
        if groups.len() > GROUPS_MAX {
            let (found, expected) = (groups.len(), GROUPS_MAX);
            return Err(OpError::Shape { op: OP, what: "number of groups of layers", found, expected });
        }
        let too_large = no_room(OP, u64::MAX, None);
        let shape = UnitLayout::new(layout).ok_or(too_large)?;
        let failed = |error| grow_error(OP, shape.bytes.saturating_mul(shape.count), error);
        let range = ResizableMemory::reserve(device, shape.bytes, shape.count).map_err(failed)?;
        let context = device.context().map_err(|error| failed(ResizeError::Driver(error)))?;
        let address = range.address();
        let mut memory = MappedKv { range, context, ahead: 0 };
        memory.grow_to(OP, 1)?;
        Ok(Self {
            layout: layout.clone(),
            shape,
            memory: Arc::new(Mutex::new(memory)),
            address,
            locations: layout.layer_locations(&groups),
            owners: if groups.len() > 1 { vec![0; layout.blocks] } else { Vec::new() },
            written: vec![BlockSet::default(); layout.layers.len()],
            spans: groups_by_span(&groups),
            groups: groups.into_iter().map(|group| group.layers).collect(),
        })
    }

    pub(super) fn ahead(&self) -> UnitPrefetch {
        UnitPrefetch(Arc::downgrade(&self.memory))
    }

    fn memory(&self) -> MutexGuard<'_, MappedKv> {
        self.memory.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// The device memory that is mapped now.
    pub fn mapped_bytes(&self) -> u64 {
        self.memory().range.mapped_bytes()
    }

    /// Unmaps the units that hold none of the first `blocks` blocks. Before that, `fence` waits for
    /// all work.
    pub(super) fn trim(
        &mut self,
        blocks: usize,
        fence: impl FnOnce() -> Result<(), OpError>,
    ) -> Result<(), OpError> {
        const OP: &str = "trim";
        for written in &mut self.written {
            written.remove_from(blocks);
        }
        let units = self.shape.of_blocks(blocks).max(1);
        let mut memory = self.memory();
        memory.ahead = 0;
        memory.range.shrink_to(units, || fence().map_err(TrimError::Fence)).map_err(|error| match error {
            TrimError::Fence(error) => error,
            TrimError::Grow(error) => grow_error(OP, 0, error),
        })
    }

    /// Copies written blocks, one pair after the other in the order of `stream`. The copies belong
    /// to the group of the blocks that they come from. The memory must stay mapped until this work
    /// has ended ([`Self::owner`]).
    pub(super) fn copy(&mut self, stream: &Stream, copies: &[(u32, u32)]) -> Result<(), OpError> {
        const OP: &str = "kv_copy";
        let len = self.layout.blocks;
        for &(from, to) in copies {
            if let Some(block) = [from, to].into_iter().find(|&block| block as usize >= len) {
                return Err(OpError::Index { op: OP, what: "block", index: block as usize, len });
            }
            let group = self.owner_of(from as usize);
            let Some(layers) = self.groups.get(group) else { continue };
            if layers.iter().any(|&layer| !self.written[layer].contains(from as usize)) {
                return Err(OpError::Unwritten { op: OP, block: from as usize });
            }
            if from == to {
                continue;
            }
            self.map_block(OP, to as usize)?;
            self.own(to as usize, group);
            for (slot, &layer) in self.groups[group].iter().enumerate() {
                self.written[layer].insert(to as usize);
                let address = self.address_of(slot, 0);
                let (source, target) = (address.of_block(from), address.of_block(to));
                // SAFETY: source and target are distinct whole blocks of this slot, in mapped
                // memory. A written block is mapped, and `map_block` maps the other one. The caller
                // keeps the memory until the work has ended.
                unsafe { stream.enqueue_copy_on_device(target, source, address.block_bytes as usize) }
                    .map_err(device_error(OP))?;
            }
        }
        Ok(())
    }

    /// The value that keeps the memory mapped.
    pub(super) fn owner(&self) -> Arc<dyn Any + Send + Sync> {
        self.memory.clone()
    }

    pub(super) fn blocks(&self) -> KvBlocks {
        KvBlocks { count: self.layout.blocks, tokens: self.layout.block_tokens }
    }

    /// The shape of a layer, its address, and its group.
    pub(super) fn layer(
        &self,
        op: &'static str,
        layer: usize,
    ) -> Result<(KvLayer, KvLayerAddress, usize), OpError> {
        let len = self.layout.layers.len();
        let shape =
            *self.layout.layers.get(layer).ok_or(OpError::Index { op, what: "layer", index: layer, len })?;
        let Some((head_bytes, _)) = bytes_in_block(&shape, self.layout.block_tokens) else {
            return Err(no_room(op, u64::MAX, None));
        };
        let KvLayerLocation { group, slot } = self.locations[layer];
        Ok((shape, self.address_of(slot, head_bytes), group))
    }

    /// The address of the layer at a slot whose heads have `head_bytes` in a block.
    fn address_of(&self, slot: usize, head_bytes: u32) -> KvLayerAddress {
        let UnitSlot { offset, block_bytes } = self.shape.slots[slot];
        KvLayerAddress {
            base: self.address,
            unit_bytes: self.memory().range.unit_bytes(),
            layer_offset: offset,
            block_bytes,
            head_bytes,
            unit_shift: self.shape.shift,
            block_tokens: self.layout.block_tokens as u32,
        }
    }

    /// Maps memory for `slots` and marks their blocks as written. `slot_max` is at least the
    /// largest slot.
    pub(super) fn prepare(
        &mut self,
        op: &'static str,
        layer: usize,
        slots: &[u32],
        slot_max: u32,
    ) -> Result<(), OpError> {
        let tokens = self.layout.block_tokens;
        self.map_block(op, slot_max as usize / tokens)?;
        let KvLayerLocation { group, .. } = self.locations[layer];
        for block in slots.iter().map(|&slot| slot as usize / tokens) {
            self.own(block, group);
            self.written[layer].insert(block);
        }
        Ok(())
    }

    /// Maps memory for the blocks up to `block`, and plans to map the next unit.
    fn map_block(&self, op: &'static str, block: usize) -> Result<(), OpError> {
        let len = self.layout.blocks;
        if block >= len {
            return Err(OpError::Index { op, what: "block", index: block, len });
        }
        let units = self.shape.of_blocks(block + 1);
        let mut memory = self.memory();
        if units > memory.range.units() {
            memory.grow_to(op, units)?;
        }
        if units == memory.range.units() {
            memory.ahead = (units + 1).min(self.shape.count);
        }
        Ok(())
    }

    fn owner_of(&self, block: usize) -> usize {
        self.owners.get(block).copied().map_or(0, usize::from)
    }

    /// Assigns a block to a group. If the block belonged to another group, its contents are lost.
    fn own(&mut self, block: usize, group: usize) {
        if self.owner_of(block) != group {
            self.written.iter_mut().for_each(|written| written.remove(block));
            self.owners[block] = group as u8;
        }
    }

    /// The number of KV cache groups, each with block tables of its own.
    pub(super) fn groups(&self) -> usize {
        self.groups.len()
    }

    /// The groups of the layers with a span.
    pub(super) fn groups_of(&self, span: AttentionSpan) -> &[usize] {
        self.spans.iter().find(|(of, _)| *of == span).map_or(&[], |(_, groups)| groups)
    }

    /// Checks that `layer` has written the blocks which a step reads.
    pub(super) fn check_written(
        &self,
        op: &'static str,
        layer: usize,
        read: &BlockSet,
    ) -> Result<(), OpError> {
        match read.first_not_in(&self.written[layer]) {
            Some(block) => Err(OpError::Unwritten { op, block }),
            None => Ok(()),
        }
    }
}

fn groups_by_span(groups: &[KvGroup]) -> Vec<(AttentionSpan, Vec<usize>)> {
    let mut spans: Vec<(AttentionSpan, Vec<usize>)> = Vec::new();
    for (number, group) in groups.iter().enumerate() {
        match spans.iter_mut().find(|(span, _)| *span == group.span) {
            Some((_, numbers)) => numbers.push(number),
            None => spans.push((group.span, vec![number])),
        }
    }
    spans
}

enum TrimError {
    Fence(OpError),
    Grow(ResizeError),
}

impl From<ResizeError> for TrimError {
    fn from(error: ResizeError) -> Self {
        Self::Grow(error)
    }
}

/// Returns two sizes for a block of `tokens` tokens: the bytes of one head's keys (or values), and
/// the bytes of the whole layer's part.
fn bytes_in_block(layer: &KvLayer, tokens: usize) -> Option<(u32, u32)> {
    let head = head_bytes(layer.kind, layer.head_dim, tokens)?;
    let block = head.checked_mul(u32::try_from(layer.kv_heads).ok()?)?.checked_mul(2)?;
    Some((head, block))
}

/// Bytes of a block of each slot: those of the largest layer there. None if they overflow 32 bits.
fn slot_bytes(layout: &KvLayout) -> Option<Vec<u32>> {
    let mut slots: Vec<u32> = Vec::new();
    for group in layout.groups() {
        slots.resize(slots.len().max(group.layers.len()), 0);
        for (slot, &layer) in slots.iter_mut().zip(&group.layers) {
            let (_, bytes) = bytes_in_block(&layout.layers[layer], layout.block_tokens)?;
            *slot = (*slot).max(bytes);
        }
    }
    Some(slots)
}

fn no_room(op: &'static str, bytes: u64, free: Option<u64>) -> OpError {
    OpError::Memory { op, what: "keys and values", bytes, free }
}

fn grow_error(op: &'static str, bytes: u64, error: ResizeError) -> OpError {
    match error {
        ResizeError::OutOfMemory { requested_bytes, free_bytes } => no_room(op, requested_bytes, free_bytes),
        ResizeError::BeyondReservation { .. } => no_room(op, bytes, None),
        error @ ResizeError::Driver(_) => OpError::Device { op, source: Box::new(error) },
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use ops::KvType;

    #[test]
    fn a_cache_that_cannot_grow_says_what_is_free() {
        let refused = ResizeError::OutOfMemory { requested_bytes: 6 << 20, free_bytes: Some(2 << 20) };
        let error = grow_error(OP, 0, refused);
        assert!(
            matches!(error, OpError::Memory { bytes, free: Some(free), .. } if (bytes, free) == (6 << 20, 2 << 20)),
            "{error}"
        );
    }

    #[test]
    fn a_cache_takes_its_blocks_rounded_up_to_units() {
        let layer = KvLayer { kv_heads: 8, head_dim: 128, kind: KvType::F16, span: AttentionSpan::Full };
        let layout = KvLayout { block_tokens: 16, blocks: 1000, layers: vec![layer; 36] };
        // A block has 2.25 MiB, so a unit of 36 MiB has 16 blocks.
        assert_eq!(kv_bytes(&layout), Some((63 * 36) << 20));
        let few = KvLayout { blocks: 3, ..layout.clone() };
        assert_eq!(kv_bytes(&few), Some(10 << 20), "four blocks are 9 MiB");
        let beyond =
            KvLayer { kv_heads: usize::MAX, head_dim: 2, kind: KvType::F32, span: AttentionSpan::Full };
        assert_eq!(kv_bytes(&KvLayout { layers: vec![beyond], ..layout.clone() }), None);
        // Seven groups of four layers share the blocks.
        let window = KvLayer { span: AttentionSpan::Window { tokens: 512 }, ..layer };
        let layers = (0..26).map(|at| if at % 6 == 5 { layer } else { window }).collect();
        // A block has 256 KiB, so a unit of 32 MiB has 128 blocks.
        assert_eq!(kv_bytes(&KvLayout { layers, ..layout }), Some((8 * 32) << 20));
    }
}
