// SPDX-License-Identifier: Apache-2.0

//! The choice of a worker among the candidates.
//!
//! The candidates of the best kind compete: those with room, then those that are not full, then
//! those that work, then all. Packed devices enter with one worker each, all others one by one.
//!
//! A target's cost is in tokens: what it would have to compute for the stream, and what its streams
//! compute already:
//!
//! ```text
//! cost = MISSING_WEIGHT * missing + work of its streams [- SESSION_GAIN_TOKENS]
//! ```
//!
//! Affinity is bounded: a target that has more of the prompt than the least loaded one, or is the
//! session's home, is left out if it has more streams than the slack allows.

use std::cmp::Reverse;

use super::worker_load::WorkerLoad;
use super::{PREFIX_GAIN_TOKENS, RouterTime, RoutingMode, RoutingPolicy, StreamDemand, WorkerId};

/// A token that is computed again weighs as much as so many that the stream waits for. It takes
/// rows from all streams of the worker, and a place in its cache. With 2, bursts of short chats hit
/// at 85% of one worker's rate, with 4 at 90%, with 8 at 97% (64 users, four workers).
const MISSING_WEIGHT: u64 = 8;
/// A session's home is as good as this many tokens less to compute.
const SESSION_GAIN_TOKENS: u64 = 128;
/// For the sake of its cache, a worker with room may have half more streams than the least loaded
/// one, and this part of its seats beyond. Chats send their next turns together, when a batch ends:
/// for a moment, the worker next to it has no stream.
const SLACK_SEATS_PART: u64 = 4;
/// The same if no worker has room. Then streams wait, and a longer queue costs more than a prompt.
const FULL_SLACK_STREAMS: u64 = 1;

/// Why a worker was chosen.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum RoutingReason {
    /// It has more of the prompt in its prefix cache than the worker that load alone would choose.
    Prefix,
    /// It is the home of the session.
    Session,
    Packed,
    LeastLoaded,
    PowerOfTwo,
    /// Another choice of the same prompt went there.
    SamePrompt,
    /// Workers died with the stream.
    Spread,
}

impl RoutingReason {
    /// Label value for metrics.
    pub const fn name(self) -> &'static str {
        match self {
            Self::Prefix => "prefix",
            Self::Session => "session",
            Self::Packed => "packed",
            Self::LeastLoaded => "least_loaded",
            Self::PowerOfTwo => "power_of_two",
            Self::SamePrompt => "same_prompt",
            Self::Spread => "spread",
        }
    }
}

/// A worker that may get the stream.
#[derive(Clone, Copy)]
struct Candidate<'a> {
    id: WorkerId,
    load: &'a WorkerLoad,
    cached_tokens: u64,
}

/// A candidate with the load of all that compute together with it.
struct RoutingTarget<'a> {
    candidate: Candidate<'a>,
    /// The name of what stays: a worker, or a packed device.
    name: &'a str,
    is_packed: bool,
    streams: u64,
    /// Tokens that the streams compute.
    work: u64,
    /// Decides between equal costs.
    tie: (u64, u64, i64),
    is_home: bool,
}

impl RoutingTarget<'_> {
    fn cost(&self, demand: &StreamDemand<'_>) -> u64 {
        let missing = demand.input_tokens.saturating_sub(self.candidate.cached_tokens);
        let gain = if self.is_home { SESSION_GAIN_TOKENS } else { 0 };
        // The gain is added to the others.
        MISSING_WEIGHT * missing + self.work + SESSION_GAIN_TOKENS - gain
    }
}

impl RoutingPolicy {
    pub(super) fn choose(
        &self,
        demand: &StreamDemand<'_>,
        tried: &[WorkerId],
        now: RouterTime,
    ) -> Option<(WorkerId, RoutingReason)> {
        let of_model = self.workers.iter().filter(|(_, load)| load.profile.model == *demand.model);
        let untried = of_model.filter(|(id, _)| !tried.contains(id));
        if demand.spread_by_deaths.is_some() {
            let order = |load: &WorkerLoad| (load.is_unusable(now), load.spread_order(), load.order(now));
            let (&id, _) = untried.min_by_key(|(_, load)| order(load))?;
            return Some((id, RoutingReason::Spread));
        }
        let (mut loads, reason) = match self.mode {
            RoutingMode::LeastLoaded => (untried.collect(), RoutingReason::LeastLoaded),
            RoutingMode::PowerOfTwo => (self.two_of(untried.collect(), now), RoutingReason::PowerOfTwo),
            RoutingMode::Auto | RoutingMode::Packed | RoutingMode::PrefixAware => {
                let cached_tokens = |load: &WorkerLoad| load.cached_tokens(demand, now);
                let candidates =
                    untried.map(|(&id, load)| Candidate { id, load, cached_tokens: cached_tokens(load) });
                return self.choose_by_cost(demand, candidates.collect(), now);
            }
        };
        loads.sort_by_key(|(_, load)| load.order(now));
        loads.first().map(|&(&id, _)| (id, reason))
    }

