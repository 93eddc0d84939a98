//! Who may queue: bounds of the queue as a whole, of each tenant in it, and of each class of priority; and when a refused
//! one should come back. A plain value; counts those who wait for their first admission.

use std::collections::HashMap;
use std::time::Duration;

use pace::{Outside, Pace};

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Bounds {
    /// Most requests that wait when one of ordinary priority (0) comes.
    pub queue_max: usize,
    /// Most of one tenant.
    pub tenant_queue_max: usize,
}

/// Places, in eighths of `queue_max`, that requests of lower priority (above 0) may fill, and those of higher priority: what
/// the class behind may not fill is the floor of each.
const LOW_EIGHTHS: usize = 7;
const HIGH_EIGHTHS: usize = 9;

/// Most of one tenant, in eighths of the queue.
const TENANT_EIGHTHS: usize = 6;

impl Bounds {
    pub fn of_queue(queue_max: usize) -> Self {
        Self { queue_max, tenant_queue_max: eighths(queue_max, TENANT_EIGHTHS) }
    }

    /// Most requests of any priority that may wait when one of this priority comes.
    pub fn places(&self, priority: i32) -> usize {
        match priority {
            ..0 => eighths(self.queue_max, HIGH_EIGHTHS),
            0 => self.queue_max,
            1.. => eighths(self.queue_max, LOW_EIGHTHS),
        }
    }
}

/// At least one.
fn eighths(whole: usize, parts: usize) -> usize {
    (whole * parts).div_ceil(8).max(1)
}

/// Why nobody can be queued now.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Full {
    pub waiting: usize,
    pub max: usize,
    /// The bound is the tenant's own.
    pub of_tenant: bool,
    pub retry_after: Duration,
}

#[derive(Debug)]
pub struct Admission {
    bounds: Bounds,
    waiting: usize,
    tenants: HashMap<u64, Own>,
    /// Of the last step.
    now: Duration,
    /// The first step that somebody has waited for since the queue was empty.
    since: Option<Duration>,
    pace: Pace,
}

#[derive(Debug, Default)]
struct Own {
    waiting: usize,
    outside: Outside,
}

impl Admission {
    pub fn new(bounds: Bounds) -> Self {
        let pace = Pace::default();
        Self { bounds, waiting: 0, tenants: HashMap::new(), now: Duration::ZERO, since: None, pace }
    }

    /// Most requests of any priority that may wait when one of this priority comes.
    pub fn places(&self, priority: i32) -> usize {
        self.bounds.places(priority)
    }

    /// Takes a place in the queue.
    pub fn enter(&mut self, priority: i32, tenant: u64) -> Result<(), Full> {
        let (waiting, max) = (self.waiting, self.places(priority));
        if waiting >= max {
            let retry_after = self.pace.promise(self.now, waiting as u32, 1);
            return Err(Full { waiting, max, of_tenant: false, retry_after });
        }
        let share = self.tenants.len() as u32;
        let own = self.tenants.entry(tenant).or_default();
        let (waiting, max) = (own.waiting, self.bounds.tenant_queue_max);
        // Those who do not say whose they are share the queue as one.
        if tenant != 0 && waiting >= max {
            let ahead = waiting as u32;
            let retry_after = self.pace.promise_to(&mut own.outside, self.now, ahead, 1, share);
            return Err(Full { waiting, max, of_tenant: true, retry_after });
        }
        own.waiting += 1;
        self.waiting += 1;
        Ok(())
    }

    /// Gone without having been admitted.
    pub fn leave(&mut self, tenant: u64) {
        debug_assert!(self.waiting > 0);
        self.waiting -= 1;
        if let Some(own) = self.tenants.get_mut(&tenant) {
            own.waiting -= 1;
            if own.waiting == 0 {
                self.tenants.remove(&tenant);
            }
        }
        self.passed(self.now);
    }

    /// To be told at the begin of each step: a queue in which nobody waits says nothing of the pace.
    pub fn passed(&mut self, now: Duration) {
        self.now = now;
        match self.waiting {
            0 => self.since = None,
            _ => self.since = self.since.or(Some(now)),
        }
        self.pace.waiting(now, self.waiting > 0);
    }

    /// Holds blocks from now on.
    pub fn admitted(&mut self, tenant: u64, now: Duration) {
        // Who comes in with its first step has waited for nobody.
        if self.since.is_some_and(|since| since < now) {
            self.pace.freed(now);
        }
        self.leave(tenant);
    }

