// attention.cu over keys and values of bf16: products in bf16, so queries and weights are rounded to 8 bits as keys and values
// are, and nothing leaves the range that an f32 has.

#include "attention/chunk.cuh"
#include "attention/halves.cuh"
#include "attention/plain.cuh"
#include "attention/split.cuh"

namespace {

template <int DIM>
using Bf16 = Halves<InBf16, DIM>;

}  // namespace

SPLIT(64, Bf16<64>)
SPLIT(96, Bf16<96>)
SPLIT(128, Bf16<128>)
CHUNK(64, Bf16<64>)
CHUNK(96, Bf16<96>)
CHUNK(128, Bf16<128>)
PLAIN(bf16, StoredFloats<__nv_bfloat16>)
