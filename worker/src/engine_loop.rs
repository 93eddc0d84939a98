//! The engine's thread: takes commands between steps, steps while there is work, sleeps while there is none.
//!
//! It alone owns the engine. Calls talk to it through [`EngineHandle`]: a bounded queue of commands in, an [`TokenChannel`] per call
//! out, and a snapshot of figures for whoever asks. A call that goes away closes its channel, which is looked at before
//! every step: its KV blocks are free within one step. Where the engine waits for something that another thread computes,
//! that thread wakes it ([`EngineWaker`]).

use std::collections::HashMap;
use std::hash::{BuildHasher, RandomState};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::mpsc::{Receiver, RecvTimeoutError, sync_channel};
use std::time::{Duration, Instant};

use engine::kv::events::Update;
use engine::schedule::integrity::IntegrityError;
use engine::{
    Constraint, Engine, EngineStats, FinishReason, KvUse, Output, Queued, RefuseReason, Request, RequestId,
    ScoreRequest, StepError,
};
use ops::Backend;
use tokio::sync::{Semaphore, oneshot, watch};

use crate::backend::{BackendUsage, MeasureBackend};
use crate::startup_timeline::{LazyInit, PostReadyStages, StartupTimeline};
use crate::token_channel::{ChannelFull, FlowControl, StreamAbort, StreamItem, TokenChannel};

mod handle;
mod kv_subscriber;

pub(crate) use handle::{EngineHandle, EngineWaker, SubmitError};
use kv_subscriber::KV_SUBSCRIBERS_MAX;

/// Commands that wait for the end of a step; more are refused.
const COMMANDS_MAX: usize = 256;
/// An engine that has been idle for so long gives back memory that holds nothing, and has its blocks checked.
const IDLE: Duration = Duration::from_secs(1);
/// What is kept of prompts is forgotten when no request has found it for so long, up to twice that.
const PREFIX_RETENTION: Duration = Duration::from_secs(300);
/// How often it is looked how well blocks are filled: every running sequence has to be asked.
const KV_USAGE_PERIOD: Duration = Duration::from_millis(100);
/// While every request is held or late, readers are looked after this often, and what is late is looked for: a lost wake-up
/// ([`EngineWaker::wake`]) costs no more.
const PAUSED_POLL: Duration = Duration::from_millis(2);

enum EngineCommand {
    Generate {
        request: Box<Request>,
        constraint: Option<Box<dyn Constraint>>,
        channel: TokenChannel,
        answer: SubmitReply,
    },
    Score {
        request: ScoreRequest,
        channel: TokenChannel,
        answer: SubmitReply,
    },
    /// A follower of the cache asks for what came from event `from` on.
    KvEvents {
        from: u64,
        answer: oneshot::Sender<Update>,
    },
    /// Whether all cached prefixes were forgotten.
    ResetPrefixCache {
        answer: oneshot::Sender<bool>,
    },
    Drain,
    AbortAll,
    /// Something that a request waited for is there: the next step sees it.
    Wake,
}

type SubmitReply = oneshot::Sender<Result<Queued, RefuseReason>>;

/// Figures of now.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct EngineSnapshot {
    pub(crate) stats: EngineStats,
    /// Streams that have not ended.
    pub(crate) streams: usize,
    pub(crate) draining: bool,
    /// Kernels are loaded and memory is mapped in the first step.
    pub(crate) first_step: Duration,
    /// As it was when last looked at.
    pub(crate) kv: KvUse,
    pub(crate) measured: BackendUsage,
}

