// SPDX-License-Identifier: Apache-2.0

//! Beam search over HTTP and gRPC. The outputs are compared with a search that the test makes
//! itself: it asks for one token at a time, and knows only the log probabilities of the reply.

use std::collections::HashMap;
use std::time::{Duration, Instant};

use proto::v1::generate_request::Prompt;
use proto::v1::{BeamSearch, GenerateFrame, GenerateRequest, TokenIds, generate_frame::Frame};
use serde_json::{Value, json};

use crate::harness::api::{connect, runtime};
use crate::harness::http::HttpClient;
use crate::harness::{
    ServedFleet, ballast, demo_7m, device, eventually, in_tree, proc, runs_on_host, streams_last_seconds,
    text,
};

const PATH: &str = "/v1/completions";
const LENGTH_PENALTY: f64 = 0.7;

/// The most probable tokens after these, with their log probabilities.
fn row(http: &HttpClient, tokens: &[u32], count: usize) -> Vec<(u32, f32)> {
    let body = json!({
        "prompt": tokens, "max_tokens": 1, "temperature": 0, "ignore_eos": true, "logprobs": count,
        "return_tokens_as_token_ids": true,
    });
    let answer = http.post_json(PATH, &body);
    let top = answer["choices"][0]["logprobs"]["top_logprobs"][0].as_object().unwrap();
    let entry = |(name, logprob): (&String, &Value)| {
        (name.strip_prefix("token_id:").unwrap().parse().unwrap(), logprob.as_f64().unwrap() as f32)
    };
    let mut row: Vec<(u32, f32)> = top.iter().map(entry).collect();
    row.sort_by(|a, b| b.1.total_cmp(&a.1).then(a.0.cmp(&b.0)));
    row.truncate(count);
    row
}

#[derive(Clone, Debug, PartialEq)]
struct Output {
    tokens: Vec<u32>,
    logprobs: Vec<f32>,
    stop_token: Option<u32>,
}

/// vLLM's search: all beams run to the limit, and the best of all outputs are chosen at the end. Of
/// several stop tokens, the most probable ends a beam.
fn searched(
    http: &HttpClient,
    prompt: &[u32],
    stops: &[u32],
    (width, max_tokens): (usize, usize),
) -> Vec<Output> {
    let sum = |logprobs: &[f32]| logprobs.iter().map(|&logprob| f64::from(logprob)).sum::<f64>();
    let score = |sum: f64, length: usize| sum / (length.max(1) as f64).powf(LENGTH_PENALTY);
    let start = Output { tokens: vec![], logprobs: vec![], stop_token: None };
    let (mut running, mut ended) = (vec![start], Vec::new());
    for _ in 0..max_tokens {
        let mut next = Vec::new();
        for beam in &running {
            let mut has_stopped = false;
            for (token, logprob) in row(http, &[prompt, &beam.tokens].concat(), 2 * width) {
                let mut beam = beam.clone();
                if stops.contains(&token) {
                    // Another stop token would end it with the same output.
                    if std::mem::replace(&mut has_stopped, true) {
                        continue;
                    }
                    let sum = sum(&beam.logprobs) + f64::from(logprob);
                    beam.stop_token = Some(token);
                    ended.push((score(sum, beam.tokens.len()), beam));
                } else {
                    beam.tokens.push(token);
                    beam.logprobs.push(logprob);
                    next.push(beam);
                }
            }
        }
        next.sort_by(|a, b| sum(&b.logprobs).total_cmp(&sum(&a.logprobs)));
        next.truncate(width);
        running = next;
    }
    ended.extend(running.into_iter().map(|beam| (score(sum(&beam.logprobs), beam.tokens.len()), beam)));
    ended.sort_by(|a, b| b.0.total_cmp(&a.0));
    ended.into_iter().map(|(_, beam)| beam).take(width).collect()
}

