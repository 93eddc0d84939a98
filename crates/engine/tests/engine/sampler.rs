// SPDX-License-Identifier: Apache-2.0

//! Compares the distributions of sampled tokens with a reference chain: f64, one full sort, no
//! shortcuts.

use engine::sample::draw::SampleContext;
use engine::sample::error::SampleError;
use engine::sample::history::History;
use engine::sample::logprobs::LogProbs;
use engine::sample::sampler::Sampler;
use engine::{DryBreakers, DryParams, MirostatParams, MirostatVersion, SamplerState, SamplingParams};
use proptest::prelude::*;

fn draw<'a>(params: &'a SamplingParams, position: usize) -> SampleContext<'a> {
    SampleContext { params, choice: 0, position, forbidden: &[], allowed: None }
}

fn fresh(params: &SamplingParams) -> History {
    History::new(params, &[], &[], &SamplerState::default()).unwrap()
}

fn sample(sampler: &mut Sampler, logits: &[f32], params: &SamplingParams, position: usize) -> u32 {
    sampler.sample(logits, &draw(params, position), &mut fresh(params)).unwrap()
}

/// Softmax of the logits of `kept` at a temperature.
fn softmax(logits: &[f32], kept: &[usize], temperature: f64) -> Vec<f64> {
    let max = kept.iter().map(|&id| f64::from(logits[id])).fold(f64::NEG_INFINITY, f64::max);
    let weights: Vec<f64> =
        kept.iter().map(|&id| ((f64::from(logits[id]) - max) / temperature).exp()).collect();
    let total: f64 = weights.iter().sum();
    weights.iter().map(|weight| weight / total).collect()
}

fn entropy(probabilities: &[f64]) -> f64 {
    probabilities.iter().filter(|&&p| p > 0.0).map(|p| -p * p.ln()).sum()
}

/// All possible tokens, most probable first.
fn ranked(logits: &[f32]) -> Vec<usize> {
    let mut ids: Vec<usize> = (0..logits.len()).filter(|&id| logits[id] > f32::NEG_INFINITY).collect();
    ids.sort_by(|&a, &b| logits[b].total_cmp(&logits[a]).then(a.cmp(&b)));
    ids
}

/// Probability of every token after the reference chain. `xtc` says whether XTC acts.
fn chain(logits: &[f32], params: &SamplingParams, xtc: bool) -> Vec<f64> {
    let mut kept = ranked(logits);
    if params.top_n_sigma > 0.0 {
        let count = kept.len() as f64;
        let mean = kept.iter().map(|&id| f64::from(logits[id])).sum::<f64>() / count;
        let square = |&id: &usize| (f64::from(logits[id]) - mean).powi(2);
        let deviation = (kept.iter().map(square).sum::<f64>() / count).sqrt();
        let floor = f64::from(logits[kept[0]]) - f64::from(params.top_n_sigma) * deviation;
        kept.retain(|&id| f64::from(logits[id]) >= floor);
    }
    if params.top_k > 0 {
        kept.truncate(params.top_k as usize);
    }
    if params.typical_p < 1.0 {
        let probabilities = softmax(logits, &kept, 1.0);
        let entropy = entropy(&probabilities);
        let mut order: Vec<usize> = (0..kept.len()).collect();
        let off = |at: usize| (-probabilities[at].ln() - entropy).abs();
        order.sort_by(|&a, &b| off(a).total_cmp(&off(b)).then(kept[a].cmp(&kept[b])));
        let mut sum = 0.0;
        let reached = order.iter().position(|&at| {
            sum += probabilities[at];
            sum > f64::from(params.typical_p)
        });
        order.truncate(reached.map_or(order.len(), |last| last + 1));
        order.sort_unstable();
        kept = order.into_iter().map(|at| kept[at]).collect();
    }
    let mut sum = 0.0;
    let reached = softmax(logits, &kept, 1.0).iter().position(|probability| {
        sum += probability;
        sum >= f64::from(params.top_p)
    });
    kept.truncate(reached.map_or(kept.len(), |last| last + 1));
    let probabilities = softmax(logits, &kept, 1.0);
    let above = probabilities.iter().filter(|&&p| p >= f64::from(params.min_p) * probabilities[0]).count();
    kept.truncate(above);
    if xtc {
        let likely = softmax(logits, &kept, 1.0);
        let likely = likely.iter().filter(|&&p| p >= f64::from(params.xtc_threshold)).count();
        kept.drain(..likely.saturating_sub(1));
    }
    let mut temperature = f64::from(params.temperature);
    if params.dynatemp_range > 0.0 {
        let range = f64::from(params.dynatemp_range);
        let (low, high) = ((temperature - range).max(0.0), temperature + range);
        let most = (kept.len() as f64).ln();
        let share = if kept.len() > 1 { entropy(&softmax(logits, &kept, 1.0)) / most } else { 0.0 };
        temperature = low + (high - low) * share.powf(f64::from(params.dynatemp_exponent));
    }
    let mut probabilities = vec![0.0; logits.len()];
    for (&id, probability) in kept.iter().zip(softmax(logits, &kept, temperature)) {
        probabilities[id] = probability;
    }
    probabilities
}

