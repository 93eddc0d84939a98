//! Which worker gets the next stream: the least loaded one of those with a free seat, else the least loaded. A plain value;
//! [`crate::fleet`] owns it and feeds it. Choices of one prompt go to one worker while it has seats: it computes and keeps
//! the prompt once for all of them.
//!
//! Load is what this router itself has in flight there, which it knows exactly, plus what others had there by the worker's
//! last report. Ties go to the emptier KV cache, then to the worker that was picked longest ago, so that equal workers
//! take turns.

use std::collections::BTreeMap;
use std::sync::Arc;

/// One incarnation of a worker process: a restarted worker has a new one.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub(crate) struct WorkerId(pub(crate) u64);

/// Workers with equal fingerprints give equal tokens (I5), so a stream may move between them.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub(crate) struct Fingerprint(pub(crate) Vec<u8>);

/// What a request asks for and a worker is there for. The name belongs to it: who loads one content under two names gives
/// each its own workers, with room, queues and an end of their own. The fingerprint does, too: a name that is swapped
/// means two contents for a while.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub(crate) struct ModelKey {
    pub(crate) name: Arc<str>,
    pub(crate) fingerprint: Fingerprint,
}

#[cfg(test)]
impl ModelKey {
    pub(crate) fn numbered(n: u8) -> Self {
        Self { name: n.to_string().into(), fingerprint: Fingerprint(vec![n]) }
    }
}

/// What a worker says about itself, some hundred milliseconds ago.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Report {
    pub(crate) running: u32,
    pub(crate) waiting: u32,
    pub(crate) kv_used_tokens: u64,
    pub(crate) kv_total_tokens: u64,
    /// Counters since the worker's start, for metrics.
    pub(crate) prompt_tokens_computed: u64,
    pub(crate) prompt_tokens_cached: u64,
    pub(crate) preemptions: u64,
    pub(crate) evictions: u64,
    pub(crate) forks: u64,
    pub(crate) late_rows: u64,
    /// Of the KV cache, beside what is used.
    pub(crate) kv_cached_tokens: u64,
    pub(crate) kv_unfilled_tokens: u64,
    pub(crate) kv_mapped_bytes: u64,
    pub(crate) drafted: u64,
    pub(crate) accepted: u64,
}

#[derive(Debug)]
struct Load {
    model: ModelKey,
    /// What it runs at once.
    seats: u32,
    in_flight: u32,
    /// Streams of others at the time of the last report.
    foreign: u32,
    kv_permille: u64,
    picked_at: u64,
}

#[derive(Debug, Default)]
pub(crate) struct Placement {
    workers: BTreeMap<WorkerId, Load>,
    picks: u64,
}

impl Placement {
    pub(crate) fn join(&mut self, worker: WorkerId, model: ModelKey, seats: u32) {
        let load = Load { model, seats, in_flight: 0, foreign: 0, kv_permille: 0, picked_at: 0 };
        self.workers.insert(worker, load);
    }

    /// The worker died or drains: it is picked no more. Streams that still end there are forgotten.
    pub(crate) fn leave(&mut self, worker: WorkerId) {
        self.workers.remove(&worker);
    }

    pub(crate) fn report(&mut self, worker: WorkerId, report: Report) {
        if let Some(load) = self.workers.get_mut(&worker) {
            load.foreign = report.running.saturating_add(report.waiting).saturating_sub(load.in_flight);
            load.kv_permille = match report.kv_total_tokens {
                0 => 0,
                total => report.kv_used_tokens.saturating_mul(1000) / total,
            };
        }
    }

    /// The worker that has `beside` if it has a free seat, else [`Self::least_loaded`]; counts a stream there until
    /// [`Self::end`].
    pub(crate) fn begin(
        &mut self,
        model: &ModelKey,
        tried: &[WorkerId],
        beside: Option<WorkerId>,
    ) -> Option<WorkerId> {
        let serves = |load: &Load| load.model == *model && !load.is_full();
        let beside = beside
            .filter(|id| !tried.contains(id) && self.workers.get(id).is_some_and(serves))
            .or_else(|| self.least_loaded(model, tried))?;
        self.picks += 1;
        let load = self.workers.get_mut(&beside)?;
        load.picked_at = self.picks;
        load.in_flight += 1;
        Some(beside)
    }

    /// Of that model, and not among `tried`.
    pub(crate) fn least_loaded(&self, model: &ModelKey, tried: &[WorkerId]) -> Option<WorkerId> {
        let serving = self.workers.iter().filter(|(_, load)| load.model == *model);
        let untried = serving.filter(|(id, _)| !tried.contains(id));
        untried.min_by_key(|(_, load)| load.rank()).map(|(&id, _)| id)
    }

    pub(crate) fn end(&mut self, worker: WorkerId) {
        if let Some(load) = self.workers.get_mut(&worker) {
            debug_assert!(load.in_flight > 0, "a stream ends once");
            load.in_flight = load.in_flight.saturating_sub(1);
        }
    }

    pub(crate) fn in_flight(&self, worker: WorkerId) -> u32 {
        self.workers.get(&worker).map_or(0, |load| load.in_flight)
    }

    pub(crate) fn serving(&self, model: &ModelKey) -> usize {
        self.workers.values().filter(|load| load.model == *model).count()
    }
}

impl Load {
    fn streams(&self) -> u32 {
        self.in_flight.saturating_add(self.foreign)
    }

    fn is_full(&self) -> bool {
        self.streams() >= self.seats
    }

