// SPDX-License-Identifier: Apache-2.0

//! The bounds that the module documentation of the waiting queue states.

use engine::schedule::sequence_id::SequenceId;
use engine::schedule::waiting_queue::{OLDEST_FIRST_EVERY, ServiceRank, WaitingQueue};
use proptest::prelude::*;
use std::collections::{HashMap, HashSet};

#[derive(Default)]
struct QueueHarness {
    queue: WaitingQueue,
    /// Tenant, priority, cost, arrival.
    live: HashMap<SequenceId, (u64, i32, u64, u64)>,
    ranks: HashMap<SequenceId, ServiceRank>,
    arrivals: u64,
}

struct Admitted {
    sequence_id: SequenceId,
    tenant: u64,
    priority: i32,
    cost: u64,
    is_oldest_turn: bool,
}

impl QueueHarness {
    fn arrive(&mut self, tenant: u64, priority: i32, cost: u64) -> SequenceId {
        let sequence_id = SequenceId(self.arrivals as u32);
        self.arrivals += 1;
        let rank = self.queue.rank(priority, tenant, cost);
        self.queue.enter(rank, sequence_id);
        self.ranks.insert(sequence_id, rank);
        self.live.insert(sequence_id, (tenant, priority, cost, self.arrivals));
        sequence_id
    }

    fn leave(&mut self, sequence_id: SequenceId) {
        self.live.remove(&sequence_id);
        self.queue.leave(self.ranks[&sequence_id]);
    }

    fn admit(&mut self) -> Option<Admitted> {
        let next = self.queue.next(None)?;
        self.queue.admit(next);
        let (tenant, priority, cost, _) = self.live.remove(&next.sequence_id).unwrap();
        Some(Admitted {
            sequence_id: next.sequence_id,
            tenant,
            priority,
            cost,
            is_oldest_turn: next.is_oldest_turn,
        })
    }
}

#[test]
fn a_burst_of_one_tenant_does_not_hold_up_another() {
    let mut harness = QueueHarness::default();
    for _ in 0..50 {
        harness.arrive(1, 0, 100);
    }
    harness.admit();
    harness.admit();
    let other = harness.arrive(2, 0, 100);
    // One request of the burst has the same tag and arrived before.
    let places = (1..).find(|_| harness.admit().unwrap().sequence_id == other).unwrap();
    assert!(places <= 2, "admitted as number {places}");
}

#[test]
fn the_lowest_priority_is_admitted_in_the_end() {
    let mut harness = QueueHarness::default();
    let low = harness.arrive(1, 100, 1);
    let places = (1..).find(|_| {
        harness.arrive(2, -100, 1);
        harness.admit().unwrap().sequence_id == low
    });
    assert_eq!(places, Some(OLDEST_FIRST_EVERY));
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(300))]

    #[test]
    fn tenants_that_always_wait_get_equal_work(
        tenants in 2..6_u64,
        // By tenant: its requests are all small, all large, or mixed.
        largest in prop::collection::vec(prop_oneof![Just(1_u64), Just(200), 1..200_u64], 6),
        shares in prop::collection::vec(any::<prop::sample::Index>(), 40..300),
    ) {
        let mut harness = QueueHarness::default();
        let (mut work, mut aged) = ([0_u64; 6], [0_u64; 6]);
        let mut waiting = [0; 6];
        let mut costs = shares.iter().cycle();
        for _ in 0..shares.len() {
            for tenant in 0..tenants as usize {
                // Always at least one, sometimes many.
                let many = 1 + costs.next().unwrap().index(4);
                while waiting[tenant] < many {
                    let cost = 1 + costs.next().unwrap().index(largest[tenant] as usize) as u64;
                    harness.arrive(tenant as u64, 0, cost);
                    waiting[tenant] += 1;
                }
            }
            let Admitted { tenant, cost, is_oldest_turn, .. } = harness.admit().unwrap();
            let tenant = tenant as usize;
            waiting[tenant] -= 1;
            work[tenant] += cost;
            aged[tenant] += if is_oldest_turn { cost } else { 0 };
            for ahead in 0..tenants as usize {
                for behind in (0..tenants as usize).filter(|&behind| behind != ahead) {
                    let most = largest[ahead] + aged[ahead];
                    let lead = work[ahead].saturating_sub(work[behind]);
                    prop_assert!(lead <= most, "{ahead} is {lead} before {behind}, at most {most} is stated");
                }
            }
        }
    }

    #[test]
    fn a_first_request_is_passed_by_one_of_each_other_tenant(
        events in prop::collection::vec(
            (0..6_u64, -1..2_i32, prop_oneof![Just(1_u64), 1..300_u64], 0..4_u8),
            1..400,
        ),
    ) {
        let mut harness = QueueHarness::default();
        let mut seen = HashSet::new();
        // Waiting sequences that are the first of their tenant: how often each other tenant
        // overtook them.
        let mut firsts: HashMap<SequenceId, (u64, i32, HashMap<u64, u32>)> = HashMap::new();
        let mut strangers = 100;
        for (tenant, priority, cost, then) in events {
            let tenant = if tenant == 5 { strangers += 1; strangers } else { tenant };
            let sequence_id = harness.arrive(tenant, priority, cost);
            if seen.insert((tenant, priority)) {
                firsts.insert(sequence_id, (tenant, priority, HashMap::new()));
            }
            if then == 3 {
                // A client cancels.
                let gone = *harness.live.keys().min().unwrap();
                harness.leave(gone);
                firsts.remove(&gone);
            }
            for _ in 0..then {
                let Some(Admitted { sequence_id, tenant, priority, is_oldest_turn, .. }) = harness.admit() else { break };
                firsts.remove(&sequence_id);
                for (of, class, passed) in firsts.values_mut() {
                    if *of != tenant && *class == priority && !is_oldest_turn {
                        let times = passed.entry(tenant).or_default();
                        *times += 1;
                        prop_assert!(*times <= 1, "tenant {tenant} passes twice");
                    }
                }
            }
        }
    }

    #[test]
    fn no_sequence_is_overtaken_more_often_than_stated(
        events in prop::collection::vec((0..4_u64, -2..3_i32, 1..300_u64, any::<bool>()), 1..300),
    ) {
        let mut harness = QueueHarness::default();
        let mut bounds: HashMap<SequenceId, (u32, u32)> = HashMap::new();
        for (tenant, priority, cost, admit) in events {
            let older = harness.live.len() as u32;
            let sequence_id = harness.arrive(tenant, priority, cost);
            bounds.insert(sequence_id, (0, OLDEST_FIRST_EVERY * (older + 1)));
            if admit {
                let admitted = harness.admit().unwrap().sequence_id;
                for (passed, most) in bounds.values_mut() {
                    *passed += 1;
                    prop_assert!(passed <= most);
                }
                bounds.remove(&admitted);
            }
        }
    }
}
