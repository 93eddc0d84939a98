// SPDX-License-Identifier: Apache-2.0

//! Startup, the death of the weight-server, drain and stop.

use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use proto::worker::v1 as wire;
use service::{Exit, HasExit};
use tonic::Code;
use tonic_health::pb::{HealthCheckRequest, health_client::HealthClient};

use crate::fake_weight_server::{DemoModelFile, FakeWeightServer, MODEL};
use crate::harness::{Generated, TIMEOUT, WorkerFixture, config, fleet, spawn};

const SERVING: i32 = 1;
const NOT_SERVING: i32 = 2;

async fn health(worker: &WorkerFixture) -> i32 {
    let request = HealthCheckRequest { service: "ballast.worker.v1.Worker".into() };
    HealthClient::new(worker.channel.clone()).check(request).await.unwrap().into_inner().status
}

#[tokio::test(flavor = "multi_thread")]
async fn a_worker_describes_what_it_serves() {
    let (_directory, _weight_server, mut worker) = fleet().await;
    let (description, gguf) = worker.metadata().await.unwrap();
    let file = DemoModelFile::demo();
    assert_eq!((description.worker.as_str(), description.model.as_str()), ("worker-0", MODEL));
    assert_eq!(gguf, file.header.metadata().bytes()[..]);
    assert_eq!(description.digest, vec![9; 32]);
    assert_eq!(u64::from(description.vocabulary), file.header.tensor("token_embd.weight").unwrap().dims[1]);
    let weights: u64 = file.header.tensors().iter().map(|tensor| tensor.bytes).sum();
    assert_eq!(description.weight_bytes, weights);
    let queues = (description.queue_max, description.batch_queue_max, description.tenant_queue_max);
    assert_eq!((description.running_max, queues), (80, (256, 224, 192)));
    assert!(String::from_utf8(description.fingerprint.to_vec()).unwrap().starts_with("ballast-1 model=0909"));
    let stats = worker.stats().await;
    assert!(
        stats.attach_ms > 0.0 && stats.attach_ms < 500.0,
        "the attach took more than ten times its goal: {stats:?}"
    );
    assert!(stats.private_bytes > 0 && stats.kv_total_tokens > 512, "{stats:?}");
    assert_eq!(health(&worker).await, SERVING);
}

#[tokio::test(flavor = "multi_thread")]
async fn startup_stages_add_up_to_ready_ms_and_the_first_step_adds_a_stage() {
    let (_directory, _weight_server, mut worker) = fleet().await;
    let ready = ["exec", "sockets", "wait", "import", "model", "kv"];
    let stats = worker.stats().await;
    let names = |stats: &wire::StatsReply| -> Vec<String> {
        stats.startup_stages.iter().map(|stage| stage.name.clone()).collect()
    };
    assert_eq!(names(&stats), ready);
    let sum: f64 = stats.startup_stages.iter().map(|stage| stage.ms).sum();
    assert!(sum > 0.0 && (sum - stats.ready_ms).abs() < 0.01, "{stats:?}");
    worker.generate(worker.greedy(&[1, 2, 3], 2)).await.unwrap();
    let after = worker.stats().await;
    assert_eq!(after.ready_ms, stats.ready_ms);
    // Only a GPU has the stages of modules and graphs.
    assert_eq!(names(&after), [&ready[..], &["first_step"]].concat());
}

