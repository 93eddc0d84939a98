// SPDX-License-Identifier: Apache-2.0

//! Measures concurrent streams: times each token of each stream.

use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use futures::future::try_join_all;
use proto::v1::inference_client::InferenceClient;
use proto::v1::{self as wire, generate_frame, generate_request};
use serde::Serialize;
use tonic::Status;
use tonic::transport::Channel;

use crate::report::{LatencySummary, summarize};

/// `streams` requests that start at once, each with `prompt_tokens` of prompt and `tokens` of
/// output.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
pub struct StreamLoad {
    pub streams: u32,
    pub prompt_tokens: u32,
    pub tokens: u32,
    /// JSON schema of every output. It must need more than `tokens` tokens.
    #[serde(skip)]
    pub schema: Option<&'static str>,
}

#[derive(Clone, Debug, Serialize)]
pub struct StreamLoadReport {
    #[serde(flatten)]
    pub load: StreamLoad,
    /// Time from the first request to the last token.
    pub total_s: f64,
    /// Output tokens per second of that time.
    pub tokens_per_s: f64,
    /// Decode speed of one stream after its first token, the mean over the streams.
    pub decode_tokens_per_s_of_a_stream: f64,
    pub first_token: LatencySummary,
    pub inter_token: LatencySummary,
    /// Number of failovers to another worker.
    pub resumes: u32,
}

#[derive(Debug, thiserror::Error)]
pub enum StreamLoadError {
    #[error("stream {stream} failed")]
    Stream { stream: u32, source: Box<Status> },
    #[error("stream {stream} generated {found} tokens instead of {expected}")]
    Count { stream: u32, found: usize, expected: u32 },
    #[error("stream {stream} ended without its last frame")]
    Unfinished { stream: u32 },
    #[error("stream {stream} over HTTP failed")]
    Http { stream: u32, source: reqwest::Error },
    #[error("stream {stream} was answered with HTTP {status}: {text}")]
    Status { stream: u32, status: u16, text: String },
    #[error("stream {stream} has an event that is no chunk of a completion")]
    Event { stream: u32 },
}

/// The prompt of one stream.
pub(crate) struct LoadPrompt {
    pub(crate) ids: Vec<u32>,
    /// Prompts with different salts share no prefix cache entries.
    pub(crate) cache_salt: String,
}

/// Runs the load once. Token ids are below `vocabulary`. Each `round` has other prompts.
pub async fn run_load(
    client: &InferenceClient<Channel>,
    load: StreamLoad,
    vocabulary: u32,
    round: u32,
) -> Result<StreamLoadReport, StreamLoadError> {
    let prompts = (0..load.streams).map(|stream| {
        let number = round.wrapping_mul(load.streams).wrapping_add(stream);
        LoadPrompt { ids: random_tokens(load.prompt_tokens, vocabulary, number), cache_salt: String::new() }
    });
    run_prompts(client, load, prompts.collect()).await
}

/// Runs the load once with `prompts`, whose number and length match the load.
pub(crate) async fn run_prompts(
    client: &InferenceClient<Channel>,
    load: StreamLoad,
    prompts: Vec<LoadPrompt>,
) -> Result<StreamLoadReport, StreamLoadError> {
    let start = Instant::now();
    let streams = (0..).zip(prompts);
    let streams = streams.map(|(stream, prompt)| run_stream(client.clone(), stream, prompt, load));
    let streams = try_join_all(streams).await?;
    Ok(summarize_streams(load, start.elapsed(), &streams))
}

/// The figures of streams that ran together for `total`.
pub(crate) fn summarize_streams(
    load: StreamLoad,
    total: Duration,
    streams: &[TimedStream],
) -> StreamLoadReport {
    let total_s = total.as_secs_f64();
    let milliseconds = |time: Duration| time.as_secs_f64() * 1e3;
    let first_tokens = streams.iter().filter_map(|s| Some(milliseconds(*s.tokens_at.first()?))).collect();
    let gaps = streams
        .iter()
        .flat_map(|stream| stream.tokens_at.windows(2).map(|pair| milliseconds(pair[1] - pair[0])))
        .collect();
    let rates: Vec<f64> = streams.iter().filter_map(TimedStream::decode_rate).collect();
    let count: usize = streams.iter().map(|stream| stream.tokens_at.len()).sum();
    StreamLoadReport {
        load,
        total_s,
        tokens_per_s: count as f64 / total_s,
        decode_tokens_per_s_of_a_stream: rates.iter().sum::<f64>() / rates.len().max(1) as f64,
        first_token: summarize(first_tokens),
        inter_token: summarize(gaps),
        resumes: streams.iter().map(|stream| stream.resumes).sum(),
    }
}

