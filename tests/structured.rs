// SPDX-License-Identifier: Apache-2.0

//! Structured output and sampling parameters on a real fleet.

use crate::harness::http::HttpClient;
use crate::harness::{ServedFleet, demo_7m};
use serde_json::{Value, json};

fn text(answer: &Value, choice: usize) -> &str {
    assert_eq!(answer["choices"][choice]["finish_reason"], "stop", "{answer}");
    answer["choices"][choice]["text"].as_str().unwrap()
}

#[test]
fn output_is_what_the_grammar_says() {
    let fleet = ServedFleet::start(&demo_7m(), &["--workers", "2", "--threads", "1"]);
    let http = HttpClient::connect(&fleet);
    let ask = |more: Value| {
        let mut body = json!({"prompt": "def answer():\n    return ", "max_tokens": 200, "seed": 4});
        body.as_object_mut().unwrap().extend(more.as_object().unwrap().clone());
        body
    };
    let schema = json!({
        "type": "object",
        "properties": {
            "name": {"type": "string", "maxLength": 12},
            "kind": {"enum": ["function", "class"]},
            "line": {"type": "integer", "minimum": 1, "maximum": 999},
        },
        "required": ["name", "kind", "line"],
        "additionalProperties": false,
    });
    let format =
        json!({"type": "json_schema", "json_schema": {"name": "symbol", "schema": schema, "strict": true}});
    let body = ask(json!({"response_format": format, "n": 3, "temperature": 1.2}));
    let answer = http.post_json("/v1/completions", &body);
    for choice in 0..3 {
        let value: Value = serde_json::from_str(text(&answer, choice)).unwrap();
        assert!(value["name"].as_str().unwrap().chars().count() <= 12, "{value}");
        assert!(["function", "class"].contains(&value["kind"].as_str().unwrap()), "{value}");
        assert!((1..=999).contains(&value["line"].as_i64().unwrap()), "{value}");
        assert_eq!(value.as_object().unwrap().len(), 3, "{value}");
    }
    assert_eq!(answer["choices"], http.post_json("/v1/completions", &body)["choices"], "the same again");
    let mut streamed = body.clone();
    streamed["stream"] = json!(true);
    let events = http.post_stream("/v1/completions", &streamed);
    let pieces = events.iter().filter(|event| event["choices"][0]["index"] == 1);
    let pieces: String = pieces.filter_map(|event| event["choices"][0]["text"].as_str()).collect();
    assert_eq!(pieces, text(&answer, 1));

    let choice = http.post_json("/v1/completions", &ask(json!({"guided_choice": ["yes", "no"]})));
    assert!(["yes", "no"].contains(&text(&choice, 0)));
    let regex =
        http.post_json("/v1/completions", &ask(json!({"structured_outputs": {"regex": "[A-F]{4}-\\d{2}"}})));
    assert_eq!(text(&regex, 0).len(), 7);
    let gbnf = http.post_json("/v1/completions", &ask(json!({"grammar": "root ::= \"<\" [a-z]{1,9} \">\""})));
    assert!(text(&gbnf, 0).starts_with('<') && text(&gbnf, 0).ends_with('>'));

    for (more, param, word) in [
        (
            json!({"response_format": {"type": "json_schema", "json_schema": {"schema": {"type": "strin"}}}}),
            "response_format",
            "strin",
        ),
        (json!({"guided_json": {"type": "integer", "minimum": 5, "maximum": 4}}), "guided_json", "minimum"),
        (json!({"guided_json": {"not": {}}}), "guided_json", "#/not"),
        (json!({"guided_json": {"enum": []}}), "guided_json", "nsatisfiable"),
        (
            json!({"guided_json": {"type": "string", "minLength": 5, "maxLength": 3}}),
            "guided_json",
            "minLength",
        ),
        (json!({"guided_choice": []}), "guided_choice", "empty"),
        (json!({"guided_regex": "("}), "guided_regex", "regex"),
        (json!({"guided_json": {"type": "string", "maxlength": 4}}), "guided_json", "maxlength"),
        (json!({"guided_json": {"minItems": -1}}), "guided_json", "allowed are"),
        (json!({"grammar": "root ::= item"}), "grammar", "item"),
        (json!({"grammar": "root ::= \"a\"", "ignore_eos": true}), "ignore_eos", "grammar"),
        (json!({"guided_regex": "a", "guided_choice": ["a"]}), "guided_choice", "together"),
    ] {
        let (status, answer) = http.post("/v1/completions", &ask(more.clone()));
        let error: Value = serde_json::from_str(&answer).unwrap();
        assert_eq!((status, error["error"]["param"].as_str()), (400, Some(param)), "{more}: {answer}");
        assert!(error["error"]["message"].as_str().unwrap().contains(word), "{more}: {answer}");
    }
    fleet.stop();
}

