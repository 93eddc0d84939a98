// SPDX-License-Identifier: Apache-2.0

// out[i] = x[rows[i]]: copies the rows whose logits are wanted. One thread block per output row.
// Limit: bytes, 8 per value.

#include "abi/elementwise.cuh"
#include "stream_order.cuh"

extern "C" __global__ void __launch_bounds__(GATHER_THREADS)
    gather_rows(const float *x, const uint32_t *rows, float *out, int cols) {
    wait_for_previous_kernel();
    launch_next_kernel();
    const float *from = x + size_t(rows[blockIdx.x]) * cols;
    float *to = out + size_t(blockIdx.x) * cols;
    for (int i = threadIdx.x; i < cols; i += int(GATHER_THREADS)) to[i] = from[i];
}
CHECK_SIGNATURE(gather_rows, GatherRows);
