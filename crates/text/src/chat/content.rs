// SPDX-License-Identifier: Apache-2.0

//! Adapts a client's messages to the shape that a template accepts.
//!
//! Clients send content as a string, as a list of typed parts, or (with tool calls) not at all.
//! About a third of the templates accept strings only, a few accept lists only, and many fail
//! without content. Loading a template renders a few probe messages to find out which shapes it
//! accepts (`probe.rs`).
//!
//! 1. Arguments of earlier tool calls arrive as a string of JSON. Most templates get objects, some
//!    concatenate strings.
//! 2. A message of the role `developer` becomes one of `system` if the template does not know the
//!    role. Half of the templates drop such a message without an error.
//! 3. Reasoning has three names in the field. Templates read `reasoning_content` or `thinking`, as
//!    Hugging Face provides them.
//! 4. A tool's result gets the `name` of the function that its `tool_call_id` belongs to.

use std::collections::HashMap;

use serde_json::{Map, Value, json};

use super::error::RenderError;
use super::json;

/// What a template accepts.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct AcceptedContent {
    pub(super) strings: bool,
    pub(super) parts: bool,
    /// An assistant message with tool calls may have no content. If false, it gets an empty string.
    pub(super) null: bool,
    /// The template concatenates the arguments of a tool call.
    pub(super) text_arguments: bool,
    /// The template knows the role `developer`.
    pub(super) developer: bool,
    /// The template refuses ids of tool calls unless they have 9 characters (Mistral).
    pub(super) short_ids: bool,
}

impl AcceptedContent {
    pub(crate) const EVERYTHING: Self = Self {
        strings: true,
        parts: true,
        null: true,
        text_arguments: false,
        developer: true,
        short_ids: false,
    };
}

/// Returns the messages in the shapes that the template accepts.
pub(crate) fn adapt_conversation(
    messages: &[Value],
    accepts: AcceptedContent,
) -> Result<Vec<Value>, RenderError> {
    let adapted = messages.iter().enumerate().map(|(index, message)| adapt(index, message, accepts));
    let mut adapted: Vec<Value> = adapted.collect::<Result<_, _>>()?;
    name_tool_results(&mut adapted);
    if accepts.short_ids {
        shorten_ids(&mut adapted);
    }
    Ok(adapted)
}

/// `index` is for error texts.
fn adapt(index: usize, message: &Value, accepts: AcceptedContent) -> Result<Value, RenderError> {
    let invalid = |problem| RenderError::InvalidMessage { index, problem };
    let message = message.as_object().ok_or(invalid("it is not an object"))?;
    let role = message.get("role").and_then(Value::as_str).ok_or(invalid("it has no role"))?;
    let mut adapted = message.clone();
    if role == "developer" && !accepts.developer {
        adapted.insert("role".to_owned(), json!("system"));
    }
    let content = match message.get("content") {
        Some(Value::String(text)) if accepts.parts && !accepts.strings => {
            Some(json!([{"type": "text", "text": text}]))
        }
        Some(Value::Array(parts)) => {
            let texts = parts.iter().map(|part| text_of(index, part)).collect::<Result<Vec<_>, _>>()?;
            (!accepts.parts).then(|| Value::String(texts.concat()))
        }
        None | Some(Value::Null) => (!accepts.null).then(|| json!("")),
        Some(Value::String(_)) => None,
        Some(_) => return Err(invalid("its content is neither a string nor a list of parts")),
    };
    if let Some(content) = content {
        adapted.insert("content".to_owned(), content);
    }
    if adapted.get("tool_calls").is_some_and(Value::is_null) {
        adapted.shift_remove("tool_calls");
    }
    if let Some(calls) = adapted.get_mut("tool_calls") {
        let calls = calls.as_array_mut().ok_or(invalid("its tool_calls are no list"))?;
        calls.iter_mut().for_each(|call| convert_arguments(call, accepts.text_arguments));
    }
    copy_reasoning(&mut adapted);
    Ok(Value::Object(adapted))
}

