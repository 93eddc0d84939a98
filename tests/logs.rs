// SPDX-License-Identifier: Apache-2.0

//! Standard error and standard output that are not read, that are closed, or that are on a full
//! disk. Logs are lost then, and nothing else.

use crate::harness::http::HttpClient;
use crate::harness::{ServedFleet, TIMEOUT, ballast, demo_7m, eventually, in_tree, proc, serve, text};
use serde_json::{Value, json};
use std::fs::File;
use std::io::{PipeReader, Read};
use std::os::unix::net::UnixDatagram;
use std::os::unix::process::ExitStatusExt;
use std::path::Path;
use std::process::{Command, Output, Stdio};
use std::time::{Duration, Instant};

/// The smallest pipe that Linux offers: one page.
const PIPE_BYTES: usize = 4096;

const SIGPIPE: i32 = 13;

const LOST_BY_ROUTER: &str = "ballast:log_lines_lost_total{process=\"router\"}";

const ONE_WORKER: [&str; 4] = ["--workers", "1", "--threads", "1"];

/// Starts a fleet of one worker that logs to `log` at this level.
fn fleet_that_logs(level: &str, log: impl Into<Stdio>) -> ServedFleet {
    let directory = tempfile::Builder::new().prefix("ballast-test-").tempdir().unwrap();
    let mut command = serve(directory.path(), &demo_7m(), &ONE_WORKER);
    command.env("BALLAST_LOG", level).stderr(log);
    ServedFleet::start_command(directory, command)
}

fn small_pipe() -> (PipeReader, std::io::PipeWriter) {
    let (reader, writer) = std::io::pipe().unwrap();
    rustix::pipe::fcntl_setpipe_size(&reader, PIPE_BYTES).unwrap();
    (reader, writer)
}

/// Kills the worker and waits until its successor serves.
fn lose_a_worker(fleet: &ServedFleet) {
    let victim = fleet.only_process("worker");
    proc::send_signal(victim.pid, "KILL");
    // A worker is ready before it has attached its model.
    eventually("another worker serves", || {
        let lines = fleet.try_ps_lines()?;
        let worker = lines.iter().find(|line| line["role"] == "worker")?;
        let serves = worker["status"].as_str()?.starts_with("serving");
        (serves && worker["pid"] != victim.pid).then_some(())
    });
}

/// Ends `ballast serve` with SIGTERM and returns how it ended.
fn terminate(fleet: &mut ServedFleet) -> std::process::ExitStatus {
    proc::send_signal(fleet.supervisor.id(), "TERM");
    eventually("the supervisor ends", || fleet.supervisor.try_wait().unwrap())
}

/// Reads what a pipe holds until all of its writers are gone.
fn read_to_end(mut reader: PipeReader) -> String {
    let mut bytes = Vec::new();
    reader.read_to_end(&mut bytes).unwrap();
    String::from_utf8_lossy(&bytes).into_owned()
}

/// Runs a command that a broken standard error must not hold up for long.
fn run_in_time(mut command: Command) -> Output {
    let mut child = command.spawn().unwrap();
    eventually("the command ends", || child.try_wait().unwrap());
    child.wait_with_output().unwrap()
}

#[test]
fn a_fleet_whose_log_readers_are_gone_restarts_its_workers() {
    let (reader, writer) = std::io::pipe().unwrap();
    let mut fleet = fleet_that_logs("debug", writer);
    drop(reader);
    lose_a_worker(&fleet);
    lose_a_worker(&fleet);
    assert!(terminate(&mut fleet).success());
}

