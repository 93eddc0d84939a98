//! A response in either of its forms: one JSON body when everything has ended, or server-sent events as it comes.
//!
//! An error in mid-stream is an event `{"error": ...}` after which the stream ends without `[DONE]`: a client that saw
//! `[DONE]` has everything.

use std::convert::Infallible;
use std::time::Duration;

use axum::Json;
use axum::body::{Body, Bytes};
use axum::http::{HeaderValue, header};
use axum::response::{IntoResponse, Response};
use futures::stream;
use serde_json::{Value, json};
use tokio::sync::mpsc;

use super::error::ApiError;
use super::fields::ResponseOptions;
use crate::choice::{Event, Finish, Outcome, Piece};
use crate::generate::Job;

/// Proxies close connections that are silent for some tens of seconds; a long prompt takes longer.
const KEEP_ALIVE: Duration = Duration::from_secs(10);
/// Events that are ready at once go out in one write.
const EVENTS_PER_WRITE_MAX: usize = 64;

/// What differs between chat and plain completions.
pub(crate) trait Surface: Send + 'static {
    /// Sent before anything else of a choice; `None` where there is nothing to say.
    fn opening(&mut self, choice: u32) -> Option<Value>;
    /// One entry of `choices` in a chunk.
    fn piece(&mut self, piece: Piece) -> Value;
    /// The last entry of a choice.
    fn ended(&mut self, choice: u32, finish: &Finish) -> Value;
    /// One entry of `choices` in a whole response.
    fn whole(&mut self, piece: Piece, finish: &Finish) -> Value;
    /// A chunk or a body around entries.
    fn envelope(&self, choices: Vec<Value>, streaming: bool) -> Value;
}

/// A started response.
pub(crate) struct Answer<S> {
    surface: S,
    events: mpsc::Receiver<Event>,
    options: ResponseOptions,
    choices: usize,
    /// Choices of one prompt.
    n: usize,
    /// How many of them the client gets: the most probable.
    kept: usize,
    prompt_tokens: usize,
}

#[derive(Default)]
struct Usage {
    completion_tokens: u64,
    cached_tokens: u64,
}

impl Usage {
    /// The prompt counts once, however many choices continue it.
    fn add(&mut self, choice: u32, n: usize, outcome: &Outcome) {
        self.completion_tokens += u64::from(outcome.output_tokens);
        if (choice as usize).is_multiple_of(n) {
            self.cached_tokens += u64::from(outcome.cached_tokens);
        }
    }

    fn json(&self, prompt_tokens: usize) -> Value {
        json!({
            "prompt_tokens": prompt_tokens,
            "completion_tokens": self.completion_tokens,
            "total_tokens": prompt_tokens as u64 + self.completion_tokens,
            "prompt_tokens_details": {"cached_tokens": self.cached_tokens},
        })
    }
}

/// Of each prompt's `n` choices the `kept` of the highest log probability per token, the best first; all, in their
/// order, where all are kept.
fn most_probable(ended: Vec<(Piece, Finish)>, n: usize, kept: usize) -> Vec<(Piece, Finish)> {
    if kept >= n {
        return ended;
    }
    let mean = |piece: &Piece| {
        let sum: f64 = piece.logprobs.iter().map(|token| f64::from(token.logprob)).sum();
        sum / piece.logprobs.len().max(1) as f64
    };
    let mut chosen = Vec::with_capacity(ended.len() / n * kept);
    let mut ended = ended.into_iter();
    loop {
        let mut of_prompt: Vec<_> = ended.by_ref().take(n).collect();
        if of_prompt.is_empty() {
            return chosen;
        }
        of_prompt.sort_by(|(a, _), (b, _)| mean(b).total_cmp(&mean(a)));
        chosen.extend(of_prompt.into_iter().take(kept));
    }
}

pub(crate) fn finish_reason(finish: &Finish) -> &'static str {
    match finish {
        Finish::StopString(_) | Finish::StopToken(_) => "stop",
        Finish::Length => "length",
    }
}

