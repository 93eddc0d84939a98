// SPDX-License-Identifier: Apache-2.0

//! The parameters. Ranges are those of OpenAI's API where it has the parameter.

use crate::parameter::{
    FloatBounds, FloatParameter, IntegerDefault, IntegerParameter, OtherParameter, Parameter, ParameterType,
};

/// All parameters, in the order of the field numbers of `ballast.v1.Sampling`, which start at 1.
pub const PARAMETERS: [Parameter; 23] = [
    Parameter::Float(&TEMPERATURE),
    Parameter::Integer(&TOP_K),
    Parameter::Float(&TOP_P),
    Parameter::Float(&MIN_P),
    Parameter::Float(&REPETITION_PENALTY),
    Parameter::Float(&PRESENCE_PENALTY),
    Parameter::Float(&FREQUENCY_PENALTY),
    Parameter::Other(&LOGIT_BIAS),
    Parameter::Other(&SEED),
    Parameter::Float(&DYNATEMP_RANGE),
    Parameter::Float(&DYNATEMP_EXPONENT),
    Parameter::Float(&TOP_N_SIGMA),
    Parameter::Float(&TYPICAL_P),
    Parameter::Float(&XTC_PROBABILITY),
    Parameter::Float(&XTC_THRESHOLD),
    Parameter::Integer(&MIROSTAT),
    Parameter::Float(&MIROSTAT_TAU),
    Parameter::Float(&MIROSTAT_ETA),
    Parameter::Float(&DRY_MULTIPLIER),
    Parameter::Float(&DRY_BASE),
    Parameter::Integer(&DRY_ALLOWED_LENGTH),
    Parameter::Integer(&DRY_PENALTY_LAST_N),
    Parameter::Other(&DRY_SEQUENCE_BREAKERS),
];

/// Calls the macro `$callback` with the names of all float and integer parameters and their
/// constants. Structs and conversions of router and worker are generated with it.
///
/// `floats` are fields of the engine's `SamplingParams`. `grouped_floats` belong to Mirostat or
/// DRY, which the router and the worker handle as a whole.
#[macro_export]
macro_rules! with_parameter_names {
    ($callback:ident) => {
        $callback! {
            floats: [
                temperature TEMPERATURE, top_p TOP_P, min_p MIN_P, repetition_penalty REPETITION_PENALTY,
                presence_penalty PRESENCE_PENALTY, frequency_penalty FREQUENCY_PENALTY,
                dynatemp_range DYNATEMP_RANGE, dynatemp_exponent DYNATEMP_EXPONENT, top_n_sigma TOP_N_SIGMA,
                typical_p TYPICAL_P, xtc_probability XTC_PROBABILITY, xtc_threshold XTC_THRESHOLD
            ],
            grouped_floats: [
                mirostat_tau MIROSTAT_TAU, mirostat_eta MIROSTAT_ETA, dry_multiplier DRY_MULTIPLIER,
                dry_base DRY_BASE
            ],
            integers: [
                top_k TOP_K, mirostat MIROSTAT, dry_allowed_length DRY_ALLOWED_LENGTH,
                dry_penalty_last_n DRY_PENALTY_LAST_N
            ],
        }
    };
}

/// Most entries of `logit_bias`. OpenAI allows 300. Bounds the work per token.
pub const LOGIT_BIAS_ENTRIES_MAX: usize = 1024;
/// The range of one bias.
pub const LOGIT_BIAS_VALUE: FloatParameter = FloatParameter {
    name: "logit_bias",
    bounds: FloatBounds::Inclusive { min: -100.0, max: 100.0 },
    default: 0.0,
    default_alias: None,
    meaning: "Added to the logit of a token.",
};

const fn inclusive(min: f32, max: f32) -> FloatBounds {
    FloatBounds::Inclusive { min, max }
}

const fn float(
    name: &'static str,
    bounds: FloatBounds,
    default: f32,
    meaning: &'static str,
) -> FloatParameter {
    FloatParameter { name, bounds, default, default_alias: None, meaning }
}