#[test]
fn with_json_each_line_is_an_object_and_names_the_request() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("log");
    let directory = tempfile::Builder::new().prefix("ballast-test-").tempdir().unwrap();
    let mut command = serve(directory.path(), &demo_7m(), &ONE_WORKER);
    command.envs([("BALLAST_LOG", "info,worker=debug"), ("BALLAST_LOG_FORMAT", "json")]);
    command.stderr(File::create(&path).unwrap());
    let mut fleet = ServedFleet::start_command(directory, command);
    let http = HttpClient::connect(&fleet);
    let body = json!({"prompt": "def f(", "max_tokens": 4000, "ignore_eos": true, "seed": 1});
    let answer = std::thread::scope(|scope| {
        let answer = scope.spawn(|| http.post_json("/v1/completions", &body));
        eventually("the request runs", || (http.metric("ballast:num_requests_running")? > 0.0).then_some(()));
        lose_a_worker(&fleet);
        answer.join().unwrap()
    });
    assert!(terminate(&mut fleet).success());
    let log = std::fs::read_to_string(&path).unwrap();
    let lines: Vec<Value> = log.lines().map(|line| serde_json::from_str(line).expect(line)).collect();
    let id = answer["id"].as_str().unwrap().strip_prefix("cmpl-").unwrap();
    let of_request = |process: &str| {
        let is_of = |line: &&Value| line["request_id"] == id && line["process"] == process;
        lines.iter().filter(is_of).count()
    };
    assert!(of_request("router") >= 2 && of_request("worker-0") >= 1, "{id}: {log}");
}

#[test]
fn an_unknown_format_is_named_and_lines_are_text() {
    let directory = tempfile::tempdir().unwrap();
    let mut command = serve(directory.path(), &in_tree("README.md"), &ONE_WORKER);
    command.envs([("BALLAST_LOG", "warn"), ("BALLAST_LOG_FORMAT", "xml")]).stderr(Stdio::piped());
    let (_, log) = text(&command.output().unwrap());
    let warning =
        " WARN supervisor BALLAST_LOG_FORMAT is neither \"text\" nor \"json\": lines are text format=xml";
    assert!(log.lines().next().is_some_and(|line| line.ends_with(warning)), "{log}");
}

#[test]
fn a_fleet_whose_announcement_cannot_be_written_serves() {
    let directory = tempfile::tempdir().unwrap();
    let (reader, writer) = std::io::pipe().unwrap();
    drop(reader);
    let mut command = serve(directory.path(), &demo_7m(), &ONE_WORKER);
    let both = writer.try_clone().unwrap();
    let supervisor = command.stdout(writer).stderr(both).spawn().unwrap();
    let mut fleet = ServedFleet::without_announcement(directory, supervisor);
    eventually("the fleet serves", || {
        fleet.try_processes()?.into_iter().find(|p| p.role == "worker" && p.state == "ready")
    });
    lose_a_worker(&fleet);
    assert!(terminate(&mut fleet).success());
}

#[test]
fn a_fleet_whose_log_is_not_read_is_supervised_answers_and_stops() {
    let (reader, writer) = small_pipe();
    let mut fleet = fleet_that_logs("trace", writer);
    lose_a_worker(&fleet);
    lose_a_worker(&fleet);
    assert!(fleet.run_command(&["ps"]).status.success());
    assert_eq!(HttpClient::connect(&fleet).get("/health").0, 200);
    assert!(terminate(&mut fleet).success());
    // What the pipe holds is lines of whichever process wrote first.
    let log = read_to_end(reader);
    assert!((1..=PIPE_BYTES).contains(&log.len()), "{} bytes", log.len());
    let roles = [" supervisor ", " weight-server ", " router ", " worker "];
    let first = log.lines().next().unwrap();
    assert!(roles.iter().any(|role| first.contains(role)), "{log}");
}

#[test]
fn an_output_that_is_not_read_does_not_keep_the_fleet_from_stopping() {
    let directory = tempfile::tempdir().unwrap();
    let (mut reader, mut writer) = small_pipe();
    std::io::Write::write_all(&mut writer, &[b'.'; PIPE_BYTES]).unwrap();
    let mut command = serve(directory.path(), &demo_7m(), &ONE_WORKER);
    let both = writer.try_clone().unwrap();
    let supervisor = command.stdout(writer).stderr(both).spawn().unwrap();
    let mut fleet = ServedFleet::without_announcement(directory, supervisor);
    eventually("the fleet serves", || {
        fleet.try_processes()?.into_iter().find(|p| p.role == "worker" && p.state == "ready")
    });
    lose_a_worker(&fleet);
    assert!(terminate(&mut fleet).success());
    drop(command);
    let mut held = Vec::new();
    reader.read_to_end(&mut held).unwrap();
    assert_eq!(held.len(), PIPE_BYTES, "nothing fits into a full pipe");
}

