// SPDX-License-Identifier: Apache-2.0

//! Clients that do not read their streams, beside clients that do.

use std::time::{Duration, Instant};

use proto::v1::inference_client::InferenceClient;
use tonic::transport::Endpoint;

use crate::harness::admin::worker_stats;
use crate::harness::api::{TestRequest, generate_all, read, runtime};
use crate::harness::{ServedFleet, demo_7m, eventually};

/// Each of these streams holds more than half of the KV cache when it stalls.
const UNREAD: u64 = 2;
const KV_TOKENS: &str = "1024";
const OTHER_PROMPT: u32 = 500;
/// What the client of the unread streams takes of each of them: a few tokens.
const WINDOW_BYTES: u32 = 1 << 10;

fn request(seed: u64, prompt: u32, max_tokens: u32) -> TestRequest {
    TestRequest {
        prompt: (0..prompt).map(|i| 10 + (i * 13 + seed as u32) % 900).collect(),
        max_tokens,
        temperature: 0.7,
        seed,
        // Frames of some hundred bytes, so that few of them fill the buffers on the way.
        top_logprobs: 20,
        ..TestRequest::default()
    }
}

#[test]
#[ignore = "nightly"]
fn nightly_streams_that_are_not_read_delay_no_other_and_are_whole_when_they_are_read() {
    let arguments = ["--workers", "1", "--threads", "1", "--kv-tokens", KV_TOKENS];
    let fleet = ServedFleet::start(&demo_7m(), &arguments);
    let runtime = runtime();
    let unread: Vec<TestRequest> = (0..UNREAD).map(|seed| request(seed, 20, 1000)).collect();
    let expected = runtime.block_on(generate_all(&fleet.grpc, &unread));
    let streams = runtime.block_on(async {
        let endpoint = Endpoint::from_shared(fleet.grpc.clone()).unwrap();
        let channel = endpoint.initial_stream_window_size(WINDOW_BYTES).connect().await.unwrap();
        let mut client = InferenceClient::new(channel);
        let mut streams = Vec::new();
        for request in &unread {
            streams.push(client.generate(request.request()).await.unwrap().into_inner());
        }
        streams
    });
    let mut before = 0;
    let stalled = eventually("the streams stall", || {
        std::thread::sleep(Duration::from_millis(300));
        let stats = runtime.block_on(worker_stats(&fleet));
        let is_stalled = stats.output_tokens == std::mem::replace(&mut before, stats.output_tokens);
        is_stalled.then_some(stats)
    });
    eprintln!("measured: stalled streams hold {} tokens", stalled.kv_used_tokens);
    let other = request(9, OTHER_PROMPT, 20);
    let free = stalled.kv_total_tokens - stalled.kv_used_tokens;
    assert!(free < u64::from(OTHER_PROMPT), "the other request needs their blocks: {stalled:?}");

    // Without their blocks, it waits until the router ends the streams, 30 s later.
    let since = Instant::now();
    let answer = runtime.block_on(generate_all(&fleet.grpc, &[other])).remove(0).unwrap();
    eprintln!("measured: a request beside {UNREAD} unread streams takes {:?}", since.elapsed());
    assert_eq!(answer.tokens.len(), 20);
    assert!(runtime.block_on(worker_stats(&fleet)).preemptions > stalled.preemptions);
    for ((stream, request), expected) in streams.into_iter().zip(&unread).zip(expected) {
        assert_eq!(runtime.block_on(read(stream, request, |_| {})).unwrap(), expected.unwrap());
    }
    fleet.stop();
}
