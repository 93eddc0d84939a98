// SPDX-License-Identifier: Apache-2.0

//! Launcher of kv_write.cu: writes the keys and values of a step to the KV cache. A
//! [`KvLayerAddress`] tells kernels where a layer of the cache begins.

use ops::KvType;

pub use super::abi::kv::KvLayerAddress;
use super::abi::kv::{KV_WRITE_THREADS, KvWrite};
use super::launch::{kernel_name, launch_spread};
use super::module::image;
use super::norm::ensure_same_len;
use super::{CudaError, Device, DeviceView, LaunchConfig, LazyModule, Stream};

/// Bytes of the scales of one head of one token. The number of f16 scales is even, as in q8_scales
/// of kv_layer.cuh.
pub(super) fn q8_scale_bytes(head_dim: usize) -> usize {
    const SCALED_VALUES: usize = 32;
    head_dim.div_ceil(SCALED_VALUES).next_multiple_of(2) * size_of::<u16>()
}

/// Bytes of the keys (or of the values) of one head in a block of `block_tokens` tokens. None if
/// the number of bytes exceeds 32 bits.
pub fn head_bytes(kind: KvType, head_dim: usize, block_tokens: usize) -> Option<u32> {
    /// Kernels copy scales in units of 4 bytes.
    const SCALES_ALIGN: usize = 4;
    /// Kernels copy quants in units of 16 bytes.
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
    /// The address of the layer's part of a block, which begins with the keys of head 0 (head_keys
    /// in kv_layer.cuh).
    pub fn of_block(&self, block: u32) -> u64 {
        let (unit, inside) = (block >> self.unit_shift, block & ((1 << self.unit_shift) - 1));
        self.base
            + u64::from(unit) * self.unit_bytes
            + self.layer_offset
            + u64::from(inside) * u64::from(self.block_bytes)
    }
}

pub struct KvWriteKernels(LazyModule);

impl KvWriteKernels {
    pub fn new(device: &Device) -> Self {
        Self(LazyModule::new(device, "kv_write", image!("kv_write")))
    }

    /// Writes the keys and values of `slots.len()` rows, each of `kv_heads` heads of `head_dim`
    /// values.
    ///
    /// # Safety
    /// `layer` describes mapped memory of this shape and type. `slots` are in device memory, and
    /// their blocks lie in the memory of `layer`. Nothing else uses these slots until the kernel
    /// has ended.
    #[expect(clippy::too_many_arguments, reason = "operands of one kernel, each of its own meaning")]
    pub unsafe fn launch(
        &self,
        stream: &Stream,
        layer: KvLayerAddress,
        kind: KvType,
        keys: DeviceView<'_, f32>,
        values: DeviceView<'_, f32>,
        slots: DeviceView<'_, u32>,
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
            KvType::F32 => kernel_name!("kv_write", "kv_write_f32"),
            KvType::F16 => kernel_name!("kv_write", "kv_write_f16"),
            KvType::Bf16 => kernel_name!("kv_write", "kv_write_bf16"),
            KvType::Q8_0 => kernel_name!("kv_write", "kv_write_q8_0"),
        };
        let launch = LaunchConfig {
            grid: (rows as u32, 1, 1),
            block: KV_WRITE_THREADS,
            shared_bytes: 0,
            overlaps_predecessor: true,
            cluster: 1,
        };
        let arguments = KvWrite {
            kv: layer,
            keys: keys.address(),
            values: values.address(),
            slots: slots.address(),
            kv_heads: kv_heads as i32,
            head_dim: head_dim as i32,
        };
        // SAFETY: block r reads row r of keys and values and writes slot `slots[r]`, which is valid
        // by this function's contract.
        unsafe { launch_spread(&self.0, name, stream, launch, &arguments) }
    }
}
