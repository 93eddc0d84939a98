// SPDX-License-Identifier: Apache-2.0

//! [`Tracer`]: begins the spans of a process.

use std::io;
use std::sync::Arc;
use std::sync::mpsc::{SyncSender, sync_channel};
use std::time::{Duration, SystemTime};

use opentelemetry::KeyValue;
use opentelemetry::trace::{SpanKind, Tracer as _, TracerProvider};
use opentelemetry_sdk::Resource;
use opentelemetry_sdk::trace::{Sampler, SdkTracer, SdkTracerProvider, SpanLimits};
use service::exit::exit_for_io_error;
use service::{Exit, HasExit};
use tokio::sync::mpsc;

use crate::config::{TracingConfig, TracingConfigError};
use crate::context::TraceContext;
use crate::export_thread::ExportThread;
use crate::span::Span;
use crate::span_queue::{DroppedSpans, SpanQueue};

/// How much longer a process may take to end for its last spans. A collector on the same host takes
/// milliseconds. A worker has 2 s between its drain and the supervisor's SIGKILL, also for its log.
const FLUSH_WAIT: Duration = Duration::from_millis(500);

/// Bounds of one span. Requests use less, so these are for bugs.
const SPAN_LIMITS: SpanLimits = SpanLimits {
    max_events_per_span: 64,
    max_attributes_per_span: 32,
    max_links_per_span: 1,
    max_attributes_per_event: 8,
    max_attributes_per_link: 1,
};

