// SPDX-License-Identifier: Apache-2.0

//! Launcher of norm_rope_kv.cu. In one pass, the kernel applies RMS norms and rotary embeddings to
//! query and key heads, and writes keys and values to the KV cache.

use ops::KvType;

use super::abi::kv::{NORM_ROPE_HEAD_DIM_MAX, NORM_ROPE_WARPS, NormRopeKvParams, NormRopeKvWrite};
use super::kv_write::KvLayerAddress;
use super::launch::{kernel_name, launch_spread};
use super::module::image;
use super::norm::ensure_same_len;
use super::rope::RopeAngles;
use super::{CudaError, Device, DeviceView, DeviceViewMut, LaunchConfig, LazyModule, Stream};

/// From this number of rows on, a block has a whole row: then there are enough blocks for every
/// multiprocessor of a large GPU.
const WHOLE_ROWS_MIN: usize = 512;

pub struct NormRopeKvKernels(LazyModule);

/// The query, key and value heads of a step.
pub struct NormRopeKvOperands<'a> {
    pub queries: DeviceViewMut<'a, f32>,
    pub keys: DeviceViewMut<'a, f32>,
    pub values: DeviceView<'a, f32>,
    /// The weights of the query norm and of the key norm, and their epsilon.
    pub norms: Option<(DeviceView<'a, f32>, DeviceView<'a, f32>, f32)>,
    pub positions: DeviceView<'a, u32>,
    pub slots: DeviceView<'a, u32>,
    pub angles: RopeAngles<'a>,
    pub head_dim: usize,
    pub kv_heads: usize,
}

impl NormRopeKvOperands<'_> {
    /// The kernel's parameters, if the lengths agree.
    pub(super) fn params(&self) -> Result<NormRopeKvParams, CudaError> {
        let Self { head_dim, kv_heads, angles, .. } = *self;
        let (rows, pairs) = (self.slots.len(), angles.inverse_frequencies.len());
        let heads = self.queries.len() / (rows * head_dim).max(1);
        ensure_same_len("query heads", self.queries.len(), rows * heads * head_dim)?;
        ensure_same_len("key heads", self.keys.len(), rows * kv_heads * head_dim)?;
        ensure_same_len("value heads", self.values.len(), self.keys.len())?;
        ensure_same_len("positions", self.positions.len(), rows)?;
        ensure_same_len("pairs of a head", (2 * pairs).max(head_dim), head_dim)?;
        ensure_same_len("values of a head", head_dim.min(NORM_ROPE_HEAD_DIM_MAX), head_dim)?;
        if let Some((query, key, _)) = self.norms {
            ensure_same_len("weight of a query norm", query.len(), head_dim)?;
            ensure_same_len("weight of a key norm", key.len(), head_dim)?;
        }
        let (query_weight, key_weight, eps) =
            self.norms.map_or((0, 0, 0.0), |(query, key, eps)| (query.address(), key.address(), eps));
        Ok(NormRopeKvParams {
            queries: self.queries.address(),
            keys: self.keys.address(),
            values: self.values.address(),
            query_weight,
            key_weight,
            positions: self.positions.address(),
            slots: self.slots.address(),
            inverse_frequencies: angles.inverse_frequencies.address(),
            eps,
            magnitude: angles.magnitude,
            heads: heads as i32,
            kv_heads: kv_heads as i32,
            head_dim: head_dim as i32,
            pairs: pairs as i32,
            adjacent: i32::from(angles.pairing == ops::RopePairing::Adjacent),
        })
    }
}

impl NormRopeKvKernels {
    pub fn new(device: &Device) -> Self {
        Self(LazyModule::new(device, "norm_rope_kv", image!("norm_rope_kv")))
    }

    /// Whether the kernel's shared memory has room for heads of `head_dim` values.
    pub(super) fn supports(head_dim: usize) -> bool {
        head_dim <= NORM_ROPE_HEAD_DIM_MAX
    }

    /// # Safety
    /// `layer` describes mapped memory of this shape and type. The slots are in device memory, and
    /// their blocks lie in the memory of `layer`. Positions, slots, weights and frequencies were
    /// written before the stream's last kernel was launched.
    pub unsafe fn launch(
        &self,
        stream: &Stream,
        layer: KvLayerAddress,
        kind: KvType,
        operands: &NormRopeKvOperands<'_>,
    ) -> Result<(), CudaError> {
        let params = operands.params()?;
        let rows = operands.slots.len();
        if rows == 0 {
            return Ok(());
        }
        let heads = (params.heads + 2 * params.kv_heads) as usize;
        let blocks_of_row = if rows < WHOLE_ROWS_MIN { heads.div_ceil(NORM_ROPE_WARPS) as u32 } else { 1 };
        let launch = LaunchConfig {
            grid: (rows as u32, blocks_of_row, 1),
            block: 32 * NORM_ROPE_WARPS as u32,
            shared_bytes: 0,
            overlaps_predecessor: true,
            cluster: 1,
        };
        let name = match kind {
            KvType::F32 => kernel_name!("norm_rope_kv", "norm_rope_kv_write_f32"),
            KvType::F16 => kernel_name!("norm_rope_kv", "norm_rope_kv_write_f16"),
            KvType::Bf16 => kernel_name!("norm_rope_kv", "norm_rope_kv_write_bf16"),
            KvType::Q8_0 => kernel_name!("norm_rope_kv", "norm_rope_kv_write_q8_0"),
        };
        let arguments = NormRopeKvWrite { kv: layer, params };
        // SAFETY: a warp reads and writes one head of one row, inside lengths that were checked. It
        // writes the slot of its row, which is valid by this function's contract.
        unsafe { launch_spread(&self.0, name, stream, launch, &arguments) }
    }
}
