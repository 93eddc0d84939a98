// SPDX-License-Identifier: Apache-2.0

//! The worker process around its real scheduler, block pool, admission control and repeated claims.
//! The model is a hash: a token depends on the file, the prompt and all tokens before it (I5).

use std::collections::BTreeMap;
use std::rc::Rc;
use std::time::Duration;

use bytes::Bytes;
use engine::schedule::admission::{AdmissionControl, QueueLimits};
use engine::schedule::scheduler::Scheduler;
use engine::schedule::sequence::{NewSequence, SequenceKind};
use engine::schedule::sequence_id::SequenceId;
use engine::schedule::step_plan::{ChunkOutputs, SchedulerLimits};
use handoff::PROTOCOL_VERSION;
use handoff::claim_retry::{ClaimAnswer, ClaimRetry, ClaimStep};
use handoff::manifest::MANIFEST_FORMAT;
use memory::manifest::HOST_DEVICE;
use prefix::Scope;
use proto::weights::v1::RefusalReason;
use supervisor::Termination;
use weight_server::events::WeightServerEvent;
use weight_server::ids::ConnectionId;
use weight_server::waiters::{AttachParams, LeaseClaim};

use crate::fleet::Fleet;
use crate::messages::{
    GenerateCall, Message, Notice, ServerFrame, SimManifest, StreamFrame, ToRouter, ToWeightServer, ToWorker,
    TokenBytes,
};
use crate::network::{Link, MILLISECOND, Micros, SECOND, SimPid, mix};
use crate::weights::{ALLOCATIONS, WeightCopy, model_index};

const ATTACH_RETRY: Micros = 50 * MILLISECOND;
/// How long a worker asks for a model that is not there.
const ATTACH_PATIENCE: Micros = 30 * SECOND;
/// A weight-server that is stopped does not answer a claim.
const CLAIM_TIMEOUT: Micros = 10 * SECOND;
const REPORT_PERIOD: Micros = SECOND;
pub(crate) const RUNNING_MAX: usize = 4;
pub(crate) const QUEUE_MAX: usize = 8;
pub(crate) const KV_BLOCKS: usize = 24;
pub(crate) const BLOCK_TOKENS: usize = 8;
const KV_BYTES: u64 = 50;
const WORKSPACE_BYTES: u64 = 10;

#[derive(Debug)]
pub(crate) struct MappedWeights {
    pub(crate) manifest: Rc<SimManifest>,
    pub(crate) copy: Rc<WeightCopy>,
    pub(crate) lease: u64,
}

/// Where the lease is.
#[derive(Debug)]
pub(crate) enum SimLease {
    Attaching,
    Held,
    Claiming(ClaimRetry),
    Lost,
}

#[derive(Debug)]
pub(crate) struct WorkerStream {
    pub(crate) router: SimPid,
    call: Box<GenerateCall>,
    sequence: SequenceId,
    is_queued: bool,
}

#[derive(Debug)]
pub(crate) struct SimWorker {
    pub(crate) model: String,
    pub(crate) token: TokenBytes,
    pub(crate) weights: Option<MappedWeights>,
    pub(crate) lease: SimLease,
    /// The connection to the weight-server.
    pub(crate) connection: Option<u64>,
    attempt: u64,
    attached_until: Micros,
    pub(crate) scheduler: Scheduler,
    admission: AdmissionControl,
    pub(crate) streams: BTreeMap<u64, WorkerStream>,
    is_stepping: bool,
    pub(crate) is_draining: bool,
    steps: u64,
}

impl SimWorker {
    pub(crate) fn new(model: &str, token: TokenBytes) -> Self {
        let limits = SchedulerLimits {
            block_tokens: BLOCK_TOKENS,
            step_tokens: 32,
            running_max: RUNNING_MAX,
            score_rows_max: 1,
            draft_rows_max: 0,
            prefix_cache: true,
            can_fork: false,
        };
        Self {
            model: model.to_owned(),
            token,
            weights: None,
            lease: SimLease::Attaching,
            connection: None,
            attempt: 0,
            attached_until: Micros::MAX,
            scheduler: Scheduler::new(limits, KV_BLOCKS),
            admission: AdmissionControl::new(QueueLimits::for_queue(QUEUE_MAX)),
            streams: BTreeMap::new(),
            is_stepping: false,
            is_draining: false,
            steps: 0,
        }
    }

