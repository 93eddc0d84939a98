// SPDX-License-Identifier: Apache-2.0

// Products of 64 tokens and N weight rows over 64 columns, by the four warps of a warpgroup: wgmma
// on sm_90a, mma.sync elsewhere. Operands are in shared memory, rows of 128 bytes with the 128-byte
// swizzle, at a multiple of 1,024 bytes.
//
//   warp w of the warpgroup holds tokens 16 w to 16 w + 15
//   lane 4 g + t holds sums[4 j + 0, 1] = token g,     rows 8 j + 2 t, 8 j + 2 t + 1
//                      sums[4 j + 2, 3] = token g + 8, the same rows
//
// begin_products, multiply_unit ..., end_products form one group. end_products waits for the group
// before; wait_for_products for all.

#pragma once

#include "mma.cuh"

#if defined(__CUDA_ARCH_FEAT_SM90_ALL) && !defined(BALLAST_NO_WGMMA)
#define HAS_WGMMA 1
#include "abi/wgmma_instructions.cuh"
#else
#define HAS_WGMMA 0
#endif

struct F16 {
    static constexpr bool IS_BF16 = false;
};
struct BF16 {
    static constexpr bool IS_BF16 = true;
};

template <int REGISTERS>
__device__ __forceinline__ void begin_products(float (&sums)[REGISTERS]) {
#if HAS_WGMMA
#pragma unroll
    for (int i = 0; i < REGISTERS; i++) asm volatile("" : "+f"(sums[i])::"memory");
    asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
#endif
}

template <int REGISTERS>
__device__ __forceinline__ void end_products(float (&sums)[REGISTERS]) {
#if HAS_WGMMA
    asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
    asm volatile("wgmma.wait_group.sync.aligned 1;" ::: "memory");
#pragma unroll
    for (int i = 0; i < REGISTERS; i++) asm volatile("" : "+f"(sums[i])::"memory");
#endif
}

template <int REGISTERS>
__device__ __forceinline__ void wait_for_products(float (&sums)[REGISTERS]) {
#if HAS_WGMMA
    asm volatile("wgmma.wait_group.sync.aligned 0;" ::: "memory");
#pragma unroll
    for (int i = 0; i < REGISTERS; i++) asm volatile("" : "+f"(sums[i])::"memory");
#endif
}

#if HAS_WGMMA

// Address in units of 16 bytes, `stride` bytes between groups of eight rows, 128-byte swizzle.
__device__ __forceinline__ uint64_t operand_descriptor(const uint8_t *rows, int stride) {
    return (shared_address(rows) & 0x3FFFF) >> 4 | uint64_t(1) << 16 | uint64_t(stride >> 4) << 32 |
           uint64_t(1) << 62;
}

template <class Float, int N, int UNITS>
__device__ __forceinline__ void multiply_unit(float (&sums)[N / 2], const uint8_t *tokens,
                                              const uint8_t *weights) {
    uint64_t a = operand_descriptor(tokens, UNITS * 1024), b = operand_descriptor(weights, 1024);
#pragma unroll
    for (int k = 0; k < 4; k++) Wgmma<N, Float::IS_BF16>::run(sums, a + 2 * k, b + 2 * k);
}

#else

template <class Float>
__device__ __forceinline__ void mma_float(float *c, const uint32_t (&a)[4], uint32_t b0, uint32_t b1) {
    if constexpr (Float::IS_BF16) {
        asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, "
            "{%8, %9}, {%0, %1, %2, %3};"
            : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
            : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
    } else {
        asm("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, "
            "%9}, {%0, %1, %2, %3};"
            : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
            : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
    }
}

// Vector `p` of a row, `stride` bytes between groups of eight rows.
__device__ __forceinline__ const uint8_t *swizzled(const uint8_t *rows, int stride, int row, int p) {
    return rows + row / 8 * stride + row % 8 * 128 + (p ^ row % 8) * 16;
}

template <class Float, int N, int UNITS>
__device__ __forceinline__ void multiply_unit(float (&sums)[N / 2], const uint8_t *tokens,
                                              const uint8_t *weights) {
    int warp = threadIdx.x / 32 % 4, lane = threadIdx.x % 32;
#pragma unroll
    for (int k = 0; k < 4; k++) {
        uint32_t a[4];
        load_matrices(a, swizzled(tokens, UNITS * 1024, warp * 16 + lane % 16, 2 * k + lane / 16));
#pragma unroll
        for (int j = 0; j < N / 8; j += 2) {
            uint32_t b[4];
            load_matrices(b, swizzled(weights, 1024, 8 * j + lane / 16 * 8 + lane % 8, 2 * k + lane / 8 % 2));
            mma_float<Float>(sums + 4 * j, a, b[0], b[1]);
            mma_float<Float>(sums + 4 * j + 4, a, b[2], b[3]);
        }
    }
}

#endif
