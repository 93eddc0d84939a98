// SPDX-License-Identifier: Apache-2.0

// The kernels of attention.cu for a cache of bf16. Products are in bf16, so queries and weights are
// rounded to 8 bits, as keys and values are; every value that f32 can hold stays in range.

#include "attention/grouped_kv.cuh"
#include "attention/prefill.cuh"
#include "attention/kv_16bit.cuh"
#include "attention/prefill_wgmma.cuh"
#include "attention/scalar.cuh"
#include "attention/split_kv.cuh"

namespace {

template <int DIM>
using Bf16Cache = Kv16Bit<MmaBf16, DIM>;

}  // namespace

SPLIT_KV_KERNEL(64, Bf16Cache<64>)
SPLIT_KV_KERNEL(80, Bf16Cache<80>)
SPLIT_KV_KERNEL(96, Bf16Cache<96>)
SPLIT_KV_KERNEL(128, Bf16Cache<128>)
SPLIT_KV_KERNEL(192, Bf16Cache<192>)
SPLIT_KV_KERNEL(256, Bf16Cache<256>)
GROUPED_KV_KERNELS(64, Bf16Cache<64>)
GROUPED_KV_KERNELS(80, Bf16Cache<80>)
GROUPED_KV_KERNELS(96, Bf16Cache<96>)
GROUPED_KV_KERNELS(128, Bf16Cache<128>)
PREFILL_KERNEL(64, Bf16Cache<64>)
PREFILL_KERNEL(80, Bf16Cache<80>)
PREFILL_KERNEL(96, Bf16Cache<96>)
PREFILL_KERNEL(128, Bf16Cache<128>)
PREFILL_KERNEL(192, Bf16Cache<192>)
PREFILL_KERNEL(256, Bf16Cache<256>)
PREFILL_WGMMA_KERNEL(64, MmaBf16)
PREFILL_WGMMA_KERNEL(128, MmaBf16)
SCALAR_KERNEL(bf16, KvReaderFloat<__nv_bfloat16>)