    pub(crate) fn held_connection(&self) -> Option<u64> {
        self.connection.filter(|_| matches!(self.lease, SimLease::Held))
    }

    pub(crate) fn serves(&self) -> bool {
        self.weights.is_some() && !self.is_draining
    }
}

impl Fleet {
    pub(crate) fn handle_worker(&mut self, pid: SimPid, event: ToWorker) {
        let patience = self.net.now + ATTACH_PATIENCE;
        let Some(worker) = self.workers.get_mut(&pid) else { return };
        match event {
            ToWorker::Ready => {
                worker.attached_until = patience;
                self.notify(pid, Notice::Ready);
                self.net.timer(pid, 0, Message::Worker(ToWorker::Attach));
                self.net.timer(pid, REPORT_PERIOD, Message::Worker(ToWorker::Report));
            }
            ToWorker::Attach => self.attach(pid),
            ToWorker::Frame { connection, frame } => {
                if worker.connection == Some(connection) {
                    self.handle_server_frame(pid, connection, frame);
                }
            }
            ToWorker::Claim { attempt } => {
                if worker.attempt == attempt {
                    self.claim(pid);
                }
            }
            ToWorker::ClaimTimeout { connection } => {
                if worker.connection == Some(connection) && matches!(worker.lease, SimLease::Claiming(_)) {
                    self.close_connection(connection);
                    self.claim_answered(pid, ClaimAnswer::Nothing);
                }
            }
            ToWorker::Step => self.step(pid),
            ToWorker::Generate { stream, router, call } => self.generate(pid, stream, router, call),
            ToWorker::Cancel { stream } => self.end_worker_stream(pid, stream),
            ToWorker::Report => {
                let (running, waiting) = (worker.scheduler.running_count(), worker.scheduler.waiting_count());
                let (running, waiting, steps) = (running as u32, waiting as u32, worker.steps);
                self.send_to_router(pid, ToRouter::Report { pid, running, waiting, steps });
                self.net.timer(pid, REPORT_PERIOD, Message::Worker(ToWorker::Report));
            }
        }
    }

    fn attach(&mut self, pid: SimPid) {
        let connection = self.number();
        let now = self.net.now;
        let Some(worker) = self.workers.get_mut(&pid).filter(|worker| worker.weights.is_none()) else {
            return;
        };
        if now > worker.attached_until {
            return self.kill(pid, Termination::ExitCode(1));
        }
        let Some(server) = self.weight_server.as_ref().filter(|server| server.is_ready()) else {
            return self.net.timer(pid, 2 * ATTACH_RETRY, Message::Worker(ToWorker::Attach));
        };
        worker.connection = Some(connection);
        let params = AttachParams {
            protocol: PROTOCOL_VERSION,
            layout: 0,
            manifest_format: MANIFEST_FORMAT,
            device: HOST_DEVICE.to_owned(),
            model: worker.model.clone(),
            token: Bytes::copy_from_slice(&worker.token),
            kv_bytes: KV_BYTES,
            workspace_bytes: WORKSPACE_BYTES,
        };
        let attach = ToWeightServer::Attach { connection, pid, params: Box::new(params) };
        self.net.send(Link::Handoff(connection), server.pid, Message::WeightServer(attach));
    }

