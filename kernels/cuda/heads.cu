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
    int adjacent, is_f16;
};

extern "C" __global__ void __launch_bounds__(32 * WARPS)
    heads_to_cache(const __grid_constant__ KvLayer kv, const __grid_constant__ Heads a) {
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
    uint8_t *to = kv.keys(block, head) + (is_value ? kv.head_bytes : 0);
    const size_t first = size_t(token) * a.head_dim;
    for (int i = lane; i < a.head_dim; i += 32) {
        if (a.is_f16) {
            store(own[i], reinterpret_cast<__half *>(to) + first + i);
        } else {
            store(own[i], reinterpret_cast<float *>(to) + first + i);
        }
    }
}
