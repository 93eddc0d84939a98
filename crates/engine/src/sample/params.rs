// SPDX-License-Identifier: Apache-2.0

//! Sampling parameters of one request and their validation.

use sampling_params::{
    DRY_BASE, DRY_MULTIPLIER, DYNATEMP_EXPONENT, DYNATEMP_RANGE, FREQUENCY_PENALTY, FloatBounds,
    FloatParameter, LOGIT_BIAS_VALUE, MIN_P, MIROSTAT_ETA, MIROSTAT_TAU, PRESENCE_PENALTY,
    REPETITION_PENALTY, TEMPERATURE, TOP_N_SIGMA, TOP_P, TYPICAL_P, XTC_PROBABILITY, XTC_THRESHOLD,
};

/// Sampling parameters of one request. The defaults sample from the model's own distribution. The
/// module [`sampler`](crate::sample::sampler) lists the steps in order.
#[derive(Clone, Debug, PartialEq)]
pub struct SamplingParams {
    /// 0 selects the highest logit after bias and penalties. Among equal logits, the lowest id
    /// wins.
    pub temperature: f32,
    /// Dynamic temperature: the temperature moves between `temperature` minus this and
    /// `temperature` plus this, by the entropy of the remaining tokens.
    pub dynatemp_range: f32,
    /// Exponent of the dynamic temperature. Above 1, the temperature stays low longer as entropy
    /// rises.
    pub dynatemp_exponent: f32,
    /// Keeps tokens whose logit is within this many standard deviations of the highest; 0 keeps
    /// all.
    pub top_n_sigma: f32,
    /// Keeps the k most probable tokens; 0 keeps all.
    pub top_k: u32,
    /// Keeps the tokens whose surprise is nearest to the expected surprise, until they reach this
    /// probability; 1 is off.
    pub typical_p: f32,
    /// Keeps the fewest most probable tokens that together reach this probability.
    pub top_p: f32,
    /// Keeps tokens of at least this share of the highest probability.
    pub min_p: f32,
    /// Probability that XTC acts on a token. XTC removes all tokens that have at least the
    /// probability `xtc_threshold`, except the least probable of them.
    pub xtc_probability: f32,
    /// Above 0.5, XTC is off: no two tokens can both reach the threshold.
    pub xtc_threshold: f32,
    /// Replaces penalties, DRY, the filters from `top_n_sigma` to XTC, and the dynamic temperature.
    pub mirostat: Option<MirostatParams>,
    /// Divides positive logits and multiplies negative logits of tokens in prompt or output; 1 is
    /// off.
    pub repetition_penalty: f32,
    /// Subtracted once from the logit of each token in the output.
    pub presence_penalty: f32,
    /// Subtracted from a token's logit for each of its occurrences in the output.
    pub frequency_penalty: f32,
    pub dry: Option<DryParams>,
    /// Added to logits before penalties and filters. Each token has at most one bias.
    pub logit_bias: Vec<(u32, f32)>,
    /// Equal seeds give equal output. If the request has no seed, the router draws one.
    pub seed: u64,
}

/// Mirostat: keeps the surprise of the sampled tokens near a target (Basu et al., "Mirostat",
/// 2021).
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct MirostatParams {
    pub version: MirostatVersion,
    /// Target surprise in bits.
    pub tau: f32,
    /// Share of the last token's error by which the bound on surprise moves.
    pub eta: f32,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum MirostatVersion {
    /// Estimates the exponent of Zipf's law and keeps the k most probable tokens.
    One,
    /// Keeps tokens whose surprise is below the bound.
    Two,
}

/// DRY ("don't repeat yourself"): lowers tokens that would prolong a repetition in prompt and
/// output.
#[derive(Clone, Debug, PartialEq)]
pub struct DryParams {
    pub multiplier: f32,
    pub base: f32,
    /// Shortest repetition with a penalty. The penalty is `multiplier * base^(length -
    /// allowed_length)`.
    pub allowed_length: u32,
    /// DRY looks for repetitions in this many of the last tokens of prompt and output; `None` means
    /// all.
    pub last_n: Option<u32>,
    pub breakers: DryBreakers,
}

/// DRY sequence breakers: no repetition extends across one of these token sequences. The router
/// derives them from words, since the router has the vocabulary.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct DryBreakers {
    /// Breakers of one token, sorted. DRY never lowers them.
    singles: Vec<u32>,
    /// Breakers of two or more tokens, sorted.
    sequences: Vec<Vec<u32>>,
}

