//! An IEEE half as it stands in a block: two little-endian bytes at any address.

use bytemuck::{Pod, Zeroable};
use half::f16;

/// Scale fields of blocks. Without alignment, so that a block struct can be laid over file bytes wherever they are.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Pod, Zeroable)]
#[repr(transparent)]
pub struct HalfBytes([u8; 2]);

impl HalfBytes {
    /// Rounds to nearest even; too large becomes infinite.
    pub fn from_f32(x: f32) -> Self {
        Self(f16::from_f32(x).to_le_bytes())
    }

    /// Exact.
    pub fn to_f32(self) -> f32 {
        f16::from_le_bytes(self.0).to_f32()
    }
}
