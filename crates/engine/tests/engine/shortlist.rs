// SPDX-License-Identifier: Apache-2.0

//! A token sampled from a row's shortlist equals the token sampled from the whole row, with any
//! parameters. If the shortlist does not determine the token, the sampler says so.

use engine::sample::draw::SampleContext;
use engine::sample::history::History;
use engine::sample::logprobs::{LogProbs, TokenLogProbs};
use engine::sample::sampler::Sampler;
use engine::{DryBreakers, DryParams, MirostatParams, MirostatVersion, SamplerState, SamplingParams};
use ops::softmax::SoftmaxWeights;
use ops::{DrawParams, SHORTLIST_LEN, Shortlist};
use proptest::prelude::*;

/// Prompt, output so far, and forbidden tokens.
#[derive(Clone, Debug, Default)]
struct HistoryInputs {
    prompt: Vec<u32>,
    output: Vec<u32>,
    forbidden: Vec<u32>,
}

impl HistoryInputs {
    fn history(&self, params: &SamplingParams) -> History {
        // An arbitrary mirostat bound, as a token frame may carry it.
        let bytes = if params.mirostat.is_some() { &4.0_f32.to_le_bytes()[..] } else { &[] };
        History::new(params, &self.prompt, &self.output, &SamplerState::from_bytes(bytes).unwrap()).unwrap()
    }

    fn draw<'a>(&'a self, params: &'a SamplingParams, position: usize) -> SampleContext<'a> {
        SampleContext { params, choice: 1, position, forbidden: &self.forbidden, allowed: None }
    }
}

/// Samples from the row and from its shortlist. `None` means that the row has no possible token, or
/// that the shortlist does not determine the token.
fn both(
    logits: &[f32],
    params: &SamplingParams,
    past: &HistoryInputs,
    position: usize,
) -> (Option<u32>, Option<u32>) {
    let (mut sampler, draw) = (Sampler::default(), past.draw(params, position));
    let mut history = past.history(params);
    let list_params = draw.shortlist_params(logits.len(), &history);
    let short = list_params.and_then(|list_params| {
        let mut list = Shortlist::default();
        list.fill(logits, &list_params, &mut SoftmaxWeights::default());
        sampler.sample_shortlist(&list, logits.len(), &draw, &history)
    });
    (sampler.sample(logits, &draw, &mut history).ok(), short)
}

/// Yields `off` half of the time.
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
        mirostat in prop_oneof![9 => Just(None), 1 => Just(Some(MirostatParams {
            version: MirostatVersion::Two, tau: 3.0, eta: 0.1,
        }))],
        repetition_penalty in prop_oneof![4 => Just(1.0), 2 => 1.0..2.0_f32, 1 => 0.5..1.0_f32],
        (presence_penalty, frequency_penalty) in (sometimes(0.0, -0.5..2.0_f32), sometimes(0.0, -0.1..1.0_f32)),
        dry in prop_oneof![3 => Just(None), 1 => (0..3_u32).prop_map(|allowed_length| Some(DryParams {
            multiplier: 0.8, base: 1.75, allowed_length, last_n: None, breakers: DryBreakers::new([vec![1]]),
        }))],
        logit_bias in prop_oneof![9 => Just(vec![]), 1 => (-5.0..5.0_f32).prop_map(|bias| vec![(0, bias)])],
        seed in any::<u64>(),
    ) -> SamplingParams {
        SamplingParams {
            repetition_penalty, presence_penalty, frequency_penalty, dry, logit_bias,
            temperature, top_k, top_p, typical_p, min_p, top_n_sigma, xtc_probability, xtc_threshold,
            dynatemp_range, dynatemp_exponent, mirostat, seed,
        }
    }
}

/// Three kinds of rows: smooth logits, few distinct values with many ties, and rows with impossible
/// tokens.
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

