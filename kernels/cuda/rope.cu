// SPDX-License-Identifier: Apache-2.0

// Rotary position embedding in place: pair i of every head of row r turns by the angle positions[r]
// * inverse_frequencies[i]. `x` is [rows][heads][head_dim] f32.
//
// One thread block per row. A thread computes the angle of one pair, in f64 as the host backend
// does, and turns that pair in several heads. Limit: bytes, 8 per value; the angles are 64
// evaluations a row.

#include "abi/elementwise.cuh"
#include "rope_angles.cuh"
#include "stream_order.cuh"

namespace {

constexpr int THREADS = ROPE_THREADS;

}  // namespace

extern "C" __global__ void __launch_bounds__(THREADS)
    rope(float *x, const uint32_t *positions, const float *inverse_frequencies, float magnitude, int adjacent,
         int pairs, int head_dim, int heads) {
    wait_for_previous_kernel();
    launch_next_kernel();
    // Threads that share a pair take heads in turn. If there are more pairs than threads, a thread
    // takes several pairs.
    int sharing = max(THREADS / pairs, 1);
    int share = threadIdx.x / pairs % sharing;
    if (int(threadIdx.x) >= sharing * pairs) return;
    float *row = x + size_t(blockIdx.x) * heads * head_dim;
    for (int pair = threadIdx.x % pairs; pair < pairs; pair += THREADS) {
        float cosine, sine;
        rope_angle(positions[blockIdx.x], inverse_frequencies[pair], magnitude, &cosine, &sine);
        int first = adjacent ? 2 * pair : pair, second = adjacent ? 2 * pair + 1 : pair + pairs;
        for (int head = share; head < heads; head += sharing) {
            float *values = row + head * head_dim;
            rotate_pair(values[first], values[second], cosine, sine);
        }
    }
}
CHECK_SIGNATURE(rope, Rope);
