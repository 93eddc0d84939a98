// SPDX-License-Identifier: Apache-2.0

//! The interface of linear layers with 16-bit float weights: tensor maps, and the block shapes of
//! the kernels.

use std::fmt::Write;

use super::linear::{LinearParams, MATRICES_MAX};
use super::tiles::ACT_TILE_TOKENS;

abi! {
    header "float_linear.cuh";
    include "\"abi/linear.cuh\"";

    constants {
        /// Warps of a block that start copies.
        const FLOAT_COPY_WARPS: usize = 2;
        /// Columns of a unit: 128 bytes of a row of weights.
        const FLOAT_UNIT_COLS: usize = 64;
    }
    structs {
        /// The driver's encoding of a tensor and of the boxes that a kernel copies.
        struct TensorMap [128 bytes, align 64] {
            words: [u64; 16],
        }
        struct FloatMaps [640 bytes, align 64] {
            /// Boxes of BN weight rows.
            weights: [TensorMap; MATRICES_MAX],
            activations: TensorMap,
        }
    }
    kernels {
        /// `params.weights` and `params.act_tiles` are not used. A stage has room for `token_rows`
        /// tokens.
        kernel FloatMatmul(params: LinearParams, maps: FloatMaps, stages: i32, token_rows: i32);
    }

    text float_matmul_kernels;
}

/// The shape of a block: `warpgroups` times 64 tokens by `rows` weight rows. A pipeline stage has
/// `units` units of columns.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[allow(unreachable_pub, reason = "the launcher exports it")]
pub struct FloatShape {
    warpgroups: usize,
    rows: usize,
    units: usize,
}

#[allow(dead_code, unreachable_pub, reason = "build.rs needs the dimensions, launchers the sizes")]
impl FloatShape {
    const fn new(warpgroups: usize, rows: usize, units: usize) -> Self {
        Self { warpgroups, rows, units }
    }

    /// Few rows need long stages, because a stage costs its two copies and a barrier.
    pub(crate) const ALL: [Self; 9] = [
        Self::new(1, 16, 4),
        Self::new(1, 32, 2),
        Self::new(1, 48, 2),
        Self::new(1, 96, 1),
        Self::new(1, 192, 1),
        Self::new(2, 64, 2),
        Self::new(2, 128, 1),
        Self::new(2, 192, 1),
        Self::new(2, 256, 1),
    ];

    /// Tokens of a block.
    pub const fn tokens(&self) -> usize {
        64 * self.warpgroups
    }

    /// Weight rows of a block.
    pub const fn rows(&self) -> usize {
        self.rows
    }

    /// Units of a pipeline stage.
    pub(crate) const fn units(&self) -> usize {
        self.units
    }

    pub(crate) const fn warps(&self) -> usize {
        4 * self.warpgroups + FLOAT_COPY_WARPS
    }

    /// Rows of a stage for tokens. A block of two warpgroups has room for all.
    pub(crate) const fn token_rows(&self, tokens: usize) -> usize {
        let rows = tokens.next_multiple_of(ACT_TILE_TOKENS);
        if self.warpgroups > 1 || rows > self.tokens() { self.tokens() } else { rows }
    }
}

/// Returns a macro that defines the kernels of a type: `FLOAT_MATMULS(f16, F16)`.
#[allow(dead_code, reason = "for build.rs")]
fn float_matmul_kernels() -> String {
    let mut out = String::from(
        "\n// FLOAT_MATMUL_KERNEL(name, tokens, format, warpgroups, rows, units)\n#define FLOAT_MATMULS(NAME, FORMAT)",
    );
    for FloatShape { warpgroups, rows, units } in FloatShape::ALL {
        let tokens = 64 * warpgroups;
        let _ = write!(
            out,
            " \\\n    FLOAT_MATMUL_KERNEL(NAME, {tokens}, FORMAT, {warpgroups}, {rows}, {units})"
        );
    }
    out.push('\n');
    out
}