pub const TEMPERATURE: FloatParameter = float(
    "temperature",
    inclusive(0.0, 2.0),
    1.0,
    "Divides the logits. 0 takes the most likely token, 1 samples from the model's distribution.",
);
pub const TOP_K: IntegerParameter = IntegerParameter {
    name: "top_k",
    min: 0,
    max: u32::MAX,
    default: IntegerDefault::Value(0),
    // Clients of vLLM send -1 for "all".
    accepts_minus_one: true,
    meaning: "Keeps the k most likely tokens. 0 keeps all.",
};
pub const TOP_P: FloatParameter = float(
    "top_p",
    FloatBounds::AboveZero { max: 1.0 },
    1.0,
    "Keeps the smallest set of most likely tokens that reaches this probability.",
);
pub const MIN_P: FloatParameter = float(
    "min_p",
    inclusive(0.0, 1.0),
    0.0,
    "Keeps tokens that are at least this fraction as likely as the most likely token.",
);
pub const REPETITION_PENALTY: FloatParameter = float(
    "repetition_penalty",
    FloatBounds::AboveZero { max: 2.0 },
    1.0,
    "Divides positive and multiplies negative logits of tokens in the prompt or the output.",
);
pub const PRESENCE_PENALTY: FloatParameter = float(
    "presence_penalty",
    inclusive(-2.0, 2.0),
    0.0,
    "Subtracted from the logits of tokens that occur in the output.",
);
pub const FREQUENCY_PENALTY: FloatParameter = float(
    "frequency_penalty",
    inclusive(-2.0, 2.0),
    0.0,
    "Subtracted from a token's logit for each time it occurs in the output.",
);
pub const LOGIT_BIAS: OtherParameter = OtherParameter {
    name: "logit_bias",
    value_type: ParameterType::FloatByToken,
    allowed: "-100 to 100 per token, at most 1024 tokens",
    default: "no bias",
    meaning: "Added to the logits of single tokens before all other changes.",
};
pub const SEED: OtherParameter = OtherParameter {
    name: "seed",
    value_type: ParameterType::Uint64,
    allowed: "64-bit integers",
    default: "random",
    meaning: "Equal seeds give equal outputs. If the seed is absent, the router draws one.",
};
pub const DYNATEMP_RANGE: FloatParameter = float(
    "dynatemp_range",
    inclusive(0.0, 2.0),
    0.0,
    "With the entropy, the temperature varies by up to this value in both directions. 0 is off.",
);
/// The bound is far beyond any use: a normalized entropy below 1 to the power of 100 is about 0.
pub const DYNATEMP_EXPONENT: FloatParameter = float(
    "dynatemp_exponent",
    inclusive(0.0, 100.0),
    1.0,
    "Above 1, the dynamic temperature stays low longer as the entropy rises.",
);
/// In no vocabulary is a logit 1000 standard deviations below the highest. Clients of llama.cpp
/// send -1 for "off".
pub const TOP_N_SIGMA: FloatParameter = FloatParameter {
    name: "top_n_sigma",
    bounds: inclusive(0.0, 1000.0),
    default: 0.0,
    default_alias: Some(-1.0),
    meaning: "Keeps tokens whose logit is within this many standard deviations of the highest. 0 is off.",
};
pub const TYPICAL_P: FloatParameter = float(
    "typical_p",
    FloatBounds::AboveZero { max: 1.0 },
    1.0,
    "Keeps the tokens of most typical surprise that reach this probability. 1 is off.",
);
pub const XTC_PROBABILITY: FloatParameter = float(
    "xtc_probability",
    inclusive(0.0, 1.0),
    0.0,
    "Probability of XTC: it drops all tokens of at least `xtc_threshold` except the least likely.",
);
pub const XTC_THRESHOLD: FloatParameter = float(
    "xtc_threshold",
    inclusive(0.0, 1.0),
    0.1,
    "Probability from which XTC drops tokens. Above 0.5 XTC is off: no two tokens reach it.",
);
pub const MIROSTAT: IntegerParameter = IntegerParameter {
    name: "mirostat",
    min: 0,
    max: 2,
    default: IntegerDefault::Value(0),
    accepts_minus_one: false,
    meaning: "Version of Mirostat, which replaces the filters above. 0 is off.",
};
/// In bits. A uniform choice among a million tokens has 20.
pub const MIROSTAT_TAU: FloatParameter =
    float("mirostat_tau", inclusive(0.0, 100.0), 5.0, "Surprise in bits that Mirostat aims for.");
