// SPDX-License-Identifier: Apache-2.0

//! [`StagingRing`] is host memory that readers fill and from which the device copies, or which
//! kernels read in place.
//!
//! The whole ring is pinned at once, before the first copy. While the driver pins memory, it starts
//! no copies, and threads that pin wait for each other. Pinning 24 slots one by one on first use
//! took 47 ms of a load of 165 ms.

use std::collections::VecDeque;
use std::sync::{Condvar, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use crate::cuda::checksum::PIECE_BYTES;
use crate::cuda::{CudaError, Device, Event, PinnedBuffer};

/// The largest number of a tensor's bytes in one slot. Copying it takes 78 us. With 2 MiB the bus
/// carries 51.5 GB/s, with 4 MiB 53.4, with 8 MiB 54.4. But 8 MiB need twice the memory for as many
/// readers.
pub const PART_BYTES: usize = 4 << 20;

/// Room before and after a part. Reads that bypass the page cache begin and end at multiples of it.
pub const EDGE_BYTES: usize = 4096;

const SLOT_BYTES: usize = PART_BYTES + 2 * EDGE_BYTES;

/// With this many slots, every reader fills one slot while another slot is copied. Half as many
/// slots lose 3% of the rate.
pub(super) const SLOTS: usize = 24;

/// Time between two polls of a slot in use. It is less than the time of a copy, and other threads
/// can use the core meanwhile. Waiting for the device's interrupt instead costs 2% of the rate.
const PAUSE: Duration = Duration::from_micros(20);

/// Kernels read words of this many bytes.
const ALIGNMENT: usize = 8;

/// A slot that kernels read in place has room for carried bytes (`upload`) before the part.
const IN_PLACE_SLOT_BYTES: usize = PIECE_BYTES + SLOT_BYTES;

/// Bytes of host memory for a load. There are at least two slots of either kind, because an upload
/// keeps the last slot that it received.
pub fn ring_bytes(model_bytes: u64) -> usize {
    let slots = (model_bytes / PART_BYTES as u64 + 2).min(SLOTS as u64);
    (SLOT_BYTES * slots as usize).max(2 * IN_PLACE_SLOT_BYTES)
}

/// A slot of page-aligned memory. Each slot has its own staging buffer on the device (`upload`),
/// unless kernels read the slot in place. A slot is free when all work on its part has ended.
pub struct HostSlot {
    /// The slot's index in the ring.
    pub(super) index: usize,
    /// Recorded after the last work on the slot's bytes.
    pub(super) done: Event,
    memory: PinnedBuffer<u8>,
    /// Room for carried bytes before those that a reader fills.
    front: usize,
}

impl HostSlot {
    /// The slot's bytes. No copy uses them: a slot leaves the ring only when all work on it has
    /// ended.
    pub fn bytes_mut(&mut self) -> &mut [u8] {
        &mut self.memory.as_mut_slice()[self.front..]
    }

    pub(super) fn bytes(&self) -> &[u8] {
        &self.memory.as_slice()[self.front..]
    }

    /// The part of `bytes` bytes at `at`, behind `carry` carried bytes.
    pub(super) fn part(&self, at: usize, carry: usize, bytes: usize) -> &[u8] {
        &self.memory.as_slice()[self.front + at - carry..self.front + at + bytes]
    }

    /// Moves a part to where kernels can read it, and returns its place. Only files with a small
    /// `general.alignment` have parts elsewhere.
    pub(super) fn align_part(&mut self, at: usize, bytes: usize) -> usize {
        let aligned = at - at % ALIGNMENT;
        if aligned != at {
            self.bytes_mut().copy_within(at..at + bytes, aligned);
        }
        aligned
    }

    /// Puts the end of the previous part before the part at `at`.
    pub(super) fn carry_over(&mut self, at: usize, carried: &[u8]) {
        let to = self.front + at;
        self.memory.as_mut_slice()[to - carried.len()..to].copy_from_slice(carried);
    }
}

impl Drop for HostSlot {
    fn drop(&mut self) {
        // Pinned memory may be freed only when no copy reads it. If waiting fails, the context is
        // gone.
        let _ = self.done.synchronize();
    }
}

/// The slots, in the order in which they become free.
pub struct StagingRing {
    slots: usize,
    is_in_place: bool,
    state: Mutex<RingState>,
    returned: Condvar,
}

struct RingState {
    free: VecDeque<HostSlot>,
    closed: bool,
}

impl StagingRing {
    /// Makes a ring of `pinned`, which has [`ring_bytes`] bytes. Kernels read it in place if the
    /// device can.
    pub fn new(device: &Device, pinned: PinnedBuffer<u8>) -> Result<Self, CudaError> {
        let is_in_place = device.info().reads_host_memory();
        Self::with_slots(device, pinned, is_in_place)
    }

    /// A ring that kernels read in place. The device has the memory at the host's addresses.
    pub fn in_place(device: &Device, pinned: PinnedBuffer<u8>) -> Result<Self, CudaError> {
        Self::with_slots(device, pinned, true)
    }

    fn with_slots(device: &Device, pinned: PinnedBuffer<u8>, is_in_place: bool) -> Result<Self, CudaError> {
        let (bytes, front) = if is_in_place { (IN_PLACE_SLOT_BYTES, PIECE_BYTES) } else { (SLOT_BYTES, 0) };
        let slot = |(index, memory)| Ok(HostSlot { index, done: Event::new(device)?, memory, front });
        let free: VecDeque<HostSlot> =
            pinned.split(bytes).into_iter().enumerate().map(slot).collect::<Result<_, CudaError>>()?;
        let (slots, state) = (free.len(), RingState { free, closed: false });
        Ok(Self { slots, is_in_place, state: Mutex::new(state), returned: Condvar::new() })
    }

    /// Whether kernels read the slots, so that no part is copied to a staging buffer.
    pub fn is_in_place(&self) -> bool {
        self.is_in_place
    }

    /// Device memory that an upload from this ring needs besides the model.
    pub fn staging_bytes(&self) -> u64 {
        if self.is_in_place { 0 } else { (self.slots * (PIECE_BYTES + PART_BYTES)) as u64 }
    }

    pub(super) fn slots(&self) -> usize {
        self.slots
    }

    /// Waits for a free slot. Returns None once the ring is closed.
    pub fn take(&self) -> Result<Option<HostSlot>, CudaError> {
        let mut state = self.lock();
        let slot = loop {
            if state.closed {
                return Ok(None);
            }
            match state.free.pop_front() {
                Some(slot) => break slot,
                None => state = self.returned.wait(state).unwrap_or_else(PoisonError::into_inner),
            }
        };
        drop(state);
        while !slot.done.is_done()? {
            std::thread::sleep(PAUSE);
        }
        Ok(Some(slot))
    }

    /// Returns a slot to the ring after all work on its bytes has been enqueued. The ring hands the
    /// slot out again when that work has ended.
    pub fn put_back(&self, slot: HostSlot) {
        self.lock().free.push_back(slot);
        self.returned.notify_one();
    }

    /// Closes the ring and wakes all threads that wait for a slot.
    pub fn close(&self) {
        self.lock().closed = true;
        self.returned.notify_all();
    }

    fn lock(&self) -> MutexGuard<'_, RingState> {
        // No code can panic halfway through a change while it holds the lock, so a poisoned state
        // is usable.
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use cuda::fake::FakeDriver;
    use cuda::{DeviceSelector, HostPages};

    use super::*;

    fn ring(fake: &Arc<FakeDriver>, model_bytes: u64) -> StagingRing {
        let device = Device::open(fake.clone(), DeviceSelector::Ordinal(0)).unwrap();
        let pages = HostPages::new(ring_bytes(model_bytes)).unwrap();
        StagingRing::new(&device, PinnedBuffer::pin(&device, pages).unwrap()).unwrap()
    }

    #[test]
    fn unified_memory_is_read_in_place_and_neither_pinned_nor_staged() {
        let fake = Arc::new(FakeDriver::new(1 << 30));
        let staged = ring(&fake, 0);
        assert!(!staged.is_in_place() && fake.pinned() > 0);
        assert_eq!(staged.staging_bytes(), (2 * (PIECE_BYTES + PART_BYTES)) as u64);
        drop(staged);
        fake.unify_memory(0);
        let in_place = ring(&fake, 0);
        assert!(in_place.is_in_place());
        assert_eq!((in_place.staging_bytes(), in_place.slots(), fake.pinned()), (0, 2, 0));
        drop(in_place);
        fake.assert_clean();
    }

    #[test]
    fn carried_bytes_are_before_the_part_and_parts_are_aligned() {
        let fake = Arc::new(FakeDriver::new(1 << 30));
        fake.unify_memory(0);
        let ring = ring(&fake, 0);
        let (mut first, mut second) = (ring.take().unwrap().unwrap(), ring.take().unwrap().unwrap());
        let carry = PIECE_BYTES - 8;
        for (slot, byte) in [(&mut first, 1), (&mut second, 101)] {
            assert!(slot.bytes().len() >= SLOT_BYTES);
            assert!(slot.bytes().as_ptr().addr().is_multiple_of(EDGE_BYTES));
            slot.bytes_mut().fill(byte);
        }
        first.bytes_mut()[10] = 9;
        let at = first.align_part(10, PART_BYTES);
        assert_eq!((at, first.part(at, 0, 2)), (8, &[9, 1][..]));
        second.carry_over(0, first.part(at + PART_BYTES, carry, 0));
        let whole = second.part(0, carry, 10);
        assert_eq!(whole.len(), carry + 10);
        assert!(
            whole[..carry].iter().all(|byte| *byte == 1) && whole[carry..].iter().all(|byte| *byte == 101)
        );
        ring.put_back(first);
        ring.put_back(second);
    }

    #[test]
    fn small_models_pin_little_and_large_ones_no_more_than_the_ring() {
        assert_eq!(ring_bytes(0), 2 * IN_PLACE_SLOT_BYTES);
        assert_eq!(ring_bytes(PART_BYTES as u64 * 3), 5 * SLOT_BYTES);
        assert_eq!(ring_bytes(u64::MAX), SLOTS * SLOT_BYTES);
    }
}
