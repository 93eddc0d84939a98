// SPDX-License-Identifier: Apache-2.0

//! Traces of requests: one id in the log lines of each process, W3C trace context from the client
//! to the workers, and spans at a collector, also one that hangs or is away.

use std::fs::File;
use std::net::{SocketAddr, TcpListener};
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use serde_json::{Value, json};

use crate::harness::api::{TestRequest, connect, read, runtime};
use crate::harness::collector::{self, CollectedSpan, Collector, hex};
use crate::harness::http::HttpClient;
use crate::harness::{ServedFleet, demo_7m, eventually, model_table, proc, serve_config, text};

const TRACE: &str = "0af7651916cd43dd8448eb211c80319c";
const CLIENT_SPAN: &str = "b7ad6b7169203331";
/// Far more than the request takes, far less than an export may take.
const SOON: Duration = Duration::from_secs(4);

fn traceparent(flags: &str) -> String {
    format!("00-{TRACE}-{CLIENT_SPAN}-{flags}")
}

/// A fleet with its log in a file.
struct LoggedFleet {
    fleet: ServedFleet,
    log: PathBuf,
}

impl LoggedFleet {
    fn start(level: &str, workers: u32, tracing: &str) -> Self {
        let directory = tempfile::Builder::new().prefix("ballast-test-").tempdir().unwrap();
        let log = directory.path().join("log");
        let model =
            model_table("demo", &demo_7m(), "").replace("workers = 1", &format!("workers = {workers}"));
        let routing = "[routing]\nmode = \"least-loaded\"\n";
        let mut command = serve_config(&directory.path().join("run"), &format!("{tracing}{routing}{model}"));
        command.envs([("BALLAST_LOG", level), ("BALLAST_LOG_FORMAT", "json")]);
        command.stderr(File::create(&log).unwrap());
        Self { fleet: ServedFleet::start_command(directory, command), log }
    }

    fn log_lines(&self) -> Vec<Value> {
        log_lines(&self.log)
    }

    /// Ends the fleet with SIGTERM. Returns how long that took, and its log.
    fn terminate(mut self) -> (Duration, Vec<Value>) {
        let asked = Instant::now();
        proc::send_signal(self.fleet.supervisor.id(), "TERM");
        let status = eventually("the fleet ends", || self.fleet.supervisor.try_wait().unwrap());
        assert!(status.success(), "{status}");
        (asked.elapsed(), log_lines(&self.log))
    }
}

fn log_lines(path: &Path) -> Vec<Value> {
    let log = std::fs::read_to_string(path).unwrap();
    // The last line may not be whole yet.
    log.lines().filter_map(|line| serde_json::from_str(line).ok()).collect()
}

fn with_message<'a>(lines: &'a [Value], message: &str) -> Vec<&'a Value> {
    lines.iter().filter(|line| line["message"] == message).collect()
}

/// A completion with this `traceparent` and request id. Returns the answer's id and text.
fn complete(http: &HttpClient, traceparent: &str, id: &str, max_tokens: u32) -> (String, String) {
    let body = json!({"prompt": "def secret_prompt(", "max_tokens": max_tokens, "ignore_eos": true});
    http.runtime.block_on(async {
        let request = http.client.post(format!("{}/v1/completions", http.url)).json(&body);
        let request = request.header("traceparent", traceparent).header("x-request-id", id);
        let reply = request.send().await.unwrap();
        assert_eq!(reply.status().as_u16(), 200);
        assert_eq!(reply.headers()["x-request-id"], *id);
        let answer: Value = reply.json().await.unwrap();
        let text = |value: &Value| value.as_str().unwrap().to_owned();
        (text(&answer["id"]), text(&answer["choices"][0]["text"]))
    })
}

#[track_caller]
fn only<'a>(spans: &'a [CollectedSpan], name: &str) -> &'a CollectedSpan {
    let found: Vec<_> = spans.iter().filter(|collected| collected.span.name == name).collect();
    assert_eq!(found.len(), 1, "{name}: {spans:#?}");
    found[0]
}

