// SPDX-License-Identifier: Apache-2.0

//! Writes the results of llama.cpp's samplers on rows of logits: each sampler alone, and several in
//! the order of its default chain (`samplers` in `common/common.h`). The output is the fixture of
//! `crates/engine/tests/engine/llama_samplers.rs`.
//!
//!     cargo run --release --bin sampler_goldens -- ../demo/pycoder-7m-q8_0.gguf \
//!         > ../crates/engine/tests/data/llama_samplers.txt
//!
//! The model file only provides the token sequences of DRY's breakers.

#![forbid(unsafe_code)]

use anyhow::{Context, Result, ensure};
use llama_cpp_2::llama_backend::LlamaBackend;
use llama_cpp_2::model::LlamaModel;
use llama_cpp_2::model::params::LlamaModelParams;
use llama_cpp_2::sampling::LlamaSampler;
use llama_cpp_2::token::LlamaToken;
use llama_cpp_2::token::data::LlamaTokenData;
use llama_cpp_2::token::data_array::LlamaTokenDataArray;
use llama_cpp_2::token::logit_bias::LlamaLogitBias;
use std::str::FromStr;

/// A token below GONE counts as removed; the test can verify a token above SEEN. No probability may
/// lie between the two.
const GONE: f32 = 1e-8;
const SEEN: f32 = 1e-4;
/// Tokens that mirostat draws from one row.
const MIROSTAT_STEPS: usize = 6;
const HEAD: &str = "\
# What the samplers of llama.cpp leave, by bench/src/bin/sampler_goldens.rs with llama-cpp-2 0.1.160 (llama-cpp-sys-2 0.1.161).
# row NAME LOGIT ...
# NAME OPTION=VALUE ... | ID:PROBABILITY ... | ... (mirostat: one part for each token, * before the drawn one)";

