// SPDX-License-Identifier: Apache-2.0

//! The load of one worker, and whether it has room for another stream.
//!
//! A worker has room for a stream if all of these hold:
//!
//! 1. It runs fewer sequences than it can.
//! 2. Its KV cache will not be full: expected tokens of its streams stay within 7/8.
//! 3. Its prompts that wait for prefill take at most [`PREFILL_WAIT_MAX`] at its measured rate. A
//!    worker that decodes many streams computes prompts slowly, and another worker of the device
//!    has not that limit.
//! 4. It is not stalled: it reports, and while it runs sequences, it steps.

use std::collections::BTreeMap;
use std::num::NonZeroU32;
use std::time::Duration;

use super::worker_prefixes::WorkerPrefixes;
use super::{RouterTime, StreamDemand, WorkerProfile, WorkerReport};

/// Expected output of a stream, if it may be longer. A client that names no maximum asks for the
/// rest of the context and takes some hundred tokens.
const EXPECTED_OUTPUT_TOKENS: u64 = 512;
/// What a running stream costs another one on the same worker, at most: about the rows of its steps
/// that both wait for, if the answer is short.
const STREAM_TOKENS: u64 = 64;
/// A shorter backlog says nothing about the rate, since the fixed times of steps and messages count
/// more. It is one step with many prompt rows.
const PREFILL_BACKLOG_MIN: u64 = 2048;
/// A prompt behind a longer backlog goes to another worker.
const PREFILL_WAIT_MAX: Duration = Duration::from_secs(4);
/// Weight of the newest sample in the prefill rate.
const PREFILL_RATE_WEIGHT: f64 = 0.25;
/// A worker reports every 250 ms, and within seconds on a machine with far too much work. A stopped
/// process does not. After 5 s its link breaks.
const REPORT_AGE_MAX: Duration = Duration::from_secs(4);
/// A step takes milliseconds on a GPU, and some seconds for a large model on few cores.
const STEP_AGE_MAX: Duration = Duration::from_secs(10);

/// What a stream is expected to take of its worker.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct StreamShare {
    /// Use of the KV cache beside shared blocks.
    kv_tokens: u64,
    /// Tokens of the input that the worker still has to compute.
    pub(super) prefill_tokens: u64,
    decode_tokens: u64,
}

#[derive(Debug)]
pub(super) struct WorkerLoad {
    pub(super) profile: WorkerProfile,
    /// Streams of this router.
    pub(super) own_streams: u32,
    /// Streams among them that are to be spread, by the number of deaths.
    spread_streams: BTreeMap<NonZeroU32, u32>,
    /// Streams of other clients as of the last report.
    other_streams: u32,
    kv_used_tokens: u64,
    kv_used_permille: u64,
    /// KV cache that the streams of this router are expected to use.
    expected_kv_tokens: u64,
    /// Output that the streams of this router are expected to have, each [`STREAM_TOKENS`] at most.
    decode_tokens: u64,
    /// Input tokens of streams that have no token yet.
    prefill_backlog: u64,
    /// Input tokens per second while there was a backlog.
    prefill_rate: Option<f64>,
    prompt_tokens_computed: u64,
    reported_at: RouterTime,
    steps: u64,
    /// When the counter of steps last changed, or the worker had nothing to do.
    stepped_at: RouterTime,
    /// Whether there was a long backlog at the last report.
    had_backlog: bool,
    /// Number of the choice that last chose this worker.
    pub(super) last_chosen: u64,
    pub(super) prefixes: WorkerPrefixes,
}

impl WorkerLoad {
    pub(super) fn new(profile: WorkerProfile, now: RouterTime) -> Self {
        Self {
            prefixes: WorkerPrefixes::new(profile.kv_tokens, now),
            profile,
            own_streams: 0,
            spread_streams: BTreeMap::new(),
            other_streams: 0,
            kv_used_tokens: 0,
            kv_used_permille: 0,
            expected_kv_tokens: 0,
            decode_tokens: 0,
            prefill_backlog: 0,
            prefill_rate: None,
            prompt_tokens_computed: 0,
            reported_at: now,
            steps: 0,
            stepped_at: now,
            had_backlog: false,
            last_chosen: 0,
        }
    }

    pub(super) fn update(&mut self, report: &WorkerReport, now: RouterTime) {
        let streams = report.running.saturating_add(report.waiting);
        self.other_streams = streams.saturating_sub(self.own_streams);
        self.kv_used_tokens = report.kv_used_tokens;
        self.kv_used_permille = match report.kv_total_tokens {
            0 => 0,
            total => report.kv_used_tokens.saturating_mul(1000) / total,
        };
        if report.steps != self.steps || report.running == 0 {
            (self.steps, self.stepped_at) = (report.steps, now);
        }
        let computed = report.prompt_tokens_computed.saturating_sub(self.prompt_tokens_computed);
        let seconds = now.saturating_sub(self.reported_at).as_secs_f64();
        // Without a backlog at both ends, the worker may have waited for prompts.
        let has_backlog = self.prefill_backlog >= PREFILL_BACKLOG_MIN;
        if self.had_backlog && has_backlog && computed > 0 && seconds > 0.0 {
            let sample = computed as f64 / seconds;
            let rate = self.prefill_rate.unwrap_or(sample);
            self.prefill_rate = Some(rate + PREFILL_RATE_WEIGHT * (sample - rate));
        }
        self.had_backlog = has_backlog;
        self.prompt_tokens_computed = report.prompt_tokens_computed;
        self.reported_at = now;
    }

