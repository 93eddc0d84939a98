// SPDX-License-Identifier: Apache-2.0

//! What the fuzz targets in `router/fuzz` call: all that the router does with a request before it
//! calls a worker. Behind the feature `fuzzing`.

use std::path::Path;
use std::sync::{Arc, LazyLock};

use gguf::{GgufModel, MetadataBuilder};
use prost::Message;
use tokio::time::Instant;
use traces::TraceContext;

use crate::admission::{ModelCapacity, Tenant};
use crate::generate::{CHOICES_MAX, GenerationRequest, RequestOrigin};
use crate::model::{ServedModel, ServedModelInfo};
use crate::quarantine::ContentHasher;
use crate::request_trace::RequestTrace;
use crate::routing::{ModelKey, WorkerFingerprint};
use crate::text_stream::TextStream;
use crate::{grpc, http};

const CONTEXT_TOKENS: u32 = 512;
/// Uses messages and tools as real templates do, and writes calls as Qwen does.
const TEMPLATE: &str = include_str!("../../crates/text/tests/data/qwen3.jinja");

/// The demo model, which has no chat template, with one.
static MODEL: LazyLock<Arc<ServedModel>> = LazyLock::new(|| {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("../demo/pycoder-7m-q8_0.gguf");
    let model = GgufModel::open(&path).expect("the demo model is in the repository");
    let mut metadata = MetadataBuilder::default();
    metadata.copy(model.metadata(), |_| true).expect("metadata can be copied");
    metadata.put("tokenizer.chat_template", TEMPLATE).expect("the demo model has no template");
    let description = ServedModelInfo {
        key: ModelKey { name: "m".into(), fingerprint: WorkerFingerprint(vec![1]) },
        aliases: Vec::new(),
        chat_template: None,
        sampling_defaults: proto::v1::Sampling::default(),
        digest: vec![0; 32],
        generation: 1,
        context_tokens: CONTEXT_TOKENS,
        vocabulary: 4096,
        weight_bytes: 1,
        pooling: proto::v1::Pooling::Last,
        embedding_length: 8,
    };
    let model = ServedModel::load(description, metadata.bytes().to_vec(), None);
    Arc::new(model.expect("the model can be served"))
});

fn origin() -> RequestOrigin {
    let arrived = Instant::now();
    let trace = RequestTrace::unrecorded("r".into(), TraceContext::default());
    RequestOrigin { trace, arrived, tenant: Tenant::Unnamed, session: None, bytes: None, active: None }
}

/// Reads a body as each endpoint does. A refusal is a 4xx response with a text.
pub fn read_http_body(body: &[u8]) {
    http::fuzzing::read_body(&MODEL, &origin(), body);
}

/// Reads a message of `Generate`. A refusal has a text and is the client's fault.
pub fn read_generate_request(message: &[u8]) {
    let Ok(message) = proto::v1::GenerateRequest::decode(message) else { return };
    match grpc::generation_request(MODEL.clone(), message, None, origin()) {
        Ok(request) => check_calls(&request),
        Err(status) => {
            assert_eq!(status.code(), tonic::Code::InvalidArgument, "{status}");
            assert!(!status.message().is_empty());
        }
    }
}

/// Makes the calls of an accepted request, and the text of some output.
pub(crate) fn check_calls(request: &GenerationRequest) {
    let calls =
        request.choice_calls(request.model.key(), 0, ModelCapacity::default(), &ContentHasher::default());
    assert!((1..=CHOICES_MAX).contains(&calls.len()) && calls.len() == request.choices());
    for call in calls.iter().step_by(calls.len().div_ceil(4)) {
        let params = &call.params;
        assert!(params.max_tokens > 0 && params.n > 0 && params.n <= params.best_of);
        assert!(call.prompt.len() + params.max_tokens as usize <= CONTEXT_TOKENS as usize);
        match TextStream::new(&request.model, params, true, Arc::new([])) {
            Ok(mut text) => drop(text.push(&call.prompt)),
            Err(refusal) => assert!(!refusal.to_string().is_empty()),
        }
    }
}
