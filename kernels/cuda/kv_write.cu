// SPDX-License-Identifier: Apache-2.0

// Rounds a step's keys and values to the cache's type and stores them in the slots of their rows.
//
//   keys, values [rows][kv_heads][head_dim] f32 -> block slots[r] / block_tokens, token slots[r] %
//   block_tokens of the cache (kv_layer.cuh); grid: rows, one thread block each
//
// Limit: bytes, 8 read and 2 to 8 written per pair of a key and a value; at few rows the launch.

#include <cuda_fp16.h>

#include "kv_layer.cuh"
#include "kv_store.cuh"
#include "stream_order.cuh"

namespace {

constexpr int THREADS = KV_WRITE_THREADS;

template <typename T>
__device__ void write_row(KvLayerAddress kv, const float *keys, const float *values, const uint32_t *slots,
                          int kv_heads, int head_dim) {
    wait_for_previous_kernel();
    launch_next_kernel();
    uint32_t slot = slots[blockIdx.x];
    uint32_t block = slot / kv.block_tokens, token = slot % kv.block_tokens;
    int cols = kv_heads * head_dim;
    size_t row = size_t(blockIdx.x) * cols;
    for (int i = threadIdx.x; i < cols; i += THREADS) {
        int head = i / head_dim, dim = i % head_dim;
        uint8_t *to = head_keys(kv, block, head) + (size_t(token) * head_dim + dim) * sizeof(T);
        store(keys[row + i], reinterpret_cast<T *>(to));
        store(values[row + i], reinterpret_cast<T *>(to + kv.head_bytes));
    }
}

// A warp stores 32 values at a time, which share a scale.
__device__ void write_q8_row(KvLayerAddress kv, const float *keys, const float *values, const uint32_t *slots,
                             int kv_heads, int head_dim) {
    wait_for_previous_kernel();
    launch_next_kernel();
    uint32_t slot = slots[blockIdx.x];
    uint32_t block = slot / kv.block_tokens, token = slot % kv.block_tokens;
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, parts = (head_dim + 31) / 32;
    for (int i = warp; i < 2 * kv_heads * parts; i += THREADS / 32) {
        int is_value = i / (kv_heads * parts), head = i / parts % kv_heads, part = i % parts;
        int count = min(head_dim - 32 * part, 32);
        size_t from = (size_t(blockIdx.x) * kv_heads + head) * head_dim + 32 * part + lane;
        float value = lane < count ? (is_value ? values : keys)[from] : 0.0f;
        store_q8(value, count, head_keys(kv, block, head) + is_value * kv.head_bytes, kv.block_tokens, token,
                 head_dim, part);
    }
}

}  // namespace

extern "C" __global__ void __launch_bounds__(THREADS)
    kv_write_f16(KvLayerAddress kv, const float *keys, const float *values, const uint32_t *slots,
                 int kv_heads, int head_dim) {
    write_row<__half>(kv, keys, values, slots, kv_heads, head_dim);
}
CHECK_SIGNATURE(kv_write_f16, KvWrite);

extern "C" __global__ void __launch_bounds__(THREADS)
    kv_write_f32(KvLayerAddress kv, const float *keys, const float *values, const uint32_t *slots,
                 int kv_heads, int head_dim) {
    write_row<float>(kv, keys, values, slots, kv_heads, head_dim);
}
CHECK_SIGNATURE(kv_write_f32, KvWrite);

extern "C" __global__ void __launch_bounds__(THREADS)
    kv_write_bf16(KvLayerAddress kv, const float *keys, const float *values, const uint32_t *slots,
                  int kv_heads, int head_dim) {
    write_row<__nv_bfloat16>(kv, keys, values, slots, kv_heads, head_dim);
}
CHECK_SIGNATURE(kv_write_bf16, KvWrite);

extern "C" __global__ void __launch_bounds__(THREADS)
    kv_write_q8_0(KvLayerAddress kv, const float *keys, const float *values, const uint32_t *slots,
                  int kv_heads, int head_dim) {
    write_q8_row(kv, keys, values, slots, kv_heads, head_dim);
}
CHECK_SIGNATURE(kv_write_q8_0, KvWrite);
