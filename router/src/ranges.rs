// SPDX-License-Identifier: Apache-2.0

//! Tests that the router and the engine accept the same parameter ranges, although neither crate
//! uses the other.
//!
//! 1. The engine accepts every value that the router passes on.
//! 2. The engine refuses every value that the router refuses, with the same parameter name. So a
//!    client that calls a worker directly gets the same errors.

use engine::{DryBreakers, DryParams, MirostatParams, MirostatVersion, SamplingParams};
use sampling_params::{FloatBounds, FloatParameter};

use crate::params::{CheckedSampling, RequestParamError, RequestParams, TokenLimits};

const VOCABULARY: u32 = 50;

fn checked(params: RequestParams) -> Result<CheckedSampling, RequestParamError> {
    let limits = TokenLimits { context_tokens: 100, vocabulary: VOCABULARY };
    params.check(limits, "prompt", 10).map(|plan| plan.sampling)
}

/// The engine's form of checked sampling parameters.
fn to_engine(sampling: CheckedSampling) -> SamplingParams {
    let mut params = SamplingParams {
        top_k: sampling.top_k,
        mirostat: sampling.mirostat.map(|mirostat| MirostatParams {
            version: MirostatVersion::Two,
            tau: mirostat.tau,
            eta: mirostat.eta,
        }),
        dry: sampling.dry.map(|dry| DryParams {
            multiplier: dry.multiplier,
            base: dry.base,
            allowed_length: dry.allowed_length,
            last_n: dry.penalty_last_n,
            breakers: DryBreakers::default(),
        }),
        logit_bias: sampling.logit_bias,
        seed: sampling.seed,
        ..SamplingParams::default()
    };
    macro_rules! copy_floats {
        (floats: [$($name:ident $constant:ident),*], $($rest:tt)*) => {
            $(params.$name = sampling.$name;)*
        };
    }
    sampling_params::with_parameter_names!(copy_floats);
    params
}

fn dry() -> DryParams {
    DryParams {
        multiplier: 1.0,
        base: 1.75,
        allowed_length: 2,
        last_n: None,
        breakers: DryBreakers::default(),
    }
}

fn mirostat() -> MirostatParams {
    MirostatParams { version: MirostatVersion::Two, tau: 5.0, eta: 0.1 }
}

/// How to set a parameter in the router and in the engine.
struct ParameterSetter {
    parameter: &'static FloatParameter,
    set_router: fn(&mut RequestParams, f64),
    set_engine: fn(&mut SamplingParams, f32),
}

/// Every parameter with a float value.
fn float_parameters() -> Vec<ParameterSetter> {
    macro_rules! independent {
        (floats: [$($name:ident $constant:ident),*], $($rest:tt)*) => {
            vec![$(ParameterSetter {
                parameter: &sampling_params::$constant,
                set_router: |params, value| params.$name = Some(value),
                set_engine: |params, value| params.$name = value,
            }),*]
        };
    }
    let mut parameters = sampling_params::with_parameter_names!(independent);
    parameters.extend([
        ParameterSetter {
            parameter: &sampling_params::MIROSTAT_TAU,
            set_router: |p, v| (p.mirostat, p.mirostat_tau) = (Some(2), Some(v)),
            set_engine: |p, v| p.mirostat = Some(MirostatParams { tau: v, ..mirostat() }),
        },
        ParameterSetter {
            parameter: &sampling_params::MIROSTAT_ETA,
            set_router: |p, v| (p.mirostat, p.mirostat_eta) = (Some(2), Some(v)),
            set_engine: |p, v| p.mirostat = Some(MirostatParams { eta: v, ..mirostat() }),
        },
        ParameterSetter {
            parameter: &sampling_params::DRY_MULTIPLIER,
            set_router: |p, v| p.dry_multiplier = Some(v),
            set_engine: |p, v| p.dry = Some(DryParams { multiplier: v, ..dry() }),
        },
        ParameterSetter {
            parameter: &sampling_params::DRY_BASE,
            set_router: |p, v| (p.dry_multiplier, p.dry_base) = (Some(1.0), Some(v)),
            set_engine: |p, v| p.dry = Some(DryParams { base: v, ..dry() }),
        },
        ParameterSetter {
            parameter: &sampling_params::LOGIT_BIAS_VALUE,
            set_router: |p, v| p.logit_bias = vec![(3, v)],
            set_engine: |p, v| p.logit_bias = vec![(3, v)],
        },
    ]);
    parameters
}

#[test]
fn router_and_engine_accept_the_same_ranges() {
    for ParameterSetter { parameter, set_router, set_engine } in float_parameters() {
        let name = parameter.name;
        let (min, max) = match parameter.bounds {
            FloatBounds::Inclusive { min, max } => (min, max),
            // The smallest f32 above 0.
            FloatBounds::AboveZero { max } => (f32::from_bits(1), max),
        };
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
            dry: Some(DryParams { allowed_length: length, ..dry() }),
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
        let limits = TokenLimits { context_tokens: 100, vocabulary: count };
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
