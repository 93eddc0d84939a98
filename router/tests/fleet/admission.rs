//! Who enters: queues, classes, tenants, deadlines, and what those who do not enter are told.

use std::time::Instant;

use proto::v1::{self as wire, generate_request};
use reqwest::{RequestBuilder, Response};
use router::AdmissionConfig;
use serde_json::{Value, json};
use tokio::task::JoinHandle;
use tonic::Code;

use crate::fake_worker::{Behaviour, Grammars, Misfortune, says};
use crate::harness::{Harness, PATIENCE};

/// One stream at a time, and a second one on its way to it.
const PLACES: usize = 2;

/// A fleet whose streams stand still after their first token, until their client goes.
async fn fleet(queue_max: u32, tenant_queue_max: u32) -> Harness {
    let stands =
        Behaviour { running_max: 1, misfortune: Some((1, Misfortune::Hang)), ..Behaviour::default() };
    Harness::with_config(&says("a b c d"), &[stands], |config| {
        config.admission =
            AdmissionConfig { queue_max, tenant_queue_max, interactive_floor: 0, batch_floor: 0 };
    })
    .await
}

fn ask(fleet: &Harness, tenant: &str, fields: Value) -> RequestBuilder {
    let mut body = json!({"prompt": "x", "max_tokens": 4, "stream": true});
    body.as_object_mut().unwrap().extend(fields.as_object().unwrap().clone());
    fleet.client.post(format!("{}/v1/completions", fleet.url)).header("x-ballast-tenant", tenant).json(&body)
}

/// Streams that have begun, as many as there are places.
async fn full(fleet: &Harness, tenant: &str) -> Vec<Response> {
    let mut running = Vec::new();
    for _ in 0..PLACES {
        let response = ask(fleet, tenant, json!({})).send().await.unwrap();
        assert_eq!(response.status(), 200);
        running.push(response);
    }
    running
}

/// A request in the queue, behind those that are there.
async fn queued(fleet: &Harness, tenant: &str, fields: Value) -> JoinHandle<Response> {
    let before = waiting(fleet).await;
    let request = ask(fleet, tenant, fields);
    let queued = tokio::spawn(async move { request.send().await.unwrap() });
    until_waiting(fleet, before + 1).await;
    queued
}

async fn answer(queued: JoinHandle<Response>) -> Response {
    tokio::time::timeout(PATIENCE, queued).await.expect("an answer in time").unwrap()
}

async fn metrics(fleet: &Harness) -> String {
    fleet.client.get(format!("{}/metrics", fleet.url)).send().await.unwrap().text().await.unwrap()
}

/// Requests in the queue, of all classes.
async fn waiting(fleet: &Harness) -> usize {
    let text = metrics(fleet).await;
    let lines = text.lines().filter(|line| line.starts_with("ballast:num_requests_queued{"));
    lines.map(|line| line.rsplit(' ').next().unwrap().parse::<usize>().unwrap()).sum()
}

async fn until_waiting(fleet: &Harness, count: usize) {
    let start = Instant::now();
    while waiting(fleet).await != count {
        assert!(start.elapsed() < PATIENCE, "{count} should wait, {} do", waiting(fleet).await);
        tokio::time::sleep(std::time::Duration::from_millis(5)).await;
    }
}

