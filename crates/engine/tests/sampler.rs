//! Distributions of drawn tokens against a chain written the long way: f64, one full sort, nothing clever.

#![expect(clippy::unwrap_used, reason = "a panic is how a test fails")]

use engine::SamplingParams;
use engine::sampler::{Draw, LogProbs, SampleError, Sampler, TokenCounts};
use proptest::prelude::*;

fn draw<'a>(params: &'a SamplingParams, position: usize) -> Draw<'a> {
    Draw { params, choice: 0, position, counts: None, ruled_out: &[] }
}

/// Probability of every token after truncation and temperature.
fn expected(logits: &[f32], params: &SamplingParams) -> Vec<f64> {
    let mut kept: Vec<usize> = (0..logits.len()).collect();
    kept.sort_by(|&a, &b| logits[b].total_cmp(&logits[a]).then(a.cmp(&b)));
    if params.top_k > 0 {
        kept.truncate(params.top_k as usize);
    }
    let softmax = |kept: &[usize], temperature: f64| -> Vec<f64> {
        let max = f64::from(logits[kept[0]]);
        let weights: Vec<f64> =
            kept.iter().map(|&id| ((f64::from(logits[id]) - max) / temperature).exp()).collect();
        let total: f64 = weights.iter().sum();
        weights.iter().map(|weight| weight / total).collect()
    };
    let mut sum = 0.0;
    let reached = softmax(&kept, 1.0).iter().position(|probability| {
        sum += probability;
        sum >= f64::from(params.top_p)
    });
    kept.truncate(reached.map_or(kept.len(), |last| last + 1));
    let highest = softmax(&kept, 1.0)[0];
    let above: Vec<bool> =
        softmax(&kept, 1.0).iter().map(|&p| p >= f64::from(params.min_p) * highest).collect();
    kept.truncate(above.iter().filter(|&&above| above).count());
    let mut probabilities = vec![0.0; logits.len()];
    let temperature = f64::from(params.temperature);
    for (&id, probability) in kept.iter().zip(softmax(&kept, temperature)) {
        probabilities[id] = probability;
    }
    probabilities
}

/// 2,500 logits in some disorder, the probability falling over a few hundred of them.
fn wide_logits() -> Vec<f32> {
    (0..2500_u32).map(|id| -((id.wrapping_mul(7919) % 2500) as f32) * 0.012).collect()
}

