// SPDX-License-Identifier: Apache-2.0

//! The OpenAI-compatible HTTP API of a real fleet.

use crate::harness::admin::worker_stats;
use crate::harness::http::HttpClient;
use crate::harness::{ServedFleet, demo_7m, eventually};
use serde_json::{Value, json};

#[test]
fn the_openai_surface_serves_completions() {
    let fleet = ServedFleet::start(&demo_7m(), &["--workers", "2", "--threads", "1"]);
    let http = HttpClient::connect(&fleet);
    assert_eq!(http.get("/health").0, 200);
    assert_eq!(http.get("/ready").0, 200);
    let models: Value = serde_json::from_str(&http.get("/v1/models").1).unwrap();
    let model = models["data"][0]["id"].as_str().unwrap().to_owned();

    let body = json!({"model": model, "prompt": "def fibonacci(n):\n", "max_tokens": 24, "temperature": 0});
    let whole = http.post_json("/v1/completions", &body);
    let text = whole["choices"][0]["text"].as_str().unwrap();
    assert!(text.starts_with("    return fib"), "{text:?}");
    assert_eq!(whole["choices"][0]["finish_reason"], "length");
    assert_eq!(whole["usage"]["completion_tokens"], 24);
    assert_eq!(whole["usage"]["prompt_tokens"], 9);

    let mut streamed = body.clone();
    streamed["stream"] = json!(true);
    streamed["stream_options"] = json!({"include_usage": true});
    let events = http.post_stream("/v1/completions", &streamed);
    let pieces: String = events.iter().filter_map(|e| e["choices"][0]["text"].as_str()).collect();
    assert_eq!(pieces, text);
    assert_eq!(events.last().unwrap()["usage"]["completion_tokens"], 24);

    // A stop string may span several tokens. The text ends before it.
    let mut stopped = body.clone();
    let stop = &text[6..16];
    stopped["stop"] = json!([stop]);
    let cut = http.post_json("/v1/completions", &stopped);
    assert_eq!(cut["choices"][0]["text"].as_str().unwrap(), &text[..text.find(stop).unwrap()]);
    assert_eq!(cut["choices"][0]["finish_reason"], "stop");

    let sampled = json!({"model": model, "prompt": "import ", "max_tokens": 8, "temperature": 1.0, "seed": 7, "n": 3, "logprobs": 2});
    let first = http.post_json("/v1/completions", &sampled);
    let second = http.post_json("/v1/completions", &sampled);
    assert_eq!(first["choices"], second["choices"], "the same seed gives the same choices");
    let texts: Vec<_> = (0..3).map(|i| first["choices"][i]["text"].as_str().unwrap()).collect();
    assert!(
        texts[0] != texts[1] || texts[1] != texts[2],
        "choices draw random numbers of their own: {texts:?}"
    );
    assert_eq!(first["choices"][0]["logprobs"]["token_logprobs"].as_array().unwrap().len(), 8);

    let metrics = http.get("/metrics").1;
    assert!(metrics.contains("ballast"), "{metrics}");
    fleet.stop();
}

#[test]
fn i8_bad_requests_name_the_field() {
    let arguments = ["--workers", "1", "--threads", "1", "--strict-requests"];
    let fleet = ServedFleet::start(&demo_7m(), &arguments);
    let http = HttpClient::connect(&fleet);
    let cases = [
        (json!({"prompt": "x", "temperature": -1}), 400, "temperature", "-1"),
        (json!({"prompt": "x", "top_p": 0}), 400, "top_p", "0"),
        (json!({"prompt": "x", "max_tokens": -5}), 400, "max_tokens", "-5"),
        (json!({"prompt": "x", "n": 0}), 400, "n", "`n` is 0"),
        (json!({"prompt": 5}), 400, "prompt", "expected a string"),
        (json!({"prompt": "x", "model": "no-such-model"}), 404, "model", "no-such-model"),
        (json!({"prompt": [999_999]}), 400, "prompt", "999999"),
        (json!({"prompt": "x ".repeat(9000)}), 400, "prompt", "context"),
    ];
    for (body, code, param, word) in cases {
        let (status, text) = http.post("/v1/completions", &body);
        let error: Value = serde_json::from_str(&text).unwrap();
        assert_eq!((status, error["error"]["param"].as_str()), (code, Some(param)), "{body}: {text}");
        assert!(error["error"]["message"].as_str().unwrap().contains(word), "{body}: {text}");
    }
    // The demo models have no chat template, which gives a named error.
    let (status, text) =
        http.post("/v1/chat/completions", &json!({"messages": [{"role": "user", "content": "hi"}]}));
    assert_eq!(status, 400, "{text}");
    assert!(text.contains("chat template"), "{text}");
    assert_eq!(http.get("/no-such-route").0, 404);
    // An answer quotes what a client sent in part.
    let long = "x".repeat(500_000);
    for (body, code) in [
        (json!({"prompt": "x", "model": long}), 404),
        (json!({"prompt": "x", "temperature": long}), 400),
        (json!({"prompt": "x", &long: 1}), 400),
    ] {
        let (status, text) = http.post("/v1/completions", &body);
        assert!(status == code && text.len() < 4000, "{status}: {} bytes", text.len());
    }
    assert!(http.get(&format!("/{}", "x".repeat(50_000))).1.len() < 4000);
    fleet.stop();
}

/// Choices of a stream, and tokens of each: far more than the worker generates within the test.
const CHOICES: u64 = 16;
const TOKENS: u64 = 3900;

#[test]
fn a_client_that_goes_away_frees_its_blocks() {
    let arguments = ["--workers", "1", "--threads", "1", "--kv-tokens", "65536"];
    let fleet = ServedFleet::start(&demo_7m(), &arguments);
    let http = HttpClient::connect(&fleet);
    let reply = http.runtime.block_on(async {
        let body = json!({
            "prompt": "x", "n": CHOICES, "max_tokens": TOKENS, "ignore_eos": true, "stream": true, "seed": 1,
        });
        let url = format!("{}/v1/completions", http.url);
        let mut reply = http.client.post(url).json(&body).send().await.unwrap();
        assert!(reply.chunk().await.unwrap().is_some());
        reply
    });
    let stats = eventually("every choice runs", || {
        let stats = http.runtime.block_on(worker_stats(&fleet));
        (u64::from(stats.running) == CHOICES).then_some(stats)
    });
    assert!(stats.kv_used_tokens > 0, "{stats:?}");
    // Dropping the reply closes the connection.
    http.runtime.block_on(async { drop(reply) });
    let stats = eventually("the worker's blocks are free", || {
        let stats = http.runtime.block_on(worker_stats(&fleet));
        (stats.running == 0 && stats.kv_used_tokens == 0).then_some(stats)
    });
    // A stream that ends by itself would free its blocks as well.
    assert!(stats.output_tokens < CHOICES * TOKENS / 2, "the worker has not cancelled: {stats:?}");
    eventually("the router reports it", || {
        (http.metric("ballast:num_requests_running")? == 0.0
            && http.metric("ballast:kv_cache_usage_perc")? == 0.0)
            .then_some(())
    });
    fleet.stop();
}
