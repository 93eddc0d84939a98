// SPDX-License-Identifier: Apache-2.0

//! Requests in the router, from their arrival to their end, and what their clients see. A request
//! has one choice.

use std::cell::RefCell;
use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;
use router::admission::{AdmissionError, AdmissionEvent, AdmissionId, AdmissionRequest, Tenant};
use router::failover::{ChoiceError, ChoiceProgress, FailoverAction, StreamLoss, WAIT_FOR_WORKER};
use router::opening::{
    CallOutcome, IsolationWait, OpeningStep, RefusalCollector, Reopening, RequestRefusal, WorkerChoice,
    WorkerForecast, WorkerTries,
};
use router::quarantine::{ContentKey, LossVerdict, StreamId};
use router::routing::{ModelKey, PromptPrefix, RoutingPolicy, StreamDemand, StreamPlacement, WorkerId};

use crate::cures::Cure;
use crate::faults::SimArrival;
use crate::fleet::Fleet;
use crate::messages::{GenerateCall, Message, StreamFrame, ToRouter, ToWorker};
use crate::network::{Link, Micros, SimPid};
use crate::weights::MODELS;
use crate::worker_process::next_token;

const REQUEST_TIMEOUT: Duration = Duration::from_secs(120);

/// A stream that counts on a worker.
#[derive(Debug)]
pub(crate) struct OpenCall {
    stream: u64,
    worker: WorkerId,
    pid: SimPid,
    placement: StreamPlacement,
    stay: StreamId,
    is_admitted: bool,
}

/// One search for a worker that admits the request.
#[derive(Debug, Default)]
pub(crate) struct WorkerQuest {
    tries: WorkerTries,
    refusals: RefusalCollector,
    isolation: IsolationWait,
    /// The quarantine keeps the request from all workers since then.
    blocked_at: Option<Duration>,
    began: Duration,
}

#[derive(Debug)]
pub(crate) struct SimRequest {
    pub(crate) key: ModelKey,
    source: u64,
    prompt: Arc<[u32]>,
    pub(crate) arrival: SimArrival,
    pub(crate) arrived: Micros,
    progress: ChoiceProgress,
    quest: WorkerQuest,
    /// The choice has lost a worker, and looks for another one.
    reopening: Option<Reopening>,
    /// The wait for the next attempt began here.
    asked: Option<Duration>,
    call: Option<OpenCall>,
    retry: u64,
}

/// A stream that is placed, and counts until this value is dropped.
struct PlacementGuard<'a> {
    routing: &'a RefCell<RoutingPolicy>,
    worker: WorkerId,
    placement: Option<StreamPlacement>,
    now: Duration,
}

impl Drop for PlacementGuard<'_> {
    fn drop(&mut self) {
        if let Some(placement) = self.placement.take() {
            self.routing.borrow_mut().end_stream(placement, self.now);
        }
    }
}

/// How a request ended, for its client.
#[derive(Debug)]
pub(crate) enum RequestEnd {
    Complete,
    Refused(RequestRefusal),
    Failed(ChoiceError),
}

impl Fleet {
    /// A client sends a request. Without a router its connection is refused.
    pub(crate) fn start_request(&mut self, arrival: SimArrival) {
        let number = self.number();
        let now = self.uptime();
        let Some(router) = self.router.as_mut().filter(|router| router.is_ready) else {
            return self.poison.ended(arrival.content);
        };
        let Some((key, source)) = router.resolve(MODELS[arrival.model]) else {
            self.counts.refused += 1;
            return self.poison.ended(arrival.content);
        };
        let content = ContentKey(u128::from(arrival.content));
        if router.quarantine.find(content, now).is_some() {
            self.counts.quarantined += 1;
            return self.poison.ended(arrival.content);
        }
        let request = AdmissionRequest {
            model: key.clone(),
            tenant: Tenant::Unnamed,
            priority: 0,
            permits: 1,
            deadline: now + REQUEST_TIMEOUT,
        };
        let state = SimRequest {
            key,
            source,
            prompt: arrival.prompt(),
            arrived: self.net.now,
            progress: ChoiceProgress::new(arrival.max_tokens),
            arrival,
            quest: WorkerQuest::default(),
            reopening: None,
            asked: None,
            call: None,
            retry: 0,
        };
        router.requests.insert(number, state);
        self.counts.requests += 1;
        self.admit(AdmissionEvent::Arrived(AdmissionId(number), request));
    }

    pub(crate) fn request_admitted(&mut self, number: u64) {
        self.begin_quest(number);
        self.search(number);
    }

    pub(crate) fn request_refused_by_admission(&mut self, number: u64, error: AdmissionError) {
        let request = self.router.as_mut().and_then(|router| router.requests.remove(&number));
        if let Some(request) = request {
            let model = MODELS[request.arrival.model].into();
            let refusal = RequestRefusal::of_admission(error, &model, WorkerForecast::NoneExpected);
            self.report_end(&request, RequestEnd::Refused(refusal));
        }
    }

