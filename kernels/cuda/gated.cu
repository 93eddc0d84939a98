// out = gate / (1 + exp(-gate)) * up, value by value. Limit: bytes, 12 per value.

#include "numeric.cuh"

namespace {

__device__ float silu(float gate, float up) { return __fdiv_rn(gate, 1.0f + exp_exact(-gate)) * up; }

}  // namespace

// `vectors` of four values.
extern "C" __global__ void __launch_bounds__(256) silu_gated(const float4 *gate, const float4 *up, float4 *out, uint64_t vectors) {
    wait_for_predecessor();
    let_successor_start();
    uint64_t i = blockIdx.x * uint64_t(256) + threadIdx.x;
    if (i >= vectors) return;
    float4 g = gate[i], u = up[i];
    out[i] = make_float4(silu(g.x, u.x), silu(g.y, u.y), silu(g.z, u.z), silu(g.w, u.w));
}

// For numbers of values that are no multiple of four.
extern "C" __global__ void __launch_bounds__(256) silu_gated_odd(const float *gate, const float *up, float *out, uint64_t values) {
    wait_for_predecessor();
    let_successor_start();
    uint64_t i = blockIdx.x * uint64_t(256) + threadIdx.x;
    if (i < values) out[i] = silu(gate[i], up[i]);
}
