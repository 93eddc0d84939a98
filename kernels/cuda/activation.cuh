// SPDX-License-Identifier: Apache-2.0

// activation(gate) * up, for the activations of feed-forward layers:
//
//   Silu   activation(x) = x / (1 + exp(-x))
//   Gelu   activation(x) = x / (1 + exp(-(GELU_LINEAR x + GELU_CUBIC x^3))), by tanh

#pragma once

#include "numeric.cuh"

namespace activation {

struct Silu {
    static __device__ __forceinline__ float exponent(float x) { return -x; }
};

struct Gelu {
    // As in crates/ops/src/backend.rs.
    static constexpr double LINEAR = 2.0 * 0.7978845608028654, CUBIC = 0.044715 * LINEAR;

    static __device__ __forceinline__ float exponent(float x) {
        return -x * fmaf(float(CUBIC) * x, x, float(LINEAR));
    }
};

template <class Activation>
__device__ float multiply(float gate, float up) {
    return __fdiv_rn(gate, 1.0f + exp_exact(Activation::exponent(gate))) * up;
}

template <class Activation>
__device__ float4 multiply(float4 g, float4 u) {
    return make_float4(multiply<Activation>(g.x, u.x), multiply<Activation>(g.y, u.y),
                       multiply<Activation>(g.z, u.z), multiply<Activation>(g.w, u.w));
}

}  // namespace activation
