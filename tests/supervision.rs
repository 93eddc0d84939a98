// SPDX-License-Identifier: Apache-2.0

//! The supervisor under pauses, crash loops and lost files, with watchdog times short enough for a
//! test.

use std::os::unix::net::UnixDatagram;
use std::path::Path;
use std::sync::mpsc;
use std::time::{Duration, Instant};

use serde_json::Value;

use crate::harness::api::{Continuation, TestRequest, generate_all, runtime};
use crate::harness::http::HttpClient;
use crate::harness::{
    FleetProcess, ServedFleet, ballast, demo_7m, device, eventually, executable, first_json_line, proc,
    runs_on_host, serve, serve_config, synth, text,
};

/// A running child that is silent for this long is replaced.
const WATCHDOG: Duration = Duration::from_secs(2);

/// `ballast.toml` for the demo model.
fn config(workers: u32, more: &str) -> String {
    format!(
        "{more}\n[supervision]\nwatchdog = \"{}s\"\n[[models]]\nname = \"m\"\npath = {:?}\ndevice = {:?}\n\
         workers = {workers}\nthreads = 1\nkv-tokens = 2048\n",
        WATCHDOG.as_secs(),
        demo_7m(),
        device(),
    )
}

fn children(fleet: &ServedFleet) -> Vec<FleetProcess> {
    fleet.processes().into_iter().filter(|process| process.role != "supervisor").collect()
}

fn identities(children: &[FleetProcess]) -> Vec<(String, u32, u64)> {
    children.iter().map(|child| (child.name.clone(), child.pid, child.restarts)).collect()
}

fn serves(fleet: &ServedFleet) {
    let request = TestRequest { prompt: vec![10, 23, 36], max_tokens: 8, ..TestRequest::default() };
    let done = runtime().block_on(generate_all(&fleet.grpc, &[request]));
    assert_eq!(done[0].as_ref().unwrap().tokens.len(), 8);
}

#[test]
fn a_supervisor_that_was_stopped_keeps_its_healthy_children() {
    let fleet = ServedFleet::start_config(&config(2, ""));
    let before = children(&fleet);
    proc::send_signal(fleet.supervisor.id(), "STOP");
    std::thread::sleep(3 * WATCHDOG);
    serves(&fleet);
    proc::send_signal(fleet.supervisor.id(), "CONT");
    // Longer than the watchdog's time: the children are watched again.
    std::thread::sleep(WATCHDOG + Duration::from_secs(1));
    assert_eq!(identities(&children(&fleet)), identities(&before));

    // A child that hangs is replaced as ever.
    let worker = before.iter().find(|child| child.role == "worker").unwrap();
    proc::send_signal(worker.pid, "STOP");
    eventually("the hung worker is replaced", || {
        let now = children(&fleet).into_iter().find(|child| child.name == worker.name)?;
        (now.pid != worker.pid && now.state == "ready").then_some(())
    });
    fleet.stop();
}

#[test]
fn a_fleet_that_was_frozen_goes_on_with_the_same_processes_and_streams() {
    let fleet = ServedFleet::start_config(&config(1, ""));
    let before = children(&fleet);
    let pids: Vec<u32> = std::iter::once(fleet.supervisor.id()).chain(before.iter().map(|c| c.pid)).collect();
    let found = runtime().block_on(fleet.generate_during_fault(&long_requests(2), || {
        pids.iter().for_each(|&pid| proc::send_signal(pid, "STOP"));
        std::thread::sleep(3 * WATCHDOG);
        // The supervisor goes on first: it has no message of the meantime to read.
        for &pid in &pids {
            proc::send_signal(pid, "CONT");
            std::thread::sleep(Duration::from_millis(200));
        }
    }));
    assert_undisturbed(&found);
    std::thread::sleep(WATCHDOG + Duration::from_secs(1));
    assert_eq!(identities(&children(&fleet)), identities(&before));
    serves(&fleet);
    fleet.stop();
}

