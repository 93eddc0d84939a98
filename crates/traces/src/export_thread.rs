// SPDX-License-Identifier: Apache-2.0

//! [`ExportThread`]: sends ended spans to the collector, in batches. It has a thread and a runtime
//! of its own, so that a collector that hangs holds up nothing else.

use std::sync::mpsc::SyncSender;
use std::time::Duration;

use opentelemetry_proto::tonic::collector::trace::v1::ExportTraceServiceRequest;
use opentelemetry_proto::tonic::collector::trace::v1::trace_service_client::TraceServiceClient;
use opentelemetry_proto::transform::common::tonic::ResourceAttributesWithSchema;
use opentelemetry_proto::transform::trace::tonic::group_spans_by_resource_and_scope;
use opentelemetry_sdk::Resource;
use opentelemetry_sdk::trace::SpanData;
use tokio::sync::mpsc;
use tonic::transport::{Channel, Endpoint};

use crate::config::TracingConfig;
use crate::span_queue::DroppedSpans;
use crate::tracer::TracerError;

/// Spans of one call: at about 1 KiB each, far below the 4 MiB that a collector takes by default.
const BATCH_SPANS_MAX: usize = 512;
/// How long a span waits for others. People who look at a trace notice no second.
const BATCH_WAIT: Duration = Duration::from_secs(1);
/// A collector that takes longer hangs. Its batch is dropped.
const EXPORT_TIMEOUT: Duration = Duration::from_secs(5);

pub(crate) struct ExportThread {
    endpoint: String,
    client: TraceServiceClient<Channel>,
    resource: ResourceAttributesWithSchema,
    spans: mpsc::Receiver<SpanData>,
    flushes: mpsc::Receiver<SyncSender<()>>,
    dropped: DroppedSpans,
    /// Spans lost since the collector has failed. `None` while it works.
    lost: Option<u64>,
}

/// What the collector made of a batch.
#[derive(Debug, thiserror::Error)]
enum ExportError {
    #[error("no answer within {EXPORT_TIMEOUT:?}")]
    Timeout,
    #[error(transparent)]
    Call(#[from] tonic::Status),
    #[error("{rejected} spans are rejected: {reason:?}")]
    Rejected { rejected: u64, reason: String },
}

impl ExportThread {
    /// Returns where to ask for a flush. The thread ends with the last sender of `spans`.
    pub(crate) fn start(
        config: &TracingConfig,
        resource: &Resource,
        spans: mpsc::Receiver<SpanData>,
        dropped: DroppedSpans,
    ) -> Result<mpsc::Sender<SyncSender<()>>, TracerError> {
        let endpoint = config.endpoint()?.connect_timeout(EXPORT_TIMEOUT);
        let (name, resource) = (config.otlp_endpoint.clone(), resource.into());
        let (flush_sender, flushes) = mpsc::channel(1);
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build();
        let runtime = runtime.map_err(TracerError::Thread)?;
        let body = move || {
            runtime.block_on(async move {
                let client = TraceServiceClient::new(Endpoint::connect_lazy(&endpoint));
                Self { endpoint: name, client, resource, spans, flushes, dropped, lost: None }.run().await;
            });
        };
        let thread = std::thread::Builder::new().name("otlp".to_owned()).spawn(body);
        thread.map_err(TracerError::Thread)?;
        Ok(flush_sender)
    }

    async fn run(mut self) {
        let mut batch = Vec::new();
        loop {
            let flush = tokio::select! {
                received = self.spans.recv_many(&mut batch, BATCH_SPANS_MAX) => match received {
                    0 => return,
                    _ => self.fill(&mut batch).await,
                },
                Some(flush) = self.flushes.recv() => Some(flush),
            };
            self.export(&mut batch).await;
            let Some(flush) = flush else { continue };
            // All that ended before the flush.
            for _ in 0..self.spans.len().div_ceil(BATCH_SPANS_MAX) {
                self.spans.recv_many(&mut batch, BATCH_SPANS_MAX).await;
                self.export(&mut batch).await;
            }
            // Who asked may have stopped waiting.
            let _: Result<(), _> = flush.try_send(());
        }
    }

    /// Waits for more spans, until the batch is full, its time is over, or a flush is asked for.
    async fn fill(&mut self, batch: &mut Vec<SpanData>) -> Option<SyncSender<()>> {
        let over = tokio::time::sleep(BATCH_WAIT);
        tokio::pin!(over);
        while let Some(room) = BATCH_SPANS_MAX.checked_sub(batch.len()).filter(|&room| room > 0) {
            tokio::select! {
                received = self.spans.recv_many(batch, room) => if received == 0 { return None },
                Some(flush) = self.flushes.recv() => return Some(flush),
                () = &mut over => return None,
            }
        }
        None
    }

    async fn export(&mut self, batch: &mut Vec<SpanData>) {
        if batch.is_empty() {
            return;
        }
        let spans = batch.len() as u64;
        let exported = self.send(std::mem::take(batch)).await;
        let lost = match &exported {
            Ok(()) => 0,
            Err(ExportError::Rejected { rejected, .. }) => *rejected,
            Err(ExportError::Timeout | ExportError::Call(_)) => spans,
        };
        self.dropped.add(lost);
        self.report(exported, lost);
    }

    async fn send(&mut self, batch: Vec<SpanData>) -> Result<(), ExportError> {
        let resource_spans = group_spans_by_resource_and_scope(batch, &self.resource);
        let call = self.client.export(ExportTraceServiceRequest { resource_spans });
        let reply = tokio::time::timeout(EXPORT_TIMEOUT, call).await.map_err(|_| ExportError::Timeout)??;
        match reply.into_inner().partial_success.filter(|partial| partial.rejected_spans > 0) {
            Some(partial) => Err(ExportError::Rejected {
                rejected: partial.rejected_spans.unsigned_abs(),
                reason: partial.error_message,
            }),
            None => Ok(()),
        }
    }

    /// One line when the collector fails, one when it works again.
    fn report(&mut self, exported: Result<(), ExportError>, lost: u64) {
        let endpoint = &self.endpoint;
        match (exported, &mut self.lost) {
            (Err(_), Some(before)) => *before += lost,
            (Err(error), state @ None) => {
                *state = Some(lost);
                let error = service::exit::one_line(&error);
                tracing::warn!(endpoint, error, "the collector takes no spans: they are dropped");
            }
            (Ok(()), state) => {
                if let Some(spans_dropped) = state.take() {
                    tracing::info!(endpoint, spans_dropped, "the collector takes spans again");
                }
            }
        }
    }
}
