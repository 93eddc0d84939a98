// SPDX-License-Identifier: Apache-2.0

//! Measures what sharing of equal prefixes saves, on the demo models.
//!
//! 1. A burst of requests that share 2,048 tokens, with sharing on and off in turns.
//! 2. How many sequences fit one budget in blocks, against a reserved context for each.
//!
//! The rows that each request needs for itself limit what sharing can save. So the output has a
//! bound beside the times: rows without sharing divided by rows with sharing, as if each row took
//! equally long. Two effects are not in this bound. A row behind a long context takes longer than
//! an average row of its prefix. The backend reads the shared part of that context for several rows
//! at once.

#![expect(clippy::unwrap_used, reason = "a benchmark that cannot run says so by panicking")]
#![expect(clippy::print_stdout, reason = "it reports there")]

use engine::{Engine, EngineConfig, EngineOutput, KvBudget, Request, RequestId, SamplingParams};
use kernels::Cpu;
use models::testing::{ModelFile, demo_models};
use std::time::{Duration, Instant};

const THREADS: usize = 2;
const ROUNDS: usize = 3;
const PREFIX: usize = 2_048;
/// Own prompt tokens and output tokens of each request: a question with its answer, and the time to
/// a first token.
const SHAPES: [(usize, usize); 2] = [(32, 16), (8, 1)];

fn engine(file: &ModelFile, config: &EngineConfig) -> Engine<Cpu> {
    let mut backend = Cpu::new(THREADS).unwrap();
    let limits = config.model_limits(file.description().unwrap().vocab_size);
    let model =
        models::build(file.header().metadata(), file.weights().unwrap(), &mut backend, limits).unwrap();
    Engine::new(model, backend, config).unwrap()
}

fn request(id: u64, prompt: Vec<u32>, max_tokens: usize) -> Request {
    Request { sampling: SamplingParams::greedy(), ..Request::new(RequestId(id), prompt, max_tokens as u32) }
}

/// Arbitrary tokens: the model takes the same time for any text.
fn token(seed: usize, place: usize) -> u32 {
    ((seed * 7919 + place * 104_729) % 8_000) as u32 + 100
}

/// Runs a burst of `count` requests. Returns its wall time and the most bytes of KV cache in use.
fn burst(file: &ModelFile, count: usize, (own, output): (usize, usize), share: bool) -> (Duration, usize) {
    let config = EngineConfig {
        prefix_cache: share,
        running_max: count,
        ..EngineConfig::new(KvBudget::Tokens(count * (PREFIX + own + output + 16)))
    };
    let mut engine = engine(file, &config);
    let requests: Vec<Request> = (0..count)
        .map(|index| {
            let prefix = (0..PREFIX).map(|place| token(0, place));
            let suffix = (0..own).map(|place| token(index + 1, place));
            request(index as u64, prefix.chain(suffix).collect(), output)
        })
        .collect();
    let start = Instant::now();
    for request in requests {
        engine.submit(request).unwrap();
    }
    let (mut out, mut most) = (Vec::new(), 0);
    while engine.has_work() {
        engine.step(start.elapsed(), &mut out).unwrap();
        most = most.max(engine.stats().kv_blocks_used);
    }
    let took = start.elapsed();
    let tokens = out.iter().filter(|output| matches!(output, EngineOutput::Token(_))).count();
    assert_eq!(tokens, count * output);
    (took, most * engine.stats().kv_block_bytes)
}

fn median(mut times: Vec<Duration>) -> f64 {
    times.sort();
    times[times.len() / 2].as_secs_f64()
}

fn sharing(name: &str, file: &ModelFile, shape: (usize, usize)) {
    for count in [16, 32] {
        let (mut on, mut off, mut bytes) = (Vec::new(), Vec::new(), (0, 0));
        for _ in 0..ROUNDS {
            let shared = burst(file, count, shape, true);
            let own = burst(file, count, shape, false);
            on.push(shared.0);
            off.push(own.0);
            bytes = (shared.1, own.1);
        }
        let (on, off) = (median(on), median(off));
        // The last output token is sampled, but not computed.
        let rows = shape.0 + shape.1 - 1;
        println!(
            "{name}: {count} requests of {PREFIX} + {} tokens, {} out: {on:.2} s shared, {off:.2} s not: {:.1} times, at \
             most {:.1} by rows; {:.1} MiB of keys and values against {:.1}: {:.1} times",
            shape.0,
            shape.1,
            off / on,
            (count * (PREFIX + rows)) as f64 / (PREFIX + count * rows) as f64,
            bytes.0 as f64 / (1 << 20) as f64,
            bytes.1 as f64 / (1 << 20) as f64,
            bytes.1 as f64 / bytes.0 as f64,
        );
    }
}

/// Reports how many sequences run at once before the first preemption. Each sequence has 32 to 287
/// prompt tokens and 64 output tokens.
fn capacity(name: &str, file: &ModelFile) {
    const CONTEXTS: usize = 16;
    const MOST: usize = 512;
    let context = file.description().unwrap().context_length;
    let config = EngineConfig {
        running_max: MOST,
        step_tokens: MOST,
        queue_max: MOST,
        ..EngineConfig::new(KvBudget::Tokens(CONTEXTS * context))
    };
    let mut engine = engine(file, &config);
    for index in 0..MOST {
        let prompt: Vec<u32> = (0..32 + index * 37 % 256).map(|place| token(index, place)).collect();
        engine.submit(request(index as u64, prompt, 64)).unwrap();
    }
    let (mut out, mut most, mut tokens) = (Vec::new(), 0, 0);
    while engine.has_work() {
        engine.step(Duration::ZERO, &mut out).unwrap();
        let stats = engine.stats();
        if stats.running > most && stats.preemptions == 0 {
            (most, tokens) = (stats.running, stats.kv_blocks_used * stats.kv_block_tokens);
        }
    }
    println!(
        "{name}: {} tokens of budget hold {CONTEXTS} reserved contexts of {context}, or {most} sequences in blocks \
         ({tokens} tokens in use): {:.1} times; {} preemptions later",
        CONTEXTS * context,
        most as f64 / CONTEXTS as f64,
        engine.stats().preemptions,
    );
}

fn main() {
    for name in ["pycoder-7m-q8_0", "pycoder-22m-q4_k_m"] {
        let file = ModelFile::open(&demo_models().join(format!("{name}.gguf"))).unwrap();
        SHAPES.into_iter().for_each(|shape| sharing(name, &file, shape));
        capacity(name, &file);
    }
}