    fn begin_quest(&mut self, number: u64) {
        let now = self.uptime();
        if let Some(request) = self.request(number) {
            request.quest = WorkerQuest { began: now, ..WorkerQuest::default() };
        }
    }

    fn request(&mut self, number: u64) -> Option<&mut SimRequest> {
        self.router.as_mut()?.requests.get_mut(&number)
    }

    /// Looks for a worker and calls it.
    fn search(&mut self, number: u64) {
        let now = self.uptime();
        let stream = self.number();
        let Some(router) = self.router.as_mut() else { return };
        let Some(request) = router.requests.get_mut(&number) else { return };
        let content = ContentKey(u128::from(request.arrival.content));
        if let Some(entry) = router.quarantine.find(content, now) {
            return self.refused(number, RequestRefusal::Quarantined(entry));
        }
        let prefix = PromptPrefix::new("", &request.prompt);
        let demand = StreamDemand {
            model: &request.key,
            input_tokens: (request.prompt.len() + request.progress.output().len()) as u64,
            output_tokens_max: u64::from(request.arrival.max_tokens),
            prefix: &prefix,
            session: None,
            spread_by_deaths: router.quarantine.deaths_to_spread(content, now),
        };
        let (routing, quarantine) =
            (RefCell::new(std::mem::take(&mut router.routing)), &mut router.quarantine);
        if let Some(blocked_at) = request.quest.blocked_at.take() {
            request.quest.isolation.count(now - blocked_at);
        }
        let force = request.quest.isolation.is_over();
        let choice = request.quest.tries.next(
            None,
            |tried| {
                let placement = routing.borrow_mut().place_stream(&demand, tried, None, now)?;
                Some(PlacementGuard {
                    routing: &routing,
                    worker: placement.worker,
                    placement: Some(placement),
                    now,
                })
            },
            |placed: &PlacementGuard<'_>| placed.worker,
            |worker| quarantine.enter(worker, content, now, force),
        );
        let entered = match choice {
            WorkerChoice::Enter(mut placed, stay) => Ok(placed.placement.take().map(|p| (p, stay))),
            WorkerChoice::Blocked => Err(true),
            WorkerChoice::Exhausted => Err(false),
        };
        router.routing = routing.take();
        match entered {
            Ok(None) => {}
            Ok(Some((placement, stay))) => self.call_worker(number, stream, placement, stay),
            Err(true) => {
                let retry = request.quest.isolation.next_wait(quarantine.next_change(now));
                request.quest.blocked_at = Some(now);
                router.blocked.insert(number);
                self.wait(number, retry);
            }
            Err(false) => {
                let refusal = std::mem::take(&mut request.quest.refusals).into_refusal();
                let model = MODELS[request.arrival.model].into();
                self.refused(number, refusal.unwrap_or_else(|| RequestRefusal::no_worker(&model)));
            }
        }
    }

    fn call_worker(&mut self, number: u64, stream: u64, placement: StreamPlacement, stay: StreamId) {
        let Some(router) = self.router.as_mut() else { return };
        let worker = placement.worker;
        let Some(pid) = router.workers.get(&worker).map(|registered| registered.pid) else { return };
        let Some(request) = router.requests.get_mut(&number) else { return };
        let call = GenerateCall {
            source: request.source,
            prompt: request.prompt.clone(),
            output: request.progress.output().to_vec(),
            max_tokens: request.arrival.max_tokens,
            crash_at: request.arrival.crash_at,
            content: request.arrival.content,
        };
        request.call = Some(OpenCall { stream, worker, pid, placement, stay, is_admitted: false });
        router.calls.insert(stream, (number, pid));
        let router = router.pid;
        if self.is_alive(pid) {
            let message = ToWorker::Generate { stream, router, call: Box::new(call) };
            self.net.send(Link::Calls(router, pid), pid, Message::Worker(message));
        } else {
            let died = Message::Router(ToRouter::Frame { stream, frame: StreamFrame::Died });
            self.net.send(Link::Frames(pid, router), router, died);
        }
    }

    /// Waits until something changes, at most for `wait`.
    fn wait(&mut self, number: u64, wait: Duration) {
        let retry = self.number();
        let Some(router) = self.router.as_mut() else { return };
        let Some(request) = router.requests.get_mut(&number) else { return };
        request.retry = retry;
        let message = Message::Router(ToRouter::Retry { request: number, number: retry });
        self.net.timer(router.pid, wait.as_micros() as Micros, message);
    }