impl DryBreakers {
    /// Drops empty sequences.
    pub fn new(sequences: impl IntoIterator<Item = Vec<u32>>) -> Self {
        let (mut singles, mut longer) = (Vec::new(), Vec::new());
        for sequence in sequences {
            match sequence[..] {
                [] => {}
                [single] => singles.push(single),
                _ => longer.push(sequence),
            }
        }
        singles.sort_unstable();
        singles.dedup();
        longer.sort_unstable();
        longer.dedup();
        Self { singles, sequences: longer }
    }

    pub(crate) fn is_single(&self, token: u32) -> bool {
        self.singles.binary_search(&token).is_ok()
    }

    /// Breakers of two or more tokens that begin with `token`.
    pub(crate) fn starting_with(&self, token: u32) -> &[Vec<u32>] {
        let start = self.sequences.partition_point(|sequence| sequence[0] < token);
        let rest = &self.sequences[start..];
        &rest[..rest.partition_point(|sequence| sequence[0] == token)]
    }

    fn tokens(&self) -> impl Iterator<Item = u32> {
        self.singles.iter().chain(self.sequences.iter().flatten()).copied()
    }
}

impl Default for SamplingParams {
    fn default() -> Self {
        Self {
            temperature: TEMPERATURE.default,
            dynatemp_range: DYNATEMP_RANGE.default,
            dynatemp_exponent: DYNATEMP_EXPONENT.default,
            top_n_sigma: TOP_N_SIGMA.default,
            top_k: 0,
            typical_p: TYPICAL_P.default,
            top_p: TOP_P.default,
            min_p: MIN_P.default,
            xtc_probability: XTC_PROBABILITY.default,
            xtc_threshold: XTC_THRESHOLD.default,
            mirostat: None,
            repetition_penalty: REPETITION_PENALTY.default,
            presence_penalty: PRESENCE_PENALTY.default,
            frequency_penalty: FREQUENCY_PENALTY.default,
            dry: None,
            logit_bias: Vec::new(),
            seed: 0,
        }
    }
}

impl SamplingParams {
    pub fn greedy() -> Self {
        Self { temperature: 0.0, ..Self::default() }
    }

    pub fn has_penalties(&self) -> bool {
        self.repetition_penalty != 1.0 || self.presence_penalty != 0.0 || self.frequency_penalty != 0.0
    }

    /// Whether bias and penalties raise no logit. DRY never raises one.
    pub(crate) fn only_lowers(&self) -> bool {
        self.logit_bias.is_empty()
            && self.repetition_penalty >= 1.0
            && self.presence_penalty >= 0.0
            && self.frequency_penalty >= 0.0
    }

    /// Checks every parameter. If the OpenAI API has the parameter, the range is the API's.
    pub fn check(&self, vocab_size: usize) -> Result<(), SamplingParamError> {
        check_float(&TEMPERATURE, self.temperature)?;
        check_float(&DYNATEMP_RANGE, self.dynatemp_range)?;
        check_float(&DYNATEMP_EXPONENT, self.dynatemp_exponent)?;
        check_float(&TOP_N_SIGMA, self.top_n_sigma)?;
        check_float(&MIN_P, self.min_p)?;
        check_float(&XTC_PROBABILITY, self.xtc_probability)?;
        check_float(&XTC_THRESHOLD, self.xtc_threshold)?;
        check_float(&PRESENCE_PENALTY, self.presence_penalty)?;
        check_float(&FREQUENCY_PENALTY, self.frequency_penalty)?;
        check_float(&TYPICAL_P, self.typical_p)?;
        check_float(&TOP_P, self.top_p)?;
        check_float(&REPETITION_PENALTY, self.repetition_penalty)?;
        if let Some(MirostatParams { tau, eta, .. }) = self.mirostat {
            check_float(&MIROSTAT_TAU, tau)?;
            check_float(&MIROSTAT_ETA, eta)?;
        }
        if let Some(dry) = &self.dry {
            dry.check(vocab_size)?;
        }
        if self.logit_bias.len() > LOGIT_BIAS_MAX {
            return Err(SamplingParamError::TooMany {
                field: "logit_bias",
                count: self.logit_bias.len(),
                max: LOGIT_BIAS_MAX,
            });
        }
        for (index, &(token, bias)) in self.logit_bias.iter().enumerate() {
            if token as usize >= vocab_size {
                return Err(SamplingParamError::TokenId { field: "logit_bias", token, vocab_size });
            }
            if self.logit_bias[..index].iter().any(|&(earlier, _)| earlier == token) {
                return Err(SamplingParamError::TokenTwice { field: "logit_bias", token });
            }
            check_float(&LOGIT_BIAS_VALUE, bias)?;
        }
        Ok(())
    }
}

