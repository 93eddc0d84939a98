//! The bounds that the queue's head states.

#![expect(clippy::unwrap_used, reason = "a panic is how a test fails")]

use engine::queue::{AGED_EVERY, Passed, Queue};
use engine::scheduler::Slot;
use proptest::prelude::*;
use std::collections::HashMap;

#[derive(Default)]
struct Line {
    queue: Queue,
    /// Tenant, priority, cost, arrival.
    live: HashMap<Slot, (u64, i32, u64, u64)>,
    arrivals: u64,
}

impl Line {
    fn arrive(&mut self, tenant: u64, priority: i32, cost: u64) -> Slot {
        let slot = Slot(self.arrivals as u32);
        self.arrivals += 1;
        let rank = self.queue.rank(priority, tenant, cost);
        self.queue.enter(rank, slot);
        self.live.insert(slot, (tenant, priority, cost, self.arrivals));
        slot
    }

    fn admit(&mut self) -> Option<(Slot, u64, u64)> {
        let next = self.queue.next(Passed::default())?;
        self.queue.admit(next);
        let (tenant, _, cost, _) = self.live.remove(&next.slot).unwrap();
        Some((next.slot, tenant, cost))
    }
}

#[test]
fn a_burst_of_one_tenant_does_not_hold_up_another() {
    let mut line = Line::default();
    for _ in 0..50 {
        line.arrive(1, 0, 100);
    }
    line.admit();
    line.admit();
    let other = line.arrive(2, 0, 100);
    // One of the burst has the same tag and came before.
    let places = (1..).find(|_| line.admit().unwrap().0 == other).unwrap();
    assert!(places <= 2, "admitted as number {places}");
}

#[test]
fn the_lowest_priority_is_admitted_in_the_end() {
    let mut line = Line::default();
    let low = line.arrive(1, 100, 1);
    let places = (1..).find(|_| {
        line.arrive(2, -100, 1);
        line.admit().unwrap().0 == low
    });
    assert_eq!(places, Some(AGED_EVERY));
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(300))]

    #[test]
    fn tenants_that_always_wait_get_equal_work(
        tenants in 2..6_u64,
        costs in prop::collection::vec(1..200_u64, 40..200),
    ) {
        let mut line = Line::default();
        let (mut work, mut largest) = (HashMap::new(), 0);
        let mut waiting: HashMap<u64, usize> = HashMap::new();
        for (index, &cost) in costs.iter().enumerate() {
            // Each tenant has two waiting, always.
            for tenant in 0..tenants {
                while waiting.get(&tenant).is_none_or(|&count| count < 2) {
                    line.arrive(tenant, 0, cost);
                    largest = largest.max(cost);
                    *waiting.entry(tenant).or_default() += 1;
                }
            }
            let (_, tenant, cost) = line.admit().unwrap();
            *waiting.get_mut(&tenant).unwrap() -= 1;
            // Every eighth admission goes by age: it is counted for its tenant all the same.
            *work.entry(tenant).or_insert(0_u64) += cost;
            let served = (0..tenants).map(|tenant| work.get(&tenant).copied().unwrap_or(0));
            let (least, most) = (served.clone().min().unwrap(), served.max().unwrap());
            if index as u64 > 2 * tenants {
                prop_assert!(most - least <= 4 * largest, "{least} and {most}, largest {largest}");
            }
        }
    }

    #[test]
    fn nobody_is_passed_more_often_than_stated(
        events in prop::collection::vec((0..4_u64, -2..3_i32, 1..300_u64, any::<bool>()), 1..300),
    ) {
        let mut line = Line::default();
        let mut bounds: HashMap<Slot, (u32, u32)> = HashMap::new();
        for (tenant, priority, cost, admit) in events {
            let older = line.live.len() as u32;
            let slot = line.arrive(tenant, priority, cost);
            bounds.insert(slot, (0, AGED_EVERY * (older + 1)));
            if admit {
                let (admitted, ..) = line.admit().unwrap();
                for (passed, most) in bounds.values_mut() {
                    *passed += 1;
                    prop_assert!(passed <= most);
                }
                bounds.remove(&admitted);
            }
        }
    }
}
