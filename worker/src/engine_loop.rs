// SPDX-License-Identifier: Apache-2.0

//! The engine loop: the thread that owns the engine. It handles commands between steps, steps while
//! there is work, and sleeps while there is none.
//!
//! ```text
//! calls (async)                                  engine loop (one thread)
//!   EngineHandle --commands, bounded-----------> handle --> Engine::step --> deliver
//!   Receiver     <--TokenChannel, one per call-------------------------------'
//!   EngineHandle <--EngineSnapshot, the latest one
//! mask threads
//!   EngineWaker  --Wake------------------------> the next step uses the mask
//! ```
//!
//! 1. Only this thread touches the engine.
//! 2. A dropped receiver closes its channel. The loop checks channels before every step, so the KV
//!    blocks of a cancelled call are free within one step.

use std::collections::HashMap;
use std::hash::{BuildHasher, RandomState};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::mpsc::{Receiver, RecvTimeoutError, sync_channel};
use std::time::{Duration, Instant};

use engine::schedule::integrity::IntegrityError;
use engine::{Engine, EngineOutput, FinishReason, KvCacheUsage, Queued, RefuseReason, RequestId, StepError};
use ops::Backend;
use tokio::sync::{Semaphore, watch};

use crate::backend::MeasureBackend;
use crate::startup_timeline::{LazyInit, PostReadyStages, StartupTimeline};
use crate::step_watchdog::StepCounter;
use crate::stream_trace::TracedStep;
use crate::token_channel::{ChannelFull, FlowControl, StreamAbort, StreamItem};

mod active_stream;
mod command;
mod handle;
mod kv_subscriber;

use active_stream::ActiveStream;
use command::{COMMANDS_MAX, EngineCommand, KV_SUBSCRIBERS_MAX, PAUSED_POLL, SubmitReply};
pub(crate) use command::{EngineSnapshot, SubmitError};
pub(crate) use handle::{EngineHandle, EngineWaker};

/// After this long without work, the engine frees unused memory and checks the integrity of its
/// block pool.
const IDLE: Duration = Duration::from_secs(1);
/// A cached prefix expires after one to two periods without a hit.
const PREFIX_RETENTION: Duration = Duration::from_secs(300);
/// How often the fill of KV blocks is sampled. Sampling visits every running sequence.
const KV_USAGE_PERIOD: Duration = Duration::from_millis(100);

