// SPDX-License-Identifier: Apache-2.0

//! [`ThreadPool`]: the threads of one backend. A job consists of pieces; any thread may take the
//! next piece.
//!
//! The calling thread works too. At the end it waits only for threads inside a piece. If Linux has
//! not scheduled a thread, the other threads take its pieces. Idle threads spin for [`SPIN`]
//! rounds, about the time between two ops of a step, then sleep. Results do not depend on which
//! thread computes which piece.
//!
//! ```text
//! gate:  epoch (32 bits) | open (1) | threads inside (31)
//! run:   job := f, gate := (epoch + 1, open, 0), wake sleepers, work, gate := closed, wait until no thread is inside
//! thread: gate open and epoch new -> enter (inside + 1), work, leave (inside - 1)
//! ```

use std::cell::UnsafeCell;
use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering::*};
use std::sync::{Arc, Condvar, Mutex, PoisonError};
use std::thread::JoinHandle;

/// Rounds of `spin_loop` before sleeping: some 20 us at 4 GHz, longer than the serial ops between
/// two jobs of a step.
const SPIN: u32 = 2_000;

const OPEN: u64 = 1 << 31;
const INSIDE: u64 = OPEN - 1;
const EPOCH: u64 = 1 << 32;

/// `f(piece, thread)`.
type PoolJob<'a> = &'a (dyn Fn(usize, usize) + Sync);

pub(super) struct ThreadPool {
    shared: Arc<ThreadPoolState>,
    threads: Vec<JoinHandle<()>>,
}

struct ThreadPoolState {
    gate: AtomicU64,
    /// Written while the gate is closed and no thread is inside; read by threads inside an open
    /// gate.
    job: UnsafeCell<Option<(PoolJob<'static>, usize)>>,
    next: AtomicUsize,
    stop: AtomicBool,
    /// Whether a piece has panicked on a thread of the pool.
    failed: AtomicBool,
    /// Number of threads that sleep or are about to. The lock orders "about to sleep" before
    /// "wake".
    sleepers: AtomicUsize,
    lock: Mutex<()>,
    /// Signals an open job, or the end of the pool.
    opened: Condvar,
    /// Signals that the last thread has left a closed gate.
    left: Condvar,
}

// SAFETY: `job` is the only field that is not Sync by itself; the gate orders its accesses as
// described there.
unsafe impl Sync for ThreadPoolState {}
// SAFETY: as above; the closure in `job` is Sync, and no thread reads it after the call that owns
// it has returned.
unsafe impl Send for ThreadPoolState {}

impl ThreadPool {
    /// `threads` counts the thread that calls `run`; at least one.
    pub(super) fn new(threads: usize) -> std::io::Result<Self> {
        let shared = Arc::new(ThreadPoolState {
            gate: AtomicU64::new(0),
            job: UnsafeCell::new(None),
            next: AtomicUsize::new(0),
            stop: AtomicBool::new(false),
            failed: AtomicBool::new(false),
            sleepers: AtomicUsize::new(0),
            lock: Mutex::new(()),
            opened: Condvar::new(),
            left: Condvar::new(),
        });
        let mut pool = Self { shared, threads: Vec::new() };
        for thread in 1..threads.max(1) {
            let shared = Arc::clone(&pool.shared);
            let handle = std::thread::Builder::new()
                .name(format!("kernel-{thread}"))
                .spawn(move || shared.serve(thread))?;
            pool.threads.push(handle);
        }
        Ok(pool)
    }

    pub(super) fn threads(&self) -> usize {
        self.threads.len() + 1
    }

    /// Calls `f(piece, thread)` once for each piece below `pieces`, and returns when all calls have
    /// returned.
    pub(super) fn run(&mut self, pieces: usize, f: PoolJob<'_>) {
        let shared = &*self.shared;
        if pieces <= 1 || self.threads.is_empty() {
            (0..pieces).for_each(|piece| f(piece, 0));
            return;
        }
        // SAFETY: only the lifetime changes. Threads use the reference between entering an open
        // gate and leaving it. This call doesn't return (or unwind: `Closing`) before the gate is
        // closed and no thread is inside.
        let job = unsafe { std::mem::transmute::<PoolJob<'_>, PoolJob<'static>>(f) };
        // SAFETY: `&mut self` makes this the only `run`. The gate is closed, and the last run has
        // seen no thread inside.
        unsafe { *shared.job.get() = Some((job, pieces)) };
        shared.next.store(0, Relaxed);
        let epoch = shared.gate.load(Relaxed) / EPOCH * EPOCH;
        // SeqCst, since a sleeper first counts itself in `sleepers` and then reads the gate.
        shared.gate.store(epoch.wrapping_add(EPOCH) | OPEN, SeqCst);
        let closing = Closing(shared);
        if shared.sleepers.load(SeqCst) > 0 {
            let guard = shared.lock.lock().unwrap_or_else(PoisonError::into_inner);
            drop(guard);
            shared.opened.notify_all();
        }
        shared.work(job, pieces, 0);
        drop(closing);
        assert!(!shared.failed.load(Relaxed), "a kernel panicked on another thread");
    }
}

/// Closes the gate and waits until no thread is inside, also if a piece panics.
struct Closing<'a>(&'a ThreadPoolState);

