// SPDX-License-Identifier: Apache-2.0

//! Error responses: the status, OpenAI's error object, and the name of the field.

use std::io::{Read, Write};
use std::time::Duration;

use serde_json::{Value, json};
use tonic::Code;

use crate::fake_worker::{CONTEXT_TOKENS, FakeBehaviour, RETRY_AFTER, token_ids_of};
use crate::harness::RouterHarness;

/// A fleet that refuses unknown fields.
async fn strict_fleet() -> RouterHarness {
    let strict = |config: &mut router::RouterConfig| config.limits.strict_requests = true;
    RouterHarness::with_config(&token_ids_of("x"), &[FakeBehaviour::default()], strict).await
}

#[tokio::test(flavor = "multi_thread")]
async fn every_invalid_field_is_refused_with_its_name() {
    let fleet = strict_fleet().await;
    let completions = "/v1/completions";
    let chat = "/v1/chat/completions";
    let messages = json!([{"role": "user", "content": "x"}]);
    let long: Vec<u32> = vec![1; CONTEXT_TOKENS as usize];
    let table: Vec<(&str, &str, Value)> = vec![
        (completions, "prompt", json!({"prompt": 3})),
        (completions, "prompt", json!({"prompt": []})),
        (completions, "prompt", json!({"prompt": [[]]})),
        (completions, "prompt", json!({"prompt": [1, 99999999]})),
        (completions, "prompt", json!({"prompt": [-1]})),
        (completions, "prompt", json!({"prompt": long})),
        (completions, "max_tokens", json!({"prompt": "x", "max_tokens": CONTEXT_TOKENS})),
        (completions, "max_tokens", json!({"prompt": "x", "max_tokens": 0})),
        (completions, "max_tokens", json!({"prompt": "x", "max_tokens": -5})),
        (completions, "max_tokens", json!({"prompt": "x", "max_tokens": "many"})),
        (completions, "max_tokens", json!({"prompt": "x", "max_tokens": 1.5})),
        (completions, "temperature", json!({"prompt": "x", "temperature": 3})),
        (completions, "temperature", json!({"prompt": "x", "temperature": 1e300})),
        (completions, "temperature", json!({"prompt": "x", "temperature": "NaN"})),
        (completions, "temperature", json!({"prompt": "x", "temperature": "Infinity"})),
        (completions, "top_p", json!({"prompt": "x", "top_p": 0})),
        (completions, "logprobs", json!({"prompt": "x", "logprobs": 21})),
        (completions, "n", json!({"prompt": "x", "n": 0})),
        (completions, "n", json!({"prompt": vec!["x"; 100], "n": 2})),
        (completions, "stop", json!({"prompt": "x", "stop": 3})),
        (completions, "stop", json!({"prompt": "x", "stop": [""]})),
        (completions, "logit_bias", json!({"prompt": "x", "logit_bias": {"a": 1}})),
        (completions, "logit_bias.5", json!({"prompt": "x", "logit_bias": {"5": "much"}})),
        (completions, "best_of", json!({"prompt": "x", "n": 3, "best_of": 2})),
        (completions, "best_of", json!({"prompt": "x", "best_of": 17})),
        (completions, "best_of", json!({"prompt": "x", "best_of": 3, "stream": true})),
        (completions, "priority", json!({"prompt": "x", "priority": 1u64 << 40})),
        (completions, "service_tier", json!({"prompt": "x", "service_tier": "gold"})),
        (completions, "service_tier", json!({"prompt": "x", "service_tier": "flex", "priority": -1})),
        (completions, "cache_salt", json!({"prompt": "x", "cache_salt": "x".repeat(257)})),
        (completions, "deadline_ms", json!({"prompt": "x", "deadline_ms": 0})),
        (completions, "suffix", json!({"prompt": "x", "suffix": ["y"]})),
        (completions, "suffix", json!({"prompt": "x", "suffix": "y", "truncate_prompt_tokens": 5})),
        (chat, "suffix", json!({"messages": messages, "suffix": "y"})),
        (completions, "logprobs", json!({"prompt": "x", "echo": true, "logprobs": 21})),
        (completions, "prompt_logprobs", json!({"prompt": "x", "prompt_logprobs": -1})),
        (completions, "stream_options", json!({"prompt": "x", "stream_options": {}})),
        (
            completions,
            "stream_options.usage",
            json!({"prompt": "x", "stream": true, "stream_options": {"usage": 1}}),
        ),
        (completions, "temprature", json!({"prompt": "x", "temprature": 1})),
        (completions, "messages", json!({"prompt": "x", "messages": messages})),
        (chat, "messages", json!({"messages": []})),
        (chat, "messages", json!({"messages": "hi"})),
        (chat, "messages[0]", json!({"messages": ["hi"]})),
        (
            chat,
            "messages[1].role",
            json!({"messages": [{"role": "user", "content": "x"}, {"role": "robot"}]}),
        ),
        (chat, "messages", json!({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]})),
        (chat, "top_logprobs", json!({"messages": messages, "top_logprobs": 2})),
        (chat, "tools", json!({"messages": messages, "tools": [{"type": "function"}]})),
        (chat, "best_of", json!({"messages": messages, "best_of": 2})),
        (chat, "response_format.type", json!({"messages": messages, "response_format": {"type": "yaml"}})),
        (chat, "logprobs", json!({"messages": messages, "logprobs": 5})),
    ];
    for (path, param, body) in table {
        let (status, error) = fleet.post_json(path, body.clone()).await;
        assert_eq!(status, 400, "{body}: {error}");
        let error = &error["error"];
        assert_eq!(error["type"], "invalid_request_error", "{body}: {error}");
        assert_eq!(error["param"], param, "{body}: {error}");
        let message = error["message"].as_str().unwrap();
        let name = param.split(['.', '[']).next().unwrap();
        assert!(message.contains(name) || message.contains("context"), "{body}: {message}");
    }
    assert!(fleet.workers[0].calls().is_empty(), "no worker was called");
}

