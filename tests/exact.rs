// SPDX-License-Identifier: Apache-2.0

//! Invariant I5 on a whole fleet: a request gives the same tokens and log probabilities, bit for
//! bit, however it is served.
//!
//! [`CASES`] lists the configurations and schedules. [`DRAFTED_CASES`] lists those with a draft
//! model, [`Q8_0_CASES`] those with another type of KV cache, and [`WINDOW_CASES`] those of a model
//! with attention windows. A new feature that must keep the
//! invariant needs one more line, which then runs on every device. The requests are a mix: greedy
//! and sampled, with penalties, several choices, grammars, and different priorities.

use crate::harness::api::{Continuation, TestRequest, connect, generate, generate_all, runtime};
use crate::harness::http::HttpClient;
use crate::harness::{ServedFleet, demo_7m, demo_22m, device, eventually, in_tree, proc, synth};
use proto::v1::Sampling;
use proto::v1::grammar::Kind;
use std::path::Path;
use std::time::Duration;

/// When the requests arrive.
#[derive(Debug, Clone, Copy)]
enum RequestSchedule {
    /// Each request starts after the previous one has ended.
    Sequential,
    Concurrent,
    /// In random order with pauses, from this seed.
    Staggered(u64),
    /// Concurrent, without log probabilities: logits need not be copied to the host, and a device
    /// may sample tokens itself.
    WithoutLogprobs,
    /// Concurrent, and a worker is killed after the first tokens: another worker resumes its
    /// streams.
    WorkerKilled,
}

use RequestSchedule::{Concurrent, Sequential, Staggered, WithoutLogprobs, WorkerKilled};

/// A fleet's configuration and the schedules that run on it, one after the other.
struct ServingCase {
    name: &'static str,
    /// Arguments of `ballast serve`. Names that end in .gguf are files of this repository.
    arguments: &'static [&'static str],
    ways: &'static [RequestSchedule],
    /// Counters that must have increased, because otherwise the case shows nothing. On the host,
    /// every case with a small cache must also have preempted. A GPU allocates its cache in large
    /// units, so those cases may finish without a preemption there.
    moved: &'static [&'static str],
}

const HITS: &str = "ballast:prefix_cache_hits_total";
const FORKS: &str = "ballast:forks_total";
const PREEMPTIONS: &str = "ballast:num_preemptions_total";
const RESUMES: &str = "ballast:stream_resumes_total";
const ACCEPTED: &str = "ballast:spec_decode_num_accepted_tokens_total";

/// The first schedule of the first case is the reference for all others.
const CASES: &[ServingCase] = &[
    ServingCase {
        // Repeated prompts are prefix cache hits.
        name: "alone, in any order, with prefix hits",
        arguments: &["--workers", "1", "--threads", "1"],
        ways: &[Sequential, Staggered(1), Staggered(2), Staggered(3)],
        moved: &[HITS, FORKS],
    },
    ServingCase {
        name: "together in large steps",
        arguments: &["--workers", "1", "--threads", "2", "--step-tokens", "512"],
        ways: &[Concurrent, WithoutLogprobs],
        moved: &[],
    },
    ServingCase {
        name: "prompts in chunks of an odd size",
        arguments: &["--workers", "1", "--threads", "2", "--step-tokens", "33"],
        ways: &[Concurrent],
        moved: &[],
    },
    ServingCase {
        name: "two workers",
        arguments: &["--workers", "2", "--threads", "1", "--step-tokens", "64", "--routing", "least-loaded"],
        ways: &[Concurrent, Staggered(4)],
        moved: &[],
    },
    ServingCase {
        name: "three workers",
        arguments: &["--workers", "3", "--threads", "2", "--step-tokens", "128", "--routing", "least-loaded"],
        ways: &[Concurrent],
        moved: &[],
    },
    ServingCase {
        // 768 tokens hold a few of these requests at a time, or the longest one alone.
        name: "preempted and computed again",
        arguments: &["--workers", "1", "--kv-tokens", "768"],
        ways: &[Concurrent],
        moved: &[PREEMPTIONS],
    },
    ServingCase {
        name: "resumed in the middle",
        arguments: &["--workers", "2", "--threads", "1", "--routing", "least-loaded"],
        ways: &[WorkerKilled],
        moved: &[RESUMES],
    },
    ServingCase {
        name: "drafts looked up in the text",
        arguments: &["--workers", "1", "--threads", "1", "--draft", "lookup"],
        ways: &[Concurrent, WithoutLogprobs],
        moved: &[ACCEPTED, FORKS],
    },
    ServingCase {
        name: "drafts looked up in the text, in chunks of an odd size, in a small cache",
        arguments: &["--workers", "1", "--draft", "lookup", "--kv-tokens", "768", "--step-tokens", "65"],
        ways: &[Concurrent],
        moved: &[ACCEPTED],
    },
];

