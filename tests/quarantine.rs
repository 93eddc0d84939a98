// SPDX-License-Identifier: Apache-2.0

//! Requests that crash workers. The workers are real; a library that is preloaded into them crashes
//! them when a request with a certain text arrives (crash_on_request.c).

use crate::harness::api::{Continuation, TestRequest, generate, generate_all, runtime};
use crate::harness::http::HttpClient;
use crate::harness::{ServedFleet, demo_7m, eventually, preload_library, proc, serve};
use crate::routing::placed_streams;
use serde_json::{Value, json};
use std::cmp::Reverse;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::time::Duration;

/// Grammars and cache salts reach a worker as the client wrote them.
const CRASH_ON: &str = "crash-this-worker";
const WORKERS: usize = 4;

struct CrashingFleet {
    fleet: ServedFleet,
    log: PathBuf,
    _folder: tempfile::TempDir,
}

impl CrashingFleet {
    /// Workers crash when they get the text [`CRASH_ON`].
    fn start() -> Self {
        Self::start_with(&[], |_, _| {})
    }

    /// Only the first worker that gets the text crashes, in the middle of a frame of its answer.
    fn start_crashing_once() -> Self {
        Self::start_with(&["--routing", "least-loaded"], |command, folder| {
            command.env("BALLAST_TEST_CRASH_ONCE", folder.join("crashed"));
            command.env("BALLAST_TEST_CRASH_AFTER", "60");
        })
    }

    /// Each worker that gets the text crashes some steps later: the output of its stream grows from
    /// crash to crash.
    fn start_crashing_later() -> Self {
        Self::start_with(&[], |command, _| {
            command.env("BALLAST_TEST_CRASH_AFTER", "30");
        })
    }

    fn start_with(arguments: &[&str], prepare: impl FnOnce(&mut Command, &Path)) -> Self {
        let folder = tempfile::tempdir().unwrap();
        let directory = tempfile::Builder::new().prefix("ballast-test-").tempdir().unwrap();
        let log = folder.path().join("log");
        let arguments = [&["--workers", "4", "--threads", "1"], arguments].concat();
        let mut command = serve(directory.path(), &demo_7m(), &arguments);
        command
            .env("LD_PRELOAD", preload_library("crash_on_request", folder.path()))
            .env("BALLAST_TEST_CRASH_ON", CRASH_ON);
        prepare(&mut command, folder.path());
        command.stderr(Stdio::from(std::fs::File::create(&log).unwrap()));
        Self { fleet: ServedFleet::start_command(directory, command), log, _folder: folder }
    }

    fn restarts(&self) -> u64 {
        self.fleet.processes_by_role("worker").iter().map(|worker| worker.restarts).sum()
    }

    /// The supervisor may notice a death later than the router: a driver takes its time to exit.
    fn wait_until_restarted(&self, count: u64) {
        eventually("every lost worker is counted", || (self.restarts() >= count).then_some(()));
        self.wait_until_ready();
    }

    fn wait_until_ready(&self) {
        eventually("all workers serve", || {
            let workers = self.fleet.processes_by_role("worker");
            workers.iter().all(|worker| worker.state == "ready").then_some(())
        });
    }
}

fn neighbours() -> Vec<TestRequest> {
    let request = |seed: u32| TestRequest {
        prompt: (0..20).map(|i| 10 + i * 13 + seed).collect(),
        max_tokens: 200,
        temperature: 0.7,
        seed: u64::from(seed),
        ..TestRequest::default()
    };
    (0..6).map(request).collect()
}

fn tokens(results: &[Result<Continuation, tonic::Status>]) -> Vec<&[u32]> {
    results.iter().map(|result| &result.as_ref().unwrap().tokens[..]).collect()
}

