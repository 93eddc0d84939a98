//! One choice of a response: reads a worker's token frames, turns them into text, and survives the worker (I6).
//!
//! Ends in exactly one last word, [`Outcome`], for which room in the client's queue is reserved from the start; or in
//! silence if the client is gone. Dropping the worker's stream cancels it there.

use std::sync::Arc;
use std::time::Duration;

use tokio::sync::mpsc;
use tokio::time::Instant;

use crate::dispatch::{Attempt, reopen};
use crate::fleet::Fleet;
use crate::gate::Places;
use crate::metrics;
use crate::model::Model;
use crate::resume::{Failure, Loss, Next, Progress};
use crate::text_stream::TextStream;
use crate::wire::{Call, Frame, Logprob, loss};

/// A client that takes nothing for this long is given up, so that it does not hold KV blocks.
pub(crate) const SLOW_CLIENT_WAIT: Duration = Duration::from_secs(30);

/// What a client is told about one choice. Tokens and text arrive together but text may lag behind.
#[derive(Debug)]
pub(crate) enum Event {
    Piece(Piece),
    Ended { choice: u32, outcome: Result<Outcome, Failure> },
}

#[derive(Clone, Debug)]
pub(crate) struct Piece {
    pub(crate) choice: u32,
    pub(crate) tokens: Vec<u32>,
    pub(crate) text: String,
    /// As many as tokens, or none where they were not asked for.
    pub(crate) logprobs: Vec<Logprob>,
}

#[derive(Clone, Debug, PartialEq)]
pub(crate) enum Finish {
    StopString(String),
    StopToken(Option<u32>),
    Length,
}

#[derive(Clone, Debug)]
pub(crate) struct Outcome {
    pub(crate) finish: Finish,
    pub(crate) output_tokens: u32,
    pub(crate) cached_tokens: u32,
    pub(crate) resumes: u32,
    /// From the request's arrival.
    pub(crate) first_token: Option<Duration>,
    pub(crate) total: Duration,
}

pub(crate) struct Choice {
    /// Index in the response: prompts times n.
    pub(crate) index: u32,
    pub(crate) model: Arc<Model>,
    pub(crate) fleet: Arc<Fleet>,
    pub(crate) call: Call,
    pub(crate) arrived: Instant,
    pub(crate) deadline: Option<Instant>,
    pub(crate) events: mpsc::Sender<Event>,
    /// Held until the choice has ended, whichever worker serves it: the next one waits for it.
    pub(crate) _place: Places,
}

impl Choice {
    /// Runs an admitted choice to its end. `last_word` is the reserved room for it.
    pub(crate) async fn run(
        self,
        attempt: Attempt,
        progress: Progress,
        text: TextStream,
        last_word: mpsc::OwnedPermit<Event>,
    ) {
        let choice = self.index;
        let model = self.model.clone();
        let events = self.events.clone();
        let mut running = Running {
            text: Some(text),
            progress,
            cached_tokens: 0,
            first_token: None,
            last_token: None,
            choice: self,
        };
        // A client that goes away is noticed here, also while the worker computes a long prompt.
        let outcome = tokio::select! {
            outcome = running.drive(attempt) => outcome,
            () = events.closed() => return metrics::choice_cancelled(model.name()),
        };
        metrics::choice_ended(model.name(), &outcome);
        if let Err(failure) = &outcome {
            tracing::warn!(request = %running.choice.call.request_id, choice, %failure, "choice failed");
        }
        last_word.send(Event::Ended { choice, outcome });
    }
}

struct Running {
    choice: Choice,
    progress: Progress,
    /// Until it is finished.
    text: Option<TextStream>,
    cached_tokens: u32,
    first_token: Option<Duration>,
    last_token: Option<Instant>,
}

impl Running {
    async fn drive(&mut self, mut attempt: Attempt) -> Result<Outcome, Failure> {
        loop {
            let lost = match self.next_frame(&mut attempt).await {
                Ok(frame) => match self.take(frame).await? {
                    Some(finish) => return self.finish(finish).await,
                    None => continue,
                },
                Err(lost) => lost,
            };
            if let Loss::Worker { detail } = &lost {
                tracing::warn!(worker = %attempt.place.peer.worker_name, detail, "worker lost in mid-stream");
                self.choice.fleet.leave(attempt.place.peer.worker);
            }
            match self.progress.lost(lost) {
                Next::Complete => return self.finish(Finish::Length).await,
                Next::Fail(failure) => return Err(failure),
                Next::Resume { detail } => {
                    // The place on the lost worker is given up first: it must not count against the next one.
                    drop(attempt);
                    let choice = &self.choice;
                    attempt =
                        reopen(&choice.fleet, &choice.call, &self.progress, choice.deadline, detail).await?;
                    metrics::resumed(choice.model.name());
                    tracing::info!(
                        request = %choice.call.request_id,
                        worker = %attempt.place.peer.worker_name,
                        tokens = self.progress.output().len(),
                        "stream resumed"
                    );
                }
            }
        }
    }