    fn handle_server_frame(&mut self, pid: SimPid, connection: u64, frame: ServerFrame) {
        let patience = self.net.now + ATTACH_PATIENCE;
        let Some(worker) = self.workers.get_mut(&pid) else { return };
        match (&worker.lease, frame) {
            (SimLease::Attaching, ServerFrame::Waiting) => worker.attached_until = patience,
            (SimLease::Attaching, ServerFrame::Granted { lease, manifest, copy }) => {
                worker.weights = Some(MappedWeights { manifest, copy, lease });
                worker.lease = SimLease::Held;
                let delivered = WeightServerEvent::Delivered { connection: ConnectionId(connection) };
                self.send_to_server(connection, ToWeightServer::Event(Box::new(delivered)));
                self.report_serving(pid);
            }
            (SimLease::Attaching, ServerFrame::Refused(reason)) => {
                worker.connection = None;
                let is_transient = matches!(
                    reason,
                    RefusalReason::UnknownModel
                        | RefusalReason::Busy
                        | RefusalReason::ShuttingDown
                        | RefusalReason::Token
                );
                match is_transient {
                    true => self.net.timer(pid, ATTACH_RETRY, Message::Worker(ToWorker::Attach)),
                    false => self.kill(pid, Termination::ExitCode(1)),
                }
            }
            (SimLease::Attaching, ServerFrame::Closed) => {
                worker.connection = None;
                self.net.timer(pid, ATTACH_RETRY, Message::Worker(ToWorker::Attach));
            }
            (SimLease::Held, ServerFrame::Refused(reason)) => self.lose_lease(pid, reason),
            (SimLease::Held, ServerFrame::Closed) => {
                worker.lease = SimLease::Claiming(ClaimRetry::default());
                self.claim_later(pid);
            }
            (SimLease::Claiming(_), ServerFrame::Reclaimed) => {
                self.claim_answered(pid, ClaimAnswer::Reclaimed);
            }
            (SimLease::Claiming(_), ServerFrame::Refused(reason)) => {
                self.close_connection(connection);
                self.claim_answered(pid, ClaimAnswer::Refused(reason));
            }
            (SimLease::Claiming(_), ServerFrame::Closed) => self.claim_answered(pid, ClaimAnswer::Nothing),
            (SimLease::Claiming(_), ServerFrame::ReturnRequested) => {
                let Some(weights) = &worker.weights else { return };
                let (manifest, copy) = (weights.manifest.clone(), weights.copy.clone());
                self.send_to_server(connection, ToWeightServer::Returned { connection, manifest, copy });
            }
            _ => {}
        }
    }

    fn send_to_server(&mut self, connection: u64, event: ToWeightServer) {
        if let Some(server) = &self.weight_server {
            self.net.send(Link::Handoff(connection), server.pid, Message::WeightServer(event));
        }
    }

    /// The worker closes its end.
    fn close_connection(&mut self, connection: u64) {
        let ended = WeightServerEvent::ConnectionEnded { connection: ConnectionId(connection) };
        self.send_to_server(connection, ToWeightServer::Event(Box::new(ended)));
    }

    fn claim_later(&mut self, pid: SimPid) {
        let attempt = self.number();
        let Some(worker) = self.workers.get_mut(&pid) else { return };
        let SimLease::Claiming(retry) = &mut worker.lease else { return };
        (worker.connection, worker.attempt) = (None, attempt);
        let wait = retry.next_wait().as_micros() as Micros;
        self.net.timer(pid, wait, Message::Worker(ToWorker::Claim { attempt }));
    }

    fn claim(&mut self, pid: SimPid) {
        let connection = self.number();
        let Some(server) = self.weight_server.as_ref().filter(|server| server.is_ready()) else {
            return self.claim_answered(pid, ClaimAnswer::Nothing);
        };
        let Some(worker) = self.workers.get_mut(&pid) else { return };
        let Some(weights) = &worker.weights else { return };
        let contents = &weights.manifest.contents;
        let claim = LeaseClaim {
            protocol: PROTOCOL_VERSION,
            generation: weights.manifest.generation,
            lease: weights.lease,
            token: Bytes::copy_from_slice(&worker.token),
            digest: Bytes::copy_from_slice(&contents.digest.unwrap_or_default()),
            device: HOST_DEVICE.to_owned(),
            kv_bytes: KV_BYTES,
            workspace_bytes: WORKSPACE_BYTES,
            fds: ALLOCATIONS as u32 + 1,
            manifest_inode: contents.manifest_inode,
        };
        worker.connection = Some(connection);
        let claim = ToWeightServer::Reclaim { connection, pid, claim: Box::new(claim) };
        self.net.send(Link::Handoff(connection), server.pid, Message::WeightServer(claim));
        let timeout = ToWorker::ClaimTimeout { connection };
        self.net.timer(pid, CLAIM_TIMEOUT, Message::Worker(timeout));
    }

