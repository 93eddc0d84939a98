// SPDX-License-Identifier: Apache-2.0

//! A worker without a model, whose streams get one token each at every step that the test orders.
//! What the router computes for them does not depend on time.

use std::path::Path;
use std::pin::Pin;
use std::sync::Arc;

use proto::v1::FinishReason;
use proto::worker::v1::worker_server::{Worker, WorkerServer};
use proto::worker::v1::{self as wire, generate_frame, metadata_frame};
use tokio::sync::{mpsc, watch};
use tonic::codegen::tokio_stream::wrappers::ReceiverStream;
use tonic::codegen::tokio_stream::{self, Stream};
use tonic::{Request, Response, Status};

use super::api::runtime;
use super::demo_7m;

/// Streams with this cache salt get no token.
pub(crate) const IDLE_SALT: &str = "idle";
const FINGERPRINT: &[u8] = &[7];
/// More than any test opens.
const STREAMS_MAX: u32 = 8192;
/// What the model writes again and again, without the tokens that end in white space or a bracket:
/// the router holds such text back, because a tool call may follow.
const OUTPUT: &str = "def value(self, other):\n    return self.items[other]\n";
/// The comment names the markers of a model that reasons and calls tools.
const CHAT_TEMPLATE: &str = "{# <think></think><tool_call> #}\
    {% for m in messages %}[{{ m.role }}] {{ m.content }}\n{% endfor %}\
    {% if add_generation_prompt %}[assistant] {% endif %}";

/// Serves until it is dropped.
pub(crate) struct SteppedWorker {
    steps: watch::Sender<u64>,
    _runtime: tokio::runtime::Runtime,
}

impl SteppedWorker {
    pub(crate) fn start(runtime_dir: &Path) -> Self {
        let (runtime, steps) = (runtime(), watch::Sender::new(0));
        let gguf = metadata();
        let parsed = gguf::Metadata::parse(gguf.clone()).unwrap();
        let tokenizer = text::Tokenizer::from_metadata(&parsed).unwrap();
        let is_word =
            |id: &u32| tokenizer.token_bytes(*id).unwrap().last().is_some_and(u8::is_ascii_alphanumeric);
        let mut output = tokenizer.encode(OUTPUT, text::EncodeOptions::default()).unwrap();
        output.retain(is_word);
        let service = SteppedService { gguf, output: output.into(), steps: steps.clone() };
        let socket = service::RuntimeDir::at(runtime_dir).worker_socket(0);
        runtime.block_on(async {
            let (health, health_service) = service::grpc::health();
            health.set_serving::<WorkerServer<SteppedService>>().await;
            let services =
                service::grpc::server().add_service(WorkerServer::new(service)).add_service(health_service);
            let listener = service::grpc::bind(&socket).unwrap();
            tokio::spawn(service::grpc::serve(services, listener, std::future::pending()));
        });
        Self { steps, _runtime: runtime }
    }

    /// Every stream gets its next token. A new stream has its first one without a step.
    pub(crate) fn step(&self) {
        self.steps.send_modify(|steps| *steps += 1);
    }
}

/// The metadata section of the demo model.
fn metadata() -> Vec<u8> {
    let file = std::fs::File::open(demo_7m()).unwrap();
    let length = file.metadata().unwrap().len();
    let header = gguf::Header::read(std::io::BufReader::new(file), length).unwrap();
    header.metadata().bytes().to_vec()
}

struct SteppedService {
    gguf: Vec<u8>,
    output: Arc<[u32]>,
    steps: watch::Sender<u64>,
}

type Frames<T> = Pin<Box<dyn Stream<Item = Result<T, Status>> + Send>>;

fn unsupported<T>() -> Result<Response<T>, Status> {
    Err(Status::unimplemented("this worker has no model"))
}

