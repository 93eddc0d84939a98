//! Who may queue: bounds of the queue as a whole, of each tenant in it, and of each class of priority; and when a refused
//! one should come back. A plain value; counts those who wait for their first admission.

use std::collections::HashMap;
use std::time::Duration;

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

/// What a refused caller is told at least and at most.
const RETRY_MIN: Duration = Duration::from_secs(1);
const RETRY_MAX: Duration = Duration::from_secs(60);
/// Weight of the newest gap between admissions in their mean.
const GAP_WEIGHT: f64 = 0.1;

impl Bounds {
    pub fn of_queue(queue_max: usize) -> Self {
        Self { queue_max, tenant_queue_max: eighths(queue_max, TENANT_EIGHTHS) }
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
    tenants: HashMap<u64, usize>,
    /// Mean seconds between two that leave the queue.
    gap: Option<f64>,
    last: Duration,
    /// Refused ones that have been promised one of the next places.
    promised: u32,
}

impl Admission {
    pub fn new(bounds: Bounds) -> Self {
        Self { bounds, waiting: 0, tenants: HashMap::new(), gap: None, last: Duration::ZERO, promised: 0 }
    }

    /// Most requests of any priority that may wait when one of this priority comes.
    pub fn places(&self, priority: i32) -> usize {
        let max = self.bounds.queue_max;
        match priority {
            ..0 => eighths(max, HIGH_EIGHTHS),
            0 => max,
            1.. => eighths(max, LOW_EIGHTHS),
        }
    }

    /// Takes a place in the queue.
    pub fn enter(&mut self, priority: i32, tenant: u64) -> Result<(), Full> {
        let places = self.places(priority);
        let own = self.tenants.get(&tenant).copied().unwrap_or(0);
        let (waiting, max, of_tenant) = match self.waiting >= places {
            true => (self.waiting, places, false),
            // Those who do not say whose they are share the queue as one.
            false if tenant == 0 => (0, self.bounds.queue_max, true),
            false => (own, self.bounds.tenant_queue_max, true),
        };
        if waiting >= max {
            return Err(Full { waiting, max, of_tenant, retry_after: self.promise() });
        }
        self.waiting += 1;
        *self.tenants.entry(tenant).or_default() += 1;
        Ok(())
    }

    /// Gone without having been admitted.
    pub fn leave(&mut self, tenant: u64) {
        debug_assert!(self.waiting > 0);
        self.waiting -= 1;
        if let Some(own) = self.tenants.get_mut(&tenant) {
            *own -= 1;
            if *own == 0 {
                self.tenants.remove(&tenant);
            }
        }
    }

    /// Holds blocks from now on.
    pub fn admitted(&mut self, tenant: u64, now: Duration) {
        self.leave(tenant);
        let gap = now.saturating_sub(self.last).as_secs_f64();
        self.gap = Some(self.gap.map_or(gap, |mean| mean + GAP_WEIGHT * (gap - mean)));
        self.last = now;
        self.promised = self.promised.saturating_sub(1);
    }

    pub fn waiting(&self) -> usize {
        self.waiting
    }

    /// Each refused one is promised a place of its own among those that will be free, at the pace of late.
    fn promise(&mut self) -> Duration {
        self.promised = self.promised.saturating_add(1);
        let seconds = self.gap.unwrap_or(0.0) * f64::from(self.promised);
        Duration::try_from_secs_f64(seconds).unwrap_or(RETRY_MAX).clamp(RETRY_MIN, RETRY_MAX)
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

    #[test]
    fn the_refused_are_told_times_one_after_the_other_at_the_pace_of_late() {
        let mut admission = Admission::new(Bounds { queue_max: 1, tenant_queue_max: 1 });
        assert!(admission.enter(0, 2).is_ok());
        assert_eq!(admission.enter(0, 1).unwrap_err().retry_after, RETRY_MIN, "nothing is known yet");
        admission.admitted(2, Duration::from_secs(4));
        for k in 2..12 {
            assert!(admission.enter(0, 2).is_ok());
            admission.admitted(2, Duration::from_secs(4 * k));
        }
        assert!(admission.enter(0, 2).is_ok());
        let told: Vec<u64> =
            (0..3).map(|_| admission.enter(0, 1).unwrap_err().retry_after.as_secs()).collect();
        assert_eq!(told, [4, 8, 12]);
        admission.admitted(2, Duration::from_secs(48));
        assert!(admission.enter(0, 2).is_ok());
        assert_eq!(admission.enter(0, 1).unwrap_err().retry_after.as_secs(), 12, "one place has been given");
        (0..100).for_each(|_| assert!(admission.enter(0, 1).is_err()));
        assert_eq!(admission.enter(0, 1).unwrap_err().retry_after, RETRY_MAX);
    }
}