/// Random token ids. Prompts differ in their first tokens, so they share no prefix cache entries.
pub(crate) fn random_tokens(count: u32, vocabulary: u32, number: u32) -> Vec<u32> {
    let mut state = u64::from(number).wrapping_mul(0x9e37_79b9_7f4a_7c15) ^ 0x2545_f491_4f6c_dd1d;
    (0..count)
        .map(|_| {
            // Knuth's linear congruential generator. Its high bits are random enough for token ids.
            state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
            ((state >> 33) % u64::from(vocabulary.max(1))) as u32
        })
        .collect()
}

/// Output tokens that streams of this process have received.
static RECEIVED_TOKENS: AtomicU64 = AtomicU64::new(0);

pub(crate) fn count_received(tokens: usize) {
    RECEIVED_TOKENS.fetch_add(tokens as u64, Ordering::Relaxed);
}

/// Output tokens that streams have received since the process began, for a progress bar.
pub fn received_tokens() -> u64 {
    RECEIVED_TOKENS.load(Ordering::Relaxed)
}

pub(crate) struct TimedStream {
    /// Time of each token since the request of its stream.
    pub(crate) tokens_at: Vec<Duration>,
    resumes: u32,
    /// Its last frame came.
    pub(crate) is_finished: bool,
}

impl TimedStream {
    pub(crate) fn new(tokens: u32) -> Self {
        Self { tokens_at: Vec::with_capacity(tokens as usize), resumes: 0, is_finished: false }
    }

    pub(crate) fn add(&mut self, tokens: usize, at: Duration) {
        self.tokens_at.extend(std::iter::repeat_n(at, tokens));
    }

    /// The stream, if it is whole.
    pub(crate) fn check(self, stream: u32, expected: u32) -> Result<Self, StreamLoadError> {
        match self.tokens_at.len() {
            _ if !self.is_finished => Err(StreamLoadError::Unfinished { stream }),
            found if found != expected as usize => Err(StreamLoadError::Count { stream, found, expected }),
            _ => Ok(self),
        }
    }

    fn decode_rate(&self) -> Option<f64> {
        let (first, last) = (self.tokens_at.first()?, self.tokens_at.last()?);
        let seconds = (*last - *first).as_secs_f64();
        (seconds > 0.0).then(|| (self.tokens_at.len() - 1) as f64 / seconds)
    }
}

pub(crate) async fn run_stream(
    mut client: InferenceClient<Channel>,
    stream: u32,
    prompt: LoadPrompt,
    StreamLoad { tokens, schema, .. }: StreamLoad,
) -> Result<TimedStream, StreamLoadError> {
    let failed = |source| StreamLoadError::Stream { stream, source: Box::new(source) };
    let request = wire::GenerateRequest {
        prompt: Some(generate_request::Prompt::Tokens(wire::TokenIds { ids: prompt.ids })),
        cache_salt: prompt.cache_salt,
        max_tokens: tokens,
        ignore_eos: schema.is_none(),
        grammar: schema.map(|schema| wire::Grammar {
            kind: Some(wire::grammar::Kind::JsonSchema(schema.to_owned())),
            lenient: false,
        }),
        sampling: Some(wire::Sampling { temperature: Some(0.0), seed: Some(0), ..Default::default() }),
        ..Default::default()
    };
    let start = Instant::now();
    let mut frames = client.generate(request).await.map_err(failed)?.into_inner();
    let mut timed = TimedStream::new(tokens);
    while let Some(frame) = frames.message().await.map_err(failed)? {
        match frame.frame {
            Some(generate_frame::Frame::Delta(delta)) => {
                count_received(delta.tokens.len());
                timed.add(delta.tokens.len(), start.elapsed());
            }
            Some(generate_frame::Frame::Finished(end)) => {
                timed.resumes = end.usage.map_or(0, |usage| usage.resumes);
                timed.is_finished = true;
            }
            Some(generate_frame::Frame::Started(_)) | None => {}
        }
    }
    timed.check(stream, tokens)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn prompts_are_in_the_vocabulary_and_differ_in_their_first_tokens() {
        let prompts: Vec<Vec<u32>> = (0..64).map(|number| random_tokens(8, 1000, number)).collect();
        assert!(prompts.iter().flatten().all(|&token| token < 1000));
        let beginnings: std::collections::HashSet<&[u32]> =
            prompts.iter().map(|prompt| &prompt[..2]).collect();
        assert_eq!(beginnings.len(), prompts.len());
        assert_eq!(random_tokens(8, 1000, 5), random_tokens(8, 1000, 5));
    }

    #[test]
    fn the_first_token_is_not_part_of_the_decode_rate() {
        let at = |ms: u64| Duration::from_millis(ms);
        let rate =
            |times: Vec<Duration>| TimedStream { tokens_at: times, ..TimedStream::new(0) }.decode_rate();
        assert_eq!(rate(vec![at(900), at(1000), at(1100)]), Some(10.0));
        assert_eq!(rate(vec![at(5)]), None);
    }
}
