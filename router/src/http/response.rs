// SPDX-License-Identifier: Apache-2.0

//! Sends the response of a request: one JSON body at the end, or server-sent events as tokens
//! arrive.
//!
//! An error in mid-stream is an event `{"error": ...}`. After it, the stream ends without `[DONE]`.
//! So a client that reads `[DONE]` has the whole response.

use std::convert::Infallible;
use std::time::Duration;

use axum::Json;
use axum::body::{Body, Bytes};
use axum::http::{HeaderValue, header};
use axum::response::{IntoResponse, Response};
use futures::stream;
use serde::Serialize;
use serde_json::{Value, json};
use tokio::sync::mpsc;

use super::error::ApiError;
use super::fields::ResponseOptions;
use super::keep_alive::{KEEP_ALIVE_COMMENT, PacedEvents};
use crate::choice::{ChoiceEvent, ChoiceOutcome, FinishCause, OutputDelta};
use crate::generate::GenerationRequest;

/// Maximum number of ready events that one write sends.
const EVENTS_PER_WRITE_MAX: usize = 64;

/// How an endpoint writes choices. Implemented by chat and by text completions.
pub(crate) trait ChoiceFormat: Send + 'static {
    /// One entry of `choices` in a chunk. There is one for each token, so it is written without a
    /// JSON value of its own.
    type ChunkEntry: Serialize;
    /// One entry of `choices` in a whole response.
    type WholeEntry: Serialize;

    /// The first chunk entry of a choice, if the endpoint has one.
    fn first_entry(&mut self, choice: u32) -> Option<Self::ChunkEntry>;
    /// Passes the entries of a delta on, each for a chunk of its own. May be none.
    fn delta_entries(&mut self, delta: OutputDelta, write: impl FnMut(&Self::ChunkEntry));
    /// The last entries of a choice.
    fn last_entries(&mut self, choice: u32, finish: &FinishCause) -> Vec<Self::ChunkEntry>;
    /// Sees each delta of a whole response as it arrives.
    fn read_delta(&mut self, _delta: &OutputDelta) {}
    /// An entry of a choice whose deltas have been read.
    fn whole_entry(&mut self, delta: OutputDelta, finish: &FinishCause) -> Self::WholeEntry;
    /// Tokens of reasoning in all choices so far, if the endpoint knows them.
    fn reasoning_tokens(&self) -> Option<u64> {
        None
    }
    /// What a chunk or a response body says besides `choices`, `usage` and `timings`.
    fn envelope(&self, streaming: bool) -> Value;
}

#[derive(Serialize)]
struct WholeResponse<E> {
    #[serde(flatten)]
    envelope: Value,
    choices: Vec<E>,
    usage: Value,
    timings: Value,
}

/// A request whose choices are running.
pub(crate) struct GenerationResponse<S> {
    format: S,
    events: PacedEvents,
    options: ResponseOptions,
    choices: usize,
    /// Choices that the fleet generates for each prompt.
    best_of: usize,
    /// Choices of each prompt that the client receives: the most probable.
    n: usize,
    prompt_tokens: usize,
}

#[derive(Default)]
struct ResponseUsage {
    completion_tokens: u64,
    cached_tokens: u64,
    timings: ResponseTimings,
}

/// Times of a response from the arrival of its request.
#[derive(Default)]
struct ResponseTimings {
    /// The first token of any choice.
    first_token: Option<Duration>,
    /// The end of the last choice.
    total: Duration,
}

impl ResponseUsage {
    /// Counts a prompt once, for its first choice.
    fn add(&mut self, choice: u32, best_of: usize, outcome: &ChoiceOutcome) {
        self.completion_tokens += u64::from(outcome.output_tokens);
        let timings = &mut self.timings;
        timings.first_token = [timings.first_token, outcome.time_to_first_token].into_iter().flatten().min();
        timings.total = timings.total.max(outcome.total_time);
        if (choice as usize).is_multiple_of(best_of) {
            self.cached_tokens += u64::from(outcome.cached_tokens);
        }
    }

    fn json(&self, prompt_tokens: usize, reasoning_tokens: Option<u64>) -> Value {
        let mut usage = json!({
            "prompt_tokens": prompt_tokens,
            "completion_tokens": self.completion_tokens,
            "total_tokens": prompt_tokens as u64 + self.completion_tokens,
            "prompt_tokens_details": {"cached_tokens": self.cached_tokens},
        });
        if let Some(tokens) = reasoning_tokens {
            usage["completion_tokens_details"] = json!({"reasoning_tokens": tokens});
        }
        usage
    }
}

