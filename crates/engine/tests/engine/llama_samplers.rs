// SPDX-License-Identifier: Apache-2.0

//! Compares the sampler with llama.cpp's samplers: which tokens of a row remain, and how probable
//! each of them is.
//!
//! `bench/src/bin/sampler_goldens.rs` wrote the fixture. The sampled token is a step function of
//! one random number, and the test computes that number with [`RandomStream`]. The test probes each
//! step of the function from both sides. A missing token, an extra token or a probability that is
//! off by more than [`TOLERANCE`] gives an unexpected token.
//!
//! - [`DEVIATIONS`] lists the intended differences.
//! - Among tokens of equal logits, the test chooses those that remain.
//! - XTC always or never acts here, since the random number that decides it is not llama.cpp's.

use engine::sample::draw::SampleContext;
use engine::sample::history::History;
use engine::sample::random::{RandomPurpose, RandomStream};
use engine::sample::sampler::Sampler;
use engine::{DryBreakers, DryParams, MirostatParams, MirostatVersion, SamplerState, SamplingParams};
use std::collections::{BTreeMap, BTreeSet};
use std::str::FromStr;

const FIXTURE: &str = include_str!("../data/llama_samplers.txt");
const SEED: u64 = 7;
/// Largest error of a running sum of probabilities. llama.cpp sums up to 100 tokens in f32: 100
/// roundings of 2^-24 are 6e-6. On both sides, temperature, logits and exponentials are off by some
/// units in the last place.
const TOLERANCE: f64 = 1e-5;
/// Positions to choose from. Neighbouring random numbers differ by 1e-6 on average, and by less
/// than 2e-5 at most.
const POSITIONS: usize = 1 << 20;
/// Every token in the fixture has a higher probability, so that the probes hit it.
const RAREST: f64 = 9e-5;
/// Cases in which the sampler differs on purpose. The head of `src/sample/sampler.rs` gives the
/// reasons.
const DEVIATIONS: [&str; 3] = ["greedy", "prompt", "ruled-out"];

/// Options of one case, and the remaining tokens of the row for each sampled token.
struct SamplerCase {
    text: &'static str,
    row: &'static str,
    options: BTreeMap<&'static str, &'static str>,
    steps: Vec<ExpectedSample>,
}

#[derive(Clone)]
struct ExpectedSample {
    /// Remaining tokens with their probabilities, in order of rising id.
    left: Vec<(u32, f64)>,
    drawn: Option<u32>,
}

impl SamplerCase {
    fn parse(line: &'static str) -> Self {
        let mut parts = line.split(" |");
        let text = parts.next().unwrap();
        let (row, options) = text.split_once(' ').unwrap();
        let options = options.split(' ').map(|option| option.split_once('=').unwrap()).collect();
        Self { text, row, options, steps: parts.map(ExpectedSample::parse).collect() }
    }

    fn number<T: FromStr<Err: std::fmt::Debug>>(&self, name: &str, off: T) -> T {
        self.options.get(name).map_or(off, |text| text.parse().unwrap())
    }

