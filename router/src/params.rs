// SPDX-License-Identifier: Apache-2.0

//! Validates the parameters of a request.
//!
//! [`RequestParams`] holds the parameters as the client sent them. [`RequestParams::check`]
//! compares them with their ranges and with the model's limits, fills in defaults and returns
//! [`CheckedParams`].
//!
//! 1. HTTP and gRPC requests both pass [`RequestParams::check`].
//! 2. An error names the field as OpenAI's API does.
//! 3. Numbers arrive as wide as JSON has them. So -1 for an unsigned field is a range error and not
//!    a type error.

use std::collections::hash_map::RandomState;
use std::hash::BuildHasher;
use std::time::Duration;

use sampling_params::{FloatParameter, IntegerDefault, IntegerParameter, LOGIT_BIAS_ENTRIES_MAX};

mod beams;
mod error;
mod output_grammar;

pub(crate) use beams::CheckedBeams;
pub(crate) use error::RequestParamError;
pub(crate) use output_grammar::RequestGrammar;

/// Maximum number of choices of one prompt. Each choice occupies one running sequence of a worker.
pub(crate) const N_MAX: i64 = 16;
/// Limits of stop strings. The router compares each stop string with each output delta.
pub(crate) const STOP_STRINGS_MAX: usize = 16;
pub(crate) const STOP_STRING_BYTES_MAX: usize = 256;
pub(crate) const STOP_TOKENS_MAX: usize = 64;
/// OpenAI's limit.
pub(crate) const TOP_LOGPROBS_MAX: i64 = 20;

/// A salt is a short secret.
const CACHE_SALT_BYTES_MAX: usize = 256;

/// llama.cpp's defaults.
const DRY_BREAKERS: [&str; 4] = ["\n", ":", "\"", "*"];
/// The router searches every token of the vocabulary for each sequence breaker.
const DRY_BREAKERS_MAX: usize = 16;
const DRY_BREAKER_BYTES_MAX: usize = 40;

macro_rules! define_request_params {
    (
        floats: [$($float:ident $float_constant:ident),*],
        grouped_floats: [$($grouped:ident $grouped_constant:ident),*],
        integers: [$($integer:ident $integer_constant:ident),*],
    ) => {
        /// Parameters as the client sent them. A field that the client left out is `None`, empty or
        /// false. The fields of floats and integers come from the table of sampling parameters.
        #[derive(Clone, Debug, Default)]
        pub(crate) struct RequestParams {
                $(pub(crate) $float: Option<f64>,)*
                $(pub(crate) $grouped: Option<f64>,)*
                $(pub(crate) $integer: Option<i64>,)*
            pub(crate) max_tokens: Option<i64>,
            pub(crate) min_tokens: Option<i64>,
            pub(crate) dry_sequence_breakers: Option<Vec<String>>,
            pub(crate) logit_bias: Vec<(i64, f64)>,
            pub(crate) seed: Option<u64>,
            pub(crate) stop: Vec<String>,
            pub(crate) stop_tokens: Vec<i64>,
            pub(crate) ignore_eos: bool,
            pub(crate) n: Option<i64>,
            pub(crate) top_logprobs: Option<i64>,
            pub(crate) grammar: Option<RequestGrammar>,
            /// The only tokens that the output may have. Empty: all.
            pub(crate) allowed_tokens: Vec<i64>,
            /// Texts that the output must not contain.
            pub(crate) bad_words: Vec<String>,
            /// The prompt keeps this many last tokens; -1: as many as fit.
            pub(crate) truncate_prompt_tokens: Option<i64>,
            pub(crate) include_stop_string: bool,
            /// Completions only: the fleet generates this many choices, the client receives the `n`
            /// most probable.
            pub(crate) best_of: Option<i64>,
            /// The choices are the most probable outputs, instead of random ones.
            pub(crate) beam_search: bool,
            /// Of the beam search.
            pub(crate) length_penalty: Option<f64>,
            pub(crate) early_stopping: bool,
            pub(crate) priority: Option<i64>,
            pub(crate) cache_salt: Option<String>,
            pub(crate) deadline_ms: Option<i64>,
            pub(crate) session: Option<Box<str>>,
        }

        /// Sampling parameters after validation.
        #[derive(Clone, Debug, Default, PartialEq)]
        pub(crate) struct CheckedSampling {
            $(pub(crate) $float: f32,)*
            pub(crate) top_k: u32,
            pub(crate) mirostat: Option<Mirostat>,
            pub(crate) dry: Option<Dry>,
            pub(crate) logit_bias: Vec<(u32, f32)>,
            pub(crate) seed: u64,
        }
    };
}