/// For rows with distinct logits and no masked token.
const DISTINCT: [&str; 53] = [
    "temperature=1",
    "temperature=0.8",
    "temperature=2",
    "temperature=0",
    "temperature=0 top_k=5 top_p=0.5 min_p=0.2 sigma=1",
    "sigma=0.5",
    "sigma=1",
    "sigma=1.7",
    "top_k=1",
    "top_k=7",
    "top_k=1000",
    "typical=0.2",
    "typical=0.5",
    "typical=0.95",
    "top_p=0.05",
    "top_p=0.5",
    "top_p=0.95",
    "min_p=0.05",
    "min_p=0.3",
    "min_p=1",
    "xtc=0.03",
    "xtc=0.1",
    "xtc=0.5",
    "xtc=0.03 xtc_probability=0",
    "range=0.5",
    "temperature=1.2 range=0.8 exponent=2",
    "temperature=1 range=1.5 exponent=0.5",
    "range=0.4 exponent=0",
    // Two samplers whose order matters.
    "sigma=1.2 top_p=0.8",
    "sigma=1.5 top_k=9",
    "top_k=10 typical=0.6",
    "top_k=10 top_p=0.6",
    "typical=0.6 top_p=0.7",
    "typical=0.8 min_p=0.4",
    "top_p=0.8 min_p=0.2",
    "top_p=0.7 xtc=0.1",
    "min_p=0.2 xtc=0.1",
    "min_p=0.1 temperature=1.5 range=0.5",
    "sigma=1 top_k=6 typical=0.7",
    "sigma=2.2 top_k=12 typical=0.9 top_p=0.9 min_p=0.05 xtc=0.12 temperature=0.9 range=0.3",
    "bias=4:3.5,7:-100,11:1 top_k=5",
    "output=3,3,3,9,20 repeat=1.4",
    "output=3,3,3,9,20 repeat=0.8",
    "prompt=3,9,9 output=20,3 repeat=1.4",
    "output=3,3,3,9,20 presence=0.7",
    "output=3,3,3,9,20 frequency=0.3",
    "output=3,3,3,9,20 frequency=-0.3 presence=-0.2",
    "output=3,3,3,9,20 repeat=1.3 frequency=0.2 presence=0.5 top_k=8",
    "output=3,3,3,9,20 bias=3:2,9:-1 repeat=1.5 sigma=1",
    "prompt=7,8,9,10,15,8,9,11 output=7,8,9 dry=0.4 base=1.75 allowed=2",
    "prompt=7,8,9,10,15,8,9,11 output=7,8,9 dry=0.4 base=1.75 allowed=1 last_n=9",
    "prompt=7,8,9,10,15,8,9,11 output=7,8,9 dry=0.4 base=1.5 allowed=1 break=7",
    "output=7,8,9,10,15,8,9,11,7,8,9 frequency=0.1 dry=0.3 base=1.75 allowed=1 break=15.8,12 top_k=12 top_p=0.9",
];
/// For rows with many equal logits.
const TIES: [&str; 12] = [
    "temperature=1",
    "temperature=0",
    "sigma=1",
    "top_k=5",
    "typical=0.5",
    "top_p=0.5",
    "min_p=0.5",
    "min_p=1",
    "xtc=0.02",
    "xtc=0.03125",
    "temperature=1 range=0.5",
    "output=0,1,1 frequency=0.25 presence=0.5",
];
/// For rows of one or two tokens, rows with one dominant token, and rows with masked tokens.
const ODD: [&str; 15] = [
    "temperature=1",
    "temperature=1.7",
    "temperature=0",
    "sigma=1",
    "top_k=1",
    "top_k=2",
    "top_k=15 typical=0.6",
    "top_p=0.3",
    "top_p=0.9",
    "min_p=0.1",
    "min_p=0.7",
    "xtc=0.2",
    "top_p=0.95 xtc=0.1",
    "min_p=0.01 range=0.6",
    "output=0,0 repeat=1.2 frequency=0.3 presence=0.1",
];
const WIDE: [&str; 8] = [
    "top_k=70",
    "top_p=0.25",
    "typical=0.2",
    "min_p=0.5",
    "sigma=0.4",
    "typical=0.4 top_p=0.5 min_p=0.1",
    "top_k=90 typical=0.5 xtc=0.02",
    "min_p=0.4 temperature=0.9 range=0.5",
];
const MIROSTAT: [&str; 6] = [
    "mirostat=1 tau=3 eta=0.1",
    "mirostat=1 tau=2 eta=0.9",
    "mirostat=1 tau=2.5 eta=0.5 temperature=0.8",
    "mirostat=2 tau=3 eta=0.1",
    "mirostat=2 tau=1.5 eta=0.9",
    "mirostat=2 tau=2 eta=0.6 temperature=0.8",
];
/// Cases in which Ballast deviates from llama.cpp: the row and its options. The test lists the
/// reasons by name.
const DEVIATIONS: [(&str, &str); 9] = [
    ("random", "deviation=greedy temperature=0 typical=0.2"),
    ("random", "deviation=greedy temperature=0 xtc=0.03"),
    ("random", "deviation=greedy temperature=0 range=0.5 top_k=3"),
    ("random", "deviation=prompt prompt=3,3,9 output=20 presence=0.7"),
    ("random", "deviation=prompt prompt=3,3,9 output=20 frequency=0.3"),
    ("random", "deviation=ruled-out sigma=1 range=0.5"),
    ("ruled-out", "deviation=ruled-out range=0.5"),
    ("random", "deviation=ruled-out sigma=1 typical=0.5"),
    ("ruled-out", "deviation=ruled-out mirostat=1 tau=2 eta=0.1"),
];

fn main() -> Result<()> {
    let path = std::env::args().nth(1).context("the path of a GGUF file with a vocabulary is missing")?;
    let mut backend = LlamaBackend::init()?;
    backend.void_logs();
    let vocabulary = LlamaModelParams::default().with_vocab_only(true);
    let model = LlamaModel::load_from_file(&backend, &path, &vocabulary).with_context(|| path.clone())?;

    println!("{HEAD}");
    let mut random = LinearCongruential(20_240_229);
    let rows = [
        ("random", random.logits(40, -2.5, 2.5), [&DISTINCT[..], &MIROSTAT].concat()),
        // Negative logits only, because penalties multiply them.
        ("cold", random.logits(33, -5.0, -1.5), DISTINCT.to_vec()),
        // At a temperature below 1, the rarest remaining token would fall below SEEN.
        ("wide", random.logits(300, -3.0, 1.5), [&WIDE[..], &MIROSTAT[..2], &MIROSTAT[3..5]].concat()),
        (
            "ties",
            random.logits(32, 0.0, 4.0).iter().map(|logit| logit.floor() / 2.0).collect(),
            TIES.to_vec(),
        ),
        ("flat", vec![0.3; 32], TIES.to_vec()),
        ("one", vec![-7.5], ODD.to_vec()),
        ("two", vec![-0.25, 0.5], ODD.to_vec()),
        ("equal", vec![1.5; 2], ODD.to_vec()),
        ("dominant", dominant(random.logits(24, -1.0, 1.0), 4.0), [&ODD[..], &MIROSTAT].concat()),
        ("alone", dominant(random.logits(24, -1.0, 1.0), 60.0), ODD.to_vec()),
        ("ruled-out", ruled_out(random.logits(30, -2.0, 2.0)), [&ODD[..], &MIROSTAT[3..]].concat()),
    ];
    for (name, logits, cases) in rows {
        let text: Vec<String> = logits.iter().map(f32::to_string).collect();
        println!("row {name} {}", text.join(" "));
        let deviations = DEVIATIONS.iter().filter(|(row, _)| *row == name).map(|(_, case)| *case);
        for case in cases.into_iter().chain(deviations) {
            write(&model, name, &logits, case).with_context(|| format!("{name} {case}"))?;
        }
    }
    Ok(())
}