    fn list(&self, name: &str) -> impl Iterator<Item = &'static str> {
        self.options.get(name).into_iter().flat_map(|list| list.split(','))
    }

    fn tokens(&self, name: &str) -> Vec<u32> {
        self.list(name).map(|token| token.parse().unwrap()).collect()
    }

    fn params(&self) -> SamplingParams {
        let mirostat = self.options.get("mirostat").map(|&version| MirostatParams {
            version: if version == "1" { MirostatVersion::One } else { MirostatVersion::Two },
            tau: self.number("tau", 5.0),
            eta: self.number("eta", 0.1),
        });
        let breakers = self
            .list("breakers")
            .map(|tokens| tokens.split('.').map(|token| token.parse().unwrap()).collect());
        let dry = self.options.get("dry").map(|multiplier| DryParams {
            multiplier: multiplier.parse().unwrap(),
            base: self.number("base", 1.75),
            allowed_length: self.number("allowed", 2),
            last_n: self.options.get("last_n").map(|last_n| last_n.parse().unwrap()),
            breakers: DryBreakers::new(breakers),
        });
        let bias = |bias: &str| {
            let (token, bias) = bias.split_once(':').unwrap();
            (token.parse().unwrap(), bias.parse().unwrap())
        };
        let xtc = self.options.contains_key("xtc");
        SamplingParams {
            temperature: self.number("temperature", 1.0),
            dynatemp_range: self.number("range", 0.0),
            dynatemp_exponent: self.number("exponent", 1.0),
            top_n_sigma: self.number("sigma", 0.0),
            top_k: self.number("top_k", 0),
            typical_p: self.number("typical", 1.0),
            top_p: self.number("top_p", 1.0),
            min_p: self.number("min_p", 0.0),
            xtc_probability: self.number("xtc_probability", if xtc { 1.0 } else { 0.0 }),
            xtc_threshold: self.number("xtc", 0.1),
            mirostat,
            repetition_penalty: self.number("repeat", 1.0),
            presence_penalty: self.number("presence", 0.0),
            frequency_penalty: self.number("frequency", 0.0),
            dry,
            logit_bias: self.list("bias").map(bias).collect(),
            seed: SEED,
        }
    }

    /// Returns `None` if the sampled tokens are those that llama.cpp leaves, else the first
    /// difference.
    fn difference(&self, logits: &[f32], probe: &Probe) -> Option<String> {
        let params = self.params();
        assert_eq!(params.check(logits.len()), Ok(()), "{}", self.text);
        let (prompt, output) = (self.tokens("prompt"), self.tokens("output"));
        let mut history = History::new(&params, &prompt, &output, &SamplerState::default()).unwrap();
        for (index, step) in self.steps.iter().enumerate() {
            let step = step.of_lowest_ids(logits, self.options.contains_key("xtc"));
            if let Some(difference) = probe.difference(logits, &params, &history, &step.left) {
                return Some(format!("token {index}: {difference}"));
            }
            if let Some(drawn) = step.drawn {
                let position = probe.position_of(&step.left, drawn);
                let token = sample(logits, &params, position, &mut history);
                assert_eq!(token, drawn, "{}", self.text);
            }
        }
        None
    }
}

impl ExpectedSample {
    fn parse(text: &str) -> Self {
        let token = |text: &str| {
            let (id, probability) = text.trim_start_matches('*').split_once(':').unwrap();
            (id.parse().unwrap(), probability.parse().unwrap())
        };
        let left: Vec<(u32, f64)> = text.split_whitespace().map(token).collect();
        assert!(left.iter().all(|&(_, probability)| probability > RAREST), "{text}");
        let drawn = text.split_whitespace().find(|text| text.starts_with('*')).map(|text| token(text).0);
        Self { left, drawn }
    }

    /// If a filter's border falls between equal logits, llama.cpp's sort decides which of them
    /// stay, in no guaranteed order. This sampler keeps those of lowest id. Behind XTC, which
    /// removes the best tokens first, this sampler keeps those of highest id.
    fn of_lowest_ids(&self, logits: &[f32], highest: bool) -> Self {
        let mut left = self.left.clone();
        for at in 0..left.len() {
            let logit = logits[self.left[at].0 as usize];
            let equal = |id: &u32| logits[*id as usize] == logit;
            let ids: Vec<u32> = (0..logits.len() as u32).filter(equal).collect();
            let of_them = self.left.iter().filter(|(id, _)| equal(id)).count();
            let before = self.left[..at].iter().filter(|(id, _)| equal(id)).count();
            let first = if highest { ids.len() - of_them } else { 0 };
            left[at].0 = ids[first + before];
        }
        left.sort_unstable_by_key(|&(id, _)| id);
        Self { left, drawn: self.drawn }
    }
}

/// Positions, sorted by the random numbers that are drawn there.
struct Probe(Vec<(f64, usize)>);

impl Probe {
    fn new() -> Self {
        let stream = RandomStream { seed: SEED, choice: 0 };
        let uniform = |position| (stream.uniform(position as u64, RandomPurpose::Token), position);
        let mut numbers: Vec<(f64, usize)> = (0..POSITIONS).map(uniform).collect();
        numbers.sort_unstable_by(|a, b| a.0.total_cmp(&b.0));
        Self(numbers)
    }

    /// Positions of the first number from `low` on and of the last number below `high`.
    fn ends(&self, low: f64, high: f64) -> [usize; 2] {
        let first = self.0.partition_point(|&(number, _)| number < low);
        let last = self.0.partition_point(|&(number, _)| number < high) - 1;
        assert!(first <= last, "no number in {low} to {high}");
        [self.0[first].1, self.0[last].1]
    }

