//! Fields of both endpoints that become [`RequestParams`]: sampling, stop conditions, structured
//! output and scheduling.

use serde::Deserialize;
use serde_json::{Map, Value};

use super::error::ApiError;
use super::scheduling_fields::SchedulingFields;
use super::structured_output::StructuredOutputFields;
use crate::params::RequestParams;

/// Fields of both endpoints that become [`RequestParams`].
#[derive(Debug, Default, Deserialize)]
pub(crate) struct SamplingFields {
    max_tokens: Option<i64>,
    min_tokens: Option<i64>,
    temperature: Option<f64>,
    top_k: Option<i64>,
    top_p: Option<f64>,
    min_p: Option<f64>,
    dynatemp_range: Option<f64>,
    dynatemp_exponent: Option<f64>,
    top_n_sigma: Option<f64>,
    typical_p: Option<f64>,
    xtc_probability: Option<f64>,
    xtc_threshold: Option<f64>,
    mirostat: Option<i64>,
    mirostat_tau: Option<f64>,
    mirostat_eta: Option<f64>,
    repetition_penalty: Option<f64>,
    presence_penalty: Option<f64>,
    frequency_penalty: Option<f64>,
    dry_multiplier: Option<f64>,
    dry_base: Option<f64>,
    dry_allowed_length: Option<i64>,
    dry_penalty_last_n: Option<i64>,
    dry_sequence_breakers: Option<Vec<String>>,
    logit_bias: Option<Map<String, Value>>,
    /// Any 64-bit integer, as in OpenAI's API. The router reads it as unsigned.
    seed: Option<i64>,
    stop: Option<StopField>,
    stop_token_ids: Option<Vec<i64>>,
    ignore_eos: Option<bool>,
    n: Option<i64>,
    #[serde(skip)]
    structured_output: StructuredOutputFields,
    #[serde(skip)]
    scheduling: SchedulingFields,
}

pub(super) const SAMPLING_FIELDS: [&str; 29] = [
    "max_tokens",
    "min_tokens",
    "temperature",
    "top_k",
    "top_p",
    "min_p",
    "dynatemp_range",
    "dynatemp_exponent",
    "top_n_sigma",
    "typical_p",
    "xtc_probability",
    "xtc_threshold",
    "mirostat",
    "mirostat_tau",
    "mirostat_eta",
    "dry_multiplier",
    "dry_base",
    "dry_allowed_length",
    "dry_penalty_last_n",
    "dry_sequence_breakers",
    "repetition_penalty",
    "presence_penalty",
    "frequency_penalty",
    "logit_bias",
    "seed",
    "stop",
    "stop_token_ids",
    "ignore_eos",
    "n",
];

#[derive(Debug, Deserialize)]
#[serde(untagged, expecting = "expected a string or an array of strings")]
enum StopField {
    One(String),
    Many(Vec<String>),
}

impl SamplingFields {
    /// Adds the fields that are deserialized apart.
    pub(super) fn with_parts(
        self,
        structured_output: StructuredOutputFields,
        scheduling: SchedulingFields,
    ) -> Self {
        Self { structured_output, scheduling, ..self }
    }

    pub(crate) fn params(self) -> Result<RequestParams, ApiError> {
        let params = RequestParams {
            max_tokens: self.max_tokens,
            min_tokens: self.min_tokens,
            temperature: self.temperature,
            top_k: self.top_k,
            top_p: self.top_p,
            min_p: self.min_p,
            dynatemp_range: self.dynatemp_range,
            dynatemp_exponent: self.dynatemp_exponent,
            top_n_sigma: self.top_n_sigma,
            typical_p: self.typical_p,
            xtc_probability: self.xtc_probability,
            xtc_threshold: self.xtc_threshold,
            mirostat: self.mirostat,
            mirostat_tau: self.mirostat_tau,
            mirostat_eta: self.mirostat_eta,
            dry_multiplier: self.dry_multiplier,
            dry_base: self.dry_base,
            dry_allowed_length: self.dry_allowed_length,
            dry_penalty_last_n: self.dry_penalty_last_n,
            dry_sequence_breakers: self.dry_sequence_breakers,
            repetition_penalty: self.repetition_penalty,
            presence_penalty: self.presence_penalty,
            frequency_penalty: self.frequency_penalty,
            logit_bias: logit_bias(self.logit_bias.unwrap_or_default())?,
            seed: self.seed.map(|seed| seed as u64),
            stop: match self.stop {
                None => vec![],
                Some(StopField::One(stop)) => vec![stop],
                Some(StopField::Many(stops)) => stops,
            },
            stop_tokens: self.stop_token_ids.unwrap_or_default(),
            ignore_eos: self.ignore_eos.unwrap_or(false),
            n: self.n,
            grammar: self.structured_output.grammar()?,
            ..RequestParams::default()
        };
        self.scheduling.apply_to(params)
    }
}

fn logit_bias(entries: Map<String, Value>) -> Result<Vec<(i64, f64)>, ApiError> {
    let entry = |(key, value): (String, Value)| match (key.parse::<i64>(), value.as_f64()) {
        (Ok(token), Some(bias)) => Ok((token, bias)),
        (Err(_), _) => Err(ApiError::invalid(
            Some("logit_bias"),
            format!("`logit_bias` has the key {key:?}, which is not a token id"),
        )),
        (_, None) => Err(ApiError::invalid(
            Some(&format!("logit_bias.{key}")),
            format!("`logit_bias.{key}` is {value}, expected a number"),
        )),
    };
    entries.into_iter().map(entry).collect()
}