/// Why an engine's thread ended before its callers were gone.
#[derive(Debug, thiserror::Error)]
pub(crate) enum EngineLoopError {
    #[error(transparent)]
    Step(#[from] StepError),
    #[error(transparent)]
    Integrity(#[from] IntegrityError),
}

/// The thread's side.
pub(crate) struct EngineLoop<B: Backend> {
    engine: Engine<B>,
    measure: MeasureBackend<B>,
    /// Until it was ready.
    timeline: StartupTimeline,
    epoch: Instant,
    commands: Receiver<EngineCommand>,
    woken: Arc<AtomicBool>,
    snapshot: watch::Sender<EngineSnapshot>,
    streams: HashMap<RequestId, TokenChannel>,
    outputs: Vec<Output>,
    draining: bool,
    first_step: Duration,
    kv: KvUse,
    kv_usage_sampled_at: Duration,
    /// When prompts were last forgotten that nobody had found.
    last_prefix_expiry: Duration,
    /// [`PREFIX_RETENTION`]; shorter in tests.
    prefix_retention: Duration,
}

/// `score_rows_max`: rows that one step scores at most.
pub(crate) fn engine_loop<B: Backend>(
    engine: Engine<B>,
    score_rows_max: usize,
    measure: MeasureBackend<B>,
    timeline: StartupTimeline,
) -> (EngineHandle, EngineLoop<B>) {
    let (command_sender, commands) = sync_channel(COMMANDS_MAX);
    let first = EngineSnapshot {
        stats: engine.stats(),
        kv: engine.kv_use(),
        measured: measure(engine.backend()),
        ..EngineSnapshot::default()
    };
    let (snapshot, snapshot_receiver) = watch::channel(first);
    let epoch = Instant::now();
    let woken = Arc::new(AtomicBool::new(false));
    let handle = EngineHandle {
        commands: Arc::new(command_sender),
        woken: woken.clone(),
        snapshot: snapshot_receiver,
        epoch,
        score_rows_max,
        requests: AtomicU64::new(0),
        // Random: the number of an earlier process is not taken for one of this one.
        kv_log: RandomState::new().hash_one(std::process::id()),
        followers: Arc::new(Semaphore::new(KV_SUBSCRIBERS_MAX)),
    };
    let engine_loop = EngineLoop {
        engine,
        measure,
        timeline,
        epoch,
        commands,
        woken,
        snapshot,
        streams: HashMap::new(),
        outputs: Vec::new(),
        draining: false,
        first_step: Duration::ZERO,
        kv: KvUse::default(),
        kv_usage_sampled_at: Duration::ZERO,
        last_prefix_expiry: Duration::ZERO,
        prefix_retention: PREFIX_RETENTION,
    };
    (handle, engine_loop)
}

impl<B: Backend> EngineLoop<B> {
    /// Until every handle is gone, or the device is.
    pub(crate) fn run(mut self) -> Result<(), EngineLoopError> {
        loop {
            if !self.engine.has_work() {
                match self.idle()? {
                    Some(command) => self.handle(command),
                    None => return Ok(()),
                }
            }
            while let Ok(command) = self.commands.try_recv() {
                self.handle(command);
            }
            self.apply_backpressure();
            self.expire_prefixes(self.epoch.elapsed());
            let idle = self.step()?;
            if idle && self.engine.has_work() && !self.wait_for_command() {
                return Ok(());
            }
        }
    }

    /// Sleeps until a command comes, and gives back memory meanwhile. None: nobody can send commands any more.
    fn idle(&mut self) -> Result<Option<EngineCommand>, EngineLoopError> {
        let mut wait = IDLE;
        loop {
            match self.commands.recv_timeout(wait) {
                Ok(command) => return Ok(Some(command)),
                Err(RecvTimeoutError::Disconnected) => return Ok(None),
                Err(RecvTimeoutError::Timeout) => {}
            }
            if wait == IDLE {
                self.engine.check_integrity()?;
                self.release_memory();
            }
            self.expire_prefixes(self.epoch.elapsed());
            if self.engine.stats().kv_blocks_cached == 0 {
                return Ok(self.commands.recv().ok());
            }
            wait = self.prefix_retention;
        }
    }

    /// When it is time, whether the engine is idle or not: a request now and then does not keep what others have left.
    fn expire_prefixes(&mut self, now: Duration) {
        if now.saturating_sub(self.last_prefix_expiry) >= self.prefix_retention {
            self.last_prefix_expiry = now;
            self.engine.forget_unused_prefixes();
            self.release_memory();
        }
    }

    fn release_memory(&mut self) {
        let before = self.engine.kv_use().bytes;
        match self.engine.release_memory() {
            Ok(()) => {
                let bytes = before.saturating_sub(self.engine.kv_use().bytes);
                tracing::debug!(bytes, "memory of the KV cache given back");
            }
            // It stays where it is.
            Err(error) => tracing::warn!(error = %service::exit::one_line(&error), "no memory given back"),
        }
        self.publish();
    }

    /// Whether there was nothing to compute.
    fn step(&mut self) -> Result<bool, StepError> {
        let lazy = (self.measure)(self.engine.backend()).lazy;
        let now = self.epoch.elapsed();
        let stepped = self.engine.step(now, &mut self.outputs);
        if let Ok(report) = &stepped {
            self.engine.observe(report, self.epoch.elapsed() - now);
        }
        if stepped.as_ref().is_ok_and(|report| report.rows > 0) {
            self.record_first_step(lazy, now);
        }
        // Before the outputs: whoever has read a stream's end finds its blocks free.
        self.publish();
        match stepped {
            Ok(report) => {
                self.deliver(None);
                self.publish();
                Ok(report.rows == 0)
            }
            Err(error) => {
                let detail = service::exit::one_line(&error);
                tracing::error!(%detail, "a step failed");
                let fatal = error.is_fatal();
                let cut = if fatal {
                    StreamAbort::DeviceLost { detail }
                } else {
                    StreamAbort::StepFailed { detail }
                };
                self.deliver(Some(&cut));
                if fatal {
                    self.abort_all(&cut);
                }
                self.publish();
                if fatal { Err(error) } else { Ok(false) }
            }
        }
    }

    /// Completes the time line after a step that began at `started`, and says it when there is something new in it.
    fn record_first_step(&mut self, before: LazyInit, started: Duration) {
        let lazy = (self.measure)(self.engine.backend()).lazy;
        let is_first = self.first_step.is_zero();
        if is_first {
            let took = self.epoch.elapsed() - started;
            self.first_step = took.saturating_sub(lazy.total() - before.total());
        }
        if is_first || (before.graphs.is_zero() && !lazy.graphs.is_zero()) {
            let later = PostReadyStages { first_step: self.first_step, lazy };
            tracing::info!("time line: {}; {later}", self.timeline);
        }
    }

    /// Every request is held, or waits for its constraint, or for blocks of such. False: nobody can send commands any more.
    fn wait_for_command(&mut self) -> bool {
        let due = self.engine.next_deadline().map(|at| at.saturating_sub(self.epoch.elapsed()));
        match self.commands.recv_timeout(due.map_or(PAUSED_POLL, |due| due.min(PAUSED_POLL))) {
            Ok(command) => self.handle(command),
            Err(RecvTimeoutError::Timeout) => {}
            Err(RecvTimeoutError::Disconnected) => return false,
        }
        true
    }

    fn handle(&mut self, command: EngineCommand) {
        match command {
            EngineCommand::Generate { request, constraint, channel, answer } => {
                let id = request.id;
                let queued = self.engine.submit_constrained(*request, constraint);
                self.queued(id, queued, channel, answer);
            }
            EngineCommand::Score { request, channel, answer } => {
                let id = request.id;
                let queued = self.engine.submit_score(request);
                self.queued(id, queued, channel, answer);
            }
            EngineCommand::KvEvents { from, answer } => {
                // A follower that has gone needs none.
                if !answer.is_closed() {
                    drop(answer.send(self.engine.kv_events(from)));
                }
            }
            EngineCommand::ResetPrefixCache { answer } => {
                // Whoever asked may have gone; it is done all the same.
                let _: Result<(), bool> = answer.send(self.engine.reset_prefix_cache());
            }
            EngineCommand::Drain => {
                self.engine.drain();
                self.draining = true;
            }
            EngineCommand::AbortAll => self.abort_all(&StreamAbort::Drained),
            // Before the step looks at what it was waked for.
            EngineCommand::Wake => self.woken.store(false, Ordering::Release),
        }
        self.publish();
    }

    fn queued(
        &mut self,
        id: RequestId,
        queued: Result<Queued, RefuseReason>,
        channel: TokenChannel,
        answer: SubmitReply,
    ) {
        if queued.is_ok() {
            self.streams.insert(id, channel);
        }
        // A caller that is gone by now has dropped its receiver too, and the channel shows it.
        drop(answer.send(queued));
    }

    /// Cancels what nobody reads any more, holds what is read too slowly.
    fn apply_backpressure(&mut self) {
        let now = self.epoch.elapsed();
        let mut gone = Vec::new();
        for (&id, channel) in &mut self.streams {
            if channel.is_closed() {
                gone.push((id, None));
                continue;
            }
            match channel.flow_control(now) {
                FlowControl::Unchanged => {}
                FlowControl::Pause => {
                    self.engine.hold(id, true);
                }
                FlowControl::Resume => {
                    self.engine.hold(id, false);
                }
                FlowControl::Abort => gone.push((id, Some(StreamAbort::TooSlow))),
            }
        }
        for (id, cut) in gone {
            self.cancel(id, cut);
        }
    }

    fn cancel(&mut self, id: RequestId, cut: Option<StreamAbort>) {
        let channel = self.streams.remove(&id);
        let mut unread = Vec::new();
        self.engine.cancel(id, &mut unread);
        if let (Some(channel), Some(cut)) = (channel, cut) {
            channel.finish(Err(cut));
        }
    }

    fn abort_all(&mut self, cut: &StreamAbort) {
        let ids: Vec<RequestId> = self.streams.keys().copied().collect();
        for id in ids {
            self.cancel(id, Some(cut.clone()));
        }
    }

    /// `failure` is what became of the step, if it failed.
    fn deliver(&mut self, failure: Option<&StreamAbort>) {
        let mut outputs = std::mem::take(&mut self.outputs);
        for output in outputs.drain(..) {
            let id = output_id(&output);
            if let Output::Finished { reason, .. } = output {
                if let Some(channel) = self.streams.remove(&id) {
                    channel.finish(final_item(output, reason, failure));
                }
                continue;
            }
            let sent = self.streams.get_mut(&id).map_or(Ok(()), |channel| channel.send(output));
            if sent == Err(ChannelFull) {
                self.cancel(id, Some(StreamAbort::ChannelFull));
            }
        }
        self.outputs = outputs;
    }

    fn publish(&mut self) {
        let now = self.epoch.elapsed();
        if !self.engine.has_work() || now.saturating_sub(self.kv_usage_sampled_at) >= KV_USAGE_PERIOD {
            (self.kv, self.kv_usage_sampled_at) = (self.engine.kv_use(), now);
        }
        let now = EngineSnapshot {
            stats: self.engine.stats(),
            streams: self.streams.len(),
            draining: self.draining,
            first_step: self.first_step,
            kv: self.kv,
            measured: (self.measure)(self.engine.backend()),
        };
        self.snapshot.send_if_modified(|snapshot| {
            let changed = *snapshot != now;
            *snapshot = now;
            changed
        });
    }
}

fn output_id(output: &Output) -> RequestId {
    match output {
        Output::Token(token) => token.id,
        Output::Admitted { id, .. }
        | Output::Logits { id, .. }
        | Output::Scored { id, .. }
        | Output::Finished { id, .. } => *id,
    }
}

fn final_item(output: Output, reason: FinishReason, failure: Option<&StreamAbort>) -> StreamItem {
    match reason {
        FinishReason::Stop(_) | FinishReason::Complete | FinishReason::Length | FinishReason::Scored => {
            Ok(output)
        }
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
