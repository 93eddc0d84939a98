// SPDX-License-Identifier: Apache-2.0

//! Tool calls and reasoning on a real fleet: a demo model with a chat template. It knows nothing of
//! tools, so each call is the work of the grammar.

use std::path::{Path, PathBuf};

use serde_json::{Value, json};

use crate::harness::ServedFleet;
use crate::harness::http::HttpClient;
use crate::model_text::rewrite;

const CHAT_TEMPLATE: &str = include_str!("clients/chat.jinja");
const TOOLS: &str = include_str!("clients/tools.json");

pub(crate) fn chat_model(folder: &Path) -> PathBuf {
    let path = folder.join("chat.gguf");
    rewrite(&path, &["tokenizer.chat_template"], |metadata| {
        metadata.put("tokenizer.chat_template", CHAT_TEMPLATE).unwrap();
    });
    path
}

pub(crate) fn tools() -> Value {
    serde_json::from_str(TOOLS).unwrap()
}

fn request(more: Value) -> Value {
    let mut body = json!({
        "messages": [{"role": "user", "content": "Where is main?"}],
        "tools": tools(), "max_tokens": 300, "seed": 4, "temperature": 1.2, "parallel_tool_calls": false,
        "reasoning_effort": "none",
    });
    body.as_object_mut().unwrap().extend(more.as_object().unwrap().clone());
    body
}

#[track_caller]
pub(crate) fn check_call(call: &Value) {
    assert_eq!(call["type"], "function", "{call}");
    assert!(call["id"].as_str().unwrap().starts_with("call_"), "{call}");
    let arguments: Value = serde_json::from_str(call["function"]["arguments"].as_str().unwrap()).unwrap();
    match call["function"]["name"].as_str().unwrap() {
        "find_symbol" => {
            assert!(arguments["name"].as_str().unwrap().chars().count() <= 12, "{call}");
            assert!(["function", "class"].contains(&arguments["kind"].as_str().unwrap()), "{call}");
        }
        "read_line" => assert!((1..=999).contains(&arguments["line"].as_i64().unwrap()), "{call}"),
        other => panic!("{other} is no tool: {call}"),
    }
}

/// The calls of one choice of a stream, joined as clients do.
fn joined_calls(events: &[Value], choice: usize) -> Vec<Value> {
    let mut calls: Vec<Value> = Vec::new();
    let entries = events.iter().filter_map(|event| event["choices"].get(0));
    for entry in entries.filter(|entry| entry["index"] == choice) {
        for part in entry["delta"]["tool_calls"].as_array().into_iter().flatten() {
            let index = part["index"].as_u64().unwrap() as usize;
            if index == calls.len() {
                calls.push(part.clone());
                continue;
            }
            assert!(part.get("id").is_none() && part["function"].get("name").is_none(), "{part}");
            let more = part["function"]["arguments"].as_str().unwrap();
            let whole = calls[index]["function"]["arguments"].as_str().unwrap().to_owned() + more;
            calls[index]["function"]["arguments"] = json!(whole);
        }
    }
    calls
}