fn dominant(mut logits: Vec<f32>, logit: f32) -> Vec<f32> {
    logits[5] = logit;
    logits
}

/// Masks every third token, among them the most likely one.
fn ruled_out(mut logits: Vec<f32>) -> Vec<f32> {
    logits[0] = 3.0;
    logits.iter_mut().step_by(3).for_each(|logit| *logit = f32::NEG_INFINITY);
    logits
}

/// Knuth's linear congruential generator; uses the upper half.
struct LinearCongruential(u64);

impl LinearCongruential {
    fn logits(&mut self, count: usize, low: f32, high: f32) -> Vec<f32> {
        let mut next = || {
            self.0 = self.0.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
            (self.0 >> 40) as f32 / (1_u32 << 24) as f32
        };
        (0..count).map(|_| low + (high - low) * next()).collect()
    }
}

/// Options `name=value`, separated by spaces.
#[derive(Clone, Copy)]
struct SamplerCase<'a>(&'a str);

impl<'a> SamplerCase<'a> {
    fn text(self, name: &str) -> Option<&'a str> {
        self.0.split(' ').find_map(|option| option.strip_prefix(name)?.strip_prefix('='))
    }

    fn list(self, name: &str) -> Vec<&'a str> {
        self.text(name).map(|list| list.split(',').collect()).unwrap_or_default()
    }

    fn number<T: FromStr>(self, name: &str, off: T) -> Result<T, T::Err> {
        self.text(name).map_or(Ok(off), str::parse)
    }

    fn tokens(self, name: &str) -> Result<Vec<LlamaToken>> {
        self.list(name).into_iter().map(|token| Ok(LlamaToken(token.parse()?))).collect()
    }
}

fn write(model: &LlamaModel, row: &str, logits: &[f32], text: &str) -> Result<()> {
    let case = SamplerCase(text);
    let breakers = breakers(model, case)?;
    let sequences = token_sequences(model, &breakers, logits.len())?;
    let mut line = format!("{row} {text}");
    if !sequences.is_empty() {
        line += &format!(" breakers={}", sequences.join(","));
    }
    let mut chain = chain(model, case, logits.len(), &breakers)?;
    let draws = case.text("mirostat").is_some();
    for _ in 0..if draws { MIROSTAT_STEPS } else { 1 } {
        let data = logits.iter().zip(0..).map(|(&logit, id)| LlamaTokenData::new(LlamaToken(id), logit, 0.0));
        let mut data = LlamaTokenDataArray::from_iter(data, false);
        chain.iter_mut().for_each(|sampler| data.apply_sampler(sampler));
        let drawn = data.selected_token().filter(|_| draws);
        let mut left: Vec<(LlamaToken, f32)> =
            data.data.iter().map(|token| (token.id(), token.p())).collect();
        left.retain(|&(_, probability)| probability > GONE);
        left.sort_unstable_by_key(|&(id, _)| id);
        line += " |";
        for (id, probability) in left {
            ensure!(probability >= SEEN, "token {id} of {probability} is too rare to be seen");
            let mark = if drawn == Some(id) { "*" } else { "" };
            line += &format!(" {mark}{id}:{probability:.8}");
        }
    }
    println!("{line}");
    Ok(())
}

