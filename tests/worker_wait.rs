// SPDX-License-Identifier: Apache-2.0

//! Requests wait for a worker of a model that has none at the moment: its only worker restarts.

use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::time::{Duration, Instant};

use serde_json::{Value, json};

use crate::harness::api::{TestRequest, generate_all, runtime};
use crate::harness::http::HttpClient;
use crate::harness::{
    FleetProcess, ServedFleet, demo_7m, demo_22m, eventually, model_table, proc, runs_on_host, text,
};
use crate::tools::chat_model;

/// A request of each API, and one that only scores its prompt. Each number gives other contents:
/// the same content on two workers that are killed goes into quarantine.
fn requests(number: usize) -> Vec<(&'static str, Value)> {
    let prompt = format!("x{number} = ");
    let messages = json!([{"role": "user", "content": prompt}]);
    let completion = |more: Value| {
        let mut body = json!({"model": "m", "prompt": prompt, "max_tokens": 8});
        body.as_object_mut().unwrap().extend(more.as_object().unwrap().clone());
        ("/v1/completions", body)
    };
    vec![
        completion(json!({"stop": ["\n"]})),
        completion(json!({"n": 3})),
        completion(json!({"max_tokens": 0, "echo": true, "logprobs": 1})),
        completion(json!({"guided_regex": "[0-9]+"})),
        ("/v1/chat/completions", json!({"model": "m", "messages": messages, "max_tokens": 8})),
        ("/v1/responses", json!({"model": "m", "input": prompt, "max_output_tokens": 8})),
        ("/v1/messages", json!({"model": "m", "messages": messages, "max_tokens": 8})),
    ]
}

fn grpc_request(number: usize) -> TestRequest {
    let prompt = vec![10, 23, 36 + number as u32 % 800];
    TestRequest { model: "m".to_owned(), prompt, max_tokens: 8, ..TestRequest::default() }
}

/// Sends requests of every API, those of each API one after the other, until `change` returns. All
/// must be answered. Returns how many were sent.
fn while_requests_arrive(fleet: &ServedFleet, change: impl FnOnce()) -> usize {
    let (done, sent) = (AtomicBool::new(false), AtomicUsize::new(0));
    let next_number = || sent.fetch_add(1, Ordering::Relaxed);
    std::thread::scope(|scope| {
        for api in 0..requests(0).len() {
            let (done, next_number) = (&done, &next_number);
            scope.spawn(move || {
                let http = HttpClient::connect(fleet);
                while !done.load(Ordering::Relaxed) {
                    let (path, body) = requests(next_number()).swap_remove(api);
                    let (status, answer) = http.post(path, &body);
                    assert_eq!(status, 200, "{path} {body}: {answer}");
                }
            });
        }
        scope.spawn(|| {
            while !done.load(Ordering::Relaxed) {
                let request = grpc_request(next_number());
                let answer = runtime().block_on(generate_all(&fleet.grpc, &[request])).remove(0);
                assert_eq!(answer.unwrap().tokens.len(), 8);
            }
        });
        let changed = std::panic::catch_unwind(std::panic::AssertUnwindSafe(change));
        done.store(true, Ordering::Relaxed);
        if let Err(panic) = changed {
            std::panic::resume_unwind(panic);
        }
    });
    sent.into_inner()
}

fn worker(fleet: &ServedFleet) -> FleetProcess {
    fleet.processes_by_role("worker").into_iter().find(|worker| worker.name == "worker-0").unwrap()
}

fn await_other_worker(fleet: &ServedFleet, before: &FleetProcess) {
    eventually("another process of the worker is ready", || {
        let now = fleet.try_processes()?.into_iter().find(|process| process.name == before.name)?;
        (now.pid != before.pid && now.state == "ready").then_some(())
    });
}

#[test]
fn requests_outlast_the_death_of_the_only_worker_in_every_api() {
    let folder = tempfile::tempdir().unwrap();
    let fleet = ServedFleet::start_config(&model_table("m", &chat_model(folder.path()), ""));
    let sent = while_requests_arrive(&fleet, || {
        for _ in 0..2 {
            std::thread::sleep(Duration::from_millis(300));
            let killed = worker(&fleet);
            proc::send_signal(killed.pid, "KILL");
            await_other_worker(&fleet, &killed);
        }
        std::thread::sleep(Duration::from_millis(300));
    });
    assert!(sent > 2 * requests(0).len(), "{sent} requests");
    fleet.stop();
}

