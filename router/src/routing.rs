// SPDX-License-Identifier: Apache-2.0

//! Routing policy: chooses the worker for the next stream. A plain value, which [`crate::registry`]
//! owns and keeps up to date.
//!
//! 1. Only workers of the request's model are candidates.
//! 2. Choices of one prompt go to the same worker while it has free capacity, because that worker
//!    computes and stores the prompt once for all of them.
//! 3. Packed routing: of several devices, the one with the fewest streams comes first. On a device,
//!    the worker with the most streams comes first, as long as it has room ([`worker_load`]). A
//!    step reads the weights once for all its rows, so one worker with 32 streams is faster than
//!    four workers with 8 each. The other workers are warm standbys.
//! 4. On a device, a worker that has [`PREFIX_GAIN_TOKENS`] more of the prompt in its prefix cache
//!    comes before the one with the most streams.
//! 5. Least-loaded routing, and packed routing when no worker has room: a worker with free capacity
//!    comes before a full one, then the worker with fewer streams, then the one with the emptier KV
//!    cache, then the one chosen longest ago. So equal workers take turns.
//! 6. A stream that is to be spread goes away from others of this kind, whatever the mode is.
//!    Several workers died with it ([`crate::quarantine`]), so it goes where the streams saw the
//!    fewest deaths, and then to the fewest streams.
//!
//! Streams are those of this router, which are known exactly, plus streams of other clients as of
//! the worker's last report.

use std::cmp::Reverse;
use std::collections::BTreeMap;
use std::num::NonZeroU32;
use std::sync::Arc;
use std::time::Duration;

use serde::{Deserialize, Serialize};

mod placed_prefixes;
#[cfg(test)]
mod simulation;
#[cfg(test)]
mod tests;
mod worker_load;

pub use placed_prefixes::{PrefixHash, prefix_hashes};
use worker_load::WorkerLoad;

/// A worker beside the packed one is chosen for this much more cached prompt. A second worker at
/// work slows the first one down for the whole life of the stream, and a prompt of this length
/// takes some 70 ms (8B Q4_K_M on an H200).
const PREFIX_GAIN_TOKENS: u64 = 1024;

/// Whether workers of the device compute on the host: "host", or a NUMA node of it as "host:N". A
/// worker that tells no device does too.
fn is_on_host(device: &str) -> bool {
    device.is_empty() || device.split(':').next() == Some("host")
}

/// Time since the router's start.
pub type RouterTime = Duration;

/// The order in which workers fill.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum RoutingMode {
    /// Packed on GPUs. Least-loaded on the host, where each worker computes on cores of its own.
    #[default]
    Auto,
    Packed,
    LeastLoaded,
}

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

impl RoutingMode {
    pub const ALL: [Self; 3] = [Self::Auto, Self::Packed, Self::LeastLoaded];

    /// The name in configuration and arguments.
    pub const fn name(self) -> &'static str {
        match self {
            Self::Auto => "auto",
            Self::Packed => "packed",
            Self::LeastLoaded => "least-loaded",
        }
    }
}

/// What stays constant of a worker.
#[derive(Clone, Debug)]
pub struct WorkerProfile {
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
    /// From [`prefix_hashes`] of the prompt.
    pub prefix: &'a [PrefixHash],
    /// Number of workers that died with the content, if the stream is to be spread.
    pub spread_by_deaths: Option<NonZeroU32>,
}

impl<'a> StreamDemand<'a> {
    /// A call that takes no KV cache.
    pub fn none(model: &'a ModelKey) -> Self {
        Self { model, input_tokens: 0, output_tokens_max: 0, prefix: &[], spread_by_deaths: None }
    }
}

/// A stream that counts at its worker until [`RoutingPolicy::end_stream`].
#[derive(Debug, PartialEq, Eq)]
pub struct StreamPlacement {
    pub worker: WorkerId,
    /// Expected use of the KV cache.
    kv_tokens: u64,
    /// Tokens of the input that the worker still has to compute.
    prefill_tokens: u64,
    spread_by_deaths: Option<NonZeroU32>,
}

