// SPDX-License-Identifier: Apache-2.0

//! A fake worker: serves the real gRPC API on a real socket and replays scripted output and faults.
//!
//! A fake worker runs on a runtime of its own, so that a test can end it as `kill -9` does: every
//! connection breaks and the socket file stays.

use std::path::{Path, PathBuf};
use std::pin::Pin;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, OnceLock};
use std::time::Duration;

use proto::v1::{FinishReason, TokenLogprob};
use proto::worker::v1::worker_server::{Worker, WorkerServer};
use proto::worker::v1::{self as wire, generate_frame, kv_event, metadata_frame};
use tokio::net::UnixListener;
use tokio::runtime::Runtime;
use tokio::sync::mpsc;
use tokio_stream::wrappers::{ReceiverStream, UnixListenerStream};
use tokio_stream::{Stream, StreamExt};
use tonic::{Code, Request, Response, Status};

/// How a fake worker treats every request.
#[derive(Clone, Debug)]
pub(crate) struct FakeBehaviour {
    /// Name of the model that it serves.
    pub(crate) model: &'static str,
    pub(crate) device: &'static str,
    pub(crate) fingerprint: u8,
    /// Tokens per frame.
    pub(crate) frame_tokens: usize,
    /// Pause between frames.
    pub(crate) pause: Duration,
    pub(crate) refuse: Option<(Code, &'static str)>,
    /// The refusal names the tenant's limit.
    pub(crate) refuses_tenant: bool,
    /// Answer to grammar checks. A grammar that contains "bad" is always invalid.
    pub(crate) grammar_answer: GrammarAnswer,
    /// Reported capacity. The fake worker itself accepts any number of requests.
    pub(crate) running_max: u32,
    pub(crate) queue_max: u32,
    pub(crate) tenant_queue_max: u32,
    /// Blocks of 16 tokens.
    pub(crate) kv_blocks: u64,
    pub(crate) context_tokens: u32,
    /// A fault after this many output tokens, including resumed output.
    pub(crate) fault: Option<(usize, Fault)>,
    /// The frames of each subscription to KV cache events. If empty, the worker has no events.
    pub(crate) kv_frames: &'static [KvFrames],
}

/// Frames of a subscription, as log, next event, and whether the frame clears the cache. Other
/// frames have one event.
#[derive(Clone, Copy, Debug)]
pub(crate) struct KvFrames {
    pub(crate) frames: &'static [(u64, u64, bool)],
    /// The stream ends after them, otherwise it stays open.
    pub(crate) ends: bool,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum GrammarAnswer {
    Compile,
    /// No answer.
    Hang,
    /// RESOURCE_EXHAUSTED: too many grammars wait.
    Busy,
    /// INTERNAL: the compiler failed.
    CompilerFailed,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Fault {
    /// The process dies: every stream and connection breaks.
    Die,
    /// The stream ends with this status.
    Status(Code),
    /// The stream stays open without further frames.
    Hang,
    /// The stream ends without `finished`.
    EndStream,
}

impl Default for FakeBehaviour {
    fn default() -> Self {
        Self {
            model: "demo",
            device: "host",
            fingerprint: 1,
            frame_tokens: 1,
            pause: Duration::ZERO,
            refuse: None,
            refuses_tenant: false,
            grammar_answer: GrammarAnswer::Compile,
            running_max: 64,
            queue_max: 256,
            tenant_queue_max: 192,
            kv_blocks: 1 << 20,
            context_tokens: CONTEXT_TOKENS,
            fault: None,
            kv_frames: &[],
        }
    }
}

pub(crate) struct FakeWorker {
    runtime: Arc<Mutex<Option<Runtime>>>,
    pub(crate) record: Arc<FakeWorkerRecord>,
}

/// What a fake worker records for tests.
#[derive(Default)]
pub(crate) struct FakeWorkerRecord {
    pub(crate) calls: Mutex<Vec<wire::GenerateRequest>>,
    pub(crate) metadata_calls: AtomicUsize,
    pub(crate) grammar_calls: AtomicUsize,
    pub(crate) open_streams: AtomicUsize,
    /// Log and event from which each subscription to KV cache events began.
    pub(crate) subscriptions: Mutex<Vec<(u64, u64)>>,
    /// Frames that the gRPC server took from the fake worker, over all streams.
    pub(crate) sent_frames: AtomicUsize,
}

impl FakeWorker {
    /// Serves `script`, the output of the model, at `worker-<index>.sock`.
    pub(crate) fn start(directory: &Path, index: u32, script: Vec<u32>, behaviour: FakeBehaviour) -> Self {
        let path = directory.join(format!("worker-{index}.sock"));
        let runtime =
            tokio::runtime::Builder::new_multi_thread().worker_threads(1).enable_all().build().unwrap();
        let record = Arc::new(FakeWorkerRecord::default());
        let slot = Arc::new(Mutex::new(None));
        let service = FakeService {
            name: format!("worker-{index}"),
            script: script.into(),
            behaviour,
            record: record.clone(),
            runtime: slot.clone(),
        };
        runtime.block_on(async {
            let (health, health_service) = tonic_health::server::health_reporter();
            health.set_serving::<WorkerServer<FakeService>>().await;
            let listener = bind(&path);
            tokio::spawn(
                tonic::transport::Server::builder()
                    .add_service(WorkerServer::new(service))
                    .add_service(health_service)
                    .serve_with_incoming(UnixListenerStream::new(listener)),
            );
        });
        *slot.lock().unwrap() = Some(runtime);
        Self { runtime: slot, record }
    }

    pub(crate) fn kill(&self) {
        kill(&self.runtime);
    }

    pub(crate) fn calls(&self) -> Vec<wire::GenerateRequest> {
        self.record.calls.lock().unwrap().clone()
    }

    pub(crate) fn grammar_calls(&self) -> usize {
        self.record.grammar_calls.load(Ordering::SeqCst)
    }

    pub(crate) fn sent_frames(&self) -> usize {
        self.record.sent_frames.load(Ordering::SeqCst)
    }

    pub(crate) fn open_streams(&self) -> usize {
        self.record.open_streams.load(Ordering::SeqCst)
    }
}

impl Drop for FakeWorker {
    fn drop(&mut self) {
        self.kill();
    }
}

fn kill(runtime: &Mutex<Option<Runtime>>) {
    if let Some(runtime) = runtime.lock().unwrap().take() {
        runtime.shutdown_background();
    }
}

fn bind(path: &PathBuf) -> UnixListener {
    match std::fs::remove_file(path) {
        Ok(()) => {}
        Err(error) => assert_eq!(error.kind(), std::io::ErrorKind::NotFound),
    }
    UnixListener::bind(path).unwrap()
}

struct FakeService {
    name: String,
    script: Arc<[u32]>,
    behaviour: FakeBehaviour,
    record: Arc<FakeWorkerRecord>,
    runtime: Arc<Mutex<Option<Runtime>>>,
}

type FakeStream<T> = Pin<Box<dyn Stream<Item = Result<T, Status>> + Send>>;

/// Counts an open stream until it is dropped.
struct OpenStreamGuard(Arc<FakeWorkerRecord>);

impl Drop for OpenStreamGuard {
    fn drop(&mut self) {
        self.0.open_streams.fetch_sub(1, Ordering::SeqCst);
    }
}

#[tonic::async_trait]
impl Worker for FakeService {
    type GenerateStream = FakeStream<wire::GenerateFrame>;
    type SearchBeamsStream = FakeStream<wire::GenerateFrame>;
    type ScoreStream = FakeStream<wire::ScoreFrame>;
    type GetMetadataStream = FakeStream<wire::MetadataFrame>;
    type SubscribeKvEventsStream = FakeStream<wire::KvEventsFrame>;

    async fn generate(
        &self,
        request: Request<wire::GenerateRequest>,
    ) -> Result<Response<Self::GenerateStream>, Status> {
        let request = request.into_inner();
        self.record.calls.lock().unwrap().push(request.clone());
        if let Some((code, message)) = self.behaviour.refuse {
            let mut status = Status::new(code, message);
            status.metadata_mut().insert("retry-after", RETRY_AFTER.parse().unwrap());
            if self.behaviour.refuses_tenant {
                status.metadata_mut().insert("ballast-bound", "tenant".parse().unwrap());
            }
            return Err(status);
        }
        if request.fingerprint[..] != [self.behaviour.fingerprint] {
            return Err(Status::failed_precondition("another fingerprint"));
        }
        self.record.open_streams.fetch_add(1, Ordering::SeqCst);
        let open = OpenStreamGuard(self.record.clone());
        let (sender, receiver) = mpsc::channel(4);
        let player = ScriptPlayer {
            script: self.script.clone(),
            behaviour: self.behaviour.clone(),
            runtime: self.runtime.clone(),
            record: self.record.clone(),
        };
        tokio::spawn(async move {
            tokio::select! {
                _ = player.run(request, &sender) => {}
                () = sender.closed() => {}
            }
            drop(open);
        });
        Ok(Response::new(Box::pin(ReceiverStream::new(receiver))))
    }

    async fn search_beams(
        &self,
        _: Request<wire::SearchBeamsRequest>,
    ) -> Result<Response<Self::SearchBeamsStream>, Status> {
        Err(Status::unimplemented("the fake worker has no model"))
    }

    async fn check_grammar(
        &self,
        request: Request<wire::CheckGrammarRequest>,
    ) -> Result<Response<wire::CheckGrammarReply>, Status> {
        self.record.grammar_calls.fetch_add(1, Ordering::SeqCst);
        match self.behaviour.grammar_answer {
            GrammarAnswer::Compile => {}
            GrammarAnswer::Hang => std::future::pending().await,
            GrammarAnswer::Busy => return Err(Status::resource_exhausted("64 grammars are waiting")),
            GrammarAnswer::CompilerFailed => return Err(Status::internal("the grammar compiler failed")),
        }
        let grammar = request.into_inner().grammar.unwrap();
        if format!("{grammar:?}").contains("bad") {
            let mut status = Status::invalid_argument("the grammar matches nothing");
            status.metadata_mut().insert("ballast-field", "grammar".parse().unwrap());
            return Err(status);
        }
        Ok(Response::new(wire::CheckGrammarReply {}))
    }

    async fn score(&self, _: Request<wire::ScoreRequest>) -> Result<Response<Self::ScoreStream>, Status> {
        Err(Status::unimplemented("the fake worker has no model"))
    }

    async fn embed(&self, _: Request<wire::EmbedRequest>) -> Result<Response<wire::EmbedReply>, Status> {
        Err(Status::unimplemented("the fake worker has no model"))
    }

    async fn subscribe_kv_events(
        &self,
        request: Request<wire::SubscribeKvEventsRequest>,
    ) -> Result<Response<Self::SubscribeKvEventsStream>, Status> {
        let request = request.into_inner();
        let mut subscriptions = self.record.subscriptions.lock().unwrap();
        let Some(script) = self.behaviour.kv_frames.get(subscriptions.len()) else {
            return Err(Status::unimplemented("the fake worker has no cache"));
        };
        subscriptions.push((request.log_id, request.from_event));
        let frames = tokio_stream::iter(script.frames).map(|&(log_id, next_event, is_cleared)| {
            let cleared = kv_event::Event::Cleared(wire::AllBlocksCleared {});
            let stored = kv_event::Event::Stored(wire::KvBlock { hash: vec![7; 32].into(), group: 0 });
            let event = Some(if is_cleared { cleared } else { stored });
            Ok(wire::KvEventsFrame { log_id, next_event, events: vec![wire::KvEvent { event }] })
        });
        match script.ends {
            true => Ok(Response::new(Box::pin(frames))),
            false => Ok(Response::new(Box::pin(frames.chain(tokio_stream::pending())))),
        }
    }

    async fn reset_prefix_cache(
        &self,
        _: Request<wire::ResetPrefixCacheRequest>,
    ) -> Result<Response<wire::ResetPrefixCacheReply>, Status> {
        Err(Status::unimplemented("the fake worker has no cache"))
    }

    async fn get_metadata(
        &self,
        _: Request<wire::GetMetadataRequest>,
    ) -> Result<Response<Self::GetMetadataStream>, Status> {
        self.record.metadata_calls.fetch_add(1, Ordering::SeqCst);
        let gguf = metadata();
        let description = wire::WorkerDescription {
            worker: self.name.clone(),
            model: self.behaviour.model.into(),
            digest: vec![7; 32].into(),
            generation: 1,
            fingerprint: vec![self.behaviour.fingerprint].into(),
            context_tokens: self.behaviour.context_tokens,
            vocabulary: VOCABULARY,
            gguf_bytes: gguf.len() as u64,
            running_max: self.behaviour.running_max,
            queue_max: self.behaviour.queue_max,
            batch_queue_max: self.behaviour.queue_max,
            tenant_queue_max: self.behaviour.tenant_queue_max,
            kv_blocks: self.behaviour.kv_blocks,
            kv_block_tokens: 16,
            device: self.behaviour.device.into(),
            ..Default::default()
        };
        let mut frames = vec![metadata_frame::Frame::Description(description)];
        frames.extend(gguf.chunks(1 << 20).map(|c| metadata_frame::Frame::Gguf(c.to_vec().into())));
        let frames = frames.into_iter().map(|frame| Ok(wire::MetadataFrame { frame: Some(frame) }));
        Ok(Response::new(Box::pin(tokio_stream::iter(frames))))
    }

    async fn stats(&self, _: Request<wire::StatsRequest>) -> Result<Response<wire::StatsReply>, Status> {
        Ok(Response::new(wire::StatsReply::default()))
    }

    async fn drain(&self, _: Request<wire::DrainRequest>) -> Result<Response<wire::DrainReply>, Status> {
        Err(Status::unimplemented("the fake worker does not drain"))
    }
}

/// Replays the script on one stream.
struct ScriptPlayer {
    script: Arc<[u32]>,
    behaviour: FakeBehaviour,
    runtime: Arc<Mutex<Option<Runtime>>>,
    record: Arc<FakeWorkerRecord>,
}

impl ScriptPlayer {
    async fn run(
        self,
        request: wire::GenerateRequest,
        sender: &mpsc::Sender<Result<wire::GenerateFrame, Status>>,
    ) -> Option<()> {
        let send = async |frame| sender.send(Ok(wire::GenerateFrame { frame: Some(frame) })).await.ok();
        send(generate_frame::Frame::Admitted(wire::Admitted::default())).await?;
        let prior = &request.tokens[request.prompt_tokens as usize..];
        let end = match request.max_tokens {
            0 => self.script.len(),
            max => self.script.len().min(max as usize),
        };
        if *prior != self.script[..prior.len()] || prior.len() >= end {
            sender
                .send(Err(Status::invalid_argument("the resumed output differs from the script")))
                .await
                .ok()?;
            return None;
        }
        let mut at = prior.len();
        while at < end {
            if let Some((after, fault)) = self.behaviour.fault.filter(|&(after, _)| after <= at) {
                assert!(after <= at);
                match fault {
                    // Earlier frames must have left the process, read by the router or not.
                    Fault::Die => {
                        tokio::time::sleep(Duration::from_millis(50)).await;
                        kill(&self.runtime);
                    }
                    Fault::Status(code) => {
                        return sender.send(Err(Status::new(code, "scripted fault"))).await.ok();
                    }
                    Fault::Hang => std::future::pending().await,
                    Fault::EndStream => {}
                }
                return None;
            }
            let until = end.min(at + self.behaviour.frame_tokens);
            let ids = self.script[at..until].to_vec();
            let logprobs = match request.top_logprobs {
                None => vec![],
                Some(top) => (at..until).map(|index| logprob(&self.script, index, top)).collect(),
            };
            let sampler_state = vec![until as u8].into();
            send(generate_frame::Frame::Tokens(wire::Tokens { ids, logprobs, sampler_state })).await?;
            self.record.sent_frames.fetch_add(1, Ordering::SeqCst);
            at = until;
            tokio::time::sleep(self.behaviour.pause).await;
        }
        let mut finished = wire::Finished { cached_tokens: 3, ..Default::default() };
        if end == self.script.len() && request.max_tokens as usize != end {
            finished.set_reason(FinishReason::Stop);
            finished.stop_token = request.stop_tokens.first().copied();
        } else {
            finished.set_reason(FinishReason::Length);
        }
        send(generate_frame::Frame::Finished(finished)).await
    }
}

fn logprob(script: &[u32], index: usize, top: u32) -> TokenLogprob {
    TokenLogprob {
        logprob: -(index as f32),
        top_tokens: (0..top).map(|n| script[index] + n).collect(),
        top_logprobs: (0..top).map(|n| -((index as u32 + n) as f32)).collect(),
    }
}

/// Retry time of a refusal, in seconds.
pub(crate) const RETRY_AFTER: &str = "7";
pub(crate) const CONTEXT_TOKENS: u32 = 256;
pub(crate) const VOCABULARY: u32 = 8192;

/// The comment names the markers of a model that reasons and calls tools.
const CHAT_TEMPLATE: &str = "{# <think></think><tool_call> #}\
    {% for m in messages %}[{{ m.role }}] {{ m.content }}\n{% endfor %}\
    {% if tools %}[tools] {{ tools | length }}\n{% endif %}\
    {% if add_generation_prompt %}[assistant] {% endif %}";

/// The demo model's metadata section with a chat template, which the demo model lacks.
pub(crate) fn metadata() -> &'static [u8] {
    static SECTION: OnceLock<Vec<u8>> = OnceLock::new();
    SECTION.get_or_init(|| {
        let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("../demo/pycoder-7m-q8_0.gguf");
        let file = std::fs::File::open(path).unwrap();
        let length = file.metadata().unwrap().len();
        let header = gguf::Header::read(std::io::BufReader::new(file), length).unwrap();
        let mut builder = gguf::MetadataBuilder::default();
        builder.copy(header.metadata(), |key| key != "tokenizer.chat_template").unwrap();
        builder.put("tokenizer.chat_template", CHAT_TEMPLATE).unwrap();
        builder.bytes().to_vec()
    })
}

pub(crate) fn tokenizer() -> Arc<text::Tokenizer> {
    static TOKENIZER: OnceLock<Arc<text::Tokenizer>> = OnceLock::new();
    TOKENIZER
        .get_or_init(|| {
            let metadata = gguf::Metadata::parse(metadata().to_vec()).unwrap();
            Arc::new(text::Tokenizer::from_metadata(&metadata).unwrap())
        })
        .clone()
}

/// Token ids of a text.
pub(crate) fn token_ids_of(text: &str) -> Vec<u32> {
    tokenizer().encode(text, text::EncodeOptions::default()).unwrap()
}
