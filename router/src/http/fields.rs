// SPDX-License-Identifier: Apache-2.0

//! Parses a request body into typed fields. Every error names the path of its field.
//!
//! | field | treatment |
//! |---|---|
//! | supported | parsed |
//! | in [`HINT_FIELDS`] | ignored: an answer without it is a correct answer |
//! | in [`UNSUPPORTED_FIELDS`] | accepted with its neutral value only |
//! | unknown | ignored, and named in [`IGNORED_HEADER`]; refused with `strict-requests` |

use axum::http::{HeaderName, HeaderValue};
use axum::response::Response;
use serde::Deserialize;
use serde::de::DeserializeOwned;
use serde_json::{Map, Value};

use super::error::ApiError;
use super::numbers;
use super::sampling_fields::{SamplingFields, is_sampling_field};
use super::scheduling_fields::{SCHEDULING_FIELDS, SchedulingFields};
use super::structured_output::STRUCTURED_OUTPUT_FIELDS;
use crate::params::{RequestParamError, RequestParams, TOP_LOGPROBS_MAX};

/// Fields that are for the client's own records, and hints: without them the answer is correct too.
const HINT_FIELDS: [&str; 19] = [
    "metadata",
    "store",
    "safety_identifier",
    "prompt_cache_retention",
    "parallel_tool_calls",
    "request_id",
    "detokenize",
    // A text that the reply is likely to repeat, and how long the reply should be.
    "prediction",
    "verbosity",
    // Chats take them. Other endpoints have no reasoning to switch.
    "reasoning_effort",
    "enable_thinking",
    // llama.cpp: the prefix cache is always on, and there are no slots.
    "cache_prompt",
    "id_slot",
    "timings_per_token",
    "return_progress",
    // vLLM: the choice of a grammar compiler does not change what a grammar means.
    "guided_decoding_backend",
    "guided_decoding_disable_fallback",
    "guided_whitespace_pattern",
    "add_generation_prompt",
];

/// Names the unknown fields that a request was served without.
const IGNORED_HEADER: HeaderName = HeaderName::from_static("x-ballast-ignored-fields");
/// Names in that header, and their lengths.
const NAMED_MAX: usize = 8;
const NAME_BYTES_MAX: usize = 40;
/// A byte order mark, which some clients write before JSON.
const BYTE_ORDER_MARK: &[u8] = b"\xef\xbb\xbf";

/// What happens to a request with fields that the router does not know.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum UnknownFields {
    /// They are ignored and named in a header of the response.
    Ignore,
    Refuse,
}

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

fn is_text_only(value: &Value) -> bool {
    value.as_array().is_some_and(|items| items.iter().all(|item| item == "text"))
}

const UNSUPPORTED_FIELDS: [UnsupportedField; 18] = [
    unsupported("tools", is_empty),
    unsupported("tool_choice", is_without_tools),
    unsupported("functions", is_empty),
    unsupported("function_call", is_without_tools),
    unsupported("modalities", is_text_only),
    unsupported("audio", never),
    unsupported("web_search_options", never),
    // Supported by completions only.
    unsupported("suffix", is_empty),
    unsupported("best_of", is_one),
    unsupported("skip_special_tokens", is_true),
    unsupported("spaces_between_special_tokens", is_true),
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
    return_tokens_as_token_ids: Option<bool>,
    prompt_logprobs: Option<i64>,
}

const RESPONSE_FIELDS: [&str; 6] = [
    "model",
    "stream",
    "stream_options",
    "return_token_ids",
    "return_tokens_as_token_ids",
    "prompt_logprobs",
];

#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
struct StreamOptions {
    include_usage: Option<bool>,
    /// vLLM: every chunk has the usage so far.
    continuous_usage_stats: Option<bool>,
    /// Whether to pad chunks against side channels. The router never pads.
    #[serde(rename = "include_obfuscation")]
    _include_obfuscation: Option<bool>,
}