/// The history holds mainly the best tokens, so that penalties change which token is best.
fn any_past(logits: &[f32]) -> impl Strategy<Value = HistoryInputs> + use<> {
    let mut ids: Vec<u32> = (0..logits.len() as u32).collect();
    ids.sort_by(|&a, &b| logits[b as usize].total_cmp(&logits[a as usize]));
    let count = ids.len();
    let tokens = move |most: usize| {
        let ids = ids.clone();
        let one = prop_oneof![3 => 0..count.min(8), 2 => 0..count.min(300), 1 => 0..count];
        prop::collection::vec(one.prop_map(move |rank| ids[rank]), 0..most)
    };
    (tokens(20), tokens(60), prop_oneof![3 => Just(vec![]).boxed(), 1 => tokens(4).boxed()])
        .prop_map(|(prompt, output, forbidden)| HistoryInputs { prompt, output, forbidden })
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(4000))]

    #[test]
    fn the_shortlist_draws_what_the_row_draws(
        (logits, past) in any_logits().prop_flat_map(|logits| (any_past(&logits), Just(logits)))
            .prop_map(|(past, logits)| (logits, past)),
        params in any_params(),
        position in 0..100_usize,
    ) {
        let (token, short) = both(&logits, &params, &past, position);
        prop_assert!(short.is_none() || short == token, "{short:?}, of the row {token:?}");
    }

    #[test]
    fn log_probabilities_of_the_list_are_those_of_the_row(
        logits in any_logits(),
        token in any::<prop::sample::Index>(),
        top in 0..=20_u8,
    ) {
        let token = token.index(logits.len()) as u32;
        let mut list = Shortlist::default();
        list.fill(&logits, &DrawParams::default(), &mut SoftmaxWeights::default());
        let of_row = LogProbs::new(&logits).map(|row| row.of_token(token, top)).ok();
        let of_list = TokenLogProbs::of_list(&list, token, top);
        prop_assert_eq!(of_list.is_some(), list.best().iter().any(|listed| listed.id() == token));
        prop_assert!(of_list.is_none() || of_list == of_row, "{of_list:?}, of the row {of_row:?}");
    }
}

/// Parameters that most requests use.
#[test]
fn common_parameters_are_served_by_the_list() {
    // 20,000 tokens of which a few are likely, like a row of a confident model.
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
        SamplingParams { top_k: 20, top_p: 0.8, presence_penalty: 1.5, ..base.clone() },
        SamplingParams { top_k: 40, repetition_penalty: 1.1, frequency_penalty: 0.2, ..base.clone() },
        SamplingParams { repetition_penalty: 1.2, ..SamplingParams::greedy() },
    ] {
        let penalised = params.has_penalties();
        let past =
            HistoryInputs { output: (3..20_000).step_by(2 * 997).collect(), ..HistoryInputs::default() };
        let past = if penalised { past } else { HistoryInputs::default() };
        let mut drawn = std::collections::BTreeSet::new();
        for position in 0..300 {
            let (token, short) = both(&logits, &params, &past, position);
            assert!(short.is_some() && short == token, "{params:?}: {short:?}, of the row {token:?}");
            drawn.insert(token);
        }
        assert!(drawn.len() > 3 || params.temperature == 0.0, "{params:?} drew only {drawn:?}");
    }
}

#[test]
fn what_weighs_every_token_needs_the_row() {
    let base = SamplingParams { seed: 5, ..SamplingParams::default() };
    let mirostat = MirostatParams { version: MirostatVersion::One, tau: 3.0, eta: 0.1 };
    for params in [
        SamplingParams { top_n_sigma: 1.0, top_k: 40, ..base.clone() },
        SamplingParams { top_k: SHORTLIST_LEN as u32 + 1, ..base.clone() },
        SamplingParams { typical_p: 0.9, ..base.clone() },
        SamplingParams { xtc_probability: 1.0, ..base.clone() },
        SamplingParams { dynatemp_range: 0.5, ..base.clone() },
        SamplingParams { mirostat: Some(mirostat), top_k: 40, ..base.clone() },
        SamplingParams { top_p: 0.9, presence_penalty: 0.5, ..base.clone() },
        SamplingParams { frequency_penalty: 0.5, ..base.clone() },
        SamplingParams { top_k: 40, presence_penalty: -0.5, ..base.clone() },
        SamplingParams { top_k: 40, repetition_penalty: 0.9, ..base.clone() },
        SamplingParams { logit_bias: vec![(7, -1.0)], ..SamplingParams::greedy() },
    ] {
        let past = HistoryInputs { output: vec![1, 2], ..HistoryInputs::default() };
        let list_params = past.draw(&params, 3).shortlist_params(20_000, &past.history(&params));
        assert_eq!(list_params, None, "{params:?}");
    }
    // With equal logits, the shortlist is a small part of the tokens that top-p keeps.
    let params = SamplingParams { top_p: 0.9, ..base };
    assert_eq!(both(&[1.0; 5000], &params, &HistoryInputs::default(), 3).1, None);
}
