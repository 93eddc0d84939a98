//! A worker without a model: the real gRPC surface on a real socket, with a script for output and for misfortunes.
//!
//! It runs on a runtime of its own, so that a test can end it as `kill -9` does: every connection breaks, the socket
//! file stays.

use std::path::{Path, PathBuf};
use std::pin::Pin;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, OnceLock};
use std::time::Duration;

use proto::v1::{FinishReason, TokenLogprob};
use proto::worker::v1::worker_server::{Worker, WorkerServer};
use proto::worker::v1::{self as wire, generate_frame, metadata_frame};
use tokio::net::UnixListener;
use tokio::runtime::Runtime;
use tokio::sync::mpsc;
use tokio_stream::Stream;
use tokio_stream::wrappers::{ReceiverStream, UnixListenerStream};
use tonic::{Code, Request, Response, Status};

/// What a fake does with every request.
#[derive(Clone, Debug)]
pub(crate) struct Behaviour {
    /// The name it serves.
    pub(crate) model: &'static str,
    pub(crate) fingerprint: u8,
    /// Tokens in a frame.
    pub(crate) frame_tokens: usize,
    /// Between frames.
    pub(crate) pause: Duration,
    pub(crate) refuse: Option<(Code, &'static str)>,
    /// It says that its full queue is the tenant's own.
    pub(crate) refuses_tenant: bool,
    /// What becomes of grammars; those with "bad" in them are none.
    pub(crate) grammars: Grammars,
    /// Requests that it says to run and to let wait; it takes them all.
    pub(crate) running_max: u32,
    pub(crate) queue_max: u32,
    pub(crate) tenant_queue_max: u32,
    /// Of 16 tokens.
    pub(crate) kv_blocks: u64,
    /// After so many output tokens (prior output counts), once.
    pub(crate) misfortune: Option<(usize, Misfortune)>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Grammars {
    Compile,
    /// It is asked, and does not answer.
    Hang,
    /// It has no room.
    Crowded,
    /// They cost it its compiler.
    Ruin,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Misfortune {
    /// The process dies: every stream and connection breaks.
    Die,
    /// The stream ends with this status.
    Status(Code),
    /// Nothing comes any more.
    Hang,
    /// The stream ends without `finished`.
    FallSilent,
}

impl Default for Behaviour {
    fn default() -> Self {
        Self {
            model: "demo",
            fingerprint: 1,
            frame_tokens: 1,
            pause: Duration::ZERO,
            refuse: None,
            refuses_tenant: false,
            grammars: Grammars::Compile,
            running_max: 64,
            queue_max: 256,
            tenant_queue_max: 192,
            kv_blocks: 1 << 20,
            misfortune: None,
        }
    }
}

pub(crate) struct FakeWorker {
    runtime: Arc<Mutex<Option<Runtime>>>,
    pub(crate) seen: Arc<Seen>,
}

/// What a test may look at.
#[derive(Default)]
pub(crate) struct Seen {
    pub(crate) calls: Mutex<Vec<wire::GenerateRequest>>,
    pub(crate) metadata_calls: AtomicUsize,
    pub(crate) grammar_calls: AtomicUsize,
    pub(crate) streams_open: AtomicUsize,
}

impl FakeWorker {
    /// Serves `script` (what the model "says") at `worker-<index>.sock`.
    pub(crate) fn start(directory: &Path, index: u32, script: Vec<u32>, behaviour: Behaviour) -> Self {
        let path = directory.join(format!("worker-{index}.sock"));
        let runtime =
            tokio::runtime::Builder::new_multi_thread().worker_threads(1).enable_all().build().unwrap();
        let seen = Arc::new(Seen::default());
        let slot = Arc::new(Mutex::new(None));
        let service = Service {
            name: format!("worker-{index}"),
            script: script.into(),
            behaviour,
            seen: seen.clone(),
            runtime: slot.clone(),
        };
        runtime.block_on(async {
            let (health, health_service) = tonic_health::server::health_reporter();
            health.set_serving::<WorkerServer<Service>>().await;
            let listener = bind(&path);
            tokio::spawn(
                tonic::transport::Server::builder()
                    .add_service(WorkerServer::new(service))
                    .add_service(health_service)
                    .serve_with_incoming(UnixListenerStream::new(listener)),
            );
        });
        *slot.lock().unwrap() = Some(runtime);
        Self { runtime: slot, seen }
    }

    pub(crate) fn kill(&self) {
        kill(&self.runtime);
    }

    pub(crate) fn calls(&self) -> Vec<wire::GenerateRequest> {
        self.seen.calls.lock().unwrap().clone()
    }

    pub(crate) fn grammar_calls(&self) -> usize {
        self.seen.grammar_calls.load(Ordering::SeqCst)
    }

    pub(crate) fn streams_open(&self) -> usize {
        self.seen.streams_open.load(Ordering::SeqCst)
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

struct Service {
    name: String,
    script: Arc<[u32]>,
    behaviour: Behaviour,
    seen: Arc<Seen>,
    runtime: Arc<Mutex<Option<Runtime>>>,
}

type Frames<T> = Pin<Box<dyn Stream<Item = Result<T, Status>> + Send>>;

/// Counts a stream for as long as it lives.
struct Open(Arc<Seen>);

impl Drop for Open {
    fn drop(&mut self) {
        self.0.streams_open.fetch_sub(1, Ordering::SeqCst);
    }
}

#[tonic::async_trait]
impl Worker for Service {
    type GenerateStream = Frames<wire::GenerateFrame>;
    type ScoreStream = Frames<wire::ScoreFrame>;
    type GetMetadataStream = Frames<wire::MetadataFrame>;
    type SubscribeKvEventsStream = Frames<wire::KvEventsFrame>;

    async fn generate(
        &self,
        request: Request<wire::GenerateRequest>,
    ) -> Result<Response<Self::GenerateStream>, Status> {
        let request = request.into_inner();
        self.seen.calls.lock().unwrap().push(request.clone());
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
        self.seen.streams_open.fetch_add(1, Ordering::SeqCst);
        let open = Open(self.seen.clone());
        let (sender, receiver) = mpsc::channel(4);
        let play = Play {
            script: self.script.clone(),
            behaviour: self.behaviour.clone(),
            runtime: self.runtime.clone(),
        };
        tokio::spawn(async move {
            tokio::select! {
                _ = play.run(request, &sender) => {}
                () = sender.closed() => {}
            }
            drop(open);
        });
        Ok(Response::new(Box::pin(ReceiverStream::new(receiver))))
    }

    async fn check_grammar(
        &self,
        request: Request<wire::CheckGrammarRequest>,
    ) -> Result<Response<wire::CheckGrammarReply>, Status> {
        self.seen.grammar_calls.fetch_add(1, Ordering::SeqCst);
        match self.behaviour.grammars {
            Grammars::Compile => {}
            Grammars::Hang => std::future::pending().await,
            Grammars::Crowded => return Err(Status::resource_exhausted("64 grammars wait already")),
            Grammars::Ruin => return Err(Status::internal("compiling it was given up")),
        }
        let grammar = request.into_inner().grammar.unwrap();
        if format!("{grammar:?}").contains("bad") {
            let mut status = Status::invalid_argument("nothing matches it");
            status.metadata_mut().insert("ballast-field", "grammar".parse().unwrap());
            return Err(status);
        }
        Ok(Response::new(wire::CheckGrammarReply {}))
    }

    async fn score(&self, _: Request<wire::ScoreRequest>) -> Result<Response<Self::ScoreStream>, Status> {
        Err(Status::unimplemented("the fake has no model"))
    }

    async fn subscribe_kv_events(
        &self,
        _: Request<wire::SubscribeKvEventsRequest>,
    ) -> Result<Response<Self::SubscribeKvEventsStream>, Status> {
        Err(Status::unimplemented("the fake has no cache"))
    }

    async fn reset_prefix_cache(
        &self,
        _: Request<wire::ResetPrefixCacheRequest>,
    ) -> Result<Response<wire::ResetPrefixCacheReply>, Status> {
        Err(Status::unimplemented("the fake has no cache"))
    }

    async fn get_metadata(
        &self,
        _: Request<wire::GetMetadataRequest>,
    ) -> Result<Response<Self::GetMetadataStream>, Status> {
        self.seen.metadata_calls.fetch_add(1, Ordering::SeqCst);
        let gguf = metadata();
        let description = wire::WorkerDescription {
            worker: self.name.clone(),
            model: self.behaviour.model.into(),
            digest: vec![7; 32].into(),
            generation: 1,
            fingerprint: vec![self.behaviour.fingerprint].into(),
            context_tokens: CONTEXT_TOKENS,
            vocabulary: VOCABULARY,
            gguf_bytes: gguf.len() as u64,
            running_max: self.behaviour.running_max,
            queue_max: self.behaviour.queue_max,
            batch_queue_max: self.behaviour.queue_max,
            tenant_queue_max: self.behaviour.tenant_queue_max,
            kv_blocks: self.behaviour.kv_blocks,
            kv_block_tokens: 16,
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
        Err(Status::unimplemented("the fake does not drain"))
    }
}

struct Play {
    script: Arc<[u32]>,
    behaviour: Behaviour,
    runtime: Arc<Mutex<Option<Runtime>>>,
}

impl Play {
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
            sender.send(Err(Status::invalid_argument("prior output is not what was said"))).await.ok()?;
            return None;
        }
        let mut at = prior.len();
        while at < end {
            if let Some((after, misfortune)) = self.behaviour.misfortune.filter(|&(after, _)| after <= at) {
                assert!(after <= at);
                match misfortune {
                    // The frames before must have left the process: the router may not have read them yet.
                    Misfortune::Die => {
                        tokio::time::sleep(Duration::from_millis(50)).await;
                        kill(&self.runtime);
                    }
                    Misfortune::Status(code) => {
                        return sender.send(Err(Status::new(code, "misfortune"))).await.ok();
                    }
                    Misfortune::Hang => std::future::pending().await,
                    Misfortune::FallSilent => {}
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

/// What a fake says when it refuses, in seconds.
pub(crate) const RETRY_AFTER: &str = "7";
pub(crate) const CONTEXT_TOKENS: u32 = 256;
pub(crate) const VOCABULARY: u32 = 8192;

const CHAT_TEMPLATE: &str = "{% for m in messages %}[{{ m.role }}] {{ m.content }}\n{% endfor %}\
    {% if add_generation_prompt %}[assistant] {% endif %}";

/// The demo model's metadata section, and a chat template, which it has not.
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

/// Ids of a text that the model "says".
pub(crate) fn says(text: &str) -> Vec<u32> {
    tokenizer().encode(text, text::EncodeOptions::default()).unwrap()
}
