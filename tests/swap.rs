// SPDX-License-Identifier: Apache-2.0

//! `ballast swap` replaces the file of a model while clients use it.

use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use crate::harness::admin::try_weight_server_status;
use crate::harness::api::{Continuation, TestRequest, generate_all, runtime};
use crate::harness::http::HttpClient;
use crate::harness::{
    FleetProcess, ServedFleet, ballast, demo_7m, demo_22m, device, eventually, first_json_line, proc,
    runs_on_host, serve_config, text,
};
use crate::model_text::rewrite;

/// Clients that always have a request running. The router and each worker serve more at once, so
/// that none waits in a queue.
const CLIENTS: u64 = 6;

fn model(name: &str, path: &Path, workers: u32, more: &str) -> String {
    let device = device();
    format!(
        "[[models]]\nname = {name:?}\npath = {path:?}\ndevice = {device:?}\nworkers = {workers}\nthreads = 1\n\
         kv-tokens = 2048\n{more}"
    )
}

fn requests() -> Vec<TestRequest> {
    let request = |client: u64| TestRequest {
        model: "m".to_owned(),
        prompt: (0..30).map(|i| 10 + (i * 7 + client as u32) % 900).collect(),
        max_tokens: 60,
        temperature: 0.8,
        seed: client,
        ..TestRequest::default()
    };
    (0..CLIENTS).map(request).collect()
}

/// What one file answers to [`requests`].
#[derive(Clone, Debug, PartialEq)]
struct FileAnswers(Vec<Continuation>);

fn answers(fleet: &ServedFleet) -> FileAnswers {
    eventually("every request is answered", || {
        let done = runtime().block_on(generate_all(&fleet.grpc, &requests()));
        done.into_iter().collect::<Result<Vec<_>, _>>().ok().map(FileAnswers)
    })
}

fn golden(file: &Path) -> FileAnswers {
    let fleet = ServedFleet::start_config(&model("m", file, 1, ""));
    let golden = answers(&fleet);
    fleet.stop();
    golden
}

/// Both files' answers, computed once.
fn goldens() -> &'static [FileAnswers; 2] {
    static GOLDENS: std::sync::OnceLock<[FileAnswers; 2]> = std::sync::OnceLock::new();
    GOLDENS.get_or_init(|| [golden(&demo_7m()), golden(&demo_22m())])
}

/// How often each file has answered.
type Tally = Arc<Mutex<[u64; 2]>>;

/// Runs `work` while clients send requests. Each answer is one file's whole answer: none is lost,
/// none is mixed.
fn under_load<T>(fleet: &ServedFleet, work: impl FnOnce(&Tally) -> T) -> T {
    let (done, tally) = (Arc::new(AtomicBool::new(false)), Tally::default());
    let clients = {
        let (url, done, tally) = (fleet.grpc.clone(), done.clone(), tally.clone());
        std::thread::spawn(move || {
            runtime().block_on(async {
                let clients = requests().into_iter().enumerate().map(|(client, request)| {
                    let (url, done, tally) = (url.clone(), done.clone(), tally.clone());
                    tokio::spawn(async move {
                        while !done.load(Ordering::Relaxed) {
                            let answer = generate_all(&url, std::slice::from_ref(&request)).await.remove(0);
                            let answer = answer.unwrap_or_else(|lost| panic!("client {client}: {lost}"));
                            let of = goldens().iter().position(|golden| golden.0[client] == answer);
                            let of =
                                of.unwrap_or_else(|| panic!("client {client}: {answer:?} is of no file"));
                            tally.lock().unwrap()[of] += 1;
                        }
                    })
                });
                for client in clients.collect::<Vec<_>>() {
                    client.await.unwrap();
                }
            });
        })
    };
    let worked = std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| work(&tally)));
    done.store(true, Ordering::Relaxed);
    clients.join().unwrap();
    worked.unwrap_or_else(|panic| std::panic::resume_unwind(panic))
}

/// Waits until each client has had an answer since now, and returns how often each file answered.
fn new_answers(tally: &Tally) -> [u64; 2] {
    // Answers that were under way are not counted.
    for _ in 0..2 {
        let before: u64 = tally.lock().unwrap().iter().sum();
        eventually("answers", || {
            (tally.lock().unwrap().iter().sum::<u64>() >= before + 2 * CLIENTS).then_some(())
        });
    }
    let before = *tally.lock().unwrap();
    eventually("answers", || {
        let now = *tally.lock().unwrap();
        let new = [now[0] - before[0], now[1] - before[1]];
        (new[0] + new[1] >= CLIENTS).then_some(new)
    })
}

fn swap(fleet: &ServedFleet, file: &Path) -> (Option<i32>, String, String) {
    let output = fleet.run_command(&["swap", "m", file.to_str().unwrap()]);
    let (printed, error) = text(&output);
    (output.status.code(), printed, error)
}