#[test]
fn a_request_is_one_trace_from_the_client_to_the_steps_of_a_worker() {
    let collector = Collector::start();
    let served = LoggedFleet::start("info,worker=debug", 1, &collector.config());
    let http = HttpClient::connect(&served.fleet);
    let (_, output) = complete(&http, &traceparent("01"), "id-1", 300);
    let spans = collector.trace(TRACE, &[("request", 1), ("decode", 1), ("generate", 1), ("worker call", 1)]);

    let request = only(&spans, "request");
    assert_eq!((&*request.process, &*hex(&request.span.parent_span_id)), ("router", CLIENT_SPAN));
    assert_eq!(request.text("gen_ai.request.id").as_deref(), Some("id-1"));
    assert_eq!(request.text("gen_ai.request.model").as_deref(), Some("demo"));
    assert_eq!(request.text("http.route").as_deref(), Some("/v1/completions"));
    assert_eq!(request.number("http.response.status_code"), Some(200.0));
    assert!(request.number("gen_ai.usage.input_tokens").unwrap() > 1.0);
    assert_eq!(request.number("gen_ai.usage.output_tokens"), Some(300.0));
    assert!(request.number("gen_ai.latency.time_to_first_token").unwrap() > 0.0);
    let (queue, call) = (only(&spans, "admission queue"), only(&spans, "worker call"));
    assert!(queue.is_child_of(request) && call.is_child_of(request) && call.is_within(request));
    let generate = only(&spans, "generate");
    assert!(generate.is_child_of(call) && generate.process == "worker-0", "{generate:?}");
    assert_eq!(call.text("ballast.worker").as_deref(), Some("worker-0"));
    let phases = ["queue", "prefill", "decode"].map(|name| only(&spans, name));
    for pair in phases.windows(2) {
        assert_eq!(pair[0].span.end_time_unix_nano, pair[1].span.start_time_unix_nano);
    }
    for phase in phases {
        assert!(phase.is_child_of(generate) && phase.is_within(generate), "{phase:?}");
    }
    // 1, 2, 4 ... 256 of 300 tokens.
    assert_eq!((phases[2].span.events.len(), spans.len()), (9, 7), "{spans:#?}");

    let everything = format!("{:?}", collector.spans());
    assert!(!everything.contains("secret_prompt") && !everything.contains(output.trim()), "{everything}");
    assert_eq!(http.metric("ballast:trace_spans_dropped_total{process=\"router\"}"), Some(0.0));

    // An unsampled trace goes on without spans, and log lines name it.
    let unsampled = TRACE.replace("0af7", "0af8");
    complete(&http, &traceparent("00").replace(TRACE, &unsampled), "id-2", 3);
    drop(http);
    let (_, log) = served.terminate();
    let names = |line: &&Value| line["request_id"] == "id-2" && line["trace_id"] == *unsampled;
    let of_worker = |line: &&Value| line["process"] == "worker-0";
    assert!(log.iter().filter(of_worker).filter(names).count() >= 2, "{log:?}");
    let unsampled = |collected: &CollectedSpan| hex(&collected.span.trace_id) == unsampled;
    assert!(!collector.spans().iter().any(unsampled));
}