#[test]
fn a_reload_of_a_model_with_one_worker_loses_no_request() {
    let folder = tempfile::tempdir().unwrap();
    let file = chat_model(folder.path());
    let fleet = ServedFleet::start_config(&model_table("m", &file, ""));
    // The second one changes the fingerprint of the worker too.
    for settings in ["sampling = { temperature = 0 }", "kv-type = \"q8_0\""] {
        let before = worker(&fleet);
        fleet.configure(&model_table("m", &file, settings));
        while_requests_arrive(&fleet, || {
            let printed = fleet.reload(&[]);
            assert!(printed.starts_with("workers of model m restart one after the other"), "{printed}");
            await_other_worker(&fleet, &before);
            std::thread::sleep(Duration::from_millis(300));
        });
    }
    fleet.stop();
}

/// A fleet of the model "m" whose only worker is gone and cannot attach: the weight-server is
/// stopped. Its watchdog allows 30 s.
struct FleetWithoutWorker {
    fleet: ServedFleet,
    http: HttpClient,
    weight_server: u32,
}

impl FleetWithoutWorker {
    fn start(config: &str) -> Self {
        let fleet = ServedFleet::start_config(config);
        let http = HttpClient::connect(&fleet);
        http.post_json("/v1/completions", &completion());
        let weight_server = fleet.only_process("weight-server").pid;
        proc::send_signal(weight_server, "STOP");
        proc::send_signal(worker(&fleet).pid, "KILL");
        let without = Self { fleet, http, weight_server };
        eventually("the router has no worker", || {
            (without.http.metric("ballast:workers{model_name=\"m\"}")? == 0.0).then_some(())
        });
        without
    }

    fn continue_weight_server(&self) {
        proc::send_signal(self.weight_server, "CONT");
    }

    /// Waiting requests of all models; `None` while the router restarts.
    fn waiting(&self) -> Option<usize> {
        let page = self.http.runtime.block_on(async {
            let client = reqwest::Client::new();
            client.get(format!("{}/metrics", self.http.url)).send().await.ok()?.text().await.ok()
        })?;
        let lines = page.lines().filter(|line| line.starts_with("ballast:num_requests_queued{"));
        lines.map(|line| line.rsplit(' ').next()?.parse::<usize>().ok()).sum()
    }

    fn await_waiting(&self, count: usize) {
        eventually("so many requests wait", || (self.waiting()? == count).then_some(()));
    }

    /// Sends a completion in a thread.
    fn send(&self, body: &Value) -> std::thread::JoinHandle<Answer> {
        let (http, body) = (HttpClient::connect(&self.fleet), body.clone());
        std::thread::spawn(move || Answer::of(&http, &body))
    }
}

fn completion() -> Value {
    json!({"model": "m", "prompt": "import ", "max_tokens": 2})
}

#[derive(Debug)]
struct Answer {
    status: u16,
    code: String,
    message: String,
    retry_after: Option<u64>,
    took: Duration,
}

impl Answer {
    fn of(http: &HttpClient, body: &Value) -> Self {
        let began = Instant::now();
        http.runtime.block_on(async {
            let url = format!("{}/v1/completions", http.url);
            let reply = http.client.post(url).json(body).send().await.unwrap();
            let retry_after =
                reply.headers().get("retry-after").map(|v| v.to_str().unwrap().parse().unwrap());
            let status = reply.status().as_u16();
            let body: Value = reply.json().await.unwrap();
            let field = |name: &str| body["error"][name].as_str().unwrap_or_default().to_owned();
            let (code, message) = (field("code"), field("message"));
            Self { status, code, message, retry_after, took: began.elapsed() }
        })
    }
}