impl DryParams {
    fn check(&self, vocab_size: usize) -> Result<(), SamplingParamError> {
        check_float(&DRY_MULTIPLIER, self.multiplier)?;
        check_float(&DRY_BASE, self.base)?;
        if self.allowed_length == 0 {
            // One repeated token is a repetition of length 1. At 0, every token would count as a
            // repetition.
            let (field, max) = ("dry_allowed_length", u32::MAX as f32);
            return Err(SamplingParamError::Range { field, value: 0.0, min: 1.0, max });
        }
        let field = "dry_sequence_breakers";
        let Self { breakers, .. } = self;
        if breakers.sequences.len() > DRY_SEQUENCES_MAX {
            return Err(SamplingParamError::TooMany {
                field,
                count: breakers.sequences.len(),
                max: DRY_SEQUENCES_MAX,
            });
        }
        if let Some(long) =
            breakers.sequences.iter().find(|sequence| sequence.len() > DRY_SEQUENCE_TOKENS_MAX)
        {
            return Err(SamplingParamError::TooMany {
                field,
                count: long.len(),
                max: DRY_SEQUENCE_TOKENS_MAX,
            });
        }
        match breakers.tokens().find(|&token| token as usize >= vocab_size) {
            Some(token) => Err(SamplingParamError::TokenId { field, token, vocab_size }),
            None => Ok(()),
        }
    }
}

/// Entries of `logit_bias`. The OpenAI API allows 300. The limit bounds the work per token.
pub(crate) const LOGIT_BIAS_MAX: usize = sampling_params::LOGIT_BIAS_ENTRIES_MAX;
/// Breakers of more than one token. A word yields several, one for each token that its beginning
/// may hide in.
const DRY_SEQUENCES_MAX: usize = 65_536;
/// Tokens of one breaker, as in llama.cpp.
const DRY_SEQUENCE_TOKENS_MAX: usize = 20;

