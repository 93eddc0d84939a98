// SPDX-License-Identifier: Apache-2.0

//! Many faults or many clients at once: workers that die as soon as they start, 10,000 connections,
//! and silent clients of the hand-off socket.

use std::net::TcpStream;
use std::os::fd::OwnedFd;
use std::time::{Duration, Instant};

use rustix::net::{AddressFamily, SocketAddrUnix, SocketType, connect, socket};
use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};
use serde_json::json;

use crate::harness::admin::try_weight_server_status;
use crate::harness::api::{TestRequest, generate_all, runtime};
use crate::harness::http::HttpClient;
use crate::harness::{ServedFleet, demo_7m, eventually, proc};

fn request(seed: u64) -> TestRequest {
    TestRequest {
        prompt: (0..20).map(|i| 10 + i * 13 + seed as u32).collect(),
        max_tokens: 40,
        temperature: 0.7,
        seed,
        ..TestRequest::default()
    }
}

fn requests() -> Vec<TestRequest> {
    (0..4).map(request).collect()
}

#[test]
fn i1_a_storm_of_restarts_reads_no_weights_again_and_leaves_nothing() {
    let fleet = ServedFleet::start(&demo_7m(), &["--workers", "3", "--threads", "1"]);
    let expected = runtime().block_on(generate_all(&fleet.grpc, &requests()));
    let status =
        || eventually("the weight-server answers", || runtime().block_on(try_weight_server_status(&fleet)));
    let keepers = || [fleet.supervisor.id(), fleet.only_process("weight-server").pid];
    let descriptors = || keepers().map(|pid| proc::open_files(pid).len());
    let (before, descriptors_before) = (status(), descriptors());
    let mark = format!("{}/worker-", fleet.runtime_dir().display());
    let end = Instant::now() + Duration::from_secs(4);
    let mut killed = 0;
    while Instant::now() < end {
        for pid in proc::processes_with_argument(&mark) {
            proc::send_signal(pid, "KILL");
            killed += 1;
        }
        std::thread::sleep(Duration::from_millis(20));
    }
    eprintln!("measured: a storm of restarts killed {killed} workers");
    eventually("all workers are back", || {
        let workers = fleet.processes_by_role("worker");
        workers.iter().all(|worker| worker.state == "ready").then_some(())
    });
    let found = eventually("requests are served", || {
        let found = runtime().block_on(generate_all(&fleet.grpc, &requests()));
        found.iter().all(Result::is_ok).then_some(found)
    });
    for (expected, found) in expected.iter().zip(&found) {
        assert_eq!(expected.as_ref().unwrap().tokens, found.as_ref().unwrap().tokens);
    }
    let generation = |status: &proto::weights::v1::Status| status.generations[0].generation;
    eventually("leases and descriptors are at their baseline", || {
        let now = status();
        assert_eq!(generation(&now), generation(&before), "the weights were loaded again");
        let reserved =
            |status: &proto::weights::v1::Status| status.ledger.as_ref().map(|ledger| ledger.reserved_bytes);
        let is_back = now.leases.len() == 3
            && reserved(&now) == reserved(&before)
            && descriptors().iter().zip(&descriptors_before).all(|(now, before)| *now <= before + 2);
        is_back.then_some(())
    });
    fleet.stop();
}

/// Raises the limit of this process: its children set theirs themselves.
fn allow_descriptors(count: u64) -> bool {
    let limit = getrlimit(Resource::Nofile);
    if limit.current.is_none_or(|current| current >= count) {
        return true;
    }
    limit.maximum.is_none_or(|maximum| maximum >= count)
        && setrlimit(Resource::Nofile, Rlimit { current: Some(count), maximum: limit.maximum }).is_ok()
}

#[test]
fn i7_ten_thousand_connections_are_bounded_and_delay_no_request() {
    const CONNECTIONS: usize = 10_000;
    /// `address-connections-max`, and what the router has open besides.
    const ROUTER_DESCRIPTORS_MAX: usize = 1024 + 100;
    if !allow_descriptors(CONNECTIONS as u64 + 2000) {
        crate::harness::report_skipped(format_args!("this process may not open {CONNECTIONS} connections"));
        return;
    }
    let fleet = ServedFleet::start(&demo_7m(), &["--workers", "1", "--threads", "1"]);
    let router = fleet.only_process("router").pid;
    let before = proc::open_files(router).len();
    let address = fleet.http.strip_prefix("http://").unwrap();
    let connections: Vec<TcpStream> =
        (0..CONNECTIONS).filter_map(|_| TcpStream::connect(address).ok()).collect();
    assert_eq!(connections.len(), CONNECTIONS, "a connection was refused");
    let begin = Instant::now();
    let http = HttpClient::connect(&fleet);
    http.post_json("/v1/completions", &json!({"prompt": "import ", "max_tokens": 4}));
    eprintln!("measured: a request beside {CONNECTIONS} connections takes {:?}", begin.elapsed());
    let open = proc::open_files(router).len();
    assert!(open < ROUTER_DESCRIPTORS_MAX, "the router has {open} descriptors");
    drop(connections);
    eventually("the connections are closed", || (proc::open_files(router).len() <= before + 8).then_some(()));
    fleet.stop();
}

#[test]
fn i7_silent_clients_of_the_hand_off_delay_an_attach_for_a_bounded_time() {
    let fleet = ServedFleet::start(&demo_7m(), &["--workers", "1", "--threads", "1"]);
    let path = fleet.runtime_dir().join("weights.sock");
    let silent = || -> OwnedFd {
        let fd = socket(AddressFamily::UNIX, SocketType::SEQPACKET, None).unwrap();
        connect(&fd, &SocketAddrUnix::new(&path).unwrap()).unwrap();
        fd
    };
    let clients: Vec<OwnedFd> = (0..400).map(|_| silent()).collect();
    let victim = fleet.only_process("worker");
    proc::send_signal(victim.pid, "KILL");
    let begin = Instant::now();
    eventually("a new worker serves", || {
        let workers = fleet.processes_by_role("worker");
        workers.into_iter().find(|worker| worker.pid != victim.pid && worker.state == "ready")
    });
    let http = HttpClient::connect(&fleet);
    eventually("requests are served", || (http.get("/ready").0 == 200).then_some(()));
    eprintln!("measured: an attach beside {} silent clients takes {:?}", clients.len(), begin.elapsed());
    drop(clients);
    fleet.stop();
}
