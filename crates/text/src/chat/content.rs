// SPDX-License-Identifier: Apache-2.0

//! Adapts a client's messages to the shape that a template accepts.
//!
//! Clients send content as a string, as a list of typed parts, or (with tool calls) not at all.
//! About a third of the templates accept strings only, a few accept lists only, and many fail
//! without content. Loading a template renders a few probe messages to find out which shapes it
//! accepts.
//!
//! Arguments of earlier tool calls arrive as a string of JSON. Templates get them as objects, which
//! is what most of them expect.

use serde_json::{Map, Value, json};

use super::error::RenderError;

/// The shapes of message content that a template renders correctly.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct AcceptedContent {
    strings: bool,
    parts: bool,
    /// An assistant message with tool calls may have no content. If false, it gets an empty string.
    null: bool,
}

const PROBE: &str = "ballast-content-probe";

impl AcceptedContent {
    pub(crate) const EVERYTHING: Self = Self { strings: true, parts: true, null: true };

    /// Finds the accepted shapes. `render` renders messages without adapting them, and returns
    /// `None` if the template does not accept them.
    pub(crate) fn probe<E>(render: impl Fn(&[Value]) -> Result<Option<String>, E>) -> Result<Self, E> {
        let user = |content: Value| json!({"role": "user", "content": content});
        // A template that prints the list itself shows the keys of the part.
        let faithful =
            |text: Option<String>| text.is_some_and(|t| t.contains(PROBE) && !t.contains("ballast-part-key"));
        let parts = json!([{"type": "text", "text": PROBE, "ballast-part-key": true}]);
        let call = |content: Value| {
            let function = json!({"name": PROBE, "arguments": {}});
            let calls = json!([{"type": "function", "id": "callprobe", "function": function}]);
            render(&[user(json!("a")), json!({"role": "assistant", "content": content, "tool_calls": calls})])
        };
        // A template that prints null shows it as Python does.
        let null = match (call(Value::Null)?, call(json!(""))?) {
            (Some(null), _) => !null.contains("None"),
            (None, empty) => empty.is_none(),
        };
        let strings = faithful(render(&[user(json!(PROBE))])?);
        let parts = faithful(render(&[user(parts)])?);
        Ok(Self { strings, parts, null })
    }
}

/// Returns the message in the shape that the template accepts. `index` is for error texts.
pub(crate) fn adapt(index: usize, message: &Value, accepts: AcceptedContent) -> Result<Value, RenderError> {
    let invalid = |problem| RenderError::InvalidMessage { index, problem };
    let message = message.as_object().ok_or(invalid("it is not an object"))?;
    if !message.get("role").is_some_and(Value::is_string) {
        return Err(invalid("it has no role"));
    }
    let mut adapted = message.clone();
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
    if let Some(calls) = adapted.get_mut("tool_calls").and_then(Value::as_array_mut) {
        calls.iter_mut().for_each(parse_arguments);
    }
    Ok(Value::Object(adapted))
}

fn text_of(index: usize, part: &Value) -> Result<&str, RenderError> {
    let kind = part.get("type").and_then(Value::as_str).unwrap_or("untyped");
    match (kind, part.get("text").and_then(Value::as_str)) {
        ("text", Some(text)) => Ok(text),
        ("text", None) => Err(RenderError::InvalidMessage { index, problem: "a text part has no text" }),
        _ => Err(RenderError::UnsupportedPart { index, kind: kind.chars().take(40).collect() }),
    }
}

/// Parses the arguments of a tool call. A string that is not a JSON object stays as it is, and the
/// template prints it as a string.
fn parse_arguments(call: &mut Value) {
    let Some(arguments) = call.get_mut("function").and_then(|function| function.get_mut("arguments")) else {
        return;
    };
    let parsed = arguments.as_str().and_then(|text| serde_json::from_str::<Map<String, Value>>(text).ok());
    if let Some(object) = parsed {
        *arguments = Value::Object(object);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const STRINGS: AcceptedContent = AcceptedContent { strings: true, parts: false, null: false };
    const PARTS: AcceptedContent = AcceptedContent { strings: false, parts: true, null: true };

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
    }
}
