// SPDX-License-Identifier: Apache-2.0

//! Measures what the router costs: the same load through its HTTP API, through its gRPC API, and
//! straight to the worker's socket, in turns.

use std::time::Instant;

use futures::future::try_join_all;
use proto::v1::Sampling;
use proto::v1::inference_client::InferenceClient;
use proto::worker::v1::worker_client::WorkerClient;
use proto::worker::v1::{self as wire, generate_frame};
use serde::Serialize;
use serde_json::{Value, json};
use tonic::transport::Channel;

use crate::fleet::{FleetError, MeasuredFleet};
use crate::report::median;
use crate::serving::SseReader;
use crate::streams::{
    LoadPrompt, StreamLoad, StreamLoadError, StreamLoadReport, TimedStream, random_tokens, run_stream,
    summarize_streams,
};
use crate::worker_startup::{WorkerStartupError, first_worker};

/// What is run on each path.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
pub struct RouterLoad {
    #[serde(flatten)]
    pub streams: StreamLoad,
    /// Requests of one token, one after the other, for the time to the first token.
    pub lone_requests: u32,
    pub rounds: u32,
}

#[derive(Debug, thiserror::Error)]
pub enum RouterOverheadError {
    #[error(transparent)]
    Fleet(#[from] FleetError),
    #[error(transparent)]
    Worker(#[from] WorkerStartupError),
    #[error(transparent)]
    Load(#[from] StreamLoadError),
    #[error("cannot make an HTTP client")]
    Client(#[source] reqwest::Error),
}

/// The figures of one path in each round.
#[derive(Clone, Debug, Default, Serialize)]
pub struct PathSpeed {
    pub tokens_per_s: Vec<f64>,
    /// Median over the streams, which start at once.
    pub first_token_ms: Vec<f64>,
    /// Median over the requests that run alone.
    pub lone_first_token_ms: Vec<f64>,
}

/// What a path through the router costs, compared with the worker's socket in the same round:
/// medians over the rounds.
#[derive(Clone, Copy, Debug, Serialize)]
pub struct PathCost {
    /// Part of the throughput, in percent.
    pub throughput_percent: f64,
    pub first_token_ms: f64,
    pub lone_first_token_ms: f64,
}

#[derive(Clone, Debug, Serialize)]
pub struct RouterOverheadReport {
    pub load: RouterLoad,
    pub worker: PathSpeed,
    pub grpc: PathSpeed,
    pub http: PathSpeed,
    pub grpc_cost: PathCost,
    pub http_cost: PathCost,
}

/// How requests reach the worker.
#[derive(Clone)]
enum RequestPath {
    Worker { client: WorkerClient<Channel>, fingerprint: Vec<u8> },
    Grpc(InferenceClient<Channel>),
    Http { client: reqwest::Client, url: String },
}

/// Runs all paths once as warm-up and then `rounds` times in turns.
pub async fn measure_router_overhead(
    fleet: &MeasuredFleet,
    load: RouterLoad,
) -> Result<RouterOverheadReport, RouterOverheadError> {
    let (client, worker) = first_worker(fleet).await?;
    let http = reqwest::Client::builder().no_proxy().build().map_err(RouterOverheadError::Client)?;
    let paths = [
        RequestPath::Worker { client, fingerprint: worker.fingerprint.to_vec() },
        RequestPath::Grpc(fleet.client().await?),
        RequestPath::Http { client: http, url: format!("{}/v1/completions", fleet.http()) },
    ];
    let mut speeds: [PathSpeed; 3] = Default::default();
    let mut prompts = Prompts { load, vocabulary: worker.vocabulary, used: 0 };
    for round in 0..=load.rounds as usize {
        for turn in 0..paths.len() {
            // Each path is first, second and last equally often.
            let path = (round + turn) % paths.len();
            let (together, alone) = run_path(&paths[path], &mut prompts).await?;
            // The warm-up round opens connections and faults in pages.
            if round > 0 {
                speeds[path].tokens_per_s.push(together.tokens_per_s);
                speeds[path].first_token_ms.push(together.first_token.p50_ms);
                speeds[path].lone_first_token_ms.push(alone);
            }
        }
    }
    let [worker, grpc, http] = speeds;
    let (grpc_cost, http_cost) = (PathCost::of(&grpc, &worker), PathCost::of(&http, &worker));
    Ok(RouterOverheadReport { load, worker, grpc, http, grpc_cost, http_cost })
}

impl PathCost {
    fn of(path: &PathSpeed, worker: &PathSpeed) -> Self {
        let pairs = |path: &[f64], worker: &[f64], cost: fn(f64, f64) -> f64| {
            median(path.iter().zip(worker).map(|(&path, &worker)| cost(path, worker)).collect())
        };
        let later = |path: f64, worker: f64| path - worker;
        Self {
            throughput_percent: pairs(&path.tokens_per_s, &worker.tokens_per_s, |path, worker| {
                (1.0 - path / worker) * 100.0
            }),
            first_token_ms: pairs(&path.first_token_ms, &worker.first_token_ms, later),
            lone_first_token_ms: pairs(&path.lone_first_token_ms, &worker.lone_first_token_ms, later),
        }
    }
}

/// Prompts that share no prefix cache entries.
struct Prompts {
    load: RouterLoad,
    vocabulary: u32,
    used: u32,
}

impl Prompts {
    fn next(&mut self) -> LoadPrompt {
        self.used += 1;
        let ids = random_tokens(self.load.streams.prompt_tokens, self.vocabulary, self.used);
        LoadPrompt { ids, cache_salt: String::new() }
    }
}

/// The streams that run together, and the median time to the first token of those that run alone.
async fn run_path(
    path: &RequestPath,
    prompts: &mut Prompts,
) -> Result<(StreamLoadReport, f64), StreamLoadError> {
    let RouterLoad { streams: load, lone_requests, .. } = prompts.load;
    let lone = StreamLoad { streams: 1, tokens: 1, ..load };
    let mut alone = Vec::new();
    for number in 0..lone_requests {
        let stream = path.run(number, prompts.next(), lone).await?;
        alone.extend(stream.tokens_at.first().map(|time| time.as_secs_f64() * 1e3));
    }
    let started: Vec<LoadPrompt> = (0..load.streams).map(|_| prompts.next()).collect();
    let start = Instant::now();
    let streams = (0..).zip(started).map(|(number, prompt)| path.run(number, prompt, load));
    let streams = try_join_all(streams).await?;
    Ok((summarize_streams(load, start.elapsed(), &streams), median(alone)))
}

impl RequestPath {
    async fn run(
        &self,
        stream: u32,
        prompt: LoadPrompt,
        load: StreamLoad,
    ) -> Result<TimedStream, StreamLoadError> {
        match self.clone() {
            Self::Worker { client, fingerprint } => {
                run_on_worker(client, fingerprint, stream, prompt, load).await
            }
            Self::Grpc(client) => run_stream(client, stream, prompt, load).await,
            Self::Http { client, url } => run_on_http(&client, &url, stream, prompt, load).await,
        }
    }
}

async fn run_on_worker(
    mut client: WorkerClient<Channel>,
    fingerprint: Vec<u8>,
    stream: u32,
    prompt: LoadPrompt,
    load: StreamLoad,
) -> Result<TimedStream, StreamLoadError> {
    let failed = |source| StreamLoadError::Stream { stream, source: Box::new(source) };
    let request = wire::GenerateRequest {
        fingerprint: fingerprint.into(),
        prompt_tokens: prompt.ids.len() as u32,
        tokens: prompt.ids,
        max_tokens: load.tokens,
        sampling: Some(Sampling { temperature: Some(0.0), seed: Some(0), ..Default::default() }),
        ..Default::default()
    };
    let start = Instant::now();
    let mut frames = client.generate(request).await.map_err(failed)?.into_inner();
    let mut timed = TimedStream::new(load.tokens);
    while let Some(frame) = frames.message().await.map_err(failed)? {
        match frame.frame {
            Some(generate_frame::Frame::Tokens(tokens)) => timed.add(tokens.ids.len(), start.elapsed()),
            Some(generate_frame::Frame::Finished(_)) => timed.is_finished = true,
            Some(generate_frame::Frame::Admitted(_) | generate_frame::Frame::BeamProgress(_)) | None => {}
        }
    }
    timed.check(stream, load.tokens)
}

async fn run_on_http(
    client: &reqwest::Client,
    url: &str,
    stream: u32,
    prompt: LoadPrompt,
    load: StreamLoad,
) -> Result<TimedStream, StreamLoadError> {
    let failed = |source| StreamLoadError::Http { stream, source };
    // With token ids, each token has an event, also one without text.
    let body = json!({
        "prompt": prompt.ids, "max_tokens": load.tokens, "ignore_eos": true, "temperature": 0, "seed": 0,
        "stream": true, "return_token_ids": true,
    });
    let start = Instant::now();
    let mut response = client.post(url).json(&body).send().await.map_err(failed)?;
    if response.status() != reqwest::StatusCode::OK {
        let (status, text) = (response.status().as_u16(), response.text().await.map_err(failed)?);
        return Err(StreamLoadError::Status { stream, status, text });
    }
    let (mut events, mut timed) = (SseReader::default(), TimedStream::new(load.tokens));
    while let Some(chunk) = response.chunk().await.map_err(failed)? {
        let at = start.elapsed();
        for data in events.push(&chunk).map_err(|_| StreamLoadError::Event { stream })? {
            match data.as_str() {
                "[DONE]" => timed.is_finished = true,
                data => timed.add(token_count(data).ok_or(StreamLoadError::Event { stream })?, at),
            }
        }
    }
    timed.check(stream, load.tokens)
}

/// The number of output tokens in an event of a completion.
fn token_count(data: &str) -> Option<usize> {
    let event: Value = serde_json::from_str(data).ok()?;
    Some(event["choices"].as_array()?.first()?["token_ids"].as_array().map_or(0, Vec::len))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_cost_is_compared_within_its_round() {
        let worker = PathSpeed {
            tokens_per_s: vec![100.0, 200.0, 400.0],
            first_token_ms: vec![5.0, 6.0, 9.0],
            lone_first_token_ms: vec![1.0, 2.0, 3.0],
        };
        let path = PathSpeed {
            tokens_per_s: vec![98.0, 196.0, 200.0],
            first_token_ms: vec![6.0, 6.0, 11.0],
            lone_first_token_ms: vec![1.5, 2.5, 3.25],
        };
        let cost = PathCost::of(&path, &worker);
        assert!((cost.throughput_percent - 2.0).abs() < 1e-9, "{cost:?}");
        assert_eq!((cost.first_token_ms, cost.lone_first_token_ms), (1.0, 0.5));
    }

    #[test]
    fn tokens_of_an_event_are_counted_by_their_ids() {
        assert_eq!(token_count(r#"{"choices": [{"text": "", "token_ids": [5, 6]}]}"#), Some(2));
        assert_eq!(token_count(r#"{"choices": [{"text": "", "finish_reason": "length"}]}"#), Some(0));
        assert_eq!(token_count(r#"{"error": {}}"#), None);
    }
}
