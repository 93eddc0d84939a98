// SPDX-License-Identifier: Apache-2.0

//! A thread pool for untrusted jobs: a job may panic or never return, and then costs only its
//! thread.
//!
//! ```text
//! submit --> queue --> thread runs the handler --> callback(Ok(result))
//!              |            |
//!              |            +-- panic -----------> callback(Err(Panicked)), new thread
//!              |            +-- too many ticks --> callback(Err(Overdue)), new thread
//!              +-- ticket dropped: the job leaves the queue, no callback
//! ```
//!
//! Invariants:
//!
//! 1. Every queued job has a live [`JobTicket`]. Dropping the ticket removes a job that has not
//!    begun.
//! 2. The callback of a job runs at most once. The thread that removes the job from `running` calls
//!    it: the pool thread that finished the job, the panic hook on that thread
//!    ([`panic_isolation`](crate::panic_isolation)), or the watchdog.
//! 3. A pool thread whose job is no longer in `running` when the handler returns is already
//!    replaced, and ends.
//! 4. The watchdog depends on no caller. It counts its own ticks instead of reading a clock. A
//!    process that was stopped or starved of CPU time therefore does not find every job overdue.
//! 5. A process that loses more than [`LOST_THREADS_MAX`] threads aborts, and the supervisor
//!    restarts it.

use std::collections::VecDeque;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError, Weak};
use std::time::Duration;
use std::{io, thread};

use tokio::time::MissedTickBehavior;

use crate::panic_isolation::run_isolated;

/// Threads that a process may lose. A lost thread may keep the memory of a grammar (at most about
/// 30 MB) and, if it does not sleep, a core.
pub(crate) const LOST_THREADS_MAX: usize = 16;
/// The period of the watchdog. A job may run for up to one period longer than its limit.
const WATCHDOG_PERIOD: Duration = Duration::from_secs(1);

/// Why a job cost its thread.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum JobFailure {
    Panicked,
    Overdue,
}

/// The queue holds `queue_max` jobs.
#[derive(Debug)]
pub(crate) struct PoolQueueFull;

/// Counts the threads that all pools of a process have lost.
#[derive(Debug, Default)]
pub(crate) struct LostThreads(AtomicUsize);

impl LostThreads {
    /// Counts one lost thread. Returns whether the process may go on.
    fn count_one(&self) -> bool {
        self.0.fetch_add(1, Ordering::Relaxed) < LOST_THREADS_MAX
    }
}

pub(crate) struct PoolConfig {
    pub(crate) thread_name: &'static str,
    pub(crate) stack_bytes: usize,
    pub(crate) threads: usize,
    pub(crate) queue_max: usize,
    /// Watchdog ticks, one a second, after which a running job is overdue.
    pub(crate) max_watchdog_ticks: u32,
    pub(crate) lost_threads: Arc<LostThreads>,
}

/// Runs the jobs of one thread. The handler is created on that thread and stays there.
pub(crate) type JobHandler<J, R> = Box<dyn FnMut(J) -> R>;
type JobCallback<R> = Box<dyn FnOnce(Result<R, JobFailure>) + Send>;

/// Dropping the pool ends its idle threads at once and the others after their current job.
pub(crate) struct WorkerPool<J: Send + 'static, R: 'static> {
    shared: Arc<PoolShared<J, R>>,
}

/// Refers to a submitted job.
pub(crate) struct JobTicket<J: Send + 'static, R: 'static> {
    shared: Arc<PoolShared<J, R>>,
    id: u64,
}

struct PoolShared<J, R> {
    config: PoolConfig,
    new_handler: Box<dyn Fn() -> JobHandler<J, R> + Send + Sync>,
    state: Mutex<JobQueueState<J, R>>,
    /// Notified when a job is queued and when the pool closes.
    changed: Condvar,
}

struct JobQueueState<J, R> {
    /// In the order of their ids.
    queue: VecDeque<QueuedJob<J, R>>,
    running: Vec<RunningJob<R>>,
    /// Threads that are not lost.
    threads: usize,
    next_id: u64,
    is_closed: bool,
}

struct QueuedJob<J, R> {
    id: u64,
    job: J,
    callback: JobCallback<R>,
}

struct RunningJob<R> {
    id: u64,
    ticks: u32,
    callback: JobCallback<R>,
}

impl<J: Send + 'static, R: 'static> WorkerPool<J, R> {
    /// Starts the threads, and the watchdog on the current tokio runtime. Each thread calls
    /// `new_handler` once.
    pub(crate) fn start(
        config: PoolConfig,
        new_handler: impl Fn() -> JobHandler<J, R> + Send + Sync + 'static,
    ) -> io::Result<Arc<Self>> {
        let pool = Self::without_watchdog(config, new_handler)?;
        tokio::spawn(run_watchdog(Arc::downgrade(&pool)));
        Ok(pool)
    }

    fn without_watchdog(
        config: PoolConfig,
        new_handler: impl Fn() -> JobHandler<J, R> + Send + Sync + 'static,
    ) -> io::Result<Arc<Self>> {
        let state = JobQueueState {
            queue: VecDeque::new(),
            running: Vec::new(),
            threads: 0,
            next_id: 0,
            is_closed: false,
        };
        let shared = PoolShared {
            config,
            new_handler: Box::new(new_handler),
            state: Mutex::new(state),
            changed: Condvar::new(),
        };
        let pool = Self { shared: Arc::new(shared) };
        pool.shared.start_missing_threads()?;
        Ok(Arc::new(pool))
    }

