// SPDX-License-Identifier: Apache-2.0

//! Routing policy: chooses the worker for the next stream. A plain value, which [`crate::registry`]
//! owns and keeps up to date. [`RoutingMode`] names the rules that apply, [`choice`] has them:
//!
//! 1. Only workers of the request's model are candidates.
//! 2. Choices of one prompt go to the same worker while it has free capacity, because that worker
//!    computes and stores the prompt once for all of them.
//! 3. Packed routing: on a device, the worker with the most streams comes first, as long as it has
//!    room ([`worker_load`]). A step reads the weights once for all its rows, so one worker with 32
//!    streams is faster than four workers with 8 each. The other workers are warm standbys. One
//!    that has [`PREFIX_GAIN_TOKENS`] more of the prompt in its prefix cache comes first.
//! 4. Prefix-aware routing: of the workers, or of the devices if they are packed, the one with the
//!    least cost comes first. The cost counts the tokens that the worker would have to compute and
//!    those that its streams compute. A worker gets no stream for the sake of its cache if it has
//!    more streams than the others beyond a slack.
//! 5. Least-loaded routing: a worker with free capacity comes before a full one, then the worker
//!    with fewer streams, then the one with the emptier KV cache, then the one chosen longest ago.
//!    So equal workers take turns. Power of two does this for two random workers.
//! 6. A stream that is to be spread goes away from others of this kind, whatever the mode is.
//!    Several workers died with it ([`crate::quarantine`]), so it goes where the streams saw the
//!    fewest deaths, and then to the fewest streams.
//!
//! Streams are those of this router, which are known exactly, plus streams of other clients as of
//! the worker's last report.

use std::collections::BTreeMap;
use std::num::NonZeroU32;
use std::sync::{Arc, LazyLock};
use std::time::Duration;

mod choice;
mod mode;
mod placed_prompts;
#[cfg(test)]
mod prefix_simulation;
#[cfg(test)]
mod prefix_tests;
mod prompt_prefix;
mod session;
#[cfg(test)]
mod simulation;
mod stored_blocks;
#[cfg(test)]
mod tests;
mod worker_load;
mod worker_prefixes;

pub use choice::RoutingReason;
pub use mode::RoutingMode;
pub use prompt_prefix::{PrefixHash, PromptPrefix};
pub use session::SessionKey;
pub use stored_blocks::KvCacheChange;
use worker_load::{StreamShare, WorkerLoad};
pub use worker_prefixes::KvEventFeed;

/// A worker beside the packed one is chosen for this much more cached prompt. A second worker at
/// work slows the first one down for the whole life of the stream, and a prompt of this length
/// takes some 70 ms (8B Q4_K_M on an H200).
const PREFIX_GAIN_TOKENS: u64 = 1024;
/// How long the router believes what no event confirms. Dynamo's router takes the same time.
const ESTIMATE_AGE_MAX: Duration = Duration::from_secs(120);

/// Time since the router's start.
pub type RouterTime = Duration;

/// One run of a worker process. A restarted worker has a new id.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct WorkerId(pub u64);

/// Workers with equal fingerprints generate equal tokens (I5), so a stream may move between them.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct WorkerFingerprint(pub Vec<u8>);

/// What a request asks for and a worker serves.
///
/// The name is part of the key: a file loaded under two names has workers, queues and a lifetime
/// for each name. The fingerprint is part of it too: while a model is swapped, one name stands for
/// two contents.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct ModelKey {
    pub name: Arc<str>,
    pub fingerprint: WorkerFingerprint,
}

#[cfg(test)]
impl ModelKey {
    pub fn numbered(n: u8) -> Self {
        Self { name: n.to_string().into(), fingerprint: WorkerFingerprint(vec![n]) }
    }
}

/// Load of a worker as of its last report, some hundred milliseconds old.
#[derive(Clone, Copy, Debug, Default)]
pub struct WorkerReport {
    pub running: u32,
    pub waiting: u32,
    /// Counter of steps since the worker's start.
    pub steps: u64,
    pub kv_used_tokens: u64,
    pub kv_total_tokens: u64,
    /// Counters since the worker's start, for metrics.
    pub prompt_tokens_computed: u64,
    pub prompt_tokens_cached: u64,
    pub preemptions: u64,
    pub evictions: u64,
    pub forks: u64,
    pub deferred_logits: u64,
    pub log_lines_lost: u64,
    pub trace_spans_dropped: u64,
    /// KV cache gauges, for metrics.
    pub kv_cached_tokens: u64,
    pub kv_unfilled_tokens: u64,
    pub kv_mapped_bytes: u64,
    pub draft_tokens: u64,
    pub accepted_draft_tokens: u64,
}

/// What stays constant of a worker.
#[derive(Clone, Debug)]
pub struct WorkerProfile {
    /// A restarted worker has the same name.
    pub name: Arc<str>,
    pub model: ModelKey,
    /// "host", or the UUID of a GPU.
    pub device: Arc<str>,
    /// Sequences that the worker runs at once.
    pub running_max: u32,
    /// Size of the KV cache. 0: unknown.
    pub kv_tokens: u64,
}

/// What a stream needs from its worker.
#[derive(Clone, Copy, Debug)]
pub struct StreamDemand<'a> {
    pub model: &'a ModelKey,
    /// The prompt, and the output so far of a resumed stream.
    pub input_tokens: u64,
    /// Maximum number of further tokens.
    pub output_tokens_max: u64,
    pub prefix: &'a PromptPrefix,
    /// What the client says belongs together.
    pub session: Option<SessionKey>,
    /// Number of workers that died with the content, if the stream is to be spread.
    pub spread_by_deaths: Option<NonZeroU32>,
}

