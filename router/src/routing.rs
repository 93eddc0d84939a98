// SPDX-License-Identifier: Apache-2.0

//! Routing policy: chooses the worker for the next stream. A plain value, which [`crate::registry`]
//! owns and keeps up to date.
//!
//! 1. Only workers of the request's model are candidates.
//! 2. A worker with free capacity comes before a full one.
//! 3. Then the worker with fewer streams comes first: streams of this router, which are known
//!    exactly, plus streams of other clients as of the worker's last report.
//! 4. Then the worker with the emptier KV cache, then the one chosen longest ago. So equal workers
//!    take turns.
//! 5. Choices of one prompt go to the same worker while it has free capacity, because that worker
//!    computes and stores the prompt once for all of them.

use std::collections::BTreeMap;
use std::sync::Arc;

/// One run of a worker process. A restarted worker has a new id.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub(crate) struct WorkerId(pub(crate) u64);

/// Workers with equal fingerprints generate equal tokens (I5), so a stream may move between them.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub(crate) struct WorkerFingerprint(pub(crate) Vec<u8>);

/// What a request asks for and a worker serves.
///
/// The name is part of the key: a file loaded under two names has workers, queues and a lifetime
/// for each name. The fingerprint is part of it too: while a model is swapped, one name stands for
/// two contents.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub(crate) struct ModelKey {
    pub(crate) name: Arc<str>,
    pub(crate) fingerprint: WorkerFingerprint,
}

#[cfg(test)]
impl ModelKey {
    pub(crate) fn numbered(n: u8) -> Self {
        Self { name: n.to_string().into(), fingerprint: WorkerFingerprint(vec![n]) }
    }
}

/// Load of a worker as of its last report, some hundred milliseconds old.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct WorkerReport {
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
    pub(crate) deferred_logits: u64,
    /// KV cache gauges, for metrics.
    pub(crate) kv_cached_tokens: u64,
    pub(crate) kv_unfilled_tokens: u64,
    pub(crate) kv_mapped_bytes: u64,
    pub(crate) draft_tokens: u64,
    pub(crate) accepted_draft_tokens: u64,
}

#[derive(Debug)]
struct WorkerLoad {
    model: ModelKey,
    /// Sequences that the worker runs at once.
    running_max: u32,
    /// Streams of this router.
    own_streams: u32,
    /// Streams of other clients as of the last report.
    other_streams: u32,
    kv_used_permille: u64,
    /// Number of the choice that last chose this worker.
    last_chosen: u64,
}

#[derive(Debug, Default)]
pub(crate) struct RoutingPolicy {
    workers: BTreeMap<WorkerId, WorkerLoad>,
    /// Number of choices so far.
    choices: u64,
}

impl RoutingPolicy {
    pub(crate) fn add_worker(&mut self, worker: WorkerId, model: ModelKey, running_max: u32) {
        let load = WorkerLoad {
            model,
            running_max,
            own_streams: 0,
            other_streams: 0,
            kv_used_permille: 0,
            last_chosen: 0,
        };
        self.workers.insert(worker, load);
    }

    /// The worker died or drains: no stream goes there. The policy forgets the streams that run
    /// there.
    pub(crate) fn remove_worker(&mut self, worker: WorkerId) {
        self.workers.remove(&worker);
    }

    pub(crate) fn update_load(&mut self, worker: WorkerId, report: WorkerReport) {
        if let Some(load) = self.workers.get_mut(&worker) {
            let streams = report.running.saturating_add(report.waiting);
            load.other_streams = streams.saturating_sub(load.own_streams);
            load.kv_used_permille = match report.kv_total_tokens {
                0 => 0,
                total => report.kv_used_tokens.saturating_mul(1000) / total,
            };
        }
    }