impl ResponseUsage {
    /// llama.cpp's `timings`. The time of the prompt includes the wait in queues.
    fn timings_json(&self, prompt_tokens: usize) -> Value {
        let prompt = self.timings.first_token.unwrap_or(self.timings.total);
        let computed = (prompt_tokens as u64).saturating_sub(self.cached_tokens);
        let part = |tokens: u64, time: Duration| {
            let (tokens, ms) = (tokens as f64, time.as_secs_f64() * 1e3);
            let ratio = |a: f64, b: f64| if b > 0.0 { a / b } else { 0.0 };
            (ms, ratio(ms, tokens), ratio(tokens * 1e3, ms))
        };
        let (prompt_ms, prompt_token_ms, prompt_rate) = part(computed, prompt);
        let (output_ms, output_token_ms, output_rate) =
            part(self.completion_tokens, self.timings.total.saturating_sub(prompt));
        json!({
            "cache_n": self.cached_tokens,
            "prompt_n": computed,
            "prompt_ms": prompt_ms,
            "prompt_per_token_ms": prompt_token_ms,
            "prompt_per_second": prompt_rate,
            "predicted_n": self.completion_tokens,
            "predicted_ms": output_ms,
            "predicted_per_token_ms": output_token_ms,
            "predicted_per_second": output_rate,
        })
    }
}

/// Selects of each prompt's `best_of` choices the `n` with the highest mean log probability, the
/// best first. If `n` is not smaller, returns all in their order.
fn most_probable(
    ended: Vec<(OutputDelta, FinishCause)>,
    best_of: usize,
    n: usize,
) -> Vec<(OutputDelta, FinishCause)> {
    if n >= best_of {
        return ended;
    }
    let mean = |delta: &OutputDelta| {
        let sum: f64 = delta.logprobs.iter().map(|token| f64::from(token.logprob)).sum();
        sum / delta.logprobs.len().max(1) as f64
    };
    let mut chosen = Vec::with_capacity(ended.len() / best_of * n);
    let mut ended = ended.into_iter();
    loop {
        let mut of_prompt: Vec<_> = ended.by_ref().take(best_of).collect();
        if of_prompt.is_empty() {
            return chosen;
        }
        of_prompt.sort_by(|(a, _), (b, _)| mean(b).total_cmp(&mean(a)));
        chosen.extend(of_prompt.into_iter().take(n));
    }
}

/// vLLM's `stop_reason`: the stop string or token that ended the choice.
pub(crate) fn stop_reason(finish: &FinishCause) -> Value {
    match finish {
        FinishCause::StopString(stop) => json!(stop),
        FinishCause::StopToken(token) => json!(token),
        FinishCause::Length => Value::Null,
    }
}

impl<S: ChoiceFormat> GenerationResponse<S> {
    pub(crate) fn new(
        request: &GenerationRequest,
        format: S,
        events: mpsc::Receiver<ChoiceEvent>,
        options: ResponseOptions,
    ) -> Self {
        Self {
            format,
            events: PacedEvents::new(events),
            options,
            choices: request.choices(),
            best_of: request.params().best_of as usize,
            n: request.params().n as usize,
            prompt_tokens: request.prompts().map(<[u32]>::len).sum(),
        }
    }

    pub(crate) async fn respond(self) -> Result<Response, ApiError> {
        if self.options.stream { Ok(self.into_event_stream()) } else { self.into_body().await }
    }

