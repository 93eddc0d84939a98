// SPDX-License-Identifier: Apache-2.0

//! `/v1/completions`.

use std::time::Duration;

use serde_json::{Value, json};

use crate::fake_worker::{FakeBehaviour, token_ids_of};
use crate::harness::{RouterHarness, finish_reason, joined_text};

const TEXT: &str = "    naïve = \"日本語 🙂\"\n    return naïve\n";

fn with_frames(frame_tokens: usize) -> FakeBehaviour {
    FakeBehaviour { frame_tokens, ..FakeBehaviour::default() }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_whole_response_has_text_and_usage() {
    let script = token_ids_of(TEXT);
    let fleet = RouterHarness::start(&script, &[with_frames(3)]).await;
    let (status, body) = fleet
        .post_json("/v1/completions", json!({"model": "demo", "prompt": "def f():\n", "max_tokens": 99}))
        .await;
    assert_eq!(status, 200, "{body}");
    assert_eq!(body["object"], "text_completion");
    assert_eq!(body["choices"][0]["text"], TEXT);
    assert_eq!(body["choices"][0]["finish_reason"], "stop");
    let prompt = fleet.workers[0].calls()[0].prompt_tokens;
    assert_eq!(body["usage"]["prompt_tokens"], prompt);
    assert_eq!(body["usage"]["completion_tokens"], script.len());
    assert_eq!(body["usage"]["total_tokens"], prompt as usize + script.len());
    assert_eq!(body["usage"]["prompt_tokens_details"]["cached_tokens"], 3);
}

#[tokio::test(flavor = "multi_thread")]
async fn the_text_of_a_stream_does_not_depend_on_frames() {
    let script = token_ids_of(TEXT);
    for frame_tokens in [1, 2, 5, 100] {
        let fleet = RouterHarness::start(&script, &[with_frames(frame_tokens)]).await;
        let (events, done) = fleet
            .events(
                "/v1/completions",
                json!({"prompt": "x", "max_tokens": 99, "stream_options": {"include_usage": true}}),
            )
            .await;
        assert!(done);
        assert_eq!(joined_text(&events, 0), TEXT, "{frame_tokens} tokens in a frame");
        assert_eq!(finish_reason(&events, 0).as_deref(), Some("stop"));
        let (last, earlier) = events.split_last().unwrap();
        assert_eq!(last["choices"], json!([]));
        assert_eq!(last["usage"]["completion_tokens"], script.len());
        assert!(earlier.iter().all(|event| event["usage"].is_null() && event.get("usage").is_some()));
        let replacement =
            earlier.iter().any(|e| e["choices"][0]["text"].as_str().unwrap_or("").contains('\u{fffd}'));
        assert!(!replacement, "an incomplete character was sent");
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn stop_strings_across_tokens_end_the_text_and_cancel_the_worker() {
    let text = "abc def ghi jkl mno pqr stu vwx yz";
    let script = token_ids_of(text);
    for (stop, expected) in [(json!("ghi j"), "abc def "), (json!(["zzz", "hi"]), "abc def g")] {
        let slow = FakeBehaviour { pause: Duration::from_millis(20), ..FakeBehaviour::default() };
        let fleet = RouterHarness::start(&script, &[slow]).await;
        let request = json!({"prompt": "x", "max_tokens": 99, "stop": stop});
        let (events, done) = fleet.events("/v1/completions", request.clone()).await;
        assert!(done);
        assert_eq!(joined_text(&events, 0), expected);
        assert_eq!(finish_reason(&events, 0).as_deref(), Some("stop"));
        let (_, body) = fleet.post_json("/v1/completions", request).await;
        assert_eq!(body["choices"][0]["text"], expected);
        assert!(body["choices"][0]["stop_reason"].is_string());
        let used = body["usage"]["completion_tokens"].as_u64().unwrap() as usize;
        assert!(used < script.len(), "{used} tokens");
        wait_for_streams_to_end(&fleet).await;
    }
}

pub(crate) async fn wait_for_streams_to_end(fleet: &RouterHarness) {
    let start = std::time::Instant::now();
    while fleet.workers.iter().any(|worker| worker.open_streams() > 0) {
        assert!(start.elapsed() < crate::harness::TIMEOUT, "a worker's stream was not cancelled");
        tokio::time::sleep(Duration::from_millis(5)).await;
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn an_incomplete_stop_string_is_output() {
    let fleet = RouterHarness::start(&token_ids_of("one two th"), &[FakeBehaviour::default()]).await;
    let request = json!({"prompt": "x", "max_tokens": 99, "stop": "three"});
    assert_eq!(joined_text(&fleet.events("/v1/completions", request).await.0, 0), "one two th");
}

#[tokio::test(flavor = "multi_thread")]
async fn parameters_and_openai_defaults_reach_the_worker() {
    let fleet = RouterHarness::start(&token_ids_of("x"), &[FakeBehaviour::default()]).await;
    let request = json!({
        "prompt": [1, 2, 3], "seed": -1, "temperature": 0.5, "top_p": 0.9, "top_k": 7, "min_p": 0.1,
        "repetition_penalty": 1.1, "presence_penalty": 0.2, "frequency_penalty": -0.3,
        "logit_bias": {"5": -100, "6": 1.5}, "stop_token_ids": [9], "ignore_eos": true, "logprobs": 2,
        "min_tokens": 1, "max_tokens": 5, "user": "an end user", "best_of": 1, "suffix": null
    });
    let (status, body) = fleet.post_json("/v1/completions", request).await;
    assert_eq!(status, 200, "{body}");
    fleet.post_json("/v1/completions", json!({"prompt": [1]})).await;
    let [given, default] = &fleet.workers[0].calls()[..] else { panic!("two calls") };
    assert_eq!(given.tokens, [1, 2, 3]);
    let sampling = given.sampling.clone().unwrap();
    assert_eq!(sampling.seed, Some(u64::MAX));
    assert_eq!((sampling.temperature, sampling.top_k, sampling.top_p), (Some(0.5), Some(7), Some(0.9)));
    assert_eq!((sampling.min_p, sampling.repetition_penalty), (Some(0.1), Some(1.1)));
    assert_eq!((sampling.presence_penalty, sampling.frequency_penalty), (Some(0.2), Some(-0.3)));
    assert_eq!(sampling.logit_bias, [(5, -100.0), (6, 1.5)].into());
    assert_eq!((given.max_tokens, given.min_tokens, given.top_logprobs), (5, 1, Some(2)));
    assert_eq!(given.stop_tokens, [9], "the model's own are ignored");
    assert!(given.deadline_ms > 0);
    assert_eq!(default.max_tokens, 16);
    assert_eq!(default.sampling.clone().unwrap().temperature, Some(1.0));
    assert_eq!(default.stop_tokens, crate::fake_worker::tokenizer().end_of_generation());
}

#[tokio::test(flavor = "multi_thread")]
async fn prompts_and_choices_are_in_order() {
    let fleet =
        RouterHarness::start(&token_ids_of(" ok"), &[FakeBehaviour::default(), FakeBehaviour::default()])
            .await;
    let request = json!({"prompt": ["a", "b"], "n": 2, "max_tokens": 9, "echo": true});
    let (_, body) = fleet.post_json("/v1/completions", request.clone()).await;
    let texts: Vec<&str> =
        body["choices"].as_array().unwrap().iter().map(|c| c["text"].as_str().unwrap()).collect();
    assert_eq!(texts, ["a ok", "a ok", "b ok", "b ok"]);
    let (events, done) = fleet.events("/v1/completions", request).await;
    assert!(done);
    for (choice, text) in texts.iter().enumerate() {
        assert_eq!(joined_text(&events, choice as u64), *text);
        assert!(finish_reason(&events, choice as u64).is_some());
    }
    let calls: Vec<_> = fleet.workers.iter().flat_map(|worker| worker.calls()).collect();
    assert_eq!(calls.len(), 8);
    let seeds: std::collections::HashSet<_> =
        calls.iter().map(|c| c.sampling.clone().unwrap().seed).collect();
    assert_eq!(seeds.len(), 2, "one seed for each request");
    assert_eq!(calls.iter().filter(|call| call.choice == 1).count(), 4);
    assert!(fleet.workers.iter().all(|worker| worker.calls().len() == 4), "spread over both workers");
}

#[tokio::test(flavor = "multi_thread")]
async fn logprobs_have_an_entry_for_each_token() {
    let text = "one two three";
    let script = token_ids_of(text);
    let fleet = RouterHarness::start(&script, &[with_frames(2)]).await;
    let request = json!({"prompt": "x", "max_tokens": 99, "logprobs": 2});
    let (_, body) = fleet.post_json("/v1/completions", request.clone()).await;
    let logprobs = &body["choices"][0]["logprobs"];
    let tokens: String = logprobs["tokens"].as_array().unwrap().iter().map(|t| t.as_str().unwrap()).collect();
    assert_eq!(tokens, text);
    let lines: Vec<f64> =
        logprobs["token_logprobs"].as_array().unwrap().iter().map(|l| l.as_f64().unwrap()).collect();
    assert_eq!(lines, (0..script.len()).map(|i| -(i as f64)).collect::<Vec<_>>());
    assert_eq!(logprobs["top_logprobs"][0].as_object().unwrap().len(), 2);
    assert_eq!(logprobs["text_offset"][0], 0);
    let none_beside = json!({"prompt": "x", "max_tokens": 99, "logprobs": 0});
    let (_, alone) = fleet.post_json("/v1/completions", none_beside).await;
    let drawn = &alone["choices"][0]["logprobs"];
    let token = drawn["tokens"][1].as_str().unwrap();
    assert_eq!(
        drawn["top_logprobs"][1],
        json!({token: -1.0}),
        "the one that was drawn stands there in any case"
    );
    let (events, _) = fleet.events("/v1/completions", request).await;
    let streamed: Vec<Value> = events
        .iter()
        .flat_map(|e| e["choices"][0]["logprobs"]["text_offset"].as_array().cloned().unwrap_or_default())
        .collect();
    assert_eq!(Value::Array(streamed), logprobs["text_offset"]);
}

#[tokio::test(flavor = "multi_thread")]
async fn token_ids_are_returned_if_requested() {
    let script = token_ids_of("a b c");
    let fleet = RouterHarness::start(&script, &[with_frames(2)]).await;
    let request = json!({"prompt": [4, 5], "max_tokens": 99, "return_token_ids": true});
    let (_, body) = fleet.post_json("/v1/completions", request.clone()).await;
    assert_eq!(body["choices"][0]["token_ids"], json!(script));
    assert_eq!(body["choices"][0]["prompt_token_ids"], json!([4, 5]));
    let (events, _) = fleet.events("/v1/completions", request).await;
    let streamed: Vec<Value> = events
        .iter()
        .flat_map(|e| e["choices"][0]["token_ids"].as_array().cloned().unwrap_or_default())
        .collect();
    assert_eq!(Value::Array(streamed), json!(script));
}

#[tokio::test(flavor = "multi_thread")]
async fn a_client_that_disconnects_cancels_its_stream() {
    let slow = FakeBehaviour { pause: Duration::from_millis(20), ..FakeBehaviour::default() };
    let fleet = RouterHarness::start(&token_ids_of(&"word ".repeat(100)), &[slow]).await;
    for stream in [true, false] {
        let request = json!({"prompt": "x", "max_tokens": 200, "stream": stream});
        let answer = fleet.client.post(format!("{}/v1/completions", fleet.url)).json(&request).send();
        let answer = tokio::spawn(answer);
        let start = std::time::Instant::now();
        while fleet.workers[0].open_streams() == 0 {
            assert!(start.elapsed() < crate::harness::TIMEOUT);
            tokio::time::sleep(Duration::from_millis(5)).await;
        }
        match stream {
            true => drop(answer.await.unwrap().unwrap()),
            false => answer.abort(),
        }
        wait_for_streams_to_end(&fleet).await;
    }
}
