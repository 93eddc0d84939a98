// SPDX-License-Identifier: Apache-2.0

//! Export to a collector on a Unix socket, which a worker without network uses.

use std::sync::{Arc, Mutex};

use opentelemetry_proto::tonic::collector::trace::v1::trace_service_server::{
    TraceService, TraceServiceServer,
};
use opentelemetry_proto::tonic::collector::trace::v1::{
    ExportTracePartialSuccess, ExportTraceServiceRequest, ExportTraceServiceResponse,
};
use tokio::net::UnixListener;
use tokio_stream::wrappers::UnixListenerStream;
use tonic::transport::Server;
use tonic::{Request, Response, Status};
use traces::{SpanKind, TraceContext, Tracer, TracingConfig};

/// Keeps the sizes of batches, and rejects one span of each.
#[derive(Clone, Default)]
struct PickyCollector(Arc<Mutex<Vec<usize>>>);

#[tonic::async_trait]
impl TraceService for PickyCollector {
    async fn export(
        &self,
        request: Request<ExportTraceServiceRequest>,
    ) -> Result<Response<ExportTraceServiceResponse>, Status> {
        let of_resources = request.into_inner().resource_spans.into_iter();
        let spans = of_resources.flat_map(|of| of.scope_spans).flat_map(|scope| scope.spans);
        self.0.lock().expect("no panic under this lock").push(spans.count());
        let rejection = ExportTracePartialSuccess { rejected_spans: 1, error_message: "too many".to_owned() };
        Ok(Response::new(ExportTraceServiceResponse { partial_success: Some(rejection) }))
    }
}

#[test]
fn a_flush_brings_all_spans_to_a_unix_socket_and_rejected_ones_are_counted() {
    let directory = tempfile::tempdir().unwrap();
    let socket = directory.path().join("otlp.sock");
    let (runtime, collector) = (tokio::runtime::Runtime::new().unwrap(), PickyCollector::default());
    runtime.block_on(async {
        let incoming = UnixListenerStream::new(UnixListener::bind(&socket).unwrap());
        let service = TraceServiceServer::new(collector.clone());
        drop(tokio::spawn(Server::builder().add_service(service).serve_with_incoming(incoming)));
    });
    let config = TracingConfig { otlp_endpoint: format!("unix://{}", socket.display()), sample_ratio: 1.0 };
    let tracer = Tracer::start(Some(&config), "ballast-test", "test").unwrap();
    // More than one batch.
    for _ in 0..600 {
        drop(tracer.span("span", SpanKind::Internal, &TraceContext::default()));
    }
    tracer.flush();
    let batches = collector.0.lock().unwrap();
    assert_eq!(batches.iter().sum::<usize>(), 600, "{batches:?}");
    assert!(batches.len() >= 2 && batches.iter().all(|&spans| spans <= 512), "{batches:?}");
    assert_eq!(tracer.dropped_spans(), batches.len() as u64, "one of each batch");
}
