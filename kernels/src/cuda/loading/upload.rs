// SPDX-License-Identifier: Apache-2.0

//! [`ModelUpload`] takes filled slots in order and writes their tensors to a model in device
//! memory.

use std::marker::PhantomData;

use memory::device::WritableModel;
use quant::layout::{LayoutError, TILE_ROWS, Tiles};

use super::part_memory::PartMemory;
use super::ring::{HostSlot, PART_BYTES, StagingRing};
use super::sums::{PieceChecksums, sum_all};
use super::targets::{TensorDestination, UploadTarget, upload_targets};
use crate::cuda::checksum::{ChecksumKernels, PIECE_BYTES};
use crate::cuda::repack::RepackKernels;
use crate::cuda::{Buffer, CudaError, Device, DeviceView, DeviceViewMut, Event, Stream};

/// The content of a slot: `bytes` bytes of a tensor, from byte `start` of its file form on. They
/// begin at offset `at` of the slot.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct TensorPart {
    pub tensor: usize,
    pub start: u64,
    pub bytes: usize,
    pub at: usize,
}

/// The checksums of the pieces of each tensor.
#[derive(Debug)]
pub struct ModelChecksums {
    /// Of the file's bytes.
    pub raw: Vec<Vec<u128>>,
    /// Of the bytes that kernels read.
    pub laid_out: Vec<Vec<u128>>,
}

#[derive(Debug, thiserror::Error)]
pub enum UploadError {
    #[error(transparent)]
    Cuda(#[from] CudaError),
    #[error(
        "tensor {tensor}: destination of {bytes} bytes at {offset} lies outside of allocation {allocation}"
    )]
    TensorDestination { tensor: usize, allocation: usize, offset: u64, bytes: usize },
    #[error("the model's memory is on another device than its upload")]
    Device,
    #[error("tensor {tensor}: {bytes} bytes came at {start}, byte {due} was due")]
    OutOfOrder { tensor: usize, start: u64, bytes: usize, due: u64 },
    #[error("tensor {tensor}: {bytes} bytes at {start} are not whole tiles")]
    NotWholeTiles { tensor: usize, start: u64, bytes: usize },
    #[error("tensor {tensor} did not come whole: {came} of {bytes} bytes")]
    Incomplete { tensor: usize, came: u64, bytes: u64 },
    #[error(transparent)]
    Layout(#[from] LayoutError),
}

/// Fills a model. The borrow prevents the model from being dropped or finished before the upload.
/// The upload waits for the device when it ends.
pub struct ModelUpload<'m> {
    device: Device,
    targets: Vec<UploadTarget>,
    /// The stream of all copies from the host. The stream waits for no event: a slot leaves its
    /// ring only when its staging buffer may be filled again.
    copies: Stream,
    /// Indexed by the slot's index.
    staging: Vec<StagingBuffer>,
    /// The last slot. It is not yet returned to its ring, because the next part may carry over its
    /// end.
    last: Option<HostSlot>,
    ring: &'m StagingRing,
    checksums: ChecksumKernels,
    repack: RepackKernels,
    raw: PieceChecksums,
    model: PhantomData<&'m mut WritableModel>,
}

/// A part in device memory. The part begins at `PIECE_BYTES`, and carried bytes end there.
struct StagingBuffer {
    /// The stream for work on the part after its copy.
    stream: Stream,
    /// Empty if kernels read the slot in place.
    memory: Buffer<u8>,
    /// Bytes of the last part.
    bytes: usize,
    /// Where the last part began in its slot.
    at: usize,
    /// Recorded after the copy of the part.
    copied: Event,
    /// Recorded after the copy of the carried bytes.
    carried: Event,
}

impl<'m> ModelUpload<'m> {
    pub fn new(
        device: &Device,
        ring: &'m StagingRing,
        model: &'m mut WritableModel,
        destinations: &[TensorDestination],
    ) -> Result<Self, UploadError> {
        if model.device().uuid().0 != device.uuid().0 {
            return Err(UploadError::Device);
        }
        device.bind()?;
        let targets = upload_targets(model, destinations)?;
        let staging = (0..ring.slots())
            .map(|_| StagingBuffer::new(device, ring))
            .collect::<Result<Vec<_>, CudaError>>()?;
        let (checksums, repack) = (ChecksumKernels::new(device), RepackKernels::new(device));
        checksums.load()?;
        repack.load()?;
        let raw = PieceChecksums::new(device, targets.iter().map(|target| target.tiles.raw_bytes() as u64))?;
        Ok(Self {
            device: device.clone(),
            targets,
            copies: Stream::new(device)?,
            staging,
            last: None,
            ring,
            checksums,
            repack,
            raw,
            model: PhantomData,
        })
    }