fn output(choice: &Value) -> Output {
    let numbers = |value: &Value| value.as_array().unwrap().clone();
    let token = |token: &Value| token.as_u64().unwrap() as u32;
    let output = Output {
        tokens: numbers(&choice["token_ids"]).iter().map(token).collect(),
        logprobs: numbers(&choice["logprobs"]["token_logprobs"])
            .iter()
            .map(|logprob| logprob.as_f64().unwrap() as f32)
            .collect(),
        stop_token: choice["stop_reason"].as_u64().map(|token| token as u32),
    };
    let reason = if output.stop_token.is_some() { "stop" } else { "length" };
    assert_eq!(choice["finish_reason"], json!(reason), "{choice}");
    output
}

fn tokenize(http: &HttpClient, text: &str) -> Vec<u32> {
    let answer = http.post_json("/tokenize", &json!({"prompt": text}));
    serde_json::from_value(answer["tokens"].clone()).unwrap()
}

#[test]
fn the_choices_are_those_of_a_search_made_with_single_tokens() {
    let template = in_tree("tests/clients/chat.jinja");
    let arguments = ["--workers", "2", "--threads", "1", "--chat-template", template.to_str().unwrap()];
    let fleet = ServedFleet::start(&demo_7m(), &arguments);
    let http = HttpClient::connect(&fleet);
    let stops = [tokenize(&http, "\n"), tokenize(&http, " return"), tokenize(&http, ":")].concat();
    let mut prompts = Vec::new();
    let mut expected = Vec::new();
    for text in ["def add(a, b):\n    ", "import os\nimport ", "class"] {
        let prompt = tokenize(&http, text);
        expected.extend(searched(&http, &prompt, &stops, (4, 6)).into_iter().take(3));
        prompts.push(prompt);
    }
    assert!(expected.iter().any(|output| output.stop_token.is_some()), "{expected:?}");
    assert!(expected.iter().any(|output| output.stop_token.is_none()), "{expected:?}");
    let body = json!({
        "prompt": prompts, "max_tokens": 6, "use_beam_search": true, "n": 3, "best_of": 4,
        "length_penalty": LENGTH_PENALTY, "ignore_eos": true, "stop_token_ids": stops, "logprobs": 2,
        "return_token_ids": true, "temperature": 0.9, "seed": 1,
    });
    let answer = http.post_json(PATH, &body);
    let choices = answer["choices"].as_array().unwrap();
    let found: Vec<Output> = choices.iter().map(output).collect();
    assert_eq!(found, expected);
    let tokens: usize = expected.iter().map(|output| output.tokens.len()).sum();
    assert_eq!(answer["usage"]["completion_tokens"], json!(tokens), "{}", answer["usage"]);
    for choice in choices {
        let text = http.post_json("/detokenize", &json!({"tokens": choice["token_ids"]}));
        assert_eq!(text["prompt"], choice["text"], "{choice}");
    }
    // One beam is the most probable token each time.
    let greedy = json!({"prompt": prompts[0], "max_tokens": 12, "temperature": 0, "return_token_ids": true});
    let mut one_beam = greedy.clone();
    one_beam["use_beam_search"] = json!(true);
    let [greedy, one_beam] = [greedy, one_beam].map(|body| http.post_json(PATH, &body));
    assert_eq!(greedy["choices"], one_beam["choices"]);
    // Chats search too.
    let mut chat = json!({
        "messages": [{"role": "user", "content": "def f"}], "use_beam_search": true, "n": 2, "max_tokens": 5,
        "logprobs": true, "ignore_eos": true,
    });
    let answer = http.post_json("/v1/chat/completions", &chat);
    let [first, second] = [0, 1].map(|choice| {
        let entries = answer["choices"][choice]["logprobs"]["content"].as_array().unwrap();
        assert_eq!(entries.len(), 5, "{answer}");
        entries.iter().map(|entry| entry["logprob"].as_f64().unwrap()).sum::<f64>()
    });
    assert!(first >= second, "{answer}");
    chat["stream"] = json!(true);
    let (status, answer) = http.post("/v1/chat/completions", &chat);
    assert!(status == 400 && answer.contains("cannot be streamed"), "{answer}");
    fleet.stop();
}

