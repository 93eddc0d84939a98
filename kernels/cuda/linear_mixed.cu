// SPDX-License-Identifier: Apache-2.0

// Products with matrices of two types in one launch: in Q4_K_M and Q5_K_M, half of the layers have
// V in Q6_K beside Q and K. A launch of its own would wait for the blocks of the other one.
//
//   norm_matvec_*  the norm of one token, multiplied (linear/matvec.cuh)
//   skinny_*       2 to 16 tokens (linear/skinny_matmul.cuh)

#include "linear/kquants.cuh"
#include "linear/matvec.cuh"
#include "linear/skinny_matmul.cuh"
#include "signature.cuh"

#define NORM_MATVEC_PAIR_KERNEL(NAMES, FIRST, SECOND)                                                       \
    extern "C" __global__ void __launch_bounds__(matvec::THREADS) norm_matvec_##NAMES(                      \
        const __grid_constant__ LinearParams first, const __grid_constant__ LinearParams second,            \
        const __grid_constant__ NormedInput input, int first_stages, int second_stages, int first_blocks) { \
        matvec::multiply_normed_both<FIRST, SECOND>(first, second, input, first_stages, second_stages,      \
                                                    first_blocks);                                          \
    }                                                                                                       \
    CHECK_SIGNATURE(norm_matvec_##NAMES, LinearNormMatvecPair);

NORM_MATVEC_PAIR_KERNEL(q4_k_q6_k, Q4_K, Q6_K)
NORM_MATVEC_PAIR_KERNEL(q5_k_q6_k, Q5_K, Q6_K)

#define SKINNY_PAIR_KERNEL(NAMES, TOKENS, FIRST, SECOND)                                                    \
    extern "C" __global__ void __launch_bounds__(skinny_matmul::THREADS, 1) skinny_##NAMES##_##TOKENS(      \
        const __grid_constant__ LinearParams first, const __grid_constant__ LinearParams second,            \
        int first_stages, int second_stages, int first_blocks) {                                            \
        skinny_matmul::multiply_both<FIRST, SECOND, TOKENS / ACT_TILE_TOKENS>(first, second, first_stages,  \
                                                                              second_stages, first_blocks); \
    }                                                                                                       \
    CHECK_SIGNATURE(skinny_##NAMES##_##TOKENS, LinearSkinnyPair);

SKINNY_PAIR_KERNEL(q4_k_q6_k, 8, Q4_K, Q6_K)
SKINNY_PAIR_KERNEL(q4_k_q6_k, 16, Q4_K, Q6_K)
SKINNY_PAIR_KERNEL(q5_k_q6_k, 8, Q5_K, Q6_K)
SKINNY_PAIR_KERNEL(q5_k_q6_k, 16, Q5_K, Q6_K)
