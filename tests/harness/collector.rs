// SPDX-License-Identifier: Apache-2.0

//! A collector of traces: takes spans over OTLP and keeps them.

use std::net::SocketAddr;
use std::sync::{Arc, Mutex};

use opentelemetry_proto::tonic::collector::trace::v1::trace_service_server::{
    TraceService, TraceServiceServer,
};
use opentelemetry_proto::tonic::collector::trace::v1::{
    ExportTraceServiceRequest, ExportTraceServiceResponse,
};
use opentelemetry_proto::tonic::common::v1::any_value::Value;
use opentelemetry_proto::tonic::common::v1::{AnyValue, KeyValue};
use opentelemetry_proto::tonic::trace::v1::{Span, status::StatusCode};
use tonic::transport::Server;
use tonic::transport::server::TcpIncoming;
use tonic::{Request, Response, Status};

use super::api::runtime;
use super::eventually;

/// A span with the process that has sent it.
#[derive(Clone, Debug)]
pub(crate) struct CollectedSpan {
    pub(crate) process: String,
    pub(crate) span: Span,
}

pub(crate) struct Collector {
    pub(crate) address: SocketAddr,
    spans: Arc<Mutex<Vec<CollectedSpan>>>,
    _runtime: tokio::runtime::Runtime,
}

struct Service {
    spans: Arc<Mutex<Vec<CollectedSpan>>>,
}

#[tonic::async_trait]
impl TraceService for Service {
    async fn export(
        &self,
        request: Request<ExportTraceServiceRequest>,
    ) -> Result<Response<ExportTraceServiceResponse>, Status> {
        let mut spans = self.spans.lock().unwrap();
        for of_resource in request.into_inner().resource_spans {
            let resource = of_resource.resource.unwrap_or_default();
            let process = text(find(&resource.attributes, "service.instance.id").unwrap());
            let of_scopes = of_resource.scope_spans.into_iter().flat_map(|scope| scope.spans);
            spans.extend(of_scopes.map(|span| CollectedSpan { process: process.clone(), span }));
        }
        Ok(Response::new(ExportTraceServiceResponse::default()))
    }
}

impl Collector {
    pub(crate) fn start() -> Self {
        Self::start_at(([127, 0, 0, 1], 0).into())
    }

    pub(crate) fn start_at(address: SocketAddr) -> Self {
        let (runtime, spans) = (runtime(), Arc::<Mutex<Vec<CollectedSpan>>>::default());
        let guard = runtime.enter();
        let incoming = TcpIncoming::bind(address).unwrap();
        let address = incoming.local_addr().unwrap();
        let service = TraceServiceServer::new(Service { spans: spans.clone() });
        drop(runtime.spawn(Server::builder().add_service(service).serve_with_incoming(incoming)));
        drop(guard);
        Self { address, spans, _runtime: runtime }
    }

    /// The section `[tracing]` for it.
    pub(crate) fn config(&self) -> String {
        config(self.address)
    }

    pub(crate) fn spans(&self) -> Vec<CollectedSpan> {
        self.spans.lock().unwrap().clone()
    }

    /// The spans of a trace, once there are this many with each name.
    pub(crate) fn trace(&self, trace_id: &str, expected: &[(&str, usize)]) -> Vec<CollectedSpan> {
        eventually(&format!("the trace has {expected:?}"), || {
            let mut spans = self.spans();
            spans.retain(|collected| hex(&collected.span.trace_id) == trace_id);
            let count = |name: &str| spans.iter().filter(|collected| collected.span.name == name).count();
            expected.iter().all(|&(name, spans)| count(name) >= spans).then_some(spans)
        })
    }
}

pub(crate) fn config(address: SocketAddr) -> String {
    format!("[tracing]\notlp-endpoint = \"http://{address}\"\n")
}

impl CollectedSpan {
    pub(crate) fn text(&self, key: &str) -> Option<String> {
        find(&self.span.attributes, key).map(text)
    }

    pub(crate) fn number(&self, key: &str) -> Option<f64> {
        match find(&self.span.attributes, key)? {
            Value::IntValue(number) => Some(*number as f64),
            Value::DoubleValue(number) => Some(*number),
            _ => None,
        }
    }

    pub(crate) fn is_child_of(&self, parent: &CollectedSpan) -> bool {
        self.span.parent_span_id == parent.span.span_id
    }

    pub(crate) fn has_failed(&self) -> bool {
        self.span.status.as_ref().is_some_and(|status| status.code() == StatusCode::Error)
    }

    /// Whether it lies within the time of `outer`.
    pub(crate) fn is_within(&self, outer: &CollectedSpan) -> bool {
        let (inner, outer) = (&self.span, &outer.span);
        outer.start_time_unix_nano <= inner.start_time_unix_nano
            && inner.end_time_unix_nano <= outer.end_time_unix_nano
    }
}

fn find<'a>(attributes: &'a [KeyValue], key: &str) -> Option<&'a Value> {
    let found = attributes.iter().find(|attribute| attribute.key == key)?;
    found.value.as_ref().and_then(|AnyValue { value, .. }| value.as_ref())
}

fn text(value: &Value) -> String {
    match value {
        Value::StringValue(text) => text.clone(),
        other => panic!("no text: {other:?}"),
    }
}

pub(crate) fn hex(bytes: &[u8]) -> String {
    bytes.iter().map(|byte| format!("{byte:02x}")).collect()
}