    /// Counts a stream. `placement` increases from call to call.
    pub(super) fn add_stream(
        &mut self,
        demand: &StreamDemand<'_>,
        cached_tokens: u64,
        placement: u64,
        now: RouterTime,
    ) -> StreamShare {
        let share = expected_share(demand, cached_tokens);
        self.own_streams += 1;
        if let Some(deaths) = demand.spread_by_deaths {
            *self.spread_streams.entry(deaths).or_default() += 1;
        }
        self.expected_kv_tokens += share.kv_tokens;
        self.decode_tokens += share.decode_tokens;
        self.prefill_backlog += share.prefill_tokens;
        self.prefixes.begin_stream(demand.prefix, placement, now);
        share
    }

    pub(super) fn end_prefill(&mut self, prefill_tokens: u64) {
        self.prefill_backlog -= prefill_tokens;
    }

    pub(super) fn end_stream(&mut self, share: StreamShare, spread_by_deaths: Option<NonZeroU32>) {
        assert!(self.own_streams > 0, "every stream that was placed ends once");
        self.own_streams -= 1;
        if let Some(deaths) = spread_by_deaths {
            self.spread_streams.entry(deaths).and_modify(|streams| *streams -= 1);
            self.spread_streams.retain(|_, streams| *streams > 0);
        }
        self.expected_kv_tokens -= share.kv_tokens;
        self.decode_tokens -= share.decode_tokens;
    }

    pub(super) fn streams(&self) -> u32 {
        self.own_streams.saturating_add(self.other_streams)
    }

    pub(super) fn is_full(&self) -> bool {
        self.streams() >= self.profile.running_max
    }

    /// Tokens of the prompt that the worker is expected to have cached. The last token is always
    /// computed.
    pub(super) fn cached_tokens(&self, demand: &StreamDemand<'_>, now: RouterTime) -> u64 {
        self.prefixes.cached_tokens(demand.prefix, now).min(demand.input_tokens.saturating_sub(1))
    }

    /// Tokens that the streams of the worker are expected to compute.
    pub(super) fn work(&self) -> u64 {
        self.prefill_backlog + self.decode_tokens + u64::from(self.other_streams) * STREAM_TOKENS
    }

    /// Whether packed and prefix-aware routing send the stream here; see the head of this file.
    pub(super) fn has_room(&self, demand: &StreamDemand<'_>, cached_tokens: u64, now: RouterTime) -> bool {
        if self.is_full() || self.is_stalled(now) {
            return false;
        }
        let StreamShare { kv_tokens, prefill_tokens, .. } = expected_share(demand, cached_tokens);
        let used = self.expected_kv_tokens.max(self.kv_used_tokens);
        let total = self.profile.kv_tokens;
        let fits_kv = total == 0 || self.streams() == 0 || used + kv_tokens <= total - total / 8;
        let backlog = self.prefill_backlog + prefill_tokens;
        let fits_prefill = self.prefill_backlog == 0
            || backlog <= PREFILL_BACKLOG_MIN
            || self.prefill_rate.is_none_or(|rate| backlog as f64 <= rate * PREFILL_WAIT_MAX.as_secs_f64());
        fits_kv && fits_prefill
    }

    pub(super) fn is_stalled(&self, now: RouterTime) -> bool {
        let since = |at: RouterTime| now.saturating_sub(at);
        since(self.reported_at) > REPORT_AGE_MAX || since(self.stepped_at) > STEP_AGE_MAX
    }

    /// A stream goes here only if it can go nowhere else.
    pub(super) fn is_unusable(&self, now: RouterTime) -> bool {
        self.is_stalled(now) || self.is_full()
    }

    /// The highest number of deaths of a stream that is to be spread, and the number of such
    /// streams.
    pub(super) fn spread_order(&self) -> (Option<NonZeroU32>, u32) {
        (self.spread_streams.keys().last().copied(), self.spread_streams.values().sum())
    }

    /// The order of least-loaded routing: the worker with the smallest value is chosen.
    pub(super) fn order(&self, now: RouterTime) -> (bool, bool, u32, u64, u64) {
        (self.is_stalled(now), self.is_full(), self.streams(), self.kv_used_permille, self.last_chosen)
    }
}

pub(super) fn expected_share(demand: &StreamDemand<'_>, cached_tokens: u64) -> StreamShare {
    let prefill_tokens = demand.input_tokens.saturating_sub(cached_tokens);
    let kv_tokens = prefill_tokens + demand.output_tokens_max.min(EXPECTED_OUTPUT_TOKENS);
    let decode_tokens = demand.output_tokens_max.min(STREAM_TOKENS);
    StreamShare { kv_tokens, prefill_tokens, decode_tokens }
}
