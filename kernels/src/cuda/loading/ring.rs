//! [`Ring`]: pinned host memory that readers fill and the device copies from.

use std::collections::VecDeque;
use std::sync::{Condvar, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use crate::cuda::pinned::Pinned;
use crate::cuda::{CudaError, Device, Event};

/// The most that one slot brings of a tensor. A copy of it takes 75 us, several times what starting it does; and pinning
/// memory costs as much time as copying several times its size, so larger ones would not pay before many gigabytes.
pub const PART_BYTES: usize = 4 << 20;

/// Room before and after a part: reads around the page cache start and end at multiples of it.
pub const EDGE_BYTES: usize = 4096;

/// Between two looks at a copy that has not ended: less than one takes, and others have the core meanwhile.
const COPY_PAUSE: Duration = Duration::from_micros(20);

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
    pinning: Duration,
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
                let started = Instant::now();
                let slot = Slot::new(&self.device)?;
                self.lock().pinning += started.elapsed();
                return Ok(Some(slot));
            }
            if let Some(slot) = state.free.pop_front() {
                drop(state);
                while !slot.copied.is_done()? {
                    std::thread::sleep(COPY_PAUSE);
                }
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

    /// Time that threads have spent making slots, all together.
    pub fn pinning(&self) -> Duration {
        self.lock().pinning
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