pub const MIROSTAT_ETA: FloatParameter =
    float("mirostat_eta", inclusive(0.0, 1.0), 0.1, "Learning rate of Mirostat.");
pub const DRY_MULTIPLIER: FloatParameter = float(
    "dry_multiplier",
    inclusive(0.0, 100.0),
    0.0,
    "DRY lowers a token that extends a repetition of n tokens by \
     `dry_multiplier * dry_base^(n - dry_allowed_length)`. 0 is off.",
);
pub const DRY_BASE: FloatParameter = float("dry_base", inclusive(1.0, 100.0), 1.75, "Base of DRY's penalty.");
/// One repeated token is a repetition of length 1. At 0, every token would be a repetition.
pub const DRY_ALLOWED_LENGTH: IntegerParameter = IntegerParameter {
    name: "dry_allowed_length",
    min: 1,
    max: u32::MAX,
    default: IntegerDefault::Value(2),
    accepts_minus_one: false,
    meaning: "DRY ignores shorter repetitions.",
};
pub const DRY_PENALTY_LAST_N: IntegerParameter = IntegerParameter {
    name: "dry_penalty_last_n",
    min: 0,
    max: u32::MAX,
    default: IntegerDefault::Absent("all tokens"),
    // Clients of llama.cpp send -1 for "all".
    accepts_minus_one: true,
    meaning: "Number of last tokens of prompt and output that DRY searches.",
};
pub const DRY_SEQUENCE_BREAKERS: OtherParameter = OtherParameter {
    name: "dry_sequence_breakers",
    value_type: ParameterType::Strings,
    allowed: "at most 16 strings of 1 to 40 bytes",
    default: "newline, colon, quote, asterisk",
    meaning: "DRY finds no repetition across these strings.",
};

#[cfg(test)]
mod tests {
    use super::*;

    fn names(is_listed: impl Fn(Parameter) -> bool) -> Vec<&'static str> {
        let mut names: Vec<_> =
            PARAMETERS.into_iter().filter(|&p| is_listed(p)).map(Parameter::name).collect();
        names.sort_unstable();
        names
    }

    #[test]
    fn the_macro_lists_every_float_and_every_integer() {
        macro_rules! collect {
            (
                floats: [$($float:ident $float_constant:ident),*],
                grouped_floats: [$($grouped:ident $grouped_constant:ident),*],
                integers: [$($integer:ident $integer_constant:ident),*],
            ) => {{
                $(assert_eq!(stringify!($float), $float_constant.name);)*
                $(assert_eq!(stringify!($grouped), $grouped_constant.name);)*
                $(assert_eq!(stringify!($integer), $integer_constant.name);)*
                (vec![$(stringify!($float),)* $(stringify!($grouped)),*], vec![$(stringify!($integer)),*])
            }};
        }
        let (mut floats, mut integers) = with_parameter_names!(collect);
        floats.sort_unstable();
        integers.sort_unstable();
        assert_eq!(floats, names(|parameter| matches!(parameter, Parameter::Float(_))));
        assert_eq!(integers, names(|parameter| matches!(parameter, Parameter::Integer(_))));
    }

    #[test]
    fn defaults_are_in_range() {
        for parameter in PARAMETERS {
            match parameter {
                Parameter::Float(float) => assert!(float.contains(float.default), "{}", float.name),
                Parameter::Integer(integer) => {
                    if let IntegerDefault::Value(value) = integer.default {
                        assert!((integer.min..=integer.max).contains(&value), "{}", integer.name);
                    }
                }
                Parameter::Other(_) => {}
            }
        }
        assert!(LOGIT_BIAS.allowed.contains(&LOGIT_BIAS_VALUE.allowed()));
        assert!(LOGIT_BIAS.allowed.contains(&LOGIT_BIAS_ENTRIES_MAX.to_string()));
    }
}
