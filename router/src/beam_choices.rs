// SPDX-License-Identifier: Apache-2.0

//! The choices of a beam search: one call of a worker finds all choices of a prompt.
//!
//! 1. Nothing is sent before the search has ended. A worker that is lost costs time only: another
//!    one finds the same choices (I5).
//! 2. The worker reports how far the search is. So a search that gets further than at the loss of
//!    its last worker is off trial, and its tokens count for the API key however it ends.
//! 3. Each choice ends with exactly one [`ChoiceEvent::Ended`], unless the client is gone.

use tokio::time::Instant;

use crate::choice::{
    BegunChoice, ChoiceEvent, ChoiceOutcome, ChoiceTask, FinishCause, OutputDelta, next_frame,
    sleep_until_late,
};
use crate::dispatch::OpenStream;
use crate::failover::{ChoiceError, ChoiceProgress, FailoverAction, StreamLoss};
use crate::metrics::{self, TokenMetrics};
use crate::wire::{Logprob, WorkerFrame};

/// Tokens of each sequence after which a worker reports once more how far a search is
/// (worker.proto).
const PROGRESS_TOKENS: usize = 16;

/// One output of the search.
#[derive(Debug)]
struct FoundChoice {
    tokens: Vec<u32>,
    logprobs: Vec<Logprob>,
    finish: FinishCause,
}

/// What is known of a search: its outputs, the best first, are complete at its end.
#[derive(Debug, Default)]
struct SearchState {
    choices: Vec<FoundChoice>,
    cached_tokens: u32,
    /// Tokens of each running sequence on the present worker.
    length: usize,
    /// The largest `length` at the loss of a worker.
    lost_length: usize,
    /// Tokens that count for the API key. What is computed again after a loss does not.
    charged_tokens: u64,
    /// When the prompt was first computed.
    first_progress: Option<Instant>,
}

impl ChoiceTask {
    /// Runs an admitted beam search to its end. The task has the index of the first choice.
    pub(crate) async fn run_beams(self, stream: OpenStream, first: BegunChoice, others: Vec<BegunChoice>) {
        let begun: Vec<_> = std::iter::once(first).chain(others).collect();
        let mut progress = ChoiceProgress::new(self.call.params.max_tokens);
        let mut search = SearchState::default();
        let found = tokio::select! {
            found = search.run(&self, stream, &mut progress, begun.len()) => Some(found),
            () = self.events.closed() => None,
        };
        match found {
            Some(Ok(())) => deliver(&self, begun, search, progress.losses()).await,
            Some(Err(error)) => fail(&self, begun, &error),
            None => {
                self.call.trace.record_choice(0, None, Some("client gone"));
                begun.iter().for_each(|_| metrics::record_cancelled_choice(self.model.name()));
            }
        }
    }
}

impl SearchState {
    async fn run(
        &mut self,
        task: &ChoiceTask,
        mut stream: OpenStream,
        progress: &mut ChoiceProgress,
        choices: usize,
    ) -> Result<(), ChoiceError> {
        let mut late = std::pin::pin!(sleep_until_late(task.deadline));
        loop {
            (self.length, self.choices) = (0, Vec::new());
            let read = tokio::select! {
                biased;
                read = self.read_choices(task, &mut stream, choices) => read,
                () = &mut late => Err(StreamLoss::DeadlineExceeded),
            };
            let Err(loss) = read else {
                stream.stay.record_completion();
                return Ok(());
            };
            stream.span.fail(loss.reason());
            // An earlier run has passed this place: the search ends no worker here.
            let is_proven = self.length + PROGRESS_TOKENS <= self.lost_length;
            self.lost_length = self.lost_length.max(self.length);
            let verdict = task.record_loss(&loss, &stream, (!is_proven).then_some(self.length));
            match progress.handle_loss(loss, verdict) {
                FailoverAction::Fail(error) => return Err(error),
                FailoverAction::Resume { detail } => {
                    drop(stream);
                    stream = task.resume(progress, detail).await?;
                }
                FailoverAction::Finish => panic!("a beam search has no output while it runs"),
            }
        }
    }