#[test]
fn children_that_were_stopped_still_wait_for_a_successor() {
    let mut fleet = ServedFleet::start_config(&config(1, ""));
    let before = children(&fleet);
    proc::send_signal(fleet.supervisor.id(), "KILL");
    let _ = fleet.supervisor.wait();
    before.iter().for_each(|child| proc::send_signal(child.pid, "STOP"));
    // Longer than children wait for a successor.
    std::thread::sleep(Duration::from_secs(11));
    before.iter().for_each(|child| proc::send_signal(child.pid, "CONT"));
    std::thread::sleep(Duration::from_secs(1));
    let mut successor = serve_config(fleet.runtime_dir(), &config(1, "")).spawn().unwrap();
    first_json_line(&mut successor);
    fleet.supervisor = successor;
    assert_eq!(identities(&children(&fleet)), identities(&before));
    fleet.stop();
}

/// The line of one process in `ballast ps --json`.
fn ps_line(fleet: &ServedFleet, name: &str) -> Option<Value> {
    fleet.try_ps_lines()?.into_iter().find(|line| line["name"] == name)
}

/// Kills a worker whenever it runs, until the supervisor calls it failed.
fn crash_until_failed(fleet: &ServedFleet, name: &str) -> Value {
    eventually("the worker is failed", || {
        let line = ps_line(fleet, name)?;
        if line["state"] == "failed" {
            return Some(line);
        }
        if let Some(pid @ 1..) = line["pid"].as_u64() {
            proc::send_signal(u32::try_from(pid).unwrap(), "KILL");
        }
        None
    })
}

/// The STATUS= lines that a service manager gets on this socket.
fn status_lines(path: &Path) -> mpsc::Receiver<String> {
    let socket = UnixDatagram::bind(path).unwrap();
    let (sender, lines) = mpsc::channel();
    std::thread::spawn(move || {
        let mut buffer = [0; 4096];
        while let Ok(bytes) = socket.recv(&mut buffer) {
            let message = String::from_utf8_lossy(&buffer[..bytes]).into_owned();
            if let Some(status) = message.strip_prefix("STATUS=") {
                let _ = sender.send(status.to_owned());
            }
        }
    });
    lines
}

#[test]
fn a_worker_that_crashes_again_and_again_is_reported_and_started_for_ever() {
    let directory = tempfile::Builder::new().prefix("ballast-test-").tempdir().unwrap();
    let notify = directory.path().join("systemd.sock");
    let lines = status_lines(&notify);
    let mut command = serve_config(&directory.path().join("run"), &config(2, ""));
    command.env("NOTIFY_SOCKET", &notify);
    let fleet = ServedFleet::start_command(directory, command);

    let failed = crash_until_failed(&fleet, "worker-0");
    assert!(failed["consecutive_crashes"].as_u64() > Some(6), "{failed}");
    assert!(failed["next_start_ms"].is_u64(), "{failed}");
    let http = HttpClient::connect(&fleet);
    eventually("/ready and metrics say so", || {
        let (status, body) = http.get("/ready");
        assert_eq!(status, 200, "the other worker serves");
        let ready: Value = serde_json::from_str(&body).unwrap();
        let metric = http.metric("ballast:process_failed{process=\"worker-0\"}");
        (ready["failed"] == serde_json::json!(["worker-0"]) && metric == Some(1.0)).then_some(())
    });
    let status = lines.try_iter().find(|line| line.contains("worker-0 failed (killed by SIGKILL)"));
    // Without the supervisor itself.
    let all = fleet.processes().len() - 1;
    let expected = format!("{} of {all} processes run", all - 1);
    assert!(status.as_ref().is_some_and(|line| line.starts_with(&expected)), "{status:?}, {expected}");
    serves(&fleet);

    eventually("the worker is started again without a command", || {
        (ps_line(&fleet, "worker-0")?["state"] == "ready").then_some(())
    });
    fleet.stop();
}