/// The first loss may happen to any request. The second one comes within a second of it, so one
/// cause may have killed both workers. The third one is conclusive. On a slow machine, the second
/// one comes later and is conclusive already.
fn check_lost_workers(fleet: &CrashingFleet) {
    fleet.wait_until_restarted(2);
    let lost = fleet.restarts();
    assert!((2..=3).contains(&lost), "{lost} workers were lost, more than identify the request");
}

/// Sends `poison` again and again while neighbours generate. It kills at most three workers.
fn check_quarantine(poison: &Value) {
    let fleet = CrashingFleet::start();
    let http = HttpClient::connect(&fleet.fleet);
    let neighbours = neighbours();
    let expected = runtime().block_on(generate_all(&fleet.fleet.grpc, &neighbours));
    let found = runtime().block_on(fleet.fleet.generate_during_fault(&neighbours, || {
        for attempt in 0..10 {
            let (status, answer) = http.post("/v1/completions", poison);
            let error: Value = serde_json::from_str(&answer).unwrap();
            assert_eq!(
                (status, error["error"]["code"].as_str()),
                (422, Some("request_quarantined")),
                "attempt {attempt}: {answer}"
            );
        }
    }));
    assert_eq!(tokens(&expected), tokens(&found), "the neighbours' streams are whole");
    check_lost_workers(&fleet);
    assert_eq!(fleet.fleet.processes_by_role("worker").len(), WORKERS);

    let harmless = json!({"prompt": "import ", "max_tokens": 4, "guided_regex": "[a-z]{1,4}"});
    assert_eq!(http.post("/v1/completions", &harmless).0, 200);
    let log = std::fs::read_to_string(&fleet.log).unwrap();
    let lines: Vec<&str> = log.lines().filter(|line| line.contains("a request ended its workers")).collect();
    assert_eq!(lines.len(), 1, "{log}");
    assert!(lines[0].contains("request_id=") && lines[0].contains("content="), "{}", lines[0]);
    assert_eq!(http.metric("ballast:requests_quarantined_total"), Some(1.0));
    fleet.fleet.stop();
}

#[test]
fn a_request_that_crashes_workers_before_it_is_admitted_costs_at_most_three_of_them() {
    check_quarantine(&json!({"prompt": "import ", "max_tokens": 50, "cache_salt": CRASH_ON}));
}

#[test]
fn a_grammar_that_crashes_workers_costs_at_most_three_of_them() {
    check_quarantine(&json!({"prompt": "import ", "max_tokens": 50, "guided_regex": CRASH_ON}));
}

#[test]
fn a_quarantined_request_is_refused_over_grpc_with_a_status_that_is_not_retried() {
    let fleet = CrashingFleet::start();
    let poison = TestRequest {
        prompt: vec![1, 2, 3],
        max_tokens: 4,
        grammar: Some(proto::v1::grammar::Kind::Regex(CRASH_ON.to_owned())),
        ..TestRequest::default()
    };
    let mut answers = Vec::new();
    for _ in 0..3 {
        let refused = runtime().block_on(async {
            let mut client = crate::harness::api::connect(&fleet.fleet.grpc).await;
            generate(&mut client, &poison, |_| {}).await.unwrap_err()
        });
        assert_eq!(refused.code(), tonic::Code::FailedPrecondition, "{refused}");
        answers.push(refused.message().to_owned());
    }
    assert!(answers.iter().all(|answer| answer.contains("are refused")), "{answers:?}");
    check_lost_workers(&fleet);
    fleet.fleet.stop();
}

