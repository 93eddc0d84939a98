// SPDX-License-Identifier: Apache-2.0

//! A model's sampling defaults: what its configuration sets for parameters that a request leaves
//! out. Workers bring them as a message; what it does not set has the default of the table.

use proto::v1::Sampling;
use serde_json::{Map, Value, json};

use crate::params::RequestParams;

impl RequestParams {
    /// Fills in what the client left out.
    pub(crate) fn fill_from(&mut self, defaults: &Sampling) {
        macro_rules! fill_fields {
            (
                floats: [$($float:ident $float_constant:ident),*],
                grouped_floats: [$($grouped:ident $grouped_constant:ident),*],
                integers: [$($integer:ident $integer_constant:ident),*],
            ) => {
                $(self.$float = self.$float.or(defaults.$float.map(f64::from));)*
                $(self.$grouped = self.$grouped.or(defaults.$grouped.map(f64::from));)*
                $(self.$integer = self.$integer.or(defaults.$integer.map(i64::from));)*
            };
        }
        sampling_params::with_parameter_names!(fill_fields);
    }
}

/// The defaults under the names of the request's fields.
pub(crate) fn to_json(defaults: &Sampling) -> Value {
    let mut fields = Map::new();
    macro_rules! list_fields {
        (
            floats: [$($float:ident $float_constant:ident),*],
            grouped_floats: [$($grouped:ident $grouped_constant:ident),*],
            integers: [$($integer:ident $integer_constant:ident),*],
        ) => {
            $(fields.extend(defaults.$float.map(|value| (stringify!($float).to_owned(), decimal(value))));)*
            $(fields.extend(defaults.$grouped.map(|value| (stringify!($grouped).to_owned(), decimal(value))));)*
            $(fields.extend(defaults.$integer.map(|value| (stringify!($integer).to_owned(), json!(value))));)*
        };
    }
    sampling_params::with_parameter_names!(list_fields);
    Value::Object(fields)
}

/// 0.6 as an `f32` is 0.6000000238 as an `f64`: the shortest decimal form is what was configured.
pub(crate) fn decimal(value: f32) -> Value {
    value.to_string().parse::<f64>().map_or(Value::Null, |value| json!(value))
}
