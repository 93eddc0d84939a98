//! Facts about the policy, each small enough to be read.

use super::*;

const SECOND: Time = Duration::from_secs(1);

fn limits() -> Limits {
    Limits { streams_max: 1000, queue_max: 20, tenant_queue_max: 10, interactive_floor: 20, batch_floor: 10 }
}

fn model() -> ModelKey {
    ModelKey::numbered(1)
}

pub(super) fn named(name: &str) -> Tenant {
    Tenant::Named(name.into())
}

/// A line with this many places, and the time.
struct Line {
    admission: Admission,
    now: Time,
    tickets: u64,
}

impl Line {
    fn of(capacity: u32, limits: Limits) -> Self {
        let mut line = Self { admission: Admission::new(limits), now: SECOND, tickets: 0 };
        assert_eq!(line.on(Event::Capacity(model(), capacity)), []);
        line
    }

    fn on(&mut self, event: Event) -> Vec<Action> {
        self.admission.on(self.now, event)
    }

    fn entry(&self, tenant: &Tenant, priority: i32, places: u32) -> Entry {
        let deadline = self.now + 1000 * SECOND;
        Entry { model: model(), tenant: tenant.clone(), priority, places, deadline }
    }

    fn enter(&mut self, entry: Entry) -> (Ticket, Vec<Action>) {
        self.tickets += 1;
        let ticket = Ticket(self.tickets);
        (ticket, self.on(Event::Enter(ticket, entry)))
    }

    /// One that is admitted at once.
    fn admitted(&mut self, tenant: &Tenant, priority: i32) -> Ticket {
        let (ticket, actions) = self.enter(self.entry(tenant, priority, 1));
        assert_eq!(actions, [Action::Admit(ticket)]);
        ticket
    }

    /// One that has to wait.
    fn waits(&mut self, tenant: &Tenant, priority: i32) -> Ticket {
        let (ticket, actions) = self.enter(self.entry(tenant, priority, 1));
        assert_eq!(actions, []);
        ticket
    }

    fn refused(&mut self, tenant: &Tenant, priority: i32) -> Refused {
        let (ticket, actions) = self.enter(self.entry(tenant, priority, 1));
        match actions[..] {
            [Action::Refuse(refused, why)] if refused == ticket => why,
            _ => panic!("not refused: {actions:?}"),
        }
    }

    fn ended(&mut self, ticket: Ticket) -> Vec<Action> {
        self.on(Event::Ended(ticket))
    }

    fn held(&self) -> u32 {
        self.admission.standing(&model()).unwrap().classes.iter().map(|class| class.held).sum()
    }
}

#[test]
fn a_free_place_is_given_at_once_and_the_next_one_waits_for_it() {
    let mut line = Line::of(2, limits());
    let first = line.admitted(&Tenant::Unnamed, 0);
    line.admitted(&Tenant::Unnamed, 0);
    let third = line.waits(&Tenant::Unnamed, 0);
    assert_eq!(line.ended(first), [Action::Admit(third)]);
    assert_eq!(line.ended(first), [], "a place is given back once");
    assert_eq!(line.held(), 2);
}

#[test]
fn a_tenant_that_floods_is_refused_with_its_own_bound_and_others_are_not() {
    let mut line = Line::of(1, limits());
    let (a, b) = (named("a"), named("b"));
    line.admitted(&a, 0);
    for _ in 0..10 {
        line.waits(&a, 0);
    }
    let refused = line.refused(&a, 0);
    assert_eq!(refused, Refused::TenantQueueFull { waiting: 10, max: 10, retry_after: SECOND });
    line.waits(&b, 0);
}

#[test]
fn a_full_queue_keeps_its_floors() {
    let mut line = Line::of(1, limits());
    line.admitted(&Tenant::Unnamed, 0);
    // Of 20 places 4 are for interactive requests, 2 for batches.
    for _ in 0..14 {
        line.waits(&Tenant::Unnamed, 0);
    }
    let full = |class, waiting, max| Refused::QueueFull { class, waiting, max, retry_after: SECOND };
    assert_eq!(line.refused(&Tenant::Unnamed, 0), full(Class::Default, 14, 14));
    for _ in 0..2 {
        line.waits(&Tenant::Unnamed, 7);
    }
    assert_eq!(line.refused(&Tenant::Unnamed, 7), full(Class::Batch, 16, 16));
    for _ in 0..4 {
        line.waits(&Tenant::Unnamed, -1);
    }
    assert_eq!(line.refused(&Tenant::Unnamed, -1), full(Class::Interactive, 20, 20));
}

