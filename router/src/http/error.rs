// SPDX-License-Identifier: Apache-2.0

//! Errors in the form of OpenAI's API, `{"error": {"message", "type", "param", "code"}}`, each with
//! its HTTP status.
//!
//! An invalid request never gets a 5xx status, because clients and proxies retry those.

use std::time::Duration;

use axum::Json;
use axum::http::{HeaderValue, StatusCode, header};
use axum::response::{IntoResponse, Response};
use serde_json::{Value, json};
use service::printable::excerpt;

use crate::access::AccessRefusal;
use crate::admission::CapacityExceeded;
use crate::embedding::NotPooledError;
use crate::failover::ChoiceError;
use crate::intake::BodyError;
use crate::model::ChatError;
use crate::opening::{RETRY_AFTER, RequestRefusal};
use crate::params::RequestParamError;
use crate::registry::{QUOTED_CHARS_MAX, ResolveError};
use crate::tenant::{self, TenantNameError};

/// Longest text of an error. Longer ones come from long names of fields.
const MESSAGE_CHARS_MAX: usize = 2000;

/// Fields of a chat that have another name in the responses API.
const RESPONSES_NAMES: [(&str, &str); 5] = [
    ("messages", "input"),
    ("max_completion_tokens", "max_output_tokens"),
    ("max_tokens", "max_output_tokens"),
    ("reasoning_effort", "reasoning.effort"),
    ("response_format", "text.format"),
];
/// The same for Anthropic's messages API.
const MESSAGES_NAMES: [(&str, &str); 2] = [("stop", "stop_sequences"), ("response_format", "output_format")];

#[derive(Clone, Debug, thiserror::Error)]
#[error("{message}")]
pub(crate) struct ApiError {
    status: StatusCode,
    kind: &'static str,
    code: Option<&'static str>,
    param: Option<String>,
    message: String,
    /// When the client should try again. `None` if the error is permanent.
    retry_after: Option<Duration>,
}

impl ApiError {
    pub(crate) fn invalid(param: Option<&str>, message: impl Into<String>) -> Self {
        Self {
            status: StatusCode::BAD_REQUEST,
            kind: "invalid_request_error",
            code: None,
            param: param.map(str::to_owned),
            message: message.into(),
            retry_after: None,
        }
    }

    fn server(status: StatusCode, code: &'static str, message: String) -> Self {
        Self { status, kind: "server_error", code: Some(code), param: None, message, retry_after: None }
    }

    fn rate_limit(message: String, retry_after: Duration) -> Self {
        Self {
            status: StatusCode::TOO_MANY_REQUESTS,
            kind: "rate_limit_error",
            code: Some("rate_limit_exceeded"),
            param: None,
            message,
            retry_after: Some(retry_after),
        }
    }

    pub(super) fn with_status(mut self, status: StatusCode, code: &'static str) -> Self {
        self.status = status;
        self.code = Some(code);
        self
    }

    pub(crate) fn unknown_route(method: &str, path: &str) -> Self {
        Self::invalid(None, format!("Unknown request URL: {method} {}", excerpt(path, QUOTED_CHARS_MAX)))
            .with_status(StatusCode::NOT_FOUND, "unknown_url")
    }

    pub(crate) fn wrong_method(method: &str, path: &str) -> Self {
        Self::invalid(None, format!("Not allowed to {method} on {}", excerpt(path, QUOTED_CHARS_MAX)))
            .with_status(StatusCode::METHOD_NOT_ALLOWED, "method_not_supported")
    }

    pub(super) fn unknown_response(param: &str, id: &str) -> Self {
        let id = excerpt(id, QUOTED_CHARS_MAX);
        Self::invalid(Some(param), format!("there is no response {id:?}; the router keeps the latest only"))
            .with_status(StatusCode::NOT_FOUND, "response_not_found")
    }

    /// The error of a chat that stands for a request of another API: `names` has the fields that
    /// are named differently there.
    pub(super) fn with_field_names(mut self, names: &[(&str, &str)]) -> Self {
        for (chat, own) in names {
            if let Some(param) = &mut self.param {
                let field = param.split(['.', '[']).next().unwrap_or_default();
                if field == *chat {
                    *param = own.to_string() + &param[field.len()..];
                }
            }
            self.message = self.message.replace(&format!("`{chat}"), &format!("`{own}"));
        }
        self
    }

