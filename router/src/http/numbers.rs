//! What is said of a value that is not even of its field's type: what a number there may be, in words that are not Rust's.
//!
//! JSON has no NaN and no infinity, but JavaScript and Python write them (`NaN`, `-Infinity`), and numbers beyond every
//! float are JSON all the same. A parser finds all of those unreadable; who sent one is told the field and its range.

use serde::Deserialize;
use serde_json::{Map, Value, json};

use super::error::ApiError;
use super::fields::SamplingFields;
use super::standing::StandingFields;
use crate::params::{Limits, ParamError, Params};

/// Bytes of a number that are shown in an error.
const NUMBER_SHOWN_MAX: usize = 40;
/// Whole numbers are the same as floats up to here.
const EXACT_MAX: f64 = (1u64 << 53) as f64;

/// Of a body that serde_json cannot read.
pub(super) fn unreadable(body: &[u8], error: &serde_json::Error) -> ApiError {
    let object = || ApiError::invalid(None, format!("the request body is not a JSON object: {error}"));
    let Some(number) = number_at(body, error) else { return object() };
    let reader = &mut serde_json::Deserializer::from_slice(body);
    let Err(error) = serde_path_to_error::deserialize::<_, Map<String, Value>>(reader) else {
        return object();
    };
    let path = error.path().to_string();
    let field = path.split(['.', '[']).next().unwrap_or_default();
    match range(field) {
        Some((param, allowed)) => ParamError::Range { param, value: number.to_owned(), allowed }.into(),
        None => ApiError::invalid(
            Some(&path),
            format!("`{path}` is {number}, which is not in the range of any number"),
        ),
    }
}

/// Of a value at `path` that is of another type than its field.
pub(super) fn mistyped(path: &str, error: &serde_json::Error) -> ApiError {
    let said = error.to_string();
    let number = |rust: &str, ours: &str| Some(format!("{}expected {ours}", said.strip_suffix(rust)?));
    let message = match number("expected f64", "a number").or(number("expected i64", "a whole number")) {
        None => format!("`{path}`: {said}"),
        Some(said) => match range(path) {
            Some((_, allowed)) => format!("`{path}`: {said}; allowed are {allowed}"),
            None => format!("`{path}`: {said}"),
        },
    };
    ApiError::invalid(Some(path), message)
}

/// 16.0 is a whole number to JSON, and to other servers.
pub(super) fn make_whole(value: &mut Value) {
    if let Value::Number(number) = value
        && let Some(float) = number.as_f64().filter(|float| number.is_f64() && float.abs() <= EXACT_MAX)
        && float.fract() == 0.0
    {
        *value = json!(float as i64);
    }
}

/// What a number in this field may be. It is asked of the check itself, with numbers that no range has: the largest float,
/// the largest whole number.
fn range(field: &str) -> Option<(&'static str, String)> {
    let any = Limits { context_tokens: u32::MAX, vocabulary: u32::MAX };
    [json!(f64::MAX), json!(i64::MAX)].into_iter().find_map(|most| {
        match params(field, most)?.check(any, "prompt", 1) {
            Err(ParamError::Range { param, allowed, .. }) => Some((param, allowed)),
            _ => None,
        }
    })
}

/// With this value in a field, where it can be there.
fn params(field: &str, value: Value) -> Option<Params> {
    let whole = value.as_i64();
    match field {
        "best_of" => Some(Params { best_of: Some(whole?), ..Params::default() }),
        "top_logprobs" => Some(Params { top_logprobs: Some(whole?), ..Params::default() }),
        "max_completion_tokens" => params("max_tokens", value),
        _ => {
            let fields = match field {
                "logit_bias" => json!({"logit_bias": {"0": value}}),
                _ => json!({field: value}),
            };
            let standing = StandingFields::deserialize(&fields).ok()?;
            SamplingFields::deserialize(&fields).ok()?.with_standing(standing).params().ok()
        }
    }
}

/// What stands in the body where serde_json stopped, if it is a number that it cannot hold, or none by its name.
fn number_at<'a>(body: &'a [u8], error: &serde_json::Error) -> Option<&'a str> {
    let line = body.split_inclusive(|&byte| byte == b'\n').take(error.line().checked_sub(1)?);
    let at = line.map(<[u8]>::len).sum::<usize>() + error.column().checked_sub(1)?;
    let in_number = |byte: &u8| byte.is_ascii_alphanumeric() || b"+-.".contains(byte);
    let start = body.get(..at)?.iter().rposition(|byte| !in_number(byte))? + 1;
    let length = body.get(start..)?.iter().position(|byte| !in_number(byte))?;
    let word = std::str::from_utf8(body.get(start..start + length.min(NUMBER_SHOWN_MAX))?).ok()?;
    let too_large = error.to_string().starts_with("number out of range");
    (too_large || ["NaN", "Infinity", "-Infinity"].contains(&word)).then_some(word)
}
