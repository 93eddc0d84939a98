// SPDX-License-Identifier: Apache-2.0

// Query, key and value heads between their products and attention, in one pass:
//
//   query head   norm (if the model has one) -> rotation -> in place
//   key head     norm (if the model has one) -> rotation -> in place, and to the KV cache
//   value head                                              to the KV cache
//
// The bits are those of norm.cu, rope.cu and kv_write.cu one after the other. A warp has one head
// at a time; a block has eight heads of one row. With many rows, a block has all heads of its row,
// eight at a time, so that the row's angles are computed once. It computes them while the previous
// kernel ends. Limit: bytes; at few rows the latency of a load and a store, some 2 us.

#include <cuda_fp16.h>

#include "kv_layer.cuh"
#include "kv_store.cuh"
#include "norm_rope.cuh"
#include "stream_order.cuh"

namespace {

constexpr int WARPS = NORM_ROPE_WARPS;
constexpr int HEAD_DIM_MAX = NORM_ROPE_HEAD_DIM_MAX;

// Stores a head of one token in the cache; called by a whole warp.
template <typename T>
struct KvWriterFloat {
    static __device__ __forceinline__ void store_head(const float *values, const KvLayerAddress &kv,
                                                      uint8_t *head, uint32_t token, int dim) {
        T *to = reinterpret_cast<T *>(head) + size_t(token) * dim;
        for (int i = threadIdx.x % 32; i < dim; i += 32) store(values[i], to + i);
    }
};

struct KvWriterQ8_0 {
    static __device__ __forceinline__ void store_head(const float *values, const KvLayerAddress &kv,
                                                      uint8_t *head, uint32_t token, int dim) {
        const int lane = threadIdx.x % 32;
        for (int part = 0; 32 * part < dim; part++) {
            int count = min(dim - 32 * part, 32);
            store_q8(lane < count ? values[32 * part + lane] : 0.0f, count, head, kv.block_tokens, token, dim,
                     part);
        }
    }
};

template <class KvWriter>
__device__ __forceinline__ void store_head(const KvLayerAddress &kv, const float *values, int head,
                                           bool is_value, uint32_t block, uint32_t token, int head_dim) {
    uint8_t *to = head_keys(kv, block, head) + (is_value ? kv.head_bytes : 0);
    KvWriter::store_head(values, kv, to, token, head_dim);
}

// Computes one of the row's heads: of the query heads, then the key heads, then the value heads.
// Called by a whole warp.
template <class KvWriter>
__device__ __forceinline__ void write_head(const KvLayerAddress &kv, const NormRopeKvParams &p, int head,
                                           uint32_t block, uint32_t token, float *values,
                                           const float *cosines, const float *sines) {
    const int row = blockIdx.x, lane = threadIdx.x % 32;
    const bool is_query = head < p.heads, is_value = head >= p.heads + p.kv_heads;
    if (!is_query) head = (head - p.heads) % p.kv_heads;
    const size_t at = (size_t(row) * (is_query ? p.heads : p.kv_heads) + head) * p.head_dim;
    if (is_value) {
        for (int i = lane; i < p.head_dim; i += 32) values[i] = p.values[at + i];
    } else {
        float *x = (is_query ? p.queries : p.keys) + at;
        const float *weight = is_query ? p.query_weight : p.key_weight;
        if (p.head_dim == 128 && p.pairs == 64) {
            float v[4];
#pragma unroll
            for (int i = 0; i < 4; i++) v[i] = x[lane + 32 * i];
            turn_head(v, weight, p.eps, p.adjacent, cosines, sines);
#pragma unroll
            for (int i = 0; i < 4; i++) {
                x[lane + 32 * i] = v[i];
                values[lane + 32 * i] = v[i];
            }
            if (is_query) return;
            __syncwarp();
            store_head<KvWriter>(kv, values, head, false, block, token, p.head_dim);
            return;
        }
        if (weight != nullptr) {
            float squares = 0.0f;
            for (int i = lane; i < p.head_dim; i += 32) {
                float v = x[i];
                values[i] = v;
                squares = fmaf(v, v, squares);
            }
            float mean = __fdiv_rn(warp_sum(squares), static_cast<float>(p.head_dim));
            float factor = __frcp_rn(__fsqrt_rn(mean + p.eps));
            for (int i = lane; i < p.head_dim; i += 32) values[i] = values[i] * factor * weight[i];
        } else {
            for (int i = lane; i < p.head_dim; i += 32) values[i] = x[i];
        }
        __syncwarp();
        for (int pair = lane; pair < p.pairs; pair += 32) {
            int first = p.adjacent ? 2 * pair : pair, second = p.adjacent ? 2 * pair + 1 : pair + p.pairs;
            rotate_pair(values[first], values[second], cosines[pair], sines[pair]);
        }
        __syncwarp();
        for (int i = lane; i < p.head_dim; i += 32) x[i] = values[i];
        if (is_query) return;
    }
    store_head<KvWriter>(kv, values, head, is_value, block, token, p.head_dim);
}

template <class KvWriter>
__device__ __forceinline__ void norm_rope_kv_write(const KvLayerAddress &kv, const NormRopeKvParams &p) {
    __shared__ float cosines[HEAD_DIM_MAX / 2], sines[HEAD_DIM_MAX / 2];
    __shared__ float rotated[WARPS][HEAD_DIM_MAX];
    const int row = blockIdx.x, warp = threadIdx.x / 32;
    // The host sent positions, slots and frequencies before the step's first kernel, so this kernel
    // may read them before the previous one has ended.
    for (int pair = threadIdx.x; pair < p.pairs; pair += 32 * WARPS) {
        rope_angle(p.positions[row], p.inverse_frequencies[pair], p.magnitude, &cosines[pair], &sines[pair]);
    }
    const uint32_t slot = p.slots[row], block = slot / kv.block_tokens, token = slot % kv.block_tokens;
    __syncthreads();
    wait_for_previous_kernel();
    launch_next_kernel();

    const int heads = p.heads + 2 * p.kv_heads;
    for (int head = blockIdx.y * WARPS + warp; head < heads; head += gridDim.y * WARPS) {
        write_head<KvWriter>(kv, p, head, block, token, rotated[warp], cosines, sines);
        // All lanes have read the values of this head.
        __syncwarp();
    }
}

}  // namespace

#define NORM_ROPE_KV_KERNEL(SUFFIX, KV_WRITER)                                                        \
    extern "C" __global__ void __launch_bounds__(32 * WARPS) norm_rope_kv_write_##SUFFIX(             \
        const __grid_constant__ KvLayerAddress kv, const __grid_constant__ NormRopeKvParams params) { \
        norm_rope_kv_write<KV_WRITER>(kv, params);                                                    \
    }                                                                                                 \
    CHECK_SIGNATURE(norm_rope_kv_write_##SUFFIX, NormRopeKvWrite);
NORM_ROPE_KV_KERNEL(f32, KvWriterFloat<float>)
NORM_ROPE_KV_KERNEL(f16, KvWriterFloat<__half>)
NORM_ROPE_KV_KERNEL(bf16, KvWriterFloat<__nv_bfloat16>)
NORM_ROPE_KV_KERNEL(q8_0, KvWriterQ8_0)