    /// Less is better.
    fn rank(&self) -> (bool, u32, u64, u64) {
        (self.is_full(), self.streams(), self.kv_permille, self.picked_at)
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    const SEATS: u32 = 4;

    fn model(n: u8) -> ModelKey {
        ModelKey::numbered(n)
    }

    fn fleet(workers: u64) -> Placement {
        let mut placement = Placement::default();
        for id in 0..workers {
            placement.join(WorkerId(id), model(0), SEATS);
        }
        placement
    }

    #[test]
    fn equal_workers_take_turns() {
        let mut placement = fleet(3);
        let picks: Vec<_> = (0..6).map(|_| placement.begin(&model(0), &[], None).unwrap().0).collect();
        assert_eq!(picks, [0, 1, 2, 0, 1, 2]);
    }

    #[test]
    fn a_worker_that_reports_a_queue_is_avoided() {
        let mut placement = fleet(2);
        placement.report(WorkerId(0), Report { running: 1, waiting: 2, ..Report::default() });
        let picks: Vec<_> = (0..4).map(|_| placement.begin(&model(0), &[], None).unwrap().0).collect();
        assert_eq!(picks, [1, 1, 1, 0]);
    }

    #[test]
    fn own_streams_in_a_report_count_once() {
        let mut placement = fleet(2);
        let busy = placement.begin(&model(0), &[], None).unwrap();
        placement.report(busy, Report { running: 1, ..Report::default() });
        placement.end(busy);
        let picks: Vec<_> = (0..2).map(|_| placement.begin(&model(0), &[], None).unwrap()).collect();
        assert!(picks.contains(&busy), "its only stream has ended");
    }

    #[test]
    fn the_emptier_kv_cache_wins_a_tie() {
        let mut placement = fleet(2);
        placement
            .report(WorkerId(0), Report { kv_used_tokens: 900, kv_total_tokens: 1000, ..Report::default() });
        placement
            .report(WorkerId(1), Report { kv_used_tokens: 100, kv_total_tokens: 1000, ..Report::default() });
        assert_eq!(placement.begin(&model(0), &[], None), Some(WorkerId(1)));
    }

    #[test]
    fn choices_stay_together_while_their_worker_has_seats() {
        let mut placement = fleet(3);
        let first = placement.begin(&model(0), &[], None).unwrap();
        let mut beside = |tried: &[_]| placement.begin(&model(0), tried, Some(first)).unwrap();
        assert_eq!([beside(&[]), beside(&[]), beside(&[])], [first; 3]);
        let (fifth, sixth) = (beside(&[]), beside(&[]));
        assert!(
            fifth != first && sixth != first && fifth != sixth,
            "its four seats are taken: {fifth:?}, {sixth:?}"
        );
        placement.end(first);
        assert_ne!(placement.begin(&model(0), &[first], Some(first)), Some(first), "it has refused");
        assert_eq!(placement.begin(&model(0), &[], Some(first)), Some(first));
        placement.leave(first);
        assert!(placement.begin(&model(0), &[], Some(first)).is_some_and(|next| next != first));
    }

    #[test]
    fn a_free_seat_comes_before_fewer_streams() {
        let mut placement = Placement::default();
        placement.join(WorkerId(0), model(0), 1);
        placement.join(WorkerId(1), model(0), 8);
        placement.report(WorkerId(1), Report { running: 3, ..Report::default() });
        let picks: Vec<_> = (0..3).map(|_| placement.begin(&model(0), &[], None).unwrap().0).collect();
        assert_eq!(picks, [0, 1, 1]);
    }

    #[test]
    fn a_stream_never_goes_to_another_model_or_a_tried_worker() {
        let mut placement = fleet(2);
        placement.join(WorkerId(9), model(9), SEATS);
        assert_eq!(placement.begin(&model(9), &[], None), Some(WorkerId(9)));
        assert_eq!(placement.begin(&model(9), &[WorkerId(9)], None), None);
        assert_eq!(placement.begin(&model(0), &[WorkerId(0)], None), Some(WorkerId(1)));
        assert_eq!(placement.begin(&model(5), &[], None), None);
        let renamed = ModelKey { name: "another".into(), ..model(0) };
        assert_eq!(placement.begin(&renamed, &[], None), None, "of equal content");
    }

    #[test]
    fn a_worker_that_left_is_picked_no_more_and_its_streams_may_still_end() {
        let mut placement = fleet(2);
        let first = placement.begin(&model(0), &[], None).unwrap();
        placement.leave(first);
        placement.end(first);
        assert_eq!(placement.begin(&model(0), &[], None), Some(WorkerId(1)));
        assert_eq!(placement.serving(&model(0)), 1);
    }

    proptest! {
        /// Whatever ends when: nobody has two streams more than another equal worker at the moment of a pick.
        #[test]
        fn streams_are_spread_evenly(workers in 1u64..6, ends in proptest::collection::vec(any::<u16>(), 1..80)) {
            let mut placement = fleet(workers);
            let mut running = Vec::new();
            for end in ends {
                let least = (0..workers).map(|id| placement.in_flight(WorkerId(id))).min().unwrap();
                let picked = placement.begin(&model(0), &[], None).unwrap();
                prop_assert_eq!(placement.in_flight(picked), least + 1);
                running.push(picked);
                if end % 3 == 0 {
                    placement.end(running.swap_remove(usize::from(end) % running.len()));
                }
            }
            let total: u32 = (0..workers).map(|id| placement.in_flight(WorkerId(id))).sum();
            prop_assert_eq!(total as usize, running.len());
        }
    }
}
