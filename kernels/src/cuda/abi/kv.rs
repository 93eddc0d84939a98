// SPDX-License-Identifier: Apache-2.0

//! The KV cache as kernels see it.

abi! {
    header "kv.cuh";

    constants {
        /// Threads of a block of kv_write.cu, which writes one row.
        const KV_WRITE_THREADS: u32 = 256;
        /// Warps of a block of norm_rope_kv.cu: one warp per head.
        const NORM_ROPE_WARPS: usize = 8;
        /// Values of a head that norm_rope_kv.cu has shared memory for.
        const NORM_ROPE_HEAD_DIM_MAX: usize = 256;
    }
    structs {
        /// Where the keys and values of one layer stand. The cache is one address range that grows
        /// in units. A unit holds 2^unit_shift blocks of all layers; each layer's part of it is
        /// contiguous. A block's part of a layer is [kv head][keys, values][token][dim].
        #[derive(Debug, PartialEq, Eq, Hash)]
        struct KvLayerAddress [40 bytes] {
            base: u64 as "uint8_t *",
            unit_bytes: u64,
            /// Where the layer begins in a unit.
            layer_offset: u64,
            /// Bytes of one block's part of the layer.
            block_bytes: u32,
            /// Bytes of the keys, or of the values, of one head in a block.
            head_bytes: u32,
            unit_shift: u32,
            block_tokens: u32,
        }

        /// Operands of norm_rope_kv.cu: a step's query, key and value heads.
        struct NormRopeKvParams [96 bytes] {
            queries: u64 as "float *",
            keys: u64 as "float *",
            values: u64 as "const float *",
            /// Weights of the RMS norms of query and key heads: both or neither are null.
            query_weight: u64 as "const float *",
            key_weight: u64 as "const float *",
            positions: u64 as "const uint32_t *",
            slots: u64 as "const uint32_t *",
            inverse_frequencies: u64 as "const float *",
            eps: f32,
            magnitude: f32,
            heads: i32,
            kv_heads: i32,
            head_dim: i32,
            /// Rotated pairs of a head.
            pairs: i32,
            /// Whether a pair is two adjacent values; else it is values i and i + pairs.
            adjacent: i32,
        }
    }
    kernels {
        kernel KvWrite(
            kv: KvLayerAddress,
            keys: u64 as "const float *",
            values: u64 as "const float *",
            slots: u64 as "const uint32_t *",
            kv_heads: i32,
            head_dim: i32,
        );
        kernel NormRopeKvWrite(kv: KvLayerAddress, params: NormRopeKvParams);
    }
}
