//! Who enters: bounded queues of each model, shared fairly by classes and tenants. A plain value without a clock;
//! [`crate::gate`] owns it and carries its actions out.
//!
//! ```text
//! Enter -- fits ------------------------------> Admit: holds its places until each has ended
//!      \-- has to wait, a bound is reached ---> Refuse, with the time after which to come again
//!       \- waits -- a place is free, its turn -> Admit
//!               \-- deadline, no worker -------> Refuse
//!                \- Leave (the client is gone): its place is free at once
//! ```
//!
//! A place is one stream on a worker. Where floors reserve places, a worker has as many as it runs at once, so that a reserved
//! one is computed in the step after it is taken; where none are reserved, a quarter more, so that it finds the next one in
//! its own queue when a stream ends. Everything else waits here, where a worker's death loses nobody's turn, a new worker
//! helps at once, and tenants share the whole fleet. What is on the worker, its engine orders.
//!
//! Who is next, in a model's line ([`line`]): the highest class, in it the tenant that holds the fewest places
//! ([`queue`]), of its requests the most urgent, then the oldest; every [`AGED_EVERY`]th time whoever came first. A request
//! that needs more places than are free is not passed, except by a class that is below its floor.
//!
//! Bounds, in admissions to a model (`tests` and `simulation` hold them; admissions out of a class's own floor don't count,
//! nor does the time in which a larger request waits for room):
//! - Whoever waits behind `m` older ones is admitted after at most `AGED_EVERY * (m + 1)`, whatever comes after it.
//! - A tenant that holds no place is passed by each other tenant of its class at most once, by none that came to wait after it, and
//!   by what goes by age.

mod fit;
mod line;
mod queue;
#[cfg(test)]
mod simulation;
#[cfg(test)]
mod tests;

use std::collections::{BTreeMap, HashMap};
use std::sync::Arc;
use std::time::Duration;

use crate::placement::ModelKey;
pub(crate) use fit::{NeverFits, Room, Seats};
use line::Line;

/// Admissions of which one goes by age alone.
pub(crate) const AGED_EVERY: u32 = 8;

/// How long those who wait are kept while no worker is there: a restarted one is back within a second.
pub(crate) const WORKER_WAIT: Duration = Duration::from_secs(5);

/// Since the router's start.
pub(crate) type Time = Duration;

/// A request, from its entry to the end of its last stream.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub(crate) struct Ticket(pub(crate) u64);

/// Whose request it is.
#[derive(Clone, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub(crate) enum Tenant {
    /// All that do not say share as one, which has no bound of its own.
    #[default]
    Unnamed,
    Named(Arc<str>),
}

/// OpenAI's service tiers `priority`, `default` and `flex`; vLLM's priorities below, at and above 0.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub(crate) enum Class {
    Interactive,
    #[default]
    Default,
    Batch,
}

impl Class {
    /// First things first.
    pub(crate) const ALL: [Class; 3] = [Class::Interactive, Class::Default, Class::Batch];

    pub(crate) fn name(self) -> &'static str {
        match self {
            Class::Interactive => "interactive",
            Class::Default => "default",
            Class::Batch => "batch",
        }
    }

    pub(crate) fn of_priority(priority: i32) -> Self {
        match priority {
            ..0 => Class::Interactive,
            0 => Class::Default,
            1.. => Class::Batch,
        }
    }
}

/// The knobs; `config.rs` says what is allowed.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Limits {
    /// Streams of all models that run or wait: what this process has room for.
    pub(crate) streams_max: u32,
    /// Requests that wait for one model.
    pub(crate) queue_max: u32,
    /// Of one tenant.
    pub(crate) tenant_queue_max: u32,
    /// Percent of a model's places and of its queue that other classes leave free.
    pub(crate) interactive_floor: u32,
    pub(crate) batch_floor: u32,
}

impl Limits {
    /// What of `whole` is the class's own.
    fn floor(&self, class: Class, whole: u32) -> u32 {
        let percent = match class {
            Class::Interactive => self.interactive_floor,
            Class::Default => 0,
            Class::Batch => self.batch_floor,
        };
        (u64::from(whole) * u64::from(percent) / 100) as u32
    }

    /// Streams that the workers of a model are given at once.
    pub(crate) fn places(&self, room: Room) -> u32 {
        let reserves = |class| self.floor(class, room.seats) > 0;
        if Class::ALL.into_iter().any(reserves) { room.seats } else { room.window }
    }
}

#[derive(Clone, Debug)]
pub(crate) struct Entry {
    pub(crate) model: ModelKey,
    pub(crate) tenant: Tenant,
    /// Lower is more urgent. Its sign is the class; beyond it, it orders a tenant's own requests only.
    pub(crate) priority: i32,
    /// Streams, admitted together.
    pub(crate) places: u32,
    pub(crate) deadline: Time,
}

