// SPDX-License-Identifier: Apache-2.0

//! An answer that is JSON as a whole: for models whose template has no format for calls.
//!
//! `{"tool_calls": [..]}`, `{"tool_call": {..}}`, `[..]` and a single object are calls;
//! `{"response": ".."}` is content. A fence around the answer is taken off.

use serde_json::Value;

use super::is_allowed;
use crate::cursor::{NoCall, OutputCursor};
use crate::event::ChatEvent;
use crate::parser::ToolSignature;

pub(super) async fn read(cursor: &mut OutputCursor, tools: &[ToolSignature]) -> Result<(), NoCall> {
    if cursor.looking_at(&["{", "[", "```"]).await.is_none() {
        return Err(NoCall);
    }
    let mut answer = String::new();
    while let Some(next) = cursor.next().await {
        answer.push(next);
    }
    let text = answer.trim();
    let inner = text.strip_prefix("```json").or(text.strip_prefix("```"));
    let text = inner.and_then(|inner| inner.strip_suffix("```")).unwrap_or(text);
    let parsed: Value = serde_json::from_str(text).map_err(|_| NoCall)?;
    if let Some(response) = parsed.get("response").and_then(Value::as_str) {
        cursor.forget_raw();
        cursor.emit(ChatEvent::Text(response.to_owned()));
        return Ok(());
    }
    let listed = parsed.get("tool_calls").unwrap_or(&parsed);
    let calls: Vec<&Value> = match (listed, parsed.get("tool_call")) {
        (_, Some(call)) => vec![call],
        (Value::Array(calls), None) => calls.iter().collect(),
        (call, None) => vec![call],
    };
    let calls: Option<Vec<_>> = calls.into_iter().map(|call| name_and_arguments(call, tools)).collect();
    for (name, arguments) in calls.filter(|calls| !calls.is_empty()).ok_or(NoCall)? {
        cursor.start_call(name, None);
        cursor.write_arguments(&arguments.to_string());
        cursor.end_call();
    }
    Ok(())
}

fn name_and_arguments<'a>(call: &'a Value, tools: &[ToolSignature]) -> Option<(&'a str, &'a Value)> {
    let name = call.get("name")?.as_str().filter(|name| is_allowed(Some(tools), name))?;
    let arguments = call.get("arguments").or(call.get("parameters"))?;
    arguments.is_object().then_some((name, arguments))
}
