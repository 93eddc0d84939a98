// SPDX-License-Identifier: Apache-2.0

//! Error texts for numbers that are not of their field's type. They name the field and its range,
//! and no Rust types.
//!
//! JSON has no NaN and no infinity, but JavaScript and Python write `NaN` and `-Infinity`. JSON
//! also allows numbers that no float can hold. The JSON parser rejects all of these without naming
//! the field.

use serde::Deserialize;
use serde_json::{Map, Value, json};

use super::error::ApiError;
use super::sampling_fields::SamplingFields;
use super::scheduling_fields::SchedulingFields;
use super::structured_output::StructuredOutputFields;
use crate::params::{RequestParamError, RequestParams, TokenLimits};

/// Maximum length of a number in an error text.
const SHOWN_NUMBER_BYTES_MAX: usize = 40;
/// Every integer up to 2^53 is exact as an f64.
const EXACT_INTEGER_MAX: f64 = (1u64 << 53) as f64;

/// The error for a body that serde_json cannot parse.
pub(super) fn unparsable_body(body: &[u8], error: &serde_json::Error) -> ApiError {
    let not_an_object = || {
        // Python's `json` writes half of a pair as it is, for example of a text cut in two. The
        // parser misses the other half, or finds something else.
        let text = error.to_string();
        let hint = match text.contains("surrogate") || text.contains("hex escape") {
            true => "; `\\ud800` to `\\udfff` are halves of a character: send both halves, or the character",
            false => "",
        };
        ApiError::invalid(None, format!("the request body is not a JSON object: {error}{hint}"))
    };
    let Some(number) = number_at(body, error) else { return not_an_object() };
    let reader = &mut serde_json::Deserializer::from_slice(body);
    let Err(error) = serde_path_to_error::deserialize::<_, Map<String, Value>>(reader) else {
        return not_an_object();
    };
    let path = error.path().to_string();
    let field = path.split(['.', '[']).next().unwrap_or_default();
    match allowed_range(field) {
        Some((param, allowed)) => {
            RequestParamError::OutOfRange { param, value: number.to_owned(), allowed }.into()
        }
        None => ApiError::invalid(Some(&path), format!("`{path}` is {number}, which is not a finite number")),
    }
}

/// The error for a value at `path` whose type differs from its field's type.
pub(super) fn wrong_type(path: &str, error: &serde_json::Error) -> ApiError {
    let text = error.to_string();
    let number = |rust: &str, plain: &str| Some(format!("{}expected {plain}", text.strip_suffix(rust)?));
    let message = match number("expected f64", "a number").or(number("expected i64", "a whole number")) {
        None => format!("`{path}`: {text}"),
        Some(text) => match allowed_range(path) {
            Some((_, allowed)) => format!("`{path}`: {text}; allowed are {allowed}"),
            None => format!("`{path}`: {text}"),
        },
    };
    ApiError::invalid(Some(path), message)
}

/// Turns a float without a fraction into an integer: 16.0 is a whole number in JSON and to other
/// servers.
pub(super) fn normalize_integer(value: &mut Value) {
    if let Value::Number(number) = value
        && let Some(float) =
            number.as_f64().filter(|float| number.is_f64() && float.abs() <= EXACT_INTEGER_MAX)
        && float.fract() == 0.0
    {
        *value = json!(float as i64);
    }
}

/// The range of numbers that a field accepts. [`RequestParams::check`] reports it when it refuses
/// the largest float or the largest integer, because no range contains both.
fn allowed_range(field: &str) -> Option<(&'static str, String)> {
    let any = TokenLimits { context_tokens: u32::MAX, vocabulary: u32::MAX };
    [json!(f64::MAX), json!(i64::MAX)].into_iter().find_map(|out_of_range| {
        match params_with(field, out_of_range)?.check(any, "prompt", 1) {
            Err(RequestParamError::OutOfRange { param, allowed, .. }) => Some((param, allowed)),
            _ => None,
        }
    })
}

/// Parameters with `value` in `field`; `None` if the field has another type.
fn params_with(field: &str, value: Value) -> Option<RequestParams> {
    let whole = value.as_i64();
    match field {
        "best_of" => Some(RequestParams { best_of: Some(whole?), ..RequestParams::default() }),
        "top_logprobs" => Some(RequestParams { top_logprobs: Some(whole?), ..RequestParams::default() }),
        "max_completion_tokens" => params_with("max_tokens", value),
        _ => {
            let fields = match field {
                "logit_bias" => json!({"logit_bias": {"0": value}}),
                _ => json!({field: value}),
            };
            let scheduling = SchedulingFields::deserialize(&fields).ok()?;
            SamplingFields::deserialize(&fields)
                .ok()?
                .with_parts(StructuredOutputFields::default(), scheduling)
                .params()
                .ok()
        }
    }
}

/// The text at which serde_json stopped, if it is a number that no float can hold, NaN or infinity.
fn number_at<'a>(body: &'a [u8], error: &serde_json::Error) -> Option<&'a str> {
    let line = body.split_inclusive(|&byte| byte == b'\n').take(error.line().checked_sub(1)?);
    let at = line.map(<[u8]>::len).sum::<usize>() + error.column().checked_sub(1)?;
    let in_number = |byte: &u8| byte.is_ascii_alphanumeric() || b"+-.".contains(byte);
    let start = body.get(..at)?.iter().rposition(|byte| !in_number(byte))? + 1;
    let length = body.get(start..)?.iter().position(|byte| !in_number(byte))?;
    let word = std::str::from_utf8(body.get(start..start + length.min(SHOWN_NUMBER_BYTES_MAX))?).ok()?;
    let too_large = error.to_string().starts_with("number out of range");
    (too_large || ["NaN", "Infinity", "-Infinity"].contains(&word)).then_some(word)
}
