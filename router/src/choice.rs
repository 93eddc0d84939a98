// SPDX-License-Identifier: Apache-2.0

//! One choice of a response: reads a worker's token frames, detokenizes them, and fails over to
//! another worker if the worker is lost (I6).
//!
//! 1. A choice ends with exactly one [`ChoiceEvent::Ended`], unless the client is gone. A permit
//!    for that event in the client's channel is reserved from the start.
//! 2. Dropping the worker's stream cancels it at the worker.

use std::sync::Arc;
use std::time::Duration;

use tokio::sync::mpsc;
use tokio::time::Instant;

use crate::access_control::KeyedRequest;
use crate::admission_control::StreamPermits;
use crate::dispatch::{Dispatcher, OpenStream};
use crate::failover::{ChoiceError, ChoiceProgress, FailoverAction, SPREAD_WAIT, StreamLoss, resume_wait};
use crate::metrics::{self, TokenMetrics};
use crate::model::ServedModel;
use crate::quarantine::LossVerdict;
use crate::text_stream::TextStream;
use crate::usage::ChoiceUsage;
use crate::wire::{ChoiceCall, Logprob, WorkerFrame, stream_loss};

/// A client that reads nothing for this long is cancelled, so that it does not hold KV blocks.
pub(crate) const SLOW_CLIENT_WAIT: Duration = Duration::from_secs(30);

/// How much later than the worker the router ends a stream at its deadline.
const DEADLINE_SLACK: Duration = Duration::from_secs(2);

/// An event of one choice. Text may lag behind the tokens of the same delta.
#[derive(Debug)]
pub(crate) enum ChoiceEvent {
    Output(OutputDelta),
    Ended { choice: u32, outcome: Result<ChoiceOutcome, ChoiceError> },
}

#[derive(Clone, Debug, Default)]
pub(crate) struct OutputDelta {
    pub(crate) choice: u32,
    pub(crate) tokens: Vec<u32>,
    pub(crate) text: String,
    /// One entry for each token, or none if the client did not ask for log probabilities.
    pub(crate) logprobs: Vec<Logprob>,
}

/// What ended a choice.
#[derive(Clone, Debug, PartialEq)]
pub(crate) enum FinishCause {
    StopString(String),
    StopToken(Option<u32>),
    Length,
}

#[derive(Clone, Debug)]
pub(crate) struct ChoiceOutcome {
    pub(crate) finish: FinishCause,
    pub(crate) output_tokens: u32,
    pub(crate) cached_tokens: u32,
    pub(crate) resumes: u32,
    /// Time from the arrival of the request.
    pub(crate) time_to_first_token: Option<Duration>,
    pub(crate) total_time: Duration,
}

/// What the task of a choice needs.
pub(crate) struct ChoiceTask {
    /// Index in the response: prompt index times `best_of` plus choice of the prompt.
    pub(crate) index: u32,
    pub(crate) model: Arc<ServedModel>,
    pub(crate) dispatcher: Dispatcher,
    pub(crate) call: ChoiceCall,
    pub(crate) arrived: Instant,
    pub(crate) deadline: Option<Instant>,
    /// The client receives output while it is generated.
    pub(crate) is_streamed: bool,
    pub(crate) events: mpsc::Sender<ChoiceEvent>,
    /// Counts the output for the API key, however the choice ends.
    pub(crate) active: Option<KeyedRequest>,
    /// Held until the task ends, whichever worker serves it.
    pub(crate) permit: StreamPermits,
}

/// Where the output of a choice goes.
pub(crate) struct BegunChoice {
    pub(crate) text: TextStream,
    /// Tells the usage log what the choice has used, however it ends.
    pub(crate) usage: Option<ChoiceUsage>,
    /// The reserved channel slot for [`ChoiceEvent::Ended`].
    pub(crate) ended_permit: mpsc::OwnedPermit<ChoiceEvent>,
}

impl ChoiceTask {
    /// Runs an admitted choice to its end.
    pub(crate) async fn run(self, stream: OpenStream, progress: ChoiceProgress, begun: BegunChoice) {
        let BegunChoice { text, usage, ended_permit } = begun;
        let choice = self.index;
        let model = self.model.clone();
        let events = self.events.clone();
        let mut running = RunningChoice {
            text: Some(text),
            usage,
            progress,
            cached_tokens: 0,
            time_to_first_token: None,
            last_token_at: None,
            token_metrics: TokenMetrics::of_model(model.name()),
            task: self,
        };
        // Notices a client that disconnects, also while the worker computes a long prefill.
        let outcome = tokio::select! {
            outcome = running.run(stream) => Some(outcome),
            () = events.closed() => None,
        };
        if let Some(active) = &running.task.active {
            active.record_output(running.progress.output().len());
        }
        let failure = match &outcome {
            Some(Ok(_)) => None,
            Some(Err(_)) => Some("choice failed"),
            None => Some("client gone"),
        };
        let first_token = running.time_to_first_token;
        running.task.call.trace.record_choice(running.progress.output().len(), first_token, failure);
        if let (Some(usage), Some(outcome)) = (&mut running.usage, &outcome) {
            usage.finish(outcome);
        }
        let Some(outcome) = outcome else { return metrics::record_cancelled_choice(model.name()) };
        match &outcome {
            Ok(ChoiceOutcome { finish, total_time, .. }) => {
                metrics::record_finished_choice(model.name(), finish.reason(), *total_time);
            }
            Err(error) => {
                metrics::record_failed_choice(model.name());
                let request = running.task.call.logged();
                let (request_id, trace_id) = (request.request_id, request.trace_id());
                tracing::warn!(%request_id, trace_id, choice, %error, "choice failed");
            }
        }
        ended_permit.send(ChoiceEvent::Ended { choice, outcome });
    }

