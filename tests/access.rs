// SPDX-License-Identifier: Apache-2.0

//! API keys: who may call, which models, and how much. Which web pages may call.

use std::fmt::Write as _;
use std::fs::File;
use std::io::Write as _;
use std::net::{SocketAddr, TcpListener, UdpSocket};
use std::os::unix::fs::{OpenOptionsExt, PermissionsExt};
use std::path::Path;
use std::process::{Command, Stdio};
use std::time::Duration;

use proto::v1::ListModelsRequest;
use proto::v1::inference_client::InferenceClient;
use reqwest::header::HeaderMap;
use rustix::fs::OFlags;
use serde_json::{Value, json};
use tonic::transport::Endpoint;
use tonic::{Code, Request};

use crate::harness::api::{connect, runtime};
use crate::harness::http::HttpClient;
use crate::harness::{
    ServedFleet, ballast, demo_7m, eventually, model_table, report_skipped, serve, serve_config, text,
};

// As documented in docs/OPERATING.md.
const USAGE: i32 = 2;

/// Makes a key with `ballast key`, and appends lines to its entry.
fn add_key(file: &Path, name: &str, lines: &str) -> String {
    let output = ballast().args(["key", name, "--file"]).arg(file).output().unwrap();
    let (key, stderr) = text(&output);
    assert!(output.status.success(), "{stderr}");
    let mut content = std::fs::read_to_string(file).unwrap();
    writeln!(content, "{lines}").unwrap();
    assert!(!content.contains(key.trim()), "the file holds no key");
    std::fs::write(file, content).unwrap();
    key.trim().to_owned()
}

fn fleet_with_keys(file: &Path) -> ServedFleet {
    let keys = ["--workers", "1", "--threads", "1", "--name", "m", "--keys", file.to_str().unwrap()];
    ServedFleet::start(&demo_7m(), &keys)
}

