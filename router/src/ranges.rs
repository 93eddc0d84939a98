//! Router and engine allow the same, although neither uses the other: what the router passes on, a worker takes, and what it
//! refuses, a worker that is asked by somebody else refuses by the same name.

use engine::{Dry, DryBreakers, Mirostat, MirostatVersion, SamplingParams};

use crate::params::{Limits, ParamError, Params, Sampling};

const VOCABULARY: u32 = 50;

fn checked(params: Params) -> Result<Sampling, ParamError> {
    let limits = Limits { context_tokens: 100, vocabulary: VOCABULARY };
    params.check(limits, "prompt", 10).map(|plan| plan.sampling)
}

/// As it arrives in the engine.
fn arrived(sampling: Sampling) -> SamplingParams {
    SamplingParams {
        temperature: sampling.temperature,
        dynatemp_range: sampling.dynatemp_range,
        dynatemp_exponent: sampling.dynatemp_exponent,
        top_n_sigma: sampling.top_n_sigma,
        top_k: sampling.top_k,
        typical_p: sampling.typical_p,
        top_p: sampling.top_p,
        min_p: sampling.min_p,
        xtc_probability: sampling.xtc_probability,
        xtc_threshold: sampling.xtc_threshold,
        mirostat: sampling.mirostat.map(|mirostat| Mirostat {
            version: MirostatVersion::Two,
            tau: mirostat.tau,
            eta: mirostat.eta,
        }),
        repetition_penalty: sampling.repetition_penalty,
        presence_penalty: sampling.presence_penalty,
        frequency_penalty: sampling.frequency_penalty,
        dry: sampling.dry.map(|dry| Dry {
            multiplier: dry.multiplier,
            base: dry.base,
            allowed_length: dry.allowed_length,
            last_n: dry.last_n,
            breakers: DryBreakers::default(),
        }),
        logit_bias: sampling.logit_bias,
        seed: sampling.seed,
    }
}

fn dry() -> Dry {
    Dry { multiplier: 1.0, base: 1.75, allowed_length: 2, last_n: None, breakers: DryBreakers::default() }
}

fn mirostat() -> Mirostat {
    Mirostat { version: MirostatVersion::Two, tau: 5.0, eta: 0.1 }
}

/// A parameter as the router has it, as the engine has it, and its range.
struct Figure {
    name: &'static str,
    asked: fn(&mut Params, f64),
    given: fn(&mut SamplingParams, f32),
    least: f32,
    most: f32,
}

const fn figure(
    name: &'static str,
    asked: fn(&mut Params, f64),
    given: fn(&mut SamplingParams, f32),
    least: f32,
    most: f32,
) -> Figure {
    Figure { name, asked, given, least, most }
}

/// The least float above 0.
const ABOVE_0: f32 = f32::from_bits(1);

const FIGURES: [Figure; 17] = [
    figure("temperature", |p, v| p.temperature = Some(v), |p, v| p.temperature = v, 0.0, 2.0),
    figure("dynatemp_range", |p, v| p.dynatemp_range = Some(v), |p, v| p.dynatemp_range = v, 0.0, 2.0),
    figure(
        "dynatemp_exponent",
        |p, v| p.dynatemp_exponent = Some(v),
        |p, v| p.dynatemp_exponent = v,
        0.0,
        100.0,
    ),
    figure("top_n_sigma", |p, v| p.top_n_sigma = Some(v), |p, v| p.top_n_sigma = v, 0.0, 1000.0),
    figure("typical_p", |p, v| p.typical_p = Some(v), |p, v| p.typical_p = v, ABOVE_0, 1.0),
    figure("top_p", |p, v| p.top_p = Some(v), |p, v| p.top_p = v, ABOVE_0, 1.0),
    figure("min_p", |p, v| p.min_p = Some(v), |p, v| p.min_p = v, 0.0, 1.0),
    figure("xtc_probability", |p, v| p.xtc_probability = Some(v), |p, v| p.xtc_probability = v, 0.0, 1.0),
    figure("xtc_threshold", |p, v| p.xtc_threshold = Some(v), |p, v| p.xtc_threshold = v, 0.0, 1.0),
    figure(
        "repetition_penalty",
        |p, v| p.repetition_penalty = Some(v),
        |p, v| p.repetition_penalty = v,
        ABOVE_0,
        2.0,
    ),
    figure("presence_penalty", |p, v| p.presence_penalty = Some(v), |p, v| p.presence_penalty = v, -2.0, 2.0),
    figure(
        "frequency_penalty",
        |p, v| p.frequency_penalty = Some(v),
        |p, v| p.frequency_penalty = v,
        -2.0,
        2.0,
    ),
    figure(
        "mirostat_tau",
        |p, v| (p.mirostat, p.mirostat_tau) = (Some(2), Some(v)),
        |p, v| p.mirostat = Some(Mirostat { tau: v, ..mirostat() }),
        0.0,
        100.0,
    ),
    figure(
        "mirostat_eta",
        |p, v| (p.mirostat, p.mirostat_eta) = (Some(2), Some(v)),
        |p, v| p.mirostat = Some(Mirostat { eta: v, ..mirostat() }),
        0.0,
        1.0,
    ),
    figure(
        "dry_multiplier",
        |p, v| p.dry_multiplier = Some(v),
        |p, v| p.dry = Some(Dry { multiplier: v, ..dry() }),
        0.0,
        100.0,
    ),
    figure(
        "dry_base",
        |p, v| (p.dry_multiplier, p.dry_base) = (Some(1.0), Some(v)),
        |p, v| p.dry = Some(Dry { base: v, ..dry() }),
        1.0,
        100.0,
    ),
    figure(
        "logit_bias",
        |p, v| p.logit_bias = vec![(3, v)],
        |p, v| p.logit_bias = vec![(3, v)],
        -100.0,
        100.0,
    ),
];