#[test]
fn unnamed_requests_may_fill_the_queue() {
    let mut line = Line::of(1, Limits { interactive_floor: 0, batch_floor: 0, ..limits() });
    line.admitted(&Tenant::Unnamed, 0);
    for _ in 0..20 {
        line.waits(&Tenant::Unnamed, 0);
    }
    assert!(matches!(line.refused(&Tenant::Unnamed, 0), Refused::QueueFull { waiting: 20, max: 20, .. }));
}

#[test]
fn a_class_finds_its_floor_free_whatever_the_others_want() {
    let mut line = Line::of(10, limits());
    // Two places are kept for interactive requests.
    for _ in 0..8 {
        line.admitted(&Tenant::Unnamed, 1);
    }
    line.waits(&Tenant::Unnamed, 1);
    line.waits(&Tenant::Unnamed, 0);
    line.admitted(&Tenant::Unnamed, -1);
    line.admitted(&Tenant::Unnamed, -1);
    line.waits(&Tenant::Unnamed, -1);
    assert_eq!(line.held(), 10);
}

#[test]
fn higher_classes_come_first_and_the_oldest_every_eighth_time() {
    let mut line = Line::of(1, Limits { queue_max: 100, ..limits() });
    let mut holder = line.admitted(&Tenant::Unnamed, 0);
    let batch = line.waits(&Tenant::Unnamed, 1);
    let mut interactive = Vec::new();
    let mut turns = 0;
    loop {
        interactive.push(line.waits(&Tenant::Unnamed, -1));
        let actions = line.ended(holder);
        turns += 1;
        let [Action::Admit(next)] = actions[..] else { panic!("{actions:?}") };
        if next == batch {
            break;
        }
        assert!(interactive.contains(&next));
        holder = next;
    }
    assert!((2..=AGED_EVERY).contains(&turns), "admitted as number {turns}");
}

#[test]
fn places_are_shared_not_admissions() {
    let mut line = Line::of(4, Limits { interactive_floor: 0, batch_floor: 0, ..limits() });
    let (long, short) = (named("long"), named("short"));
    let hogs: Vec<Ticket> = (0..4).map(|_| line.admitted(&long, 0)).collect();
    let more: Vec<Ticket> = (0..6).map(|_| line.waits(&long, 0)).collect();
    let wanted: Vec<Ticket> = (0..6).map(|_| line.waits(&short, 0)).collect();
    // Two of the four places go to the other tenant.
    assert_eq!(line.ended(hogs[0]), [Action::Admit(wanted[0])]);
    assert_eq!(line.ended(hogs[1]), [Action::Admit(wanted[1])]);
    assert_eq!(line.ended(wanted[0]), [Action::Admit(wanted[2])], "its own place again");
    assert_eq!(line.ended(wanted[1]), [Action::Admit(more[0])], "the eighth admission goes by age");
    assert_eq!(line.ended(more[0]), [Action::Admit(wanted[3])]);
}

#[test]
fn a_tenants_own_requests_come_by_priority_then_in_order() {
    let mut line = Line::of(1, limits());
    let mut holder = line.admitted(&Tenant::Unnamed, -1);
    let later = line.waits(&Tenant::Unnamed, -1);
    let last = line.waits(&Tenant::Unnamed, -1);
    let urgent = line.waits(&Tenant::Unnamed, -5);
    for next in [urgent, later, last] {
        assert_eq!(line.ended(holder), [Action::Admit(next)]);
        holder = next;
    }
}

#[test]
fn a_large_request_is_not_passed_by_small_ones() {
    let mut line = Line::of(4, Limits { interactive_floor: 0, batch_floor: 0, ..limits() });
    let small: Vec<Ticket> = (0..4).map(|_| line.admitted(&Tenant::Unnamed, 0)).collect();
    let (large, actions) = line.enter(line.entry(&Tenant::Unnamed, 0, 3));
    assert_eq!(actions, []);
    let after = line.waits(&Tenant::Unnamed, 0);
    assert_eq!(line.ended(small[0]), []);
    assert_eq!(line.ended(small[1]), []);
    assert_eq!(line.ended(small[2]), [Action::Admit(large)]);
    assert_eq!(line.ended(large), [Action::Admit(after)]);
    assert_eq!(line.ended(large), []);
}