/// The same invariant with a draft model. With a draft model choices are not forked, so equal
/// tokens also verify forks.
const DRAFTED_CASES: &[ServingCase] = &[
    ServingCase {
        name: "no draft tokens",
        arguments: &["--workers", "1", "--threads", "1"],
        ways: &[Sequential],
        moved: &[FORKS],
    },
    ServingCase {
        name: "a smaller model drafts",
        arguments: &["--workers", "1", "--threads", "1", "--draft", "demo/pycoder-7m-q8_0.gguf"],
        ways: &[Concurrent],
        moved: &[ACCEPTED],
    },
    ServingCase {
        name: "a smaller model drafts, preempted and computed again",
        arguments: &["--workers", "1", "--draft", "demo/pycoder-7m-q8_0.gguf", "--kv-tokens", "768"],
        ways: &[Concurrent],
        moved: &[ACCEPTED],
    },
    ServingCase {
        name: "a smaller model drafts, resumed in the middle",
        arguments: &[
            "--workers",
            "2",
            "--threads",
            "1",
            "--draft",
            "demo/pycoder-7m-q8_0.gguf",
            "--routing",
            "least-loaded",
        ],
        ways: &[WorkerKilled],
        moved: &[RESUMES],
    },
];

/// The same invariant with a quantized KV cache, which has tokens of its own.
const Q8_0_CASES: &[ServingCase] = &[
    ServingCase {
        name: "q8_0 keys and values, alone, in any order, with prefix hits",
        arguments: &["--kv-type", "q8_0", "--workers", "1", "--threads", "1"],
        ways: &[Sequential, Staggered(5)],
        moved: &[HITS],
    },
    ServingCase {
        name: "q8_0 keys and values, in chunks of an odd size, preempted and computed again",
        arguments: &["--kv-type", "q8_0", "--workers", "1", "--step-tokens", "33", "--kv-tokens", "768"],
        ways: &[Concurrent],
        moved: &[PREEMPTIONS],
    },
    ServingCase {
        name: "q8_0 keys and values, resumed in the middle",
        arguments: &["--kv-type", "q8_0", "--workers", "2", "--threads", "1", "--routing", "least-loaded"],
        ways: &[WorkerKilled],
        moved: &[RESUMES],
    },
];

/// The same invariant with layers that see the last 40 tokens, and seven KV cache groups.
const WINDOW_CASES: &[ServingCase] = &[
    ServingCase {
        name: "windows, alone, in any order, with prefix hits",
        arguments: &["--workers", "1", "--threads", "1"],
        ways: &[Sequential, Staggered(6), WithoutLogprobs],
        moved: &[HITS, FORKS],
    },
    ServingCase {
        // Blocks behind windows are free, so a smaller cache than above holds the longest request.
        name: "windows, in chunks of an odd size, preempted and computed again",
        arguments: &["--workers", "1", "--step-tokens", "33", "--kv-tokens", "200"],
        ways: &[Concurrent],
        moved: &[],
    },
    ServingCase {
        name: "windows, resumed in the middle",
        arguments: &["--workers", "2", "--threads", "1", "--routing", "least-loaded"],
        ways: &[WorkerKilled],
        moved: &[RESUMES],
    },
];

/// Token ids of prompts are below this, in the demo models and in the small synthetic ones.
const DEMO_TOKENS: u64 = 8006;
const TINY_TOKENS: u64 = 1016;

const REQUESTS: usize = 64;
/// As many of them, with one of each kind, are served in the cases that compute longest.
const SOME_REQUESTS: usize = 32;

