// SPDX-License-Identifier: Apache-2.0

//! The shared page: counters of tickets, one slot for each process, and the futex on which
//! processes wait.

use std::fs::File;
use std::io;
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::Duration;

use memmap2::{MmapOptions, MmapRaw};

use crate::policy::{PROCESSES_MAX, Ticket};

/// The length of the file.
pub(crate) const PAGE_BYTES: u64 = 4096;

/// Values of [`TurnSlot::state`].
const NO_TICKET: u32 = 0;
const HAS_TICKET: u32 = 1;
const RESTS: u32 = 2;

/// What one process wants. A cache line, so that processes do not slow each other down.
#[repr(C, align(64))]
pub(crate) struct TurnSlot {
    state: AtomicU32,
    ticket: AtomicU32,
    /// Number of rests so far.
    rests: AtomicU32,
}

/// The layout of the file. All values are atomics, and zeros are valid.
#[repr(C)]
pub(crate) struct TurnPage {
    next: AtomicU32,
    serving: AtomicU32,
    slots: [TurnSlot; PROCESSES_MAX],
}

const _: () = assert!(size_of::<TurnPage>() as u64 <= PAGE_BYTES);

/// A mapped turn file.
pub(crate) struct MappedPage {
    map: MmapRaw,
}

impl MappedPage {
    /// Maps the file, which has [`PAGE_BYTES`].
    pub(crate) fn new(file: &File) -> io::Result<Self> {
        Ok(Self { map: MmapOptions::new().len(PAGE_BYTES as usize).map_raw(file)? })
    }

    fn page(&self) -> &TurnPage {
        // SAFETY: the mapping has PAGE_BYTES, which hold a TurnPage, and begins at a page boundary.
        // It lives as long as `self`. Every value in it is an atomic, and all bit patterns are
        // valid, whatever other processes write.
        unsafe { &*self.map.as_ptr().cast::<TurnPage>() }
    }

    pub(crate) fn serving(&self) -> Ticket {
        Ticket(self.page().serving.load(Ordering::SeqCst))
    }

    /// Takes the next ticket and writes it into the slot.
    pub(crate) fn take_ticket(&self, slot: usize) -> Ticket {
        let ticket = self.page().next.fetch_add(1, Ordering::SeqCst);
        self.page().slots[slot].ticket.store(ticket, Ordering::Release);
        self.page().slots[slot].state.store(HAS_TICKET, Ordering::Release);
        Ticket(ticket)
    }

    pub(crate) fn clear_slot(&self, slot: usize) {
        self.page().slots[slot].state.store(NO_TICKET, Ordering::Release);
    }

    /// The process of `slot` rests in its turn. Wakes the next process, which then watches it.
    pub(crate) fn rest(&self, slot: usize, ticket: Ticket) {
        self.page().slots[slot].rests.fetch_add(1, Ordering::Relaxed);
        self.page().slots[slot].state.store(RESTS, Ordering::SeqCst);
        if !self.is_last(ticket) {
            wake(&self.page().serving, ticket.next());
        }
    }

    /// Ends the rest. Returns whether the process still has its turn.
    pub(crate) fn end_rest(&self, slot: usize, ticket: Ticket) -> bool {
        self.page().slots[slot].state.store(HAS_TICKET, Ordering::SeqCst);
        self.serving() == ticket
    }

    /// The number of the rest that the process of `slot` has now.
    pub(crate) fn resting(&self, slot: usize) -> Option<u32> {
        let slot = &self.page().slots[slot];
        (slot.state.load(Ordering::SeqCst) == RESTS).then(|| slot.rests.load(Ordering::Relaxed))
    }

    /// The slot that has the ticket.
    pub(crate) fn slot_with(&self, ticket: Ticket) -> Option<usize> {
        self.page().slots.iter().position(|slot| {
            matches!(slot.state.load(Ordering::Acquire), HAS_TICKET | RESTS)
                && slot.ticket.load(Ordering::Acquire) == ticket.0
        })
    }

    /// The number of tickets behind this one.
    pub(crate) fn tickets_behind(&self, ticket: Ticket) -> u32 {
        self.page().next.load(Ordering::SeqCst).wrapping_sub(ticket.next().0)
    }

    fn is_last(&self, ticket: Ticket) -> bool {
        self.tickets_behind(ticket) == 0
    }

    /// Serves `to` if `from` is served now, and wakes the process that has it.
    pub(crate) fn serve(&self, from: Ticket, to: Ticket) {
        let serving = &self.page().serving;
        // A waiting process increments `next` and then reads `serving`; this process does it the
        // other way round. In one total order, one of them sees the other.
        if serving.compare_exchange(from.0, to.0, Ordering::SeqCst, Ordering::SeqCst).is_ok()
            && !self.is_last(from)
        {
            wake(serving, to);
        }
    }

    /// Waits until `own` or a ticket with the same wake bit is served, at most for `time`. Returns
    /// at once if another ticket than `seen` is served already.
    pub(crate) fn wait(&self, seen: Ticket, own: Ticket, time: Duration) {
        let until = monotonic_time() + time;
        let timeout =
            libc::timespec { tv_sec: until.as_secs().cast_signed(), tv_nsec: until.subsec_nanos().into() };
        let word = self.page().serving.as_ptr();
        let unused = std::ptr::null::<u32>();
        // SAFETY: `word` points to a mapped, aligned u32, and `timeout` outlives the call. The
        // kernel only reads both. An early return or an error only means another look.
        unsafe {
            let wait = libc::FUTEX_WAIT_BITSET;
            libc::syscall(libc::SYS_futex, word, wait, seen.0, &raw const timeout, unused, wake_bit(own))
        };
    }
}

/// Wakes the process that waits for `ticket`, and those whose tickets have the same bit.
fn wake(word: &AtomicU32, ticket: Ticket) {
    let unused = std::ptr::null::<u32>();
    // SAFETY: the word is a mapped, aligned u32, which the kernel does not change.
    unsafe {
        let wake = libc::FUTEX_WAKE_BITSET;
        libc::syscall(libc::SYS_futex, word.as_ptr(), wake, i32::MAX, unused, unused, wake_bit(ticket))
    };
}

fn wake_bit(ticket: Ticket) -> u32 {
    1 << (ticket.0 % u32::BITS)
}

/// The clock of the futex's absolute timeout.
fn monotonic_time() -> Duration {
    let mut time = libc::timespec { tv_sec: 0, tv_nsec: 0 };
    // SAFETY: `time` is valid for the kernel to write. This clock always exists.
    unsafe { libc::clock_gettime(libc::CLOCK_MONOTONIC, &raw mut time) };
    Duration::new(time.tv_sec.cast_unsigned(), u32::try_from(time.tv_nsec).unwrap_or(0))
}