fn expected(logits: &[f32], params: &SamplingParams) -> Vec<f64> {
    let chance = if params.xtc_threshold > 0.5 { 0.0 } else { f64::from(params.xtc_probability) };
    let (with, without) = (chain(logits, params, true), chain(logits, params, false));
    with.iter().zip(without).map(|(with, without)| chance * with + (1.0 - chance) * without).collect()
}

/// The distribution that mirostat samples from at the bound `mu`.
fn mirostat_expected(logits: &[f32], params: &SamplingParams, mu: f64) -> Vec<f64> {
    let temperature = f64::from(params.temperature);
    let mut kept = ranked(logits);
    let all = softmax(logits, &kept, temperature);
    let count = match params.mirostat.unwrap().version {
        MirostatVersion::Two => all.iter().take_while(|p| -p.log2() <= mu).count().max(1),
        MirostatVersion::One => {
            let (mut products, mut squares) = (0.0, 0.0);
            for i in 0..99.min(all.len() - 1) {
                let t = ((i + 2) as f64 / (i + 1) as f64).ln();
                products += t * (all[i] / all[i + 1]).ln();
                squares += t * t;
            }
            let s = products / squares;
            let epsilon = s - 1.0;
            let share = 1.0 - (all.len() as f64).powf(-epsilon);
            ((epsilon * mu.exp2() / share).powf(1.0 / s) as usize).max(1)
        }
    };
    kept.truncate(count);
    let mut probabilities = vec![0.0; logits.len()];
    for (&id, probability) in kept.iter().zip(softmax(logits, &kept, temperature)) {
        probabilities[id] = probability;
    }
    probabilities
}

/// 2,500 logits in mixed order. The probability falls over a few hundred of them.
fn wide_logits() -> Vec<f32> {
    (0..2500_u32).map(|id| -((id.wrapping_mul(7919) % 2500) as f32) * 0.012).collect()
}

/// A few likely tokens of different probability, then the same tail.
fn peaked_logits() -> Vec<f32> {
    let mut logits = wide_logits();
    for (at, peak) in [6.0, 5.5, 5.2, 4.0, 3.0].into_iter().enumerate() {
        logits[at * 313] = peak;
    }
    logits
}

/// The chi-squared statistic of `draws` tokens as a z-score (Wilson and Hilferty). Cells below 8
/// expected draws are merged. Random numbers are keyed, so the result is the same in every run.
fn z_score(probabilities: &[f64], draws: usize, mut token_at: impl FnMut(usize) -> u32) -> f64 {
    let mut counts = vec![0_usize; probabilities.len()];
    for position in 0..draws {
        counts[token_at(position) as usize] += 1;
    }
    let (mut chi, mut cells, mut rare, mut rare_count) = (0.0, 0, 0.0, 0);
    for (&probability, &count) in probabilities.iter().zip(&counts) {
        let mean = probability * draws as f64;
        assert!(mean > 0.0 || count == 0, "a token outside the kept set was drawn");
        if mean < 8.0 {
            rare += mean;
            rare_count += count;
        } else {
            chi += (count as f64 - mean).powi(2) / mean;
            cells += 1;
        }
    }
    if rare > 0.0 {
        chi += (rare_count as f64 - rare).powi(2) / rare;
        cells += 1;
    }
    let freedom = f64::from(cells - 1);
    assert!(freedom > 0.0, "one cell shows nothing");
    ((chi / freedom).cbrt() - (1.0 - 2.0 / (9.0 * freedom))) / (2.0 / (9.0 * freedom)).sqrt()
}