/// Tokens and bits of the log probabilities of each choice.
type Choices = Vec<(Vec<u32>, Vec<u32>)>;

async fn searched_by_grpc(url: &str, request: &GenerateRequest) -> Choices {
    let mut stream = connect(url).await.generate(request.clone()).await.unwrap().into_inner();
    let mut choices: HashMap<u32, (Vec<u32>, Vec<u32>)> = HashMap::new();
    let mut ended = 0;
    while let Some(GenerateFrame { frame }) = stream.message().await.unwrap() {
        match frame {
            Some(Frame::Delta(delta)) => {
                let choice = choices.entry(delta.choice).or_default();
                choice.0.extend(delta.tokens);
                choice.1.extend(delta.logprobs.iter().map(|logprob| logprob.logprob.to_bits()));
            }
            Some(Frame::Finished(_)) => ended += 1,
            Some(Frame::Started(_)) | None => {}
        }
    }
    assert_eq!(ended, request.n);
    (0..request.n).map(|choice| choices.remove(&choice).unwrap()).collect()
}

#[test]
fn i6_a_search_whose_worker_dies_gives_the_same_choices() {
    let fleet = ServedFleet::start(&demo_7m(), &["--workers", "2", "--threads", "1"]);
    let http = HttpClient::connect(&fleet);
    let request = GenerateRequest {
        prompt: Some(Prompt::Tokens(TokenIds { ids: (5..60).collect() })),
        max_tokens: 300,
        n: 4,
        ignore_eos: true,
        top_logprobs: Some(0),
        beam_search: Some(BeamSearch { width: 8, ..BeamSearch::default() }),
        ..GenerateRequest::default()
    };
    runtime().block_on(async {
        let expected = searched_by_grpc(&fleet.grpc, &request).await;
        assert!(expected.iter().all(|(tokens, logprobs)| tokens.len() == 300 && logprobs.len() == 300));
        for round in 0..12 {
            let workers = fleet.processes_by_role("worker");
            let victim = workers[round % workers.len()].pid;
            let (found, ()) = tokio::join!(searched_by_grpc(&fleet.grpc, &request), async {
                tokio::time::sleep(Duration::from_millis(60)).await;
                proc::send_signal(victim, "KILL");
            });
            assert_eq!(found, expected, "round {round}");
        }
    });
    let resumes = http.metric("ballast:stream_resumes_total").unwrap_or(0.0);
    assert!(resumes >= 1.0, "no search lost its worker");
    // A client that goes away ends the search on the worker.
    let running = || http.metric("ballast:num_requests_running").unwrap_or(0.0);
    runtime().block_on(async {
        let impatient =
            tokio::time::timeout(Duration::from_millis(40), searched_by_grpc(&fleet.grpc, &request));
        assert!(impatient.await.is_err(), "the search took less than 40 ms");
    });
    eventually("the search ends", || (running() == 0.0).then_some(()));
    fleet.stop();
}

/// The configuration of the model, with further keys.
fn model_with(more: &str) -> String {
    let (path, device) = (demo_7m(), device());
    format!("[[models]]\nname = \"m\"\npath = {path:?}\nthreads = 1\ndevice = {device:?}\n{more}\n")
}

