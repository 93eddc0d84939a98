// SPDX-License-Identifier: Apache-2.0

//! The names of the attention kernels on tensor cores, by type of the KV cache and size of a head.

use ops::KvType;

use super::abi::attention::{AttentionGroupedKv, AttentionMergedKv, AttentionSplitKv};
use super::launch::{KernelName, kernel_name};

/// Heads for which there are kernels on tensor cores.
pub(super) const HEAD_DIMS: [usize; 6] = [64, 80, 96, 128, 192, 256];
/// The largest head of attention_grouped_kv. Four tiles of heads of 256 in f16 do not fit a
/// multiprocessor; there is no such kernel for 192 either, nor for attention windows.
pub(super) const GROUPED_HEAD_DIM_MAX: usize = 128;

/// The name of a kernel for a KV cache type and a head dimension of [`HEAD_DIMS`].
macro_rules! by_head_dim {
    ($kernel:literal, $kind:expr, $head_dim:expr) => {
        match $kind {
            KvType::Bf16 => by_head_dim!(in "attention_bf16", $kernel, $head_dim),
            KvType::Q8_0 => by_head_dim!(in "attention_q8_0", $kernel, $head_dim),
            KvType::F32 | KvType::F16 => by_head_dim!(in "attention", $kernel, $head_dim),
        }
    };
    (in $image:literal, $kernel:literal, $head_dim:expr) => {
        match $head_dim {
            64 => kernel_name!($image, concat!($kernel, "_64")),
            80 => kernel_name!($image, concat!($kernel, "_80")),
            96 => kernel_name!($image, concat!($kernel, "_96")),
            192 => kernel_name!($image, concat!($kernel, "_192")),
            256 => kernel_name!($image, concat!($kernel, "_256")),
            _ => kernel_name!($image, concat!($kernel, "_128")),
        }
    };
}
pub(super) use by_head_dim;

pub(super) fn split_kv_name(kind: KvType, head_dim: usize) -> KernelName<AttentionSplitKv> {
    by_head_dim!("attention_split_kv", kind, head_dim)
}

pub(super) fn merged_kv_name(kind: KvType, head_dim: usize) -> KernelName<AttentionMergedKv> {
    by_head_dim!("attention_merged_kv", kind, head_dim)
}

/// As `by_head_dim!`, for heads of up to [`GROUPED_HEAD_DIM_MAX`].
macro_rules! by_small_head_dim {
    ($kernel:literal, $kind:expr, $head_dim:expr) => {
        match $kind {
            KvType::Bf16 => by_small_head_dim!(in "attention_bf16", $kernel, $head_dim),
            KvType::Q8_0 => by_small_head_dim!(in "attention_q8_0", $kernel, $head_dim),
            KvType::F32 | KvType::F16 => by_small_head_dim!(in "attention", $kernel, $head_dim),
        }
    };
    (in $image:literal, $kernel:literal, $head_dim:expr) => {
        match $head_dim {
            64 => kernel_name!($image, concat!($kernel, "_64")),
            80 => kernel_name!($image, concat!($kernel, "_80")),
            96 => kernel_name!($image, concat!($kernel, "_96")),
            _ => kernel_name!($image, concat!($kernel, "_128")),
        }
    };
}

pub(super) fn grouped_kv_name(kind: KvType, head_dim: usize) -> KernelName<AttentionGroupedKv> {
    by_small_head_dim!("attention_grouped_kv", kind, head_dim)
}

pub(super) fn clustered_kv_name(kind: KvType, head_dim: usize) -> KernelName<AttentionGroupedKv> {
    by_small_head_dim!("attention_clustered_kv", kind, head_dim)
}

pub(super) fn two_groups_kv_name(kind: KvType, head_dim: usize) -> KernelName<AttentionGroupedKv> {
    by_small_head_dim!("attention_two_groups_kv", kind, head_dim)
}
