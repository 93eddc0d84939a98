// SPDX-License-Identifier: Apache-2.0

//! `sampling` of a model: values for what a request leaves out, in every API.

use std::process::Command;

use proto::v1::generate_frame::Frame;
use proto::v1::generate_request::Prompt;
use proto::v1::inference_client::InferenceClient;
use proto::v1::{GenerateRequest, ListModelsRequest, Sampling};
use serde_json::{Value, json};
use tonic::transport::Channel;

use crate::harness::api::connect;
use crate::harness::http::HttpClient;
use crate::harness::separate::{SeparateProcesses, worker_config};
use crate::harness::{ServedFleet, ballast, demo_7m, eventually, model_table, serve_config, text};
use crate::tools::chat_model;

const PROMPT: &str = "def add(a, b):\n";

/// The text of a completion with one seed.
fn completion(http: &HttpClient, model: &str, more: &Value) -> String {
    let mut body = json!({"model": model, "prompt": PROMPT, "max_tokens": 16, "seed": 5, "ignore_eos": true});
    body.as_object_mut().unwrap().extend(more.as_object().unwrap().clone());
    let answer = http.post_json("/v1/completions", &body);
    answer["choices"][0]["text"].as_str().unwrap().to_owned()
}

/// The same over gRPC.
async fn grpc_completion(client: &mut InferenceClient<Channel>, model: &str, sampling: Sampling) -> String {
    let request = GenerateRequest {
        model: model.to_owned(),
        prompt: Some(Prompt::Text(PROMPT.to_owned())),
        max_tokens: 16,
        sampling: Some(Sampling { seed: Some(5), ..sampling }),
        ignore_eos: true,
        ..GenerateRequest::default()
    };
    let mut stream = client.generate(request).await.unwrap().into_inner();
    let mut text = String::new();
    while let Some(frame) = stream.message().await.unwrap() {
        if let Some(Frame::Delta(delta)) = frame.frame {
            text.push_str(&delta.text);
        }
    }
    text
}

#[test]
fn a_model_s_defaults_hold_for_what_a_request_leaves_out_in_every_api() {
    let folder = tempfile::tempdir().unwrap();
    let file = chat_model(folder.path());
    let defaults = "sampling = { temperature = 0, top-k = -1 }\naliases = [\"alias\"]";
    // A second name on the same copy has defaults of its own.
    let hot =
        model_table("hot", &file, "sampling = { temperature = 1.7, top-p = 0.9, repetition-penalty = 1.2 }");
    let config =
        format!("{}{}{hot}", model_table("greedy", &file, defaults), model_table("plain", &file, ""));
    let fleet = ServedFleet::start_config(&config);
    let http = HttpClient::connect(&fleet);

    let none = json!({});
    let greedy = completion(&http, "plain", &json!({"temperature": 0}));
    let drawn = completion(&http, "plain", &none);
    assert_ne!(greedy, drawn);
    for name in ["greedy", "alias"] {
        assert_eq!(completion(&http, name, &none), greedy, "{name}");
        assert_eq!(completion(&http, name, &json!({"temperature": null})), greedy, "{name}");
        assert_eq!(completion(&http, name, &json!({"temperature": 1})), drawn, "{name}");
    }
    let hot = json!({"temperature": 1.7, "top_p": 0.9, "repetition_penalty": 1.2});
    let expected = completion(&http, "plain", &hot);
    assert_eq!(completion(&http, "hot", &none), expected);
    let set = json!({"temperature": 1, "top_p": 1, "repetition_penalty": 1});
    assert_eq!(completion(&http, "hot", &set), drawn);

    http.runtime.block_on(async {
        let mut client = connect(&fleet.grpc).await;
        let default = Sampling::default();
        assert_eq!(grpc_completion(&mut client, "alias", default.clone()).await, greedy);
        assert_eq!(grpc_completion(&mut client, "hot", default.clone()).await, expected);
        let one = Sampling { temperature: Some(1.0), ..default };
        assert_eq!(grpc_completion(&mut client, "greedy", one).await, drawn);
        let models = client.list_models(ListModelsRequest {}).await.unwrap().into_inner().models;
        let greedy = models.iter().find(|model| model.name == "greedy").unwrap();
        let shown = greedy.sampling_defaults.clone().unwrap();
        assert_eq!((shown.temperature, shown.top_k, shown.top_p), (Some(0.0), Some(0), None));
    });

    // The other chat APIs.
    let greedy_text = |body: &Value, path: &str, pointer: &str| -> Vec<String> {
        let answers = (0..2).map(|_| http.post_json(path, body));
        answers.map(|answer| answer.pointer(pointer).unwrap().as_str().unwrap().to_owned()).collect()
    };
    let messages = json!([{"role": "user", "content": "def f():"}]);
    let anthropic = json!({"model": "greedy", "messages": messages, "max_tokens": 12});
    let responses = json!({"model": "greedy", "input": "def f():", "max_output_tokens": 12});
    for (path, body, pointer) in [
        ("/v1/messages", &anthropic, "/content/0/text"),
        ("/v1/responses", &responses, "/output/0/content/0/text"),
    ] {
        let texts = greedy_text(body, path, pointer);
        assert_eq!(texts[0], texts[1], "{path}");
    }
    let answer =
        http.post_json("/v1/responses", &json!({"model": "hot", "input": "x", "max_output_tokens": 4}));
    assert_eq!((&answer["temperature"], &answer["top_p"]), (&json!(1.7), &json!(0.9)), "{answer}");

    let shown: Value = serde_json::from_str(&http.get("/v1/models/hot").1).unwrap();
    assert_eq!(shown["sampling_defaults"], hot);
    let shown: Value = serde_json::from_str(&http.get("/server_info").1).unwrap();
    let plain = shown["models"].as_array().unwrap().iter().find(|model| model["id"] == "plain").unwrap();
    assert_eq!(plain["sampling_defaults"], json!({}));

    // A reload brings other defaults.
    fleet.configure(&config.replace("temperature = 1.7", "temperature = 0"));
    let printed = fleet.reload(&[]);
    assert_eq!(
        printed,
        "workers of model hot restart one after the other: sampling.temperature 1.7 -> 0.0\n"
    );
    let expected = completion(&http, "plain", &json!({"temperature": 0, "repetition_penalty": 1.2}));
    // Its only worker restarts, and requests wait for it.
    eventually("the new defaults hold", || (completion(&http, "hot", &none) == expected).then_some(()));
    fleet.stop();
}