/// The form of the response that the client asks for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct ResponseOptions {
    pub(crate) stream: bool,
    pub(crate) include_usage: bool,
    /// Every chunk has the usage so far.
    pub(crate) continuous_usage: bool,
    pub(crate) return_token_ids: bool,
    /// Log probabilities name tokens as `token_id:N`.
    pub(crate) names_tokens_by_id: bool,
    /// vLLM's `prompt_logprobs`: the number of alternatives.
    pub(crate) prompt_logprobs: Option<u32>,
}

impl ResponseOptions {
    /// Refuses a stream of choices that are known at the end only.
    pub(super) fn check_streaming(self, params: &RequestParams) -> Result<(), ApiError> {
        let selects_best = params.best_of.is_some_and(|best_of| best_of > params.n.unwrap_or(1));
        let (param, what) = match (params.beam_search, selects_best) {
            (true, _) => ("use_beam_search", "a beam search"),
            (false, true) => ("best_of", "`best_of` above `n`"),
            (false, false) => return Ok(()),
        };
        let message = format!("{what} cannot be streamed: the best choices are known at the end only");
        if self.stream { Err(ApiError::invalid(Some(param), message)) } else { Ok(()) }
    }
}

impl ResponseFields {
    pub(crate) fn options(&self) -> Result<ResponseOptions, ApiError> {
        let stream = self.stream.unwrap_or(false);
        if self.stream_options.is_some() && !stream {
            let message = "`stream_options` is only allowed when `stream` is true";
            return Err(ApiError::invalid(Some("stream_options"), message));
        }
        let usage = self.stream_options.as_ref();
        let include_usage = usage.and_then(|usage| usage.include_usage).unwrap_or(false);
        Ok(ResponseOptions {
            stream,
            include_usage,
            // As in vLLM, `include_usage` switches both.
            continuous_usage: include_usage
                && usage.and_then(|usage| usage.continuous_usage_stats).unwrap_or(false),
            return_token_ids: self.return_token_ids.unwrap_or(false),
            names_tokens_by_id: self.return_tokens_as_token_ids.unwrap_or(false),
            prompt_logprobs: self.prompt_logprobs(stream)?,
        })
    }

    fn prompt_logprobs(&self, stream: bool) -> Result<Option<u32>, ApiError> {
        let param = "prompt_logprobs";
        let Some(count) = self.prompt_logprobs else { return Ok(None) };
        if stream {
            let message = "`prompt_logprobs` is not available when `stream` is true";
            return Err(ApiError::invalid(Some(param), message));
        }
        match u32::try_from(count).ok().filter(|_| count <= TOP_LOGPROBS_MAX) {
            Some(count) => Ok(Some(count)),
            None => Err(RequestParamError::OutOfRange {
                param,
                value: count.to_string(),
                allowed: format!("0 to {TOP_LOGPROBS_MAX}"),
            }
            .into()),
        }
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
    pub(crate) ignored: IgnoredFields,
}

/// The unknown fields that a request is served without.
#[derive(Debug, Default)]
pub(crate) struct IgnoredFields(Vec<String>);

impl IgnoredFields {
    /// Names the fields in a header of the response.
    pub(crate) fn name_in(self, mut response: Response) -> Response {
        if !self.0.is_empty()
            && let Ok(names) = HeaderValue::from_str(&self.0.join(", "))
        {
            response.headers_mut().insert(IGNORED_HEADER, names);
        }
        response
    }

