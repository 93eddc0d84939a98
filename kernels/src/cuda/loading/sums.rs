// SPDX-License-Identifier: Apache-2.0

//! Computes checksums of many ranges of device memory. All kernels are launched first, then all
//! results are read back together.

use memory::device::DeviceTensor;
use xxhash_rust::xxh3::xxh3_128;

use super::part_memory::PartMemory;
use crate::cuda::checksum::{ChecksumKernels, PIECE_BYTES, SHORT_BYTES};
use crate::cuda::{Buffer, CudaError, Device, DeviceView, Stream};

/// The number of streams whose kernels run at once. A kernel over a small tensor does not fill the
/// device: a few MiB take as long as 100 MiB.
const STREAMS: usize = 16;

/// The distance in `tails` between two short last pieces, which the host hashes.
const TAIL_STRIDE: usize = 256;

/// Checksums of pieces, in device memory.
pub(super) struct PieceChecksums {
    halves: Buffer<[u64; 2]>,
    tails: Buffer<u8>,
    ranges: Vec<ChecksumRange>,
}

#[derive(Clone, Copy)]
struct ChecksumRange {
    bytes: u64,
    /// The index of the range's first piece in `halves`.
    first: usize,
}

impl ChecksumRange {
    fn pieces(self) -> usize {
        (self.bytes as usize).div_ceil(PIECE_BYTES)
    }

    fn tail(self) -> usize {
        match self.bytes as usize % PIECE_BYTES {
            tail @ 1..=SHORT_BYTES => tail,
            _ => 0,
        }
    }
}

impl PieceChecksums {
    pub(super) fn new(device: &Device, sizes: impl Iterator<Item = u64>) -> Result<Self, CudaError> {
        let mut first = 0;
        let ranges: Vec<ChecksumRange> = sizes
            .map(|bytes| {
                let range = ChecksumRange { bytes, first };
                first += range.pieces();
                range
            })
            .collect();
        let tails = Buffer::new(device, ranges.len() * TAIL_STRIDE)?;
        Ok(Self { halves: Buffer::new(device, first)?, tails, ranges })
    }

    /// Hashes `bytes`. They begin with piece `piece` of range `index`, and hold whole pieces or
    /// reach the end of the range.
    pub(super) fn launch(
        &mut self,
        checksums: &ChecksumKernels,
        stream: &Stream,
        index: usize,
        piece: usize,
        bytes: PartMemory<'_>,
    ) -> Result<(), CudaError> {
        let range = self.ranges[index];
        let pieces = bytes.len().div_ceil(PIECE_BYTES);
        let mut halves = self.halves.view_mut();
        let out = (piece + pieces <= range.pieces()).then(|| halves.slice_mut(range.first + piece, pieces));
        let Some(mut out) = out.flatten() else {
            let (found, expected) = (piece + pieces, range.pieces());
            return Err(CudaError::Length { what: "pieces of a tensor", found, expected });
        };
        checksums.launch(stream, bytes.view(), &mut out)?;
        let tail = if piece + pieces == range.pieces() { range.tail() } else { 0 };
        if tail > 0
            && let (Some(source), Some(mut kept)) = (
                bytes.slice(bytes.len() - tail, tail),
                self.tails.view_mut().slice_mut(index * TAIL_STRIDE, tail),
            )
        {
            source.copy_to(stream, &mut kept)?;
        }
        Ok(())
    }

    /// Returns the checksums of the pieces of every range. All launched work must have ended.
    pub(super) fn read(&self, stream: &Stream) -> Result<Vec<Vec<u128>>, CudaError> {
        let halves = self.halves.to_host(stream)?;
        let tails = self.tails.to_host(stream)?;
        let sums = |(index, range): (usize, &ChecksumRange)| {
            let halves = &halves[range.first..range.first + range.pieces()];
            let mut pieces: Vec<u128> =
                halves.iter().map(|[low, high]| u128::from(*high) << 64 | u128::from(*low)).collect();
            if range.tail() > 0
                && let Some(last) = pieces.last_mut()
            {
                *last = xxh3_128(&tails[index * TAIL_STRIDE..][..range.tail()]);
            }
            pieces
        };
        Ok(self.ranges.iter().enumerate().map(sums).collect())
    }
}

/// Computes the checksums of the pieces of each range.
pub fn sum_all(
    checksums: &ChecksumKernels,
    device: &Device,
    ranges: &[DeviceView<'_, u8>],
) -> Result<Vec<Vec<u128>>, CudaError> {
    let streams: Vec<Stream> = (0..STREAMS).map(|_| Stream::new(device)).collect::<Result<_, _>>()?;
    let mut sums = PieceChecksums::new(device, ranges.iter().map(|range| range.len() as u64))?;
    for (index, range) in ranges.iter().enumerate().filter(|(_, range)| !range.is_empty()) {
        sums.launch(checksums, &streams[index % STREAMS], index, 0, PartMemory::Staging(*range))?;
    }
    streams.iter().try_for_each(Stream::synchronize)?;
    sums.read(&streams[0])
}

/// Computes the checksums of the pieces of each tensor from its bytes in device memory.
pub fn verify(device: &Device, tensors: &[DeviceTensor]) -> Result<Vec<Vec<u128>>, CudaError> {
    device.bind()?;
    let view = |tensor: &DeviceTensor| {
        // SAFETY: the tensor's bytes are mapped for reading as long as the tensor lives, which is
        // longer than `sum_all` runs. `sum_all` waits for all work that it enqueues. If it fails,
        // dropping its buffers waits.
        unsafe { DeviceView::from_raw(tensor.address(), tensor.bytes as usize) }
    };
    sum_all(&ChecksumKernels::new(device), device, &tensors.iter().map(view).collect::<Vec<_>>())
}
