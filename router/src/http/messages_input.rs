// SPDX-License-Identifier: Apache-2.0

//! Translates a request of Anthropic's messages API to the fields of a chat.
//!
//! | block | message |
//! |---|---|
//! | `text` | content of the same role |
//! | `tool_use` | `tool_calls` of the assistant |
//! | `tool_result` | of the role `tool`, before the rest of its turn |
//! | `thinking` | `reasoning_content` of the assistant |
//!
//! If the last message is the assistant's, the reply continues it.

use serde_json::{Map, Value, json};

use super::error::ApiError;

/// Fields without effect: records of the client, and marks for a cache that needs none.
const IGNORED: [&str; 6] = ["metadata", "service_tier", "betas", "container", "cache_control", "speed"];
const UNSUPPORTED: [&str; 3] = ["mcp_servers", "n", "context_management"];

fn invalid(param: &str, message: impl Into<String>) -> ApiError {
    ApiError::invalid(Some(param), message)
}

pub(super) fn translate(mut fields: Map<String, Value>) -> Result<Map<String, Value>, ApiError> {
    if let Some(name) = UNSUPPORTED.into_iter().find(|name| fields.contains_key(*name)) {
        return Err(invalid(name, format!("`{name}` is not supported")));
    }
    for name in IGNORED {
        fields.remove(name);
    }
    let mut messages = Vec::new();
    if let Some(system) = fields.remove("system") {
        messages.push(json!({"role": "system", "content": text_of("system", &system)?}));
    }
    let given = fields.remove("messages").ok_or_else(|| invalid("messages", "`messages` is missing"))?;
    let given = given.as_array().ok_or_else(|| invalid("messages", "`messages` is no list"))?;
    for (index, message) in given.iter().enumerate() {
        add_message(&format!("messages[{index}]"), message, &mut messages)?;
    }
    if given.last().is_some_and(|last| last["role"] == "assistant") {
        fields.insert("continue_final_message".to_owned(), json!(true));
    }
    fields.insert("messages".to_owned(), Value::Array(messages));
    if let Some(stop) = fields.remove("stop_sequences") {
        fields.insert("stop".to_owned(), stop);
    }
    translate_thinking(&mut fields)?;
    translate_format(&mut fields);
    translate_tools(&mut fields)?;
    Ok(fields)
}

/// A text, or the texts of blocks.
fn text_of(at: &str, content: &Value) -> Result<String, ApiError> {
    match content {
        Value::String(text) => Ok(text.clone()),
        Value::Null => Ok(String::new()),
        Value::Array(blocks) => blocks.iter().map(|block| block_text(at, block)).collect(),
        _ => Err(invalid(at, format!("`{at}` is neither text nor a list of blocks"))),
    }
}

fn block_text<'a>(at: &str, block: &'a Value) -> Result<&'a str, ApiError> {
    match (block["type"].as_str(), block["text"].as_str()) {
        (Some("text"), Some(text)) => Ok(text),
        (kind, _) => {
            let shown: String = kind.unwrap_or("none").chars().take(80).collect();
            Err(invalid(at, format!("`{at}` has a block of the type {shown:?}, which is not supported here")))
        }
    }
}

fn add_message(at: &str, message: &Value, messages: &mut Vec<Value>) -> Result<(), ApiError> {
    let role = match message["role"].as_str() {
        Some(role @ ("user" | "assistant" | "system")) => role,
        _ => {
            let param = format!("{at}.role");
            return Err(invalid(&param, format!("`{param}` is neither user nor assistant")));
        }
    };
    let param = format!("{at}.content");
    let Some(blocks) = message["content"].as_array() else {
        messages.push(json!({"role": role, "content": text_of(&param, &message["content"])?}));
        return Ok(());
    };
    let (mut text, mut reasoning) = (String::new(), String::new());
    let (mut calls, mut results) = (Vec::new(), Vec::new());
    for block in blocks {
        match (block["type"].as_str(), role) {
            (Some("tool_use"), "assistant") => {
                let function = json!({"name": block["name"], "arguments": block["input"].to_string()});
                calls.push(json!({"id": block["id"], "type": "function", "function": function}));
            }
            (Some("tool_result"), "user") => {
                let mut content = text_of(&param, &block["content"])?;
                if block["is_error"] == true {
                    content.insert_str(0, "Error: ");
                }
                results
                    .push(json!({"role": "tool", "tool_call_id": block["tool_use_id"], "content": content}));
            }
            (Some("thinking"), "assistant") => {
                reasoning.push_str(block["thinking"].as_str().unwrap_or_default());
            }
            // Encrypted by another server.
            (Some("redacted_thinking"), "assistant") => {}
            _ => text.push_str(block_text(&param, block)?),
        }
    }
    let has_results = !results.is_empty();
    messages.append(&mut results);
    if has_results && text.is_empty() {
        return Ok(());
    }
    let mut message = json!({"role": role, "content": text});
    if !reasoning.is_empty() {
        message["reasoning_content"] = json!(reasoning);
    }
    if !calls.is_empty() {
        message["tool_calls"] = json!(calls);
    }
    messages.push(message);
    Ok(())
}

/// The budget is a hint: no template takes one.
fn translate_thinking(fields: &mut Map<String, Value>) -> Result<(), ApiError> {
    let Some(thinking) = fields.remove("thinking") else {
        // Anthropic's default.
        fields.entry("enable_thinking").or_insert(json!(false));
        return Ok(());
    };
    let is_on = match thinking["type"].as_str() {
        Some("enabled" | "adaptive") => true,
        Some("disabled") => false,
        _ => {
            return Err(invalid(
                "thinking.type",
                "`thinking.type` is neither enabled, adaptive nor disabled",
            ));
        }
    };
    fields.insert("enable_thinking".to_owned(), json!(is_on));
    Ok(())
}