sampling_params::with_parameter_names!(define_request_params);

/// Parameters after validation: every value is in its range, every default is filled in.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct CheckedParams {
    /// At least 1. Prompt and output together fit the context.
    pub(crate) max_tokens: u32,
    /// True if the client set `max_tokens`. False if it is what the context leaves.
    pub(crate) is_max_tokens_given: bool,
    pub(crate) min_tokens: u32,
    pub(crate) sampling: CheckedSampling,
    pub(crate) stop: Vec<String>,
    pub(crate) stop_tokens: Vec<u32>,
    /// The text ends with the stop string that ended it.
    pub(crate) include_stop_string: bool,
    pub(crate) ignore_eos: bool,
    /// Choices that the fleet generates for each prompt.
    pub(crate) best_of: u32,
    /// Choices of each prompt that the client receives: the most probable.
    pub(crate) n: u32,
    pub(crate) beams: Option<CheckedBeams>,
    pub(crate) top_logprobs: Option<u32>,
    pub(crate) grammar: Option<RequestGrammar>,
    /// Lower is more urgent.
    pub(crate) priority: i32,
    pub(crate) cache_salt: String,
    pub(crate) deadline: Option<Duration>,
    pub(crate) session: Option<Box<str>>,
}

#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) struct Mirostat {
    pub(crate) version: u32,
    pub(crate) tau: f32,
    pub(crate) eta: f32,
}

#[derive(Clone, Debug, PartialEq)]
pub(crate) struct Dry {
    pub(crate) multiplier: f32,
    pub(crate) base: f32,
    pub(crate) allowed_length: u32,
    /// `None`: the whole context.
    pub(crate) penalty_last_n: Option<u32>,
    /// Strings. The router translates them to token sequences when it calls a worker.
    pub(crate) breakers: Vec<String>,
}

/// The limits of a model that parameters are checked against.
#[derive(Clone, Copy, Debug)]
pub(crate) struct TokenLimits {
    pub(crate) context_tokens: u32,
    pub(crate) vocabulary: u32,
}

impl RequestParams {
    /// Refuses parameters that contain text, for a model without tokenizer.
    pub(crate) fn check_without_text(&self) -> Result<(), RequestParamError> {
        let grammar = self.grammar.as_ref().map(|grammar| grammar.param);
        let stop = (!self.stop.is_empty()).then_some("stop");
        let bad_words = (!self.bad_words.is_empty()).then_some("bad_words");
        let breakers = self.dry_sequence_breakers.as_ref().filter(|words| !words.is_empty());
        match grammar.or(stop).or(bad_words).or(breakers.map(|_| "dry_sequence_breakers")) {
            Some(param) => Err(RequestParamError::NeedsTokenizer { param }),
            None => Ok(()),
        }
    }