    pub(super) fn of_responses(self) -> Self {
        self.with_field_names(&RESPONSES_NAMES)
    }

    pub(super) fn of_messages(self) -> Self {
        self.with_field_names(&MESSAGES_NAMES)
    }

    /// The error in the form of Anthropic's API.
    pub(super) fn messages_body(&self) -> Value {
        let kind = match self.status {
            StatusCode::UNAUTHORIZED => "authentication_error",
            StatusCode::FORBIDDEN => "permission_error",
            StatusCode::NOT_FOUND => "not_found_error",
            StatusCode::PAYLOAD_TOO_LARGE => "request_too_large",
            StatusCode::TOO_MANY_REQUESTS => "rate_limit_error",
            StatusCode::SERVICE_UNAVAILABLE => "overloaded_error",
            StatusCode::GATEWAY_TIMEOUT | StatusCode::REQUEST_TIMEOUT => "timeout_error",
            status if status.is_server_error() => "api_error",
            _ => "invalid_request_error",
        };
        let message = excerpt(&self.message, MESSAGE_CHARS_MAX);
        json!({"type": "error", "error": {"type": kind, "message": message}})
    }

    pub(crate) fn not_ready(message: impl Into<String>) -> Self {
        Self::server(StatusCode::SERVICE_UNAVAILABLE, "not_ready", message.into())
            .with_retry_after(RETRY_AFTER)
    }

    pub(crate) fn unsupported_media(message: &str) -> Self {
        Self::invalid(None, message).with_status(StatusCode::UNSUPPORTED_MEDIA_TYPE, "unsupported_media_type")
    }

    /// Clients repeat neither a 4xx status nor a response without `Retry-After`.
    fn quarantined(message: String) -> Self {
        Self::invalid(None, message).with_status(StatusCode::UNPROCESSABLE_ENTITY, "request_quarantined")
    }

    fn with_retry_after(mut self, retry_after: Duration) -> Self {
        self.retry_after = Some(retry_after);
        self
    }

    pub(crate) fn body(&self) -> Value {
        // Texts of clients are quoted in part. This bound holds whatever an error quotes.
        let message = excerpt(&self.message, MESSAGE_CHARS_MAX);
        let param = self.param.as_ref().map(|param| excerpt(param, QUOTED_CHARS_MAX));
        json!({"error": {"message": message, "type": self.kind, "param": param, "code": self.code}})
    }
}

impl IntoResponse for ApiError {
    fn into_response(self) -> Response {
        let mut response = (self.status, Json(self.body())).into_response();
        if self.status == StatusCode::UNAUTHORIZED {
            response.headers_mut().insert(header::WWW_AUTHENTICATE, HeaderValue::from_static("Bearer"));
        }
        if let Some(retry_after) = self.retry_after {
            response.headers_mut().insert(header::RETRY_AFTER, HeaderValue::from(retry_after.as_secs()));
        }
        // For an API whose errors have another form.
        response.extensions_mut().insert(self);
        response
    }
}

impl From<RequestParamError> for ApiError {
    fn from(error: RequestParamError) -> Self {
        let context = matches!(error, RequestParamError::ContextExceeded { .. });
        let mut api = Self::invalid(Some(error.param()), error.to_string());
        api.code = context.then_some("context_length_exceeded");
        api
    }
}

impl From<NotPooledError> for ApiError {
    fn from(error: NotPooledError) -> Self {
        Self::invalid(Some("model"), error.to_string())
    }
}

impl From<AccessRefusal> for ApiError {
    fn from(refusal: AccessRefusal) -> Self {
        let (message, retry_after) = (refusal.to_string(), refusal.retry_after().unwrap_or(RETRY_AFTER));
        match refusal {
            AccessRefusal::NoKey | AccessRefusal::UnknownKey => {
                Self::invalid(None, message).with_status(StatusCode::UNAUTHORIZED, "invalid_api_key")
            }
            AccessRefusal::TooManyRequests { .. } | AccessRefusal::TooManyConcurrent { .. } => {
                Self::rate_limit(message, retry_after)
            }
            AccessRefusal::NoTokensLeft { .. } => {
                Self { code: Some("insufficient_quota"), ..Self::rate_limit(message, retry_after) }
            }
        }
    }
}

