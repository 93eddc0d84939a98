// SPDX-License-Identifier: Apache-2.0

//! Fuzzes the messages that a worker gets. Any message is refused with a text, or its request runs
//! in an engine until it ends. A batch neighbour gets the same tokens as alone.

#![no_main]

use std::sync::LazyLock;

use engine::{Engine, EngineConfig, EngineOutput, KvBudget, Request, RequestId};
use fake::{FakeModel, GenerationResult, answers, id_of, oracle, request, run_out};
use libfuzzer_sys::fuzz_target;
use ops::{KvType, Reference};
use prost::Message;
use proto::worker::v1 as wire;

#[allow(dead_code, reason = "the engine's tests use all of it")]
#[path = "../../../crates/engine/tests/engine/fake.rs"]
mod fake;

const FUZZED: RequestId = RequestId(1);
const KV_TOKENS: usize = 120;

fn neighbour() -> Request {
    request(2, vec![3, 1, 4, 1, 5], 12)
}

static NEIGHBOUR: LazyLock<GenerationResult> = LazyLock::new(|| oracle(&neighbour()));

fn engine() -> Engine<Reference> {
    let kv = KvBudget::Tokens(KV_TOKENS);
    let config = EngineConfig { block_tokens: 4, kv_types: KvType::F32.into(), ..EngineConfig::new(kv) };
    Engine::new(Box::new(FakeModel::new(&config)), Reference::new(), &config).expect("an engine starts")
}

/// Runs the engine with a neighbour. Returns the outputs of the fuzzed request.
fn run(mut engine: Engine<Reference>) -> Vec<EngineOutput> {
    engine.submit(neighbour()).expect("the neighbour is accepted");
    let (fuzzed, others): (Vec<_>, Vec<_>) =
        run_out(&mut engine).into_iter().partition(|output| id_of(output) == FUZZED);
    assert_eq!(answers(others)[&RequestId(2)], *NEIGHBOUR);
    fuzzed
}

fn generate(message: wire::GenerateRequest) -> Result<(), String> {
    let tokens_max = message.max_tokens;
    let request = worker::fuzzing::generate_request(message, FUZZED)?;
    let prior_output = request.prior_output;
    let mut engine = engine();
    engine.submit(request).map_err(|refusal| refusal.to_string())?;
    let answer = answers(run(engine)).remove(&FUZZED).expect("an accepted request has outputs");
    assert!(answer.reason.is_some());
    let tokens = prior_output + answer.tokens.len();
    assert!(tokens <= KV_TOKENS + 1 && (tokens_max == 0 || tokens <= tokens_max as usize));
    Ok(())
}

fn score(message: wire::ScoreRequest) -> Result<(), String> {
    let request = worker::fuzzing::score_request(message, FUZZED)?;
    let mut engine = engine();
    engine.submit_score(request).map_err(|refusal| refusal.to_string())?;
    assert!(matches!(run(engine).last(), Some(EngineOutput::Finished { .. })));
    Ok(())
}

fuzz_target!(|message: &[u8]| {
    let generated = wire::GenerateRequest::decode(message).map(generate);
    let scored = wire::ScoreRequest::decode(message).map(score);
    for result in [generated, scored].into_iter().flatten() {
        if let Err(refusal) = result {
            assert!(!refusal.is_empty());
        }
    }
});
