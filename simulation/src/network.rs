// SPDX-License-Identifier: Apache-2.0

//! Time and messages: every event of the simulation waits here until it is due.
//!
//! Messages of one connection arrive in the order in which they were sent; messages of different
//! connections overtake each other. A process that is stopped gets its messages and timers when it
//! goes on. What is sent to a dead process is dropped, with the descriptors in it.

use std::cmp::Ordering;
use std::collections::{BTreeMap, BinaryHeap, HashMap};

use crate::messages::Message;

/// A process of the fleet. Numbers are never reused.
pub(crate) type SimPid = u32;

/// The simulated world outside of all processes.
pub(crate) const WORLD: SimPid = 0;

/// Time since the start, in microseconds.
pub(crate) type Micros = u64;

pub(crate) const MILLISECOND: Micros = 1_000;
pub(crate) const SECOND: Micros = 1_000_000;

/// Splitmix64: a fixed sequence for each seed.
#[derive(Debug)]
pub(crate) struct SimRandom(pub(crate) u64);

impl SimRandom {
    pub(crate) fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9E37_79B9_7F4A_7C15);
        mix(self.0)
    }

    pub(crate) fn below(&mut self, end: u64) -> u64 {
        self.next() % end
    }

    pub(crate) fn between(&mut self, from: u64, to: u64) -> u64 {
        from + self.below(to - from)
    }

    pub(crate) fn one_in(&mut self, n: u64) -> bool {
        self.below(n) == 0
    }
}

pub(crate) fn mix(mut mixed: u64) -> u64 {
    mixed = (mixed ^ mixed >> 30).wrapping_mul(0xBF58_476D_1CE4_E5B9);
    mixed = (mixed ^ mixed >> 27).wrapping_mul(0x94D0_49BB_1331_11EB);
    mixed ^ mixed >> 31
}

/// A connection, or a one-way channel of datagrams.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) enum Link {
    /// Notifications of this process to its supervisor.
    Notify(SimPid),
    /// A hand-off connection, by its number.
    Handoff(u64),
    /// From the supervisor to the weight-server, and back.
    Admin(SimPid),
    AdminReply(SimPid),
    /// From a router to a worker, and back.
    Calls(SimPid, SimPid),
    Frames(SimPid, SimPid),
}

#[derive(Debug)]
pub(crate) struct Entry {
    pub(crate) at: Micros,
    order: u64,
    pub(crate) to: SimPid,
    is_timer: bool,
    pub(crate) message: Message,
}

impl PartialEq for Entry {
    fn eq(&self, other: &Self) -> bool {
        self.order == other.order
    }
}

impl Eq for Entry {}

impl PartialOrd for Entry {
    fn partial_cmp(&self, other: &Self) -> Option<Ordering> {
        Some(self.cmp(other))
    }
}

impl Ord for Entry {
    /// The heap is a maximum heap: the earliest entry is the greatest.
    fn cmp(&self, other: &Self) -> Ordering {
        (other.at, other.order).cmp(&(self.at, self.order))
    }
}

#[derive(Debug)]
pub(crate) struct Network {
    pub(crate) now: Micros,
    pub(crate) random: SimRandom,
    heap: BinaryHeap<Entry>,
    order: u64,
    last: HashMap<Link, Micros>,
    /// What stopped processes have not read yet.
    held: BTreeMap<SimPid, Vec<Entry>>,
}

impl Network {
    pub(crate) fn new(seed: u64) -> Self {
        Self {
            now: 0,
            random: SimRandom(seed),
            heap: BinaryHeap::new(),
            order: 0,
            last: HashMap::new(),
            held: BTreeMap::new(),
        }
    }

    pub(crate) fn send(&mut self, link: Link, to: SimPid, message: Message) {
        let delay = match self.random.below(1000) {
            0 => self.random.between(20 * MILLISECOND, 500 * MILLISECOND),
            1..30 => self.random.between(MILLISECOND, 20 * MILLISECOND),
            _ => self.random.between(20, 500),
        };
        let last = self.last.entry(link).or_default();
        let at = (self.now + delay).max(*last + 1);
        *last = at;
        self.push(at, to, false, message);
    }

    pub(crate) fn timer(&mut self, to: SimPid, after: Micros, message: Message) {
        // A thread wakes a little late.
        let late = self.random.below(200);
        self.push(self.now + after + late, to, true, message);
    }

    fn push(&mut self, at: Micros, to: SimPid, is_timer: bool, message: Message) {
        self.order += 1;
        self.heap.push(Entry { at, order: self.order, to, is_timer, message });
    }

    /// Takes the next entry, and moves the time there.
    pub(crate) fn pop(&mut self) -> Option<Entry> {
        let entry = self.heap.pop()?;
        self.now = self.now.max(entry.at);
        Some(entry)
    }

    /// Keeps an entry for a stopped process.
    pub(crate) fn hold(&mut self, entry: Entry) {
        self.held.entry(entry.to).or_default().push(entry);
    }

    /// The process goes on, or is dead. Timers and messages are ready at once, so either may be
    /// handled first.
    pub(crate) fn release(&mut self, pid: SimPid) {
        let mut held = self.held.remove(&pid).unwrap_or_default();
        if self.random.one_in(2) {
            held.sort_by_key(|entry| !entry.is_timer);
        }
        for entry in held {
            // Before all that is under way: on the same connection, that was sent later.
            self.push(0, pid, entry.is_timer, entry.message);
        }
    }

    /// Time passes while nothing runs.
    pub(crate) fn jump(&mut self, by: Micros) {
        self.now += by;
    }
}
