// SPDX-License-Identifier: Apache-2.0

// Naive kernels, with which GPU tests compare the fast ones: sums in f64, no tiles, no KV cache, no
// quantization. Tests use them for shapes at which the host's reference would take minutes.
//
//   naive_attention  one sequence: out[row][head] = sum_k softmax_k(scale * query . key_k) *
//                    value_k over the keys up to the row's position; a thread per dimension
//   naive_matmul     out[t][r] = weights[r] . x[t] + bias[r]; a thread per value
//
// Limit: arithmetic, on purpose. Each thread of naive_attention computes every score again.

#include <cstdint>

#include "abi/naive.cuh"

// Grid: (rows, heads). `queries` and `out` are [rows][heads][dim], `keys` and `values`
// [positions][kv_heads][dim].
extern "C" __global__ void __launch_bounds__(NAIVE_THREADS)
    naive_attention(const float *queries, const float *keys, const float *values, int heads, int kv_heads,
                    int dim, int first_position, float scale, float *out) {
    const size_t row = blockIdx.x, head = blockIdx.y, kv_head = head / (heads / kv_heads);
    const int key_count = first_position + int(row) + 1;
    const float *query = queries + (row * heads + head) * dim;
    auto score = [&](int k) {
        const float *key = keys + (size_t(k) * kv_heads + kv_head) * dim;
        double sum = 0.0;
        for (int i = 0; i < dim; i++) sum += double(query[i]) * double(key[i]);
        return sum * double(scale);
    };
    double largest = score(0);
    for (int k = 1; k < key_count; k++) largest = fmax(largest, score(k));
    for (int i = threadIdx.x; i < dim; i += int(NAIVE_THREADS)) {
        double total = 0.0, sum = 0.0;
        for (int k = 0; k < key_count; k++) {
            const double weight = exp(score(k) - largest);
            total += weight;
            sum += weight * double(values[(size_t(k) * kv_heads + kv_head) * dim + i]);
        }
        out[(row * heads + head) * dim + i] = float(sum / total);
    }
}
CHECK_SIGNATURE(naive_attention, NaiveAttention);

// Grid: (rows / NAIVE_THREADS rounded up, tokens). `bias` may be null.
extern "C" __global__ void __launch_bounds__(NAIVE_THREADS)
    naive_matmul(const float *weights, const float *x, const float *bias, int cols, int rows, float *out) {
    const int row = blockIdx.x * NAIVE_THREADS + threadIdx.x;
    if (row >= rows) return;
    const size_t token = blockIdx.y;
    double sum = bias == nullptr ? 0.0 : double(bias[row]);
    for (int col = 0; col < cols; col++)
        sum += double(weights[size_t(row) * cols + col]) * double(x[token * cols + col]);
    out[token * rows + row] = float(sum);
}
CHECK_SIGNATURE(naive_matmul, NaiveMatmul);