/// Deaths with other causes: early, at a place that the search had passed, and further than before.
#[test]
fn i6_a_search_that_loses_three_workers_is_not_blamed_for_them() {
    if !streams_last_seconds("a search that loses three workers") {
        return;
    }
    let fleet = ServedFleet::start(&demo_7m(), &["--workers", "1", "--threads", "1"]);
    let request = GenerateRequest {
        prompt: Some(Prompt::Tokens(TokenIds { ids: (5..60).collect() })),
        max_tokens: 1500,
        n: 2,
        ignore_eos: true,
        top_logprobs: Some(0),
        beam_search: Some(BeamSearch { width: 8, ..BeamSearch::default() }),
        ..GenerateRequest::default()
    };
    runtime().block_on(async {
        let started = Instant::now();
        let expected = searched_by_grpc(&fleet.grpc, &request).await;
        let alone = started.elapsed();
        let (found, ()) = tokio::join!(searched_by_grpc(&fleet.grpc, &request), async {
            for part in [0.4, 0.15, 0.7] {
                tokio::time::sleep(alone.mul_f64(part)).await;
                let worker = fleet.only_process("worker").pid;
                proc::send_signal(worker, "KILL");
                let is_back = || {
                    let next = fleet.try_processes()?.into_iter().find(|next| next.role == "worker")?;
                    (next.state == "ready" && next.pid != worker).then_some(())
                };
                tokio::task::block_in_place(|| eventually("the next worker", is_back));
            }
        });
        assert_eq!(found, expected);
    });
    let http = HttpClient::connect(&fleet);
    assert_eq!(http.metric("ballast:requests_quarantined_total").unwrap_or(0.0), 0.0);
    assert_eq!(http.metric("ballast:stream_resumes_total"), Some(3.0));
    fleet.stop();
}

#[test]
fn a_search_is_refused_if_its_beams_do_not_fit_and_ends_early_if_asked_to() {
    if !runs_on_host("a search that does not fit") {
        return;
    }
    let more = format!(
        "kv-tokens = 512\nrunning-max = 6\nchat-template = {:?}",
        in_tree("tests/clients/chat.jinja")
    );
    let fleet = ServedFleet::start_config(&model_with(&more));
    let http = HttpClient::connect(&fleet);
    let beams = |n: u32, max_tokens: u32| {
        json!({
            "prompt": "x = ", "use_beam_search": true, "n": n, "max_tokens": max_tokens, "ignore_eos": true,
            "return_token_ids": true,
        })
    };
    for (body, code) in [(beams(7, 4), "too_many_beams"), (beams(4, 200), "kv_budget_exceeded")] {
        let (status, answer) = http.post(PATH, &body);
        let error: Value = serde_json::from_str(&answer).unwrap();
        assert_eq!((status, error["error"]["code"].as_str()), (400, Some(code)), "{answer}");
    }
    assert_eq!(http.post(PATH, &beams(4, 100)).0, 200);
    // Chats have no maximum of their own: each output gets the share of the cache that is left.
    let mut all = beams(4, 0);
    all["max_tokens"] = Value::Null;
    all["messages"] = json!([{"role": "user", "content": "x = "}]);
    all.as_object_mut().unwrap().remove("prompt");
    let answer = http.post_json("/v1/chat/completions", &all);
    let length = |choice: &Value| choice["token_ids"].as_array().unwrap().len();
    let lengths: Vec<usize> = answer["choices"].as_array().unwrap().iter().map(length).collect();
    assert!(lengths.iter().all(|length| (80..=128).contains(length)), "{lengths:?}");
    // The most probable first tokens stop all outputs.
    let stops: Vec<u32> = row(&http, &tokenize(&http, "x = "), 3).iter().map(|&(token, _)| token).collect();
    let mut early = beams(2, 100);
    early["stop_token_ids"] = json!(stops);
    early["length_penalty"] = json!(3.0);
    let late = http.post_json(PATH, &early);
    early["early_stopping"] = json!(true);
    let early = http.post_json(PATH, &early);
    let all = |answer: &Value| answer["choices"].as_array().unwrap().iter().map(length).max().unwrap();
    assert!(all(&early) < 100 && all(&late) == 100, "{early} {late}");
    fleet.stop();
}