/// vLLM's addition: which stop string or token it was.
pub(crate) fn stop_reason(finish: &Finish) -> Value {
    match finish {
        Finish::StopString(stop) => json!(stop),
        Finish::StopToken(token) => json!(token),
        Finish::Length => Value::Null,
    }
}

impl<S: Surface> Answer<S> {
    pub(crate) fn to(job: &Job, surface: S, events: mpsc::Receiver<Event>, options: ResponseOptions) -> Self {
        Self {
            surface,
            events,
            options,
            choices: job.choices(),
            n: job.params().best_of as usize,
            kept: job.params().n as usize,
            prompt_tokens: job.prompts().map(<[u32]>::len).sum(),
        }
    }

    pub(crate) async fn respond(self) -> Result<Response, ApiError> {
        if self.options.stream { Ok(self.stream()) } else { self.whole().await }
    }

    async fn whole(mut self) -> Result<Response, ApiError> {
        let mut pieces: Vec<Piece> = (0..self.choices as u32)
            .map(|choice| Piece { choice, tokens: vec![], text: String::new(), logprobs: vec![] })
            .collect();
        let mut finishes: Vec<Option<Finish>> = vec![None; self.choices];
        let mut usage = Usage::default();
        while let Some(event) = self.events.recv().await {
            match event {
                Event::Piece(piece) => {
                    let whole = &mut pieces[piece.choice as usize];
                    whole.tokens.extend(piece.tokens);
                    whole.text.push_str(&piece.text);
                    whole.logprobs.extend(piece.logprobs);
                }
                Event::Ended { choice, outcome } => {
                    let outcome = outcome?;
                    usage.add(choice, self.n, &outcome);
                    finishes[choice as usize] = Some(outcome.finish);
                }
            }
        }
        let mut ended = Vec::with_capacity(self.choices);
        for (piece, finish) in pieces.into_iter().zip(finishes) {
            ended.push((piece, finish.ok_or_else(|| ApiError::not_ready("the router is stopping"))?));
        }
        let mut choices = Vec::with_capacity(self.choices);
        for (index, (mut piece, finish)) in (0..).zip(most_probable(ended, self.n, self.kept)) {
            piece.choice = index;
            choices.push(self.surface.whole(piece, &finish));
        }
        let mut body = self.surface.envelope(choices, false);
        body["usage"] = usage.json(self.prompt_tokens);
        Ok(Json(body).into_response())
    }

    fn stream(self) -> Response {
        let running = Streaming { ended: 0, usage: Usage::default(), answer: self, phase: Phase::Opening };
        let body = Body::from_stream(stream::unfold(running, |mut running| async {
            let bytes = running.next().await?;
            Some((Ok::<_, Infallible>(bytes), running))
        }));
        let mut response = body.into_response();
        let headers = response.headers_mut();
        headers.insert(header::CONTENT_TYPE, HeaderValue::from_static("text/event-stream; charset=utf-8"));
        headers.insert(header::CACHE_CONTROL, HeaderValue::from_static("no-cache"));
        // nginx would collect the events otherwise.
        headers.insert("x-accel-buffering", HeaderValue::from_static("no"));
        response
    }
}

#[derive(Clone, Copy, PartialEq, Eq)]
enum Phase {
    Opening,
    Running,
    Over,
}

struct Streaming<S> {
    answer: Answer<S>,
    usage: Usage,
    ended: usize,
    phase: Phase,
}