#[test]
fn lines_that_a_stalled_reader_cost_are_counted_when_it_reads_again() {
    let (reader, writer) = small_pipe();
    let mut fleet = fleet_that_logs("trace", writer);
    let client = HttpClient::connect(&fleet);
    let lost = eventually("the router's queue is full", || {
        (0..50).for_each(|_| assert_eq!(client.get("/health").0, 200));
        client.metric(LOST_BY_ROUTER).filter(|lost| *lost > 0.0)
    });
    let log = std::thread::spawn(move || read_to_end(reader));
    assert!(terminate(&mut fleet).success());
    drop(fleet);
    let log = log.join().unwrap();
    let report = log.lines().find(|line| line.contains(" router ") && line.contains("lines_lost="));
    let report = report.unwrap_or_else(|| panic!("no report in {} bytes of log", log.len()));
    let reported: f64 = report.rsplit('=').next().unwrap().parse().unwrap();
    assert!(reported >= lost, "{report}, and the metric was {lost}");
}

#[test]
fn a_full_disk_under_the_log_costs_only_the_log() {
    let full = File::options().write(true).open("/dev/full").unwrap();
    let mut fleet = fleet_that_logs("trace", full);
    lose_a_worker(&fleet);
    lose_a_worker(&fleet);
    assert_eq!(HttpClient::connect(&fleet).get("/health").0, 200);
    assert!(terminate(&mut fleet).success());
}

#[test]
fn a_failed_start_with_a_log_that_is_not_read_ends_with_its_exit_code() {
    let directory = tempfile::tempdir().unwrap();
    let (_reader, mut writer) = small_pipe();
    std::io::Write::write_all(&mut writer, &[b'.'; PIPE_BYTES]).unwrap();
    let mut command = serve(directory.path(), &in_tree("README.md"), &ONE_WORKER);
    command.env("BALLAST_LOG", "trace").stderr(writer);
    assert_eq!(run_in_time(command).status.code(), Some(3));
}

#[test]
fn the_last_line_of_a_failed_start_is_in_the_log() {
    let directory = tempfile::tempdir().unwrap();
    let mut command = serve(directory.path(), &in_tree("README.md"), &ONE_WORKER);
    command.env("BALLAST_LOG", "trace").stderr(Stdio::piped());
    let output = command.output().unwrap();
    let (_, log) = text(&output);
    let last = log.lines().last().unwrap_or_default();
    assert!(last.starts_with("ballast: ") && last.contains("README.md"), "{last}");
}

/// The kernel queues about ten datagrams (net.unix.max_dgram_qlen); these are more on any machine.
const DATAGRAMS: usize = 2048;
/// A worker restarts, and `ballast ps` answers, in a fraction of it. One message that waits for a
/// service manager takes longer.
const UNHINDERED: Duration = Duration::from_secs(5);

#[test]
fn a_service_manager_that_does_not_read_does_not_end_the_fleet() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("manager.sock");
    let manager = UnixDatagram::bind(&path).unwrap();
    let filler = UnixDatagram::unbound().unwrap();
    filler.set_nonblocking(true).unwrap();
    let full = (0..DATAGRAMS).any(|_| filler.send_to(b"X=1", &path).is_err());
    assert!(full, "the queue of a socket takes {DATAGRAMS} datagrams");
    let directory = tempfile::Builder::new().prefix("ballast-test-").tempdir().unwrap();
    let mut command = serve(directory.path(), &demo_7m(), &ONE_WORKER);
    // The watchdog's message is due every 10 ms.
    command.env("NOTIFY_SOCKET", &path).env("WATCHDOG_USEC", "30000");
    let mut fleet = ServedFleet::start_command(directory, command);
    // The descriptors of two leases are for systemd's FD store. Nothing waits for one of them.
    for _ in 0..2 {
        let started = Instant::now();
        lose_a_worker(&fleet);
        assert!(started.elapsed() < UNHINDERED, "a worker was back after {:?}", started.elapsed());
    }
    let started = Instant::now();
    // With a GPU there is a device monitor too.
    assert_eq!(fleet.processes().iter().filter(|process| process.role != "device-monitor").count(), 4);
    assert!(started.elapsed() < UNHINDERED, "`ballast ps` answered after {:?}", started.elapsed());
    assert_eq!(HttpClient::connect(&fleet).get("/health").0, 200);
    // A manager that reads again learns that the fleet is ready, and gets the descriptors in order.
    manager.set_read_timeout(Some(TIMEOUT)).unwrap();
    let mut datagram = [0; 256];
    let mut next = || {
        let bytes = manager.recv(&mut datagram).unwrap();
        String::from_utf8_lossy(&datagram[..bytes]).into_owned()
    };
    let mut read = Vec::new();
    let is_complete = |read: &[String]| {
        let has = |start: &str| read.iter().any(|message| message.starts_with(start));
        has("READY=1") && has("FDSTORE=1\nFDNAME=l3.record\n")
    };
    let started = Instant::now();
    while !is_complete(&read) {
        let message = next();
        // Watchdog messages come for ever.
        if message != "WATCHDOG=1" {
            read.push(message);
        }
        assert!(started.elapsed() < TIMEOUT, "what is missing: {read:?}");
    }
    let at = |start: &str| read.iter().position(|message| message.starts_with(start));
    let manifest = at("FDSTORE=1\nFDNAME=g1.manifest\n");
    assert!(at("FDSTORE=1\nFDNAME=g1.a0\n") < manifest, "{read:?}");
    assert!(manifest < at("FDSTORE=1\nFDNAME=l3.record\n"), "{read:?}");
    assert!(terminate(&mut fleet).success());
}

