// SPDX-License-Identifier: Apache-2.0

//! Admission control of a real fleet: overload, tenants and deadlines.
//!
//! The fleet has one worker that runs two sequences and queues a third. The tests do not depend on
//! its speed: a request of 16 long choices occupies the whole capacity until the test drops it.

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

use reqwest::{RequestBuilder, Response};
use serde_json::{Value, json};
use tokio::task::JoinHandle;

use crate::harness::http::HttpClient;
use crate::harness::{ServedFleet, TIMEOUT, ballast, demo_7m, device, runs_on_host};

/// Streams that the worker runs or queues.
const PLACES: usize = 3;

fn fleet(queue_max: u32) -> (ServedFleet, HttpClient) {
    let admission = format!(
        "[admission]\nqueue-max = {queue_max}\ntenant-queue-max = {queue_max}\n\
         interactive-floor = 0\nbatch-floor = 0\n"
    );
    fleet_of(&admission, "step-tokens = 2\nkv-tokens = 4096\n")
}

/// Starts a fleet with these TOML tables and these lines of its `[[models]]` table.
fn fleet_of(tables: &str, lines: &str) -> (ServedFleet, HttpClient) {
    let directory = tempfile::Builder::new().prefix("ballast-test-").tempdir().unwrap();
    let text = format!(
        "{tables}[[models]]\nname = \"demo\"\npath = {:?}\ndevice = {:?}\nworkers = 1\nthreads = 1\n{lines}",
        std::fs::canonicalize(demo_7m()).unwrap(),
        device(),
    );
    let file = directory.path().join("fleet.toml");
    std::fs::write(&file, text).unwrap();
    let mut command = ballast();
    command.arg("serve").arg("--config").arg(file).args([
        "--json",
        "--listen",
        "127.0.0.1:0",
        "--runtime-dir",
    ]);
    command.arg(directory.path()).stdout(std::process::Stdio::piped());
    let fleet = ServedFleet::start_command(directory, command);
    let http = HttpClient::connect(&fleet);
    (fleet, http)
}

fn completion_request(http: &HttpClient, tenant: &str, fields: Value) -> RequestBuilder {
    let mut body = json!({"prompt": "x", "max_tokens": 4, "stream": true, "ignore_eos": true, "seed": 1});
    body.as_object_mut().unwrap().extend(fields.as_object().unwrap().clone());
    http.client.post(format!("{}/v1/completions", http.url)).header("x-ballast-tenant", tenant).json(&body)
}

/// Starts a request that occupies the whole capacity until it is dropped, and waits for its first
/// tokens.
async fn full(http: &HttpClient) -> Response {
    let mut response =
        completion_request(http, "holder", json!({"n": 16, "max_tokens": 3000})).send().await.unwrap();
    assert_eq!(response.status(), 200);
    assert!(response.chunk().await.unwrap().is_some());
    response
}

async fn eventually(what: &str, mut condition: impl AsyncFnMut() -> bool) {
    let started = std::time::Instant::now();
    while !condition().await {
        assert!(started.elapsed() < TIMEOUT, "{what}: not within {TIMEOUT:?}");
        tokio::time::sleep(Duration::from_millis(10)).await;
    }
}

async fn metric(http: &HttpClient, name: &str) -> Option<usize> {
    let text = http.client.get(format!("{}/metrics", http.url)).send().await.unwrap().text().await.unwrap();
    let line = text.lines().find(|line| line.starts_with(name))?;
    line.rsplit(' ').next()?.parse().ok()
}

async fn until_waiting(http: &HttpClient, count: usize) {
    let name = "ballast:num_requests_queued{model_name=\"demo\",class=\"default\"}";
    eventually("the queue's length", async || metric(http, name).await == Some(count)).await;
}

/// Sends a request and waits until the queue has `place` requests.
async fn queued(http: &HttpClient, tenant: &str, place: usize) -> JoinHandle<Response> {
    let request = completion_request(http, tenant, json!({}));
    let queued = tokio::spawn(async move { request.send().await.unwrap() });
    until_waiting(http, place).await;
    queued
}

async fn answer(queued: JoinHandle<Response>) -> String {
    let response = tokio::time::timeout(TIMEOUT, queued).await.expect("an answer in time").unwrap();
    assert_eq!(response.status(), 200);
    tokio::time::timeout(TIMEOUT, response.text()).await.expect("a whole answer in time").unwrap()
}

#[test]
fn i7_an_overloaded_fleet_refuses_with_a_time_while_those_inside_stream_on() {
    let (fleet, http) = fleet(2);
    http.runtime.block_on(async {
        let mut inside = full(&http).await;
        let first = queued(&http, "a", 1).await;
        let second = queued(&http, "b", 2).await;
        let refused = completion_request(&http, "c", json!({})).send().await.unwrap();
        assert_eq!(refused.status(), 503);
        let seconds: u64 = refused.headers()["retry-after"].to_str().unwrap().parse().unwrap();
        assert!((1..=60).contains(&seconds), "{seconds}");
        let error: Value = refused.json().await.unwrap();
        assert_eq!(error["error"]["code"], "overloaded", "{error}");
        let message = error["error"]["message"].as_str().unwrap();
        assert!(message.contains("is 2;") && message.contains(&format!("in {seconds} s")), "{message}");
        for _ in 0..5 {
            assert!(inside.chunk().await.unwrap().is_some(), "the running request continues");
        }
        drop(inside);
        for waited in [first, second] {
            let text = answer(waited).await;
            assert!(text.ends_with("data: [DONE]\n\n"), "{text}");
        }
    });
    fleet.stop();
}

