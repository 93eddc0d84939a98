//! Threads whose jobs may panic or never end: such a job costs its thread, and another one takes its place.
//!
//! - What waits is wanted: whoever asks holds a [`Ticket`], and who goes away takes the job out of the queue.
//! - A job is answered once, by whoever takes its entry out of `at_work`: the thread that has done it, the panic hook on
//!   that thread ([`contained`]), or the watch that has looked at it too often. A thread whose entry is gone when it comes
//!   back is lost already, and ends.
//! - The watch is nobody's call: it sees what the one who asked did not wait for. It counts its own looks and no time, so
//!   a process that was stopped, or has no processor, does not find everything overdue.
//! - After [`LOST_MAX`] of them the process ends: a restart is the better cure for many.

use std::collections::VecDeque;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError, Weak};
use std::time::Duration;
use std::{io, thread};

use tokio::time::MissedTickBehavior;

use crate::contained::contained;

/// Lost threads of a process. Each may hold what a grammar takes, some 30 MB at most, and a core, if it does not sleep.
pub(crate) const LOST_MAX: usize = 16;
/// Of the watch. One that ends up to a look later than it should makes no difference.
const LOOK_EVERY: Duration = Duration::from_secs(1);

/// What becomes of a job that costs its thread.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Lost {
    Panicked,
    Overdue,
}

/// As many jobs wait as may.
#[derive(Debug)]
pub(crate) struct Full;

/// Threads that the crews of a process have lost.
#[derive(Debug, Default)]
pub(crate) struct Losses(AtomicUsize);

impl Losses {
    /// Whether one more may be.
    fn one_more(&self) -> bool {
        self.0.fetch_add(1, Ordering::Relaxed) < LOST_MAX
    }
}

pub(crate) struct Terms {
    pub(crate) name: &'static str,
    pub(crate) stack_bytes: usize,
    pub(crate) threads: usize,
    pub(crate) waiting_max: usize,
    /// Looks of the watch, one a second, that a job may be at work for.
    pub(crate) looks_max: u32,
    pub(crate) losses: Arc<Losses>,
}

/// What one thread does its jobs with. Stays on that thread.
pub(crate) type Tool<J, R> = Box<dyn FnMut(J) -> R>;
type Answer<R> = Box<dyn FnOnce(Result<R, Lost>) + Send>;

/// Its threads end with it.
pub(crate) struct Crew<J: Send + 'static, R: 'static> {
    shared: Arc<Shared<J, R>>,
}

/// A job that was asked for.
pub(crate) struct Ticket<J: Send + 'static, R: 'static> {
    shared: Arc<Shared<J, R>>,
    number: u64,
}

struct Shared<J, R> {
    terms: Terms,
    tools: Box<dyn Fn() -> Tool<J, R> + Send + Sync>,
    state: Mutex<State<J, R>>,
    /// There is a job, or an end.
    changed: Condvar,
}

struct State<J, R> {
    /// In the order of their numbers.
    waiting: VecDeque<Waiting<J, R>>,
    at_work: Vec<AtWork<R>>,
    /// That are not lost.
    threads: usize,
    numbers: u64,
    has_ended: bool,
}

struct Waiting<J, R> {
    number: u64,
    job: J,
    answer: Answer<R>,
}

struct AtWork<R> {
    number: u64,
    looks: u32,
    answer: Answer<R>,
}

impl<J: Send + 'static, R: 'static> Crew<J, R> {
    /// With its watch, on the runtime that this is called on. `tools` is called on each thread.
    pub(crate) fn start(
        terms: Terms,
        tools: impl Fn() -> Tool<J, R> + Send + Sync + 'static,
    ) -> io::Result<Arc<Self>> {
        let crew = Self::unwatched(terms, tools)?;
        tokio::spawn(watch(Arc::downgrade(&crew)));
        Ok(crew)
    }

    fn unwatched(
        terms: Terms,
        tools: impl Fn() -> Tool<J, R> + Send + Sync + 'static,
    ) -> io::Result<Arc<Self>> {
        let state =
            State { waiting: VecDeque::new(), at_work: Vec::new(), threads: 0, numbers: 0, has_ended: false };
        let shared =
            Shared { terms, tools: Box::new(tools), state: Mutex::new(state), changed: Condvar::new() };
        let crew = Self { shared: Arc::new(shared) };
        crew.shared.fill()?;
        Ok(Arc::new(crew))
    }

    /// `answer` is called once, on any thread, unless the ticket is dropped before the job has begun.
    pub(crate) fn ask(
        &self,
        job: J,
        answer: impl FnOnce(Result<R, Lost>) + Send + 'static,
    ) -> Result<Ticket<J, R>, Full> {
        let mut state = self.shared.lock();
        if state.waiting.len() >= self.shared.terms.waiting_max {
            return Err(Full);
        }
        let number = state.numbers;
        state.numbers += 1;
        state.waiting.push_back(Waiting { number, job, answer: Box::new(answer) });
        drop(state);
        self.shared.changed.notify_one();
        Ok(Ticket { shared: self.shared.clone(), number })
    }
}

