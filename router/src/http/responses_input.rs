// SPDX-License-Identifier: Apache-2.0

//! Translates a request of OpenAI's responses API to the fields of a chat.
//!
//! | item of `input` | message |
//! |---|---|
//! | message | of the same role |
//! | `function_call` | `tool_calls` of an assistant message; adjacent ones are one message |
//! | `function_call_output` | of the role `tool` |
//! | `reasoning` | `reasoning_content` of the assistant message that follows |

use serde_json::{Map, Value, json};

use super::error::ApiError;

/// A chat in the fields of chat completions.
pub(super) struct Translation {
    pub(super) chat: Map<String, Value>,
    /// The conversation without `instructions`, which count for one response only.
    pub(super) messages: Vec<Value>,
}

/// Fields with another name in a chat.
const RENAMED: [(&str, &str); 1] = [("max_output_tokens", "max_completion_tokens")];
/// Fields without effect on a chat: records of the client, and what is always so.
const IGNORED: [&str; 8] = [
    "previous_response_id",
    "store",
    "include",
    "truncation",
    "max_tool_calls",
    "background",
    "top_logprobs",
    "stream_options",
];
/// Fields that cannot be honoured, and the values that ask for nothing.
const UNSUPPORTED: [&str; 3] = ["conversation", "prompt", "n"];

fn invalid(param: &str, message: impl Into<String>) -> ApiError {
    ApiError::invalid(Some(param), message)
}

pub(super) fn translate(
    mut fields: Map<String, Value>,
    previous: Vec<Value>,
) -> Result<Translation, ApiError> {
    if let Some(name) = UNSUPPORTED.into_iter().find(|name| fields.contains_key(*name)) {
        return Err(invalid(name, format!("`{name}` is not supported")));
    }
    for (name, neutral) in [("background", json!(false)), ("top_logprobs", json!(0))] {
        if fields.get(name).is_some_and(|value| *value != neutral) {
            return Err(invalid(name, format!("`{name}` is not supported")));
        }
    }
    let input = fields.remove("input").ok_or_else(|| invalid("input", "`input` is missing"))?;
    let mut messages = previous;
    messages.extend(input_messages(input)?);
    let instructions = fields.remove("instructions");
    let instructions = instructions.map(|text| json!({"role": "system", "content": text}));
    for name in IGNORED {
        fields.remove(name);
    }
    for (name, chat_name) in RENAMED {
        if let Some(value) = fields.remove(name) {
            fields.insert(chat_name.to_owned(), value);
        }
    }
    translate_reasoning(&mut fields)?;
    translate_text_format(&mut fields)?;
    translate_tools(&mut fields)?;
    let all = instructions.into_iter().chain(messages.iter().cloned()).collect();
    fields.insert("messages".to_owned(), Value::Array(all));
    Ok(Translation { chat: fields, messages })
}

fn input_messages(input: Value) -> Result<Vec<Value>, ApiError> {
    let items = match input {
        Value::String(text) => return Ok(vec![json!({"role": "user", "content": text})]),
        Value::Array(items) => items,
        _ => return Err(invalid("input", "`input` is neither a string nor a list of items")),
    };
    let (mut messages, mut reasoning): (Vec<Value>, Option<String>) = (Vec::new(), None);
    for (index, item) in items.iter().enumerate() {
        let at = format!("input[{index}]");
        match item["type"].as_str().unwrap_or("message") {
            "message" => {
                let role =
                    item["role"].as_str().ok_or_else(|| invalid(&at, format!("`{at}` has no role")))?;
                let content = content(&at, &item["content"])?;
                let mut message = json!({"role": role, "content": content});
                if let (Some(text), "assistant") = (&reasoning, role) {
                    message["reasoning_content"] = json!(text);
                    reasoning = None;
                }
                messages.push(message);
            }
            "function_call" => {
                let function = json!({"name": item["name"], "arguments": item["arguments"]});
                let call = json!({"id": item["call_id"], "type": "function", "function": function});
                match messages.last_mut().filter(|last| last["role"] == "assistant") {
                    Some(last) => match last["tool_calls"].as_array_mut() {
                        Some(calls) => calls.push(call),
                        None => last["tool_calls"] = json!([call]),
                    },
                    None => {
                        let mut message = json!({"role": "assistant", "content": null, "tool_calls": [call]});
                        if let Some(text) = reasoning.take() {
                            message["reasoning_content"] = json!(text);
                        }
                        messages.push(message);
                    }
                }
            }
            "function_call_output" => {
                let output = content(&at, &item["output"])?;
                messages.push(json!({"role": "tool", "tool_call_id": item["call_id"], "content": output}));
            }
            "reasoning" => reasoning = Some(reasoning_text(item)),
            other => {
                let shown: String = other.chars().take(80).collect();
                return Err(invalid(&at, format!("`{at}` has the type {shown:?}, which is not supported")));
            }
        }
    }
    Ok(messages)
}

/// Text, or parts of text in the form of chat completions.
fn content(at: &str, content: &Value) -> Result<Value, ApiError> {
    let Some(parts) = content.as_array() else { return Ok(content.clone()) };
    let part = |part: &Value| match part["type"].as_str() {
        Some("input_text" | "output_text" | "text") => Ok(json!({"type": "text", "text": part["text"]})),
        Some("refusal") => Ok(json!({"type": "text", "text": part["refusal"]})),
        other => {
            let shown: String = other.unwrap_or("none").chars().take(80).collect();
            Err(invalid(at, format!("`{at}` has content of the type {shown:?}, which is not supported")))
        }
    };
    parts.iter().map(part).collect::<Result<Vec<_>, _>>().map(Value::Array)
}