async fn until_calls(fleet: &Harness, count: usize) {
    let start = Instant::now();
    while fleet.workers[0].calls().len() != count {
        assert!(start.elapsed() < PATIENCE, "{count} calls should come");
        tokio::time::sleep(std::time::Duration::from_millis(5)).await;
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_full_queue_refuses_with_a_time_and_those_inside_go_on() {
    let fleet = fleet(2, 2).await;
    let mut running = full(&fleet, "a").await;
    let first = queued(&fleet, "a", json!({})).await;
    let second = queued(&fleet, "b", json!({})).await;
    assert_eq!(fleet.workers[0].calls().len(), PLACES, "nothing that waits is on the worker");

    let refused = ask(&fleet, "b", json!({})).send().await.unwrap();
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

    assert!(running[0].chunk().await.unwrap().is_some(), "those inside have their tokens");
    // Tenant b holds nothing yet.
    running.pop();
    assert_eq!(answer(second).await.status(), 200);
    running.pop();
    assert_eq!(answer(first).await.status(), 200);
    let text = metrics(&fleet).await;
    let refusals =
        "ballast:requests_refused_total{model_name=\"demo\",class=\"default\",reason=\"overloaded\"}";
    let waits = "ballast:request_queue_time_seconds_count{model_name=\"demo\",class=\"default\"}";
    for line in [refusals, waits, "ballast:num_permits{model_name=\"demo\"} 2"] {
        assert!(text.contains(line), "{line} is missing in\n{text}");
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_tenants_own_bound_is_429_and_others_still_enter() {
    let fleet = fleet(10, 1).await;
    let running = full(&fleet, "a").await;
    let _waits = queued(&fleet, "a", json!({})).await;
    let refused = ask(&fleet, "a", json!({})).send().await.unwrap();
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

    let _other = queued(&fleet, "b", json!({})).await;
    let text = metrics(&fleet).await;
    let line = "ballast:num_tenant_requests_queued{model_name=\"demo\",tenant=\"b\"} 1";
    assert!(text.contains(line), "{text}");
    drop(running);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_flood_of_one_tenant_does_not_hold_up_another() {
    let fleet = fleet(100, 100).await;
    let mut running = full(&fleet, "flood").await;
    let mut flood = Vec::new();
    for _ in 0..8 {
        flood.push(queued(&fleet, "flood", json!({})).await);
    }
    let other = queued(&fleet, "other", json!({})).await;
    // It holds no place: the next one is its own, or the one after if that goes by age.
    let mut places = 0;
    let flooding = fleet.workers[0].calls()[0].tenant;
    while fleet.workers[0].calls().iter().all(|call| call.tenant == flooding) {
        assert!(places < 2, "passed by {places} of the flood");
        places += 1;
        drop(running.pop().expect("two streams run"));
        until_calls(&fleet, PLACES + places).await;
    }
    assert_eq!(answer(other).await.status(), 200);
    assert_ne!(flooding, 0);
}

#[tokio::test(flavor = "multi_thread")]
async fn classes_come_in_their_order() {
    let fleet = fleet(10, 10).await;
    let mut running = full(&fleet, "a").await;
    let tiers = ["flex", "default", "priority"];
    let mut waiting = Vec::new();
    for tier in tiers {
        waiting.push(queued(&fleet, "a", json!({"service_tier": tier})).await);
    }
    for (place, tier) in tiers.iter().rev().enumerate() {
        drop(running.remove(0));
        running.push(answer(waiting.pop().unwrap()).await);
        let call = &fleet.workers[0].calls()[PLACES + place];
        assert_eq!(
            call.priority,
            ["priority", "default", "flex"].iter().position(|t| t == tier).unwrap() as i32 - 1
        );
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_client_that_goes_away_in_the_queue_frees_its_place() {
    let fleet = fleet(1, 1).await;
    let mut running = full(&fleet, "a").await;
    let gone = queued(&fleet, "a", json!({})).await;
    assert_eq!(ask(&fleet, "b", json!({})).send().await.unwrap().status(), 503);
    gone.abort();
    until_waiting(&fleet, 0).await;
    let next = queued(&fleet, "b", json!({})).await;
    running.pop();
    assert_eq!(answer(next).await.status(), 200);
    assert_eq!(fleet.workers[0].calls().len(), PLACES + 1, "the one that left was never placed");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_deadline_that_passes_in_the_queue_is_an_error_with_a_name() {
    let fleet = fleet(4, 4).await;
    let running = full(&fleet, "a").await;
    let late = ask(&fleet, "a", json!({"deadline_ms": 50})).send().await.unwrap();
    assert_eq!(late.status(), 504);
    let error = late.json::<Value>().await.unwrap()["error"].clone();
    assert_eq!(error["code"], "deadline_exceeded", "{error}");
    assert!(error["message"].as_str().unwrap().contains("before it was admitted"), "{error}");
    let mut client = fleet.grpc().await;
    let prompt = generate_request::Prompt::Text("x".into());
    let request = wire::GenerateRequest { prompt: Some(prompt), deadline_ms: 50, ..Default::default() };
    assert_eq!(client.generate(request).await.unwrap_err().code(), Code::DeadlineExceeded);
    until_waiting(&fleet, 0).await;
    assert_eq!(fleet.workers[0].calls().len(), PLACES, "no worker was asked");
    drop(running);
}

#[tokio::test(flavor = "multi_thread")]
async fn what_never_fits_is_refused_at_once_with_the_numbers() {
    let small = Behaviour { kv_blocks: 4, running_max: 2, queue_max: 3, ..Behaviour::default() };
    let fleet = Harness::start(&says("x"), &[small]).await;
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
    assert!(fleet.workers[0].calls().is_empty(), "no worker was asked");
    let (status, _) = fleet.post_json("/v1/completions", json!({"prompt": ids, "max_tokens": 5})).await;
    assert_eq!(status, 200);
}

#[tokio::test(flavor = "multi_thread")]
async fn more_choices_than_are_ever_taken_are_refused_at_once_with_the_number() {
    // Two workers take three of a tenant each, four of nobody.
    let worker = Behaviour { running_max: 64, queue_max: 4, tenant_queue_max: 3, ..Behaviour::default() };
    let fleet = Harness::start(&says("x"), &[worker.clone(), worker.clone()]).await;
    let choices = async |fleet: &Harness, tenant: Option<&str>, n: u32| {
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
    // What this process has room for is a bound, too, and waiting would not help.
    let fleet = Harness::with_config(&says("x"), &[worker], |config| config.streams_max = 2).await;
    let (status, error) = choices(&fleet, None, 3).await;
    assert_eq!((status, &error["code"]), (400, &json!("too_many_choices")), "{error}");
    assert!(error["message"].as_str().unwrap().contains("at most 2 per request"), "{error}");
}

#[tokio::test(flavor = "multi_thread")]
async fn choices_of_a_prompt_go_to_one_worker_while_it_has_seats() {
    let worker = Behaviour { running_max: 4, ..Behaviour::default() };
    let fleet = Harness::start(&says("x"), &[worker.clone(), worker]).await;
    let calls = || -> Vec<usize> { fleet.workers.iter().map(|worker| worker.calls().len()).collect() };
    let (status, _) = fleet.post_json("/v1/completions", json!({"prompt": "x", "n": 4})).await;
    assert_eq!(status, 200);
    let mut first = calls();
    first.sort_unstable();
    assert_eq!(first, [0, 4]);
    // Two prompts of three choices each: one for each worker.
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
async fn a_floor_is_seats_and_not_places_in_a_workers_queue() {
    let stands =
        Behaviour { running_max: 20, misfortune: Some((1, Misfortune::Hang)), ..Behaviour::default() };
    // Of 20 seats 2 are for interactive requests, 1 for batches.
    let fleet = Harness::with_config(&says("a b c d"), &[stands], |config| {
        config.admission =
            AdmissionConfig { queue_max: 100, tenant_queue_max: 100, interactive_floor: 10, batch_floor: 5 };
    })
    .await;
    let mut running = Vec::new();
    for _ in 0..17 {
        running.push(ask(&fleet, "a", json!({})).send().await.unwrap());
    }
    let _waits = queued(&fleet, "a", json!({})).await;
    for tier in ["priority", "flex", "priority"] {
        running.push(ask(&fleet, "b", json!({"service_tier": tier})).send().await.unwrap());
    }
    let _more = queued(&fleet, "b", json!({"service_tier": "priority"})).await;
    assert_eq!(fleet.workers[0].calls().len(), 20, "each has a seat");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_grammar_that_is_none_is_refused_before_anything_waits() {
    let fleet = fleet(1, 1).await;
    let mut running = full(&fleet, "a").await;
    let waits = queued(&fleet, "a", json!({})).await;
    // Neither the queue nor the tenant has a place left.
    for _ in 0..2 {
        let refused = ask(&fleet, "a", json!({"guided_regex": "bad"})).send().await.unwrap();
        assert_eq!(refused.status(), 400);
        let error = refused.json::<Value>().await.unwrap()["error"].clone();
        assert_eq!(error["param"], "guided_regex", "{error}");
        assert!(error["message"].as_str().unwrap().contains("nothing matches"), "{error}");
    }
    assert_eq!(fleet.workers[0].grammar_calls(), 1, "what was found is known");
    assert_eq!(ask(&fleet, "a", json!({"guided_regex": "fine"})).send().await.unwrap().status(), 429);
    assert_eq!(waiting(&fleet).await, 1);
    running.pop();
    let inside = answer(waits).await;
    assert_eq!(inside.status(), 200);
    let next = queued(&fleet, "a", json!({"guided_regex": "fine"})).await;
    drop(inside);
    assert_eq!(answer(next).await.status(), 200);
    assert_eq!(fleet.workers[0].grammar_calls(), 2);
    let kinds = fleet.workers[0].calls().iter().filter(|call| call.grammar.is_some()).count();
    assert_eq!(kinds, 1, "no worker was asked to generate for the other");
}

#[tokio::test(flavor = "multi_thread")]
async fn checks_of_grammars_are_bounded_for_each_tenant() {
    let hangs = Behaviour { grammars: Grammars::Hang, ..Behaviour::default() };
    let fleet = Harness::start(&says("x"), &[hangs]).await;
    let mut flood = Vec::new();
    for n in 0..12 {
        let request = ask(&fleet, "flood", json!({"guided_regex": format!("x{n}")}));
        flood.push(tokio::spawn(async move { request.send().await.unwrap() }));
    }
    let start = Instant::now();
    let until_asked = async |count: usize| {
        while fleet.workers[0].grammar_calls() < count {
            assert!(start.elapsed() < PATIENCE, "{count} grammars should be asked about");
            tokio::time::sleep(std::time::Duration::from_millis(5)).await;
        }
    };
    until_asked(4).await;
    let late = ask(&fleet, "flood", json!({"guided_regex": "late", "deadline_ms": 50})).send().await.unwrap();
    assert_eq!(late.status(), 504, "a deadline ends this wait, too");
    assert_eq!(fleet.workers[0].grammar_calls(), 4, "the rest of the flood waits here");
    let other = ask(&fleet, "other", json!({"guided_regex": "y"}));
    let other = tokio::spawn(async move { other.send().await.unwrap() });
    until_asked(5).await;
    assert_eq!(waiting(&fleet).await, 0, "nobody has entered the queue");
    // Who goes away makes room for the next.
    flood.iter().for_each(JoinHandle::abort);
    other.abort();
    let next: Vec<_> = (0..4)
        .map(|n| {
            let request = ask(&fleet, "flood", json!({"guided_regex": format!("z{n}")}));
            tokio::spawn(async move { request.send().await.unwrap() })
        })
        .collect();
    until_asked(9).await;
    next.iter().for_each(JoinHandle::abort);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_worker_without_room_for_grammars_is_passed_over() {
    let crowded = Behaviour { grammars: Grammars::Crowded, ..Behaviour::default() };
    let fleet = Harness::start(&says("x"), &[crowded.clone(), Behaviour::default()]).await;
    let (status, body) =
        fleet.post_json("/v1/completions", json!({"prompt": "x", "guided_regex": "x"})).await;
    assert_eq!(status, 200, "{body}");
    let fleet = Harness::start(&says("x"), &[crowded]).await;
    let refused = fleet.post("/v1/completions", json!({"prompt": "x", "guided_regex": "x"})).await;
    assert_eq!((refused.status().as_u16(), &refused.headers()["retry-after"]), (503, &"1".parse().unwrap()));
}

#[tokio::test(flavor = "multi_thread")]
async fn a_grammar_that_costs_a_worker_its_compiler_is_tried_on_no_other() {
    let ruin = Behaviour { grammars: Grammars::Ruin, ..Behaviour::default() };
    let fleet = Harness::start(&says("x"), &[ruin.clone(), ruin]).await;
    let refused = fleet.post("/v1/completions", json!({"prompt": "x", "guided_regex": "x"})).await;
    assert_eq!((refused.status().as_u16(), refused.headers().get("retry-after")), (502, None));
    let error = refused.json::<Value>().await.unwrap();
    assert!(error["error"]["message"].as_str().unwrap().contains("given up"), "{error}");
    assert_eq!(fleet.workers.iter().map(|worker| worker.grammar_calls()).sum::<usize>(), 1);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_workers_bound_of_a_tenant_is_429() {
    let full = Behaviour {
        refuse: Some((Code::ResourceExhausted, "3 requests of this tenant wait already")),
        refuses_tenant: true,
        ..Behaviour::default()
    };
    let fleet = Harness::start(&says("x"), &[full]).await;
    let refused = ask(&fleet, "a", json!({})).send().await.unwrap();
    assert_eq!((refused.status().as_u16(), &refused.headers()["retry-after"]), (429, &"7".parse().unwrap()));
    let error = refused.json::<Value>().await.unwrap();
    assert_eq!(error["error"]["code"], "rate_limit_exceeded", "{error}");
}

#[tokio::test(flavor = "multi_thread")]
async fn those_who_wait_go_to_a_worker_that_comes() {
    let mut fleet = fleet(10, 10).await;
    let running = full(&fleet, "a").await;
    let waits = queued(&fleet, "a", json!({})).await;
    fleet.add_worker(5, &says("a b c d"), Behaviour::default()).await;
    assert_eq!(answer(waits).await.status(), 200);
    assert_eq!(fleet.workers[1].calls().len(), 1);
    drop(running);
}

#[tokio::test(flavor = "multi_thread")]
async fn tenant_priority_and_salt_reach_the_worker() {
    let fleet = Harness::start(&says("x"), &[Behaviour::default()]).await;
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
    // A gateway's word comes first.
    request.metadata_mut().insert("x-ballast-tenant", "team".parse().unwrap());
    let mut stream = client.generate(request).await.unwrap().into_inner();
    while stream.message().await.unwrap().is_some() {}

    let calls = fleet.workers[0].calls();
    let standing: Vec<_> = calls.iter().map(|call| (call.priority, call.cache_salt.as_str())).collect();
    assert_eq!(standing, [(-3, "secret"), (-3, "secret"), (-3, "secret"), (0, ""), (2, "pepper")]);
    let tenants: Vec<u64> = calls.iter().map(|call| call.tenant).collect();
    assert!(tenants[0] != 0 && tenants[1] != 0 && tenants[0] != tenants[1] && tenants[1] != tenants[2]);
    assert_eq!((tenants[3], tenants[4]), (0, tenants[0]));

    let bad = post(json!({"prompt": "x"})).header("x-ballast-tenant", "a b").send().await.unwrap();
    assert_eq!(bad.status(), 400);
    assert_eq!(bad.json::<Value>().await.unwrap()["error"]["param"], "x-ballast-tenant");
}

#[tokio::test(flavor = "multi_thread")]
async fn impossible_bounds_are_a_usage_error() {
    use service::HasExit;
    let directory = tempfile::tempdir().unwrap();
    let mut config = router::RouterConfig::new(None, directory.path().to_owned());
    config.admission.interactive_floor = 91;
    let Err(error) = router::Router::bind(config, None, crate::harness::metrics()).await else {
        panic!("bound")
    };
    assert_eq!(error.exit(), service::Exit::Usage);
    let line = service::exit::one_line(&error);
    assert!(line.contains("interactive-floor") && line.contains("91"), "{line}");
}