    /// Removes a dead worker, and asks the quarantine whether this choice may have killed it.
    /// `output_tokens` is `None` for a choice that cannot have.
    pub(crate) fn record_loss(
        &self,
        loss: &StreamLoss,
        stream: &OpenStream,
        output_tokens: Option<usize>,
    ) -> LossVerdict {
        let StreamLoss::WorkerDied { detail } = loss else { return LossVerdict::Resume };
        let (worker, request) = (&stream.placed.worker, self.call.logged());
        let (request_id, trace_id) = (request.request_id, request.trace_id());
        tracing::warn!(%request_id, trace_id, worker = %worker.name, detail, "worker lost in mid-stream");
        self.dispatcher.registry.remove(worker.id);
        output_tokens.map_or(LossVerdict::Resume, |tokens| stream.stay.record_loss(tokens, request))
    }

    /// Opens the stream on another worker. `cause` is why the last one was lost.
    pub(crate) async fn resume(
        &self,
        progress: &ChoiceProgress,
        cause: String,
    ) -> Result<OpenStream, ChoiceError> {
        let dispatcher = &self.dispatcher;
        if dispatcher.quarantine.deaths_to_spread(self.call.content).is_some() {
            let until = Instant::now() + SPREAD_WAIT;
            tokio::time::sleep_until(self.deadline.map_or(until, |deadline| deadline.min(until))).await;
        }
        let (lost, has_sent_output) = (Instant::now(), self.is_streamed && !progress.output().is_empty());
        let limit = || resume_wait(has_sent_output, self.permit.worker_wait(&self.call.model, lost));
        let stream = dispatcher.reopen_stream(&self.call, progress, self.deadline, cause, limit).await?;
        metrics::record_resume(self.model.name());
        let request = self.call.logged();
        tracing::info!(
            request_id = %request.request_id,
            trace_id = request.trace_id(),
            worker = %stream.placed.worker.name,
            tokens = progress.output().len(),
            "stream resumed"
        );
        Ok(stream)
    }
}

impl FinishCause {
    /// OpenAI's `finish_reason`.
    pub(crate) fn reason(&self) -> &'static str {
        match self {
            FinishCause::StopString(_) | FinishCause::StopToken(_) => "stop",
            FinishCause::Length => "length",
        }
    }
}

struct RunningChoice {
    task: ChoiceTask,
    progress: ChoiceProgress,
    /// `None` after [`Self::finish`].
    text: Option<TextStream>,
    usage: Option<ChoiceUsage>,
    cached_tokens: u32,
    time_to_first_token: Option<Duration>,
    last_token_at: Option<Instant>,
    token_metrics: TokenMetrics,
}

impl RunningChoice {
    async fn run(&mut self, mut stream: OpenStream) -> Result<ChoiceOutcome, ChoiceError> {
        // One timer for the choice, not one for each frame.
        let mut late = std::pin::pin!(sleep_until_late(self.task.deadline));
        loop {
            let frame = tokio::select! {
                biased;
                frame = next_frame(&mut stream) => frame,
                () = &mut late => Err(StreamLoss::DeadlineExceeded),
            };
            let loss = match frame {
                Ok(frame) => {
                    if matches!(frame, WorkerFrame::Tokens { .. }) {
                        stream.placed.end_prefill();
                    }
                    let finish = self.handle_frame(frame).await?;
                    stream.stay.record_output(self.progress.output().len());
                    match finish {
                        Some(finish) => {
                            stream.stay.record_completion();
                            return self.finish(finish).await;
                        }
                        None => continue,
                    }
                }
                Err(loss) => loss,
            };
            stream.span.fail(loss.reason());
            let verdict = self.task.record_loss(&loss, &stream, Some(self.progress.output().len()));
            match self.progress.handle_loss(loss, verdict) {
                FailoverAction::Finish => return self.finish(FinishCause::Length).await,
                FailoverAction::Fail(error) => return Err(error),
                FailoverAction::Resume { detail } => {
                    // Ends the stream on the lost worker, so that it does not count when the next
                    // worker is chosen.
                    drop(stream);
                    stream = self.task.resume(&self.progress, detail).await?;
                }
            }
        }
    }