    /// Checks every parameter against its range. `prompt_param` is the name of the prompt field in
    /// this API.
    pub(crate) fn check(
        self,
        limits: TokenLimits,
        prompt_param: &'static str,
        prompt_tokens: usize,
    ) -> Result<CheckedParams, RequestParamError> {
        let mut sampling = CheckedSampling {
            // -1 means "all", as 0 does.
            top_k: integer(&sampling_params::TOP_K, self.top_k)?.max(0) as u32,
            mirostat: self.mirostat()?,
            dry: self.dry()?,
            logit_bias: logit_bias(&self.logit_bias, limits)?,
            seed: self.seed.unwrap_or_else(random_seed),
            ..CheckedSampling::default()
        };
        macro_rules! check_floats {
            (floats: [$($name:ident $constant:ident),*], $($rest:tt)*) => {
                $(sampling.$name = float(&sampling_params::$constant, self.$name)?;)*
            };
        }
        sampling_params::with_parameter_names!(check_floats);
        self.check_stop_strings()?;
        let grammar = self.output_grammar(limits)?;
        if self.stop_tokens.len() > STOP_TOKENS_MAX {
            let count = self.stop_tokens.len();
            return Err(RequestParamError::TooManyEntries {
                param: "stop_token_ids",
                count,
                max: STOP_TOKENS_MAX,
            });
        }
        let stop_tokens = token_ids("stop_token_ids", &self.stop_tokens, limits)?;
        let (max_tokens, is_max_tokens_given) =
            resolve_max_tokens(self.max_tokens, limits, prompt_param, prompt_tokens)?;
        let min_tokens = integer_in("min_tokens", self.min_tokens, 0, 0, i64::from(max_tokens))? as u32;
        let top_logprobs = match self.top_logprobs {
            None => None,
            given => Some(integer_in("top_logprobs", given, 0, 0, TOP_LOGPROBS_MAX)? as u32),
        };
        let priority =
            integer_in("priority", self.priority, 0, i64::from(i32::MIN), i64::from(i32::MAX))? as i32;
        let n = integer_in("n", self.n, 1, 1, N_MAX)?;
        let best_of = integer_in("best_of", self.best_of, n, n, N_MAX)?;
        let beams = self.beams(best_of)?;
        let cache_salt = self.cache_salt.unwrap_or_default();
        if cache_salt.len() > CACHE_SALT_BYTES_MAX {
            return Err(RequestParamError::CacheSaltLength { bytes: cache_salt.len() });
        }
        let deadline = match self.deadline_ms {
            None => None,
            given => Some(Duration::from_millis(integer_in("deadline_ms", given, 1, 1, i64::MAX)? as u64)),
        };
        Ok(CheckedParams {
            max_tokens,
            is_max_tokens_given,
            min_tokens,
            sampling,
            stop: self.stop,
            stop_tokens,
            include_stop_string: self.include_stop_string,
            ignore_eos: self.ignore_eos,
            // A beam search returns all that it was asked for.
            best_of: if beams.is_some() { n as u32 } else { best_of as u32 },
            n: n as u32,
            beams,
            top_logprobs,
            grammar,
            priority,
            cache_salt,
            deadline,
            session: self.session,
        })
    }
}

impl RequestParams {
    fn check_stop_strings(&self) -> Result<(), RequestParamError> {
        if self.stop.len() > STOP_STRINGS_MAX {
            return Err(RequestParamError::TooManyEntries {
                param: "stop",
                count: self.stop.len(),
                max: STOP_STRINGS_MAX,
            });
        }
        for (index, stop) in self.stop.iter().enumerate() {
            if stop.is_empty() || stop.len() > STOP_STRING_BYTES_MAX {
                let (bytes, max) = (stop.len(), STOP_STRING_BYTES_MAX);
                return Err(RequestParamError::StringLength { param: "stop", index, bytes, max });
            }
        }
        Ok(())
    }

    fn mirostat(&self) -> Result<Option<Mirostat>, RequestParamError> {
        let version = integer(&sampling_params::MIROSTAT, self.mirostat)? as u32;
        let tau = float(&sampling_params::MIROSTAT_TAU, self.mirostat_tau)?;
        let eta = float(&sampling_params::MIROSTAT_ETA, self.mirostat_eta)?;
        Ok((version > 0).then_some(Mirostat { version, tau, eta }))
    }

