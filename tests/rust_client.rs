// SPDX-License-Identifier: Apache-2.0

//! The crate `ballast-client` and its example, on real fleets.

use std::process::{Command, Output};
use std::time::{Duration, Instant};

use ballast_client::{
    BallastClient, ClientError, ClientTls, CompletedChoice, Completion, EmbeddingRequest, FinishReason,
    GenerateEvent, GenerateRequest, OutputGrammar, RerankRequest, ServingHealth,
};
use futures::TryStreamExt;
use serde_json::{Value, json};

use crate::harness::api::runtime;
use crate::harness::http::HttpClient;
use crate::harness::{
    ServedFleet, ballast, demo_7m, eventually, in_tree, report_skipped, serve_config, streams_last_seconds,
    text,
};
use crate::tools::chat_model;

const ONE_WORKER: [&str; 4] = ["--workers", "1", "--threads", "1"];
const PROMPT: &str = "def fibonacci(n):\n";
/// Far more than the demo model writes while a client goes away.
const LONG_OUTPUT: u32 = 3500;

async fn connect(url: &str) -> BallastClient {
    BallastClient::builder(url).connect().await.unwrap()
}

fn long_request() -> GenerateRequest {
    GenerateRequest::text(PROMPT).max_tokens(LONG_OUTPUT).ignore_eos()
}

#[track_caller]
fn check_choice(choice: &CompletedChoice, of_http: &Value) {
    assert_eq!(choice.text, of_http["text"], "{of_http}");
    let reason = match choice.finished.reason() {
        FinishReason::Length => "length",
        FinishReason::Stop => "stop",
        FinishReason::Unspecified => "unspecified",
    };
    assert_eq!(reason, of_http["finish_reason"], "{of_http}");
    let logprobs = of_http["logprobs"]["token_logprobs"].as_array().unwrap();
    for (own, other) in choice.logprobs.iter().zip(logprobs) {
        assert!((f64::from(own.logprob) - other.as_f64().unwrap()).abs() < 1e-4, "{own:?} {other}");
    }
    assert_eq!(choice.logprobs.len(), logprobs.len());
}

#[test]
fn the_rust_client_embeds_reranks_and_searches_beams_as_http_does() {
    let fleet = ServedFleet::start(&demo_7m(), &["--workers", "1", "--threads", "1", "--pooling", "last"]);
    let http = HttpClient::connect(&fleet);
    let texts = ["import os", "class Point:"];
    let embeddings = http.post_json("/v1/embeddings", &json!({"input": texts, "dimensions": 8}));
    let documents = ["def add(a, b):", "import sys", "class Point:"];
    let ranked = http.post_json(
        "/v1/rerank",
        &json!({"query": "import os", "documents": documents, "top_n": 2, "truncate_prompt_tokens": 50}),
    );
    let searched = http.post_json(
        "/v1/completions",
        &json!({"prompt": PROMPT, "n": 2, "best_of": 5, "use_beam_search": true, "length_penalty": 2.0}),
    );
    runtime().block_on(async {
        let client = connect(&fleet.grpc).await;
        let request = EmbeddingRequest::texts(texts).dimensions(8);
        let own = client.embed(request).await.unwrap();
        assert_eq!(json!(own.prompt_tokens), embeddings["usage"]["prompt_tokens"]);
        for (vector, other) in own.vectors.iter().zip(embeddings["data"].as_array().unwrap()) {
            assert_eq!(vector.len(), 8);
            let other = other["embedding"].as_array().unwrap().iter().map(|value| value.as_f64().unwrap());
            assert!(vector.iter().zip(other).all(|(&own, other)| (f64::from(own) - other).abs() < 1e-6));
        }
        let tokens = client.tokenize("", texts[0]).await.unwrap();
        let by_tokens = EmbeddingRequest::tokens([tokens]).truncate_tokens(100).without_normalization();
        let raw = client.embed(by_tokens).await.unwrap().vectors.remove(0);
        let length = raw.iter().map(|value| value * value).sum::<f32>().sqrt();
        assert!((raw[0] / length).is_finite() && (length - 1.0).abs() > 1e-3, "{length}");

        let request = RerankRequest::new("import os", documents).top_n(2).truncate_tokens(50);
        let own = client.rerank(request).await.unwrap();
        let others = ranked["results"].as_array().unwrap();
        assert_eq!(own.results.len(), others.len());
        for (own, other) in own.results.iter().zip(others) {
            assert_eq!(json!(own.index), other["index"]);
            assert!((own.score - other["relevance_score"].as_f64().unwrap()).abs() < 1e-6);
        }
        let request =
            GenerateRequest::text(PROMPT).max_tokens(16).choices(2).beam_search(5).length_penalty(2.0);
        let own = client.complete(request).await.unwrap();
        let texts: Vec<&str> = own.choices.iter().map(|choice| choice.text.as_str()).collect();
        assert_eq!(json!(texts), json!([searched["choices"][0]["text"], searched["choices"][1]["text"]]));

        let nothing: [&str; 0] = [];
        assert!(matches!(
            client.embed(EmbeddingRequest::texts(nothing)).await,
            Err(ClientError::InvalidRequest { .. })
        ));
    });
    fleet.stop();
}

