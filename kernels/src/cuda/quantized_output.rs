//! [`QuantizedOutput`]: where a kernel that makes activations also rounds them, sparing quantize.cu another pass over them.

use std::ffi::CStr;

use quant::DType;

use super::quantize::activation_bytes;
use super::{CudaError, ViewMut};

/// Panels for the rows that a kernel writes.
pub struct QuantizedOutput<'a> {
    /// Q8_0, Q8_1 or Q8_K.
    pub format: DType,
    pub act_tiles: ViewMut<'a, u8>,
}

/// Rows that are quantized have whole blocks of this many values.
const BLOCK: usize = 32;

impl QuantizedOutput<'_> {
    /// Whether there are kernels that round into this form.
    pub(super) fn has(format: DType) -> bool {
        matches!(format, DType::Q8_0 | DType::Q8_1 | DType::Q8_K)
    }

    /// The address of the act_tiles, once they have room for `rows` rows of `cols` values.
    pub(super) fn address(&self, rows: usize, cols: usize) -> Result<u64, CudaError> {
        let expected = activation_bytes(self.format, rows, cols).unwrap_or(usize::MAX);
        for (what, found, expected) in [
            ("forms without a kernel", usize::from(!Self::has(self.format)), 0),
            ("act_tiles of quantized rows", self.act_tiles.len(), expected),
            ("values beyond whole blocks in a quantized row", cols % BLOCK, 0),
        ] {
            if found != expected {
                return Err(CudaError::Length { what, found, expected });
            }
        }
        Ok(self.act_tiles.address())
    }
}

/// The kernel that rounds as asked: `names` are those that do not round, and round into Q8_0, Q8_1 and Q8_K.
pub(super) fn select_kernel(
    quantized: Option<&QuantizedOutput<'_>>,
    names: [&'static CStr; 4],
) -> &'static CStr {
    match quantized.map(|quantized| quantized.format) {
        Some(DType::Q8_0) => names[1],
        Some(DType::Q8_1) => names[2],
        Some(DType::Q8_K) => names[3],
        _ => names[0],
    }
}
