//! The line of one model: its places, who holds them, who waits for them.
//!
//! Invariants (checked after every event of the simulation): no more places are held than there are, but by a request
//! that is larger than what its class may ever have, or after workers were lost; a class below its floor finds room up to it; nobody
//! waits who could be admitted; every request gets one answer, and gives every place back once.

use std::collections::{BTreeMap, BTreeSet, HashMap};

use pace::{Outside, Pace};

use super::queue::{Queue, Rank};
use super::{
    AGED_EVERY, Action, Class, ClassStanding, Entry, Limits, Refused, Standing, Tenant, Ticket, Time,
    WORKER_WAIT,
};

#[derive(Debug)]
pub(super) struct Line {
    limits: Limits,
    capacity: u32,
    /// Since when there has been no worker.
    deserted: Option<Time>,
    queues: [Queue; 3],
    /// Everybody who waits or holds places.
    guests: HashMap<Ticket, Guest>,
    /// Those who wait, by arrival.
    waiting: BTreeMap<u64, Ticket>,
    deadlines: BTreeSet<(Time, Ticket)>,
    /// Requests of each named tenant that waits, in all classes.
    tenants: HashMap<Tenant, Own>,
    /// Places that are waited for.
    wanted: u32,
    arrivals: u64,
    /// Admissions since the last one by age.
    turn: u32,
    pace: Pace,
}

#[derive(Debug)]
struct Guest {
    tenant: Tenant,
    class: Class,
    rank: Rank,
    places: u32,
    deadline: Time,
    /// Of an admitted one: places that it has not given back.
    held: Option<u32>,
}

#[derive(Debug, Default)]
struct Own {
    waiting: u32,
    places: u32,
    outside: Outside,
}

/// Whether the next one of a class may come in.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Room {
    Enough,
    /// Enough of what is its class's own: nobody else could use it.
    Own,
    Wanting,
}

impl Line {
    pub(super) fn new(limits: Limits) -> Self {
        Self {
            limits,
            capacity: 0,
            deserted: None,
            queues: Default::default(),
            guests: HashMap::new(),
            waiting: BTreeMap::new(),
            deadlines: BTreeSet::new(),
            tenants: HashMap::new(),
            wanted: 0,
            arrivals: 0,
            turn: 0,
            pace: Pace::default(),
        }
    }

    pub(super) fn is_open(&self) -> bool {
        self.capacity > 0
    }

    pub(super) fn is_idle(&self) -> bool {
        self.capacity == 0 && self.guests.is_empty()
    }

    /// Places that are held or waited for.
    pub(super) fn streams(&self) -> u32 {
        self.wanted + self.queues.iter().map(Queue::held).sum::<u32>()
    }

    pub(super) fn wake_at(&self) -> Option<Time> {
        let deadline = self.deadlines.first().map(|&(at, _)| at);
        let desertion = self.deserted.filter(|_| !self.waiting.is_empty()).map(|since| since + WORKER_WAIT);
        deadline.into_iter().chain(desertion).min()
    }

    pub(super) fn standing(&self) -> Standing {
        let of = |class| {
            let queue = &self.queues[class as usize];
            ClassStanding { waiting: queue.waiting(), held: queue.held() }
        };
        let name = |(tenant, own): (&Tenant, &Own)| match tenant {
            Tenant::Named(name) => Some((name.clone(), own.waiting)),
            Tenant::Unnamed => None,
        };
        let mut tenants: Vec<_> = self.tenants.iter().filter_map(name).collect();
        tenants.sort_by(|a, b| b.1.cmp(&a.1).then_with(|| a.0.cmp(&b.0)));
        Standing { capacity: self.capacity, classes: Class::ALL.map(of), tenants }
    }

