// SPDX-License-Identifier: Apache-2.0

//! OpenAI's responses and Anthropic's messages on a real fleet, against the recorded order of their
//! events.

use serde_json::{Value, json};

use crate::harness::ServedFleet;
use crate::harness::http::HttpClient;
use crate::tools::{chat_model, check_call, tools};

/// The named events of a stream, after checking that each has its name as `type`.
fn named_events(http: &HttpClient, path: &str, body: &Value) -> Vec<Value> {
    let (status, text) = http.post(path, body);
    assert_eq!(status, 200, "{text}");
    let event = |block: &str| {
        let (name, data) = block.split_once('\n').unwrap();
        let data: Value = serde_json::from_str(data.strip_prefix("data: ").unwrap()).unwrap();
        assert_eq!(data["type"], name.strip_prefix("event: ").unwrap());
        data
    };
    text.split_terminator("\n\n").map(event).collect()
}

fn types(events: &[Value]) -> Vec<&str> {
    let mut types: Vec<&str> = events.iter().map(|event| event["type"].as_str().unwrap()).collect();
    types.dedup();
    types
}

#[test]
fn the_responses_api_calls_tools_and_continues_conversations() {
    let folder = tempfile::tempdir().unwrap();
    let fleet = ServedFleet::start(&chat_model(folder.path()), &["--workers", "1", "--threads", "1"]);
    let http = HttpClient::connect(&fleet);
    let flat: Vec<Value> = tools()
        .as_array()
        .unwrap()
        .iter()
        .map(|tool| {
            let mut flat = tool["function"].clone();
            flat["type"] = json!("function");
            flat
        })
        .collect();
    let body = json!({
        "input": "Where is main?", "tools": flat, "tool_choice": "required", "max_output_tokens": 300, "seed": 4,
        "temperature": 1.2, "parallel_tool_calls": false, "reasoning": {"effort": "none"}, "metadata": {"a": "b"},
    });
    let whole = http.post_json("/v1/responses", &body);
    assert_eq!((&whole["object"], &whole["status"]), (&json!("response"), &json!("completed")), "{whole}");
    assert_eq!((&whole["metadata"], &whole["tools"]), (&json!({"a": "b"}), &json!(flat)), "{whole}");
    let call = &whole["output"][0];
    assert_eq!((&call["type"], &call["status"]), (&json!("function_call"), &json!("completed")), "{whole}");
    check_call(&json!({"type": "function", "id": call["call_id"], "function": call}));
    assert_eq!(
        whole["usage"]["total_tokens"],
        whole["usage"]["input_tokens"].as_u64().unwrap() + whole["usage"]["output_tokens"].as_u64().unwrap()
    );

    let mut streamed = body.clone();
    streamed["stream"] = json!(true);
    let events = named_events(&http, "/v1/responses", &streamed);
    assert_eq!(
        types(&events),
        [
            "response.created",
            "response.in_progress",
            "response.output_item.added",
            "response.function_call_arguments.delta",
            "response.function_call_arguments.done",
            "response.output_item.done",
            "response.completed",
        ]
    );
    assert!(events.iter().zip(0..).all(|(event, number)| event["sequence_number"] == number));
    let deltas = events.iter().filter_map(|event| event["delta"].as_str()).collect::<String>();
    assert_eq!(call["arguments"], json!(deltas), "the stream has the same call");
    let last = &events.last().unwrap()["response"];
    assert_eq!(last["output"][0]["arguments"], call["arguments"]);

    continue_from_call(&http, &whole);
    refuse_responses(&http);
    fleet.stop();
}

/// The next turn refers to the call, which the router remembers.
fn continue_from_call(http: &HttpClient, whole: &Value) {
    let call = &whole["output"][0];
    let result = json!([{"type": "function_call_output", "call_id": call["call_id"], "output": "line 3"}]);
    let next = json!({
        "input": result, "previous_response_id": whole["id"], "max_output_tokens": 8, "ignore_eos": true, "seed": 1,
        "reasoning": {"effort": "none"},
    });
    let answer = http.post_json("/v1/responses", &next);
    assert_eq!(answer["status"], "incomplete", "{answer}");
    assert_eq!(answer["incomplete_details"]["reason"], "max_output_tokens", "{answer}");
    assert!(
        answer["usage"]["input_tokens"].as_u64() > Some(20),
        "the conversation is in the prompt: {answer}"
    );
    let message = &answer["output"][0];
    assert_eq!(
        (&message["type"], &message["content"][0]["type"]),
        (&json!("message"), &json!("output_text"))
    );
    let mut streamed = next.clone();
    streamed["stream"] = json!(true);
    let events = named_events(http, "/v1/responses", &streamed);
    assert_eq!(
        types(&events),
        [
            "response.created",
            "response.in_progress",
            "response.output_item.added",
            "response.content_part.added",
            "response.output_text.delta",
            "response.output_text.done",
            "response.content_part.done",
            "response.output_item.done",
            "response.incomplete",
        ]
    );
    let text = events.iter().filter_map(|event| event["delta"].as_str()).collect::<String>();
    assert_eq!(message["content"][0]["text"], json!(text));

    let path = format!("/v1/responses/{}", answer["id"].as_str().unwrap());
    assert_eq!(serde_json::from_str::<Value>(&http.get(&path).1).unwrap(), answer);
    let deleted = http.runtime.block_on(async {
        http.client.delete(format!("{}{path}", http.url)).send().await.unwrap().status().as_u16()
    });
    assert_eq!((deleted, http.get(&path).0), (200, 404));
    let thinking = json!({"input": "Hi", "max_output_tokens": 6, "ignore_eos": true, "seed": 1, "store": false,
        "chat_template_kwargs": {"enable_thinking": true}});
    let answer = http.post_json("/v1/responses", &thinking);
    assert_eq!(answer["output"][0]["type"], "reasoning", "{answer}");
    assert_eq!(answer["usage"]["output_tokens_details"]["reasoning_tokens"], 6, "{answer}");
    assert_eq!(http.get(&format!("/v1/responses/{}", answer["id"].as_str().unwrap())).0, 404, "not stored");
}

