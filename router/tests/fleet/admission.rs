// SPDX-License-Identifier: Apache-2.0

//! Admission control: queues, priority classes, tenants, deadlines, and the errors of refused
//! requests.

use std::time::Instant;

use proto::v1::{self as wire, generate_request};
use reqwest::{RequestBuilder, Response};
use router::AdmissionConfig;
use serde_json::{Value, json};
use tokio::task::JoinHandle;
use tonic::Code;

use crate::fake_worker::{FakeBehaviour, Fault, GrammarAnswer, token_ids_of};
use crate::harness::{RouterHarness, TIMEOUT};

/// A worker that runs one sequence gets a second stream ahead of time.
const PERMITS: usize = 2;

/// A fleet whose streams hang after their first token, until their client disconnects.
async fn fleet(queue_max: u32, tenant_queue_max: u32) -> RouterHarness {
    let hangs = FakeBehaviour { running_max: 1, fault: Some((1, Fault::Hang)), ..FakeBehaviour::default() };
    RouterHarness::with_config(&token_ids_of("a b c d"), &[hangs], |config| {
        config.admission =
            AdmissionConfig { queue_max, tenant_queue_max, interactive_floor: 0, batch_floor: 0 };
    })
    .await
}

fn completion_request(fleet: &RouterHarness, tenant: &str, fields: Value) -> RequestBuilder {
    let mut body = json!({"prompt": "x", "max_tokens": 4, "stream": true});
    body.as_object_mut().unwrap().extend(fields.as_object().unwrap().clone());
    fleet.client.post(format!("{}/v1/completions", fleet.url)).header("x-ballast-tenant", tenant).json(&body)
}

/// Starts as many streams as there are permits.
async fn start_streams(fleet: &RouterHarness, tenant: &str) -> Vec<Response> {
    let mut running = Vec::new();
    for _ in 0..PERMITS {
        let response = completion_request(fleet, tenant, json!({})).send().await.unwrap();
        assert_eq!(response.status(), 200);
        running.push(response);
    }
    running
}

/// Starts a request that waits behind the waiting requests.
async fn start_waiting(fleet: &RouterHarness, tenant: &str, fields: Value) -> JoinHandle<Response> {
    let before = waiting_requests(fleet).await;
    let request = completion_request(fleet, tenant, fields);
    let queued = tokio::spawn(async move { request.send().await.unwrap() });
    wait_for_waiting(fleet, before + 1).await;
    queued
}

async fn wait_for_response(queued: JoinHandle<Response>) -> Response {
    tokio::time::timeout(TIMEOUT, queued).await.expect("a response before the timeout").unwrap()
}

async fn metrics(fleet: &RouterHarness) -> String {
    fleet.client.get(format!("{}/metrics", fleet.url)).send().await.unwrap().text().await.unwrap()
}

/// Waiting requests of all classes.
async fn waiting_requests(fleet: &RouterHarness) -> usize {
    let text = metrics(fleet).await;
    let lines = text.lines().filter(|line| line.starts_with("ballast:num_requests_queued{"));
    lines.map(|line| line.rsplit(' ').next().unwrap().parse::<usize>().unwrap()).sum()
}

async fn wait_for_waiting(fleet: &RouterHarness, count: usize) {
    let start = Instant::now();
    while waiting_requests(fleet).await != count {
        assert!(
            start.elapsed() < TIMEOUT,
            "expected {count} waiting requests, found {}",
            waiting_requests(fleet).await
        );
        tokio::time::sleep(std::time::Duration::from_millis(5)).await;
    }
}

