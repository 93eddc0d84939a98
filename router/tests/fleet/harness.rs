// SPDX-License-Identifier: Apache-2.0

//! Test harness: a router in this process on a port of its own, and a runtime directory with fake
//! workers.

use std::sync::OnceLock;
use std::time::{Duration, Instant};

use proto::v1::inference_client::InferenceClient;
use router::{Router, RouterConfig};
use serde_json::{Value, json};
use service::Shutdown;
use service::metrics::Metrics;
use tempfile::TempDir;
use tokio::task::JoinHandle;
use tonic::transport::Channel;

use crate::fake_worker::{FakeBehaviour, FakeWorker};

/// Events in these tests take milliseconds. The timeout allows for a loaded machine.
pub(crate) const TIMEOUT: Duration = Duration::from_secs(60);

/// Short, for the tests that wait for its end. The others do not need it.
pub(crate) const WORKER_WAIT: Duration = Duration::from_secs(1);

pub(crate) struct RouterHarness {
    pub(crate) directory: TempDir,
    pub(crate) url: String,
    pub(crate) client: reqwest::Client,
    pub(crate) workers: Vec<FakeWorker>,
    shutdown: Shutdown,
    router: Option<JoinHandle<Result<(), router::RouterError>>>,
}

/// The metrics recorder, which a process can install only once.
pub(crate) fn metrics() -> Metrics {
    static METRICS: OnceLock<Metrics> = OnceLock::new();
    METRICS.get_or_init(|| Metrics::install().unwrap()).clone()
}

impl RouterHarness {
    pub(crate) async fn start(script: &[u32], behaviours: &[FakeBehaviour]) -> Self {
        Self::with_config(script, behaviours, |_| ()).await
    }

    pub(crate) async fn with_config(
        script: &[u32],
        behaviours: &[FakeBehaviour],
        change: impl FnOnce(&mut RouterConfig),
    ) -> Self {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().to_owned();
        let (script, behaviours) = (script.to_vec(), behaviours.to_vec());
        let count = behaviours.len();
        // A fake worker blocks on its own runtime while it starts.
        let workers = tokio::task::spawn_blocking(move || {
            let starts = (0..).zip(behaviours);
            starts.map(|(index, b)| FakeWorker::start(&path, index, script.clone(), b)).collect()
        });
        let workers: Vec<FakeWorker> = workers.await.unwrap();
        let mut config = RouterConfig::new(Some(([127, 0, 0, 1], 0).into()), directory.path().to_owned());
        config.limits.drain = Duration::from_secs(20);
        config.limits.worker_wait = WORKER_WAIT;
        change(&mut config);
        let router = Router::bind(config, None, metrics()).await.unwrap();
        let url = format!("http://{}", router.address().unwrap());
        let shutdown = Shutdown::default();
        let stop = shutdown.clone();
        let router = Some(tokio::spawn(async move { router.serve(&stop).await }));
        let client = reqwest::Client::builder().no_proxy().build().unwrap();
        let harness = Self { directory, url, client, workers, shutdown, router };
        harness.wait_for_workers(count).await;
        harness
    }

    pub(crate) async fn add_worker(&mut self, index: u32, script: &[u32], behaviour: FakeBehaviour) {
        let (path, script) = (self.directory.path().to_owned(), script.to_vec());
        let start = move || FakeWorker::start(&path, index, script, behaviour);
        self.workers.push(tokio::task::spawn_blocking(start).await.unwrap());
    }

    pub(crate) async fn wait_for_workers(&self, count: usize) {
        let start = Instant::now();
        while self.worker_count().await != count {
            assert!(
                start.elapsed() < TIMEOUT,
                "expected {count} workers, found {}",
                self.worker_count().await
            );
            tokio::time::sleep(Duration::from_millis(10)).await;
        }
    }

    pub(crate) async fn worker_count(&self) -> usize {
        let ready: Value = self.get("/ready").await.1;
        ready["workers"].as_u64().unwrap_or(0) as usize
    }

    pub(crate) async fn get(&self, path: &str) -> (u16, Value) {
        let response = self.client.get(format!("{}{path}", self.url)).send().await.unwrap();
        let status = response.status().as_u16();
        (status, response.json().await.unwrap())
    }

    pub(crate) async fn post(&self, path: &str, body: Value) -> reqwest::Response {
        self.client.post(format!("{}{path}", self.url)).json(&body).send().await.unwrap()
    }

    pub(crate) async fn post_json(&self, path: &str, body: Value) -> (u16, Value) {
        let response = self.post(path, body).await;
        let status = response.status().as_u16();
        (status, response.json().await.unwrap())
    }

    /// The JSON events of a streamed response, and whether `[DONE]` ended it.
    pub(crate) async fn events(&self, path: &str, mut body: Value) -> (Vec<Value>, bool) {
        body["stream"] = json!(true);
        let response = self.post(path, body).await;
        assert_eq!(response.status(), 200);
        assert_eq!(response.headers()["content-type"], "text/event-stream; charset=utf-8");
        parse_events(&response.text().await.unwrap())
    }

    pub(crate) async fn grpc(&self) -> InferenceClient<Channel> {
        InferenceClient::connect(self.url.clone()).await.unwrap()
    }

    pub(crate) async fn grpc_on_socket(&self) -> InferenceClient<Channel> {
        let path = service::RuntimeDir::at(self.directory.path()).router_socket();
        InferenceClient::new(service::grpc::connect(&path).await.unwrap())
    }

    pub(crate) fn request_stop(&self) {
        self.shutdown.request();
    }

    pub(crate) async fn wait_stopped(&mut self) -> Result<(), router::RouterError> {
        self.router.take().unwrap().await.unwrap()
    }
}

impl Drop for RouterHarness {
    fn drop(&mut self) {
        self.shutdown.request();
    }
}

pub(crate) fn parse_events(text: &str) -> (Vec<Value>, bool) {
    let mut events = Vec::new();
    let mut done = false;
    for block in text.split_terminator("\n\n") {
        let Some(data) = block.strip_prefix("data: ") else {
            assert!(block.starts_with(':'), "{block}");
            continue;
        };
        assert!(!done, "an event after [DONE]: {data}");
        match data {
            "[DONE]" => done = true,
            json => events.push(serde_json::from_str(json).unwrap()),
        }
    }
    (events, done)
}

/// The whole text of one choice of a streamed response.
pub(crate) fn joined_text(events: &[Value], choice: u64) -> String {
    let entries = events.iter().flat_map(|event| event["choices"].as_array().into_iter().flatten());
    entries
        .filter(|entry| entry["index"] == choice)
        .filter_map(|entry| entry["text"].as_str().or(entry["delta"]["content"].as_str()))
        .collect()
}

/// The finish reason of one choice of a streamed response.
pub(crate) fn finish_reason(events: &[Value], choice: u64) -> Option<String> {
    let entries = events.iter().flat_map(|event| event["choices"].as_array().into_iter().flatten());
    let mut reasons = entries
        .filter(|e| e["index"] == choice)
        .filter_map(|e| e["finish_reason"].as_str().map(str::to_owned));
    let reason = reasons.next();
    assert_eq!(reasons.next(), None, "a choice has one finish reason");
    reason
}
