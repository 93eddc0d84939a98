// SPDX-License-Identifier: Apache-2.0

//! A worker on a thread of its own instead of a process, and a client on its socket.

use std::path::{Path, PathBuf};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use proto::v1::Sampling;
use proto::worker::v1::worker_client::WorkerClient;
use proto::worker::v1::{self as wire, generate_frame, metadata_frame};
use service::{ByteSize, Notify, Shutdown};
use tonic::transport::Channel;
use tonic::{Code, Status};
use worker::{WorkerConfig, WorkerRunError};

use crate::fake_weight_server::{DemoModelFile, FakeWeightServer, MODEL};

/// Long enough for a loaded machine; the awaited events take milliseconds.
pub(crate) const TIMEOUT: Duration = Duration::from_secs(60);

pub(crate) struct WorkerFixture {
    pub(crate) client: WorkerClient<Channel>,
    pub(crate) channel: Channel,
    pub(crate) socket: PathBuf,
    pub(crate) fingerprint: bytes::Bytes,
    pub(crate) shutdown: Shutdown,
    pub(crate) thread: Option<JoinHandle<Result<(), WorkerRunError>>>,
}

pub(crate) fn config(directory: &Path, index: u32) -> WorkerConfig {
    let directory = service::RuntimeDir::at(directory);
    let (name, model) = (format!("worker-{index}"), MODEL.to_owned());
    WorkerConfig::new(
        name,
        model,
        directory.weights_socket(),
        directory.worker_socket(index),
        ByteSize::mib(16),
        2,
    )
}

pub(crate) fn spawn(config: WorkerConfig) -> (Shutdown, JoinHandle<Result<(), WorkerRunError>>) {
    let shutdown = Shutdown::default();
    let stop = shutdown.clone();
    let thread = std::thread::spawn(move || {
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
        let notify = Notify::from_env().unwrap();
        runtime.block_on(worker::serve(config, None, &notify, &stop))
    });
    (shutdown, thread)
}

impl WorkerFixture {
    pub(crate) async fn start(config: WorkerConfig) -> Self {
        let socket = config.listen.clone();
        let (shutdown, thread) = spawn(config);
        let start = Instant::now();
        let channel = loop {
            match service::grpc::connect(&socket).await {
                Ok(channel) => break channel,
                Err(error) => assert!(start.elapsed() < TIMEOUT, "{error}"),
            }
            tokio::time::sleep(Duration::from_millis(2)).await;
        };
        let client = WorkerClient::new(channel.clone());
        let fingerprint = bytes::Bytes::new();
        let mut worker = Self { client, channel, socket, fingerprint, shutdown, thread: Some(thread) };
        while worker.fingerprint.is_empty() {
            match worker.metadata().await {
                Ok((description, _)) => worker.fingerprint = description.fingerprint,
                Err(status) => assert_eq!(status.code(), Code::Unavailable, "{status}"),
            }
            if worker.has_ended() {
                panic!("the worker ended: {:?}", worker.thread.take().map(|thread| thread.join()));
            }
            assert!(start.elapsed() < TIMEOUT, "the worker did not attach");
            tokio::time::sleep(Duration::from_millis(2)).await;
        }
        worker
    }

    pub(crate) fn has_ended(&self) -> bool {
        self.thread.as_ref().is_none_or(|thread| thread.is_finished())
    }

    pub(crate) async fn metadata(&mut self) -> Result<(wire::WorkerDescription, Vec<u8>), Status> {
        let mut frames = self.client.get_metadata(wire::GetMetadataRequest {}).await?.into_inner();
        let Some(metadata_frame::Frame::Description(description)) = frames.message().await?.unwrap().frame
        else {
            panic!("the description comes first");
        };
        let mut gguf = Vec::new();
        while let Some(frame) = frames.message().await? {
            let Some(metadata_frame::Frame::Gguf(piece)) = frame.frame else { panic!("{frame:?}") };
            assert!(piece.len() <= 1 << 20);
            gguf.extend_from_slice(&piece);
        }
        Ok((description, gguf))
    }