fn spawn_swap(fleet: &ServedFleet, file: &Path) -> Child {
    let mut command = ballast();
    command.arg("swap").arg("m").arg(file).arg("--runtime-dir").arg(fleet.runtime_dir());
    command.stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap()
}

/// Names and process ids of the workers.
fn workers(fleet: &ServedFleet) -> Vec<(String, u32)> {
    let workers = fleet.try_processes().unwrap_or_default().into_iter().filter(|p| p.role == "worker");
    workers.map(|worker| (worker.name, worker.pid)).collect()
}

/// Nothing is left of the other file: as many workers as before, one copy of each model.
#[track_caller]
fn settled(fleet: &ServedFleet, workers_wanted: usize, copies: usize) -> Vec<String> {
    eventually("the fleet has settled", || {
        let processes = fleet.try_processes()?;
        let workers: Vec<_> = processes.iter().filter(|p| p.role == "worker").collect();
        let are_ready = workers.iter().all(|worker| worker.state == "ready");
        let status = runtime().block_on(try_weight_server_status(fleet))?;
        // A worker has a lease, and one more for its draft model.
        let holds = |pid: u32| status.leases.iter().any(|lease| i64::from(lease.pid) == i64::from(pid));
        let is_of_worker = |pid: i32| workers.iter().any(|worker| i64::from(worker.pid) == i64::from(pid));
        let is_settled = are_ready
            && workers.len() == workers_wanted
            && workers.iter().all(|worker| holds(worker.pid))
            && status.leases.iter().all(|lease| is_of_worker(lease.pid))
            && status.generations.len() == copies;
        is_settled.then(|| status.generations.iter().map(|generation| generation.path.clone()).collect())
    })
}

#[test]
fn a_swap_under_load_loses_no_request_and_mixes_no_answer() {
    goldens();
    let fleet = ServedFleet::start_config(&model("m", &demo_7m(), 2, "aliases = [\"gpt\"]"));
    let before = workers(&fleet);
    under_load(&fleet, |tally| {
        assert_eq!(new_answers(tally)[1], 0);
        let (code, printed, error) = swap(&fleet, &demo_22m());
        assert_eq!(code, Some(0), "{error}");
        assert!(printed.starts_with(&format!("m serves {}\n", demo_22m().display())), "{printed}");
        let old = demo_7m();
        assert!(
            printed.contains(&format!("still names {}", std::path::absolute(old).unwrap().display())),
            "{printed}"
        );
        assert_eq!(new_answers(tally)[0], 0, "the old file has left");
        let now = workers(&fleet);
        assert!(now.len() == 2 && now.iter().all(|worker| !before.contains(worker)), "{before:?} {now:?}");
        assert_eq!(settled(&fleet, 2, 1), [demo_22m().to_str().unwrap()]);

        // The swapped file is what a reload compares with.
        let output = fleet.run_command(&["reload"]);
        assert_eq!(text(&output).0, "the configuration has not changed\n", "{}", text(&output).1);
        let (code, printed, error) = swap(&fleet, &demo_7m());
        assert_eq!((code, printed.lines().count()), (Some(0), 1), "{printed}{error}");
        assert_eq!(new_answers(tally)[1], 0);
        settled(&fleet, 2, 1);
    });
    assert_eq!(answers(&fleet), goldens()[0]);
    fleet.stop();
}

/// Files that a swap must refuse, each with words of the sentence that says why.
fn refused_files(folder: &Path) -> Vec<(PathBuf, &'static str)> {
    let [truncated, tokenizer, copy] = ["truncated", "tokenizer", "copy"].map(|name| folder.join(name));
    let bytes = std::fs::read(demo_22m()).unwrap();
    std::fs::write(&truncated, &bytes[..bytes.len() / 2]).unwrap();
    rewrite(&tokenizer, &["tokenizer.ggml.pre"], |metadata| {
        metadata.put("tokenizer.ggml.pre", "gpt-9").unwrap();
    });
    std::fs::copy(demo_22m(), &copy).unwrap();
    vec![
        (truncated, "truncated"),
        (tokenizer, "tokenizer.ggml.pre"),
        (demo_22m(), "already serves"),
        (folder.join("missing"), "cannot open"),
        (copy, "goes on"),
    ]
}