/// `output_format`, or the same in `output_config`.
fn translate_format(fields: &mut Map<String, Value>) {
    let config = fields.remove("output_config").unwrap_or_default();
    let format = fields.remove("output_format").or_else(|| config.get("format").cloned());
    if let Some(format) = format.filter(|format| format["type"] == "json_schema") {
        let schema = json!({"name": "output", "schema": format["schema"], "strict": true});
        fields.insert("response_format".to_owned(), json!({"type": "json_schema", "json_schema": schema}));
    }
}

fn translate_tools(fields: &mut Map<String, Value>) -> Result<(), ApiError> {
    if let Some(tools) = fields.get_mut("tools").and_then(Value::as_array_mut) {
        for (index, tool) in tools.iter_mut().enumerate() {
            if !matches!(tool["type"].as_str(), None | Some("custom")) {
                let kind: String = tool["type"].to_string().chars().take(80).collect();
                let message = format!("`tools[{index}]` has the type {kind}, which is not supported");
                return Err(invalid("tools", message));
            }
            let mut function = Map::new();
            for (name, chat_name) in [
                ("name", "name"),
                ("description", "description"),
                ("input_schema", "parameters"),
                ("strict", "strict"),
            ] {
                if let Some(value) = tool.get(name) {
                    function.insert(chat_name.to_owned(), value.clone());
                }
            }
            *tool = json!({"type": "function", "function": function});
        }
    }
    let Some(choice) = fields.remove("tool_choice") else { return Ok(()) };
    if let Some(is_single) = choice.get("disable_parallel_tool_use").and_then(Value::as_bool) {
        fields.insert("parallel_tool_calls".to_owned(), json!(!is_single));
    }
    let translated = match choice["type"].as_str() {
        Some(mode @ ("auto" | "none")) => json!(mode),
        Some("any") => json!("required"),
        Some("tool") => json!({"type": "function", "function": {"name": choice["name"]}}),
        _ => return Err(invalid("tool_choice.type", "`tool_choice.type` is none of auto, any, tool, none")),
    };
    fields.insert("tool_choice".to_owned(), translated);
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn chat(body: Value) -> Result<Value, String> {
        let translated = translate(body.as_object().unwrap().clone());
        translated.map(Value::Object).map_err(|error| error.to_string())
    }

    #[test]
    fn blocks_become_messages() {
        let body = json!({
            "system": [{"type": "text", "text": "Be brief.", "cache_control": {"type": "ephemeral"}}],
            "messages": [
                {"role": "user", "content": "Hi"},
                {"role": "assistant", "content": [
                    {"type": "thinking", "thinking": "Hm.", "signature": ""},
                    {"type": "text", "text": "Well:"},
                    {"type": "tool_use", "id": "t1", "name": "f", "input": {"a": 1}},
                ]},
                {"role": "user", "content": [
                    {"type": "tool_result", "tool_use_id": "t1", "content": [{"type": "text", "text": "2"}], "is_error": true},
                    {"type": "text", "text": "And?"},
                ]},
            ],
        });
        let call =
            json!({"id": "t1", "type": "function", "function": {"name": "f", "arguments": "{\"a\":1}"}});
        let expected = json!([
            {"role": "system", "content": "Be brief."},
            {"role": "user", "content": "Hi"},
            {"role": "assistant", "content": "Well:", "reasoning_content": "Hm.", "tool_calls": [call]},
            {"role": "tool", "tool_call_id": "t1", "content": "Error: 2"},
            {"role": "user", "content": "And?"},
        ]);
        assert_eq!(chat(body).unwrap()["messages"], expected);
    }

    #[test]
    fn tools_thinking_and_stops_have_the_names_of_chats() {
        let body = json!({
            "messages": [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "So"}],
            "max_tokens": 5, "stop_sequences": ["x"], "thinking": {"type": "enabled", "budget_tokens": 1024},
            "tools": [{"name": "f", "description": "d", "input_schema": {"type": "object"}}],
            "tool_choice": {"type": "any", "disable_parallel_tool_use": true}, "metadata": {"user_id": "u"},
        });
        let chat = chat(body).unwrap();
        let tools = json!([{"type": "function", "function": {"name": "f", "description": "d", "parameters": {"type": "object"}}}]);
        assert_eq!(chat["tools"], tools);
        for (field, value) in [
            ("max_tokens", json!(5)),
            ("stop", json!(["x"])),
            ("enable_thinking", json!(true)),
            ("tool_choice", json!("required")),
            ("parallel_tool_calls", json!(false)),
            ("continue_final_message", json!(true)),
        ] {
            assert_eq!(chat[field], value, "{field}");
        }
        assert!(chat.get("metadata").is_none());
    }

    #[test]
    fn what_cannot_be_translated_is_named() {
        for (body, word) in [
            (json!({}), "messages"),
            (json!({"messages": [{"role": "tool", "content": "x"}]}), "messages[0].role"),
            (json!({"messages": [{"role": "user", "content": [{"type": "image"}]}]}), "image"),
            (json!({"messages": [], "thinking": {}}), "thinking.type"),
            (json!({"messages": [], "tools": [{"type": "bash_20250124"}]}), "tools[0]"),
            (json!({"messages": [], "tool_choice": {"type": "x"}}), "tool_choice.type"),
        ] {
            let error = chat(body.clone()).unwrap_err();
            assert!(error.contains(word), "{body}: {error}");
        }
    }
}