#[test]
fn a_worker_that_does_not_come_back_ends_the_wait_with_503_after_the_bound() {
    const BOUND: Duration = Duration::from_secs(3);
    /// For a busy machine.
    const SLACK: Duration = Duration::from_secs(5);
    let config = format!("[router]\nworker-wait = \"3s\"\n{}", model_table("m", &demo_7m(), ""));
    let without = FleetWithoutWorker::start(&config);
    let http = &without.http;
    for _ in 0..2 {
        let answer = Answer::of(http, &completion());
        assert_eq!((answer.status, answer.code.as_str(), answer.retry_after), (503, "not_ready", Some(1)));
        let expected = "no worker of the model \"m\" is ready after a wait of 3.";
        assert!(answer.message.starts_with(expected), "{answer:?}");
        assert!(answer.message.ends_with(": a worker is starting"), "{answer:?}");
        assert!((BOUND..BOUND + SLACK).contains(&answer.took), "{answer:?}");
    }
    let refused = http.runtime.block_on(generate_all(&without.fleet.grpc, &[grpc_request(0)])).remove(0);
    let refused = refused.unwrap_err();
    assert_eq!(refused.code(), tonic::Code::Unavailable, "{refused}");
    assert!(
        refused.message().contains("after a wait of 3.") && refused.metadata().contains_key("retry-after")
    );

    // The client's own deadline, and a client that goes away.
    let mut hurried = completion();
    hurried["deadline_ms"] = json!(300);
    let answer = Answer::of(http, &hurried);
    assert_eq!((answer.status, answer.code.as_str()), (504, "deadline_exceeded"), "{answer:?}");
    http.runtime.block_on(async {
        let sent = http.client.post(format!("{}/v1/completions", http.url)).json(&completion()).send();
        assert!(tokio::time::timeout(Duration::from_millis(500), sent).await.is_err(), "the request waits");
    });
    without.await_waiting(0);
    without.continue_weight_server();
    eventually("the model serves", || (http.post("/v1/completions", &completion()).0 == 200).then_some(()));
    without.fleet.stop();
}

#[test]
fn requests_that_wait_for_a_worker_are_bounded_and_complete_when_it_is_back() {
    let config = format!("[admission]\nqueue-max = 4\n{}", model_table("m", &demo_7m(), ""));
    let without = FleetWithoutWorker::start(&config);
    let flood: Vec<_> = (0..12).map(|_| without.send(&completion())).collect();
    without.await_waiting(4);
    eventually("the others are refused", || {
        (flood.iter().filter(|request| request.is_finished()).count() == 8).then_some(())
    });
    without.continue_weight_server();
    let answers: Vec<Answer> = flood.into_iter().map(|request| request.join().unwrap()).collect();
    let of_status = |status: u16| answers.iter().filter(move |answer| answer.status == status);
    assert_eq!((of_status(200).count(), of_status(503).count()), (4, 8), "{answers:?}");
    let is_told_of_the_restart =
        |answer: &Answer| answer.code == "overloaded" && answer.retry_after == Some(1);
    assert!(of_status(503).all(is_told_of_the_restart), "{answers:?}");
    without.await_waiting(0);
    without.fleet.stop();
}

#[test]
fn an_answer_of_which_nothing_was_sent_waits_as_long_as_a_new_request() {
    /// Longer than a stream that has sent tokens waits.
    const OUTAGE: Duration = Duration::from_secs(7);
    let fleet = ServedFleet::start_config(&model_table("m", &demo_7m(), ""));
    let http = HttpClient::connect(&fleet);
    let (weight_server, killed) = (fleet.only_process("weight-server").pid, worker(&fleet).pid);
    let body = json!({"model": "m", "prompt": "def f(", "max_tokens": 900, "ignore_eos": true, "n": 8});
    let own = HttpClient::connect(&fleet);
    let running = std::thread::spawn(move || Answer::of(&own, &body));
    eventually("the request generates", || {
        (http.metric("ballast:generation_tokens_total{model_name=\"m\"}")? > 0.0).then_some(())
    });
    proc::send_signal(weight_server, "STOP");
    proc::send_signal(killed, "KILL");
    std::thread::sleep(OUTAGE);
    assert!(!running.is_finished(), "{:?}", running.join());
    proc::send_signal(weight_server, "CONT");
    let answer = running.join().unwrap();
    assert_eq!(answer.status, 200, "{answer:?}");
    assert_eq!(http.metric("ballast:stream_resumes_total{model_name=\"m\"}"), Some(8.0));
    fleet.stop();
}