/// Gives reasoning the names that templates read, as Hugging Face does.
pub(super) fn copy_reasoning(message: &mut Map<String, Value>) {
    let names = ["reasoning_content", "thinking", "reasoning"];
    let reasoning =
        names.iter().find_map(|&name| message.get(name).filter(|value| !value.is_null()).cloned());
    let Some(reasoning) = reasoning else { return };
    if message.get("thinking").is_none_or(Value::is_null) {
        message.insert("thinking".to_owned(), reasoning.clone());
    }
    message.insert("reasoning_content".to_owned(), reasoning);
}

fn calls_of(message: &Value) -> impl Iterator<Item = &Value> {
    message.get("tool_calls").and_then(Value::as_array).into_iter().flatten()
}

fn name_tool_results(messages: &mut [Value]) {
    let mut names: HashMap<String, Value> = HashMap::new();
    for message in messages {
        for call in calls_of(message) {
            if let (Some(id), Some(name)) = (call["id"].as_str(), call["function"].get("name")) {
                names.insert(id.to_owned(), name.clone());
            }
        }
        let Some(result) = message.as_object_mut().filter(|message| message["role"] == "tool") else {
            continue;
        };
        let id = result.get("tool_call_id").and_then(Value::as_str);
        if let (Some(name), None) = (id.and_then(|id| names.get(id)), result.get("name")) {
            result.insert("name".to_owned(), name.clone());
        }
    }
}

/// Replaces ids that do not have 9 characters by their number in the conversation.
fn shorten_ids(messages: &mut [Value]) {
    let mut short: HashMap<String, String> = HashMap::new();
    let mut shorten = |id: &mut Value| {
        if let Value::String(text) = id
            && text.chars().count() != 9
        {
            let number = short.len();
            *text = short.entry(text.clone()).or_insert_with(|| format!("call{number:05}")).clone();
        }
    };
    for message in messages {
        let calls = message.get_mut("tool_calls").and_then(Value::as_array_mut);
        calls.into_iter().flatten().filter_map(|call| call.get_mut("id")).for_each(&mut shorten);
        if let Some(id) = message.get_mut("tool_call_id") {
            shorten(id);
        }
    }
}

fn text_of(index: usize, part: &Value) -> Result<&str, RenderError> {
    let kind = part.get("type").and_then(Value::as_str).unwrap_or("untyped");
    match (kind, part.get("text").and_then(Value::as_str)) {
        ("text", Some(text)) => Ok(text),
        ("text", None) => Err(RenderError::InvalidMessage { index, problem: "a text part has no text" }),
        _ => Err(RenderError::UnsupportedPart { index, kind: kind.chars().take(40).collect() }),
    }
}

