// SPDX-License-Identifier: Apache-2.0

// Copies words between pinned host memory and device memory, between two steps that follow each
// other on the device. A copy engine would take the same words in 1 us; but it starts 6 us after
// the kernel before it has ended, and the next kernel 3 us after the copy. Three such copies made
// 20 us between two decode steps (H200).

#include <cstdint>

#include "abi/elementwise.cuh"
#include "stream_order.cuh"

namespace {

constexpr int ROUND = WORD_COPY_BLOCK_WORDS / WORD_COPY_THREADS;
static_assert(ROUND * WORD_COPY_THREADS == WORD_COPY_BLOCK_WORDS);

}  // namespace

// From the host. A block copies up to WORD_COPY_BLOCK_WORDS of one range. It does not let the next
// kernel start early: that kernel may read what the host sent before it waits.
extern "C" __global__ void __launch_bounds__(WORD_COPY_THREADS)
    fetch_words(const __grid_constant__ WordCopies copies) {
    uint32_t block = blockIdx.x;
    int range = 0;
    while (range + 1 < copies.ranges) {
        uint32_t blocks = (copies.words[range] + WORD_COPY_BLOCK_WORDS - 1) / WORD_COPY_BLOCK_WORDS;
        if (block < blocks) break;
        block -= blocks;
        range++;
    }
    const volatile uint32_t *from = copies.from[range];
    uint32_t words[ROUND], first = block * WORD_COPY_BLOCK_WORDS + threadIdx.x, end = copies.words[range];
    // All loads are under way at once: the host is a microsecond away.
#pragma unroll
    for (int i = 0; i < ROUND; i++) {
        uint32_t at = first + i * WORD_COPY_THREADS;
        words[i] = at < end ? from[at] : 0;
    }
    // The step before may still read what these words replace.
    wait_for_previous_kernel();
#pragma unroll
    for (int i = 0; i < ROUND; i++) {
        uint32_t at = first + i * WORD_COPY_THREADS;
        if (at < end) copies.to[range][at] = words[i];
    }
    // The next kernel may read them before it waits.
    __threadfence();
}
CHECK_SIGNATURE(fetch_words, FetchWords);

// To the host, one block.
extern "C" __global__ void __launch_bounds__(WORD_COPY_THREADS)
    send_words(const uint32_t *from, uint32_t *to, uint32_t words) {
    launch_next_kernel();
    wait_for_previous_kernel();
    for (uint32_t i = threadIdx.x; i < words; i += WORD_COPY_THREADS) to[i] = from[i];
}
CHECK_SIGNATURE(send_words, SendWords);
