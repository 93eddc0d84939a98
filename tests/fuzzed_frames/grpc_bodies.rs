// SPDX-License-Identifier: Apache-2.0

//! gRPC calls with mutated messages. Calls that stop or drain something are left out: they would
//! do it.

use std::path::PathBuf;
use std::time::{Duration, Instant};

use bytes::Bytes;
use prost::Message;
use proto::v1::generate_request::Prompt;
use proto::v1::grammar::Kind;
use proto::v1::{DetokenizeRequest, GenerateRequest, Grammar, Sampling, TokenIds, TokenizeRequest};
use proto::weights::v1::{AllowTokenRequest, LoadRequest, VerifyRequest};
use proto::worker::v1 as worker;
use tokio::io::{AsyncRead, AsyncWrite};

use super::mutation::mutated;
use crate::harness::ServedFleet;
use crate::harness::random::SeededRandom;

/// A call that is not answered within this time is given up: it generates.
const CALL_TIME: Duration = Duration::from_millis(300);

const CALLS_PER_CONNECTION: usize = 20;

struct Target {
    /// `None`: the router's public address.
    socket: Option<&'static str>,
    methods: &'static [&'static str],
}

const TARGETS: [Target; 4] = [
    Target {
        socket: None,
        methods: &[
            "ballast.v1.Inference/Generate",
            "ballast.v1.Inference/Tokenize",
            "ballast.v1.Inference/Detokenize",
            "ballast.v1.Inference/ListModels",
            "grpc.health.v1.Health/Check",
            "grpc.reflection.v1.ServerReflection/ServerReflectionInfo",
        ],
    },
    Target {
        socket: Some("worker-0.sock"),
        methods: &[
            "ballast.worker.v1.Worker/Generate",
            "ballast.worker.v1.Worker/CheckGrammar",
            "ballast.worker.v1.Worker/Score",
            "ballast.worker.v1.Worker/GetMetadata",
            "ballast.worker.v1.Worker/SubscribeKvEvents",
            "ballast.worker.v1.Worker/ResetPrefixCache",
            "ballast.worker.v1.Worker/Stats",
        ],
    },
    Target {
        socket: Some("weights-admin.sock"),
        methods: &[
            "ballast.weights.v1.WeightServer/Load",
            "ballast.weights.v1.WeightServer/GetStatus",
            "ballast.weights.v1.WeightServer/AllowToken",
            "ballast.weights.v1.WeightServer/ForgetToken",
            "ballast.weights.v1.WeightServer/Verify",
            "ballast.weights.v1.WeightServer/WatchEvents",
        ],
    },
    Target {
        socket: Some("supervisor.sock"),
        methods: &[
            "ballast.fleet.v1.Fleet/GetStatus",
            "ballast.fleet.v1.Fleet/WatchEvents",
            "ballast.fleet.v1.Fleet/LoadModel",
            "grpc.health.v1.Health/Check",
        ],
    },
];