impl Drop for Closing<'_> {
    fn drop(&mut self) {
        let shared = self.0;
        shared.gate.fetch_and(!OPEN, SeqCst);
        for _ in 0..SPIN {
            if shared.gate.load(Acquire) & INSIDE == 0 {
                return;
            }
            std::hint::spin_loop();
        }
        let mut guard = shared.lock.lock().unwrap_or_else(PoisonError::into_inner);
        while shared.gate.load(SeqCst) & INSIDE != 0 {
            guard = shared.left.wait(guard).unwrap_or_else(PoisonError::into_inner);
        }
    }
}

impl ThreadPoolState {
    fn serve(&self, thread: usize) {
        let mut seen = 0;
        while let Some(epoch) = self.enter(seen) {
            seen = epoch;
            // SAFETY: while this thread is inside an open gate, the job is not written, and what it
            // points to lives until this thread leaves.
            let job = unsafe { *self.job.get() };
            let leaving = Leaving(self);
            if let Some((job, pieces)) = job {
                self.work(job, pieces, thread);
            }
            drop(leaving);
        }
    }

    fn work(&self, job: PoolJob<'_>, pieces: usize, thread: usize) {
        loop {
            let piece = self.next.fetch_add(1, Relaxed);
            if piece >= pieces {
                return;
            }
            job(piece, thread);
        }
    }

    /// Waits for an open gate with another epoch than `seen`, and enters it. Returns `None` if the
    /// pool ends.
    fn enter(&self, seen: u64) -> Option<u64> {
        loop {
            for _ in 0..SPIN {
                if let Some(epoch) = self.try_enter(seen) {
                    return Some(epoch);
                }
                if self.stop.load(Relaxed) {
                    return None;
                }
                std::hint::spin_loop();
            }
            let mut guard = self.lock.lock().unwrap_or_else(PoisonError::into_inner);
            self.sleepers.fetch_add(1, SeqCst);
            while !self.stop.load(SeqCst) && !is_open_and_new(self.gate.load(SeqCst), seen) {
                guard = self.opened.wait(guard).unwrap_or_else(PoisonError::into_inner);
            }
            self.sleepers.fetch_sub(1, SeqCst);
        }
    }

    fn try_enter(&self, seen: u64) -> Option<u64> {
        let gate = self.gate.load(Relaxed);
        // Acquire makes visible what `run` wrote before it opened the gate.
        let entered = is_open_and_new(gate, seen)
            && self.gate.compare_exchange(gate, gate + 1, Acquire, Relaxed).is_ok();
        entered.then_some(gate / EPOCH)
    }
}

fn is_open_and_new(gate: u64, seen: u64) -> bool {
    gate & OPEN != 0 && gate / EPOCH != seen
}

struct Leaving<'a>(&'a ThreadPoolState);

impl Drop for Leaving<'_> {
    fn drop(&mut self) {
        if std::thread::panicking() {
            self.0.failed.store(true, Relaxed);
        }
        // The release lets the caller see what the pieces wrote.
        let before = self.0.gate.fetch_sub(1, SeqCst);
        if before & OPEN == 0 && before & INSIDE == 1 {
            let guard = self.0.lock.lock().unwrap_or_else(PoisonError::into_inner);
            drop(guard);
            self.0.left.notify_all();
        }
    }
}

impl Drop for ThreadPool {
    fn drop(&mut self) {
        self.shared.stop.store(true, SeqCst);
        let guard = self.shared.lock.lock().unwrap_or_else(PoisonError::into_inner);
        drop(guard);
        self.shared.opened.notify_all();
        for thread in self.threads.drain(..) {
            // The thread has already printed the panic of its piece.
            drop(thread.join());
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::sync::atomic::AtomicU32;

    #[test]
    fn every_piece_is_done_once() {
        for threads in 1..=4 {
            let mut pool = ThreadPool::new(threads).unwrap();
            for round in 0..300 {
                let pieces = round % 37;
                let done: Vec<AtomicU32> = (0..pieces).map(|_| AtomicU32::new(0)).collect();
                pool.run(pieces, &|piece, thread| {
                    assert!(thread < threads);
                    done[piece].fetch_add(1, Relaxed);
                });
                assert!(done.iter().all(|count| count.load(Relaxed) == 1));
            }
        }
    }

    #[test]
    fn a_panic_on_another_thread_reaches_the_caller() {
        let mut pool = ThreadPool::new(2).unwrap();
        let barrier = std::sync::Barrier::new(2);
        let run = std::panic::AssertUnwindSafe(|| {
            pool.run(2, &|_, thread| {
                barrier.wait();
                assert!(thread == 0, "piece on thread {thread}");
            });
        });
        assert!(std::panic::catch_unwind(run).is_err());
    }

    #[test]
    fn sleeping_threads_are_woken() {
        let mut pool = ThreadPool::new(3).unwrap();
        for _ in 0..5 {
            std::thread::sleep(std::time::Duration::from_millis(5));
            let barrier = std::sync::Barrier::new(3);
            // This ends only if all three threads take part.
            pool.run(3, &|_, _| {
                barrier.wait();
            });
        }
    }
}
