// SPDX-License-Identifier: Apache-2.0

//! OpenAI's fields for tools: `tools`, `tool_choice` and `parallel_tool_calls`.

use chat_output::ToolSignature;
use serde::Deserialize;
use serde_json::{Value, json};

use super::error::ApiError;

/// OpenAI's limit.
const TOOLS_MAX: usize = 128;
/// OpenAI allows 64 bytes. Names that gateways make of several parts are longer.
const NAME_BYTES_MAX: usize = 128;

pub(crate) const TOOL_FIELDS: [&str; 3] = ["tools", "tool_choice", "parallel_tool_calls"];

#[derive(Debug, Deserialize)]
pub(crate) struct ToolFields {
    pub(crate) tools: Option<Vec<Value>>,
    pub(crate) tool_choice: Option<Value>,
    pub(crate) parallel_tool_calls: Option<bool>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum ToolChoice {
    /// Calls are text.
    None,
    /// The model decides.
    Auto,
    /// At least one call.
    Required,
    /// One call of the only signature.
    Named,
}

/// The tools of a request.
#[derive(Clone, Debug)]
pub(crate) struct RequestTools {
    /// As the client sent them, for the template. `None`: the client sent no tools.
    pub(crate) listed: Option<Vec<Value>>,
    /// The tools that the model may call.
    pub(crate) callable: Vec<CallableTool>,
    pub(crate) choice: ToolChoice,
    pub(crate) parallel: bool,
}

#[derive(Clone, Debug)]
pub(crate) struct CallableTool {
    pub(crate) signature: ToolSignature,
    /// The schema's keywords that cannot be enforced are errors.
    pub(crate) is_strict: bool,
}

impl RequestTools {
    pub(crate) fn parse(fields: ToolFields) -> Result<Self, ApiError> {
        let listed = fields.tools.filter(|tools| !tools.is_empty());
        let tools = listed.as_deref().unwrap_or_default();
        if tools.len() > TOOLS_MAX {
            let message = format!("`tools` has {} entries, allowed are at most {TOOLS_MAX}", tools.len());
            return Err(ApiError::invalid(Some("tools"), message));
        }
        let callable: Vec<CallableTool> = tools
            .iter()
            .enumerate()
            .map(|(index, tool)| parse_tool(index, tool))
            .collect::<Result<_, _>>()?;
        for (index, tool) in callable.iter().enumerate() {
            let name = &tool.signature.name;
            if callable[..index].iter().any(|other| other.signature.name == *name) {
                return Err(ApiError::invalid(Some("tools"), format!("`tools` has the name {name:?} twice")));
            }
        }
        let parallel = fields.parallel_tool_calls.unwrap_or(true);
        let (choice, callable) = match fields.tool_choice {
            None if callable.is_empty() => (ToolChoice::None, callable),
            None => (ToolChoice::Auto, callable),
            Some(choice) => parse_choice(&choice, callable)?,
        };
        Ok(Self { listed, callable, choice, parallel })
    }

    pub(crate) fn signatures(&self) -> Vec<ToolSignature> {
        self.callable.iter().map(|tool| tool.signature.clone()).collect()
    }

    /// Whether a tool wants its schema enforced.
    pub(crate) fn has_strict(&self) -> bool {
        self.callable.iter().any(|tool| tool.is_strict)
    }

