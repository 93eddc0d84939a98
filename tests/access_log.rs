// SPDX-License-Identifier: Apache-2.0

//! The access log: a line for each request, whatever becomes of it.

use std::io::{Read, Write};
use std::net::TcpStream;

use serde_json::{Value, json};

use crate::harness::api::{TestRequest, generate_all, runtime};
use crate::harness::http::HttpClient;
use crate::harness::{ServedFleet, demo_7m, eventually, serve};

struct LoggedFleet {
    fleet: ServedFleet,
    log: std::path::PathBuf,
}

impl LoggedFleet {
    fn start(level: &str) -> Self {
        let directory = tempfile::Builder::new().prefix("ballast-test-").tempdir().unwrap();
        let log = directory.path().join("log");
        let run = directory.path().join("run");
        let mut command = serve(&run, &demo_7m(), &["--workers", "1", "--threads", "1"]);
        command.env("BALLAST_LOG", level).env("BALLAST_LOG_FORMAT", "json");
        command.stderr(std::fs::File::create(&log).unwrap());
        Self { fleet: ServedFleet::start_command(directory, command), log }
    }

    fn lines(&self) -> Vec<Value> {
        let text = std::fs::read_to_string(&self.log).unwrap();
        let lines = text.lines().filter_map(|line| serde_json::from_str::<Value>(line).ok());
        lines.filter(|line| line["message"] == "request" && !line["path"].is_null()).collect()
    }

    #[track_caller]
    fn line(&self, what: &str, is_it: impl Fn(&Value) -> bool) -> Value {
        eventually(what, || self.lines().into_iter().find(&is_it))
    }
}

#[test]
fn each_request_has_a_line_with_its_id_status_size_and_end_and_without_its_content() {
    let logged = LoggedFleet::start("error,access_log=info");
    let (client, runtime) = (reqwest::Client::new(), runtime());
    let url = |path: &str| format!("{}{path}", logged.fleet.http);
    let body = json!({"model": "pycoder-7m-q8_0", "prompt": "def secret_name(", "max_tokens": 20});
    let ask = |id: &str, body: &Value| {
        let request = client.post(url("/v1/completions?secret=1")).header("x-request-id", id);
        let request = request.header("content-type", "application/json").body(body.to_string());
        runtime.block_on(async { request.send().await.unwrap().bytes().await.unwrap().len() })
    };
    let bytes = ask("whole", &body);
    let line = logged.line("a whole answer", |line| line["request_id"] == "whole");
    let words = ["method", "path", "version", "status", "bytes", "end"].map(|key| line[key].clone());
    let expected = [
        json!("POST"),
        json!("/v1/completions"),
        json!("HTTP/1.1"),
        json!(200),
        json!(bytes),
        json!("complete"),
    ];
    assert_eq!(words, expected, "{line}");
    let (head, took) = (line["head_ms"].as_f64().unwrap(), line["took_ms"].as_f64().unwrap());
    assert!(0.0 < head && head <= took, "{line}");

    let mut stream = body.clone();
    stream["stream"] = json!(true);
    let bytes = ask("streamed", &stream);
    let line = logged.line("a whole stream", |line| line["request_id"] == "streamed");
    assert_eq!((&line["bytes"], &line["end"]), (&json!(bytes), &json!("complete")), "{line}");

    // A client that leaves in the middle of its stream.
    stream["max_tokens"] = json!(1500);
    let mut left = TcpStream::connect(logged.fleet.http.trim_start_matches("http://")).unwrap();
    let content = stream.to_string();
    write!(
        left,
        "POST /v1/completions HTTP/1.1\r\nhost: localhost\r\nx-request-id: left\r\n\
         content-type: application/json\r\ncontent-length: {}\r\n\r\n{content}",
        content.len()
    )
    .unwrap();
    left.read_exact(&mut [0; 400]).unwrap();
    drop(left);
    let line = logged.line("a stream that was left", |line| line["request_id"] == "left");
    assert_eq!((&line["status"], &line["end"]), (&json!(200), &json!("cut")), "{line}");

    let long = format!("/no/route/{}", "x".repeat(3000));
    runtime.block_on(client.get(url(&long)).header("x-request-id", "unknown").send()).unwrap();
    let line = logged.line("an unknown route", |line| line["request_id"] == "unknown");
    assert_eq!(line["status"], 404);
    assert!(line["path"].as_str().unwrap().len() < 100, "{line}");

    let request = TestRequest { prompt: vec![10, 20, 30], max_tokens: 5, ..TestRequest::default() };
    runtime.block_on(generate_all(&logged.fleet.grpc, &[request])).remove(0).unwrap();
    let line = logged.line("a call", |line| line["path"] == "/ballast.v1.Inference/Generate");
    assert_eq!((&line["version"], &line["end"]), (&json!("HTTP/2.0"), &json!("complete")), "{line}");
    assert_eq!(line["request_id"].as_str().unwrap().len(), 32, "{line}");

    let text = std::fs::read_to_string(&logged.log).unwrap();
    assert!(!text.contains("secret"), "{text}");
    logged.fleet.stop();
}

#[test]
fn probes_have_lines_only_at_debug() {
    let count = |level: &str| {
        let logged = LoggedFleet::start(level);
        let http = HttpClient::connect(&logged.fleet);
        for path in ["/health", "/ready", "/metrics", "/v1/models"] {
            assert_eq!(http.get(path).0, 200);
        }
        logged.line("the last request", |line| line["path"] == "/v1/models");
        let probes = logged.lines().iter().filter(|line| line["path"] != "/v1/models").count();
        logged.fleet.stop();
        probes
    };
    assert_eq!(count("error,access_log=info"), 0);
    assert!(count("error,access_log=debug") >= 3);
}
