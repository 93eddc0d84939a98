// SPDX-License-Identifier: Apache-2.0

//! [`StreamTrace`]: what log lines and spans tell of a call's stream. The engine loop reports what
//! happens; nothing here waits.
//!
//! ```text
//! generate   |-- queue --|-- prefill --|-- decode -- * -- * ------ * -------------- * ---|
//!        submitted    admitted    first token        events after 1, 2, 4, 8 ... tokens
//! ```
//!
//! A stream has three phases and, for its steps, one event for each doubling of its output: an
//! output of a million tokens has 21.

use std::time::{Duration, SystemTime};

use engine::EngineOutput;
use traces::{KeyValue, Span, SpanKind};

use crate::call_trace::{CallLabel, CallTrace};
use crate::token_channel::{StreamAbort, StreamItem};

/// A step as the events of its streams show it. Times are on the engine's clock.
#[derive(Clone, Copy, Debug)]
pub(crate) struct TracedStep {
    pub(crate) began: Duration,
    pub(crate) ended: Duration,
    pub(crate) rows: usize,
    pub(crate) sequences: usize,
}

#[derive(Debug)]
pub(crate) struct StreamTrace {
    label: CallLabel,
    span: Span,
    clock: EngineClock,
    phase: TracedPhase,
    phase_span: Span,
    output_tokens: u64,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum TracedPhase {
    Queue,
    Prefill,
    Decode,
}

impl TracedPhase {
    fn name(self) -> &'static str {
        match self {
            TracedPhase::Queue => "queue",
            TracedPhase::Prefill => "prefill",
            TracedPhase::Decode => "decode",
        }
    }
}

/// Converts the engine's time, which counts from its start, into the time of day.
#[derive(Clone, Copy, Debug)]
struct EngineClock {
    engine: Duration,
    day: SystemTime,
}

impl EngineClock {
    fn at(&self, time: Duration) -> SystemTime {
        match time.checked_sub(self.engine) {
            Some(since) => self.day + since,
            None => self.day - (self.engine - time),
        }
    }
}

impl StreamTrace {
    /// The call is submitted to the engine at `now`.
    pub(crate) fn submit(CallTrace { label, span }: CallTrace, now: Duration) -> Self {
        let clock = EngineClock { engine: now, day: SystemTime::now() };
        let phase_span = span.child_at(TracedPhase::Queue.name(), SpanKind::Internal, clock.day);
        Self { label, span, clock, phase: TracedPhase::Queue, phase_span, output_tokens: 0 }
    }

    pub(crate) fn record(&mut self, output: &EngineOutput, step: &TracedStep) {
        if !self.span.is_recorded() {
            return;
        }
        match output {
            EngineOutput::Admitted { cached_tokens, .. } => self.record_admission(*cached_tokens, step),
            EngineOutput::Token(_) => self.record_token(step),
            EngineOutput::BeamProgress { .. } if self.phase != TracedPhase::Decode => {
                self.enter(TracedPhase::Decode, step.ended);
            }
            EngineOutput::Logits { .. }
            | EngineOutput::Scored { .. }
            | EngineOutput::Embedding { .. }
            | EngineOutput::BeamProgress { .. }
            | EngineOutput::Beams { .. }
            | EngineOutput::Finished { .. } => {}
        }
    }

    fn record_admission(&mut self, cached_tokens: usize, step: &TracedStep) {
        let began = step.began;
        if self.phase == TracedPhase::Queue {
            self.span.set("ballast.cached_tokens", cached_tokens as i64);
            return self.enter(TracedPhase::Prefill, began);
        }
        let attributes = vec![KeyValue::new("ballast.cached_tokens", cached_tokens as i64)];
        self.span.add_event("admitted after preemption", self.clock.at(began), attributes);
    }

    fn record_token(&mut self, step: &TracedStep) {
        if self.phase != TracedPhase::Decode {
            self.enter(TracedPhase::Decode, step.ended);
        }
        self.output_tokens += 1;
        if self.output_tokens.is_power_of_two() {
            let attributes = vec![
                KeyValue::new("ballast.output_tokens", self.output_tokens as i64),
                KeyValue::new("ballast.step.rows", step.rows as i64),
                KeyValue::new("ballast.step.sequences", step.sequences as i64),
                KeyValue::new("ballast.step.seconds", (step.ended - step.began).as_secs_f64()),
            ];
            self.phase_span.add_event("engine step", self.clock.at(step.ended), attributes);
        }
    }

    fn enter(&mut self, phase: TracedPhase, at: Duration) {
        let at = self.clock.at(at);
        let next = self.span.child_at(phase.name(), SpanKind::Internal, at);
        std::mem::replace(&mut self.phase_span, next).end_at(at);
        self.phase = phase;
    }

    /// The engine does not take the request. The call logs why.
    pub(crate) fn refuse(mut self) {
        self.span.fail("refused");
    }

    /// The stream ends with this item at `now`.
    pub(crate) fn finish(mut self, last: &StreamItem, now: Duration) {
        match last {
            Ok(EngineOutput::Finished { usage, .. }) => {
                let (request_id, trace_id) = (&*self.label.request_id, self.label.trace_id());
                tracing::debug!(%request_id, trace_id, output_tokens = usage.output_tokens, "stream finished");
            }
            Ok(_) => {}
            Err(abort) => {
                self.log_abort(abort);
                self.span.fail(abort.to_string());
            }
        }
        self.end(now);
    }

    /// The router has dropped the call.
    pub(crate) fn cancel(mut self, now: Duration) {
        let (request_id, trace_id) = (&*self.label.request_id, self.label.trace_id());
        tracing::debug!(%request_id, trace_id, "stream dropped by its reader");
        self.span.set("ballast.cancelled", true);
        self.end(now);
    }

    /// What an operator has to see has a line at the default level.
    fn log_abort(&self, abort: &StreamAbort) {
        let (request_id, trace_id, error) = (&*self.label.request_id, self.label.trace_id(), abort);
        match abort {
            StreamAbort::ChannelFull
            | StreamAbort::StepFailed { .. }
            | StreamAbort::DeviceLost { .. }
            | StreamAbort::BadLogits(_) => {
                tracing::warn!(%request_id, trace_id, %error, "stream aborted");
            }
            StreamAbort::TooSlow => tracing::info!(%request_id, trace_id, %error, "stream aborted"),
            StreamAbort::Deadline | StreamAbort::Drained | StreamAbort::Grammar(_) => {
                tracing::debug!(%request_id, trace_id, %error, "stream aborted");
            }
        }
    }

    fn end(mut self, now: Duration) {
        let at = self.clock.at(now);
        self.phase_span.end_at(at);
        self.span.set("gen_ai.usage.output_tokens", self.output_tokens as i64);
        self.span.end_at(at);
    }
}
