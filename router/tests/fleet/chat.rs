// SPDX-License-Identifier: Apache-2.0

//! `/v1/chat/completions`.

use serde_json::{Value, json};

use crate::fake_worker::{FakeBehaviour, token_ids_of};
use crate::harness::{RouterHarness, finish_reason, joined_text};

const REPLY: &str = "Sure: `x = 1` 🙂";

fn request() -> Value {
    json!({"model": "demo", "messages": [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": [{"type": "text", "text": "Hi"}]},
    ]})
}

#[tokio::test(flavor = "multi_thread")]
async fn a_chat_is_rendered_with_the_models_template() {
    let fleet = RouterHarness::start(&token_ids_of(REPLY), &[FakeBehaviour::default()]).await;
    let (status, body) = fleet.post_json("/v1/chat/completions", request()).await;
    assert_eq!(status, 200, "{body}");
    assert_eq!(body["object"], "chat.completion");
    assert_eq!(
        body["choices"][0]["message"],
        json!({"role": "assistant", "content": REPLY, "refusal": null})
    );
    assert_eq!(body["choices"][0]["finish_reason"], "stop");
    let call = &fleet.workers[0].calls()[0];
    let text = String::from_utf8(crate::fake_worker::tokenizer().decode_bytes(&call.tokens)).unwrap();
    assert!(text.ends_with("[system] Be brief.\n[user] Hi\n[assistant] "), "{text}");
    assert_eq!(call.max_tokens, 0, "a chat without a figure may use the context");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_streamed_chat_begins_with_the_role_and_ends_with_done() {
    let fleet = RouterHarness::start(&token_ids_of(REPLY), &[FakeBehaviour::default()]).await;
    let mut request = request();
    request["stream_options"] = json!({"include_usage": true});
    request["n"] = json!(2);
    let (events, done) = fleet.events("/v1/chat/completions", request).await;
    assert!(done);
    assert_eq!(events[0]["object"], "chat.completion.chunk");
    for (choice, event) in events[..2].iter().enumerate() {
        assert_eq!(event["choices"][0]["index"], choice);
        assert_eq!(event["choices"][0]["delta"], json!({"role": "assistant", "content": ""}));
    }
    for choice in 0..2 {
        assert_eq!(joined_text(&events, choice), REPLY);
        assert_eq!(finish_reason(&events, choice).as_deref(), Some("stop"));
    }
    let usage = &events.last().unwrap()["usage"];
    assert_eq!(usage["completion_tokens"], 2 * token_ids_of(REPLY).len());
    let id = &events[0]["id"];
    assert!(events.iter().all(|event| event["id"] == *id));
}

#[tokio::test(flavor = "multi_thread")]
async fn chat_logprobs_have_bytes_and_alternatives() {
    let fleet = RouterHarness::start(&token_ids_of(REPLY), &[FakeBehaviour::default()]).await;
    let mut request = request();
    request["logprobs"] = json!(true);
    request["top_logprobs"] = json!(3);
    let (_, body) = fleet.post_json("/v1/chat/completions", request.clone()).await;
    let content = body["choices"][0]["logprobs"]["content"].as_array().unwrap().clone();
    let bytes: Vec<u8> = content
        .iter()
        .flat_map(|entry| entry["bytes"].as_array().unwrap())
        .map(|byte| byte.as_u64().unwrap() as u8)
        .collect();
    assert_eq!(String::from_utf8(bytes).unwrap(), REPLY);
    assert!(content.iter().all(|entry| entry["top_logprobs"].as_array().unwrap().len() == 3));
    let (events, _) = fleet.events("/v1/chat/completions", request).await;
    let streamed: Vec<Value> = events
        .iter()
        .flat_map(|e| e["choices"][0]["logprobs"]["content"].as_array().cloned().unwrap_or_default())
        .collect();
    assert_eq!(streamed, content);
}

#[tokio::test(flavor = "multi_thread")]
async fn max_completion_tokens_means_max_tokens() {
    let script = token_ids_of(REPLY);
    let fleet = RouterHarness::start(&script, &[FakeBehaviour::default()]).await;
    let mut request = request();
    request["max_completion_tokens"] = json!(2);
    let (_, body) = fleet.post_json("/v1/chat/completions", request).await;
    assert_eq!(body["choices"][0]["finish_reason"], "length");
    assert_eq!(body["usage"]["completion_tokens"], 2);
}

#[tokio::test(flavor = "multi_thread")]
async fn the_final_message_is_continued_on_request() {
    let fleet = RouterHarness::start(&token_ids_of(REPLY), &[FakeBehaviour::default()]).await;
    let mut request = request();
    let messages = request["messages"].as_array_mut().unwrap();
    messages.push(json!({"role": "assistant", "content": "The answer is"}));
    request["continue_final_message"] = json!(true);
    let (status, body) = fleet.post_json("/v1/chat/completions", request.clone()).await;
    assert_eq!(status, 200, "{body}");
    let call = &fleet.workers[0].calls()[0];
    let text = String::from_utf8(crate::fake_worker::tokenizer().decode_bytes(&call.tokens)).unwrap();
    assert!(text.ends_with("[user] Hi\n[assistant] The answer is"), "{text}");
    request["add_generation_prompt"] = json!(true);
    let (status, body) = fleet.post_json("/v1/chat/completions", request).await;
    assert_eq!((status, &body["error"]["param"]), (400, &json!("messages")), "{body}");
}