#[test]
fn more_workers_than_a_fleet_may_have_are_refused_at_once() {
    let directory = tempfile::tempdir().unwrap();
    let output = serve_config(&directory.path().join("run"), &config(257, "")).output().unwrap();
    assert_eq!(output.status.code(), Some(2));
    let said = text(&output).1;
    assert!(said.contains("the models have 257 workers, a fleet may have 256"), "{said}");
    let output = serve(directory.path(), &demo_7m(), &["--workers", "257"]).output().unwrap();
    assert_eq!(output.status.code(), Some(2));
    assert!(text(&output).1.contains("1..=256"), "{}", text(&output).1);
    let fleet = "exec \"$0\" serve \"$1\" --device host --workers 66 --listen 127.0.0.1:0";
    let mut limited = std::process::Command::new("sh");
    limited.arg("-c").arg(format!("ulimit -n 512 && {fleet}")).arg(executable()).arg(demo_7m());
    let output = limited.output().unwrap();
    assert_eq!(output.status.code(), Some(4));
    assert!(text(&output).1.contains("this fleet needs 850"), "{}", text(&output).1);
    let fleet = ServedFleet::start(&demo_7m(), &["--workers", "1", "--threads", "1"]);
    let more = ["load", demo_7m().to_str().unwrap(), "--name", "more", "--workers", "256"].map(str::to_owned);
    let mut arguments: Vec<&str> = more.iter().map(String::as_str).collect();
    let device = device();
    arguments.extend(["--device", &device, "--threads", "1", "--kv-tokens", "256"]);
    let output = fleet.run_command(&arguments);
    let said = text(&output).1;
    assert!(said.contains("1 workers run, and 256 more would exceed the 256"), "{said}");
    assert_eq!(fleet.processes_by_role("worker").len(), 1, "no worker of the refused load was started");
    fleet.stop();
}

#[test]
fn a_fleet_of_more_than_64_workers_uses_all_of_them() {
    // A GPU's turns are for 62 workers.
    if !runs_on_host("a_fleet_of_more_than_64_workers_uses_all_of_them") {
        return;
    }
    let arguments = ["--workers", "66", "--threads", "1", "--kv-tokens", "256", "--ctx-size", "256"];
    let fleet = ServedFleet::start(&demo_7m(), &arguments);
    let ready: Value = serde_json::from_str(&HttpClient::connect(&fleet).get("/ready").1).unwrap();
    assert_eq!(ready["workers"], 66);
    fleet.stop();
}

#[test]
fn a_hangup_ends_no_process() {
    let fleet = ServedFleet::start_config(&config(1, ""));
    let before = children(&fleet);
    let pids = std::iter::once(fleet.supervisor.id()).chain(before.iter().map(|child| child.pid));
    pids.for_each(|pid| proc::send_signal(pid, "HUP"));
    std::thread::sleep(Duration::from_millis(500));
    assert_eq!(identities(&children(&fleet)), identities(&before));
    serves(&fleet);
    fleet.stop();
}

/// The sockets of a fleet with one worker.
const SOCKETS: [&str; 8] = [
    "supervisor.sock",
    "weights.sock",
    "weights-admin.sock",
    "worker-0.sock",
    "router.sock",
    "notify-worker-0.sock",
    "notify-weight-server.sock",
    "notify-router.sock",
];

fn is_complete(directory: &Path) -> bool {
    SOCKETS.iter().all(|name| directory.join(name).exists())
}

/// Kills a worker and the weight-server. Both need their sockets to come back.
fn survives_crashes(fleet: &ServedFleet) {
    for name in ["worker-0", "weight-server"] {
        let before = children(fleet).into_iter().find(|child| child.name == name).unwrap();
        proc::send_signal(before.pid, "KILL");
        eventually("the process is back", || {
            let now = children(fleet).into_iter().find(|child| child.name == name)?;
            (now.pid != before.pid && now.state == "ready").then_some(())
        });
    }
    let http = HttpClient::connect(fleet);
    eventually("the worker serves", || (http.get("/ready").0 == 200).then_some(()));
    serves(fleet);
}

