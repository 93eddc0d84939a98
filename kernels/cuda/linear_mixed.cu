// SPDX-License-Identifier: Apache-2.0

// Products of one token with matrices of two types, in one launch: in Q4_K_M and Q5_K_M, half of
// the layers have V in Q6_K beside Q and K. A launch of its own would wait for the other one, whose
// blocks normalise the input.

#include "linear/kquants.cuh"
#include "linear/matvec.cuh"
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
