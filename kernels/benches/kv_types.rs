// SPDX-License-Identifier: Apache-2.0

//! Measures what each KV cache type costs at a long context.
//!
//! 1. The attention of one row at the shape of qwen3-0.6b over 16,384 positions.
//! 2. The decode of tokens by the demo models, after 4,000 other tokens.
//!
//! Types take turns in each round, since the speed of machines drifts.

#![expect(clippy::print_stdout, reason = "its result is what it prints")]

use std::time::{Duration, Instant};

use anyhow::Result;
use kernels::Cpu;
use models::testing::{ModelFile, Runner, demo_models};
use ops::{AttentionSpan, AttentionSpec, Backend, KvLayer, KvLayout, KvType, Step};

const SPEC: AttentionSpec = AttentionSpec { heads: 16, kv_heads: 8, head_dim: 128, scale: 0.088 };
const BLOCK_TOKENS: usize = 16;
const POSITIONS: usize = 16 << 10;
const BEHIND: usize = 4_000;
const ROUNDS: usize = 15;
/// Tokens per round, which take some 10 ms.
const DECODED: usize = 6;
const THREADS: usize = 2;

fn main() -> Result<()> {
    attention()?;
    for model in ["pycoder-7m-q8_0", "pycoder-22m-q4_k_m"] {
        decode(model)?;
    }
    Ok(())
}

/// Runs each of `all` in turns, and returns the median time of each.
fn in_turns<T>(all: &mut [T], mut run: impl FnMut(&mut T) -> Result<()>) -> Result<Vec<Duration>> {
    let mut times = vec![Vec::with_capacity(ROUNDS); all.len()];
    for round in 0..=ROUNDS {
        for (one, times) in all.iter_mut().zip(&mut times) {
            let start = Instant::now();
            run(one)?;
            // The first round fills caches.
            if round > 0 {
                times.push(start.elapsed());
            }
        }
    }
    times.iter_mut().for_each(|times| times.sort_unstable());
    Ok(times.iter().map(|times| times[times.len() / 2]).collect())
}

fn attention() -> Result<()> {
    let (width, kv_width) = (SPEC.heads * SPEC.head_dim, SPEC.kv_heads * SPEC.head_dim);
    let values = |len: usize| (0..len).map(|i| (i * 7919 % 997) as f32 / 500.0 - 1.0).collect::<Vec<_>>();
    let positions: Vec<u32> = (0..POSITIONS as u32).collect();
    let table: Vec<u32> = (0..POSITIONS.div_ceil(BLOCK_TOKENS) as u32).collect();
    let zeros = vec![0; POSITIONS];
    let step = |cpu: &mut Cpu, from: usize| {
        cpu.begin(&Step {
            tokens: &zeros[from..],
            positions: &positions[from..],
            sequences: &zeros[from..],
            kv_slots: &positions[from..],
            tables: &[&table],
            outputs: &[],
        })
    };
    let mut cpu = Cpu::new(THREADS)?;
    let mut keys = cpu.tensor(POSITIONS, kv_width)?;
    cpu.write(&mut keys, POSITIONS, &values(POSITIONS * kv_width))?;
    let layer =
        |kind| KvLayer { kv_heads: SPEC.kv_heads, head_dim: SPEC.head_dim, kind, span: AttentionSpan::Full };
    step(&mut cpu, 0)?;
    let mut caches = Vec::new();
    for kind in KvType::ALL {
        let blocks = table.len();
        let mut kv = cpu.kv(&KvLayout { block_tokens: BLOCK_TOKENS, blocks, layers: vec![layer(kind)] })?;
        cpu.kv_write(&mut kv, 0, &keys, &keys, POSITIONS)?;
        caches.push(kv);
    }
    step(&mut cpu, POSITIONS - 1)?;
    let (mut queries, mut out) = (cpu.tensor(1, width)?, cpu.tensor(1, width)?);
    cpu.write(&mut queries, 1, &values(width))?;
    let times = in_turns(&mut caches, |kv| Ok(cpu.attention(kv, 0, &queries, &SPEC, &mut out, 1)?))?;
    println!("attention of one row over {POSITIONS} positions, {THREADS} threads:");
    for (kind, time) in KvType::ALL.into_iter().zip(times) {
        let bytes = POSITIONS * layer(kind).token_bytes();
        let rate = bytes as f64 / time.as_secs_f64() / 1e9;
        println!("  {:5} {:8.1} us  {rate:5.1} GB/s", kind.name(), time.as_secs_f64() * 1e6);
    }
    Ok(())
}

fn decode(model: &str) -> Result<()> {
    let file = ModelFile::open(&demo_models().join(model).with_extension("gguf"))?;
    let tokens: Vec<u32> = (0..BEHIND as u32).map(|i| 6 + i * 7919 % 8000).collect();
    let mut runners = Vec::new();
    for kind in KvType::ALL {
        let room = BEHIND + (ROUNDS + 1) * DECODED;
        let mut runner = Runner::new(&file, Cpu::new(THREADS)?, kind, 1, room)?;
        runner.step(&[(0, &tokens)], |row| row + 1 == BEHIND)?;
        runners.push(runner);
    }
    let times = in_turns(&mut runners, |runner| {
        tokens[..DECODED].iter().try_for_each(|&token| runner.extend(&[token]).map(drop))
    })?;
    println!("{model}, a token behind {BEHIND} others, {THREADS} threads:");
    for (kind, time) in KvType::ALL.into_iter().zip(times) {
        let token = time.as_secs_f64() / DECODED as f64;
        println!("  {:5} {:8.1} us  {:6.0} tokens/s", kind.name(), token * 1e6, 1.0 / token);
    }
    Ok(())
}
