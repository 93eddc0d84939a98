// SPDX-License-Identifier: Apache-2.0

//! `suffix` of completions: the model fills in the text between prompt and suffix.

use serde_json::{Value, json};

use crate::harness::http::HttpClient;
use crate::harness::{ServedFleet, demo_7m};
use crate::model_text::rewrite;

const PREFIX: &str = "def add(a, b):\n    ";
const SUFFIX: &str = "\n\nprint(add(1, 2))\n";

fn with(body: &Value, fields: Value) -> Value {
    let mut body = body.clone();
    body.as_object_mut().unwrap().extend(fields.as_object().unwrap().clone());
    body
}

fn refused(http: &HttpClient, path: &str, body: &Value, param: &str, word: &str) {
    let (status, answer) = http.post(path, body);
    let error: Value = serde_json::from_str(&answer).unwrap();
    assert_eq!((status, error["error"]["param"].as_str()), (400, Some(param)), "{body}: {answer}");
    assert!(error["error"]["message"].as_str().unwrap().contains(word), "{body}: {answer}");
}

/// The demo models know the tokens of Qwen2.5-Coder, whose documented prompt is written here by
/// hand.
#[test]
fn a_suffix_gives_the_documented_prompt_for_the_middle() {
    let fleet = ServedFleet::start(&demo_7m(), &["--workers", "1", "--threads", "1"]);
    let http = HttpClient::connect(&fleet);
    let complete = |body: &Value| http.post_json("/v1/completions", body);
    let common = json!({"max_tokens": 12, "temperature": 0, "return_token_ids": true});
    let documented = format!("<|fim_prefix|>{PREFIX}<|fim_suffix|>{SUFFIX}<|fim_middle|>");
    let by_hand = complete(&with(&common, json!({"prompt": documented})));
    let expected = &by_hand["choices"];

    let middle = with(&common, json!({"prompt": PREFIX, "suffix": SUFFIX}));
    let whole = complete(&middle);
    assert_eq!(&whole["choices"], expected, "{whole}");
    assert_eq!(whole["usage"]["prompt_tokens"], by_hand["usage"]["prompt_tokens"]);

    // Streamed, as ids, several prompts with several choices, with echo.
    let events = http.post_stream("/v1/completions", &with(&middle, json!({"stream": true})));
    let text: String = events.iter().filter_map(|event| event["choices"][0]["text"].as_str()).collect();
    assert_eq!(text, expected[0]["text"].as_str().unwrap());
    let tokenize = json!({"prompt": PREFIX, "add_special_tokens": false});
    let ids = http.post_json("/tokenize", &tokenize)["tokens"].clone();
    assert_eq!(&complete(&with(&middle, json!({"prompt": ids})))["choices"], expected);
    let several = complete(&with(&middle, json!({"prompt": ["import ", PREFIX], "n": 2})));
    assert_ne!(several["choices"][0]["prompt_token_ids"], expected[0]["prompt_token_ids"]);
    for choice in [2, 3] {
        assert_eq!(several["choices"][choice]["text"], expected[0]["text"], "{several}");
        let prompt = &several["choices"][choice]["prompt_token_ids"];
        assert!(*prompt == expected[0]["prompt_token_ids"] || (choice == 3 && prompt.is_null()), "{several}");
    }
    let echoed = complete(&with(&middle, json!({"echo": true})));
    let expected_text = format!("{PREFIX}{}", expected[0]["text"].as_str().unwrap());
    assert_eq!(echoed["choices"][0]["text"], json!(expected_text));

    // A suffix of nothing is no suffix.
    let plain = with(&common, json!({"prompt": PREFIX}));
    let continued = complete(&plain);
    assert_ne!(continued["choices"][0]["prompt_token_ids"], expected[0]["prompt_token_ids"]);
    for nothing in [json!(""), Value::Null] {
        assert_eq!(complete(&with(&plain, json!({"suffix": nothing})))["choices"], continued["choices"]);
    }
    let path = "/v1/completions";
    refused(&http, path, &with(&middle, json!({"truncate_prompt_tokens": 8})), "suffix", "truncate");
    refused(&http, path, &with(&middle, json!({"echo": true, "logprobs": 1})), "suffix", "prompt_logprobs");
    refused(&http, path, &with(&middle, json!({"suffix": 5})), "suffix", "expected a string");
    refused(&http, path, &with(&middle, json!({"suffix": "x ".repeat(9000)})), "prompt", "context");
    let chat = json!({"messages": [{"role": "user", "content": "Hi"}], "suffix": SUFFIX});
    refused(&http, "/v1/chat/completions", &chat, "suffix", "not supported");
    fleet.stop();
}

#[test]
fn a_suffix_is_refused_if_the_vocabulary_has_no_tokens_for_the_middle() {
    let folder = tempfile::tempdir().unwrap();
    let model = folder.path().join("no-middle.gguf");
    let keys = ["tokenizer.ggml.fim_", "tokenizer.ggml.token_type"];
    rewrite(&model, &keys, |_| ());
    let fleet = ServedFleet::start(&model, &["--workers", "1", "--threads", "1"]);
    let http = HttpClient::connect(&fleet);
    let body = json!({"prompt": PREFIX, "suffix": SUFFIX, "max_tokens": 4});
    refused(&http, "/v1/completions", &body, "suffix", "tokenizer.ggml.fim_pre_token_id");
    http.post_json("/v1/completions", &with(&body, json!({"suffix": null})));
    fleet.stop();
}
