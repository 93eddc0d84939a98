// SPDX-License-Identifier: Apache-2.0

//! [`SpanQueue`]: ended spans that wait for their export, and the count of those that are dropped.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use opentelemetry::Context;
use opentelemetry_sdk::error::OTelSdkResult;
use opentelemetry_sdk::trace::{Span, SpanData, SpanProcessor};
use tokio::sync::mpsc;

/// Spans that wait. At about 1 KiB each, 2 MiB per process. A request has some ten spans.
const QUEUED_SPANS_MAX: usize = 2048;

/// Spans that no collector has got.
#[derive(Clone, Debug, Default)]
pub(crate) struct DroppedSpans(Arc<AtomicU64>);

impl DroppedSpans {
    pub(crate) fn add(&self, spans: u64) {
        self.0.fetch_add(spans, Ordering::Relaxed);
    }

    pub(crate) fn get(&self) -> u64 {
        self.0.load(Ordering::Relaxed)
    }
}

/// Takes spans from the SDK. The SDK's own batch processor does not tell how many spans it drops.
#[derive(Debug)]
pub(crate) struct SpanQueue {
    spans: mpsc::Sender<SpanData>,
    dropped: DroppedSpans,
}

impl SpanQueue {
    pub(crate) fn new(dropped: DroppedSpans) -> (Self, mpsc::Receiver<SpanData>) {
        let (spans, receiver) = mpsc::channel(QUEUED_SPANS_MAX);
        (Self { spans, dropped }, receiver)
    }
}

impl SpanProcessor for SpanQueue {
    fn on_start(&self, _: &mut Span, _: &Context) {}

    /// Runs where a span ends, also on the engine's thread: never waits.
    fn on_end(&self, span: SpanData) {
        if self.spans.try_send(span).is_err() {
            self.dropped.add(1);
        }
    }

    /// [`crate::Tracer::flush`] does this.
    fn force_flush(&self) -> OTelSdkResult {
        Ok(())
    }

    fn shutdown_with_timeout(&self, _: Duration) -> OTelSdkResult {
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use opentelemetry::trace::{Tracer as _, TracerProvider};
    use opentelemetry_sdk::trace::SdkTracerProvider;

    use super::*;

    #[test]
    fn spans_beyond_the_queue_are_dropped_and_counted() {
        let dropped = DroppedSpans::default();
        let (queue, mut spans) = SpanQueue::new(dropped.clone());
        let provider = SdkTracerProvider::builder().with_span_processor(queue).build();
        let tracer = provider.tracer("test");
        (0..QUEUED_SPANS_MAX + 10).for_each(|_| drop(tracer.start("span")));
        assert_eq!((dropped.get(), spans.len()), (10, QUEUED_SPANS_MAX));
        spans.close();
        drop(tracer.start("span"));
        assert_eq!(dropped.get(), 11, "a thread that has ended takes no spans");
    }
}
