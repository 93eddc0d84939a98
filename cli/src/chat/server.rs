// SPDX-License-Identifier: Apache-2.0

//! [`ChatServer`]: the OpenAI-compatible server that answers, at a URL or behind the router's
//! socket of a fleet.

use std::time::Duration;

use loadgen::serving::error_text;
use reqwest::header::CONTENT_TYPE;
use serde::Deserialize;
use serde_json::Value;
use service::exit::{HasExit, one_line};
use service::{Exit, RuntimeDir};
use tokio::time::timeout;

use super::answer::AnswerStream;

/// The list of models, and the text of an error.
const DOCUMENT_BYTES_MAX: usize = 1 << 20;
const CONNECT_TIMEOUT: Duration = Duration::from_secs(10);
/// How long the list of models may take, which needs no engine.
const MODELS_TIMEOUT: Duration = Duration::from_secs(10);
/// How long a server may send nothing: a long prompt on a CPU, or a wait for a worker.
pub(crate) const STALL_TIMEOUT: Duration = Duration::from_secs(600);

/// Why there is no answer.
#[derive(Debug, thiserror::Error)]
pub(crate) enum ChatServerError {
    #[error("{0:?} is no address of a server: write http://HOST:PORT; a server with TLS needs a proxy")]
    Address(String),
    #[error("cannot make an HTTP client")]
    Client(#[source] reqwest::Error),
    #[error("{server} does not answer ({cause}): start it, or name another one")]
    Unreachable { server: String, cause: String },
    #[error("{server} refuses the API key, or its absence (HTTP {status}): pass --api-key-file")]
    Unauthorized { server: String, status: u16 },
    #[error("{server} has no list of models (HTTP {status}: {text}): is it an OpenAI-compatible server?")]
    NoModelList { server: String, status: u16, text: String },
    #[error("{server} has no model {wanted:?}; it has {has}")]
    UnknownModel { server: String, wanted: String, has: String },
    #[error("{server} serves several models: choose one with --name: {has}")]
    SeveralModels { server: String, has: String },
    #[error("{server} serves no model")]
    NoModel { server: String },
    #[error("{server} refuses the request (HTTP {status}): {text}")]
    Refused { server: String, status: u16, text: String },
    #[error("the answer of {server} breaks off: {cause}")]
    Cut { server: String, cause: String },
    #[error("the answer of {server} ends with an error: {text}")]
    InStream { server: String, text: String },
    #[error("{server} sends what is no part of an answer: {source}")]
    Malformed { server: String, source: serde_json::Error },
    #[error("{server} sends too much: an event is longer than 1 MiB, or the answer longer than 64 MiB")]
    TooLong { server: String },
    #[error("{server} has sent nothing for {} s", STALL_TIMEOUT.as_secs())]
    Stalled { server: String },
}

impl HasExit for ChatServerError {
    fn exit(&self) -> Exit {
        match self {
            Self::Address(_)
            | Self::Unauthorized { .. }
            | Self::NoModelList { .. }
            | Self::UnknownModel { .. }
            | Self::SeveralModels { .. } => Exit::Usage,
            Self::Refused { status: 429, .. } => Exit::OutOfResources,
            Self::Refused { status: 400..=499, .. } => Exit::Usage,
            Self::Client(_) => Exit::Internal,
            _ => Exit::PeerLost,
        }
    }
}

#[derive(Deserialize)]
struct OfferedModels {
    data: Vec<OfferedModel>,
}

#[derive(Deserialize)]
struct OfferedModel {
    id: String,
    /// The model of which `id` is a further name.
    root: Option<String>,
}

pub(crate) struct ChatServer {
    http: reqwest::Client,
    /// Without a slash at the end and without `/v1`.
    base_url: String,
    api_key: Option<String>,
    /// As error texts name the server.
    name: String,
}

impl ChatServer {
    pub(crate) fn at_url(url: &str, api_key: Option<String>) -> Result<Self, ChatServerError> {
        // A base URL of OpenAI's libraries has the version in it.
        let base_url = url.trim_end_matches('/').trim_end_matches("/v1").to_owned();
        if !base_url.starts_with("http://") || base_url.parse::<reqwest::Url>().is_err() {
            return Err(ChatServerError::Address(url.to_owned()));
        }
        let http = reqwest::Client::builder().no_proxy().connect_timeout(CONNECT_TIMEOUT).build();
        let http = http.map_err(ChatServerError::Client)?;
        Ok(Self { http, name: base_url.clone(), base_url, api_key })
    }