    async fn into_body(mut self) -> Result<Response, ApiError> {
        let mut deltas: Vec<OutputDelta> = (0..self.choices as u32)
            .map(|choice| OutputDelta { choice, tokens: vec![], text: String::new(), logprobs: vec![] })
            .collect();
        let mut finishes: Vec<Option<FinishCause>> = vec![None; self.choices];
        let mut usage = ResponseUsage::default();
        while let Some(event) = self.events.recv().await {
            match event {
                ChoiceEvent::Output(delta) => {
                    self.format.read_delta(&delta);
                    let whole = &mut deltas[delta.choice as usize];
                    whole.tokens.extend(delta.tokens);
                    whole.text.push_str(&delta.text);
                    whole.logprobs.extend(delta.logprobs);
                }
                ChoiceEvent::Ended { choice, outcome } => {
                    let outcome = outcome?;
                    usage.add(choice, self.best_of, &outcome);
                    finishes[choice as usize] = Some(outcome.finish);
                }
            }
        }
        let mut ended = Vec::with_capacity(self.choices);
        for (delta, finish) in deltas.into_iter().zip(finishes) {
            ended.push((delta, finish.ok_or_else(|| ApiError::not_ready("the router is stopping"))?));
        }
        let mut choices = Vec::with_capacity(self.choices);
        for (index, (mut delta, finish)) in (0..).zip(most_probable(ended, self.best_of, self.n)) {
            delta.choice = index;
            choices.push(self.format.whole_entry(delta, &finish));
        }
        let body = WholeResponse {
            envelope: self.format.envelope(false),
            choices,
            usage: usage.json(self.prompt_tokens, self.format.reasoning_tokens()),
            timings: usage.timings_json(self.prompt_tokens),
        };
        Ok(Json(body).into_response())
    }

    fn into_event_stream(self) -> Response {
        let running = ServerSentEvents {
            ended: 0,
            usage: ResponseUsage::default(),
            streamed_tokens: 0,
            chunks: ChunkWriter::new(&self.format.envelope(true)),
            response: self,
            phase: StreamPhase::First,
        };
        let body = Body::from_stream(stream::unfold(running, |mut running| async {
            let bytes = running.next_bytes().await?;
            Some((Ok::<_, Infallible>(bytes), running))
        }));
        event_stream(body)
    }
}

/// A response of server-sent events.
pub(super) fn event_stream(body: Body) -> Response {
    let mut response = body.into_response();
    let headers = response.headers_mut();
    headers.insert(header::CONTENT_TYPE, HeaderValue::from_static("text/event-stream; charset=utf-8"));
    headers.insert(header::CACHE_CONTROL, HeaderValue::from_static("no-cache"));
    // Tells nginx not to buffer the events.
    headers.insert("x-accel-buffering", HeaderValue::from_static("no"));
    response
}

#[derive(Clone, Copy, PartialEq, Eq)]
enum StreamPhase {
    First,
    Running,
    Over,
}

struct ServerSentEvents<S> {
    response: GenerationResponse<S>,
    chunks: ChunkWriter,
    usage: ResponseUsage,
    /// Output tokens so far, of all choices.
    streamed_tokens: u64,
    ended: usize,
    phase: StreamPhase,
}

impl<S: ChoiceFormat> ServerSentEvents<S> {
    async fn next_bytes(&mut self) -> Option<Bytes> {
        let mut out = Vec::new();
        match self.phase {
            StreamPhase::Over => return None,
            StreamPhase::First => {
                self.phase = StreamPhase::Running;
                for choice in 0..self.response.choices as u32 {
                    if let Some(entry) = self.response.format.first_entry(choice) {
                        self.chunks.write(&mut out, &entry, self.usage_of_chunk());
                    }
                }
                if !out.is_empty() {
                    return Some(out.into());
                }
            }
            StreamPhase::Running => {}
        }
        while out.is_empty() && self.phase == StreamPhase::Running {
            let Some(event) = self.response.events.next().await else {
                return Some(Bytes::from_static(KEEP_ALIVE_COMMENT));
            };
            self.write_choice_event(&mut out, event);
            for _ in 1..EVENTS_PER_WRITE_MAX {
                match self.response.events.try_next() {
                    Ok(event) if self.phase == StreamPhase::Running => {
                        self.write_choice_event(&mut out, Some(event))
                    }
                    _ => break,
                }
            }
        }
        Some(out.into())
    }

    fn write_choice_event(&mut self, out: &mut Vec<u8>, event: Option<ChoiceEvent>) {
        match event {
            Some(ChoiceEvent::Output(delta)) => {
                self.streamed_tokens += delta.tokens.len() as u64;
                let has_ids = self.response.options.return_token_ids && !delta.tokens.is_empty();
                let is_empty = delta.text.is_empty() && delta.logprobs.is_empty() && !has_ids;
                if !is_empty {
                    let usage = self.usage_of_chunk();
                    let chunks = &self.chunks;
                    self.response.format.delta_entries(delta, |entry| chunks.write(out, entry, usage));
                }
            }
            Some(ChoiceEvent::Ended { choice, outcome: Ok(outcome) }) => {
                self.usage.add(choice, self.response.best_of, &outcome);
                for entry in self.response.format.last_entries(choice, &outcome.finish) {
                    self.chunks.write(out, &entry, self.usage_of_chunk());
                }
                self.ended += 1;
                if self.ended == self.response.choices {
                    self.write_end(out);
                }
            }
            Some(ChoiceEvent::Ended { outcome: Err(error), .. }) => self.write_error(out, &error.into()),
            // The task ended without its `Ended` event: the runtime is shutting down.
            None => self.write_error(out, &ApiError::not_ready("the router is stopping")),
        }
    }

