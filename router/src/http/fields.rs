//! Reading a request body: which fields are served, which are harmless, which are refused by name; then typed values,
//! with the path of the field in every error.
//!
//! An unknown field is refused as OpenAI does, since a mistyped one would otherwise do nothing in silence. A field that
//! clients of OpenAI or vLLM send and that is not served is accepted with its neutral value only.

use serde::Deserialize;
use serde::de::DeserializeOwned;
use serde_json::{Map, Value};

use super::error::ApiError;
use super::numbers;
use super::standing::{STANDING_FIELDS, StandingFields};
use super::structure::{STRUCTURE_FIELDS, StructureFields};
use crate::params::Params;

/// Fields that change nothing in the output; accepted and not looked at.
const HARMLESS: [&str; 10] = [
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

/// A field that is known but not served, and the values of it that ask for nothing.
struct Unserved {
    name: &'static str,
    is_neutral: fn(&Value) -> bool,
}

const fn unserved(name: &'static str, is_neutral: fn(&Value) -> bool) -> Unserved {
    Unserved { name, is_neutral }
}

fn never(_: &Value) -> bool {
    false
}

fn empty(value: &Value) -> bool {
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

fn no_tool_choice(value: &Value) -> bool {
    matches!(value.as_str(), Some("none" | "auto"))
}

/// Which engine compiles grammars is not the client's choice here, nor does it change what they mean.
fn text_of_any_length(value: &Value) -> bool {
    value.is_string()
}

fn text_only(value: &Value) -> bool {
    value.as_array().is_some_and(|items| items.iter().all(|item| item == "text"))
}

const UNSERVED: [Unserved; 30] = [
    unserved("suffix", empty),
    unserved("tools", empty),
    unserved("tool_choice", no_tool_choice),
    unserved("functions", empty),
    unserved("function_call", no_tool_choice),
    unserved("modalities", text_only),
    unserved("audio", never),
    unserved("prediction", never),
    unserved("web_search_options", never),
    unserved("reasoning_effort", never),
    unserved("verbosity", never),
    // Of completions only.
    unserved("best_of", is_one),
    unserved("use_beam_search", is_false),
    unserved("length_penalty", is_one),
    unserved("early_stopping", is_false),
    unserved("guided_decoding_backend", text_of_any_length),
    unserved("include_stop_str_in_output", is_false),
    unserved("skip_special_tokens", is_true),
    unserved("spaces_between_special_tokens", is_true),
    unserved("prompt_logprobs", never),
    unserved("truncate_prompt_tokens", never),
    unserved("allowed_token_ids", never),
    unserved("bad_words", empty),
    unserved("documents", empty),
    // Of chats only: the template writes the special tokens.
    unserved("add_special_tokens", is_false),
    unserved("chat_template", never),
    unserved("continue_final_message", is_false),
    unserved("kv_transfer_params", never),
    unserved("include_reasoning", is_true),
    unserved("thinking_token_budget", never),
];

/// Fields of both surfaces that become [`Params`].
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
    /// OpenAI's is any 64-bit integer, ours too: the sign is only a way to write it.
    seed: Option<i64>,
    stop: Option<OneOrMany>,
    stop_token_ids: Option<Vec<i64>>,
    ignore_eos: Option<bool>,
    n: Option<i64>,
    #[serde(skip)]
    structure: StructureFields,
    #[serde(skip)]
    standing: StandingFields,
}

const SAMPLING_FIELDS: [&str; 29] = [
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
enum OneOrMany {
    One(String),
    Many(Vec<String>),
}

/// Fields of both surfaces that shape the response.
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
    /// Padding against side channels; there is none to leave out.
    #[serde(rename = "include_obfuscation")]
    _include_obfuscation: Option<bool>,
}

/// How the client wants its response.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Shape {
    pub(crate) stream: bool,
    pub(crate) include_usage: bool,
    pub(crate) return_token_ids: bool,
}

impl ResponseFields {
    pub(crate) fn shape(&self) -> Result<Shape, ApiError> {
        let stream = self.stream.unwrap_or(false);
        if self.stream_options.is_some() && !stream {
            let message = "`stream_options` is only allowed when `stream` is true";
            return Err(ApiError::invalid(Some("stream_options"), message));
        }
        Ok(Shape {
            stream,
            include_usage: self.stream_options.as_ref().and_then(|o| o.include_usage).unwrap_or(false),
            return_token_ids: self.return_token_ids.unwrap_or(false),
        })
    }
}

impl SamplingFields {
    pub(super) fn with_standing(self, standing: StandingFields) -> Self {
        Self { standing, ..self }
    }

    pub(crate) fn params(self) -> Result<Params, ApiError> {
        let params = Params {
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
                Some(OneOrMany::One(stop)) => vec![stop],
                Some(OneOrMany::Many(stops)) => stops,
            },
            stop_tokens: self.stop_token_ids.unwrap_or_default(),
            ignore_eos: self.ignore_eos.unwrap_or(false),
            n: self.n,
            grammar: self.structure.grammar()?,
            ..Params::default()
        };
        self.standing.add_to(params)
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

/// A body as typed values. Three structs read from one object rather than one with flattened parts: serde loses a
/// field's path in those.
#[derive(Debug)]
pub(crate) struct Body<T> {
    pub(crate) own: T,
    pub(crate) sampling: SamplingFields,
    pub(crate) response: ResponseFields,
}

/// `own` names the fields of `T`.
pub(crate) fn read<T: DeserializeOwned>(body: &[u8], own: &[&str]) -> Result<Body<T>, ApiError> {
    let mut fields: Map<String, Value> =
        serde_json::from_slice(body).map_err(|error| numbers::unreadable(body, &error))?;
    // An explicit null is an absent field.
    fields.retain(|_, value| !value.is_null());
    fields.values_mut().for_each(numbers::make_whole);
    for (name, value) in &fields {
        let name = name.as_str();
        let served = [own, &SAMPLING_FIELDS, &STRUCTURE_FIELDS, &STANDING_FIELDS, &RESPONSE_FIELDS]
            .iter()
            .any(|served| served.contains(&name));
        if !served && !HARMLESS.contains(&name) {
            check_unserved(name, value)?;
        }
    }
    let fields = Value::Object(fields);
    let (structure, standing) = (typed(&fields)?, typed(&fields)?);
    let sampling = SamplingFields { structure, standing, ..typed(&fields)? };
    Ok(Body { own: typed(&fields)?, sampling, response: typed(&fields)? })
}

fn check_unserved(name: &str, value: &Value) -> Result<(), ApiError> {
    match UNSERVED.iter().find(|field| field.name == name) {
        Some(field) if (field.is_neutral)(value) => Ok(()),
        Some(_) => Err(ApiError::invalid(Some(name), format!("`{name}` is not supported"))),
        None => {
            let shown: String = name.chars().take(80).collect();
            let message = format!("Unrecognized request argument supplied: {shown}");
            Err(ApiError::invalid(Some(&shown), message))
        }
    }
}

fn typed<T: DeserializeOwned>(fields: &Value) -> Result<T, ApiError> {
    serde_path_to_error::deserialize(fields).map_err(|error| match error.path().to_string().as_str() {
        // A missing field of the body has no path; its message names it.
        "." => {
            let said = error.inner().to_string();
            ApiError::invalid(said.split('`').nth(1), &said)
        }
        path => numbers::mistyped(path, error.inner()),
    })
}
