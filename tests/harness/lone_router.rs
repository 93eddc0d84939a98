// SPDX-License-Identifier: Apache-2.0

//! A router process without a supervisor beside a [`SteppedWorker`], and clients that read its
//! streams token by token.

use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};

use proto::v1::generate_frame::Frame;
use proto::v1::generate_request::Prompt;
use proto::v1::inference_client::InferenceClient;
use proto::v1::{GenerateFrame, GenerateRequest};
use serde_json::{Value, json};
use tonic::transport::Channel;

use super::stepped_worker::SteppedWorker;
use super::{eventually, executable};

const PROMPT: &str = "def item(self, name):\n    ";

/// Dropping it kills the router.
pub(crate) struct LoneRouter {
    child: Child,
    pub(crate) url: String,
    pub(crate) worker: SteppedWorker,
    directory: tempfile::TempDir,
}

impl LoneRouter {
    /// `limits` is the table of that name in the router's configuration. `runner` is the command
    /// that runs the router, and gets the runtime directory.
    pub(crate) fn start(limits: &str, runner: impl FnOnce(&Path) -> Option<Command>) -> Self {
        let directory = tempfile::Builder::new().prefix("ballast-test-").tempdir().unwrap();
        let folder = directory.path();
        let worker = SteppedWorker::start(folder);
        let config = folder.join("router-config.toml");
        let text = format!("runtime-dir = {folder:?}\nlisten = \"127.0.0.1:0\"\n[limits]\n{limits}");
        std::fs::write(&config, text).unwrap();
        let mut command = match runner(folder) {
            Some(mut runner) => {
                runner.arg(executable());
                runner
            }
            None => Command::new(executable()),
        };
        let log = folder.join("router.log");
        command.args(["router", "--config"]).arg(&config).stdin(Stdio::null()).env_remove("NOTIFY_SOCKET");
        let child = command.stderr(std::fs::File::create(&log).unwrap()).spawn().unwrap();
        let url = eventually("the router listens", || address_in(&log));
        let router = Self { child, url, worker, directory };
        eventually("the router serves the worker", || {
            let ready = router.get("/ready");
            (ready.0 == 200).then_some(())
        });
        router
    }

    pub(crate) fn pid(&self) -> u32 {
        self.child.id()
    }

    pub(crate) fn runtime_dir(&self) -> PathBuf {
        self.directory.path().to_owned()
    }

    fn get(&self, path: &str) -> (u16, String) {
        super::api::runtime().block_on(async {
            let reply = reqwest::get(format!("{}{path}", self.url)).await.unwrap();
            (reply.status().as_u16(), reply.text().await.unwrap())
        })
    }

    /// Opens a stream of server-sent events.
    pub(crate) async fn post(
        &self,
        client: &reqwest::Client,
        path: &str,
        tokens: u32,
        salt: &str,
    ) -> HttpStream {
        let mut body = json!({
            "max_tokens": tokens, "ignore_eos": true, "stream": true, "temperature": 0, "cache_salt": salt,
            "stream_options": {"include_usage": true},
        });
        let role_events = match path {
            "/v1/chat/completions" => {
                body["messages"] = json!([{"role": "user", "content": PROMPT}]);
                1
            }
            _ => {
                body["prompt"] = json!(PROMPT);
                0
            }
        };
        HttpStream::open(client, format!("{}{path}", self.url), &body, role_events).await
    }

    /// Opens a stream of the public gRPC API.
    pub(crate) async fn generate(
        &self,
        client: &mut InferenceClient<Channel>,
        tokens: u32,
        salt: &str,
    ) -> tonic::Streaming<GenerateFrame> {
        let request = GenerateRequest {
            prompt: Some(Prompt::Text(PROMPT.to_owned())),
            max_tokens: tokens,
            ignore_eos: true,
            cache_salt: salt.to_owned(),
            ..GenerateRequest::default()
        };
        client.generate(request).await.unwrap().into_inner()
    }
}

/// The URL in the router's log.
fn address_in(log: &Path) -> Option<String> {
    let text = std::fs::read_to_string(log).unwrap();
    let (_, rest) = text.split_once("address=")?;
    let url = rest.split_whitespace().next()?.trim_matches('"');
    rest.contains('\n').then(|| url.to_owned())
}

impl Drop for LoneRouter {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// A stream that one client reads.
pub(crate) enum ReadStream {
    Http(HttpStream),
    Grpc(tonic::Streaming<GenerateFrame>),
}

impl ReadStream {
    /// Waits for the next token.
    pub(crate) async fn token(&mut self) {
        match self {
            Self::Http(stream) => stream.token().await,
            Self::Grpc(frames) => loop {
                let frame = frames.message().await.unwrap().expect("the stream goes on");
                if let Some(Frame::Delta(delta)) = frame.frame {
                    assert_eq!(delta.tokens.len(), 1);
                    return;
                }
            },
        }
    }

    /// Reads what follows the last token.
    pub(crate) async fn end(&mut self) {
        match self {
            Self::Http(stream) => while stream.response.chunk().await.unwrap().is_some() {},
            Self::Grpc(frames) => while frames.message().await.unwrap().is_some() {},
        }
    }
}

/// A stream of server-sent events.
pub(crate) struct HttpStream {
    response: reqwest::Response,
    /// Events that came and that no call has waited for. Negative before the first token of a chat.
    unread: i64,
}

impl HttpStream {
    async fn open(client: &reqwest::Client, url: String, body: &Value, role_events: i64) -> Self {
        let response = client.post(url).json(body).send().await.unwrap();
        let status = response.status().as_u16();
        if status != 200 {
            panic!("{status}: {}", response.text().await.unwrap());
        }
        Self { response, unread: -role_events }
    }

    async fn token(&mut self) {
        while self.unread < 1 {
            let chunk = self.response.chunk().await.unwrap().expect("the stream goes on");
            let events = chunk.windows(7).filter(|bytes| *bytes == b"data: {").count();
            self.unread += events as i64;
        }
        self.unread -= 1;
    }
}