/// A sampling parameter is outside its range.
#[derive(Clone, Debug, PartialEq, thiserror::Error)]
pub enum SamplingParamError {
    #[error("{field} is {value}, allowed are {min} to {max}")]
    Range { field: &'static str, value: f32, min: f32, max: f32 },
    #[error("{field} is {value}, allowed is above 0 and up to {max}")]
    AboveZero { field: &'static str, value: f32, max: f32 },
    #[error("{field} has {count} entries, at most {max} are allowed")]
    TooMany { field: &'static str, count: usize, max: usize },
    #[error("{field} names token {token}, the vocabulary has {vocab_size}")]
    TokenId { field: &'static str, token: u32, vocab_size: usize },
    #[error("{field} names token {token} twice")]
    TokenTwice { field: &'static str, token: u32 },
    #[error("sampler_state of {bytes} bytes is not what the last token frame carried")]
    SamplerState { bytes: usize },
}

fn check_float(parameter: &FloatParameter, value: f32) -> Result<(), SamplingParamError> {
    match parameter.bounds {
        FloatBounds::Inclusive { min, max } => range(parameter.name, value, min, max),
        FloatBounds::AboveZero { max } => above_zero(parameter.name, value, max),
    }
}

/// No range contains NaN, so NaN is refused.
fn range(field: &'static str, value: f32, min: f32, max: f32) -> Result<(), SamplingParamError> {
    if (min..=max).contains(&value) {
        Ok(())
    } else {
        Err(SamplingParamError::Range { field, value, min, max })
    }
}

fn above_zero(field: &'static str, value: f32, max: f32) -> Result<(), SamplingParamError> {
    if value > 0.0 && value <= max {
        Ok(())
    } else {
        Err(SamplingParamError::AboveZero { field, value, max })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    type Change = fn(&mut SamplingParams, f32);

    /// Every float parameter, with one value below its range and one above.
    const FIGURES: [(&str, Change, f32, f32); 16] = [
        ("temperature", |p, v| p.temperature = v, -0.1, 2.1),
        ("dynatemp_range", |p, v| p.dynatemp_range = v, -0.1, 2.1),
        ("dynatemp_exponent", |p, v| p.dynatemp_exponent = v, -0.1, 101.0),
        ("top_n_sigma", |p, v| p.top_n_sigma = v, -1.0, 1001.0),
        ("typical_p", |p, v| p.typical_p = v, 0.0, 1.1),
        ("top_p", |p, v| p.top_p = v, 0.0, 1.1),
        ("min_p", |p, v| p.min_p = v, -0.1, 1.1),
        ("xtc_probability", |p, v| p.xtc_probability = v, -0.1, 1.1),
        ("xtc_threshold", |p, v| p.xtc_threshold = v, -0.1, 1.1),
        ("repetition_penalty", |p, v| p.repetition_penalty = v, 0.0, 2.1),
        ("presence_penalty", |p, v| p.presence_penalty = v, -2.1, 2.1),
        ("frequency_penalty", |p, v| p.frequency_penalty = v, -2.1, 2.1),
        ("dry_multiplier", |p, v| p.dry = Some(DryParams { multiplier: v, ..dry() }), -0.1, 101.0),
        ("dry_base", |p, v| p.dry = Some(DryParams { base: v, ..dry() }), 0.9, 101.0),
        ("mirostat_tau", |p, v| p.mirostat = Some(MirostatParams { tau: v, ..mirostat() }), -0.1, 101.0),
        ("mirostat_eta", |p, v| p.mirostat = Some(MirostatParams { eta: v, ..mirostat() }), -0.1, 1.1),
    ];

    fn dry() -> DryParams {
        DryParams {
            multiplier: 0.8,
            base: 1.75,
            allowed_length: 2,
            last_n: None,
            breakers: DryBreakers::default(),
        }
    }

    fn mirostat() -> MirostatParams {
        MirostatParams { version: MirostatVersion::Two, tau: 5.0, eta: 0.1 }
    }

    #[test]
    fn what_is_out_of_range_or_no_number_is_refused_by_name_and_range() {
        for (field, change, below, above) in FIGURES {
            for value in [below, above, f32::NAN, f32::INFINITY, f32::NEG_INFINITY] {
                let mut params = SamplingParams::default();
                change(&mut params, value);
                let text = params.check(100).unwrap_err().to_string();
                assert!(text.starts_with(field) && text.contains("allowed"), "{field} {value}: {text}");
            }
        }
        assert_eq!(SamplingParams::default().check(0), Ok(()));
    }

    #[test]
    fn breakers_must_be_tokens_of_the_vocabulary() {
        let with = |sequences: Vec<Vec<u32>>| SamplingParams {
            dry: Some(DryParams { breakers: DryBreakers::new(sequences), ..dry() }),
            ..SamplingParams::default()
        };
        assert_eq!(with(vec![vec![9], vec![1, 2], vec![]]).check(10), Ok(()));
        let error = with(vec![vec![1, 10]]).check(10).unwrap_err();
        assert!(matches!(
            error,
            SamplingParamError::TokenId { field: "dry_sequence_breakers", token: 10, .. }
        ));
        assert!(with(vec![vec![1; 21]]).check(10).is_err());
    }

    #[test]
    fn breakers_are_found_by_their_first_token() {
        let breakers =
            DryBreakers::new([vec![7], vec![3, 1], vec![3, 0], vec![5, 5, 5], vec![7], vec![3, 1]]);
        assert!(breakers.is_single(7) && !breakers.is_single(3));
        assert_eq!(breakers.starting_with(3), [vec![3, 0], vec![3, 1]]);
        assert_eq!(breakers.starting_with(5), [vec![5, 5, 5]]);
        assert!(breakers.starting_with(7).is_empty());
    }
}