#[tokio::test(flavor = "multi_thread")]
async fn a_worker_binds_its_socket_before_its_weights_are_there() {
    let directory = tempfile::tempdir().unwrap();
    let config = config(directory.path(), 0);
    let socket = config.listen.clone();
    let mut weight_server = FakeWeightServer::new(directory.path(), &DemoModelFile::demo());
    let late = async {
        let start = Instant::now();
        let channel = loop {
            match service::grpc::connect(&socket).await {
                Ok(channel) => break channel,
                Err(error) => assert!(start.elapsed() < TIMEOUT, "{error}"),
            }
        };
        let mut client = wire::worker_client::WorkerClient::new(channel.clone());
        let status = client.get_metadata(wire::GetMetadataRequest {}).await.unwrap_err();
        assert_eq!(status.code(), Code::Unavailable);
        let request = HealthCheckRequest { service: "ballast.worker.v1.Worker".into() };
        let health = HealthClient::new(channel).check(request).await.unwrap().into_inner().status;
        assert_eq!(health, NOT_SERVING);
        weight_server.start();
    };
    let (mut worker, ()) = tokio::join!(WorkerFixture::start(config), late);
    assert_eq!(worker.generate(worker.greedy(&[1], 2)).await.unwrap().tokens.len(), 2);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_worker_keeps_serving_without_its_weight_server_and_reclaims_its_lease() {
    let (_directory, mut weight_server, mut worker) = fleet().await;
    let before = worker.generate(worker.greedy(&[1, 2, 3], 30)).await.unwrap().tokens;
    weight_server.kill();
    let orphaned = worker.generate(worker.greedy(&[1, 2, 3], 30)).await.unwrap().tokens;
    assert_eq!(orphaned, before);
    weight_server.start();
    let start = Instant::now();
    while weight_server.reclaimed.load(Ordering::SeqCst) == 0 {
        assert!(start.elapsed() < TIMEOUT, "the worker did not reclaim its lease");
        tokio::time::sleep(Duration::from_millis(10)).await;
    }
    assert_eq!(weight_server.attached.load(Ordering::SeqCst), 1, "the weights were attached once");
    assert_eq!(worker.generate(worker.greedy(&[1, 2, 3], 30)).await.unwrap().tokens, before);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_drain_waits_for_streams_and_refuses_requests() {
    let (_directory, _weight_server, mut worker) = fleet().await;
    let request = worker.greedy(&[1, 2], 200);
    let mut frames = worker.client.generate(request.clone()).await.unwrap().into_inner();
    frames.message().await.unwrap();
    let mut drainer = worker.client.clone();
    let drain = tokio::spawn(async move { drainer.drain(wire::DrainRequest { grace_ms: 60_000 }).await });
    worker.until("draining", |stats| stats.draining).await;
    assert_eq!(health(&worker).await, NOT_SERVING);
    assert_eq!(worker.client.generate(request).await.unwrap_err().code(), Code::Unavailable);
    let mut count = 0;
    while frames.message().await.unwrap().is_some() {
        count += 1;
    }
    assert_eq!(count, 201, "all tokens and the end of the stream");
    assert_eq!(drain.await.unwrap().unwrap().into_inner().streams_cut, 0);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_stream_aborted_by_a_drain_can_be_resumed_on_another_worker() {
    let (directory, _weight_server, mut first) = fleet().await;
    let mut second = WorkerFixture::start(config(directory.path(), 1)).await;
    assert_eq!(first.fingerprint, second.fingerprint);
    let mut request = first.greedy(&[7, 8, 9], 400);
    request.sampling.as_mut().unwrap().temperature = Some(0.7);
    let whole = second.generate(request.clone()).await.unwrap().tokens;
    // The client does not read, so the stream is paused and still runs when the drain begins.
    let mut lagging = first.slow_client().await;
    let frames = lagging.generate(request.clone()).await.unwrap().into_inner();
    first.until("a running stream", |stats| stats.running == 1).await;
    let drained = first.client.drain(wire::DrainRequest { grace_ms: 0 }).await.unwrap().into_inner();
    assert_eq!(drained.streams_cut, 1);
    let cut = Generated::collect(frames).await.unwrap();
    assert_eq!(cut.cut.unwrap().code(), Code::Unavailable);
    assert!(cut.tokens.len() < whole.len());
    request.tokens.extend_from_slice(&cut.tokens);
    let rest = second.generate(request).await.unwrap().tokens;
    assert_eq!([cut.tokens, rest].concat(), whole);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_stopping_worker_finishes_its_streams_and_removes_its_socket() {
    let (directory, _weight_server, mut worker) = fleet().await;
    let mut frames = worker.client.generate(worker.greedy(&[1, 2], 100)).await.unwrap().into_inner();
    frames.message().await.unwrap();
    // An open health watch must not keep the worker running.
    let request = HealthCheckRequest { service: "ballast.worker.v1.Worker".into() };
    let mut watch = HealthClient::new(worker.channel.clone()).watch(request).await.unwrap().into_inner();
    let start = Instant::now();
    let stop = tokio::spawn(worker.stop());
    let mut count = 0;
    while frames.message().await.unwrap().is_some() {
        count += 1;
    }
    assert_eq!(count, 101);
    let mut states = Vec::new();
    while let Ok(Some(state)) = watch.message().await {
        states.push(state.status);
    }
    assert_eq!(states, [SERVING, NOT_SERVING], "then the watch ends");
    stop.await.unwrap().unwrap();
    assert!(start.elapsed() < Duration::from_secs(8), "the worker did not wait for the drain's deadline");
    assert!(!directory.path().join("worker-0.sock").exists());
}

#[tokio::test(flavor = "multi_thread")]
async fn a_kv_budget_that_is_too_small_is_reported() {
    let directory = tempfile::tempdir().unwrap();
    let mut weight_server = FakeWeightServer::new(directory.path(), &DemoModelFile::demo());
    weight_server.start();
    let mut small = config(directory.path(), 0);
    small.kv_bytes = service::ByteSize(100);
    let (_shutdown, thread) = spawn(small);
    let error = tokio::task::spawn_blocking(move || thread.join().unwrap()).await.unwrap().unwrap_err();
    assert_eq!(error.exit(), Exit::Usage);
    let line = service::exit::one_line(&error);
    assert!(line.contains("the KV budget is 100 bytes"), "{line}");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_worker_that_waits_for_weights_stops_promptly() {
    let directory = tempfile::tempdir().unwrap();
    let (shutdown, thread) = spawn(config(directory.path(), 0));
    tokio::time::sleep(Duration::from_millis(50)).await;
    let start = Instant::now();
    shutdown.request();
    tokio::task::spawn_blocking(move || thread.join().unwrap()).await.unwrap().unwrap();
    assert!(start.elapsed() < Duration::from_secs(5));
}
