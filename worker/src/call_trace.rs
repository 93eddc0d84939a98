// SPDX-License-Identifier: Apache-2.0

//! [`CallTrace`]: names a call of the router in log lines, and records its span.

use std::sync::Arc;

use engine::RequestId;
use tonic::metadata::MetadataMap;
use tonic::{Code, Status};
use traces::{Span, SpanKind, TraceContext, TraceId, Tracer};
use tracing::field::DisplayValue;

/// A request as log lines name it: the id that the router gave it, and its trace.
#[derive(Clone, Debug)]
pub(crate) struct CallLabel {
    pub(crate) request_id: Arc<str>,
    trace: Option<TraceId>,
}

/// A call, from its arrival until its stream has a [`crate::stream_trace::StreamTrace`].
#[derive(Debug)]
pub(crate) struct CallTrace {
    pub(crate) label: CallLabel,
    pub(crate) span: Span,
}

impl CallLabel {
    pub(crate) fn new(request_id: &str, metadata: &MetadataMap) -> Self {
        let trace = TraceContext::from_headers(metadata.as_ref()).trace_id();
        Self { request_id: request_id.into(), trace }
    }

    /// As a field of a log line, which lacks it if the request belongs to no trace.
    pub(crate) fn trace_id(&self) -> Option<DisplayValue<TraceId>> {
        self.trace.map(tracing::field::display)
    }

    /// A refusal tells the router why, and may quote the client. Only an error of this worker is a
    /// warning.
    pub(crate) fn log_refusal(&self, status: &Status) {
        let (request_id, trace_id) = (&*self.request_id, self.trace_id());
        let code = status.code();
        match code {
            Code::Internal | Code::Unknown => {
                let reason = status.message();
                tracing::warn!(%request_id, trace_id, ?code, reason, "failed");
            }
            _ => tracing::debug!(%request_id, trace_id, ?code, "refused"),
        }
    }
}

impl CallTrace {
    pub(crate) fn begin(
        tracer: &Tracer,
        name: &'static str,
        request_id: &str,
        metadata: &MetadataMap,
    ) -> Self {
        let label = CallLabel::new(request_id, metadata);
        let mut span = tracer.span(name, SpanKind::Server, &TraceContext::from_headers(metadata.as_ref()));
        if span.is_recorded() {
            span.set("gen_ai.request.id", request_id.to_owned());
        }
        Self { label, span }
    }

    pub(crate) fn log_begin(&self, id: RequestId, call: &'static str, tokens: usize) {
        let CallLabel { request_id, .. } = &self.label;
        tracing::debug!(%request_id, trace_id = self.label.trace_id(), %id, tokens, "{call}");
    }
}
