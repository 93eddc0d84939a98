//! I6, whole or error: workers that die, drain, hang or fail in the middle of a stream.

use std::time::Duration;

use serde_json::json;
use tonic::Code;

use crate::fake_worker::{Behaviour, Misfortune, says};
use crate::harness::{Harness, finish_reason, joined};

const TEXT: &str = "one two three — four five 🙂 six seven eight nine ten";

fn request() -> serde_json::Value {
    json!({"prompt": [1, 2, 3], "max_tokens": 200, "seed": 5, "logprobs": 0, "stream_options": {"include_usage": true}})
}

fn unlucky(after: usize, misfortune: Misfortune) -> Behaviour {
    Behaviour { misfortune: Some((after, misfortune)), frame_tokens: 2, ..Behaviour::default() }
}

/// One worker meets `misfortune` after `after` tokens, the other is healthy. Which one is asked first is arranged.
async fn resumed_after(misfortune: Misfortune, after: usize) {
    let script = says(TEXT);
    let mut fleet = Harness::start(&script, &[unlucky(after, misfortune)]).await;
    fleet.add_worker(1, &script, Behaviour::default()).await;
    fleet.until_workers(2).await;
    // Both are idle: the one that joined first is picked first.
    let (events, done) = fleet.events("/v1/completions", request()).await;
    assert!(done, "{misfortune:?} after {after}: {events:?}");
    assert_eq!(joined(&events, 0), TEXT, "{misfortune:?} after {after}");
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
    assert!(sent >= after, "{sent} tokens had been sent");
    assert_eq!(second.tokens, [&[1, 2, 3], &script[..sent]].concat());
    assert_eq!(second.sampling, first.sampling, "the same seed");
    assert_eq!((second.prompt_tokens, second.max_tokens, second.choice), (3, 200, 0));
    let state: &[u8] = if sent == 0 { &[] } else { &[sent as u8] };
    assert_eq!(&second.sampler_state[..], state);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_stream_survives_the_death_of_its_worker() {
    for after in [0, 1, 7] {
        resumed_after(Misfortune::Die, after).await;
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_stream_moves_away_from_a_draining_worker() {
    resumed_after(Misfortune::Status(Code::Unavailable), 4).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_stream_that_ends_without_a_word_is_resumed() {
    resumed_after(Misfortune::FallSilent, 4).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_stream_waits_for_a_restarted_worker() {
    let script = says(TEXT);
    let mut fleet = Harness::start(&script, &[unlucky(5, Misfortune::Die)]).await;
    let events = {
        let answer = fleet.events("/v1/completions", request());
        let mut answer = std::pin::pin!(answer);
        tokio::select! {
            early = &mut answer => panic!("ended without a worker: {early:?}"),
            () = tokio::time::sleep(Duration::from_millis(400)) => {}
        }
        // The same socket path, as a supervisor restarts it.
        let (path, script) = (fleet.directory.path().to_owned(), script.clone());
        let start = move || crate::fake_worker::FakeWorker::start(&path, 0, script, Behaviour::default());
        let _restarted = tokio::task::spawn_blocking(start).await.unwrap();
        answer.await
    };
    assert!(events.1, "{:?}", events.0);
    assert_eq!(joined(&events.0, 0), TEXT);
    fleet.workers.clear();
}

/// A stream that loses its worker while only `other` is there ends with an error.
async fn not_resumed_by(other: Behaviour) {
    let mut fleet = Harness::start(&says(TEXT), &[unlucky(3, Misfortune::Hang)]).await;
    let mut streamed = request();
    streamed["stream"] = json!(true);
    let response = fleet.post("/v1/completions", streamed).await;
    fleet.add_worker(1, &says("something else"), other).await;
    fleet.until_workers(2).await;
    fleet.workers[0].kill();
    let (events, done) = crate::harness::events_of(&response.text().await.unwrap());
    assert!(!done, "{events:?}");
    assert_eq!(events.last().unwrap()["error"]["code"], "worker_lost");
    assert!(fleet.workers[1].calls().is_empty());
}

#[tokio::test(flavor = "multi_thread")]
async fn a_worker_with_another_fingerprint_never_takes_over() {
    not_resumed_by(Behaviour { fingerprint: 2, ..Behaviour::default() }).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_worker_of_another_name_never_takes_over() {
    not_resumed_by(Behaviour { model: "twin", ..Behaviour::default() }).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn when_all_workers_die_the_stream_ends_with_an_explicit_error() {
    let script = says(TEXT);
    let fleet = Harness::start(&script, &[unlucky(3, Misfortune::Die)]).await;
    let (events, done) = fleet.events("/v1/completions", request()).await;
    assert!(!done, "no [DONE] after an error");
    let error = &events.last().unwrap()["error"];
    assert_eq!(
        (&error["type"], &error["code"]),
        (&json!("server_error"), &json!("worker_lost")),
        "{events:?}"
    );
    assert!(TEXT.starts_with(&joined(&events, 0)), "what was sent is a beginning of the right text");
    assert_eq!(finish_reason(&events, 0), None);
    fleet.until_workers(0).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_request_that_kills_its_workers_is_given_up() {
    let script = says(TEXT);
    let deadly = || unlucky(4, Misfortune::Die);
    let fleet = Harness::start(&script, &[deadly(), deadly(), deadly(), deadly()]).await;
    let (events, done) = fleet.events("/v1/completions", request()).await;
    assert!(!done);
    assert!(
        events.last().unwrap()["error"]["message"].as_str().unwrap().contains("not resumed again"),
        "{events:?}"
    );
    assert!(fleet.serving().await >= 2, "two workers at most died of it");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_workers_verdict_is_passed_on_and_not_tried_elsewhere() {
    let script = says(TEXT);
    let fails = || unlucky(4, Misfortune::Status(Code::Internal));
    let fleet = Harness::start(&script, &[fails(), fails()]).await;
    let (status, error) = fleet.post_json("/v1/completions", json!({"prompt": [1], "max_tokens": 99})).await;
    assert_eq!((status, &error["error"]["code"]), (502, &json!("worker_failed")), "{error}");
    assert_eq!(fleet.workers.iter().map(|worker| worker.calls().len()).sum::<usize>(), 1);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_hanging_worker_cannot_outlive_the_deadline() {
    let script = says(TEXT);
    let fleet = Harness::with_config(&script, &[unlucky(2, Misfortune::Hang)], |config| {
        config.request_timeout = Duration::from_secs(3);
    })
    .await;
    let (events, done) = fleet.events("/v1/completions", request()).await;
    assert!(!done);
    assert_eq!(events.last().unwrap()["error"]["code"], "deadline_exceeded");
    crate::completions::until_streams_end(&fleet).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_client_that_does_not_read_holds_the_worker_back_and_gets_everything_later() {
    // More than the sockets' buffers and the router's queue hold.
    let text = "word ".repeat(20_000);
    let script = says(&text);
    let fleet = Harness::start(&script, &[Behaviour { frame_tokens: 1, ..Behaviour::default() }]).await;
    let request = json!({"prompt": [1], "max_tokens": 255, "stream": true, "n": 8});
    let response = fleet.post("/v1/completions", request).await;
    assert_eq!(response.status(), 200);
    tokio::time::sleep(Duration::from_millis(300)).await;
    let (events, done) = crate::harness::events_of(&response.text().await.unwrap());
    assert!(done);
    for choice in 0..8 {
        assert!(text.starts_with(&joined(&events, choice)));
        assert_eq!(finish_reason(&events, choice).as_deref(), Some("length"));
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_stopping_router_finishes_its_streams() {
    let script = says(TEXT);
    let slow = Behaviour { pause: Duration::from_millis(20), ..Behaviour::default() };
    let mut fleet = Harness::start(&script, &[slow]).await;
    let mut request = request();
    request["stream"] = json!(true);
    let response = fleet.post("/v1/completions", request).await;
    fleet.request_stop();
    let (events, done) = crate::harness::events_of(&response.text().await.unwrap());
    assert!(done);
    assert_eq!(joined(&events, 0), TEXT);
    fleet.stopped().await.unwrap();
    assert!(reqwest::get(format!("{}/health", fleet.url)).await.is_err(), "nobody listens any more");
    assert!(!service::RuntimeDir::at(fleet.directory.path()).router_socket().exists());
}