    pub fn waiting(&self) -> usize {
        self.waiting
    }

    pub fn waiting_of(&self, tenant: u64) -> usize {
        self.tenants.get(&tenant).map_or(0, |own| own.waiting)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn admission() -> Admission {
        Admission::new(Bounds { queue_max: 16, tenant_queue_max: 10 })
    }

    #[test]
    fn each_class_leaves_a_floor_to_those_before_it() {
        let mut admission = admission();
        (0..14).for_each(|tenant| admission.enter(1, tenant).unwrap());
        let low = admission.enter(1, 99).unwrap_err();
        assert_eq!((low.waiting, low.max, low.of_tenant), (14, 14, false));
        (14..16).for_each(|tenant| admission.enter(0, tenant).unwrap());
        assert_eq!(admission.enter(0, 99).unwrap_err().max, 16);
        (16..18).for_each(|tenant| admission.enter(-1, tenant).unwrap());
        assert_eq!(admission.enter(-1, 99).unwrap_err().max, 18);
    }

    #[test]
    fn a_tenant_cannot_fill_the_queue() {
        let mut admission = admission();
        (0..10).for_each(|_| admission.enter(0, 7).unwrap());
        let full = admission.enter(0, 7).unwrap_err();
        assert_eq!((full.waiting, full.max, full.of_tenant), (10, 10, true));
        admission.enter(0, 8).unwrap();
        admission.leave(7);
        admission.enter(0, 7).unwrap();
    }

    /// A queue of two that always wait; one gets in every four seconds, from second 4 to second 80.
    fn measured() -> Admission {
        let mut admission = Admission::new(Bounds { queue_max: 2, tenant_queue_max: 2 });
        (0..2).for_each(|_| admission.enter(0, 2).unwrap());
        assert_eq!(admission.enter(0, 1).unwrap_err().retry_after.as_secs(), 1, "nothing is known yet");
        admission.passed(Duration::ZERO);
        (1..=20).for_each(|k| one_gets_in(&mut admission, 4 * k));
        admission
    }

    fn one_gets_in(admission: &mut Admission, second: u64) {
        let now = Duration::from_secs(second);
        admission.passed(now);
        admission.admitted(2, now);
        admission.enter(0, 2).unwrap();
    }

    fn told(admission: &mut Admission) -> u64 {
        admission.enter(0, 1).unwrap_err().retry_after.as_secs()
    }

    #[test]
    fn the_refused_are_told_times_one_after_the_other_at_the_pace_of_late() {
        let mut admission = measured();
        assert_eq!([told(&mut admission), told(&mut admission), told(&mut admission)], [12, 16, 20]);
        one_gets_in(&mut admission, 84);
        assert_eq!(told(&mut admission), 20, "behind those of before, who are four seconds nearer");
        (0..100).for_each(|_| _ = told(&mut admission));
        assert_eq!(told(&mut admission), 60);
    }

    #[test]
    fn idle_times_say_nothing_of_the_pace() {
        let mut admission = measured();
        // Both leave, an hour passes, and those who come then find room in their first step.
        let later = |second: u64| Duration::from_secs(3600 + second);
        (0..2).for_each(|_| admission.leave(2));
        for second in 0..50 {
            admission.enter(0, 2).unwrap();
            admission.passed(later(second));
            admission.admitted(2, later(second));
        }
        (0..2).for_each(|_| admission.enter(0, 2).unwrap());
        admission.passed(later(50));
        assert_eq!(told(&mut admission), 12, "as before that hour");
    }

    #[test]
    fn promises_are_forgotten_when_their_time_has_passed() {
        let mut admission = measured();
        (0..100).for_each(|_| _ = told(&mut admission));
        (21..=40).for_each(|k| one_gets_in(&mut admission, 4 * k));
        assert_eq!(told(&mut admission), 12, "those who were refused had their turn, or have gone");
    }

    #[test]
    fn a_tenant_at_its_own_bound_is_told_its_own_time() {
        let mut admission = Admission::new(Bounds { queue_max: 9, tenant_queue_max: 2 });
        (0..2).for_each(|_| admission.enter(0, 2).unwrap());
        admission.enter(0, 3).unwrap();
        admission.passed(Duration::ZERO);
        (1..=20).for_each(|k| one_gets_in(&mut admission, 4 * k));
        let full = admission.enter(0, 2).unwrap_err();
        assert_eq!((full.of_tenant, full.retry_after.as_secs()), (true, 24), "every second place is its own");
    }
}
