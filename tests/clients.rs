// SPDX-License-Identifier: Apache-2.0

//! What clients of other servers send, on a real fleet: log likelihoods of prompts, hints, fields
//! that no server knows, and the routes beside completions.

use serde_json::{Value, json};

use crate::harness::http::HttpClient;
use crate::harness::{ServedFleet, ballast, demo_7m, device, text};

const ONE_WORKER: [&str; 4] = ["--workers", "1", "--threads", "1"];
const PROMPT: &str = "def fibonacci(n):\n    if n < 2:\n        return n\n";

fn numbers(values: &Value) -> Vec<Option<f64>> {
    values.as_array().unwrap().iter().map(Value::as_f64).collect()
}

#[test]
fn a_prompt_is_scored_as_ballast_eval_scores_it() {
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("prompt.txt");
    std::fs::write(&file, PROMPT).unwrap();
    let mut eval = ballast();
    eval.arg("eval").arg(demo_7m()).arg("--text").arg(&file).args(["--json", "--device", &device()]);
    let printed = text(&eval.output().unwrap()).0;
    let eval: Value = serde_json::from_str(&printed).unwrap_or_else(|_| panic!("{printed:?}"));

    let fleet = ServedFleet::start(&demo_7m(), &ONE_WORKER);
    let http = HttpClient::connect(&fleet);
    let ask = |more: Value| {
        let mut body =
            json!({"prompt": PROMPT, "echo": true, "logprobs": 1, "max_tokens": 0, "temperature": 0});
        body.as_object_mut().unwrap().extend(more.as_object().unwrap().clone());
        body
    };
    let answer = http.post_json("/v1/completions", &ask(json!({})));
    let choice = &answer["choices"][0];
    assert_eq!(choice["text"], PROMPT, "{answer}");
    assert_eq!(answer["usage"]["completion_tokens"], 0, "{answer}");
    let scores = numbers(&choice["logprobs"]["token_logprobs"]);
    assert_eq!((scores[0], scores.len() as u64), (None, answer["usage"]["prompt_tokens"].as_u64().unwrap()));
    let loss = -scores.iter().flatten().sum::<f64>();
    assert_eq!(eval["tokens"], scores.len() - 1, "{eval}");
    let perplexity = (loss / (scores.len() - 1) as f64).exp();
    let expected = eval["perplexity"].as_f64().unwrap();
    assert!((perplexity / expected - 1.0).abs() < 1e-5, "{perplexity} {expected}");
    let tokens = choice["logprobs"]["tokens"].as_array().unwrap();
    // The first token is the model's BOS, which is not in the text.
    assert_eq!(tokens[1..].iter().map(|token| token.as_str().unwrap()).collect::<String>(), PROMPT);
    let offsets = choice["logprobs"]["text_offset"].as_array().unwrap();
    assert_eq!((&offsets[1], &offsets[2]), (&json!(0), &json!(tokens[1].as_str().unwrap().len())));
    // lm-eval compares with the most probable token.
    for (score, top) in scores.iter().zip(choice["logprobs"]["top_logprobs"].as_array().unwrap()).skip(1) {
        let top: Vec<f64> = top.as_object().unwrap().values().map(|it| it.as_f64().unwrap()).collect();
        assert!(
            top.iter().all(|it| *it >= score.unwrap()) && (1..=2).contains(&top.len()),
            "{score:?} {top:?}"
        );
    }

    let longer = http.post_json("/v1/completions", &ask(json!({"max_tokens": 2})));
    let both = numbers(&longer["choices"][0]["logprobs"]["token_logprobs"]);
    assert_eq!((&both[..scores.len()], both.len()), (&scores[..], scores.len() + 2), "{longer}");
    let events = http.post_stream("/v1/completions", &ask(json!({"max_tokens": 2, "stream": true})));
    let streamed: Vec<_> = events
        .iter()
        .filter(|event| event["choices"][0]["logprobs"].is_object())
        .flat_map(|event| numbers(&event["choices"][0]["logprobs"]["token_logprobs"]))
        .collect();
    assert_eq!(streamed, both);

    let vllm = json!({"prompt": PROMPT, "prompt_logprobs": 3, "max_tokens": 1});
    let answer = http.post_json("/v1/completions", &vllm);
    let of_prompt = answer["choices"][0]["prompt_logprobs"].as_array().unwrap();
    assert_eq!((&of_prompt[0], of_prompt.len()), (&Value::Null, scores.len()));
    assert!(of_prompt[1..].iter().all(|entry| (3..=4).contains(&entry.as_object().unwrap().len())));
    let ids = http.post_json("/tokenize", &json!({"prompt": PROMPT}));
    let second = &of_prompt[1][ids["tokens"][1].to_string()];
    assert_eq!(second["logprob"].as_f64(), scores[1], "{answer}");
    for (body, word) in [
        (json!({"prompt": "x", "max_tokens": 0}), "max_tokens"),
        (json!({"prompt": "x", "prompt_logprobs": 21}), "0 to 20"),
        (json!({"prompt": "x", "prompt_logprobs": 1, "stream": true}), "stream"),
        (
            json!({"prompt": vec!["x ".repeat(3000); 64], "echo": true, "logprobs": 20, "max_tokens": 0}),
            "fewer prompts",
        ),
    ] {
        let (status, text) = http.post("/v1/completions", &body);
        assert!(status == 400 && text.contains(word), "{status} {text}");
    }
    fleet.stop();
}

