// SPDX-License-Identifier: Apache-2.0

//! I6: a stream is complete or ends with an error. Workers die, drain, hang or fail in mid-stream.

use std::time::{Duration, Instant};

use serde_json::json;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::TcpSocket;
use tonic::Code;

use crate::fake_worker::{FakeBehaviour, Fault, token_ids_of};
use crate::harness::{RouterHarness, TIMEOUT, finish_reason, joined_text, parse_events};

const TEXT: &str = "one two three — four five 🙂 six seven eight nine ten";

fn request() -> serde_json::Value {
    json!({"prompt": [1, 2, 3], "max_tokens": 200, "seed": 5, "logprobs": 0, "stream_options": {"include_usage": true}})
}

fn faulty(after: usize, fault: Fault) -> FakeBehaviour {
    FakeBehaviour { fault: Some((after, fault)), frame_tokens: 2, ..FakeBehaviour::default() }
}

/// A stream starts on a worker that meets `fault` after `after` tokens and is resumed by a healthy
/// one.
async fn check_resume_after(fault: Fault, after: usize) {
    let script = token_ids_of(TEXT);
    let mut fleet = RouterHarness::start(&script, &[faulty(after, fault)]).await;
    fleet.add_worker(1, &script, FakeBehaviour::default()).await;
    fleet.wait_for_workers(2).await;
    // Both workers are idle, so the router chooses the one that it registered first.
    let (events, done) = fleet.events("/v1/completions", request()).await;
    assert!(done, "{fault:?} after {after}: {events:?}");
    assert_eq!(joined_text(&events, 0), TEXT, "{fault:?} after {after}");
    assert_eq!(finish_reason(&events, 0).as_deref(), Some("stop"));
    assert_eq!(events.last().unwrap()["usage"]["completion_tokens"], script.len());
    let logprobs: Vec<f64> = events
        .iter()
        .flat_map(|e| e["choices"][0]["logprobs"]["token_logprobs"].as_array().cloned().unwrap_or_default())
        .map(|l| l.as_f64().unwrap())
        .collect();
    assert_eq!(logprobs, (0..script.len()).map(|i| -(i as f64)).collect::<Vec<_>>());
    let [first, second] = [&fleet.workers[0].calls()[0], &fleet.workers[1].calls()[0]];
    let sent = second.tokens.len() - 3;
    assert!(sent >= after, "the resumed request has {sent} output tokens");
    assert_eq!(second.tokens, [&[1, 2, 3], &script[..sent]].concat());
    assert_eq!(second.sampling, first.sampling, "the same seed");
    assert_eq!((second.prompt_tokens, second.max_tokens, second.choice), (3, 200, 0));
    let state: &[u8] = if sent == 0 { &[] } else { &[sent as u8] };
    assert_eq!(&second.sampler_state[..], state);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_stream_survives_the_death_of_its_worker() {
    for after in [0, 1, 7] {
        check_resume_after(Fault::Die, after).await;
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_stream_of_a_draining_worker_is_resumed() {
    check_resume_after(Fault::Status(Code::Unavailable), 4).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_stream_that_ends_without_a_status_is_resumed() {
    check_resume_after(Fault::EndStream, 4).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_stream_waits_for_a_restarted_worker() {
    let script = token_ids_of(TEXT);
    let mut fleet = RouterHarness::start(&script, &[faulty(5, Fault::Die)]).await;
    let events = {
        let answer = fleet.events("/v1/completions", request());
        let mut answer = std::pin::pin!(answer);
        tokio::select! {
            early = &mut answer => panic!("the stream ended without a worker: {early:?}"),
            () = tokio::time::sleep(Duration::from_millis(400)) => {}
        }
        // A supervisor restarts a worker at the same socket path.
        let (path, script) = (fleet.directory.path().to_owned(), script.clone());
        let start = move || crate::fake_worker::FakeWorker::start(&path, 0, script, FakeBehaviour::default());
        let _restarted = tokio::task::spawn_blocking(start).await.unwrap();
        answer.await
    };
    assert!(events.1, "{:?}", events.0);
    assert_eq!(joined_text(&events.0, 0), TEXT);
    fleet.workers.clear();
}

/// A stream whose worker dies is not resumed on `other` and ends with an error.
async fn check_not_resumed_on(other: FakeBehaviour) {
    let mut fleet = RouterHarness::start(&token_ids_of(TEXT), &[faulty(3, Fault::Hang)]).await;
    let mut streamed = request();
    streamed["stream"] = json!(true);
    let response = fleet.post("/v1/completions", streamed).await;
    fleet.add_worker(1, &token_ids_of("something else"), other).await;
    fleet.wait_for_workers(2).await;
    fleet.workers[0].kill();
    let (events, done) = parse_events(&response.text().await.unwrap());
    assert!(!done, "{events:?}");
    assert_eq!(events.last().unwrap()["error"]["code"], "worker_lost");
    assert!(fleet.workers[1].calls().is_empty());
}

#[tokio::test(flavor = "multi_thread")]
async fn a_worker_with_another_fingerprint_never_resumes_a_stream() {
    check_not_resumed_on(FakeBehaviour { fingerprint: 2, ..FakeBehaviour::default() }).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_worker_of_another_model_name_never_resumes_a_stream() {
    check_not_resumed_on(FakeBehaviour { model: "renamed", ..FakeBehaviour::default() }).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn when_all_workers_die_the_stream_ends_with_an_explicit_error() {
    let script = token_ids_of(TEXT);
    let fleet = RouterHarness::start(&script, &[faulty(4, Fault::Die)]).await;
    let (events, done) = fleet.events("/v1/completions", request()).await;
    assert!(!done, "no [DONE] after an error");
    let errors: Vec<_> = events.iter().filter(|event| event.get("error").is_some()).collect();
    assert_eq!(errors.len(), 1, "the stream has exactly one error: {events:?}");
    assert_eq!(errors[0], events.last().unwrap(), "the error is the last event");
    assert_eq!(errors[0]["error"]["type"], "server_error", "{events:?}");
    assert_eq!(errors[0]["error"]["code"], "worker_lost", "{events:?}");
    let text = joined_text(&events, 0);
    assert!(!text.is_empty() && text.len() < TEXT.len(), "{text:?} is a part of the output");
    assert!(TEXT.starts_with(&text), "{text:?} is not the beginning of the output");
    assert_eq!(finish_reason(&events, 0), None);
    assert!(events.iter().all(|event| event["usage"].is_null()), "a failed stream has no usage");
    fleet.wait_for_workers(0).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_request_that_kills_its_workers_is_not_resumed_again() {
    let script = token_ids_of(TEXT);
    let deadly = || faulty(4, Fault::Die);
    let fleet = RouterHarness::start(&script, &[deadly(), deadly(), deadly(), deadly()]).await;
    let (events, done) = fleet.events("/v1/completions", request()).await;
    assert!(!done);
    assert!(
        events.last().unwrap()["error"]["message"].as_str().unwrap().contains("not resumed again"),
        "{events:?}"
    );
    assert!(fleet.worker_count().await >= 1, "the request killed at most three workers");
}

#[tokio::test(flavor = "multi_thread")]
async fn an_error_of_a_worker_is_reported_and_not_retried() {
    let script = token_ids_of(TEXT);
    let fails = || faulty(4, Fault::Status(Code::Internal));
    let fleet = RouterHarness::start(&script, &[fails(), fails()]).await;
    let (status, error) = fleet.post_json("/v1/completions", json!({"prompt": [1], "max_tokens": 99})).await;
    assert_eq!((status, &error["error"]["code"]), (502, &json!("worker_failed")), "{error}");
    assert_eq!(fleet.workers.iter().map(|worker| worker.calls().len()).sum::<usize>(), 1);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_stream_of_a_hanging_worker_ends_at_the_deadline() {
    let script = token_ids_of(TEXT);
    let fleet = RouterHarness::with_config(&script, &[faulty(2, Fault::Hang)], |config| {
        config.limits.request_timeout = Duration::from_secs(3);
    })
    .await;
    let (events, done) = fleet.events("/v1/completions", request()).await;
    assert!(!done);
    assert_eq!(events.last().unwrap()["error"]["code"], "deadline_exceeded");
    crate::completions::wait_for_streams_to_end(&fleet).await;
}

/// The number of frames that the worker has sent, once it has not changed for two seconds.
async fn settled_frame_count(fleet: &RouterHarness) -> usize {
    let start = Instant::now();
    let (mut count, mut since) = (0, Instant::now());
    while since.elapsed() < Duration::from_secs(2) {
        assert!(start.elapsed() < TIMEOUT, "the worker still sends: {count} frames");
        tokio::time::sleep(Duration::from_millis(20)).await;
        let sent = fleet.workers[0].sent_frames();
        if sent != count {
            (count, since) = (sent, Instant::now());
        }
    }
    count
}

#[tokio::test(flavor = "multi_thread")]
async fn a_client_that_does_not_read_holds_the_worker_back_and_gets_everything_later() {
    // The buffers between worker and client hold at most half of these frames: 64 KiB of HTTP/2
    // window, 128 deltas in the router, and up to 4 MiB of TCP send buffer. With 20 log
    // probabilities, a frame has about 150 bytes and an event about 700.
    const TOKENS: usize = 14_000;
    const RECEIVE_BUFFER_BYTES: u32 = 64 << 10;
    let word = token_ids_of(" word");
    let script: Vec<u32> = word.iter().copied().cycle().take(TOKENS).collect();
    let worker = FakeBehaviour { context_tokens: 2 * TOKENS as u32, ..FakeBehaviour::default() };
    let fleet = RouterHarness::start(&script, &[worker]).await;
    let request = json!({
        "prompt": [1], "max_tokens": TOKENS, "logprobs": 20, "stream": true,
        "stream_options": {"include_usage": true},
    });
    let socket = TcpSocket::new_v4().unwrap();
    socket.set_recv_buffer_size(RECEIVE_BUFFER_BYTES).unwrap();
    let address = fleet.url.strip_prefix("http://").unwrap().parse().unwrap();
    let mut client = socket.connect(address).await.unwrap();
    let body = request.to_string();
    // HTTP/1.0: the body is not chunked, and ends with the connection.
    let head = "POST /v1/completions HTTP/1.0\r\ncontent-type: application/json\r\n";
    let request = format!("{head}content-length: {}\r\n\r\n{body}", body.len());
    client.write_all(request.as_bytes()).await.unwrap();
    let sent = settled_frame_count(&fleet).await;
    assert!(sent > 0 && sent < TOKENS * 3 / 4, "the worker sent {sent} of {TOKENS} frames unread");

    let mut response = String::new();
    client.read_to_string(&mut response).await.unwrap();
    let (head, body) = response.split_once("\r\n\r\n").unwrap();
    assert!(head.starts_with("HTTP/1.0 200"), "{head}");
    let (events, done) = parse_events(body);
    assert!(done);
    assert_eq!(fleet.workers[0].sent_frames(), TOKENS);
    assert_eq!(fleet.workers[0].calls().len(), 1, "unread frames did not end the worker's connection");
    let usage = events.last().unwrap()["usage"].clone();
    assert_eq!(usage["completion_tokens"], TOKENS, "{usage}");
    let text = joined_text(&events, 0);
    assert_eq!(text, " word".repeat(TOKENS / word.len()));
    assert_eq!(finish_reason(&events, 0).as_deref(), Some("length"));
}

#[tokio::test(flavor = "multi_thread")]
async fn a_stopping_router_finishes_its_streams() {
    let script = token_ids_of(TEXT);
    let slow = FakeBehaviour { pause: Duration::from_millis(20), ..FakeBehaviour::default() };
    let mut fleet = RouterHarness::start(&script, &[slow]).await;
    let mut request = request();
    request["stream"] = json!(true);
    let response = fleet.post("/v1/completions", request).await;
    fleet.request_stop();
    let (events, done) = parse_events(&response.text().await.unwrap());
    assert!(done);
    assert_eq!(joined_text(&events, 0), TEXT);
    fleet.wait_stopped().await.unwrap();
    assert!(
        reqwest::get(format!("{}/health", fleet.url)).await.is_err(),
        "the router has closed its listening socket"
    );
    assert!(!service::RuntimeDir::at(fleet.directory.path()).router_socket().exists());
}
