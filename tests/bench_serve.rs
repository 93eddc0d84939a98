// SPDX-License-Identifier: Apache-2.0

//! `ballast bench serve`, `compare` and `report`, against a fleet and against a server of this test
//! that misbehaves on purpose.

use std::path::Path;
use std::process::{Command, Output};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use serde_json::{Value, json};

use crate::harness::scripted_server::{Reply, ScriptedServer, chunk, usage};
use crate::harness::{ServedFleet, ballast, demo_7m, in_tree, text};

fn bench(arguments: &[&str]) -> Output {
    ballast().arg("bench").args(arguments).env_remove("OPENAI_API_KEY").output().unwrap()
}

/// Runs `bench serve` with further arguments and returns its table and its result.
#[track_caller]
fn measure(url: &str, arguments: &[&str]) -> (String, Value) {
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("result.json");
    let file = file.to_str().unwrap();
    let mut all = vec!["serve", "--base-url", url, "--json", file, "--save-detailed"];
    all.extend(arguments);
    let (stdout, stderr) = text(&bench(&all));
    let json = std::fs::read_to_string(file).unwrap_or_else(|_| panic!("{stdout}{stderr}"));
    (stdout + &stderr, serde_json::from_str(&json).unwrap())
}

/// The script reads the result by the names of vLLM's benchmark.
#[track_caller]
fn check_names(file: &Path) {
    let output = Command::new("python3").arg(in_tree("tests/vllm_result.py")).arg(file).output().unwrap();
    assert!(output.status.success(), "{}", text(&output).1);
}

fn ms(result: &Value, name: &str) -> f64 {
    result[name].as_f64().unwrap_or_else(|| panic!("no {name} in {result}"))
}

#[test]
fn a_fleet_is_found_measured_compared_and_shown() {
    let fleet = ServedFleet::start(&demo_7m(), &["--workers", "1", "--threads", "1"]);
    let folder = tempfile::tempdir().unwrap();
    let path = |name: &str| folder.path().join(name).to_str().unwrap().to_owned();
    for (seed, file) in [("1", "a.json"), ("2", "b.json")] {
        let file = path(file);
        let mut arguments = vec!["bench", "serve", "--request-rate", "50", "--num-prompts", "40"];
        arguments.extend(["--input-len", "24", "--output-len", "8", "--num-warmups", "2", "--seed", seed]);
        arguments.extend(["--goodput", "ttft:60000", "e2el:60000", "--save-detailed", "--json", &file]);
        let output = fleet.run_command(&arguments);
        let (stdout, stderr) = text(&output);
        assert!(output.status.success() && stdout.contains("goodput (requests/s)"), "{stdout}{stderr}");
        check_names(Path::new(&file));
    }
    let result: Value = serde_json::from_str(&std::fs::read_to_string(path("a.json")).unwrap()).unwrap();
    assert_eq!((&result["completed"], &result["failed"]), (&json!(40), &json!(0)));
    assert_eq!(result["total_output_tokens"], 320, "ignore_eos makes every answer as long");
    assert_eq!(result["request_goodput"], result["request_throughput"]);
    let input = ms(&result, "total_input_tokens") / 40.0;
    assert!((20.0..=28.0).contains(&input), "prompts of {input} tokens, 24 were asked for");

    let compared = bench(&["compare", &path("a.json"), &path("b.json"), "--json"]);
    let comparison: Value = serde_json::from_str(&text(&compared).0).unwrap();
    assert_eq!(comparison["rows"].as_array().unwrap().len(), 15, "{comparison}");
    assert!(comparison["warnings"].to_string().contains("seed differs: 1 and 2"), "{comparison}");
    let same = text(&bench(&["compare", &path("a.json"), &path("a.json")])).0;
    assert_eq!(same.matches("no difference shown").count(), 15, "{same}");
    // Other latencies, and two runs of them.
    let mut slower = result.clone();
    for latency in slower["latencies"].as_array_mut().unwrap() {
        *latency = json!(latency.as_f64().unwrap() + 1.0);
    }
    std::fs::create_dir(path("slower")).unwrap();
    for file in ["slower/1.json", "slower/2.json"] {
        std::fs::write(path(file), slower.to_string()).unwrap();
    }
    let verdict = |a: &str, b: &str| {
        let table = text(&bench(&["compare", &path(a), &path(b)])).0;
        let line = table.lines().find(|line| line.starts_with("mean_e2el_ms")).unwrap();
        line.rsplit(": ").next().unwrap().to_owned()
    };
    assert_eq!(verdict("a.json", "slower/1.json"), "B is worse in this run");
    assert_eq!(verdict("slower", "a.json"), "B is better in this run");
    std::fs::create_dir(path("faster")).unwrap();
    for file in ["faster/1.json", "faster/2.json"] {
        std::fs::copy(path("a.json"), path(file)).unwrap();
    }
    assert_eq!(verdict("faster", "slower"), "B is worse");
    let page = path("page.html");
    let directory = folder.path().to_str().unwrap();
    assert!(bench(&["compare", directory, directory]).status.success(), "a directory is several runs");
    assert!(bench(&["report", &path("a.json"), &path("b.json"), "--html", &page]).status.success());
    let page = std::fs::read_to_string(page).unwrap();
    assert_eq!((page.matches("<svg").count(), page.matches("<script").count()), (6, 0));
    fleet.stop();
}