fn z_of(logits: &[f32], probabilities: &[f64], params: &SamplingParams) -> f64 {
    let mut sampler = Sampler::default();
    z_score(probabilities, 20_000, |position| sample(&mut sampler, logits, params, position))
}

#[test]
fn drawn_tokens_follow_the_distribution() {
    let base = SamplingParams { seed: 11, ..SamplingParams::default() };
    for params in [
        base.clone(),
        SamplingParams { temperature: 0.7, ..base.clone() },
        SamplingParams { temperature: 1.8, ..base.clone() },
        SamplingParams { top_k: 40, ..base.clone() },
        SamplingParams { top_p: 0.9, ..base.clone() },
        // This case needs more candidates than the sampler sorts at first.
        SamplingParams { top_p: 0.5, temperature: 1.3, ..base.clone() },
        SamplingParams { min_p: 0.1, ..base.clone() },
        SamplingParams { top_k: 300, top_p: 0.8, min_p: 0.2, temperature: 0.6, ..base.clone() },
        SamplingParams { top_n_sigma: 0.5, ..base.clone() },
        SamplingParams { top_n_sigma: 1.0, top_k: 100, ..base.clone() },
        SamplingParams { typical_p: 0.3, ..base.clone() },
        SamplingParams { typical_p: 0.9, temperature: 1.2, ..base.clone() },
        SamplingParams { typical_p: 0.7, top_k: 200, top_p: 0.8, min_p: 0.05, ..base.clone() },
        SamplingParams { xtc_probability: 1.0, xtc_threshold: 0.05, ..base.clone() },
        SamplingParams { xtc_probability: 0.4, xtc_threshold: 0.1, top_p: 0.9, ..base.clone() },
        SamplingParams { xtc_probability: 1.0, xtc_threshold: 0.6, ..base.clone() },
        SamplingParams { dynatemp_range: 0.5, ..base.clone() },
        SamplingParams { dynatemp_range: 0.9, dynatemp_exponent: 2.0, top_k: 60, ..base.clone() },
        SamplingParams {
            top_n_sigma: 3.0,
            top_k: 500,
            typical_p: 0.95,
            top_p: 0.95,
            min_p: 0.01,
            xtc_probability: 0.5,
            xtc_threshold: 0.08,
            temperature: 0.9,
            dynatemp_range: 0.3,
            ..base
        },
    ] {
        for logits in [wide_logits(), peaked_logits()] {
            let z = z_of(&logits, &expected(&logits, &params), &params);
            assert!(z.abs() < 3.3, "{params:?}: chi-squared is {z} standard deviations off");
        }
    }
}

#[test]
fn mirostat_draws_from_what_its_bound_leaves_and_comes_to_its_target() {
    let logits = peaked_logits();
    for version in [MirostatVersion::One, MirostatVersion::Two] {
        for temperature in [1.0, 1.7] {
            // The distribution itself has at least 2.8 bits, so mirostat can reach the target.
            let tau = 2.2;
            let mirostat = Some(MirostatParams { version, tau, eta: 0.1 });
            let params = SamplingParams { mirostat, temperature, seed: 5, ..SamplingParams::default() };
            let mut sampler = Sampler::default();
            // With a fresh history for each draw, the bound is that of a first token: twice the
            // target.
            let first = |position| sample(&mut sampler, &logits, &params, position);
            let z = z_score(&mirostat_expected(&logits, &params, 4.4), 20_000, first);
            assert!(z.abs() < 3.3, "{version:?} at {temperature}: {z}");

            let kept: Vec<usize> = (0..logits.len()).collect();
            let probabilities = softmax(&logits, &kept, f64::from(temperature));
            let mut history = fresh(&params);
            let mut surprise = 0.0;
            for position in 0..4_000 {
                let token = sampler.sample(&logits, &draw(&params, position), &mut history).unwrap();
                if position >= 1_000 {
                    surprise -= probabilities[token as usize].log2() / 3_000.0;
                }
            }
            // The test measures the surprise over the whole softmax, mirostat over the remaining
            // tokens. The mean exceeds the target by the surprise of the truncation.
            let off = surprise - f64::from(tau);
            assert!((-0.1..1.6).contains(&off), "{version:?} at {temperature}: {surprise} bits");
        }
    }
}