fn with_headers(fleet: &ServedFleet, headers: &[(&'static str, String)]) -> HttpClient {
    let headers: HeaderMap =
        headers.iter().map(|(name, value)| (name.parse().unwrap(), value.parse().unwrap())).collect();
    let client = reqwest::Client::builder().default_headers(headers).build().unwrap();
    HttpClient { client, ..HttpClient::connect(fleet) }
}

fn with_key(fleet: &ServedFleet, key: &str) -> HttpClient {
    with_headers(fleet, &[("authorization", format!("Bearer {key}"))])
}

fn completion(max_tokens: u32) -> Value {
    json!({"model": "m", "prompt": "def add(a, b):", "max_tokens": max_tokens, "ignore_eos": true})
}

/// The code of an error, or an empty string.
fn error_code(reply: &str) -> String {
    let reply: Value = serde_json::from_str(reply).unwrap();
    reply["error"]["code"].as_str().unwrap_or_default().to_owned()
}

#[test]
fn without_a_valid_key_nothing_but_health_is_served() {
    let directory = tempfile::tempdir().unwrap();
    let file = directory.path().join("keys.toml");
    let key = add_key(&file, "team-a", "");
    assert_eq!(std::fs::metadata(&file).unwrap().permissions().mode() & 0o777, 0o600);
    let fleet = fleet_with_keys(&file);
    let wrong = format!("{key}0");
    for client in [HttpClient::connect(&fleet), with_key(&fleet, &wrong)] {
        for path in ["/v1/models", "/v1/models/m", "/metrics", "/", "/v1/unknown", "/health/x"] {
            let (status, reply) = client.get(path);
            assert_eq!((status, error_code(&reply).as_str()), (401, "invalid_api_key"), "{path}: {reply}");
        }
        for path in ["/v1/completions", "/v1/chat/completions", "/health"] {
            let status = client.post(path, &completion(1)).0;
            assert_eq!(status, if path == "/health" { 405 } else { 401 }, "{path}");
        }
        assert_eq!(client.get("/health").0, 200);
        let (status, ready) = client.get("/ready");
        // It names no models.
        let ready: Value = serde_json::from_str(&ready).unwrap();
        assert_eq!((status, &ready), (200, &json!({"status": "ready", "workers": ready["workers"]})));
    }
    // Anthropic's clients have a header and a form of errors of their own.
    let message = json!({"model": "m", "messages": [], "max_tokens": 1});
    for path in ["/v1/messages", "/v1/messages/count_tokens"] {
        let (status, reply) = with_headers(&fleet, &[("x-api-key", wrong.clone())]).post(path, &message);
        let reply: Value = serde_json::from_str(&reply).unwrap();
        assert_eq!((status, &reply["error"]["type"]), (401, &json!("authentication_error")), "{reply}");
    }
    let client = with_headers(&fleet, &[("x-api-key", key.clone())]);
    let (status, reply) = client.post("/v1/messages", &message);
    assert!(status == 400 && reply.contains("invalid_request_error"), "{status} {reply}");
    let client = with_key(&fleet, &key);
    assert_eq!(client.get("/v1/models").0, 200);
    assert_eq!(client.post("/v1/completions", &completion(4)).0, 200);
    let used = client.metric("ballast:key_generation_tokens_total{key=\"team-a\"}");
    assert_eq!(used, Some(4.0));
    assert!(client.metric("ballast:requests_denied_total{reason=\"unknown_key\"}").unwrap() >= 8.0);

    client.runtime.block_on(async {
        let mut grpc: InferenceClient<_> = connect(&fleet.grpc).await;
        let mut request = Request::new(ListModelsRequest::default());
        assert_eq!(
            grpc.list_models(ListModelsRequest::default()).await.unwrap_err().code(),
            Code::Unauthenticated
        );
        request.metadata_mut().insert("authorization", format!("Bearer {key}").parse().unwrap());
        assert_eq!(grpc.list_models(request).await.unwrap().into_inner().models.len(), 1);
    });
    // The commands of the fleet's user connect over Unix sockets.
    assert!(fleet.run_command(&["ps"]).status.success());
    fleet.stop();
}

#[test]
fn a_key_is_bound_to_its_models_rate_and_tokens() {
    let directory = tempfile::tempdir().unwrap();
    let file = directory.path().join("keys.toml");
    let foreign = add_key(&file, "foreign", "models = [\"other\"]");
    let twice = add_key(&file, "twice", "requests-per-minute = 2");
    let small = add_key(&file, "small", "tokens-per-day = 12");
    let gateway = add_key(&file, "gateway", "gateway = true");
    let fleet = fleet_with_keys(&file);

    let client = with_key(&fleet, &foreign);
    let (status, reply) = client.post("/v1/completions", &completion(1));
    assert_eq!((status, error_code(&reply).as_str()), (404, "model_not_found"), "{reply}");
    assert!(!reply.contains("served models: m"), "{reply}");
    let listed: Value = serde_json::from_str(&client.get("/v1/models").1).unwrap();
    assert_eq!(listed["data"], json!([]));

    let client = with_key(&fleet, &twice);
    for _ in 0..2 {
        assert_eq!(client.post("/v1/completions", &completion(1)).0, 200);
    }
    let reply = client.runtime.block_on(async {
        let request = client.client.post(format!("{}/v1/completions", client.url)).json(&completion(1));
        request.send().await.unwrap()
    });
    assert_eq!(reply.status().as_u16(), 429);
    let retry_after: u64 = reply.headers()["retry-after"].to_str().unwrap().parse().unwrap();
    assert!((1..=30).contains(&retry_after), "a bucket of two fills every 30 s: {retry_after}");

    let client = with_key(&fleet, &small);
    assert_eq!(client.post("/v1/completions", &completion(12)).0, 200);
    let (status, reply) = client.post("/v1/completions", &completion(1));
    assert_eq!((status, error_code(&reply).as_str()), (429, "insufficient_quota"), "{reply}");

    // Only a gateway names tenants; a wrong name is its error and not that of others.
    let tenant = |key: &str| {
        let headers = [("x-ballast-tenant", "a b".to_owned()), ("authorization", format!("Bearer {key}"))];
        with_headers(&fleet, &headers).post("/v1/completions", &completion(1)).0
    };
    assert_eq!(tenant(&gateway), 400);
    assert_eq!(tenant(&foreign), 404);
    fleet.stop();
}

#[test]
fn a_running_request_counts_for_its_key_until_it_ends() {
    let directory = tempfile::tempdir().unwrap();
    let file = directory.path().join("keys.toml");
    let key = add_key(&file, "one", "concurrent-requests = 1");
    let fleet = fleet_with_keys(&file);
    let client = with_key(&fleet, &key);
    let streamed = client.runtime.block_on(async {
        let mut body = completion(2000);
        body["stream"] = json!(true);
        let mut reply =
            client.client.post(format!("{}/v1/completions", client.url)).json(&body).send().await.unwrap();
        assert!(reply.chunk().await.unwrap().is_some());
        reply
    });
    assert_eq!(client.get("/v1/models").0, 429);
    drop(streamed);
    eventually("the cancelled request ends", || (client.get("/v1/models").0 == 200).then_some(()));
    fleet.stop();
}

#[test]
fn a_changed_key_file_is_used_and_a_wrong_one_changes_nothing() {
    let directory = tempfile::tempdir().unwrap();
    let file = directory.path().join("keys.toml");
    let first = add_key(&file, "first", "");
    let fleet = fleet_with_keys(&file);
    let second = add_key(&file, "second", "");
    let client = with_key(&fleet, &second);
    eventually("the new key is valid", || (client.get("/v1/models").0 == 200).then_some(()));

    let content = std::fs::read_to_string(&file).unwrap();
    std::fs::write(&file, format!("{content}\ncolour = 1\n")).unwrap();
    std::thread::sleep(std::time::Duration::from_secs(3));
    assert_eq!((client.get("/v1/models").0, with_key(&fleet, &first).get("/v1/models").0), (200, 200));
    let output = ballast().args(["key", "third", "--file"]).arg(&file).output().unwrap();
    assert_eq!(output.status.code(), Some(USAGE));
    assert!(text(&output).1.contains("colour"), "{}", text(&output).1);

    let only_second = content.split_once("\n\n").unwrap().1;
    std::fs::write(&file, only_second).unwrap();
    let removed = with_key(&fleet, &first);
    eventually("the removed key is refused", || (removed.get("/v1/models").0 == 401).then_some(()));
    assert_eq!(client.get("/v1/models").0, 200);
    fleet.stop();
}

/// A router that is not held up answers within milliseconds.
const UNHINDERED: Duration = Duration::from_secs(10);

#[test]
fn a_key_file_that_does_not_answer_holds_up_no_request() {
    let directory = tempfile::tempdir().unwrap();
    let file = directory.path().join("keys.toml");
    let first = add_key(&file, "first", "");
    let runtime_dir = tempfile::Builder::new().prefix("ballast-test-").tempdir().unwrap();
    let keys = ["--workers", "1", "--threads", "1", "--name", "m", "--keys", file.to_str().unwrap()];
    let mut command = serve(runtime_dir.path(), &demo_7m(), &keys);
    // A read on a thread of the runtime would take the only one.
    command.env("TOKIO_WORKER_THREADS", "1");
    let fleet = ServedFleet::start_command(runtime_dir, command);
    let router = fleet.only_process("router").pid;

    let next = directory.path().join("next.toml");
    let second = add_key(&next, "second", "");
    let pipe = directory.path().join("pipe");
    assert!(Command::new("mkfifo").arg(&pipe).status().unwrap().success());
    std::fs::rename(&pipe, &file).unwrap();
    // Succeeds as soon as the router has opened the other end, where it waits for text.
    let mut writer = eventually("the router reads", || {
        let flags = OFlags::NONBLOCK.bits().cast_signed();
        File::options().write(true).custom_flags(flags).open(&file).ok()
    });
    let client = with_key(&fleet, &first);
    for _ in 0..10 {
        let reply = client.runtime.block_on(async {
            let request = client.client.get(format!("{}/v1/models", client.url)).timeout(UNHINDERED);
            request.send().await.expect("the router answers")
        });
        assert_eq!(reply.status().as_u16(), 200);
    }
    writer.write_all(&std::fs::read(&next).unwrap()).unwrap();
    drop(writer);
    eventually("the old key is refused", || (client.get("/v1/models").0 == 401).then_some(()));
    assert_eq!(with_key(&fleet, &second).get("/v1/models").0, 200);
    assert_eq!(fleet.only_process("router").pid, router, "the router was replaced");
    fleet.stop();
}

#[test]
fn a_fleet_with_a_wrong_key_file_does_not_start() {
    let directory = tempfile::tempdir().unwrap();
    let file = directory.path().join("keys.toml");
    for (content, words) in [(None, "No such file"), (Some("[[keys]]\nname = \"a\"\n"), "blake3")] {
        if let Some(content) = content {
            std::fs::write(&file, content).unwrap();
        }
        let mut command = ballast();
        command.arg("serve").arg(demo_7m()).args(["--listen", "127.0.0.1:0", "--keys"]).arg(&file);
        let output = command.output().unwrap();
        let stderr = text(&output).1;
        assert_eq!(output.status.code(), Some(USAGE), "{stderr}");
        assert!(stderr.contains(words) && stderr.contains("keys.toml"), "{stderr}");
    }
}

/// Sends a completion with headers, and returns the status and one header of the reply.
fn post_with(fleet: &ServedFleet, headers: &[(&str, &str)], read: &str) -> (u16, Option<String>) {
    let client = HttpClient::connect(fleet);
    client.runtime.block_on(async {
        let request = client.client.post(format!("{}/v1/completions", client.url));
        let request = headers.iter().fold(request, |request, (name, value)| request.header(*name, *value));
        let reply = request.body(completion(1).to_string()).send().await.unwrap();
        let read = reply.headers().get(read).map(|value| value.to_str().unwrap().to_owned());
        (reply.status().as_u16(), read)
    })
}

#[test]
fn a_page_of_another_site_cannot_use_a_server_of_this_machine() {
    const READABLE: &str = "access-control-allow-origin";
    let origins =
        ["--workers", "1", "--threads", "1", "--name", "m", "--allow-origin", "https://chat.example"];
    let fleet = ServedFleet::start(&demo_7m(), &origins);
    let json = ("content-type", "application/json");
    let post = |origin: &str| post_with(&fleet, &[json, ("origin", origin)], READABLE);
    for own in ["https://chat.example", "http://localhost:3000"] {
        assert_eq!(post(own), (200, Some(own.to_owned())));
    }
    for foreign in ["https://evil.example", "null"] {
        assert_eq!(post(foreign), (403, None));
    }
    assert_eq!(post_with(&fleet, &[json], READABLE), (200, None), "a program, which sends no origin");
    // What a page may send without asking first.
    for simple in ["text/plain", "application/x-www-form-urlencoded"] {
        assert_eq!(post_with(&fleet, &[("content-type", simple)], READABLE).0, 415);
    }
    assert_eq!(post_with(&fleet, &[], READABLE).0, 415);
    assert_eq!(post_with(&fleet, &[json, ("content-encoding", "gzip")], READABLE).0, 415);
    let charset = ("content-type", "application/json; charset=utf-8");
    assert_eq!(post_with(&fleet, &[charset], READABLE).0, 200);

    // A page whose name resolves to this machine reads answers without an origin.
    let get = |host: &str| {
        let client = HttpClient::connect(&fleet);
        client.runtime.block_on(async {
            let request = client.client.get(format!("{}/v1/models", client.url)).header("host", host);
            request.send().await.unwrap().status().as_u16()
        })
    };
    for (host, status) in [
        ("evil.example:8080", 403),
        ("127.0.0.1.evil.example", 403),
        ("", 403),
        ("localhost:1", 200),
        ("[::1]", 200),
        ("chat.example", 200),
    ] {
        assert_eq!(get(host), status, "{host}");
    }

    let client = HttpClient::connect(&fleet);
    let preflight = client.runtime.block_on(async {
        let url = format!("{}/v1/chat/completions", client.url);
        let request = client.client.request(reqwest::Method::OPTIONS, url);
        let request = request.header("origin", "https://chat.example");
        let request = request.header("access-control-request-method", "POST");
        request.header("access-control-request-headers", "authorization,content-type").send().await.unwrap()
    });
    assert_eq!(preflight.status().as_u16(), 200);
    assert_eq!(preflight.headers()[READABLE], "https://chat.example");
    assert!(preflight.headers()["access-control-allow-headers"].to_str().unwrap().contains("authorization"));
    fleet.stop();
}

/// The status of a GET with these headers, and the code of its error.
fn get_with(url: &str, headers: &[(&str, &str)]) -> (u16, String) {
    runtime().block_on(async {
        let request = reqwest::Client::new().get(url);
        let request = headers.iter().fold(request, |request, (name, value)| request.header(*name, *value));
        let reply = request.send().await.unwrap();
        let (status, body) = (reply.status().as_u16(), reply.text().await.unwrap());
        (status, if status == 200 { String::new() } else { error_code(&body) })
    })
}

/// An address of this machine that is not loopback. Sends nothing.
fn network_address() -> Option<SocketAddr> {
    let socket = UdpSocket::bind("0.0.0.0:0").unwrap();
    socket.connect("203.0.113.1:9").ok()?;
    socket.local_addr().ok()
}

#[test]
fn a_client_of_this_machine_names_it_on_each_of_its_addresses() {
    let health = TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap();
    let directory = tempfile::Builder::new().prefix("ballast-test-").tempdir().unwrap();
    let config = directory.path().join("ballast.toml");
    let table = model_table("m", &demo_7m(), "");
    let content = format!("listen = \"0.0.0.0:0\"\n[router]\nhealth-listen = \"{health}\"\n{table}");
    std::fs::write(&config, content).unwrap();
    let mut command = ballast();
    command.args(["serve", "--json", "--config"]).arg(&config).arg("--runtime-dir");
    command.arg(directory.path().join("run")).stdout(Stdio::piped());
    let fleet = ServedFleet::start_command(directory, command);
    let port = fleet.http.rsplit(':').next().unwrap();

    let mut urls = vec![format!("http://127.0.0.1:{port}/v1/models"), format!("http://{health}/metrics")];
    match network_address() {
        Some(address) => urls.push(format!("http://{}:{port}/v1/models", address.ip())),
        None => report_skipped(format_args!("the host check: this machine has no network address")),
    }
    for url in &urls {
        assert_eq!(get_with(url, &[]).0, 200, "{url}");
        assert_eq!(get_with(url, &[("host", "localhost")]).0, 200, "{url}");
        let refused = get_with(url, &[("host", "evil.example")]);
        assert_eq!(refused, (403, "host_not_allowed".to_owned()), "{url}");
        let refused = get_with(url, &[("origin", "https://evil.example")]);
        assert_eq!(refused, (403, "origin_not_allowed".to_owned()), "{url}");
    }
    fleet.stop();
}

#[test]
fn a_listed_host_may_be_named_and_its_pages_may_not_call() {
    let access = "[access]\nhosts = [\"llm.example\", \"ballast_backend\"]\n";
    let fleet = ServedFleet::start_config(&(access.to_owned() + &model_table("m", &demo_7m(), "")));
    let url = format!("{}/v1/models", fleet.http);
    for host in ["llm.example", "LLM.example:8080", "ballast_backend"] {
        assert_eq!(get_with(&url, &[("host", host)]).0, 200, "{host}");
    }
    let page = get_with(&url, &[("host", "llm.example"), ("origin", "http://llm.example")]);
    assert_eq!(page, (403, "origin_not_allowed".to_owned()));
    assert_eq!(get_with(&url, &[("host", "x.llm.example")]).0, 403);
    fleet.stop();

    let directory = tempfile::tempdir().unwrap();
    let config = "[access]\nhosts = [\"https://llm.example\"]\n".to_owned();
    let config = config + &model_table("m", &demo_7m(), "");
    let output = serve_config(&directory.path().join("run"), &config).output().unwrap();
    assert_eq!(output.status.code(), Some(USAGE));
    assert!(text(&output).1.contains("`access.hosts`: \"https://llm.example\""), "{output:?}");
}

#[test]
fn a_refused_host_leaves_an_id_a_log_line_and_a_count_and_calls_get_a_grpc_status() {
    let directory = tempfile::Builder::new().prefix("ballast-test-").tempdir().unwrap();
    let log = directory.path().join("log");
    let run = directory.path().join("run");
    let mut command = serve(&run, &demo_7m(), &["--workers", "1", "--threads", "1", "--name", "m"]);
    command.env("BALLAST_LOG", "error,access_log=info").env("BALLAST_LOG_FORMAT", "json");
    command.stderr(File::create(&log).unwrap());
    let fleet = ServedFleet::start_command(directory, command);
    let json = ("content-type", "application/json");
    let headers = [json, ("host", "evil.example"), ("x-request-id", "rebound")];
    assert_eq!(post_with(&fleet, &headers, "x-request-id"), (403, Some("rebound".to_owned())));

    runtime().block_on(async {
        let endpoint = Endpoint::new(fleet.grpc.clone()).unwrap();
        let endpoint = endpoint.origin("http://evil.example".parse().unwrap());
        let mut client = InferenceClient::new(endpoint.connect().await.unwrap());
        let mut call = Request::new(ListModelsRequest::default());
        call.metadata_mut().insert("x-request-id", "call".parse().unwrap());
        let refused = client.list_models(call).await.unwrap_err();
        assert_eq!(refused.code(), Code::PermissionDenied);
        assert!(refused.message().contains("`access.hosts`"), "{refused}");
        assert_eq!(refused.metadata().get("x-request-id").unwrap(), "call");
    });
    for (id, status) in [("rebound", 403), ("call", 200)] {
        let line = eventually("the access log has the refusal", || {
            let text = std::fs::read_to_string(&log).unwrap();
            let mut lines = text.lines().filter_map(|line| serde_json::from_str::<Value>(line).ok());
            lines.find(|line| line["request_id"] == id)
        });
        assert_eq!((&line["status"], &line["end"]), (&json!(status), &json!("complete")), "{line}");
    }
    let client = HttpClient::connect(&fleet);
    let denied = client.metric("ballast:requests_denied_total{reason=\"host_not_allowed\"}");
    assert_eq!(denied, Some(2.0));
    fleet.stop();
}