    /// Chooses a worker that is not among `tried` and counts a stream there until
    /// [`Self::end_stream`]. `preferred` is chosen if it has free capacity.
    pub(crate) fn place_stream(
        &mut self,
        model: &ModelKey,
        tried: &[WorkerId],
        preferred: Option<WorkerId>,
    ) -> Option<WorkerId> {
        let has_capacity = |load: &WorkerLoad| load.model == *model && !load.is_full();
        let worker = preferred
            .filter(|id| !tried.contains(id) && self.workers.get(id).is_some_and(has_capacity))
            .or_else(|| self.least_loaded(model, tried))?;
        self.choices += 1;
        let load = self.workers.get_mut(&worker)?;
        load.last_chosen = self.choices;
        load.own_streams += 1;
        Some(worker)
    }

    /// The least loaded worker of the model that is not among `tried`.
    pub(crate) fn least_loaded(&self, model: &ModelKey, tried: &[WorkerId]) -> Option<WorkerId> {
        let candidates = self.workers.iter().filter(|(_, load)| load.model == *model);
        let untried = candidates.filter(|(id, _)| !tried.contains(id));
        untried.min_by_key(|(_, load)| load.order()).map(|(&id, _)| id)
    }

    /// Ends a stream on `worker`. Does nothing if the worker was removed.
    pub(crate) fn end_stream(&mut self, worker: WorkerId) {
        if let Some(load) = self.workers.get_mut(&worker) {
            assert!(load.own_streams > 0, "every stream that was placed ends once");
            load.own_streams -= 1;
        }
    }

    /// Streams of this router on `worker`.
    pub(crate) fn own_streams(&self, worker: WorkerId) -> u32 {
        self.workers.get(&worker).map_or(0, |load| load.own_streams)
    }

    /// Number of workers that serve the model.
    pub(crate) fn worker_count(&self, model: &ModelKey) -> usize {
        self.workers.values().filter(|load| load.model == *model).count()
    }
}

impl WorkerLoad {
    fn streams(&self) -> u32 {
        self.own_streams.saturating_add(self.other_streams)
    }

    fn is_full(&self) -> bool {
        self.streams() >= self.running_max
    }

