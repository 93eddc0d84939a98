// SPDX-License-Identifier: Apache-2.0

//! [`HalfBytes`]: an f16 in a block, as two little-endian bytes.

use bytemuck::{Pod, Zeroable};
use half::f16;

/// A scale field of a block. Its alignment is 1, so that a block struct may be read from any file
/// offset.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Pod, Zeroable)]
#[repr(transparent)]
pub struct HalfBytes([u8; 2]);

impl HalfBytes {
    /// Rounds to nearest even. A value beyond the range of f16 becomes infinite.
    pub fn from_f32(x: f32) -> Self {
        Self(f16::from_f32(x).to_le_bytes())
    }

    /// Exact.
    pub fn to_f32(self) -> f32 {
        f16::from_le_bytes(self.0).to_f32()
    }
}