#[test]
fn samplers_of_all_kinds_are_served_and_repeatable() {
    let fleet = ServedFleet::start(&demo_7m(), &["--workers", "1", "--threads", "2"]);
    let http = HttpClient::connect(&fleet);
    for more in [
        json!({"dynatemp_range": 0.5, "typical_p": 0.9, "top_n_sigma": 2.0}),
        json!({"xtc_probability": 0.5, "xtc_threshold": 0.1}),
        json!({"dry_multiplier": 0.8, "dry_allowed_length": 2, "dry_sequence_breakers": ["\n", "def"]}),
        json!({"mirostat": 1, "mirostat_tau": 3.0}),
        json!({"mirostat": 2, "mirostat_eta": 0.3}),
    ] {
        let mut body = json!({"prompt": "import ", "max_tokens": 24, "seed": 3});
        body.as_object_mut().unwrap().extend(more.as_object().unwrap().clone());
        let first = http.post_json("/v1/completions", &body);
        assert_eq!(first["choices"], http.post_json("/v1/completions", &body)["choices"], "{more}");
    }
    // Greedy decoding repeats itself here; DRY ends the repetition.
    let looping = json!({"prompt": "x = 1\nx = 1\nx = 1\nx = 1\n", "max_tokens": 40, "temperature": 0});
    let mut dry = looping.clone();
    dry["dry_multiplier"] = json!(5.0);
    dry["dry_sequence_breakers"] = json!([]);
    let of = |body: &Value| http.post_json("/v1/completions", body)["choices"][0]["text"].clone();
    assert_ne!(of(&looping), of(&dry));

    let best = json!({"prompt": "def f(", "max_tokens": 8, "seed": 5, "best_of": 6, "n": 2, "logprobs": 0});
    let best = http.post_json("/v1/completions", &best);
    assert_eq!(best["choices"].as_array().unwrap().len(), 2);
    let mean = |choice: usize| {
        let logprobs = best["choices"][choice]["logprobs"]["token_logprobs"].as_array().unwrap();
        logprobs.iter().map(|logprob| logprob.as_f64().unwrap()).sum::<f64>() / logprobs.len() as f64
    };
    assert!(mean(0) >= mean(1), "the best comes first");
    assert!(best["usage"]["completion_tokens"].as_u64().unwrap() > 16, "all six are counted");
    fleet.stop();
}

#[test]
fn large_grammars_are_served_and_too_large_ones_are_refused_with_the_limit() {
    let fleet = ServedFleet::start(&demo_7m(), &["--workers", "1", "--threads", "1"]);
    let http = HttpClient::connect(&fleet);
    let ask = |more: Value| {
        let mut body = json!({"prompt": "x = ", "max_tokens": 60, "seed": 4, "temperature": 1.0});
        body.as_object_mut().unwrap().extend(more.as_object().unwrap().clone());
        http.post("/v1/completions", &body)
    };
    for count in [2_000, 50_000] {
        let choices: Vec<String> = (0..count).map(|n| format!("item {n}")).collect();
        let (status, answer) = ask(json!({"guided_choice": choices}));
        assert_eq!(status, 200, "{count} choices: {answer}");
        let answer: Value = serde_json::from_str(&answer).unwrap();
        assert!(choices.iter().any(|choice| choice == text(&answer, 0)), "{answer}");
    }
    let object = |n: usize| {
        let properties = (0..15).map(|p| (format!("field{n}_{p}"), json!({"type": "integer"})));
        json!({"type": "object", "properties": properties.collect::<serde_json::Map<_, _>>(), "additionalProperties": false})
    };
    let any_of: Vec<Value> = (0..50).map(object).collect();
    let (status, answer) = ask(json!({"guided_json": {"anyOf": any_of}}));
    assert_eq!(status, 200, "50 objects of 15 optional properties: {answer}");
    let lark = |count: usize, rule: &str| {
        let names: Vec<String> = (0..count).map(|n| format!("r{n}")).collect();
        let rules: String =
            (0..count).map(|n| format!("r{n}: {}\n", rule.replace('#', &n.to_string()))).collect();
        format!("start: {}\n{rules}s: \"a\" | \"b\" start\n", names.join(" | "))
    };
    let (status, answer) = ask(json!({"guided_grammar": lark(2000, "\"word# \" s")}));
    assert_eq!(status, 200, "2,000 rules: {answer}");

    let too_many: Vec<String> = (0..200_000).map(|n| format!("item {n}")).collect();
    for (more, param, word) in [
        (json!({"guided_choice": too_many}), "guided_choice", "allowed are at most"),
        (json!({"guided_grammar": lark(3900, "s")}), "guided_grammar", "max is"),
    ] {
        let (status, answer) = ask(more);
        let error: Value = serde_json::from_str(&answer).unwrap();
        assert_eq!((status, error["error"]["param"].as_str()), (400, Some(param)), "{answer}");
        assert!(error["error"]["message"].as_str().unwrap().contains(word), "{answer}");
    }
    fleet.stop();
}