/// Builds the samplers in the order of the default chain. A missing option leaves its sampler
/// neutral.
fn chain(
    model: &LlamaModel,
    case: SamplerCase<'_>,
    vocab_size: usize,
    breakers: &[String],
) -> Result<Vec<LlamaSampler>> {
    let vocab_size = i32::try_from(vocab_size)?;
    let temperature = case.number("temperature", 1.0)?;
    if let Some(version) = case.text("mirostat") {
        let (tau, eta) = (case.number("tau", 5.0)?, case.number("eta", 0.1)?);
        let mirostat = match version {
            "1" => LlamaSampler::mirostat(vocab_size, 7, tau, eta, 100),
            _ => LlamaSampler::mirostat_v2(7, tau, eta),
        };
        return Ok(vec![LlamaSampler::temp(temperature), mirostat]);
    }
    let seen = [case.tokens("prompt")?, case.tokens("output")?].concat();
    let all = i32::try_from(seen.len())?;
    let biases = case.list("bias").into_iter().map(|bias| {
        let (token, bias) = bias.split_once(':').context("a bias is TOKEN:BIAS")?;
        Ok(LlamaLogitBias::new(LlamaToken(token.parse()?), bias.parse()?))
    });
    let biases: Vec<LlamaLogitBias> = biases.collect::<Result<_>>()?;
    let penalties =
        [case.number("repeat", 1.0)?, case.number("frequency", 0.0)?, case.number("presence", 0.0)?];
    let mut penalties = LlamaSampler::penalties(vocab_size, all, penalties[0], penalties[1], penalties[2]);
    penalties.accept_many(&seen);
    let (multiplier, base) = (case.number("dry", 0.0)?, case.number("base", 1.75)?);
    let (allowed, last_n) = (case.number("allowed", 2)?, case.number("last_n", all)?);
    let mut dry = LlamaSampler::dry(model, multiplier, base, allowed, last_n, breakers);
    dry.accept_many(&seen);
    Ok(vec![
        LlamaSampler::logit_bias(vocab_size, &biases),
        penalties,
        dry,
        LlamaSampler::top_n_sigma(case.number("sigma", -1.0)?),
        LlamaSampler::top_k(case.number("top_k", 0)?),
        LlamaSampler::typical(case.number("typical", 1.0)?, 0),
        LlamaSampler::top_p(case.number("top_p", 1.0)?, 0),
        LlamaSampler::min_p(case.number("min_p", 0.0)?, 0),
        match case.text("xtc") {
            Some(threshold) => {
                LlamaSampler::xtc(case.number("xtc_probability", 1.0)?, threshold.parse()?, 0, 7)
            }
            None => LlamaSampler::xtc(0.0, 0.1, 0, 7),
        },
        LlamaSampler::temp_ext(temperature, case.number("range", 0.0)?, case.number("exponent", 1.0)?),
        LlamaSampler::dist(7),
    ])
}

/// Texts of DRY's sequence breakers. An option names each breaker by its tokens.
fn breakers(model: &LlamaModel, case: SamplerCase<'_>) -> Result<Vec<String>> {
    let text =
        |tokens: &str| tokens.split('.').map(|token| piece(model, LlamaToken(token.parse()?))).collect();
    case.list("break").into_iter().map(text).collect()
}

fn piece(model: &LlamaModel, token: LlamaToken) -> Result<String> {
    Ok(String::from_utf8(model.vocab().detokenize(&[token], false, true))?)
}

/// Token sequences that llama.cpp derives from the breakers, limited to first tokens within the
/// row: tokens that contain the breaker, and tokens that end with its beginning, followed by the
/// tokens of the rest.
fn token_sequences(model: &LlamaModel, breakers: &[String], vocab_size: usize) -> Result<Vec<String>> {
    let mut sequences = Vec::new();
    for breaker in breakers {
        for id in 0..i32::try_from(vocab_size)? {
            let Ok(piece) = piece(model, LlamaToken(id)) else { continue };
            if piece.contains(breaker) {
                sequences.push(id.to_string());
                continue;
            }
            for (at, _) in breaker.char_indices().skip(1).filter(|&(at, _)| piece.ends_with(&breaker[..at])) {
                let rest = model.vocab().tokenize(breaker[at..].as_bytes(), false, false);
                let rest: Vec<String> = rest.iter().map(ToString::to_string).collect();
                sequences.push(format!("{id}.{}", rest.join(".")));
            }
        }
    }
    Ok(sequences)
}
