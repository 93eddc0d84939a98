// SPDX-License-Identifier: Apache-2.0

//! Generate: the tokens do not depend on other requests; refusals; clients that leave or read
//! slowly.

use std::path::Path;
use std::time::Duration;

use proto::v1::FinishReason;
use proto::worker::v1::{self as wire, generate_frame};
use tonic::Code;

use crate::figures::{FIGURES, NO_NUMBERS};
use crate::harness::{Generated, WorkerFixture, fleet, fleet_with};

/// llama.cpp's greedy output for the demo model. Ends at the first step whose two highest logits
/// are closer than `GAP`.
struct RecordedOutput {
    prompt: Vec<u32>,
    tokens: Vec<u32>,
}

/// Below this difference, the rounding of llama.cpp's activations decides.
const GAP: f64 = 0.3;

fn golden() -> Vec<RecordedOutput> {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("../demo/pycoder-7m-q8_0.greedy.jsonl");
    let ids = |value: &serde_json::Value| {
        value.as_array().unwrap().iter().map(|id| id.as_u64().unwrap() as u32).collect::<Vec<_>>()
    };
    let line = |line: &str| {
        let line: serde_json::Value = serde_json::from_str(line).unwrap();
        let gaps = line["gap"].as_array().unwrap();
        let sure = gaps.iter().take_while(|gap| gap.as_f64().unwrap() >= GAP).count();
        RecordedOutput { prompt: ids(&line["prompt_tokens"]), tokens: ids(&line["tokens"])[..sure].to_vec() }
    };
    std::fs::read_to_string(path).unwrap().lines().map(line).collect()
}

#[tokio::test(flavor = "multi_thread")]
async fn greedy_tokens_are_the_recorded_ones() {
    let (_directory, _weight_server, worker) = fleet().await;
    let golden = golden();
    assert!(
        golden.iter().map(|line| line.tokens.len()).sum::<usize>() > 200,
        "the recording has more than 200 tokens"
    );
    let all = golden.iter().map(|line| {
        let (mut worker, request) = (clone(&worker), worker.greedy(&line.prompt, 96));
        async move { worker.generate(request).await.unwrap() }
    });
    for (line, generated) in golden.iter().zip(futures::future::join_all(all).await) {
        assert_eq!(generated.tokens.len(), 96);
        assert_eq!(generated.tokens[..line.tokens.len()], line.tokens, "prompt {:?}", line.prompt);
        assert_eq!(generated.finished.unwrap().reason(), FinishReason::Length);
    }
}