/// Sends the frames of one stream, until the router drops it.
async fn generate(
    request: wire::GenerateRequest,
    output: Arc<[u32]>,
    mut steps: watch::Receiver<u64>,
    frames: mpsc::Sender<Result<wire::GenerateFrame, Status>>,
) -> Option<()> {
    let send = async |frame| frames.send(Ok(wire::GenerateFrame { frame: Some(frame) })).await.ok();
    let first_step = *steps.borrow();
    send(generate_frame::Frame::Admitted(wire::Admitted::default())).await?;
    if request.cache_salt == IDLE_SALT {
        frames.closed().await;
        return None;
    }
    for index in 0..u64::from(request.max_tokens) {
        steps.wait_for(|&step| step >= first_step + index).await.ok()?;
        let ids = vec![output[index as usize % output.len()]];
        send(generate_frame::Frame::Tokens(wire::Tokens { ids, ..Default::default() })).await?;
    }
    let mut finished = wire::Finished::default();
    finished.set_reason(FinishReason::Length);
    send(generate_frame::Frame::Finished(finished)).await
}

#[tonic::async_trait]
impl Worker for SteppedService {
    type GenerateStream = ReceiverStream<Result<wire::GenerateFrame, Status>>;
    type SearchBeamsStream = Frames<wire::GenerateFrame>;
    type ScoreStream = Frames<wire::ScoreFrame>;
    type GetMetadataStream = Frames<wire::MetadataFrame>;
    type SubscribeKvEventsStream = Frames<wire::KvEventsFrame>;

    async fn get_metadata(
        &self,
        _: Request<wire::GetMetadataRequest>,
    ) -> Result<Response<Self::GetMetadataStream>, Status> {
        let description = wire::WorkerDescription {
            worker: "worker-0".to_owned(),
            model: "stepped".into(),
            digest: vec![7; 32].into(),
            generation: 1,
            fingerprint: FINGERPRINT.into(),
            context_tokens: 1 << 20,
            vocabulary: 8192,
            gguf_bytes: self.gguf.len() as u64,
            running_max: STREAMS_MAX,
            queue_max: STREAMS_MAX,
            batch_queue_max: STREAMS_MAX,
            tenant_queue_max: STREAMS_MAX,
            kv_blocks: 1 << 24,
            kv_block_tokens: 16,
            device: "host".into(),
            chat_template: Some(CHAT_TEMPLATE.to_owned()),
            ..Default::default()
        };
        let mut frames = vec![metadata_frame::Frame::Description(description)];
        frames
            .extend(self.gguf.chunks(1 << 20).map(|part| metadata_frame::Frame::Gguf(part.to_vec().into())));
        let frames = frames.into_iter().map(|frame| Ok(wire::MetadataFrame { frame: Some(frame) }));
        Ok(Response::new(Box::pin(tokio_stream::iter(frames))))
    }

    async fn generate(
        &self,
        request: Request<wire::GenerateRequest>,
    ) -> Result<Response<Self::GenerateStream>, Status> {
        let (frames, receiver) = mpsc::channel(4);
        tokio::spawn(generate(request.into_inner(), self.output.clone(), self.steps.subscribe(), frames));
        Ok(Response::new(ReceiverStream::new(receiver)))
    }

    async fn search_beams(
        &self,
        _: Request<wire::SearchBeamsRequest>,
    ) -> Result<Response<Self::SearchBeamsStream>, Status> {
        unsupported()
    }

    async fn check_grammar(
        &self,
        _: Request<wire::CheckGrammarRequest>,
    ) -> Result<Response<wire::CheckGrammarReply>, Status> {
        unsupported()
    }

    async fn score(&self, _: Request<wire::ScoreRequest>) -> Result<Response<Self::ScoreStream>, Status> {
        unsupported()
    }

    async fn embed(&self, _: Request<wire::EmbedRequest>) -> Result<Response<wire::EmbedReply>, Status> {
        unsupported()
    }

    async fn subscribe_kv_events(
        &self,
        _: Request<wire::SubscribeKvEventsRequest>,
    ) -> Result<Response<Self::SubscribeKvEventsStream>, Status> {
        unsupported()
    }

    async fn reset_prefix_cache(
        &self,
        _: Request<wire::ResetPrefixCacheRequest>,
    ) -> Result<Response<wire::ResetPrefixCacheReply>, Status> {
        unsupported()
    }

    async fn stats(&self, _: Request<wire::StatsRequest>) -> Result<Response<wire::StatsReply>, Status> {
        Ok(Response::new(wire::StatsReply::default()))
    }

    async fn drain(&self, _: Request<wire::DrainRequest>) -> Result<Response<wire::DrainReply>, Status> {
        unsupported()
    }
}
