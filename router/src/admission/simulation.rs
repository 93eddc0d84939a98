//! Random clients, classes, tenants, deadlines and worker losses against the policy, beside a plain account of who should be
//! where. A failure prints its seed.

use std::collections::BTreeMap;

use proptest::prelude::*;

use super::tests::named;
use super::*;

const STEPS_OF_A_SEED: u64 = 2_000;

/// SplitMix64.
struct Dice(u64);

impl Dice {
    fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut z = self.0;
        z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        z ^ (z >> 31)
    }

    fn below(&mut self, bound: u64) -> u64 {
        self.next() % bound
    }

    fn one_in(&mut self, n: u64) -> bool {
        self.below(n) == 0
    }
}

#[derive(Clone, Debug)]
struct Waiting {
    entry: Entry,
    /// How many admissions to its model may come before its own, but for those out of a floor.
    passes_left: u32,
    /// Of a tenant that held nothing.
    rivals: Option<Rivals>,
}

/// Those who may be admitted before a tenant that holds no place.
#[derive(Clone, Copy, Debug, Default)]
struct Rivals {
    /// Other tenants of its class that waited when it came.
    tenants: u32,
    /// Admissions since: of its class, and of all.
    of_class: u32,
    of_all: u32,
}

/// What the policy should know.
struct Account {
    limits: Limits,
    admission: Admission,
    now: Time,
    tickets: u64,
    capacity: BTreeMap<ModelKey, u32>,
    waiting: BTreeMap<Ticket, Waiting>,
    /// Places that are left of each.
    holding: BTreeMap<Ticket, (Entry, u32)>,
    admitted: u64,
    refused: u64,
}

fn class_of(entry: &Entry) -> Class {
    Class::of_priority(entry.priority)
}

impl Account {
    fn new(limits: Limits) -> Self {
        Self {
            limits,
            admission: Admission::new(limits),
            now: Duration::ZERO,
            tickets: 0,
            capacity: BTreeMap::new(),
            waiting: BTreeMap::new(),
            holding: BTreeMap::new(),
            admitted: 0,
            refused: 0,
        }
    }

    fn held(&self, model: &ModelKey, class: Option<Class>) -> u32 {
        let of = |entry: &Entry| entry.model == *model && class.is_none_or(|class| class_of(entry) == class);
        self.holding.values().filter(|(entry, _)| of(entry)).map(|(_, places)| places).sum()
    }

    fn floor(&self, class: Class, whole: u32) -> u32 {
        match class {
            Class::Interactive => whole * self.limits.interactive_floor / 100,
            Class::Default => 0,
            Class::Batch => whole * self.limits.batch_floor / 100,
        }
    }

    /// Places that other classes leave free for themselves.
    fn reserved_by_others(&self, model: &ModelKey, class: Class) -> u32 {
        let others = Class::ALL.into_iter().filter(|&other| other != class);
        let unused =
            |other| self.floor(other, self.capacity[model]).saturating_sub(self.held(model, Some(other)));
        others.map(unused).sum()
    }

    fn on(&mut self, event: Event) {
        let entered = match &event {
            Event::Enter(ticket, entry) => {
                let waiting = Waiting { entry: entry.clone(), passes_left: u32::MAX, rivals: None };
                self.waiting.insert(*ticket, waiting);
                Some(*ticket)
            }
            Event::Leave(ticket) => {
                self.waiting.remove(ticket);
                None
            }
            Event::Ended(ticket) => {
                if let Some((_, places)) = self.holding.get_mut(ticket) {
                    *places -= 1;
                    if *places == 0 {
                        self.holding.remove(ticket);
                    }
                }
                None
            }
            Event::Capacity(model, places) => {
                self.capacity.insert(model.clone(), *places);
                None
            }
            Event::Passed => None,
        };
        for action in self.admission.on(self.now, event.clone()) {
            match action {
                Action::Admit(ticket) => self.was_admitted(ticket),
                Action::Refuse(ticket, why) => self.was_refused(ticket, why, entered),
            }
        }
        // Whom its coming has let in stood before it: it is passed from now on.
        if let Some((ticket, waiting)) = entered.and_then(|ticket| self.waiting.remove_entry(&ticket)) {
            self.came(ticket, waiting.entry);
        }
        self.check(&event);
    }