    pub(crate) fn wake_request(&mut self, number: u64) {
        let Some(router) = self.router.as_ref() else { return };
        let Some(request) = router.requests.get(&number) else { return };
        let message = Message::Router(ToRouter::Retry { request: number, number: request.retry });
        self.net.timer(router.pid, 0, message);
    }

    pub(crate) fn retry_request(&mut self, number: u64, retry: u64) {
        let now = self.uptime();
        let next = self.number();
        let Some(router) = self.router.as_mut() else { return };
        let Some(request) = router.requests.get_mut(&number) else { return };
        if request.retry != retry || request.call.is_some() {
            return;
        }
        request.retry = next;
        router.waiting.remove(&number);
        router.blocked.remove(&number);
        if let (Some(asked), Some(reopening)) = (request.asked.take(), request.reopening.as_mut()) {
            let asking = asked.saturating_sub(request.quest.began);
            if let Err(error) = reopening.count_wait(asking, now - asked, WAIT_FOR_WORKER) {
                return self.end_request(number, RequestEnd::Failed(error));
            }
            self.begin_quest(number);
        }
        self.search(number);
    }

    /// No worker admits the request now, or none ever will.
    fn refused(&mut self, number: u64, refusal: RequestRefusal) {
        let now = self.uptime();
        self.drop_claims(number);
        let Some(request) = self.request(number) else { return };
        match &request.reopening {
            None => self.end_request(number, RequestEnd::Refused(refusal)),
            Some(reopening) => match reopening.refused(refusal) {
                Ok(wait) => {
                    request.asked = Some(now);
                    self.wait(number, wait);
                    self.router.iter_mut().for_each(|router| _ = router.waiting.insert(number));
                }
                Err(error) => self.end_request(number, RequestEnd::Failed(error)),
            },
        }
    }

    fn drop_claims(&mut self, number: u64) {
        let Some(router) = self.router.as_mut() else { return };
        let Some(request) = router.requests.get(&number) else { return };
        router.quarantine.drop_claims(ContentKey(u128::from(request.arrival.content)));
        self.wake_blocked();
    }

    pub(crate) fn handle_stream_frame(&mut self, stream: u64, frame: StreamFrame) {
        let Some(router) = self.router.as_mut() else { return };
        let Some(&(number, _)) = router.calls.get(&stream) else { return };
        let Some(call) = router.requests.get_mut(&number).and_then(|request| request.call.as_mut()) else {
            return;
        };
        if call.is_admitted {
            return self.handle_open_stream(number, frame);
        }
        let worker = call.worker;
        let outcome = match frame {
            StreamFrame::Admitted => {
                call.is_admitted = true;
                CallOutcome::Admitted
            }
            StreamFrame::Full => {
                let (detail, retry_after) = (String::new(), Duration::from_secs(1));
                CallOutcome::Full(RequestRefusal::Overloaded { detail, retry_after })
            }
            StreamFrame::NotServing | StreamFrame::Drains => CallOutcome::NotServing,
            StreamFrame::Died => CallOutcome::WorkerDied { had_request: true },
            StreamFrame::Tokens(_) | StreamFrame::Finished => {
                return self.break_invariant(|| "I6: a stream began without `admitted`".to_owned());
            }
        };
        let mut verdict = LossVerdict::Resume;
        if matches!(outcome, CallOutcome::WorkerDied { .. }) {
            verdict = self.record_loss(number);
            self.remove_worker_from_router(worker);
        }
        let Some(request) = self.request(number) else { return };
        match request.quest.refusals.handle(outcome, verdict) {
            OpeningStep::Open => {
                if request.reopening.take().is_some() {
                    self.counts.resumes += 1;
                }
                self.drop_claims(number);
            }
            OpeningStep::TryNext => {
                self.close_call(number);
                self.search(number);
            }
            OpeningStep::Refuse(refusal) => {
                self.close_call(number);
                self.refused(number, refusal);
            }
        }
    }

    fn handle_open_stream(&mut self, number: u64, frame: StreamFrame) {
        let loss = match frame {
            StreamFrame::Tokens(ids) => return self.handle_tokens(number, &ids),
            StreamFrame::Finished => {
                self.record_completion(number);
                return self.end_request(number, RequestEnd::Complete);
            }
            StreamFrame::Died => StreamLoss::WorkerDied { detail: String::new() },
            StreamFrame::Drains => StreamLoss::WorkerDrains { detail: String::new() },
            StreamFrame::Admitted | StreamFrame::Full | StreamFrame::NotServing => return,
        };
        let mut verdict = LossVerdict::Resume;
        if matches!(loss, StreamLoss::WorkerDied { .. }) {
            verdict = self.record_loss(number);
            let worker = self.request(number).and_then(|request| Some(request.call.as_ref()?.worker));
            worker.into_iter().for_each(|worker| self.remove_worker_from_router(worker));
        }
        let Some(request) = self.request(number) else { return };
        match request.progress.handle_loss(loss, verdict) {
            FailoverAction::Finish => self.end_request(number, RequestEnd::Complete),
            FailoverAction::Fail(error) => self.end_request(number, RequestEnd::Failed(error)),
            FailoverAction::Resume { detail } => {
                request.reopening = Some(Reopening::new(request.key.name.clone(), detail));
                self.close_call(number);
                self.begin_quest(number);
                self.search(number);
            }
        }
    }