/// Each command with what it prints.
fn commands_that_print() -> [Vec<String>; 4] {
    let model = demo_7m().display().to_string();
    let command = |words: &[&str]| words.iter().map(|word| (*word).to_owned()).collect::<Vec<_>>();
    [
        command(&["inspect", &model]),
        command(&["tokenize", &model, "--prompt", "def f(x):"]),
        command(&["devices"]),
        command(&["--help"]),
    ]
}

#[test]
fn a_command_whose_output_does_not_fit_on_the_disk_fails_and_says_so() {
    for arguments in commands_that_print() {
        let full = File::options().write(true).open("/dev/full").unwrap();
        let output = ballast().args(&arguments).stdout(full).output().unwrap();
        assert_eq!(output.status.code(), Some(4), "{arguments:?}: {}", output.status);
        let (_, said) = text(&output);
        assert!(said.contains("No space left on device"), "{arguments:?}: {said}");
    }
}

#[test]
fn a_command_whose_reader_is_gone_ends_quietly_as_sigpipe_would_end_it() {
    for arguments in commands_that_print() {
        let (reader, writer) = std::io::pipe().unwrap();
        drop(reader);
        let output = ballast().args(&arguments).stdout(writer).output().unwrap();
        assert_eq!(output.status.code(), Some(128 + SIGPIPE), "{arguments:?}: {}", output.status);
        assert_eq!(output.status.signal(), None);
        assert_eq!(text(&output).1, "", "{arguments:?}");
    }
}

#[test]
fn a_generation_whose_reader_is_gone_stops_its_fleet() {
    let (reader, writer) = std::io::pipe().unwrap();
    drop(reader);
    let mut command = ballast();
    command.arg("generate").arg(demo_7m()).args(["--prompt", "def f(x):", "--device", "host"]);
    command.args(["--threads", "1"]).stdout(writer).stderr(Stdio::piped());
    let output = run_in_time(command);
    assert_eq!(output.status.code(), Some(128 + SIGPIPE));
    assert_eq!(text(&output).1, "");
}

#[test]
fn a_generation_that_is_not_read_stops_when_it_is_told_to() {
    let (_reader, mut writer) = small_pipe();
    std::io::Write::write_all(&mut writer, &[b'.'; PIPE_BYTES]).unwrap();
    let directory = tempfile::tempdir().unwrap();
    let mut command = ballast();
    command.arg("generate").arg(demo_7m()).args(["--prompt", "def f(x):", "--device", "host"]);
    command.args(["--threads", "1", "--runtime-dir"]).arg(directory.path());
    let mut child = command.stdout(writer).stderr(Stdio::null()).spawn().unwrap();
    let ps = || {
        let output =
            ballast().args(["ps", "--json", "--runtime-dir"]).arg(directory.path()).output().unwrap();
        output.status.success().then(|| text(&output).0)
    };
    eventually("the fleet serves", || ps().filter(|lines| lines.contains("serving ")));
    // Some time for the generation to reach its output; it must stop before and after that.
    std::thread::sleep(Duration::from_secs(1));
    let started = Instant::now();
    proc::send_signal(child.id(), "TERM");
    let status = eventually("generate ends", || child.try_wait().unwrap());
    assert_eq!(status.code(), Some(130), "after {:?}", started.elapsed());
}

