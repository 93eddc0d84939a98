//! Invariant I5 on the whole fleet: tokens and log probabilities of a request are the same bits however it is served.

use crate::harness::api::{Ask, Continuation, connect, generate, generate_all, runtime};
use crate::harness::{Fleet, demo_7m};
use std::time::Duration;

const REQUESTS: usize = 64;

/// Prompts of 1 to 150 tokens, greedy and sampled, from a fixed seed.
fn requests() -> Vec<Ask> {
    let mut random = Random(0x5eed);
    (0..REQUESTS)
        .map(|index| {
            let length = 1 + random.below(150);
            Ask {
                prompt: (0..length).map(|_| 6 + random.below(8000) as u32).collect(),
                max_tokens: 8 + random.below(24) as u32,
                temperature: if index % 3 == 0 { 0.0 } else { 0.9 },
                seed: index as u64,
            }
        })
        .collect()
}

/// xorshift64*: a fixed sequence, so that a failure repeats.
struct Random(u64);

impl Random {
    fn below(&mut self, bound: u64) -> u64 {
        self.0 ^= self.0 >> 12;
        self.0 ^= self.0 << 25;
        self.0 ^= self.0 >> 27;
        (self.0.wrapping_mul(0x2545_f491_4f6c_dd1d) >> 33) % bound
    }
}

fn all_at_once(arguments: &[&str], asks: &[Ask]) -> Vec<Continuation> {
    let fleet = Fleet::start(&demo_7m(), arguments);
    let results = runtime().block_on(generate_all(&fleet.grpc, asks));
    fleet.stop();
    results.into_iter().map(|result| result.unwrap()).collect()
}

fn assert_same(expected: &[Continuation], found: &[Continuation], how: &str) {
    for (index, (expected, found)) in expected.iter().zip(found).enumerate() {
        assert_eq!(expected.tokens, found.tokens, "{how}: tokens of request {index}");
        assert_eq!(expected.logprob_bits, found.logprob_bits, "{how}: log probabilities of request {index}");
    }
}

#[test]
fn i5_same_tokens_however_a_request_is_served() {
    let asks = requests();
    let fleet = Fleet::start(&demo_7m(), &["--workers", "1", "--threads", "1"]);
    let runtime = runtime();
    let alone: Vec<Continuation> = runtime.block_on(async {
        let mut client = connect(&fleet.grpc).await;
        let mut results = Vec::new();
        for ask in &asks {
            results.push(generate(&mut client, ask, |_| {}).await.unwrap());
        }
        results
    });
    assert!(alone.iter().zip(&asks).all(|(done, ask)| done.tokens.len() == ask.max_tokens as usize));
    assert!(alone.iter().all(|done| done.tokens.len() == done.logprob_bits.len()));

    for seed in 1..=3u64 {
        let mut order: Vec<usize> = (0..asks.len()).collect();
        let mut random = Random(seed);
        for last in (1..order.len()).rev() {
            order.swap(last, random.below(last as u64 + 1) as usize);
        }
        let found = runtime.block_on(async {
            let client = connect(&fleet.grpc).await;
            let mut tasks = Vec::new();
            for &index in &order {
                let (mut client, ask) = (client.clone(), asks[index].clone());
                tasks.push((index, tokio::spawn(async move { generate(&mut client, &ask, |_| {}).await })));
                tokio::time::sleep(Duration::from_millis(random.below(8))).await;
            }
            let mut found = vec![None; asks.len()];
            for (index, task) in tasks {
                found[index] = Some(task.await.unwrap().unwrap());
            }
            found.into_iter().flatten().collect::<Vec<_>>()
        });
        assert_same(&alone, &found, &format!("arrival order of seed {seed}"));
    }
    fleet.stop();

    for arguments in [
        ["--workers", "1", "--threads", "2", "--step-tokens", "512"],
        ["--workers", "1", "--threads", "2", "--step-tokens", "33"],
        ["--workers", "2", "--threads", "1", "--step-tokens", "64"],
        ["--workers", "3", "--threads", "2", "--step-tokens", "128"],
    ] {
        assert_same(&alone, &all_at_once(&arguments, &asks), &arguments.join(" "));
    }
}

#[test]
fn i5_same_tokens_when_sequences_are_preempted() {
    let asks = requests();
    let roomy = all_at_once(&["--workers", "1"], &asks);
    // 512 tokens hold about four of these requests at a time.
    let tight = all_at_once(&["--workers", "1", "--kv-tokens", "512"], &asks);
    assert_same(&roomy, &tight, "under KV pressure");
}