    fn claim_answered(&mut self, pid: SimPid, answer: ClaimAnswer) {
        match ClaimRetry::handle(answer) {
            ClaimStep::Held => {
                if let Some(worker) = self.workers.get_mut(&pid) {
                    worker.lease = SimLease::Held;
                }
            }
            ClaimStep::Lost(reason) => self.lose_lease(pid, reason),
            ClaimStep::TryAgain => self.claim_later(pid),
        }
    }

    fn lose_lease(&mut self, pid: SimPid, reason: RefusalReason) {
        if let Some(worker) = self.workers.get_mut(&pid) {
            worker.lease = SimLease::Lost;
            worker.connection = None;
            self.check_lost_lease(pid, reason);
        }
    }

    pub(crate) fn report_serving(&mut self, pid: SimPid) {
        let Some(worker) = self.workers.get(&pid).filter(|worker| worker.serves()) else { return };
        let Some(weights) = &worker.weights else { return };
        let (model, source) = (model_index(&worker.model) as u8, weights.copy.source);
        let generation = weights.manifest.generation;
        self.send_to_router(pid, ToRouter::WorkerServes { pid, model, source, generation });
    }

    pub(crate) fn send_to_router(&mut self, pid: SimPid, event: ToRouter) {
        if let Some(router) = &self.router {
            self.net.send(Link::Frames(pid, router.pid), router.pid, Message::Router(event));
        }
    }

    /// The worker takes no new streams, and ends those that it has.
    pub(crate) fn drain_worker(&mut self, pid: SimPid) {
        self.send_to_router(pid, ToRouter::WorkerGone { pid });
        let Some(worker) = self.workers.get_mut(&pid) else { return };
        worker.is_draining = true;
        let streams: Vec<u64> = worker.streams.keys().copied().collect();
        for stream in streams {
            self.send_stream_frame(pid, stream, StreamFrame::Drains);
            self.end_worker_stream(pid, stream);
        }
    }

    pub(crate) fn send_stream_frame(&mut self, pid: SimPid, stream: u64, frame: StreamFrame) {
        let Some(call) = self.workers.get(&pid).and_then(|worker| worker.streams.get(&stream)) else {
            return;
        };
        let router = call.router;
        let frame = Message::Router(ToRouter::Frame { stream, frame });
        self.net.send(Link::Frames(pid, router), router, frame);
    }

    fn generate(&mut self, pid: SimPid, stream: u64, router: SimPid, call: Box<GenerateCall>) {
        let Some(worker) = self.workers.get_mut(&pid) else { return };
        let refuse = |frame| Message::Router(ToRouter::Frame { stream, frame });
        let link = Link::Frames(pid, router);
        let is_served = worker.serves()
            && worker.weights.as_ref().is_some_and(|weights| weights.copy.source == call.source);
        if !is_served {
            return self.net.send(link, router, refuse(StreamFrame::NotServing));
        }
        if worker.admission.try_enter(0, 0).is_err() {
            self.counts.full_workers += 1;
            return self.net.send(link, router, refuse(StreamFrame::Full));
        }
        let tokens: Vec<u32> = call.prompt.iter().chain(&call.output).copied().collect();
        let tokens_max = call.prompt.len() + call.max_tokens as usize;
        let new = NewSequence {
            kind: SequenceKind::Generate,
            priority: 0,
            tenant: 0,
            tokens,
            tokens_max,
            scope: &Scope::default(),
        };
        let sequence = worker.scheduler.add(new);
        let admitted = WorkerStream { router, call, sequence, is_queued: true };
        worker.streams.insert(stream, admitted);
        if !std::mem::replace(&mut worker.is_stepping, true) {
            self.net.timer(pid, MILLISECOND, Message::Worker(ToWorker::Step));
        }
    }

