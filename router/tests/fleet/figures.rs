// SPDX-License-Identifier: Apache-2.0

//! Every float of `ballast.v1.Sampling`, from the table of sampling parameters. Tests of the router
//! and of the worker include this file, because both check the values.

use proto::v1::Sampling;

pub(crate) type Change = fn(&mut Sampling, f32);

/// Values that are in no range. JSON cannot express them, protocol buffers can.
pub(crate) const NO_NUMBERS: [f32; 3] = [f32::NAN, f32::INFINITY, f32::NEG_INFINITY];

macro_rules! define_figures {
    (
        floats: [$($float:ident $float_constant:ident),*],
        grouped_floats: [$($grouped:ident $grouped_constant:ident),*],
        $($rest:tt)*
    ) => {
        /// The name of each parameter, and how to set it.
        pub(crate) const FIGURES: &[(&str, Change)] = &[
            $((stringify!($float), |sampling, value| sampling.$float = Some(value)),)*
            $((stringify!($grouped), |sampling, value| {
                // Without Mirostat and DRY, their parameters have no effect and are not checked.
                sampling.mirostat = Some(2);
                sampling.dry_multiplier = Some(1.0);
                sampling.$grouped = Some(value);
            }),)*
            ("logit_bias", |sampling, value| sampling.logit_bias.extend([(1, value)])),
        ];
    };
}

sampling_params::with_parameter_names!(define_figures);
