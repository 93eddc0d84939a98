// SPDX-License-Identifier: Apache-2.0

//! [`SamplingDefaults`]: what a model's configuration sets in place of the table's defaults.
//!
//! It has the parameters whose value is a number. A seed or a bias of single tokens is a property
//! of a request, not of a model.

use std::fmt;

use serde::{Deserialize, Serialize};

use crate::parameter::{FloatParameter, IntegerDefault, IntegerParameter};
use crate::table::*;

macro_rules! define_sampling_defaults {
    (
        floats: [$($float:ident $float_constant:ident),*],
        grouped_floats: [$($grouped:ident $grouped_constant:ident),*],
        integers: [$($integer:ident $integer_constant:ident),*],
    ) => {
        /// Values for what a request leaves out. Every value is in its range.
        #[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
        #[serde(rename_all = "kebab-case", try_from = "UncheckedDefaults")]
        pub struct SamplingDefaults {
            $(#[serde(skip_serializing_if = "Option::is_none")] pub $float: Option<f64>,)*
            $(#[serde(skip_serializing_if = "Option::is_none")] pub $grouped: Option<f64>,)*
            $(#[serde(skip_serializing_if = "Option::is_none")] pub $integer: Option<u32>,)*
        }

        /// Values as they stand in a configuration.
        #[derive(Debug, Deserialize)]
        #[serde(deny_unknown_fields, rename_all = "kebab-case")]
        struct UncheckedDefaults {
            $($float: Option<f64>,)*
            $($grouped: Option<f64>,)*
            $($integer: Option<i64>,)*
        }

        impl TryFrom<UncheckedDefaults> for SamplingDefaults {
            type Error = SamplingDefaultError;

            fn try_from(unchecked: UncheckedDefaults) -> Result<Self, SamplingDefaultError> {
                Ok(Self {
                    $($float: checked_float(&$float_constant, unchecked.$float)?,)*
                    $($grouped: checked_float(&$grouped_constant, unchecked.$grouped)?,)*
                    $($integer: checked_integer(&$integer_constant, unchecked.$integer)?,)*
                })
            }
        }
    };
}

crate::with_parameter_names!(define_sampling_defaults);

/// A default is out of its parameter's range.
#[derive(Debug, PartialEq, Eq)]
pub struct SamplingDefaultError {
    name: &'static str,
    value: String,
    allowed: String,
}

impl fmt::Display for SamplingDefaultError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { name, value, allowed } = self;
        write!(f, "`{}` of `sampling` is {value}, allowed are {allowed}", name.replace('_', "-"))
    }
}

impl std::error::Error for SamplingDefaultError {}

impl SamplingDefaults {
    pub fn is_empty(&self) -> bool {
        *self == Self::default()
    }
}

fn checked_float(
    parameter: &FloatParameter,
    value: Option<f64>,
) -> Result<Option<f64>, SamplingDefaultError> {
    let Some(value) = value else { return Ok(None) };
    match parameter.checked(value) {
        Some(_) => Ok(Some(value)),
        None => Err(SamplingDefaultError {
            name: parameter.name,
            value: value.to_string(),
            allowed: parameter.allowed(),
        }),
    }
}

/// -1, where it is allowed, is the value that it stands for.
fn checked_integer(
    parameter: &IntegerParameter,
    value: Option<i64>,
) -> Result<Option<u32>, SamplingDefaultError> {
    let Some(value) = value else { return Ok(None) };
    if !parameter.contains(value) {
        let allowed = parameter.allowed();
        return Err(SamplingDefaultError { name: parameter.name, value: value.to_string(), allowed });
    }
    Ok(u32::try_from(value).ok().or(match parameter.default {
        IntegerDefault::Value(default) => Some(default),
        IntegerDefault::Absent(_) => None,
    }))
}