impl From<ResolveError> for ApiError {
    fn from(error: ResolveError) -> Self {
        match error {
            ResolveError::Unknown { .. } => Self::invalid(Some("model"), error.to_string())
                .with_status(StatusCode::NOT_FOUND, "model_not_found"),
            ResolveError::Ambiguous { .. } => Self::invalid(Some("model"), error.to_string()),
            ResolveError::NoModel | ResolveError::NotAllKnown | ResolveError::Failed { .. } => {
                Self::not_ready(error.to_string())
            }
        }
    }
}

impl From<ChatError> for ApiError {
    fn from(error: ChatError) -> Self {
        Self::invalid(Some("messages"), error.to_string())
    }
}

impl From<BodyError> for ApiError {
    fn from(error: BodyError) -> Self {
        let message = error.to_string();
        match error {
            BodyError::TooLarge { .. } => {
                Self::invalid(None, message).with_status(StatusCode::PAYLOAD_TOO_LARGE, "request_too_large")
            }
            BodyError::TooSlow { .. } => {
                Self::invalid(None, message).with_status(StatusCode::REQUEST_TIMEOUT, "request_timeout")
            }
            BodyError::ClientBytes { .. } => Self::rate_limit(message, RETRY_AFTER),
            BodyError::RouterBytes { .. } => {
                Self::server(StatusCode::SERVICE_UNAVAILABLE, "overloaded", message)
                    .with_retry_after(RETRY_AFTER)
            }
            // Its client reads no answer.
            BodyError::Broken => Self::invalid(None, message),
        }
    }
}

impl From<TenantNameError> for ApiError {
    fn from(error: TenantNameError) -> Self {
        Self::invalid(Some(tenant::HEADER), error.to_string())
    }
}

impl From<RequestRefusal> for ApiError {
    fn from(refusal: RequestRefusal) -> Self {
        let message = refusal.to_string();
        match refusal {
            RequestRefusal::NoWorker { retry_after, .. } => {
                Self::not_ready(message).with_retry_after(retry_after)
            }
            RequestRefusal::Overloaded { retry_after, .. } => {
                Self::server(StatusCode::SERVICE_UNAVAILABLE, "overloaded", message)
                    .with_retry_after(retry_after)
            }
            RequestRefusal::TenantLimit { retry_after, .. } => Self::rate_limit(message, retry_after),
            RequestRefusal::CapacityExceeded(exceeded) => {
                let (param, code) = match exceeded {
                    CapacityExceeded::KvCache { .. } => ("max_tokens", "kv_budget_exceeded"),
                    CapacityExceeded::Choices { .. } => ("n", "too_many_choices"),
                    CapacityExceeded::Beams { .. } => ("n", "too_many_beams"),
                };
                Self { code: Some(code), ..Self::invalid(Some(param), message) }
            }
            RequestRefusal::Invalid { .. } => Self::invalid(None, message),
            RequestRefusal::Grammar { param, .. } => Self::invalid(Some(param), message),
            RequestRefusal::DeadlineExceeded => {
                Self::server(StatusCode::GATEWAY_TIMEOUT, "deadline_exceeded", message)
            }
            RequestRefusal::WorkerError { .. } => {
                Self::server(StatusCode::BAD_GATEWAY, "worker_failed", message)
            }
            RequestRefusal::Quarantined(_) => Self::quarantined(message),
        }
    }
}

impl From<ChoiceError> for ApiError {
    fn from(error: ChoiceError) -> Self {
        let (status, code) = match &error {
            ChoiceError::Quarantined { .. } => return Self::quarantined(error.to_string()),
            ChoiceError::InvalidRequest { .. } => return Self::invalid(None, error.to_string()),
            ChoiceError::NoWorker { .. } | ChoiceError::TooManyLosses { .. } => {
                (StatusCode::SERVICE_UNAVAILABLE, "worker_lost")
            }
            ChoiceError::DeadlineExceeded => (StatusCode::GATEWAY_TIMEOUT, "deadline_exceeded"),
            ChoiceError::SlowClient => (StatusCode::REQUEST_TIMEOUT, "client_too_slow"),
            ChoiceError::WorkerError { .. } | ChoiceError::Protocol { .. } => {
                (StatusCode::BAD_GATEWAY, "worker_failed")
            }
        };
        let api = Self::server(status, code, error.to_string());
        match status {
            StatusCode::SERVICE_UNAVAILABLE => api.with_retry_after(RETRY_AFTER),
            _ => api,
        }
    }
}
