// SPDX-License-Identifier: Apache-2.0

//! A worker that is healthy, but whose model no router can serve: its tokenizer is unknown. It
//! stands for a worker of another version, because this version checks models before it loads them.

use std::path::Path;
use std::pin::Pin;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use gguf::MetadataBuilder;
use proto::worker::v1::worker_server::{Worker, WorkerServer};
use proto::worker::v1::{self as wire, metadata_frame};
use tonic::codegen::tokio_stream::{self, Stream};
use tonic::{Request, Response, Status};

use super::api::runtime;

/// Serves until it is dropped.
pub(crate) struct UnusableWorker {
    metadata_calls: Arc<AtomicUsize>,
    _runtime: tokio::runtime::Runtime,
}

impl UnusableWorker {
    pub(crate) fn start(runtime_dir: &Path, index: u32) -> Self {
        let (runtime, metadata_calls) = (runtime(), Arc::new(AtomicUsize::new(0)));
        let service =
            UnusableService { name: format!("worker-{index}"), metadata_calls: metadata_calls.clone() };
        let socket = service::RuntimeDir::at(runtime_dir).worker_socket(index);
        runtime.block_on(async {
            let (health, health_service) = service::grpc::health();
            health.set_serving::<WorkerServer<UnusableService>>().await;
            let services =
                service::grpc::server().add_service(WorkerServer::new(service)).add_service(health_service);
            let listener = service::grpc::bind(&socket).unwrap();
            tokio::spawn(service::grpc::serve(services, listener, std::future::pending()));
        });
        Self { metadata_calls, _runtime: runtime }
    }

    /// How often the router has asked what the worker serves.
    pub(crate) fn metadata_calls(&self) -> usize {
        self.metadata_calls.load(Ordering::SeqCst)
    }
}

struct UnusableService {
    name: String,
    metadata_calls: Arc<AtomicUsize>,
}

type Frames<T> = Pin<Box<dyn Stream<Item = Result<T, Status>> + Send>>;

fn no_model<T>() -> Result<Response<T>, Status> {
    Err(Status::unimplemented("this worker has no model"))
}

#[tonic::async_trait]
impl Worker for UnusableService {
    type GenerateStream = Frames<wire::GenerateFrame>;
    type SearchBeamsStream = Frames<wire::GenerateFrame>;
    type ScoreStream = Frames<wire::ScoreFrame>;
    type GetMetadataStream = Frames<wire::MetadataFrame>;
    type SubscribeKvEventsStream = Frames<wire::KvEventsFrame>;

    async fn get_metadata(
        &self,
        _: Request<wire::GetMetadataRequest>,
    ) -> Result<Response<Self::GetMetadataStream>, Status> {
        self.metadata_calls.fetch_add(1, Ordering::SeqCst);
        let mut metadata = MetadataBuilder::default();
        metadata.put("tokenizer.ggml.model", "abacus").unwrap();
        metadata.put("tokenizer.ggml.tokens", &["a"][..]).unwrap();
        let description = wire::WorkerDescription {
            worker: self.name.clone(),
            model: "unusable".into(),
            digest: vec![9; 32].into(),
            generation: 1,
            fingerprint: vec![9].into(),
            context_tokens: 512,
            vocabulary: 512,
            gguf_bytes: metadata.bytes().len() as u64,
            ..Default::default()
        };
        let gguf = metadata_frame::Frame::Gguf(metadata.bytes().to_vec().into());
        let frames = [metadata_frame::Frame::Description(description), gguf];
        let frames = frames.map(|frame| Ok(wire::MetadataFrame { frame: Some(frame) }));
        Ok(Response::new(Box::pin(tokio_stream::iter(frames))))
    }

    async fn generate(
        &self,
        _: Request<wire::GenerateRequest>,
    ) -> Result<Response<Self::GenerateStream>, Status> {
        no_model()
    }

    async fn search_beams(
        &self,
        _: Request<wire::SearchBeamsRequest>,
    ) -> Result<Response<Self::SearchBeamsStream>, Status> {
        no_model()
    }

    async fn check_grammar(
        &self,
        _: Request<wire::CheckGrammarRequest>,
    ) -> Result<Response<wire::CheckGrammarReply>, Status> {
        no_model()
    }

    async fn score(&self, _: Request<wire::ScoreRequest>) -> Result<Response<Self::ScoreStream>, Status> {
        no_model()
    }

    async fn embed(&self, _: Request<wire::EmbedRequest>) -> Result<Response<wire::EmbedReply>, Status> {
        no_model()
    }

    async fn subscribe_kv_events(
        &self,
        _: Request<wire::SubscribeKvEventsRequest>,
    ) -> Result<Response<Self::SubscribeKvEventsStream>, Status> {
        no_model()
    }

    async fn reset_prefix_cache(
        &self,
        _: Request<wire::ResetPrefixCacheRequest>,
    ) -> Result<Response<wire::ResetPrefixCacheReply>, Status> {
        no_model()
    }

    async fn stats(&self, _: Request<wire::StatsRequest>) -> Result<Response<wire::StatsReply>, Status> {
        no_model()
    }

    async fn drain(&self, _: Request<wire::DrainRequest>) -> Result<Response<wire::DrainReply>, Status> {
        no_model()
    }
}
