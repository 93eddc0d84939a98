// SPDX-License-Identifier: Apache-2.0

//! Requests for embeddings, beside requests that generate: the vectors have the same bits however
//! the engine computes their tokens.

use crate::fake::{FakeModel, VOCAB, answers, id_of, oracle, request, row_of, run_out};
use engine::{EmbedRequest, Engine, EngineConfig, EngineOutput, FinishReason, KvBudget, RequestId};
use models::{OutputKind, Pooling};
use ops::{KvType, Reference};
use proptest::prelude::*;
use std::collections::HashMap;

fn embed(id: u64, tokens: Vec<u32>, pooling: Pooling) -> EmbedRequest {
    EmbedRequest {
        id: RequestId(id),
        tokens,
        pooling,
        deadline: None,
        priority: 0,
        tenant: 0,
        scope: prefix::Scope::default(),
    }
}

/// The vector that the fake model gives for these tokens.
fn vector(tokens: &[u32], pooling: Pooling) -> Vec<f32> {
    let rows = (1..=tokens.len()).map(|end| row_of(OutputKind::HiddenState, &tokens[..end]));
    match pooling {
        Pooling::Rank => row_of(OutputKind::Labels, tokens),
        Pooling::Last => row_of(OutputKind::HiddenState, tokens),
        Pooling::Mean => {
            let rows: Vec<Vec<f32>> = rows.collect();
            let mean = |column: usize| {
                let sum = rows.iter().fold(0.0, |sum, row| sum + f64::from(row[column]));
                (sum / tokens.len() as f64) as f32
            };
            (0..rows[0].len()).map(mean).collect()
        }
    }
}

fn engine(block_tokens: usize, kv_tokens: usize, step_tokens: usize) -> Engine<Reference> {
    let config = EngineConfig {
        block_tokens,
        kv_types: KvType::F32.into(),
        step_tokens,
        running_max: 5,
        ..EngineConfig::new(KvBudget::Tokens(kv_tokens))
    };
    Engine::new(Box::new(FakeModel::new(&config)), Reference::new(), &config).unwrap()
}

fn vectors(outputs: &[EngineOutput]) -> HashMap<RequestId, Vec<u32>> {
    let vector = |output: &EngineOutput| match output {
        EngineOutput::Embedding { id, values } => Some((*id, values.iter().map(|x| x.to_bits()).collect())),
        _ => None,
    };
    outputs.iter().filter_map(vector).collect()
}

proptest! {
    /// Few blocks: sequences are preempted. Texts begin alike: prefixes are shared.
    #[test]
    fn i5_a_vector_has_the_same_bits_in_every_batch(
        block_tokens in 1..8_usize,
        step_tokens in 5..30_usize,
        texts in prop::collection::vec((0..3_usize, 1..40_usize, 0..4_u32), 1..12),
    ) {
        let poolings = [Pooling::Mean, Pooling::Last, Pooling::Rank];
        let mut engine = engine(block_tokens, 64, step_tokens);
        let (mut expected, mut generated) = (HashMap::new(), Vec::new());
        for (id, (kind, len, start)) in (0..).zip(texts) {
            let tokens: Vec<u32> = (0..len as u32).map(|place| (place * place + start / 2) % VOCAB as u32).collect();
            if start == 3 {
                generated.push(request(id, tokens, 15));
                continue;
            }
            let bits = vector(&tokens, poolings[kind]).iter().map(|x| x.to_bits()).collect::<Vec<_>>();
            expected.insert(RequestId(id), bits);
            engine.submit_embed(embed(id, tokens, poolings[kind])).unwrap();
        }
        for request in &generated {
            engine.submit(request.clone()).unwrap();
        }
        let outputs = run_out(&mut engine);
        prop_assert_eq!(vectors(&outputs), expected);
        let answers = answers(outputs);
        for request in &generated {
            prop_assert_eq!(&answers[&request.id], &oracle(request));
        }
    }
}

#[test]
fn an_embedding_of_the_last_token_uses_cached_blocks_and_a_mean_computes_every_row() {
    let mut engine = engine(4, 256, 64);
    let tokens: Vec<u32> = (0..18).collect();
    for (id, pooling, cached) in
        [(1, Pooling::Last, 0), (2, Pooling::Last, 16), (3, Pooling::Mean, 0), (4, Pooling::Rank, 16)]
    {
        engine.submit_embed(embed(id, tokens.clone(), pooling)).unwrap();
        let outputs = run_out(&mut engine);
        let Some(EngineOutput::Finished { reason, usage, .. }) = outputs.last() else { panic!("no end") };
        assert_eq!((*reason, usage.cached_tokens, usage.prompt_tokens), (FinishReason::Embedded, cached, 18));
    }
    // The blocks that an embedding has filled serve a prompt.
    engine.submit(request(5, tokens, 1)).unwrap();
    let outputs = run_out(&mut engine);
    assert!(matches!(outputs[0], EngineOutput::Admitted { cached_tokens: 16, .. }), "{outputs:?}");
}

#[test]
fn a_cancelled_embedding_releases_its_blocks() {
    let mut engine = engine(4, 256, 5);
    engine.submit_embed(embed(1, (0..40).collect(), Pooling::Mean)).unwrap();
    let mut out = Vec::new();
    engine.step(std::time::Duration::ZERO, &mut out).unwrap();
    assert!(engine.stats().kv_blocks_used > 0);
    assert!(engine.cancel(RequestId(1), &mut out));
    assert_eq!(engine.stats().kv_blocks_used, 0);
    assert_eq!(out.iter().map(id_of).max(), Some(RequestId(1)));
    engine.check_integrity().unwrap();
}