/// The chi-squared statistic of `draws` tokens, cells below 8 expected draws put together, as a z-score
/// (Wilson and Hilferty). Keyed draws make the result the same in every run.
fn z_score(logits: &[f32], probabilities: &[f64], params: &SamplingParams, draws: usize) -> f64 {
    let mut counts = vec![0_usize; logits.len()];
    let mut sampler = Sampler::default();
    for position in 0..draws {
        counts[sampler.sample(logits, &draw(params, position)).unwrap() as usize] += 1;
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
    ((chi / freedom).cbrt() - (1.0 - 2.0 / (9.0 * freedom))) / (2.0 / (9.0 * freedom)).sqrt()
}

#[test]
fn drawn_tokens_follow_the_distribution() {
    let base = SamplingParams { seed: 11, ..SamplingParams::default() };
    let logits = wide_logits();
    for params in [
        base.clone(),
        SamplingParams { temperature: 0.7, ..base.clone() },
        SamplingParams { temperature: 1.8, ..base.clone() },
        SamplingParams { top_k: 40, ..base.clone() },
        SamplingParams { top_p: 0.9, ..base.clone() },
        // Needs more candidates than top-p sorts at first.
        SamplingParams { top_p: 0.5, temperature: 1.3, ..base.clone() },
        SamplingParams { min_p: 0.1, ..base.clone() },
        SamplingParams { top_k: 300, top_p: 0.8, min_p: 0.2, temperature: 0.6, ..base.clone() },
    ] {
        let z = z_score(&logits, &expected(&logits, &params), &params, 20_000);
        assert!(z.abs() < 3.3, "{params:?}: chi-squared is {z} standard deviations off");
    }
}

#[test]
fn the_distribution_test_sees_a_temperature_that_is_off_by_a_fifth() {
    let logits = wide_logits();
    let params = SamplingParams::default();
    let flatter: Vec<f32> = logits.iter().map(|logit| logit / 1.2).collect();
    assert!(z_score(&logits, &expected(&flatter, &params), &params, 20_000) > 10.0);
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(300))]

    #[test]
    fn no_token_outside_the_kept_set_is_drawn(
        logits in prop::collection::vec((-20..20_i8).prop_map(|v| f32::from(v) / 3.0), 2..200),
        top_k in 0..20_u32,
        top_p in prop_oneof![Just(1.0_f32), 0.01..1.0_f32],
        min_p in prop_oneof![Just(0.0_f32), 0.01..1.0_f32],
        temperature in prop_oneof![Just(0.0_f32), 0.01..2.0_f32],
        seed in any::<u64>(),
    ) {
        let params = SamplingParams { temperature, top_k, top_p, min_p, seed, ..SamplingParams::default() };
        let probabilities = expected(&logits, &SamplingParams { temperature: 1.0, ..params.clone() });
        let mut sampler = Sampler::default();
        for position in 0..20 {
            let token = sampler.sample(&logits, &draw(&params, position)).unwrap();
            let probability = probabilities[token as usize];
            // Rounding may move the border of top-p and min-p by a token of the same or the next logit.
            let near = SamplingParams {
                top_p: (params.top_p + 1e-5).min(1.0),
                min_p: (params.min_p - 1e-5).max(0.0),
                temperature: 1.0,
                ..params.clone()
            };
            prop_assert!(probability > 0.0 || expected(&logits, &near)[token as usize] > 0.0);
            if temperature == 0.0 {
                let best = logits.iter().copied().fold(f32::NEG_INFINITY, f32::max);
                prop_assert_eq!(token as usize, logits.iter().position(|&logit| logit == best).unwrap());
            }
        }
    }

    /// The buffers carry nothing from one draw to the next.
    #[test]
    fn a_draw_does_not_depend_on_earlier_draws(
        top_k in 0..50_u32, top_p in 0.1..1.0_f32, seed in any::<u64>(), position in 0..100_000_usize,
    ) {
        let params = SamplingParams { top_k, top_p, seed, ..SamplingParams::default() };
        let mut used = Sampler::default();
        for earlier in 0..5 {
            used.sample(&wide_logits(), &draw(&SamplingParams::default(), earlier)).unwrap();
        }
        let fresh = Sampler::default().sample(&wide_logits(), &draw(&params, position));
        prop_assert_eq!(used.sample(&wide_logits(), &draw(&params, position)), fresh);
    }
}

#[test]
fn bias_and_penalties_act_on_greedy_too() {
    let logits = [1.0, 3.0, 2.0];
    let mut sampler = Sampler::default();
    let mut greedy = |params: &SamplingParams, counts: Option<&TokenCounts>, ruled_out: &[u32]| {
        sampler.sample(&logits, &Draw { params, choice: 0, position: 0, counts, ruled_out })
    };
    let plain = SamplingParams::greedy();
    assert_eq!(greedy(&plain, None, &[]), Ok(1));
    assert_eq!(greedy(&plain, None, &[1]), Ok(2));
    assert_eq!(greedy(&plain, None, &[0, 1, 2]), Err(SampleError::NothingLeft));
    let biased = SamplingParams { logit_bias: vec![(0, 2.5)], ..plain.clone() };
    assert_eq!(greedy(&biased, None, &[]), Ok(0));
    let repeated = SamplingParams { repetition_penalty: 2.0, ..plain.clone() };
    assert_eq!(greedy(&repeated, Some(&TokenCounts::new(&[1], &[])), &[]), Ok(2));
    let present = SamplingParams { presence_penalty: 1.5, ..plain };
    assert_eq!(greedy(&present, Some(&TokenCounts::new(&[1], &[])), &[]), Ok(1));
    assert_eq!(greedy(&present, Some(&TokenCounts::new(&[], &[1])), &[]), Ok(2));
}

#[test]
fn a_banned_token_is_never_drawn_and_logprobs_do_not_see_the_ban() {
    let logits = [5.0, 1.0, 0.0];
    let params = SamplingParams { logit_bias: vec![(0, -100.0)], ..SamplingParams::default() };
    let mut sampler = Sampler::default();
    for position in 0..1000 {
        assert_ne!(sampler.sample(&logits, &draw(&params, position)), Ok(0));
    }
    assert_eq!(LogProbs::new(&logits).unwrap().top(1)[0].0, 0);
}

#[test]
fn broken_logits_are_refused_and_extremes_are_not() {
    let mut sampler = Sampler::default();
    let params = SamplingParams::default();
    let mut sample = |logits: &[f32], params: &SamplingParams| sampler.sample(logits, &draw(params, 0));
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