    fn record_loss(&mut self, number: u64) -> LossVerdict {
        let now = self.uptime();
        let Some(router) = self.router.as_mut() else { return LossVerdict::Resume };
        let Some(request) = router.requests.get(&number) else { return LossVerdict::Resume };
        let Some(call) = &request.call else { return LossVerdict::Resume };
        let content = ContentKey(u128::from(request.arrival.content));
        let output = request.progress.output().len();
        match self.missing {
            Some(Cure::Quarantine) => LossVerdict::Resume,
            _ => router.quarantine.record_loss(call.worker, call.stay, content, output, now),
        }
    }

    fn record_completion(&mut self, number: u64) {
        let Some(router) = self.router.as_mut() else { return };
        let Some(request) = router.requests.get(&number) else { return };
        router.quarantine.record_completion(ContentKey(u128::from(request.arrival.content)));
    }

    /// The client gets tokens: the next ones of the one right output.
    fn handle_tokens(&mut self, number: u64, ids: &[u32]) {
        let now = self.uptime();
        let Some(router) = self.router.as_mut() else { return };
        let Some(request) = router.requests.get_mut(&number) else { return };
        let Some(call) = request.call.as_mut() else { return };
        router.routing.end_prefill(&mut call.placement);
        let mut right: Vec<u32> = request.prompt.iter().chain(request.progress.output()).copied().collect();
        for &id in ids {
            let expected = next_token(request.source, &right);
            if id != expected {
                let at = right.len() - request.prompt.len();
                let why = format!("I6: token {at} of request {number} is {id} instead of {expected}");
                return self.break_invariant(|| why);
            }
            right.push(id);
        }
        if let Err(error) = request.progress.append(ids, Bytes::new()) {
            return self.break_invariant(|| format!("I6: request {number}: {error}"));
        }
        self.counts.tokens += ids.len();
        let content = ContentKey(u128::from(request.arrival.content));
        let (worker, stay, output) = (call.worker, call.stay, request.progress.output().len());
        if router.quarantine.record_output(worker, stay, content, output, now) {
            self.wake_blocked();
        }
    }

    /// The stream leaves its worker.
    fn close_call(&mut self, number: u64) {
        let now = self.uptime();
        let Some(router) = self.router.as_mut() else { return };
        let Some(call) = router.requests.get_mut(&number).and_then(|request| request.call.take()) else {
            return;
        };
        router.calls.remove(&call.stream);
        router.routing.end_stream(call.placement, now);
        router.quarantine.leave(call.worker, call.stay);
        let (from, cancel) = (router.pid, ToWorker::Cancel { stream: call.stream });
        self.net.send(Link::Calls(from, call.pid), call.pid, Message::Worker(cancel));
        self.wake_blocked();
    }

    fn end_request(&mut self, number: u64, end: RequestEnd) {
        self.close_call(number);
        let Some(router) = self.router.as_mut() else { return };
        router.waiting.remove(&number);
        router.blocked.remove(&number);
        let Some(request) = router.requests.remove(&number) else { return };
        self.report_end(&request, end);
        self.admit(AdmissionEvent::StreamEnded(AdmissionId(number)));
    }

    fn report_end(&mut self, request: &SimRequest, end: RequestEnd) {
        self.poison.ended(request.arrival.content);
        let (output, max) = (request.progress.output().len(), request.arrival.max_tokens as usize);
        match end {
            RequestEnd::Complete if output == max => self.counts.completed += 1,
            RequestEnd::Complete => {
                self.break_invariant(|| {
                    format!("I6: a stream ended silently after {output} of {max} tokens")
                });
            }
            RequestEnd::Refused(refusal) => {
                self.counts.refused += 1;
                self.check_refusal(request, &format!("{refusal:?}"));
            }
            RequestEnd::Failed(error) => {
                self.counts.failed += 1;
                self.check_refusal(request, &format!("{error:?}"));
            }
        }
    }

    /// Connections of clients are reset, which they see.
    pub(crate) fn lose_router(&mut self, pid: SimPid) {
        let Some(router) = self.router.take() else { return };
        self.counts.resets += router.requests.len();
        self.poison.router_lost();
        for (stream, (_, worker)) in router.calls {
            let cancel = Message::Worker(ToWorker::Cancel { stream });
            self.net.send(Link::Calls(pid, worker), worker, cancel);
        }
    }
}