#[test]
fn the_rust_client_gets_what_http_returns_for_the_same_seed() {
    let folder = tempfile::tempdir().unwrap();
    let fleet = ServedFleet::start(&chat_model(folder.path()), &ONE_WORKER);
    let http = HttpClient::connect(&fleet);
    let body = json!({
        "prompt": PROMPT, "max_tokens": 40, "temperature": 0.8, "seed": 7, "n": 2, "logprobs": 1,
        "stop": ["return"], "min_tokens": 3,
    });
    let expected = http.post_json("/v1/completions", &body);
    let socket = format!("unix:{}", fleet.runtime_dir().join("router.sock").display());
    let tokens = http.post_json("/tokenize", &json!({"prompt": PROMPT}))["tokens"].clone();
    let tokens: Vec<u32> = serde_json::from_value(tokens).unwrap();
    http.runtime.block_on(async {
        for url in [&fleet.grpc, &socket] {
            let client = connect(url).await;
            assert_eq!(client.health().await.unwrap(), ServingHealth::Serving);
            assert_eq!(client.models().await.unwrap()[0].workers, 1);
            assert_eq!(client.tokenize("", PROMPT).await.unwrap(), tokens);
            let request = |request: GenerateRequest| {
                let request = request.max_tokens(40).temperature(0.8).seed(7).choices(2).top_logprobs(1);
                request.stop(["return"]).min_tokens(3)
            };
            let by_text: Completion = client.complete(request(GenerateRequest::text(PROMPT))).await.unwrap();
            assert_eq!((&by_text.started.prompt_tokens, by_text.started.seed), (&tokens, 7));
            for (choice, of_http) in by_text.choices.iter().zip(expected["choices"].as_array().unwrap()) {
                check_choice(choice, of_http);
                assert_eq!(
                    client.detokenize("", choice.tokens.clone()).await.unwrap()[..5],
                    choice.text[..5]
                );
            }
            assert_ne!(by_text.choices[0].text, by_text.choices[1].text);
            let by_tokens = client.complete(request(GenerateRequest::tokens(tokens.clone()))).await.unwrap();
            assert_eq!(by_tokens.choices[1].tokens, by_text.choices[1].tokens);
        }
    });
    let body = json!({
        "messages": [{"role": "user", "content": "Where is main?"}], "max_tokens": 12, "temperature": 0,
        "reasoning_effort": "none",
    });
    let expected = http.post_json("/v1/chat/completions", &body);
    http.runtime.block_on(async {
        let client = connect(&fleet.grpc).await;
        let chat = GenerateRequest::chat([("user", "Where is main?")]).max_tokens(12).temperature(0.0);
        let answer = client.complete(chat).await.unwrap();
        assert_eq!(answer.choices[0].text, expected["choices"][0]["message"]["content"]);
        let digits = OutputGrammar::Regex("[0-9]{3}".to_owned());
        let answer = client.complete(GenerateRequest::text("x = ").grammar(digits)).await.unwrap();
        assert_eq!((answer.choices[0].text.len(), answer.choices[0].text.parse::<u32>().is_ok()), (3, true));
    });
    fleet.stop();
}