fn clone(worker: &WorkerFixture) -> WorkerFixture {
    WorkerFixture {
        client: worker.client.clone(),
        channel: worker.channel.clone(),
        socket: worker.socket.clone(),
        fingerprint: worker.fingerprint.clone(),
        shutdown: service::Shutdown::default(),
        thread: None,
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn sampled_tokens_do_not_depend_on_batch_neighbours_or_chunked_prefill() {
    let (_directory, _weight_server, mut alone) = fleet().await;
    let request = |worker: &WorkerFixture, seed| {
        let mut request = worker.greedy(&golden()[13].prompt, 24);
        request.top_logprobs = Some(3);
        let sampling = request.sampling.as_mut().unwrap();
        (sampling.temperature, sampling.top_p, sampling.seed) = (Some(0.9), Some(0.95), Some(seed));
        request
    };
    let mut expected = Vec::new();
    for seed in 0..6 {
        expected.push(alone.generate(request(&alone, seed)).await.unwrap());
    }
    assert!(expected.iter().any(|e| e.tokens != expected[0].tokens), "seeds matter");
    let (_directory, _weight_server, batched) = fleet_with(|config| {
        (config.step_tokens, config.running_max, config.threads) = (Some(7), 3, 1);
    })
    .await;
    let all = (0..6).map(|seed| {
        let (mut worker, request) = (clone(&batched), request(&batched, seed));
        async move { worker.generate(request).await.unwrap() }
    });
    for (expected, generated) in expected.iter().zip(futures::future::join_all(all).await) {
        assert_eq!((&generated.tokens, &generated.logprobs), (&expected.tokens, &expected.logprobs));
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_stop_token_is_reported_and_not_sent() {
    let (_directory, _weight_server, mut worker) = fleet().await;
    let prompt = golden()[11].prompt.clone();
    let whole = worker.generate(worker.greedy(&prompt, 20)).await.unwrap();
    let stop = whole.tokens[9];
    let until = whole.tokens.iter().position(|&token| token == stop).unwrap();
    let mut request = worker.greedy(&prompt, 20);
    request.stop_tokens = vec![stop];
    let generated = worker.generate(request).await.unwrap();
    assert_eq!(generated.tokens, whole.tokens[..until]);
    let finished = generated.finished.unwrap();
    assert_eq!((finished.reason(), finished.stop_token), (FinishReason::Stop, Some(stop)));
}

#[tokio::test(flavor = "multi_thread")]
async fn a_resumed_stream_continues_with_the_same_tokens() {
    let (_directory, _weight_server, mut worker) = fleet().await;
    let mut request = worker.greedy(&golden()[3].prompt, 30);
    let sampling = request.sampling.as_mut().unwrap();
    (sampling.temperature, sampling.frequency_penalty) = (Some(0.8), Some(0.7));
    let whole = worker.generate(request.clone()).await.unwrap();
    for sent in [1, 11, 29] {
        let mut rest = request.clone();
        rest.tokens.extend_from_slice(&whole.tokens[..sent]);
        let resumed = worker.generate(rest).await.unwrap();
        assert_eq!(resumed.tokens, whole.tokens[sent..], "after {sent}");
    }
    let mut done = request.clone();
    done.tokens.extend_from_slice(&whole.tokens);
    assert_eq!(worker.generate(done).await.unwrap_err().code(), Code::InvalidArgument);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_client_that_leaves_frees_its_blocks() {
    let (_directory, _weight_server, mut worker) = fleet().await;
    for _ in 0..3 {
        let mut frames = worker.client.generate(worker.greedy(&[1, 2, 3], 400)).await.unwrap().into_inner();
        let first = frames.message().await.unwrap().unwrap().frame.unwrap();
        assert!(matches!(first, generate_frame::Frame::Admitted(_)));
        frames.message().await.unwrap().unwrap();
        let stats = worker.stats().await;
        assert!(stats.kv_used_tokens > 0 && stats.running == 1, "{stats:?}");
        drop(frames);
        worker.until("an empty engine", |stats| stats.kv_used_tokens == 0 && stats.running == 0).await;
    }
    assert!(worker.stats().await.output_tokens < 3 * 400, "the requests were cancelled before their end");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_slow_reader_pauses_its_own_request_only() {
    let (_directory, _weight_server, mut worker) = fleet().await;
    let mut lagging = worker.slow_client().await;
    let mut frames = lagging.generate(worker.greedy(&[1, 2, 3], 480)).await.unwrap().into_inner();
    let whole = worker.generate(worker.greedy(&[1, 2, 3], 480)).await.unwrap();
    assert_eq!(whole.tokens.len(), 480);
    tokio::time::sleep(Duration::from_millis(300)).await;
    let stats = worker.stats().await;
    assert!(stats.output_tokens < 960 && stats.running == 1, "the unread stream is paused: {stats:?}");
    let mut tokens = Vec::new();
    while let Some(frame) = frames.message().await.unwrap() {
        if let Some(generate_frame::Frame::Tokens(frame)) = frame.frame {
            tokens.extend(frame.ids);
        }
    }
    assert_eq!(tokens, whole.tokens, "the stream is complete once it is read");
}

#[tokio::test(flavor = "multi_thread")]
async fn refusals_are_statuses_before_the_first_frame() {
    let (_directory, _weight_server, mut worker) = fleet_with(|config| {
        (config.running_max, config.queue_max) = (1, 1);
    })
    .await;
    let good = worker.greedy(&[1, 2], 4);
    let refused: [(Code, &str, wire::GenerateRequest); 7] = [
        (
            Code::FailedPrecondition,
            "another",
            wire::GenerateRequest { fingerprint: "x".into(), ..good.clone() },
        ),
        (
            Code::InvalidArgument,
            "prompt",
            wire::GenerateRequest { tokens: vec![], prompt_tokens: 0, ..good.clone() },
        ),
        (Code::InvalidArgument, "prompt_tokens", wire::GenerateRequest { prompt_tokens: 3, ..good.clone() }),
        (
            Code::InvalidArgument,
            "99999999",
            wire::GenerateRequest { tokens: vec![99_999_999, 1], ..good.clone() },
        ),
        (Code::InvalidArgument, "logprobs", wire::GenerateRequest { top_logprobs: Some(21), ..good.clone() }),
        (
            Code::InvalidArgument,
            "context",
            wire::GenerateRequest { tokens: vec![1; 5000], prompt_tokens: 5000, ..good.clone() },
        ),
        (
            Code::InvalidArgument,
            "temperature",
            wire::GenerateRequest {
                sampling: Some(proto::v1::Sampling { temperature: Some(-1.0), ..Default::default() }),
                ..good.clone()
            },
        ),
    ];
    for (code, text, request) in refused {
        let status = worker.generate(request).await.unwrap_err();
        assert_eq!(status.code(), code, "{status}");
        assert!(status.message().contains(text), "{text}: {status}");
    }
    for &(name, change) in FIGURES {
        for value in NO_NUMBERS {
            let mut request = good.clone();
            change(request.sampling.get_or_insert_default(), value);
            let status = worker.generate(request).await.unwrap_err();
            assert_eq!(status.code(), Code::InvalidArgument, "{name} {value}: {status}");
            let message = status.message();
            assert!(message.contains(name) && message.contains("allowed"), "{name} {value}: {message}");
        }
    }
    let stats = worker.stats().await;
    assert_eq!((stats.running, stats.waiting), (0, 0));
    // One request runs, one waits, the third is refused.
    let long = worker.greedy(&[1, 2], 400);
    let mut running = worker.client.generate(long.clone()).await.unwrap().into_inner();
    running.message().await.unwrap();
    running.message().await.unwrap();
    let waiting = worker.client.generate(long.clone()).await.unwrap();
    let status = worker.client.generate(long).await.unwrap_err();
    assert_eq!(status.code(), Code::ResourceExhausted, "{status}");
    drop((running, waiting));
    worker.until("room", |stats| stats.running == 0 && stats.waiting == 0).await;
    let Generated { tokens, cut, .. } = worker.generate(good).await.unwrap();
    assert_eq!((tokens.len(), cut.is_none()), (4, true));
}

#[tokio::test(flavor = "multi_thread")]
async fn a_deadline_ends_a_stream_with_deadline_exceeded() {
    let (_directory, _weight_server, mut worker) = fleet().await;
    let request = wire::GenerateRequest { deadline_ms: 5, ..worker.greedy(&[1, 2], 480) };
    let generated = worker.generate(request).await.unwrap();
    assert_eq!(generated.cut.unwrap().code(), Code::DeadlineExceeded);
    assert!(generated.tokens.len() < 480);
    assert_eq!(worker.stats().await.kv_used_tokens, 0);
}