#[test]
fn a_model_that_has_to_call_a_tool_calls_it_with_arguments_of_its_schema() {
    let folder = tempfile::tempdir().unwrap();
    let fleet = ServedFleet::start(&chat_model(folder.path()), &["--workers", "1", "--threads", "1"]);
    let http = HttpClient::connect(&fleet);
    let required = request(json!({"tool_choice": "required", "n": 3}));
    let answer = http.post_json("/v1/chat/completions", &required);
    for choice in 0..3 {
        let choice = &answer["choices"][choice];
        assert_eq!(choice["finish_reason"], "tool_calls", "{answer}");
        assert_eq!(choice["message"]["content"], Value::Null, "{answer}");
        let calls = choice["message"]["tool_calls"].as_array().unwrap();
        assert_eq!(calls.len(), 1, "{answer}");
        check_call(&calls[0]);
    }
    let mut streamed = required.clone();
    streamed["stream"] = json!(true);
    let events = http.post_stream("/v1/chat/completions", &streamed);
    for choice in 0..3 {
        let calls = joined_calls(&events, choice);
        check_call(&calls[0]);
        let whole = &answer["choices"][choice]["message"]["tool_calls"][0];
        assert_eq!(calls[0]["function"], whole["function"], "the stream has the same call");
    }

    let named = json!({"type": "function", "function": {"name": "read_line"}});
    let answer = http.post_json("/v1/chat/completions", &request(json!({"tool_choice": named})));
    assert_eq!(answer["choices"][0]["finish_reason"], "stop", "{answer}");
    let call = &answer["choices"][0]["message"]["tool_calls"][0];
    assert_eq!(call["function"]["name"], "read_line", "{answer}");
    check_call(call);

    // The next turn: the call and its result go back to the model, which answers with text.
    let messages = json!([
        {"role": "developer", "content": "Be brief."},
        {"role": "user", "content": [{"type": "text", "text": "Where is main?"}]},
        {"role": "assistant", "content": null, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": call["id"], "content": "line 3"},
    ]);
    let answer =
        http.post_json("/v1/chat/completions", &request(json!({"messages": messages, "max_tokens": 8})));
    assert!(answer["choices"][0]["message"]["content"].is_string(), "{answer}");
    let answer =
        http.post_json("/v1/chat/completions", &request(json!({"tool_choice": "none", "max_tokens": 8})));
    assert!(answer["choices"][0]["message"].get("tool_calls").is_none(), "{answer}");

    // A schema that cannot be compiled is enforced only if it has to be.
    let mut odd = request(json!({"tool_choice": "required"}));
    odd["tools"][0]["function"]["parameters"]["properties"]["name"] =
        json!({"type": "string", "pattern": "("});
    odd["tools"].as_array_mut().unwrap().truncate(1);
    let answer = http.post("/v1/chat/completions", &odd);
    assert_eq!(answer.0, 200, "{}", answer.1);
    odd["tools"][0]["function"]["strict"] = json!(true);
    let (status, answer) = http.post("/v1/chat/completions", &odd);
    assert!(status == 400 && answer.contains("tools"), "{status} {answer}");
    fleet.stop();
}

#[test]
fn reasoning_is_split_from_the_answer_and_can_be_switched_off() {
    let folder = tempfile::tempdir().unwrap();
    let fleet = ServedFleet::start(&chat_model(folder.path()), &["--workers", "1", "--threads", "1"]);
    let http = HttpClient::connect(&fleet);
    let ask = |more: Value| {
        let mut body = json!({
            "messages": [{"role": "user", "content": "Hi"}], "max_tokens": 12, "seed": 1, "ignore_eos": true,
        });
        body.as_object_mut().unwrap().extend(more.as_object().unwrap().clone());
        body
    };
    // The demo model never closes its reasoning.
    let thinking = ask(json!({"chat_template_kwargs": {"enable_thinking": true}}));
    let answer = http.post_json("/v1/chat/completions", &thinking);
    let message = &answer["choices"][0]["message"];
    assert!(message["reasoning_content"].as_str().is_some_and(|text| !text.is_empty()), "{answer}");
    assert_eq!(message["content"], Value::Null, "{answer}");
    assert_eq!(answer["usage"]["completion_tokens_details"]["reasoning_tokens"], 12, "{answer}");
    let mut streamed = thinking.clone();
    streamed["stream"] = json!(true);
    let events = http.post_stream("/v1/chat/completions", &streamed);
    let pieces = events.iter().filter_map(|event| event["choices"][0]["delta"]["reasoning_content"].as_str());
    assert_eq!(json!(pieces.collect::<String>()), message["reasoning_content"]);

    let answer = http.post_json("/v1/chat/completions", &ask(json!({"reasoning_effort": "high"})));
    assert!(answer["choices"][0]["message"]["reasoning_content"].is_string(), "{answer}");
    for off in [
        json!({"reasoning_effort": "none"}),
        json!({"chat_template_kwargs": {"enable_thinking": false}}),
        json!({"reasoning_effort": "high", "chat_template_kwargs": {"enable_thinking": false}}),
    ] {
        let answer = http.post_json("/v1/chat/completions", &ask(off));
        let message = &answer["choices"][0]["message"];
        assert!(message["content"].is_string() && message.get("reasoning_content").is_none(), "{answer}");
    }
    let (status, answer) = http.post("/v1/chat/completions", &ask(json!({"reasoning_effort": "much"})));
    assert!(status == 400 && answer.contains("reasoning_effort"), "{answer}");
    fleet.stop();
}
