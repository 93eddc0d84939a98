// SPDX-License-Identifier: Apache-2.0

//! Why a call failed, by the status of gRPC.

use std::time::Duration;

use tonic::{Code, Status};

/// Metadata of a temporary refusal, in seconds.
const RETRY_AFTER: &str = "retry-after";

#[derive(Debug, thiserror::Error)]
pub enum ClientError {
    #[error("{url:?} is no URL of a server: {source}")]
    Url { url: String, source: tonic::transport::Error },
    #[error("the certificates cannot be used: {source}")]
    Tls { source: tonic::transport::Error },
    #[error("cannot connect to {url}: {source}")]
    Connect { url: String, source: tonic::transport::Error },
    #[error("the API key has characters that no header can have")]
    ApiKey,
    /// A field is wrong, or the request can never fit.
    #[error("the request is not valid: {message}")]
    InvalidRequest { message: String },
    /// The API key is missing or not valid.
    #[error("not authenticated: {message}")]
    Unauthenticated { message: String },
    /// The model does not exist.
    #[error("not found: {message}")]
    NotFound { message: String },
    /// The tenant or the key has reached a limit of its own.
    #[error("a limit is reached: {message}")]
    RateLimited { message: String, retry_after: Option<Duration> },
    /// No worker is ready, the model's queue is full, or the connection broke.
    #[error("unavailable: {message}")]
    Unavailable { message: String, retry_after: Option<Duration> },
    /// The deadline has passed, here or at the server.
    #[error("the deadline has passed: {message}")]
    DeadlineExceeded { message: String },
    /// Requests with this content have crashed workers. Do not repeat it.
    #[error("quarantined: {message}")]
    Quarantined { message: String },
    #[error("cancelled: {message}")]
    Cancelled { message: String },
    /// The stream ended before so many choices had ended.
    #[error("the stream ended, but {unfinished} choices have not")]
    Incomplete { unfinished: u32 },
    #[error("the server failed with {code:?}: {message}")]
    Server { code: Code, message: String },
}

impl ClientError {
    /// When the server can take the request, as far as it knows.
    pub fn retry_after(&self) -> Option<Duration> {
        match self {
            Self::RateLimited { retry_after, .. } | Self::Unavailable { retry_after, .. } => *retry_after,
            _ => None,
        }
    }
}

impl From<Status> for ClientError {
    fn from(status: Status) -> Self {
        let seconds = status.metadata().get(RETRY_AFTER).and_then(|value| value.to_str().ok()?.parse().ok());
        let retry_after = seconds.map(Duration::from_secs);
        let message = status.message().to_owned();
        match status.code() {
            Code::InvalidArgument => Self::InvalidRequest { message },
            Code::Unauthenticated => Self::Unauthenticated { message },
            Code::NotFound => Self::NotFound { message },
            Code::ResourceExhausted => Self::RateLimited { message, retry_after },
            Code::Unavailable => Self::Unavailable { message, retry_after },
            Code::DeadlineExceeded => Self::DeadlineExceeded { message },
            Code::FailedPrecondition => Self::Quarantined { message },
            // The layer of tonic that watches `grpc-timeout` gives this code.
            Code::Cancelled if message == "Timeout expired" => Self::DeadlineExceeded { message },
            Code::Cancelled => Self::Cancelled { message },
            code => Self::Server { code, message },
        }
    }
}
