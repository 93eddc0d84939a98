//! The OpenAI-compatible surface of a real fleet, as clients use it.

use crate::harness::http::HttpClient;
use crate::harness::{TestFleet, demo_7m, eventually};
use serde_json::{Value, json};

#[test]
fn the_openai_surface_serves_completions() {
    let fleet = TestFleet::start(&demo_7m(), &["--workers", "2", "--threads", "1"]);
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

    // A stop string that spans tokens ends the text before it.
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
    let fleet = TestFleet::start(&demo_7m(), &["--workers", "1", "--threads", "1"]);
    let http = HttpClient::connect(&fleet);
    let cases = [
        (json!({"prompt": "x", "temperature": -1}), 400, "temperature"),
        (json!({"prompt": "x", "top_p": 0}), 400, "top_p"),
        (json!({"prompt": "x", "max_tokens": -5}), 400, "max_tokens"),
        (json!({"prompt": "x", "n": 0}), 400, "n"),
        (json!({"prompt": 5}), 400, "prompt"),
        (json!({"prompt": "x", "model": "no-such-model"}), 404, "no-such-model"),
        (json!({"prompt": [999_999]}), 400, "prompt"),
        (json!({"prompt": "x ".repeat(9000)}), 400, "context"),
    ];
    for (body, code, word) in cases {
        let (status, text) = http.post("/v1/completions", &body);
        assert_eq!(status, code, "{body}: {text}");
        let error: Value = serde_json::from_str(&text).unwrap();
        assert!(error["error"]["message"].as_str().unwrap().contains(word), "{body}: {text}");
    }
    // The demo models have no chat template: a named error, not a guess.
    let (status, text) =
        http.post("/v1/chat/completions", &json!({"messages": [{"role": "user", "content": "hi"}]}));
    assert_eq!(status, 400, "{text}");
    assert!(text.contains("chat template"), "{text}");
    assert_eq!(http.get("/no-such-route").0, 404);
    fleet.stop();
}

#[test]
fn a_client_that_goes_away_frees_its_blocks() {
    let fleet = TestFleet::start(&demo_7m(), &["--workers", "1", "--threads", "1"]);
    let http = HttpClient::connect(&fleet);
    http.runtime.block_on(async {
        let body = json!({"prompt": "x", "max_tokens": 3000, "stream": true, "temperature": 1, "seed": 1});
        let mut reply =
            http.client.post(format!("{}/v1/completions", http.url)).json(&body).send().await.unwrap();
        reply.chunk().await.unwrap();
        // Dropping the reply closes the connection.
    });
    eventually("no request is running", || {
        (http.metric("ballast:num_requests_running")? == 0.0).then_some(())
    });
    eventually("no KV is in use", || (http.metric("ballast:kv_cache_usage_perc")? == 0.0).then_some(()));
    fleet.stop();
}
