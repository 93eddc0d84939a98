// SPDX-License-Identifier: Apache-2.0

//! [`WeightData`] is the bytes of a weight. They are either in device memory, which this process or
//! another one owns, or on the host in the file's layout. In the second case, the first use uploads
//! them.

use std::any::Any;
use std::sync::{Arc, OnceLock};

use bytes::Bytes;
use ops::{OpError, Weight};
use quant::layout::{LAYOUT_GGML, LAYOUT_TILES, LayoutError, Tiles};

use super::Cuda;
use super::operand::ByteRange;
use crate::cuda::error::device_error;
use crate::cuda::{Buffer, Stream};

/// Cheap to clone. Each clone keeps the memory alive.
#[derive(Clone)]
pub struct WeightData(WeightLocation);

#[derive(Clone)]
enum WeightLocation {
    Device { range: ByteRange, owner: Arc<dyn Any + Send + Sync> },
    Host(Arc<HostWeight>),
}

struct HostWeight {
    bytes: Bytes,
    tiles: OnceLock<Buffer<u8>>,
}

impl WeightData {
    /// # Safety
    /// `len` bytes at `address` are readable by kernels of the backend's device as long as `owner`
    /// lives. `owner` ends only after all work that was enqueued with these bytes has ended.
    pub unsafe fn on_device(address: u64, len: usize, owner: Arc<dyn Any + Send + Sync>) -> Self {
        Self(WeightLocation::Device { range: ByteRange { address, len }, owner })
    }
}

/// A tensor that another process loaded. The value keeps the model mapped.
impl From<memory::device::DeviceTensor> for WeightData {
    fn from(tensor: memory::device::DeviceTensor) -> Self {
        let (address, len) = (tensor.address(), tensor.bytes as usize);
        // SAFETY: the tensor's bytes are mapped for the device as long as the value lives. The
        // backend keeps each owner until it has waited for the work that uses the owner's
        // addresses.
        unsafe { Self::on_device(address, len, Arc::new(tensor)) }
    }
}

/// Bytes in the file's layout.
impl From<Bytes> for WeightData {
    fn from(bytes: Bytes) -> Self {
        Self(WeightLocation::Host(Arc::new(HostWeight { bytes, tiles: OnceLock::new() })))
    }
}

/// A weight in device memory, in the layout that kernels read.
#[derive(Clone)]
pub(super) struct ResidentWeight {
    pub(super) range: ByteRange,
    pub(super) tiles: Tiles,
    pub(super) owner: Arc<dyn Any + Send + Sync>,
}

/// Checks the size of a weight. If the weight is not in device memory, uploads it. The matrices of
/// a stack follow one another, as if their rows were the rows of one matrix.
pub(super) fn make_resident(
    op: &'static str,
    stream: &Stream,
    weight: &Weight<Cuda>,
) -> Result<ResidentWeight, OpError> {
    let tiles = Tiles::new(weight.dtype, weight.cols(), weight.rows())
        .map_err(|error| layout_error(op, weight, &error))?;
    let (range, owner): (ByteRange, Arc<dyn Any + Send + Sync>) = match (&weight.data.0, weight.layout) {
        (WeightLocation::Device { range, owner }, LAYOUT_TILES) => (*range, owner.clone()),
        // Types without blocks have the same bytes in both layouts.
        (WeightLocation::Device { range, owner }, LAYOUT_GGML) if tiles.tile_bytes() == 0 => {
            (*range, owner.clone())
        }
        (WeightLocation::Host(host), LAYOUT_GGML) => {
            let buffer = match host.tiles.get() {
                Some(buffer) => buffer,
                None => {
                    let made = upload(op, stream, weight, &host.bytes, &tiles)?;
                    host.tiles.get_or_init(|| made)
                }
            };
            (ByteRange { address: buffer.view().address(), len: buffer.len() }, host.clone())
        }
        (_, layout) => return Err(OpError::Layout { op, layout }),
    };
    let expected = tiles.bytes();
    if range.len != expected {
        return Err(OpError::Shape { op, what: "bytes of the weight", found: range.len, expected });
    }
    Ok(ResidentWeight { range, tiles, owner })
}

/// Returns matrix `index` of a stack in the third dimension, as a view.
pub(super) fn expert(
    op: &'static str,
    expert_weights: &Weight<Cuda>,
    index: usize,
) -> Result<Weight<Cuda>, OpError> {
    let matrix_rows = expert_weights.dims.get(1).copied().unwrap_or(1);
    let len = expert_weights.rows() / matrix_rows.max(1);
    if index >= len {
        return Err(OpError::Index { op, what: "expert", index, len });
    }
    let shape = |rows| {
        Tiles::new(expert_weights.dtype, expert_weights.cols(), rows)
            .map_err(|error| layout_error(op, expert_weights, &error))
    };
    let (whole, one) = (shape(expert_weights.rows())?, shape(matrix_rows)?);
    let place = match &expert_weights.data.0 {
        WeightLocation::Device { range, owner } => {
            // If matrices are not whole tiles, a tile has rows of two matrices, and the sizes
            // differ.
            let expected = one.bytes() * len;
            if range.len != expected || whole.bytes() != expected {
                return Err(OpError::Shape { op, what: "bytes of the weight", found: range.len, expected });
            }
            let address = range.address + (index * one.bytes()) as u64;
            WeightLocation::Device { range: ByteRange { address, len: one.bytes() }, owner: owner.clone() }
        }
        WeightLocation::Host(host) => {
            let (found, expected) = (host.bytes.len(), one.raw_bytes() * len);
            if found != expected {
                return Err(OpError::Shape { op, what: "bytes of the weight", found, expected });
            }
            let bytes = host.bytes.slice(index * one.raw_bytes()..(index + 1) * one.raw_bytes());
            return Ok(Weight {
                dtype: expert_weights.dtype,
                dims: expert_weights.dims[..expert_weights.dims.len().min(2)].to_vec(),
                layout: expert_weights.layout,
                data: bytes.into(),
            });
        }
    };
    let dims = expert_weights.dims[..expert_weights.dims.len().min(2)].to_vec();
    Ok(Weight { dtype: expert_weights.dtype, dims, layout: expert_weights.layout, data: WeightData(place) })
}

fn upload(
    op: &'static str,
    stream: &Stream,
    weight: &Weight<Cuda>,
    bytes: &[u8],
    tiles: &Tiles,
) -> Result<Buffer<u8>, OpError> {
    let mut laid_out = vec![0; tiles.bytes()];
    tiles.repack(bytes, &mut laid_out).map_err(|error| layout_error(op, weight, &error))?;
    Buffer::from_host(stream, &laid_out).map_err(|error| device_error(op)(error))
}

fn layout_error(op: &'static str, weight: &Weight<Cuda>, error: &LayoutError) -> OpError {
    match error {
        LayoutError::Bytes { expected, found, .. } => OpError::Shape {
            op,
            what: "bytes of the weight",
            found: *found,
            expected: usize::try_from(*expected).unwrap_or(usize::MAX),
        },
        LayoutError::Size(quant::SizeError::PartialBlock { values, block, .. }) => OpError::Shape {
            op,
            what: "values beyond whole blocks in a row",
            found: (values % block) as usize,
            expected: 0,
        },
        _ => OpError::Type { op, dtype: weight.dtype },
    }
}
