// SPDX-License-Identifier: Apache-2.0

//! Parses a request body into typed fields. Every error names the path of its field.
//!
//! | field | treatment |
//! |---|---|
//! | supported | parsed |
//! | in [`IGNORED_FIELDS`] | ignored: it changes nothing in the output |
//! | in [`UNSUPPORTED_FIELDS`] | accepted with its neutral value only |
//! | unknown | refused, as OpenAI does: a misspelt field would otherwise have no effect |

use serde::Deserialize;
use serde::de::DeserializeOwned;
use serde_json::{Map, Value};

use super::error::ApiError;
use super::numbers;
use super::sampling_fields::{SamplingFields, is_sampling_field};
use super::scheduling_fields::SCHEDULING_FIELDS;
use super::structured_output::STRUCTURED_OUTPUT_FIELDS;

/// Fields that change nothing in the output.
const IGNORED_FIELDS: [&str; 10] = [
    "user",
    "metadata",
    "store",
    "safety_identifier",
    "prompt_cache_key",
    "prompt_cache_retention",
    "parallel_tool_calls",
    "request_id",
    "return_tokens_as_token_ids",
    "detokenize",
];

/// Values of a body: token ids of a prompt, messages. A value takes up to 70 bytes in memory and 2
/// in a body.
const VALUES_MAX: usize = 1 << 20;

/// A field of OpenAI's or vLLM's API that this router does not support, and its neutral values.
struct UnsupportedField {
    name: &'static str,
    is_neutral: fn(&Value) -> bool,
}

const fn unsupported(name: &'static str, is_neutral: fn(&Value) -> bool) -> UnsupportedField {
    UnsupportedField { name, is_neutral }
}

fn never(_: &Value) -> bool {
    false
}

fn is_empty(value: &Value) -> bool {
    match value {
        Value::Array(items) => items.is_empty(),
        Value::String(text) => text.is_empty(),
        Value::Object(map) => map.is_empty(),
        _ => false,
    }
}

fn is_false(value: &Value) -> bool {
    *value == Value::Bool(false)
}

fn is_true(value: &Value) -> bool {
    *value == Value::Bool(true)
}

fn is_one(value: &Value) -> bool {
    value.as_f64() == Some(1.0)
}

fn is_without_tools(value: &Value) -> bool {
    matches!(value.as_str(), Some("none" | "auto"))
}

/// For the choice of a grammar compiler: it does not change what a grammar means.
fn is_string(value: &Value) -> bool {
    value.is_string()
}

fn is_text_only(value: &Value) -> bool {
    value.as_array().is_some_and(|items| items.iter().all(|item| item == "text"))
}

const UNSUPPORTED_FIELDS: [UnsupportedField; 30] = [
    unsupported("suffix", is_empty),
    unsupported("tools", is_empty),
    unsupported("tool_choice", is_without_tools),
    unsupported("functions", is_empty),
    unsupported("function_call", is_without_tools),
    unsupported("modalities", is_text_only),
    unsupported("audio", never),
    unsupported("prediction", never),
    unsupported("web_search_options", never),
    unsupported("reasoning_effort", never),
    unsupported("verbosity", never),
    // Supported by completions only.
    unsupported("best_of", is_one),
    unsupported("use_beam_search", is_false),
    unsupported("length_penalty", is_one),
    unsupported("early_stopping", is_false),
    unsupported("guided_decoding_backend", is_string),
    unsupported("include_stop_str_in_output", is_false),
    unsupported("skip_special_tokens", is_true),
    unsupported("spaces_between_special_tokens", is_true),
    unsupported("prompt_logprobs", never),
    unsupported("truncate_prompt_tokens", never),
    unsupported("allowed_token_ids", never),
    unsupported("bad_words", is_empty),
    unsupported("documents", is_empty),
    // Chats only: the template writes the special tokens.
    unsupported("add_special_tokens", is_false),
    unsupported("chat_template", never),
    // Supported by chats only.
    unsupported("continue_final_message", is_false),
    unsupported("kv_transfer_params", never),
    unsupported("include_reasoning", is_true),
    unsupported("thinking_token_budget", never),
];

/// Fields of both endpoints that define the form of the response.
#[derive(Debug, Default, Deserialize)]
pub(crate) struct ResponseFields {
    pub(crate) model: Option<String>,
    stream: Option<bool>,
    stream_options: Option<StreamOptions>,
    return_token_ids: Option<bool>,
}