    /// Whether the output may contain calls.
    pub(crate) fn may_call(&self) -> bool {
        self.choice != ToolChoice::None && !self.callable.is_empty()
    }
}

fn parse_tool(index: usize, tool: &Value) -> Result<CallableTool, ApiError> {
    let invalid = |problem: &str| ApiError::invalid(Some("tools"), format!("`tools[{index}]` {problem}"));
    if tool["type"] != "function" {
        return Err(invalid("is not of the type \"function\""));
    }
    let function = tool.get("function").filter(|it| it.is_object()).ok_or(invalid("has no `function`"))?;
    let name = function["name"].as_str().ok_or(invalid("has no name"))?;
    let is_plain = |c: char| c.is_alphanumeric() || matches!(c, '_' | '-' | '.' | ':' | '/');
    if name.is_empty() || name.len() > NAME_BYTES_MAX || !name.chars().all(is_plain) {
        return Err(invalid("has a name that is not made of 1 to 128 letters, digits, _ - . : /"));
    }
    let parameters = match function.get("parameters") {
        None | Some(Value::Null) => json!({"type": "object", "properties": {}}),
        Some(Value::Object(schema)) => Value::Object(schema.clone()),
        Some(_) => return Err(invalid("has `parameters` that are no JSON schema")),
    };
    let is_strict = function.get("strict").and_then(Value::as_bool).unwrap_or(false);
    Ok(CallableTool { signature: ToolSignature { name: name.to_owned(), parameters }, is_strict })
}

fn parse_choice(
    choice: &Value,
    callable: Vec<CallableTool>,
) -> Result<(ToolChoice, Vec<CallableTool>), ApiError> {
    let invalid = |message: String| Err(ApiError::invalid(Some("tool_choice"), message));
    let mode = |word: &str| match word {
        "none" => Some(ToolChoice::None),
        "auto" => Some(ToolChoice::Auto),
        "required" => Some(ToolChoice::Required),
        _ => None,
    };
    let (choice, names) = match (choice.as_str().and_then(mode), choice["type"].as_str()) {
        (Some(choice), _) => (choice, None),
        (None, Some("function")) => (ToolChoice::Named, Some(vec![&choice["function"]["name"]])),
        (None, Some("allowed_tools")) => {
            let allowed = &choice["allowed_tools"];
            let chosen = allowed["mode"].as_str().and_then(mode).unwrap_or(ToolChoice::Auto);
            let names =
                allowed["tools"].as_array().map(|tools| tools.iter().map(|it| &it["function"]["name"]));
            (chosen, Some(names.into_iter().flatten().collect()))
        }
        _ => {
            let message = "`tool_choice` is none, auto, required, a function or allowed_tools";
            return invalid(message.to_owned());
        }
    };
    let needs_tools = matches!(choice, ToolChoice::Required | ToolChoice::Named);
    if callable.is_empty() && needs_tools {
        return invalid("`tool_choice` is only allowed with `tools`".to_owned());
    }
    let Some(names) = names else { return Ok((choice, callable)) };
    for name in &names {
        if !callable.iter().any(|tool| **name == tool.signature.name) {
            let shown: String = name.to_string().chars().take(80).collect();
            return invalid(format!("`tool_choice` names {shown}, which is not in `tools`"));
        }
    }
    if names.is_empty() {
        return invalid("`tool_choice` names no tool".to_owned());
    }
    let chosen = callable.into_iter().filter(|tool| names.iter().any(|name| **name == tool.signature.name));
    Ok((choice, chosen.collect()))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn parse(body: Value) -> Result<RequestTools, String> {
        let fields: ToolFields = serde_json::from_value(body).map_err(|error| error.to_string())?;
        RequestTools::parse(fields).map_err(|error| error.to_string())
    }

    fn tool(name: &str) -> Value {
        json!({"type": "function", "function": {"name": name}})
    }

    #[test]
    fn each_choice_selects_its_tools() {
        let chosen = |choice: Value| {
            let mut body = json!({"tools": [tool("f"), tool("g")]});
            if !choice.is_null() {
                body["tool_choice"] = choice;
            }
            let tools = parse(body).unwrap();
            let names: Vec<String> = tools.signatures().into_iter().map(|tool| tool.name).collect();
            (tools.choice, names.join(" "), tools.may_call())
        };
        assert_eq!(chosen(Value::Null), (ToolChoice::Auto, "f g".to_owned(), true));
        assert_eq!(chosen(json!("none")), (ToolChoice::None, "f g".to_owned(), false));
        assert_eq!(chosen(json!("required")), (ToolChoice::Required, "f g".to_owned(), true));
        assert_eq!(chosen(tool("g")), (ToolChoice::Named, "g".to_owned(), true));
        let allowed =
            json!({"type": "allowed_tools", "allowed_tools": {"mode": "required", "tools": [tool("f")]}});
        assert_eq!(chosen(allowed), (ToolChoice::Required, "f".to_owned(), true));
        assert_eq!(parse(json!({})).unwrap().choice, ToolChoice::None);
        assert!(parse(json!({"tools": []})).unwrap().listed.is_none());
    }

    #[test]
    fn malformed_tools_and_choices_are_refused_by_name() {
        for (body, word) in [
            (json!({"tools": [{"type": "web_search"}]}), "tools[0]"),
            (json!({"tools": [tool("f"), {"type": "function"}]}), "tools[1]"),
            (json!({"tools": [tool("a b")]}), "name"),
            (json!({"tools": [tool("f"), tool("f")]}), "twice"),
            (json!({"tools": vec![tool("f"); 129]}), "128"),
            (json!({"tool_choice": "required"}), "tools"),
            (json!({"tools": [tool("f")], "tool_choice": "maybe"}), "tool_choice"),
            (json!({"tools": [tool("f")], "tool_choice": tool("g")}), "g"),
            (json!({"tools": [{"type": "function", "function": {"name": "f", "parameters": 5}}]}), "schema"),
        ] {
            let error = parse(body.clone()).unwrap_err();
            assert!(error.contains(word), "{body}: {error}");
        }
    }
}