#[test]
fn dropping_a_stream_of_the_rust_client_frees_the_worker_and_deadlines_end_streams() {
    if !streams_last_seconds("dropping a stream of the Rust client") {
        return;
    }
    let fleet = ServedFleet::start(&demo_7m(), &ONE_WORKER);
    let http = HttpClient::connect(&fleet);
    http.runtime.block_on(async {
        let client = connect(&fleet.grpc).await;
        let mut events = client.generate(long_request()).await.unwrap();
        let first = events.try_next().await.unwrap();
        assert!(matches!(first, Some(GenerateEvent::Started(_))), "{first:?}");
        assert!(matches!(events.try_next().await.unwrap(), Some(GenerateEvent::Delta(_))));
    });
    let aborted =
        || http.metric("ballast:request_success_total{").filter(|_| http.get("/metrics").1.contains("abort"));
    eventually("the stream counts as aborted", aborted);
    let idle = || http.metric("ballast:num_requests_running").filter(|running| *running == 0.0);
    eventually("the worker is free", idle);
    let written = http.metric("ballast:generation_tokens_total").unwrap();
    assert!(written < f64::from(LONG_OUTPUT), "the stream ended by itself after {written} tokens");

    http.runtime.block_on(async {
        let client = connect(&fleet.grpc).await;
        let begun = Instant::now();
        let request = long_request().deadline(Duration::from_millis(150));
        let error = client.complete(request).await.unwrap_err();
        assert!(matches!(error, ClientError::DeadlineExceeded { .. }), "{error:?}");
        assert!(begun.elapsed() < Duration::from_secs(10), "{:?}", begun.elapsed());
    });
    fleet.stop();
}

#[test]
fn errors_of_the_rust_client_say_what_is_wrong_and_when_to_come_back() {
    let folder = tempfile::tempdir().unwrap();
    let keys = folder.path().join("keys.toml");
    let make_key = |name: &str| {
        let output = ballast().args(["key", name, "--file"]).arg(&keys).output().unwrap();
        text(&output).0.trim().to_owned()
    };
    let key = make_key("free");
    let limited = make_key("limited");
    let entries = std::fs::read_to_string(&keys).unwrap() + "requests-per-minute = 1\n";
    std::fs::write(&keys, entries).unwrap();
    let arguments = [&ONE_WORKER[..], &["--keys", keys.to_str().unwrap()]].concat();
    let fleet = ServedFleet::start(&demo_7m(), &arguments);
    runtime().block_on(async {
        let with_key = |key: &str| BallastClient::builder(&fleet.grpc).api_key(key).connect();
        let short = || GenerateRequest::text(PROMPT).max_tokens(1);
        let client = with_key(&key).await.unwrap();
        client.complete(short()).await.unwrap();
        let error = client.complete(short().model("none")).await.unwrap_err();
        assert!(matches!(&error, ClientError::NotFound { message } if message.contains("none")), "{error:?}");
        let error = client.complete(short().temperature(3.0)).await.unwrap_err();
        assert!(matches!(&error, ClientError::InvalidRequest { message } if message.contains("temperature")));
        let error = connect(&fleet.grpc).await.models().await.unwrap_err();
        assert!(matches!(error, ClientError::Unauthenticated { .. }), "{error:?}");
        let limited = with_key(&limited).await.unwrap();
        limited.complete(short()).await.unwrap();
        let error = limited.complete(short()).await.unwrap_err();
        let retry_after = error.retry_after().unwrap().as_secs();
        assert!(matches!(error, ClientError::RateLimited { .. }) && (1..=60).contains(&retry_after));
        assert!(matches!(with_key("a\nb").await.unwrap_err(), ClientError::ApiKey));
        let error = BallastClient::builder("http://127.0.0.1:1").connect().await.unwrap_err();
        assert!(matches!(error, ClientError::Connect { .. }), "{error:?}");
        let error = BallastClient::builder("no url").connect().await.unwrap_err();
        assert!(matches!(error, ClientError::Url { .. }), "{error:?}");
    });
    fleet.stop();
}

