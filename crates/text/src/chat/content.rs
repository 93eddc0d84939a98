//! Brings a client's messages into the shape that a template was written for.
//!
//! Clients send content as a string or as a list of typed parts; about a third of the templates take strings only, a
//! few take lists only. Which, is found by rendering a probe once, when the template is loaded. Arguments of earlier
//! tool calls arrive as JSON in a string and are given to templates as objects, which is what most expect.

use serde_json::{Map, Value, json};

use super::template::RenderError;

/// Which shapes of content a template renders faithfully.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum ContentShape {
    /// Lists of text parts are joined to one string.
    Strings,
    /// Strings become a list of one text part.
    Parts,
    /// As the client sent it.
    Both,
}

const PROBE: &str = "ballast-content-probe";

impl ContentShape {
    /// `render` renders a conversation of one user message with the given content.
    pub(crate) fn probe(render: impl Fn(Value) -> Option<String>) -> Self {
        // A template that prints the list itself shows the key of the part.
        let faithful =
            |text: Option<String>| text.is_some_and(|t| t.contains(PROBE) && !t.contains("ballast-part-key"));
        let string = faithful(render(json!(PROBE)));
        let parts = faithful(render(json!([{"type": "text", "text": PROBE, "ballast-part-key": true}])));
        match (string, parts) {
            (true, true) => Self::Both,
            (false, true) => Self::Parts,
            _ => Self::Strings,
        }
    }
}

/// The message as the template shall see it.
pub(crate) fn adapt(index: usize, message: &Value, shape: ContentShape) -> Result<Value, RenderError> {
    let invalid = |problem| RenderError::InvalidMessage { index, problem };
    let message = message.as_object().ok_or(invalid("it is not an object"))?;
    if !message.get("role").is_some_and(Value::is_string) {
        return Err(invalid("it has no role"));
    }
    let mut adapted = message.clone();
    if let Some(content) = message.get("content") {
        let content = match content {
            Value::String(text) if shape == ContentShape::Parts => json!([{"type": "text", "text": text}]),
            Value::String(_) | Value::Null => content.clone(),
            Value::Array(parts) => {
                let texts = parts.iter().map(|part| text_of(index, part)).collect::<Result<Vec<_>, _>>()?;
                match shape {
                    ContentShape::Strings => Value::String(texts.concat()),
                    ContentShape::Parts | ContentShape::Both => content.clone(),
                }
            }
            _ => return Err(invalid("its content is neither a string nor a list of parts")),
        };
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

/// Leaves what is not the JSON of an object as it is: the template then prints it as a string.
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

    #[test]
    fn parts_are_joined_for_templates_that_take_strings() {
        let message = json!({"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]});
        assert_eq!(adapt(0, &message, ContentShape::Strings).unwrap()["content"], json!("ab"));
        assert_eq!(adapt(0, &message, ContentShape::Both).unwrap(), message);
        let string = json!({"role": "user", "content": "a"});
        assert_eq!(
            adapt(0, &string, ContentShape::Parts).unwrap()["content"],
            json!([{"type": "text", "text": "a"}])
        );
    }

    #[test]
    fn images_and_shapeless_messages_are_refused_by_position() {
        let image = json!({"role": "user", "content": [{"type": "image_url", "image_url": {}}]});
        let error = adapt(3, &image, ContentShape::Both).unwrap_err();
        assert!(
            matches!(error, RenderError::UnsupportedPart { index: 3, ref kind } if kind == "image_url"),
            "{error}"
        );
        for message in [json!("hi"), json!({"content": "x"}), json!({"role": "user", "content": 5})] {
            assert!(matches!(
                adapt(1, &message, ContentShape::Both),
                Err(RenderError::InvalidMessage { index: 1, .. })
            ));
        }
    }

    #[test]
    fn arguments_of_tool_calls_become_objects() {
        let call = |arguments: Value| json!({"role": "assistant", "tool_calls": [{"function": {"arguments": arguments}}]});
        let adapted = adapt(0, &call(json!("{\"b\": 1, \"a\": 2}")), ContentShape::Both).unwrap();
        assert_eq!(adapted, call(json!({"b": 1, "a": 2})));
        let broken = call(json!("{"));
        assert_eq!(adapt(0, &broken, ContentShape::Both).unwrap(), broken);
    }
}