#[test]
fn a_conversation_sends_its_history_again() {
    let fleet = ServedFleet::start(&demo_7m(), &["--workers", "1", "--threads", "1"]);
    let turns = ["--dataset-name", "multi-turn", "--turns", "3", "--think-time", "10ms"];
    let mut arguments = vec!["--num-prompts", "4", "--max-concurrency", "2"];
    arguments.extend(turns);
    arguments.extend(["--input-len", "16", "--output-len", "8"]);
    let (table, result) = measure(&fleet.http, &arguments);
    assert_eq!((&result["completed"], &result["loop"]), (&json!(12), &json!("closed")), "{table}");
    let mut lengths: Vec<u64> =
        result["input_lens"].as_array().unwrap().iter().filter_map(Value::as_u64).collect();
    lengths.sort_unstable();
    // The third turn has three prompts and two answers: 64 tokens, the first one 16.
    assert!(lengths[11] > 3 * lengths[0], "{lengths:?}");
    fleet.stop();
}

/// Faults in turn, after the requests that count tokens.
fn misbehave(number: usize) -> Reply {
    match number.saturating_sub(ScriptedServer::FIRST_MEASURED) % 6 {
        0 => Reply::stream([chunk("a"), chunk("b"), usage(2), "[DONE]".to_owned()]),
        1 => Reply::Error(500, json!({"error": {"message": "out of luck"}}).to_string()),
        2 => Reply::stream([chunk("a"), chunk("b"), usage(2)]),
        3 => Reply::stream([chunk("a"), "[DONE]".to_owned()]),
        4 => Reply::stream([chunk("a"), json!({"error": {"message": "worker died"}}).to_string()]),
        _ => Reply::Stall { after: vec![chunk("a")], pause: Duration::from_secs(3) },
    }
}

#[test]
fn only_whole_answers_count_and_failures_are_counted_by_kind() {
    let server = ScriptedServer::start(|number, _| misbehave(number));
    let arguments = ["--request-rate", "100", "--num-prompts", "30", "--stall-timeout", "1s"];
    let (table, result) = measure(&server.url(), &arguments);
    assert_eq!((&result["completed"], &result["failed"]), (&json!(5), &json!(25)), "{table}");
    let failures: Vec<(&str, u64)> = result["failures"]
        .as_array()
        .unwrap()
        .iter()
        .map(|failure| (failure["kind"].as_str().unwrap(), failure["count"].as_u64().unwrap()))
        .collect();
    for kind in ["HTTP 500", "cut", "no usage", "error in the stream", "stalled"] {
        assert!(failures.contains(&(kind, 5)), "{kind}: {failures:?}");
    }
    for words in ["5 x HTTP 500 (first: HTTP 500: out of luck)", "worker died", "no event for 1 s"] {
        assert!(table.contains(words), "{words}: {table}");
    }
    assert_eq!(result["total_output_tokens"], 10, "tokens of failed requests do not count");
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("result.json");
    std::fs::write(&file, result.to_string()).unwrap();
    check_names(&file);
}

