// SPDX-License-Identifier: Apache-2.0

//! What the table says of a parameter.

use std::fmt;

/// One entry of [`PARAMETERS`](crate::PARAMETERS).
#[derive(Clone, Copy, Debug)]
pub enum Parameter {
    Float(&'static FloatParameter),
    Integer(&'static IntegerParameter),
    Other(&'static OtherParameter),
}

/// A parameter whose value is an `f32`.
#[derive(Debug)]
pub struct FloatParameter {
    /// The name in every API, in errors, and in `ballast.v1.Sampling`.
    pub name: &'static str,
    pub bounds: FloatBounds,
    pub default: f32,
    /// A value outside the bounds that clients of other servers send for the default.
    pub default_alias: Option<f32>,
    pub meaning: &'static str,
}

#[derive(Clone, Copy, Debug, PartialEq)]
pub enum FloatBounds {
    /// Both bounds are allowed.
    Inclusive { min: f32, max: f32 },
    /// 0 is not allowed, `max` is.
    AboveZero { max: f32 },
}

/// A parameter whose value is a `u32`.
#[derive(Debug)]
pub struct IntegerParameter {
    pub name: &'static str,
    pub min: u32,
    pub max: u32,
    pub default: IntegerDefault,
    /// Whether HTTP clients may send -1 for the default.
    pub accepts_minus_one: bool,
    pub meaning: &'static str,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum IntegerDefault {
    Value(u32),
    /// An absent parameter has a meaning that no value has.
    Absent(&'static str),
}

/// A parameter that is neither a float nor a `u32`.
#[derive(Debug)]
pub struct OtherParameter {
    pub name: &'static str,
    pub value_type: ParameterType,
    /// Which values are allowed, as text.
    pub allowed: &'static str,
    /// What an absent parameter means, as text.
    pub default: &'static str,
    pub meaning: &'static str,
}

/// The type of a parameter's protobuf field.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ParameterType {
    Float,
    Uint32,
    Uint64,
    Strings,
    FloatByToken,
}

impl FloatParameter {
    /// NaN is in no range.
    pub fn contains(&self, value: f32) -> bool {
        match self.bounds {
            FloatBounds::Inclusive { min, max } => (min..=max).contains(&value),
            FloatBounds::AboveZero { max } => value > 0.0 && value <= max,
        }
    }

    /// The checked value of a parameter that arrives as an `f64`. `None` if the value is out of
    /// range.
    pub fn checked(&self, value: f64) -> Option<f32> {
        let narrow = value as f32;
        let is_allowed = match self.bounds {
            FloatBounds::Inclusive { min, max } => (f64::from(min)..=f64::from(max)).contains(&value),
            // A positive f64 may round to 0 as an f32.
            FloatBounds::AboveZero { max } => narrow > 0.0 && value <= f64::from(max),
        };
        if self.default_alias.is_some_and(|alias| f64::from(alias) == value) {
            return Some(self.default);
        }
        is_allowed.then_some(narrow)
    }

    /// "0 to 2" or "numbers above 0 up to 1".
    pub fn allowed(&self) -> String {
        self.bounds.to_string()
    }

    /// The text of a command-line option.
    pub fn help(&self) -> String {
        format!("{} [allowed: {}]", self.meaning, self.bounds)
    }
}

impl fmt::Display for FloatBounds {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Inclusive { min, max } => write!(f, "{min} to {max}"),
            Self::AboveZero { max } => write!(f, "numbers above 0 up to {max}"),
        }
    }
}

impl IntegerParameter {
    /// The value that clients may send, -1 included where it is allowed.
    pub fn allowed(&self) -> String {
        format!("{} to {}", self.smallest(), self.max)
    }

    /// Whether a client may send this value.
    pub fn contains(&self, value: i64) -> bool {
        (self.smallest()..=i64::from(self.max)).contains(&value)
    }

    fn smallest(&self) -> i64 {
        if self.accepts_minus_one { -1 } else { i64::from(self.min) }
    }

    /// The text of a command-line option.
    pub fn help(&self) -> String {
        format!("{} [allowed: {} to {}]", self.meaning, self.min, self.max)
    }
}

impl Parameter {
    pub fn name(self) -> &'static str {
        match self {
            Self::Float(parameter) => parameter.name,
            Self::Integer(parameter) => parameter.name,
            Self::Other(parameter) => parameter.name,
        }
    }

    pub fn value_type(self) -> ParameterType {
        match self {
            Self::Float(_) => ParameterType::Float,
            Self::Integer(_) => ParameterType::Uint32,
            Self::Other(parameter) => parameter.value_type,
        }
    }

    pub fn allowed(self) -> String {
        match self {
            Self::Float(parameter) => parameter.allowed(),
            Self::Integer(parameter) => parameter.allowed(),
            Self::Other(parameter) => parameter.allowed.to_owned(),
        }
    }

    pub fn default(self) -> String {
        match self {
            Self::Float(parameter) => parameter.default.to_string(),
            Self::Integer(parameter) => match parameter.default {
                IntegerDefault::Value(value) => value.to_string(),
                IntegerDefault::Absent(meaning) => meaning.to_owned(),
            },
            Self::Other(parameter) => parameter.default.to_owned(),
        }
    }

    pub fn meaning(self) -> &'static str {
        match self {
            Self::Float(parameter) => parameter.meaning,
            Self::Integer(parameter) => parameter.meaning,
            Self::Other(parameter) => parameter.meaning,
        }
    }
}

#[cfg(test)]
mod tests {
    use crate::{REPETITION_PENALTY, TEMPERATURE, TOP_K, TOP_N_SIGMA, TOP_P};

    #[test]
    fn values_are_checked_against_the_bounds() {
        assert_eq!((TEMPERATURE.checked(0.0), TEMPERATURE.checked(2.0)), (Some(0.0), Some(2.0)));
        for value in [-0.1, 2.1, f64::NAN, f64::INFINITY] {
            assert_eq!(TEMPERATURE.checked(value), None, "{value}");
        }
        for value in [0.0, 1e-300, 1.1] {
            assert_eq!(TOP_P.checked(value), None, "{value}");
        }
        assert!(TEMPERATURE.contains(2.0) && !TEMPERATURE.contains(f32::NAN) && !TOP_P.contains(0.0));
        assert_eq!((TOP_N_SIGMA.checked(-1.0), TOP_N_SIGMA.checked(-0.5)), (Some(0.0), None));
        assert!(TOP_K.contains(-1) && !TOP_K.contains(-2));
    }

    #[test]
    fn ranges_are_printed_for_errors_and_help() {
        assert_eq!(TEMPERATURE.allowed(), "0 to 2");
        assert_eq!(REPETITION_PENALTY.allowed(), "numbers above 0 up to 2");
        assert_eq!(TOP_K.allowed(), "-1 to 4294967295");
        assert!(TEMPERATURE.help().ends_with("[allowed: 0 to 2]"));
    }
}
