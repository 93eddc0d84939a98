// SPDX-License-Identifier: Apache-2.0

//! The wgmma instructions of the block shapes. Their operand lists have 8 to 128 registers, so the
//! build writes them.

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
    let mut out = String::from(
        "\ntemplate <int N, bool IS_BF16>\nstruct Wgmma;\n\ntemplate <int N>\nstruct WgmmaFromRegisters;\n",
    );
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
    out += &with_rows_in_registers(F16_TOKENS);
    out += "\ntemplate <int N, bool SIGNED>\nstruct WgmmaIntegers;\n";
    for tokens in EIGHT_BIT_TOKENS {
        out += &of_integers(tokens, true);
        out += &of_integers(tokens, false);
    }
    out
}

/// Tokens of the f16 products of linear/affine_k_wgmma.cuh.
#[allow(dead_code, reason = "for build.rs")]
const F16_TOKENS: usize = 32;

/// Returns `WgmmaFromRegisters<N>::run<ACCUMULATE>(sums, a, b)`: 64 rows in registers by N tokens
/// over 16 columns of f16. If not ACCUMULATE, `sums` is overwritten.
#[allow(dead_code, reason = "for build.rs")]
fn with_rows_in_registers(tokens: usize) -> String {
    let registers = tokens / 2;
    let list = |text: &dyn Fn(usize) -> String| (0..registers).map(text).collect::<Vec<_>>().join(", ");
    let rows = (0..4).map(|i| format!("%{}", registers + i)).collect::<Vec<_>>().join(", ");
    format!(
        "\ntemplate <>\nstruct WgmmaFromRegisters<{tokens}> {{\n    \
         template <int ACCUMULATE>\n    \
         static __device__ __forceinline__ void run(float (&sums)[{registers}], const uint32_t (&a)[4], uint64_t b) {{\n        \
         asm volatile(\"{{\\n.reg .pred accumulate;\\nsetp.ne.b32 accumulate, %{}, 0;\\n\"\n            \
         \"wgmma.mma_async.sync.aligned.m64n{tokens}k16.f32.f16.f16 {{{}}}, {{{rows}}}, %{}, accumulate, 1, 1, 0;\\n}}\"\n            \
         : {} : \"r\"(a[0]), \"r\"(a[1]), \"r\"(a[2]), \"r\"(a[3]), \"l\"(b), \"n\"(ACCUMULATE));\n    }}\n}};\n",
        registers + 5,
        list(&|i| format!("%{i}")),
        registers + 4,
        list(&|i| format!("\"+f\"(sums[{i}])")),
    )
}

/// Token counts of the 8-bit products of linear/wgmma_product.cuh: all tokens of an output tile.
#[allow(dead_code, reason = "for build.rs")]
const EIGHT_BIT_TOKENS: [usize; 6] = [160, 128, 96, 64, 32, 16];

/// Returns `WgmmaIntegers<N, SIGNED>::run<ACCUMULATE>(sums, a, b)`: 64 rows of signed or unsigned
/// bytes in registers by N tokens of signed bytes over 32 columns.
#[allow(dead_code, reason = "for build.rs")]
fn of_integers(tokens: usize, signed: bool) -> String {
    let registers = tokens / 2;
    let list = |text: &dyn Fn(usize) -> String| (0..registers).map(text).collect::<Vec<_>>().join(", ");
    let rows = (0..4).map(|i| format!("%{}", registers + i)).collect::<Vec<_>>().join(", ");
    let kind = if signed { "s8" } else { "u8" };
    format!(
        "\ntemplate <>\nstruct WgmmaIntegers<{tokens}, {signed}> {{\n    \
         template <int ACCUMULATE>\n    \
         static __device__ __forceinline__ void run(int (&sums)[{registers}], const uint32_t (&a)[4], uint64_t b) {{\n        \
         asm volatile(\"{{\\n.reg .pred accumulate;\\nsetp.ne.b32 accumulate, %{}, 0;\\n\"\n            \
         \"wgmma.mma_async.sync.aligned.m64n{tokens}k32.s32.{kind}.s8 {{{}}}, {{{rows}}}, %{}, accumulate;\\n}}\"\n            \
         : {} : \"r\"(a[0]), \"r\"(a[1]), \"r\"(a[2]), \"r\"(a[3]), \"l\"(b), \"n\"(ACCUMULATE));\n    }}\n}};\n",
        registers + 5,
        list(&|i| format!("%{i}")),
        registers + 4,
        list(&|i| format!("\"+r\"(sums[{i}])")),
    )
}
