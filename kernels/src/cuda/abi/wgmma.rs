// SPDX-License-Identifier: Apache-2.0

//! The wgmma instructions of the block shapes. Their operand lists are as long as half a block has
//! rows, so the build writes them.

use std::fmt::Write;

use super::float_linear::FloatShape;

abi! {
    header "wgmma_instructions.cuh";

    constants {}
    structs {}
    kernels {}

    text wgmma_instructions;
}

/// Returns `Wgmma<N, IS_BF16>::run(sums, a, b)` for the row counts of all shapes: sums += a b over
/// 16 columns.
#[allow(dead_code, reason = "for build.rs")]
fn wgmma_instructions() -> String {
    let mut rows: Vec<usize> = FloatShape::ALL.iter().map(FloatShape::rows).collect();
    rows.sort_unstable();
    rows.dedup();
    let mut out = String::from("\ntemplate <int N, bool IS_BF16>\nstruct Wgmma;\n");
    for (rows, (is_bf16, float)) in
        rows.iter().flat_map(|&rows| [(rows, (false, "f16")), (rows, (true, "bf16"))])
    {
        let registers = rows / 2;
        let list = |text: &dyn Fn(usize) -> String| (0..registers).map(text).collect::<Vec<_>>().join(", ");
        let _ = write!(
            out,
            "\ntemplate <>\nstruct Wgmma<{rows}, {is_bf16}> {{\n    \
             static __device__ __forceinline__ void run(float (&sums)[{registers}], uint64_t a, uint64_t b) {{\n        \
             asm volatile(\"wgmma.mma_async.sync.aligned.m64n{rows}k16.f32.{float}.{float} {{{}}}, %{registers}, %{}, \
             1, 1, 1, 0, 0;\" : {} : \"l\"(a), \"l\"(b));\n    }}\n}};\n",
            list(&|i| format!("%{i}")),
            registers + 1,
            list(&|i| format!("\"+f\"(sums[{i}])")),
        );
    }
    out
}