#[test]
fn a_request_larger_than_the_fleet_enters_when_everybody_else_has_left() {
    let mut line = Line::of(2, limits());
    let small = line.admitted(&Tenant::Unnamed, 0);
    let (large, actions) = line.enter(line.entry(&Tenant::Unnamed, 0, 5));
    assert_eq!(actions, []);
    assert_eq!(line.ended(small), [Action::Admit(large)]);
    let after = line.waits(&Tenant::Unnamed, 0);
    (0..3).for_each(|_| assert_eq!(line.ended(large), []));
    assert_eq!(line.ended(large), [Action::Admit(after)]);
}

#[test]
fn who_goes_away_frees_its_place_in_the_queue_at_once() {
    let mut line = Line::of(1, limits());
    let a = named("a");
    let holder = line.admitted(&a, 0);
    let queued: Vec<Ticket> = (0..10).map(|_| line.waits(&a, 0)).collect();
    assert!(matches!(line.refused(&a, 0), Refused::TenantQueueFull { .. }));
    assert_eq!(line.on(Event::Leave(queued[0])), []);
    line.waits(&a, 0);
    assert_eq!(line.ended(holder), [Action::Admit(queued[1])], "the one that left is not admitted");
    assert_eq!(line.on(Event::Leave(queued[1])), [], "one that holds a place gives it back when it ends");
    assert_eq!(line.held(), 1);
}

#[test]
fn when_a_large_request_leaves_those_behind_it_come_in() {
    let mut line = Line::of(3, Limits { interactive_floor: 0, batch_floor: 0, ..limits() });
    line.admitted(&Tenant::Unnamed, 0);
    let (large, _) = line.enter(line.entry(&Tenant::Unnamed, 0, 3));
    let after = [line.waits(&Tenant::Unnamed, 0), line.waits(&Tenant::Unnamed, 1)];
    assert_eq!(line.on(Event::Leave(large)), after.map(Action::Admit));
}

#[test]
fn a_deadline_ends_the_wait_and_says_when_it_is_due() {
    let mut line = Line::of(1, limits());
    let holder = line.admitted(&Tenant::Unnamed, 0);
    let soon = Entry { deadline: line.now + SECOND, ..line.entry(&Tenant::Unnamed, 0, 1) };
    let (ticket, actions) = line.enter(soon);
    assert_eq!((actions, line.admission.wake_at()), (vec![], Some(2 * SECOND)));
    line.now += SECOND;
    assert_eq!(line.on(Event::Passed), [Action::Refuse(ticket, Refused::Deadline)]);
    assert_eq!(line.admission.wake_at(), None);
    // Also when a place becomes free before anybody looked at the clock.
    let soon = Entry { deadline: line.now + SECOND, ..line.entry(&Tenant::Unnamed, 0, 1) };
    let (ticket, _) = line.enter(soon.clone());
    line.now += 2 * SECOND;
    assert_eq!(line.ended(holder), [Action::Refuse(ticket, Refused::Deadline)]);
    let (late, actions) = line.enter(soon);
    assert_eq!(actions, [Action::Refuse(late, Refused::Deadline)]);
}

#[test]
fn a_deadline_that_is_noticed_at_anothers_entry_makes_room_at_once() {
    let mut line = Line::of(3, limits());
    line.admitted(&Tenant::Unnamed, 0);
    let soon = Entry { deadline: line.now + SECOND, ..line.entry(&Tenant::Unnamed, 0, 3) };
    let (large, _) = line.enter(soon.clone());
    let small = line.waits(&Tenant::Unnamed, 0);
    line.now += SECOND;
    let (late, actions) = line.enter(soon);
    let refused = |ticket| Action::Refuse(ticket, Refused::Deadline);
    assert_eq!(actions, [refused(large), Action::Admit(small), refused(late)]);
}

