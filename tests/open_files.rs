// SPDX-License-Identifier: Apache-2.0

//! A process of a serving fleet that may open no further descriptor (EMFILE).

use std::fs::File;
use std::time::Duration;

use rustix::process::{Pid, Resource, Rlimit, getrlimit, prlimit};

use crate::harness::api::{TestRequest, generate_all, runtime};
use crate::harness::http::HttpClient;
use crate::harness::{ServedFleet, demo_7m, eventually, serve};

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
/// with the same processes afterwards.
fn shorten_descriptors(role: &str, during: impl FnOnce(&ServedFleet) + Send) {
    let directory = tempfile::Builder::new().prefix("ballast-test-").tempdir().unwrap();
    let log = tempfile::NamedTempFile::new().unwrap();
    let mut command = serve(
        directory.path(),
        &demo_7m(),
        &["--workers", "2", "--threads", "1", "--routing", "least-loaded"],
    );
    command.stderr(File::create(log.path()).unwrap());
    let fleet = ServedFleet::start_command(directory, command);
    let expected = runtime().block_on(generate_all(&fleet.grpc, &requests()));
    let before: Vec<u32> = fleet.processes().iter().map(|process| process.pid).collect();
    let victim = match role {
        "supervisor" => fleet.supervisor.id(),
        _ => fleet.processes_by_role(role)[0].pid,
    };
    let found = runtime().block_on(fleet.generate_during_fault(&requests(), || {
        let limit = allow_descriptors(victim, lowest_unused_fd(victim));
        during(&fleet);
        std::thread::sleep(SHORTAGE);
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
}

#[test]
fn other_processes_without_descriptors_keep_their_streams_and_go_on() {
    for role in ["worker", "weight-server", "supervisor"] {
        shorten_descriptors(role, |fleet| {
            let _refused_or_late = fleet.run_command(&["ps"]);
        });
    }
}