    fn dry(&self) -> Result<Option<Dry>, RequestParamError> {
        let param = "dry_sequence_breakers";
        // -1 means "all", as an absent value does.
        let penalty_last_n = integer(&sampling_params::DRY_PENALTY_LAST_N, self.dry_penalty_last_n)?;
        let breakers = match &self.dry_sequence_breakers {
            None => DRY_BREAKERS.map(str::to_owned).to_vec(),
            Some(words) => words.clone(),
        };
        if breakers.len() > DRY_BREAKERS_MAX {
            return Err(RequestParamError::TooManyEntries {
                param,
                count: breakers.len(),
                max: DRY_BREAKERS_MAX,
            });
        }
        for (index, word) in breakers.iter().enumerate() {
            if word.is_empty() || word.len() > DRY_BREAKER_BYTES_MAX {
                let (bytes, max) = (word.len(), DRY_BREAKER_BYTES_MAX);
                return Err(RequestParamError::StringLength { param, index, bytes, max });
            }
        }
        let dry = Dry {
            multiplier: float(&sampling_params::DRY_MULTIPLIER, self.dry_multiplier)?,
            base: float(&sampling_params::DRY_BASE, self.dry_base)?,
            allowed_length: integer(&sampling_params::DRY_ALLOWED_LENGTH, self.dry_allowed_length)? as u32,
            penalty_last_n: u32::try_from(penalty_last_n).ok(),
            breakers,
        };
        Ok((dry.multiplier > 0.0).then_some(dry))
    }
}

fn resolve_max_tokens(
    max_tokens: Option<i64>,
    limits: TokenLimits,
    prompt_param: &'static str,
    prompt: usize,
) -> Result<(u32, bool), RequestParamError> {
    let context = limits.context_tokens;
    if prompt == 0 {
        return Err(RequestParamError::EmptyPrompt { param: prompt_param });
    }
    let left = u32::try_from(prompt).ok().and_then(|p| context.checked_sub(p)).filter(|&left| left > 0);
    let Some(left) = left else {
        return Err(RequestParamError::ContextExceeded {
            param: prompt_param,
            context,
            prompt,
            output: None,
        });
    };
    match max_tokens {
        None => Ok((left, false)),
        given => {
            let output = integer_in("max_tokens", given, 1, 1, i64::from(u32::MAX))? as u32;
            if output > left {
                return Err(RequestParamError::ContextExceeded {
                    param: "max_tokens",
                    context,
                    prompt,
                    output: Some(output),
                });
            }
            Ok((output, true))
        }
    }
}

/// Checks that each token id of a client is in the vocabulary.
pub(crate) fn token_ids(
    param: &'static str,
    ids: &[i64],
    limits: TokenLimits,
) -> Result<Vec<u32>, RequestParamError> {
    let vocabulary = limits.vocabulary;
    ids.iter()
        .enumerate()
        .map(|(index, &token)| {
            u32::try_from(token).ok().filter(|&id| id < vocabulary).ok_or(RequestParamError::UnknownToken {
                param,
                index,
                token,
                vocabulary,
            })
        })
        .collect()
}

fn logit_bias(entries: &[(i64, f64)], limits: TokenLimits) -> Result<Vec<(u32, f32)>, RequestParamError> {
    let param = "logit_bias";
    if entries.len() > LOGIT_BIAS_ENTRIES_MAX {
        return Err(RequestParamError::TooManyEntries {
            param,
            count: entries.len(),
            max: LOGIT_BIAS_ENTRIES_MAX,
        });
    }
    let ids: Vec<i64> = entries.iter().map(|&(token, _)| token).collect();
    let mut bias = token_ids(param, &ids, limits)?
        .into_iter()
        .zip(entries)
        .map(|(token, &(_, value))| Ok((token, float(&sampling_params::LOGIT_BIAS_VALUE, Some(value))?)))
        .collect::<Result<Vec<_>, RequestParamError>>()?;
    bias.sort_by_key(|&(token, _)| token);
    match bias.windows(2).find(|pair| pair[0].0 == pair[1].0) {
        Some(pair) => Err(RequestParamError::DuplicateToken { param, token: pair[0].0 }),
        None => Ok(bias),
    }
}

/// The value of a float parameter, or its default.
fn float(parameter: &FloatParameter, value: Option<f64>) -> Result<f32, RequestParamError> {
    match value {
        None => Ok(parameter.default),
        Some(value) => parameter.checked(value).ok_or_else(|| RequestParamError::OutOfRange {
            param: parameter.name,
            value: value.to_string(),
            allowed: parameter.allowed(),
        }),
    }
}