#[tokio::test(flavor = "multi_thread")]
async fn bodies_that_are_not_json_objects_are_refused() {
    let fleet = RouterHarness::start(&token_ids_of("x"), &[FakeBehaviour::default()]).await;
    let deep = format!("{{\"prompt\":{}", "[".repeat(100_000));
    let words = "{\"prompt\":\"x\",\"top_p\":None}";
    for body in ["", "{", "[]", "\"x\"", "{\"prompt\": \"x\",}", "\u{0}", words, deep.as_str()] {
        let url = format!("{}/v1/completions", fleet.url);
        let response = fleet
            .client
            .post(url)
            .header("content-type", "application/json")
            .body(body.to_owned())
            .send()
            .await
            .unwrap();
        assert_eq!(response.status(), 400, "{body:.20}");
        let error: Value = response.json().await.unwrap();
        assert_eq!(error["error"]["type"], "invalid_request_error");
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn numbers_that_json_lacks_are_refused_with_field_and_range() {
    let fleet = RouterHarness::start(&token_ids_of("x"), &[FakeBehaviour::default()]).await;
    for (fields, param, words) in [
        ("\"top_p\":1e999", "top_p", "`top_p` is 1e999, allowed are numbers above 0 up to 1"),
        ("\"temperature\": -1E+999 ", "temperature", "`temperature` is -1E+999, allowed are 0 to 2"),
        ("\n \"min_p\":\n 9e400", "min_p", "`min_p` is 9e400, allowed are 0 to 1"),
        ("\"logit_bias\": {\"7\": 1e999}", "logit_bias", "`logit_bias` is 1e999, allowed are -100 to 100"),
        ("\"max_tokens\": 1e999", "max_tokens", "`max_tokens` is 1e999, allowed are 1 to 4294967295"),
        ("\"top_k\": -1e999", "top_k", "`top_k` is -1e999, allowed are -1 to"),
        ("\"best_of\": 1e999", "best_of", "`best_of` is 1e999, allowed are 1 to 16"),
        ("\"priority\": 1e999", "priority", "`priority` is 1e999, allowed are -2147483648 to"),
        ("\"top_p\":NaN", "top_p", "`top_p` is NaN, allowed are numbers above 0 up to 1"),
        ("\"mirostat_tau\": Infinity", "mirostat_tau", "`mirostat_tau` is Infinity, allowed are 0 to 100"),
        ("\n\"min_p\": -Infinity ", "min_p", "`min_p` is -Infinity, allowed are 0 to 1"),
        ("\"n\": NaN", "n", "`n` is NaN, allowed are 1 to 16"),
        ("\"seed\": NaN", "seed", "`seed` is NaN"),
        ("\"guided_json\": {\"maximum\": 1e999}", "guided_json.maximum", "`guided_json.maximum` is 1e999"),
        ("\"stop_token_ids\": [1, 1e999]", "stop_token_ids[1]", "`stop_token_ids[1]` is 1e999"),
    ] {
        let url = format!("{}/v1/completions", fleet.url);
        let body = format!("{{\"prompt\": \"é\", {fields}}}");
        let response = fleet
            .client
            .post(url)
            .header("content-type", "application/json")
            .body(body.clone())
            .send()
            .await
            .unwrap();
        assert_eq!(response.status(), 400, "{body}");
        let error = response.json::<Value>().await.unwrap()["error"].clone();
        assert_eq!(
            (&error["type"], &error["param"]),
            (&json!("invalid_request_error"), &json!(param)),
            "{body}"
        );
        assert!(error["message"].as_str().unwrap().starts_with(words), "{body}: {error}");
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_value_of_another_type_is_refused_with_field_and_range() {
    let fleet = RouterHarness::start(&token_ids_of("x"), &[FakeBehaviour::default()]).await;
    for (param, value, words) in [
        (
            "temperature",
            json!("x"),
            "`temperature`: invalid type: string \"x\", expected a number; allowed are 0 to 2",
        ),
        ("top_k", json!(1.5), "floating point `1.5`, expected a whole number; allowed are -1 to 4294967295"),
        ("top_k", json!(1e30), "expected a whole number; allowed are -1 to 4294967295"),
        ("n", json!([1]), "sequence, expected a whole number; allowed are 1 to 16"),
        ("dry_allowed_length", json!(true), "expected a whole number; allowed are 1 to 4294967295"),
        ("priority", json!("high"), "expected a whole number; allowed are -2147483648 to 2147483647"),
        ("seed", json!("x"), "string \"x\", expected a whole number"),
    ] {
        let body = json!({"prompt": "x", param: value});
        let (status, error) = fleet.post_json("/v1/completions", body.clone()).await;
        assert_eq!((status, &error["error"]["param"]), (400, &json!(param)), "{body}: {error}");
        assert!(error["error"]["message"].as_str().unwrap().ends_with(words), "{body}: {error}");
    }
    let (status, error) = fleet.post_json("/v1/completions", json!({"n": 1})).await;
    assert_eq!((status, &error["error"]["param"]), (400, &json!("prompt")), "{error}");
    assert!(fleet.workers[0].calls().is_empty(), "no worker was called");
    // Floats without a fraction are integers, as in other servers.
    let whole = json!({"prompt": "x", "max_tokens": 7.0, "n": 2.0, "temperature": 1.0});
    assert_eq!(fleet.post_json("/v1/completions", whole).await.0, 200);
    assert_eq!(fleet.workers[0].calls()[1].max_tokens, 7);
}

#[tokio::test(flavor = "multi_thread")]
async fn unknown_models_routes_and_methods_have_their_own_errors() {
    let fleet = RouterHarness::start(&token_ids_of("x"), &[FakeBehaviour::default()]).await;
    let (status, error) = fleet.post_json("/v1/completions", json!({"model": "gpt-4", "prompt": "x"})).await;
    assert_eq!((status, &error["error"]["code"]), (404, &json!("model_not_found")));
    assert!(
        error["error"]["message"].as_str().unwrap().contains("demo"),
        "the error names the served models: {error}"
    );
    let (status, error) = fleet.get("/v1/models/gpt-4").await;
    assert_eq!((status, &error["error"]["param"]), (404, &json!("model")));
    let (status, error) = fleet.get("/v1/images/generations").await;
    assert_eq!((status, &error["error"]["code"]), (404, &json!("unknown_url")));
    let (status, error) = fleet.get("/v1/completions").await;
    assert_eq!((status, &error["error"]["code"]), (405, &json!("method_not_supported")));
}

#[tokio::test(flavor = "multi_thread")]
async fn an_error_quotes_a_long_text_in_part() {
    const LONG: usize = 500_000;
    let fleet = strict_fleet().await;
    let long = "x".repeat(LONG);
    let mut unknown_field = json!({"prompt": "x"});
    unknown_field[&long] = json!(1);
    for (path, body, status) in [
        ("/v1/completions", json!({"prompt": "x", "model": long}), 404),
        ("/v1/completions", unknown_field, 400),
        ("/v1/completions", json!({"prompt": "x", "temperature": long}), 400),
        ("/v1/completions", json!({"prompt": "x", "response_format": {"type": long}}), 400),
        ("/v1/chat/completions", json!({"messages": [{"role": long, "content": "x"}]}), 400),
        ("/v1/chat/completions", json!({"messages": [{"role": "user"}], "stream_options": {&long: 1}}), 400),
    ] {
        let response = fleet.post(path, body).await;
        let code = response.status().as_u16();
        let text = response.text().await.unwrap();
        assert!(code == status && text.len() < 4000, "{path}: {code}, {} bytes", text.len());
    }
    let (_, error) = fleet.post_json("/v1/completions", json!({"prompt": "x", "model": long})).await;
    let message = error["error"]["message"].as_str().unwrap();
    assert!(message.contains("(500000 bytes)") && message.contains("demo"), "{message}");
    let (status, error) = fleet.get(&format!("/v1/models/{}", "y".repeat(50_000))).await;
    assert!(status == 404 && error.to_string().len() < 4000, "{status}");
}

#[tokio::test(flavor = "multi_thread")]
async fn more_json_values_than_the_limit_are_400() {
    let fleet = RouterHarness::start(&token_ids_of("x"), &[FakeBehaviour::default()]).await;
    let (status, error) = fleet.post_json("/v1/completions", json!({"prompt": vec![1; 1 << 20]})).await;
    assert_eq!(status, 400);
    assert!(error["error"]["message"].as_str().unwrap().contains("1048576 JSON values"), "{error}");
    // Separators in texts are no values: this prompt is refused for its length only.
    let (status, error) = fleet.post_json("/v1/completions", json!({"prompt": ",[".repeat(1 << 20)})).await;
    assert_eq!((status, &error["error"]["code"]), (400, &json!("context_length_exceeded")), "{error}");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_body_over_the_limit_is_413() {
    let fleet = RouterHarness::with_config(&token_ids_of("x"), &[FakeBehaviour::default()], |config| {
        config.limits.body_max = service::ByteSize::kib(4);
    })
    .await;
    let (status, error) = fleet.post_json("/v1/completions", json!({"prompt": "x".repeat(5000)})).await;
    assert_eq!((status, &error["error"]["code"]), (413, &json!("request_too_large")));
}

#[tokio::test(flavor = "multi_thread")]
async fn full_workers_are_503_with_retry_after_before_the_stream_starts() {
    let full = FakeBehaviour {
        refuse: Some((Code::ResourceExhausted, "8 requests are waiting")),
        ..FakeBehaviour::default()
    };
    let fleet = RouterHarness::start(&token_ids_of("x"), &[full.clone(), full]).await;
    let response = fleet.post("/v1/completions", json!({"prompt": "x", "stream": true})).await;
    assert_eq!(response.status(), 503);
    assert_eq!(response.headers()["retry-after"], RETRY_AFTER);
    let error: Value = response.json().await.unwrap();
    assert_eq!(error["error"]["code"], "overloaded");
    assert!(error["error"]["message"].as_str().unwrap().contains("8 requests are waiting"), "{error}");
    assert!(fleet.workers.iter().all(|worker| worker.calls().len() == 1), "every worker was called once");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_worker_that_refuses_is_skipped() {
    let full = FakeBehaviour { refuse: Some((Code::ResourceExhausted, "full")), ..FakeBehaviour::default() };
    let fleet = RouterHarness::start(&token_ids_of("fine"), &[full, FakeBehaviour::default()]).await;
    for _ in 0..4 {
        let (status, body) = fleet.post_json("/v1/completions", json!({"prompt": "x"})).await;
        assert_eq!((status, &body["choices"][0]["text"]), (200, &json!("fine")));
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn an_invalid_argument_of_a_worker_is_400() {
    let refuses = FakeBehaviour {
        refuse: Some((Code::InvalidArgument, "needs 99 KV blocks")),
        ..FakeBehaviour::default()
    };
    let fleet = RouterHarness::start(&token_ids_of("x"), &[refuses]).await;
    let (status, error) = fleet.post_json("/v1/completions", json!({"prompt": "x"})).await;
    assert_eq!((status, &error["error"]["message"]), (400, &json!("needs 99 KV blocks")));
}

#[tokio::test(flavor = "multi_thread")]
async fn more_streams_than_the_limit_are_503() {
    let slow = FakeBehaviour { pause: Duration::from_millis(500), ..FakeBehaviour::default() };
    let fleet = RouterHarness::with_config(&token_ids_of(&"a ".repeat(100)), &[slow], |config| {
        config.limits.streams_max = 2
    })
    .await;
    let running =
        fleet.post("/v1/completions", json!({"prompt": "x", "n": 2, "max_tokens": 99, "stream": true})).await;
    assert_eq!(running.status(), 200);
    let (status, error) = fleet.post_json("/v1/completions", json!({"prompt": "x"})).await;
    assert_eq!((status, &error["error"]["code"]), (503, &json!("overloaded")));
    drop(running);
    crate::completions::wait_for_streams_to_end(&fleet).await;
    let start = std::time::Instant::now();
    while fleet.post("/v1/completions", json!({"prompt": "x", "max_tokens": 1})).await.status() != 200 {
        assert!(start.elapsed() < crate::harness::TIMEOUT, "the permits were not released");
        tokio::time::sleep(Duration::from_millis(10)).await;
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn without_a_worker_the_status_is_503_with_retry_after() {
    let fleet = RouterHarness::start(&[], &[]).await;
    let response = fleet.post("/v1/completions", json!({"prompt": "x"})).await;
    assert_eq!(response.status(), 503);
    assert_eq!(response.headers()["retry-after"], "1");
    assert_eq!(fleet.get("/ready").await.0, 503);
    assert_eq!(fleet.get("/health").await.0, 200);
}

#[tokio::test(flavor = "multi_thread")]
async fn bytes_that_are_not_http_end_only_their_connection() {
    let fleet = RouterHarness::start(&token_ids_of("x"), &[FakeBehaviour::default()]).await;
    let address = fleet.url.strip_prefix("http://").unwrap().to_owned();
    for bytes in [
        &b"\x16\x03\x01\x02\x00"[..],
        b"PRI * HTTP/2.0\r\n\r\nXX\r\n\r\n",
        b"GET / HTTP/9.9\r\n\r\n",
        b"\r\n\0\0",
    ] {
        let (address, bytes) = (address.clone(), bytes.to_vec());
        tokio::task::spawn_blocking(move || {
            let mut stream = std::net::TcpStream::connect(address).unwrap();
            stream.write_all(&bytes).unwrap();
            stream.shutdown(std::net::Shutdown::Write).unwrap();
            let mut answer = Vec::new();
            // The router answers 400 or resets the connection.
            let _: std::io::Result<usize> = stream.read_to_end(&mut answer);
        })
        .await
        .unwrap();
    }
    assert_eq!(fleet.get("/health").await.0, 200);
}