/// A server that needs no time, but stands still for a second from `STALL_BEGIN` on.
fn stalling_server() -> ScriptedServer {
    const STALL_BEGIN: Duration = Duration::from_millis(500);
    const STALL_END: Duration = Duration::from_millis(1500);
    let began: Arc<Mutex<Option<Instant>>> = Arc::default();
    ScriptedServer::start(move |_, _| {
        let began = *began.lock().unwrap().get_or_insert_with(Instant::now);
        let now = began.elapsed();
        if (STALL_BEGIN..STALL_END).contains(&now) {
            std::thread::sleep(STALL_END - now);
        }
        Reply::stream([chunk("a"), chunk("b"), usage(2), "[DONE]".to_owned()])
    })
}

#[test]
fn a_server_that_stands_still_for_a_second_shows_in_the_open_loop_and_hides_in_the_closed_loop() {
    let server = stalling_server();
    let arguments = ["--request-rate", "100", "--num-prompts", "300"];
    let (table, open) = measure(&server.url(), &arguments);
    // A third of the requests arrive in that second, and wait for half of it on average.
    assert!(ms(&open, "p99_ttft_ms") > 800.0 && ms(&open, "p90_ttft_ms") > 400.0, "{table}");

    let server = stalling_server();
    let closed = ["--max-concurrency", "1", "--duration", "4s", "--num-prompts", "100000"];
    let (table, closed) = measure(&server.url(), &closed);
    assert!(ms(&closed, "completed") > 150.0, "{table}");
    assert!(ms(&closed, "p99_ttft_ms") < 400.0, "one slow request of many: {table}");
}

#[test]
fn a_wait_for_the_limit_of_concurrency_is_part_of_the_latency_in_the_open_loop() {
    let server = ScriptedServer::start(|_, _| {
        std::thread::sleep(Duration::from_millis(50));
        Reply::stream([chunk("a"), usage(1), "[DONE]".to_owned()])
    });
    let arguments = ["--request-rate", "1000", "--num-prompts", "20", "--max-concurrency", "1"];
    let (table, result) = measure(&server.url(), &arguments);
    assert!(ms(&result, "p99_ttft_ms") > 800.0, "20 requests of 50 ms one after the other: {table}");
    assert!(ms(&result, "p99_client_queue_time_ms") > 700.0, "{table}");
    assert_eq!(result["max_concurrent_requests"], 1);
}

#[test]
fn goodput_counts_the_requests_that_are_fast_enough() {
    let server = ScriptedServer::start(|number, _| {
        std::thread::sleep(Duration::from_millis(if number % 4 == 3 { 1500 } else { 0 }));
        Reply::stream([chunk("a"), chunk("b"), usage(2), "[DONE]".to_owned()])
    });
    let (table, result) =
        measure(&server.url(), &["--num-prompts", "40", "--goodput", "ttft:1000", "tpot:900"]);
    let good = ms(&result, "request_goodput") * ms(&result, "duration");
    assert!((good - 30.0).abs() < 1e-6, "{good}: {table}");
}

#[test]
fn a_server_that_is_not_there_is_an_error_that_says_what_to_do() {
    let unused = std::net::TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap();
    let output = bench(&["serve", "--base-url", &format!("http://{unused}")]);
    let error = text(&output).1;
    assert_eq!(output.status.code(), Some(5), "{error}");
    for words in [unused.to_string().as_str(), "Connection refused", "start the server", "--base-url"] {
        assert!(error.contains(words), "{words}: {error}");
    }
}

#[test]
fn a_server_with_keys_gets_the_key_and_the_result_does_not() {
    let server = ScriptedServer::start(|_, head| match head.contains("authorization: Bearer secret-1") {
        true => Reply::stream([chunk("a"), usage(1), "[DONE]".to_owned()]),
        false => Reply::Error(401, json!({"error": {"message": "no key"}}).to_string()),
    });
    let (_, result) = measure(&server.url(), &["--num-prompts", "3", "--api-key", "secret-1"]);
    assert_eq!(result["completed"], 3);
    assert!(!result.to_string().contains("secret-1"));
    let output = bench(&["serve", "--base-url", &server.url(), "--num-prompts", "3"]);
    let error = text(&output).1;
    assert!(output.status.code() == Some(5) && error.contains("--api-key"), "{error}");
}

