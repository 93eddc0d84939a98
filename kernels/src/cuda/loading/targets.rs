// SPDX-License-Identifier: Apache-2.0

//! Where the tensors of a model lie in the memory that is being filled.

use memory::device::WritableModel;
use quant::layout::{TILE_ROWS, Tiles};

use super::sums::sum_all;
use super::upload::UploadError;
use crate::cuda::checksum::{ChecksumKernels, PIECE_BYTES};
use crate::cuda::{Device, DeviceView};

/// The destination of a tensor, and its layout.
#[derive(Debug, Clone, Copy)]
pub struct TensorDestination {
    pub allocation: usize,
    pub offset: u64,
    pub tiles: Tiles,
}

pub(super) struct UploadTarget {
    pub(super) address: u64,
    pub(super) tiles: Tiles,
    /// The number of bytes of the file form that have arrived.
    pub(super) came: u64,
}

impl UploadTarget {
    pub(super) fn row_bytes(&self) -> usize {
        self.tiles.raw_bytes() / self.tiles.rows().max(1)
    }

    /// Parts begin and end at multiples of this, except at the end of the tensor.
    pub(super) fn step(&self) -> usize {
        if self.tiles.tile_bytes() == 0 { PIECE_BYTES } else { TILE_ROWS * self.row_bytes() }
    }
}

/// The address of each destination, which lies inside of its allocation.
pub(super) fn upload_targets(
    model: &WritableModel,
    destinations: &[TensorDestination],
) -> Result<Vec<UploadTarget>, UploadError> {
    let target = |(tensor, to): (usize, &TensorDestination)| {
        let bytes = to.tiles.bytes();
        let end = to.offset.checked_add(bytes as u64);
        let start = model.addresses().get(to.allocation);
        match (start, end, model.bytes(to.allocation)) {
            (Some(start), Some(end), Some(size)) if end <= size => {
                Ok(UploadTarget { address: start + to.offset, tiles: to.tiles, came: 0 })
            }
            _ => {
                let TensorDestination { allocation, offset, .. } = *to;
                Err(UploadError::TensorDestination { tensor, allocation, offset, bytes })
            }
        }
    };
    destinations.iter().enumerate().map(target).collect()
}

/// Computes the checksums of the pieces of each tensor of a model that was filled. All work that
/// writes to it has ended.
pub fn sum_model(
    device: &Device,
    model: &WritableModel,
    destinations: &[TensorDestination],
) -> Result<Vec<Vec<u128>>, UploadError> {
    if model.device().uuid() != device.uuid() {
        return Err(UploadError::Device);
    }
    device.bind()?;
    let targets = upload_targets(model, destinations)?;
    let view = |target: &UploadTarget| {
        // SAFETY: the range is inside the model, which is borrowed. `sum_all` waits for the work
        // that it enqueues. If it fails, dropping its buffers waits.
        unsafe { DeviceView::from_raw(target.address, target.tiles.bytes()) }
    };
    let views: Vec<DeviceView<'_, u8>> = targets.iter().map(view).collect();
    Ok(sum_all(&ChecksumKernels::new(device), device, &views)?)
}