#[test]
fn deleted_sockets_and_a_deleted_runtime_directory_come_back() {
    // The supervisor looks for its sockets once a second, and messages of that time are lost: a
    // watchdog of 2 s would expire.
    let watchdog = format!("watchdog = \"{}s\"", WATCHDOG.as_secs());
    let fleet = ServedFleet::start_config(&config(1, "").replace(&watchdog, "watchdog = \"10s\""));
    let directory = fleet.runtime_dir().to_owned();
    let before = children(&fleet);
    for name in SOCKETS {
        std::fs::remove_file(directory.join(name)).unwrap();
    }
    eventually("all sockets are back", || is_complete(&directory).then_some(()));
    assert_eq!(identities(&children(&fleet)), identities(&before));
    survives_crashes(&fleet);

    let before = children(&fleet);
    // Fails if a process of the fleet puts a file into it meanwhile.
    eventually("the directory is removed", || std::fs::remove_dir_all(&directory).ok());
    eventually("the directory is back", || is_complete(&directory).then_some(()));
    assert_eq!(identities(&children(&fleet)), identities(&before));
    survives_crashes(&fleet);
    fleet.stop();
    assert!(!directory.exists());
}

#[test]
fn a_weight_server_that_starts_while_the_supervisor_dies_is_adopted_or_ends() {
    let config = config(1, "");
    let mut fleet = ServedFleet::start_config(&config);
    for wait in 0..8 {
        proc::send_signal(fleet.only_process("weight-server").pid, "KILL");
        // The supervisor starts another one at some moment of this time.
        std::thread::sleep(Duration::from_micros(700 * wait));
        let mut kill = fleet.supervisor.kill();
        kill = kill.and_then(|()| fleet.supervisor.wait().map(drop));
        kill.unwrap();
        let mut successor = serve_config(fleet.runtime_dir(), &config).spawn().unwrap();
        first_json_line(&mut successor);
        fleet.supervisor = successor;
        let server = eventually("a weight-server is ready", || {
            fleet.try_processes()?.into_iter().find(|p| p.role == "weight-server" && p.state == "ready")
        });
        assert!(server.restarts <= 1, "{server:?}: another one held its socket");
    }
    fleet.stop();
}

/// The supervisor of this child is process 1, which is not its parent: it is an orphan.
#[test]
fn a_child_that_starts_after_its_supervisor_leaves_the_record_of_a_successors_child() {
    let directory = tempfile::tempdir().unwrap();
    let record = directory.path().join("worker-0.pid");
    std::fs::write(&record, "7 7\n").unwrap();
    let mut command = ballast();
    command.args(["exec-shim", "--supervisor", "1", "--oom-score-adj", "0", "worker"]);
    command.env("BALLAST_LIVENESS_FD", "0");
    command.env("NOTIFY_SOCKET", directory.path().join("notify-worker-0.sock"));
    let output = command.output().unwrap();
    assert!(text(&output).1.contains("the supervisor ended before its child"), "{}", text(&output).1);
    assert_eq!(std::fs::read_to_string(&record).unwrap(), "7 7\n");
}

#[test]
fn a_start_that_fails_leaves_no_directory() {
    let directory = tempfile::tempdir().unwrap();
    let run = directory.path().join("run");
    let missing = directory.path().join("missing.gguf");
    let output = serve(&run, &missing, &[]).output().unwrap();
    assert_eq!(output.status.code(), Some(3), "{}", text(&output).1);
    assert!(!run.exists());
    let taken = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
    let address = taken.local_addr().unwrap().to_string();
    let config = config(1, "");
    let mut command = serve_config(&run, &config);
    let output = command.args(["--listen", &address]).output().unwrap();
    assert!(!output.status.success());
    assert!(!run.exists(), "{}", text(&output).1);
}

fn long_requests(count: u64) -> Vec<TestRequest> {
    let request = |seed: u64| TestRequest {
        prompt: (0..20).map(|i| 10 + i * 13 + seed as u32).collect(),
        max_tokens: 300,
        temperature: 0.7,
        seed,
        ..TestRequest::default()
    };
    (0..count).map(request).collect()
}

/// Checks that every stream is complete and that none was moved to another worker.
fn assert_undisturbed(found: &[Result<Continuation, tonic::Status>]) {
    for done in found {
        let done = done.as_ref().unwrap();
        assert_eq!((done.tokens.len(), done.resumes), (300, 0));
    }
}