impl StreamPlacement {
    /// False from [`RoutingPolicy::end_prefill`] on.
    pub fn is_in_prefill(&self) -> bool {
        self.prefill_tokens > 0
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
        let worker = preferred
            .filter(|id| !tried.contains(id) && self.workers.get(id).is_some_and(has_capacity))
            .or_else(|| self.choose_worker(demand, tried, now))?;
        self.choices += 1;
        let load = self.workers.get_mut(&worker)?;
        load.last_chosen = self.choices;
        let (kv_tokens, prefill_tokens) = load.add_stream(demand, self.choices);
        Some(StreamPlacement { worker, kv_tokens, prefill_tokens, spread_by_deaths: demand.spread_by_deaths })
    }

    /// The worker that [`Self::place_stream`] would choose.
    pub fn choose_worker(
        &self,
        demand: &StreamDemand<'_>,
        tried: &[WorkerId],
        now: RouterTime,
    ) -> Option<WorkerId> {
        let is_candidate =
            |id: &WorkerId, load: &WorkerLoad| load.profile.model == *demand.model && !tried.contains(id);
        let candidates = || self.workers.iter().filter(|(id, load)| is_candidate(id, load));
        if demand.spread_by_deaths.is_some() {
            let order = |load: &WorkerLoad| (load.is_unusable(now), load.spread_order(), load.order(now));
            return candidates().min_by_key(|(_, load)| order(load)).map(|(&id, _)| id);
        }
        let with_room = candidates().filter(|(_, load)| self.is_packed(load) && load.has_room(demand, now));
        let packed = self.choose_packed(demand, with_room.collect());
        packed.or_else(|| candidates().min_by_key(|(_, load)| load.order(now)).map(|(&id, _)| id))
    }

    fn is_packed(&self, load: &WorkerLoad) -> bool {
        match self.mode {
            RoutingMode::Auto => !is_on_host(&load.profile.device),
            RoutingMode::Packed => true,
            RoutingMode::LeastLoaded => false,
        }
    }

    /// Rules 3 and 4 over workers that have room.
    fn choose_packed(
        &self,
        demand: &StreamDemand<'_>,
        with_room: Vec<(&WorkerId, &WorkerLoad)>,
    ) -> Option<WorkerId> {
        let device_order = |load: &WorkerLoad| {
            let on_device =
                || self.workers.values().filter(|other| other.profile.device == load.profile.device);
            let streams: u64 = on_device().map(|other| u64::from(other.streams())).sum();
            (streams, Reverse(on_device().map(|other| other.last_chosen).max()))
        };
        let device = &with_room.iter().min_by_key(|(_, load)| device_order(load))?.1.profile.device;
        let on_device = || with_room.iter().filter(|(_, load)| load.profile.device == *device);
        let fullest =
            on_device().max_by_key(|(id, load)| (load.streams(), load.last_chosen, Reverse(*id)))?;
        let cached = on_device().max_by_key(|(_, load)| load.cached_tokens(demand.prefix))?;
        let gain = cached.1.cached_tokens(demand.prefix) - fullest.1.cached_tokens(demand.prefix);
        Some(*if gain >= PREFIX_GAIN_TOKENS { cached.0 } else { fullest.0 })
    }

    /// The stream has its first token: the worker has computed the input. Idempotent.
    pub fn end_prefill(&mut self, placement: &mut StreamPlacement) {
        let prefill_tokens = std::mem::take(&mut placement.prefill_tokens);
        if let Some(load) = self.workers.get_mut(&placement.worker) {
            load.end_prefill(prefill_tokens);
        }
    }

    /// Ends a stream on its worker. Does nothing if the worker was removed.
    pub fn end_stream(&mut self, mut placement: StreamPlacement) {
        self.end_prefill(&mut placement);
        if let Some(load) = self.workers.get_mut(&placement.worker) {
            load.end_stream(placement.kv_tokens, placement.spread_by_deaths);
        }
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