#[test]
fn i6_a_worker_that_crashes_in_the_middle_of_a_frame_cuts_no_stream_and_blames_no_request() {
    let fleet = CrashingFleet::start_crashing_once();
    let http = HttpClient::connect(&fleet.fleet);
    let mut requests = neighbours();
    let expected = runtime().block_on(generate_all(&fleet.fleet.grpc, &requests));
    // The salt separates caches and changes no token.
    requests[0].cache_salt = CRASH_ON.to_owned();
    let found = runtime().block_on(generate_all(&fleet.fleet.grpc, &requests));
    fleet.wait_until_restarted(1);
    for (index, (expected, found)) in expected.iter().zip(&found).enumerate() {
        let (expected, found) = (expected.as_ref().unwrap(), found.as_ref().unwrap());
        let resumes = found.resumes;
        assert_eq!(Continuation { resumes, ..expected.clone() }, *found, "request {index}");
        assert!(resumes <= 1, "request {index} was resumed {resumes} times");
    }
    assert_eq!(found[0].as_ref().unwrap().resumes, 1, "the crash came after its stream");

    // One loss is no reason to refuse the request.
    let again = runtime().block_on(generate_all(&fleet.fleet.grpc, &requests));
    assert_eq!(tokens(&expected), tokens(&again));
    assert_eq!(fleet.restarts(), 1);
    assert_eq!(http.metric("ballast:requests_quarantined_total").unwrap_or(0.0), 0.0);
    fleet.fleet.stop();
}

fn worker_pids(fleet: &ServedFleet) -> Vec<u32> {
    fleet.processes_by_role("worker").into_iter().map(|worker| worker.pid).collect()
}

fn wait_for_successors(fleet: &ServedFleet, killed: &[u32]) {
    eventually("all workers are back", || {
        let next = fleet.try_processes()?.into_iter().filter(|next| next.role == "worker");
        let back = next.filter(|next| next.state == "ready" && !killed.contains(&next.pid)).count();
        (back == killed.len()).then_some(())
    });
}

/// As when their GPU fails: the stream is sent to the next worker before that one is known to be
/// dead.
#[test]
fn i6_a_stream_whose_workers_are_killed_together_is_not_blamed() {
    let fleet = ServedFleet::start(&demo_7m(), &["--workers", "3", "--threads", "1"]);
    for round in 0..3 {
        let prompt = (5..60).map(|token| token + round).collect();
        let requests = [TestRequest { prompt, max_tokens: 900, ..TestRequest::default() }];
        let expected = runtime().block_on(generate_all(&fleet.grpc, &requests));
        let workers = worker_pids(&fleet);
        let found = runtime().block_on(fleet.generate_during_fault(&requests, || {
            // One process, so that there are no milliseconds between them.
            let killed = Command::new("kill").arg("-KILL").args(workers.iter().map(u32::to_string)).status();
            assert!(killed.unwrap().success());
        }));
        assert_eq!(tokens(&found), tokens(&expected), "round {round}");
        wait_for_successors(&fleet, &workers);
    }
    let quarantined = HttpClient::connect(&fleet).metric("ballast:requests_quarantined_total");
    assert_eq!(quarantined.unwrap_or(0.0), 0.0);
    fleet.stop();
}

/// As when memory runs out: the next worker has admitted the stream, and is killed some
/// milliseconds after the first one. Its prefill of the long prompt takes longer.
#[test]
fn i6_streams_whose_workers_are_killed_milliseconds_apart_are_not_blamed() {
    let arguments = ["--workers", "4", "--threads", "1", "--routing", "least-loaded"];
    let fleet = ServedFleet::start(&demo_7m(), &arguments);
    for (round, gap_ms) in (0..).zip([5, 10, 20]) {
        // Each runs alone on its worker.
        let request = |number: u32| TestRequest {
            prompt: (0..1500).map(|at| 5 + (at * 7 + number * 131 + round * 17) % 900).collect(),
            max_tokens: 600,
            ..TestRequest::default()
        };
        let requests = [request(0), request(1)];
        let workers = worker_pids(&fleet);
        let found = runtime().block_on(fleet.generate_during_fault(&requests, || {
            let placed = placed_streams(&fleet);
            let mut order: Vec<_> = workers.iter().zip(placed).collect();
            // Those with streams die first.
            order.sort_by_key(|&(_, streams)| Reverse(streams));
            for (&worker, _) in order {
                proc::send_signal(worker, "KILL");
                std::thread::sleep(Duration::from_millis(gap_ms));
            }
        }));
        wait_for_successors(&fleet, &workers);
        let expected = runtime().block_on(generate_all(&fleet.grpc, &requests));
        for (found, expected) in found.iter().zip(expected) {
            let found = found.as_ref().unwrap_or_else(|error| panic!("{gap_ms} ms apart: {error}"));
            let resumes = found.resumes;
            assert!(resumes > 0, "the stream ended before its worker was killed");
            assert_eq!(*found, Continuation { resumes, ..expected.unwrap() }, "{gap_ms} ms apart");
        }
    }
    let quarantined = HttpClient::connect(&fleet).metric("ballast:requests_quarantined_total");
    assert_eq!(quarantined.unwrap_or(0.0), 0.0);
    fleet.stop();
}

