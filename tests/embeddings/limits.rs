// SPDX-License-Identifier: Apache-2.0

//! Bounds of embeddings and scores: lengths, costs, and what a large request leaves to others.

use std::path::Path;
use std::time::{Duration, Instant};

use proto::v1::{EmbedInput, EmbedRequest, RerankRequest, embed_input};
use serde_json::{Value, json};

use super::{PooledFleet, pooled_fleet};
use crate::harness::api::connect;
use crate::harness::http::HttpClient;
use crate::harness::{
    ServedFleet, ballast, demo_7m, eventually, model_table, runs_on_host, streams_last_seconds, text,
};

/// Tokens in the KV cache of each model of [`pooled_fleet`], which is smaller than their context.
const KV_TOKENS: u64 = 1024;

/// Sends a request that is refused. Returns the error.
#[track_caller]
fn refused(http: &HttpClient, path: &str, body: &Value) -> Value {
    let (status, text) = http.post(path, body);
    assert_eq!(status, 400, "{text}");
    serde_json::from_str::<Value>(&text).unwrap()["error"].clone()
}

#[track_caller]
fn check_refusal(error: &Value, param: &str, code: Option<&str>, says: &str) {
    assert_eq!((&error["param"], &error["code"]), (&json!(param), &json!(code)), "{error}");
    assert!(error["message"].as_str().unwrap().contains(says), "{error}");
}

fn prompt_tokens(http: &HttpClient, path: &str, body: &Value) -> u64 {
    http.post_json(path, body)["usage"]["prompt_tokens"].as_u64().unwrap()
}

fn check_long_queries(pooled: &PooledFleet) {
    let http = &pooled.http;
    let long = "x = 1\n".repeat(4000);
    let body = json!({"model": "rank", "query": long, "documents": ["a", "b"]});
    check_refusal(
        &refused(http, "/rerank", &body),
        "query",
        Some("context_length_exceeded"),
        "`query` makes a prompt",
    );
    let body = json!({
        "model": "rank", "query": "def sort(values):", "documents": ["a"], "truncate_prompt_tokens": 3,
    });
    check_refusal(
        &refused(http, "/rerank", &body),
        "query",
        Some("context_length_exceeded"),
        "allowed are 3",
    );
    let body = json!({"model": "rank", "text_1": ["a", &long], "text_2": ["b", "c"]});
    check_refusal(
        &refused(http, "/score", &body),
        "text_1",
        Some("context_length_exceeded"),
        "`text_1[1]` makes",
    );
    for model in ["rank", "last"] {
        let body = json!({"model": model, "query": "a", "documents": ["b", &long]});
        check_refusal(
            &refused(http, "/rerank", &body),
            "documents",
            Some("context_length_exceeded"),
            "`documents[1]`",
        );
    }
    // A query of 40 kB for 2,000 documents has 80 MB.
    let body = json!({"model": "rank", "query": "y".repeat(40_000), "documents": vec!["z"; 2000]});
    check_refusal(&refused(http, "/rerank", &body), "documents", None, "allowed are 67108864 together");
    let body = json!({"model": "last", "text_1": vec!["a"; 1500], "text_2": vec!["b"; 1500]});
    check_refusal(&refused(http, "/score", &body), "text_2", None, "have 3000 texts together");
    http.runtime.block_on(async {
        let mut client = connect(&pooled.fleet.grpc).await;
        let documents = vec!["a".to_owned(); 100];
        let request =
            RerankRequest { model: "rank".to_owned(), query: long, documents, ..Default::default() };
        let error = client.rerank(request).await.unwrap_err();
        assert!(error.message().contains("`query` makes a prompt"), "{error}");
    });
}

