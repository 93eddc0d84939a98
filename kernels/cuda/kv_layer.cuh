// SPDX-License-Identifier: Apache-2.0

// Where keys and values of one layer stand. The cache is one address range that grows in units; a
// unit holds 2^unit_shift blocks of all layers, each layer's part contiguous; a block's part of a
// layer is [kv head][keys, values][token][dim].
//
// A head's part in q8_0 is the bytes of all tokens, [token][dim], then their f16 scales,
// [token][q8_scales].
#pragma once

#include "abi/kv.cuh"

// The keys of `head` in `block`; the values follow after head_bytes.
__device__ __forceinline__ uint8_t *head_keys(const KvLayerAddress &kv, uint32_t block, uint32_t head) {
    uint64_t unit = block >> kv.unit_shift, inside = block & ((1u << kv.unit_shift) - 1);
    return kv.base + unit * kv.unit_bytes + kv.layer_offset + inside * kv.block_bytes +
           uint64_t(head) * 2 * kv.head_bytes;
}

// Scales of a token: one for 32 values, and one more that nobody reads if they were odd, so that
// copies of four bytes do.
__host__ __device__ constexpr int q8_scales(int dim) { return ((dim + 31) / 32 + 1) & ~1; }

// Where the scales of a head start.
__device__ __forceinline__ uint32_t q8_scales_at(uint32_t block_tokens, int dim) {
    return (block_tokens * dim + 3) & ~3u;
}