async fn wait_for_calls(fleet: &RouterHarness, count: usize) {
    let start = Instant::now();
    while fleet.workers[0].calls().len() != count {
        assert!(start.elapsed() < TIMEOUT, "expected {count} calls");
        tokio::time::sleep(std::time::Duration::from_millis(5)).await;
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_full_queue_refuses_with_a_retry_time_and_running_streams_continue() {
    let fleet = fleet(2, 2).await;
    let mut running = start_streams(&fleet, "a").await;
    let first = start_waiting(&fleet, "a", json!({})).await;
    let second = start_waiting(&fleet, "b", json!({})).await;
    assert_eq!(fleet.workers[0].calls().len(), PERMITS, "no waiting request is at the worker");

    let refused = completion_request(&fleet, "b", json!({})).send().await.unwrap();
    assert_eq!(refused.status(), 503);
    let seconds: u64 = refused.headers()["retry-after"].to_str().unwrap().parse().unwrap();
    assert!((1..=60).contains(&seconds), "{seconds}");
    let error = refused.json::<Value>().await.unwrap()["error"].clone();
    assert_eq!((&error["type"], &error["code"]), (&json!("server_error"), &json!("overloaded")));
    let message = error["message"].as_str().unwrap();
    assert!(message.contains("is 2;") && message.contains(&format!("in {seconds} s")), "{message}");

    let mut client = fleet.grpc().await;
    let prompt = generate_request::Prompt::Text("x".into());
    let request = wire::GenerateRequest { prompt: Some(prompt), ..Default::default() };
    let status = client.generate(request).await.unwrap_err();
    assert_eq!(status.code(), Code::Unavailable, "{status}");
    assert!(status.metadata().get("retry-after").is_some());

    assert!(running[0].chunk().await.unwrap().is_some(), "running streams receive tokens");
    // Tenant b holds no permit yet, so its request comes first.
    running.pop();
    assert_eq!(wait_for_response(second).await.status(), 200);
    running.pop();
    assert_eq!(wait_for_response(first).await.status(), 200);
    let text = metrics(&fleet).await;
    let refusals =
        "ballast:requests_refused_total{model_name=\"demo\",class=\"default\",reason=\"overloaded\"}";
    let waits = "ballast:request_queue_time_seconds_count{model_name=\"demo\",class=\"default\"}";
    for line in [refusals, waits, "ballast:num_permits{model_name=\"demo\"} 2"] {
        assert!(text.contains(line), "{line} is missing in\n{text}");
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_tenant_limit_is_429_and_other_tenants_are_admitted() {
    let fleet = fleet(10, 1).await;
    let running = start_streams(&fleet, "a").await;
    let _waits = start_waiting(&fleet, "a", json!({})).await;
    let refused = completion_request(&fleet, "a", json!({})).send().await.unwrap();
    assert_eq!(refused.status(), 429);
    assert!(refused.headers().contains_key("retry-after"));
    let error = refused.json::<Value>().await.unwrap()["error"].clone();
    assert_eq!((&error["type"], &error["code"]), (&json!("rate_limit_error"), &json!("rate_limit_exceeded")));
    assert!(error["message"].as_str().unwrap().contains("of this tenant"), "{error}");

    let mut client = fleet.grpc().await;
    let prompt = generate_request::Prompt::Text("x".into());
    let request = wire::GenerateRequest { prompt: Some(prompt), tenant: "a".into(), ..Default::default() };
    let status = client.generate(request).await.unwrap_err();
    assert_eq!(status.code(), Code::ResourceExhausted, "{status}");
    assert!(status.metadata().get("retry-after").is_some());

    let _other = start_waiting(&fleet, "b", json!({})).await;
    let text = metrics(&fleet).await;
    let line = "ballast:num_tenant_requests_queued{model_name=\"demo\",tenant=\"b\"} 1";
    assert!(text.contains(line), "{text}");
    drop(running);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_flood_of_one_tenant_does_not_delay_another() {
    let fleet = fleet(100, 100).await;
    let mut running = start_streams(&fleet, "flood").await;
    let mut flood = Vec::new();
    for _ in 0..8 {
        flood.push(start_waiting(&fleet, "flood", json!({})).await);
    }
    let other = start_waiting(&fleet, "other", json!({})).await;
    // The other tenant holds no permit: it gets the next one, or the one after an oldest-first
    // admission.
    let mut released = 0;
    let flooding = fleet.workers[0].calls()[0].tenant;
    while fleet.workers[0].calls().iter().all(|call| call.tenant == flooding) {
        assert!(released < 2, "{released} requests of the flood came first");
        released += 1;
        drop(running.pop().expect("two streams run"));
        wait_for_calls(&fleet, PERMITS + released).await;
    }
    assert_eq!(wait_for_response(other).await.status(), 200);
    assert_ne!(flooding, 0);
}

#[tokio::test(flavor = "multi_thread")]
async fn higher_priority_classes_are_admitted_first() {
    let fleet = fleet(10, 10).await;
    let mut running = start_streams(&fleet, "a").await;
    let tiers = ["flex", "default", "priority"];
    let mut waiting = Vec::new();
    for tier in tiers {
        waiting.push(start_waiting(&fleet, "a", json!({"service_tier": tier})).await);
    }
    for (position, tier) in tiers.iter().rev().enumerate() {
        drop(running.remove(0));
        running.push(wait_for_response(waiting.pop().unwrap()).await);
        let call = &fleet.workers[0].calls()[PERMITS + position];
        assert_eq!(
            call.priority,
            ["priority", "default", "flex"].iter().position(|t| t == tier).unwrap() as i32 - 1
        );
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_client_that_disconnects_leaves_the_queue() {
    let fleet = fleet(1, 1).await;
    let mut running = start_streams(&fleet, "a").await;
    let gone = start_waiting(&fleet, "a", json!({})).await;
    assert_eq!(completion_request(&fleet, "b", json!({})).send().await.unwrap().status(), 503);
    gone.abort();
    wait_for_waiting(&fleet, 0).await;
    let next = start_waiting(&fleet, "b", json!({})).await;
    running.pop();
    assert_eq!(wait_for_response(next).await.status(), 200);
    assert_eq!(fleet.workers[0].calls().len(), PERMITS + 1, "the cancelled request reached no worker");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_deadline_that_passes_in_the_queue_is_an_explicit_error() {
    let fleet = fleet(4, 4).await;
    let running = start_streams(&fleet, "a").await;
    let late = completion_request(&fleet, "a", json!({"deadline_ms": 50})).send().await.unwrap();
    assert_eq!(late.status(), 504);
    let error = late.json::<Value>().await.unwrap()["error"].clone();
    assert_eq!(error["code"], "deadline_exceeded", "{error}");
    assert!(error["message"].as_str().unwrap().contains("before it was admitted"), "{error}");
    let mut client = fleet.grpc().await;
    let prompt = generate_request::Prompt::Text("x".into());
    let request = wire::GenerateRequest { prompt: Some(prompt), deadline_ms: 50, ..Default::default() };
    assert_eq!(client.generate(request).await.unwrap_err().code(), Code::DeadlineExceeded);
    wait_for_waiting(&fleet, 0).await;
    assert_eq!(fleet.workers[0].calls().len(), PERMITS, "no worker was called");
    drop(running);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_request_that_exceeds_every_worker_is_refused_at_once_with_the_numbers() {
    let small = FakeBehaviour { kv_blocks: 4, running_max: 2, queue_max: 3, ..FakeBehaviour::default() };
    let fleet = RouterHarness::start(&token_ids_of("x"), &[small]).await;
    let ids: Vec<u32> = vec![1; 60];
    let (status, error) = fleet.post_json("/v1/completions", json!({"prompt": ids, "max_tokens": 6})).await;
    let error = &error["error"];
    assert_eq!(
        (status, &error["param"], &error["code"]),
        (400, &json!("max_tokens"), &json!("kv_budget_exceeded"))
    );
    let message = error["message"].as_str().unwrap();
    assert!(message.contains("66 tokens") && message.contains("need 5 KV blocks"), "{message}");
    assert!(message.contains("worker has 4"), "{message}");
    assert!(fleet.workers[0].calls().is_empty(), "no worker was called");
    let (status, _) = fleet.post_json("/v1/completions", json!({"prompt": ids, "max_tokens": 5})).await;
    assert_eq!(status, 200);
}

#[tokio::test(flavor = "multi_thread")]
async fn more_choices_than_the_fleet_accepts_are_refused_at_once_with_the_number() {
    // Each of two workers accepts three choices of a named tenant and four of the unnamed tenant.
    let worker =
        FakeBehaviour { running_max: 64, queue_max: 4, tenant_queue_max: 3, ..FakeBehaviour::default() };
    let fleet = RouterHarness::start(&token_ids_of("x"), &[worker.clone(), worker.clone()]).await;
    let choices = async |fleet: &RouterHarness, tenant: Option<&str>, n: u32| {
        let body = json!({"prompt": "x", "n": n, "max_tokens": 1});
        let mut request = fleet.client.post(format!("{}/v1/completions", fleet.url)).json(&body);
        if let Some(tenant) = tenant {
            request = request.header("x-ballast-tenant", tenant);
        }
        let response = request.send().await.unwrap();
        (response.status().as_u16(), response.json::<Value>().await.unwrap()["error"].clone())
    };
    for (tenant, most) in [(None, 8), (Some("a"), 6)] {
        let (status, error) = choices(&fleet, tenant, most + 1).await;
        assert_eq!((status, &error["code"], &error["param"]), (400, &json!("too_many_choices"), &json!("n")));
        let message = error["message"].as_str().unwrap();
        assert!(message.contains(&format!("at most {most} per request")), "{message}");
        assert_eq!(choices(&fleet, tenant, most).await.0, 200);
    }
    // The limit of this process counts too: waiting would not help.
    let fleet =
        RouterHarness::with_config(&token_ids_of("x"), &[worker], |config| config.limits.streams_max = 2)
            .await;
    let (status, error) = choices(&fleet, None, 3).await;
    assert_eq!((status, &error["code"]), (400, &json!("too_many_choices")), "{error}");
    assert!(error["message"].as_str().unwrap().contains("at most 2 per request"), "{error}");
}

#[tokio::test(flavor = "multi_thread")]
async fn choices_of_a_prompt_go_to_one_worker_while_it_has_capacity() {
    let worker = FakeBehaviour { running_max: 4, ..FakeBehaviour::default() };
    let fleet = RouterHarness::start(&token_ids_of("x"), &[worker.clone(), worker]).await;
    let calls = || -> Vec<usize> { fleet.workers.iter().map(|worker| worker.calls().len()).collect() };
    let (status, _) = fleet.post_json("/v1/completions", json!({"prompt": "x", "n": 4})).await;
    assert_eq!(status, 200);
    let mut first = calls();
    first.sort_unstable();
    assert_eq!(first, [0, 4]);
    // Two prompts of three choices each: each worker gets one prompt.
    let (status, _) = fleet.post_json("/v1/completions", json!({"prompt": ["a", "b"], "n": 3})).await;
    assert_eq!(status, 200);
    for worker in &fleet.workers {
        let calls = worker.calls();
        let of_two = &calls[calls.len() - 3..];
        assert!(of_two.iter().all(|call| call.tokens == of_two[0].tokens), "{of_two:?}");
    }
    let mut all = calls();
    all.sort_unstable();
    assert_eq!(all, [3, 7]);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_floor_reserves_running_sequences_and_not_the_workers_queue() {
    let hangs = FakeBehaviour { running_max: 20, fault: Some((1, Fault::Hang)), ..FakeBehaviour::default() };
    // Of 20 permits, 2 are reserved for class interactive and 1 for class batch.
    let fleet = RouterHarness::with_config(&token_ids_of("a b c d"), &[hangs], |config| {
        config.admission =
            AdmissionConfig { queue_max: 100, tenant_queue_max: 100, interactive_floor: 10, batch_floor: 5 };
    })
    .await;
    let mut running = Vec::new();
    for _ in 0..17 {
        running.push(completion_request(&fleet, "a", json!({})).send().await.unwrap());
    }
    let _waits = start_waiting(&fleet, "a", json!({})).await;
    for tier in ["priority", "flex", "priority"] {
        running.push(completion_request(&fleet, "b", json!({"service_tier": tier})).send().await.unwrap());
    }
    let _more = start_waiting(&fleet, "b", json!({"service_tier": "priority"})).await;
    assert_eq!(fleet.workers[0].calls().len(), 20, "each call runs at once");
}

#[tokio::test(flavor = "multi_thread")]
async fn an_invalid_grammar_is_refused_before_the_request_waits() {
    let fleet = fleet(1, 1).await;
    let mut running = start_streams(&fleet, "a").await;
    let waits = start_waiting(&fleet, "a", json!({})).await;
    // The queue and the tenant's queue are full.
    for _ in 0..2 {
        let refused = completion_request(&fleet, "a", json!({"guided_regex": "bad"})).send().await.unwrap();
        assert_eq!(refused.status(), 400);
        let error = refused.json::<Value>().await.unwrap()["error"].clone();
        assert_eq!(error["param"], "guided_regex", "{error}");
        assert!(error["message"].as_str().unwrap().contains("matches nothing"), "{error}");
    }
    assert_eq!(fleet.workers[0].grammar_calls(), 1, "the result is cached");
    assert_eq!(
        completion_request(&fleet, "a", json!({"guided_regex": "fine"})).send().await.unwrap().status(),
        429
    );
    assert_eq!(waiting_requests(&fleet).await, 1);
    running.pop();
    let inside = wait_for_response(waits).await;
    assert_eq!(inside.status(), 200);
    let next = start_waiting(&fleet, "a", json!({"guided_regex": "fine"})).await;
    drop(inside);
    assert_eq!(wait_for_response(next).await.status(), 200);
    assert_eq!(fleet.workers[0].grammar_calls(), 2);
    let kinds = fleet.workers[0].calls().iter().filter(|call| call.grammar.is_some()).count();
    assert_eq!(kinds, 1, "the invalid grammar reached no worker");
}

#[tokio::test(flavor = "multi_thread")]
async fn grammar_checks_are_limited_for_each_tenant() {
    let hangs = FakeBehaviour { grammar_answer: GrammarAnswer::Hang, ..FakeBehaviour::default() };
    let fleet = RouterHarness::start(&token_ids_of("x"), &[hangs]).await;
    let mut flood = Vec::new();
    for n in 0..12 {
        let request = completion_request(&fleet, "flood", json!({"guided_regex": format!("x{n}")}));
        flood.push(tokio::spawn(async move { request.send().await.unwrap() }));
    }
    let start = Instant::now();
    let until_asked = async |count: usize| {
        while fleet.workers[0].grammar_calls() < count {
            assert!(start.elapsed() < TIMEOUT, "expected {count} grammar checks");
            tokio::time::sleep(std::time::Duration::from_millis(5)).await;
        }
    };
    until_asked(4).await;
    let late = completion_request(&fleet, "flood", json!({"guided_regex": "late", "deadline_ms": 50}))
        .send()
        .await
        .unwrap();
    assert_eq!(late.status(), 504, "a deadline ends the wait for a grammar check");
    assert_eq!(fleet.workers[0].grammar_calls(), 4, "the remaining checks wait at the router");
    let other = completion_request(&fleet, "other", json!({"guided_regex": "y"}));
    let other = tokio::spawn(async move { other.send().await.unwrap() });
    until_asked(5).await;
    assert_eq!(waiting_requests(&fleet).await, 0, "no request has entered the queue");
    // A client that disconnects frees its check.
    flood.iter().for_each(JoinHandle::abort);
    other.abort();
    let next: Vec<_> = (0..4)
        .map(|n| {
            let request = completion_request(&fleet, "flood", json!({"guided_regex": format!("z{n}")}));
            tokio::spawn(async move { request.send().await.unwrap() })
        })
        .collect();
    until_asked(9).await;
    next.iter().for_each(JoinHandle::abort);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_worker_that_is_too_busy_to_check_a_grammar_is_skipped() {
    let busy = FakeBehaviour { grammar_answer: GrammarAnswer::Busy, ..FakeBehaviour::default() };
    let fleet = RouterHarness::start(&token_ids_of("x"), &[busy.clone(), FakeBehaviour::default()]).await;
    let (status, body) =
        fleet.post_json("/v1/completions", json!({"prompt": "x", "guided_regex": "x"})).await;
    assert_eq!(status, 200, "{body}");
    let fleet = RouterHarness::start(&token_ids_of("x"), &[busy]).await;
    let refused = fleet.post("/v1/completions", json!({"prompt": "x", "guided_regex": "x"})).await;
    assert_eq!((refused.status().as_u16(), &refused.headers()["retry-after"]), (503, &"1".parse().unwrap()));
}

#[tokio::test(flavor = "multi_thread")]
async fn a_grammar_that_breaks_the_compiler_is_sent_to_no_other_worker() {
    let fails = FakeBehaviour { grammar_answer: GrammarAnswer::CompilerFailed, ..FakeBehaviour::default() };
    let fleet = RouterHarness::start(&token_ids_of("x"), &[fails.clone(), fails]).await;
    let refused = fleet.post("/v1/completions", json!({"prompt": "x", "guided_regex": "x"})).await;
    assert_eq!((refused.status().as_u16(), refused.headers().get("retry-after")), (502, None));
    let error = refused.json::<Value>().await.unwrap();
    assert!(error["error"]["message"].as_str().unwrap().contains("compiler failed"), "{error}");
    assert_eq!(fleet.workers.iter().map(|worker| worker.grammar_calls()).sum::<usize>(), 1);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_tenant_limit_of_a_worker_is_429() {
    let full = FakeBehaviour {
        refuse: Some((Code::ResourceExhausted, "3 requests of this tenant are waiting")),
        refuses_tenant: true,
        ..FakeBehaviour::default()
    };
    let fleet = RouterHarness::start(&token_ids_of("x"), &[full]).await;
    let refused = completion_request(&fleet, "a", json!({})).send().await.unwrap();
    assert_eq!((refused.status().as_u16(), &refused.headers()["retry-after"]), (429, &"7".parse().unwrap()));
    let error = refused.json::<Value>().await.unwrap();
    assert_eq!(error["error"]["code"], "rate_limit_exceeded", "{error}");
}

#[tokio::test(flavor = "multi_thread")]
async fn waiting_requests_go_to_a_new_worker() {
    let mut fleet = fleet(10, 10).await;
    let running = start_streams(&fleet, "a").await;
    let waits = start_waiting(&fleet, "a", json!({})).await;
    fleet.add_worker(5, &token_ids_of("a b c d"), FakeBehaviour::default()).await;
    assert_eq!(wait_for_response(waits).await.status(), 200);
    assert_eq!(fleet.workers[1].calls().len(), 1);
    drop(running);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_request_waits_for_a_restarted_worker_also_if_its_fingerprint_has_changed() {
    let script = token_ids_of("fine");
    for fingerprint in [1, 2] {
        let mut fleet = RouterHarness::with_config(&script, &[FakeBehaviour::default()], |config| {
            config.limits.worker_wait = TIMEOUT;
        })
        .await;
        fleet.workers[0].kill();
        fleet.wait_for_workers(0).await;
        let completion = start_waiting(&fleet, "a", json!({"stream": false})).await;
        let streamed = start_waiting(&fleet, "b", json!({"n": 2})).await;
        fleet.add_worker(0, &script, FakeBehaviour { fingerprint, ..FakeBehaviour::default() }).await;
        for waiting in [completion, streamed] {
            let response = wait_for_response(waiting).await;
            assert_eq!(response.status(), 200, "{fingerprint}: {}", response.text().await.unwrap());
        }
        wait_for_waiting(&fleet, 0).await;
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_request_that_loses_its_only_worker_before_it_is_admitted_tries_again_for_a_bounded_time() {
    // A worker that drains, as long as its link has not noticed.
    let drains = FakeBehaviour { refuse: Some((Code::Unavailable, "draining")), ..FakeBehaviour::default() };
    let mut fleet = RouterHarness::start(&[], std::slice::from_ref(&drains)).await;
    let refused = completion_request(&fleet, "a", json!({})).send().await.unwrap();
    assert_eq!((refused.status().as_u16(), &refused.headers()["retry-after"]), (503, &"1".parse().unwrap()));
    let error = refused.json::<Value>().await.unwrap()["error"].clone();
    assert_eq!(error["code"], "not_ready", "{error}");
    assert!(error["message"].as_str().unwrap().contains("after a wait of 1."), "{error}");
    let calls = fleet.workers[0].calls().len();
    assert!((2..=20).contains(&calls), "{calls} calls in a second");

    let request = completion_request(&fleet, "a", json!({}));
    let response = tokio::spawn(async move { request.send().await.unwrap() });
    let start = Instant::now();
    while fleet.workers[0].calls().len() == calls {
        assert!(start.elapsed() < TIMEOUT, "the worker is not asked");
        tokio::time::sleep(std::time::Duration::from_millis(5)).await;
    }
    fleet.add_worker(1, &token_ids_of("fine"), FakeBehaviour::default()).await;
    assert_eq!(wait_for_response(response).await.status(), 200);
    while !metrics(&fleet).await.contains("ballast:num_streams 0\n") {
        assert!(start.elapsed() < TIMEOUT, "permits are left");
        tokio::time::sleep(std::time::Duration::from_millis(5)).await;
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn requests_wait_in_a_queue_for_a_model_that_the_router_has_not_heard() {
    let config = |config: &mut router::RouterConfig| {
        config.limits.worker_wait = TIMEOUT;
        config.admission.queue_max = 2;
    };
    let mut fleet = RouterHarness::with_config(&[], &[], config).await;
    let named = start_waiting(&fleet, "a", json!({"model": "demo"})).await;
    let unknown = start_waiting(&fleet, "a", json!({"model": "other"})).await;
    let full = completion_request(&fleet, "a", json!({"model": "third"})).send().await.unwrap();
    assert_eq!((full.status().as_u16(), full.headers().contains_key("retry-after")), (503, true));
    let error = full.json::<Value>().await.unwrap();
    assert_eq!(error["error"]["code"], "overloaded", "{error}");
    unknown.abort();
    wait_for_waiting(&fleet, 1).await;
    let mut client = fleet.grpc().await;
    let prompt = generate_request::Prompt::Text("x".into());
    let message = wire::GenerateRequest { prompt: Some(prompt), model: "demo".into(), ..Default::default() };
    let hurried = wire::GenerateRequest { deadline_ms: 100, ..message.clone() };
    assert_eq!(client.generate(hurried).await.unwrap_err().code(), Code::DeadlineExceeded);
    let over_grpc = tokio::spawn(async move { client.generate(message).await.map(drop) });
    wait_for_waiting(&fleet, 2).await;
    fleet.add_worker(0, &token_ids_of("fine"), FakeBehaviour::default()).await;
    assert_eq!(wait_for_response(named).await.status(), 200);
    over_grpc.await.unwrap().unwrap();
    let unknown = completion_request(&fleet, "a", json!({"model": "other"})).send().await.unwrap();
    assert_eq!(unknown.status(), 404);
}

#[tokio::test(flavor = "multi_thread")]
async fn tenant_priority_and_salt_reach_the_worker() {
    let fleet = RouterHarness::start(&token_ids_of("x"), &[FakeBehaviour::default()]).await;
    let post = |body: Value| fleet.client.post(format!("{}/v1/completions", fleet.url)).json(&body);
    let body = json!({"prompt": "x", "priority": -3, "cache_salt": "secret"});
    post(body.clone()).header("x-ballast-tenant", "team").send().await.unwrap();
    post(body.clone()).bearer_auth("sk-one").send().await.unwrap();
    post(body).bearer_auth("sk-two").send().await.unwrap();
    post(json!({"prompt": "x", "service_tier": "auto"})).send().await.unwrap();
    let mut client = fleet.grpc().await;
    let prompt = generate_request::Prompt::Text("x".into());
    let mut request = tonic::Request::new(wire::GenerateRequest {
        prompt: Some(prompt),
        tenant: "other".into(),
        priority: 2,
        cache_salt: "pepper".into(),
        ..Default::default()
    });
    // The metadata of a gateway overrides the field.
    request.metadata_mut().insert("x-ballast-tenant", "team".parse().unwrap());
    let mut stream = client.generate(request).await.unwrap().into_inner();
    while stream.message().await.unwrap().is_some() {}

    let calls = fleet.workers[0].calls();
    let scheduling: Vec<_> = calls.iter().map(|call| (call.priority, call.cache_salt.as_str())).collect();
    assert_eq!(scheduling, [(-3, "secret"), (-3, "secret"), (-3, "secret"), (0, ""), (2, "pepper")]);
    let tenants: Vec<u64> = calls.iter().map(|call| call.tenant).collect();
    assert!(tenants[0] != 0 && tenants[1] != 0 && tenants[0] != tenants[1] && tenants[1] != tenants[2]);
    assert_eq!((tenants[3], tenants[4]), (0, tenants[0]));

    let bad = post(json!({"prompt": "x"})).header("x-ballast-tenant", "a b").send().await.unwrap();
    assert_eq!(bad.status(), 400);
    assert_eq!(bad.json::<Value>().await.unwrap()["error"]["param"], "x-ballast-tenant");
}

#[tokio::test(flavor = "multi_thread")]
async fn impossible_floors_are_a_usage_error() {
    use service::HasExit;
    let directory = tempfile::tempdir().unwrap();
    let mut config = router::RouterConfig::new(None, directory.path().to_owned());
    config.admission.interactive_floor = 91;
    let Err(error) = router::Router::bind(config, None, crate::harness::metrics()).await else {
        panic!("the router accepted impossible floors")
    };
    assert_eq!(error.exit(), service::Exit::Usage);
    let line = service::exit::one_line(&error);
    assert!(line.contains("interactive-floor") && line.contains("91"), "{line}");
}
