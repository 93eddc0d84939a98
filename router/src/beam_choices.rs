// SPDX-License-Identifier: Apache-2.0

//! The choices of a beam search: one call of a worker finds all choices of a prompt.
//!
//! 1. Nothing is sent before the search has ended. A worker that is lost costs time only: another
//!    one finds the same choices (I5).
//! 2. Each choice ends with exactly one [`ChoiceEvent::Ended`], unless the client is gone.

use tokio::time::Instant;

use crate::choice::{
    BegunChoice, ChoiceEvent, ChoiceOutcome, ChoiceTask, FinishCause, OutputDelta, next_frame,
    sleep_until_late,
};
use crate::dispatch::OpenStream;
use crate::failover::{ChoiceError, ChoiceProgress, FailoverAction, StreamLoss};
use crate::metrics::{self, TokenMetrics};
use crate::wire::{Logprob, WorkerFrame};

/// One output of the search.
#[derive(Debug)]
struct FoundChoice {
    tokens: Vec<u32>,
    logprobs: Vec<Logprob>,
    finish: FinishCause,
}

/// All outputs, the best first.
#[derive(Debug, Default)]
struct FoundChoices {
    choices: Vec<FoundChoice>,
    cached_tokens: u32,
}

impl ChoiceTask {
    /// Runs an admitted beam search to its end. The task has the index of the first choice.
    pub(crate) async fn run_beams(self, stream: OpenStream, first: BegunChoice, others: Vec<BegunChoice>) {
        let begun: Vec<_> = std::iter::once(first).chain(others).collect();
        let mut progress = ChoiceProgress::new(self.call.params.max_tokens);
        let found = tokio::select! {
            found = find(&self, stream, &mut progress, begun.len()) => Some(found),
            () = self.events.closed() => None,
        };
        match found {
            Some(Ok(found)) => deliver(&self, begun, found, progress.losses()).await,
            Some(Err(error)) => fail(&self, begun, &error),
            None => {
                self.call.trace.record_choice(0, None, Some("client gone"));
                begun.iter().for_each(|_| metrics::record_cancelled_choice(self.model.name()));
            }
        }
    }
}

async fn find(
    task: &ChoiceTask,
    mut stream: OpenStream,
    progress: &mut ChoiceProgress,
    choices: usize,
) -> Result<FoundChoices, ChoiceError> {
    let mut late = std::pin::pin!(sleep_until_late(task.deadline));
    loop {
        // Nothing tells when the prompt is computed, and a search lasts much longer than its
        // prompt.
        stream.placed.end_prefill();
        let read = tokio::select! {
            biased;
            read = read_choices(&mut stream, choices) => read,
            () = &mut late => Err(StreamLoss::DeadlineExceeded),
        };
        let loss = match read {
            Ok(found) => {
                stream.stay.record_completion();
                return Ok(found);
            }
            Err(loss) => loss,
        };
        stream.span.fail(loss.reason());
        let verdict = task.record_loss(&loss, &stream, 0);
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
async fn read_choices(stream: &mut OpenStream, choices: usize) -> Result<FoundChoices, StreamLoss> {
    let mut found = FoundChoices::default();
    let (mut tokens, mut logprobs) = (Vec::new(), Vec::new());
    while found.choices.len() < choices {
        match next_frame(stream).await? {
            WorkerFrame::Admitted => {}
            WorkerFrame::Tokens { ids, logprobs: of_ids, .. } => {
                tokens.extend(ids);
                logprobs.extend(of_ids);
            }
            WorkerFrame::Finished { is_stop, stop_token, cached_tokens } => {
                let finish = if is_stop { FinishCause::StopToken(stop_token) } else { FinishCause::Length };
                let (tokens, logprobs) = (std::mem::take(&mut tokens), std::mem::take(&mut logprobs));
                found.choices.push(FoundChoice { tokens, logprobs, finish });
                found.cached_tokens = cached_tokens;
            }
        }
    }
    Ok(found)
}

/// Sends the choices to the client.
async fn deliver(task: &ChoiceTask, begun: Vec<BegunChoice>, found: FoundChoices, resumes: u32) {
    let model = task.model.name();
    let total_time = Instant::now() - task.arrived;
    let output_tokens = found.choices.iter().map(|choice| choice.tokens.len()).sum();
    let token_metrics = TokenMetrics::of_model(model);
    metrics::record_time_to_first_token(model, total_time);
    task.call.trace.record_choice(output_tokens, Some(total_time), None);
    if let Some(active) = &task.active {
        active.record_output(output_tokens);
    }
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
            time_to_first_token: Some(total_time),
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
