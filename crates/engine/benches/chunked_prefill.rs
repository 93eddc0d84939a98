// SPDX-License-Identifier: Apache-2.0

//! Measures how a prompt of 2,048 tokens delays other requests.
//!
//! 1. How long a short prompt that arrives just after the long one waits for its first token.
//! 2. How long running streams wait between tokens.
//!
//! The benchmark alternates between two engines. One caps prefill while sequences decode, with the
//! default `max_prefill_stall`; the other one has no cap. The model is the larger demo model, or
//! each of the GGUF files named as arguments.

#![expect(clippy::unwrap_used, reason = "a benchmark that cannot run says so by panicking")]
#![expect(clippy::print_stdout, reason = "it reports there")]

use engine::{Engine, EngineConfig, EngineOutput, KvBudget, Request, RequestId, SamplingParams};
use kernels::Cpu;
use models::testing::{ModelFile, demo_models};
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

const THREADS: usize = 2;
const ROUNDS: usize = 3;
const LONG: usize = 2_048;
const SHORT: usize = 64;
/// Numbers of streams that decode. Each stream has `WARM_UP` tokens when the long prompt arrives.
const STREAMS: [usize; 3] = [0, 4, 16];
const WARM_UP: usize = 16;
/// Ids of the long and the short request. The ids of streams count from 0.
const LONG_ID: RequestId = RequestId(1_000);
const SHORT_ID: RequestId = RequestId(1_001);

fn engine(file: &ModelFile, streams: usize, is_bounded: bool) -> Engine<Cpu> {
    let base = EngineConfig::new(KvBudget::Tokens(4 * LONG + streams * LONG));
    let max_prefill_stall = if is_bounded { base.max_prefill_stall } else { Duration::MAX };
    let config = EngineConfig { running_max: 32, max_prefill_stall, ..base };
    let mut backend = Cpu::new(THREADS).unwrap();
    let limits = config.model_limits(file.description().unwrap().vocab_size);
    let model =
        models::build(file.header().metadata(), file.weights().unwrap(), &mut backend, limits).unwrap();
    Engine::new(model, backend, &config).unwrap()
}

/// Arbitrary tokens: the model takes the same time for any text.
fn request(id: RequestId, tokens: usize, max_tokens: usize) -> Request {
    let token = |place: usize| ((id.0 as usize * 7_919 + place * 104_729) % 8_000) as u32 + 100;
    let prompt = (0..tokens).map(token).collect();
    Request { sampling: SamplingParams::greedy(), ..Request::new(id, prompt, max_tokens as u32) }
}

/// An engine and its clock.
struct BenchEngine {
    engine: Engine<Cpu>,
    start: Instant,
}

impl BenchEngine {
    /// Runs one step and returns the requests that got a token.
    fn step(&mut self) -> Vec<RequestId> {
        let mut out = Vec::new();
        let now = self.start.elapsed();
        let report = self.engine.step(now, &mut out).unwrap();
        self.engine.observe(&report, self.start.elapsed() - now);
        out.iter()
            .filter_map(|output| if let EngineOutput::Token(token) = output { Some(token.id) } else { None })
            .collect()
    }
}

#[derive(Default)]
struct Waits {
    short: Vec<Duration>,
    long: Vec<Duration>,
    /// Times between tokens of the streams: before the long prompt arrived, and during its prefill.
    alone: Vec<Duration>,
    beside: Vec<Duration>,
    longest: Vec<Duration>,
}

fn round(run: &mut BenchEngine, streams: usize, waits: &mut Waits) {
    for stream in 0..streams {
        run.engine.submit(request(RequestId(stream as u64), 32, LONG)).unwrap();
    }
    for _ in 0..WARM_UP {
        let before = Instant::now();
        run.step();
        waits.alone.push(before.elapsed());
    }
    let submitted = Instant::now();
    run.engine.submit(request(LONG_ID, LONG, 1)).unwrap();
    let (mut short_at, mut last) = (None, submitted);
    let (mut long, mut short) = (None, None);
    let mut gaps = Vec::new();
    while long.is_none() || short.is_none() {
        let got = run.step();
        let now = Instant::now();
        if short_at.is_none() {
            run.engine.submit(request(SHORT_ID, SHORT, 1)).unwrap();
            short_at = Some(now);
        }
        if long.is_none() {
            gaps.push(now - last);
        }
        last = now;
        if got.contains(&LONG_ID) {
            long = Some(now - submitted);
        }
        if got.contains(&SHORT_ID) {
            short = short_at.map(|at| now - at);
        }
    }
    waits.long.extend(long);
    waits.short.extend(short);
    waits.longest.extend(gaps.iter().max());
    waits.beside.extend(gaps);
    let mut out = Vec::new();
    for stream in 0..streams {
        run.engine.cancel(RequestId(stream as u64), &mut out);
    }
    assert!(run.engine.reset_prefix_cache());
}

/// Median in milliseconds.
fn median(times: &mut [Duration]) -> f64 {
    times.sort();
    times.get(times.len() / 2).map_or(0.0, |time| time.as_secs_f64() * 1e3)
}

fn report(path: &Path) {
    let file = ModelFile::open(path).unwrap();
    let name = path.file_stem().unwrap().to_string_lossy();
    for streams in STREAMS {
        let mut sides = [true, false].map(|is_bounded| {
            let run = BenchEngine { engine: engine(&file, streams, is_bounded), start: Instant::now() };
            (is_bounded, run, Waits::default())
        });
        for number in 0..=ROUNDS {
            for (_, run, waits) in &mut sides {
                round(run, streams, waits);
                // The first round does not count, since it writes to memory for the first time.
                if number == 0 {
                    *waits = Waits::default();
                }
            }
        }
        for (is_bounded, _, Waits { short, long, alone, beside, longest }) in &mut sides {
            println!(
                "{name}, {streams} streams, prompts beside them {}: first token of {SHORT} tokens after {:.0} ms, of {LONG} \
                 after {:.0} ms; between tokens of a stream {:.1} ms, meanwhile {:.1} ms, at most {:.0} ms",
                if *is_bounded { "bounded" } else { "not bounded" },
                median(short),
                median(long),
                median(alone),
                median(beside),
                median(longest),
            );
        }
    }
}

fn main() {
    let mut paths: Vec<PathBuf> =
        std::env::args_os().skip(1).filter(|arg| arg != "--bench").map(PathBuf::from).collect();
    if paths.is_empty() {
        paths.push(demo_models().join("pycoder-22m-q4_k_m.gguf"));
    }
    paths.iter().for_each(|path| report(path));
}