    /// Greedy, without stop tokens.
    pub(crate) fn greedy(&self, prompt: &[u32], max_tokens: u32) -> wire::GenerateRequest {
        wire::GenerateRequest {
            fingerprint: self.fingerprint.clone(),
            tokens: prompt.to_vec(),
            prompt_tokens: prompt.len() as u32,
            max_tokens,
            sampling: Some(Sampling { temperature: Some(0.0), seed: Some(1), ..Default::default() }),
            ..Default::default()
        }
    }

    pub(crate) async fn generate(&mut self, request: wire::GenerateRequest) -> Result<Generated, Status> {
        Generated::collect(self.client.generate(request).await?.into_inner()).await
    }

    /// A separate connection with a small window: unread frames stay in the worker.
    pub(crate) async fn slow_client(&self) -> wire::worker_client::WorkerClient<tonic::transport::Channel> {
        let socket = self.socket.display();
        let endpoint = tonic::transport::Endpoint::from_shared(format!("unix://{socket}")).unwrap();
        let channel = endpoint.initial_stream_window_size(1024).connect().await.unwrap();
        wire::worker_client::WorkerClient::new(channel)
    }

    pub(crate) async fn stats(&mut self) -> wire::StatsReply {
        self.client.stats(wire::StatsRequest {}).await.unwrap().into_inner()
    }

    pub(crate) async fn until(&mut self, what: &str, holds: impl Fn(&wire::StatsReply) -> bool) {
        let start = Instant::now();
        loop {
            let stats = self.stats().await;
            if holds(&stats) {
                return;
            }
            assert!(start.elapsed() < TIMEOUT, "{what} did not come: {stats:?}");
            tokio::time::sleep(Duration::from_millis(2)).await;
        }
    }

    pub(crate) async fn stop(mut self) -> Result<(), WorkerRunError> {
        self.shutdown.request();
        let thread = self.thread.take().unwrap();
        tokio::task::spawn_blocking(move || thread.join().unwrap()).await.unwrap()
    }
}

impl Drop for WorkerFixture {
    fn drop(&mut self) {
        self.shutdown.request();
    }
}

#[derive(Debug, Default)]
pub(crate) struct Generated {
    pub(crate) tokens: Vec<u32>,
    pub(crate) logprobs: Vec<proto::v1::TokenLogprob>,
    pub(crate) finished: Option<wire::Finished>,
    pub(crate) cut: Option<Status>,
}

impl Generated {
    /// Reads a stream to its end or its abort.
    pub(crate) async fn collect(mut frames: tonic::Streaming<wire::GenerateFrame>) -> Result<Self, Status> {
        let mut generated = Self::default();
        let first = frames.message().await?.and_then(|frame| frame.frame);
        assert!(matches!(first, Some(generate_frame::Frame::Admitted(_))), "{first:?}");
        loop {
            match frames.message().await {
                Ok(Some(frame)) => match frame.frame.unwrap() {
                    generate_frame::Frame::Tokens(tokens) => {
                        generated.tokens.extend(tokens.ids);
                        generated.logprobs.extend(tokens.logprobs);
                    }
                    generate_frame::Frame::Finished(finished) => generated.finished = Some(finished),
                    generate_frame::Frame::Admitted(_) => panic!("admitted twice"),
                    generate_frame::Frame::BeamProgress(_) => panic!("no beams were asked for"),
                },
                Ok(None) => return Ok(generated),
                Err(status) => {
                    generated.cut = Some(status);
                    return Ok(generated);
                }
            }
        }
    }
}

/// A weight-server with the demo model, and a worker that has attached it.
pub(crate) async fn fleet() -> (tempfile::TempDir, FakeWeightServer, WorkerFixture) {
    fleet_with(|_| ()).await
}

pub(crate) async fn fleet_with(
    change: impl FnOnce(&mut WorkerConfig),
) -> (tempfile::TempDir, FakeWeightServer, WorkerFixture) {
    let directory = tempfile::tempdir().unwrap();
    let mut weight_server = FakeWeightServer::new(directory.path(), &DemoModelFile::demo());
    weight_server.start();
    let mut config = config(directory.path(), 0);
    change(&mut config);
    let worker = WorkerFixture::start(config).await;
    (directory, weight_server, worker)
}
