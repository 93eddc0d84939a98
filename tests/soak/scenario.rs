// SPDX-License-Identifier: Apache-2.0

//! The requests of the soak: every kind of stream whose output is a function of the request alone.

use proto::v1::generate_request::Prompt;
use proto::v1::grammar::Kind;
use proto::v1::{GenerateRequest, Grammar, Sampling, TokenIds};
use serde_json::{Value, json};

/// A request, and what it is called in the table.
#[derive(Debug, Clone)]
pub(super) struct Scenario {
    pub(super) name: String,
    pub(super) call: Call,
}

#[derive(Debug, Clone)]
pub(super) enum Call {
    Grpc(Box<GenerateRequest>),
    /// Body of `/v1/completions`.
    Http(Value),
}

impl Scenario {
    /// Number of choices in the response.
    pub(super) fn choices(&self) -> usize {
        match &self.call {
            Call::Grpc(request) => request.n.max(1) as usize,
            Call::Http(body) => body["n"].as_u64().unwrap_or(1) as usize,
        }
    }
}

const SCHEMA: &str = r#"{"type": "object", "properties": {"name": {"type": "string", "maxLength": 12},
"line": {"type": "integer", "minimum": 1, "maximum": 999}, "kind": {"enum": ["function", "class"]}},
"required": ["name", "line", "kind"], "additionalProperties": false}"#;

/// The requests to one model. Prompts begin with the same tokens here and there, so that some are
/// hits of the prefix cache.
pub(super) fn scenarios(model: &str) -> Vec<Scenario> {
    let mut all = Vec::new();
    let mut add = |name: &str, call: Call| all.push(Scenario { name: format!("{model} {name}"), call });
    let grpc = |prompt: u32, max_tokens: u32, sampling: Sampling| GenerateRequest {
        model: model.to_owned(),
        prompt: Some(Prompt::Tokens(TokenIds { ids: (0..prompt).map(|i| 10 + i * 13 % 900).collect() })),
        max_tokens,
        sampling: Some(Sampling { seed: Some(u64::from(prompt)), ..sampling }),
        ignore_eos: true,
        top_logprobs: Some(2),
        ..GenerateRequest::default()
    };
    let boxed = |request: GenerateRequest| Call::Grpc(Box::new(request));
    let greedy = Sampling { temperature: Some(0.0), ..Sampling::default() };
    let sampled = Sampling { temperature: Some(0.8), top_p: Some(0.95), ..Sampling::default() };
    add("gRPC greedy", boxed(grpc(20, 200, greedy.clone())));
    add("gRPC sampled", boxed(grpc(21, 300, sampled.clone())));
    add("gRPC long prompt", boxed(grpc(700, 60, greedy)));
    let mirostat = Sampling { mirostat: Some(2), ..Sampling::default() };
    add("gRPC mirostat", boxed(grpc(33, 250, mirostat)));
    let penalties = Sampling {
        repetition_penalty: Some(1.2),
        frequency_penalty: Some(0.3),
        dry_multiplier: Some(0.8),
        ..sampled.clone()
    };
    add("gRPC penalties", boxed(grpc(40, 200, penalties)));
    add("gRPC 3 choices", boxed(GenerateRequest { n: 3, ..grpc(25, 120, sampled.clone()) }));
    let grammar = Grammar { kind: Some(Kind::JsonSchema(SCHEMA.to_owned())), lenient: false };
    let structured =
        GenerateRequest { grammar: Some(grammar), ignore_eos: false, ..grpc(30, 200, sampled.clone()) };
    add("gRPC JSON schema", boxed(structured));
    let stop = GenerateRequest { stop: vec!["e".repeat(3), "\n\n\n".into()], ..grpc(22, 300, sampled) };
    add("gRPC stop strings", boxed(stop));

    let http = |prompt: &str, more: Value| {
        let mut body = json!({
            "model": model, "prompt": prompt, "max_tokens": 200, "seed": 7, "logprobs": 1,
            "return_token_ids": true, "stream": true,
        });
        body.as_object_mut().unwrap().extend(more.as_object().unwrap().clone());
        Call::Http(body)
    };
    add("HTTP greedy", http("def add(a, b):\n", json!({"temperature": 0, "ignore_eos": true})));
    add("HTTP sampled", http("class Queue:\n", json!({"temperature": 0.9, "ignore_eos": true})));
    add("HTTP stop string", http("import os\n", json!({"temperature": 0.7, "stop": ["return", "\n\n\n"]})));
    add("HTTP regular expression", http("x = ", json!({"guided_regex": "[a-f]{20,90}-[0-9]{4}"})));
    add("HTTP whole", http("for i in range(", json!({"stream": false, "n": 2, "ignore_eos": true})));
    all
}