    fn write_end(&mut self, out: &mut Vec<u8>) {
        if self.response.options.include_usage {
            let mut chunk = self.response.format.envelope(true);
            chunk["choices"] = json!([]);
            let reasoning_tokens = self.response.format.reasoning_tokens();
            chunk["usage"] = self.usage.json(self.response.prompt_tokens, reasoning_tokens);
            chunk["timings"] = self.usage.timings_json(self.response.prompt_tokens);
            write_event(out, &chunk);
        }
        out.extend_from_slice(b"data: [DONE]\n\n");
        self.phase = StreamPhase::Over;
    }

    fn write_error(&mut self, out: &mut Vec<u8>, error: &ApiError) {
        write_event(out, &error.body());
        self.phase = StreamPhase::Over;
    }

    fn usage_of_chunk(&self) -> ChunkUsage {
        let options = self.response.options;
        match (options.include_usage, options.continuous_usage) {
            (false, _) => ChunkUsage::Absent,
            (true, false) => ChunkUsage::Null,
            (true, true) => ChunkUsage::Tokens {
                prompt: self.response.prompt_tokens as u64,
                completion: self.streamed_tokens,
            },
        }
    }
}

/// `usage` of a chunk other than the last one.
#[derive(Clone, Copy)]
enum ChunkUsage {
    Absent,
    Null,
    Tokens { prompt: u64, completion: u64 },
}

/// Writes the chunks of one response, which differ in `choices` and `usage` only.
struct ChunkWriter {
    /// A chunk up to its entry.
    head: Vec<u8>,
}

impl ChunkWriter {
    fn new(envelope: &Value) -> Self {
        let envelope = envelope.to_string();
        // An object, without its closing brace.
        let fields = &envelope[..envelope.len() - 1];
        Self { head: format!("data: {fields},\"choices\":[").into_bytes() }
    }

    fn write(&self, out: &mut Vec<u8>, entry: &impl Serialize, usage: ChunkUsage) {
        out.extend_from_slice(&self.head);
        serde_json::to_writer(&mut *out, entry)
            .expect("an entry has string keys, and a vector takes all bytes");
        out.push(b']');
        match usage {
            ChunkUsage::Absent => {}
            ChunkUsage::Null => out.extend_from_slice(b",\"usage\":null"),
            ChunkUsage::Tokens { prompt, completion } => {
                let usage = json!({
                    "prompt_tokens": prompt,
                    "completion_tokens": completion,
                    "total_tokens": prompt + completion,
                });
                out.extend_from_slice(format!(",\"usage\":{usage}").as_bytes());
            }
        }
        out.extend_from_slice(b"}\n\n");
    }
}

fn write_event(out: &mut Vec<u8>, value: &Value) {
    out.extend_from_slice(format!("data: {value}\n\n").as_bytes());
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::wire::Logprob;

    #[test]
    fn the_most_probable_choices_of_each_prompt_are_selected() {
        let choice = |choice: u32, logprobs: &[f32]| {
            let logprobs: Vec<Logprob> =
                logprobs.iter().map(|&logprob| Logprob { logprob, top: vec![] }).collect();
            (OutputDelta { choice, tokens: vec![], text: String::new(), logprobs }, FinishCause::Length)
        };
        let ended = vec![
            choice(0, &[-3.0]),
            choice(1, &[-1.0, -1.0, -1.0, -1.0]),
            choice(2, &[-2.0, -1.5]),
            choice(3, &[-0.1]),
            choice(4, &[-0.5]),
            choice(5, &[-0.3]),
        ];
        let chosen = |n| -> Vec<u32> {
            most_probable(ended.clone(), 3, n).iter().map(|(delta, _)| delta.choice).collect()
        };
        assert_eq!(chosen(1), [1, 3]);
        assert_eq!(chosen(2), [1, 2, 3, 5]);
        assert_eq!(chosen(3), [0, 1, 2, 3, 4, 5]);
    }
}