    /// The worker with the smallest value is chosen.
    fn order(&self) -> (bool, u32, u64, u64) {
        (self.is_full(), self.streams(), self.kv_used_permille, self.last_chosen)
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    const RUNNING_MAX: u32 = 4;

    fn model(n: u8) -> ModelKey {
        ModelKey::numbered(n)
    }

    fn policy_with(workers: u64) -> RoutingPolicy {
        let mut policy = RoutingPolicy::default();
        for id in 0..workers {
            policy.add_worker(WorkerId(id), model(0), RUNNING_MAX);
        }
        policy
    }

    #[test]
    fn equal_workers_take_turns() {
        let mut policy = policy_with(3);
        let chosen: Vec<_> = (0..6).map(|_| policy.place_stream(&model(0), &[], None).unwrap().0).collect();
        assert_eq!(chosen, [0, 1, 2, 0, 1, 2]);
    }

    #[test]
    fn a_worker_that_reports_a_queue_is_avoided() {
        let mut policy = policy_with(2);
        policy.update_load(WorkerId(0), WorkerReport { running: 1, waiting: 2, ..WorkerReport::default() });
        let chosen: Vec<_> = (0..4).map(|_| policy.place_stream(&model(0), &[], None).unwrap().0).collect();
        assert_eq!(chosen, [1, 1, 1, 0]);
    }

    #[test]
    fn own_streams_in_a_report_count_once() {
        let mut policy = policy_with(2);
        let busy = policy.place_stream(&model(0), &[], None).unwrap();
        policy.update_load(busy, WorkerReport { running: 1, ..WorkerReport::default() });
        policy.end_stream(busy);
        let chosen: Vec<_> = (0..2).map(|_| policy.place_stream(&model(0), &[], None).unwrap()).collect();
        assert!(chosen.contains(&busy), "its only stream has ended");
    }

    #[test]
    fn the_emptier_kv_cache_breaks_a_tie() {
        let mut policy = policy_with(2);
        let report = |kv_used_tokens| WorkerReport {
            kv_used_tokens,
            kv_total_tokens: 1000,
            ..WorkerReport::default()
        };
        policy.update_load(WorkerId(0), report(900));
        policy.update_load(WorkerId(1), report(100));
        assert_eq!(policy.place_stream(&model(0), &[], None), Some(WorkerId(1)));
    }

    #[test]
    fn choices_of_a_prompt_stay_on_one_worker_while_it_has_capacity() {
        let mut policy = policy_with(3);
        let first = policy.place_stream(&model(0), &[], None).unwrap();
        let mut place_preferred = |tried: &[_]| policy.place_stream(&model(0), tried, Some(first)).unwrap();
        assert_eq!([place_preferred(&[]), place_preferred(&[]), place_preferred(&[])], [first; 3]);
        let (fifth, sixth) = (place_preferred(&[]), place_preferred(&[]));
        assert!(
            fifth != first && sixth != first && fifth != sixth,
            "the first worker runs four sequences: {fifth:?}, {sixth:?}"
        );
        policy.end_stream(first);
        assert_ne!(policy.place_stream(&model(0), &[first], Some(first)), Some(first), "it has refused");
        assert_eq!(policy.place_stream(&model(0), &[], Some(first)), Some(first));
        policy.remove_worker(first);
        assert!(policy.place_stream(&model(0), &[], Some(first)).is_some_and(|next| next != first));
    }

    #[test]
    fn free_capacity_comes_before_fewer_streams() {
        let mut policy = RoutingPolicy::default();
        policy.add_worker(WorkerId(0), model(0), 1);
        policy.add_worker(WorkerId(1), model(0), 8);
        policy.update_load(WorkerId(1), WorkerReport { running: 3, ..WorkerReport::default() });
        let chosen: Vec<_> = (0..3).map(|_| policy.place_stream(&model(0), &[], None).unwrap().0).collect();
        assert_eq!(chosen, [0, 1, 1]);
    }

    #[test]
    fn a_stream_never_goes_to_another_model_or_a_tried_worker() {
        let mut policy = policy_with(2);
        policy.add_worker(WorkerId(9), model(9), RUNNING_MAX);
        assert_eq!(policy.place_stream(&model(9), &[], None), Some(WorkerId(9)));
        assert_eq!(policy.place_stream(&model(9), &[WorkerId(9)], None), None);
        assert_eq!(policy.place_stream(&model(0), &[WorkerId(0)], None), Some(WorkerId(1)));
        assert_eq!(policy.place_stream(&model(5), &[], None), None);
        let renamed = ModelKey { name: "another".into(), ..model(0) };
        assert_eq!(policy.place_stream(&renamed, &[], None), None, "equal content under another name");
    }

    #[test]
    fn a_removed_worker_is_not_chosen_and_its_streams_may_still_end() {
        let mut policy = policy_with(2);
        let first = policy.place_stream(&model(0), &[], None).unwrap();
        policy.remove_worker(first);
        policy.end_stream(first);
        assert_eq!(policy.place_stream(&model(0), &[], None), Some(WorkerId(1)));
        assert_eq!(policy.worker_count(&model(0)), 1);
    }

    proptest! {
        /// A stream always goes to a worker with the fewest streams, whichever streams end.
        #[test]
        fn streams_are_spread_evenly(
            workers in 1u64..6,
            ends in proptest::collection::vec(any::<u16>(), 1..80),
        ) {
            let mut policy = policy_with(workers);
            let mut running = Vec::new();
            for end in ends {
                let fewest = (0..workers).map(|id| policy.own_streams(WorkerId(id))).min().unwrap();
                let chosen = policy.place_stream(&model(0), &[], None).unwrap();
                prop_assert_eq!(policy.own_streams(chosen), fewest + 1);
                running.push(chosen);
                if end % 3 == 0 {
                    policy.end_stream(running.swap_remove(usize::from(end) % running.len()));
                }
            }
            let total: u32 = (0..workers).map(|id| policy.own_streams(WorkerId(id))).sum();
            prop_assert_eq!(total as usize, running.len());
        }
    }
}