#[test]
fn those_who_wait_outlast_a_workers_restart_but_not_its_end() {
    let mut line = Line::of(1, limits());
    let holder = line.admitted(&Tenant::Unnamed, 0);
    let first = line.waits(&Tenant::Unnamed, 0);
    let second = line.waits(&Tenant::Unnamed, 0);
    assert_eq!(line.on(Event::Capacity(model(), 0)), []);
    assert_eq!(line.refused(&Tenant::Unnamed, 0), Refused::NoWorker);
    assert_eq!(line.ended(holder), []);
    line.now += SECOND;
    assert_eq!(line.on(Event::Capacity(model(), 1)), [Action::Admit(first)]);
    assert_eq!(line.on(Event::Capacity(model(), 0)), []);
    let gone = line.now + WORKER_WAIT;
    assert_eq!(line.admission.wake_at(), Some(gone));
    line.now = gone;
    assert_eq!(line.on(Event::Passed), [Action::Refuse(second, Refused::NoWorker)]);
    assert_eq!(line.ended(first), []);
    assert_eq!(line.admission.standing(&model()), None, "a model without workers and guests is forgotten");
}

#[test]
fn a_lost_worker_takes_no_place_from_those_who_have_one() {
    let mut line = Line::of(4, limits());
    let holders: Vec<Ticket> = (0..4).map(|_| line.admitted(&Tenant::Unnamed, 0)).collect();
    let next = line.waits(&Tenant::Unnamed, 0);
    assert_eq!(line.on(Event::Capacity(model(), 2)), []);
    assert_eq!(line.ended(holders[0]), []);
    assert_eq!(line.ended(holders[1]), []);
    assert_eq!(line.ended(holders[2]), [Action::Admit(next)]);
    let more = line.waits(&Tenant::Unnamed, 0);
    assert_eq!(line.on(Event::Capacity(model(), 3)), [Action::Admit(more)], "a new worker helps at once");
}

#[test]
fn the_process_has_a_bound_of_its_own() {
    let mut line = Line::of(2, Limits { streams_max: 5, ..limits() });
    line.admitted(&Tenant::Unnamed, 0);
    let (_, actions) = line.enter(line.entry(&Tenant::Unnamed, 0, 3));
    assert_eq!((actions, line.admission.streams()), (vec![], 4));
    let (ticket, actions) = line.enter(line.entry(&Tenant::Unnamed, 0, 2));
    let full = Refused::StreamsFull { streams: 4, max: 5, retry_after: SECOND };
    assert_eq!(actions, [Action::Refuse(ticket, full)]);
    line.waits(&Tenant::Unnamed, 0);
}

#[test]
fn refusals_follow_the_measured_pace() {
    let mut line = Line::of(1, Limits { queue_max: 4, interactive_floor: 0, batch_floor: 0, ..limits() });
    let mut holder = line.admitted(&Tenant::Unnamed, 0);
    for _ in 0..4 {
        line.waits(&Tenant::Unnamed, 0);
    }
    for _ in 0..30 {
        line.now += 3 * SECOND;
        let actions = line.ended(holder);
        let [Action::Admit(next)] = actions[..] else { panic!("{actions:?}") };
        holder = next;
        line.waits(&Tenant::Unnamed, 0);
    }
    // Four wait, each takes three seconds.
    for seconds in [15, 18, 21] {
        let Refused::QueueFull { retry_after, .. } = line.refused(&Tenant::Unnamed, 0) else { panic!() };
        assert_eq!(retry_after.as_secs(), seconds);
    }
}

#[test]
fn models_do_not_wait_for_each_other() {
    let mut line = Line::of(1, limits());
    let other = ModelKey::numbered(2);
    assert_eq!(line.on(Event::Capacity(other.clone(), 1)), []);
    line.admitted(&Tenant::Unnamed, 0);
    line.waits(&Tenant::Unnamed, 0);
    let (ticket, actions) = line.enter(Entry { model: other, ..line.entry(&Tenant::Unnamed, 0, 1) });
    assert_eq!(actions, [Action::Admit(ticket)]);
    let unknown = ModelKey::numbered(3);
    let (ticket, actions) = line.enter(Entry { model: unknown, ..line.entry(&Tenant::Unnamed, 0, 1) });
    assert_eq!(actions, [Action::Refuse(ticket, Refused::NoWorker)]);
}