#[derive(Debug, thiserror::Error)]
pub enum TracerError {
    #[error(transparent)]
    Config(#[from] TracingConfigError),
    #[error("cannot start the thread that exports spans")]
    Thread(#[source] io::Error),
}

impl HasExit for TracerError {
    fn exit(&self) -> Exit {
        match self {
            Self::Config(error) => error.exit(),
            Self::Thread(source) => exit_for_io_error(source),
        }
    }
}

/// Cheap to clone. The default records nothing.
#[derive(Clone, Debug, Default)]
pub struct Tracer(Option<Arc<ActiveTracer>>);

#[derive(Debug)]
struct ActiveTracer {
    sdk: SdkTracer,
    /// Its drop ends all recording.
    _provider: SdkTracerProvider,
    dropped: DroppedSpans,
    flushes: mpsc::Sender<SyncSender<()>>,
}

impl Tracer {
    /// Starts the thread that exports spans, if `config` names a collector. `service` and
    /// `instance` tell the processes of a fleet apart: "ballast-worker", "worker-0".
    pub fn start(
        config: Option<&TracingConfig>,
        service: &'static str,
        instance: &str,
    ) -> Result<Self, TracerError> {
        let Some(config) = config else { return Ok(Self::default()) };
        config.check()?;
        // Empty: the SDK's own resource reads the environment.
        let resource = Resource::builder_empty()
            .with_service_name(service)
            .with_attributes([
                KeyValue::new("service.version", env!("CARGO_PKG_VERSION")),
                KeyValue::new("service.instance.id", instance.to_owned()),
                KeyValue::new("process.pid", i64::from(std::process::id())),
            ])
            .build();
        let dropped = DroppedSpans::default();
        let (queue, spans) = SpanQueue::new(dropped.clone());
        let flushes = ExportThread::start(config, &resource, spans, dropped.clone())?;
        let sampler = Sampler::ParentBased(Box::new(Sampler::TraceIdRatioBased(config.sample_ratio)));
        let provider = SdkTracerProvider::builder()
            .with_resource(resource)
            .with_sampler(sampler)
            .with_span_limits(SPAN_LIMITS)
            .with_span_processor(queue)
            .build();
        let sdk = provider.tracer("ballast");
        Ok(Self(Some(Arc::new(ActiveTracer { sdk, _provider: provider, dropped, flushes }))))
    }

    /// Begins a span. Without a collector, it carries the context of `parent`.
    pub fn span(&self, name: &'static str, kind: SpanKind, parent: &TraceContext) -> Span {
        self.span_since(name, kind, parent, None)
    }

    pub(crate) fn span_since(
        &self,
        name: &'static str,
        kind: SpanKind,
        parent: &TraceContext,
        began: Option<SystemTime>,
    ) -> Span {
        let Some(active) = &self.0 else { return Span::unrecorded(parent.clone()) };
        let mut builder = active.sdk.span_builder(name).with_kind(kind);
        builder.start_time = began;
        Span::of_sdk(self, builder.start_with_context(&active.sdk, &parent.to_parent()))
    }

    /// Spans that no collector has got, since the start of the process.
    pub fn dropped_spans(&self) -> u64 {
        self.0.as_ref().map_or(0, |active| active.dropped.get())
    }

    /// Waits until the collector has the spans that have ended, but not for long. For the end of a
    /// process.
    pub fn flush(&self) {
        let Some(active) = &self.0 else { return };
        let (reply, done) = sync_channel(1);
        if active.flushes.try_send(reply).is_ok() {
            // A collector that does not answer costs its spans.
            let _: Result<(), _> = done.recv_timeout(FLUSH_WAIT);
        }
    }
}

#[cfg(test)]
mod tests {
    use http::HeaderMap;

    use super::*;

    const PARENT: &str = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331";

    fn parent(flags: &str) -> TraceContext {
        let mut headers = HeaderMap::new();
        headers.insert("traceparent", format!("{PARENT}-{flags}").parse().unwrap());
        TraceContext::from_headers(&headers)
    }

    fn header(span: &Span) -> String {
        let mut headers = HeaderMap::new();
        span.context().write_to(&mut headers);
        headers.get("traceparent").map_or(String::new(), |value| value.to_str().unwrap().to_owned())
    }

    /// A tracer without a collector.
    fn tracer(sample_ratio: f64) -> Tracer {
        let config = TracingConfig { otlp_endpoint: "unix:///nowhere/otlp.sock".to_owned(), sample_ratio };
        Tracer::start(Some(&config), "ballast-test", "test").unwrap()
    }

    fn begin(tracer: &Tracer, parent: &TraceContext) -> Span {
        tracer.span("span", SpanKind::Server, parent)
    }

    #[test]
    fn without_a_collector_the_clients_context_goes_on_unchanged() {
        let span = begin(&Tracer::default(), &parent("01"));
        assert!(!span.is_recorded());
        assert_eq!(header(&span.child("child", SpanKind::Client)), format!("{PARENT}-01"));
        assert_eq!(header(&begin(&Tracer::default(), &TraceContext::default())), "");
    }

    #[test]
    fn the_clients_flag_decides_and_else_the_ratio() {
        for (ratio, parent, is_recorded) in [
            (1.0, parent("00"), false),
            (0.0, parent("01"), true),
            (1.0, TraceContext::default(), true),
            (0.0, TraceContext::default(), false),
        ] {
            let span = begin(&tracer(ratio), &parent);
            assert_eq!(span.is_recorded(), is_recorded, "{ratio} {parent:?}");
            // Callees are told, also that a trace is not recorded.
            assert!(header(&span).ends_with(if is_recorded { "-01" } else { "-00" }), "{}", header(&span));
            let child = span.child("child", SpanKind::Client);
            assert_eq!(child.context().trace_id(), span.context().trace_id());
            assert_eq!((child.is_recorded(), header(&child) != header(&span)), (is_recorded, is_recorded));
        }
    }

    #[test]
    fn a_flush_without_a_collector_ends_and_its_spans_are_counted() {
        let tracer = tracer(1.0);
        drop(begin(&tracer, &TraceContext::default()));
        let began = std::time::Instant::now();
        tracer.flush();
        assert!(began.elapsed() < 4 * FLUSH_WAIT, "{:?}", began.elapsed());
        while tracer.dropped_spans() == 0 {
            assert!(began.elapsed() < Duration::from_secs(20), "the span is not counted");
            std::thread::sleep(Duration::from_millis(10));
        }
    }
}