#[test]
fn a_failover_is_a_second_worker_call_in_the_same_trace() {
    let collector = Collector::start();
    let served = LoggedFleet::start("warn", 2, &collector.config());
    let request = TestRequest { prompt: (10..40).collect(), max_tokens: 400, ..TestRequest::default() };
    let workers = served.fleet.processes_by_role("worker");
    let busy = || {
        let http = HttpClient::connect(&served.fleet);
        let running = |worker: &&crate::harness::FleetProcess| {
            let label =
                format!("ballast:num_streams_placed{{model_name=\"demo\",engine=\"{}\"}}", worker.name);
            http.metric(&label).is_some_and(|streams| streams > 0.0)
        };
        workers.iter().find(running).cloned()
    };
    let continuation = runtime().block_on(async {
        let mut call = tonic::Request::new(request.request());
        call.metadata_mut().insert("traceparent", traceparent("01").parse().unwrap());
        call.metadata_mut().insert("x-request-id", "grpc.id-7".parse().unwrap());
        let answer = connect(&served.fleet.grpc).await.generate(call).await.unwrap();
        assert_eq!(answer.metadata().get("x-request-id").unwrap(), "grpc.id-7");
        let mut victim = None;
        let stream = read(answer.into_inner(), &request, |tokens| {
            if tokens >= 5 && victim.is_none() {
                let found = std::thread::scope(|scope| scope.spawn(busy).join().unwrap());
                victim = found.inspect(|worker| proc::send_signal(worker.pid, "KILL"));
            }
        });
        let continuation = stream.await.unwrap();
        (continuation, victim.expect("a worker has the stream"))
    });
    let (continuation, victim) = continuation;
    assert_eq!((continuation.tokens.len(), continuation.resumes), (400, 1));

    let spans = collector.trace(TRACE, &[("request", 1), ("worker call", 2), ("generate", 1), ("decode", 1)]);
    let request = only(&spans, "request");
    assert_eq!(request.number("gen_ai.usage.output_tokens"), Some(400.0));
    let mut calls: Vec<_> = spans.iter().filter(|collected| collected.span.name == "worker call").collect();
    calls.sort_by_key(|call| call.span.start_time_unix_nano);
    let [first, second] = calls[..] else { panic!("{calls:#?}") };
    assert!(first.is_child_of(request) && second.is_child_of(request));
    assert!(first.has_failed() && !second.has_failed() && !request.has_failed(), "{calls:#?}");
    assert_eq!(first.text("ballast.worker"), Some(victim.name));
    assert!(first.text("ballast.failover.reason").is_none());
    assert!(second.text("ballast.failover.reason").is_some_and(|reason| !reason.is_empty()));
    let generate = only(&spans, "generate");
    assert!(generate.is_child_of(second), "spans of the killed worker are lost: {spans:#?}");
    assert_eq!(Some(generate.process.clone()), second.text("ballast.worker"));

    let lost = served.log_lines();
    let lost = with_message(&lost, "worker lost in mid-stream");
    let [line] = lost[..] else { panic!("{lost:?}") };
    assert_eq!((&line["request_id"], &line["trace_id"]), (&json!("grpc.id-7"), &json!(TRACE)));
    served.fleet.stop();
}

#[test]
fn scores_and_grammars_are_in_the_trace_of_their_request() {
    let collector = Collector::start();
    let served = LoggedFleet::start("info,worker=debug", 1, &collector.config());
    let http = HttpClient::connect(&served.fleet);
    let post = |id: &str, body: &Value| {
        http.runtime.block_on(async {
            let request = http.client.post(format!("{}/v1/completions", http.url)).json(body);
            let request = request.header("traceparent", traceparent("01")).header("x-request-id", id);
            assert_eq!(request.send().await.unwrap().status().as_u16(), 200, "{body}");
        });
    };
    post("scored", &json!({"prompt": "def f(a):", "max_tokens": 0, "echo": true, "logprobs": 1}));
    let spans = collector.trace(TRACE, &[("request", 1), ("score", 1), ("worker call", 1)]);
    let (request, call) = (only(&spans, "request"), only(&spans, "worker call"));
    assert!(call.is_child_of(request) && only(&spans, "score").is_child_of(call), "{spans:#?}");

    post("constrained", &json!({"prompt": "def f(", "max_tokens": 4, "guided_regex": "[a-z]{1,4}"}));
    let spans = collector.trace(TRACE, &[("request", 2), ("grammar check", 1), ("generate", 1)]);
    let check = only(&spans, "grammar check");
    let is_parent = |collected: &CollectedSpan| {
        check.is_child_of(collected) && collected.text("gen_ai.request.id").as_deref() == Some("constrained")
    };
    assert!(spans.iter().any(is_parent) && !format!("{spans:?}").contains("a-z"), "{spans:#?}");
    drop(http);
    let (_, log) = served.terminate();
    for id in ["scored", "constrained"] {
        let named = log.iter().filter(|line| line["request_id"] == id && line["trace_id"] == TRACE);
        assert!(named.count() >= 2, "{id}: {log:?}");
    }
}