    /// Two random workers, among those that are usable if there are any.
    fn two_of<'a>(
        &self,
        mut workers: Vec<(&'a WorkerId, &'a WorkerLoad)>,
        now: RouterTime,
    ) -> Vec<(&'a WorkerId, &'a WorkerLoad)> {
        if workers.iter().any(|(_, load)| !load.is_unusable(now)) {
            workers.retain(|(_, load)| !load.is_unusable(now));
        }
        let mut random = scramble(self.choices);
        while workers.len() > 2 {
            workers.swap_remove((random % workers.len() as u64) as usize);
            random = scramble(random);
        }
        workers
    }

    fn choose_by_cost(
        &self,
        demand: &StreamDemand<'_>,
        mut candidates: Vec<Candidate<'_>>,
        now: RouterTime,
    ) -> Option<(WorkerId, RoutingReason)> {
        let has_room = |c: &Candidate<'_>| c.load.has_room(demand, c.cached_tokens, now);
        let is_usable = |c: &Candidate<'_>| !c.load.is_unusable(now);
        let is_working = |c: &Candidate<'_>| !c.load.is_stalled(now);
        let is_roomy = candidates.iter().any(has_room);
        for is_of_kind in [&has_room as &dyn Fn(&Candidate<'_>) -> bool, &is_usable, &is_working] {
            if candidates.iter().any(is_of_kind) {
                candidates.retain(is_of_kind);
                break;
            }
        }
        let mut targets = self.targets(candidates, is_roomy, now);
        if let Some(session) = demand.session
            && let Some(home) = targets.iter_mut().max_by_key(|target| session.affinity(target.name))
        {
            home.is_home = true;
        }
        choose_target(demand, &targets, is_roomy)
    }

    /// One target for each packed device, and one for each other worker.
    fn targets<'a>(
        &'a self,
        candidates: Vec<Candidate<'a>>,
        is_roomy: bool,
        now: RouterTime,
    ) -> Vec<RoutingTarget<'a>> {
        let is_packed = |c: &Candidate<'_>| is_roomy && self.mode.packs(&c.load.profile.device);
        let (packed, spread): (Vec<_>, Vec<_>) = candidates.into_iter().partition(is_packed);
        let mut targets: Vec<RoutingTarget<'a>> = spread.into_iter().map(|c| spread_target(c, now)).collect();
        let mut devices: Vec<&str> = packed.iter().map(|c| &*c.load.profile.device).collect();
        devices.sort_unstable();
        devices.dedup();
        for device in devices {
            let on_device = packed.iter().filter(|c| *c.load.profile.device == *device);
            targets.extend(self.packed_target(device, on_device.copied().collect()));
        }
        targets
    }

    fn packed_target<'a>(
        &'a self,
        device: &'a str,
        candidates: Vec<Candidate<'a>>,
    ) -> Option<RoutingTarget<'a>> {
        let order = |c: &&Candidate<'_>| (c.load.streams(), c.load.last_chosen, Reverse(c.id));
        let fullest = *candidates.iter().max_by_key(order)?;
        let cached = *candidates.iter().max_by_key(|c| c.cached_tokens)?;
        let gain = cached.cached_tokens - fullest.cached_tokens;
        let candidate = if gain >= PREFIX_GAIN_TOKENS { cached } else { fullest };
        // Streams of other models compute on the device too.
        let on_device = || self.workers.values().filter(|load| *load.profile.device == *device);
        let streams = on_device().map(|load| u64::from(load.streams())).sum();
        let work = on_device().map(WorkerLoad::work).sum();
        let last_chosen = on_device().map(|load| load.last_chosen).max().unwrap_or(0);
        // The device that served last is warm.
        let tie = (streams, 0, -(last_chosen as i64));
        Some(RoutingTarget { candidate, name: device, is_packed: true, streams, work, tie, is_home: false })
    }
}

fn spread_target(candidate: Candidate<'_>, now: RouterTime) -> RoutingTarget<'_> {
    let load = candidate.load;
    let (_, _, streams, kv_used_permille, last_chosen) = load.order(now);
    RoutingTarget {
        candidate,
        name: &load.profile.name,
        is_packed: false,
        streams: u64::from(streams),
        work: load.work(),
        tie: (u64::from(streams), kv_used_permille, last_chosen as i64),
        is_home: false,
    }
}

fn choose_target(
    demand: &StreamDemand<'_>,
    targets: &[RoutingTarget<'_>],
    is_roomy: bool,
) -> Option<(WorkerId, RoutingReason)> {
    let least = targets.iter().min_by_key(|target| target.tie)?;
    let streams_max = |target: &RoutingTarget<'_>| match is_roomy {
        true => {
            let seats = u64::from(target.candidate.load.profile.running_max);
            least.streams + least.streams / 2 + seats / SLACK_SEATS_PART
        }
        false => least.streams + FULL_SLACK_STREAMS,
    };
    let has_affinity = |target: &RoutingTarget<'_>| {
        target.candidate.cached_tokens > least.candidate.cached_tokens || target.is_home
    };
    let eligible =
        targets.iter().filter(|target| target.streams <= streams_max(target) || !has_affinity(target));
    let chosen = eligible.min_by_key(|target| (target.cost(demand), target.tie))?;
    let reason = if chosen.candidate.cached_tokens > least.candidate.cached_tokens {
        RoutingReason::Prefix
    } else if chosen.is_home {
        RoutingReason::Session
    } else if chosen.is_packed {
        RoutingReason::Packed
    } else {
        RoutingReason::LeastLoaded
    };
    Some((chosen.candidate.id, reason))
}

/// SplitMix64: spreads the choices, whose numbers are counted.
fn scramble(number: u64) -> u64 {
    let mut z = number.wrapping_add(0x9e37_79b9_7f4a_7c15);
    z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    z ^ (z >> 31)
}
