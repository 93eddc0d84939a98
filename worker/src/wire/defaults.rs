// SPDX-License-Identifier: Apache-2.0

//! Converts a model's sampling defaults to the message that the router reads.

use proto::v1 as public;
use sampling_params::SamplingDefaults;

pub(crate) fn sampling_defaults(defaults: &SamplingDefaults) -> public::Sampling {
    let mut wire = public::Sampling::default();
    macro_rules! copy_fields {
        (
            floats: [$($float:ident $float_constant:ident),*],
            grouped_floats: [$($grouped:ident $grouped_constant:ident),*],
            integers: [$($integer:ident $integer_constant:ident),*],
        ) => {
            $(wire.$float = defaults.$float.map(|value| value as f32);)*
            $(wire.$grouped = defaults.$grouped.map(|value| value as f32);)*
            $(wire.$integer = defaults.$integer;)*
        };
    }
    sampling_params::with_parameter_names!(copy_fields);
    wire
}
