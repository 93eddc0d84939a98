//! Carries out what [`crate::admission`] decides: one small lock around it, as around the fleet, held for a few map operations and
//! never over an await.
//!
//! Whoever enters gets [`Places`], which give themselves back: a client that goes away while it waits, and a stream that has
//! ended, make room in the same moment. Time and workers that come and go are told by [`Gate::watch`].

use std::collections::{BTreeSet, HashMap};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use tokio::sync::{Notify, oneshot};
use tokio::time::Instant;
use tokio_util::sync::CancellationToken;

use crate::admission::{Action, Admission, Class, Entry, Event, Limits, Refused, Standing, Ticket, Time};
use crate::fleet::Fleet;
use crate::metrics;
use crate::placement::ModelKey;

#[derive(Debug)]
pub(crate) struct Gate {
    fleet: Arc<Fleet>,
    start: Instant,
    limits: Limits,
    state: Mutex<State>,
    /// Something may be due earlier than it was.
    earlier: Notify,
}

#[derive(Debug)]
struct State {
    limits: Limits,
    admission: Admission,
    answers: HashMap<Ticket, oneshot::Sender<Result<(), Refused>>>,
    /// Models whose workers were counted.
    models: BTreeSet<ModelKey>,
    tickets: u64,
}

/// Room for streams on the workers of a model, from the wish for it to the end of the last one.
#[derive(Debug)]
pub(crate) struct Places {
    gate: Arc<Gate>,
    ticket: Ticket,
    count: u32,
}

impl Places {
    /// One of them, for a stream of its own.
    pub(crate) fn split(&mut self) -> Option<Places> {
        self.count = self.count.checked_sub(1)?;
        Some(Places { gate: self.gate.clone(), ticket: self.ticket, count: 1 })
    }
}

impl Drop for Places {
    fn drop(&mut self) {
        self.gate.give_back(self.ticket, self.count);
    }
}

impl Gate {
    pub(crate) fn new(fleet: Arc<Fleet>, limits: Limits) -> Arc<Self> {
        let state = State {
            limits,
            admission: Admission::new(limits),
            answers: HashMap::new(),
            models: BTreeSet::new(),
            tickets: 0,
        };
        let (start, earlier) = (Instant::now(), Notify::new());
        Arc::new(Self { fleet, start, limits, state: Mutex::new(state), earlier })
    }

    /// Streams that this process has room for.
    pub(crate) fn streams_max(&self) -> u32 {
        self.limits.streams_max
    }

    pub(crate) fn time(&self, at: Instant) -> Time {
        at.saturating_duration_since(self.start)
    }

    /// Waits for a turn within the entry's deadline. Dropping the future gives up its place in the queue.
    pub(crate) async fn enter(self: &Arc<Self>, model_name: &str, entry: Entry) -> Result<Places, Refused> {
        let (class, count) = (Class::of_priority(entry.priority), entry.places);
        let came = Instant::now();
        let (answer, answered) = oneshot::channel();
        let ticket = self.knock(entry, answer);
        let places = Places { gate: self.clone(), ticket, count };
        self.earlier.notify_one();
        // The policy answers every request once.
        answered.await.unwrap_or(Err(Refused::NoWorker))?;
        metrics::queued(model_name, class, came.elapsed());
        Ok(places)
    }

    fn knock(&self, entry: Entry, answer: oneshot::Sender<Result<(), Refused>>) -> Ticket {
        let mut state = self.lock();
        let now = self.time(Instant::now());
        state.tickets += 1;
        let ticket = Ticket(state.tickets);
        state.answers.insert(ticket, answer);
        // A worker that has just come counts, although nobody told of it yet.
        state.count_workers(&self.fleet, &entry.model, now);
        state.on(now, Event::Enter(ticket, entry));
        ticket
    }

    /// Places that are held or waited for.
    pub(crate) fn streams(&self) -> u32 {
        self.lock().admission.streams()
    }

    pub(crate) fn standing(&self, model: &ModelKey) -> Option<Standing> {
        self.lock().admission.standing(model)
    }

    /// Tells of workers that come and go, and of times that have come, until `stop`.
    pub(crate) async fn watch(self: Arc<Self>, stop: CancellationToken) {
        let mut changes = self.fleet.changes();
        loop {
            let due = self.look();
            let wait = async {
                match due {
                    Some(due) => tokio::time::sleep_until(self.start + due).await,
                    None => std::future::pending().await,
                }
            };
            tokio::select! {
                () = wait => {}
                // The sender lives as long as the fleet.
                _ = changes.changed() => {}
                () = self.earlier.notified() => {}
                () = stop.cancelled() => return,
            }
        }
    }

    /// Returns when to look again.
    fn look(&self) -> Option<Time> {
        let mut state = self.lock();
        let now = self.time(Instant::now());
        let known = state.models.iter().cloned();
        let models: BTreeSet<ModelKey> = self.fleet.keys().into_iter().chain(known).collect();
        for model in models {
            state.count_workers(&self.fleet, &model, now);
        }
        state.on(now, Event::Passed);
        state.admission.wake_at()
    }

    /// Of one that waits: its place in the queue.
    fn give_back(&self, ticket: Ticket, count: u32) {
        let mut state = self.lock();
        let now = self.time(Instant::now());
        if state.answers.remove(&ticket).is_some() {
            return state.on(now, Event::Leave(ticket));
        }
        for _ in 0..count {
            state.on(now, Event::Ended(ticket));
        }
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        // Nothing below panics half way: a poisoned state is a whole one.
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl State {
    fn on(&mut self, now: Time, event: Event) {
        for action in self.admission.on(now, event) {
            let (ticket, answer) = match action {
                Action::Admit(ticket) => (ticket, Ok(())),
                Action::Refuse(ticket, why) => (ticket, Err(why)),
            };
            if let Some(waiting) = self.answers.remove(&ticket) {
                // Nobody listens if the client has just gone: its places come back when they are dropped.
                let _gone = waiting.send(answer);
            }
        }
    }

    /// Under this lock, so that the last word is the latest.
    fn count_workers(&mut self, fleet: &Fleet, model: &ModelKey, now: Time) {
        let places = self.limits.places(fleet.room(model));
        if places > 0 {
            self.models.insert(model.clone());
        } else if !self.models.remove(model) {
            return;
        }
        self.on(now, Event::Capacity(model.clone(), places));
    }
}