#[test]
fn an_id_that_is_not_plain_is_replaced_for_grpc_as_for_http() {
    let served = LoggedFleet::start("info,worker=debug", 1, "");
    let request = TestRequest { prompt: (10..20).collect(), max_tokens: 2, ..TestRequest::default() };
    let ids = runtime().block_on(async {
        let mut client = connect(&served.fleet.grpc).await;
        let mut ids = Vec::new();
        for given in ["two words", &"x".repeat(65)] {
            let mut call = tonic::Request::new(request.request());
            call.metadata_mut().insert("x-request-id", given.parse().unwrap());
            let answer = client.generate(call).await.unwrap();
            ids.push(answer.metadata().get("x-request-id").unwrap().to_str().unwrap().to_owned());
            read(answer.into_inner(), &request, |_| {}).await.unwrap();
        }
        // Also of a call that is refused.
        let mut call = tonic::Request::new(TestRequest::default().request());
        call.metadata_mut().insert("x-request-id", "refused-1".parse().unwrap());
        let refused = client.generate(call).await.unwrap_err();
        assert_eq!(refused.metadata().get("x-request-id").unwrap(), "refused-1");
        ids
    });
    let (_, log) = served.terminate();
    for id in ids {
        assert!(id.len() == 32 && id.bytes().all(|byte| byte.is_ascii_hexdigit()), "{id}");
        let of_worker: Vec<_> = log.iter().filter(|line| line["request_id"] == *id).collect();
        assert!(
            of_worker.len() >= 2 && of_worker.iter().all(|line| line.get("trace_id").is_none()),
            "{log:?}"
        );
    }
}

#[test]
fn a_collector_that_hangs_delays_neither_requests_nor_the_end() {
    // Connections wait in its queue and get no answer.
    let hanging = TcpListener::bind("127.0.0.1:0").unwrap();
    let served = LoggedFleet::start("info", 1, &collector::config(hanging.local_addr().unwrap()));
    let http = HttpClient::connect(&served.fleet);
    let dropped = |process: &str| {
        let name = format!("ballast:trace_spans_dropped_total{{process=\"{process}\"}}");
        http.metric(&name).filter(|&spans| spans > 0.0)
    };
    for number in 0..3 {
        let asked = Instant::now();
        complete(&http, &traceparent("01"), &format!("id-{number}"), 5);
        assert!(asked.elapsed() < SOON, "{:?}", asked.elapsed());
    }
    eventually("router and worker count dropped spans", || dropped("router").zip(dropped("worker-0")));
    // An export is under way at the end.
    complete(&http, &traceparent("01"), "id-4", 5);
    std::thread::sleep(Duration::from_millis(1200));
    drop(http);
    let (took, log) = served.terminate();
    assert!(took < SOON, "{took:?}");
    let lines = with_message(&log, "the collector takes no spans: they are dropped");
    let mut processes: Vec<_> = lines.iter().map(|line| line["process"].as_str().unwrap()).collect();
    processes.sort_unstable();
    assert_eq!(processes, ["router", "worker-0"], "one line each: {log:?}");
}

#[test]
fn a_reload_says_that_another_collector_needs_a_restart() {
    let (first, second) = (Collector::start(), Collector::start());
    let served = LoggedFleet::start("info", 1, &first.config());
    let file = served.fleet.runtime_dir().with_extension("toml");
    let config = std::fs::read_to_string(&file).unwrap();
    std::fs::write(&file, config.replace(&first.config(), &second.config())).unwrap();
    let (printed, _) = text(&served.fleet.run_command(&["reload"]));
    let [line] = printed.lines().collect::<Vec<_>>()[..] else { panic!("{printed}") };
    assert!(line.starts_with("not applied until the supervisor restarts: tracing.otlp-endpoint "), "{line}");
    served.fleet.stop();
}

#[test]
fn a_collector_that_comes_back_gets_spans_again_and_a_line_says_so() {
    let address: SocketAddr = TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap();
    let served = LoggedFleet::start("info", 1, &collector::config(address));
    let http = HttpClient::connect(&served.fleet);
    let lines = |message: &str| with_message(&served.log_lines(), message).len();
    let failed = "the collector takes no spans: they are dropped";
    complete(&http, &traceparent("01"), "id-1", 5);
    eventually("both processes say so", || (lines(failed) == 2).then_some(()));
    complete(&http, &traceparent("01"), "id-2", 5);
    std::thread::sleep(Duration::from_secs(2));

    let collector = Collector::start_at(address);
    let mut number = 2;
    eventually("both processes say so", || {
        number += 1;
        complete(&http, &traceparent("01"), &format!("id-{number}"), 5);
        std::thread::sleep(Duration::from_millis(500));
        (lines("the collector takes spans again") == 2).then_some(())
    });
    assert_eq!(lines(failed), 2, "one line for each change");
    collector.trace(TRACE, &[("request", 1), ("decode", 1)]);
    drop(http);
    let (_, log) = served.terminate();
    let again = with_message(&log, "the collector takes spans again");
    assert!(again.iter().all(|line| line["spans_dropped"].as_u64().unwrap() > 0), "{again:?}");
}