/// Why the engine loop ended before all handles were dropped.
#[derive(Debug, thiserror::Error)]
pub(crate) enum EngineLoopError {
    #[error(transparent)]
    Step(#[from] StepError),
    #[error(transparent)]
    Integrity(#[from] IntegrityError),
}

/// The state of the engine loop's thread.
pub(crate) struct EngineLoop<B: Backend> {
    engine: Engine<B>,
    measure: MeasureBackend<B>,
    /// The stages until the worker was ready.
    timeline: StartupTimeline,
    epoch: Instant,
    commands: Receiver<EngineCommand>,
    is_wake_queued: Arc<AtomicBool>,
    snapshot: watch::Sender<EngineSnapshot>,
    steps: StepCounter,
    streams: HashMap<RequestId, ActiveStream>,
    outputs: Vec<EngineOutput>,
    is_draining: bool,
    first_step: Duration,
    kv_usage: KvCacheUsage,
    kv_usage_sampled_at: Duration,
    prefixes_expired_at: Duration,
    /// [`PREFIX_RETENTION`]; shorter in tests.
    prefix_retention: Duration,
}

/// Creates the loop and its handle. `score_rows_max` is the limit of scored rows in one step.
pub(crate) fn engine_loop<B: Backend>(
    engine: Engine<B>,
    score_rows_max: usize,
    measure: MeasureBackend<B>,
    timeline: StartupTimeline,
) -> (EngineHandle, EngineLoop<B>) {
    let (command_sender, commands) = sync_channel(COMMANDS_MAX);
    let first = EngineSnapshot {
        stats: engine.stats(),
        kv_usage: engine.kv_cache_usage(),
        backend_usage: measure(engine.backend()),
        ..EngineSnapshot::default()
    };
    let (snapshot, snapshot_receiver) = watch::channel(first);
    let epoch = Instant::now();
    let is_wake_queued = Arc::new(AtomicBool::new(false));
    let handle = EngineHandle {
        commands: Arc::new(command_sender),
        is_wake_queued: is_wake_queued.clone(),
        snapshot: snapshot_receiver,
        epoch,
        score_rows_max,
        next_request_id: AtomicU64::new(0),
        // Random, so that event numbers of an earlier process are not taken for numbers of this
        // one.
        kv_log: RandomState::new().hash_one(std::process::id()),
        kv_subscribers: Arc::new(Semaphore::new(KV_SUBSCRIBERS_MAX)),
        steps: StepCounter::default(),
    };
    let engine_loop = EngineLoop {
        engine,
        measure,
        timeline,
        epoch,
        commands,
        is_wake_queued,
        snapshot,
        steps: handle.steps.clone(),
        streams: HashMap::new(),
        outputs: Vec::new(),
        is_draining: false,
        first_step: Duration::ZERO,
        kv_usage: KvCacheUsage::default(),
        kv_usage_sampled_at: Duration::ZERO,
        prefixes_expired_at: Duration::ZERO,
        prefix_retention: PREFIX_RETENTION,
    };
    (handle, engine_loop)
}

impl<B: Backend> EngineLoop<B> {
    /// Runs until every handle is dropped, or the device or the block pool fails.
    pub(crate) fn run(mut self) -> Result<(), EngineLoopError> {
        loop {
            let mut received = None;
            if !self.engine.has_work() {
                received = self.wait_while_idle()?;
                if received.is_none() {
                    return Ok(());
                }
            }
            self.steps.begin_work();
            received.into_iter().for_each(|command| self.handle(command));
            self.wait_before_launch();
            while let Ok(command) = self.commands.try_recv() {
                self.handle(command);
            }
            self.apply_flow_control();
            self.expire_prefixes(self.epoch.elapsed());
            let stepped = self.step();
            self.steps.end_work();
            let was_empty = stepped?;
            if was_empty && self.engine.has_work() && !self.wait_while_paused() {
                return Ok(());
            }
        }
    }

    /// Handles commands while the device computes a step and the next one need not be launched.
    fn wait_before_launch(&mut self) {
        while let Some(due) = self.engine.launch_due() {
            let wait = due.saturating_sub(self.epoch.elapsed());
            match self.commands.recv_timeout(wait) {
                Ok(command) => self.handle(command),
                Err(_) => return,
            }
        }
    }

    /// Sleeps until a command arrives, and frees memory meanwhile. Returns `None` once all handles
    /// are dropped.
    fn wait_while_idle(&mut self) -> Result<Option<EngineCommand>, EngineLoopError> {
        let mut wait = IDLE;
        loop {
            match self.commands.recv_timeout(wait) {
                Ok(command) => return Ok(Some(command)),
                Err(RecvTimeoutError::Disconnected) => return Ok(None),
                Err(RecvTimeoutError::Timeout) => {}
            }
            self.steps.begin_work();
            if wait == IDLE {
                self.engine.check_integrity()?;
                self.release_memory();
            }
            self.expire_prefixes(self.epoch.elapsed());
            self.steps.end_work();
            if self.engine.stats().kv_blocks_cached == 0 {
                return Ok(self.commands.recv().ok());
            }
            wait = self.prefix_retention;
        }
    }

    /// Expires unused prefixes once a period, idle or not: occasional requests must not keep the
    /// prefixes of others.
    fn expire_prefixes(&mut self, now: Duration) {
        if now.saturating_sub(self.prefixes_expired_at) >= self.prefix_retention {
            self.prefixes_expired_at = now;
            self.engine.evict_unused_prefixes();
            self.release_memory();
        }
    }

    fn release_memory(&mut self) {
        let before = self.engine.kv_cache_usage().bytes;
        match self.engine.release_memory() {
            Ok(()) => {
                let bytes = before.saturating_sub(self.engine.kv_cache_usage().bytes);
                tracing::debug!(bytes, "released unused KV cache memory");
            }
            // The memory stays mapped, and the next attempt may release it.
            Err(error) => {
                tracing::warn!(error = %service::exit::one_line(&error), "cannot release KV cache memory");
            }
        }
        self.publish();
    }

    /// Runs one step. Returns whether the step had nothing to compute.
    fn step(&mut self) -> Result<bool, StepError> {
        let lazy_init = (self.measure)(self.engine.backend()).lazy_init;
        let now = self.epoch.elapsed();
        let stepped = self.engine.step(now, &mut self.outputs);
        let ended = self.epoch.elapsed();
        let mut step = TracedStep { began: now, ended, rows: 0, sequences: 0 };
        if let Ok(report) = &stepped {
            let took = self.engine.step_was_read(now, ended);
            self.engine.observe(report, took);
            step.began = ended.saturating_sub(took);
            (step.rows, step.sequences) = (report.rows, report.sequences);
        }
        if stepped.as_ref().is_ok_and(|report| report.rows > 0) {
            self.record_first_step(lazy_init, now);
        }
        // Publish before delivering: a client that reads the end of its stream then finds its
        // blocks free.
        self.publish();
        match stepped {
            Ok(report) => {
                self.deliver(&step, None);
                self.publish();
                Ok(report.rows == 0)
            }
            Err(error) => {
                let detail = service::exit::one_line(&error);
                tracing::error!(%detail, "a step failed");
                let is_fatal = error.is_fatal();
                let abort = if is_fatal {
                    StreamAbort::DeviceLost { detail }
                } else {
                    StreamAbort::StepFailed { detail }
                };
                self.deliver(&step, Some(&abort));
                if is_fatal {
                    self.abort_all(&abort);
                }
                self.publish();
                if is_fatal { Err(error) } else { Ok(false) }
            }
        }
    }

    /// Adds the step that began at `started` to the startup timeline, and logs the timeline if it
    /// changed.
    fn record_first_step(&mut self, before: LazyInit, started: Duration) {
        let lazy_init = (self.measure)(self.engine.backend()).lazy_init;
        let is_first = self.first_step.is_zero();
        if is_first {
            let took = self.epoch.elapsed() - started;
            self.first_step = took.saturating_sub(lazy_init.total() - before.total());
        }
        if is_first || (before.graphs.is_zero() && !lazy_init.graphs.is_zero()) {
            let stages = PostReadyStages { first_step: self.first_step, lazy_init };
            tracing::info!("startup timeline: {}; {stages}", self.timeline);
        }
    }

    /// Waits while every request is paused, waits for its grammar mask, or waits for blocks of such
    /// requests. Returns false once all handles are dropped.
    fn wait_while_paused(&mut self) -> bool {
        let due = self.engine.next_deadline().map(|at| at.saturating_sub(self.epoch.elapsed()));
        match self.commands.recv_timeout(due.map_or(PAUSED_POLL, |due| due.min(PAUSED_POLL))) {
            Ok(command) => {
                self.steps.begin_work();
                self.handle(command);
                self.steps.end_work();
            }
            Err(RecvTimeoutError::Timeout) => {}
            Err(RecvTimeoutError::Disconnected) => return false,
        }
        true
    }

    fn handle(&mut self, command: EngineCommand) {
        match command {
            EngineCommand::Generate { request, constraint, stream, reply } => {
                let id = request.id;
                let queued = self.engine.submit_constrained(*request, constraint);
                self.register_stream(id, queued, stream, reply);
            }
            EngineCommand::SearchBeams { request, stream, reply } => {
                let id = request.id;
                let queued = self.engine.submit_beams(request);
                self.register_stream(id, queued, stream, reply);
            }
            EngineCommand::Score { request, stream, reply } => {
                let id = request.id;
                let queued = self.engine.submit_score(request);
                self.register_stream(id, queued, stream, reply);
            }
            EngineCommand::Embed { request, stream, reply } => {
                let id = request.id;
                let queued = self.engine.submit_embed(request);
                self.register_stream(id, queued, stream, reply);
            }
            EngineCommand::KvEvents { from, reply } => {
                // The subscriber may be gone.
                if !reply.is_closed() {
                    drop(reply.send(self.engine.kv_events(from)));
                }
            }
            EngineCommand::ResetPrefixCache { reply } => {
                // The reset happens even if the caller is gone.
                let _: Result<(), bool> = reply.send(self.engine.reset_prefix_cache());
            }
            EngineCommand::Drain => {
                self.engine.drain();
                self.is_draining = true;
            }
            EngineCommand::AbortAll => self.abort_all(&StreamAbort::Drained),
            // Cleared before the step looks for the mask: a later mask then queues a new `Wake`.
            EngineCommand::Wake => self.is_wake_queued.store(false, Ordering::Release),
        }
        self.publish();
    }

    fn register_stream(
        &mut self,
        id: RequestId,
        queued: Result<Queued, RefuseReason>,
        stream: ActiveStream,
        reply: SubmitReply,
    ) {
        match queued {
            Ok(_) => drop(self.streams.insert(id, stream)),
            Err(_) => stream.trace.refuse(),
        }
        // A caller that is gone has dropped its receiver too. The closed channel then cancels the
        // request.
        drop(reply.send(queued));
    }

    /// Cancels requests whose receiver is dropped, and pauses, resumes or aborts those with a slow
    /// reader.
    fn apply_flow_control(&mut self) {
        let now = self.epoch.elapsed();
        let mut cancelled = Vec::new();
        for (&id, ActiveStream { channel, .. }) in &mut self.streams {
            if channel.is_closed() {
                cancelled.push((id, None));
                continue;
            }
            match channel.flow_control(now) {
                FlowControl::Unchanged => {}
                FlowControl::Pause => {
                    self.engine.set_paused(id, true);
                }
                FlowControl::Resume => {
                    self.engine.set_paused(id, false);
                }
                FlowControl::Abort => cancelled.push((id, Some(StreamAbort::TooSlow))),
            }
        }
        for (id, abort) in cancelled {
            self.cancel(id, abort);
        }
    }

    fn cancel(&mut self, id: RequestId, abort: Option<StreamAbort>) {
        let stream = self.streams.remove(&id);
        let mut unread = Vec::new();
        self.engine.cancel(id, &mut unread);
        let now = self.epoch.elapsed();
        match (stream, abort) {
            (Some(stream), Some(abort)) => stream.finish(Err(abort), now),
            (Some(stream), None) => stream.trace.cancel(now),
            (None, _) => {}
        }
    }

    fn abort_all(&mut self, abort: &StreamAbort) {
        let ids: Vec<RequestId> = self.streams.keys().copied().collect();
        for id in ids {
            self.cancel(id, Some(abort.clone()));
        }
    }

    /// Sends the step's outputs to their channels. `failure` is set if the step failed.
    fn deliver(&mut self, step: &TracedStep, failure: Option<&StreamAbort>) {
        let mut outputs = std::mem::take(&mut self.outputs);
        for output in outputs.drain(..) {
            let id = output_id(&output);
            if let EngineOutput::Finished { reason, .. } = output {
                if let Some(stream) = self.streams.remove(&id) {
                    stream.finish(final_item(output, reason, failure), step.ended);
                }
                continue;
            }
            let sent = self.streams.get_mut(&id).map_or(Ok(()), |stream| stream.send(output, step));
            if sent == Err(ChannelFull) {
                self.cancel(id, Some(StreamAbort::ChannelFull));
            }
        }
        self.outputs = outputs;
    }

    fn publish(&mut self) {
        let now = self.epoch.elapsed();
        if !self.engine.has_work() || now.saturating_sub(self.kv_usage_sampled_at) >= KV_USAGE_PERIOD {
            (self.kv_usage, self.kv_usage_sampled_at) = (self.engine.kv_cache_usage(), now);
        }
        let current = EngineSnapshot {
            stats: self.engine.stats(),
            streams: self.streams.len(),
            is_draining: self.is_draining,
            first_step: self.first_step,
            kv_usage: self.kv_usage,
            backend_usage: (self.measure)(self.engine.backend()),
        };
        self.snapshot.send_if_modified(|snapshot| {
            let is_changed = *snapshot != current;
            *snapshot = current;
            is_changed
        });
    }
}

fn output_id(output: &EngineOutput) -> RequestId {
    match output {
        EngineOutput::Token(token) => token.id,
        EngineOutput::Admitted { id, .. }
        | EngineOutput::Logits { id, .. }
        | EngineOutput::Scored { id, .. }
        | EngineOutput::Embedding { id, .. }
        | EngineOutput::BeamProgress { id, .. }
        | EngineOutput::Beams { id, .. }
        | EngineOutput::Finished { id, .. } => *id,
    }
}

/// The last item of a stream: its regular end, or the reason why it is aborted.
fn final_item(output: EngineOutput, reason: FinishReason, failure: Option<&StreamAbort>) -> StreamItem {
    match reason {
        FinishReason::Stop(_)
        | FinishReason::Complete
        | FinishReason::Length
        | FinishReason::Scored
        | FinishReason::Embedded
        | FinishReason::Searched => Ok(output),
        FinishReason::Deadline => Err(StreamAbort::Deadline),
        FinishReason::Cancelled => Err(StreamAbort::Drained),
        FinishReason::StepFailed => {
            Err(failure.cloned().unwrap_or(StreamAbort::StepFailed { detail: String::new() }))
        }
        FinishReason::BadLogits(error) => Err(StreamAbort::BadLogits(error)),
        FinishReason::Constraint(error) => Err(StreamAbort::Grammar(error)),
    }
}

#[cfg(test)]
pub(crate) mod tests;