    /// Reads a whole result.
    async fn read_choices(
        &mut self,
        task: &ChoiceTask,
        stream: &mut OpenStream,
        choices: usize,
    ) -> Result<(), StreamLoss> {
        let (mut tokens, mut logprobs) = (Vec::new(), Vec::new());
        while self.choices.len() < choices {
            match next_frame(stream).await? {
                WorkerFrame::Admitted => {}
                WorkerFrame::BeamProgress { length, computed_tokens } => {
                    stream.placed.end_prefill();
                    self.first_progress.get_or_insert_with(Instant::now);
                    self.length = length as usize;
                    stream.stay.record_output(self.length);
                    self.charge(task, computed_tokens);
                }
                WorkerFrame::Tokens { ids, logprobs: of_ids, .. } => {
                    tokens.extend(ids);
                    logprobs.extend(of_ids);
                }
                WorkerFrame::Finished { is_stop, stop_token, cached_tokens } => {
                    let finish =
                        if is_stop { FinishCause::StopToken(stop_token) } else { FinishCause::Length };
                    let (tokens, logprobs) = (std::mem::take(&mut tokens), std::mem::take(&mut logprobs));
                    self.choices.push(FoundChoice { tokens, logprobs, finish });
                    self.cached_tokens = cached_tokens;
                }
            }
        }
        Ok(())
    }

    /// `tokens`: all of the search so far.
    fn charge(&mut self, task: &ChoiceTask, tokens: u64) {
        let more = tokens.saturating_sub(self.charged_tokens);
        self.charged_tokens += more;
        if let Some(active) = &task.active {
            active.record_output(usize::try_from(more).unwrap_or(usize::MAX));
        }
    }
}

/// Sends the choices to the client.
async fn deliver(task: &ChoiceTask, begun: Vec<BegunChoice>, mut found: SearchState, resumes: u32) {
    let model = task.model.name();
    let total_time = Instant::now() - task.arrived;
    // The client gets no token before the last one is computed.
    let prompt_time = found.first_progress.map_or(total_time, |first| first - task.arrived);
    let output_tokens = found.choices.iter().map(|choice| choice.tokens.len()).sum();
    let token_metrics = TokenMetrics::of_model(model);
    metrics::record_time_to_first_token(model, total_time);
    task.call.trace.record_choice(output_tokens, Some(total_time), None);
    // A worker may leave out its last report.
    found.charge(task, output_tokens as u64);
    let cached_tokens = found.cached_tokens.min(task.call.prompt.len() as u32);
    for (index, (choice, found)) in (task.index..).zip(begun.into_iter().zip(found.choices)) {
        let BegunChoice { mut text, usage, ended_permit } = choice;
        let mut output = text.push(&found.tokens).text;
        output.push_str(&text.finish());
        let outcome = ChoiceOutcome {
            finish: found.finish,
            output_tokens: found.tokens.len() as u32,
            cached_tokens,
            resumes,
            time_to_first_token: Some(prompt_time),
            total_time,
        };
        token_metrics.record_output_tokens(found.tokens.len());
        metrics::record_finished_choice(model, outcome.finish.reason(), total_time);
        if let Some(mut usage) = usage {
            (usage.output_tokens, usage.cached_tokens) = (found.tokens.len(), cached_tokens);
            usage.first_token = Some(total_time);
            usage.finish(&Ok(outcome.clone()));
        }
        let logprobs = if task.call.params.top_logprobs.is_some() { found.logprobs } else { Vec::new() };
        let delta = OutputDelta { choice: index, tokens: found.tokens, text: output, logprobs };
        // The channel has room for one delta of each choice. If it is closed, the client is gone.
        if task.events.send(ChoiceEvent::Output(delta)).await.is_ok() {
            ended_permit.send(ChoiceEvent::Ended { choice: index, outcome: Ok(outcome) });
        }
    }
}

fn fail(task: &ChoiceTask, begun: Vec<BegunChoice>, error: &ChoiceError) {
    let request = task.call.logged();
    let (request_id, trace_id) = (request.request_id, request.trace_id());
    tracing::warn!(%request_id, trace_id, choice = task.index, %error, "beam search failed");
    task.call.trace.record_choice(0, None, Some("choice failed"));
    for (index, BegunChoice { usage, ended_permit, .. }) in (task.index..).zip(begun) {
        metrics::record_failed_choice(task.model.name());
        if let Some(mut usage) = usage {
            usage.finish(&Err(error.clone()));
        }
        ended_permit.send(ChoiceEvent::Ended { choice: index, outcome: Err(error.clone()) });
    }
}