/// A script in a mount namespace of its own: a disk of 64 KiB under the log.
const SMALL_DISK: &str =
    "mount -t tmpfs -o size=64k none \"$1\" && shift && exec \"$@\" 2>>\"$BALLAST_TEST_LOG\"";

#[test]
fn a_log_continues_on_a_new_line_after_a_full_disk_has_room_again() {
    let directory = tempfile::Builder::new().prefix("ballast-test-").tempdir().unwrap();
    let disk = tempfile::tempdir().unwrap();
    if !can_mount(disk.path()) {
        crate::harness::report_skipped(format_args!(
            "this user cannot mount a tmpfs in a namespace of its own"
        ));
        return;
    }
    let log = disk.path().join("log");
    let inner = serve(directory.path(), &demo_7m(), &ONE_WORKER);
    let mut command = in_namespace(SMALL_DISK, disk.path(), &inner);
    command.env("BALLAST_LOG", "trace").env("BALLAST_TEST_LOG", &log);
    let mut fleet = ServedFleet::start_command(directory, command);
    // The namespace's disk, seen from outside through the process in it.
    let log =
        Path::new(&format!("/proc/{}/root", fleet.supervisor.id())).join(log.strip_prefix("/").unwrap());
    let client = HttpClient::connect(&fleet);
    eventually("the disk is full", || {
        assert_eq!(client.get("/health").0, 200);
        client.metric(LOST_BY_ROUTER).filter(|lost| *lost > 0.0)
    });
    lose_a_worker(&fleet);
    File::options().write(true).open(&log).unwrap().set_len(0).unwrap();
    let report = eventually("the loss is reported", || {
        assert_eq!(client.get("/health").0, 200);
        let text = std::fs::read_to_string(&log).unwrap();
        text.lines().find(|line| line.contains(" router ") && line.contains("lines_lost=")).map(str::to_owned)
    });
    assert!(report.contains("WARN router "), "{report}");
    assert!(terminate(&mut fleet).success());
}

/// The same for the runtime directory.
const SMALL_RUNTIME_DIR: &str = "mount -t tmpfs -o size=256k none \"$1\" && shift && exec \"$@\"";

#[test]
fn a_worker_restarts_although_the_disk_of_the_runtime_directory_is_full() {
    let directory = tempfile::Builder::new().prefix("ballast-test-").tempdir().unwrap();
    if !can_mount(directory.path()) {
        crate::harness::report_skipped(format_args!(
            "this user cannot mount a tmpfs in a namespace of its own"
        ));
        return;
    }
    let outside = directory.path().to_owned();
    let command = in_namespace(SMALL_RUNTIME_DIR, &outside, &serve(&outside, &demo_7m(), &ONE_WORKER));
    let mut fleet = ServedFleet::start_command(directory, command);
    fleet.seen_from(
        Path::new(&format!("/proc/{}/root", fleet.supervisor.id())).join(outside.strip_prefix("/").unwrap()),
    );
    let filler = std::fs::write(fleet.runtime_dir().join("filler"), vec![0; 1 << 20]);
    assert_eq!(filler.unwrap_err().kind(), std::io::ErrorKind::StorageFull);
    lose_a_worker(&fleet);
    lose_a_worker(&fleet);
    assert!(terminate(&mut fleet).success());
}

/// A command that runs `inner` in a mount namespace of its own, after `script` has mounted a disk
/// at `folder`.
fn in_namespace(script: &str, folder: &Path, inner: &Command) -> Command {
    let mut command = Command::new("unshare");
    command.args(["--user", "--map-root-user", "--mount", "sh", "-c", script, "sh"]).arg(folder);
    command.arg(inner.get_program()).args(inner.get_args());
    command.stdin(Stdio::null()).stdout(Stdio::piped()).env_remove("NOTIFY_SOCKET");
    command
}

fn can_mount(folder: &Path) -> bool {
    Command::new("unshare")
        .args(["--user", "--map-root-user", "--mount", "sh", "-c", "mount -t tmpfs none \"$1\"", "sh"])
        .arg(folder)
        .stderr(Stdio::null())
        .status()
        .is_ok_and(|status| status.success())
}
