// SPDX-License-Identifier: Apache-2.0

//! Compares scores with the model's own logits, computed without an engine.

use kernels::Cpu;
use models::{ForwardLimits, WeightTable};
use ops::{Backend, KvLayout, KvTypes, Step, Weight};
use proto::worker::v1::{self as wire, score_frame};
use tonic::Code;

use crate::fake_weight_server::DemoModelFile;
use crate::harness::{WorkerFixture, fleet, fleet_with};

const TOKENS: [u32; 40] = {
    let mut tokens = [0; 40];
    let mut i = 0;
    while i < 40 {
        tokens[i] = (i as u32 * 97 + 5) % 8000;
        i += 1;
    }
    tokens
};

/// Logits of every position, from one step of the model.
fn logits(tokens: &[u32]) -> Vec<f32> {
    let file = DemoModelFile::demo();
    let mut backend = Cpu::new(1).unwrap();
    let mut table = WeightTable::new();
    for tensor in file.header.tensors() {
        let start = file.header.file_offset(tensor) as usize;
        let weight = Weight {
            dtype: tensor.dtype,
            dims: tensor.dims.iter().map(|&dim| dim as usize).collect(),
            layout: 0,
            data: file.bytes.slice(start..start + tensor.bytes as usize),
        };
        table.insert(tensor.name.clone(), weight).unwrap();
    }
    let rows = tokens.len();
    let limits = ForwardLimits { rows_max: rows, outputs_max: rows };
    let mut model = models::build(file.header.metadata(), table, &mut backend, limits).unwrap();
    let layout = KvLayout { block_tokens: rows, blocks: 1, layers: model.kv_layers(&KvTypes::default()) };
    let mut kv = backend.kv(&layout).unwrap();
    let positions: Vec<u32> = (0..rows as u32).collect();
    let step = Step {
        tokens,
        positions: &positions,
        sequences: &vec![0; rows],
        kv_slots: &positions,
        tables: &[&[0]],
        outputs: &positions,
    };
    let vocabulary = model_vocabulary(&file);
    let mut host = vec![0.0; rows * vocabulary];
    let mut take = |backend: &mut Cpu, run: std::ops::Range<usize>, logits: &_| {
        backend.read(logits, run.len(), &mut host[run.start * vocabulary..run.end * vocabulary])
    };
    model.forward(&mut backend, &mut kv, &step, &[], &mut take).unwrap();
    host
}

fn model_vocabulary(file: &DemoModelFile) -> usize {
    file.header.tensor("token_embd.weight").unwrap().dims[1] as usize
}

async fn score(worker: &WorkerFixture, request: wire::ScoreRequest) -> Vec<score_frame::Frame> {
    let mut frames = worker.client.clone().score(request).await.unwrap().into_inner();
    let mut all = Vec::new();
    while let Some(frame) = frames.message().await.unwrap() {
        all.push(frame.frame.unwrap());
    }
    all
}

fn request(worker: &WorkerFixture) -> wire::ScoreRequest {
    wire::ScoreRequest {
        fingerprint: worker.fingerprint.clone(),
        tokens: TOKENS.to_vec(),
        ..Default::default()
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn scored_logits_equal_the_models_bit_by_bit() {
    let expected = logits(&TOKENS);
    for step_tokens in [512, 64] {
        let narrow = |config: &mut worker::WorkerConfig| {
            config.step_tokens = Some(step_tokens);
            config.running_max = config.running_max.min(step_tokens);
        };
        let (_directory, _weight_server, mut worker) = fleet_with(narrow).await;
        let mut bytes = Vec::new();
        for frame in score(&worker, request(&worker)).await {
            let score_frame::Frame::Logits(piece) = frame else { panic!("logits") };
            assert!(piece.len() <= 1 << 20);
            bytes.extend_from_slice(&piece);
        }
        let values: Vec<f32> =
            bytes.chunks_exact(4).map(|b| f32::from_le_bytes(b.try_into().unwrap())).collect();
        assert_eq!(values.len(), expected.len());
        assert!(values == expected, "the logits differ");
        assert_eq!(worker.stats().await.kv_used_tokens, 0);
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn scored_log_probabilities_match_the_logits() {
    let (_directory, _weight_server, worker) = fleet().await;
    let expected = logits(&TOKENS);
    let vocabulary = expected.len() / TOKENS.len();
    let frames = score(&worker, wire::ScoreRequest { top_logprobs: Some(2), ..request(&worker) }).await;
    let scored: Vec<_> = frames
        .into_iter()
        .flat_map(|frame| match frame {
            score_frame::Frame::Scored(scored) => scored.logprobs,
            score_frame::Frame::Logits(_) => panic!("log probabilities"),
        })
        .collect();
    assert_eq!(scored.len(), TOKENS.len() - 1);
    for ((row, &next), scored) in expected.chunks(vocabulary).zip(&TOKENS[1..]).zip(scored) {
        let sum: f64 = row.iter().map(|&logit| f64::from(logit).exp()).sum();
        let logprob = f64::from(row[next as usize]) - sum.ln();
        assert!((f64::from(scored.logprob) - logprob).abs() < 1e-4, "{} and {logprob}", scored.logprob);
        let best = row.iter().enumerate().max_by(|a, b| a.1.total_cmp(b.1)).unwrap().0;
        assert_eq!((scored.top_tokens[0], scored.top_tokens.len()), (best as u32, 2));
        assert!(scored.top_logprobs[0] >= scored.top_logprobs[1]);
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_score_whose_client_is_gone_is_cancelled() {
    let (_directory, _weight_server, mut worker) = fleet().await;
    let tokens = TOKENS.repeat(12);
    let frames = worker.client.score(wire::ScoreRequest { tokens, ..request(&worker) }).await.unwrap();
    drop(frames);
    worker.until("an empty engine", |stats| stats.kv_used_tokens == 0 && stats.running == 0).await;
    let status =
        worker.client.score(wire::ScoreRequest { tokens: vec![], ..request(&worker) }).await.unwrap_err();
    assert_eq!(status.code(), Code::InvalidArgument, "{status}");
}

/// Scored tokens are not cached, so an idle worker frees their KV blocks. The blocks of a prompt
/// stay cached.
#[tokio::test(flavor = "multi_thread")]
async fn an_idle_worker_releases_kv_cache_memory() {
    let (_directory, _weight_server, mut worker) = fleet().await;
    let tokens = TOKENS.repeat(12);
    let mut frames =
        worker.client.score(wire::ScoreRequest { tokens, ..request(&worker) }).await.unwrap().into_inner();
    while frames.message().await.unwrap().is_some() {}
    worker.until("all memory back", |stats| stats.kv_mapped_bytes == Some(0)).await;

    let prompt = worker.greedy(&TOKENS.repeat(3), 2);
    let first = worker.generate(prompt.clone()).await.unwrap();
    worker.until("what was kept", |stats| stats.kv_used_tokens == 0 && stats.kv_cached_tokens > 0).await;
    assert!(worker.stats().await.kv_mapped_bytes > Some(0));
    assert_eq!(worker.generate(prompt).await.unwrap().tokens, first.tokens);
    assert!(worker.stats().await.prompt_tokens_cached > 0);
}