#[test]
fn a_client_that_goes_away_in_the_queue_frees_its_place() {
    let (fleet, http) = fleet(1);
    http.runtime.block_on(async {
        let inside = full(&http).await;
        let gone = queued(&http, "a", 1).await;
        assert_eq!(completion_request(&http, "b", json!({})).send().await.unwrap().status(), 503);
        gone.abort();
        until_waiting(&http, 0).await;
        let next = queued(&http, "b", 1).await;
        drop(inside);
        answer(next).await;
    });
    fleet.stop();
}

#[test]
fn a_deadline_that_passes_in_the_queue_is_an_error_with_a_name() {
    let (fleet, http) = fleet(8);
    http.runtime.block_on(async {
        let inside = full(&http).await;
        let late = completion_request(&http, "a", json!({"deadline_ms": 300})).send().await.unwrap();
        assert_eq!(late.status(), 504);
        let error: Value = late.json().await.unwrap();
        assert_eq!(error["error"]["code"], "deadline_exceeded", "{error}");
        assert!(error["error"]["message"].as_str().unwrap().contains("before it was admitted"), "{error}");
        until_waiting(&http, 0).await;
        drop(inside);
    });
    fleet.stop();
}

#[test]
fn a_request_that_never_fits_is_refused_at_once_with_the_numbers() {
    let (fleet, http) = fleet(8);
    http.runtime.block_on(async {
        let _inside = full(&http).await;
        // The capacity is used up, but such a request is refused without waiting. The context is
        // 4096 tokens, the KV budget 4096 tokens.
        let check = async |fields: Value, code: &str, words: &[&str]| {
            let refused = completion_request(&http, "a", fields).send().await.unwrap();
            assert_eq!(refused.status(), 400);
            let error: Value = refused.json().await.unwrap();
            assert_eq!(error["error"]["code"], code, "{error}");
            let message = error["error"]["message"].as_str().unwrap();
            words.iter().for_each(|word| assert!(message.contains(word), "{message} lacks {word}"));
        };
        let context = json!({"prompt": vec![5; 10], "max_tokens": 100_000});
        check(context, "context_length_exceeded", &["10 tokens of prompt", "100000 of output"]).await;
        let entries = json!({"prompt": vec!["x"; 20], "n": 16});
        let refused = completion_request(&http, "a", entries).send().await.unwrap();
        assert_eq!(refused.status(), 400);
        let error: Value = refused.json().await.unwrap();
        assert_eq!(error["error"]["param"], "n", "{error}");
        assert!(error["error"]["message"].as_str().unwrap().contains("320 entries, allowed are at most 128"));
    });
    fleet.stop();
}

#[test]
fn a_grammar_that_is_none_is_refused_although_no_place_is_left() {
    let (fleet, http) = fleet(1);
    http.runtime.block_on(async {
        let inside = full(&http).await;
        let first = queued(&http, "a", 1).await;
        let unsatisfiable = json!({"type": "integer", "minimum": 5, "maximum": 4});
        for (param, grammar, word) in
            [("guided_json", unsatisfiable, "minimum"), ("guided_regex", json!("("), "regex")]
        {
            // Twice: first the worker compiles the grammar, then the router remembers it.
            for _ in 0..2 {
                let fields = json!({param: grammar, "ignore_eos": false});
                let refused = completion_request(&http, "a", fields).send().await.unwrap();
                assert_eq!(refused.status(), 400);
                let error: Value = refused.json().await.unwrap();
                assert_eq!(error["error"]["param"], param, "{error}");
                assert!(error["error"]["message"].as_str().unwrap().contains(word), "{error}");
            }
        }
        let sound = json!({"guided_choice": ["q"], "ignore_eos": false});
        assert_eq!(
            completion_request(&http, "b", sound.clone()).send().await.unwrap().status(),
            503,
            "the queue is full"
        );
        until_waiting(&http, 1).await;
        drop(inside);
        answer(first).await;
        let text = completion_request(&http, "b", sound).send().await.unwrap().text().await.unwrap();
        assert!(text.contains("\"text\":\"q\""), "{text}");
    });
    fleet.stop();
}