#[test]
fn the_end_of_a_scored_prompt_s_output_has_an_entry_without_a_log_probability() {
    let fleet = ServedFleet::start(&demo_7m(), &ONE_WORKER);
    let http = HttpClient::connect(&fleet);
    let end = http.post_json("/tokenize", &json!({"prompt": "<|endoftext|>", "add_special_tokens": false}));
    let bias = json!({end["tokens"][0].to_string(): 100});
    // lm-eval asks for one token and takes its entry away; this token is the end.
    let mut body = json!({
        "prompt": PROMPT, "echo": true, "logprobs": 1, "max_tokens": 1, "temperature": 0, "logit_bias": bias,
    });
    let answer = http.post_json("/v1/completions", &body);
    let choice = &answer["choices"][0];
    assert_eq!((&choice["finish_reason"], &choice["text"]), (&json!("stop"), &json!(PROMPT)), "{answer}");
    let scores = numbers(&choice["logprobs"]["token_logprobs"]);
    let prompt_tokens = answer["usage"]["prompt_tokens"].as_u64().unwrap() as usize;
    assert_eq!((scores.len(), scores.last()), (prompt_tokens + 1, Some(&None)), "{answer}");
    assert!(scores[1..prompt_tokens].iter().all(Option::is_some), "{answer}");
    assert_eq!(choice["logprobs"]["tokens"][prompt_tokens], "<|endoftext|>", "{answer}");

    body["stream"] = json!(true);
    let events = http.post_stream("/v1/completions", &body);
    let scored = events.iter().filter(|event| event["choices"][0]["logprobs"].is_object());
    let streamed = scored.flat_map(|event| numbers(&event["choices"][0]["logprobs"]["token_logprobs"]));
    assert_eq!(streamed.collect::<Vec<_>>(), scores);

    body["echo"] = json!(false);
    let events = http.post_stream("/v1/completions", &body);
    assert!(events.iter().all(|event| event["choices"][0]["logprobs"].is_null()), "{events:?}");
    fleet.stop();
}

#[test]
fn tokens_that_share_a_text_keep_their_log_probabilities() {
    let fleet = ServedFleet::start(&demo_7m(), &ONE_WORKER);
    let http = HttpClient::connect(&fleet);
    // Half a character: many tokens of one byte are probable after it.
    let ids = http.post_json("/tokenize", &json!({"prompt": "x = \"\u{1F600}", "return_token_strs": true}));
    let tokens = ids["tokens"].as_array().unwrap();
    let prompt = &tokens[..tokens.len() - 1];
    let body = json!({"prompt": prompt, "max_tokens": 6, "logprobs": 20, "ignore_eos": true, "temperature": 2, "seed": 3});
    let answer = http.post_json("/v1/completions", &body);
    let logprobs = &answer["choices"][0]["logprobs"];
    let names = logprobs["tokens"].as_array().unwrap();
    for (index, top) in logprobs["top_logprobs"].as_array().unwrap().iter().enumerate() {
        let top = top.as_object().unwrap();
        assert!((20..=21).contains(&top.len()), "{top:?}");
        let own = top.values().any(|value| *value == logprobs["token_logprobs"][index]);
        assert!(own && !top.contains_key("\u{fffd}"), "{} in {top:?}", names[index]);
    }
    let mut by_id = body.clone();
    by_id["return_tokens_as_token_ids"] = json!(true);
    let answer = http.post_json("/v1/completions", &by_id);
    let names = answer["choices"][0]["logprobs"]["tokens"].as_array().unwrap();
    assert!(names.iter().all(|name| name.as_str().unwrap().starts_with("token_id:")), "{answer}");
    fleet.stop();
}