/// The value of an integer parameter, or its default. -1 stands for an absent default.
fn integer(parameter: &IntegerParameter, value: Option<i64>) -> Result<i64, RequestParamError> {
    let default = match parameter.default {
        IntegerDefault::Value(default) => i64::from(default),
        IntegerDefault::Absent(_) => -1,
    };
    let value = value.unwrap_or(default);
    if value == default || parameter.contains(value) {
        return Ok(value);
    }
    Err(RequestParamError::OutOfRange {
        param: parameter.name,
        value: value.to_string(),
        allowed: parameter.allowed(),
    })
}

fn integer_in(
    param: &'static str,
    value: Option<i64>,
    default: i64,
    min: i64,
    max: i64,
) -> Result<i64, RequestParamError> {
    let value = value.unwrap_or(default);
    if (min..=max).contains(&value) {
        return Ok(value);
    }
    Err(RequestParamError::OutOfRange { param, value: value.to_string(), allowed: format!("{min} to {max}") })
}

/// 64 random bits. The standard library seeds its hash maps from the system's random source.
fn random_seed() -> u64 {
    RandomState::new().hash_one("seed")
}

#[cfg(test)]
mod tests {
    use super::*;

    const LIMITS: TokenLimits = TokenLimits { context_tokens: 100, vocabulary: 50 };

    fn check(change: impl FnOnce(&mut RequestParams)) -> Result<CheckedParams, RequestParamError> {
        let mut params = RequestParams::default();
        change(&mut params);
        params.check(LIMITS, "prompt", 10)
    }

    #[test]
    fn absent_parameters_are_neutral_and_the_context_limits_the_output() {
        let checked = check(|_| ()).unwrap();
        assert_eq!((checked.max_tokens, checked.is_max_tokens_given, checked.best_of), (90, false, 1));
        let sampling = CheckedSampling { seed: 0, ..checked.sampling };
        let neutral = CheckedSampling {
            temperature: 1.0,
            top_k: 0,
            top_p: 1.0,
            min_p: 0.0,
            dynatemp_range: 0.0,
            dynatemp_exponent: 1.0,
            top_n_sigma: 0.0,
            typical_p: 1.0,
            xtc_probability: 0.0,
            xtc_threshold: 0.1,
            mirostat: None,
            repetition_penalty: 1.0,
            presence_penalty: 0.0,
            frequency_penalty: 0.0,
            dry: None,
            logit_bias: vec![],
            seed: 0,
        };
        assert_eq!(sampling, neutral);
    }

