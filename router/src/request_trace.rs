// SPDX-License-Identifier: Apache-2.0

//! [`RequestTrace`]: names a request in log lines and towards workers, and records its spans.
//!
//! ```text
//! request                    from its arrival until its last choice has ended
//!   grammar check
//!   admission queue          one for each wait for permits
//!   worker call              one for each worker that is asked, to the end of its stream
//!     generate               the worker's own spans
//! ```
//!
//! Attributes have the names of OpenTelemetry's semantic conventions where they exist, and vLLM's
//! for latencies.

use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use traces::{Span, SpanKind, TraceContext, TraceId, Tracer};
use tracing::field::DisplayValue;

/// Spans of one request: 128 choices with some failovers. A choice without a worker asks all
/// workers ten times a second.
const CHILD_SPANS_MAX: u32 = 512;

/// Cheap to clone. The span ends with the last clone.
#[derive(Clone, Debug)]
pub(crate) struct RequestTrace(Arc<TracedRequest>);

#[derive(Debug)]
struct TracedRequest {
    id: Arc<str>,
    context: TraceContext,
    is_recorded: bool,
    child_spans: AtomicU32,
    record: Mutex<RequestRecord>,
}

#[derive(Debug)]
struct RequestRecord {
    span: Span,
    output_tokens: u64,
    first_token: Option<Duration>,
}

/// Names a request in the log.
#[derive(Clone, Copy, Debug)]
pub(crate) struct LoggedRequest<'a> {
    pub(crate) request_id: &'a str,
    pub(crate) model: &'a str,
    trace: Option<TraceId>,
}

impl LoggedRequest<'_> {
    /// As a field of a log line, which lacks it if the request belongs to no trace.
    pub(crate) fn trace_id(&self) -> Option<DisplayValue<TraceId>> {
        self.trace.map(tracing::field::display)
    }
}

impl RequestTrace {
    pub(crate) fn begin(tracer: &Tracer, id: Arc<str>, parent: &TraceContext) -> Self {
        let mut span = tracer.span("request", SpanKind::Server, parent);
        if span.is_recorded() {
            span.set("gen_ai.request.id", id.to_string());
        }
        Self::new(id, span)
    }

    /// Without a span of its own. The client's context goes on to workers and into log lines.
    pub(crate) fn unrecorded(id: Arc<str>, parent: TraceContext) -> Self {
        Self::new(id, Span::unrecorded(parent))
    }

    fn new(id: Arc<str>, span: Span) -> Self {
        let (context, is_recorded) = (span.context().clone(), span.is_recorded());
        let record = Mutex::new(RequestRecord { span, output_tokens: 0, first_token: None });
        Self(Arc::new(TracedRequest { id, context, is_recorded, child_spans: AtomicU32::new(0), record }))
    }

    pub(crate) fn id(&self) -> &Arc<str> {
        &self.0.id
    }

    pub(crate) fn logged<'a>(&'a self, model: &'a str) -> LoggedRequest<'a> {
        LoggedRequest { request_id: &self.0.id, model, trace: self.0.context.trace_id() }
    }

    pub(crate) fn grammar_check(&self) -> Span {
        self.child("grammar check", SpanKind::Internal)
    }

    pub(crate) fn admission_queue(&self) -> Span {
        self.child("admission queue", SpanKind::Internal)
    }

    /// A call of a worker. `cause` is why the worker before it does not serve the request.
    pub(crate) fn worker_call(&self, worker: &str, cause: Option<&str>) -> Span {
        let mut span = self.child("worker call", SpanKind::Client);
        if span.is_recorded() {
            span.set("ballast.worker", worker.to_owned());
            if let Some(cause) = cause {
                span.set("ballast.failover.reason", cause.to_owned());
            }
        }
        span
    }

    fn child(&self, name: &'static str, kind: SpanKind) -> Span {
        let request = &*self.0;
        let may_record =
            request.is_recorded && request.child_spans.fetch_add(1, Ordering::Relaxed) < CHILD_SPANS_MAX;
        match may_record {
            true => self.lock().span.child(name, kind),
            false => Span::unrecorded(request.context.clone()),
        }
    }

    pub(crate) fn record_prompts(&self, model: &str, prompt_tokens: usize, choices: usize) {
        self.record(|RequestRecord { span, .. }| {
            span.set("gen_ai.request.model", model.to_owned());
            span.set("gen_ai.usage.input_tokens", prompt_tokens as i64);
            span.set("gen_ai.request.choice.count", choices as i64);
        });
    }

    /// `reason` is the label of the refusal in metrics.
    pub(crate) fn record_refusal(&self, reason: &'static str) {
        self.record(|RequestRecord { span, .. }| {
            span.set("error.type", reason);
            span.fail(reason);
        });
    }

    pub(crate) fn record_response(&self, route: &'static str, status: u16, grpc_status: Option<i64>) {
        self.record(|RequestRecord { span, .. }| {
            span.set("http.route", route);
            span.set("http.response.status_code", i64::from(status));
            if let Some(code) = grpc_status {
                span.set("rpc.grpc.status_code", code);
            }
            if status >= 500 {
                span.fail(format!("status {status}"));
            }
        });
    }

    /// A choice has ended. `failure` is set if it ended with an error.
    pub(crate) fn record_choice(
        &self,
        output_tokens: usize,
        first_token: Option<Duration>,
        failure: Option<&'static str>,
    ) {
        self.record(|record| {
            record.output_tokens += output_tokens as u64;
            record.first_token = [record.first_token, first_token].into_iter().flatten().min();
            if let Some(failure) = failure {
                record.span.fail(failure);
            }
        });
    }

    fn record(&self, change: impl FnOnce(&mut RequestRecord)) {
        if self.0.is_recorded {
            change(&mut self.lock());
        }
    }

    fn lock(&self) -> MutexGuard<'_, RequestRecord> {
        self.0.record.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Drop for TracedRequest {
    fn drop(&mut self) {
        let record = self.record.get_mut().unwrap_or_else(PoisonError::into_inner);
        record.span.set("gen_ai.usage.output_tokens", record.output_tokens as i64);
        if let Some(first_token) = record.first_token {
            record.span.set("gen_ai.latency.time_to_first_token", first_token.as_secs_f64());
        }
    }
}