fn check_cut_documents(http: &HttpClient) {
    let rank = |document: &str, name: &str, limit: i64| {
        let mut body = json!({"model": "rank", "query": "sort", "documents": [document]});
        body[name] = json!(limit);
        prompt_tokens(http, "/rerank", &body)
    };
    let smileys = "\u{1f600}".repeat(3000);
    for document in [&*smileys, &"\u{1f469}\u{200d}\u{1f4bb} é".repeat(1500), &"x = 1\n".repeat(3000)] {
        let found = rank(document, "truncate_prompt_tokens", -1);
        assert!((KV_TOKENS - 8..=KV_TOKENS).contains(&found), "{found}");
        for limit in [16, 17, 18, 19, 20, 100] {
            let found = rank(document, "truncate_prompt_tokens", limit);
            assert!((limit as u64 - 8..=limit as u64).contains(&found), "{found} of {limit}");
        }
        // A limit of the document is not one of the prompt.
        let empty =
            prompt_tokens(http, "/rerank", &json!({"model": "rank", "query": "sort", "documents": [""]}));
        let found = rank(document, "max_tokens_per_doc", 20);
        assert!((empty + 10..=empty + 22).contains(&found), "{found}, {empty} without a document");
        let found = rank(document, "max_tokens_per_doc", 1 << 40);
        assert!((KV_TOKENS - 8..=KV_TOKENS).contains(&found), "{found}");
    }
    let query = "def sort(values): return sorted(values)";
    let whole = prompt_tokens(http, "/v1/embeddings", &json!({"model": "last", "input": query}));
    let body = json!({
        "model": "last", "query": query, "documents": [query, query], "max_tokens_per_doc": 3,
    });
    assert_eq!(prompt_tokens(http, "/rerank", &body), whole + 6, "the query is not cut");
    let mut body = body;
    body["truncate_prompt_tokens"] = json!(2);
    assert_eq!(prompt_tokens(http, "/rerank", &body), 6, "the smaller limit of both counts");
    let body = json!({"model": "rank", "query": "a", "documents": ["b"], "max_tokens_per_doc": 0});
    check_refusal(&refused(http, "/rerank", &body), "max_tokens_per_doc", None, "`max_tokens_per_doc` is 0");
}

fn check_small_kv_cache(http: &HttpClient) {
    let long = vec![7; KV_TOKENS as usize + 1];
    let counted = || http.metric("ballast:prompt_tokens_total{model_name=\"mean\"}").unwrap_or_default();
    let before = counted();
    let body = json!({"model": "mean", "input": [[1, 2], &long]});
    let error = refused(http, "/v1/embeddings", &body);
    check_refusal(&error, "input", Some("kv_budget_exceeded"), "`input[1]`");
    assert_eq!(counted(), before, "nothing was computed");
    let body = json!({"model": "mean", "input": [&long], "truncate_prompt_tokens": -1});
    assert_eq!(prompt_tokens(http, "/v1/embeddings", &body), KV_TOKENS);
    let text = "x = 1\n".repeat(600);
    for (model, says) in [("last", "`documents[1]`"), ("rank", "`documents[1]`")] {
        let body = json!({"model": model, "query": "a", "documents": ["b", text]});
        check_refusal(&refused(http, "/rerank", &body), "documents", Some("kv_budget_exceeded"), says);
    }
}

#[test]
fn texts_that_do_not_fit_are_refused_by_name_or_cut_until_they_fit() {
    if !runs_on_host("a small KV cache") {
        return;
    }
    let pooled = pooled_fleet();
    check_long_queries(&pooled);
    check_cut_documents(&pooled.http);
    check_small_kv_cache(&pooled.http);
    pooled.fleet.stop();
}

#[test]
fn other_requests_do_not_wait_while_a_grpc_call_is_tokenized() {
    let arguments = ["--workers", "1", "--threads", "1", "--pooling", "last"];
    let fleet = ServedFleet::start(&demo_7m(), &arguments);
    let http = HttpClient::connect(&fleet);
    http.runtime.block_on(async {
        // As many calls as keep all threads of the router for connections busy. Together they stay
        // below the bytes that one client may hold.
        let cores = std::thread::available_parallelism().unwrap().get();
        let call = || async {
            let mut client = connect(&fleet.grpc).await;
            let text = "def sort(values):\n    return sorted(values)\n".repeat(160_000 / cores);
            let inputs = vec![EmbedInput { input: Some(embed_input::Input::Text(text)) }; 2];
            let request = EmbedRequest { inputs, truncate_tokens: Some(4), ..EmbedRequest::default() };
            client.embed(request).await.unwrap();
        };
        let begun = Instant::now();
        let calls: Vec<_> = (0..2 * cores).map(|_| call()).collect();
        let mut calls = std::pin::pin!(futures::future::join_all(calls));
        let (mut longest, url) = (Duration::ZERO, format!("{}/health", fleet.http));
        let polls = async {
            loop {
                let asked = Instant::now();
                assert!(http.client.get(&url).send().await.unwrap().status().is_success());
                longest = longest.max(asked.elapsed());
                tokio::time::sleep(Duration::from_millis(5)).await;
            }
        };
        tokio::select! { _ = &mut calls => {}, () = polls => {} }
        let all = begun.elapsed();
        eprintln!("the calls took {all:?}, `/health` at most {longest:?}");
        assert!(longest < all / 4, "`/health` took {longest:?} of {all:?}");
    });
    fleet.stop();
}

fn lines(file: &Path) -> Vec<Value> {
    let text = std::fs::read_to_string(file).unwrap_or_default();
    text.lines().map(|line| serde_json::from_str(line).unwrap()).collect()
}

