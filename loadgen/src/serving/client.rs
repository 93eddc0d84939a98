// SPDX-License-Identifier: Apache-2.0

//! The HTTP client of the load generator.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use serde::Deserialize;
use service::exit::one_line;
use tokio::time::{Instant, timeout_at};

use super::answer::{AnswerReader, RequestFailure, StreamedAnswer, error_text};
use super::sse::SseReader;
use super::target::{PastTurn, RequestTemplate};

/// An answer of 100,000 tokens with 600 bytes an event.
const STREAM_BYTES_MAX: usize = 64 << 20;
/// The list of models, and the text of an error.
const DOCUMENT_BYTES_MAX: usize = 1 << 20;
/// How long a response may stay open after `[DONE]`. Its connection is used again once it has
/// ended.
const END_TIMEOUT: Duration = Duration::from_secs(1);
/// How long the list of models may take, which needs no engine.
const MODELS_TIMEOUT: Duration = Duration::from_secs(10);

/// Why there is nothing to measure.
#[derive(Debug, thiserror::Error)]
pub enum ServerError {
    #[error("{0:?} is no address of a server: write http://HOST:PORT; a server with TLS needs a proxy")]
    Address(String),
    #[error("cannot make an HTTP client")]
    Client(#[source] reqwest::Error),
    #[error("{url} does not answer ({cause}): start the server, or name another one with --base-url")]
    Unreachable { url: String, cause: String },
    #[error("{url} refuses the API key, or its absence (HTTP {status}): pass --api-key")]
    Unauthorized { url: String, status: u16 },
    #[error("{url}/v1/models answers HTTP {status}: {text}; is this an OpenAI-compatible server?")]
    NoModels { url: String, status: u16, text: String },
    #[error("{url} has no model {wanted:?}; it has {has}")]
    UnknownModel { url: String, wanted: String, has: String },
    #[error("the first request to {url} fails: {failure}")]
    FirstRequest { url: String, failure: RequestFailure },
}

/// A model of the server.
#[derive(Clone, Debug, PartialEq, Eq, Deserialize)]
pub struct ListedModel {
    pub id: String,
    /// vLLM and Ballast say it.
    pub max_model_len: Option<u32>,
}

#[derive(Deserialize)]
struct ModelList {
    data: Vec<ListedModel>,
}

/// A client of one server. Requests share its connections.
#[derive(Clone)]
pub struct ServingClient {
    http: reqwest::Client,
    base_url: String,
    api_key: Option<String>,
    /// A stream without an event for this long has failed.
    stall_timeout: Duration,
    ended_requests: Arc<AtomicU64>,
}

impl ServingClient {
    pub fn new(
        base_url: &str,
        api_key: Option<String>,
        stall_timeout: Duration,
    ) -> Result<Self, ServerError> {
        // A base URL of OpenAI's libraries has the version in it.
        let trimmed = base_url.trim_end_matches('/').trim_end_matches("/v1").to_owned();
        if !trimmed.starts_with("http://") || trimmed.parse::<reqwest::Url>().is_err() {
            return Err(ServerError::Address(base_url.to_owned()));
        }
        let http = reqwest::Client::builder().no_proxy().build().map_err(ServerError::Client)?;
        Ok(Self { http, base_url: trimmed, api_key, stall_timeout, ended_requests: Arc::default() })
    }

    pub fn base_url(&self) -> &str {
        &self.base_url
    }

    /// Requests of this client and its clones that have ended, for a progress bar.
    pub fn ended_requests(&self) -> u64 {
        self.ended_requests.load(Ordering::Relaxed)
    }

    fn with_key(&self, request: reqwest::RequestBuilder) -> reqwest::RequestBuilder {
        match &self.api_key {
            Some(key) => request.bearer_auth(key),
            None => request,
        }
    }