/// As in llama.cpp, mirostat follows logit bias and temperature only.
#[test]
fn with_mirostat_neither_penalties_nor_dry_nor_filters_are_looked_at() {
    for version in [MirostatVersion::One, MirostatVersion::Two] {
        for temperature in [0.0, 0.8] {
            let mirostat = Some(MirostatParams { version, tau: 3.0, eta: 0.1 });
            let plain = SamplingParams { mirostat, temperature, seed: 3, ..SamplingParams::default() };
            let all = SamplingParams {
                repetition_penalty: 1.9,
                presence_penalty: 1.5,
                frequency_penalty: 1.5,
                dry: Some(DryParams {
                    multiplier: 5.0,
                    base: 2.0,
                    allowed_length: 1,
                    last_n: None,
                    breakers: DryBreakers::new([]),
                }),
                top_k: 1,
                top_p: 0.1,
                min_p: 0.9,
                typical_p: 0.1,
                top_n_sigma: 0.1,
                xtc_probability: 1.0,
                xtc_threshold: 0.01,
                dynatemp_range: 0.5,
                ..plain.clone()
            };
            let tokens = |params: &SamplingParams| -> Vec<u32> {
                let prompt: Vec<u32> = (0..2500).collect();
                let mut history = History::new(params, &prompt, &[], &SamplerState::default()).unwrap();
                let mut sampler = Sampler::default();
                let mut one =
                    |position| sampler.sample(&peaked_logits(), &draw(params, position), &mut history);
                (0..200).map(|position| one(position).unwrap()).collect()
            };
            let drawn = tokens(&plain);
            assert_eq!(tokens(&all), drawn, "{version:?} at {temperature}");
            let biased = SamplingParams { logit_bias: vec![(drawn[0], -100.0)], ..plain };
            assert!(!tokens(&biased).contains(&drawn[0]), "{version:?} at {temperature}");
        }
    }
}

#[test]
fn mirostat_goes_on_from_a_carried_state_with_the_same_tokens() {
    let mirostat = Some(MirostatParams { version: MirostatVersion::Two, tau: 4.0, eta: 0.3 });
    let params = SamplingParams { mirostat, seed: 9, ..SamplingParams::default() };
    let mut sampler = Sampler::default();
    let mut history = fresh(&params);
    let mut tokens = Vec::new();
    let mut states = Vec::new();
    for position in 0..50 {
        tokens.push(sampler.sample(&wide_logits(), &draw(&params, position), &mut history).unwrap());
        states.push(history.state());
    }
    for cut in [1, 7, 49] {
        let mut resumed = History::new(&params, &[], &tokens[..cut], &states[cut - 1]).unwrap();
        for (position, token) in tokens.iter().enumerate().skip(cut) {
            let drawn = sampler.sample(&wide_logits(), &draw(&params, position), &mut resumed);
            assert_eq!(drawn, Ok(*token), "position {position} after {cut}");
        }
    }
}