/// Inputs that take this model seconds.
fn bulk(inputs: usize) -> Vec<Vec<usize>> {
    (0..inputs).map(|input| (0..900).map(|place| 5 + (place * (input + 3)) % 900).collect()).collect()
}

#[test]
fn embeddings_that_do_not_finish_are_charged_and_logged() {
    if !streams_last_seconds("embeddings that do not finish") {
        return;
    }
    let folder = tempfile::tempdir().unwrap();
    let (keys, log) = (folder.path().join("keys.toml"), folder.path().join("usage.jsonl"));
    let key = ballast().args(["key", "team-a", "--file"]).arg(&keys).output().unwrap();
    let key = text(&key).0.trim().to_owned();
    let table = model_table("m", &demo_7m(), "pooling = \"mean\"\nrunning-max = 1");
    let config = format!("[access]\nkeys = {keys:?}\nusage-log = {log:?}\n{table}");
    let fleet = ServedFleet::start_config(&config);
    let http = HttpClient::connect(&fleet);
    let request =
        |body: &Value| http.client.post(format!("{}/v1/embeddings", http.url)).bearer_auth(&key).json(body);
    let wait_for = |count: usize| {
        eventually("the lines are written", || Some(lines(&log)).filter(|lines| lines.len() >= count))
    };
    let all = json!(bulk(200).iter().map(Vec::len).sum::<usize>());
    http.runtime.block_on(async {
        let body = json!({"input": bulk(200), "deadline_ms": 1500});
        assert_eq!(request(&body).send().await.unwrap().status().as_u16(), 504);
        let disconnecting = request(&json!({"input": bulk(200)})).send();
        assert!(tokio::time::timeout(Duration::from_millis(1500), disconnecting).await.is_err());
        let body = json!({"input": [[1, 2, 3], [4, 5]]});
        assert!(request(&body).send().await.unwrap().status().is_success());
    });
    let mut found = wait_for(3);
    // The line of the client that is gone may come after the next one's.
    found.sort_by_key(|line| line["finish_reasons"].to_string());
    let reasons: Vec<&Value> = found.iter().map(|line| &line["finish_reasons"]).collect();
    assert_eq!(reasons, [&json!(["abort"]), &json!(["error"]), &json!([])], "{found:?}");
    for line in &found[..2] {
        let tokens = line["prompt_tokens"].as_u64().unwrap();
        assert!(tokens > 0 && tokens % 900 == 0 && tokens < all.as_u64().unwrap(), "{line}");
        assert_eq!(line["key"], "team-a");
    }
    assert_eq!(found[2]["prompt_tokens"], 5);
    let charged: u64 = found.iter().map(|line| line["prompt_tokens"].as_u64().unwrap()).sum();
    let metrics = http.runtime.block_on(async {
        let request = http.client.get(format!("{}/metrics", http.url)).bearer_auth(&key);
        request.send().await.unwrap().text().await.unwrap()
    });
    for name in ["key_prompt_tokens_total{key=\"team-a\"}", "prompt_tokens_total{model_name=\"m\"}"] {
        assert!(
            metrics.contains(&format!("ballast:{name} {charged}\n")),
            "{name} is not {charged}: {metrics}"
        );
    }
    fleet.stop();
}

#[test]
fn a_bulk_request_leaves_other_tenants_their_turn_after_each_input() {
    let table = model_table("m", &demo_7m(), "pooling = \"mean\"\nrunning-max = 1");
    let fleet = ServedFleet::start_config(&table);
    let http = HttpClient::connect(&fleet);
    http.runtime.block_on(async {
        let post = |path: &str, tenant: &str, body: Value| {
            let request = http.client.post(format!("{}{path}", http.url)).header("x-ballast-tenant", tenant);
            let sent = request.json(&body).send();
            async move {
                let begun = Instant::now();
                let reply = sent.await.unwrap();
                assert!(reply.status().is_success(), "{}", reply.text().await.unwrap());
                begun.elapsed()
            }
        };
        // They hold all permits of the model: one sequence runs, and one waits at the worker.
        let bulk =
            |salt: &str| post("/v1/embeddings", "bulk", json!({"input": bulk(40), "cache_salt": salt}));
        let other = async {
            tokio::time::sleep(Duration::from_millis(500)).await;
            post("/v1/completions", "other", json!({"prompt": "x", "max_tokens": 1})).await
        };
        let (first, second, other) = tokio::join!(bulk("a"), bulk("b"), other);
        eprintln!("embeddings took {first:?} and {second:?}, the completion {other:?}");
        assert!(other < first.min(second) / 4, "{other:?} beside {first:?} and {second:?}");
    });
    fleet.stop();
}
