// SPDX-License-Identifier: Apache-2.0

//! The operands of kernel commands: ranges of device memory, and the shapes of what they hold. A
//! launcher receives them as views.

use ops::{AttentionSpan, AttentionSpec, KvType, OpError};
use quant::DType;
use quant::layout::Tiles;

use super::step::WordRange;
use crate::cuda::attention;
use crate::cuda::kv_write::KvLayerAddress;
use crate::cuda::quantize::{ActivationLayout, QuantizedActivations};
use crate::cuda::quantized_output::QuantizedOutput;
use crate::cuda::{DeviceView, DeviceViewMut};

/// A range of bytes in device memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(super) struct ByteRange {
    pub(super) address: u64,
    pub(super) len: usize,
}

/// A range of f32 values in device memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(super) struct FloatRange {
    pub(super) address: u64,
    pub(super) len: usize,
}

/// An f32 that is compared and hashed by its bits.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(super) struct F32Bits(u32);

impl From<f32> for F32Bits {
    fn from(value: f32) -> Self {
        Self(value.to_bits())
    }
}

impl F32Bits {
    pub(super) fn value(self) -> f32 {
        f32::from_bits(self.0)
    }
}

/// A weight matrix in device memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(super) struct WeightMatrix {
    pub(super) dtype: DType,
    pub(super) range: ByteRange,
    pub(super) cols: u32,
    pub(super) rows: u32,
}

/// Quantized activations in scratch memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(super) struct ActivationTiles {
    pub(super) layout: ActivationLayout,
    pub(super) range: ByteRange,
    pub(super) tokens: u32,
    pub(super) cols: u32,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(super) struct AttentionShape {
    pub(super) heads: u32,
    pub(super) kv_heads: u32,
    pub(super) head_dim: u32,
    pub(super) scale: F32Bits,
}

impl AttentionShape {
    pub(super) fn spec(self) -> AttentionSpec {
        AttentionSpec {
            heads: self.heads as usize,
            kv_heads: self.kv_heads as usize,
            head_dim: self.head_dim as usize,
            scale: self.scale.value(),
        }
    }
}

/// The operands of both attention commands.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(super) struct AttentionOperands {
    pub(super) layer: KvLayerAddress,
    pub(super) kind: KvType,
    pub(super) span: AttentionSpan,
    pub(super) shape: AttentionShape,
    pub(super) queries: FloatRange,
    pub(super) tables: u64,
    pub(super) out: FloatRange,
}

impl WeightMatrix {
    pub(super) fn tiles(&self) -> Result<Tiles, OpError> {
        // `push` received the same numbers from a valid shape, so this cannot fail.
        Tiles::new(self.dtype, self.cols as usize, self.rows as usize)
            .map_err(|_| OpError::Type { op: "linear", dtype: self.dtype })
    }
}

impl ActivationTiles {
    /// # Safety
    /// As `KernelSet::enqueue`.
    pub(super) unsafe fn activations<'a>(&self) -> QuantizedActivations<'a> {
        QuantizedActivations {
            layout: self.layout,
            tokens: self.tokens as usize,
            cols: self.cols as usize,
            // SAFETY: the caller's contract.
            data: unsafe { self.range.view() },
        }
    }

    /// `needs_values` says whether anything reads the values that a kernel quantizes.
    ///
    /// # Safety
    /// As `KernelSet::enqueue`.
    pub(super) unsafe fn quantized_output<'a>(&self, needs_values: bool) -> QuantizedOutput<'a> {
        // SAFETY: the caller's contract.
        let act_tiles = unsafe { self.range.view_mut() };
        QuantizedOutput { layout: self.layout, act_tiles, needs_values, is_before_product: false }
    }
}

impl AttentionOperands {
    /// # Safety
    /// As `KernelSet::enqueue`.
    pub(super) unsafe fn inputs<'a>(&self) -> attention::AttentionInputs<'a> {
        attention::AttentionInputs {
            layer: self.layer,
            kind: self.kind,
            span: self.span,
            spec: self.shape.spec(),
            // SAFETY: the caller's contract.
            queries: unsafe { self.queries.view() },
            // SAFETY: as above. The launcher uses the address alone.
            tables: unsafe { DeviceView::from_raw(self.tables, 0) },
        }
    }
}

impl ByteRange {
    fn end(self) -> u64 {
        self.address + self.len as u64
    }

    pub(super) fn overlaps(self, other: Self) -> bool {
        self.address < other.end() && other.address < self.end()
    }

    pub(super) fn covers(self, other: Self) -> bool {
        self.address <= other.address && other.end() <= self.end()
    }

    /// # Safety
    /// As [`DeviceView::from_raw`].
    pub(super) unsafe fn view<'a>(self) -> DeviceView<'a, u8> {
        // SAFETY: the caller's contract.
        unsafe { DeviceView::from_raw(self.address, self.len) }
    }

    /// # Safety
    /// As [`DeviceViewMut::from_raw`].
    pub(super) unsafe fn view_mut<'a>(self) -> DeviceViewMut<'a, u8> {
        // SAFETY: the caller's contract.
        unsafe { DeviceViewMut::from_raw(self.address, self.len) }
    }
}

impl FloatRange {
    /// # Safety
    /// As [`DeviceView::from_raw`].
    pub(super) unsafe fn view<'a>(self) -> DeviceView<'a, f32> {
        // SAFETY: the caller's contract.
        unsafe { DeviceView::from_raw(self.address, self.len) }
    }

    /// # Safety
    /// As [`DeviceViewMut::from_raw`].
    pub(super) unsafe fn view_mut<'a>(self) -> DeviceViewMut<'a, f32> {
        // SAFETY: the caller's contract.
        unsafe { DeviceViewMut::from_raw(self.address, self.len) }
    }
}

impl FloatRange {
    pub(super) fn bytes(self) -> ByteRange {
        ByteRange { address: self.address, len: self.len * size_of::<f32>() }
    }

    /// The `len` values from `start` on. They lie inside the range.
    pub(super) fn part(self, start: usize, len: usize) -> Self {
        debug_assert!(start + len <= self.len);
        Self { address: self.address + (start * size_of::<f32>()) as u64, len }
    }
}

impl WordRange {
    /// Words of this range. The range has at least `first + len` words.
    pub(super) fn part(self, first: usize, len: usize) -> Self {
        assert!(first + len <= self.len, "words {first} to {} of {}", first + len, self.len);
        Self { address: self.address + (first * size_of::<u32>()) as u64, len }
    }

    /// # Safety
    /// As [`DeviceViewMut::from_raw`].
    pub(super) unsafe fn view_mut<'a>(self) -> DeviceViewMut<'a, u32> {
        // SAFETY: the caller's contract.
        unsafe { DeviceViewMut::from_raw(self.address, self.len) }
    }

    /// # Safety
    /// As [`DeviceView::from_raw`].
    pub(super) unsafe fn view<'a>(self) -> DeviceView<'a, u32> {
        // SAFETY: the caller's contract.
        unsafe { DeviceView::from_raw(self.address, self.len) }
    }
}