#[test]
fn a_wrong_default_is_an_error_of_the_configuration_that_names_the_range() {
    let folder = tempfile::tempdir().unwrap();
    let wrong = [
        ("temperature = 3", "`temperature` of `sampling` is 3, allowed are 0 to 2"),
        ("top-p = 0.0", "`top-p` of `sampling` is 0, allowed are numbers above 0 up to 1"),
        ("top-p = nan", "`top-p` of `sampling` is NaN"),
        ("top-k = -2", "`top-k` of `sampling` is -2, allowed are -1 to 4294967295"),
        ("mirostat = 3", "`mirostat` of `sampling` is 3, allowed are 0 to 2"),
        ("seed = 1", "unknown field `seed`, expected one of `temperature`"),
        ("logit-bias = {}", "unknown field `logit-bias`"),
        ("top_p = 0.5", "unknown field `top_p`"),
        ("temperature = \"hot\"", "expected f64"),
    ];
    let check = |mut command: Command, expected: &str| {
        let output = command.output().unwrap();
        let error = text(&output).1;
        assert_eq!(output.status.code(), Some(2), "{expected}: {error}");
        assert!(error.contains(expected), "{expected}: {error}");
    };
    for (sampling, expected) in wrong {
        let setting = format!("sampling = {{ {sampling} }}\n");
        check(serve_config(&folder.path().join("run"), &model_table("m", &demo_7m(), &setting)), expected);
        let file = folder.path().join("worker.toml");
        std::fs::write(&file, worker_config(folder.path(), &setting)).unwrap();
        let mut worker = ballast();
        worker.args(["worker", "--config"]).arg(&file);
        check(worker, expected);
    }
}

#[test]
fn a_worker_without_supervisor_has_defaults_too() {
    let processes = SeparateProcesses::start(&demo_7m(), "sampling = { temperature = 0 }\n");
    let mut client = processes.client().unwrap();
    processes.runtime.block_on(async {
        let zero = Sampling { temperature: Some(0.0), ..Sampling::default() };
        let expected = grpc_completion(&mut client, "m", zero).await;
        assert_eq!(grpc_completion(&mut client, "m", Sampling::default()).await, expected);
    });
}
