// SPDX-License-Identifier: Apache-2.0

//! The interface of the KV cache kernels.

abi! {
    header "kv.cuh";

    constants {
        /// Threads of a block of kv_write.cu. A block writes one row.
        const KV_WRITE_THREADS: u32 = 256;
        /// Warps of a block of norm_rope_kv.cu: one warp per head.
        const NORM_ROPE_WARPS: usize = 8;
        /// The largest head, in values, for which norm_rope_kv.cu has shared memory.
        const NORM_ROPE_HEAD_DIM_MAX: usize = 256;
    }
    structs {
        /// The location of one layer's keys and values. The cache is one address range that grows
        /// in units. A unit holds 2^unit_shift blocks of all layers. In a unit, the part of each
        /// layer is contiguous. A block's part of a layer is [kv head][keys, values][token][dim].
        #[derive(Debug, PartialEq, Eq, Hash)]
        struct KvLayerAddress [40 bytes] {
            base: u64 as "uint8_t *",
            unit_bytes: u64,
            /// The offset of the layer in a unit.
            layer_offset: u64,
            /// Bytes of one block's part of the layer.
            block_bytes: u32,
            /// Bytes of the keys (or of the values) of one head in a block.
            head_bytes: u32,
            unit_shift: u32,
            block_tokens: u32,
        }

        /// Operands of norm_rope_kv.cu: the query, key and value heads of a step.
        #[derive(Default)]
        struct NormRopeKvParams [96 bytes] {
            queries: u64 as "float *",
            keys: u64 as "float *",
            values: u64 as "const float *",
            /// Weights of the RMS norms of query and key heads. Either both are null or neither is.
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
            /// If not 0, a pair is two adjacent values. Otherwise a pair is values i and i + pairs.
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