#[test]
fn a_request_that_crashes_workers_in_the_middle_of_its_output_is_quarantined_for_all_of_them() {
    let fleet = CrashingFleet::start_crashing_later();
    let http = HttpClient::connect(&fleet.fleet);
    let harmless = json!({"prompt": "import ", "max_tokens": 8, "temperature": 0.0});
    let expected = http.post_json("/v1/completions", &harmless)["choices"][0]["text"].clone();
    let poison = json!({"prompt": "import ", "max_tokens": 500, "ignore_eos": true, "cache_salt": CRASH_ON});
    let (status, answer) = http.post("/v1/completions", &poison);
    assert_eq!(status, 422, "{answer}");
    fleet.wait_until_ready();
    let lost = fleet.restarts();
    assert!((2..=8).contains(&lost), "{lost} workers were lost");
    for _ in 0..3 {
        assert_eq!(http.post("/v1/completions", &poison).0, 422, "a repetition is refused");
    }
    assert_eq!(fleet.restarts(), lost, "a repetition reached a worker");
    assert_eq!(http.post_json("/v1/completions", &harmless)["choices"][0]["text"], expected);
    fleet.fleet.stop();
}

/// A poison whose workers crash a little later each time shares every worker with its neighbours,
/// since packed routing sends all streams to one worker.
#[test]
fn i6_neighbours_of_a_request_that_crashes_workers_later_each_time_are_whole() {
    let fleet = CrashingFleet::start_with(&["--routing", "packed"], |command, _| {
        command.env("BALLAST_TEST_CRASH_AFTER", "30");
    });
    let http = HttpClient::connect(&fleet.fleet);
    let mut requests = neighbours();
    requests.iter_mut().for_each(|request| request.max_tokens = 900);
    let expected = runtime().block_on(generate_all(&fleet.fleet.grpc, &requests));
    let mut all = requests.clone();
    // A salt is no part of a request's content.
    let prompt = vec![1, 2, 3];
    all.push(TestRequest { prompt, cache_salt: CRASH_ON.to_owned(), ..requests[0].clone() });
    let mut found = runtime().block_on(generate_all(&fleet.fleet.grpc, &all));
    let poisoned = found.pop().unwrap().unwrap_err();
    assert_eq!(poisoned.code(), tonic::Code::FailedPrecondition, "{poisoned}");
    assert_eq!(tokens(&expected), tokens(&found), "the neighbours' streams are whole");
    let resumes: Vec<u32> = found.iter().map(|result| result.as_ref().unwrap().resumes).collect();
    assert!(resumes.iter().all(|&resumes| resumes >= 3), "the neighbours were elsewhere: {resumes:?}");
    fleet.wait_until_ready();
    let lost = fleet.restarts();
    // Eight if its output is longer at each crash; fewer if it once is not.
    assert!((4..16).contains(&lost), "{lost} workers were lost");
    assert_eq!(http.metric("ballast:requests_quarantined_total"), Some(1.0));
    fleet.fleet.stop();
}
