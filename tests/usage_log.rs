// SPDX-License-Identifier: Apache-2.0

//! The usage log: a line of JSON for each request that has ended.

use std::path::Path;

use proto::v1::generate_request::Prompt;
use proto::v1::{GenerateRequest, TokenIds};
use serde_json::{Value, json};

use crate::harness::api::connect;
use crate::harness::http::HttpClient;
use crate::harness::{ServedFleet, ballast, demo_7m, device, eventually, text};

fn config(access: &str) -> String {
    let (model, device) = (demo_7m(), device());
    format!(
        "[access]\n{access}\n[[models]]\nname = \"m\"\npath = {model:?}\ndevice = {device:?}\nworkers = 1\n\
         threads = 1\nkv-tokens = 4096\naliases = [\"alias\"]\n"
    )
}

fn lines(file: &Path) -> Vec<Value> {
    let text = std::fs::read_to_string(file).unwrap_or_default();
    text.lines().map(|line| serde_json::from_str(line).unwrap()).collect()
}

#[track_caller]
fn wait_for(file: &Path, count: usize) -> Vec<Value> {
    eventually("the lines are written", || Some(lines(file)).filter(|lines| lines.len() >= count))
}

#[test]
fn each_request_that_ends_has_a_line_with_its_usage_and_nothing_of_its_text() {
    let folder = tempfile::tempdir().unwrap();
    let (keys, log) = (folder.path().join("keys.toml"), folder.path().join("usage.jsonl"));
    let key = ballast().args(["key", "team-a", "--file"]).arg(&keys).output().unwrap();
    let key = text(&key).0.trim().to_owned();
    let fleet = ServedFleet::start_config(&config(&format!("keys = {keys:?}\nusage-log = {log:?}")));
    let http = HttpClient::connect(&fleet);
    let send = |path: &str, body: Value| {
        let request = http.client.post(format!("{}{path}", http.url)).bearer_auth(&key).json(&body);
        http.runtime.block_on(async { request.send().await.unwrap().json::<Value>().await.unwrap() })
    };
    let body = json!({
        "model": "alias", "prompt": ["def secret_name():", "x"], "n": 2, "max_tokens": 8, "ignore_eos": true,
    });
    let answer = send("/v1/completions", body);
    let line = wait_for(&log, 1).remove(0);
    assert_eq!(
        (&line["key"], &line["tenant"], &line["model"]),
        (&json!("team-a"), &json!("team-a"), &json!("m"))
    );
    assert_eq!(line["prompt_tokens"], answer["usage"]["prompt_tokens"]);
    assert_eq!(line["cached_tokens"], answer["usage"]["prompt_tokens_details"]["cached_tokens"]);
    assert_eq!(line["completion_tokens"], json!(32));
    assert_eq!(line["finish_reasons"], json!(vec!["length"; 4]));
    let milliseconds = |name: &str| line[name].as_f64().unwrap();
    assert!(milliseconds("time_to_first_token_ms") <= milliseconds("total_ms"), "{line}");
    assert!(milliseconds("time") > 1.7e9 && line["request_id"].is_string(), "{line}");
    assert!(!std::fs::read_to_string(&log).unwrap().contains("secret_name"));

    // Nothing is generated, and a client that goes away.
    send("/v1/completions", json!({"prompt": "x", "max_tokens": 0, "echo": true}));
    assert_eq!(wait_for(&log, 2)[1]["completion_tokens"], json!(0));
    http.runtime.block_on(async {
        let body = json!({"prompt": "x", "max_tokens": 2000, "ignore_eos": true, "stream": true});
        let request = http.client.post(format!("{}/v1/completions", http.url)).bearer_auth(&key).json(&body);
        let mut answer = request.send().await.unwrap();
        answer.chunk().await.unwrap();
    });
    let line = wait_for(&log, 3).remove(2);
    assert_eq!(line["finish_reasons"], json!(["abort"]));
    assert!(line["completion_tokens"].as_u64().unwrap() > 0, "{line}");
    // Refused requests have none.
    let refused = send("/v1/completions", json!({"prompt": "x", "temperature": 9}));
    assert_eq!(refused["error"]["param"], "temperature");

    // A renamed log is replaced.
    std::fs::rename(&log, folder.path().join("usage.1")).unwrap();
    send("/v1/completions", json!({"prompt": "x", "max_tokens": 1}));
    assert_eq!((wait_for(&log, 1).len(), lines(&folder.path().join("usage.1")).len()), (1, 3));
    fleet.stop();
}

#[test]
fn a_log_that_cannot_be_written_costs_lines_and_no_request_and_comes_back() {
    let folder = tempfile::tempdir().unwrap();
    let log = folder.path().join("missing").join("usage.jsonl");
    let fleet = ServedFleet::start_config(&config(&format!("usage-log = {log:?}")));
    let http = HttpClient::connect(&fleet);
    let ask = || http.post_json("/v1/completions", &json!({"prompt": "x", "max_tokens": 1}));
    ask();
    let lost = || http.metric("ballast:usage_lines_lost_total");
    eventually("the line is counted as lost", || (lost()? == 1.0).then_some(()));
    std::fs::create_dir(log.parent().unwrap()).unwrap();
    ask();
    wait_for(&log, 1);
    // A full disk.
    std::fs::remove_file(&log).unwrap();
    std::os::unix::fs::symlink("/dev/full", &log).unwrap();
    ask();
    eventually("the line is counted as lost", || (lost()? == 2.0).then_some(()));
    std::fs::remove_file(&log).unwrap();
    http.runtime.block_on(async {
        let mut client = connect(&fleet.grpc).await;
        let prompt = Some(Prompt::Tokens(TokenIds { ids: vec![1, 2, 3] }));
        let request = GenerateRequest { prompt, max_tokens: 1, ..GenerateRequest::default() };
        let mut stream = client.generate(request).await.unwrap().into_inner();
        while stream.message().await.unwrap().is_some() {}
    });
    assert_eq!(wait_for(&log, 1)[0]["prompt_tokens"], json!(3));
    fleet.stop();
}