#[test]
fn hints_are_ignored_and_unknown_fields_are_named_unless_requests_are_strict() {
    let fleet = ServedFleet::start(&demo_7m(), &ONE_WORKER);
    let http = HttpClient::connect(&fleet);
    let send = |http: &HttpClient, body: &Value| {
        http.runtime.block_on(async {
            let request = http.client.post(format!("{}/v1/completions", http.url)).json(body);
            let reply = request.send().await.unwrap();
            let named =
                reply.headers().get("x-ballast-ignored-fields").map(|it| it.to_str().unwrap().to_owned());
            (reply.status().as_u16(), named, reply.text().await.unwrap())
        })
    };
    let hints = json!({
        "prompt": "x", "max_tokens": 1, "reasoning_effort": "low", "verbosity": "low", "cache_prompt": true,
        "prediction": {"type": "content", "content": "x"}, "enable_thinking": false,
        "structured_outputs": {"grammar": "start: \"a\""}, "guided_grammar": "start: \"a\"",
    });
    let (status, named, text) = send(&http, &hints);
    assert_eq!((status, named), (200, None), "{text}");
    let mut unknown = json!({"prompt": "x", "max_tokens": 1, "min_pp": 0.5, "\u{e9}\n": 1});
    unknown["y".repeat(500_000)] = json!(1);
    let (status, named, _) = send(&http, &unknown);
    let named = named.unwrap();
    assert!(status == 200 && named.starts_with("min_pp, ?, yyy") && named.len() < 100, "{named}");
    for (body, word) in [
        (json!({"prompt": "x", "modalities": ["audio"]}), "modalities"),
        (json!({"prompt": "x", "guided_regex": "a", "structured_outputs": {"regex": "b"}}), "guided_regex"),
    ] {
        let (status, _, text) = send(&http, &body);
        assert!(status == 400 && text.contains(word), "{text}");
    }
    let usage = json!({"include_usage": true, "continuous_usage_stats": true});
    let body =
        json!({"prompt": "x", "max_tokens": 5, "ignore_eos": true, "stream": true, "stream_options": usage});
    let events = http.post_stream("/v1/completions", &body);
    let counts: Vec<u64> =
        events.iter().map(|event| event["usage"]["completion_tokens"].as_u64().unwrap()).collect();
    assert!(counts.is_sorted() && counts.last() == Some(&5), "{counts:?}");
    fleet.stop();

    let strict = [&ONE_WORKER[..], &["--strict-requests"]].concat();
    let fleet = ServedFleet::start(&demo_7m(), &strict);
    let http = HttpClient::connect(&fleet);
    assert_eq!(send(&http, &hints).0, 200);
    let (status, _, text) = send(&http, &json!({"prompt": "x", "min_pp": 0.5}));
    assert!(status == 400 && text.contains("min_pp"), "{status} {text}");
    fleet.stop();
}

#[test]
fn routes_of_other_servers_and_odd_requests_have_useful_answers() {
    let fleet = ServedFleet::start(&demo_7m(), &ONE_WORKER);
    let http = HttpClient::connect(&fleet);
    let get = |path: &str| -> Value {
        let (status, text) = http.get(path);
        assert_eq!(status, 200, "{path}: {text}");
        serde_json::from_str(&text).unwrap()
    };
    assert_eq!(get("/")["name"], "ballast");
    assert_eq!(get("/version")["version"], env!("CARGO_PKG_VERSION"));
    let info = get("/server_info");
    assert_eq!(info["models"][0]["workers"], 1, "{info}");
    assert_eq!(get("/v1/models/")["object"], "list");
    let id = get("/v1/models")["data"][0]["id"].as_str().unwrap().to_owned();
    assert_eq!(get(&format!("/v1/models/{id}"))["id"], id);

    let tokens = http.post_json(
        "/tokenize/",
        &json!({"model": id, "prompt": PROMPT, "add_special_tokens": false, "return_token_strs": true}),
    );
    assert_eq!(tokens["count"], tokens["tokens"].as_array().unwrap().len());
    assert_eq!(tokens["max_model_len"], info["models"][0]["max_model_len"]);
    let texts: String =
        tokens["token_strs"].as_array().unwrap().iter().map(|it| it.as_str().unwrap()).collect();
    assert_eq!(texts, PROMPT);
    let named = get(&format!("/tokenizer_info?model={id}"));
    assert_eq!(
        (&named["eos_token"], &named["model_max_length"]),
        (&json!("<|endoftext|>"), &tokens["max_model_len"])
    );
    assert_eq!(get("/tokenizer_info"), named);
    assert_eq!(http.get("/tokenizer_info?model=none").0, 404);
    let text = http.post_json("/detokenize", &json!({"tokens": tokens["tokens"]}));
    assert_eq!(text["prompt"], PROMPT);
    let (status, text) = http.post("/detokenize", &json!({"tokens": [99_999_999]}));
    assert!(status == 400 && text.contains("tokens[0]"), "{text}");

    let raw = |path: &str, kind: &str, body: Vec<u8>| {
        http.runtime.block_on(async {
            let request = http.client.post(format!("{}{path}", http.url)).header("content-type", kind);
            let reply = request.header("x-request-id", "client-7").body(body).send().await.unwrap();
            if kind == "application/json" {
                assert_eq!(reply.headers()["x-request-id"], "client-7");
            }
            let grpc = reply.headers().get("grpc-status").map(|it| it.to_str().unwrap().to_owned());
            (reply.status().as_u16(), grpc, reply.text().await.unwrap())
        })
    };
    let json_body = br#"{"prompt": "x", "max_tokens": 1}"#;
    let marked = [b"\xef\xbb\xbf".as_slice(), json_body].concat();
    let (status, _, text) = raw("/v1/completions", "application/json", marked);
    assert_eq!(status, 200, "{text}");
    assert!(text.contains("cmpl-client-7") && text.contains("predicted_ms"), "{text}");
    let lone = br#"{"prompt": "\ud83d"}"#.to_vec();
    let (status, _, text) = raw("/v1/completions", "application/json", lone);
    assert!(status == 400 && text.contains("halves of a character"), "{text}");
    let (_, grpc, _) = raw("/ballast.v1.Inference/NoSuchMethod", "application/grpc", vec![0; 5]);
    assert_eq!(grpc.as_deref(), Some("12"));
    let (_, grpc, _) = raw("/other.Service/Method", "application/grpc", vec![0; 5]);
    assert_eq!(grpc.as_deref(), Some("12"));

    let metrics = http.get("/metrics").1;
    for line in metrics.lines().filter_map(|line| line.strip_prefix("# TYPE ")) {
        let name = line.split(' ').next().unwrap();
        assert!(metrics.contains(&format!("# HELP {name} ")), "{name} has no help");
    }
    fleet.stop();
}