const RESPONSE_FIELDS: [&str; 4] = ["model", "stream", "stream_options", "return_token_ids"];

#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
struct StreamOptions {
    include_usage: Option<bool>,
    /// Whether to pad chunks against side channels. The router never pads.
    #[serde(rename = "include_obfuscation")]
    _include_obfuscation: Option<bool>,
}

/// The form of the response that the client asks for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct ResponseOptions {
    pub(crate) stream: bool,
    pub(crate) include_usage: bool,
    pub(crate) return_token_ids: bool,
}

impl ResponseFields {
    pub(crate) fn options(&self) -> Result<ResponseOptions, ApiError> {
        let stream = self.stream.unwrap_or(false);
        if self.stream_options.is_some() && !stream {
            let message = "`stream_options` is only allowed when `stream` is true";
            return Err(ApiError::invalid(Some("stream_options"), message));
        }
        Ok(ResponseOptions {
            stream,
            include_usage: self.stream_options.as_ref().and_then(|o| o.include_usage).unwrap_or(false),
            return_token_ids: self.return_token_ids.unwrap_or(false),
        })
    }
}

/// A parsed body. Each part is deserialized from the same JSON object, because serde loses the path
/// of a field in flattened structs.
#[derive(Debug)]
pub(crate) struct ParsedBody<T> {
    /// Fields of one endpoint only.
    pub(crate) endpoint: T,
    pub(crate) sampling: SamplingFields,
    pub(crate) response: ResponseFields,
}

/// Parses `body`. `endpoint_fields` names the fields of `T`.
pub(crate) fn parse_body<T: DeserializeOwned>(
    body: &[u8],
    endpoint_fields: &[&str],
) -> Result<ParsedBody<T>, ApiError> {
    check_value_count(body)?;
    let mut fields: Map<String, Value> =
        serde_json::from_slice(body).map_err(|error| numbers::unparsable_body(body, &error))?;
    // An explicit null is an absent field.
    fields.retain(|_, value| !value.is_null());
    fields.values_mut().for_each(numbers::normalize_integer);
    for (name, value) in &fields {
        let name = name.as_str();
        let lists = [endpoint_fields, &STRUCTURED_OUTPUT_FIELDS, &SCHEDULING_FIELDS, &RESPONSE_FIELDS];
        let is_supported = is_sampling_field(name) || lists.iter().any(|names| names.contains(&name));
        if !is_supported && !IGNORED_FIELDS.contains(&name) {
            check_unsupported(name, value)?;
        }
    }
    let fields = Value::Object(fields);
    let sampling: SamplingFields = deserialize(&fields)?;
    let sampling = sampling.with_parts(deserialize(&fields)?, deserialize(&fields)?);
    Ok(ParsedBody { endpoint: deserialize(&fields)?, sampling, response: deserialize(&fields)? })
}

/// Counts the separators outside strings.
fn check_value_count(body: &[u8]) -> Result<(), ApiError> {
    let (mut values, mut in_string, mut escaped) = (0_usize, false, false);
    for &byte in body {
        match byte {
            _ if escaped => escaped = false,
            b'\\' => escaped = in_string,
            b'"' => in_string = !in_string,
            b',' | b'[' | b'{' if !in_string => values += 1,
            _ => {}
        }
    }
    match values > VALUES_MAX {
        true => Err(ApiError::invalid(
            None,
            format!("the request body has more than {VALUES_MAX} JSON values; send long prompts as text"),
        )),
        false => Ok(()),
    }
}

fn check_unsupported(name: &str, value: &Value) -> Result<(), ApiError> {
    match UNSUPPORTED_FIELDS.iter().find(|field| field.name == name) {
        Some(field) if (field.is_neutral)(value) => Ok(()),
        Some(_) => Err(ApiError::invalid(Some(name), format!("`{name}` is not supported"))),
        None => {
            let shown: String = name.chars().take(80).collect();
            let message = format!("Unrecognized request argument supplied: {shown}");
            Err(ApiError::invalid(Some(&shown), message))
        }
    }
}

fn deserialize<T: DeserializeOwned>(fields: &Value) -> Result<T, ApiError> {
    serde_path_to_error::deserialize(fields).map_err(|error| match error.path().to_string().as_str() {
        // For a missing field of the body, the path is empty and the message names the field.
        "." => {
            let text = error.inner().to_string();
            ApiError::invalid(text.split('`').nth(1), &text)
        }
        path => numbers::wrong_type(path, error.inner()),
    })
}