    fn came(&mut self, ticket: Ticket, entry: Entry) {
        let older = self.waiting.values().filter(|other| other.entry.model == entry.model);
        let same_class = |other: &Entry| other.model == entry.model && class_of(other) == class_of(&entry);
        let own = |other: &Entry| same_class(other) && other.tenant == entry.tenant;
        let first = !self.waiting.values().any(|other| own(&other.entry))
            && !self.holding.values().any(|(other, _)| own(other));
        let rivals = self.waiting.values().filter(|other| same_class(&other.entry));
        let rivals: std::collections::BTreeSet<&Tenant> = rivals.map(|other| &other.entry.tenant).collect();
        let waiting = Waiting {
            passes_left: AGED_EVERY * (older.count() as u32 + 1),
            rivals: first.then_some(Rivals { tenants: rivals.len() as u32, ..Rivals::default() }),
            entry,
        };
        self.waiting.insert(ticket, waiting);
    }

    fn was_admitted(&mut self, ticket: Ticket) {
        let Waiting { entry, .. } = self.waiting.remove(&ticket).expect("only those who wait are admitted");
        let (model, class, capacity) = (&entry.model, class_of(&entry), self.capacity[&entry.model]);
        assert!(entry.deadline > self.now, "admitted after its deadline");
        let floors: u32 =
            Class::ALL.into_iter().filter(|&c| c != class).map(|c| self.floor(c, capacity)).sum();
        let places = entry.places.min(capacity - floors);
        let free = capacity.saturating_sub(self.held(model, None));
        assert!(places <= free, "{places} places admitted, {free} were free");
        let own = self.held(model, Some(class)) + places <= self.floor(class, capacity);
        if !own {
            let reserved = self.reserved_by_others(model, class);
            assert!(places + reserved <= free, "floors of {reserved} places were broken");
        }
        for other in self.waiting.values_mut().filter(|other| other.entry.model == *model) {
            if other.entry.tenant == entry.tenant {
                // Its tenant has had a turn.
                other.rivals = None;
            }
            if !own {
                assert!(other.passes_left > 1, "{other:?} was passed too often");
                other.passes_left -= 1;
            }
            if let Some(rivals) = &mut other.rivals {
                rivals.of_all += 1;
                rivals.of_class += u32::from(class_of(&other.entry) == class);
                let by_age = rivals.of_all / AGED_EVERY + 1;
                let most = rivals.tenants + by_age;
                assert!(rivals.of_class <= most, "{other:?} was passed by more than its rivals");
            }
        }
        self.holding.insert(ticket, (entry.clone(), entry.places));
        self.admitted += 1;
    }

    fn was_refused(&mut self, ticket: Ticket, why: Refused, entered: Option<Ticket>) {
        let Waiting { entry, .. } = self.waiting.remove(&ticket).expect("only those who wait are refused");
        let in_line = |model: &ModelKey| self.waiting.values().filter(|w| w.entry.model == *model).count();
        match why {
            Refused::Deadline => assert!(entry.deadline <= self.now),
            Refused::NoWorker => {
                assert_eq!(self.capacity.get(&entry.model).copied().unwrap_or(0), 0)
            }
            Refused::QueueFull { waiting, max, retry_after, class } => {
                assert_eq!((Some(ticket), class), (entered, class_of(&entry)));
                assert!(waiting >= max && max <= self.limits.queue_max);
                assert_eq!(waiting as usize, in_line(&entry.model));
                assert!((1..=60).contains(&retry_after.as_secs()));
            }
            Refused::TenantQueueFull { waiting, max, retry_after } => {
                assert_eq!(Some(ticket), entered);
                assert_ne!(entry.tenant, Tenant::Unnamed);
                assert_eq!((waiting, max), (self.limits.tenant_queue_max, self.limits.tenant_queue_max));
                assert!((1..=60).contains(&retry_after.as_secs()));
            }
            Refused::StreamsFull { streams, max, .. } => assert!(streams + entry.places > max),
        }
        self.refused += 1;
    }

