// SPDX-License-Identifier: Apache-2.0

//! The interface of the reference kernels in naive.cu, which only tests use.

abi! {
    header "naive.cuh";

    constants {
        const NAIVE_THREADS: u32 = 128;
    }
    structs {}
    kernels {
        kernel NaiveAttention(
            queries: u64 as "const float *",
            keys: u64 as "const float *",
            values: u64 as "const float *",
            heads: i32,
            kv_heads: i32,
            dim: i32,
            first_position: i32,
            scale: f32,
            out: u64 as "float *",
        );
        kernel NaiveMatmul(
            weights: u64 as "const float *",
            x: u64 as "const float *",
            bias: u64 as "const float *",
            cols: i32,
            rows: i32,
            out: u64 as "float *",
        );
    }
}