    /// A position at which the sampler draws `token`.
    fn position_of(&self, left: &[(u32, f64)], token: u32) -> usize {
        let before: f64 =
            left.iter().take_while(|&&(id, _)| id != token).map(|(_, probability)| probability).sum();
        self.ends(before + TOLERANCE, 1.0)[0]
    }

    fn difference(
        &self,
        logits: &[f32],
        params: &SamplingParams,
        history: &History,
        left: &[(u32, f64)],
    ) -> Option<String> {
        let mut sum = 0.0;
        for &(id, probability) in left {
            for position in self.ends(sum + TOLERANCE, sum + probability - TOLERANCE) {
                let token = sample(logits, params, position, &mut history.clone());
                if token != id {
                    return Some(format!("{token} is drawn, not {id} of {probability} after {sum}"));
                }
            }
            sum += probability;
        }
        assert!((sum - 1.0).abs() < TOLERANCE, "probabilities of the fixture add up to {sum}");
        None
    }
}

fn sample(logits: &[f32], params: &SamplingParams, position: usize, history: &mut History) -> u32 {
    let draw = SampleContext { params, choice: 0, position, forbidden: &[], allowed: None };
    Sampler::default().sample(logits, &draw, history).unwrap()
}

fn fixture() -> (BTreeMap<&'static str, Vec<f32>>, Vec<SamplerCase>) {
    let (mut rows, mut cases) = (BTreeMap::new(), Vec::new());
    for line in FIXTURE.lines().filter(|line| !line.starts_with('#')) {
        match line.strip_prefix("row ") {
            Some(row) => {
                let (name, logits) = row.split_once(' ').unwrap();
                rows.insert(name, logits.split(' ').map(|logit| logit.parse().unwrap()).collect());
            }
            None => cases.push(SamplerCase::parse(line)),
        }
    }
    (rows, cases)
}

#[test]
fn what_is_left_of_a_row_is_what_llama_cpp_leaves() {
    let (rows, cases) = fixture();
    let probe = Probe::new();
    let same = |case: &&SamplerCase| !case.options.contains_key("deviation");
    let differs =
        |case: &SamplerCase| Some(format!("{}: {}", case.text, case.difference(&rows[case.row], &probe)?));
    let differing: Vec<String> = cases.iter().filter(same).filter_map(differs).collect();
    assert!(differing.is_empty(), "{}", differing.join("\n"));
    assert!(cases.iter().filter(same).count() > 200);
}

/// Every case that is marked as a deviation still differs.
#[test]
fn what_deviates_by_name_does() {
    let (rows, cases) = fixture();
    let probe = Probe::new();
    let mut seen = BTreeSet::new();
    for case in &cases {
        if let Some(&name) = case.options.get("deviation") {
            assert!(case.difference(&rows[case.row], &probe).is_some(), "{} does not", case.text);
            seen.insert(name);
        }
    }
    assert_eq!(seen.into_iter().collect::<Vec<_>>(), DEVIATIONS);
}

#[test]
fn the_comparison_sees_one_token_more_or_less_and_a_hundredth_of_a_percent() {
    let (rows, cases) = fixture();
    let probe = Probe::new();
    let case = cases.iter().find(|case| case.text == "random top_p=0.5").unwrap();
    let [ExpectedSample { left, .. }] = &case.steps[..] else { panic!("{}", case.text) };
    let wrong = |left: Vec<(u32, f64)>| {
        let total: f64 = left.iter().map(|(_, probability)| probability).sum();
        let left = left.into_iter().map(|(id, probability)| (id, probability / total)).collect();
        let case = SamplerCase {
            options: case.options.clone(),
            steps: vec![ExpectedSample { left, drawn: None }],
            ..*case
        };
        case.difference(&rows[case.row], &probe).is_some()
    };
    assert!(!wrong(left.clone()));
    let mut one_less = left.clone();
    one_less.pop();
    assert!(wrong(one_less));
    let more = (0..40).find(|id| left.iter().all(|(there, _)| there != id)).unwrap();
    let mut one_more = [&left[..], &[(more, 4e-4)]].concat();
    one_more.sort_unstable_by_key(|&(id, _)| id);
    assert!(wrong(one_more));
    let mut off = left.clone();
    (off[0].1, off[1].1) = (off[0].1 + 1e-4, off[1].1 - 1e-4);
    assert!(wrong(off));
}