#[test]
fn requests_do_not_wait_for_a_router_that_stops_or_a_model_that_is_unloaded_or_drained() {
    let config = [model_table("m", &demo_7m(), ""), model_table("other", &demo_22m(), "")].concat();
    let without = FleetWithoutWorker::start(&config);
    let waits = without.send(&completion());
    without.await_waiting(1);
    let output = without.fleet.run_command(&["restart", "router"]);
    assert!(output.status.success(), "{}", text(&output).1);
    let answer = waits.join().unwrap();
    assert!(answer.status == 503 && answer.took < Duration::from_secs(20), "{answer:?}");

    // The next router has not heard of the model, and the supervisor lists it.
    let waits = without.send(&completion());
    without.await_waiting(1);
    without.continue_weight_server();
    assert_eq!(waits.join().unwrap().status, 200);

    proc::send_signal(without.weight_server, "STOP");
    proc::send_signal(worker(&without.fleet).pid, "KILL");
    let http = HttpClient::connect(&without.fleet);
    eventually("the router has no worker", || {
        (http.metric("ballast:workers{model_name=\"m\"}")? == 0.0).then_some(())
    });
    let waits = without.send(&completion());
    without.await_waiting(1);
    std::thread::scope(|scope| {
        let unload = scope.spawn(|| without.fleet.run_command(&["unload", "m"]));
        let answer = waits.join().unwrap();
        assert_eq!((answer.status, answer.code.as_str()), (503, "not_ready"), "{answer:?}");
        assert!(answer.took < Duration::from_secs(20), "{answer:?}");
        without.continue_weight_server();
        let output = unload.join().unwrap();
        assert!(output.status.success(), "{}", text(&output).1);
    });
    eventually("the model is unknown", || {
        let answer = Answer::of(&http, &completion());
        assert!(answer.took < Duration::from_secs(20), "{answer:?}");
        (answer.status == 404).then_some(())
    });

    // A drained worker stays down until it is restarted.
    let run = |arguments: &[&str]| {
        let output = without.fleet.run_command(arguments);
        assert!(output.status.success(), "{arguments:?}: {}", text(&output).1);
    };
    run(&["drain", "worker-1"]);
    let other = json!({"model": "other", "prompt": "import ", "max_tokens": 2});
    let answer = Answer::of(&http, &other);
    assert_eq!((answer.status, answer.code.as_str()), (503, "not_ready"), "{answer:?}");
    assert!(answer.message.starts_with("no worker of the model \"other\" is ready"), "{answer:?}");
    assert!(answer.message.ends_with(": none is going to start; `ballast ps` says why"), "{answer:?}");
    assert!(answer.took < Duration::from_secs(20), "{answer:?}");
    run(&["restart", "worker-1"]);
    eventually("the other model serves", || (Answer::of(&http, &other).status == 200).then_some(()));
    without.fleet.stop();
}

#[test]
fn requests_do_not_wait_for_a_worker_that_starts_after_the_bound() {
    const BOUND: Duration = Duration::from_secs(3);
    if !runs_on_host("a worker that crashes again and again") {
        return;
    }
    let config = format!("[router]\nworker-wait = \"3s\"\n{}", model_table("m", &demo_7m(), ""));
    let fleet = ServedFleet::start_config(&config);
    let http = HttpClient::connect(&fleet);
    http.post_json("/v1/completions", &completion());
    let answer = eventually("a request is refused at once", || {
        let worker = fleet.try_processes()?.into_iter().find(|process| process.role == "worker")?;
        if worker.state != "failed" {
            if worker.pid > 0 {
                proc::send_signal(worker.pid, "KILL");
            }
            return None;
        }
        let answer = Answer::of(&http, &completion());
        let is_told_when = answer.retry_after.is_some_and(|seconds| (2..=60).contains(&seconds));
        (answer.status == 503 && is_told_when && answer.took < BOUND / 2).then_some(answer)
    });
    assert_eq!(answer.code, "not_ready");
    assert!(answer.message.starts_with("no worker of the model \"m\" is ready"), "{answer:?}");
    assert!(answer.message.contains(": the next worker starts in "), "{answer:?}");

    let run = |arguments: &[&str]| {
        let output = fleet.run_command(arguments);
        assert!(output.status.success(), "{arguments:?}: {}", text(&output).1);
    };
    run(&["restart", "worker-0"]);
    eventually("the model serves", || (Answer::of(&http, &completion()).status == 200).then_some(()));
    fleet.stop();
}
