// SPDX-License-Identifier: Apache-2.0

//! Traces of requests over the processes of a fleet: W3C trace context, OpenTelemetry spans, and
//! their export to a collector over OTLP.
//!
//! ```text
//! headers --> TraceContext --> Tracer::span --> Span -- end --> SpanQueue --> ExportThread
//!                                                |              bounded        |
//!                                                |                             '--> collector
//!                                                '-- child spans, headers of calls
//! ```
//!
//! 1. Recording and ending a span never waits. If the queue is full, the span is dropped and
//!    counted.
//! 2. Without a configuration, a span only carries the client's context: nothing is recorded,
//!    allocated or started.
//! 3. Attributes hold no prompt and no output. The callers keep this; see decision 0054.

#![forbid(unsafe_code)]

mod config;
mod context;
mod export_thread;
mod span;
mod span_queue;
mod tracer;

pub use config::{TracingConfig, TracingConfigError};
pub use context::{TRACEPARENT, TRACESTATE, TraceContext};
pub use opentelemetry::KeyValue;
pub use opentelemetry::trace::{SpanKind, TraceId};
pub use span::Span;
pub use tracer::{Tracer, TracerError};
