// SPDX-License-Identifier: Apache-2.0

//! A process of a serving fleet that may open no further descriptor (EMFILE).

use std::fs::File;
use std::net::TcpStream;
use std::os::fd::OwnedFd;
use std::os::unix::net::UnixStream;
use std::time::Duration;

use rustix::process::{Pid, Resource, Rlimit, getrlimit, prlimit};

use crate::harness::api::{TestRequest, generate_all, runtime};
use crate::harness::http::HttpClient;
use crate::harness::{ServedFleet, demo_7m, eventually, proc, serve};

/// How long a process is short of descriptors.
const SHORTAGE: Duration = Duration::from_secs(2);

fn requests() -> Vec<TestRequest> {
    let request = |seed: u64| TestRequest {
        prompt: (0..20).map(|i| 10 + i * 13 + seed as u32).collect(),
        max_tokens: 600,
        temperature: 0.7,
        seed,
        ..TestRequest::default()
    };
    (0..4).map(request).collect()
}

/// The number that the process's next descriptor would have. With it as the limit, none is opened.
fn lowest_unused_fd(pid: u32) -> u64 {
    let is_unused = |fd: &u64| !std::path::Path::new(&format!("/proc/{pid}/fd/{fd}")).exists();
    (0..).find(is_unused).unwrap()
}

/// Sets the number of descriptors that a process may have open.
fn allow_descriptors(pid: u32, count: u64) -> Rlimit {
    let pid = Pid::from_raw(i32::try_from(pid).unwrap());
    let maximum = getrlimit(Resource::Nofile).maximum;
    prlimit(pid, Resource::Nofile, Rlimit { current: Some(count), maximum }).unwrap()
}

/// Streams run while a process of the role may open nothing. They are whole, and the fleet serves
/// with the same processes afterwards. The connections of `connect` wait meanwhile. Returns the log
/// and the processor time of that process during the shortage.
fn shorten_descriptors(
    role: &str,
    connect: impl FnOnce(&ServedFleet) -> Vec<OwnedFd> + Send,
) -> (String, Duration) {
    let directory = tempfile::Builder::new().prefix("ballast-test-").tempdir().unwrap();
    let log = tempfile::NamedTempFile::new().unwrap();
    let mut command = serve(
        directory.path(),
        &demo_7m(),
        &["--workers", "2", "--threads", "1", "--routing", "least-loaded"],
    );
    command.env("BALLAST_LOG", "warn").stderr(File::create(log.path()).unwrap());
    let fleet = ServedFleet::start_command(directory, command);
    let expected = runtime().block_on(generate_all(&fleet.grpc, &requests()));
    let before: Vec<u32> = fleet.processes().iter().map(|process| process.pid).collect();
    let victim = match role {
        "supervisor" => fleet.supervisor.id(),
        _ => fleet.processes_by_role(role)[0].pid,
    };
    let mut cpu_time = Duration::ZERO;
    let found = runtime().block_on(fleet.generate_during_fault(&requests(), || {
        let limit = allow_descriptors(victim, lowest_unused_fd(victim));
        let _waiting = connect(&fleet);
        let before = proc::cpu_time(victim).unwrap();
        std::thread::sleep(SHORTAGE);
        cpu_time = proc::cpu_time(victim).unwrap() - before;
        allow_descriptors(victim, limit.current.unwrap());
    }));
    for (expected, found) in expected.iter().zip(&found) {
        assert_eq!(expected.as_ref().unwrap().tokens, found.as_ref().unwrap().tokens);
    }
    let http = HttpClient::connect(&fleet);
    eventually("the fleet is ready", || (http.try_get("/ready") == Some(200)).then_some(()));
    let again = runtime().block_on(generate_all(&fleet.grpc, &requests()));
    for (expected, again) in expected.iter().zip(&again) {
        assert_eq!(expected.as_ref().unwrap().tokens, again.as_ref().unwrap().tokens);
    }
    let after: Vec<u32> = fleet.processes().iter().map(|process| process.pid).collect();
    assert_eq!(after, before, "a process was replaced");
    fleet.stop();
    let log = std::fs::read_to_string(log.path()).unwrap();
    assert!(!log.contains("panicked"), "{log}");
    (log, cpu_time)
}

/// Checks that the listeners said once what to do, and did not try again and again at once.
fn check_shortage(role: &str, log: &str, cpu_time: Duration, listeners: usize) {
    let warnings: Vec<&str> = log.lines().filter(|line| line.contains("cannot accept connections")).collect();
    assert_eq!(warnings.len(), listeners, "{role}: {warnings:#?}");
    for warning in warnings {
        assert!(warning.contains("raise the limit of open files"), "{role}: {warning}");
    }
    eprintln!("measured: a {role} without descriptors took {cpu_time:?} of {SHORTAGE:?}");
    assert!(cpu_time < SHORTAGE / 2, "{role}: {cpu_time:?} of {SHORTAGE:?}");
}

fn connect_to(fleet: &ServedFleet, socket: &str) -> OwnedFd {
    UnixStream::connect(fleet.runtime_dir().join(socket)).unwrap().into()
}

#[test]
fn a_worker_without_descriptors_keeps_its_streams() {
    let (log, _) = shorten_descriptors("worker", |fleet| vec![connect_to(fleet, "worker-0.sock")]);
    assert!(log.contains("raise the limit of open files"), "{log}");
}

#[test]
fn weight_server_and_supervisor_without_descriptors_disturb_no_stream_and_take_no_core() {
    for (role, socket) in [("weight-server", "weights-admin.sock"), ("supervisor", "supervisor.sock")] {
        let (log, cpu_time) = shorten_descriptors(role, |fleet| vec![connect_to(fleet, socket)]);
        check_shortage(role, &log, cpu_time, 1);
    }
}

#[test]
fn a_router_without_descriptors_keeps_its_streams_and_serves_new_clients_afterwards() {
    let (log, cpu_time) = shorten_descriptors("router", |fleet| {
        let waiting =
            (0..4).map(|_| TcpStream::connect(fleet.http.trim_start_matches("http://")).unwrap().into());
        waiting.chain([connect_to(fleet, "router.sock")]).collect()
    });
    check_shortage("router", &log, cpu_time, 2);
}
