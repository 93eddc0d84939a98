//! Launcher of kv_write.cu: a step's keys and values into the cache; and [`KvLayerAddress`], how kernels find them.

use ops::KvType;

use super::module::{arguments, image};
use super::norm::ensure_same_len;
use super::{CudaError, Device, Family, Launch, Stream, View};

/// As kv_write.cu.
const THREADS: u32 = 256;

/// `KvLayer` of kv_layer.cuh.
#[repr(C)]
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct KvLayerAddress {
    pub base: u64,
    pub unit_bytes: u64,
    pub layer_offset: u64,
    pub block_bytes: u32,
    pub head_bytes: u32,
    pub unit_shift: u32,
    pub block_tokens: u32,
}

/// Bytes of the scales of a head of one token: an even number of them, as kv_layer.cuh has it.
pub(super) fn q8_scale_bytes(head_dim: usize) -> usize {
    const SCALED_VALUES: usize = 32;
    head_dim.div_ceil(SCALED_VALUES).next_multiple_of(2) * size_of::<u16>()
}

/// Keys, or values, of one head in a block of so many tokens, as kernels lay them out. None if it is beyond 32 bits.
pub fn head_bytes(kind: KvType, head_dim: usize, block_tokens: usize) -> Option<u32> {
    /// Of scales, and of a head's quants, which are copied by so many.
    const SCALES_ALIGN: usize = 4;
    const ALIGN: usize = 16;
    let values = head_dim.checked_mul(block_tokens)?;
    let bytes = match kind {
        KvType::F32 => values.checked_mul(4)?,
        KvType::F16 | KvType::Bf16 => values.checked_mul(2)?,
        KvType::Q8_0 => {
            let scales = q8_scale_bytes(head_dim).checked_mul(block_tokens)?;
            let quants = values.checked_next_multiple_of(SCALES_ALIGN)?;
            quants.checked_add(scales)?.checked_next_multiple_of(ALIGN)?
        }
    };
    u32::try_from(bytes).ok()
}

impl KvLayerAddress {
    /// Where the layer's part of a block starts: its keys of head 0, as kv_layer.cuh has it.
    pub fn of_block(&self, block: u32) -> u64 {
        let (unit, inside) = (block >> self.unit_shift, block & ((1 << self.unit_shift) - 1));
        self.base
            + u64::from(unit) * self.unit_bytes
            + self.layer_offset
            + u64::from(inside) * u64::from(self.block_bytes)
    }
}

pub struct KvWriteKernels(Family);

impl KvWriteKernels {
    pub fn new(device: &Device) -> Self {
        Self(Family::new(device, "kv_write", image!("kv_write")))
    }

    /// Keys and values of `slots.len()` rows of `kv_heads` heads of `head_dim` values.
    ///
    /// # Safety
    /// `layer` describes mapped memory of this shape and type, and the blocks of all `slots`, which are on the device, lie
    /// in it. Nothing else uses these slots until the kernel has ended.
    #[expect(clippy::too_many_arguments, reason = "operands of one kernel, each of its own meaning")]
    pub unsafe fn launch(
        &self,
        stream: &Stream,
        layer: KvLayerAddress,
        kind: KvType,
        keys: View<'_, f32>,
        values: View<'_, f32>,
        slots: View<'_, u32>,
        kv_heads: usize,
        head_dim: usize,
    ) -> Result<(), CudaError> {
        let rows = slots.len();
        ensure_same_len("keys", keys.len(), rows * kv_heads * head_dim)?;
        ensure_same_len("values", values.len(), keys.len())?;
        if rows == 0 {
            return Ok(());
        }
        let name = match kind {
            KvType::F32 => c"kv_write_f32",
            KvType::F16 => c"kv_write_f16",
            KvType::Bf16 => c"kv_write_bf16",
            KvType::Q8_0 => c"kv_write_q8_0",
        };
        let launch =
            Launch { grid: (rows as u32, 1, 1), block: THREADS, shared_bytes: 0, overlaps_predecessor: true };
        let (keys, values, slots) = (keys.address(), values.address(), slots.address());
        let (kv_heads, head_dim) = (kv_heads as i32, head_dim as i32);
        let kernel = self.0.kernel(name)?;
        // SAFETY: (KvLayer, const float *, const float *, const uint32_t *, int, int); block r reads row r of keys and
        // values and writes slot `slots[r]`, valid by this function's contract.
        unsafe { kernel.launch(stream, launch, arguments![layer, keys, values, slots, kv_heads, head_dim]) }
    }
}