#[test]
fn the_distribution_test_sees_what_is_off_by_a_fifth() {
    let logits = wide_logits();
    let params = SamplingParams::default();
    let flatter: Vec<f32> = logits.iter().map(|logit| logit / 1.2).collect();
    assert!(z_of(&logits, &expected(&flatter, &params), &params) > 10.0);
    let logits = peaked_logits();
    let half = SamplingParams { xtc_probability: 0.5, xtc_threshold: 0.1, ..params.clone() };
    let less = SamplingParams { xtc_probability: 0.4, ..half.clone() };
    assert!(z_of(&logits, &expected(&logits, &less), &half) > 10.0);
    let dynamic = SamplingParams { dynatemp_range: 0.5, ..params.clone() };
    let sharper = SamplingParams { dynatemp_exponent: 1.2, ..dynamic.clone() };
    assert!(z_of(&logits, &expected(&logits, &sharper), &dynamic) > 5.0);
}

/// All sampling parameters, each within its range.
fn any_params() -> impl Strategy<Value = SamplingParams> {
    let half_off = |off: f32, on: std::ops::Range<f32>| prop_oneof![Just(off), on];
    let mirostat = prop_oneof![
        3 => Just(None),
        1 => (any::<bool>(), 0.0..10.0_f32, 0.0..1.0_f32).prop_map(|(one, tau, eta)| {
            let version = if one { MirostatVersion::One } else { MirostatVersion::Two };
            Some(MirostatParams { version, tau, eta })
        }),
    ];
    let dry = prop_oneof![
        Just(None),
        (0.0..5.0_f32, 1.0..3.0_f32, 0..4_u32).prop_map(|(multiplier, base, allowed_length)| {
            Some(DryParams {
                multiplier,
                base,
                allowed_length,
                last_n: None,
                breakers: DryBreakers::default(),
            })
        }),
    ];
    let thinning = (
        half_off(0.0, 0.01..4.0),
        0..20_u32,
        half_off(1.0, 0.01..1.0),
        half_off(1.0, 0.01..1.0),
        half_off(0.0, 0.01..1.0),
        half_off(0.0, 0.01..1.0),
        0.0..0.6_f32,
    );
    let rest =
        (half_off(0.0, 0.01..2.0), half_off(0.0, 0.01..2.0), 0.0..3.0_f32, mirostat, dry, any::<u64>());
    (thinning, rest).prop_map(|(thinning, rest)| {
        let (top_n_sigma, top_k, typical_p, top_p, min_p, xtc_probability, xtc_threshold) = thinning;
        let (temperature, dynatemp_range, dynatemp_exponent, mirostat, dry, seed) = rest;
        SamplingParams {
            temperature,
            dynatemp_range,
            dynatemp_exponent,
            top_n_sigma,
            top_k,
            typical_p,
            top_p,
            min_p,
            xtc_probability,
            xtc_threshold,
            mirostat,
            dry,
            seed,
            ..SamplingParams::default()
        }
    })
}