/// One of so many requests is long enough for an event in its middle.
const LONG_EVERY: usize = 16;
const LONG_TOKENS: u32 = 400;

/// One of so many requests has several choices, and one has a grammar.
const SPECIAL_EVERY: usize = 8;
const CHOICES: u32 = 3;
const GRAMMAR_TOKENS: u32 = 48;

/// One of so many requests of any kind has penalties.
const PENALISED_EVERY: usize = 5;

/// Prompts of 1 to 150 tokens below `tokens_end`, greedy and sampled, from a fixed seed.
fn requests(tokens_end: u64) -> Vec<TestRequest> {
    let mut random = XorShift64(0x5eed);
    (0..REQUESTS)
        .map(|index| {
            let length = 1 + random.below(150);
            let tokens = 8 + random.below(24) as u32;
            let grammar = (index % SPECIAL_EVERY == 2).then(|| grammar(index / SPECIAL_EVERY));
            TestRequest {
                model: String::new(),
                prompt: (0..length).map(|_| 6 + random.below(tokens_end - 6) as u32).collect(),
                max_tokens: match grammar {
                    Some(_) => GRAMMAR_TOKENS,
                    None if index % LONG_EVERY == 0 => LONG_TOKENS,
                    None => tokens,
                },
                temperature: if index % 3 == 0 { 0.0 } else { 0.9 },
                seed: index as u64,
                sampling: match index % PENALISED_EVERY {
                    0 => penalties(index / PENALISED_EVERY),
                    _ => Sampling::default(),
                },
                without_logprobs: false,
                choices: if index % SPECIAL_EVERY == 5 { CHOICES } else { 1 },
                grammar,
                priority: [0, 0, 1, 0, -1][index % 5],
                top_logprobs: 0,
                cache_salt: String::new(),
            }
        })
        .collect()
}

/// Penalties on past tokens. Without truncation they apply to all tokens of the row; with top_k or
/// min_p a device applies them to the best tokens only.
fn penalties(number: usize) -> Sampling {
    let (top_k, min_p, dry_multiplier) = (Some(40), Some(0.05), Some(0.8));
    match number % 4 {
        0 => Sampling {
            repetition_penalty: Some(1.1),
            frequency_penalty: Some(0.2),
            top_k,
            ..Sampling::default()
        },
        1 => Sampling { presence_penalty: Some(1.5), min_p, ..Sampling::default() },
        2 => Sampling { dry_multiplier, top_k, ..Sampling::default() },
        _ => Sampling { repetition_penalty: Some(1.3), dry_multiplier, min_p, ..Sampling::default() },
    }
}

fn grammar(number: usize) -> Kind {
    let schema = r#"{"type": "object", "required": ["name", "line"], "additionalProperties": false, "properties":
        {"name": {"type": "string", "maxLength": 12}, "line": {"type": "integer", "minimum": 1, "maximum": 999}}}"#;
    match number % 2 {
        0 => Kind::Regex(r"[a-z_]{3,12}\([a-z, ]{0,20}\):".to_owned()),
        _ => Kind::JsonSchema(schema.to_owned()),
    }
}

/// xorshift64*, with a fixed seed, so that a failure repeats.
struct XorShift64(u64);

impl XorShift64 {
    fn below(&mut self, bound: u64) -> u64 {
        self.0 ^= self.0 >> 12;
        self.0 ^= self.0 << 25;
        self.0 ^= self.0 >> 27;
        (self.0.wrapping_mul(0x2545_f491_4f6c_dd1d) >> 33) % bound
    }
}

impl RequestSchedule {
    async fn serve(self, fleet: &ServedFleet, requests: &[TestRequest]) -> Vec<Continuation> {
        let found = match self {
            Sequential => {
                let mut client = connect(&fleet.grpc).await;
                let mut found = Vec::new();
                for request in requests {
                    found.push(generate(&mut client, request, |_| {}).await);
                }
                found
            }
            Concurrent => generate_all(&fleet.grpc, requests).await,
            WithoutLogprobs => {
                let without_logprobs =
                    |request: &TestRequest| TestRequest { without_logprobs: true, ..request.clone() };
                generate_all(&fleet.grpc, &requests.iter().map(without_logprobs).collect::<Vec<_>>()).await
            }
            Staggered(seed) => arriving(fleet, requests, seed).await,
            WorkerKilled => {
                let victim = fleet.processes_by_role("worker")[0].pid;
                let kill = || proc::send_signal(victim, "KILL");
                fleet.generate_during_fault(requests, kill).await
            }
        };
        found.into_iter().map(|result| result.unwrap()).collect()
    }
}

