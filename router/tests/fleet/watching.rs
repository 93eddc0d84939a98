// SPDX-License-Identifier: Apache-2.0

//! Worker discovery, readiness, model listings and metrics.

use std::sync::atomic::Ordering;
use std::time::Duration;

use serde_json::json;

use crate::fake_worker::{FakeBehaviour, token_ids_of};
use crate::harness::{RouterHarness, metrics};

#[tokio::test(flavor = "multi_thread")]
async fn workers_are_discovered_and_removed() {
    let script = token_ids_of("hello");
    let mut fleet = RouterHarness::start(&script, &[]).await;
    assert_eq!(fleet.worker_count().await, 0);
    fleet.add_worker(3, &script, FakeBehaviour::default()).await;
    fleet.wait_for_workers(1).await;
    fleet.add_worker(8, &script, FakeBehaviour::default()).await;
    fleet.wait_for_workers(2).await;
    let (_, models) = fleet.get("/v1/models").await;
    assert_eq!(models["data"][0]["id"], "demo");
    assert_eq!(models["data"][0]["max_model_len"], crate::fake_worker::CONTEXT_TOKENS);
    assert_eq!(models["data"][0]["workers"], 2);
    fleet.workers[0].kill();
    fleet.wait_for_workers(1).await;
    fleet.workers[1].kill();
    fleet.wait_for_workers(0).await;
    // The model stays known: the response is 503 and not 404.
    let (status, _) = fleet.post_json("/v1/completions", json!({"model": "demo", "prompt": "x"})).await;
    assert_eq!(status, 503);
    fleet.add_worker(3, &script, FakeBehaviour::default()).await;
    fleet.wait_for_workers(1).await;
    let (status, body) = fleet.post_json("/v1/completions", json!({"model": "demo", "prompt": "x"})).await;
    assert_eq!((status, &body["choices"][0]["text"]), (200, &json!("hello")));
    let metadata_calls: Vec<usize> =
        fleet.workers.iter().map(|worker| worker.record.metadata_calls.load(Ordering::SeqCst)).collect();
    assert_eq!(metadata_calls, [1, 1, 1], "the router reads the metadata of each worker once");
}

#[tokio::test(flavor = "multi_thread")]
async fn one_content_under_two_names_is_served_by_the_workers_of_each_name() {
    let renamed = FakeBehaviour { model: "renamed", ..FakeBehaviour::default() };
    let mut fleet = RouterHarness::start(&token_ids_of("demo"), &[FakeBehaviour::default()]).await;
    fleet.add_worker(1, &token_ids_of("renamed"), renamed.clone()).await;
    fleet.wait_for_workers(2).await;
    let (_, models) = fleet.get("/v1/models").await;
    let listed: Vec<_> =
        models["data"].as_array().unwrap().iter().map(|model| (&model["id"], &model["workers"])).collect();
    assert_eq!(listed, [(&json!("demo"), &json!(1)), (&json!("renamed"), &json!(1))]);
    // The output of each fake worker is the name of its model.
    let complete =
        async |model| fleet.post_json("/v1/completions", json!({"model": model, "prompt": "x"})).await;
    for model in ["demo", "renamed", "demo"] {
        let (status, answer) = complete(model).await;
        assert_eq!((status, &answer["choices"][0]["text"]), (200, &json!(model)), "{answer}");
        assert_eq!(answer["model"], model);
    }
    fleet.workers[0].kill();
    fleet.wait_for_workers(1).await;
    assert_eq!(
        complete("demo").await.0,
        503,
        "its worker is gone, although another worker has the same content"
    );
    assert_eq!(complete("renamed").await.1["choices"][0]["text"], "renamed");
}

#[tokio::test(flavor = "multi_thread")]
async fn files_that_are_not_worker_sockets_are_ignored() {
    let script = token_ids_of("hello");
    let mut fleet = RouterHarness::start(&script, &[]).await;
    std::fs::write(fleet.directory.path().join("worker-1.sock"), b"not a socket").unwrap();
    std::fs::write(fleet.directory.path().join("worker-x.sock"), b"").unwrap();
    drop(std::os::unix::net::UnixListener::bind(fleet.directory.path().join("worker-2.sock")).unwrap());
    fleet.add_worker(4, &script, FakeBehaviour::default()).await;
    fleet.wait_for_workers(1).await;
    tokio::time::sleep(Duration::from_millis(300)).await;
    assert_eq!(fleet.worker_count().await, 1);
}