#[test]
fn a_swap_that_fails_leaves_the_old_file_serving() {
    if !runs_on_host("a_swap_that_fails_leaves_the_old_file_serving") {
        return;
    }
    goldens();
    let folder = tempfile::tempdir().unwrap();
    let small = model("small", &demo_7m(), 0, "");
    let models = format!("{}{small}", model("m", &demo_22m(), 1, "draft = \"small\"\n"));
    let plan = folder.path().join("plan.toml");
    std::fs::write(&plan, &models).unwrap();
    let output = ballast().args(["plan", "--json", "--config"]).arg(&plan).output().unwrap();
    let report: serde_json::Value = serde_json::from_str(&text(&output).0).unwrap();
    // There is room for the weights of another file, but not for another worker.
    let budget = report["devices"][0]["needed"].as_u64().unwrap() + (40 << 20);
    let fleet = ServedFleet::start_config(&format!("host-budget = \"{budget}\"\n{models}"));
    let before = workers(&fleet);
    under_load(&fleet, |tally| {
        for (file, words) in refused_files(folder.path()) {
            let (code, printed, error) = swap(&fleet, &file);
            assert!(code != Some(0) && printed.is_empty() && error.contains(words), "{words}: {error}");
        }
        let output = fleet.run_command(&["swap", "small", demo_22m().to_str().unwrap()]);
        assert!(text(&output).1.contains("drafts for \"m\""), "{}", text(&output).1);
        assert_eq!(new_answers(tally)[0], 0);
    });
    assert_eq!(workers(&fleet), before);
    settled(&fleet, 1, 2);
    fleet.stop();
}

#[test]
fn a_swap_whose_workers_die_is_undone() {
    goldens();
    let fleet = ServedFleet::start_config(&model("m", &demo_7m(), 2, ""));
    let before = workers(&fleet);
    under_load(&fleet, |tally| {
        // A stopped router uses no new worker before it is killed. Requests wait meanwhile.
        let router = fleet.only_process("router").pid;
        proc::send_signal(router, "STOP");
        let mut swap = spawn_swap(&fleet, &demo_22m());
        let status = eventually("the swap ends", || {
            for (_, pid) in workers(&fleet).iter().filter(|worker| !before.contains(worker) && worker.1 != 0)
            {
                proc::send_signal(*pid, "KILL");
            }
            swap.try_wait().unwrap()
        });
        proc::send_signal(router, "CONT");
        let output = swap.wait_with_output().unwrap();
        assert!(!status.success(), "{}", text(&output).0);
        assert!(text(&output).1.contains("goes on"), "{}", text(&output).1);
        assert_eq!(new_answers(tally)[1], 0);
    });
    assert_eq!(workers(&fleet), before);
    settled(&fleet, 2, 1);
    fleet.stop();
}

#[test]
fn processes_may_die_in_a_swap_and_one_file_is_left() {
    goldens();
    let directory = tempfile::Builder::new().prefix("ballast-test-").tempdir().unwrap();
    let (runtime_dir, config) = (directory.path().join("run"), model("m", &demo_7m(), 2, ""));
    let mut fleet = ServedFleet::start_command(directory, serve_config(&runtime_dir, &config));
    under_load(&fleet, |_| {
        let mut file = demo_22m();
        for wait in [0, 100, 300] {
            let mut swap = spawn_swap(&fleet, &file);
            std::thread::sleep(Duration::from_millis(wait));
            proc::send_signal(fleet.only_process("weight-server").pid, "KILL");
            let status = eventually("the swap ends", || swap.try_wait().unwrap());
            settled(&fleet, 2, 1);
            if status.success() {
                file = if file == demo_22m() { demo_7m() } else { demo_22m() };
            }
        }
    });
    // In the middle of a swap: the new workers run, and the model still means the old file.
    for wait in [0, 1000] {
        let known = workers(&fleet);
        let now = answers(&fleet);
        let file = if now == goldens()[0] { demo_22m() } else { demo_7m() };
        let mut swap = spawn_swap(&fleet, &file);
        eventually("a new worker runs", || {
            workers(&fleet).iter().any(|worker| worker.1 != 0 && !known.contains(worker)).then_some(())
        });
        std::thread::sleep(Duration::from_millis(wait));
        proc::send_signal(fleet.supervisor.id(), "KILL");
        fleet.supervisor.wait().unwrap();
        let mut successor = serve_config(&runtime_dir, &config).spawn().unwrap();
        first_json_line(&mut successor);
        fleet.supervisor = successor;
        swap.wait().unwrap();
        settled(&fleet, 2, 1);
        assert!(goldens().contains(&answers(&fleet)));
    }
    fleet.stop();
}

/// How many files the router lists under the model's name.
fn listed_files(fleet: &ServedFleet) -> usize {
    let models = HttpClient::connect(fleet).get("/v1/models").1;
    serde_json::from_str::<serde_json::Value>(&models).unwrap()["data"].as_array().unwrap().len()
}