    /// Enqueues all work on a part, then returns the previous slot to its ring. The parts of a
    /// tensor come in order, and one tensor comes after the other.
    pub fn submit(&mut self, mut slot: HostSlot, part: TensorPart) -> Result<(), UploadError> {
        if let Err(error) = self.start(&mut slot, part) {
            // A copy may have started that the slot's event does not cover. So the slot is dropped
            // only after all work has ended.
            let _ = self.device.synchronize();
            return Err(error);
        }
        self.last = Some(slot);
        Ok(())
    }

    fn start(&mut self, slot: &mut HostSlot, part: TensorPart) -> Result<(), UploadError> {
        let TensorPart { tensor, start, bytes, at } = part;
        let source = at.checked_add(bytes).and_then(|end| slot.bytes().get(at..end));
        let target = self.targets.get_mut(tensor).filter(|target| target.came == start);
        let (Some(_), Some(target)) = (source.filter(|_| bytes <= PART_BYTES), target) else {
            let due = self.targets.get(tensor).map_or(0, |target| target.came);
            return Err(UploadError::OutOfOrder { tensor, start, bytes, due });
        };
        let raw_bytes = target.tiles.raw_bytes() as u64;
        let is_last = start + bytes as u64 == raw_bytes;
        if !(start as usize).is_multiple_of(target.step())
            || !(is_last || bytes.is_multiple_of(target.step()))
            || bytes == 0
            || start + bytes as u64 > raw_bytes
        {
            return Err(UploadError::NotWholeTiles { tensor, start, bytes });
        }

        let carry = (start % PIECE_BYTES as u64) as usize;
        target.came += bytes as u64;
        let at = if self.ring.is_in_place() { slot.align_part(at, bytes) } else { at };
        let staging = &mut self.staging[slot.index];
        (staging.bytes, staging.at) = (bytes, at);
        if !self.ring.is_in_place() {
            staging.copy_part(&self.copies, slot.part(at, 0, bytes))?;
        }
        if let Some(last) = self.last.take() {
            if carry > 0 && self.ring.is_in_place() {
                let before = &self.staging[last.index];
                let end = last.part(before.at + before.bytes, carry, 0);
                slot.carry_over(at, end);
            } else if carry > 0 {
                carry_over(&mut self.staging, last.index, slot.index, carry)?;
            }
            last.done.record(&self.staging[last.index].stream)?;
            self.ring.put_back(last);
        }
        let staging = &self.staging[slot.index];
        let part = match self.ring.is_in_place() {
            true => Some(PartMemory::InPlace(slot.part(at, carry, bytes))),
            false => staging.memory.view().slice(PIECE_BYTES - carry, carry + bytes).map(PartMemory::Staging),
        };
        let stream = &staging.stream;

        let unhashed = carry + bytes;
        let hashed = if is_last { unhashed } else { unhashed - unhashed % PIECE_BYTES };
        if let Some(part) = part.and_then(|part| part.slice(0, hashed)).filter(|_| hashed > 0) {
            let piece = (start / PIECE_BYTES as u64) as usize;
            self.raw.launch(&self.checksums, stream, tensor, piece, part)?;
        }
        if let Some(part) = part.and_then(|part| part.slice(carry, bytes)) {
            lay_out(&self.repack, stream, target, start as usize, part)?;
        }
        Ok(())
    }