/// Few distinct values, so that ties are frequent. Some tokens are impossible, but never all.
fn any_logits() -> impl Strategy<Value = Vec<f32>> {
    let logit = prop_oneof![4 => (-20..20_i8).prop_map(|v| f32::from(v) / 3.0), 1 => Just(f32::NEG_INFINITY)];
    prop::collection::vec(logit, 1..200).prop_map(|mut logits| {
        logits[0] = logits[0].max(-6.0);
        logits
    })
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(300))]

    #[test]
    fn no_token_outside_the_kept_set_is_drawn(logits in any_logits(), params in any_params()) {
        let params = SamplingParams { mirostat: None, dry: None, ..params };
        let tempered = |params: &SamplingParams| SamplingParams { temperature: 1.0, dynatemp_range: 0.0, ..params.clone() };
        // Rounding may move a filter's border by one token of the same or the next logit.
        let near = SamplingParams {
            top_n_sigma: if params.top_n_sigma > 0.0 { params.top_n_sigma + 1e-5 } else { 0.0 },
            typical_p: (params.typical_p + 1e-5).min(1.0),
            top_p: (params.top_p + 1e-5).min(1.0),
            min_p: (params.min_p - 1e-5).max(0.0),
            xtc_threshold: params.xtc_threshold + 1e-5,
            ..params.clone()
        };
        let further = SamplingParams { xtc_threshold: (params.xtc_threshold - 1e-5).max(0.0), ..near.clone() };
        let possible: Vec<f64> = [&params, &near, &further]
            .map(|params| expected(&logits, &tempered(params)))
            .iter()
            .fold(vec![0.0; logits.len()], |sum, one| sum.iter().zip(one).map(|(a, b)| a + b).collect());
        let mut sampler = Sampler::default();
        for position in 0..20 {
            let token = sample(&mut sampler, &logits, &params, position) as usize;
            if params.temperature == 0.0 {
                let best = logits.iter().copied().fold(f32::NEG_INFINITY, f32::max);
                prop_assert_eq!(token, logits.iter().position(|&logit| logit == best).unwrap());
            } else {
                // At typical's border, f32 rounding of equal distances decides ties.
                prop_assert!(possible[token] > 0.0 || params.typical_p < 1.0, "token {}", token);
            }
            prop_assert!(logits[token] > f32::NEG_INFINITY);
        }
    }

    /// No parameter, tie or impossible token causes a panic, an error or an impossible draw.
    #[test]
    fn the_only_possible_token_is_drawn_whatever_the_options(
        params in any_params(), size in 1..300_usize, at in any::<prop::sample::Index>(), value in -1e30..1e30_f32,
    ) {
        let at = at.index(size);
        let mut logits = vec![f32::NEG_INFINITY; size];
        logits[at] = value;
        prop_assert_eq!(sample(&mut Sampler::default(), &logits, &params, 3), at as u32);
    }

    /// The sampler's buffers carry no state from one draw to the next.
    #[test]
    fn a_draw_does_not_depend_on_earlier_draws(
        params in any_params(), other in any_params(), position in 0..100_000_usize,
    ) {
        let mut used = Sampler::default();
        for earlier in 0..5 {
            sample(&mut used, &wide_logits(), &other, earlier);
        }
        let fresh = sample(&mut Sampler::default(), &peaked_logits(), &params, position);
        prop_assert_eq!(sample(&mut used, &peaked_logits(), &params, position), fresh);
    }

    #[test]
    fn what_the_mask_does_not_allow_is_never_drawn(
        params in any_params(), logits in any_logits(), mask in prop::collection::vec(any::<u32>(), 0..8),
    ) {
        let allowed = |token: usize| {
            mask.get(token / 32).is_some_and(|word| word >> (token % 32) & 1 == 1)
        };
        let possible = (0..logits.len()).any(|token| allowed(token) && logits[token] > f32::NEG_INFINITY);
        for position in 0..10 {
            let draw = SampleContext { allowed: Some(&mask), ..draw(&params, position) };
            match Sampler::default().sample(&logits, &draw, &mut fresh(&params)) {
                Ok(token) => prop_assert!(allowed(token as usize)),
                Err(error) => prop_assert_eq!((error, possible), (SampleError::NothingLeft, false)),
            }
        }
    }
}

#[test]
fn bias_and_penalties_act_on_greedy_too() {
    let logits = [1.0, 3.0, 2.0];
    let mut sampler = Sampler::default();
    let mut greedy = |params: &SamplingParams, [prompt, output]: [&[u32]; 2], forbidden: &[u32]| {
        let mut history = History::new(params, prompt, output, &SamplerState::default()).unwrap();
        sampler.sample(&logits, &SampleContext { forbidden, ..draw(params, 0) }, &mut history)
    };
    let plain = SamplingParams::greedy();
    assert_eq!(greedy(&plain, [&[], &[]], &[]), Ok(1));
    assert_eq!(greedy(&plain, [&[], &[]], &[1]), Ok(2));
    assert_eq!(greedy(&plain, [&[], &[]], &[0, 1, 2]), Err(SampleError::NothingLeft));
    let biased = SamplingParams { logit_bias: vec![(0, 2.5)], ..plain.clone() };
    assert_eq!(greedy(&biased, [&[], &[]], &[]), Ok(0));
    let repeated = SamplingParams { repetition_penalty: 2.0, ..plain.clone() };
    assert_eq!(greedy(&repeated, [&[1], &[]], &[]), Ok(2));
    let present = SamplingParams { presence_penalty: 1.5, ..plain.clone() };
    assert_eq!(greedy(&present, [&[1], &[]], &[]), Ok(1));
    assert_eq!(greedy(&present, [&[], &[1]], &[]), Ok(2));
    let dry = DryParams {
        multiplier: 2.0,
        base: 2.0,
        allowed_length: 1,
        last_n: None,
        breakers: DryBreakers::default(),
    };
    let dry = SamplingParams { dry: Some(dry), ..plain };
    assert_eq!(greedy(&dry, [&[0, 1, 2], &[0]], &[]), Ok(2), "1 followed 0 before");
    assert_eq!(greedy(&dry, [&[2, 2], &[0]], &[]), Ok(1));
}

