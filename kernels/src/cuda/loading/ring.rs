// SPDX-License-Identifier: Apache-2.0

//! [`StagingRing`]: pinned host memory that readers fill and the device copies from.
//!
//! All of it is pinned at once, before the first copy. While the driver pins, it starts no copies,
//! and threads that pin wait for each other: 24 slots pinned one by one on first use took 47 ms of
//! a load of 165 ms.

use std::collections::VecDeque;
use std::sync::{Condvar, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use crate::cuda::{CudaError, Device, Event, PinnedBuffer};

/// Bytes of a tensor that one slot holds at most. A copy of it takes 78 us. With 2 MiB the bus
/// carries 51.5 GB/s, with 4 MiB 53.4, with 8 MiB 54.4, but 8 MiB need twice the memory for as many
/// readers.
pub const PART_BYTES: usize = 4 << 20;

/// Room before and after a part: reads around the page cache begin and end at multiples of it.
pub const EDGE_BYTES: usize = 4096;

const SLOT_BYTES: usize = PART_BYTES + 2 * EDGE_BYTES;

/// Enough that every reader fills one slot while another is copied. Half as many lose 3% of the
/// rate.
pub(super) const SLOTS: usize = 24;

/// Time between two polls of a slot that is in use: less than a copy takes, and other threads have
/// the core meanwhile. Waiting for the device's interrupt instead costs 2% of the rate.
const PAUSE: Duration = Duration::from_micros(20);

/// Bytes of host memory for a load: at least two slots, since an upload keeps the last one that it
/// was given.
pub fn ring_bytes(model_bytes: u64) -> usize {
    let slots = (model_bytes / PART_BYTES as u64 + 2).min(SLOTS as u64);
    SLOT_BYTES * slots as usize
}

/// Page-aligned pinned memory. Each slot has its own staging buffer on the device (`upload`), and
/// is free when that buffer is.
pub struct HostSlot {
    /// Its index in the ring.
    pub(super) index: usize,
    /// Recorded behind the last work on its bytes.
    pub(super) done: Event,
    memory: PinnedBuffer<u8>,
}

impl HostSlot {
    /// No copy uses the bytes: a slot comes out of the ring only when all work on them has ended.
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

/// Slots in the order in which they become free.
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
    /// `pinned` has [`ring_bytes`] bytes.
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

    /// Waits for a free slot; none once the ring is closed.
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

    /// Returns a slot on whose bytes all work has been enqueued. The ring hands it out again when
    /// that work has ended.
    pub fn put_back(&self, slot: HostSlot) {
        self.lock().free.push_back(slot);
        self.returned.notify_one();
    }

    /// Wakes all threads that wait for a slot.
    pub fn close(&self) {
        self.lock().closed = true;
        self.returned.notify_all();
    }

    fn lock(&self) -> MutexGuard<'_, RingState> {
        // No code that holds the lock can panic halfway through a change.
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