    fn push(&mut self, name: &str) {
        if self.0.len() < NAMED_MAX {
            let is_plain = |c: &char| c.is_ascii_alphanumeric() || "_-.".contains(*c);
            let plain: String = name.chars().filter(is_plain).take(NAME_BYTES_MAX).collect();
            self.0.push(if plain.is_empty() { "?".to_owned() } else { plain });
        }
    }
}

/// Parses `body` as a JSON object without its nulls: an explicit null is an absent field.
pub(crate) fn parse_object(body: &[u8]) -> Result<Map<String, Value>, ApiError> {
    let body = body.strip_prefix(BYTE_ORDER_MARK).unwrap_or(body);
    check_value_count(body)?;
    let mut fields: Map<String, Value> =
        serde_json::from_slice(body).map_err(|error| numbers::unparsable_body(body, &error))?;
    fields.retain(|_, value| !value.is_null());
    fields.values_mut().for_each(numbers::normalize_integer);
    Ok(fields)
}

/// Parses `body`. `endpoint_fields` names the fields of `T`.
pub(crate) fn parse_body<T: DeserializeOwned>(
    body: &[u8],
    endpoint_fields: &[&str],
    unknown: UnknownFields,
) -> Result<ParsedBody<T>, ApiError> {
    parse_fields(parse_object(body)?, endpoint_fields, unknown)
}

/// The same for a body that is parsed already.
pub(crate) fn parse_fields<T: DeserializeOwned>(
    fields: Map<String, Value>,
    endpoint_fields: &[&str],
    unknown: UnknownFields,
) -> Result<ParsedBody<T>, ApiError> {
    let lists = [endpoint_fields, &STRUCTURED_OUTPUT_FIELDS, &SCHEDULING_FIELDS, &RESPONSE_FIELDS];
    let is_supported = |name: &str| is_sampling_field(name) || lists.iter().any(|it| it.contains(&name));
    let ignored = check_names(&fields, is_supported, unknown)?;
    let fields = Value::Object(fields);
    let sampling: SamplingFields = deserialize(&fields)?;
    let sampling = sampling.with_parts(deserialize(&fields)?, deserialize(&fields)?);
    Ok(ParsedBody { endpoint: deserialize(&fields)?, sampling, response: deserialize(&fields)?, ignored })
}

/// Parses the fields of an endpoint that generates nothing. `endpoint_fields` names those of `T`.
pub(super) fn parse_pooled<T: DeserializeOwned>(
    body: &[u8],
    endpoint_fields: &[&str],
    unknown: UnknownFields,
) -> Result<(T, SchedulingFields, IgnoredFields), ApiError> {
    let fields = parse_object(body)?;
    let is_supported = |name: &str| endpoint_fields.contains(&name) || SCHEDULING_FIELDS.contains(&name);
    let ignored = check_names(&fields, is_supported, unknown)?;
    let fields = Value::Object(fields);
    Ok((deserialize(&fields)?, deserialize(&fields)?, ignored))
}

/// Refuses fields that this router does not support, and collects those that it ignores.
fn check_names(
    fields: &Map<String, Value>,
    is_supported: impl Fn(&str) -> bool,
    unknown: UnknownFields,
) -> Result<IgnoredFields, ApiError> {
    let mut ignored = IgnoredFields::default();
    for (name, value) in fields {
        let name = name.as_str();
        if is_supported(name) || HINT_FIELDS.contains(&name) {
            continue;
        }
        match UNSUPPORTED_FIELDS.iter().find(|field| field.name == name) {
            Some(field) if (field.is_neutral)(value) => {}
            Some(_) => return Err(ApiError::invalid(Some(name), format!("`{name}` is not supported"))),
            None if unknown == UnknownFields::Refuse => return Err(unknown_field(name)),
            None => ignored.push(name),
        }
    }
    Ok(ignored)
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

pub(super) fn unknown_field(name: &str) -> ApiError {
    let shown: String = name.chars().take(80).collect();
    ApiError::invalid(Some(&shown), format!("Unrecognized request argument supplied: {shown}"))
}

pub(super) fn deserialize<T: DeserializeOwned>(fields: &Value) -> Result<T, ApiError> {
    serde_path_to_error::deserialize(fields).map_err(|error| match error.path().to_string().as_str() {
        // For a missing field of the body, the path is empty and the message names the field.
        "." => {
            let text = error.inner().to_string();
            ApiError::invalid(text.split('`').nth(1), &text)
        }
        path => numbers::wrong_type(path, error.inner()),
    })
}