#[test]
fn a_drawn_token_counts_in_the_next_draw() {
    let params = SamplingParams { presence_penalty: 1.5, ..SamplingParams::greedy() };
    let mut history = fresh(&params);
    let mut sampler = Sampler::default();
    let mut next = |position| sampler.sample(&[1.0, 2.0, 1.9], &draw(&params, position), &mut history);
    assert_eq!([next(0), next(1), next(2)], [Ok(1), Ok(2), Ok(0)]);
}

#[test]
fn a_banned_token_is_never_drawn_and_logprobs_do_not_see_the_ban() {
    let logits = [5.0, 1.0, 0.0];
    let params = SamplingParams { logit_bias: vec![(0, -100.0)], ..SamplingParams::default() };
    let mut sampler = Sampler::default();
    for position in 0..1000 {
        assert_ne!(sample(&mut sampler, &logits, &params, position), 0);
    }
    assert_eq!(LogProbs::new(&logits).unwrap().top(1)[0].0, 0);
}

#[test]
fn broken_logits_are_refused_and_extremes_are_not() {
    let mut sampler = Sampler::default();
    let params = SamplingParams::default();
    let mut sample = |logits: &[f32], params: &SamplingParams| {
        sampler.sample(logits, &draw(params, 0), &mut fresh(params))
    };
    assert_eq!(sample(&[0.0, f32::NAN], &params), Err(SampleError::NotFinite { token: 1 }));
    assert_eq!(sample(&[f32::INFINITY, 0.0], &params), Err(SampleError::NotFinite { token: 0 }));
    assert_eq!(sample(&[f32::NEG_INFINITY; 3], &params), Err(SampleError::NothingLeft));
    assert_eq!(sample(&[f32::NEG_INFINITY, -1.0], &params), Ok(1));
    assert_eq!(sample(&[f32::MIN, f32::MAX], &params), Ok(1));
    let cold = SamplingParams { temperature: f32::MIN_POSITIVE, ..params.clone() };
    assert_eq!(sample(&[1.0, 1.000_001], &cold), Ok(1));
    let narrow = SamplingParams { top_p: f32::MIN_POSITIVE, min_p: 1.0, ..params };
    assert_eq!(sample(&[1.0, 2.0, 0.0], &narrow), Ok(1));
}

/// If k exceeds the number of possible tokens, top-k removes none. The entropy that the dynamic
/// temperature follows stays the same.
#[test]
fn a_dynamic_temperature_does_not_count_what_is_ruled_out() {
    let mut logits = peaked_logits()[..100].to_vec();
    logits[10..].fill(f32::NEG_INFINITY);
    let all = SamplingParams { dynatemp_range: 0.9, seed: 3, ..SamplingParams::default() };
    let best = SamplingParams { top_k: 50, ..all.clone() };
    let tokens = |params: &SamplingParams| -> Vec<u32> {
        (0..2_000).map(|position| sample(&mut Sampler::default(), &logits, params, position)).collect()
    };
    assert_eq!(tokens(&best), tokens(&all));
}

#[test]
fn a_huge_temperature_makes_all_that_is_left_equally_likely() {
    let logits = peaked_logits();
    let params = SamplingParams { temperature: 1e30, top_k: 50, seed: 3, ..SamplingParams::default() };
    let mut flat = vec![0.0; logits.len()];
    ranked(&logits)[..50].iter().for_each(|&id| flat[id] = 0.02);
    let z = z_of(&logits, &flat, &params);
    assert!(z.abs() < 3.3, "{z}");
}