impl<J: Send + 'static, R: 'static> Drop for Crew<J, R> {
    fn drop(&mut self) {
        self.shared.lock().has_ended = true;
        self.shared.changed.notify_all();
    }
}

impl<J: Send + 'static, R: 'static> Ticket<J, R> {
    /// Whether nobody had begun it; nobody will.
    pub(crate) fn withdraw(&self) -> bool {
        let withdrawn = {
            let waiting = &mut self.shared.lock().waiting;
            let at = waiting.binary_search_by_key(&self.number, |job| job.number).ok();
            at.and_then(|at| waiting.remove(at))
        };
        // Its memory is given back here, where nobody waits for the lock.
        withdrawn.is_some()
    }
}

impl<J: Send + 'static, R: 'static> Drop for Ticket<J, R> {
    fn drop(&mut self) {
        self.withdraw();
    }
}

impl<J: Send + 'static, R: 'static> Shared<J, R> {
    fn lock(&self) -> MutexGuard<'_, State<J, R>> {
        // Nothing below panics half way: a poisoned state is a whole one.
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// As many threads as there should be.
    fn fill(self: &Arc<Self>) -> io::Result<()> {
        let mut state = self.lock();
        while state.threads < self.terms.threads {
            let thread = thread::Builder::new().name(self.terms.name.to_owned());
            let shared = self.clone();
            thread.stack_size(self.terms.stack_bytes).spawn(move || shared.work())?;
            state.threads += 1;
        }
        Ok(())
    }

    fn work(self: Arc<Self>) {
        let mut tool = (self.tools)();
        while let Some((number, job)) = self.begin() {
            let lost = {
                let shared = self.clone();
                move || shared.lose(number, Lost::Panicked)
            };
            let done = contained(lost, || tool(job));
            let Some(answer) = self.take(number) else { return };
            answer(Ok(done));
        }
    }

    /// The next job. Nothing once the crew has ended.
    fn begin(&self) -> Option<(u64, J)> {
        let is_idle = |state: &mut State<J, R>| state.waiting.is_empty() && !state.has_ended;
        let state = self.changed.wait_while(self.lock(), is_idle);
        let mut state = state.unwrap_or_else(PoisonError::into_inner);
        let Waiting { number, job, answer } = state.waiting.pop_front()?;
        state.at_work.push(AtWork { number, looks: 0, answer });
        Some((number, job))
    }

    /// To be called by whoever answers.
    fn take(&self, number: u64) -> Option<Answer<R>> {
        let at_work = &mut self.lock().at_work;
        let at = at_work.iter().position(|job| job.number == number)?;
        Some(at_work.swap_remove(at).answer)
    }

    /// The job costs its thread. Whether the process is to go on.
    fn lose(self: &Arc<Self>, number: u64, how: Lost) -> bool {
        // Else it is done by now, or its thread was lost before it panicked.
        let Some(answer) = self.take(number) else { return true };
        if !self.terms.losses.one_more() {
            return false;
        }
        self.lock().threads -= 1;
        if let Err(error) = self.fill() {
            tracing::error!(%error, thread = self.terms.name, "cannot be replaced yet");
        }
        answer(Err(how));
        true
    }

    /// Whether the process is to go on.
    fn look(self: &Arc<Self>) -> bool {
        let mut overdue = Vec::new();
        for job in &mut self.lock().at_work {
            job.looks += 1;
            if job.looks > self.terms.looks_max {
                overdue.push(job.number);
            }
        }
        for number in overdue {
            let (thread, most) = (self.terms.name, self.terms.looks_max);
            tracing::error!(thread, "a job takes more than {most} s: its thread is lost");
            if !self.lose(number, Lost::Overdue) {
                return false;
            }
        }
        // There may have been no room for a thread before.
        if let Err(error) = self.fill() {
            tracing::error!(%error, thread = self.terms.name, "cannot be replaced yet");
        }
        true
    }
}

async fn watch<J: Send + 'static, R: 'static>(crew: Weak<Crew<J, R>>) {
    let mut looks = tokio::time::interval(LOOK_EVERY);
    looks.set_missed_tick_behavior(MissedTickBehavior::Delay);
    loop {
        looks.tick().await;
        let Some(crew) = crew.upgrade() else { return };
        if !crew.shared.look() {
            tracing::error!("more than {LOST_MAX} threads are lost: the process ends");
            // As a panic that is one too many does.
            std::process::abort();
        }
    }
}

#[cfg(test)]
pub(crate) mod tests;
