//! [`Ring`]: pinned host memory that readers fill and the device copies from.

use std::collections::VecDeque;
use std::sync::{Condvar, Mutex, MutexGuard, PoisonError};

use crate::cuda::pinned::Pinned;
use crate::cuda::{CudaError, Device, Event};

/// The most that one slot brings of a tensor. A copy of it takes 150 us, many times what starting it does; 32 of them
/// are 256 MiB.
pub const PART_BYTES: usize = 8 << 20;

/// Room before and after a part: reads around the page cache start and end at multiples of it.
pub const EDGE_BYTES: usize = 4096;

/// One piece of pinned memory, page-aligned.
pub struct Slot {
    memory: Pinned<u8>,
    /// The last copy out of it.
    pub(super) copied: Event,
}

impl Slot {
    fn new(device: &Device) -> Result<Self, CudaError> {
        let copied = Event::new(device)?;
        Ok(Self { memory: Pinned::new(device, PART_BYTES + 2 * EDGE_BYTES)?, copied })
    }

    /// No copy uses it: slots come out of a ring only after their last one has ended.
    pub fn bytes_mut(&mut self) -> &mut [u8] {
        self.memory.as_mut_slice()
    }

    pub(super) fn bytes(&self) -> &[u8] {
        self.memory.as_slice()
    }
}

/// Slots in the order of their last copies. They are made when they are first needed, by the thread that needs them:
/// pinning is slow, and a small model needs few.
pub struct Ring {
    device: Device,
    slots: usize,
    state: Mutex<State>,
    returned: Condvar,
}

#[derive(Default)]
struct State {
    made: usize,
    free: VecDeque<Slot>,
    closed: bool,
}

impl Ring {
    pub fn new(device: &Device, slots: usize) -> Self {
        Self { device: device.clone(), slots, state: Mutex::default(), returned: Condvar::new() }
    }

    /// A slot to fill, when there is one; none once the ring is closed.
    pub fn take(&self) -> Result<Option<Slot>, CudaError> {
        let mut state = self.lock();
        loop {
            if state.closed {
                return Ok(None);
            }
            let idle = match state.free.front() {
                Some(slot) => slot.copied.is_done()?,
                None => false,
            };
            if !idle && state.made < self.slots {
                state.made += 1;
                drop(state);
                self.device.bind()?;
                return Slot::new(&self.device).map(Some);
            }
            if let Some(slot) = state.free.pop_front() {
                drop(state);
                slot.copied.synchronize()?;
                return Ok(Some(slot));
            }
            state = self.returned.wait(state).unwrap_or_else(PoisonError::into_inner);
        }
    }

    /// Copies out of the slot have been started; it is taken again when they have ended.
    pub fn put_back(&self, slot: Slot) {
        self.lock().free.push_back(slot);
        self.returned.notify_one();
    }

    /// Lets go whoever waits for a slot.
    pub fn close(&self) {
        self.lock().closed = true;
        self.returned.notify_all();
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        // Nothing that holds the lock can panic half way through a change.
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}