#[test]
fn the_rust_client_speaks_tls_and_shows_its_certificate() {
    let directory = tempfile::Builder::new().prefix("ballast-test-").tempdir().unwrap();
    let file = |name: &str| in_tree("tests/data/tls").join(name);
    let config = format!(
        "[tls]\ncertificate = {:?}\nkey = {:?}\nclient-ca = {:?}\n[[models]]\nname = \"m\"\npath = {:?}\n\
         workers = 1\nthreads = 1\nkv-tokens = 2048\n",
        file("server.pem"),
        file("server.key"),
        file("ca.pem"),
        demo_7m()
    );
    let command = serve_config(&directory.path().join("run"), &config);
    let fleet = ServedFleet::start_command(directory, command);
    let read = |name: &str| std::fs::read(file(name)).unwrap();
    runtime().block_on(async {
        let own = || ClientTls::with_roots(read("ca.pem")).identity(read("client.pem"), read("client.key"));
        let connect = |tls| BallastClient::builder(&fleet.grpc).tls(tls).connect();
        for tls in [own(), own().server_name("localhost")] {
            let client = connect(tls).await.unwrap();
            let answer = client.complete(GenerateRequest::text(PROMPT).max_tokens(4)).await.unwrap();
            assert_eq!(answer.choices[0].tokens.len(), 4, "{answer:?}");
        }
        let error = connect(own().server_name("other")).await.unwrap_err();
        assert!(matches!(error, ClientError::Connect { .. }), "{error:?}");
        let stranger = connect(ClientTls::with_roots(read("ca.pem"))).await;
        // TLS 1.3 tells a client after the handshake that its certificate is missing.
        let refused = match stranger {
            Ok(client) => client.models().await.map(drop),
            Err(error) => Err(error),
        };
        assert!(refused.is_err());
    });
    fleet.stop();
}

fn run_example(arguments: &[&str], key: Option<&str>) -> Option<Output> {
    let mut command = Command::new(option_env!("CARGO")?);
    command.args(["run", "--quiet", "--package", "ballast-client", "--example", "stream", "--"]);
    command.args(arguments).current_dir(in_tree("")).env_remove("BALLAST_API_KEY");
    command.envs(key.map(|key| ("BALLAST_API_KEY", key)));
    // A machine with a GPU has the tests without a toolchain.
    command.output().ok()
}

#[test]
fn the_example_of_the_rust_client_prints_what_http_returns_for_its_seed() {
    let fleet = ServedFleet::start(&demo_7m(), &ONE_WORKER);
    let Some(output) = run_example(&[PROMPT, &fleet.grpc], None) else {
        return report_skipped(format_args!("the example of the Rust client: cargo is not here"));
    };
    let (printed, notes) = text(&output);
    assert!(output.status.success(), "{notes}");
    let body = json!({"prompt": PROMPT, "max_tokens": 64, "temperature": 0.8, "seed": 7});
    let expected = HttpClient::connect(&fleet).post_json("/v1/completions", &body);
    assert_eq!(printed, expected["choices"][0]["text"].as_str().unwrap());
    assert!(notes.contains(&format!("{} tokens, ", expected["usage"]["completion_tokens"])), "{notes}");
    fleet.stop();
}