    pub(crate) fn end_worker_stream(&mut self, pid: SimPid, stream: u64) {
        let Some(worker) = self.workers.get_mut(&pid) else { return };
        if let Some(ended) = worker.streams.remove(&stream) {
            worker.scheduler.remove(ended.sequence);
            if ended.is_queued {
                worker.admission.leave(0);
            }
        }
    }

    /// One step of the engine.
    fn step(&mut self, pid: SimPid) {
        let now = Duration::from_micros(self.net.now);
        let Some(worker) = self.workers.get_mut(&pid) else { return };
        worker.is_stepping = !worker.streams.is_empty();
        if !worker.is_stepping {
            return;
        }
        worker.steps += 1;
        worker.admission.start_step(now);
        let plan = worker.scheduler.schedule(usize::MAX);
        let admitted: Vec<SequenceId> = plan.admitted.iter().map(|(sequence, _)| *sequence).collect();
        let with_output = plan.chunks.iter().filter(|chunk| chunk.outputs != ChunkOutputs::None);
        let with_output: Vec<SequenceId> = with_output.map(|chunk| chunk.sequence_id).collect();
        let was_preempted = plan.preempted > 0;
        let in_step = |stream: &WorkerStream| with_output.contains(&stream.sequence);
        let crash = worker.streams.values().find(|stream| {
            let next = worker.scheduler.sequence(stream.sequence).map_or(0, |s| s.tokens().len());
            in_step(stream) && stream.call.crash_at.is_some_and(|at| stream.call.prompt.len() + at == next)
        });
        if let Some(crash) = crash {
            let (content, router) = (crash.call.content, crash.router);
            return self.crash_worker(pid, content, router);
        }
        worker.scheduler.commit();
        self.counts.preemptions += usize::from(was_preempted);
        let mut frames: Vec<(u64, StreamFrame)> = Vec::new();
        let mut ended = Vec::new();
        for (&number, stream) in &mut worker.streams {
            if stream.is_queued && admitted.contains(&stream.sequence) {
                stream.is_queued = false;
                worker.admission.admitted(0, now);
                frames.push((number, StreamFrame::Admitted));
            }
            if !with_output.contains(&stream.sequence) {
                continue;
            }
            let Some(sequence) = worker.scheduler.sequence(stream.sequence) else { continue };
            let token = next_token(stream.call.source, sequence.tokens());
            let is_last = sequence.tokens().len() + 1 == sequence.tokens_max();
            frames.push((number, StreamFrame::Tokens(vec![token])));
            match is_last {
                true => {
                    frames.push((number, StreamFrame::Finished));
                    ended.push(number);
                }
                false => worker.scheduler.push_token(stream.sequence, token),
            }
        }
        self.check_kv_cache(pid);
        for (stream, frame) in frames {
            self.send_stream_frame(pid, stream, frame);
        }
        ended.into_iter().for_each(|stream| self.end_worker_stream(pid, stream));
        let took = self.net.random.between(5 * MILLISECOND, 25 * MILLISECOND);
        self.net.timer(pid, took, Message::Worker(ToWorker::Step));
    }

    /// A request ends its worker.
    fn crash_worker(&mut self, pid: SimPid, content: u64, router: SimPid) {
        self.poison_killed(content, router);
        self.kill(pid, Termination::Signal(11));
    }
}

/// The model: the last tokens and the position decide about the next one.
pub(crate) fn next_token(source: u64, tokens: &[u32]) -> u32 {
    let last = tokens.iter().rev().take(3).fold(source, |hash, &token| mix(hash ^ u64::from(token)));
    (mix(last ^ tokens.len() as u64) % 50_000) as u32
}
