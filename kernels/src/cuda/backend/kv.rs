//! Keys and values of all layers: one address range that grows as blocks are first written.
//!
//! It grows in units of 2^k blocks over all layers; inside a unit each layer's blocks stand together, so that attention reads
//! long ranges. Units are mapped before the step that first writes into them, and never taken away while the cache lives.

use std::any::Any;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex};

use memory::cuda::{Context, Device, GrowError, GrowingRange};
use ops::{KvLayer, KvLayout, OpError};

use crate::cuda::kv_write::KvLayerAddress;

/// The smallest unit: mapping one costs some 100 us whatever its size.
const UNIT_BYTES_MIN: u64 = 32 << 20;
/// Parts of layers start at multiples of this.
const ALIGN: u64 = 256;

pub struct Kv {
    layout: KvLayout,
    memory: Arc<Mutex<Memory>>,
    address: u64,
    unit_bytes: u64,
    /// Units mapped so far.
    units: u64,
    unit_shift: u32,
    /// Where each layer starts in a unit.
    layer_offsets: Vec<u64>,
    /// By layer, then by block.
    written: Vec<Vec<bool>>,
    /// By layer, the step whose blocks were last found to be written.
    checked: Vec<AtomicU64>,
}

/// Shared with the commands in flight, so that it is unmapped only after them.
struct Memory {
    range: GrowingRange,
    context: Context,
}

impl Kv {
    pub(super) fn new(device: &Device, layout: &KvLayout) -> Result<Self, OpError> {
        const OP: &str = "kv";
        if layout.block_tokens == 0 {
            return Err(OpError::Shape { op: OP, what: "tokens of a block", found: 0, expected: 1 });
        }
        let too_large = || OpError::Memory { op: OP, what: "keys and values", bytes: u64::MAX };
        let block_bytes = layer_bytes(layout, 1)
            .and_then(|layers| layers.into_iter().try_fold(0_u64, |sum, bytes| sum.checked_add(bytes)));
        let block_bytes = block_bytes.ok_or_else(too_large)?.max(1);
        let unit_blocks = UNIT_BYTES_MIN.div_ceil(block_bytes).next_power_of_two();
        let unit_blocks = unit_blocks.min((layout.blocks as u64).next_power_of_two());
        let mut unit_bytes = 0_u64;
        let mut layer_offsets = Vec::with_capacity(layout.layers.len());
        for bytes in layer_bytes(layout, unit_blocks).ok_or_else(too_large)? {
            layer_offsets.push(unit_bytes);
            let end = unit_bytes.checked_add(bytes).and_then(|end| end.checked_next_multiple_of(ALIGN));
            unit_bytes = end.ok_or_else(too_large)?;
        }
        let units = (layout.blocks as u64).div_ceil(unit_blocks);
        let bytes = unit_bytes.saturating_mul(units);
        let failed = |error| grow_error(OP, bytes, error);
        let range = GrowingRange::reserve(device, unit_bytes.max(1), units.max(1)).map_err(failed)?;
        let context = device.context().map_err(|refusal| failed(GrowError::Refused(refusal)))?;
        Ok(Self {
            layout: layout.clone(),
            address: range.address(),
            unit_bytes: range.unit_bytes(),
            units: 0,
            memory: Arc::new(Mutex::new(Memory { range, context })),
            unit_shift: unit_blocks.trailing_zeros(),
            layer_offsets,
            written: layout.layers.iter().map(|_| vec![false; layout.blocks]).collect(),
            checked: layout.layers.iter().map(|_| AtomicU64::new(0)).collect(),
        })
    }

    /// Device memory behind the cache now.
    pub fn mapped_bytes(&self) -> u64 {
        self.units * self.unit_bytes
    }

    /// What keeps the memory mapped.
    pub(super) fn owner(&self) -> Arc<dyn Any + Send + Sync> {
        self.memory.clone()
    }

    pub(super) fn block_tokens(&self) -> usize {
        self.layout.block_tokens
    }

    pub(super) fn layer(&self, op: &'static str, layer: usize) -> Result<(KvLayer, KvLayerAddress), OpError> {
        let len = self.layout.layers.len();
        let shape =
            *self.layout.layers.get(layer).ok_or(OpError::Index { op, what: "layer", index: layer, len })?;
        let block_bytes = (shape.token_bytes() * self.layout.block_tokens) as u32;
        let address = KvLayerAddress {
            base: self.address,
            unit_bytes: self.unit_bytes,
            layer_offset: self.layer_offsets[layer],
            block_bytes,
            head_bytes: block_bytes / (2 * shape.kv_heads as u32).max(1),
            unit_shift: self.unit_shift,
            block_tokens: self.layout.block_tokens as u32,
        };
        Ok((shape, address))
    }

    /// Makes room for `slots`, the largest of which is `slot_max`, and marks their blocks as written.
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
        let units = (last as u64 >> self.unit_shift) + 1;
        if units > self.units {
            let bytes = (units - self.units) * self.unit_bytes;
            let Memory { range, context } =
                &mut *self.memory.lock().unwrap_or_else(std::sync::PoisonError::into_inner);
            range.grow_to(context, units).map_err(|error| grow_error(op, bytes, error))?;
            self.units = units;
        }
        let written = &mut self.written[layer];
        for &slot in slots {
            written[slot as usize / tokens] = true;
        }
        Ok(())
    }

    /// That the blocks that step number `step` reads have been written.
    pub(super) fn check_written<I: Iterator<Item = u32>>(
        &self,
        op: &'static str,
        layer: usize,
        step: u64,
        blocks: impl FnOnce() -> Result<I, OpError>,
    ) -> Result<(), OpError> {
        if self.checked[layer].load(Ordering::Relaxed) == step {
            return Ok(());
        }
        let written = &self.written[layer];
        for block in blocks()? {
            let (index, len) = (block as usize, written.len());
            match written.get(index) {
                Some(true) => {}
                Some(false) => return Err(OpError::Unwritten { op, block: index }),
                None => return Err(OpError::Index { op, what: "block", index, len }),
            }
        }
        self.checked[layer].store(step, Ordering::Relaxed);
        Ok(())
    }
}

/// Bytes of `blocks` blocks of each layer; none if they are beyond 64 bits, or a block beyond 32.
fn layer_bytes(layout: &KvLayout, blocks: u64) -> Option<Vec<u64>> {
    let bytes = |layer: &KvLayer| {
        let values = (layer.kv_heads as u64).checked_mul(layer.head_dim as u64)?.checked_mul(2)?;
        let block = values.checked_mul(layer.kind.bytes() as u64)?.checked_mul(layout.block_tokens as u64)?;
        u32::try_from(block).ok()?;
        block.checked_mul(blocks)
    };
    layout.layers.iter().map(bytes).collect()
}

fn grow_error(op: &'static str, bytes: u64, error: GrowError) -> OpError {
    match error {
        GrowError::OutOfMemory { asked_bytes, .. } => {
            OpError::Memory { op, what: "keys and values", bytes: asked_bytes }
        }
        GrowError::BeyondReservation { .. } => OpError::Memory { op, what: "keys and values", bytes },
        error @ GrowError::Refused(_) => OpError::Device { op, source: Box::new(error) },
    }
}
