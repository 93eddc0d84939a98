// SPDX-License-Identifier: Apache-2.0

//! Types of values that a format writes without quotes: they come from the tool's schema.

use serde_json::Value;

use crate::parser::ToolSignature;

/// The JSON of a value. A string by the schema stays a string, even if it is `123`. Other values
/// are JSON if they can be.
pub(crate) fn to_json(tools: &[ToolSignature], function: &str, key: &str, value: &str) -> String {
    let tool = tools.iter().find(|tool| tool.name == function);
    let kind = tool.and_then(|tool| tool.parameters.get("properties")?.get(key)?.get("type"));
    let is_kind = |name: &str| match kind {
        Some(Value::String(kind)) => kind == name,
        Some(Value::Array(kinds)) => kinds.iter().any(|kind| kind == name),
        _ => false,
    };
    let is_text = is_kind("string") && !(is_kind("null") && value == "null");
    match serde_json::from_str::<Value>(value) {
        Ok(parsed) if !is_text => parsed.to_string(),
        _ => quote(value),
    }
}

pub(crate) fn quote(text: &str) -> String {
    Value::from(text).to_string()
}