    async fn next_frame(&self, attempt: &mut Attempt) -> Result<Frame, Loss> {
        let late = async {
            match self.choice.deadline {
                // The worker ends the stream itself at the deadline; this is for one that cannot.
                Some(deadline) => tokio::time::sleep_until(deadline + DEADLINE_SLACK).await,
                None => std::future::pending().await,
            }
        };
        tokio::select! {
            message = attempt.frames.message() => match message {
                Ok(Some(frame)) => Frame::try_from(frame).map_err(|violation| Loss::Verdict { detail: violation.to_string() }),
                Ok(None) => Err(Loss::Worker { detail: "its stream ended without a word".to_owned() }),
                Err(status) => Err(loss(status)),
            },
            () = late => Err(Loss::Deadline),
        }
    }

    /// Passes tokens on; `Some` when the choice is at its end.
    async fn take(&mut self, frame: Frame) -> Result<Option<Finish>, Failure> {
        match frame {
            Frame::Admitted => Ok(None),
            Frame::Tokens { ids, logprobs, sampler_state } => self.tokens(ids, logprobs, sampler_state).await,
            Frame::Finished { stopped, stop_token, cached_tokens } => {
                // A resumed stream finds its own prompt in the cache, which is no news to the client.
                if self.progress.losses() == 0 {
                    self.cached_tokens = cached_tokens.min(self.choice.call.prompt.len() as u32);
                }
                Ok(Some(if stopped { Finish::StopToken(stop_token) } else { Finish::Length }))
            }
        }
    }

    async fn tokens(
        &mut self,
        mut ids: Vec<u32>,
        mut logprobs: Vec<Logprob>,
        sampler_state: bytes::Bytes,
    ) -> Result<Option<Finish>, Failure> {
        let now = Instant::now();
        match self.last_token.replace(now) {
            None => {
                let since_arrival = now - self.choice.arrived;
                self.first_token = Some(since_arrival);
                metrics::first_token(self.choice.model.name(), since_arrival);
            }
            Some(last) => metrics::inter_token(self.choice.model.name(), now - last),
        }
        let Some(text) = &mut self.text else {
            return Err(Failure::Protocol { violation: "tokens after the end" });
        };
        let pushed = text.push(&ids);
        ids.truncate(pushed.consumed);
        logprobs.truncate(pushed.consumed);
        self.progress.tokens(&ids, sampler_state)?;
        metrics::generated(self.choice.model.name(), ids.len());
        self.send(Piece { choice: self.choice.index, tokens: ids, text: pushed.text, logprobs }).await?;
        Ok(pushed.stop.map(Finish::StopString))
    }

    async fn finish(&mut self, finish: Finish) -> Result<Outcome, Failure> {
        // After a stop string the text has ended before it; otherwise the held-back rest is text after all.
        let rest = match finish {
            Finish::StopString(_) => String::new(),
            _ => self.text.take().map(TextStream::finish).unwrap_or_default(),
        };
        if !rest.is_empty() {
            let piece = Piece { choice: self.choice.index, tokens: vec![], text: rest, logprobs: vec![] };
            self.send(piece).await?;
        }
        Ok(Outcome {
            finish,
            output_tokens: self.progress.output().len() as u32,
            cached_tokens: self.cached_tokens,
            resumes: self.progress.losses(),
            first_token: self.first_token,
            total: self.choice.arrived.elapsed(),
        })
    }

    /// Waits for a slow client within bounds; meanwhile the worker's stream fills up to the worker's own bound.
    async fn send(&self, piece: Piece) -> Result<(), Failure> {
        match tokio::time::timeout(SLOW_CLIENT_WAIT, self.choice.events.send(Event::Piece(piece))).await {
            // Closed: the client is gone, and `closed()` in `run` ends this task.
            Ok(_) => Ok(()),
            Err(_) => Err(Failure::SlowClient),
        }
    }
}

/// How much later than the worker the router gives up.
const DEADLINE_SLACK: Duration = Duration::from_secs(2);
