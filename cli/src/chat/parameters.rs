// SPDX-License-Identifier: Apache-2.0

//! [`ChatParameters`]: the sampling parameters of a chat's requests. Those that are not set are the
//! server's.

use serde_json::{Map, Value, json};

use crate::sampling_arguments::SharedSamplingArguments;

/// The type of a parameter's value.
#[derive(Clone, Copy)]
enum ValueKind {
    Number,
    Count,
    Text,
    /// One string; several with `--stop`.
    Texts,
}

/// The parameters with their types, by the names of the API.
const PARAMETERS: [(&str, ValueKind); 11] = [
    ("temperature", ValueKind::Number),
    ("top_p", ValueKind::Number),
    ("top_k", ValueKind::Count),
    ("min_p", ValueKind::Number),
    ("repetition_penalty", ValueKind::Number),
    ("presence_penalty", ValueKind::Number),
    ("frequency_penalty", ValueKind::Number),
    ("seed", ValueKind::Count),
    ("max_tokens", ValueKind::Count),
    ("stop", ValueKind::Texts),
    ("reasoning_effort", ValueKind::Text),
];
/// The value that leaves a parameter to the server again.
const DEFAULT: &str = "default";

#[derive(clap::Args, Clone, Debug)]
pub(crate) struct ChatSamplingArguments {
    /// Most tokens of an answer [default: the server's]
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u32).range(1..))]
    max_tokens: Option<u32>,
    #[arg(long, value_name = "T", help = sampling_params::TEMPERATURE.help())]
    temperature: Option<f32>,
    #[command(flatten)]
    shared: SharedSamplingArguments,
    /// How much a model reasons that can: none, low, medium or high
    #[arg(long, value_name = "EFFORT")]
    reasoning_effort: Option<String>,
}

impl ChatSamplingArguments {
    pub(crate) fn parameters(&self) -> ChatParameters {
        let SharedSamplingArguments { top_k, top_p, min_p, repetition_penalty, seed, stop } = &self.shared;
        let stop = (!stop.is_empty()).then(|| json!(stop));
        let values = [
            ("max_tokens", self.max_tokens.map(Value::from)),
            ("temperature", self.temperature.map(number)),
            ("top_k", top_k.map(Value::from)),
            ("top_p", top_p.map(number)),
            ("min_p", min_p.map(number)),
            ("repetition_penalty", repetition_penalty.map(number)),
            ("seed", seed.map(Value::from)),
            ("stop", stop),
            ("reasoning_effort", self.reasoning_effort.clone().map(Value::from)),
        ];
        let set = values.into_iter().filter_map(|(name, value)| Some((name.to_owned(), value?)));
        ChatParameters(set.collect())
    }
}

/// 0.7 as the user wrote it, not as the nearest 64-bit number.
fn number(value: f32) -> Value {
    serde_json::from_str(&value.to_string()).unwrap_or(Value::Null)
}

/// Why a parameter was not set.
#[derive(Debug, PartialEq, Eq, thiserror::Error)]
pub(crate) enum SetParameterError {
    #[error("no parameter is called {name:?}; there are {}", ChatParameters::names().join(", "))]
    Unknown { name: String },
    #[error("{name} takes {takes}, or \"{DEFAULT}\" for the server's value; not {value:?}")]
    Value { name: String, takes: &'static str, value: String },
}

#[derive(Clone, Debug, Default, PartialEq)]
pub(crate) struct ChatParameters(Map<String, Value>);

impl ChatParameters {
    pub(crate) fn names() -> [&'static str; PARAMETERS.len()] {
        PARAMETERS.map(|(name, _)| name)
    }

    /// Sets a parameter from text. The server checks its range.
    pub(crate) fn set(&mut self, name: &str, text: &str) -> Result<(), SetParameterError> {
        let Some((name, kind)) = PARAMETERS.into_iter().find(|(known, _)| *known == name) else {
            return Err(SetParameterError::Unknown { name: name.to_owned() });
        };
        if text == DEFAULT {
            self.0.remove(name);
            return Ok(());
        }
        let (value, takes) = match kind {
            ValueKind::Number => (finite(text), "a number"),
            ValueKind::Count => (text.parse::<u64>().ok().map(Value::from), "a whole number"),
            ValueKind::Text => (some_text(text).map(Value::from), "a word"),
            ValueKind::Texts => (some_text(text).map(|text| json!([text])), "a text"),
        };
        match value {
            Some(value) => {
                self.0.insert(name.to_owned(), value);
                Ok(())
            }
            None => Err(SetParameterError::Value { name: name.to_owned(), takes, value: text.to_owned() }),
        }
    }

    /// Adds the parameters to the body of a request.
    pub(crate) fn add_to(&self, body: &mut Value) {
        for (name, value) in &self.0 {
            body[name] = value.clone();
        }
    }
}

impl std::fmt::Display for ChatParameters {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        if self.0.is_empty() {
            return f.write_str("the server's");
        }
        let values: Vec<String> = self.0.iter().map(|(name, value)| format!("{name} {value}")).collect();
        f.write_str(&values.join(", "))
    }
}

fn finite(text: &str) -> Option<Value> {
    text.parse::<f64>().ok().filter(|number| number.is_finite()).map(Value::from)
}

fn some_text(text: &str) -> Option<&str> {
    Some(text).filter(|text| !text.is_empty())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn parameters_are_set_by_name_and_errors_name_what_is_allowed() {
        let mut parameters = ChatParameters::default();
        for (name, text) in [("temperature", "0.7"), ("max_tokens", "12"), ("stop", "\n\n"), ("seed", "3")] {
            parameters.set(name, text).unwrap();
        }
        parameters.set("seed", "default").unwrap();
        let mut body = json!({"model": "m"});
        parameters.add_to(&mut body);
        assert_eq!(body, json!({"model": "m", "temperature": 0.7, "max_tokens": 12, "stop": ["\n\n"]}));
        let unknown = parameters.set("heat", "1").unwrap_err().to_string();
        assert!(unknown.contains("temperature, top_p"), "{unknown}");
        for (name, text) in [("temperature", "hot"), ("temperature", "inf"), ("top_k", "-1"), ("stop", "")] {
            let error = parameters.set(name, text).unwrap_err().to_string();
            assert!(error.starts_with(name) && error.contains("default"), "{error}");
        }
        assert_eq!(parameters.to_string(), "temperature 0.7, max_tokens 12, stop [\"\\n\\n\"]");
    }
}