#[test]
fn tokens_of_all_beams_count_for_the_key_even_if_the_client_leaves() {
    let folder = tempfile::tempdir().unwrap();
    let keys = folder.path().join("keys.toml");
    let key = ballast().args(["key", "team-a", "--file"]).arg(&keys).output().unwrap();
    let key = text(&key).0.trim().to_owned();
    let config = format!("[access]\nkeys = {keys:?}\n{}", model_with("kv-tokens = 32768"));
    let fleet = ServedFleet::start_config(&config);
    let http = HttpClient::connect(&fleet);
    let post = |body: Value| http.client.post(format!("{}{PATH}", http.url)).bearer_auth(&key).json(&body);
    let used = async || {
        let metrics =
            http.client.get(format!("{}/metrics", http.url)).bearer_auth(&key).send().await.unwrap();
        let metrics = metrics.text().await.unwrap();
        let line = metrics.lines().find(|line| line.starts_with("ballast:key_generation_tokens_total"));
        line.map_or(0, |line| line.rsplit(' ').next().unwrap().parse().unwrap())
    };
    let search = |max_tokens: u32| {
        json!({
            "prompt": "x = ", "use_beam_search": true, "n": 1, "best_of": 8, "max_tokens": max_tokens,
            "ignore_eos": true,
        })
    };
    http.runtime.block_on(async {
        let answer: Value = post(search(50)).send().await.unwrap().json().await.unwrap();
        assert_eq!(answer["usage"]["completion_tokens"], 50);
        // The first token has one row, the others one for each beam.
        let finished: u64 = used().await;
        assert_eq!(finished, 1 + 49 * 8);
        let impatient = tokio::time::timeout(Duration::from_millis(500), post(search(3000)).send());
        assert!(impatient.await.is_err());
        let charged = used().await - finished;
        assert!(charged > 100, "{charged} tokens");
    });
    fleet.stop();
}

#[test]
fn what_does_not_go_together_with_beam_search_is_refused_by_name() {
    let fleet = ServedFleet::start(&demo_7m(), &["--workers", "1", "--threads", "1"]);
    let http = HttpClient::connect(&fleet);
    let beams = json!({"prompt": "x = ", "use_beam_search": true, "n": 2, "max_tokens": 4});
    for (field, value, param) in [
        ("stream", json!(true), "use_beam_search"),
        ("stop", json!(["x"]), "stop"),
        ("logit_bias", json!({"5": 1}), "logit_bias"),
        ("guided_regex", json!("a+"), "guided_regex"),
        ("allowed_token_ids", json!([1, 2]), "allowed_token_ids"),
        ("repetition_penalty", json!(1.2), "repetition_penalty"),
        ("frequency_penalty", json!(0.5), "frequency_penalty"),
        ("presence_penalty", json!(-0.5), "presence_penalty"),
        ("mirostat", json!(2), "mirostat"),
        ("length_penalty", json!(10.5), "length_penalty"),
        ("length_penalty", json!("long"), "length_penalty"),
        ("n", json!(17), "n"),
        ("best_of", json!(1), "best_of"),
        ("use_beam_search", json!("yes"), "use_beam_search"),
        ("early_stopping", json!("never"), "early_stopping"),
    ] {
        let mut body = beams.clone();
        body[field] = value;
        let (status, answer) = http.post(PATH, &body);
        let error: Value = serde_json::from_str(&answer).unwrap();
        assert_eq!((status, error["error"]["param"].as_str()), (400, Some(param)), "{body}: {answer}");
    }
    let alone = json!({"prompt": "x = ", "length_penalty": 2.0, "max_tokens": 4});
    let (status, answer) = http.post(PATH, &alone);
    assert!(status == 400 && answer.contains("beam search only"), "{answer}");
    let alone = json!({"prompt": "x = ", "early_stopping": true, "max_tokens": 4});
    let (status, answer) = http.post(PATH, &alone);
    assert!(status == 400 && answer.contains("beam search only"), "{answer}");
    // Neutral values ask for nothing.
    let neutral = json!({
        "prompt": "x = ", "max_tokens": 4, "use_beam_search": false, "length_penalty": 1.0, "early_stopping": false,
    });
    assert_eq!(http.post(PATH, &neutral).0, 200);
    let mut neutral = beams;
    neutral["repetition_penalty"] = json!(1.0);
    neutral["stop"] = Value::Null;
    let answer = http.post_json(PATH, &neutral);
    assert_eq!(answer["choices"].as_array().unwrap().len(), 2);
    fleet.stop();
}
