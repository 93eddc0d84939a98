// SPDX-License-Identifier: Apache-2.0

// Tensor-core products of 8-bit integers, and the loads of their fragments.
//
//   A: 16 weight rows    B: 8 tokens    C: [16 rows][8 tokens], exact sums
//   lane 4 g + t holds C[g][2t], C[g][2t + 1], C[g + 8][2t], C[g + 8][2t + 1]

#pragma once

#include "../shared_memory.cuh"

// Loads four matrices of 8 rows by 16 bytes. Lane l gives the address of row l % 8 of matrix l / 8.
__device__ inline void load_matrices(uint32_t (&r)[4], const uint8_t *row) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
                 : "r"(shared_address(row)));
}

__device__ inline void load_matrices(uint32_t (&r)[2], const uint8_t *row) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x2.shared.b16 {%0, %1}, [%2];"
                 : "=r"(r[0]), "=r"(r[1])
                 : "r"(shared_address(row)));
}

// D = A B + `start` in every element.
#define MMA_K32(NAME, ATYPE)                                                                              \
    __device__ inline void NAME(int(&d)[4], const uint32_t(&a)[4], uint32_t b0, uint32_t b1, int start) { \
        asm("mma.sync.aligned.m16n8k32.row.col.s32." ATYPE                                                \
            ".s8.s32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, "                                      \
            "{%10, %10, %10, %10};"                                                                       \
            : "=r"(d[0]), "=r"(d[1]), "=r"(d[2]), "=r"(d[3])                                              \
            : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1), "r"(start));                  \
    }
MMA_K32(mma_s8, "s8")
MMA_K32(mma_u8, "u8")
#undef MMA_K32

// D = A B.
#define MMA_K16(NAME, ATYPE, BTYPE)                                                  \
    __device__ inline void NAME(int(&d)[4], uint32_t a0, uint32_t a1, uint32_t b0) { \
        asm("mma.sync.aligned.m16n8k16.row.col.s32." ATYPE "." BTYPE                 \
            ".s32 {%0, %1, %2, %3}, {%4, %5}, {%6}, "                                \
            "{%7, %7, %7, %7};"                                                      \
            : "=r"(d[0]), "=r"(d[1]), "=r"(d[2]), "=r"(d[3])                         \
            : "r"(a0), "r"(a1), "r"(b0), "r"(0));                                    \
    }
MMA_K16(mma16_s8, "s8", "s8")
MMA_K16(mma16_u8, "u8", "s8")
MMA_K16(mma16_u8_u8, "u8", "u8")
#undef MMA_K16

// INT_BIAS is the bits of the float 12,582,912. An mma that starts at it leaves, for an exact sum
// below 2^22 in magnitude, the bits of the float 12,582,912 + sum. One subtraction then replaces a
// conversion, which runs at half rate.
constexpr int INT_BIAS = 0x4B400000;
__device__ inline float unbias(int sum) { return __int_as_float(sum) - 12582912.0f; }

// Four products of unsigned weights and signed activations, added to `sum`.
__device__ inline int dot4_u8(uint32_t w, uint32_t a, int sum) {
    asm("dp4a.u32.s32 %0, %1, %2, %0;" : "+r"(sum) : "r"(w), "r"(a));
    return sum;
}

__device__ inline int dot4_s8(uint32_t w, uint32_t a, int sum) {
    asm("dp4a.s32.s32 %0, %1, %2, %0;" : "+r"(sum) : "r"(w), "r"(a));
    return sum;
}