/// Turns the arguments of a tool call into an object, or into a string. A string that is not a JSON
/// object stays as it is, and the template prints it as a string.
fn convert_arguments(call: &mut Value, to_text: bool) {
    let Some(arguments) = call.get_mut("function").and_then(|function| function.get_mut("arguments")) else {
        return;
    };
    match arguments {
        Value::String(text) if !to_text => {
            // Some clients send "" for a call without arguments.
            let text = if text.trim().is_empty() { "{}" } else { text };
            if let Ok(object) = serde_json::from_str::<Map<String, Value>>(text) {
                *arguments = Value::Object(object);
            }
        }
        Value::Object(object) if to_text => *arguments = Value::String(json::dumps(object)),
        _ => {}
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const STRINGS: AcceptedContent =
        AcceptedContent { parts: false, null: false, ..AcceptedContent::EVERYTHING };
    const PARTS: AcceptedContent = AcceptedContent { strings: false, ..AcceptedContent::EVERYTHING };

    #[test]
    fn content_takes_the_shape_that_the_template_accepts() {
        let adapted = |content: &Value, accepts| {
            let message = json!({"role": "user", "content": content});
            adapt(0, &message, accepts).unwrap()["content"].clone()
        };
        let (text, parts) =
            (json!("ab"), json!([{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]));
        assert_eq!(adapted(&parts, STRINGS), text);
        assert_eq!(adapted(&text, PARTS), json!([{"type": "text", "text": "ab"}]));
        assert_eq!(adapted(&Value::Null, STRINGS), json!(""));
        for content in [text, parts, Value::Null] {
            assert_eq!(adapted(&content, AcceptedContent::EVERYTHING), content);
        }
    }

    #[test]
    fn images_and_shapeless_messages_are_refused_by_position() {
        let image = json!({"role": "user", "content": [{"type": "image_url", "image_url": {}}]});
        let error = adapt(3, &image, AcceptedContent::EVERYTHING).unwrap_err();
        assert!(
            matches!(error, RenderError::UnsupportedPart { index: 3, ref kind } if kind == "image_url"),
            "{error}"
        );
        for message in [json!("hi"), json!({"content": "x"}), json!({"role": "user", "content": 5})] {
            let error = adapt(1, &message, AcceptedContent::EVERYTHING).unwrap_err();
            assert!(matches!(error, RenderError::InvalidMessage { index: 1, .. }), "{error}");
        }
    }

    #[test]
    fn arguments_of_tool_calls_become_objects() {
        let call = |arguments: Value| json!({"role": "assistant", "tool_calls": [{"function": {"arguments": arguments}}]});
        let adapted = adapt(0, &call(json!("{\"b\": 1, \"a\": 2}")), AcceptedContent::EVERYTHING).unwrap();
        assert_eq!(adapted, call(json!({"b": 1, "a": 2})));
        let broken = call(json!("{"));
        assert_eq!(adapt(0, &broken, AcceptedContent::EVERYTHING).unwrap(), broken);
        let texts = AcceptedContent { text_arguments: true, ..AcceptedContent::EVERYTHING };
        let text = adapt(0, &call(json!({"b": 1, "a": "é"})), texts).unwrap();
        assert_eq!(text, call(json!("{\"b\": 1, \"a\": \"é\"}")));
    }

    #[test]
    fn reasoning_has_the_names_that_templates_read() {
        for name in ["reasoning_content", "thinking", "reasoning"] {
            let message = json!({"role": "assistant", "content": "", name: "why"});
            let adapted = adapt(0, &message, AcceptedContent::EVERYTHING).unwrap();
            assert_eq!((&adapted["reasoning_content"], &adapted["thinking"]), (&json!("why"), &json!("why")));
        }
    }

    #[test]
    fn results_of_tools_get_the_names_of_their_calls_and_ids_the_length_that_a_template_wants() {
        let call = |id: &str, name: &str| json!({"id": id, "function": {"name": name, "arguments": {}}});
        let result = |id: &str| json!({"role": "tool", "tool_call_id": id, "content": "x"});
        let messages = [
            json!({"role": "assistant", "content": "", "tool_calls": [call("call_1", "f"), call("123456789", "g")]}),
            result("123456789"),
            result("call_1"),
            result("unknown"),
        ];
        let short = AcceptedContent { short_ids: true, ..AcceptedContent::EVERYTHING };
        let adapted = adapt_conversation(&messages, short).unwrap();
        assert_eq!(adapted[0]["tool_calls"][0]["id"], "call00000");
        let results: Vec<_> =
            adapted[1..].iter().map(|it| (it["tool_call_id"].clone(), it["name"].clone())).collect();
        let named = |id: &str, name: &str| (json!(id), json!(name));
        assert_eq!(
            results,
            [named("123456789", "g"), named("call00000", "f"), (json!("call00001"), Value::Null)]
        );
        let adapted = adapt_conversation(&messages, AcceptedContent::EVERYTHING).unwrap();
        assert_eq!(adapted[2]["tool_call_id"], "call_1");
    }
}