fn reasoning_text(item: &Value) -> String {
    let parts = |name: &str| item[name].as_array().into_iter().flatten().filter_map(|it| it["text"].as_str());
    let text: String = parts("content").collect();
    if text.is_empty() { parts("summary").collect() } else { text }
}

fn translate_reasoning(fields: &mut Map<String, Value>) -> Result<(), ApiError> {
    match fields.remove("reasoning") {
        None => {}
        Some(Value::Object(mut reasoning)) => {
            if let Some(effort) = reasoning.remove("effort").filter(|effort| !effort.is_null()) {
                fields.insert("reasoning_effort".to_owned(), effort);
            }
        }
        Some(_) => return Err(invalid("reasoning", "`reasoning` is no object")),
    }
    Ok(())
}

fn translate_text_format(fields: &mut Map<String, Value>) -> Result<(), ApiError> {
    let Some(text) = fields.remove("text") else { return Ok(()) };
    let format = match &text["format"] {
        Value::Null => return Ok(()),
        format if format["type"] == "json_schema" => {
            let mut schema = format.as_object().cloned().unwrap_or_default();
            schema.remove("type");
            json!({"type": "json_schema", "json_schema": schema})
        }
        format => format.clone(),
    };
    fields.insert("response_format".to_owned(), format);
    Ok(())
}

/// Tools and a chosen tool have their names one level deeper in a chat.
fn translate_tools(fields: &mut Map<String, Value>) -> Result<(), ApiError> {
    let nested = |tool: &Value| {
        let mut function = tool.as_object().cloned().unwrap_or_default();
        function.remove("type");
        json!({"type": "function", "function": function})
    };
    if let Some(tools) = fields.get_mut("tools").and_then(Value::as_array_mut) {
        for (index, tool) in tools.iter_mut().enumerate() {
            if tool["type"] != "function" {
                let at = format!("tools[{index}]");
                let kind: String = tool["type"].to_string().chars().take(80).collect();
                return Err(invalid(
                    "tools",
                    format!("`{at}` has the type {kind}; only functions are called"),
                ));
            }
            *tool = nested(tool);
        }
    }
    if let Some(choice) = fields.get_mut("tool_choice").filter(|choice| choice.is_object()) {
        if choice["type"] == "allowed_tools" {
            let tools = choice["tools"].as_array().into_iter().flatten().map(nested).collect::<Vec<_>>();
            *choice = json!({
                "type": "allowed_tools", "allowed_tools": {"mode": choice["mode"], "tools": tools},
            });
        } else {
            *choice = nested(choice);
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn messages(input: Value) -> Value {
        let fields = json!({"input": input}).as_object().unwrap().clone();
        translate(fields, vec![])
            .map(|it| json!(it.messages))
            .unwrap_or_else(|error| json!(error.to_string()))
    }

    #[test]
    fn items_become_messages() {
        assert_eq!(messages(json!("Hi")), json!([{"role": "user", "content": "Hi"}]));
        let items = json!([
            {"role": "user", "content": [{"type": "input_text", "text": "Hi"}]},
            {"type": "reasoning", "id": "rs_1", "summary": [], "content": [{"type": "reasoning_text", "text": "Hm."}]},
            {"type": "function_call", "call_id": "c1", "name": "f", "arguments": "{}"},
            {"type": "function_call", "call_id": "c2", "name": "g", "arguments": "{}"},
            {"type": "function_call_output", "call_id": "c1", "output": "1"},
            {"type": "function_call_output", "call_id": "c2", "output": "2"},
        ]);
        let call = |id: &str, name: &str| json!({"id": id, "type": "function", "function": {"name": name, "arguments": "{}"}});
        let expected = json!([
            {"role": "user", "content": [{"type": "text", "text": "Hi"}]},
            {"role": "assistant", "content": null, "tool_calls": [call("c1", "f"), call("c2", "g")], "reasoning_content": "Hm."},
            {"role": "tool", "tool_call_id": "c1", "content": "1"},
            {"role": "tool", "tool_call_id": "c2", "content": "2"},
        ]);
        assert_eq!(messages(items), expected);
    }

    #[test]
    fn what_cannot_be_translated_is_named() {
        for (input, word) in [
            (json!(5), "input"),
            (json!([{"type": "item_reference", "id": "x"}]), "input[0]"),
            (json!([{"role": "user", "content": [{"type": "input_image"}]}]), "input_image"),
        ] {
            let error = messages(input);
            assert!(error.as_str().unwrap().contains(word), "{error}");
        }
        let refused =
            |fields: Value| translate(fields.as_object().unwrap().clone(), vec![]).err().unwrap().to_string();
        assert!(refused(json!({"input": "x", "background": true})).contains("background"));
        assert!(refused(json!({"input": "x", "tools": [{"type": "web_search"}]})).contains("web_search"));
    }

    #[test]
    fn tools_formats_and_limits_have_the_names_of_chats() {
        let fields = json!({
            "input": "x", "instructions": "Be brief.", "max_output_tokens": 9, "reasoning": {"effort": "low", "summary": "auto"},
            "tools": [{"type": "function", "name": "f", "parameters": {}, "strict": true}],
            "tool_choice": {"type": "function", "name": "f"},
            "text": {"format": {"type": "json_schema", "name": "s", "schema": {}, "strict": true}},
        });
        let chat = translate(fields.as_object().unwrap().clone(), vec![]).unwrap().chat;
        let expected = json!({
            "max_completion_tokens": 9, "reasoning_effort": "low",
            "tools": [{"type": "function", "function": {"name": "f", "parameters": {}, "strict": true}}],
            "tool_choice": {"type": "function", "function": {"name": "f"}},
            "response_format": {"type": "json_schema", "json_schema": {"name": "s", "schema": {}, "strict": true}},
            "messages": [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "x"}],
        });
        assert_eq!(Value::Object(chat), expected);
    }
}
