// SPDX-License-Identifier: Apache-2.0

//! Measures how long a mask takes: the time from a token to the mask of the next one, as a worker's
//! mask threads compute it. Tokens are chosen at random among the allowed ones. The vocabularies
//! are the demo model's, those in BALLAST_TEST_DATA, and those of GGUF files given as arguments.

#![expect(
    clippy::unwrap_used,
    clippy::print_stdout,
    reason = "a measurement: it prints, and fails by panicking"
)]

use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use grammar::{CompiledGrammar, GrammarSource, GrammarVocabulary, MatcherStatus};
use text::Tokenizer;

const TOKENS: usize = 4_000;
/// Tokens of one output, at most. Some schemas allow endless outputs.
const OUTPUT_MAX: usize = 400;

fn main() {
    let mut files =
        vec![PathBuf::from(concat!(env!("CARGO_MANIFEST_DIR"), "/../../demo/pycoder-7m-q8_0.gguf"))];
    match std::env::var_os("BALLAST_TEST_DATA") {
        Some(folder) => {
            let of = |name: &str| Path::new(&folder).join("data/vocab").join(name).with_extension("gguf");
            files.extend(["qwen3", "llama3"].map(of));
        }
        None => println!("SKIPPED: vocabularies of real models, BALLAST_TEST_DATA is not set"),
    }
    files.extend(std::env::args().skip(1).filter(|argument| argument.ends_with(".gguf")).map(PathBuf::from));
    println!("| vocabulary | tokens | grammar | compile ms | mask p50 us | p99 us | longest us |");
    println!("|---|---|---|---|---|---|---|");
    for file in files {
        measure(&file);
    }
}

fn measure(file: &Path) {
    let name = file.file_stem().unwrap().to_string_lossy();
    let opened = std::fs::File::open(file).unwrap();
    let length = opened.metadata().unwrap().len();
    let header = gguf::Header::read(std::io::BufReader::new(opened), length).unwrap();
    let tokenizer = Tokenizer::from_metadata(header.metadata()).unwrap();
    let vocabulary = GrammarVocabulary::new(&tokenizer).unwrap();
    let record = r#"{"type": "object", "properties": {"name": {"type": "string", "maxLength": 40}, "kind": {"enum": ["function", "class"]},
        "line": {"type": "integer", "minimum": 1, "maximum": 99999}, "tags": {"type": "array", "items": {"type": "string"}, "maxItems": 5},
        "made": {"type": "string", "format": "date-time"}}, "required": ["name", "kind", "line"], "additionalProperties": false}"#;
    let schema = |schema: &str| GrammarSource::JsonSchema { schema: schema.to_owned(), lenient: false };
    for (kind, source) in [
        ("schema of a record", schema(record)),
        ("any JSON object", schema(r#"{"type": "object"}"#)),
        (
            "regex of an address",
            GrammarSource::Regex(r"[a-z0-9._-]{1,30}@([a-z0-9-]{1,20}\.){1,3}[a-z]{2,6}".to_owned()),
        ),
        (
            "recursive GBNF",
            GrammarSource::Gbnf(
                "root ::= sum\nsum ::= term ([+-] term)*\nterm ::= [0-9]+ | \"(\" sum \")\"".to_owned(),
            ),
        ),
        ("50,000 choices", GrammarSource::Choice((0..50_000).map(|n| format!("product {n}")).collect())),
    ] {
        let begin = Instant::now();
        let grammar = CompiledGrammar::compile(&source, &vocabulary).unwrap();
        let compiled = begin.elapsed();
        let mut times = masks(&tokenizer, &grammar);
        times.sort_unstable();
        let us = |time: Duration| time.as_secs_f64() * 1e6;
        let at = |share: f64| us(times[((times.len() - 1) as f64 * share) as usize]);
        println!(
            "| {name} | {} | {kind} | {:.1} | {:.0} | {:.0} | {:.0} |",
            tokenizer.len(),
            us(compiled) / 1e3,
            at(0.5),
            at(0.99),
            at(1.0)
        );
    }
}

fn masks(tokenizer: &Tokenizer, grammar: &CompiledGrammar) -> Vec<Duration> {
    let mut times = Vec::with_capacity(TOKENS);
    let mut mask = Vec::new();
    let mut random = 1_u64;
    while times.len() < TOKENS {
        let mut matcher = grammar.matcher();
        let mut next = matcher.compute_mask(&mut mask).unwrap();
        for _ in 0..OUTPUT_MAX {
            let tokens: Vec<u32> = (0..mask.len() as u32 * 32)
                .filter(|&t| mask[t as usize / 32] >> (t % 32) & 1 == 1 && !tokenizer.is_end_of_generation(t))
                .collect();
            if next == MatcherStatus::Finished || tokens.is_empty() {
                break;
            }
            // A linear congruential generator.
            random = random.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
            let token = tokens[(random >> 33) as usize % tokens.len()];
            let begin = Instant::now();
            matcher.accept(token).unwrap();
            next = matcher.compute_mask(&mut mask).unwrap();
            times.push(begin.elapsed());
        }
    }
    times
}
