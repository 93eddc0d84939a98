// SPDX-License-Identifier: Apache-2.0

//! Compares Ballast with llama.cpp on one model, alternately in one run, so that a change of the
//! machine's speed affects both. Quote the medians and the ratio.
//!
//!     cargo run --release -- --ballast ../target/release/ballast --model MODEL.gguf

#![forbid(unsafe_code)]

use anyhow::{Context, Result};
use clap::Parser;
use std::path::{Path, PathBuf};
use std::process::Command;

mod llama;

#[derive(Parser)]
struct CompareArguments {
    /// Path of the ballast executable
    #[arg(long)]
    ballast: PathBuf,
    #[arg(long)]
    model: PathBuf,
    /// Threads of each side
    #[arg(long, default_value_t = 2)]
    threads: usize,
    /// Concurrent streams; may be given several times
    #[arg(long, default_values_t = [1, 16])]
    streams: Vec<usize>,
    #[arg(long, default_value_t = 128)]
    prompt_tokens: usize,
    #[arg(long, default_value_t = 64)]
    tokens: usize,
    #[arg(long, default_value_t = 5)]
    rounds: usize,
}

/// The workload: `streams` sequences with prompts of `prompt_tokens`, each continued by `tokens`.
#[derive(Clone, Copy)]
struct Workload {
    streams: usize,
    prompt_tokens: usize,
    tokens: usize,
}

/// Tokens per second over all streams.
#[derive(Clone, Copy)]
struct TokenRates {
    prompt: f64,
    decode: f64,
}

impl Workload {
    /// Token ids of one prompt. They differ between streams, so that no prefix is shared.
    fn prompt(self, stream: usize, vocabulary: u32) -> Vec<u32> {
        (0..self.prompt_tokens)
            .map(|i| ((i * 7919 + stream * 104_729 + 17) % vocabulary as usize) as u32)
            .collect()
    }
}

fn main() -> Result<()> {
    let arguments = CompareArguments::parse();
    let peer = llama::Peer::load(&arguments.model, arguments.threads)?;
    println!("| streams | measure | ballast | llama.cpp | ratio |\n|---|---|---|---|---|");
    for &streams in &arguments.streams {
        let shape = Workload { streams, prompt_tokens: arguments.prompt_tokens, tokens: arguments.tokens };
        let mut ours = Vec::new();
        let mut theirs = Vec::new();
        for _ in 0..arguments.rounds {
            theirs.push(peer.measure(shape)?);
            ours.push(measure_ballast(&arguments.ballast, &arguments.model, arguments.threads, shape)?);
        }
        for (name, part) in
            [("prompt tok/s", (|s| s.prompt) as fn(&TokenRates) -> f64), ("decode tok/s", |s| s.decode)]
        {
            let ballast = median(ours.iter().map(part));
            let llama = median(theirs.iter().map(part));
            println!("| {streams} | {name} | {ballast:.1} | {llama:.1} | {:.2} |", ballast / llama);
        }
    }
    Ok(())
}

/// Measures a fleet of one worker with `ballast bench throughput`.
fn measure_ballast(executable: &Path, model: &Path, threads: usize, shape: Workload) -> Result<TokenRates> {
    let output = Command::new(executable)
        .args(["bench", "throughput"])
        .arg(model)
        .args(["--workers", "1", "--json"])
        .args(["--threads", &threads.to_string()])
        .args(["--streams", &shape.streams.to_string()])
        .args(["--prompt-tokens", &shape.prompt_tokens.to_string()])
        .args(["--tokens", &shape.tokens.to_string()])
        .output()
        .with_context(|| format!("running {}", executable.display()))?;
    anyhow::ensure!(output.status.success(), "ballast bench: {}", String::from_utf8_lossy(&output.stderr));
    let line: serde_json::Value =
        serde_json::from_slice(&output.stdout).context("ballast bench printed no JSON")?;
    let field = |name: &str| line[name].as_f64().with_context(|| format!("no {name} in {line}"));
    Ok(TokenRates { prompt: field("prompt_tokens_per_second")?, decode: field("decode_tokens_per_second")? })
}

fn median(values: impl Iterator<Item = f64>) -> f64 {
    let mut values: Vec<f64> = values.collect();
    values.sort_by(f64::total_cmp);
    values[values.len() / 2]
}
