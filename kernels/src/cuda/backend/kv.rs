// SPDX-License-Identifier: Apache-2.0

//! [`CudaKv`] holds the KV cache of all layers in one address range. The range grows when blocks
//! are written for the first time.
//!
//! The range grows in units of 2^k blocks over all layers. Inside a unit the blocks of each layer
//! are contiguous, so that attention reads long ranges.
//!
//! 1. The first unit is mapped from the beginning.
//! 2. A unit is mapped before the step that first writes to it. This happens mostly while the
//!    device is busy with the previous step.
//! 3. When the engine trims the cache, units are unmapped after all work has ended.
//! 4. Addresses never change, so captured graphs stay valid.

use std::any::Any;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, Weak};

use cuda::{Context, Device, ResizableMemory, ResizeError};
use ops::{AttentionSpan, KvLayer, KvLayout, OpError};

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

pub struct CudaKv {
    layout: KvLayout,
    shape: UnitLayout,
    memory: Arc<Mutex<MappedKv>>,
    address: u64,
    /// The written blocks, by layer.
    written: Vec<BlockSet>,
}

/// How a cache is divided into units.
struct UnitLayout {
    /// Bytes of a unit, before rounding up to the driver's granularity.
    bytes: u64,
    /// A unit has 2^shift blocks.
    shift: u32,
    count: u64,
    /// The offset of each layer in a unit.
    layer_offsets: Vec<u64>,
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
        let sum = |layers: Vec<u64>| layers.into_iter().try_fold(0_u64, |sum, bytes| sum.checked_add(bytes));
        let block_bytes = sum(layer_bytes(layout, 1)?)?.max(1);
        let blocks = UNIT_BYTES_MIN.div_ceil(block_bytes).next_power_of_two();
        let blocks = blocks.min((layout.blocks as u64).next_power_of_two());
        let mut bytes = 0_u64;
        let mut layer_offsets = Vec::with_capacity(layout.layers.len());
        for of_layer in layer_bytes(layout, blocks)? {
            layer_offsets.push(bytes);
            bytes = bytes.checked_add(of_layer)?.checked_next_multiple_of(ALIGN)?;
        }
        let count = (layout.blocks as u64).div_ceil(blocks).max(1);
        Some(Self { bytes: bytes.max(1), shift: blocks.trailing_zeros(), count, layer_offsets })
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
        let windows = layout.layers.iter().find_map(|layer| match layer.span {
            AttentionSpan::Full => None,
            AttentionSpan::Window { tokens } => Some(tokens),
        });
        if let Some(tokens) = windows {
            return Err(OpError::Window { op: OP, tokens });
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
            written: vec![BlockSet::default(); layout.layers.len()],
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

    /// Copies written blocks of all layers, one pair after the other in the order of `stream`. The
    /// memory must stay mapped until this work has ended ([`Self::owner`]).
    pub(super) fn copy(&mut self, stream: &Stream, copies: &[(u32, u32)]) -> Result<(), OpError> {
        const OP: &str = "kv_copy";
        let (tokens, len) = (self.layout.block_tokens as u32, self.layout.blocks);
        for &(from, to) in copies {
            if let Some(block) = [from, to].into_iter().find(|&block| block as usize >= len) {
                return Err(OpError::Index { op: OP, what: "block", index: block as usize, len });
            }
            for layer in 0..self.layout.layers.len() {
                if !self.written[layer].contains(from as usize) {
                    return Err(OpError::Unwritten { op: OP, block: from as usize });
                }
                self.prepare(OP, layer, &[to * tokens], to * tokens)?;
                if from == to {
                    continue;
                }
                let (_, address) = self.layer(OP, layer)?;
                let (source, target) = (address.of_block(from), address.of_block(to));
                // SAFETY: source and target are distinct whole blocks of this layer, in mapped
                // memory. A written block is mapped, and `prepare` maps the other one. The caller
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

    pub(super) fn layer(&self, op: &'static str, layer: usize) -> Result<(KvLayer, KvLayerAddress), OpError> {
        let len = self.layout.layers.len();
        let shape =
            *self.layout.layers.get(layer).ok_or(OpError::Index { op, what: "layer", index: layer, len })?;
        let Some((head_bytes, block_bytes)) = bytes_in_block(&shape, self.layout.block_tokens) else {
            return Err(no_room(op, u64::MAX, None));
        };
        let address = KvLayerAddress {
            base: self.address,
            unit_bytes: self.memory().range.unit_bytes(),
            layer_offset: self.shape.layer_offsets[layer],
            block_bytes,
            head_bytes,
            unit_shift: self.shape.shift,
            block_tokens: self.layout.block_tokens as u32,
        };
        Ok((shape, address))
    }

    /// Maps memory for `slots` and marks their blocks as written. `slot_max` is the largest slot.
    pub(super) fn prepare(
        &mut self,
        op: &'static str,
        layer: usize,
        slots: &[u32],
        slot_max: u32,
    ) -> Result<(), OpError> {
        let (tokens, len) = (self.layout.block_tokens, self.layout.blocks);
        let last = slot_max as usize / tokens;
        if last >= len {
            return Err(OpError::Index { op, what: "block", index: last, len });
        }
        let units = self.shape.of_blocks(last + 1);
        let mut memory = self.memory();
        if units > memory.range.units() {
            memory.grow_to(op, units)?;
        }
        if units == memory.range.units() {
            memory.ahead = (units + 1).min(self.shape.count);
        }
        drop(memory);
        let written = &mut self.written[layer];
        for &slot in slots {
            written.insert(slot as usize / tokens);
        }
        Ok(())
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

/// Bytes of `blocks` blocks of each layer. None if they overflow 64 bits, or if a block overflows
/// 32 bits.
fn layer_bytes(layout: &KvLayout, blocks: u64) -> Option<Vec<u64>> {
    let bytes = |layer: &KvLayer| {
        let (_, block) = bytes_in_block(layer, layout.block_tokens)?;
        u64::from(block).checked_mul(blocks)
    };
    layout.layers.iter().map(bytes).collect()
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
        assert_eq!(kv_bytes(&KvLayout { layers: vec![beyond], ..layout }), None);
    }
}