#[test]
fn a_run_without_a_completed_request_fails_after_its_table() {
    let server = ScriptedServer::start(|number, _| match number < ScriptedServer::FIRST_MEASURED {
        true => Reply::stream([chunk("a"), usage(1), "[DONE]".to_owned()]),
        false => Reply::Error(503, "overloaded".to_owned()),
    });
    let output = bench(&["serve", "--base-url", &server.url(), "--num-prompts", "3"]);
    let (stdout, stderr) = text(&output);
    assert_eq!(output.status.code(), Some(5), "{stderr}");
    assert!(
        stdout.contains("3 x HTTP 503") && stderr.contains("no request was completed"),
        "{stdout}{stderr}"
    );
}

#[test]
fn the_same_seed_sends_the_same_prompts() {
    let prompts = |seed: &str| {
        let seen: Arc<Mutex<Vec<String>>> = Arc::default();
        let kept = Arc::clone(&seen);
        let server = ScriptedServer::start(move |_, request| {
            kept.lock().unwrap().push(request.rsplit("\r\n\r\n").next().unwrap().to_owned());
            Reply::stream([chunk("a"), usage(1), "[DONE]".to_owned()])
        });
        let mut arguments = vec!["--num-prompts", "8", "--dataset-name", "sharegpt", "--seed", seed];
        arguments.extend(["--max-concurrency", "1"]);
        measure(&server.url(), &arguments);
        drop(server);
        let seen = seen.lock().unwrap().clone();
        assert_eq!(seen.len(), 8 + ScriptedServer::FIRST_MEASURED);
        seen
    };
    assert_eq!(prompts("1"), prompts("1"));
    assert_ne!(prompts("1"), prompts("2"));
}

#[test]
fn prompts_of_a_sharegpt_file_are_sent_with_the_lengths_of_their_answers() {
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("sharegpt.json");
    let messages = |prompt: &str| {
        let answer = json!({"from": "gpt", "value": "word ".repeat(90)});
        json!({"id": "x", "conversations": [{"from": "human", "value": prompt}, answer]})
    };
    let prompts = ["What is the capital of France?", "How do I sort a list in Rust?"];
    std::fs::write(&file, json!(prompts.map(messages)).to_string()).unwrap();
    let seen: Arc<Mutex<String>> = Arc::default();
    let kept = Arc::clone(&seen);
    let server = ScriptedServer::start(move |_, request| {
        kept.lock().unwrap().push_str(request);
        Reply::stream([chunk("a"), usage(1), "[DONE]".to_owned()])
    });
    let file = file.to_str().unwrap();
    let mut arguments = vec!["--dataset-name", "sharegpt", "--dataset-path", file];
    arguments.extend(["--num-prompts", "2", "--ignore-eos", "false"]);
    let (table, result) = measure(&server.url(), &arguments);
    assert_eq!(result["completed"], 2, "{table}");
    let seen = seen.lock().unwrap();
    // 450 bytes at 4.5 bytes a token: this server's counts do not tell its own scale.
    assert!(prompts.iter().all(|prompt| seen.contains(prompt)), "{seen}");
    assert_eq!(seen.matches("\"max_tokens\":100,").count(), 2, "{seen}");
}

#[test]
fn wrong_arguments_and_files_are_refused_by_name() {
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("other.json");
    std::fs::write(&file, "{}").unwrap();
    let (file, folder) = (file.to_str().unwrap(), folder.path().to_str().unwrap());
    let nowhere = ["serve", "--base-url", "http://127.0.0.1:9"];
    let serve = |more: &[&str]| bench(&[&nowhere[..], more].concat());
    for (output, words) in [
        (serve(&["--request-rate", "0"]), "no request rate"),
        (serve(&["--goodput", "itl:5"]), "no objective"),
        (serve(&["--range-ratio", "1"]), "--range-ratio"),
        (serve(&["--duration", "1s"]), "--num-prompts or --max-concurrency"),
        (serve(&["--dataset-path", file]), "--dataset-name sharegpt"),
        (bench(&["serve", "--base-url", "https://127.0.0.1:9"]), "no address"),
        (bench(&["compare", file, file]), "is no result: it has no field \"duration\""),
        (bench(&["compare", folder, "missing.json"]), "is no result"),
        (bench(&["report", "missing.json", "--html", "page.html"]), "cannot read missing.json"),
    ] {
        let error = text(&output).1;
        assert!(!output.status.success() && error.contains(words), "{words}: {error}");
    }
}
