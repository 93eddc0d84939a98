// SPDX-License-Identifier: Apache-2.0

//! A client of the soak: sends one request, reads as fast or as far as it is told, and says how the
//! response ended.

use std::error::Error;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

use proto::v1::generate_frame::Frame;
use proto::v1::inference_client::InferenceClient;
use proto::v1::{Finished, GenerateRequest};
use serde_json::Value;
use tonic::transport::Channel;

use super::output::Output;
use super::scenario::{Call, Scenario};
use crate::harness::random::SeededRandom;

/// A stream without a frame for so long hangs. A worker is replaced within its watchdog's time, and
/// a lost stream waits 5 s for another one; the rest is for busy machines.
const HANG: Duration = Duration::from_secs(90);

/// How a client reads.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Reader {
    Fast,
    /// Pauses before each frame.
    Slow,
    /// Goes away after this many tokens.
    Leaves(usize),
}

impl Reader {
    pub(super) fn random(random: &mut SeededRandom) -> Self {
        match random.below(10) {
            0 | 1 => Reader::Slow,
            2 | 3 => Reader::Leaves(random.below(100)),
            _ => Reader::Fast,
        }
    }

    async fn before_frame(self) {
        if self == Reader::Slow {
            tokio::time::sleep(Duration::from_millis(15)).await;
        }
    }

    fn leaves_at(self, output: &Output) -> bool {
        matches!(self, Reader::Leaves(tokens) if output.tokens() >= tokens)
    }
}

/// How a response ended.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) enum Ending {
    Complete {
        resumes: u32,
    },
    /// The client went away.
    Left,
    /// An error status before the first frame or the first byte of the response.
    Refused(String),
    /// An error status or an error event in the middle.
    Failed(String),
    /// No process listens.
    Unreachable(String),
    /// The connection broke: the router is gone.
    Reset(String),
    /// The stream ended as if it were complete, and was not.
    Silent,
    Hung,
}

/// How far the streams of a client have come.
#[derive(Default)]
pub(super) struct Progress {
    pub(super) started: AtomicUsize,
    pub(super) deltas: AtomicUsize,
}

pub(super) struct Client {
    pub(super) progress: Progress,
    grpc: InferenceClient<Channel>,
    http: reqwest::Client,
    url: String,
}

impl Client {
    pub(super) fn new(url: &str) -> Self {
        let channel = Channel::from_shared(url.to_owned()).unwrap().connect_lazy();
        let progress = Progress::default();
        Self {
            progress,
            grpc: InferenceClient::new(channel),
            http: reqwest::Client::new(),
            url: url.to_owned(),
        }
    }

    pub(super) async fn run(&self, scenario: &Scenario, reader: Reader) -> (Output, Ending) {
        let mut output = Output::new(scenario.choices());
        let ending = match &scenario.call {
            Call::Grpc(request) => self.run_grpc((**request).clone(), reader, &mut output).await,
            Call::Http(body) if body["stream"] == true => self.run_events(body, reader, &mut output).await,
            Call::Http(body) => self.run_whole(body, &mut output).await,
        };
        let ending = ending.unwrap_or_else(|ending| ending);
        (output, ending)
    }

    async fn run_grpc(
        &self,
        request: GenerateRequest,
        reader: Reader,
        output: &mut Output,
    ) -> Result<Ending, Ending> {
        let call = in_time(self.grpc.clone().generate(request)).await?;
        let mut frames = call.map_err(|status| status_ending(&status, Ending::Refused))?.into_inner();
        let mut resumes = 0;
        loop {
            reader.before_frame().await;
            let next = in_time(frames.message()).await?;
            let Some(frame) = next.map_err(|status| status_ending(&status, Ending::Failed))? else { break };
            match frame.frame {
                Some(Frame::Delta(delta)) => {
                    output.append(delta);
                    self.progress.deltas.fetch_add(1, Ordering::Relaxed);
                }
                Some(Frame::Finished(end)) => {
                    resumes += end.usage.map_or(0, |usage| usage.resumes);
                    output.finish(end.choice as usize, finish_text(&end));
                }
                Some(Frame::Started(_)) => {
                    self.progress.started.fetch_add(1, Ordering::Relaxed);
                }
                None => {}
            }
            if reader.leaves_at(output) {
                return Ok(Ending::Left);
            }
        }
        Ok(if output.is_finished() { Ending::Complete { resumes } } else { Ending::Silent })
    }

    async fn post(&self, body: &Value) -> Result<reqwest::Response, Ending> {
        let request = self.http.post(format!("{}/v1/completions", self.url)).json(body).send();
        let response = in_time(request).await?.map_err(|error| reset(&error))?;
        if response.status() == 200 {
            return Ok(response);
        }
        let status = response.status();
        let text = in_time(response.text()).await?.map_err(|error| reset(&error))?;
        let answer: Value = serde_json::from_str(&text).unwrap_or_default();
        let message = answer["error"]["message"].as_str().unwrap_or(&text).to_owned();
        Err(Ending::Refused(format!("HTTP {}: {message}", status.as_u16())))
    }

    async fn run_events(&self, body: &Value, reader: Reader, output: &mut Output) -> Result<Ending, Ending> {
        let mut response = self.post(body).await?;
        let mut unread = Vec::new();
        loop {
            reader.before_frame().await;
            let chunk = in_time(response.chunk()).await?.map_err(|error| reset(&error))?;
            let Some(chunk) = chunk else { return Ok(Ending::Silent) };
            unread.extend_from_slice(&chunk);
            while let Some(end) = unread.windows(2).position(|two| two == b"\n\n") {
                let event = String::from_utf8(unread.drain(..end + 2).collect()).unwrap();
                let Some(data) = event.trim().strip_prefix("data: ") else { continue };
                if data == "[DONE]" {
                    let is_whole = output.is_finished();
                    return Ok(if is_whole { Ending::Complete { resumes: 0 } } else { Ending::Silent });
                }
                let data: Value = serde_json::from_str(data).unwrap();
                if let Some(message) = data["error"]["message"].as_str() {
                    return Ok(Ending::Failed(format!("HTTP event: {message}")));
                }
                output.append_json(&data);
            }
            if reader.leaves_at(output) {
                return Ok(Ending::Left);
            }
        }
    }

    async fn run_whole(&self, body: &Value, output: &mut Output) -> Result<Ending, Ending> {
        let response = self.post(body).await?;
        let text = in_time(response.text()).await?.map_err(|error| reset(&error))?;
        output.append_json(&serde_json::from_str(&text).unwrap());
        Ok(if output.is_finished() { Ending::Complete { resumes: 0 } } else { Ending::Silent })
    }
}

async fn in_time<T>(future: impl Future<Output = T>) -> Result<T, Ending> {
    tokio::time::timeout(HANG, future).await.map_err(|_| Ending::Hung)
}

fn finish_text(end: &Finished) -> String {
    format!("{:?} {:?} {:?}", end.reason(), end.stop, end.stop_token)
}

/// A status with a source comes from the connection, not from the router.
fn status_ending(status: &tonic::Status, explicit: fn(String) -> Ending) -> Ending {
    match status.source() {
        Some(source) => reset(source),
        None => explicit(format!("gRPC {:?}: {}", status.code(), status.message())),
    }
}

fn reset(error: &dyn Error) -> Ending {
    let mut text = error.to_string();
    let mut cause = error.source();
    while let Some(error) = cause {
        text = format!("{text}: {error}");
        cause = error.source();
    }
    match text.contains("Connection refused") {
        true => Ending::Unreachable(text),
        false => Ending::Reset(text),
    }
}