    /// Passes a frame on to the client. Returns `Some` if the choice is at its end.
    async fn handle_frame(&mut self, frame: WorkerFrame) -> Result<Option<FinishCause>, ChoiceError> {
        match frame {
            // Only searches have progress.
            WorkerFrame::Admitted | WorkerFrame::BeamProgress { .. } => Ok(None),
            WorkerFrame::Tokens { ids, logprobs, sampler_state } => {
                self.handle_tokens(ids, logprobs, sampler_state).await
            }
            WorkerFrame::Finished { is_stop, stop_token, cached_tokens } => {
                // After a resume, the worker reports the choice's own output as prefix cache hits.
                if self.progress.losses() == 0 {
                    self.cached_tokens = cached_tokens.min(self.task.call.prompt.len() as u32);
                    if let Some(usage) = &mut self.usage {
                        usage.cached_tokens = self.cached_tokens;
                    }
                }
                Ok(Some(if is_stop { FinishCause::StopToken(stop_token) } else { FinishCause::Length }))
            }
        }
    }

    async fn handle_tokens(
        &mut self,
        mut ids: Vec<u32>,
        mut logprobs: Vec<Logprob>,
        sampler_state: bytes::Bytes,
    ) -> Result<Option<FinishCause>, ChoiceError> {
        self.record_latency();
        let text = self.text.as_mut().expect("a choice reads no frame after it has finished");
        let pushed = text.push(&ids);
        ids.truncate(pushed.consumed_tokens);
        logprobs.truncate(pushed.consumed_tokens);
        self.progress.append(&ids, sampler_state)?;
        self.token_metrics.record_output_tokens(ids.len());
        if let Some(usage) = &mut self.usage {
            usage.output_tokens = self.progress.output().len();
            usage.first_token = self.time_to_first_token;
        }
        self.send(OutputDelta { choice: self.task.index, tokens: ids, text: pushed.text, logprobs }).await?;
        Ok(pushed.stop.map(FinishCause::StopString))
    }

    fn record_latency(&mut self) {
        let now = Instant::now();
        match self.last_token_at.replace(now) {
            None => {
                let since_arrival = now - self.task.arrived;
                self.time_to_first_token = Some(since_arrival);
                metrics::record_time_to_first_token(self.task.model.name(), since_arrival);
            }
            Some(last) => self.token_metrics.record_inter_token_latency(now - last),
        }
    }

    async fn finish(&mut self, finish: FinishCause) -> Result<ChoiceOutcome, ChoiceError> {
        // After a stop string, the text ends before it. Otherwise the held-back text is output.
        let text = match finish {
            FinishCause::StopString(_) => String::new(),
            _ => self.text.take().expect("a choice finishes once").finish(),
        };
        if !text.is_empty() {
            self.send(OutputDelta { choice: self.task.index, text, ..OutputDelta::default() }).await?;
        }
        Ok(ChoiceOutcome {
            finish,
            output_tokens: self.progress.output().len() as u32,
            cached_tokens: self.cached_tokens,
            resumes: self.progress.losses(),
            time_to_first_token: self.time_to_first_token,
            total_time: self.task.arrived.elapsed(),
        })
    }

    /// Sends a delta to the client. While the client's channel is full, the worker's stream fills
    /// up to the worker's own limit.
    async fn send(&self, delta: OutputDelta) -> Result<(), ChoiceError> {
        let sent = self.task.events.send(ChoiceEvent::Output(delta));
        match tokio::time::timeout(SLOW_CLIENT_WAIT, sent).await {
            // If the channel is closed, the client is gone and `events.closed()` ends this task.
            Ok(_) => Ok(()),
            Err(_) => Err(ChoiceError::SlowClient),
        }
    }
}

/// Ends after the deadline. A worker ends the stream itself at the deadline: this is for a worker
/// that hangs.
pub(crate) async fn sleep_until_late(deadline: Option<Instant>) {
    match deadline {
        Some(deadline) => tokio::time::sleep_until(deadline + DEADLINE_SLACK).await,
        None => std::future::pending().await,
    }
}

pub(crate) async fn next_frame(stream: &mut OpenStream) -> Result<WorkerFrame, StreamLoss> {
    match stream.frames.message().await {
        Ok(Some(frame)) => WorkerFrame::try_from(frame)
            .map_err(|violation| StreamLoss::WorkerError { detail: violation.to_string() }),
        Ok(None) => Err(StreamLoss::WorkerDied { detail: "its stream ended without `finished`".to_owned() }),
        Err(status) => Err(stream_loss(status)),
    }
}
