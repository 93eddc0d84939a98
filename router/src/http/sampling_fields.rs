// SPDX-License-Identifier: Apache-2.0

//! Fields of both endpoints that become [`RequestParams`]: sampling, stop conditions, structured
//! output and scheduling.

use serde::Deserialize;
use serde_json::{Map, Value};

use super::error::ApiError;
use super::scheduling_fields::SchedulingFields;
use super::structured_output::StructuredOutputFields;
use crate::params::RequestParams;

macro_rules! define_sampling_fields {
    (
        floats: [$($float:ident $float_constant:ident),*],
        grouped_floats: [$($grouped:ident $grouped_constant:ident),*],
        integers: [$($integer:ident $integer_constant:ident),*],
    ) => {
        /// Fields of both endpoints that become [`RequestParams`].
        #[derive(Debug, Default, Deserialize)]
        pub(crate) struct SamplingFields {
            $($float: Option<f64>,)*
            $($grouped: Option<f64>,)*
            $($integer: Option<i64>,)*
            max_tokens: Option<i64>,
            min_tokens: Option<i64>,
            dry_sequence_breakers: Option<Vec<String>>,
            logit_bias: Option<Map<String, Value>>,
            /// Any 64-bit integer, as in OpenAI's API. The router reads it as unsigned.
            seed: Option<i64>,
            stop: Option<StopField>,
            stop_token_ids: Option<Vec<i64>>,
            ignore_eos: Option<bool>,
            allowed_token_ids: Option<Vec<i64>>,
            bad_words: Option<Vec<String>>,
            truncate_prompt_tokens: Option<i64>,
            include_stop_str_in_output: Option<bool>,
            n: Option<i64>,
            use_beam_search: Option<bool>,
            length_penalty: Option<f64>,
            early_stopping: Option<bool>,
            #[serde(skip)]
            structured_output: StructuredOutputFields,
            #[serde(skip)]
            scheduling: SchedulingFields,
        }
    };
}

sampling_params::with_parameter_names!(define_sampling_fields);

/// The names of the fields of [`SamplingFields`].
pub(super) fn is_sampling_field(name: &str) -> bool {
    const OTHERS: [&str; 13] = [
        "max_tokens",
        "min_tokens",
        "stop",
        "stop_token_ids",
        "ignore_eos",
        "allowed_token_ids",
        "bad_words",
        "truncate_prompt_tokens",
        "include_stop_str_in_output",
        "n",
        "use_beam_search",
        "length_penalty",
        "early_stopping",
    ];
    sampling_params::PARAMETERS.into_iter().any(|parameter| parameter.name() == name)
        || OTHERS.contains(&name)
}

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
        let mut params = RequestParams {
            max_tokens: self.max_tokens,
            min_tokens: self.min_tokens,
            dry_sequence_breakers: self.dry_sequence_breakers,
            logit_bias: logit_bias(self.logit_bias.unwrap_or_default())?,
            seed: self.seed.map(|seed| seed as u64),
            stop: match self.stop {
                None => vec![],
                Some(StopField::One(stop)) => vec![stop],
                Some(StopField::Many(stops)) => stops,
            },
            stop_tokens: self.stop_token_ids.unwrap_or_default(),
            ignore_eos: self.ignore_eos.unwrap_or(false),
            allowed_tokens: self.allowed_token_ids.unwrap_or_default(),
            bad_words: self.bad_words.unwrap_or_default(),
            truncate_prompt_tokens: self.truncate_prompt_tokens,
            include_stop_string: self.include_stop_str_in_output.unwrap_or(false),
            n: self.n,
            beam_search: self.use_beam_search.unwrap_or(false),
            length_penalty: self.length_penalty,
            early_stopping: self.early_stopping.unwrap_or(false),
            grammar: self.structured_output.grammar()?,
            ..RequestParams::default()
        };
        macro_rules! copy_fields {
            (
                floats: [$($float:ident $float_constant:ident),*],
                grouped_floats: [$($grouped:ident $grouped_constant:ident),*],
                integers: [$($integer:ident $integer_constant:ident),*],
            ) => {
                $(params.$float = self.$float;)*
                $(params.$grouped = self.$grouped;)*
                $(params.$integer = self.$integer;)*
            };
        }
        sampling_params::with_parameter_names!(copy_fields);
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
