//! A token drawn from a row's shortlist is the token drawn from the row, whatever the parameters: where the list does not
//! show it, it says so.

#![expect(clippy::unwrap_used, reason = "a panic is how a test fails")]

use engine::sampler::{Draw, History, Sampler};
use engine::{Mirostat, MirostatVersion, SamplerState, SamplingParams};
use ops::weights::Weights;
use ops::{SHORTLIST_LEN, Shortlist};
use proptest::prelude::*;

fn draw(params: &SamplingParams, position: usize) -> Draw<'_> {
    Draw { params, choice: 1, position, ruled_out: &[], allowed: None }
}

/// The token of the row itself, and that of its shortlist.
fn both(logits: &[f32], params: &SamplingParams, position: usize) -> (u32, Option<u32>) {
    let (mut sampler, draw) = (Sampler::default(), draw(params, position));
    let mut history = History::new(params, &[], &[], &SamplerState::default()).unwrap();
    let token = sampler.sample(logits, &draw, &mut history).unwrap();
    let Some(weighing) = draw.weighing(logits.len()) else { return (token, None) };
    let mut list = Shortlist::default();
    list.fill(logits, &weighing, &mut Weights::default());
    (token, sampler.sample_shortlist(&list, logits.len(), &draw))
}

/// Half of the time `off`.
fn sometimes<T: Clone + std::fmt::Debug + 'static>(
    off: T,
    on: impl Strategy<Value = T> + 'static,
) -> impl Strategy<Value = T> {
    prop_oneof![Just(off), on]
}

prop_compose! {
    fn any_params()(
        temperature in prop_oneof![Just(0.0_f32), Just(1.0), 0.01..2.0_f32],
        top_k in sometimes(0, 1..400_u32),
        (top_p, typical_p) in (sometimes(1.0, 0.05..1.0_f32), prop_oneof![5 => Just(1.0), 1 => 0.05..1.0_f32]),
        min_p in sometimes(0.0, 0.001..0.5_f32),
        top_n_sigma in prop_oneof![5 => Just(0.0), 1 => 0.1..4.0_f32],
        (xtc_probability, xtc_threshold) in (sometimes(0.0, 0.0..1.0_f32), 0.0..0.6_f32),
        (dynatemp_range, dynatemp_exponent) in (sometimes(0.0, 0.0..1.0_f32), 0.1..3.0_f32),
        mirostat in prop_oneof![9 => Just(None), 1 => Just(Some(Mirostat {
            version: MirostatVersion::Two, tau: 3.0, eta: 0.1,
        }))],
        seed in any::<u64>(),
    ) -> SamplingParams {
        SamplingParams {
            temperature, top_k, top_p, typical_p, min_p, top_n_sigma, xtc_probability, xtc_threshold,
            dynatemp_range, dynatemp_exponent, mirostat, seed, ..SamplingParams::default()
        }
    }
}

/// Smooth ones, ones of few values so that ties are everywhere, and ones with tokens that are ruled out.
fn any_logits() -> impl Strategy<Value = Vec<f32>> {
    let some = |logit: BoxedStrategy<f32>| prop::collection::vec(logit, 1..1500);
    prop_oneof![
        some((-12.0..12.0_f32).boxed()),
        some((-5..5_i8).prop_map(|value| f32::from(value) * 2.0).boxed()),
        some(prop_oneof![Just(f32::NEG_INFINITY), -1.0..9.0_f32, Just(-0.0), Just(0.0)].boxed()),
    ]
    .prop_map(|mut logits| {
        logits[0] = logits[0].max(-12.0);
        logits
    })
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(2000))]

    #[test]
    fn the_shortlist_draws_what_the_row_draws(
        logits in any_logits(), params in any_params(), position in 0..100_usize,
    ) {
        let (token, short) = both(&logits, &params, position);
        prop_assert!(short.is_none_or(|short| short == token), "{short:?}, of the row {token}");
    }
}

/// Those that most requests have.
#[test]
fn common_parameters_are_served_by_the_list() {
    // 20,000 tokens of which the best few are likely, as of a model that knows what it says.
    let logits: Vec<f32> = (0..20_000_u32)
        .map(|id| {
            let noise = (id.wrapping_mul(2_654_435_761) >> 8) as f32 / 16_777_216.0;
            if id % 997 == 3 { 18.0 + 4.0 * noise } else { 6.0 * noise }
        })
        .collect();
    let base = SamplingParams { temperature: 0.8, seed: 5, ..SamplingParams::default() };
    for params in [
        SamplingParams::greedy(),
        base.clone(),
        SamplingParams { top_k: 40, top_p: 0.95, min_p: 0.05, ..base.clone() },
        SamplingParams { top_k: SHORTLIST_LEN as u32, typical_p: 0.9, ..base.clone() },
        SamplingParams { top_p: 0.9, ..base.clone() },
        SamplingParams { min_p: 0.05, dynatemp_range: 0.3, ..base.clone() },
        SamplingParams { top_p: 0.9, xtc_probability: 1.0, ..base.clone() },
    ] {
        let mut drawn = std::collections::BTreeSet::new();
        for position in 0..300 {
            let (token, short) = both(&logits, &params, position);
            assert_eq!(short, Some(token), "{params:?}");
            drawn.insert(token);
        }
        assert!(drawn.len() > 3 || params.temperature == 0.0, "{params:?} drew only {drawn:?}");
    }
}

#[test]
fn what_weighs_every_token_needs_the_row() {
    let base = SamplingParams { seed: 5, ..SamplingParams::default() };
    let mirostat = Mirostat { version: MirostatVersion::One, tau: 3.0, eta: 0.1 };
    for params in [
        SamplingParams { top_n_sigma: 1.0, top_k: 40, ..base.clone() },
        SamplingParams { top_k: SHORTLIST_LEN as u32 + 1, ..base.clone() },
        SamplingParams { typical_p: 0.9, ..base.clone() },
        SamplingParams { xtc_probability: 1.0, ..base.clone() },
        SamplingParams { dynatemp_range: 0.5, ..base.clone() },
        SamplingParams { mirostat: Some(mirostat), top_k: 40, ..base.clone() },
    ] {
        assert_eq!(draw(&params, 3).weighing(20_000), None, "{params:?}");
    }
    // Equal logits: a shortlist is a small part of what top-p keeps.
    let params = SamplingParams { top_p: 0.9, ..base };
    assert_eq!(both(&[1.0; 5000], &params, 3).1, None);
}