impl<'a> StreamDemand<'a> {
    /// A call that takes no KV cache.
    pub fn none(model: &'a ModelKey) -> Self {
        static NO_PROMPT: LazyLock<PromptPrefix> = LazyLock::new(PromptPrefix::default);
        Self {
            model,
            input_tokens: 0,
            output_tokens_max: 0,
            prefix: &NO_PROMPT,
            session: None,
            spread_by_deaths: None,
        }
    }
}

/// A stream that counts at its worker until [`RoutingPolicy::end_stream`].
#[derive(Debug, PartialEq, Eq)]
pub struct StreamPlacement {
    pub worker: WorkerId,
    pub reason: RoutingReason,
    /// Tokens of the prompt that the worker is expected to have cached.
    pub cached_tokens: u64,
    /// Number of the placement.
    number: u64,
    share: StreamShare,
    spread_by_deaths: Option<NonZeroU32>,
}

impl StreamPlacement {
    /// False from [`RoutingPolicy::end_prefill`] on.
    pub fn is_in_prefill(&self) -> bool {
        self.share.prefill_tokens > 0
    }
}

#[derive(Debug, Default)]
pub struct RoutingPolicy {
    mode: RoutingMode,
    workers: BTreeMap<WorkerId, WorkerLoad>,
    /// Number of choices so far.
    choices: u64,
}

impl RoutingPolicy {
    pub fn new(mode: RoutingMode) -> Self {
        Self { mode, ..Self::default() }
    }

    pub fn add_worker(&mut self, worker: WorkerId, profile: WorkerProfile, now: RouterTime) {
        self.workers.insert(worker, WorkerLoad::new(profile, now));
    }

    /// The worker died or drains: no stream goes there. The policy forgets the streams that run
    /// there.
    pub fn remove_worker(&mut self, worker: WorkerId) {
        self.workers.remove(&worker);
    }

    pub fn update_load(&mut self, worker: WorkerId, report: WorkerReport, now: RouterTime) {
        if let Some(load) = self.workers.get_mut(&worker) {
            load.update(&report, now);
        }
    }

    /// Applies changes of the worker's prefix cache, in order.
    pub fn apply_kv_changes(&mut self, worker: WorkerId, changes: &[KvCacheChange]) {
        if let Some(load) = self.workers.get_mut(&worker) {
            load.prefixes.apply(changes);
        }
    }

    /// Notes whether the changes so far are all that the worker has made.
    pub fn set_kv_feed(&mut self, worker: WorkerId, feed: KvEventFeed) {
        if let Some(load) = self.workers.get_mut(&worker) {
            load.prefixes.set_feed(feed);
        }
    }

    /// Chooses a worker that is not among `tried` and counts a stream there until
    /// [`Self::end_stream`]. `preferred` is chosen if it has free capacity.
    pub fn place_stream(
        &mut self,
        demand: &StreamDemand<'_>,
        tried: &[WorkerId],
        preferred: Option<WorkerId>,
        now: RouterTime,
    ) -> Option<StreamPlacement> {
        let has_capacity = |load: &WorkerLoad| load.profile.model == *demand.model && !load.is_full();
        let (worker, reason) = preferred
            .filter(|id| !tried.contains(id) && self.workers.get(id).is_some_and(has_capacity))
            .map(|id| (id, RoutingReason::SamePrompt))
            .or_else(|| self.choose(demand, tried, now))?;
        self.choices += 1;
        let load = self.workers.get_mut(&worker)?;
        load.last_chosen = self.choices;
        let cached_tokens = load.cached_tokens(demand, now);
        let share = load.add_stream(demand, cached_tokens, self.choices, now);
        Some(StreamPlacement {
            worker,
            reason,
            cached_tokens,
            number: self.choices,
            share,
            spread_by_deaths: demand.spread_by_deaths,
        })
    }

    /// The worker that [`Self::place_stream`] would choose.
    pub fn choose_worker(
        &self,
        demand: &StreamDemand<'_>,
        tried: &[WorkerId],
        now: RouterTime,
    ) -> Option<WorkerId> {
        Some(self.choose(demand, tried, now)?.0)
    }

    /// The stream has its first token: the worker has computed the input. Idempotent.
    pub fn end_prefill(&mut self, placement: &mut StreamPlacement) {
        let prefill_tokens = std::mem::take(&mut placement.share.prefill_tokens);
        if let Some(load) = self.workers.get_mut(&placement.worker) {
            load.end_prefill(prefill_tokens);
        }
    }

    /// Ends a stream on its worker. Does nothing if the worker was removed.
    pub fn end_stream(&mut self, mut placement: StreamPlacement, now: RouterTime) {
        let is_computed = !placement.is_in_prefill();
        self.end_prefill(&mut placement);
        if let Some(load) = self.workers.get_mut(&placement.worker) {
            load.end_stream(placement.share, placement.spread_by_deaths);
            load.prefixes.end_stream(placement.number, is_computed, now);
        }
    }

    /// Bytes that the router keeps about the worker's prefix cache, and whether its events arrive.
    pub fn prefix_index(&self, worker: WorkerId) -> (u64, bool) {
        let prefixes = self.workers.get(&worker).map(|load| &load.prefixes);
        prefixes.map_or((0, false), |prefixes| (prefixes.bytes(), prefixes.is_live()))
    }

    /// Streams of this router on `worker`.
    pub fn own_streams(&self, worker: WorkerId) -> u32 {
        self.workers.get(&worker).map_or(0, |load| load.own_streams)
    }

    /// Number of workers that serve the model.
    pub fn worker_count(&self, model: &ModelKey) -> usize {
        self.workers.values().filter(|load| load.profile.model == *model).count()
    }
}
