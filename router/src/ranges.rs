//! Tests that the router and the engine accept the same parameter ranges, although neither crate
//! uses the other.
//!
//! 1. The engine accepts every value that the router passes on.
//! 2. The engine refuses every value that the router refuses, with the same parameter name. So a
//!    client that calls a worker directly gets the same errors.

use engine::{Dry, DryBreakers, Mirostat, MirostatVersion, SamplingParams};

use crate::params::{CheckedSampling, ModelLimits, RequestParamError, RequestParams};

const VOCABULARY: u32 = 50;

fn checked(params: RequestParams) -> Result<CheckedSampling, RequestParamError> {
    let limits = ModelLimits { context_tokens: 100, vocabulary: VOCABULARY };
    params.check(limits, "prompt", 10).map(|plan| plan.sampling)
}

/// The engine's form of checked sampling parameters.
fn to_engine(sampling: CheckedSampling) -> SamplingParams {
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
            last_n: dry.penalty_last_n,
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

/// How to set a parameter in the router and in the engine, and its range.
struct ParameterRange {
    name: &'static str,
    set_router: fn(&mut RequestParams, f64),
    set_engine: fn(&mut SamplingParams, f32),
    min: f32,
    max: f32,
}

const fn range(
    name: &'static str,
    set_router: fn(&mut RequestParams, f64),
    set_engine: fn(&mut SamplingParams, f32),
    min: f32,
    max: f32,
) -> ParameterRange {
    ParameterRange { name, set_router, set_engine, min, max }
}

/// The smallest f32 above 0.
const ABOVE_0: f32 = f32::from_bits(1);

const RANGES: [ParameterRange; 17] = [
    range("temperature", |p, v| p.temperature = Some(v), |p, v| p.temperature = v, 0.0, 2.0),
    range("dynatemp_range", |p, v| p.dynatemp_range = Some(v), |p, v| p.dynatemp_range = v, 0.0, 2.0),
    range(
        "dynatemp_exponent",
        |p, v| p.dynatemp_exponent = Some(v),
        |p, v| p.dynatemp_exponent = v,
        0.0,
        100.0,
    ),
    range("top_n_sigma", |p, v| p.top_n_sigma = Some(v), |p, v| p.top_n_sigma = v, 0.0, 1000.0),
    range("typical_p", |p, v| p.typical_p = Some(v), |p, v| p.typical_p = v, ABOVE_0, 1.0),
    range("top_p", |p, v| p.top_p = Some(v), |p, v| p.top_p = v, ABOVE_0, 1.0),
    range("min_p", |p, v| p.min_p = Some(v), |p, v| p.min_p = v, 0.0, 1.0),
    range("xtc_probability", |p, v| p.xtc_probability = Some(v), |p, v| p.xtc_probability = v, 0.0, 1.0),
    range("xtc_threshold", |p, v| p.xtc_threshold = Some(v), |p, v| p.xtc_threshold = v, 0.0, 1.0),
    range(
        "repetition_penalty",
        |p, v| p.repetition_penalty = Some(v),
        |p, v| p.repetition_penalty = v,
        ABOVE_0,
        2.0,
    ),
    range("presence_penalty", |p, v| p.presence_penalty = Some(v), |p, v| p.presence_penalty = v, -2.0, 2.0),
    range(
        "frequency_penalty",
        |p, v| p.frequency_penalty = Some(v),
        |p, v| p.frequency_penalty = v,
        -2.0,
        2.0,
    ),
    range(
        "mirostat_tau",
        |p, v| (p.mirostat, p.mirostat_tau) = (Some(2), Some(v)),
        |p, v| p.mirostat = Some(Mirostat { tau: v, ..mirostat() }),
        0.0,
        100.0,
    ),
    range(
        "mirostat_eta",
        |p, v| (p.mirostat, p.mirostat_eta) = (Some(2), Some(v)),
        |p, v| p.mirostat = Some(Mirostat { eta: v, ..mirostat() }),
        0.0,
        1.0,
    ),
    range(
        "dry_multiplier",
        |p, v| p.dry_multiplier = Some(v),
        |p, v| p.dry = Some(Dry { multiplier: v, ..dry() }),
        0.0,
        100.0,
    ),
    range(
        "dry_base",
        |p, v| (p.dry_multiplier, p.dry_base) = (Some(1.0), Some(v)),
        |p, v| p.dry = Some(Dry { base: v, ..dry() }),
        1.0,
        100.0,
    ),
    range(
        "logit_bias",
        |p, v| p.logit_bias = vec![(3, v)],
        |p, v| p.logit_bias = vec![(3, v)],
        -100.0,
        100.0,
    ),
];

#[test]
fn router_and_engine_accept_the_same_ranges() {
    for ParameterRange { name, set_router, set_engine, min, max } in RANGES {
        for value in [min, max] {
            let mut params = RequestParams::default();
            set_router(&mut params, f64::from(value));
            let sampling = checked(params).unwrap_or_else(|error| panic!("{value}: {error}"));
            assert_eq!(to_engine(sampling).check(VOCABULARY as usize), Ok(()), "{name} {value}");
        }
        for value in [min.next_down(), max.next_up(), f32::NAN, f32::INFINITY] {
            let mut params = RequestParams::default();
            set_router(&mut params, f64::from(value));
            assert_eq!(checked(params).map_err(|error| error.param()), Err(name), "{value}");
            let mut sampling = SamplingParams::default();
            set_engine(&mut sampling, value);
            let error = sampling.check(VOCABULARY as usize).expect_err(name).to_string();
            assert!(error.starts_with(name), "{value}: {error}");
        }
    }
}

#[test]
fn router_and_engine_accept_the_same_counts() {
    let check_engine =
        |params: &SamplingParams| params.check(VOCABULARY as usize).map_err(|error| error.to_string());
    let check_length = |length: u32| {
        let asked = RequestParams {
            dry_multiplier: Some(1.0),
            dry_allowed_length: Some(i64::from(length)),
            ..RequestParams::default()
        };
        let given = SamplingParams {
            dry: Some(Dry { allowed_length: length, ..dry() }),
            ..SamplingParams::default()
        };
        (checked(asked).map(drop).map_err(|error| error.param()), check_engine(&given))
    };
    for allowed in [1, u32::MAX] {
        assert_eq!(check_length(allowed), (Ok(()), Ok(())));
    }
    let (router, engine) = check_length(0);
    assert_eq!(router, Err("dry_allowed_length"));
    assert!(engine.unwrap_err().starts_with("dry_allowed_length is 0, allowed are 1 to"));

    let is_token_accepted = |token: u32| {
        let asked = RequestParams { logit_bias: vec![(i64::from(token), 1.0)], ..RequestParams::default() };
        let given = SamplingParams { logit_bias: vec![(token, 1.0)], ..SamplingParams::default() };
        (checked(asked).is_ok(), check_engine(&given).is_ok())
    };
    assert_eq!(
        [is_token_accepted(VOCABULARY - 1), is_token_accepted(VOCABULARY)],
        [(true, true), (false, false)]
    );
    let are_entries_accepted = |count: u32| {
        let limits = ModelLimits { context_tokens: 100, vocabulary: count };
        let asked = RequestParams {
            logit_bias: (0..count).map(|token| (i64::from(token), 1.0)).collect(),
            ..RequestParams::default()
        };
        let given = SamplingParams {
            logit_bias: (0..count).map(|token| (token, 1.0)).collect(),
            ..SamplingParams::default()
        };
        (asked.check(limits, "prompt", 10).is_ok(), given.check(count as usize).is_ok())
    };
    assert_eq!([are_entries_accepted(1024), are_entries_accepted(1025)], [(true, true), (false, false)]);
}