    /// The socket is open to the fleet's user only and needs no key.
    pub(crate) fn of_fleet(directory: &RuntimeDir) -> Result<Self, ChatServerError> {
        let http = reqwest::Client::builder().unix_socket(directory.router_socket()).build();
        let http = http.map_err(ChatServerError::Client)?;
        let name = format!("the fleet in {}", directory.path().display());
        Ok(Self { http, base_url: "http://fleet".to_owned(), api_key: None, name })
    }

    pub(crate) fn name(&self) -> &str {
        &self.name
    }

    fn with_key(&self, request: reqwest::RequestBuilder) -> reqwest::RequestBuilder {
        match &self.api_key {
            Some(key) => request.bearer_auth(key),
            None => request,
        }
    }

    fn unreachable(&self, error: &reqwest::Error) -> ChatServerError {
        ChatServerError::Unreachable { server: self.name.clone(), cause: root_cause(error) }
    }

    /// The wanted model, or the only one.
    pub(crate) async fn model(&self, wanted: Option<&str>) -> Result<String, ChatServerError> {
        let request = self.with_key(self.http.get(format!("{}/v1/models", self.base_url)));
        let response =
            request.timeout(MODELS_TIMEOUT).send().await.map_err(|error| self.unreachable(&error))?;
        let status = response.status().as_u16();
        let text = document(response).await.map_err(|error| self.unreachable(&error))?;
        let server = self.name.clone();
        if matches!(status, 401 | 403) {
            return Err(ChatServerError::Unauthorized { server, status });
        }
        let models = serde_json::from_str::<OfferedModels>(&text).ok().filter(|_| status == 200);
        let Some(OfferedModels { data: models }) = models else {
            return Err(ChatServerError::NoModelList { server, status, text: error_text(&text) });
        };
        let is_own_name = |model: &&OfferedModel| model.root.as_ref().is_none_or(|root| *root == model.id);
        let names: Vec<&str> = models.iter().filter(is_own_name).map(|model| model.id.as_str()).collect();
        let has = names.join(", ");
        match (wanted, names.as_slice()) {
            (Some(wanted), _) if models.iter().any(|model| model.id == wanted) => Ok(wanted.to_owned()),
            (Some(wanted), _) => {
                Err(ChatServerError::UnknownModel { server, wanted: wanted.to_owned(), has })
            }
            (None, []) => Err(ChatServerError::NoModel { server }),
            (None, [only]) => Ok((*only).to_owned()),
            (None, _) => Err(ChatServerError::SeveralModels { server, has }),
        }
    }

    /// Sends the request of a chat. Dropping the stream ends the generation.
    pub(crate) async fn open(&self, body: &Value) -> Result<AnswerStream, ChatServerError> {
        let request = self.http.post(format!("{}/v1/chat/completions", self.base_url));
        let request = self.with_key(request).header(CONTENT_TYPE, "application/json").body(body.to_string());
        let server = self.name.clone();
        let sent = timeout(STALL_TIMEOUT, request.send()).await;
        let Ok(sent) = sent else { return Err(ChatServerError::Stalled { server }) };
        let response = sent.map_err(|error| self.unreachable(&error))?;
        match response.status().as_u16() {
            200 => Ok(AnswerStream::new(response, server)),
            status @ (401 | 403) => Err(ChatServerError::Unauthorized { server, status }),
            status => {
                let text = document(response).await.map_err(|error| self.unreachable(&error))?;
                Err(ChatServerError::Refused { server, status, text: error_text(&text) })
            }
        }
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
pub(super) fn root_cause(error: &reqwest::Error) -> String {
    let mut cause: &dyn std::error::Error = error;
    while let Some(deeper) = cause.source() {
        cause = deeper;
    }
    one_line(cause)
}
