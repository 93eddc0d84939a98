// SPDX-License-Identifier: Apache-2.0

//! Tools and reasoning of `/v1/chat/completions`.

use serde_json::{Value, json};

use crate::fake_worker::{FakeBehaviour, token_ids_of};
use crate::harness::{RouterHarness, finish_reason, joined_text};

const CALL: &str =
    "<tool_call>\n{\"name\": \"get_weather\", \"arguments\": {\"city\": \"Rome\"}}\n</tool_call>";
const ARGUMENTS: &str = "{\"city\": \"Rome\"}";

fn request(more: Value) -> Value {
    let parameters = json!({"type": "object", "properties": {"city": {"type": "string"}}});
    let tool = json!({"type": "function", "function": {"name": "get_weather", "parameters": parameters}});
    let mut body = json!({"messages": [{"role": "user", "content": "Hi"}], "tools": [tool]});
    body.as_object_mut().unwrap().extend(more.as_object().unwrap().clone());
    body
}

async fn answer(script: &str, more: Value) -> (RouterHarness, Value) {
    let fleet = RouterHarness::start(&token_ids_of(script), &[FakeBehaviour::default()]).await;
    let (status, body) = fleet.post_json("/v1/chat/completions", request(more)).await;
    assert_eq!(status, 200, "{body}");
    (fleet, body)
}

#[tokio::test(flavor = "multi_thread")]
async fn calls_reasoning_and_content_come_apart() {
    let script = format!("<think>\nhm\n</think>\n\nI look.\n{CALL}\n{CALL}");
    let (fleet, body) = answer(&script, json!({})).await;
    let message = &body["choices"][0]["message"];
    assert_eq!(
        (&message["content"], &message["reasoning_content"]),
        (&json!("I look."), &json!("hm")),
        "{body}"
    );
    let calls = message["tool_calls"].as_array().unwrap();
    assert_eq!(calls.len(), 2, "{body}");
    assert_ne!(calls[0]["id"], calls[1]["id"]);
    for call in calls {
        assert_eq!(call["function"], json!({"name": "get_weather", "arguments": ARGUMENTS}));
        assert!(call["id"].as_str().unwrap().len() == 29 && call.get("index").is_none(), "{call}");
    }
    assert_eq!(body["choices"][0]["finish_reason"], "tool_calls");
    let reasoning = body["usage"]["completion_tokens_details"]["reasoning_tokens"].as_u64().unwrap();
    assert!((1..body["usage"]["completion_tokens"].as_u64().unwrap()).contains(&reasoning), "{body}");
    let call = &fleet.workers[0].calls()[0];
    assert!(format!("{:?}", call.grammar).contains("get_weather"), "the worker gets a grammar");

    let (events, done) = fleet.events("/v1/chat/completions", request(json!({}))).await;
    assert!(done && finish_reason(&events, 0).as_deref() == Some("tool_calls"));
    let deltas = || events.iter().map(|event| &event["choices"][0]["delta"]);
    let reasoning: String = deltas().filter_map(|delta| delta["reasoning_content"].as_str()).collect();
    assert_eq!((joined_text(&events, 0).as_str(), reasoning.as_str()), ("I look.", "hm"));
    let parts: Vec<&Value> =
        deltas().flat_map(|delta| delta["tool_calls"].as_array().into_iter().flatten()).collect();
    for index in 0..2 {
        let parts: Vec<_> = parts.iter().filter(|part| part["index"] == index).collect();
        assert_eq!(parts[0]["function"], json!({"name": "get_weather", "arguments": ""}));
        assert!(parts[0]["id"].is_string() && parts[1..].iter().all(|part| part.get("id").is_none()));
        let joined: String = parts.iter().filter_map(|part| part["function"]["arguments"].as_str()).collect();
        assert!(joined == ARGUMENTS && parts.len() > 3, "arguments come in pieces");
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn fields_choose_what_a_reply_contains() {
    let script = format!("<think>hm</think>{CALL}{CALL}");
    let (_, single) =
        answer(&script, json!({"parallel_tool_calls": false, "include_reasoning": false})).await;
    let message = &single["choices"][0]["message"];
    assert_eq!(message["tool_calls"].as_array().unwrap().len(), 1, "{single}");
    assert!(message["content"].is_null() && message.get("reasoning_content").is_none(), "{single}");
    let (_, none) = answer(CALL, json!({"tool_choice": "none"})).await;
    assert_eq!(none["choices"][0]["message"]["content"], CALL, "{none}");
    assert_eq!(none["choices"][0]["finish_reason"], "stop");
    let named = json!({"type": "function", "function": {"name": "get_weather"}});
    let (_, named) = answer(CALL, json!({"tool_choice": named})).await;
    assert_eq!(named["choices"][0]["finish_reason"], "stop", "as OpenAI does");
    for malformed in ["<tool_call>\n{\"name\": 5}", "<tool_call>{}</tool_call>", "see <tool_call"] {
        let (_, text) = answer(malformed, json!({})).await;
        assert_eq!(text["choices"][0]["message"]["content"], malformed);
        assert_eq!(text["choices"][0]["finish_reason"], "stop");
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_schema_that_cannot_be_compiled_is_enforced_only_if_it_is_strict() {
    // A fake worker refuses every grammar with this word.
    let mut body = json!({});
    let mut tools = request(json!({}))["tools"].clone();
    tools[0]["function"]["parameters"]["description"] = json!("bad");
    body["tools"] = tools.clone();
    let (fleet, answer) = answer(CALL, body.clone()).await;
    assert_eq!(answer["choices"][0]["finish_reason"], "tool_calls", "{answer}");
    assert_eq!(fleet.workers[0].grammar_calls(), 2, "the second grammar asks for any object");
    tools[0]["function"]["strict"] = json!(true);
    body["tools"] = tools;
    let (status, error) = fleet.post_json("/v1/chat/completions", request(body)).await;
    assert_eq!((status, &error["error"]["param"]), (400, &json!("tools")), "{error}");
}
