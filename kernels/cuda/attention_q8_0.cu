// SPDX-License-Identifier: Apache-2.0

// The kernels of attention.cu for a cache of q8_0. Operands of products are scale times byte,
// rounded to f16.

#include "attention/grouped_kv.cuh"
#include "attention/kv_q8_0.cuh"
#include "attention/prefill.cuh"
#include "attention/scalar.cuh"
#include "attention/split_kv.cuh"

SPLIT_KV_KERNEL(64, KvQ8_0<64>)
SPLIT_KV_KERNEL(80, KvQ8_0<80>)
SPLIT_KV_KERNEL(96, KvQ8_0<96>)
SPLIT_KV_KERNEL(128, KvQ8_0<128>)
SPLIT_KV_KERNEL(192, KvQ8_0<192>)
SPLIT_KV_KERNEL(256, KvQ8_0<256>)
GROUPED_KV_KERNELS(64, KvQ8_0<64>)
GROUPED_KV_KERNELS(80, KvQ8_0<80>)
GROUPED_KV_KERNELS(96, KvQ8_0<96>)
GROUPED_KV_KERNELS(128, KvQ8_0<128>)
PREFILL_KERNEL(64, KvQ8_0<64>)
PREFILL_KERNEL(80, KvQ8_0<80>)
PREFILL_KERNEL(96, KvQ8_0<96>)
PREFILL_KERNEL(128, KvQ8_0<128>)
PREFILL_KERNEL(192, KvQ8_0<192>)
PREFILL_KERNEL(256, KvQ8_0<256>)
SCALAR_KERNEL(q8_0, KvReaderQ8_0)
