// SPDX-License-Identifier: Apache-2.0

//! The wgmma instructions of attention/prefill_wgmma.cuh. They have a header of their own, so that
//! a change compiles no other image anew.

use super::attention::ATTENTION_TILE;

abi! {
    header "attention_wgmma.cuh";

    constants {}
    structs {}
    kernels {}

    text attention_wgmma;
}

/// Columns of P V: the dimensions of a head, and eight for the sum of weights.
#[allow(dead_code, reason = "for build.rs")]
const VALUE_COLUMNS: [usize; 2] = [64 + 8, 128 + 8];

#[allow(dead_code, reason = "for build.rs")]
fn attention_wgmma() -> String {
    let mut out = String::from(
        "\ntemplate <bool IS_BF16>\nstruct ScoresWgmma;\n\ntemplate <int N, bool IS_BF16>\nstruct ValuesWgmma;\n",
    );
    for (is_bf16, float) in [(false, "f16"), (true, "bf16")] {
        out += &scores(is_bf16, float);
        for columns in VALUE_COLUMNS {
            out += &values(columns, is_bf16, float);
        }
    }
    out
}

/// Returns `ScoresWgmma<IS_BF16>::run<ACCUMULATE>(sums, a, b)`: 64 queries by the keys of a tile
/// over 16 dimensions. If not ACCUMULATE, `sums` is overwritten.
#[allow(dead_code, reason = "for build.rs")]
fn scores(is_bf16: bool, float: &str) -> String {
    let registers = ATTENTION_TILE / 2;
    format!(
        "\ntemplate <>\nstruct ScoresWgmma<{is_bf16}> {{\n    \
         template <int ACCUMULATE>\n    \
         static __device__ __forceinline__ void run(float (&sums)[{registers}], uint64_t a, uint64_t b) {{\n        \
         asm volatile(\"{{\\n.reg .pred accumulate;\\nsetp.ne.b32 accumulate, %{}, 0;\\n\"\n            \
         \"wgmma.mma_async.sync.aligned.m64n{ATTENTION_TILE}k16.f32.{float}.{float} {{{}}}, %{registers}, %{}, \
         accumulate, 1, 1, 0, 0;\\n}}\"\n            \
         : {} : \"l\"(a), \"l\"(b), \"n\"(ACCUMULATE));\n    }}\n}};\n",
        registers + 2,
        list(0..registers, |i| format!("%{i}")),
        registers + 1,
        list(0..registers, |i| format!("\"+f\"(sums[{i}])")),
    )
}

/// Returns `ValuesWgmma<N, IS_BF16>::run(sums, a, b)`: sums += weights of 64 queries, in registers,
/// by N columns over 16 keys. Columns are contiguous in `b`, so it is transposed.
#[allow(dead_code, reason = "for build.rs")]
fn values(columns: usize, is_bf16: bool, float: &str) -> String {
    let registers = columns / 2;
    format!(
        "\ntemplate <>\nstruct ValuesWgmma<{columns}, {is_bf16}> {{\n    \
         static __device__ __forceinline__ void run(float (&sums)[{registers}], const uint32_t (&a)[4], uint64_t b) {{\n        \
         asm volatile(\"wgmma.mma_async.sync.aligned.m64n{columns}k16.f32.{float}.{float} {{{}}}, {{{}}}, %{}, \
         1, 1, 1, 1;\"\n            \
         : {} : \"r\"(a[0]), \"r\"(a[1]), \"r\"(a[2]), \"r\"(a[3]), \"l\"(b));\n    }}\n}};\n",
        list(0..registers, |i| format!("%{i}")),
        list(registers..registers + 4, |i| format!("%{i}")),
        registers + 4,
        list(0..registers, |i| format!("\"+f\"(sums[{i}])")),
    )
}

#[allow(dead_code, reason = "for build.rs")]
fn list(numbers: std::ops::Range<usize>, text: impl Fn(usize) -> String) -> String {
    numbers.map(text).collect::<Vec<_>>().join(", ")
}