    fn check(&self, event: &Event) {
        let held: u32 = self.holding.values().map(|(_, places)| places).sum();
        let wanted: u32 = self.waiting.values().map(|waiting| waiting.entry.places).sum();
        assert_eq!(self.admission.streams(), held + wanted);
        assert!(held + wanted <= self.limits.streams_max);
        for (model, &capacity) in &self.capacity {
            let in_line: Vec<&Waiting> = self.waiting.values().filter(|w| w.entry.model == *model).collect();
            assert!(in_line.len() as u32 <= self.limits.queue_max);
            let Some(standing) = self.admission.standing(model) else {
                assert!(capacity == 0 && in_line.is_empty() && self.held(model, None) == 0);
                continue;
            };
            let mut tenants: BTreeMap<&Tenant, u32> = BTreeMap::new();
            for (class, standing) in Class::ALL.into_iter().zip(standing.classes) {
                let of_class: Vec<_> = in_line.iter().filter(|w| class_of(&w.entry) == class).collect();
                assert_eq!(standing.waiting as usize, of_class.len());
                assert_eq!(standing.held, self.held(model, Some(class)));
                of_class.iter().for_each(|w| *tenants.entry(&w.entry.tenant).or_default() += 1);
                // Nobody waits for a place that is free, unless for more than one.
                if capacity > 0 && in_line.iter().all(|w| w.entry.places == 1) && !of_class.is_empty() {
                    let free = capacity.saturating_sub(self.held(model, None));
                    assert!(free <= self.reserved_by_others(model, class), "{class:?} could be admitted");
                    assert!(free == 0 || standing.held >= self.floor(class, capacity), "{class:?}'s floor");
                }
            }
            assert!(capacity == 0 || self.held(model, None) > 0 || in_line.is_empty(), "an idle fleet");
            for (tenant, waiting) in tenants {
                assert!(*tenant == Tenant::Unnamed || waiting <= self.limits.tenant_queue_max);
            }
        }
        if matches!(event, Event::Passed) {
            assert!(self.waiting.values().all(|waiting| waiting.entry.deadline > self.now));
            assert!(self.admission.wake_at().is_none_or(|at| at > self.now));
        }
        let first = self.waiting.values().map(|waiting| waiting.entry.deadline).min();
        assert!(first.is_none_or(|first| self.admission.wake_at().is_some_and(|at| at <= first)));
    }

    fn any_holding(&self, dice: &mut Dice) -> Option<Ticket> {
        let at = dice.below(self.holding.len().max(1) as u64) as usize;
        self.holding.keys().nth(at).copied()
    }

    fn any_waiting(&self, dice: &mut Dice) -> Option<Ticket> {
        let at = dice.below(self.waiting.len().max(1) as u64) as usize;
        self.waiting.keys().nth(at).copied()
    }
}