async fn arriving(
    fleet: &ServedFleet,
    requests: &[TestRequest],
    seed: u64,
) -> Vec<Result<Continuation, tonic::Status>> {
    let mut order: Vec<usize> = (0..requests.len()).collect();
    let mut random = XorShift64(seed);
    for last in (1..order.len()).rev() {
        order.swap(last, random.below(last as u64 + 1) as usize);
    }
    let client = connect(&fleet.grpc).await;
    let mut tasks = Vec::new();
    for index in order {
        let (mut client, request) = (client.clone(), requests[index].clone());
        tasks.push((index, tokio::spawn(async move { generate(&mut client, &request, |_| {}).await })));
        tokio::time::sleep(Duration::from_millis(random.below(8))).await;
    }
    tasks.sort_by_key(|(index, _)| *index);
    let mut found = Vec::new();
    for (_, task) in tasks {
        found.push(task.await.unwrap());
    }
    found
}

#[test]
fn i5_same_tokens_however_a_request_is_served() {
    same_tokens(&demo_7m(), CASES, &requests(DEMO_TOKENS));
}

#[test]
fn i5_same_tokens_with_any_draft_source() {
    same_tokens(&demo_22m(), DRAFTED_CASES, &requests(DEMO_TOKENS)[..SOME_REQUESTS]);
}

#[test]
fn i5_same_tokens_with_keys_and_values_of_q8_0() {
    same_tokens(&demo_7m(), Q8_0_CASES, &requests(DEMO_TOKENS));
}

#[test]
fn i5_same_tokens_with_attention_windows() {
    same_tokens(&synth("gemma3-tiny", "q8_0"), WINDOW_CASES, &requests(TINY_TOKENS));
}

#[test]
#[ignore = "nightly: takes minutes"]
fn nightly_i5_same_tokens_for_all_requests_with_any_draft_source() {
    same_tokens(&demo_22m(), DRAFTED_CASES, &requests(DEMO_TOKENS));
}

fn same_tokens(model: &Path, cases: &[ServingCase], requests: &[TestRequest]) {
    let mut expected: Option<Vec<Continuation>> = None;
    for case in cases {
        let in_place = |argument: &&str| match argument.ends_with(".gguf") {
            true => in_tree(argument).into_os_string().into_string().unwrap(),
            false => (*argument).to_owned(),
        };
        let arguments: Vec<String> = case.arguments.iter().map(in_place).collect();
        let fleet = ServedFleet::start(model, &arguments.iter().map(String::as_str).collect::<Vec<_>>());
        let http = HttpClient::connect(&fleet);
        for way in case.ways {
            let found = runtime().block_on(way.serve(&fleet, requests));
            let expected = expected.get_or_insert_with(|| found.clone());
            for (index, (expected, found)) in expected.iter().zip(&found).enumerate() {
                let how = format!("{}, {way:?}, request {index}", case.name);
                let (request, tokens) = (&requests[index], found.tokens.len());
                let tokens_max = (request.max_tokens * request.choices) as usize;
                assert!(tokens == tokens_max || request.grammar.is_some() && tokens > 0, "{how}: {tokens}");
                assert_eq!(expected.tokens, found.tokens, "{how}: tokens");
                if !matches!(way, WithoutLogprobs) {
                    assert_eq!(expected.logprob_bits, found.logprob_bits, "{how}: log probabilities");
                    assert_eq!(found.tokens.len(), found.logprob_bits.len(), "{how}");
                }
            }
        }
        let is_short = device() == "host" && case.arguments.contains(&"--kv-tokens");
        for counter in case.moved.iter().chain(is_short.then_some(&PREEMPTIONS)) {
            eventually(counter, || (http.metric(counter)? > 0.0).then_some(()));
        }
        fleet.stop();
    }
}