    /// Queues a job. `callback` runs once, on any thread, unless the ticket is dropped before the
    /// job begins.
    pub(crate) fn submit(
        &self,
        job: J,
        callback: impl FnOnce(Result<R, JobFailure>) + Send + 'static,
    ) -> Result<JobTicket<J, R>, PoolQueueFull> {
        let mut state = self.shared.lock();
        if state.queue.len() >= self.shared.config.queue_max {
            return Err(PoolQueueFull);
        }
        let id = state.next_id;
        state.next_id += 1;
        state.queue.push_back(QueuedJob { id, job, callback: Box::new(callback) });
        drop(state);
        self.shared.changed.notify_one();
        Ok(JobTicket { shared: self.shared.clone(), id })
    }
}

impl<J: Send + 'static, R: 'static> Drop for WorkerPool<J, R> {
    fn drop(&mut self) {
        self.shared.lock().is_closed = true;
        self.shared.changed.notify_all();
    }
}

impl<J: Send + 'static, R: 'static> JobTicket<J, R> {
    /// Removes the job from the queue. Returns false if the job has already begun.
    pub(crate) fn cancel(&self) -> bool {
        let cancelled = {
            let queue = &mut self.shared.lock().queue;
            let at = queue.binary_search_by_key(&self.id, |job| job.id).ok();
            at.and_then(|at| queue.remove(at))
        };
        // The job's memory is freed after the lock is released.
        cancelled.is_some()
    }
}

impl<J: Send + 'static, R: 'static> Drop for JobTicket<J, R> {
    fn drop(&mut self) {
        self.cancel();
    }
}

impl<J: Send + 'static, R: 'static> PoolShared<J, R> {
    fn lock(&self) -> MutexGuard<'_, JobQueueState<J, R>> {
        // No critical section panics between two changes: a poisoned state is still consistent.
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Starts threads until `config.threads` are alive.
    fn start_missing_threads(self: &Arc<Self>) -> io::Result<()> {
        let mut state = self.lock();
        while state.threads < self.config.threads {
            let thread = thread::Builder::new().name(self.config.thread_name.to_owned());
            let shared = self.clone();
            thread.stack_size(self.config.stack_bytes).spawn(move || shared.run_thread())?;
            state.threads += 1;
        }
        Ok(())
    }

    /// The body of a pool thread.
    fn run_thread(self: Arc<Self>) {
        let mut handler = (self.new_handler)();
        while let Some((id, job)) = self.next_job() {
            let on_panic = {
                let shared = self.clone();
                move || shared.fail_job(id, JobFailure::Panicked)
            };
            let result = run_isolated(on_panic, || handler(job));
            let Some(callback) = self.take_callback(id) else { return };
            callback(Ok(result));
        }
    }

    /// Waits for a job and marks it as running. Returns `None` once the pool is closed and its
    /// queue is empty.
    fn next_job(&self) -> Option<(u64, J)> {
        let is_idle = |state: &mut JobQueueState<J, R>| state.queue.is_empty() && !state.is_closed;
        let state = self.changed.wait_while(self.lock(), is_idle);
        let mut state = state.unwrap_or_else(PoisonError::into_inner);
        let QueuedJob { id, job, callback } = state.queue.pop_front()?;
        state.running.push(RunningJob { id, ticks: 0, callback });
        Some((id, job))
    }

    /// Removes the job from `running`. The caller that gets the callback is the one that must call
    /// it.
    fn take_callback(&self, id: u64) -> Option<JobCallback<R>> {
        let running = &mut self.lock().running;
        let at = running.iter().position(|job| job.id == id)?;
        Some(running.swap_remove(at).callback)
    }

    /// Gives up a running job together with its thread. Returns whether the process may go on.
    fn fail_job(self: &Arc<Self>, id: u64, failure: JobFailure) -> bool {
        // Without a callback, the job has ended meanwhile, or its thread was lost before it
        // panicked.
        let Some(callback) = self.take_callback(id) else { return true };
        if !self.config.lost_threads.count_one() {
            return false;
        }
        self.lock().threads -= 1;
        self.replace_lost_threads();
        callback(Err(failure));
        true
    }

    fn replace_lost_threads(self: &Arc<Self>) {
        if let Err(error) = self.start_missing_threads() {
            tracing::error!(%error, thread = self.config.thread_name, "cannot replace a lost thread yet");
        }
    }

    /// One tick of the watchdog. Returns whether the process may go on.
    fn tick(self: &Arc<Self>) -> bool {
        let mut overdue = Vec::new();
        for job in &mut self.lock().running {
            job.ticks += 1;
            if job.ticks > self.config.max_watchdog_ticks {
                overdue.push(job.id);
            }
        }
        for id in overdue {
            let (thread, seconds) = (self.config.thread_name, self.config.max_watchdog_ticks);
            tracing::error!(thread, "a job runs for more than {seconds} s, its thread is given up");
            if !self.fail_job(id, JobFailure::Overdue) {
                return false;
            }
        }
        // An earlier attempt to start a thread may have failed.
        self.replace_lost_threads();
        true
    }
}

async fn run_watchdog<J: Send + 'static, R: 'static>(pool: Weak<WorkerPool<J, R>>) {
    let mut ticks = tokio::time::interval(WATCHDOG_PERIOD);
    ticks.set_missed_tick_behavior(MissedTickBehavior::Delay);
    loop {
        ticks.tick().await;
        let Some(pool) = pool.upgrade() else { return };
        if !pool.shared.tick() {
            tracing::error!("more than {LOST_THREADS_MAX} threads are lost, the process aborts");
            // A panic beyond the limit aborts the process too.
            service::logging::flush();
            std::process::abort();
        }
    }
}

#[cfg(test)]
pub(crate) mod tests;
