//! Every real number that a request can say about sampling. The router is asked with each, and so is the worker, whose tests
//! include this file: what one passes on, the other must check all the same.

use proto::v1::Sampling;

pub(crate) type Change = fn(&mut Sampling, f32);

/// In no range. JSON cannot say them, protocol buffers can.
pub(crate) const NO_NUMBERS: [f32; 3] = [f32::NAN, f32::INFINITY, f32::NEG_INFINITY];

pub(crate) const FIGURES: [(&str, Change); 17] = [
    ("temperature", |s, v| s.temperature = Some(v)),
    ("top_p", |s, v| s.top_p = Some(v)),
    ("min_p", |s, v| s.min_p = Some(v)),
    ("typical_p", |s, v| s.typical_p = Some(v)),
    ("top_n_sigma", |s, v| s.top_n_sigma = Some(v)),
    ("dynatemp_range", |s, v| s.dynatemp_range = Some(v)),
    ("dynatemp_exponent", |s, v| s.dynatemp_exponent = Some(v)),
    ("xtc_probability", |s, v| s.xtc_probability = Some(v)),
    ("xtc_threshold", |s, v| s.xtc_threshold = Some(v)),
    ("mirostat_tau", |s, v| (s.mirostat, s.mirostat_tau) = (Some(2), Some(v))),
    ("mirostat_eta", |s, v| (s.mirostat, s.mirostat_eta) = (Some(1), Some(v))),
    ("dry_multiplier", |s, v| s.dry_multiplier = Some(v)),
    ("dry_base", |s, v| (s.dry_multiplier, s.dry_base) = (Some(1.0), Some(v))),
    ("repetition_penalty", |s, v| s.repetition_penalty = Some(v)),
    ("presence_penalty", |s, v| s.presence_penalty = Some(v)),
    ("frequency_penalty", |s, v| s.frequency_penalty = Some(v)),
    ("logit_bias", |s, v| s.logit_bias.extend([(1, v)])),
];