impl<S: Surface> Streaming<S> {
    async fn next(&mut self) -> Option<Bytes> {
        let mut out = Vec::new();
        match self.phase {
            Phase::Over => return None,
            Phase::Opening => {
                self.phase = Phase::Running;
                for choice in 0..self.answer.choices as u32 {
                    if let Some(entry) = self.answer.surface.opening(choice) {
                        self.chunk(&mut out, entry);
                    }
                }
                if !out.is_empty() {
                    return Some(out.into());
                }
            }
            Phase::Running => {}
        }
        while out.is_empty() && self.phase == Phase::Running {
            let event = match tokio::time::timeout(KEEP_ALIVE, self.answer.events.recv()).await {
                Ok(event) => event,
                Err(_) => return Some(Bytes::from_static(b": keep-alive\n\n")),
            };
            self.take(&mut out, event);
            for _ in 1..EVENTS_PER_WRITE_MAX {
                match self.answer.events.try_recv() {
                    Ok(event) if self.phase == Phase::Running => self.take(&mut out, Some(event)),
                    _ => break,
                }
            }
        }
        Some(out.into())
    }

    fn take(&mut self, out: &mut Vec<u8>, event: Option<Event>) {
        match event {
            Some(Event::Piece(piece)) => {
                let ids_count = self.answer.options.return_token_ids && !piece.tokens.is_empty();
                let silent = piece.text.is_empty() && piece.logprobs.is_empty() && !ids_count;
                if !silent {
                    let entry = self.answer.surface.piece(piece);
                    self.chunk(out, entry);
                }
            }
            Some(Event::Ended { choice, outcome: Ok(outcome) }) => {
                self.usage.add(choice, self.answer.n, &outcome);
                let entry = self.answer.surface.ended(choice, &outcome.finish);
                self.chunk(out, entry);
                self.ended += 1;
                if self.ended == self.answer.choices {
                    self.close(out);
                }
            }
            Some(Event::Ended { outcome: Err(failure), .. }) => self.fail(out, &failure.into()),
            // A task that ended without its last word: the process is coming down.
            None => self.fail(out, &ApiError::not_ready("the router is stopping")),
        }
    }

    fn close(&mut self, out: &mut Vec<u8>) {
        if self.answer.options.include_usage {
            let mut chunk = self.answer.surface.envelope(vec![], true);
            chunk["usage"] = self.usage.json(self.answer.prompt_tokens);
            event(out, &chunk);
        }
        out.extend_from_slice(b"data: [DONE]\n\n");
        self.phase = Phase::Over;
    }

    fn fail(&mut self, out: &mut Vec<u8>, error: &ApiError) {
        event(out, &error.body());
        self.phase = Phase::Over;
    }

    fn chunk(&self, out: &mut Vec<u8>, entry: Value) {
        let mut chunk = self.answer.surface.envelope(vec![entry], true);
        if self.answer.options.include_usage {
            chunk["usage"] = Value::Null;
        }
        event(out, &chunk);
    }
}

fn event(out: &mut Vec<u8>, value: &Value) {
    out.extend_from_slice(b"data: ");
    out.extend_from_slice(value.to_string().as_bytes());
    out.extend_from_slice(b"\n\n");
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::wire::Logprob;

    #[test]
    fn the_best_of_each_prompt_are_the_most_probable_per_token() {
        let choice = |choice: u32, logprobs: &[f32]| {
            let logprobs: Vec<Logprob> =
                logprobs.iter().map(|&logprob| Logprob { logprob, top: vec![] }).collect();
            (Piece { choice, tokens: vec![], text: String::new(), logprobs }, Finish::Length)
        };
        let ended = vec![
            choice(0, &[-3.0]),
            choice(1, &[-1.0, -1.0, -1.0, -1.0]),
            choice(2, &[-2.0, -1.5]),
            choice(3, &[-0.1]),
            choice(4, &[-0.5]),
            choice(5, &[-0.3]),
        ];
        let chosen = |kept| -> Vec<u32> {
            most_probable(ended.clone(), 3, kept).iter().map(|(piece, _)| piece.choice).collect()
        };
        assert_eq!(chosen(1), [1, 3]);
        assert_eq!(chosen(2), [1, 2, 3, 5]);
        assert_eq!(chosen(3), [0, 1, 2, 3, 4, 5]);
    }
}
