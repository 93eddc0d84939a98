// SPDX-License-Identifier: Apache-2.0

//! The engine's scheduling with doubles of admission control, waiting queue and scheduler.

#[path = "../../src/schedule/budget.rs"]
pub(crate) mod budget;
#[path = "../../src/schedule/integrity.rs"]
pub(crate) mod integrity;
#[path = "../../src/schedule/admission.rs"]
pub(crate) mod real_admission;
#[path = "../../src/schedule/scheduler.rs"]
pub(crate) mod real_scheduler;
#[path = "../../src/schedule/waiting_queue.rs"]
pub(crate) mod real_waiting_queue;
#[path = "../../src/schedule/sequence.rs"]
pub(crate) mod sequence;
#[path = "../../src/schedule/sequence_id.rs"]
pub(crate) mod sequence_id;
#[path = "../../src/schedule/step_plan.rs"]
pub(crate) mod step_plan;

/// The double of `engine::schedule::admission`.
pub(crate) mod admission {
    use crate::schedule::real_admission;
    pub(crate) use crate::schedule::real_admission::{QueueFullError, QueueLimits};
    use crate::{Bug, is, now_and_then};
    use std::time::Duration;

    /// A tenant without requests.
    const OTHER: u64 = u64::MAX;

    #[derive(Debug)]
    pub struct AdmissionControl(real_admission::AdmissionControl);

    fn leaver(tenant: u64) -> u64 {
        if is(Bug::TenantLeak) && now_and_then(100) { OTHER } else { tenant }
    }

    impl AdmissionControl {
        pub fn new(bounds: QueueLimits) -> Self {
            Self(real_admission::AdmissionControl::new(bounds))
        }

        pub fn capacity_for(&self, priority: i32) -> usize {
            self.0.capacity_for(priority)
        }

        pub fn try_enter(&mut self, priority: i32, tenant: u64) -> Result<(), QueueFullError> {
            self.0.try_enter(priority, tenant)
        }

        pub fn leave(&mut self, tenant: u64) {
            self.0.leave(leaver(tenant));
        }

        pub fn admitted(&mut self, tenant: u64, now: Duration) {
            self.0.admitted(leaver(tenant), now);
        }

        pub fn waiting(&self) -> usize {
            self.0.waiting()
        }
    }
}

/// The double of `engine::schedule::scheduler`.
pub(crate) mod scheduler {
    use crate::kv::group::KvGroupKind;
    use crate::schedule::real_scheduler;
    use crate::schedule::sequence_id::SequenceId;
    use crate::schedule::step_plan::SchedulerLimits;
    use crate::{Bug, is, now_and_then};
    use std::ops::{Deref, DerefMut};

    #[derive(Debug)]
    pub struct Scheduler(real_scheduler::Scheduler);

    impl Scheduler {
        pub fn with_groups(limits: SchedulerLimits, blocks: usize, groups: Vec<KvGroupKind>) -> Self {
            Self(real_scheduler::Scheduler::with_groups(limits, blocks, groups))
        }

        pub fn accept_draft(&mut self, sequence_id: SequenceId, position: usize, token: u32) -> bool {
            let drawn =
                self.sequence(sequence_id).and_then(|sequence| sequence.tokens().get(position).copied());
            // Takes another token for the sampled one, so that a row of a different text is
            // accepted.
            let wrong = drawn.filter(|&drawn| drawn != token && is(Bug::OneDraftTooMany) && now_and_then(20));
            self.0.accept_draft(sequence_id, position, wrong.unwrap_or(token))
        }
    }

    impl Deref for Scheduler {
        type Target = real_scheduler::Scheduler;

        fn deref(&self) -> &Self::Target {
            &self.0
        }
    }

    impl DerefMut for Scheduler {
        fn deref_mut(&mut self) -> &mut Self::Target {
            &mut self.0
        }
    }
}

/// The double of `engine::schedule::waiting_queue`.
pub(crate) mod waiting_queue {
    use crate::schedule::real_waiting_queue;
    pub(crate) use crate::schedule::real_waiting_queue::{
        NextSequence, OLDEST_FIRST_EVERY, QueueIntegrityError, ServiceRank,
    };
    use crate::schedule::sequence_id::SequenceId;
    use crate::{Bug, is, now_and_then};

    #[derive(Debug, Default)]
    pub struct WaitingQueue(real_waiting_queue::WaitingQueue);

    impl WaitingQueue {
        pub fn len(&self) -> usize {
            self.0.len()
        }

        pub fn is_empty(&self) -> bool {
            self.0.is_empty()
        }

        pub fn rank(&mut self, priority: i32, tenant: u64, cost: u64) -> ServiceRank {
            self.0.rank(priority, tenant, cost)
        }

        pub fn rank_behind(&mut self, rank: ServiceRank) -> ServiceRank {
            self.0.rank_behind(rank)
        }

        pub fn enter(&mut self, rank: ServiceRank, sequence_id: SequenceId) {
            self.0.enter(rank, sequence_id);
        }

        pub fn leave(&mut self, rank: ServiceRank) {
            self.0.leave(rank);
        }

        pub fn at(&self, rank: ServiceRank) -> Option<SequenceId> {
            self.0.at(rank)
        }

        pub fn ahead(&self, rank: ServiceRank) -> usize {
            self.0.ahead(rank)
        }

        pub fn check_integrity(&self) -> Result<(), QueueIntegrityError> {
            self.0.check_integrity()
        }

        pub fn next(&self, skipped: Option<ServiceRank>) -> Option<NextSequence> {
            let first = self.0.next(skipped)?;
            let second = || self.0.next(Some(first.rank));
            let overtakes = is(Bug::Overtakes) && now_and_then(20);
            Some(if overtakes { second().unwrap_or(first) } else { first })
        }

        pub fn admit(&mut self, next: NextSequence) -> ServiceRank {
            let rank = self.0.admit(next);
            if is(Bug::LostPlace) && !next.is_oldest_turn { self.0.rank(0, 0, 1) } else { rank }
        }
    }
}