#[test]
fn an_interactive_request_is_computed_while_as_many_ordinary_ones_run_as_may() {
    let (fleet, http) = fleet_of("", "kv-tokens = 65536\n");
    http.runtime.block_on(async {
        // Of 80 permits, 8 are reserved for interactive requests and 4 for batch requests.
        let mut running = Vec::new();
        for (n, requests) in [(16, 4), (1, 4)] {
            for _ in 0..requests {
                running.push(
                    completion_request(&http, "holder", json!({"n": n, "max_tokens": 4000}))
                        .send()
                        .await
                        .unwrap(),
                );
            }
        }
        let held = "ballast:num_permits_held{model_name=\"demo\",class=\"default\"}";
        assert_eq!(metric(&http, held).await, Some(68));
        let next = queued(&http, "holder", 1).await;
        let mut urgent =
            completion_request(&http, "other", json!({"service_tier": "priority"})).send().await.unwrap();
        assert_eq!(urgent.status(), 200);
        let first = tokio::time::timeout(TIMEOUT, urgent.chunk()).await.expect("its first token in time");
        assert!(first.unwrap().is_some());
        assert_eq!(metric(&http, held).await, Some(68), "no request had to end for it");
        assert!(!next.is_finished(), "the next ordinary one waits");
        next.abort();
    });
    fleet.stop();
}

#[test]
fn a_worker_runs_and_queues_as_many_sequences_as_its_model_allows() {
    /// Looks at the running sequences, some 50 ms apart: a worker reports several times a second.
    const LOOKS: usize = 20;
    let lines = "kv-tokens = 65536\nrunning-max = 3\nqueue-max = 8\n";
    let (fleet, http) = fleet_of("[admission]\ninteractive-floor = 0\nbatch-floor = 0\n", lines);
    http.runtime.block_on(async {
        let refused = completion_request(&http, "a", json!({"n": 16})).send().await.unwrap();
        assert_eq!(refused.status(), 400);
        let error: Value = refused.json().await.unwrap();
        assert_eq!(error["error"]["code"], "too_many_choices", "{error}");

        let streams: Vec<_> = (0..6)
            .map(|_| completion_request(&http, "a", json!({"max_tokens": 4000})).send())
            .map(tokio::spawn)
            .collect();
        let running = async || metric(&http, "ballast:num_requests_running{").await;
        eventually("three sequences run", async || running().await == Some(3)).await;
        for _ in 0..LOOKS {
            assert!(running().await <= Some(3));
            tokio::time::sleep(Duration::from_millis(50)).await;
        }
        streams.into_iter().for_each(|stream| stream.abort());
    });
    fleet.stop();
}

#[test]
fn a_request_beyond_the_whole_cache_is_refused_with_the_numbers() {
    // A GPU allocates its KV cache in units that are larger than this cache.
    if !runs_on_host("a_request_beyond_the_whole_cache_is_refused_with_the_numbers") {
        return;
    }
    let (fleet, http) = small_cache();
    let (status, text) = http.post("/v1/completions", &json!({"prompt": vec![5; 100], "max_tokens": 413}));
    assert_eq!(status, 200, "a request that fills the budget is served: {text}");
    let (status, text) = http.post("/v1/completions", &json!({"prompt": vec![5; 100], "max_tokens": 414}));
    let error: Value = serde_json::from_str(&text).unwrap();
    assert_eq!((status, &error["error"]["code"]), (400, &json!("kv_budget_exceeded")), "{text}");
    for word in ["514 tokens", "need 33 KV blocks of 16 tokens", "has 32;"] {
        assert!(text.contains(word), "{text} lacks {word}");
    }
    fleet.stop();
}

fn small_cache() -> (ServedFleet, HttpClient) {
    let fleet = ServedFleet::start(&demo_7m(), &["--workers", "1", "--threads", "1", "--kv-tokens", "512"]);
    let http = HttpClient::connect(&fleet);
    (fleet, http)
}

#[test]
fn a_flooding_tenant_does_not_hold_up_another() {
    /// Requests of the flood. In order of arrival, the other tenant would come after all of them.
    const FLOOD: usize = 24;
    /// Most requests of the flood that may end before the other tenant's first token: one that is
    /// oldest, one whose permit the tenant gets, those on the worker, and as many again while the
    /// test polls.
    const PASSED_MAX: usize = 2 + PLACES + 5;

    let (fleet, http) = fleet(64);
    http.runtime.block_on(async {
        let ended = Arc::new(AtomicUsize::new(0));
        let mut flood = Vec::new();
        for _ in 0..FLOOD {
            let (request, ended) =
                (completion_request(&http, "flood", json!({"max_tokens": 800})), ended.clone());
            flood.push(tokio::spawn(async move {
                let text = request.send().await.unwrap().text().await.unwrap();
                assert!(text.ends_with("data: [DONE]\n\n"), "{text}");
                ended.fetch_add(1, Ordering::SeqCst);
            }));
        }
        let placed = "ballast:num_permits_held{model_name=\"demo\",class=\"default\"}";
        eventually("the places are taken", async || metric(&http, placed).await == Some(PLACES)).await;
        let before = ended.load(Ordering::SeqCst);
        let mut other = completion_request(&http, "other", json!({})).send().await.unwrap();
        assert_eq!(other.status(), 200);
        assert!(other.chunk().await.unwrap().is_some());
        let passed = ended.load(Ordering::SeqCst) - before;
        assert!(passed <= PASSED_MAX, "{passed} of the flood came first");
        flood.iter().for_each(JoinHandle::abort);
    });
    fleet.stop();
}
