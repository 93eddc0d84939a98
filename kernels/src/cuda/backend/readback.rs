// SPDX-License-Identifier: Apache-2.0

//! [`Readback`] copies device memory to a caller's slice through pinned memory, in chunks. While
//! one chunk is in flight, the chunk before it is copied to the slice. Several threads copy the
//! logits of many rows, because one thread copies at a fifth of the bus's rate.

use bytemuck::Pod;

use crate::cuda::{CudaError, Device, Event, PinnedBuffer, Stream};

/// Words of a chunk. A chunk is small, so that the copy of the last one is short: it overlaps
/// nothing.
const PIECE_WORDS: usize = 1 << 17;
/// Chunks in flight at once. Together they have 10 MiB.
const PIECES: usize = 20;
/// The number of threads that copy, including the caller's. A thread must have at least
/// `PIECES_OF_THREAD` chunks to be worth its start (20 us).
const THREADS: usize = 4;
const PIECES_OF_THREAD: usize = 2;

pub(super) struct Readback {
    device: Device,
    /// Allocated on first use.
    slots: Vec<ReadbackSlot>,
}

struct ReadbackSlot {
    staging: PinnedBuffer<u32>,
    /// Recorded after the copy into `staging`.
    arrived: Event,
}

impl ReadbackSlot {
    /// Waits until the chunk has arrived, then copies it to `to`.
    fn take(&self, to: &mut [u32]) -> Result<(), CudaError> {
        self.arrived.synchronize()?;
        to.copy_from_slice(&self.staging.as_slice()[..to.len()]);
        Ok(())
    }
}

impl Readback {
    pub(super) fn new(device: &Device) -> Self {
        Self { device: device.clone(), slots: Vec::new() }
    }

    /// Fills `host` after all work that was enqueued on the stream before.
    ///
    /// # Safety
    /// Device memory at `address` holds as many values as `host` until this function returns.
    pub(super) unsafe fn read_to_host<T: Pod>(
        &mut self,
        stream: &Stream,
        address: u64,
        host: &mut [T],
    ) -> Result<(), CudaError> {
        let mut from = address;
        for round in bytemuck::cast_slice_mut::<T, u32>(host).chunks_mut(PIECES * PIECE_WORDS) {
            let mut pieces: Vec<&mut [u32]> = round.chunks_mut(PIECE_WORDS).collect();
            while self.slots.len() < pieces.len() {
                let staging = PinnedBuffer::new(&self.device, PIECE_WORDS)?;
                self.slots.push(ReadbackSlot { staging, arrived: Event::new(&self.device)? });
            }
            for (slot, piece) in self.slots.iter_mut().zip(&pieces) {
                let staging = &mut slot.staging.as_mut_slice()[..piece.len()];
                // SAFETY: the source is valid by this function's contract, and `staging` has the
                // same length. No code touches `staging` before the copy has ended. Its previous
                // contents were taken at the end of the previous round or call.
                unsafe { stream.enqueue_copy_to_host(staging, from) }?;
                slot.arrived.record(stream)?;
                from += size_of_val(staging) as u64;
            }
            take_all(&self.device, &self.slots, &mut pieces)?;
        }
        Ok(())
    }
}

fn take_all(device: &Device, slots: &[ReadbackSlot], pieces: &mut [&mut [u32]]) -> Result<(), CudaError> {
    let threads = (pieces.len() / PIECES_OF_THREAD).clamp(1, THREADS);
    // Each thread gets every n-th chunk, so all threads take chunks in the order of arrival.
    let mut shares: Vec<Vec<(&ReadbackSlot, &mut [u32])>> = (0..threads).map(|_| Vec::new()).collect();
    for (at, (slot, piece)) in slots.iter().zip(pieces).enumerate() {
        shares[at % threads].push((slot, piece));
    }
    let take =
        |share: Vec<(&ReadbackSlot, &mut [u32])>| share.into_iter().try_for_each(|(slot, to)| slot.take(to));
    let Some(own) = shares.pop() else { return Ok(()) };
    std::thread::scope(|scope| {
        let copy = |share| move || device.bind().and_then(|()| take(share));
        let others: Vec<_> = shares.into_iter().map(|share| scope.spawn(copy(share))).collect();
        let mut taken = take(own);
        for other in others {
            match other.join() {
                Ok(result) => taken = taken.and(result),
                Err(panic) => std::panic::resume_unwind(panic),
            }
        }
        taken
    })
}