#[derive(Clone, Debug)]
pub(crate) enum Event {
    /// A ticket that never was before.
    Enter(Ticket, Entry),
    /// The client is gone. Nothing, if it does not wait.
    Leave(Ticket),
    /// One of an admitted request's streams has ended.
    Ended(Ticket),
    /// So many streams the workers of this model take.
    Capacity(ModelKey, u32),
    /// Time passes.
    Passed,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Action {
    Admit(Ticket),
    Refuse(Ticket, Refused),
}

/// Why a request does not enter. Times are those after which to come again.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub(crate) enum Refused {
    #[error("no worker of this model is ready")]
    NoWorker,
    #[error("the request's deadline passed before it was admitted")]
    Deadline,
    #[error(
        "{waiting} requests of class {} wait for this model or stand before them, at most {max} may; come again in {} s",
        .class.name(), .retry_after.as_secs()
    )]
    QueueFull { class: Class, waiting: u32, max: u32, retry_after: Duration },
    #[error("{waiting} requests of this tenant wait for this model, at most {max} may; come again in {} s", .retry_after.as_secs())]
    TenantQueueFull { waiting: u32, max: u32, retry_after: Duration },
    #[error("{streams} streams run or wait, at most {max} may; come again in {} s", .retry_after.as_secs())]
    StreamsFull { streams: u32, max: u32, retry_after: Duration },
}

/// What stands in a model's line, for metrics.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Standing {
    pub(crate) capacity: u32,
    pub(crate) classes: [ClassStanding; 3],
    /// Requests of each named tenant that wait, most first.
    pub(crate) tenants: Vec<(Arc<str>, u32)>,
}

#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct ClassStanding {
    /// Requests.
    pub(crate) waiting: u32,
    /// Places.
    pub(crate) held: u32,
}

#[derive(Debug)]
pub(crate) struct Admission {
    limits: Limits,
    lines: BTreeMap<ModelKey, Line>,
    /// Where each ticket waits or holds places.
    tickets: HashMap<Ticket, ModelKey>,
    /// Places that are held or waited for, in all lines.
    streams: u32,
}

impl Admission {
    pub(crate) fn new(limits: Limits) -> Self {
        Self { limits, lines: BTreeMap::new(), tickets: HashMap::new(), streams: 0 }
    }

    /// What is to be done, in this order.
    pub(crate) fn on(&mut self, now: Time, event: Event) -> Vec<Action> {
        let mut actions = Vec::new();
        match event {
            Event::Enter(ticket, entry) => self.enter(now, ticket, entry, &mut actions),
            Event::Leave(ticket) => {
                if let Some(line) = self.line_of(ticket)
                    && line.leave(now, ticket, &mut actions)
                {
                    self.tickets.remove(&ticket);
                }
            }
            Event::Ended(ticket) => {
                if let Some(line) = self.line_of(ticket)
                    && line.ended(now, ticket, &mut actions)
                {
                    self.tickets.remove(&ticket);
                }
            }
            Event::Capacity(model, places) => {
                let limits = self.limits;
                let line = self.lines.entry(model).or_insert_with(|| Line::new(limits));
                line.resize(now, places, &mut actions);
            }
            Event::Passed => self.lines.values_mut().for_each(|line| line.pass(now, &mut actions)),
        }
        for action in &actions {
            if let Action::Refuse(ticket, _) = action {
                self.tickets.remove(ticket);
            }
        }
        self.lines.retain(|_, line| !line.is_idle());
        self.streams = self.lines.values().map(Line::streams).sum();
        actions
    }

    /// When something is due that no event will bring.
    pub(crate) fn wake_at(&self) -> Option<Time> {
        self.lines.values().filter_map(Line::wake_at).min()
    }

    /// Places that are held or waited for.
    pub(crate) fn streams(&self) -> u32 {
        self.streams
    }

    pub(crate) fn standing(&self, model: &ModelKey) -> Option<Standing> {
        self.lines.get(model).map(Line::standing)
    }

    fn enter(&mut self, now: Time, ticket: Ticket, entry: Entry, actions: &mut Vec<Action>) {
        let max = self.limits.streams_max;
        let Some(line) = self.lines.get_mut(&entry.model).filter(|line| line.is_open()) else {
            return actions.push(Action::Refuse(ticket, Refused::NoWorker));
        };
        if self.streams.saturating_add(entry.places) > max {
            let (streams, retry_after) = (self.streams, line.promise(now, entry.places));
            return actions.push(Action::Refuse(ticket, Refused::StreamsFull { streams, max, retry_after }));
        }
        self.tickets.insert(ticket, entry.model.clone());
        line.enter(now, ticket, entry, actions);
    }

    fn line_of(&mut self, ticket: Ticket) -> Option<&mut Line> {
        self.lines.get_mut(self.tickets.get(&ticket)?)
    }
}