    pub(super) fn enter(&mut self, now: Time, ticket: Ticket, entry: Entry, actions: &mut Vec<Action>) {
        self.settle(now, actions);
        if entry.deadline <= now {
            return actions.push(Action::Refuse(ticket, Refused::Deadline));
        }
        self.arrivals += 1;
        let rank = Rank { priority: entry.priority, arrival: self.arrivals };
        let guest = Guest {
            class: Class::of_priority(entry.priority),
            tenant: entry.tenant,
            rank,
            places: entry.places,
            deadline: entry.deadline,
            held: None,
        };
        self.queues[guest.class as usize].enter(&guest.tenant, rank);
        self.waiting.insert(rank.arrival, ticket);
        self.deadlines.insert((guest.deadline, ticket));
        let own = self.tenants.entry(guest.tenant.clone()).or_default();
        own.waiting += 1;
        own.places += guest.places;
        self.wanted += guest.places;
        self.guests.insert(ticket, guest);
        self.admit(actions);
        // Bounds are for those who have to wait.
        if let Some(refused) = self.over_bounds(now, ticket) {
            self.forget_waiting(ticket);
            actions.push(Action::Refuse(ticket, refused));
        }
        self.pace.waiting(now, !self.waiting.is_empty());
    }

    /// False if the ticket does not wait.
    pub(super) fn leave(&mut self, now: Time, ticket: Ticket, actions: &mut Vec<Action>) -> bool {
        let waits = self.guests.get(&ticket).is_some_and(|guest| guest.held.is_none());
        if waits {
            self.forget_waiting(ticket);
        }
        self.settle(now, actions);
        waits
    }

    /// True if that was the last place of the ticket.
    pub(super) fn ended(&mut self, now: Time, ticket: Ticket, actions: &mut Vec<Action>) -> bool {
        let Some(Guest { tenant, class, held: Some(held), .. }) = self.guests.get_mut(&ticket) else {
            return false;
        };
        *held -= 1;
        self.queues[*class as usize].release(tenant);
        let was_last = *held == 0;
        if was_last {
            self.guests.remove(&ticket);
        }
        self.pace.freed(now);
        self.settle(now, actions);
        was_last
    }

    pub(super) fn resize(&mut self, now: Time, places: u32, actions: &mut Vec<Action>) {
        self.capacity = places;
        self.deserted = (places == 0).then(|| self.deserted.unwrap_or(now));
        self.settle(now, actions);
    }

    pub(super) fn pass(&mut self, now: Time, actions: &mut Vec<Action>) {
        self.settle(now, actions);
    }

    /// For a request of `places` that this process has no room for.
    pub(super) fn promise(&mut self, now: Time, places: u32) -> Time {
        self.pace.promise(now, self.wanted, places)
    }

    /// What follows from any change.
    fn settle(&mut self, now: Time, actions: &mut Vec<Action>) {
        self.expire(now, actions);
        self.admit(actions);
        self.pace.waiting(now, !self.waiting.is_empty());
    }

    fn expire(&mut self, now: Time, actions: &mut Vec<Action>) {
        while let Some(&(deadline, ticket)) = self.deadlines.first()
            && deadline <= now
        {
            self.forget_waiting(ticket);
            actions.push(Action::Refuse(ticket, Refused::Deadline));
        }
        if self.deserted.is_some_and(|since| since + WORKER_WAIT <= now) {
            while let Some((_, &ticket)) = self.waiting.first_key_value() {
                self.forget_waiting(ticket);
                actions.push(Action::Refuse(ticket, Refused::NoWorker));
            }
        }
    }

    /// Admits whoever may come in now.
    fn admit(&mut self, actions: &mut Vec<Action>) {
        while let Some((ticket, by_age)) = self.next() {
            let Some(guest) = self.guests.get_mut(&ticket) else { return };
            guest.held = Some(guest.places);
            self.queues[guest.class as usize].admit(&guest.tenant, guest.rank, guest.places);
            self.waiting.remove(&guest.rank.arrival);
            self.deadlines.remove(&(guest.deadline, ticket));
            let (tenant, places) = (guest.tenant.clone(), guest.places);
            self.waits_no_more(&tenant, places);
            self.turn = if by_age { 0 } else { (self.turn + 1).min(AGED_EVERY - 1) };
            actions.push(Action::Admit(ticket));
        }
    }