    #[test]
    fn a_value_out_of_range_is_refused_with_its_parameter_name() {
        type Change = fn(&mut RequestParams);
        let table: [(&str, Change); 44] = [
            ("max_tokens", |p| p.max_tokens = Some(0)),
            ("max_tokens", |p| p.max_tokens = Some(-1)),
            ("max_tokens", |p| p.max_tokens = Some(91)),
            ("max_tokens", |p| p.max_tokens = Some(i64::MAX)),
            ("min_tokens", |p| p.min_tokens = Some(91)),
            ("temperature", |p| p.temperature = Some(-0.1)),
            ("temperature", |p| p.temperature = Some(2.1)),
            ("temperature", |p| p.temperature = Some(f64::NAN)),
            ("top_k", |p| p.top_k = Some(-2)),
            ("top_p", |p| p.top_p = Some(0.0)),
            ("top_p", |p| p.top_p = Some(1.01)),
            ("top_p", |p| p.top_p = Some(1e-300)),
            ("min_p", |p| p.min_p = Some(1.5)),
            ("dynatemp_range", |p| p.dynatemp_range = Some(2.5)),
            ("dynatemp_exponent", |p| p.dynatemp_exponent = Some(f64::INFINITY)),
            ("top_n_sigma", |p| p.top_n_sigma = Some(-0.5)),
            ("typical_p", |p| p.typical_p = Some(0.0)),
            ("xtc_probability", |p| p.xtc_probability = Some(f64::NAN)),
            ("xtc_threshold", |p| p.xtc_threshold = Some(1.5)),
            ("mirostat", |p| p.mirostat = Some(3)),
            ("mirostat_tau", |p| p.mirostat_tau = Some(-1.0)),
            ("mirostat_eta", |p| p.mirostat_eta = Some(1.1)),
            ("dry_multiplier", |p| p.dry_multiplier = Some(-1.0)),
            ("dry_base", |p| p.dry_base = Some(0.5)),
            ("dry_allowed_length", |p| p.dry_allowed_length = Some(0)),
            ("dry_penalty_last_n", |p| p.dry_penalty_last_n = Some(-2)),
            ("dry_sequence_breakers", |p| p.dry_sequence_breakers = Some(vec![String::new()])),
            ("repetition_penalty", |p| p.repetition_penalty = Some(0.0)),
            ("presence_penalty", |p| p.presence_penalty = Some(3.0)),
            ("frequency_penalty", |p| p.frequency_penalty = Some(-3.0)),
            ("logit_bias", |p| p.logit_bias = vec![(1, 101.0)]),
            ("logit_bias", |p| p.logit_bias = vec![(50, 1.0)]),
            ("logit_bias", |p| p.logit_bias = vec![(1, 1.0), (1, 2.0)]),
            ("stop", |p| p.stop = vec![String::new()]),
            ("stop", |p| p.stop = vec!["x".into(); STOP_STRINGS_MAX + 1]),
            ("stop_token_ids", |p| p.stop_tokens = vec![-1]),
            ("n", |p| p.n = Some(N_MAX + 1)),
            ("top_logprobs", |p| p.top_logprobs = Some(21)),
            ("best_of", |p| (p.n, p.best_of) = (Some(3), Some(2))),
            ("best_of", |p| p.best_of = Some(N_MAX + 1)),
            ("priority", |p| p.priority = Some(1 << 40)),
            ("cache_salt", |p| p.cache_salt = Some("x".repeat(257))),
            ("deadline_ms", |p| p.deadline_ms = Some(0)),
            ("deadline_ms", |p| p.deadline_ms = Some(-5)),
        ];
        for (index, (param, change)) in table.into_iter().enumerate() {
            let error = check(change).expect_err(&format!("case {index}, {param}"));
            assert_eq!(error.param(), param, "case {index}: {error}");
            assert!(
                error.to_string().contains(param)
                    || matches!(error, RequestParamError::ContextExceeded { .. }),
                "{error}"
            );
        }
    }

    #[test]
    fn text_needs_a_tokenizer() {
        type Change = fn(&mut RequestParams);
        let table: [(&str, Change); 4] = [
            ("grammar", |p| p.grammar = Some(RequestGrammar::lark("grammar", String::new()))),
            ("stop", |p| p.stop = vec!["x".to_owned()]),
            ("bad_words", |p| p.bad_words = vec!["x".to_owned()]),
            ("dry_sequence_breakers", |p| p.dry_sequence_breakers = Some(vec!["x".to_owned()])),
        ];
        for (param, change) in table {
            let mut params = RequestParams::default();
            assert_eq!(params.check_without_text(), Ok(()));
            change(&mut params);
            assert_eq!(params.check_without_text(), Err(RequestParamError::NeedsTokenizer { param }));
        }
    }

    #[test]
    fn a_prompt_must_leave_room_for_output() {
        let check = |prompt| RequestParams::default().check(LIMITS, "messages", prompt);
        assert_eq!(check(99).unwrap().max_tokens, 1);
        for prompt in [0, 100, 101, usize::MAX] {
            assert_eq!(check(prompt).unwrap_err().param(), "messages");
        }
    }

    #[test]
    fn a_given_seed_is_kept_and_an_absent_seed_is_random() {
        assert_eq!(check(|p| p.seed = Some(7)).unwrap().sampling.seed, 7);
        assert_ne!(check(|_| ()).unwrap().sampling.seed, check(|_| ()).unwrap().sampling.seed);
    }
}
