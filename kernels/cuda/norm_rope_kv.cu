// SPDX-License-Identifier: Apache-2.0

// Query, key and value heads between their products and attention, in one pass:
//
//   query head   norm (if the model has one) -> rotation -> in place
//   key head     norm (if the model has one) -> rotation -> in place, and to the KV cache
//   value head                                              to the KV cache
//
// The bits are those of norm.cu, rope.cu and kv_write.cu one after the other. A warp has one head;
// a block has eight heads of one row. The block computes the row's angles while the previous kernel
// ends. Limit: bytes; at few rows the latency of a load and a store, some 2 us.

#include <cuda_fp16.h>

#include "rope_angles.cuh"
#include "kv_layer.cuh"
#include "kv_store.cuh"
#include "numeric.cuh"
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
__device__ __forceinline__ void norm_rope_kv_write(const KvLayerAddress &kv, const NormRopeKvParams &p) {
    __shared__ float cosines[HEAD_DIM_MAX / 2], sines[HEAD_DIM_MAX / 2];
    __shared__ float rotated[WARPS][HEAD_DIM_MAX];
    const int row = blockIdx.x, warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    // The host sent positions, slots and frequencies before the step's first kernel, so this kernel
    // may read them before the previous one has ended.
    for (int pair = threadIdx.x; pair < p.pairs; pair += 32 * WARPS) {
        rope_angle(p.positions[row], p.inverse_frequencies[pair], p.magnitude, &cosines[pair], &sines[pair]);
    }
    const uint32_t slot = p.slots[row], block = slot / kv.block_tokens, token = slot % kv.block_tokens;
    __syncthreads();
    wait_for_previous_kernel();
    launch_next_kernel();

    int head = blockIdx.y * WARPS + warp;
    if (head >= p.heads + 2 * p.kv_heads) return;
    const bool is_query = head < p.heads, is_value = head >= p.heads + p.kv_heads;
    if (!is_query) head = (head - p.heads) % p.kv_heads;
    const size_t at = (size_t(row) * (is_query ? p.heads : p.kv_heads) + head) * p.head_dim;
    float *values = rotated[warp];
    if (is_value) {
        for (int i = lane; i < p.head_dim; i += 32) values[i] = p.values[at + i];
    } else {
        float *x = (is_query ? p.queries : p.keys) + at;
        const float *weight = is_query ? p.query_weight : p.key_weight;
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
    KvWriter::store_head(values, kv, head_keys(kv, block, head) + (is_value ? kv.head_bytes : 0), token,
                         p.head_dim);
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