    /// Who comes in now, and whether by age.
    fn next(&self) -> Option<(Ticket, bool)> {
        let mut blocked = false;
        if self.turn + 1 >= AGED_EVERY
            && let Some((_, &oldest)) = self.waiting.first_key_value()
        {
            match self.room_for(oldest) {
                Room::Enough | Room::Own => return Some((oldest, true)),
                // Its turn stays.
                Room::Wanting => blocked = true,
            }
        }
        for class in Class::ALL {
            let Some(rank) = self.queues[class as usize].next() else { continue };
            let Some(&ticket) = self.waiting.get(&rank.arrival) else { continue };
            match self.room_for(ticket) {
                Room::Enough if !blocked => return Some((ticket, false)),
                Room::Own => return Some((ticket, false)),
                // What it waits for is not given to those after it.
                Room::Enough | Room::Wanting => blocked = true,
            }
        }
        None
    }

    fn room_for(&self, ticket: Ticket) -> Room {
        let Some(Guest { class, places, .. }) = self.guests.get(&ticket) else { return Room::Wanting };
        let floor_of = |class: Class| self.limits.floor(class, self.capacity);
        let held_by = |class: Class| self.queues[class as usize].held();
        let held: u32 = Class::ALL.into_iter().map(held_by).sum();
        let others = || Class::ALL.into_iter().filter(|other| other != class);
        // What the others would leave it if they held nothing: a larger request makes do with all of that.
        let most = self.capacity - others().map(floor_of).sum::<u32>();
        let wanted = (*places).min(most);
        let free = self.capacity.saturating_sub(held);
        if wanted == 0 || wanted > free {
            return Room::Wanting;
        }
        if held_by(*class) + wanted <= floor_of(*class) {
            return Room::Own;
        }
        let reserved: u32 = others().map(|other| floor_of(other).saturating_sub(held_by(other))).sum();
        if wanted <= free.saturating_sub(reserved) { Room::Enough } else { Room::Wanting }
    }

    /// Why a request that has to wait may not.
    fn over_bounds(&mut self, now: Time, ticket: Ticket) -> Option<Refused> {
        let guest = self.guests.get(&ticket).filter(|guest| guest.held.is_none())?;
        let (class, places) = (guest.class, guest.places);
        // Without itself.
        let ahead = self.wanted - places;
        let max = self.limits.tenant_queue_max;
        let own = self.tenants.get_mut(&guest.tenant)?;
        if guest.tenant != Tenant::Unnamed && own.waiting > max {
            let share = self.queues[class as usize].tenants();
            let waiting = own.waiting - 1;
            let ahead = own.places - places;
            let retry_after = self.pace.promise_to(&mut own.outside, now, ahead, places, share);
            return Some(Refused::TenantQueueFull { waiting, max, retry_after });
        }
        let queue_max = self.limits.queue_max;
        let waits = |class: Class| self.queues[class as usize].waiting();
        let reserved = |class: Class| self.limits.floor(class, queue_max).saturating_sub(waits(class));
        let others = Class::ALL.into_iter().filter(|&other| other != class);
        let max = queue_max - others.map(reserved).sum::<u32>();
        let waiting = self.waiting.len() as u32 - 1;
        if waiting >= max {
            let retry_after = self.pace.promise(now, ahead, places);
            return Some(Refused::QueueFull { class, waiting, max, retry_after });
        }
        None
    }

    fn forget_waiting(&mut self, ticket: Ticket) {
        let Some(guest) = self.guests.remove(&ticket) else { return };
        self.queues[guest.class as usize].leave(&guest.tenant, guest.rank);
        self.waiting.remove(&guest.rank.arrival);
        self.deadlines.remove(&(guest.deadline, ticket));
        self.waits_no_more(&guest.tenant, guest.places);
    }

    fn waits_no_more(&mut self, tenant: &Tenant, places: u32) {
        self.wanted -= places;
        if let Some(own) = self.tenants.get_mut(tenant) {
            own.waiting -= 1;
            own.places -= places;
            if own.waiting == 0 {
                self.tenants.remove(tenant);
            }
        }
    }
}
