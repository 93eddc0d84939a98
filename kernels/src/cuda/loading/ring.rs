// SPDX-License-Identifier: Apache-2.0

//! [`StagingRing`] is pinned host memory that readers fill and from which the device copies.
//!
//! The whole ring is pinned at once, before the first copy. While the driver pins memory, it starts
//! no copies, and threads that pin wait for each other. Pinning 24 slots one by one on first use
//! took 47 ms of a load of 165 ms.

use std::collections::VecDeque;
use std::sync::{Condvar, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

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

/// Bytes of pinned host memory for a load. There are at least two slots, because an upload keeps
/// the last slot that it received.
pub fn ring_bytes(model_bytes: u64) -> usize {
    let slots = (model_bytes / PART_BYTES as u64 + 2).min(SLOTS as u64);
    SLOT_BYTES * slots as usize
}

/// A slot of page-aligned pinned memory. Each slot has its own staging buffer on the device
/// (`upload`). A slot is free when its staging buffer is free.
pub struct HostSlot {
    /// The slot's index in the ring.
    pub(super) index: usize,
    /// Recorded after the last work on the slot's bytes.
    pub(super) done: Event,
    memory: PinnedBuffer<u8>,
}

impl HostSlot {
    /// The slot's bytes. No copy uses them: a slot leaves the ring only when all work on it has
    /// ended.
    pub fn bytes_mut(&mut self) -> &mut [u8] {
        self.memory.as_mut_slice()
    }

    pub(super) fn bytes(&self) -> &[u8] {
        self.memory.as_slice()
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
    state: Mutex<RingState>,
    returned: Condvar,
}

struct RingState {
    free: VecDeque<HostSlot>,
    closed: bool,
}

impl StagingRing {
    /// Makes a ring of `pinned`, which has [`ring_bytes`] bytes.
    pub fn new(device: &Device, pinned: PinnedBuffer<u8>) -> Result<Self, CudaError> {
        let slot = |(index, memory)| Ok(HostSlot { index, done: Event::new(device)?, memory });
        let free: VecDeque<HostSlot> =
            pinned.split(SLOT_BYTES).into_iter().enumerate().map(slot).collect::<Result<_, CudaError>>()?;
        let (slots, state) = (free.len(), RingState { free, closed: false });
        Ok(Self { slots, state: Mutex::new(state), returned: Condvar::new() })
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
    use super::*;

    #[test]
    fn small_models_pin_little_and_large_ones_no_more_than_the_ring() {
        assert_eq!(ring_bytes(0), 2 * SLOT_BYTES);
        assert_eq!(ring_bytes(PART_BYTES as u64 * 3), 5 * SLOT_BYTES);
        assert_eq!(ring_bytes(u64::MAX), SLOTS * SLOT_BYTES);
    }
}