#[test]
fn a_drained_worker_finishes_its_streams_and_stays_down_until_its_restart() {
    let fleet = ServedFleet::start_config(&config(2, ""));
    let found = runtime().block_on(fleet.generate_during_fault(&long_requests(4), || {
        let output = fleet.run_command(&["drain", "worker-0"]);
        assert!(output.status.success(), "{}", text(&output).1);
    }));
    assert_undisturbed(&found);
    let drained = ps_line(&fleet, "worker-0").unwrap();
    assert_eq!((&drained["state"], &drained["pid"]), (&Value::from("stopped"), &Value::from(0)));
    let table = text(&fleet.run_command(&["ps"])).0;
    let line = table.lines().find(|line| line.starts_with("worker-0")).unwrap();
    assert!(line.split_whitespace().take(3).eq(["worker-0", "-", "stopped"]), "{line}");
    serves(&fleet);
    let refused = fleet.run_command(&["drain", "router"]);
    assert!(text(&refused).1.contains("\"router\" is not a worker"), "{}", text(&refused).1);

    let output = fleet.run_command(&["restart", "worker-0"]);
    assert!(output.status.success(), "{}", text(&output).1);
    let http = HttpClient::connect(&fleet);
    eventually("both workers serve", || {
        let ready: Value = serde_json::from_str(&http.get("/ready").1).ok()?;
        (ready["workers"] == 2).then_some(())
    });
    fleet.stop();
}

#[test]
fn a_rolling_restart_replaces_every_worker_and_disturbs_no_stream() {
    let fleet = ServedFleet::start_config(&config(2, ""));
    let before = fleet.processes_by_role("worker");
    let done = std::sync::atomic::AtomicBool::new(false);
    std::thread::scope(|scope| {
        let load = scope.spawn(|| {
            let mut rounds = 0;
            while !done.load(std::sync::atomic::Ordering::Relaxed) || rounds == 0 {
                assert_undisturbed(&runtime().block_on(generate_all(&fleet.grpc, &long_requests(4))));
                rounds += 1;
            }
        });
        let output = fleet.run_command(&["restart", "--rolling"]);
        done.store(true, std::sync::atomic::Ordering::Relaxed);
        assert!(output.status.success(), "{}", text(&output).1);
        assert_eq!(text(&output).0, "worker-0 restarted\nworker-1 restarted\n");
        load.join().unwrap();
    });
    for (before, after) in before.iter().zip(fleet.processes_by_role("worker")) {
        assert_ne!(before.pid, after.pid);
        assert_eq!((after.state.as_str(), after.restarts), ("ready", 0));
    }
    fleet.stop();
}

#[test]
fn a_worker_whose_step_does_not_end_is_replaced_and_says_why() {
    if !runs_on_host("a_worker_whose_step_does_not_end_is_replaced_and_says_why") {
        return;
    }
    // A step of 2,048 rows of this model takes many seconds on one thread.
    let model = synth("qwen3-0.6b", "q8_0");
    let config = format!(
        "[[models]]\nname = \"m\"\npath = {model:?}\ndevice = \"host\"\nworkers = 1\nthreads = 1\n\
         kv-tokens = 4096\nstep-tokens = 2048\nstep-timeout = \"1s\"\n"
    );
    let fleet = ServedFleet::start_config(&config);
    let long = TestRequest {
        prompt: (0..2048).map(|i| 10 + i % 1000).collect(),
        max_tokens: 4,
        ..TestRequest::default()
    };
    let began = Instant::now();
    let found = runtime().block_on(generate_all(&fleet.grpc, &[long]));
    assert!(found[0].is_err(), "{found:?} after {:?}", began.elapsed());
    let line = eventually("the worker is replaced", || {
        ps_line(&fleet, "worker-0")
            .filter(|line| line["restarts"].as_u64() > Some(0) && line["state"] == "ready")
    });
    let why = line["last_termination"].as_str().unwrap();
    assert!(why.contains("a step on host has not ended within 1s"), "{why}");
    fleet.stop();
}
