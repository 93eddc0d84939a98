// SPDX-License-Identifier: Apache-2.0

// Where the keys and values of one layer are in the KV cache. The cache is one address range that
// grows in units.
//
//   unit          | layer 0: 2^unit_shift blocks | layer 1: 2^unit_shift blocks | ...
//   block         | kv head 0: keys, values | kv head 1: keys, values | ...
//   keys, values  [token][dim]
//   in q8_0       the bytes of all tokens, [token][dim], then their f16 scales, [token][q8_scales]
#pragma once

#include "abi/kv.cuh"

// The keys of `head` in `block`; the values begin `head_bytes` after them.
__device__ __forceinline__ uint8_t *head_keys(const KvLayerAddress &kv, uint32_t block, uint32_t head) {
    uint64_t unit = block >> kv.unit_shift, inside = block & ((1u << kv.unit_shift) - 1);
    return kv.base + unit * kv.unit_bytes + kv.layer_offset + inside * kv.block_bytes +
           uint64_t(head) * 2 * kv.head_bytes;
}

// f16 scales of a token: one per 32 values. The number is rounded up to even, so that asynchronous
// copies, which need multiples of four bytes, can load them. The kernels never read the added one.
__host__ __device__ constexpr int q8_scales(int dim) { return ((dim + 31) / 32 + 1) & ~1; }

// Offset of the scales in the keys, or in the values, of a head.
__device__ __forceinline__ uint32_t q8_scales_at(uint32_t block_tokens, int dim) {
    return (block_tokens * dim + 3) & ~3u;
}