#[test]
fn router_and_engine_allow_the_same_figures() {
    for Figure { name, asked, given, least, most } in FIGURES {
        for value in [least, most] {
            let mut params = Params::default();
            asked(&mut params, f64::from(value));
            let sampling = checked(params).unwrap_or_else(|error| panic!("{value}: {error}"));
            assert_eq!(arrived(sampling).check(VOCABULARY as usize), Ok(()), "{name} {value}");
        }
        for value in [least.next_down(), most.next_up(), f32::NAN, f32::INFINITY] {
            let mut params = Params::default();
            asked(&mut params, f64::from(value));
            assert_eq!(checked(params).map_err(|error| error.param()), Err(name), "{value}");
            let mut sampling = SamplingParams::default();
            given(&mut sampling, value);
            let error = sampling.check(VOCABULARY as usize).expect_err(name).to_string();
            assert!(error.starts_with(name), "{value}: {error}");
        }
    }
}

#[test]
fn router_and_engine_allow_the_same_counts() {
    let engine =
        |params: &SamplingParams| params.check(VOCABULARY as usize).map_err(|error| error.to_string());
    let length = |length: u32| {
        let asked = Params {
            dry_multiplier: Some(1.0),
            dry_allowed_length: Some(i64::from(length)),
            ..Params::default()
        };
        let given = SamplingParams {
            dry: Some(Dry { allowed_length: length, ..dry() }),
            ..SamplingParams::default()
        };
        (checked(asked).map(drop).map_err(|error| error.param()), engine(&given))
    };
    for allowed in [1, u32::MAX] {
        assert_eq!(length(allowed), (Ok(()), Ok(())));
    }
    let (router, engine_says) = length(0);
    assert_eq!(router, Err("dry_allowed_length"));
    assert!(engine_says.unwrap_err().starts_with("dry_allowed_length is 0, allowed are 1 to"));

    let bias = |token: u32| {
        let asked = Params { logit_bias: vec![(i64::from(token), 1.0)], ..Params::default() };
        let given = SamplingParams { logit_bias: vec![(token, 1.0)], ..SamplingParams::default() };
        (checked(asked).is_ok(), engine(&given).is_ok())
    };
    assert_eq!([bias(VOCABULARY - 1), bias(VOCABULARY)], [(true, true), (false, false)]);
    let many = |count: u32| {
        let limits = Limits { context_tokens: 100, vocabulary: count };
        let asked = Params {
            logit_bias: (0..count).map(|token| (i64::from(token), 1.0)).collect(),
            ..Params::default()
        };
        let given = SamplingParams {
            logit_bias: (0..count).map(|token| (token, 1.0)).collect(),
            ..SamplingParams::default()
        };
        (asked.check(limits, "prompt", 10).is_ok(), given.check(count as usize).is_ok())
    };
    assert_eq!([many(1024), many(1025)], [(true, true), (false, false)]);
}
