// SPDX-License-Identifier: Apache-2.0

//! Generate under a grammar: refusals before a request is queued, and a resume in the middle of a
//! grammar.

use proto::v1::grammar::Kind;
use proto::v1::{FinishReason, Grammar, StringList};
use proto::worker::v1 as wire;
use tonic::Code;

use crate::harness::{WorkerFixture, fleet};

fn constrained(worker: &WorkerFixture, kind: Kind) -> wire::GenerateRequest {
    let mut request = worker.greedy(&[1, 2, 3], 300);
    let sampling = request.sampling.as_mut().unwrap();
    (sampling.temperature, sampling.seed) = (Some(1.0), Some(11));
    request.grammar = Some(Grammar { kind: Some(kind), lenient: false });
    request
}

#[tokio::test(flavor = "multi_thread")]
async fn a_stream_can_be_resumed_in_the_middle_of_its_grammar() {
    let (_directory, _weight_server, mut worker) = fleet().await;
    let schema =
        r#"{"type": "array", "items": {"type": "string", "maxLength": 8}, "minItems": 4, "maxItems": 6}"#;
    let mut request = constrained(&worker, Kind::JsonSchema(schema.to_owned()));
    request.sampling.as_mut().unwrap().mirostat = Some(2);
    let mut frames = worker.client.generate(request.clone()).await.unwrap().into_inner();
    let (mut whole, mut states) = (Vec::new(), Vec::new());
    while let Some(frame) = frames.message().await.unwrap() {
        if let Some(wire::generate_frame::Frame::Tokens(tokens)) = frame.frame {
            whole.extend(tokens.ids);
            states.push(tokens.sampler_state);
        }
    }
    assert!(whole.len() > 8, "{whole:?}");
    for sent in [1, whole.len() / 2, whole.len()] {
        let mut rest = request.clone();
        rest.tokens.extend_from_slice(&whole[..sent]);
        rest.sampler_state = states[sent - 1].clone();
        let resumed = worker.generate(rest).await.unwrap();
        assert_eq!(resumed.tokens, whole[sent..], "after {sent}");
        assert_eq!(resumed.finished.unwrap().reason(), FinishReason::Stop);
    }
    let mut other = request;
    other.tokens.extend([whole[0], whole[0], whole[0]]);
    other.sampler_state = states[0].clone();
    let status = worker.generate(other).await.unwrap_err();
    assert_eq!(status.code(), Code::InvalidArgument, "{status}");
    assert!(status.message().contains("output so far"), "{status}");
}

fn check(request: &wire::GenerateRequest) -> wire::CheckGrammarRequest {
    let (fingerprint, grammar) = (request.fingerprint.clone(), request.grammar.clone());
    wire::CheckGrammarRequest { fingerprint, grammar, request_id: String::new() }
}

#[tokio::test(flavor = "multi_thread")]
async fn an_invalid_grammar_is_refused_with_its_field() {
    let (_directory, _weight_server, mut worker) = fleet().await;
    for (kind, word) in [
        (Kind::JsonSchema(r#"{"type": 5}"#.to_owned()), "#/type"),
        (Kind::JsonSchema(r#"{"type": "integer", "minimum": 5, "maximum": 3}"#.to_owned()), "minimum (5)"),
        (Kind::JsonSchema(r#"{"enum": []}"#.to_owned()), "nsatisfiable"),
        (Kind::JsonSchema(r#"{"not": {}}"#.to_owned()), "#/not"),
        (Kind::JsonSchema("false".to_owned()), "matches"),
        (Kind::Regex("[".to_owned()), "regex"),
        (Kind::Gbnf("start ::= \"a\"".to_owned()), "root"),
        (Kind::Choice(StringList { values: vec![] }), "empty"),
    ] {
        let request = constrained(&worker, kind);
        let check = check(&request);
        let status = worker.generate(request).await.unwrap_err();
        assert_eq!(status.code(), Code::InvalidArgument, "{status}");
        assert!(status.message().contains(word), "{status}");
        assert_eq!(status.metadata().get("ballast-field").unwrap(), "grammar");
        let alone = worker.client.check_grammar(check).await.unwrap_err();
        assert_eq!((alone.code(), alone.message()), (status.code(), status.message()));
        assert_eq!(alone.metadata().get("ballast-field").unwrap(), "grammar");
    }
    let sound = constrained(&worker, Kind::Regex("[a-f]+".to_owned()));
    worker.client.check_grammar(check(&sound)).await.unwrap();
    let another = wire::CheckGrammarRequest { fingerprint: "another".into(), ..check(&sound) };
    let status = worker.client.check_grammar(another).await.unwrap_err();
    assert_eq!(status.code(), Code::FailedPrecondition, "{status}");
    let stats = worker.stats().await;
    assert_eq!((stats.running, stats.waiting), (0, 0));
}

/// A grammar that panics inside llguidance 1.9.1 (an assertion about rules that only pass a
/// parameter on).
const BREAKS: &str = r#"start: perm::0x0
perm::_: "" %if is_ones([0:3]) | perm::set_bit(0) %if bit_clear(0) | "b" perm::set_bit(1) %if bit_clear(1)"#;

/// The thread is lost and the worker keeps serving, in release builds (abort on panic) and in
/// tests.
#[tokio::test(flavor = "multi_thread")]
async fn a_grammar_that_panics_the_compiler_fails_only_its_own_request() {
    let (_directory, _weight_server, mut worker) = fleet().await;
    for _ in 0..3 {
        let status = worker.generate(constrained(&worker, Kind::Lark(BREAKS.to_owned()))).await.unwrap_err();
        assert_eq!(status.code(), Code::Internal, "{status}");
        assert!(status.message().contains("bug of this program"), "{status}");
        let digits = worker.generate(constrained(&worker, Kind::Regex("[0-9]{4}".to_owned()))).await.unwrap();
        assert_eq!(digits.finished.unwrap().reason(), FinishReason::Stop);
    }
}

/// The automaton tracks which of the last characters were an "a". Random text visits ever more of
/// its states.
#[tokio::test(flavor = "multi_thread")]
async fn a_grammar_that_becomes_too_complex_ends_only_its_own_request() {
    let (_directory, _weight_server, mut worker) = fleet().await;
    let kind =
        Kind::Lark("start: A\nA: /[a-z ]*a[a-z ]{40}[0-9]/ & /[a-z ]*e[a-z ]{31}[a-z0-9]+/".to_owned());
    let generated = worker.generate(constrained(&worker, kind)).await.unwrap();
    let status = generated.cut.unwrap();
    assert_eq!(status.code(), Code::InvalidArgument, "{status}");
    assert!(status.message().contains("too complex"), "{status}");
    assert!(!generated.tokens.is_empty(), "the output has begun");
    let digits = worker.generate(constrained(&worker, Kind::Regex("[0-9]{4}".to_owned()))).await.unwrap();
    assert_eq!(digits.finished.unwrap().reason(), FinishReason::Stop);
    let stats = worker.stats().await;
    assert_eq!((stats.running, stats.waiting, stats.kv_used_tokens), (0, 0, 0));
}
