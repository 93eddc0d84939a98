// SPDX-License-Identifier: Apache-2.0

//! [`QuantizedOutput`] makes a kernel that computes activations also quantize them. This saves a
//! separate pass by quantize.cu.

use quant::DType;

use super::abi::tiles::QuantizedRows;
use super::launch::KernelName;
use super::quantize::{ActivationLayout, FLOAT16_ROW_STEP, QuantizedActivations};
use super::{CudaError, DeviceView, DeviceViewMut};

/// Activation tiles for the rows that a kernel writes.
pub struct QuantizedOutput<'a> {
    /// The format is Q8_0, Q8_1, Q8_K, F16 or BF16.
    pub layout: ActivationLayout,
    pub act_tiles: DeviceViewMut<'a, u8>,
    /// Whether anything reads the values themselves. If not, a kernel need not write them.
    pub needs_values: bool,
    /// Whether the next launch is a product that gains by an early start. Norms and activations
    /// then let it start, and copy weights, before they have their input.
    pub is_before_product: bool,
}

/// A row of quants consists of whole blocks of this many values.
const BLOCK: usize = 32;

impl QuantizedOutput<'_> {
    /// Whether kernels can quantize into this format.
    pub(super) fn supports(format: DType) -> bool {
        matches!(format, DType::Q8_0 | DType::Q8_1 | DType::Q8_K | DType::F16 | DType::BF16)
    }

    /// Returns the addresses for kernels, if the activation tiles have room for `rows` rows of
    /// `cols` values.
    pub(super) fn rows(&self, rows: usize, cols: usize) -> Result<QuantizedRows, CudaError> {
        let expected = self.layout.bytes(rows, cols).unwrap_or(usize::MAX);
        let block = match self.layout.format {
            DType::F16 | DType::BF16 => FLOAT16_ROW_STEP,
            _ => BLOCK,
        };
        for (what, found, expected) in [
            ("formats without a kernel", usize::from(!Self::supports(self.layout.format)), 0),
            ("activation tiles of quantized rows", self.act_tiles.len(), expected),
            ("values beyond whole blocks in a quantized row", cols % block, 0),
        ] {
            if found != expected {
                return Err(CudaError::Length { what, found, expected });
            }
        }
        Ok(self.layout.rows(self.act_tiles.address(), rows, cols))
    }

    /// [`Self::is_before_product`] as kernels take it.
    pub(super) fn launches_early(quantized: Option<&Self>) -> i32 {
        i32::from(quantized.is_some_and(|quantized| quantized.is_before_product))
    }

    /// What a kernel has written here: `tokens` rows of `cols` values.
    pub fn activations(&self, tokens: usize, cols: usize) -> QuantizedActivations<'_> {
        // SAFETY: the range is that of `act_tiles`, which stays borrowed.
        let data = unsafe { DeviceView::from_raw(self.act_tiles.address(), self.act_tiles.len()) };
        QuantizedActivations { layout: self.layout, tokens, cols, data }
    }

    /// The number of the format among Q8_0, Q8_1, Q8_K, F16 and BF16, as in ActivationFormat of
    /// linear/tile.cuh. [`Self::rows`] has already refused other formats.
    pub(super) fn number(&self) -> usize {
        match self.layout.format {
            DType::Q8_0 => 0,
            DType::Q8_1 => 1,
            DType::Q8_K => 2,
            DType::F16 => 3,
            _ => 4,
        }
    }

    /// Selects the kernel for the format from `names`, those of Q8_0, Q8_1, Q8_K, F16 and BF16.
    pub(super) fn select<A>(&self, names: [KernelName<A>; 5]) -> KernelName<A> {
        names[self.number()]
    }

    /// As [`Self::select`], for kernels that round to quants alone: Q8_0, Q8_1 and Q8_K. None for
    /// other formats.
    pub(super) fn select_quants<A>(&self, names: [KernelName<A>; 3]) -> Option<KernelName<A>> {
        let [q8_0, q8_1, q8_k] = names;
        match self.layout.format {
            DType::Q8_0 => Some(q8_0),
            DType::Q8_1 => Some(q8_1),
            DType::Q8_K => Some(q8_k),
            _ => None,
        }
    }
}
