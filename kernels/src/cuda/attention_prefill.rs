// SPDX-License-Identifier: Apache-2.0

//! Chooses and launches the kernel of attention for long runs of tokens: attention/prefill.cuh, or
//! attention/prefill_wgmma.cuh on Hopper.

use std::collections::HashSet;

use ops::{AttentionSpan, AttentionSpec, KvType};

use super::abi::attention::{
    ATTENTION_STAGES, AttentionPrefill, PREFILL_PAIRS, PREFILL_PART_DIM_MAX, PREFILL_WGMMA_GROUPS,
    PREFILL_WGMMA_SHARED_BYTES,
};
use super::attention::{
    AttentionInputs, AttentionKernels, AttentionPlanAddress, KvStageBytes, launch_shape, query_params,
    query_pitch_bytes,
};
use super::attention_names::by_head_dim;
use super::launch::{KernelName, kernel_name, launch_kernel};
use super::{CudaError, Device, DeviceViewMut, LaunchConfig, Stream, wgmma_linear};

/// The instructions that compute products of the prefill kernel. The choice depends on the model
/// and the device alone.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum PrefillMethod {
    MmaSync,
    Wgmma,
}

impl PrefillMethod {
    pub(super) fn of(device: &Device, spec: &AttentionSpec, kind: KvType) -> Self {
        let has_wgmma = has_wgmma_kernel(kind, spec.head_dim) && wgmma_linear::is_on(device);
        if has_wgmma { Self::Wgmma } else { Self::MmaSync }
    }

    /// (token, head) pairs of a block.
    pub(super) fn pairs(self) -> usize {
        match self {
            Self::MmaSync => PREFILL_PAIRS,
            Self::Wgmma => 64 * PREFILL_WGMMA_GROUPS,
        }
    }

    fn name(self, kind: KvType, head_dim: usize) -> KernelName<AttentionPrefill> {
        match (self, kind, head_dim) {
            (Self::MmaSync, ..) => by_head_dim!("attention_prefill", kind, head_dim),
            (Self::Wgmma, KvType::Bf16, 64) => kernel_name!("attention_bf16", "attention_prefill_wgmma_64"),
            (Self::Wgmma, KvType::Bf16, _) => kernel_name!("attention_bf16", "attention_prefill_wgmma_128"),
            (Self::Wgmma, _, 64) => kernel_name!("attention", "attention_prefill_wgmma_64"),
            (Self::Wgmma, ..) => kernel_name!("attention", "attention_prefill_wgmma_128"),
        }
    }

    fn launch(self, kind: KvType, spec: &AttentionSpec, tiles: u32) -> LaunchConfig {
        let kv_heads = spec.kv_heads as u32;
        match self {
            Self::MmaSync => {
                let parts = if spec.head_dim > PREFILL_PART_DIM_MAX { 2 } else { 1 };
                launch_shape((tiles, kv_heads, parts), self.shared_bytes(kind, spec) as usize)
            }
            // Blocks start in the order of x, then of y: the longest tiles of all heads first.
            Self::Wgmma => LaunchConfig {
                block: 128 * (PREFILL_WGMMA_GROUPS as u32 + 1),
                ..launch_shape((kv_heads, tiles, 1), self.shared_bytes(kind, spec) as usize)
            },
        }
    }

    /// Shared memory of a block.
    pub(super) fn shared_bytes(self, kind: KvType, spec: &AttentionSpec) -> u32 {
        let bytes = match self {
            Self::MmaSync => {
                let kv = KvStageBytes::of(kind, spec.head_dim);
                let queries = PREFILL_PAIRS * query_pitch_bytes(kind, spec.head_dim);
                ATTENTION_STAGES * kv.stage + kv.dequantized + queries
            }
            Self::Wgmma => PREFILL_WGMMA_SHARED_BYTES,
        };
        bytes as u32
    }
}

fn has_wgmma_kernel(kind: KvType, head_dim: usize) -> bool {
    matches!(kind, KvType::F16 | KvType::Bf16) && matches!(head_dim, 64 | 128)
}

/// The number of shapes of attention plans for layers with these caches and spans: query tiles have
/// as many tokens as the layer's kernel takes. Fewer on devices without wgmma.
pub(super) fn plan_shapes(layers: &[(KvType, AttentionSpan)], head_dim: usize) -> usize {
    let shapes = layers.iter().map(|&(kind, span)| (has_wgmma_kernel(kind, head_dim), span));
    shapes.collect::<HashSet<_>>().len()
}

impl AttentionKernels {
    /// # Safety
    /// As [`Self::paged`]. The query tiles have no more pairs than [`PrefillMethod::pairs`].
    pub(super) unsafe fn prefill(
        &self,
        stream: &Stream,
        inputs: &AttentionInputs<'_>,
        plan: &AttentionPlanAddress,
        out: &mut DeviceViewMut<'_, f32>,
    ) -> Result<(), CudaError> {
        let AttentionInputs { layer, kind, spec, .. } = *inputs;
        let method = PrefillMethod::of(stream.device(), &spec, kind);
        let arguments = AttentionPrefill {
            kv: layer,
            queries: query_params(inputs),
            tables: inputs.tables.address(),
            query_tiles: plan.prefill_tiles,
            query_tile_count: plan.counts + 2 * size_of::<u32>() as u64,
            out: out.address(),
        };
        let launch = method.launch(kind, &spec, plan.prefill_tiles_max);
        // SAFETY: the arguments are valid by this function's contract. The kernel divides shared
        // memory as `launch` counts it.
        unsafe {
            launch_kernel(self.family(kind), method.name(kind, spec.head_dim), stream, launch, &arguments)
        }
    }
}