fn refuse_responses(http: &HttpClient) {
    for (body, param) in [
        (json!({}), "input"),
        (json!({"input": []}), "input"),
        (json!({"input": "x", "max_output_tokens": -1}), "max_output_tokens"),
        (json!({"input": "x", "previous_response_id": "resp_none"}), "previous_response_id"),
        (json!({"input": "x", "background": true}), "background"),
    ] {
        let (status, text) = http.post("/v1/responses", &body);
        let error: Value = serde_json::from_str(&text).unwrap();
        assert!((400..=404).contains(&status) && error["error"]["param"] == param, "{body}: {text}");
    }
}

#[test]
fn the_messages_api_calls_tools_thinks_and_counts_tokens() {
    let folder = tempfile::tempdir().unwrap();
    let fleet = ServedFleet::start(&chat_model(folder.path()), &["--workers", "1", "--threads", "1"]);
    let http = HttpClient::connect(&fleet);
    let listed = tools();
    let tools: Vec<Value> = listed
        .as_array()
        .unwrap()
        .iter()
        .map(|tool| json!({"name": tool["function"]["name"], "input_schema": tool["function"]["parameters"]}))
        .collect();
    let question = json!({"role": "user", "content": [{"type": "text", "text": "Where is main?"}]});
    let body = json!({
        "messages": [question], "tools": tools, "max_tokens": 300, "seed": 4, "temperature": 1,
        "tool_choice": {"type": "any", "disable_parallel_tool_use": true}, "metadata": {"user_id": "u"},
    });
    let whole = http.post_json("/v1/messages", &body);
    assert_eq!((&whole["type"], &whole["role"]), (&json!("message"), &json!("assistant")), "{whole}");
    assert_eq!(whole["stop_reason"], "tool_use", "{whole}");
    let call = &whole["content"][0];
    assert_eq!(call["type"], "tool_use", "{whole}");
    let function = json!({"name": call["name"], "arguments": call["input"].to_string()});
    check_call(&json!({"type": "function", "id": call["id"], "function": function}));

    let mut streamed = body.clone();
    streamed["stream"] = json!(true);
    let events = named_events(&http, "/v1/messages", &streamed);
    let expected = [
        "message_start",
        "content_block_start",
        "content_block_delta",
        "content_block_stop",
        "message_delta",
        "message_stop",
    ];
    assert_eq!(types(&events), expected);
    let input = events.iter().filter_map(|event| event["delta"]["partial_json"].as_str()).collect::<String>();
    assert_eq!(serde_json::from_str::<Value>(&input).unwrap(), call["input"], "the stream has the same call");
    let usage = &events[events.len() - 2]["usage"];
    assert_eq!(usage["output_tokens"], whole["usage"]["output_tokens"], "{usage}");

    answer_call(&http, &question, call);
    think(&http, &question);
    fleet.stop();
}

/// The next turn has the call and its result.
fn answer_call(http: &HttpClient, question: &Value, call: &Value) {
    let results = json!([
        {"type": "tool_result", "tool_use_id": call["id"], "content": "line 3"},
        {"type": "text", "text": "And?"},
    ]);
    let turns =
        json!([question, {"role": "assistant", "content": [call]}, {"role": "user", "content": results}]);
    let next =
        json!({"messages": turns, "system": "Be brief.", "max_tokens": 8, "ignore_eos": true, "seed": 1});
    let answer = http.post_json("/v1/messages", &next);
    assert_eq!(
        (&answer["stop_reason"], &answer["content"][0]["type"]),
        (&json!("max_tokens"), &json!("text"))
    );
    let input_tokens = answer["usage"]["input_tokens"].as_u64().unwrap()
        + answer["usage"]["cache_read_input_tokens"].as_u64().unwrap();
    let counted =
        http.post_json("/v1/messages/count_tokens", &json!({"messages": turns, "system": "Be brief."}));
    assert_eq!(counted, json!({"input_tokens": input_tokens}), "{answer}");
}

fn think(http: &HttpClient, question: &Value) {
    let mut thinking = json!({
        "messages": [question], "max_tokens": 6, "ignore_eos": true, "seed": 1,
        "thinking": {"type": "enabled", "budget_tokens": 1024},
    });
    let answer = http.post_json("/v1/messages", &thinking);
    assert_eq!(answer["content"][0]["type"], "thinking", "{answer}");
    thinking["stream"] = json!(true);
    let events = named_events(http, "/v1/messages", &thinking);
    assert!(events.iter().any(|event| event["delta"]["type"] == "signature_delta"), "{events:?}");
    let text = events.iter().filter_map(|event| event["delta"]["thinking"].as_str()).collect::<String>();
    assert_eq!(answer["content"][0]["thinking"], json!(text));

    for (path, body, status, kind) in [
        ("/v1/messages", json!({"messages": [question]}), 400, "invalid_request_error"),
        (
            "/v1/messages",
            json!({"messages": [question], "max_tokens": 1, "model": "none"}),
            404,
            "not_found_error",
        ),
        ("/v1/messages/batches", json!({}), 404, "not_found_error"),
    ] {
        let (code, text) = http.post(path, &body);
        let error: Value = serde_json::from_str(&text).unwrap();
        assert_eq!(
            (code, &error["type"], &error["error"]["type"]),
            (status, &json!("error"), &json!(kind)),
            "{text}"
        );
    }
}