    /// Waits for all work, then computes the checksums of the tiles.
    pub fn finish(mut self) -> Result<ModelChecksums, UploadError> {
        for (tensor, target) in self.targets.iter().enumerate() {
            let bytes = target.tiles.raw_bytes() as u64;
            if target.came != bytes {
                return Err(UploadError::Incomplete { tensor, came: target.came, bytes });
            }
        }
        self.staging.iter().try_for_each(|staging| staging.stream.synchronize())?;
        if let Some(last) = self.last.take() {
            self.ring.put_back(last);
        }
        let raw = self.raw.read(&self.staging[0].stream)?;
        let view = |target: &UploadTarget| {
            // SAFETY: the range is inside the model, which this value borrows. `sum_all` waits for
            // the work that it enqueues.
            unsafe { DeviceView::from_raw(target.address, target.tiles.bytes()) }
        };
        let views: Vec<DeviceView<'_, u8>> = self.targets.iter().map(view).collect();
        let laid_out = sum_all(&self.checksums, &self.device, &views)?;
        Ok(ModelChecksums { raw, laid_out })
    }
}

impl Drop for ModelUpload<'_> {
    fn drop(&mut self) {
        // Once the model can be freed, no work may write to its addresses. If waiting fails, the
        // context is gone.
        let _ = self.device.synchronize();
    }
}

impl StagingBuffer {
    fn new(device: &Device, ring: &StagingRing) -> Result<Self, CudaError> {
        Ok(Self {
            stream: Stream::new(device)?,
            memory: Buffer::new(device, if ring.is_in_place() { 0 } else { PIECE_BYTES + PART_BYTES })?,
            bytes: 0,
            at: 0,
            copied: Event::new(device)?,
            carried: Event::new(device)?,
        })
    }

    /// Enqueues the copy of a slot's part. Work on it waits for the copy.
    fn copy_part(&mut self, copies: &Stream, part: &[u8]) -> Result<(), CudaError> {
        let address = self.memory.view().address() + PIECE_BYTES as u64;
        // SAFETY: the staging buffer has room for a part after the carry. All work on its last part
        // ended before the slot left its ring. The slot's memory is pinned and not touched before
        // `done`: the ring waits for that event, and so does dropping the slot.
        unsafe { copies.enqueue_copy_to_device(address, part) }?;
        self.copied.record(copies)?;
        self.stream.wait(&self.copied)
    }
}

/// Copies the last `carry` bytes of buffer `before` to the front of the part of buffer `now`. Later
/// work on `before` waits for that copy.
fn carry_over(
    staging: &mut [StagingBuffer],
    before: usize,
    now: usize,
    carry: usize,
) -> Result<(), CudaError> {
    let Ok([before, now]) = staging.get_disjoint_mut([before, now]) else {
        // This cannot happen: there are at least two slots, and these two are neighbours.
        return Ok(());
    };
    if carry > before.bytes {
        // Part of the carry was itself carried over. The stream must wait for that copy; the part
        // of `before` itself was copied before this part.
        now.stream.wait(&before.carried)?;
    }
    let source = before.memory.view().slice(PIECE_BYTES + before.bytes - carry, carry);
    let mut memory = now.memory.view_mut();
    if let (Some(source), Some(mut to)) = (source, memory.slice_mut(PIECE_BYTES - carry, carry)) {
        to.copy_from(&now.stream, source)?;
    }
    now.carried.record(&now.stream)?;
    before.stream.wait(&now.carried)
}

/// Writes a part to its place in the model.
fn lay_out(
    repack: &RepackKernels,
    stream: &Stream,
    target: &UploadTarget,
    start: usize,
    raw: PartMemory<'_>,
) -> Result<(), UploadError> {
    let tiles = &target.tiles;
    let (offset, bytes, part) = if tiles.tile_bytes() == 0 {
        (start, raw.len(), None)
    } else {
        let (first, rows) = (start / target.row_bytes(), raw.len() / target.row_bytes());
        let part = Tiles::new(tiles.dtype(), tiles.cols(), rows)?;
        (first / TILE_ROWS * tiles.row_tile_bytes(), part.bytes(), Some(part))
    };
    debug_assert!(offset + bytes <= tiles.bytes(), "a part is inside of its tensor");
    // SAFETY: the range is inside the tensor's place, which lies in an allocation of the model that
    // the upload borrows. Parts of a tensor do not overlap.
    let mut to = unsafe { DeviceViewMut::from_raw(target.address + offset as u64, bytes) };
    match part {
        Some(part) => repack.repack(stream, &part, raw.view(), &mut to)?,
        None => raw.copy_to(stream, &mut to)?,
    }
    Ok(())
}
