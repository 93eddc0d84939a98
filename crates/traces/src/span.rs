// SPDX-License-Identifier: Apache-2.0

//! [`Span`]: a part of a request's time, with its place in a trace.

use std::borrow::Cow;
use std::time::SystemTime;

use opentelemetry::trace::{Span as _, SpanKind, Status};
use opentelemetry::{KeyValue, Value};
use opentelemetry_sdk::trace::Span as SdkSpan;

use crate::context::TraceContext;
use crate::tracer::Tracer;

/// Longest reason of a failure. Statuses of peers may be longer.
const REASON_CHARS_MAX: usize = 256;

/// Dropping it ends the span. A span that is not recorded only carries its context.
#[derive(Debug)]
pub struct Span {
    context: TraceContext,
    recording: Option<Recording>,
}

#[derive(Debug)]
struct Recording {
    tracer: Tracer,
    span: SdkSpan,
}

impl Span {
    pub fn unrecorded(context: TraceContext) -> Self {
        Self { context, recording: None }
    }

    /// A span that the sampler may have left out. Its context says so to callees.
    pub(crate) fn of_sdk(tracer: &Tracer, span: SdkSpan) -> Self {
        let context = TraceContext::of_span(span.span_context());
        let recording = span.is_recording().then(|| Recording { tracer: tracer.clone(), span });
        Self { context, recording }
    }

    /// The parent of what happens in this span.
    pub fn context(&self) -> &TraceContext {
        &self.context
    }

    pub fn is_recorded(&self) -> bool {
        self.recording.is_some()
    }

    /// A part of this span, from now on.
    pub fn child(&self, name: &'static str, kind: SpanKind) -> Span {
        self.child_since(name, kind, None)
    }

    /// A part of this span that has begun before.
    pub fn child_at(&self, name: &'static str, kind: SpanKind, began: SystemTime) -> Span {
        self.child_since(name, kind, Some(began))
    }

    fn child_since(&self, name: &'static str, kind: SpanKind, began: Option<SystemTime>) -> Span {
        match &self.recording {
            Some(recording) => recording.tracer.span_since(name, kind, &self.context, began),
            None => Span::unrecorded(self.context.clone()),
        }
    }

    /// Never a prompt or an output.
    pub fn set(&mut self, key: &'static str, value: impl Into<Value>) {
        if let Some(Recording { span, .. }) = &mut self.recording {
            span.set_attribute(KeyValue::new(key, value));
        }
    }

    pub fn add_event(&mut self, name: &'static str, at: SystemTime, attributes: Vec<KeyValue>) {
        if let Some(Recording { span, .. }) = &mut self.recording {
            span.add_event_with_timestamp(name, at, attributes);
        }
    }

    /// What the span measures has failed.
    pub fn fail(&mut self, reason: impl Into<Cow<'static, str>>) {
        let Some(Recording { span, .. }) = &mut self.recording else { return };
        let mut reason = reason.into();
        if reason.len() > REASON_CHARS_MAX {
            reason = reason.chars().take(REASON_CHARS_MAX).collect();
        }
        span.set_status(Status::error(reason));
    }

    pub fn end_at(mut self, ended: SystemTime) {
        if let Some(Recording { span, .. }) = &mut self.recording {
            span.end_with_timestamp(ended);
        }
    }
}