#[tokio::test(flavor = "multi_thread")]
async fn streams_are_spread_over_the_workers() {
    let slow = FakeBehaviour { pause: Duration::from_millis(300), ..FakeBehaviour::default() };
    let script = token_ids_of("a b c d e f g h");
    let fleet = RouterHarness::start(&script, &[slow.clone(), slow.clone(), slow]).await;
    let requests = (0..6).map(|_| fleet.post_json("/v1/completions", json!({"prompt": "x"})));
    for (status, _) in futures::future::join_all(requests).await {
        assert_eq!(status, 200);
    }
    let calls: Vec<usize> = fleet.workers.iter().map(|worker| worker.calls().len()).collect();
    assert_eq!(calls, [2, 2, 2]);
}

#[tokio::test(flavor = "multi_thread")]
async fn metrics_count_requests_and_tokens() {
    let fleet = RouterHarness::start(&token_ids_of("a b c"), &[FakeBehaviour::default()]).await;
    fleet.post_json("/v1/completions", json!({"prompt": "x", "max_tokens": 99})).await;
    fleet.post_json("/v1/completions", json!({"prompt": "x", "n": 99})).await;
    let response = fleet.client.get(format!("{}/metrics", fleet.url)).send().await.unwrap();
    assert!(response.headers()["content-type"].to_str().unwrap().starts_with("text/plain; version=0.0.4"));
    let text = response.text().await.unwrap();
    for line in [
        "ballast:request_success_total{model_name=\"demo\",finished_reason=\"stop\"}",
        "ballast:generation_tokens_total{model_name=\"demo\"}",
        "ballast:prompt_tokens_total{model_name=\"demo\"}",
        "ballast:time_to_first_token_seconds_bucket{model_name=\"demo\",le=\"0.1\"}",
        "ballast:inter_token_latency_seconds_count{model_name=\"demo\"}",
        "ballast:e2e_request_latency_seconds_sum{model_name=\"demo\"}",
        "ballast:http_requests_total{handler=\"/v1/completions\",status=\"400\"}",
        "ballast:num_requests_running{model_name=\"demo\",engine=\"worker-0\"} 0",
        "ballast:kv_cache_usage_perc{model_name=\"demo\",engine=\"worker-0\"} 0",
        "ballast:workers{model_name=\"demo\"} 1",
    ] {
        assert!(text.contains(line), "{line} is missing in\n{text}");
    }
    let type_lines = text.lines().filter(|line| line.starts_with("# TYPE"));
    let names: Vec<&str> = type_lines.map(|line| line.split(' ').nth(2).unwrap()).collect();
    let unique: std::collections::HashSet<&str> = names.iter().copied().collect();
    assert_eq!(names.len(), unique.len(), "a metric is declared once");
}

#[tokio::test(flavor = "multi_thread")]
async fn responses_carry_the_request_id() {
    let fleet = RouterHarness::start(&token_ids_of("x"), &[FakeBehaviour::default()]).await;
    let post = || fleet.client.post(format!("{}/v1/completions", fleet.url)).json(&json!({"prompt": "x"}));
    let response = post().header("x-request-id", "mine-1").send().await.unwrap();
    assert_eq!(response.headers()["x-request-id"], "mine-1");
    assert_eq!(response.json::<serde_json::Value>().await.unwrap()["id"], "cmpl-mine-1");
    assert_eq!(fleet.workers[0].calls()[0].request_id, "mine-1");
    let response = post().header("x-request-id", "not\tplain").send().await.unwrap();
    let random = response.headers()["x-request-id"].to_str().unwrap().to_owned();
    assert_eq!(random.len(), 32);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_port_in_use_is_a_clear_error() {
    use service::HasExit;
    let taken = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
    let directory = tempfile::tempdir().unwrap();
    let address = taken.local_addr().unwrap();
    let config = router::RouterConfig::new(Some(address), directory.path().to_owned());
    let Err(error) = router::Router::bind(config, None, metrics()).await else {
        panic!("the router bound a port in use")
    };
    assert_eq!(error.exit(), service::Exit::AddressInUse);
    let line = service::exit::one_line(&error);
    assert!(line.contains(&address.to_string()) && line.contains("choose another port"), "{line}");
}

#[tokio::test(flavor = "multi_thread")]
async fn an_inherited_listener_replaces_the_configured_address() {
    let inherited = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
    let address = inherited.local_addr().unwrap();
    let directory = tempfile::tempdir().unwrap();
    let config = router::RouterConfig::new(Some(([127, 0, 0, 1], 1).into()), directory.path().to_owned());
    let router = router::Router::bind(config, Some(inherited), metrics()).await.unwrap();
    assert_eq!(router.address(), Some(address));
}
