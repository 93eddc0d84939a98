// SPDX-License-Identifier: Apache-2.0

//! Finds out what a template accepts, by rendering short conversations with it.

use serde_json::{Value, json};

use super::content::AcceptedContent;

const PROBE: &str = "ballast-content-probe";
/// Mistral's templates accept ids of this length only.
const SHORT_ID: &str = "callprobe";

/// `render` renders messages without adapting them, and returns `None` if the template does not
/// accept them.
pub(super) fn probe<E>(render: impl Fn(&[Value]) -> Result<Option<String>, E>) -> Result<AcceptedContent, E> {
    let user = |content: Value| json!({"role": "user", "content": content});
    // A template that prints the list itself shows the keys of the part.
    let faithful =
        |text: Option<String>| text.is_some_and(|t| t.contains(PROBE) && !t.contains("ballast-part-key"));
    let parts = json!([{"type": "text", "text": PROBE, "ballast-part-key": true}]);
    let call = |content: Value, arguments: Value, id: &str| {
        let function = json!({"name": "f", "arguments": arguments});
        let calls = json!([{"type": "function", "id": id, "function": function}]);
        render(&[user(json!("a")), json!({"role": "assistant", "content": content, "tool_calls": calls})])
    };
    // A template that prints null shows it as Python does.
    let null = match (call(Value::Null, json!({}), SHORT_ID)?, call(json!(""), json!({}), SHORT_ID)?) {
        (Some(null), _) => !null.contains("None"),
        (None, empty) => empty.is_none(),
    };
    // Some templates print calls only if there is no content.
    let content = if null { Value::Null } else { json!("") };
    let object = json!({"x": PROBE});
    let prints = |text: Option<String>| text.is_some_and(|text| text.contains(PROBE));
    let text_arguments = !prints(call(content.clone(), object.clone(), SHORT_ID)?)
        && prints(call(content.clone(), json!(object.to_string()), SHORT_ID)?);
    let arguments = if text_arguments { json!("{}") } else { json!({}) };
    let short_ids = call(content.clone(), arguments.clone(), SHORT_ID)?.is_some()
        && call(content, arguments, "call_of_another_length")?.is_none();
    let developer = json!({"role": "developer", "content": PROBE});
    Ok(AcceptedContent {
        strings: faithful(render(&[user(json!(PROBE))])?),
        parts: faithful(render(&[user(parts)])?),
        null,
        text_arguments,
        developer: prints(render(&[developer, user(json!("a"))])?),
        short_ids,
    })
}