#[test]
fn outputs_are_limited_to_tokens_and_texts_and_prompts_are_truncated() {
    let fleet = ServedFleet::start(&demo_7m(), &ONE_WORKER);
    let http = HttpClient::connect(&fleet);
    let ask = |more: Value| {
        let mut body = json!({"prompt": "def fibonacci(n):\n", "max_tokens": 16, "temperature": 0});
        body.as_object_mut().unwrap().extend(more.as_object().unwrap().clone());
        http.post_json("/v1/completions", &body)
    };
    let free = ask(json!({"return_token_ids": true}));
    let text = free["choices"][0]["text"].as_str().unwrap();
    let ids = free["choices"][0]["token_ids"].as_array().unwrap();
    let allowed = [ids[3].clone(), ids[5].clone()];
    let few = ask(json!({"allowed_token_ids": allowed, "return_token_ids": true}));
    let written = few["choices"][0]["token_ids"].as_array().unwrap();
    assert!(written.len() == 16 && written.iter().all(|id| allowed.contains(id)), "{few}");

    let stop = &text[8..14];
    let cut = ask(json!({"stop": stop, "include_stop_str_in_output": true}));
    let end = text.find(stop).unwrap() + stop.len();
    assert_eq!(cut["choices"][0]["text"], text[..end], "{cut}");
    let other = ask(json!({"bad_words": [stop, "never"]}));
    let other = other["choices"][0]["text"].as_str().unwrap();
    assert!(!other.contains(stop) && !other.is_empty(), "{stop:?} in {other:?}");

    let short = ask(json!({"truncate_prompt_tokens": 3, "return_token_ids": true}));
    assert_eq!(short["usage"]["prompt_tokens"], 3, "{short}");
    let whole = free["choices"][0]["prompt_token_ids"].as_array().unwrap();
    assert_eq!(short["choices"][0]["prompt_token_ids"], json!(whole[whole.len() - 3..]));
    let long = json!({"prompt": "x ".repeat(9000), "truncate_prompt_tokens": -1});
    assert_eq!(ask(long)["choices"][0]["finish_reason"], "length");
    for (more, param) in [
        (json!({"allowed_token_ids": [99_999_999]}), "allowed_token_ids"),
        (json!({"bad_words": [""]}), "bad_words"),
        (json!({"bad_words": ["x"], "guided_regex": "a"}), "bad_words"),
        (json!({"truncate_prompt_tokens": 0}), "truncate_prompt_tokens"),
    ] {
        let mut body = json!({"prompt": "x"});
        body.as_object_mut().unwrap().extend(more.as_object().unwrap().clone());
        let (status, text) = http.post("/v1/completions", &body);
        let error: Value = serde_json::from_str(&text).unwrap();
        assert_eq!((status, &error["error"]["param"]), (400, &json!(param)), "{body}: {text}");
    }
    fleet.stop();
}
