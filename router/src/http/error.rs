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

use crate::admission::CapacityExceeded;
use crate::dispatch::{RETRY_AFTER, RequestRefusal};
use crate::failover::ChoiceError;
use crate::model::ChatError;
use crate::params::RequestParamError;
use crate::registry::ResolveError;
use crate::tenant::{self, TenantNameError};

#[derive(Debug, thiserror::Error)]
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

    fn with_status(mut self, status: StatusCode, code: &'static str) -> Self {
        self.status = status;
        self.code = Some(code);
        self
    }

    pub(crate) fn body_too_large(limit: usize) -> Self {
        Self::invalid(None, format!("the request body has more than {limit} bytes"))
            .with_status(StatusCode::PAYLOAD_TOO_LARGE, "request_too_large")
    }

    pub(crate) fn body_too_slow() -> Self {
        Self::invalid(None, "the request body did not arrive in time")
            .with_status(StatusCode::REQUEST_TIMEOUT, "request_timeout")
    }

    pub(crate) fn unknown_route(method: &str, path: &str) -> Self {
        Self::invalid(None, format!("Unknown request URL: {method} {path}"))
            .with_status(StatusCode::NOT_FOUND, "unknown_url")
    }

    pub(crate) fn wrong_method(method: &str, path: &str) -> Self {
        Self::invalid(None, format!("Not allowed to {method} on {path}"))
            .with_status(StatusCode::METHOD_NOT_ALLOWED, "method_not_supported")
    }

    pub(crate) fn not_ready(message: impl Into<String>) -> Self {
        Self::server(StatusCode::SERVICE_UNAVAILABLE, "not_ready", message.into())
            .with_retry_after(RETRY_AFTER)
    }

    fn with_retry_after(mut self, retry_after: Duration) -> Self {
        self.retry_after = Some(retry_after);
        self
    }

    pub(crate) fn body(&self) -> Value {
        json!({"error": {"message": self.message, "type": self.kind, "param": self.param, "code": self.code}})
    }
}

impl IntoResponse for ApiError {
    fn into_response(self) -> Response {
        let mut response = (self.status, Json(self.body())).into_response();
        if let Some(retry_after) = self.retry_after {
            response.headers_mut().insert(header::RETRY_AFTER, HeaderValue::from(retry_after.as_secs()));
        }
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

impl From<ResolveError> for ApiError {
    fn from(error: ResolveError) -> Self {
        match error {
            ResolveError::Unknown { .. } => Self::invalid(Some("model"), error.to_string())
                .with_status(StatusCode::NOT_FOUND, "model_not_found"),
            ResolveError::Ambiguous { .. } => Self::invalid(Some("model"), error.to_string()),
            ResolveError::NoModel => Self::not_ready(error.to_string()),
        }
    }
}

impl From<ChatError> for ApiError {
    fn from(error: ChatError) -> Self {
        Self::invalid(Some("messages"), error.to_string())
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
            RequestRefusal::NoWorker => Self::not_ready(message),
            RequestRefusal::Overloaded { retry_after, .. } => {
                Self::server(StatusCode::SERVICE_UNAVAILABLE, "overloaded", message)
                    .with_retry_after(retry_after)
            }
            RequestRefusal::TenantLimit { retry_after, .. } => Self {
                status: StatusCode::TOO_MANY_REQUESTS,
                kind: "rate_limit_error",
                code: Some("rate_limit_exceeded"),
                param: None,
                message,
                retry_after: Some(retry_after),
            },
            RequestRefusal::CapacityExceeded(exceeded) => {
                let (param, code) = match exceeded {
                    CapacityExceeded::KvCache { .. } => ("max_tokens", "kv_budget_exceeded"),
                    CapacityExceeded::Choices { .. } => ("n", "too_many_choices"),
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
        }
    }
}

impl From<ChoiceError> for ApiError {
    fn from(error: ChoiceError) -> Self {
        let (status, code) = match &error {
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