/// Messages of all services: a message of one is a mutation of the other's.
///
/// A worker looks at requests only if they name its `fingerprint`.
fn messages(fingerprint: Bytes) -> Vec<Vec<u8>> {
    let tokens = || TokenIds { ids: (10..60).collect() };
    let sampling =
        Sampling { temperature: Some(0.7), top_k: Some(5), dry_multiplier: Some(0.5), ..Sampling::default() };
    let grammar = |kind: Kind| Grammar { kind: Some(kind), lenient: false };
    let public = GenerateRequest {
        prompt: Some(Prompt::Tokens(tokens())),
        max_tokens: 8,
        sampling: Some(sampling.clone()),
        stop: vec!["ab".into()],
        n: 2,
        top_logprobs: Some(2),
        grammar: Some(grammar(Kind::Regex("[a-z]{3,9}".into()))),
        ..GenerateRequest::default()
    };
    let schema = r#"{"type": "array", "items": {"enum": ["a", 1, null]}, "maxItems": 3}"#;
    let inner = worker::GenerateRequest {
        fingerprint: fingerprint.clone(),
        tokens: (10..60).collect(),
        prompt_tokens: 45,
        max_tokens: 12,
        grammar: Some(grammar(Kind::JsonSchema(schema.into()))),
        ..worker::GenerateRequest::default()
    };
    let check = worker::CheckGrammarRequest {
        fingerprint: fingerprint.clone(),
        grammar: Some(grammar(Kind::Gbnf("root ::= \"a\" | [b-d] root".into()))),
        request_id: "request-1".into(),
    };
    let score =
        worker::ScoreRequest { fingerprint, tokens: (10..40).collect(), ..worker::ScoreRequest::default() };
    let load =
        LoadRequest { path: "/nowhere/model.gguf".into(), model: "nothing".into(), ..LoadRequest::default() };
    vec![
        public.encode_to_vec(),
        inner.encode_to_vec(),
        check.encode_to_vec(),
        score.encode_to_vec(),
        TokenizeRequest { text: "def f(x):\n".repeat(9), ..TokenizeRequest::default() }.encode_to_vec(),
        DetokenizeRequest { tokens: (0..99).collect(), ..DetokenizeRequest::default() }.encode_to_vec(),
        load.encode_to_vec(),
        VerifyRequest { model: "nothing".into(), ..VerifyRequest::default() }.encode_to_vec(),
        AllowTokenRequest { name: "stranger".into(), token: Bytes::from_static(&[7; 32]) }.encode_to_vec(),
        Vec::new(),
    ]
}

pub(super) async fn send_until(end: Instant, fleet: &ServedFleet, mut random: SeededRandom) {
    let seeds = messages(crate::harness::admin::worker_fingerprint(fleet).await);
    let (mut calls, mut answered) = (0, 0);
    while Instant::now() < end {
        let target = random.pick(&TARGETS);
        let path = target.socket.map(|name| fleet.runtime_dir().join(name));
        let bodies: Vec<_> = (0..CALLS_PER_CONNECTION)
            .map(|_| (*random.pick(target.methods), framed(&mut random, &seeds)))
            .collect();
        calls += bodies.len();
        answered += call_all(path, fleet.http.strip_prefix("http://").unwrap(), bodies).await;
    }
    eprintln!("measured: {calls} gRPC calls with fuzzed messages, {answered} answered in time");
    assert!(answered > 0, "no call was answered");
}

/// A message with its prefix of gRPC, which is wrong at times.
fn framed(random: &mut SeededRandom, seeds: &[Vec<u8>]) -> Bytes {
    let message = mutated(random, seeds);
    let length = match random.below(20) {
        0 => random.next() as u32,
        _ => message.len() as u32,
    };
    let compressed = u8::from(random.below(30) == 0);
    [&[compressed], &length.to_be_bytes()[..], &message].concat().into()
}

async fn call_all(path: Option<PathBuf>, address: &str, bodies: Vec<(&'static str, Bytes)>) -> usize {
    match path {
        Some(path) => call_on(tokio::net::UnixStream::connect(path).await.unwrap(), bodies).await,
        None => call_on(tokio::net::TcpStream::connect(address).await.unwrap(), bodies).await,
    }
}

/// Makes all calls at once on one connection. Returns how many were answered.
async fn call_on<S>(stream: S, bodies: Vec<(&'static str, Bytes)>) -> usize
where
    S: AsyncRead + AsyncWrite + Unpin + Send + 'static,
{
    let (mut client, connection) = h2::client::handshake(stream).await.unwrap();
    let connection = tokio::spawn(connection);
    let mut answers = Vec::new();
    for (method, body) in bodies {
        let request = http::Request::post(format!("http://x/{method}"))
            .header("content-type", "application/grpc")
            .header("te", "trailers");
        let Ok(ready) = client.ready().await else { break };
        client = ready;
        let Ok((answer, mut send)) = client.send_request(request.body(()).unwrap(), false) else { break };
        let _reset = send.send_data(body, true);
        answers.push(tokio::spawn(tokio::time::timeout(CALL_TIME, answer)));
    }
    let mut answered = 0;
    for answer in answers {
        answered += usize::from(matches!(answer.await.unwrap(), Ok(Ok(_))));
    }
    connection.abort();
    answered
}