    /// The wanted model, or the first one.
    pub async fn model(&self, wanted: Option<&str>) -> Result<ListedModel, ServerError> {
        let url = self.base_url.clone();
        let unreachable = |cause| ServerError::Unreachable { url: url.clone(), cause };
        let request = self.with_key(self.http.get(format!("{url}/v1/models")));
        let response =
            request.timeout(MODELS_TIMEOUT).send().await.map_err(|error| unreachable(root(&error)))?;
        let status = response.status().as_u16();
        let text = document(response).await.map_err(|error| unreachable(root(&error)))?;
        if matches!(status, 401 | 403) {
            return Err(ServerError::Unauthorized { url, status });
        }
        let models = serde_json::from_str::<ModelList>(&text).ok().filter(|_| status == 200);
        let Some(ModelList { data: models }) = models else {
            return Err(ServerError::NoModels { url, status, text: error_text(&text) });
        };
        let has = models.iter().map(|model| model.id.clone()).collect::<Vec<_>>().join(", ");
        let mut found = models.into_iter().filter(|model| wanted.is_none_or(|wanted| model.id == wanted));
        let wanted = wanted.unwrap_or_default().to_owned();
        found.next().ok_or(ServerError::UnknownModel { url, wanted, has })
    }

    /// Serializes a request, so that its sending takes little time.
    pub(crate) fn request(
        &self,
        template: &RequestTemplate,
        past: &[PastTurn],
        prompt: &str,
        output_tokens: u32,
    ) -> reqwest::RequestBuilder {
        let body = template.body(past, prompt, output_tokens).to_string();
        let request = self.http.post(format!("{}{}", self.base_url, template.backend.path()));
        self.with_key(request).header(reqwest::header::CONTENT_TYPE, "application/json").body(body)
    }

    /// Sends a request and reads its stream to the end. Times count from `began`.
    pub(crate) async fn stream(
        &self,
        request: reqwest::RequestBuilder,
        began: Instant,
    ) -> Result<StreamedAnswer, RequestFailure> {
        let answer = self.read_stream(request, began).await;
        self.ended_requests.fetch_add(1, Ordering::Relaxed);
        answer
    }

    async fn read_stream(
        &self,
        request: reqwest::RequestBuilder,
        began: Instant,
    ) -> Result<StreamedAnswer, RequestFailure> {
        let stalled = |_| RequestFailure::Stalled(self.stall_timeout);
        let mut deadline = Instant::now() + self.stall_timeout;
        let sent = timeout_at(deadline, request.send()).await.map_err(stalled)?;
        let mut response = sent.map_err(|error| RequestFailure::Connect(root(&error)))?;
        let status = response.status().as_u16();
        if status != 200 {
            let text = timeout_at(deadline, document(response)).await.map_err(stalled)?;
            return Err(RequestFailure::Status { status, text: error_text(&text.unwrap_or_default()) });
        }
        let (mut events, mut answer, mut bytes) = (SseReader::default(), AnswerReader::default(), 0);
        loop {
            // Bytes without an event, such as comments, do not count as life.
            let chunk = match timeout_at(deadline, response.chunk()).await {
                Err(_) if answer.is_done => break,
                chunk => chunk.map_err(stalled)?,
            };
            let Ok(Some(chunk)) = chunk else { break };
            let at = began.elapsed();
            bytes += chunk.len();
            let read = events.push(&chunk).map_err(|_| RequestFailure::TooLong)?;
            if bytes > STREAM_BYTES_MAX {
                return Err(RequestFailure::TooLong);
            }
            read.iter().try_for_each(|data| answer.event(data, at))?;
            if !read.is_empty() {
                let wait = if answer.is_done { END_TIMEOUT } else { self.stall_timeout };
                deadline = Instant::now() + wait;
            }
        }
        answer.finish()
    }
}

/// The body of a response that is no stream, up to its bound.
async fn document(mut response: reqwest::Response) -> Result<String, reqwest::Error> {
    let mut bytes = Vec::new();
    while let Some(chunk) = response.chunk().await? {
        bytes.extend_from_slice(&chunk);
        if bytes.len() > DOCUMENT_BYTES_MAX {
            break;
        }
    }
    Ok(String::from_utf8_lossy(&bytes).into_owned())
}

/// The cause without the URL, which the caller names.
fn root(error: &reqwest::Error) -> String {
    let mut cause: &dyn std::error::Error = error;
    while let Some(deeper) = cause.source() {
        cause = deeper;
    }
    one_line(cause)
}
