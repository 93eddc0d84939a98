//! Launcher of norm_rope_kv.cu: norms and rotations of query and key heads, and keys and values into the cache, in one pass.

use ops::KvType;

use super::kv_write::KvLayerAddress;
use super::module::{arguments, image};
use super::norm::ensure_same_len;
use super::rope::RopeAngles;
use super::{CudaError, Device, Family, Launch, Stream, View, ViewMut};

/// As norm_rope_kv.cu.
const WARPS: usize = 8;
const HEAD_DIM_MAX: usize = 256;

pub struct NormRopeKvKernels(Family);

/// What a step's heads go through. NormKernels have one epsilon.
pub struct NormRopeKvOperands<'a> {
    pub queries: ViewMut<'a, f32>,
    pub keys: ViewMut<'a, f32>,
    pub values: View<'a, f32>,
    /// Weights of the norms of query and key heads.
    pub norms: Option<(View<'a, f32>, View<'a, f32>, f32)>,
    pub positions: View<'a, u32>,
    pub slots: View<'a, u32>,
    pub turn: RopeAngles<'a>,
    pub head_dim: usize,
    pub kv_heads: usize,
}

/// `Heads` of norm_rope_kv.cu.
#[repr(C)]
#[derive(Clone, Copy)]
struct Heads {
    queries: u64,
    keys: u64,
    values: u64,
    query_weight: u64,
    key_weight: u64,
    positions: u64,
    slots: u64,
    inverse_frequencies: u64,
    eps: f32,
    magnitude: f32,
    heads: i32,
    kv_heads: i32,
    head_dim: i32,
    pairs: i32,
    adjacent: i32,
}

impl NormRopeKvKernels {
    pub fn new(device: &Device) -> Self {
        Self(Family::new(device, "norm_rope_kv", image!("norm_rope_kv")))
    }

    /// Whether there is a kernel for heads of so many values.
    pub(super) fn has(head_dim: usize) -> bool {
        head_dim <= HEAD_DIM_MAX
    }

    /// # Safety
    /// `layer` describes mapped memory of this shape and type, and the blocks of all `slots`, which are on the device, lie
    /// in it. Positions, slots, weights and frequencies were written before the stream's last kernel was started.
    pub unsafe fn launch(
        &self,
        stream: &Stream,
        layer: KvLayerAddress,
        kind: KvType,
        rows: &mut NormRopeKvOperands<'_>,
    ) -> Result<(), CudaError> {
        let NormRopeKvOperands { head_dim, kv_heads, turn, .. } = *rows;
        let (count, pairs) = (rows.slots.len(), turn.inverse_frequencies.len());
        let heads = rows.queries.len() / (count * head_dim).max(1);
        ensure_same_len("query heads", rows.queries.len(), count * heads * head_dim)?;
        ensure_same_len("key heads", rows.keys.len(), count * kv_heads * head_dim)?;
        ensure_same_len("value heads", rows.values.len(), rows.keys.len())?;
        ensure_same_len("positions", rows.positions.len(), count)?;
        ensure_same_len("pairs of a head", (2 * pairs).max(head_dim), head_dim)?;
        ensure_same_len("values of a head", head_dim.min(HEAD_DIM_MAX), head_dim)?;
        if let Some((query, key, _)) = rows.norms {
            ensure_same_len("weight of a norm of heads", query.len(), head_dim)?;
            ensure_same_len("weight of a norm of heads", key.len(), head_dim)?;
        }
        if count == 0 {
            return Ok(());
        }
        let (query_weight, key_weight, eps) =
            rows.norms.map_or((0, 0, 0.0), |(query, key, eps)| (query.address(), key.address(), eps));
        let operands = Heads {
            queries: rows.queries.address(),
            keys: rows.keys.address(),
            values: rows.values.address(),
            query_weight,
            key_weight,
            positions: rows.positions.address(),
            slots: rows.slots.address(),
            inverse_frequencies: turn.inverse_frequencies.address(),
            eps,
            magnitude: turn.magnitude,
            heads: heads as i32,
            kv_heads: kv_heads as i32,
            head_dim: head_dim as i32,
            pairs: pairs as i32,
            adjacent: i32::from(turn.pairing == ops::RopePairing::Adjacent),
        };
        let grid = (count as u32, (heads + 2 * kv_heads).div_ceil(WARPS) as u32, 1);
        let launch = Launch { grid, block: 32 * WARPS as u32, shared_bytes: 0, overlaps_predecessor: true };
        let kernel = self.0.kernel(match kind {
            KvType::F32 => c"norm_rope_kv_write_f32",
            KvType::F16 => c"norm_rope_kv_write_f16",
            KvType::Bf16 => c"norm_rope_kv_write_bf16",
            KvType::Q8_0 => c"norm_rope_kv_write_q8_0",
        })?;
        // SAFETY: (KvLayer, Heads); a warp works on one head of one row, inside lengths that were checked, and the slot of
        // its row by this function's contract.
        unsafe { kernel.launch(stream, launch, arguments![layer, operands]) }
    }
}