#[test]
fn a_successor_that_undoes_a_swap_does_not_wait_for_workers_of_the_new_file() {
    let directory = tempfile::Builder::new().prefix("ballast-test-").tempdir().unwrap();
    let (runtime_dir, config) = (directory.path().join("run"), model("m", &demo_7m(), 2, ""));
    let folder = tempfile::tempdir().unwrap();
    let log = folder.path().join("log");
    let mut fleet = ServedFleet::start_command(directory, serve_config(&runtime_dir, &config));
    let before = workers(&fleet);
    // The swap waits until the router uses the new workers, which a stopped router does not.
    let router = fleet.only_process("router").pid;
    proc::send_signal(router, "STOP");
    let mut swap = spawn_swap(&fleet, &demo_22m());
    eventually("the new workers are ready", || {
        let ready = |process: &FleetProcess| process.role == "worker" && process.state == "ready";
        (fleet.try_processes()?.into_iter().filter(ready).count() == 4).then_some(())
    });
    let new: Vec<_> = workers(&fleet).into_iter().filter(|worker| !before.contains(worker)).collect();
    proc::send_signal(fleet.supervisor.id(), "KILL");
    fleet.supervisor.wait().unwrap();
    // The router comes to know one of the two new workers.
    proc::send_signal(new[1].1, "STOP");
    proc::send_signal(router, "CONT");
    eventually("the router lists the model with both files", || (listed_files(&fleet) == 2).then_some(()));

    let mut successor = serve_config(&runtime_dir, &config);
    successor.stderr(std::fs::File::create(&log).unwrap());
    let mut successor = successor.spawn().unwrap();
    first_json_line(&mut successor);
    fleet.supervisor = successor;
    proc::send_signal(new[1].1, "CONT");
    swap.wait().unwrap();
    assert_eq!(settled(&fleet, 2, 1), [demo_7m().to_str().unwrap()]);
    assert_eq!(workers(&fleet), before);
    eventually("the router has forgotten the new file", || (listed_files(&fleet) == 1).then_some(()));
    fleet.stop();
    // Log lines are written by a thread of their own.
    let log = std::fs::read_to_string(&log).unwrap();
    assert!(!log.contains("the adopted fleet is not complete"), "{log}");
}

/// Ends the supervisor, with `others` in the same call, and starts a successor with the same
/// configuration.
fn follow(fleet: &mut ServedFleet, others: &[u32], runtime_dir: &Path, config: &str) {
    let pids = others.iter().copied().chain([fleet.supervisor.id()]).map(|pid| pid.to_string());
    assert!(Command::new("kill").arg("-KILL").args(pids).status().unwrap().success());
    fleet.supervisor.wait().unwrap();
    let mut successor = serve_config(runtime_dir, config).spawn().unwrap();
    first_json_line(&mut successor);
    fleet.supervisor = successor;
}

#[test]
fn i1_after_a_swap_a_successor_serves_the_new_file_without_loading_it_again() {
    goldens();
    let folder = tempfile::tempdir().unwrap();
    let [old, new] = ["old", "new"].map(|name| folder.path().join(name));
    std::fs::copy(demo_7m(), &old).unwrap();
    std::fs::copy(demo_22m(), &new).unwrap();
    let directory = tempfile::Builder::new().prefix("ballast-test-").tempdir().unwrap();
    let (runtime_dir, config) = (directory.path().join("run"), model("m", &old, 2, ""));
    let mut fleet = ServedFleet::start_command(directory, serve_config(&runtime_dir, &config));
    let (code, _, error) = swap(&fleet, &new);
    assert_eq!(code, Some(0), "{error}");
    assert_eq!(settled(&fleet, 2, 1), [new.to_str().unwrap()]);
    let generation = |fleet: &ServedFleet| {
        let status = eventually("status", || runtime().block_on(try_weight_server_status(fleet)));
        status.generations[0].generation
    };
    let (loaded, serving) = (generation(&fleet), workers(&fleet));
    // No process can read a file that is gone. Who dies: the supervisor, both, both with a worker.
    std::fs::remove_file(&new).unwrap();
    for round in 0..3 {
        let mut killed = Vec::new();
        if round > 0 {
            killed.push(fleet.only_process("weight-server").pid);
        }
        if round > 1 {
            killed.push(serving[0].1);
        }
        follow(&mut fleet, &killed, &runtime_dir, &config);
        assert_eq!(settled(&fleet, 2, 1), [new.to_str().unwrap()], "round {round}");
        assert_eq!(generation(&fleet), loaded, "round {round}: the weights were loaded again");
        let kept = workers(&fleet).iter().filter(|worker| serving.contains(worker)).count();
        assert_eq!(kept, if round > 1 { 1 } else { 2 }, "round {round}: workers were restarted");
        assert_eq!(answers(&fleet), goldens()[1], "round {round}");
        eventually("the router has forgotten the old file", || (listed_files(&fleet) == 1).then_some(()));
    }
    fleet.stop();
}
