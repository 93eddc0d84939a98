// What happens to a step's query, key and value heads between their products and attention, in one pass: the norm of each query
// and key head (where the model has one), the rotation of norm.cu and rope.cu, and keys and values into the cache as
// kv_write.cu stores them. The same bits as those kernels one after the other.
//
// A warp per head, eight heads of one row a block; the angles of the row are formed while the predecessor ends.
// Limit: at few rows the latency of a load and a store, some 2 us; else bytes.

#include <cuda_fp16.h>

#include "angles.cuh"
#include "kv_layer.cuh"
#include "kv_store.cuh"
#include "numeric.cuh"

namespace {

constexpr int WARPS = 8;
// As in heads.rs.
constexpr int HEAD_DIM_MAX = 256;

}  // namespace

// As `Heads` in heads.rs.
struct Heads {
    float *queries, *keys;
    const float *values;
    // Of the norms; both or none.
    const float *query_weight, *key_weight;
    const uint32_t *positions, *slots;
    const float *inverse_frequencies;
    float eps, magnitude;
    int heads, kv_heads, head_dim, pairs;
    int adjacent;
};

namespace {

// A head of one token in the cache, as one warp stores it.
template <typename T>
struct ToFloats {
    static __device__ __forceinline__ void put(const float *own, const KvLayer &kv, uint8_t *head, uint32_t token, int dim) {
        T *to = reinterpret_cast<T *>(head) + size_t(token) * dim;
        for (int i = threadIdx.x % 32; i < dim; i += 32) store(own[i], to + i);
    }
};

struct ToQ8 {
    static __device__ __forceinline__ void put(const float *own, const KvLayer &kv, uint8_t *head, uint32_t token, int dim) {
        const int lane = threadIdx.x % 32;
        for (int part = 0; 32 * part < dim; part++) {
            int count = min(dim - 32 * part, 32);
            store_q8(lane < count ? own[32 * part + lane] : 0.0f, count, head, kv.block_tokens, token, dim, part);
        }
    }
};

template <class Stored>
__device__ __forceinline__ void heads_to_cache(const KvLayer &kv, const Heads &a) {
    __shared__ float cosines[HEAD_DIM_MAX / 2], sines[HEAD_DIM_MAX / 2];
    __shared__ float turned[WARPS][HEAD_DIM_MAX];
    const int row = blockIdx.x, warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    // Positions, slots and frequencies were there before the step's first kernel.
    for (int pair = threadIdx.x; pair < a.pairs; pair += 32 * WARPS) {
        angle(a.positions[row], a.inverse_frequencies[pair], a.magnitude, &cosines[pair], &sines[pair]);
    }
    const uint32_t slot = a.slots[row], block = slot / kv.block_tokens, token = slot % kv.block_tokens;
    __syncthreads();
    wait_for_predecessor();
    let_successor_start();

    int head = blockIdx.y * WARPS + warp;
    if (head >= a.heads + 2 * a.kv_heads) return;
    const bool is_query = head < a.heads, is_value = head >= a.heads + a.kv_heads;
    if (!is_query) head = (head - a.heads) % a.kv_heads;
    const size_t at = (size_t(row) * (is_query ? a.heads : a.kv_heads) + head) * a.head_dim;
    float *own = turned[warp];
    if (is_value) {
        for (int i = lane; i < a.head_dim; i += 32) own[i] = a.values[at + i];
    } else {
        float *x = (is_query ? a.queries : a.keys) + at;
        const float *weight = is_query ? a.query_weight : a.key_weight;
        if (weight != nullptr) {
            float squares = 0.0f;
            for (int i = lane; i < a.head_dim; i += 32) {
                float v = x[i];
                own[i] = v;
                squares = fmaf(v, v, squares);
            }
            float mean = __fdiv_rn(warp_sum(squares), static_cast<float>(a.head_dim));
            float factor = __frcp_rn(__fsqrt_rn(mean + a.eps));
            for (int i = lane; i < a.head_dim; i += 32) own[i] = own[i] * factor * weight[i];
        } else {
            for (int i = lane; i < a.head_dim; i += 32) own[i] = x[i];
        }
        __syncwarp();
        for (int pair = lane; pair < a.pairs; pair += 32) {
            int first = a.adjacent ? 2 * pair : pair, second = a.adjacent ? 2 * pair + 1 : pair + a.pairs;
            turn(own[first], own[second], cosines[pair], sines[pair]);
        }
        __syncwarp();
        for (int i = lane; i < a.head_dim; i += 32) x[i] = own[i];
        if (is_query) return;
    }
    Stored::put(own, kv, kv.keys(block, head) + (is_value ? kv.head_bytes : 0), token, a.head_dim);
}

}  // namespace

#define HEADS(SUFFIX, STORED)                                                                                                  \
    extern "C" __global__ void __launch_bounds__(32 * WARPS)                                                                   \
        heads_to_cache_##SUFFIX(const __grid_constant__ KvLayer kv, const __grid_constant__ Heads a) {                         \
        heads_to_cache<STORED>(kv, a);                                                                                         \
    }
HEADS(f32, ToFloats<float>)
HEADS(f16, ToFloats<__half>)
HEADS(bf16, ToFloats<__nv_bfloat16>)
HEADS(q8_0, ToQ8)