/// Returns how many were admitted, and how many refused.
fn run(seed: u64, steps: u64) -> (u64, u64) {
    let mut dice = Dice(seed);
    let queue_max = 1 + dice.below(40) as u32;
    let limits = Limits {
        streams_max: 20 + dice.below(200) as u32,
        queue_max,
        tenant_queue_max: 1 + dice.below(u64::from(queue_max)) as u32,
        interactive_floor: dice.below(46) as u32,
        batch_floor: dice.below(46) as u32,
    };
    let models = [ModelKey::numbered(0), ModelKey::numbered(1)];
    let tenants: Vec<Tenant> = (0..1 + dice.below(6))
        .map(|n| if n == 0 { Tenant::Unnamed } else { named(&n.to_string()) })
        .collect();
    let large = dice.one_in(2);
    let arrivals = 30 + dice.below(40);
    let mut account = Account::new(limits);
    for _ in 0..steps {
        account.now += Duration::from_millis(dice.below(300));
        let model = models[dice.below(2) as usize].clone();
        let roll = dice.below(100);
        let event = if roll < arrivals {
            account.tickets += 1;
            let patience_ms = if dice.one_in(3) { 4_000 } else { 60_000 };
            let entry = Entry {
                model,
                // The first ones flood.
                tenant: tenants[dice.below(1 + dice.0 % tenants.len() as u64) as usize].clone(),
                priority: dice.below(5) as i32 - 2,
                places: if large && dice.one_in(8) { 1 + dice.below(12) as u32 } else { 1 },
                deadline: account.now + Duration::from_millis(dice.below(patience_ms)),
            };
            Event::Enter(Ticket(account.tickets), entry)
        } else if roll < arrivals + 3 {
            let Some(ticket) = account.any_waiting(&mut dice) else { continue };
            Event::Leave(ticket)
        } else if roll < arrivals + 5 {
            let places = if dice.one_in(4) { 0 } else { dice.below(20) as u32 };
            Event::Capacity(model, places)
        } else if roll < arrivals + 8 {
            Event::Passed
        } else {
            let Some(ticket) = account.any_holding(&mut dice) else { continue };
            Event::Ended(ticket)
        };
        account.on(event);
    }
    // Everybody goes: nothing is left.
    for model in &models {
        account.on(Event::Capacity(model.clone(), 0));
    }
    account.now += WORKER_WAIT;
    account.on(Event::Passed);
    assert!(account.waiting.is_empty());
    while let Some(ticket) = account.any_holding(&mut dice) {
        account.on(Event::Ended(ticket));
    }
    assert!(account.admission.lines.is_empty() && account.admission.tickets.is_empty());
    (account.admitted, account.refused)
}

fn storm(seeds: std::ops::Range<u64>) {
    let steps = (seeds.end - seeds.start) * STEPS_OF_A_SEED;
    let (mut admitted, mut refused) = (0, 0);
    for seed in seeds {
        let outcome = std::panic::catch_unwind(|| run(seed, STEPS_OF_A_SEED));
        let (in_this, out_of_this) = outcome.unwrap_or_else(|_| panic!("seed {seed} broke an invariant"));
        admitted += in_this;
        refused += out_of_this;
    }
    assert!(admitted > steps / 20 && refused > steps / 20, "{admitted} admitted, {refused} refused");
}

#[test]
fn a_storm_breaks_no_invariant() {
    storm(0..500);
}

#[test]
#[ignore = "nightly"]
fn nightly_a_hundred_million_events_break_no_invariant() {
    storm(1_000_000..1_050_000);
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(200))]

    /// Whatever one tenant has done before: another one's first request is admitted with the third place that becomes
    /// free, at the latest. (One may go to the first tenant if that holds no place either, one by age.)
    #[test]
    fn a_flood_does_not_hold_up_another_tenant(
        capacity in 1u32..20,
        flood in 1u32..100,
        ended in prop::collection::vec(any::<prop::sample::Index>(), 0..60),
    ) {
        let limits = Limits {
            streams_max: 1000, queue_max: 200, tenant_queue_max: 150, interactive_floor: 0, batch_floor: 0,
        };
        let mut account = Account::new(limits);
        let model = ModelKey::numbered(0);
        account.on(Event::Capacity(model.clone(), capacity));
        let enter = |account: &mut Account, tenant: &str| {
            account.tickets += 1;
            let ticket = Ticket(account.tickets);
            let deadline = Duration::from_secs(600);
            account.on(Event::Enter(ticket, Entry {
                model: model.clone(), tenant: named(tenant), priority: 0, places: 1, deadline,
            }));
            ticket
        };
        for _ in 0..capacity + flood {
            enter(&mut account, "flood");
        }
        for index in ended {
            account.now += Duration::from_millis(10);
            let holders: Vec<Ticket> = account.holding.keys().copied().collect();
            account.on(Event::Ended(*index.get(&holders)));
            enter(&mut account, "flood");
        }
        let other = enter(&mut account, "other");
        for _ in 0..3 {
            let Some(holder) = account.holding.keys().copied().find(|&ticket| ticket != other) else { break };
            account.on(Event::Ended(holder));
        }
        prop_assert!(account.holding.contains_key(&other));
    }
}
